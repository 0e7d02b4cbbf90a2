"""`NLLHead`: the layer it is made from, and the options that it keeps or hands on."""

from __future__ import annotations

from collections.abc import Collection

from xentlib.checks.operand import Operand, Scalar

__all__ = [
    "check_denominator_dtype",
    "check_head_options",
    "check_kept_option",
    "check_linear",
]


def check_linear(kind: str, plain: bool, hooked: bool) -> None:
    """Refuse a head that is more than its weight and bias."""
    if hooked:
        raise TypeError(
            f"`linear` must have no hooks, which would be lost; got a {kind} with some. Convert "
            f"it to `NLLHead` first, then register hooks and apply wrappers such as `fully_shard`."
        )
    if not plain:
        raise TypeError(
            f"`linear` must be a plain linear layer; got a {kind}, whose weight alone is not what "
            f"it computes. Merge an adapter into its layer first, or call `chunked_nll` with the "
            f"weight that it stands for: base + scale * B @ A for LoRA."
        )


def check_head_options(options: Collection[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that an `NLLHead` does not hand on."""
    for name in options:
        if name in known:
            continue
        if name in ("bias", "weight", "weight_layout"):
            way = "The module has them: leave it out."
        elif not known:
            way = "Without labels no option applies: pass `labels`, or leave it out."
        else:
            way = f"Pass any of {', '.join(known)}."
        raise TypeError(f"`{name}` is not an option of this call. {way}")


def check_kept_option(name: str, value: object) -> None:
    """Refuse what a Flax module cannot keep beside its parameters."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a number, a string or a tuple to be kept by the head; got "
            f"{type(value).__name__}. Pass it with each call."
        ) from None


def check_denominator_dtype(denominator: Scalar) -> None:
    """Refuse a count that a wrapper has rounded on its way into a module."""
    if isinstance(denominator, Operand) and denominator.dtype in ("bfloat16", "float16"):
        raise TypeError(
            f"`denominator` must be a number, an integer or float32; got {denominator.dtype}, "
            f"in which counts are rounded. FSDP2 casts floating tensors that a module is given "
            f"(`cast_forward_inputs`): pass a Python number or an integer tensor."
        )
