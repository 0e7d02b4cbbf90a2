"""Log-probabilities over a kept set and of several classes of each token, in PyTorch: the steps of
`xentlib.classes` between those of `xentlib.logprobs`.

Shapes: N tokens, K further classes, C columns of given logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import Coefficients, NonTargetStats, WantedStats
from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.call import CALLS, NLLProblem
from xentlib.checks.classes import KEPT, check_classes
from xentlib.classes import Classes, Residuals, Upstream, Wanted
from xentlib.logprobs import LogprobOutput
from xentlib.torch.array_spec import array_spec, as_tensor, with_leading
from xentlib.torch.binding import bind, bind_logits, tokens
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.device import host_readable
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import fake_gradients, rounded
from xentlib.torch.core.kernels import DzOutput
from xentlib.torch.core.logits import GivenLogits
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.stats import class_stats, columns_of, columns_of_blocks
from xentlib.torch.core.tokens import Selected
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.nll import refused_divisor
from xentlib.torch.operators import (
    DIFFERENTIATED,
    HeadCall,
    LogitsCall,
    Named,
    RowLayout,
    differentiated_once,
    keep_call,
    kept_call,
    operator,
    wanted,
)
from xentlib.torch.placement.head import with_head

CLASSES = Classes(
    xp=torch,
    algebra=ALGEBRA,
    places=lambda x: torch.arange(x.shape[1], device=x.device),
    argsort=lambda x: torch.argsort(x, dim=1, stable=True),
    search=lambda a, x: torch.searchsorted(a.contiguous(), x.contiguous()),
    take=lambda x, places: torch.take_along_dim(x, places, 1),
    sum=lambda x: x.contiguous().sum(1),
)


class Options(NamedTuple):
    """What an operator takes beside its call, whose `ids` are those kept and then the others."""

    kept: int  # how many; -1: no set is kept
    entropy: bool
    output_dtype: torch.dtype
    wanted: list[bool]  # gradients, as `DIFFERENTIATED` has them: alike on all ranks of a head
    # Of a loss that is made of the results, so that all ranks refuse a denominator of 0.
    token_weights: Tensor | None = None
    denominator: Tensor | None = None

    @property
    def class_weights(self) -> Tensor | None:
        """It has none."""
        return None

    @property
    def mean(self) -> bool:
        """It reduces nothing."""
        return False

    @property
    def needs(self) -> list[bool]:
        return self.wanted


class Cotangents(NamedTuple):
    """What a backward operator takes beside its call: upstream gradients, and what it kept."""

    d_logprobs: Tensor | None
    d_entropy: Tensor | None
    d_lse: Tensor | None
    d_ids_logprobs: Tensor | None
    d_tail: Tensor | None
    residuals: Tensor  # [1 + K + 5, N]


def want_of(own: Selected, call: Any, options: Options) -> Wanted:
    return Wanted(own.targets, own.valid & ~own.bad, call.ids, options.kept)


def values_of(own: Selected, packed: Tensor, call: Any, options: Options) -> tuple[Tensor, ...]:
    """Of rows that `class_stats` has made, of this rank's tokens: outputs and residuals."""
    z, (m, ones, s, sum_ed) = packed[:-4], packed[-4:]
    rest = NonTargetStats(m, ones, s, sum_ed if options.entropy else None, None, None)
    want = want_of(own, call, options)
    outside = CLASSES.outside(want)
    # Where tokens are a rank's own it would raise alone.
    if host_readable(outside) and not call.rows.route and bool(outside.any()):
        KEPT.refuse("outside", label=int(want.labels[outside][0]))
    values, kept = CLASSES.values(z, rest, want)
    *of_tokens, correct, ids_logprobs, tail = values
    outputs = (own.clean(x).to(options.output_dtype, copy=True) for x in of_tokens)
    tail = own.clean(tail).to(options.output_dtype, copy=True)
    ids_logprobs = own.clean(ids_logprobs.T).T.to(options.output_dtype)
    residuals = torch.cat((kept.log_p, torch.stack([x.to(z.dtype) for x in kept[1:]])))
    return (*outputs, correct & ~own.bad, ids_logprobs.contiguous(), tail, residuals)


