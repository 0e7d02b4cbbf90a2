"""The functions of the head, for people and their editors.

Written by `make public` from the definitions in `nll.py`, `logprobs.py` and `divergence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from xentlib.arguments import (
    Arguments,
    DivergenceArguments,
    LogitsArguments,
    LogitsDivergenceArguments,
)
from xentlib.checks.call import known_names
from xentlib.head import LowRankHead
from xentlib.labels import SoftLabels
from xentlib.logprobs import LogprobOutput
from xentlib.nll import NLLOutput
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
from xentlib.shards import VocabShard
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK
from xentlib.torch.losses.index import nll
from xentlib.torch.losses.logprobs import head_logprobs, logits_logprobs

if TYPE_CHECKING:
    from xentlib.divergence import DivergenceOutput

__all__ = [
    "chunked_divergence",
    "chunked_logprobs",
    "chunked_nll",
    "vocab_parallel_divergence",
    "vocab_parallel_logprobs",
]


@known_names
def chunked_nll(
    hidden: Tensor,
    weight: Tensor | nn.Module | LowRankHead[Tensor],
    labels: Tensor | SoftLabels[Tensor],
    *,
    bias: Tensor | None = None,
    where: Tensor | None = None,
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float | Tensor = 0.0,
    reduction: Reduction = "mean",
    denominator: float | Tensor | None = None,
    outputs: Sequence[OutputName] = (),
    vocab_parallel: Any = None,
    tokens_parallel: Any = None,
    gather: Gather = "head",
    tokens_per_rank: int | None = None,
    reduce_hidden_grad: bool = True,
    recompute: bool = False,
    compute_dtype: ComputeDtype | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: WeightLayout = "VH",
) -> NLLOutput[Tensor]:
    """Negative log-likelihood of a language-model head, without ever storing the logits.

        x = hidden @ weight.T + bias
        s = softcap * tanh(logit_scale * x / softcap)      (logit_scale * x without a softcap)
        z = s / temperature
        lse = log sum_v exp(z_v),   logprob = z_y - lse
        nll = -(1 - eps) * c_y * logprob - (eps / V) * sum_v c_v (z_v - lse)
        loss = sum over valid tokens of token_weight * (nll + z_loss * lse^2) / denominator

    with class weights c, 1 where there are none. Of labels that are class probabilities q,

        a_v = c_v ((1 - eps) q_v + eps / V),   nll = sum_v a_v (lse - z_v)

    A token is valid where its label is not `ignore_index` and `where`, if given, is true. Tokens
    that are not valid are taken out before any arithmetic: inf or NaN there reaches nothing and
    their gradient is exactly +0. With no valid token the loss is 0 and all gradients are 0.

    Gradients for `hidden`, `weight` and `bias` are computed in the forward pass, chunk by chunk:
    three GEMMs, one where no gradient is wanted. With `vocab_parallel` and several chunks the
    statistics of all shards must be known first: `xentlib.plan.exchanges_per_chunk` says whether
    they are exchanged in every chunk, or once for a fourth GEMM. With `recompute` the forward makes
    the loss alone, of one GEMM, and the backward the other three. All other arguments are
    constants; asking for their gradient raises.

    Args:
        hidden: [..., H] hidden states, the head's input; float16, bfloat16, float32 or float64.
        weight: [V, H] head (`weight_layout="VH"`) or [H, V] (`"HV"`, a Flax kernel); its dtype may
            differ from that of `hidden`. Or a `LowRankHead`; or what it is the weight of, with its
            bias: in PyTorch an `nn.Linear`, a tied `nn.Embedding`, `NLLHead`, PEFT's LoRA on one,
            whose adapters are computed; in JAX a Flax or Equinox linear or embedding layer.
        labels: [...] integers of any dtype but uint64. In PyTorch they, and `where` with them, may
            be on the CPU while the rest is on an accelerator (not with `vocab_parallel`): the
            number of valid tokens is known there without a device sync, and only they are computed.
            Or class probabilities, as torch's `cross_entropy` takes them: [..., V] floating, over
            vocabulary shards this rank's columns, or `SoftLabels` of a few classes of each token.
            They need not add up to 1. `where` says which tokens are valid.
        bias: [V] or None.
        where: [...] bool or None; False takes a token out.
        token_weights: [...] floating point or None; may be negative (advantages).
        class_weights: [V] floating point or None, c in the equations: `weight=` of torch's
            `cross_entropy`, label smoothing included. Of the whole vocabulary, on every rank.
        ignore_index: label of tokens without a loss.
        logit_scale: number or 0-d array that multiplies the logits.
        softcap: positive number, 0-d array (in PyTorch read by the host), or None.
        temperature: positive number, 0-d array, or [...] one per token.
        label_smoothing: eps in [0, 1], torch and optax convention: eps / V on every class, times
            its class weight.
        z_loss: coefficient >= 0 of lse^2, a number or a 0-d array (in PyTorch read by the host).
        reduction: "mean" over the weights of the valid tokens (each times its label's class
            weight, as in torch; not so where labels are class probabilities, as in torch), or
            "sum".
        denominator: number or 0-d array; if given the loss is the sum divided by it, whatever
            `reduction` says. Pass the token count of the whole window to accumulate micro-batches.
            0 where no token is valid gives 0; with valid tokens it raises wherever it can be read
            without a device sync, and gives inf elsewhere.
        outputs: any of "logprobs", "entropy", "lse", "correct", "predicted": per token, without
            gradient, 0 (False, -1) for tokens that are not valid. "predicted" costs vocabulary
            shards one number more a token and rank. A loss that depends on one raises in its
            backward (NaN inside `jit`): `chunked_logprobs` has their gradients. Of class
            probabilities "logprobs" is sum_v q_v log p_v, and there is no "correct" or "predicted".
        vocab_parallel: in PyTorch a ProcessGroup or a one-dimensional DeviceMesh, in JAX the name
            of a mesh axis inside `shard_map`; `PaddedVocab` of one where the last rows are padding;
            in PyTorch `VocabShard.of_ranks(rows, group)` where ranks have different numbers of
            rows, none included. `weight` and `bias` are then this rank's rows of the head, in rank
            order, or a DTensor sharded on the vocabulary.
            `hidden`, `labels` and the rest are the same on every rank, and so are the results and
            d hidden. One MAX and one packed SUM over [N] numbers, one SUM of d hidden. The MAX
            also compares checksums of what must be the same: where ranks differ all raise, or have
            NaN where raising would need a device sync (and in JAX).
        tokens_parallel: the ranks of `vocab_parallel` again, if tokens are sharded over them too:
            `hidden`, `labels` and all other per-token arguments are then this rank's own, of any
            number, none included, and so are its results and d hidden; the options are the same on
            every rank, and the head's gradient is that of the sum of all ranks' results: a mean of
            each rank's tokens needs a `denominator`. Every rank makes the call, with or without
            tokens, and its backward, with the same upstream gradient. In PyTorch, with
            `gather="hidden"`: a DeviceMesh [nodes, ranks of a node] of FSDP2's ranks; rows are
            gathered over nodes, hidden states within a node.
        gather: how a sharded head meets data-parallel tokens. "head" all-gathers the weight,
            [V, H]. "hidden" all-gathers the hidden states, chunk by chunk; no rank holds [V, H].
            "stream" all-gathers the weight in blocks of rows, twice: no [V, H] either, a fourth
            GEMM, and what is sent does not depend on the number of tokens. "auto" is the faster of
            "head" and "hidden" by `xentlib.plan.choose_gather`. In PyTorch for heads that FSDP2 or
            ZeRO-3 shards, with `vocab_parallel` for shards that FSDP2 shards further; in JAX, which
            has no "stream", on Explicit meshes and for Flax's `NLLHead`. `SoftLabels`
            travel with "hidden", probabilities of all classes do not; neither goes with "stream".
        tokens_per_rank: for `gather="auto"`: about the tokens of a rank, equal on every rank.
        reduce_hidden_grad: with `vocab_parallel`, whether d hidden is summed over the shards.
            False, in PyTorch only, returns this rank's part, for a model whose own region before
            the head sums the parts (Megatron's copy to the tensor-parallel region, a gather of the
            sequence whose backward is a reduce-scatter). Each part is rounded to the dtype of
            `hidden` first.
        recompute: compute the gradients in the backward, from logits that are computed again: four
            GEMMs in place of three, and far less memory. The sum of d weight in float32, [V, H], is
            gone, and no gradient waits between forward and backward, whose head must be as it was.
            Not of class probabilities.
        compute_dtype: None for float32 (float64 for float64 inputs); "float64" is the audit mode,
            everything in float64 and rounded once (in JAX it needs 64-bit types switched on).
        max_chunk_bytes: budget of the logits of one chunk; None for the default of the device.
        weight_layout: "VH" or "HV"; neither is transposed. Copied only where operands must be cast
            (a 16-bit head on CPU in torch, mixed dtypes, the audit mode).

    Returns:
        NLLOutput, float32 (float64 for float64 inputs), never below.

    Raises:
        ValueError: shapes, devices or values that do not belong together; a label outside [0, V)
            of a valid token wherever values can be read without a device sync (elsewhere that
            token's outputs, and what sums over them, are NaN).
        TypeError: a dtype that cannot be used.
        RuntimeError: the gradient of the gradient (in JAX, its own ValueError).

    Numerics: logits accumulate in float32 and are never rounded below it; p = exp(z - lse) from the
    rounded lse; the log-probability of a confident token comes from log1p of the sum without its
    column; factors multiply dz in float32 before the GEMMs; dz is rounded once to the GEMM dtype;
    d weight and d bias accumulate in float32 over ascending chunks; every gradient is rounded once,
    after the upstream gradient, which with `recompute` is one of the factors. Under float16, dz
    carries a power of two so that small probabilities survive. Rows A0 to A14 of the contract.

    Sources: gradient in forward and chunking over tokens as in Liger-Kernel (arXiv 2410.10989) and
    Cut Cross-Entropy (arXiv 2411.09009); z-loss as in PaLM (arXiv 2204.02311); soft-capping as in
    Gemma 2 (arXiv 2408.00118); label smoothing as in arXiv 1512.00567.
    """
    return nll(
        Arguments(
            hidden=hidden,
            weight=weight,
            labels=labels,
            bias=bias,
            where=where,
            token_weights=token_weights,
            class_weights=class_weights,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            denominator=denominator,
            outputs=outputs,
            vocab_parallel=vocab_parallel,
            tokens_parallel=tokens_parallel,
            gather=gather,
            tokens_per_rank=tokens_per_rank,
            reduce_hidden_grad=reduce_hidden_grad,
            recompute=recompute,
            compute_dtype=compute_dtype,
            max_chunk_bytes=max_chunk_bytes,
            weight_layout=weight_layout,
        )
    )


@known_names
def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor | nn.Module | LowRankHead[Tensor],
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    where: Tensor | None = None,
    kept: Tensor | None = None,
    ids: Tensor | None = None,
    top_k: int = 0,
    ignore_index: int = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    vocab_parallel: Any = None,
    tokens_parallel: Any = None,
    gather: Gather = "head",
    tokens_per_rank: int | None = None,
    reduce_hidden_grad: bool = True,
    compute_dtype: ComputeDtype | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: WeightLayout = "VH",
) -> LogprobOutput[Tensor]:
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
    return head_logprobs(
        Arguments(
            hidden=hidden,
            weight=weight,
            labels=labels,
            bias=bias,
            where=where,
            kept=kept,
            ids=ids,
            top_k=top_k,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            entropy=entropy,
            vocab_parallel=vocab_parallel,
            tokens_parallel=tokens_parallel,
            gather=gather,
            tokens_per_rank=tokens_per_rank,
            reduce_hidden_grad=reduce_hidden_grad,
            compute_dtype=compute_dtype,
            max_chunk_bytes=max_chunk_bytes,
            weight_layout=weight_layout,
        )
    )


@known_names
def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor | SoftLabels[Tensor],
    *,
    vocab_parallel: Any = None,
    where: Tensor | None = None,
    kept: Tensor | None = None,
    ids: Tensor | None = None,
    top_k: int = 0,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    entropy: bool = False,
    max_chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> LogprobOutput[Tensor]:
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
    return logits_logprobs(
        LogitsArguments(
            logits=logits,
            labels=labels,
            vocab_parallel=vocab_parallel,
            where=where,
            kept=kept,
            ids=ids,
            top_k=top_k,
            ignore_index=ignore_index,
            temperature=temperature,
            label_smoothing=label_smoothing,
            entropy=entropy,
            max_chunk_bytes=max_chunk_bytes,
            shard=shard,
        )
    )


@known_names
def chunked_divergence(
    hidden: Tensor,
    weight: Tensor | nn.Module | LowRankHead[Tensor],
    teacher: TeacherHead[Tensor] | TeacherLogits[Tensor] | TeacherTopK[Tensor],
    *,
    kind: Divergence = "forward_kl",
    beta: float | None = None,
    labels: Tensor | None = None,
    nll_weight: float = 0.0,
    vocab: Vocab = "same",
    bias: Tensor | None = None,
    where: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    temperature_squared: bool = False,
    reduction: DivergenceReduction = "mean",
    denominator: float | Tensor | None = None,
    outputs: Sequence[DivergenceOutputName] = (),
    vocab_parallel: Any = None,
    tokens_parallel: Any = None,
    gather: Gather = "head",
    tokens_per_rank: int | None = None,
    reduce_hidden_grad: bool = True,
    compute_dtype: ComputeDtype | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: WeightLayout = "VH",
) -> DivergenceOutput[Tensor]:
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
    from xentlib.torch.losses.divergence import head_divergence

    return head_divergence(
        DivergenceArguments(
            hidden=hidden,
            weight=weight,
            teacher=teacher,
            kind=kind,
            beta=beta,
            labels=labels,
            nll_weight=nll_weight,
            vocab=vocab,
            bias=bias,
            where=where,
            token_weights=token_weights,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            temperature_squared=temperature_squared,
            reduction=reduction,
            denominator=denominator,
            outputs=outputs,
            vocab_parallel=vocab_parallel,
            tokens_parallel=tokens_parallel,
            gather=gather,
            tokens_per_rank=tokens_per_rank,
            reduce_hidden_grad=reduce_hidden_grad,
            compute_dtype=compute_dtype,
            max_chunk_bytes=max_chunk_bytes,
            weight_layout=weight_layout,
        )
    )


@known_names
def vocab_parallel_divergence(
    logits: Tensor,
    teacher: TeacherLogits[Tensor],
    *,
    kind: Divergence = "forward_kl",
    beta: float | None = None,
    vocab_parallel: Any = None,
    where: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    max_chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> DivergenceOutput[Tensor]:
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
    from xentlib.torch.losses.divergence import logits_divergence

    return logits_divergence(
        LogitsDivergenceArguments(
            logits=logits,
            teacher=teacher,
            kind=kind,
            beta=beta,
            vocab_parallel=vocab_parallel,
            where=where,
            temperature=temperature,
            max_chunk_bytes=max_chunk_bytes,
            shard=shard,
        )
    )
