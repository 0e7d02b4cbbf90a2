"""Per-token log-probabilities in PyTorch: the steps of `xentlib.logprobs`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, B rows of a block of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib import logprobs as spec
from xentlib.checks import check_logits, check_logprobs, plain
from xentlib.logprobs import LogprobOutput
from xentlib.plan import VocabShard, default_chunk_bytes
from xentlib.torch.chunks import (
    GIVEN,
    GIVEN_SCHEMA,
    Asked,
    Given,
    GivenCall,
    GradientSums,
    Rows,
    Walk,
    power_of_two,
)
from xentlib.torch.describe import (
    CALL,
    HEAD_SCHEMA,
    HeadCall,
    as_tensor,
    autocast_dtype,
    describe,
    differentiated_once,
    gradients_by_name,
    not_differentiable,
    not_forward_mode,
    prepare,
    same_tokens,
)
from xentlib.torch.head import (
    local_columns,
    local_logits,
    local_rows,
    replicated,
    with_whole_head,
)
from xentlib.torch.ranks import numbers_of, over_shards
from xentlib.torch.softmax import FLOOR, Block, TokenStats, take_target

__all__ = [
    "LogprobOutput",
    "chunked_logprobs",
    "given_backward",
    "given_forward",
    "logprobs_backward",
    "logprobs_forward",
    "vocab_parallel_logprobs",
]


class Residuals(NamedTuple):
    """What the backward needs beside the inputs: [N] each, in the compute dtype."""

    lse: Tensor
    p_rest: Tensor  # 1 - p_y, from r / S
    logprob: Tensor
    entropy: Tensor


Forward = tuple[LogprobOutput, Residuals, Tensor]  # the shard as all ranks know it, or nothing


def logprobs_forward(call: HeadCall, entropy: bool, output_dtype: torch.dtype) -> Forward:
    """Steps 1 to 5."""
    walk = Walk(call)
    walk.agree()
    stats = walk.stats(Asked(entropy))
    return outputs_of(stats, walk, output_dtype)


def outputs_of(
    stats: TokenStats, walk: Walk | Given, output_dtype: torch.dtype, label_smoothing: float = 0.0
) -> Forward:
    tokens, parallel = walk.tokens, walk.parallel
    per_token_5N = tokens.clean(
        torch.stack((stats.lse, stats.p_rest, stats.logprob, stats.entropy, stats.correct))
    )
    shard = tokens.labels.new_empty(0) if parallel is None else numbers_of(parallel.shard)
    residuals = Residuals(*per_token_5N[:4])
    logprob = residuals.logprob
    if stats.mean_logp is not None:
        logprob = (1.0 - label_smoothing) * logprob + label_smoothing * stats.mean_logp
        logprob = tokens.clean(logprob)
    output = LogprobOutput(
        logprob.to(output_dtype, copy=True),
        residuals.entropy.to(output_dtype, copy=True),
        residuals.lse.to(output_dtype, copy=True),
        per_token_5N[4] > 0,
    )
    return output, residuals, shard


def logprobs_backward(
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
    d_lse: Tensor | None,
    residuals: Residuals,
    call: HeadCall,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 6 to 8: d hidden, d weight and d bias in their inputs' dtypes; empty if not needed."""
    walk = Walk(call)

    g_3N = upstream(walk, d_logprobs, d_entropy, d_lse)
    exponent = power_of_two(call.gemm_dtype, g_3N.abs().sum(0))
    if exponent is not None:
        g_3N = torch.ldexp(g_3N, exponent)
    sums = GradientSums(walk, needs, call.weight.shape[call.transposed])
    for chunk in walk.chunks():
        block = walk.block()
        for rows in walk.blocks(chunk, jacobian=True):
            take_target(rows.z_BV, rows.y_B1)
            g_3B = walk.scaled(g_3N[:, rows.places], rows)
            kept = Residuals(*(x[rows.places] for x in residuals))
            sums.block(rows, dlogits_(rows, g_3B, kept, block, entropy=d_entropy is not None))
        del block
        sums.add(chunk)
    found = sums.finish(exponent)
    # On CPU rows that were not computed are +0 already, elsewhere their dz was.
    inputs = (call.hidden, call.weight, call.hidden if call.bias is None else call.bias)
    d_hidden, d_weight, d_bias = (x.to(like.dtype) for x, like in zip(found, inputs, strict=True))
    return d_hidden, d_weight, d_bias


