"""`chunked_nll` and `vocab_parallel_logprobs` of class probabilities, in PyTorch: the steps of
`xentlib.math.soft_labels` in the operators of divergences and of log-probabilities.

Shapes: N tokens, V vocabulary, K classes of each, B rows of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.soft_labels import (
    SOFT,
    check_columns,
    check_none,
    check_read,
    check_soft,
    check_soft_options,
)
from xentlib.checks.validators import plain
from xentlib.labels import SoftLabels
from xentlib.logprobs import LogprobOutput
from xentlib.math.soft_labels import SOFT_LABELS, Largest
from xentlib.math.softmax import FLOOR, WantedStats, is_zero
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.torch.array_spec import array_spec, as_tensor, only_tensors, with_leading
from xentlib.torch.binding import bind, bind_logits, tokens
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.device import host_readable
from xentlib.torch.core.kernels import eager_kernels
from xentlib.torch.core.loop import HeadLoop, Out
from xentlib.torch.core.stats import columns_of, over_shards
from xentlib.torch.losses.divergence import RESULTS, divergence_op
from xentlib.torch.losses.logprobs import LOGITS_FUNCTION, Values, logprobs_op
from xentlib.torch.losses.paired import Loss, PairedRecompute
from xentlib.torch.losses.pairs import Unit, restore
from xentlib.torch.losses.teacher import (
    KINDS,
    NO_SOFT_LABELS,
    TeacherCall,
    labels_for,
    probabilities,
    soft_logits,
)
from xentlib.torch.micro_batch import label_loss
from xentlib.torch.operators import (
    HeadCall,
    RowLayout,
    not_differentiable,
    wanted,
    without_gradient,
)
from xentlib.torch.placement.head import with_head
from xentlib.torch.placement.logits import local_logits


def soft_nll(args: Arguments) -> NLLOutput[Tensor]:
    """`chunked_nll` of arguments whose labels are class probabilities."""
    soft: Any = args.labels
    check_soft_options(args)
    only_tensors(hidden=args.hidden)

    @with_head(recompute=False)
    def placed(call: Arguments, local: RowLayout | None = None) -> NLLOutput[Tensor]:
        return placed_nll(call, soft, local)

    return placed(args._replace(labels=labels_for(args.hidden, None, args.where)))


def placed_nll(
    args: Arguments, soft: Tensor | SoftLabels[Tensor], local: RowLayout | None
) -> NLLOutput[Tensor]:
    """With the head as this rank multiplies with it."""
    args, problem, call = bind("chunked_nll", args, local)
    columns = None if call.rows.group else problem.vocab_size
    call, labels = labels_call(call, soft, args, "hidden", columns)
    divisor = as_tensor(args.denominator, None, call.hidden, call.compute_dtype)
    loss = Loss(
        SOFT_LABELS,
        False,
        tokens(args.token_weights),
        divisor,
        args.reduction == "mean",
        "entropy" in args.outputs,
        False,
        0 if labels.sparse else labels.classes - problem.vocab_size,
        False,
        getattr(torch, problem.output_dtype),
        args.class_weights,
        wanted(*call.leaves),
    )
    results = divergence_op(call, labels, loss)
    total, num_tokens, weight_sum, z_term, mass, *rest = results[:RESULTS]
    check_soft_values(mass, call)
    if call.scalars.z_loss:
        z_term = without_gradient("z_loss", z_term, call.leaves)
    per_token: dict[str, Any] = dict.fromkeys(OUTPUTS)
    for name, x in zip(OUTPUTS, rest):
        if name in args.outputs:
            value = with_leading(x, problem.leading)
            per_token[name] = without_gradient(name, value, call.leaves)
    if divisor is None and loss.mean:
        divisor = weight_sum
    label_loss(total, num_tokens, weight_sum, divisor)
    return NLLOutput(total, num_tokens, weight_sum, z_term, **per_token, denominator=divisor)


def labels_call(
    call: Any, soft: Tensor | SoftLabels[Tensor], args: Any, name: str, columns: int | None
) -> tuple[Any, TeacherCall]:
    """What an operator takes of class probabilities: all classes', or those of its `ids`."""
    source = array_spec(getattr(args, name))
    check_read(args)
    if isinstance(soft, SoftLabels):
        ids, probs = map(plain, soft)
        only_tensors(ids=ids, labels=probs)
        not_differentiable(probs=probs)
        soft_spec = SoftLabels(array_spec(ids), array_spec(probs))
        check_soft(soft_spec, source, name, columns, call.ignore_index)
        ids = ids.reshape(-1, ids.shape[-1])
        probs = torch.where(ids >= 0, probs.reshape(ids.shape), 0.0)
        # A token without a class is none. Labels go where the ids are, which nobody waits for.
        where = None if call.where is None else call.where.to(ids.device)
        labels = call.labels.to(ids.device)
        labels = torch.where((ids >= 0).any(1), labels, call.ignore_index)
        return call._replace(labels=labels, where=where, ids=ids), probabilities(probs, sparse=True)
    not_differentiable(labels=soft)
    if call.rows.route:
        SOFT.refuse("stay", route=call.rows.route)
    probs, *_ = local_logits(plain(soft), args.vocab_parallel, None)
    check_soft(array_spec(probs), source, name, columns, call.ignore_index)
    return call, probabilities(probs.reshape(call.labels.shape[0], probs.shape[-1]))


