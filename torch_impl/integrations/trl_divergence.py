"""TRL's divergences by ours: `DistillationTrainer` from hidden states; GKD, GOLD and IW-OPD from
the logits that they make.

TRL's `beta` is the teacher's share of the mixture, as here, but 0 means forward KL there, and 1
reverse KL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from xentlib.teacher import TeacherHead, TeacherLogits
from xentlib.torch.api import chunked_divergence, vocab_parallel_divergence

__all__ = ["divergences"]

# A trainer whose module is not loaded cannot be running: looked up in what is, never imported.
FROM_HIDDEN = ("trl.trainer.distillation_trainer", None, "_chunked_divergence_loss")
FROM_LOGITS = [
    (f"trl.experimental.{module}", trainer, "generalized_jsd_loss")
    for module, trainer in (
        ("gkd.gkd_trainer", "GKDTrainer"),
        ("gold.gold_trainer", "GOLDTrainer"),
        ("iw_opd.iw_opd_trainer", "IWOPDTrainer"),
    )
]


@contextmanager
def divergences(calls: list[None], options: dict[str, Any]) -> Iterator[None]:
    """The losses of the trainers that are loaded are ours inside; each call of one is counted."""
    with ExitStack() as stack:
        for place in (FROM_HIDDEN, *FROM_LOGITS):
            module, trainer, name = place
            owner: Any = sys.modules.get(module)
            if owner is None:
                continue
            owner = owner if trainer is None else getattr(owner, trainer, None)
            theirs = getattr(owner, name, None)
            if theirs is None:
                raise ImportError(
                    f"`use` must find the divergence `{name}` of TRL 1.16 in {module}; got none. "
                    f"Run: pip install 'trl==1.16.0'"
                )
            ours: Any = counted(partial(from_hidden, **options), calls)
            if trainer is not None:
                ours = staticmethod(counted(from_logits(theirs), calls))
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, ours)
        yield


def counted(function: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    return call


def kind_of(beta: float) -> dict[str, Any]:
    if beta in (0, 1):
        return {"kind": "reverse_kl" if beta else "forward_kl"}
    return {"kind": "jsd", "beta": float(beta)}


def from_hidden(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, sum of the student's entropies and number of tokens, with the arguments of TRL's."""
    denominator: Any = num_items_in_batch
    if isinstance(denominator, Tensor):
        denominator = denominator.to(student_hidden_states.device).reshape(())
    teacher = TeacherHead(
        teacher_hidden_states,
        teacher_lm_head_weight,
        teacher_lm_head_bias,
        teacher_logit_scale,
        teacher_final_logit_softcapping,
    )
    out = chunked_divergence(
        student_hidden_states,
        student_lm_head_weight,
        teacher,
        bias=student_lm_head_bias,
        where=completion_mask != 0,
        logit_scale=student_logit_scale,
        softcap=student_final_logit_softcapping,
        temperature=temperature,
        denominator=denominator,
        outputs=("entropy",),
        **kind_of(beta),
        **options,
    )
    return out.loss, out.entropy.sum(), out.num_tokens


def from_logits(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A stand-in for `generalized_jsd_loss`, which calls it for what only it has: the terms of each
    class (`reduction` "none"), their mean over tokens and classes ("mean"), probabilities in place
    of logits, and the top k of both."""
    arguments = signature(theirs)

    def generalized_jsd_loss(*args: Any, **kwargs: Any) -> Tensor:
        bound = arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        labels, over = named["labels"], named["num_items_in_batch"]
        by_class = over is None and named["reduction"] not in ("batchmean", "sum")
        if by_class or named.get("logits_are_probs") or named.get("top_k"):
            return theirs(*args, **kwargs)
        where = None if labels is None else labels != -100
        each = vocab_parallel_divergence(
            named["student_logits"],
            TeacherLogits(named["teacher_logits"]),
            where=where,
            temperature=named["temperature"],
            **kind_of(named["beta"]),
        ).loss
        if over is None and named["reduction"] == "batchmean":
            over = max(len(each), 1) if where is None else where.sum().clamp_min(1)
        if over is None:
            return each.sum()
        return each.sum() / torch.as_tensor(over, device=each.device)

    return generalized_jsd_loss
