"""Chunked negative log-likelihood: signature, docstring, result and rounding points.

The two implementations are `xentlib.torch.chunked_nll` and `xentlib.jax.chunked_nll`. Both walk
the steps below in this order, under these numbers:

 1. pack the valid tokens to the front; split them into chunks (`plan/`)
 2. logits of a chunk, operands exact, accumulated in the compute dtype; bias, scale, softcap,
    temperature in that dtype
 3. take the target column out: z_y is read, the column becomes -inf
 4. m_r = max of the rest; S_r = sum of exp(z - m_r) of the rest: of each block of 128 columns
    relative to its own maximum, then of blocks relative to that of all, exactly
 5. per token: m, r, log S, lse, log-probability, from (z_y, m_r, S_r)
 6. p = exp(z - lse); dz = factor * (p * (1 + 2 z_loss lse) - eps / V) of the rest, 0 in the target
    column; dz_y of the target from r / S
 7. chain both back through temperature, softcap and scale; round them once to the GEMM dtype
 8. d hidden = dz @ W + dz_y W_y of the chunk; dz.T @ X and then the rows dz_y X added to d weight,
    likewise d bias; chunks ascending
 9. reduce the per-token values; divide by the denominator
10. (backward) multiply the accumulated gradients by the upstream gradient; round once

With `recompute` the backward computes the logits again and takes steps 6 to 8, with the upstream
gradient in the factor of step 6 and one rounding of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from xentlib.arguments import Array, Head
from xentlib.labels import SoftLabels
from xentlib.options import OUTPUTS, ComputeDtype, Gather, OutputName, Reduction, WeightLayout
from xentlib.results import not_a_tensor

__all__ = ["OUTPUTS", "NLLOutput", "chunked_nll"]

A = TypeVar("A")  # a tensor or an array of the backend


@not_a_tensor("loss")
class NLLOutput(NamedTuple, Generic[A]):
    """Result of `chunked_nll`; a pytree in JAX. Only `loss` carries a gradient.

    Attributes:
        loss: [] the reduced loss, float32 (float64 for float64 inputs).
        num_tokens: [] number of valid tokens, int64 in torch, int32 in JAX.
        weight_sum: [] sum of the weights of the valid tokens, each times its label's class weight;
            `num_tokens` where there are none.
        z_loss: [] the part of `loss` that z-loss contributes.
        logprobs: [...] log-probability of each label, or None if not asked for.
        entropy: [...] entropy of each token's distribution in nats, or None.
        lse: [...] log-sum-exp of each token's logits, or None.
        correct: [...] bool, the label's logit is the largest and no other equals it, or None.
        predicted: [...] the class of the largest logit, the first of several, -1 for tokens that
            are not valid; int64 in torch, int32 in JAX; or None.
        denominator: [] what the sum was divided by: `weight_sum` for a mean, or the argument; None
            for a sum. `TokenNormalizer` and `Evaluation` take sums, and look here.
    """

    loss: A
    num_tokens: A
    weight_sum: A
    z_loss: A
    # None where they were not asked for, which a type checker need not hear of each time.
    logprobs: A | Any = None
    entropy: A | Any = None
    lse: A | Any = None
    correct: A | Any = None
    predicted: A | Any = None
    denominator: A | Any = None


def chunked_nll(
    hidden: Array,
    weight: Head,
    labels: Array | SoftLabels[Array],
    *,
    bias: Array | None = None,
    where: Array | None = None,
    token_weights: Array | None = None,
    class_weights: Array | None = None,
    ignore_index: int = -100,
    logit_scale: float | Array = 1.0,
    softcap: float | Array | None = None,
    temperature: float | Array = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float | Array = 0.0,
    reduction: Reduction = "mean",
    denominator: float | Array | None = None,
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
) -> NLLOutput[Array]:
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
    raise NotImplementedError("call xentlib.torch.chunked_nll or xentlib.jax.chunked_nll")
