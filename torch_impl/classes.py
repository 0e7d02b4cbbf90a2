"""Log-probabilities over a kept set and of several classes of each token, in PyTorch: what the
operators give `xentlib.classes`.

Shapes: N tokens, K further classes, C columns of given logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import Coefficients, RestStats, WantedStats
from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.classes import KEPT, check_classes
from xentlib.classes import Classes, ClassLogits, Wanted
from xentlib.logprobs import LogprobOutput
from xentlib.torch.array_spec import array_spec, with_leading
from xentlib.torch.binding import bind, bind_logits
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.device import host_readable, onto
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import Gradients, fake_gradients, rounded
from xentlib.torch.core.kernels import DzOutput
from xentlib.torch.core.logits import GivenLogits
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.stats import class_stats, columns_of, columns_of_blocks
from xentlib.torch.core.tokens import Selected
from xentlib.torch.logprobs import Values, given_op
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

RESULTS = "(Tensor, Tensor, Tensor, Tensor)"


class ClassOptions(NamedTuple):
    """What a forward operator takes beside its call."""

    entropy: bool
    wanted: list[bool]  # gradients, as `DIFFERENTIATED` has them: alike on all ranks of a head


class Cotangents(NamedTuple):
    """What a backward operator takes beside its call: upstream gradients, and what it kept."""

    d_z: Tensor | None  # [1 + K, N]
    d_lse: Tensor | None
    d_entropy: Tensor | None
    residuals: Tensor  # [2, N] lse and entropy of the rest


class Needs(NamedTuple):
    """Which gradients a backward operator makes, as `DIFFERENTIATED` has them."""

    needs: list[bool]


def head_forward(call: HeadCall, options: ClassOptions) -> ClassLogits:
    """Steps 1 to 5 of `xentlib.nll`, with further classes out of the rest."""
    entropy, needs = options
    loop = HeadLoop(call, Terms("chunked_logprobs", needs, float(entropy)), made=Eager)
    loop.chunks_of.exchange()
    vocab = loop.check_consistent()
    if vocab is not None:
        vocab.consistency.exact("entropy", float(entropy))
        vocab.consistency.exact("gradient", needs[0] + 2.0 * needs[3])
    z, rest = class_stats(loop, columns_of_blocks(loop.blocks(), WantedStats(entropy)))
    values = loop.chunks_of.local(torch.cat((z, torch.stack(rest))))
    return class_logits(loop.own, values)


def given_forward(call: LogitsCall, options: ClassOptions) -> ClassLogits:
    """The same of precomputed logits."""
    given = GivenLogits(call, Eager)
    given.check_consistent()
    z, rest = class_stats(given, columns_of(given, WantedStats(options.entropy)))
    return class_logits(given.tokens, torch.cat((z, torch.stack(rest))))


def class_logits(own: Selected, values: Tensor) -> ClassLogits:
    """Of [1 + K + 3, N]."""
    z, *rest = own.clean(values).split([len(values) - 3, 1, 1, 1])
    # An operator's results are no views of one another.
    return ClassLogits(z.clone(), *(x[0].clone() for x in rest))


def coefficients(g: Tensor, rest: RestStats, *, entropy: bool) -> Coefficients:
    """Of dz, for upstream gradients [1 + K + 2, B] and what the rest has."""
    d_lse, d_entropy = g[-2:]
    alpha, beta = d_lse, None
    if entropy:
        alpha, beta = alpha - d_entropy * rest.entropy, -d_entropy
    return Coefficients(alpha, beta, None, g[0], g[1:-2].T)


def clean_upstream(own: Selected, upstream: Cotangents, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """[1 + K + 2, N]: 0 where there is none, or no token."""
    (count,) = own.valid.shape
    g = upstream.residuals.new_zeros(ids.shape[1] + 3, count, dtype=dtype)
    for at, x in ((slice(0, -2), upstream.d_z), (-2, upstream.d_lse), (-1, upstream.d_entropy)):
        if x is not None:
            g[at] = own.clean(x.to(dtype))
    return g


def head_backward(upstream: Cotangents, call: HeadCall, needs: list[bool]) -> tuple[Tensor, ...]:
    """Steps 6 to 8 from logits that are made again: gradients in their inputs' dtypes."""
    assert call.ids is not None
    entropy = upstream.d_entropy is not None
    terms = Terms("the backward of chunked_logprobs", needs, d_entropy=entropy)
    loop = HeadLoop(call, terms, made=Eager)
    entropy = loop.chunks_of.d_entropy  # of the tokens of any rank
    g = clean_upstream(loop.own, upstream, call.compute_dtype, call.ids)
    residuals, g = loop.chunks_of.exchange(upstream.residuals, g)
    exponent = power_of_two(call.gemm_dtype, g.abs().sum(0))
    if exponent is not None:
        g = torch.ldexp(g, exponent)
    sums = loop.sums(needs)
    for logits, of_block in sums.passes(exponent):
        for chunk in logits.chunks():
            kernels = logits.kernels()
            for rows in logits.blocks(chunk):
                rest = rest_of(residuals[:, rows.places])
                scaled = logits.scaled(g[:, rows.places], rows)
                of_block.take(rows, kernels, rest.lse, coefficients(scaled, rest, entropy=entropy))
            del kernels
            of_block.add(chunk)
    accumulators: Gradients = sums.finish(exponent)
    for x in accumulators[1:] if call.rows.head_scale != 1.0 else ():
        x.mul_(call.rows.head_scale)
    return tuple(
        rounded(x, (call.hidden if like is None else like).dtype)
        for x, like in zip(accumulators, call.leaves, strict=True)
    )


