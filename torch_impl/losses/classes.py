"""Log-probabilities over a kept set and of several classes of each token, in PyTorch: the steps of
`xentlib.math.classes` between those of `xentlib.logprobs`.

Shapes: N tokens, K further classes, M candidates for the `top_k` most probable ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.arguments import SCALARS, Arguments, DivergenceArguments, LogitsArguments
from xentlib.checks.call import CALLS, NLLProblem, check_top_k
from xentlib.checks.classes import KEPT, check_classes
from xentlib.logprobs import LogprobOutput
from xentlib.math.classes import Classes, Residuals, Upstream, Wanted
from xentlib.math.softmax import Coefficients, NonTargetStats, WantedStats
from xentlib.torch.array_spec import array_spec, as_tensor, with_leading
from xentlib.torch.binding import bind, bind_logits, tokens
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.device import host_readable
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.gradients import Gradients, fake_gradients
from xentlib.torch.core.kernels import Kernels, eager_kernels, kernels_for
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.stats import class_stats, columns_of_loop
from xentlib.torch.core.tokens import Selected
from xentlib.torch.losses.logprobs import function_of
from xentlib.torch.losses.loss import (
    Recompute,
    as_inputs,
    recompute,
    refused_divisor,
    without_autocast,
)
from xentlib.torch.operators import (
    DIFFERENTIATED,
    HeadCall,
    Named,
    RowLayout,
    differentiated_once,
    keep_call,
    kept_call,
    operator,
    wanted,
)
from xentlib.torch.placement.head import with_head

# The numbers of a divergence that is made of several classes, beside those of their logits
OF_DIVERGENCE = [x for x in SCALARS["chunked_divergence"] if x not in SCALARS["chunked_logprobs"]]
CLASSES = Classes(
    xp=torch,
    algebra=ALGEBRA,
    positions=lambda x: torch.arange(x.shape[1], device=x.device),
    argsort=lambda x: torch.argsort(x, dim=1, stable=True),
    search=lambda a, x: torch.searchsorted(a.contiguous(), x.contiguous()),
    take=lambda x, index: x.gather(1, index),  # `take_along_dim` guards the number of tokens
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
    # Of a divergence from these classes: its options as one number, and the teacher's values.
    kind: float = 0.0
    teacher: Tensor | None = None

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
    d_top_logprobs: Tensor | None
    residuals: Tensor  # [1 + K + 2 top_k + 5, N]


def want_of(local: Selected, call: Any, options: Options) -> Wanted:
    return Wanted(local.targets, local.valid & ~local.bad, call.ids, options.kept)


def values_of(local: Selected, packed: Tensor, call: Any, options: Options) -> tuple[Tensor, ...]:
    """Of rows that `class_stats` has made, of this rank's tokens: outputs and residuals."""
    z, candidates, (m, ones, s, sum_ed) = packed.tensor_split([1 + call.ids.shape[1], -4])
    if call.top_k:
        candidates = candidates.unflatten(0, (2, -1))
    else:
        candidates = candidates[None].expand(2, 0, -1)
    rest = NonTargetStats(m, ones, s, sum_ed if options.entropy else None, None, None)
    want = want_of(local, call, options)
    outside = CLASSES.outside(want)
    # Where tokens are a rank's own it would raise alone.
    if host_readable(outside) and not call.rows.route and bool(outside.any()):
        KEPT.refuse("outside", label=int(want.labels[outside][0]))
    values, kept, top = CLASSES.values_and_top(z, rest, want, candidates, call.top_k)
    *per_token, correct, ids_logprobs, tail = values
    outputs = (local.clean(x).to(options.output_dtype, copy=True) for x in per_token)
    tail = local.clean(tail).to(options.output_dtype, copy=True)
    ids_out, top_out = (
        local.clean(x.T).T.to(options.output_dtype).contiguous()
        for x in (ids_logprobs, top.logprobs)
    )
    numbers = torch.stack([x.to(z.dtype) for x in kept[1:]])
    residuals = torch.cat((kept.log_p, top.ids.T.to(z.dtype), numbers))
    top_ids = top.ids.clone(memory_format=torch.contiguous_format)
    return (*outputs, correct & ~local.bad, ids_out, tail, top_ids, top_out, residuals)


