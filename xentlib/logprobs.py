"""Per-token log-probabilities with gradients: signatures, docstrings, result and rounding points.

Forward walks steps 1 to 5 of `xentlib.nll`. Backward computes the logits again:

 6. p = exp(z - lse) from the lse that the forward kept; of the columns other than the target, with
    upstream gradients g of logprob, entropy and lse, each times scale / temperature,
        dz = p * [(g_lse - g_logprob - g_entropy * entropy) - g_entropy * (z - lse)]
    and of the target
        dz_y = g_logprob * (1 - p_y) + p_y * [g_lse - g_entropy * (logprob + entropy)]
    with 1 - p_y from r / S, as the forward had it
 7. and 8. as in `xentlib.nll`, to the input's dtype at the end of 8.

Where the logits are given there are no GEMMs: steps 3 to 6, and dz rounded once to their dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from xentlib.arguments import Array, Head
from xentlib.labels import SoftLabels
from xentlib.options import ComputeDtype, Gather, WeightLayout
from xentlib.results import not_a_tensor

if TYPE_CHECKING:
    from xentlib.shards import VocabShard

__all__ = ["LogprobOutput", "chunked_logprobs", "vocab_parallel_logprobs"]


A = TypeVar("A")  # a tensor or an array of the backend


@not_a_tensor("logprobs")
class LogprobOutput(NamedTuple, Generic[A]):
    """Result of the functions here; a pytree in JAX. All but `correct` and `top_ids` carry
    gradients.

    Attributes:
        logprobs: [...] log-probability of each label, at most 0, float32 (float64 for float64
            inputs); 0 for tokens that are not valid, like all others.
        entropy: [...] entropy of each token's distribution in nats, or None if not asked for.
        lse: [...] log-sum-exp of each token's logits.
        correct: [...] bool, the label's logit is the largest and no other equals it.
        ids_logprobs: [..., K] log-probability of each class of `ids`, or None without them.
        top_ids: [..., top_k] the most probable classes, the most probable first, of several whose
            logits are equal the lowest first; int64 (int32 in JAX), without a gradient; -1 for
            tokens that are not valid. None without `top_k`.
        top_logprobs: [..., top_k] their log-probabilities, or None without `top_k`.
    """

    logprobs: A
    entropy: A | Any
    lse: A
    correct: A
    ids_logprobs: A | Any = None
    top_ids: A | Any = None
    top_logprobs: A | Any = None


def chunked_logprobs(
    hidden: Array,
    weight: Head,
    labels: Array,
    *,
    bias: Array | None = None,
    where: Array | None = None,
    kept: Array | None = None,
    ids: Array | None = None,
    top_k: int = 0,
    ignore_index: int = -100,
    logit_scale: float | Array = 1.0,
    softcap: float | Array | None = None,
    temperature: float | Array = 1.0,
    entropy: bool = False,
    vocab_parallel: Any = None,
    tokens_parallel: Any = None,
    gather: Gather = "head",
    tokens_per_rank: int | None = None,
    reduce_hidden_grad: bool = True,
    compute_dtype: ComputeDtype | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: WeightLayout = "VH",
) -> LogprobOutput[Array]:
    """Log-probability of each label, and entropy, from hidden states; the logits are never stored.

        x = hidden @ weight.T + bias
        s = softcap * tanh(logit_scale * x / softcap)      (logit_scale * x without a softcap)
        z = s / temperature
        lse = log sum_v exp(z_v),   logprob = z_y - lse,   entropy = -sum_v p_v log p_v

    Every output but `correct` and `top_ids` may be part of a loss, each token with a gradient of
    its own:

        d logprob / dz = onehot_y - p,   d lse / dz = p,   d entropy / dz = -p (log p + entropy)

    Tokens that are not valid (label `ignore_index`, or `where` false) are taken out before any
    arithmetic; their outputs and their gradients are exactly 0.

    The backward computes the logits again, chunk by chunk: four GEMMs in all, one where no gradient
    is wanted. Beside its inputs the call keeps four numbers per token, with `kept`, `ids` or
    `top_k` six, one for each of their classes, and another for each of the `top_k`. For a loss that
    is a weighted sum of log-probabilities known in advance, `chunked_nll` needs three GEMMs.

    Args:
        hidden: [..., H] hidden states, the head's input; float16, bfloat16, float32 or float64.
        weight: [V, H] head (`weight_layout="VH"`) or [H, V] (`"HV"`, a Flax kernel); its dtype may
            differ from that of `hidden`. Or a `LowRankHead`; or what it is the weight of, with its
            bias: in PyTorch an `nn.Linear`, a tied `nn.Embedding`, `NLLHead`, PEFT's LoRA on one,
            whose adapters are computed; in JAX a Flax or Equinox linear or embedding layer.
        labels: [...] integers of any dtype but uint64. In PyTorch they, and `where` with them, may
            be on the CPU while the rest is on an accelerator (not with `vocab_parallel`): the
            number of valid tokens is known there without a device sync, and only they are computed.
        bias: [V] or None.
        where: [...] bool or None; False takes a token out.
        kept: [..., K] integers or None: the classes that a sampler kept at each token, by top-k or
            top-p, in any order, -1 beyond their number; a row of -1 alone is the whole vocabulary.
            `lse`, `logprobs`, `entropy` and `correct` are then over these classes, and so is the
            softmax in every gradient. A label must be one of them.
        ids: [..., K] integers or None: classes whose log-probabilities are wanted beside the
            label's, as `ids_logprobs` with gradients; -1 for none, which gives 0. Outside of
            `kept` they are -inf.
        top_k: how many of the most probable classes of each token are wanted, as `top_ids` and
            `top_logprobs`, at most V; 0 for none. With `kept` they are of the set; where it has
            fewer, the others are -1, with log-probabilities of -inf. Vocabularies of up to 2^24.
        ignore_index: label of tokens to leave out.
        logit_scale: number or 0-d array that multiplies the logits.
        softcap: positive number, 0-d array (in PyTorch read by the host), or None.
        temperature: positive number, 0-d array, or [...] one per token.
        entropy: compute the entropy too. Not asked for, it costs nothing.
        vocab_parallel: in PyTorch a ProcessGroup or a one-dimensional DeviceMesh, in JAX the name
            of a mesh axis inside `shard_map`; `PaddedVocab` of one where the last rows are padding;
            in PyTorch `VocabShard.of_ranks(rows, group)` where ranks have different numbers of
            rows, none included. `weight` and `bias` are then this rank's rows of the head, in rank
            order, or a DTensor sharded on the vocabulary.
            `hidden`, `labels` and the rest are the same on every rank, and so are the results and
            d hidden. One MAX and one packed SUM over [N] numbers, one SUM of d hidden; with `kept`
            or `ids` of K classes one SUM more over [N, K], which has 2 R K numbers of a token too
            for a `top_k` of K on R ranks. The MAX also compares checksums of what must be the same:
            where ranks differ all raise, or have NaN where raising would need a device sync (and in
            JAX).
        tokens_parallel: the ranks of `vocab_parallel` again, if tokens are sharded over them too:
            `hidden`, `labels` and all other per-token arguments are then this rank's own, of any
            number, none included, and so are its results and d hidden; the options are the same on
            every rank, and the head's gradient is that of the sum of all ranks' results. Every rank
            makes the call, with or without tokens, and its backward. In PyTorch, with
            `gather="hidden"`: a DeviceMesh [nodes, ranks of a node] of FSDP2's ranks; rows are
            gathered over nodes, hidden states within a node.
        gather: how a sharded head meets data-parallel tokens. "head" all-gathers the weight,
            [V, H]. "hidden" all-gathers the hidden states, chunk by chunk; no rank holds [V, H].
            "stream" all-gathers the weight in blocks of rows, twice: no [V, H] either, a fourth
            GEMM, and what is sent does not depend on the number of tokens. "auto" is the faster of
            "head" and "hidden" by `xentlib.plan.choose_gather`. In PyTorch for heads that FSDP2 or
            ZeRO-3 shards, with `vocab_parallel` for shards that FSDP2 shards further; in JAX, which
            has no "stream", on Explicit meshes and for Flax's `NLLHead`.
        tokens_per_rank: for `gather="auto"`: about the tokens of a rank, equal on every rank.
        reduce_hidden_grad: with `vocab_parallel`, whether d hidden is summed over the shards.
            False, in PyTorch only, returns this rank's part, for a model whose own region before
            the head sums the parts (Megatron's copy to the tensor-parallel region, a gather of the
            sequence whose backward is a reduce-scatter). Each part is rounded to the dtype of
            `hidden` first.
        compute_dtype: None for float32 (float64 for float64 inputs); "float64" is the audit mode,
            everything in float64 and rounded once (in JAX it needs 64-bit types switched on).
        max_chunk_bytes: budget of the logits of one chunk; None for the default of the device.
        weight_layout: "VH" or "HV"; neither is transposed.

    Returns:
        LogprobOutput, float32 (float64 for float64 inputs), never below.

    Raises:
        ValueError: shapes, devices or values that do not belong together; a label outside [0, V)
            or not in `kept` of a valid token wherever values can be read without a device sync
            (elsewhere that token's outputs, and what sums over them, are NaN).
        TypeError: a dtype that cannot be used.
        RuntimeError: the gradient of the gradient (in JAX, its own ValueError).

    Numerics: as `chunked_nll`. The log-probability of a confident token comes from log1p of the sum
    without its column, so it is never above 0 and keeps its digits near it; the upstream gradients,
    the scale and the temperature multiply dz in float32 before the GEMMs; dz is rounded once to the
    GEMM dtype; every gradient is rounded once. Rows A3 to A7, A10 and A11 of the contract.

    Sources: keeping lse and forming p from it as in Cut Cross-Entropy (arXiv 2411.09009).
    """
    raise NotImplementedError("call xentlib.torch.chunked_logprobs or xentlib.jax.chunked_logprobs")


def vocab_parallel_logprobs(
    logits: Array,
    labels: Array | SoftLabels[Array],
    *,
    vocab_parallel: Any = None,
    where: Array | None = None,
    kept: Array | None = None,
    ids: Array | None = None,
    top_k: int = 0,
    ignore_index: int = -100,
    temperature: float | Array = 1.0,
    label_smoothing: float = 0.0,
    entropy: bool = False,
    max_chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> LogprobOutput[Array]:
    """Log-probability of each label, and entropy, from precomputed logits, sharded over ranks.

        z = logits / temperature      (this rank's columns of them)
        lse = log sum_v exp(z_v),   logprob = z_y - lse,   entropy = -sum_v p_v log p_v
        d logprob / dz = onehot_y - p,   d lse / dz = p,   d entropy / dz = -p (log p + entropy)

    Of labels that are class probabilities q, logprob = sum_v q_v (z_v - lse) and
    d logprob / dz = q - p sum_v q_v.

    The sums run over the columns of all ranks, labels are ids of the whole vocabulary, and results
    are the same on every rank; each gets the gradient of its own columns. One MAX and one packed
    SUM over [N] numbers in the forward, none in the backward. Neither the logits nor a tensor that
    another operator saved is written to, and no one-hot rows are made: the target's gradient goes
    straight into its column. Rows are worked on in blocks, so beside the gradient of the logits a
    call needs `xentlib.plan.given_peak_bytes`, whatever the number of tokens.

    Args:
        logits: [..., C] this rank's columns, in rank order; float16, bfloat16, float32, float64.
            C may differ from rank to rank, and may be 0. In PyTorch also a DTensor that is sharded
            over its last dimension on a one-dimensional mesh, which needs no other argument, or one
            that every rank has whole.
        labels: [...] integers of any dtype but uint64, ids of the whole vocabulary. On the CPU in
            PyTorch as for `chunked_logprobs`. Or class probabilities: [..., C] floating, of this
            rank's columns, or `SoftLabels` of a few classes of each token, with one SUM more over
            shards and two passes over the logits; there is no `correct` then.
        vocab_parallel: in PyTorch a ProcessGroup or a one-dimensional DeviceMesh, in JAX the name
            of a mesh axis inside `shard_map`; `PaddedVocab` of one where the last columns are
            padding; in PyTorch `VocabShard.of_ranks(columns, group)` where ranks have different
            numbers of columns. None: `logits` has all columns.
        where: [...] bool or None; False takes a token out.
        kept: [..., K] ids of the whole vocabulary or None, as in `chunked_logprobs`.
        ids: [..., K] ids of the whole vocabulary or None, as in `chunked_logprobs`.
        top_k: how many of the most probable classes of the whole vocabulary are wanted, as in
            `chunked_logprobs`.
        ignore_index: label of tokens to leave out.
        temperature: positive number, 0-d array, or [...] one per token.
        label_smoothing: eps in [0, 1]. `logprobs` is then the smoothed log-likelihood, whose
            negative is the loss of torch, optax and `chunked_nll`,
            (1 - eps) * logprob + (eps / V) * sum_v (z_v - lse).
        entropy: compute the entropy too. Not asked for, it costs nothing.
        max_chunk_bytes: budget of the float32 copy of some rows; None for the default of the
            device.
        shard: the classes of this rank's columns, on every rank or on none; every class on one
            rank. Without it every rank has as many columns.

    Returns:
        LogprobOutput, float32 (float64 for float64 logits), never below.

    Raises:
        ValueError: shapes, devices or values that do not belong together; the whole vocabulary
            handed in as a shard; a label outside [0, V) of a valid token wherever values can be
            read without a device sync (elsewhere that token's outputs are NaN).
        TypeError: a dtype that cannot be used.
        RuntimeError: the gradient of the gradient (in JAX, its own ValueError).

    Numerics: as `chunked_logprobs` from step 3 on; dz is computed in float32 and rounded once to
    the dtype of the logits. Rows A3, A4, A10, A11 and A13 of the contract.

    Sources: two-phase reduction as in Megatron-LM (arXiv 1909.08053), with lse kept so that the
    backward reduces nothing.
    """
    raise NotImplementedError(
        "call xentlib.torch.vocab_parallel_logprobs or xentlib.jax.vocab_parallel_logprobs"
    )
