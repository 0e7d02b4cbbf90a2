"""Kept sets and several classes of each token, in PyTorch: what `xentlib.math.classes` makes of the
statistics of tokens, and of upstream gradients.

Shapes: N tokens, K further classes, M candidates for the `top_k` most probable ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.classes import KEPT
from xentlib.math.classes import Classes, Residuals, Upstream, Wanted
from xentlib.math.softmax import Coefficients, NonTargetStats
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.device import host_readable
from xentlib.torch.core.tokens import Selected

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
    *of_tokens, correct, ids_logprobs, tail = values
    outputs = (local.clean(x).to(options.output_dtype, copy=True) for x in of_tokens)
    tail = local.clean(tail).to(options.output_dtype, copy=True)
    of_ids, of_top = (
        local.clean(x.T).T.to(options.output_dtype).contiguous()
        for x in (ids_logprobs, top.logprobs)
    )
    numbers = torch.stack([x.to(z.dtype) for x in kept[1:]])
    residuals = torch.cat((kept.log_p, top.ids.T.to(z.dtype), numbers))
    top_ids = top.ids.clone(memory_format=torch.contiguous_format)
    return (*outputs, correct & ~local.bad, of_ids, tail, top_ids, of_top, residuals)


def kept_of(call: Any, residuals: Tensor) -> tuple[Any, Residuals]:
    """The call of a backward, which has the classes of the forward's `top_k` among its `ids`, and
    what that kept."""
    known, top_k = call.ids.shape[1], call.top_k
    log_p, top, of_tokens = residuals.tensor_split([1 + known + top_k, 1 + known + 2 * top_k])
    if top_k:  # a copy of many ids is as large as what a backward makes of them
        call = call._replace(ids=torch.cat((call.ids, top.T.long()), 1), top_k=0)
    lse, entropy, index, rest_of_top, tail = of_tokens
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

    of_ids = like.new_zeros(count, call.ids.shape[1] - max(0, options.kept))
    d_ids, d_top = upstream.d_ids_logprobs, upstream.d_top_logprobs
    if d_ids is not None:
        of_ids[:, : d_ids.shape[1]] = local.clean(d_ids.to(like.dtype).T).T
    if d_top is not None:
        of_ids[:, of_ids.shape[1] - d_top.shape[1] :] = local.clean(d_top.to(like.dtype).T).T
    entropies = None if upstream.d_entropy is None else clean(upstream.d_entropy)
    tails = None if upstream.d_tail is None else clean(upstream.d_tail)
    g = Upstream(clean(upstream.d_logprobs), entropies, clean(upstream.d_lse), of_ids, tails)
    want = want_of(local, call, options)
    dz, lse = CLASSES.gradients(g, kept, want), CLASSES.lse_of_rest(kept, want)
    beta = zeros if dz.beta is None else dz.beta
    return torch.cat((dz.z, dz.alpha[None], beta[None])), lse[None]


def coefficients(rows: Tensor, *, entropy: bool) -> Coefficients:
    return Coefficients(rows[-2], rows[-1] if entropy else None, None, rows[0], rows[1:-2].T)