def check_soft_values(mass: Tensor, call: HeadCall) -> None:
    """Refuse a valid token without a class, and a negative probability of one, which all ranks of a
    vocabulary have seen, where they can be read; where tokens are a rank's own it would raise
    alone: the first do not count, and the loss of the second is NaN."""
    if call.rows.route or not host_readable(mass) or torch.compiler.is_compiling():
        return
    if call.ids is not None and host_readable(call.ids):
        none = (call.ids < 0).all(1)
        check_none(int((none if call.where is None else none & call.where).sum()))
    if mass.isnan().any():
        SOFT.refuse("negative")


def soft_forward(call: HeadCall, labels: TeacherCall, values: Any) -> tuple[Tensor, ...]:
    """Of precomputed logits: sum_v a_v (z_v - lse), entropy, lse and the sum of each token's
    probabilities, [N] each; `Largest`, and the sum of a, [5, N]."""
    kernel_cls = eager_kernels(call.hidden.device, NO_SOFT_LABELS)
    terms = Terms(LOGITS_FUNCTION, outputs=float(values.entropy))
    loop = HeadLoop(call, terms, kernel_cls=kernel_cls)
    vocab, tokens = loop.check_consistent(), loop.local_tokens
    logits: Any = next(iter(loop.blocks()))
    if vocab is not None:
        more = 0 if labels.sparse else labels.classes - call.columns
        vocab.consistency.exact("kind", float(KINDS.index(SOFT_LABELS)))
        vocab.consistency.exact("the classes of the teacher", float(more))
        labels.check_consistent(loop, SOFT_LABELS)
    pair: Any = soft_logits(loop, logits, labels, entropy=values.entropy)
    logits.tokens = tokens._replace(more=None)  # classes that labels have are among the rest
    columns = columns_of(logits, WantedStats(values.entropy))
    stats: Largest = pair.kind.stats(*over_shards(logits, columns))
    logits.tokens = tokens
    if not labels.sparse:
        check_columns(call.columns, labels.classes)
    kernels, parts = pair.kernels(), []
    for rows, label_rows in pair.teacher.pairs(logits.blocks(), None):
        restore(rows, kernels[0].prepare(rows, derivative=False))
        a_BV = pair.put_p(rows, label_rows, Largest(*(x[rows.token_index] for x in stats)))
        parts.append(pair.sums_of(rows, label_rows, a_BV, kernels[0]))
    total, nll = torch.zeros_like(stats.lse), torch.zeros_like(stats.lse)
    if parts:
        token_index = tokens.token_index(0, tokens.computed)
        total[token_index], nll[token_index], _ = pair.totals(parts)
    outputs = (tokens.clean(x).to(values.output_dtype) for x in (-nll, stats.entropy, stats.lse))
    return *outputs, tokens.clean(total), torch.stack((*stats, total))


class SoftRecompute(PairedRecompute):
    """d out / dz_v = a_v - p_v sum(a), and those of entropy and lse."""

    pair: Any

    def __init__(self, loop: HeadLoop, labels: TeacherCall, upstream: Any) -> None:
        self.upstream, self.entropy = upstream, upstream.d_entropy is not None
        super().__init__(lambda x: soft_logits(loop, x, labels, entropy=self.entropy))

    def step(self, unit: Unit, kernels: Any, out: Out) -> None:
        ((rows, labels, _),) = unit.parts()
        token_index, columns = rows.token_index, self.pair.columns
        *stats, total = self.upstream.residuals[:, token_index]
        largest, (g_logprob, g_entropy, g_lse) = Largest(*stats), out.factor[:, token_index, None]
        restore(rows, kernels[0].prepare(rows, derivative=True))
        a_BV = self.pair.put_p(rows, labels, largest)
        dz_BV, above = rows.z_BV[:, columns], None
        if self.entropy:
            above = dz_BV.clamp(min=FLOOR).add_(largest.entropy[:, None])
        labels.z_BV = p_BV = kernels[0].exp(dz_BV)
        self.pair.put_slope(rows, labels, a_BV, total[:, None], largest)
        dz_BV.mul_(g_logprob)
        if self.upstream.d_lse is not None:
            dz_BV.addcmul_(p_BV, g_lse)
        if above is not None:
            dz_BV.addcmul_(above.mul_(p_BV), g_entropy, value=-1.0)
        if rows.temperature_B is not None:
            dz_BV.div_(rows.temperature_B[:, None])
        out.sums.put(rows, kernels[0])


def logits_soft(args: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` of arguments whose labels are class probabilities."""
    soft: Any = args.labels
    SOFT.require("kept", args.kept is None and args.ids is None and is_zero(args.top_k))
    only_tensors(logits=args.logits)
    labels = labels_for(args.logits, None, args.where)
    args, problem, call = bind_logits(LOGITS_FUNCTION, args._replace(labels=labels))
    columns = None if call.rows.group else problem.columns
    call, of_labels = labels_call(call, soft, args, "logits", columns)
    values = Values(
        args.entropy,
        getattr(torch, problem.output_dtype),
        wanted(*call.leaves),
        of_labels.head.hidden,
        of_labels.sparse,
    )
    *outputs, mass, _ = logprobs_op(call, values)
    check_soft_values(mass, call)
    logprobs, entropy, lse = (with_leading(x, problem.leading) for x in outputs)
    none: Any = None
    return LogprobOutput(logprobs, entropy if args.entropy else None, lse, none)