def head_forward(call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """Steps 1 to 5, with further classes out of the rest."""
    needs, entropy = options.wanted, options.entropy
    refused = refused_divisor(call, options)
    terms = Terms("chunked_logprobs", needs, float(entropy), refused=refused)
    loop = HeadLoop(call, terms, made=Eager)
    loop.chunks_of.exchange()
    vocab = loop.check_consistent()
    if vocab is not None:
        vocab.consistency.exact("entropy", float(entropy))
        vocab.consistency.exact("kept", options.kept)
        vocab.consistency.exact("gradient", needs[0] + 2.0 * needs[3])
        if not loop.gathered:
            vocab.consistency.close("denominator", options.denominator)
    packed = class_stats(loop, columns_of_blocks(loop.blocks(), WantedStats(entropy)))
    # Ranks of a route have refused it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    return values_of(loop.own, loop.chunks_of.local(packed), call, options)


def given_forward(call: LogitsCall, options: Options) -> tuple[Tensor, ...]:
    """The same of precomputed logits."""
    given = GivenLogits(call, Eager)
    given.check_consistent()
    if isinstance(given.vocab, ShardedVocab):
        given.vocab.consistency.exact("kept", options.kept)
    packed = class_stats(given, columns_of(given, WantedStats(options.entropy)))
    return values_of(given.tokens, packed, call, options)


def upstream_rows(
    own: Selected, upstream: Cotangents, call: Any, options: Options
) -> tuple[Tensor, Tensor]:
    """[1 + K + 2, N]: gradients of the logits, alpha and beta of the rest; and lse [1, N]."""
    (count,), like = own.valid.shape, upstream.residuals
    *log_p, lse, entropy, top, rest_of_top, tail = like
    kept = Residuals(torch.stack(log_p), lse, entropy, top.long(), rest_of_top, tail)
    zeros = like.new_zeros(count)

    def clean(g: Tensor | None) -> Tensor:
        return zeros if g is None else own.clean(g.to(like.dtype))

    of_ids = like.new_zeros(count, call.ids.shape[1] - max(0, options.kept))
    if upstream.d_ids_logprobs is not None:
        of_ids = own.clean(upstream.d_ids_logprobs.to(like.dtype).T).T
    entropies = None if upstream.d_entropy is None else clean(upstream.d_entropy)
    tails = None if upstream.d_tail is None else clean(upstream.d_tail)
    g = Upstream(clean(upstream.d_logprobs), entropies, clean(upstream.d_lse), of_ids, tails)
    made = CLASSES.gradients(g, kept, want_of(own, call, options))
    beta = zeros if made.beta is None else made.beta
    return torch.cat((made.z, made.alpha[None], beta[None])), lse[None]


def coefficients(rows: Tensor, *, entropy: bool) -> Coefficients:
    return Coefficients(rows[-2], rows[-1] if entropy else None, None, rows[0], rows[1:-2].T)


def head_backward(upstream: Cotangents, call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """Steps 6 to 8 from logits that are made again: gradients in their inputs' dtypes."""
    needs, entropy = options.wanted, upstream.d_entropy is not None
    terms = Terms("the backward of chunked_logprobs", needs, d_entropy=entropy)
    loop = HeadLoop(call, terms, made=Eager)
    entropy = loop.chunks_of.d_entropy  # of the tokens of any rank
    g, lse = upstream_rows(loop.own, upstream, call, options)
    g, lse = loop.chunks_of.exchange(g, lse)
    exponent = power_of_two(call.gemm_dtype, g.abs().sum(0))
    if exponent is not None:
        g = torch.ldexp(g, exponent)
    sums = loop.sums(needs)
    for logits, of_block in sums.passes(exponent):
        for chunk in logits.chunks():
            kernels = logits.kernels()
            for rows in logits.blocks(chunk):
                dz = coefficients(logits.scaled(g[:, rows.places], rows), entropy=entropy)
                of_block.take(rows, kernels, lse[0, rows.places], dz)
            del kernels
            of_block.add(chunk)
    accumulators = sums.finish(exponent)
    for x in accumulators[1:] if call.rows.head_scale != 1.0 else ():
        x.mul_(call.rows.head_scale)
    return tuple(
        rounded(x, (call.hidden if like is None else like).dtype)
        for x, like in zip(accumulators, call.leaves, strict=True)
    )


def given_backward(upstream: Cotangents, call: LogitsCall, options: Options) -> Tensor:
    """Step 6 of given logits, in their dtype."""
    given, logits = GivenLogits(call, Eager), call.logits
    size, entropy = given.local_size, upstream.d_entropy is not None
    g, lse = upstream_rows(given.tokens, upstream, call, options)
    d_logits, kernels = torch.zeros_like(logits), given.kernels()
    for rows in given.blocks():
        of_rows = g[:, rows.places]
        if rows.temperature_B is not None:
            of_rows = of_rows / rows.temperature_B
        dz = coefficients(of_rows, entropy=entropy)
        kernels.dz(rows, lse[0, rows.places], dz, DzOutput(with_target=True))
        d_logits[rows.places, :size] = rows.z_BV[:, :size].to(logits.dtype)
    return d_logits


RESULTS = f"({', '.join(['Tensor'] * 7)})"


@operator("class_logprobs_forward", HeadCall, Options, returns=RESULTS)
def head_op(call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """`head_forward` as one operator, opaque to the compiler: outputs and residuals."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return head_forward(call, options)


@operator("given_class_logprobs_forward", LogitsCall, Options, returns=RESULTS)
def given_op(call: LogitsCall, options: Options) -> tuple[Tensor, ...]:
    """`given_forward` as one operator, opaque to the compiler."""
    return given_forward(call, options)


@head_op.fake
@given_op.fake
def fake_outputs(call: HeadCall | LogitsCall, options: Options) -> tuple[Tensor, ...]:
    assert call.ids is not None
    count, further = call.ids.shape
    like, number = call[0], further - max(0, options.kept)
    dtypes = [options.output_dtype] * 3 + [torch.bool]
    of_tokens = [like.new_empty(count, dtype=dtype) for dtype in dtypes]
    of_ids = like.new_empty(count, number, dtype=options.output_dtype)
    residuals = like.new_empty(further + 6, count, dtype=call.compute_dtype)
    return (*of_tokens, of_ids, torch.empty_like(of_tokens[0]), residuals)


@operator(
    "class_logprobs_backward",
    *(Cotangents, HeadCall, Options),
    returns=f"({', '.join(['Tensor'] * len(DIFFERENTIATED))})",
)
def head_backward_op(upstream: Cotangents, call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """`head_backward` as one operator, opaque to the compiler."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return head_backward(upstream, call, options)


@head_backward_op.fake
def _(upstream: Cotangents, call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    return tuple(fake_gradients(call, options.wanted))


@operator("given_class_logprobs_backward", Cotangents, LogitsCall, Options, returns="Tensor")
def given_backward_op(upstream: Cotangents, call: LogitsCall, options: Options) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    return given_backward(upstream, call, options)


@given_backward_op.fake
def _(upstream: Cotangents, call: LogitsCall, options: Options) -> Tensor:
    return torch.empty_like(call.logits)


def keep(ctx: Any, output: tuple[Tensor, ...], call: Any, options: Options) -> None:
    """What a backward needs: the call and its options, and residuals."""
    *_, correct, _, _, residuals = output
    keep_call(ctx, residuals, (correct, residuals), call, options)


def upstream_of(ctx: Any, function: str, gradients: Any) -> tuple[Cotangents, Any, Any] | None:
    differentiated_once(function, "log_softmax")
    d_logprobs, d_entropy, d_lse, _, d_ids, d_tail, _ = gradients
    if all(g is None for g in (d_logprobs, d_entropy, d_lse, d_ids, d_tail)):
        return None
    residuals, (call, options) = kept_call(ctx)
    d_entropy = d_entropy if options.entropy else None
    return Cotangents(d_logprobs, d_entropy, d_lse, d_ids, d_tail, residuals), call, options


def backward_of_head(ctx: Any, *gradients: Tensor | None) -> Named | None:
    kept = upstream_of(ctx, "chunked_logprobs", gradients)
    if kept is None:
        return None
    upstream, call, options = kept
    needs = head_op.needed(ctx, *DIFFERENTIATED)
    made = head_backward_op(upstream, call, options._replace(wanted=needs))
    return {name: g if need else None for name, g, need in zip(DIFFERENTIATED, made, needs)}


def backward_of_given(ctx: Any, *gradients: Tensor | None) -> Named | None:
    kept = upstream_of(ctx, "vocab_parallel_logprobs", gradients)
    return None if kept is None else {"logits": given_backward_op(*kept)}


head_op.gradient(keep, backward_of_head)
given_op.gradient(keep, backward_of_given)


def with_ids(given: Arguments | LogitsArguments, call: Any) -> tuple[Any, int]:
    """The call with the classes that it asks for, flat, and how many of them are of a kept set."""
    classes, (count,), kept = [], call.labels.shape, -1
    if given.kept is not None:
        kept = given.kept.shape[-1]
        classes.append(torch.sort(given.kept.reshape(count, kept).long(), dim=1).values)
    if given.ids is not None:
        classes.append(given.ids.reshape(count, -1).long())
    return call._replace(ids=torch.cat(classes, 1)), kept


def shaped(results: Any, problem: Any, given: Any) -> LogprobOutput[Tensor]:
    """With the leading dimensions of a call."""
    *of_tokens, of_ids, _, _ = results
    logprobs, entropy, lse, correct = (with_leading(x, problem.leading) for x in of_tokens)
    ids_logprobs = None
    if given.ids is not None:
        ids_logprobs = of_ids.reshape(*problem.leading, of_ids.shape[1])
    return LogprobOutput(logprobs, entropy if given.entropy else None, lse, correct, ids_logprobs)


class ClassResults(NamedTuple):
    """Flat results of a head's operator, each a field, as a wrapper puts its hooks on them; its
    problem and its call."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    correct: Tensor
    ids_logprobs: Tensor
    tail: Tensor
    residuals: Tensor
    problem: NLLProblem
    call: HeadCall
    given: Arguments


@with_head(recompute=True)
def class_results(given: Arguments, local: RowLayout | None = None) -> ClassResults:
    """Of a call with `kept` or `ids`."""
    given, problem, call = bind("chunked_logprobs", given, local)
    check_classes(*map(array_spec, (given.kept, given.ids, given.hidden)), source="hidden")
    call, kept = with_ids(given, call)
    dtype = getattr(torch, problem.output_dtype)
    options = Options(
        kept,
        given.entropy,
        dtype,
        wanted(*call.leaves),
        tokens(given.token_weights),
        as_tensor(given.denominator, None, call.hidden, call.compute_dtype),
    )
    made: list[Any] = [*head_op(call, options), problem, call, given]
    return ClassResults(*made)


def head_classes(given: Arguments) -> LogprobOutput[Tensor]:
    """`chunked_logprobs` with `kept` or `ids`."""
    *results, problem, _, given = class_results(given)
    return shaped(results, problem, given)


def given_classes(given: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` with `kept` or `ids`."""
    given, problem, call = bind_logits("vocab_parallel_logprobs", given)
    KEPT.require("smoothing", not given.label_smoothing, eps=given.label_smoothing)
    check_classes(*map(array_spec, (given.kept, given.ids, given.logits)), source="logits")
    call, kept = with_ids(given, call)
    dtype = getattr(torch, problem.output_dtype)
    return shaped(given_op(call, Options(kept, given.entropy, dtype, [])), problem, given)
