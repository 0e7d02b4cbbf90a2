"""Which dtypes there are, by name, and in which of them a call runs."""

from __future__ import annotations

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FLOATS = ("float16", "bfloat16", "float32", "float64")
# uint64 has ids that no signed index can hold.
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
INT32 = 2**31 - 1


def holds(dtype: str, value: int) -> bool:
    """Whether an integer dtype has this value."""
    signed = dtype[0] != "u"
    top = 1 << int(dtype.lstrip("uint")) - signed
    return (-top if signed else 0) <= value < top


def resolve_dtypes(
    hidden: str, weight: str, compute: str | None = None, autocast: str | None = None
) -> tuple[str, str, str]:
    """GEMM, compute and output dtypes of a call.

    The GEMMs take the operands' common dtype (float32 where they differ), or autocast's. Logits are
    never below float32. The audit mode computes everything in float64 and keeps the output dtype.
    """
    double = "float64" in (hidden, weight)
    output = "float64" if double else "float32"
    if compute == "float64" or double:
        return "float64", "float64", output
    if autocast is not None:
        return autocast, "float32", output
    return (hidden if hidden == weight else "float32"), "float32", output
