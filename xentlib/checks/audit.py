"""What `audit` is given: a step of the right arguments that returns what can be compared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

PROTOCOL = {
    "step": "step(head, micro_batches)",
    "loss": "loss(hidden, weight, labels), then the bias if there is one,",
    "logprobs": "logprobs(hidden, weight, labels), then the bias if there is one,",
}
MOST = 4  # of a tuple, in a message
TWO = ("step(head, micro_batches)", "loss(hidden, weight, labels[, bias])")


def described(x: object) -> str:
    """What a step has returned, in a message."""
    if isinstance(x, Mapping):
        return f"a dict with {', '.join(repr(k) for k in x) or 'nothing in it'}"
    if isinstance(x, (tuple, list)):
        more = ", ..." if len(x) > MOST else ""
        return f"({', '.join(described(one) for one in x[:MOST])}{more})"
    if x is None or isinstance(x, (bool, int, float)):
        return repr(x)
    shape = getattr(x, "shape", None)
    if shape is None:
        return type(x).__name__
    return f"an array of shape {tuple(shape)}" if shape else "one number"


def check_step(step: object) -> None:
    if inspect.isclass(step):
        raise TypeError(
            f"`step` must be a function; got the class {step.__name__}. Pass a function that makes "
            f"an instance, or an instance's method."
        )
    if not callable(step):
        raise TypeError(
            f"`step` must be a function; got {type(step).__name__}. Pass the function itself, "
            f"not what it returns."
        )


def check_arguments(kind: str | None, required: Sequence[str], fits: bool) -> None:
    """`kind`: None where nobody has named one."""
    if [*required[:1]] == ["self"]:
        raise TypeError(
            f"`step` must be a function or the method of an instance; got ({', '.join(required)}), "
            f"a method of the class. Make an instance, and name its method."
        )
    if not fits:
        asked = f"{PROTOCOL[kind]} with kind='{kind}'" if kind else " or of ".join(TWO)
        raise TypeError(
            f"`step` must take the arguments of {asked}; got ({', '.join(required)}). Wrap it in a "
            f"function that does{', or name the other kind' if kind else ''}."
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


def check_gradients_there(weight: object, returned: object) -> None:
    if weight is None:
        raise ValueError(
            f"`step` must return (loss, gradients of the head), or in PyTorch leave them in "
            f"`head.weight.grad`; got {described(returned)} and no such gradient. In PyTorch call "
            f"backward on the head that is passed, and no `zero_grad` after it; in JAX return what "
            f"`jax.value_and_grad` does."
        )


def check_unchanged(before: npt.NDArray[np.float32], after: npt.NDArray[np.float32]) -> None:
    if not np.array_equal(before, after):
        raise ValueError(
            "`step` must return before the optimizer's step; got a head whose weight has changed, "
            "and no gradient. Leave out `optimizer.step()` and `zero_grad()`."
        )


def check_gradient(name: str, shape: tuple[int, ...], *expected: tuple[int, ...]) -> None:
    if shape not in expected:
        raise ValueError(
            f"`step` must return a gradient of `{name}` of shape {expected[0]}; got {shape}. "
            f"Gather it where a wrapper shards it, leave out the dimension of the devices, and "
            f"return nothing else in its place: the loss is first, the head's gradients are second."
        )


def check_hiddens(d_hiddens: object, micro_batches: int) -> None:
    there = isinstance(d_hiddens, (tuple, list)) or len(getattr(d_hiddens, "shape", ())) > 0
    if not there or len(d_hiddens) != micro_batches:  # type: ignore[arg-type]
        raise ValueError(
            f"`step` must return as its third result the gradients of the hidden states, one for "
            f"each of {micro_batches} micro-batches; got {described(d_hiddens)}. Leave anything "
            f"else out, such as metrics."
        )


def check_loss(loss: object, size: int | None) -> None:
    """`size`: how many numbers it is, None of what is no number."""
    if size != 1:
        raise ValueError(
            f"`step` must return a loss that is one number, alone or first in a tuple; got "
            f"{described(loss)}. Reduce it to the mean over the tokens that count; "
            f"kind='logprobs' is for one number a token."
        )


def check_backward(kind: str, value: object, graph: bool, called: bool = False) -> None:
    """Of a function: its value has a graph, and no backward was called."""
    if called:
        raise ValueError(
            f"`step` must leave the backward to the audit with kind='{kind}'; got a function that "
            f"calls it. Leave out `backward()`."
        )
    if not graph:
        raise ValueError(
            f"`step` must return an array that can be differentiated with kind='{kind}'; got "
            f"{described(value)}, which cannot. Return it without `detach()`, `item()` and "
            f"`no_grad()`."
        )


def check_group(world: str | None, ranks: int, before: int | None = None) -> None:
    """`world`: what torchrun says; `ranks`: of the group that there is, 0 without one; `before`: of
    the group before the step."""
    if before is None and not ranks and int(world or 1) > 1:
        raise ValueError(
            f"`torch.distributed` must be initialised before `audit` under torchrun; got "
            f"{world} processes and no group. Call `torch.distributed.init_process_group('gloo')` "
            f"first, or use `xentlib audit`, which does."
        )
    if before is not None and max(before, 1) != max(ranks, 1):
        raise ValueError(
            f"`step` must leave the group of processes as it is; got one of {ranks} ranks after it "
            f"and of {before} before. Start the group before the audit."
        )


def check_per_token_values(sizes: Sequence[int | None], tokens: int, returned: object) -> None:
    """`sizes`: how many numbers each value is, None of what is no array."""
    if not sizes or any(size != tokens for size in sizes):
        raise ValueError(
            f"`step` must return log-probabilities, and entropies if it has them, of {tokens} "
            f"tokens; got {described(returned)}. Return one number for each label, or (logprobs, "
            f"entropy), by their order or by these names."
        )