def rest_of(residuals: Tensor) -> RestStats:
    """Where no class is left, anything: its columns are at -inf."""
    lse, entropy = residuals
    return RestStats(torch.where(lse == -torch.inf, 0.0, lse), entropy, lse)


def given_backward(upstream: Cotangents, call: LogitsCall) -> Tensor:
    """Step 6 of given logits, in their dtype."""
    assert call.ids is not None
    given, logits = GivenLogits(call, Eager), call.logits
    size, entropy = given.local_size, upstream.d_entropy is not None
    g = clean_upstream(given.tokens, upstream, call.compute_dtype, call.ids)
    d_logits, kernels = torch.zeros_like(logits), given.kernels()
    for rows in given.blocks():
        of_rows, rest = g[:, rows.places], rest_of(upstream.residuals[:, rows.places])
        if rows.temperature_B is not None:
            of_rows = of_rows / rows.temperature_B
        dz = coefficients(of_rows, rest, entropy=entropy)
        kernels.dz(rows, rest.lse, dz, DzOutput(with_target=True))
        d_logits[rows.places, :size] = rows.z_BV[:, :size].to(logits.dtype)
    return d_logits


@operator("class_logits_forward", HeadCall, ClassOptions, returns=RESULTS)
def head_op(call: HeadCall, options: ClassOptions) -> tuple[Tensor, ...]:
    """`head_forward` as one operator, opaque to the compiler."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return head_forward(call, options)


@operator("given_class_logits_forward", LogitsCall, ClassOptions, returns=RESULTS)
def given_classes_op(call: LogitsCall, options: ClassOptions) -> tuple[Tensor, ...]:
    """`given_forward` as one operator, opaque to the compiler."""
    return given_forward(call, options)


@head_op.fake
@given_classes_op.fake
def fake_logits(call: HeadCall | LogitsCall, options: ClassOptions) -> tuple[Tensor, ...]:
    assert call.ids is not None
    count, further = call.ids.shape
    like = call[0].new_empty(count, dtype=call.compute_dtype)
    return (like.new_empty(1 + further, count), *(torch.empty_like(like) for _ in range(3)))


@operator(
    "class_logits_backward",
    *(Cotangents, HeadCall, Needs),
    returns=f"({', '.join(['Tensor'] * len(DIFFERENTIATED))})",
)
def head_backward_op(upstream: Cotangents, call: HeadCall, needs: Needs) -> tuple[Tensor, ...]:
    """`head_backward` as one operator, opaque to the compiler."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return head_backward(upstream, call, needs.needs)


@head_backward_op.fake
def _(upstream: Cotangents, call: HeadCall, needs: Needs) -> tuple[Tensor, ...]:
    return tuple(fake_gradients(call, needs.needs))


@operator("given_class_logits_backward", Cotangents, LogitsCall, returns="Tensor")
def given_backward_op(upstream: Cotangents, call: LogitsCall) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    return given_backward(upstream, call)


@given_backward_op.fake
def _(upstream: Cotangents, call: LogitsCall) -> Tensor:
    return torch.empty_like(call.logits)


def keep(ctx: Any, output: tuple[Tensor, ...], call: Any, options: ClassOptions) -> None:
    """What a backward needs: the call, and lse and entropy of the rest."""
    _, lse, entropy, largest = output
    ctx.entropy = options.entropy
    keep_call(ctx, torch.stack((lse, entropy)), (largest,), call)


def upstream_of(ctx: Any, function: str, gradients: Any) -> tuple[Cotangents, Any] | None:
    differentiated_once(function, "log_softmax")
    d_z, d_lse, d_entropy, _ = gradients
    if d_z is None and d_lse is None and d_entropy is None:
        return None
    residuals, (call,) = kept_call(ctx)
    return Cotangents(d_z, d_lse, d_entropy if ctx.entropy else None, residuals), call


