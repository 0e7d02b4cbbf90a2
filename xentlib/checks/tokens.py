"""Which tokens a call has, which of them count, and labels that no class has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from xentlib.checks.array_spec import ArraySpec
from xentlib.checks.validators import check_device, check_floating, check_integers, check_per_token
from xentlib.dtypes import holds


def check_tokens(
    source: ArraySpec,
    labels: ArraySpec,
    where: ArraySpec | None,
    ignore_index: object,
    name: str = "hidden",
    *,
    on_host: bool = False,
) -> tuple[int, ...]:
    """Validate which tokens there are and which count; return the leading dimensions.

    `on_host`: labels and mask may be on the CPU, together, wherever `source` is.
    """
    states = name == "hidden"
    if len(source.shape) < 1 or (states and source.shape[-1] < 1):
        shape = "(..., hidden_size) with hidden_size >= 1" if states else "(..., columns)"
        what = "the states that go into the head" if states else "one row of logits for each token"
        raise ValueError(f"`{name}` must have shape {shape}; got {source.shape}. Pass {what}.")
    check_floating(name, source)
    leading = source.shape[:-1]
    check_integers("labels", labels, "Pass class indices, not one-hot rows or masks.")
    check_per_token("labels", labels, leading, name)
    apart = on_host and labels.device == "cpu" != source.device
    if not apart:
        check_device("labels", labels, source, name)
    if where is not None:
        if where.dtype != "bool":
            raise TypeError(
                f"`where` must be boolean; got {where.dtype}. Compare it with 0, or pass weights "
                f"as `token_weights`."
            )
        check_per_token("where", where, leading, name)
        beside, beside_name = (labels, "labels") if apart else (source, name)
        check_device("where", where, beside, beside_name)
    check_ignore_index(ignore_index)
    return leading


def check_ignore_index(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`ignore_index` must be an integer; got {value!r}. Pass the label that marks tokens "
            f"without a loss, -100 by convention."
        )
    if not holds("int64", value):
        raise ValueError(
            f"`ignore_index` must fit 64 bits; got {value}, which no label can be. Pass -100 by "
            f"convention."
        )


def check_label_range(offender: int, vocab_size: int, ignore_index: int) -> None:
    """Raise for one valid label that lies outside the vocabulary."""
    raise ValueError(
        f"`labels` must lie in [0, {vocab_size}) or equal `ignore_index` ({ignore_index}); "
        f"got {offender}. Mask that token with `where`, or set its label to `ignore_index`."
    )


def check_labels_elsewhere(ranks: Sequence[int]) -> None:
    """Raise, on every rank, for a label outside the vocabulary on some; they would wait for it."""
    if ranks:
        raise ValueError(
            f"`labels` must be classes or `ignore_index` on every rank that shares the head; got "
            f"others on rank {', '.join(map(str, ranks))} of its group, which says which."
        )


def check_divisor_elsewhere(ranks: Sequence[int]) -> None:
    """Raise, on every rank, for a `denominator` of some that `check_divisor` refuses there."""
    if ranks:
        raise ValueError(
            f"`denominator` must be positive on every rank whose tokens count; got 0 or less on "
            f"rank {', '.join(map(str, ranks))} of its group. Pass the number of the window's "
            f"valid tokens, counted with the mask that this call uses."
        )


def check_narrowed(name: str, value: int, dtype: str) -> NoReturn:
    """Refuse integers of which JAX would drop the upper half without a word."""
    raise ValueError(
        f"`{name}` must fit {dtype}, in which a JAX without 64-bit types keeps int64; got {value}. "
        f"Wrap the call in `with jax.enable_x64(True):`."
    )


def check_divisor(value: float) -> NoReturn:
    """Refuse to divide the losses of some tokens by nothing."""
    raise ValueError(
        f"`denominator` must be positive where a token is valid; got {value:g}. Pass the number of "
        f"the window's valid tokens, counted with the mask that this call uses."
    )


def refuse_derivative(name: str, constant: str) -> NoReturn:
    """Of a result of `chunked_nll` that a loss depends on; `constant` is the backend's `name` cut
    off from its history."""
    instead = "squares of its `lse`" if name == "z_loss" else f"its `{name}`"
    raise RuntimeError(
        f"`{name}` of `chunked_nll` must not be differentiated; got a loss that depends on it, "
        f"whose gradient would be 0. Use `chunked_logprobs` and {instead}, or pass `{constant}`."
    )
