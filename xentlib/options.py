"""What an option may be: types for an editor, which are also what the checks accept, and a rule for
each number; and which dtypes an array may have."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

__all__ = [
    "COMPUTE",
    "DIVERGENCES",
    "DIVERGENCE_OUTPUTS",
    "EMPTY",
    "FLOATS",
    "GATHERS",
    "INT32",
    "INTEGERS",
    "ITEMSIZE",
    "KERNELS",
    "KERNELS_ENV",
    "LAYOUTS",
    "MODES",
    "NONFINITE",
    "OUTPUTS",
    "REDUCTIONS",
    "ROUTE_OPTIONS",
    "RULES",
    "TAILS",
    "VOCABS",
    "ComputeDtype",
    "Divergence",
    "DivergenceOutputName",
    "DivergenceReduction",
    "Empty",
    "Gather",
    "Mode",
    "NonFinite",
    "OutputName",
    "Reduction",
    "Rule",
    "Vocab",
    "WeightLayout",
]

# Which implementation of the steps computes, where there are several, and who may say so.
KERNELS = ("auto", "eager", "triton")
KERNELS_ENV = "XENTLIB_KERNELS"

Reduction = Literal["mean", "sum"]
WeightLayout = Literal["VH", "HV"]
ComputeDtype = Literal["float32", "float64"]
# What travels where a wrapper or a mesh has sharded the head.
Gather = Literal["head", "hidden", "stream", "auto"]
# The per-token fields of the result of `chunked_nll`.
OutputName = Literal["logprobs", "entropy", "lse", "correct", "predicted"]
# How far the student is from the teacher, and the per-token fields of that result.
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
DivergenceReduction = Literal["mean", "sum", "none"]
Tail = Literal["class", "renormalize", "drop"]
# The classes that a divergence is over.
Vocab = Literal["same", "intersect"]
DivergenceOutputName = Literal["divergence", "logprobs", "entropy", "teacher_entropy"]
# Of windows; JAX, whose programs cannot raise, has no "raise".
Mode = Literal["precount", "postscale"]
Empty = Literal["skip", "zero", "raise"]
NonFinite = Literal["keep", "drop"]

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
LAYOUTS: tuple[WeightLayout, ...] = get_args(WeightLayout)
COMPUTE: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
GATHERS: tuple[Gather, ...] = get_args(Gather)
# Which arguments say what travels of a sharded head and of its tokens
ROUTE_OPTIONS = ("gather", "tokens_parallel", "tokens_per_rank")
OUTPUTS: tuple[OutputName, ...] = get_args(OutputName)
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
TAILS: tuple[Tail, ...] = get_args(Tail)
VOCABS: tuple[Vocab, ...] = get_args(Vocab)
DIVERGENCE_OUTPUTS: tuple[DivergenceOutputName, ...] = get_args(DivergenceOutputName)
MODES: tuple[Mode, ...] = get_args(Mode)
EMPTY: tuple[Empty, ...] = get_args(Empty)
NONFINITE: tuple[NonFinite, ...] = get_args(NonFinite)

# Dtypes by name.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FLOATS = ("float16", "bfloat16", "float32", "float64")
# uint64 has ids that no signed index can hold.
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
INT32 = 2**31 - 1


class Rule(NamedTuple):
    """What a number of a call may be. An option with a rule is checked, reaches both backends and
    all ranks, `CrossCheck` and the oracle by itself."""

    expected: str  # for the message
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False  # `low` itself is refused
    open_high: bool = False
    array: bool = True  # a 0-d array will do
    # PyTorch's operators take a tensor: it is learned, counted on the device or one for each token.
    # Of the others, the fields of `Scalars`, the host reads the number.
    tensor: bool = False
    # The loss of class probabilities has it too; one that is not marked so is refused with them.
    probabilities: bool = False


RULES: dict[str, Rule] = {
    "logit_scale": Rule("a finite number or a 0-d array", tensor=True),
    "temperature": Rule(
        "a positive number or one entry per token", low=0, open_low=True, tensor=True
    ),
    "denominator": Rule("a number >= 0 or a 0-d array", low=0, tensor=True),
    "softcap": Rule(
        "None, a positive number or a 0-d array", low=0, open_low=True, probabilities=True
    ),
    "label_smoothing": Rule("a number in [0, 1]", low=0, high=1, array=False, probabilities=True),
    "z_loss": Rule("a number >= 0 or a 0-d array", low=0, probabilities=True),
    "beta": Rule(
        "a number between 0 and 1, neither of them",
        0,
        1,
        open_low=True,
        open_high=True,
        array=False,
    ),
    "nll_weight": Rule("a number >= 0", low=0, array=False),
}
