"""`chunked_nll` and `vocab_parallel_logprobs` of class probabilities, in PyTorch: the steps of
`xentlib.soft_labels` in the operators of divergences.

Shapes: N tokens, V vocabulary, K classes of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.arguments import Arguments
from xentlib.checks.soft_labels import SOFT, check_none, check_read, check_soft, check_soft_options
from xentlib.checks.validators import plain
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.soft_labels import SOFT_LABELS, SoftLabels
from xentlib.torch.array_spec import array_spec, as_tensor, only_tensors, with_leading
from xentlib.torch.binding import bind, tokens
from xentlib.torch.core.device import host_readable
from xentlib.torch.losses.divergence import RESULTS, divergence_op
from xentlib.torch.losses.paired import Loss
from xentlib.torch.losses.teacher import TeacherCall, labels_for
from xentlib.torch.micro_batch import label_loss
from xentlib.torch.operators import (
    HeadCall,
    LogitsCall,
    RowLayout,
    not_differentiable,
    wanted,
    without_gradient,
)
from xentlib.torch.placement.head import with_head
from xentlib.torch.placement.logits import local_logits


def soft_nll(given: Arguments) -> NLLOutput[Tensor]:
    """`chunked_nll` of arguments whose labels are class probabilities."""
    soft: Any = given.labels
    check_soft_options(given.outputs, given.gather)
    only_tensors(hidden=given.hidden)

    @with_head(recompute=False)
    def placed(call: Arguments, local: RowLayout | None = None) -> NLLOutput[Tensor]:
        return placed_nll(call, soft, local)

    return placed(given._replace(labels=labels_for(given.hidden, None, given.where)))


def placed_nll(
    given: Arguments, soft: Tensor | SoftLabels[Tensor], local: RowLayout | None
) -> NLLOutput[Tensor]:
    """With the head as this rank multiplies with it."""
    given, problem, call = bind("chunked_nll", given, local)
    columns = None if call.rows.group else problem.vocab_size
    call, labels = labels_call(call, soft, given, "hidden", columns)
    divisor = as_tensor(given.denominator, None, call.hidden, call.compute_dtype)
    loss = Loss(
        SOFT_LABELS,
        False,
        tokens(given.token_weights),
        divisor,
        given.reduction == "mean",
        "entropy" in given.outputs,
        False,
        0 if labels.few else labels.classes - problem.vocab_size,
        False,
        getattr(torch, problem.output_dtype),
        given.class_weights,
        wanted(*call.leaves),
    )
    results = divergence_op(call, labels, loss)
    total, num_tokens, weight_sum, z_term, mass, *rest = results[:RESULTS]
    check_soft_values(mass, call)
    if call.scalars.z_loss:
        z_term = without_gradient("z_loss", z_term, call.leaves)
    per_token: dict[str, Any] = dict.fromkeys(OUTPUTS)
    for name, x in zip(OUTPUTS, rest):
        if name in given.outputs:
            value = with_leading(x, problem.leading)
            per_token[name] = without_gradient(name, value, call.leaves)
    if divisor is None and loss.mean:
        divisor = weight_sum
    label_loss(total, num_tokens, weight_sum, divisor)
    return NLLOutput(total, num_tokens, weight_sum, z_term, **per_token, denominator=divisor)


def labels_call(
    call: Any, soft: Tensor | SoftLabels[Tensor], given: Any, name: str, columns: int | None
) -> tuple[Any, TeacherCall]:
    """What an operator takes of class probabilities: all classes', or those of its `ids`."""
    source = array_spec(getattr(given, name))
    check_read(given)
    if isinstance(soft, SoftLabels):
        ids, probs = map(plain, soft)
        only_tensors(ids=ids, labels=probs)
        not_differentiable(probs=probs)
        of_few = SoftLabels(array_spec(ids), array_spec(probs))
        check_soft(of_few, source, name, columns, call.ignore_index)
        ids = ids.reshape(-1, ids.shape[-1])
        probs = torch.where(ids >= 0, probs.reshape(ids.shape), 0.0)
        # A token without a class is none. Labels go where the ids are, which nobody waits for.
        where = None if call.where is None else call.where.to(ids.device)
        labels = call.labels.to(ids.device)
        labels = torch.where((ids >= 0).any(1), labels, call.ignore_index)
        return call._replace(labels=labels, where=where, ids=ids), TeacherCall(probs, few=True)
    not_differentiable(labels=soft)
    if call.rows.route:
        SOFT.refuse("stay", route=call.rows.route)
    probs, *_ = local_logits(plain(soft), given.vocab_parallel, None)
    check_soft(array_spec(probs), source, name, columns, call.ignore_index)
    return call, TeacherCall(probs.reshape(call.labels.shape[0], probs.shape[-1]))


def check_soft_values(mass: Tensor, call: HeadCall | LogitsCall) -> None:
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