def upstream(walk: Walk | Given, *gradients: Tensor | None) -> Tensor:
    """[3, N]: gradients of log-probability, entropy and lse; 0 where there is none, or no token."""
    zeros = torch.zeros(walk.tokens.valid.shape, **walk.like)
    return torch.stack(
        [zeros if g is None else walk.tokens.clean(g.to(walk.compute_dtype)) for g in gradients]
    )


def dlogits_(rows: Rows, g_3B: Tensor, kept: Residuals, block: Block, *, entropy: bool) -> Tensor:
    """Step 6: logits with -inf in the target column become dz, 0 in that column; the target's own
    dz is returned."""
    z_BV, (g_logprob, g_entropy, g_lse) = rows.z_BV, g_3B
    z_BV.sub_(kept.lse[:, None])
    own = g_lse
    if entropy:
        p_BV = block.diff_BV[: z_BV.shape[0]]
        block.scaled_exp(z_BV, rows.y_B1, 1.0, p_BV)
        others = g_lse - g_logprob - g_entropy * kept.entropy
        z_BV.clamp_(min=FLOOR).mul_(-g_entropy[:, None]).add_(others[:, None]).mul_(p_BV)
        # A label whose p is 0 has a log-probability of -inf: their product must be 0.
        own = g_lse - g_entropy * (kept.logprob.clamp(min=FLOOR) + kept.entropy)
    else:
        block.scaled_exp(z_BV, rows.y_B1, (g_lse - g_logprob)[:, None], z_BV)
    target: Tensor = g_logprob * kept.p_rest + torch.exp(kept.logprob) * own
    return target


