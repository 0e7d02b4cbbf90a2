"""What `audit` is given: a step of the right arguments that returns what can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "check_arguments",
    "check_gradient",
    "check_gradients_there",
    "check_one_number",
    "check_per_token_values",
    "check_ranks",
    "check_step",
    "check_unchanged",
]

PROTOCOL = {
    "step": "step(head, micro_batches)",
    "loss": "loss(hidden, weight, labels), then the bias if there is one,",
    "logprobs": "logprobs(hidden, weight, labels), then the bias if there is one,",
}


def check_step(step: object) -> None:
    if not callable(step):
        raise TypeError(
            f"`step` must be a function; got {type(step).__name__}. Pass the function itself, "
            f"not what it returns."
        )


def check_arguments(kind: str, required: Sequence[str], fits: bool) -> None:
    if not fits:
        raise TypeError(
            f"`step` must take the arguments of {PROTOCOL[kind]} with kind='{kind}'; got "
            f"({', '.join(required)}). Wrap it in a function that does, or name the other kind."
        )


def check_ranks(ranks: object, devices: int, kind: str) -> None:
    if kind != "step" and ranks != 1:
        raise ValueError(
            f"`ranks` must be 1 with kind='{kind}', a function of one batch; got {ranks!r}. Leave "
            f"it out, or write a step."
        )
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= devices:
        raise ValueError(
            f"`ranks` must be a number of devices, 1 to {devices} here; got {ranks!r}. On a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count=N makes N, before JAX is imported."
        )


def check_gradients_there(weight: object) -> None:
    if weight is None:
        raise ValueError(
            "`step` must return (loss, gradients of the head), or in PyTorch leave them in "
            "`head.weight.grad`; got neither. Call backward on the head that is passed, and no "
            "`zero_grad` after it."
        )


def check_unchanged(before: npt.NDArray[np.float32], after: npt.NDArray[np.float32]) -> None:
    if not np.array_equal(before, after):
        raise ValueError(
            "`step` must return before the optimizer's step; got a head whose weight has changed, "
            "and no gradient. Leave out `optimizer.step()` and `zero_grad()`."
        )


def check_gradient(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(
            f"`step` must return a gradient of `{name}` of shape {expected}; got {shape}. Gather "
            f"it where a wrapper shards it, and leave out the dimension of the devices."
        )


def check_one_number(size: int) -> None:
    if size != 1:
        raise ValueError(
            f"`step` must return a loss that is one number; got {size}. Reduce it to the mean over "
            f"the tokens that count; kind='logprobs' is for one number a token."
        )


def check_per_token_values(shapes: Sequence[tuple[int, ...]], tokens: int) -> None:
    for shape in shapes or [()]:
        if int(np.prod(shape, dtype=int)) != tokens:
            raise ValueError(
                f"`step` must return log-probabilities, and entropies if it has them, of {tokens} "
                f"tokens; got shape {shape}. Return one number for each label, or (logprobs, "
                f"entropy)."
            )
