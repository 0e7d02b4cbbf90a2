"""A call of a function of the head as one object: what the user gave, by name.

Written by `make public` from the signatures in `nll.py`, `logprobs.py` and `divergence.py`, where
options are added. A function leaves at its default what is none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xentlib.labels import SoftLabels
from xentlib.options import (
    ComputeDtype,
    Divergence,
    DivergenceOutputName,
    DivergenceReduction,
    Gather,
    OutputName,
    Reduction,
    Vocab,
    WeightLayout,
)
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

if TYPE_CHECKING:
    from xentlib.shards import VocabShard

__all__ = [
    "SCALARS",
    "Arguments",
    "Array",
    "DivergenceArguments",
    "Head",
    "LogitsArguments",
    "LogitsDivergenceArguments",
    "Scalars",
]

Array = Any  # a tensor or an array of the backend
Head = Any  # an array, or a module of the backend that stands for one


class Arguments(NamedTuple):
    """Of `chunked_nll` and `chunked_logprobs`."""

    hidden: Array
    weight: Head
    labels: Array
    bias: Array | None = None
    where: Array | None = None
    token_weights: Array | None = None
    class_weights: Array | None = None
    ignore_index: int = -100
    logit_scale: float | Array = 1.0
    softcap: float | Array | None = None
    temperature: float | Array = 1.0
    label_smoothing: float = 0.0
    z_loss: float | Array = 0.0
    reduction: Reduction = "mean"
    denominator: float | Array | None = None
    outputs: Sequence[OutputName] = ()
    vocab_parallel: Any = None
    tokens_parallel: Any = None
    gather: Gather = "head"
    tokens_per_rank: int | None = None
    reduce_hidden_grad: bool = True
    recompute: bool = False
    compute_dtype: ComputeDtype | None = None
    max_chunk_bytes: int | None = None
    weight_layout: WeightLayout = "VH"
    kept: Array | None = None
    ids: Array | None = None
    top_k: int = 0
    entropy: bool = False


class LogitsArguments(NamedTuple):
    """Of `vocab_parallel_logprobs`."""

    logits: Array
    labels: Array | SoftLabels[Array]
    vocab_parallel: Any = None
    where: Array | None = None
    kept: Array | None = None
    ids: Array | None = None
    top_k: int = 0
    ignore_index: int = -100
    temperature: float | Array = 1.0
    label_smoothing: float = 0.0
    entropy: bool = False
    max_chunk_bytes: int | None = None
    shard: VocabShard | None = None


class DivergenceArguments(NamedTuple):
    """Of `chunked_divergence`."""

    hidden: Array
    weight: Head
    teacher: TeacherHead[Array] | TeacherLogits[Array] | TeacherTopK[Array]
    kind: Divergence = "forward_kl"
    beta: float | None = None
    labels: Array | None = None
    nll_weight: float = 0.0
    vocab: Vocab = "same"
    bias: Array | None = None
    where: Array | None = None
    token_weights: Array | None = None
    ignore_index: int = -100
    logit_scale: float | Array = 1.0
    softcap: float | Array | None = None
    temperature: float | Array = 1.0
    temperature_squared: bool = False
    reduction: DivergenceReduction = "mean"
    denominator: float | Array | None = None
    outputs: Sequence[DivergenceOutputName] = ()
    vocab_parallel: Any = None
    tokens_parallel: Any = None
    gather: Gather = "head"
    tokens_per_rank: int | None = None
    reduce_hidden_grad: bool = True
    compute_dtype: ComputeDtype | None = None
    max_chunk_bytes: int | None = None
    weight_layout: WeightLayout = "VH"


class LogitsDivergenceArguments(NamedTuple):
    """Of `vocab_parallel_divergence`."""

    logits: Array
    teacher: TeacherLogits[Array]
    kind: Divergence = "forward_kl"
    beta: float | None = None
    vocab_parallel: Any = None
    where: Array | None = None
    temperature: float | Array = 1.0
    max_chunk_bytes: int | None = None
    shard: VocabShard | None = None


class Scalars(NamedTuple):
    """The numbers of a call that the host knows."""

    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    beta: float | None = None
    nll_weight: float = 0.0


# Of each function
SCALARS: dict[str, tuple[str, ...]] = {
    "chunked_nll": ("softcap", "label_smoothing", "z_loss"),
    "chunked_logprobs": ("softcap",),
    "vocab_parallel_logprobs": ("label_smoothing",),
    "chunked_divergence": ("beta", "nll_weight", "softcap"),
    "vocab_parallel_divergence": ("beta",),
}