def kept_of(call: Any, residuals: Tensor) -> tuple[Any, Residuals]:
    """The call of a backward, which has the classes of the forward's `top_k` among its `ids`, and
    what that kept."""
    known, top_k = call.ids.shape[1], call.top_k
    log_p, top, per_token = residuals.tensor_split([1 + known + top_k, 1 + known + 2 * top_k])
    if top_k:  # a copy of many ids is as large as what a backward makes of them
        call = call._replace(ids=torch.cat((call.ids, top.T.long()), 1), top_k=0)
    lse, entropy, index, rest_of_top, tail = per_token
    return call, Residuals(log_p, lse, entropy, index.long(), rest_of_top, tail)


def upstream_rows(
    local: Selected, upstream: Cotangents, kept: Residuals, call: Any, options: Options
) -> tuple[Tensor, Tensor]:
    """[1 + K + 2, N]: gradients of the logits, alpha and beta of the rest; and lse [1, N]. `kept`
    and the call are those of `kept_of`."""
    (count,), like = local.valid.shape, kept.lse
    zeros = like.new_zeros(count)

    def clean(g: Tensor | None) -> Tensor:
        return zeros if g is None else local.clean(g.to(like.dtype))

    d_further = like.new_zeros(count, call.ids.shape[1] - max(0, options.kept))
    d_ids, d_top = upstream.d_ids_logprobs, upstream.d_top_logprobs
    if d_ids is not None:
        d_further[:, : d_ids.shape[1]] = local.clean(d_ids.to(like.dtype).T).T
    if d_top is not None:
        d_further[:, d_further.shape[1] - d_top.shape[1] :] = local.clean(d_top.to(like.dtype).T).T
    entropies = None if upstream.d_entropy is None else clean(upstream.d_entropy)
    tails = None if upstream.d_tail is None else clean(upstream.d_tail)
    g = Upstream(clean(upstream.d_logprobs), entropies, clean(upstream.d_lse), d_further, tails)
    want = want_of(local, call, options)
    dz, lse = CLASSES.gradients(g, kept, want), CLASSES.lse_of_rest(kept, want)
    beta = zeros if dz.beta is None else dz.beta
    return torch.cat((dz.z, dz.alpha[None], beta[None])), lse[None]


def coefficients(rows: Tensor, *, entropy: bool) -> Coefficients:
    more = rows[1:-2].T.contiguous()  # once for all blocks of classes
    return Coefficients(rows[-2], rows[-1] if entropy else None, None, rows[0], more)


def kernels_of(call: HeadCall) -> type[Kernels]:
    """Triton's programs, where the device has them. Eager with a softcap or scale, which turn the
    -inf of a class that is left out into a number, and with `top_k`, whose classes come first."""
    assert call.ids is not None
    scaled = call.logit_scale is not None or call.scalars.softcap is not None
    if not call.ids.shape[1] and not call.top_k:
        return Eager
    if scaled or call.top_k:
        why = "`top_k`" if call.top_k else "classes of a token, under a softcap or `logit_scale`"
        return eager_kernels(call.hidden.device, f"they have no {why}")
    return kernels_for(call.hidden.device, call.compute_dtype, call.scalars)