def backward_of_head(ctx: Any, *gradients: Tensor | None) -> Named | None:
    upstream = upstream_of(ctx, "chunked_logprobs", gradients)
    if upstream is None:
        return None
    needs = head_op.needed(ctx, *DIFFERENTIATED)
    made = head_backward_op(*upstream, Needs(needs))
    return {name: g if need else None for name, g, need in zip(DIFFERENTIATED, made, needs)}


def backward_of_given(ctx: Any, *gradients: Tensor | None) -> Named | None:
    upstream = upstream_of(ctx, "vocab_parallel_logprobs", gradients)
    return None if upstream is None else {"logits": given_backward_op(*upstream)}


head_op.gradient(keep, backward_of_head)
given_classes_op.gradient(keep, backward_of_given)


def of_few(
    logits: Tensor, labels: Tensor, valid: Tensor, *, entropy: bool
) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` of the classes that are told apart."""
    problem = LogitsArguments(logits, labels, where=valid, entropy=entropy)
    _, _, call = bind_logits("vocab_parallel_logprobs", problem)
    return LogprobOutput(*given_op(call, Values(entropy, logits.dtype, []))[:4])


CLASSES = Classes(
    xp=torch,
    exp=torch.exp,
    places=lambda ids: torch.arange(ids.shape[1], device=ids.device),
    argsort=lambda x: torch.argsort(x, dim=1, stable=True),
    search=torch.searchsorted,
    take=lambda x, places: torch.take_along_dim(x, places, 1),
    constant=Tensor.detach,
    logprobs=of_few,
)


def flat(x: Tensor | None, num_tokens: int) -> Tensor | None:
    return None if x is None else x.reshape(num_tokens, x.shape[-1]).long().contiguous()


def asked(given: Arguments | LogitsArguments, call: Any) -> Wanted:
    """What the classes of a call are, flat; those that are kept in ascending order."""
    (count,) = call.labels.shape
    valid = call.labels.long() != call.ignore_index
    if call.where is not None:
        valid = valid & call.where
    device = call[0].device
    labels = torch.where(valid, call.labels.long(), 0)
    kept = flat(given.kept, count)
    kept = None if kept is None else torch.sort(kept, dim=1).values
    parts = onto(labels, device), onto(valid, device), kept, flat(given.ids, count)
    return Wanted(*parts, given.entropy)


def outputs(
    of: ClassLogits, want: Wanted, problem: Any, *, gathered: bool
) -> LogprobOutput[Tensor]:
    """With the leading dimensions and the dtype of a call."""
    outside = CLASSES.outside(want)
    readable = host_readable(outside) and not torch.compiler.is_compiling()
    # Where tokens are a rank's own it would raise alone.
    if readable and not gathered and bool(outside.any()):
        KEPT.refuse("outside", label=int(want.labels[outside][0]))
    logprobs, entropy, lse, correct, ids_logprobs = CLASSES.output(of, want)
    dtype = getattr(torch, problem.output_dtype)
    values = (x.to(dtype) for x in (logprobs, entropy, lse))
    logprobs, entropy, lse = (with_leading(x, problem.leading) for x in values)
    if ids_logprobs is not None:
        ids_logprobs = ids_logprobs.to(dtype).reshape(*problem.leading, -1)
    correct = with_leading(correct, problem.leading)
    return LogprobOutput(logprobs, entropy if want.entropy else None, lse, correct, ids_logprobs)


@with_head(recompute=True)
def head_classes(given: Arguments, local: RowLayout | None = None) -> LogprobOutput[Tensor]:
    """`chunked_logprobs` with `kept` or `ids`."""
    given, problem, call = bind("chunked_logprobs", given, local)
    check_classes(*map(array_spec, (given.kept, given.ids, given.hidden)), source="hidden")
    want = asked(given, call)
    call = call._replace(ids=torch.cat(want.further, 1))
    made = head_op(call, ClassOptions(given.entropy, wanted(*call.leaves)))
    return outputs(ClassLogits(*made), want, problem, gathered=bool(call.rows.route))


def given_classes(given: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` with `kept` or `ids`."""
    given, problem, call = bind_logits("vocab_parallel_logprobs", given)
    KEPT.require("smoothing", not given.label_smoothing, eps=given.label_smoothing)
    check_classes(*map(array_spec, (given.kept, given.ids, given.logits)), source="logits")
    want = asked(given, call)
    call = call._replace(ids=torch.cat(want.further, 1))
    made = given_classes_op(call, ClassOptions(given.entropy, []))
    return outputs(ClassLogits(*made), want, problem, gathered=False)
