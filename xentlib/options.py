"""What an option may be: types for an editor, which are also what the checks accept."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = [
    "COMPUTE",
    "EMPTY",
    "GATHERS",
    "LAYOUTS",
    "MODES",
    "NONFINITE",
    "OUTPUTS",
    "REDUCTIONS",
    "ComputeDtype",
    "Empty",
    "Gather",
    "Mode",
    "NonFinite",
    "OutputName",
    "Reduction",
    "WeightLayout",
]

Reduction = Literal["mean", "sum"]
WeightLayout = Literal["VH", "HV"]
ComputeDtype = Literal["float32", "float64"]
# What travels where a wrapper or a mesh has sharded the head.
Gather = Literal["head", "hidden", "stream", "auto"]
# The per-token fields of the result of `chunked_nll`.
OutputName = Literal["logprobs", "entropy", "lse", "correct", "predicted"]
# Of windows; JAX, whose programs cannot raise, has no "raise".
Mode = Literal["precount", "postscale"]
Empty = Literal["skip", "zero", "raise"]
NonFinite = Literal["keep", "drop"]

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
LAYOUTS: tuple[WeightLayout, ...] = get_args(WeightLayout)
COMPUTE: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
GATHERS: tuple[Gather, ...] = get_args(Gather)
OUTPUTS: tuple[OutputName, ...] = get_args(OutputName)
MODES: tuple[Mode, ...] = get_args(Mode)
EMPTY: tuple[Empty, ...] = get_args(Empty)
NONFINITE: tuple[NonFinite, ...] = get_args(NonFinite)