def classes_forward(call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """Steps 1 to 5, with further classes out of the rest."""
    needs, entropy = options.wanted, options.entropy
    refused = refused_divisor(call, options)
    terms = Terms(function_of(call), needs, float(entropy), None, refused, kind=options.kind)
    loop = HeadLoop(call, terms, kernel_cls=kernels_of(call), in_blocks=True)
    loop.chunks_of.exchange()
    vocab = loop.check_consistent()
    if vocab is not None:
        vocab.consistency.exact("kept", options.kept)
    if vocab is not None and call.weight is not None:
        vocab.consistency.exact("entropy", float(entropy))
        vocab.consistency.exact("gradient", needs[0] + 2.0 * needs[3])
        if not loop.gathered:
            vocab.consistency.close("denominator", options.denominator)
            for name in OF_DIVERGENCE:
                vocab.consistency.exact(name, getattr(call.scalars, name) or 0.0)
            valid, weights = loop.tokens.valid, options.token_weights
            vocab.consistency.per_token("token_weights", weights, valid.shape[0])
            if options.teacher is not None:
                vocab.consistency.probs(options.teacher, valid, "teacher")
    packed = class_stats(loop, columns_of_loop(loop, WantedStats(entropy)))
    # Ranks of a route have refused it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    check_top_k(call.top_k, loop.vocab.size)
    return values_of(loop.local_tokens, loop.chunks_of.local(packed), call, options)


def classes_backward(upstream: Cotangents, call: HeadCall, options: Options) -> Gradients:
    """Steps 6 to 8 from logits that are computed again: gradients in the compute dtype."""
    needs, entropy = options.wanted, upstream.d_entropy is not None
    call, kept = kept_of(call, upstream.residuals)
    terms = Terms("the backward of chunked_logprobs", needs, d_entropy=entropy)
    loop = HeadLoop(call, terms, kernel_cls=kernels_of(call), in_blocks=True)
    entropy = loop.chunks_of.d_entropy  # of the tokens of any rank
    g, lse = upstream_rows(loop.local_tokens, upstream, kept, call, options)
    g, lse = loop.chunks_of.exchange(g, lse)
    objective = Recompute(loop, lse[0], lambda g_KN: coefficients(g_KN, entropy=entropy))
    return recompute(call, loop, objective, g, needs)


RESULTS = f"({', '.join(['Tensor'] * 9)})"


@operator("class_logprobs_forward", HeadCall, Options, returns=RESULTS)
def class_op(call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """`classes_forward` as one operator, opaque to the compiler: outputs and residuals."""
    with without_autocast(call.hidden.device):
        return classes_forward(call, options)


@class_op.fake
def _(call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    assert call.ids is not None
    count, further = call.ids.shape
    like, number = call.hidden, further - max(0, options.kept)
    dtypes = [options.output_dtype] * 3 + [torch.bool]
    per_token = [like.new_empty(count, dtype=dtype) for dtype in dtypes]
    of_ids = like.new_empty(count, number, dtype=options.output_dtype)
    top_ids = like.new_empty(count, call.top_k, dtype=torch.int64)
    of_top = like.new_empty(count, call.top_k, dtype=options.output_dtype)
    rows = further + 2 * call.top_k + 6
    residuals = like.new_empty(rows, count, dtype=call.compute_dtype)
    return (*per_token, of_ids, torch.empty_like(per_token[0]), top_ids, of_top, residuals)


@operator(
    "class_logprobs_backward",
    *(Cotangents, HeadCall, Options),
    returns=f"({', '.join(['Tensor'] * len(DIFFERENTIATED))})",
)
def class_backward_op(upstream: Cotangents, call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    """`classes_backward` as one operator, opaque to the compiler."""
    with without_autocast(call.hidden.device):
        return as_inputs(call, classes_backward(upstream, call, options))


@class_backward_op.fake
def _(upstream: Cotangents, call: HeadCall, options: Options) -> tuple[Tensor, ...]:
    return tuple(fake_gradients(call, options.wanted))


def keep(ctx: Any, output: tuple[Tensor, ...], call: Any, options: Options) -> None:
    """What a backward needs: the call and its options, and residuals."""
    *_, correct, _, _, top_ids, _, residuals = output
    keep_call(ctx, residuals, (correct, top_ids, residuals), call, options)


def backward(ctx: Any, *gradients: Tensor | None) -> Named | None:
    residuals, (call, options) = kept_call(ctx)
    differentiated_once(function_of(call), "log_softmax")
    d_logprobs, d_entropy, d_lse, _, d_ids, d_tail, _, d_top, _ = gradients
    if all(g is None for g in (d_logprobs, d_entropy, d_lse, d_ids, d_tail, d_top)):
        return None
    d_entropy = d_entropy if options.entropy else None
    upstream = Cotangents(d_logprobs, d_entropy, d_lse, d_ids, d_tail, d_top, residuals)
    needs = class_op.needed(ctx, *DIFFERENTIATED)
    gradients = class_backward_op(upstream, call, options._replace(wanted=needs))
    return {name: g if need else None for name, g, need in zip(DIFFERENTIATED, gradients, needs)}


class_op.gradient(keep, backward)


def with_ids(args: Arguments | LogitsArguments, call: Any) -> tuple[Any, int]:
    """The call with the classes that it asks for, flat, and how many of them are of a kept set."""
    (count,), kept = call.labels.shape, -1
    classes = [torch.empty(count, 0, dtype=torch.int64, device=call.hidden.device)]
    if args.kept is not None:
        kept = args.kept.shape[-1]
        classes.append(torch.sort(args.kept.reshape(count, kept).long(), dim=1).values)
    if args.ids is not None:
        classes.append(args.ids.reshape(count, args.ids.shape[-1]).long())
    return call._replace(ids=torch.cat(classes, 1), top_k=args.top_k), kept


def shaped(results: Any, problem: Any, args: Any) -> LogprobOutput[Tensor]:
    """With the leading dimensions of a call."""
    *per_token, of_ids, _, top_ids, of_top, _ = results
    logprobs, entropy, lse, correct = (with_leading(x, problem.leading) for x in per_token)
    further: list[Any] = [None, None, None]
    if args.ids is not None:
        further[0] = of_ids.reshape(*problem.leading, of_ids.shape[1])
    if args.top_k:
        further[1:] = (x.reshape(*problem.leading, args.top_k) for x in (top_ids, of_top))
    return LogprobOutput(logprobs, entropy if args.entropy else None, lse, correct, *further)


class ClassResults(NamedTuple):
    """Flat results of a head's operator, each a field, as a wrapper puts its hooks on them; its
    problem and its call."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    correct: Tensor
    ids_logprobs: Tensor
    tail: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    residuals: Tensor
    problem: NLLProblem
    call: HeadCall
    args: Arguments


class FewClasses(NamedTuple):
    """A divergence that is made of the results: what all ranks must have the same of it."""

    kind: float = 0.0
    args: DivergenceArguments | None = None
    teacher: Tensor | None = None


def class_results(args: Arguments, divergence: FewClasses | None = None) -> ClassResults:
    """Of a call with `kept`, `ids` or `top_k`."""
    kind, caller, teacher = divergence or FewClasses()

    @with_head(recompute=True)
    def placed(args: Arguments, local: RowLayout | None = None) -> ClassResults:
        args, problem, call = bind("chunked_logprobs", args, local, caller)
        check_top_k(args.top_k, None if call.rows.group else problem.vocab_size)
        check_classes(*map(array_spec, (args.kept, args.ids, args.hidden)), source="hidden")
        call, kept_count = with_ids(args, call)
        options = Options(
            kept_count,
            args.entropy,
            call.compute_dtype if divergence else getattr(torch, problem.output_dtype),
            wanted(*call.leaves),
            tokens(args.token_weights),
            as_tensor(args.denominator, None, call.hidden, call.compute_dtype),
            kind,
            teacher,
        )
        results: list[Any] = [*class_op(call, options), problem, call, args]
        return ClassResults(*results)

    return placed(args)


def head_classes(args: Arguments) -> LogprobOutput[Tensor]:
    """`chunked_logprobs` with `kept`, `ids` or `top_k`."""
    *results, problem, _, args = class_results(args)
    return shaped(results, problem, args)


def logits_classes(args: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` with `kept`, `ids` or `top_k`."""
    args, problem, call = bind_logits("vocab_parallel_logprobs", args)
    check_top_k(args.top_k, None if call.rows.group else problem.columns)
    KEPT.require("smoothing", not args.label_smoothing, eps=args.label_smoothing)
    check_classes(*map(array_spec, (args.kept, args.ids, args.logits)), source="logits")
    call, kept = with_ids(args, call)
    dtype = getattr(torch, problem.output_dtype)
    options = Options(kept, args.entropy, dtype, wanted(*call.leaves))
    return shaped(class_op(call, options), problem, args)