@torch.library.custom_op(
    "xentlib::logprobs_forward",
    mutates_args=(),
    schema=f"({HEAD_SCHEMA}, bool entropy, ScalarType output_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def logprobs_op(*arguments: Any) -> tuple[Tensor, ...]:
    """`logprobs_forward` as one operator, opaque to the compiler: outputs, residuals [4, N], shard
    [3] or nothing."""
    call, rest = HeadCall(*arguments[:CALL]), arguments[CALL:]
    with torch.autocast(call.hidden.device.type, enabled=False):
        output, residuals, shard = over_shards(lambda: logprobs_forward(call, *rest))
    return (*output, torch.stack(residuals), shard)


@logprobs_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, output_dtype = HeadCall(*arguments[:CALL]), arguments[-1]
    return fake_outputs(call.hidden, output_dtype, call.compute_dtype, call.shard)


def fake_outputs(
    like: Tensor, output_dtype: torch.dtype, compute_dtype: torch.dtype, shard: Tensor | None
) -> tuple[Tensor, ...]:
    dtypes = [output_dtype] * 3 + [torch.bool]
    outputs = [like.new_empty(like.shape[0], dtype=dtype) for dtype in dtypes]
    residuals = like.new_empty(4, like.shape[0], dtype=compute_dtype)
    none = like.new_empty(0, dtype=torch.int64)
    return (*outputs, residuals, none if shard is None else torch.empty_like(shard))


@torch.library.custom_op(
    "xentlib::logprobs_backward",
    mutates_args=(),
    schema="(Tensor? d_logprobs, Tensor? d_entropy, Tensor? d_lse, Tensor residuals, "
    f"{HEAD_SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def logprobs_backward_op(
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
    d_lse: Tensor | None,
    residuals: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`logprobs_backward` as one operator, opaque to the compiler."""
    call, needs = HeadCall(*arguments[:-1]), arguments[-1]
    with torch.autocast(call.hidden.device.type, enabled=False):
        return logprobs_backward(d_logprobs, d_entropy, d_lse, Residuals(*residuals), call, needs)


@logprobs_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, needs = HeadCall(*arguments[-1 - CALL : -1]), arguments[-1]
    hidden, weight = call.hidden, call.weight
    vocab_size = weight.shape[1 if call.transposed else 0]
    like_bias = hidden if call.bias is None else call.bias
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0, hidden.shape[1])),
        weight.new_empty(weight.shape if needs[1] else (0, 0)),
        like_bias.new_empty(vocab_size if needs[2] else 0),
    )


def _keep(ctx: Any, call: Any, output: tuple[Tensor, ...]) -> None:
    """What a backward needs: the call, with the shard that its forward knew, and residuals."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    *_, residuals, shard = output
    call = call._replace(shard=None if call.shard is None else shard)
    tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
    ctx.save_for_backward(residuals, *tensors.values())
    ctx.tensors, ctx.call = list(tensors), call._replace(**dict.fromkeys(tensors))


def _kept(ctx: Any) -> tuple[Any, Tensor]:
    residuals, *tensors = ctx.saved_tensors
    return ctx.call._replace(**dict(zip(ctx.tensors, tensors, strict=True))), residuals


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, HeadCall(*inputs[:CALL]), output)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    differentiated_once("chunked_logprobs", "log_softmax")
    fields = (*HeadCall._fields, "entropy", "output_dtype")
    if all(gradient is None for gradient in gradients[:3]):
        return gradients_by_name(fields)
    call, residuals = _kept(ctx)
    needs = [ctx.needs_input_grad[fields.index(name)] for name in ("hidden", "weight", "bias")]
    found = logprobs_backward_op(*gradients[:3], residuals, *call, needs)
    d_hidden, d_weight, d_bias = (g if need else None for g, need in zip(found, needs))
    return gradients_by_name(fields, hidden=d_hidden, weight=d_weight, bias=d_bias)


logprobs_op.register_autograd(_backward, setup_context=_setup_context)


def given_forward(given: Given, entropy: bool, output_dtype: torch.dtype) -> Forward:
    """Steps 3 to 5 for logits that are there."""
    given.agree()
    stats = given.stats(Asked(entropy, given.label_smoothing > 0))
    return outputs_of(stats, given, output_dtype, given.label_smoothing)


def given_backward(
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
    d_lse: Tensor | None,
    residuals: Residuals,
    given: Given,
) -> Tensor:
    """Step 6, in the logits' dtype: every row is written once, its target's column with it."""
    g_3N = upstream(given, d_logprobs, d_entropy, d_lse)
    tokens, logits, size = given.tokens, given.logits, given.local_size
    whole = tokens.computed == logits.shape[0]
    d_logits = torch.empty_like(logits) if whole else torch.zeros_like(logits)
    d_logits[:, size:] = 0.0
    eps = given.label_smoothing
    for rows, block in given.blocks(diff=d_entropy is not None):
        take_target(rows.z_BV, rows.y_B1)
        g_3B = g_3N[:, rows.places]
        if rows.temperature_B is not None:
            g_3B = g_3B / rows.temperature_B
        kept = Residuals(*(x[rows.places] for x in residuals))
        dz_y_B = dlogits_(rows, g_3B, kept, block, entropy=d_entropy is not None)
        if eps:
            uniform_B = g_3B[0] * (eps / given.vocab_size)
            rows.z_BV.add_(uniform_B[:, None])
            dz_y_B = dz_y_B + (uniform_B - eps * g_3B[0])
        rows.z_BV.scatter_(1, rows.y_B1, dz_y_B[:, None])  # the spare column, if not its own
        if not tokens.packed:
            rows.z_BV.masked_fill_(~tokens.valid[rows.places, None], 0.0)
        d_logits[rows.places, :size] = rows.z_BV[:, :size].to(logits.dtype)
    return d_logits


@torch.library.custom_op(
    "xentlib::given_forward",
    mutates_args=(),
    schema=f"({GIVEN_SCHEMA}, bool entropy, ScalarType output_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def given_op(*arguments: Any) -> tuple[Tensor, ...]:
    """`given_forward` as one operator, opaque to the compiler; returns what `logprobs_op` does."""
    call, rest = GivenCall(*arguments[:GIVEN]), arguments[GIVEN:]
    output, residuals, shard = over_shards(lambda: given_forward(Given(call), *rest))
    return (*output, torch.stack(residuals), shard)


@given_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, output_dtype = GivenCall(*arguments[:GIVEN]), arguments[-1]
    return fake_outputs(call.logits, output_dtype, call.compute_dtype, call.shard)


@torch.library.custom_op(
    "xentlib::given_backward",
    mutates_args=(),
    schema="(Tensor? d_logprobs, Tensor? d_entropy, Tensor? d_lse, Tensor residuals, "
    f"{GIVEN_SCHEMA}) -> Tensor",
)
def given_backward_op(
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
    d_lse: Tensor | None,
    residuals: Tensor,
    *arguments: Any,
) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    given = Given(GivenCall(*arguments))
    return given_backward(d_logprobs, d_entropy, d_lse, Residuals(*residuals), given)


@given_backward_op.register_fake
def _(*arguments: Any) -> Tensor:
    return torch.empty_like(GivenCall(*arguments[-GIVEN:]).logits)


def _given_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, GivenCall(*inputs[:GIVEN]), output)


def _given_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    differentiated_once("vocab_parallel_logprobs", "log_softmax")
    fields = (*GivenCall._fields, "entropy", "output_dtype")
    if all(gradient is None for gradient in gradients[:3]):
        return gradients_by_name(fields)
    call, residuals = _kept(ctx)
    d_logits = given_backward_op(*gradients[:3], residuals, *call)
    return gradients_by_name(fields, logits=d_logits)


given_op.register_autograd(_given_backward, setup_context=_given_context)


@with_whole_head(recompute=True)
def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    where: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    vocab_parallel: Any = None,
    reduce_hidden_grad: bool = True,
    compute_dtype: str | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: str = "VH",
) -> LogprobOutput:
    ignore_index, logit_scale, softcap, temperature, max_chunk_bytes = map(
        plain, (ignore_index, logit_scale, softcap, temperature, max_chunk_bytes)
    )
    hidden, labels = replicated("hidden", hidden), replicated("labels", labels)
    weight, bias, local = local_rows(weight, bias, vocab_parallel, weight_layout)
    same_tokens(hidden, labels, where, temperature)
    problem = check_logprobs(
        describe(hidden),
        describe(weight),
        describe(labels),
        bias=describe(bias),
        where=describe(where),
        ignore_index=ignore_index,
        logit_scale=describe(logit_scale),
        softcap=describe(softcap),
        temperature=describe(temperature),
        entropy=entropy,
        compute_dtype=compute_dtype,
        max_chunk_bytes=max_chunk_bytes,
        weight_layout=weight_layout,
        autocast_dtype=autocast_dtype(hidden),
        sharded=vocab_parallel is not None,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    constants = {"logit_scale": logit_scale, "softcap": softcap, "temperature": temperature}
    not_forward_mode("chunked_logprobs", hidden, weight, bias, *constants.values())
    not_differentiable(**constants)
    call = prepare(
        problem,
        hidden,
        weight,
        labels,
        bias,
        local,
        where=where,
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        max_chunk_bytes=max_chunk_bytes,
        weight_layout=weight_layout,
        reduce_hidden=reduce_hidden_grad,
    )
    results = logprobs_op(*call, entropy, getattr(torch, problem.output_dtype))
    return shaped(results, problem.leading, entropy)


chunked_logprobs.__doc__ = spec.chunked_logprobs.__doc__


def shaped(results: Any, leading: tuple[int, ...], entropy: bool) -> LogprobOutput:
    # Copies, not views: FSDP2 warns of views that a module's forward returns.
    logprobs, entropies, lse, correct = (
        x if x.shape == leading else x.reshape(leading).clone() for x in results[:4]
    )
    return LogprobOutput(logprobs, entropies if entropy else None, lse, correct)


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_parallel: Any = None,
    where: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    entropy: bool = False,
    max_chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> LogprobOutput:
    ignore_index, temperature, label_smoothing, max_chunk_bytes = map(
        plain, (ignore_index, temperature, label_smoothing, max_chunk_bytes)
    )
    logits, vocab_parallel, shard = local_logits(logits, vocab_parallel, shard)
    labels = replicated("labels", labels)
    same_tokens(logits, labels, where, temperature)
    problem = check_logits(
        describe(logits),
        describe(labels),
        where=describe(where),
        ignore_index=ignore_index,
        temperature=describe(temperature),
        label_smoothing=label_smoothing,
        entropy=entropy,
        max_chunk_bytes=max_chunk_bytes,
        vocab_parallel=vocab_parallel,
        shard=shard,
    )
    not_forward_mode("vocab_parallel_logprobs", logits, temperature)
    not_differentiable(temperature=temperature)
    flat = logits.reshape(problem.num_tokens, problem.columns)
    local = local_columns(flat, vocab_parallel, shard)
    compute = getattr(torch, problem.compute_dtype)
    temperatures = as_tensor(temperature, 1.0, logits, compute)
    results = given_op(
        flat,
        labels.reshape(-1),
        None if where is None else where.reshape(-1),
        None if temperatures is None else temperatures.reshape(-1),
        local.shard,
        ignore_index,
        compute,
        max_chunk_bytes or default_chunk_bytes(logits.device.type),
        local.group,
        float(label_smoothing),
        entropy,
        getattr(torch, problem.output_dtype),
    )
    return shaped(results, problem.leading, entropy)


vocab_parallel_logprobs.__doc__ = spec.vocab_parallel_logprobs.__doc__
