"""Divergences of a student from a teacher: signatures, docstrings, result and rounding points.

Both implementations walk the steps of `xentlib.nll` for two heads at once, chunk by chunk:

 1. valid tokens, as there
 2. logits of the student and of the teacher, and lse of both: steps 2 to 5 of `xentlib.nll`
 3. log-ratio d0 = (z_S - z_T) - (lse_S - lse_T), in this order: the logits first, which lie close
    together where the two agree. It lacks one number of a token, delta ~ 1e-6, by which the rounded
    lse are off: p_S = p_T exp(d0 - delta)
 4. sums over the classes, of blocks of 128 columns, then of blocks exactly: of p_T; of p_S - p_T,
    from expm1(-|d0|) and the larger of the two, whence delta = log1p(sum (p_S - p_T) / sum p_T);
    and of the terms of the divergence, none of which is negative
 5. per token: the divergence, and what dz is made of
 6. dz = factor * (gain * a + shift * p), p and a what step 4 has left for each class
 7. and 8. of `xentlib.nll`: dz back through temperature, softcap and scale, rounded once, the
    products with the student's head and hidden states
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from xentlib.arguments import Array, Head
from xentlib.options import (
    ComputeDtype,
    Divergence,
    DivergenceOutputName,
    DivergenceReduction,
    Gather,
    Vocab,
    WeightLayout,
)
from xentlib.results import not_a_tensor
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

if TYPE_CHECKING:
    from xentlib.shards import VocabShard

__all__ = ["DivergenceOutput", "chunked_divergence", "vocab_parallel_divergence"]

A = TypeVar("A")  # a tensor or an array of the backend


@not_a_tensor("loss")
class DivergenceOutput(NamedTuple, Generic[A]):
    """Result of both divergences; a pytree in JAX. Only `loss` carries a gradient.

    Attributes:
        loss: [] the reduced loss, or [...] with `reduction="none"`; float32 (float64 for float64
            inputs).
        num_tokens: [] number of valid tokens, int64 in torch, int32 in JAX.
        weight_sum: [] sum of the weights of the valid tokens; `num_tokens` where there are none.
        nll: [] the part of `loss` that the labels' NLL contributes.
        divergence: [...] of each token, in nats, never below 0; or None if not asked for.
        logprobs: [...] log-probability of each label under the student, at its temperature, or
            None.
        entropy: [...] entropy of each token's student distribution in nats, or None.
        teacher_entropy: [...] of the teacher's, or None.
        denominator: [] what the sum was divided by; None for a sum. `TokenNormalizer` and
            `Evaluation` take sums, and look here.
    """

    loss: A
    num_tokens: A
    weight_sum: A
    nll: A
    divergence: A | Any = None
    logprobs: A | Any = None
    entropy: A | Any = None
    teacher_entropy: A | Any = None
    denominator: A | Any = None


def chunked_divergence(
    hidden: Array,
    weight: Head,
    teacher: TeacherHead[Array] | TeacherLogits[Array] | TeacherTopK[Array],
    *,
    kind: Divergence = "forward_kl",
    beta: float | None = None,
    labels: Array | None = None,
    nll_weight: float = 0.0,
    vocab: Vocab = "same",
    bias: Array | None = None,
    where: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    logit_scale: float | Array = 1.0,
    softcap: float | Array | None = None,
    temperature: float | Array = 1.0,
    temperature_squared: bool = False,
    reduction: DivergenceReduction = "mean",
    denominator: float | Array | None = None,
    outputs: Sequence[DivergenceOutputName] = (),
    vocab_parallel: Any = None,
    tokens_parallel: Any = None,
    gather: Gather = "head",
    tokens_per_rank: int | None = None,
    reduce_hidden_grad: bool = True,
    compute_dtype: ComputeDtype | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: WeightLayout = "VH",
) -> DivergenceOutput[Array]:
    """Divergence of a student's distribution from a teacher's, the logits of neither ever stored.

        z = logits / temperature of each of the two, as in `chunked_nll`;  p_S, p_T = softmax(z)
        forward_kl: D = sum_v p_T log(p_T / p_S)      reverse_kl: D = sum_v p_S log(p_S / p_T)
        jsd: D = beta KL(p_T : m) + (1 - beta) KL(p_S : m),   m = beta p_T + (1 - beta) p_S
        loss = sum over valid tokens of token_weight * (D + nll_weight * nll) / denominator

    with D times temperature^2 if `temperature_squared`.

    The student learns, the teacher is a constant. Gradients for `hidden`, `weight` and `bias` are
    computed in the forward pass, chunk by chunk: four GEMMs beside a `TeacherHead`, three beside
    `TeacherLogits`; with `reduction="none"` the backward makes the logits again, for two or one
    more. A chunk holds the logits of both.

    D is never negative, and exactly 0 where both have the same logits, with gradients of exactly
    +0. It keeps its digits where the two are close, as at the end of a distillation, where a
    difference of two rounded log-softmaxes has none.

    Args:
        hidden: [..., H] hidden states of the student; float16, bfloat16, float32 or float64.
        weight: [V, H] its head, or whatever `weight` of `chunked_nll` may be.
        teacher: `TeacherHead` or `TeacherLogits`, for the same tokens and the same V classes; its
            `temperature` is the student's if None. Or `TeacherTopK`, a few classes of each token
            and their log-probabilities: gradients are then made in the backward, four GEMMs in all,
            and D is over these classes and their tail.
        kind: which divergence. "forward_kl" spreads over all that the teacher does, "reverse_kl"
            keeps to what it does most.
        beta: of "jsd", between 0 and 1, the teacher's share of the mixture. It tends to 0 at either
            end: for the divergences of KL pass their `kind`.
        labels: [...] integers, or None. A token whose label is `ignore_index` is not valid.
        nll_weight: >= 0, how much of the labels' NLL the loss has; needs `labels`. That is of the
            logits before their temperature, as in Hinton's distillation.
        vocab: "same" refuses a teacher of another number of classes. "intersect" takes the first
            classes, which both have, and leaves out the others of either, as of a vocabulary that
            only one of them has padded: both distributions, and the labels' NLL, are then over
            these alone, and the other rows of the student have a gradient of 0. For heads that are
            whole on each rank, or gathered by their wrapper.
        bias: [V] or None.
        where: [...] bool or None; False takes a token out.
        token_weights: [...] floating point or None; may be negative.
        ignore_index: label of tokens without a loss.
        logit_scale: number or 0-d array that multiplies the student's logits.
        softcap: positive number, 0-d array (in PyTorch read by the host), or None.
        temperature: positive number, 0-d array, or [...] one per token; of both, unless the teacher
            has its own; beside a `TeacherTopK` that of its log-probabilities.
        temperature_squared: multiply D by the student's temperature squared, as in Hinton's
            distillation, so that gradients do not shrink as it grows.
        reduction: "mean" over the weights of the valid tokens, "sum", or "none" for each token's
            own loss [...], which may be clipped or weighed.
        denominator: number or 0-d array; if given the loss is the sum divided by it. Not with
            `reduction="none"`.
        outputs: any of "divergence", "logprobs", "entropy", "teacher_entropy": per token, without
            gradient, 0 for tokens that are not valid.
        vocab_parallel: as in `chunked_nll`; the teacher's head or logits are sharded alike. One SUM
            more than there, two with "jsd", and a MAX and a SUM for a `TeacherHead`, in each chunk.
        tokens_parallel: as in `chunked_nll`, for a `TeacherHead`.
        gather: as in `chunked_nll`, of both heads. With "hidden" the hidden states of both travel,
            for a `TeacherHead` that the same ranks shard; "stream" is for a `TeacherTopK` alone.
        tokens_per_rank: as in `chunked_nll`.
        reduce_hidden_grad: as in `chunked_nll`.
        compute_dtype: None for float32 (float64 for float64 inputs); "float64" is the audit mode.
        max_chunk_bytes: budget of the logits of one chunk, of both; None for the device's default.
        weight_layout: "VH" or "HV", of the student's head.

    Returns:
        DivergenceOutput, float32 (float64 for float64 inputs), never below.

    Raises:
        ValueError: shapes, devices or values that do not belong together; vocabularies of two
            sizes; `beta` without "jsd" or the other way round; probabilities as `TeacherLogits`,
            where they can be read; over shards those that each rank has normalised by itself (NaN
            where nothing is read).
        TypeError: a dtype that cannot be used, or a `teacher` of another class.
        RuntimeError: the gradient of the gradient (in JAX, its own ValueError).

    Numerics: logits of both accumulate in float32; log-ratios from differences of logits, expm1 and
    phi(x) = exp(x) - 1 - x by series below 0.3; every term of D is >= 0. With given logits D is
    right to 1e-6, to 5e-6 at 1e-9; from hidden states as far as two products in float32 agree. dz
    is rounded once to the GEMM dtype, every gradient once. Rows A20 to A25 of the contract.

    Sources: distillation (arXiv 1503.02531); generalised JSD on-policy, GKD (arXiv 2306.13649).
    """
    raise NotImplementedError(
        "call xentlib.torch.chunked_divergence or xentlib.jax.chunked_divergence"
    )


def vocab_parallel_divergence(
    logits: Array,
    teacher: TeacherLogits[Array],
    *,
    kind: Divergence = "forward_kl",
    beta: float | None = None,
    vocab_parallel: Any = None,
    where: Array | None = None,
    temperature: float | Array = 1.0,
    max_chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> DivergenceOutput[Array]:
    """Divergence of each token's student distribution from the teacher's, from precomputed logits,
    sharded over ranks or whole; D of `chunked_divergence`, with a gradient for the student's.

        forward_kl: dD/dz = p_S - p_T      reverse_kl: dD/dz = p_S (log(p_S / p_T) - D)
        jsd: dD/dz = (1 - beta) p_S (log(p_S / m) - KL(p_S : m))

    The sums run over the columns of all ranks, and results are the same on every rank; each gets
    the gradient of its own columns. Neither logits are written to. Beside the gradient of the
    logits a call needs some rows in float32, whatever the number of tokens.

    Args:
        logits: [..., C] this rank's columns of the student's, in rank order; float16, bfloat16,
            float32, float64.
        teacher: `TeacherLogits` of the same columns.
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: of "jsd", between 0 and 1, the teacher's share of the mixture.
        vocab_parallel: as in `vocab_parallel_logprobs`. None: `logits` has all columns.
        where: [...] bool or None; False takes a token out: its D and its gradient are 0.
        temperature: positive number, 0-d array, or [...] one per token; of both, unless the teacher
            has its own.
        max_chunk_bytes: budget of the float32 copies of some rows; None for the device's default.
        shard: the classes of this rank's columns, as in `vocab_parallel_logprobs`.

    Returns:
        `DivergenceOutput`, whose `loss` is [...] D in nats, float32 (float64 for float64 logits),
        never negative; a mean over the tokens that count is `out.loss.sum() / out.num_tokens`. Its
        per-token results are None, and `nll` is 0.

    Raises:
        ValueError: shapes, devices or values that do not belong together.
        TypeError: a dtype that cannot be used, or a `teacher` of another class.
        RuntimeError: the gradient of the gradient (in JAX, its own ValueError).

    Numerics: as `chunked_divergence` from step 3 on; dz is computed in float32 and rounded once to
    the dtype of the logits. Rows A20 to A22 and A24 of the contract.

    Sources: as `chunked_divergence`.
    """
    raise NotImplementedError(
        "call xentlib.torch.vocab_parallel_divergence or xentlib.jax.vocab_parallel_divergence"
    )
