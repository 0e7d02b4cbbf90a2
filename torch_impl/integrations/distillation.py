"""Distillation from a teacher's most probable classes under the signatures of verl and NeMo-RL.

Each function stands in for theirs of the same name; results are float32, whatever the dtype of the
logits, which are not written to.

Shapes: B rows, L tokens of a row, K classes of the teacher, C columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from xentlib.options import Divergence
from xentlib.teacher import TeacherLogits
from xentlib.torch.api import vocab_parallel_divergence, vocab_parallel_logprobs
from xentlib.torch.integrations.rl import check

__all__ = [
    "compute_forward_kl_topk",
    "get_distillation_topk_logprobs_from_logits",
    "topk_divergence",
]


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str = "thd",
) -> dict[str, Tensor]:
    """verl's of FSDP workers (`verl.trainer.distillation.fsdp.losses`), of logits [1, N, V] and
    nested [B, L, K]: sum over the K classes of p_T (log p_T - log p_S), which is no divergence.

    `log_prob_min_clamp` of the config clamps both, as there. Ulysses, which splits the sequence, is
    refused. verl rounds the student's log-probabilities to the dtype of its logits.
    """
    pair = teacher_topk_log_probs, teacher_topk_ids
    logprobs, ids = (x.values()[None] if x.is_nested else x for x in pair)
    check("tokens of `student_logits`", tuple(student_logits.shape[:-1]), tuple(ids.shape[:-1]))
    student = vocab_parallel_logprobs(student_logits, ids[..., 0], ids=ids).ids_logprobs
    mass = student.exp().sum(-1)
    teacher, teacher_mass = logprobs.float(), logprobs.float().exp().sum(-1)
    clamp = config.distillation_loss.log_prob_min_clamp
    if clamp is not None:
        student, teacher = student.clamp_min(clamp), teacher.clamp_min(clamp)
    terms = teacher.exp() * (teacher - student)
    student_ids = student_logits.detach().topk(ids.shape[-1]).indices
    shared = (ids[..., None] == student_ids[..., None, :]).any(-1)
    count = shared.sum(-1)
    return {
        "distillation_losses": terms.sum(-1),
        "student_mass": mass,
        "teacher_mass": teacher_mass,
        "overlap_count": count,
        "overlap_token_advantage": -(terms * shared).sum(-1) / count.clamp_min(1),
    }


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
    cp_sharder: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """NeMo-RL's (`nemo_rl.distributed.model_utils`), of logits [B, L, C]: log-probabilities
    [B, L - 1, K] of student and teacher, and sum p log p of the student [B, L - 1] or None.

    The teacher's are renormalised over the K classes, the student's too unless `zero_outside_topk`.
    Context parallelism is refused.
    """
    group = context_parallel_group
    check(
        "the size of `context_parallel_group`",
        1 if group is None else dist.get_world_size(group),
        1,
    )
    check("`cp_sharder`", cp_sharder, None)
    ids = teacher_topk_indices.to(student_logits.device)
    how: dict[str, Any] = {"ids": ids, "vocab_parallel": vocab_parallel_group}
    out = vocab_parallel_logprobs(student_logits, ids[..., 0], entropy=calculate_entropy, **how)
    student = out.ids_logprobs if zero_outside_topk else out.ids_logprobs.log_softmax(-1)
    teacher = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)
    entropy = -out.entropy[:, :-1] if calculate_entropy else None
    return student[:, :-1], teacher[:, :-1], entropy


def topk_divergence(
    student_topk_logprobs: Tensor,
    teacher_topk_logprobs: Tensor,
    *,
    kl_type: str,
    mixed_kl_weight: float = 0.5,
    zero_outside_topk: bool = False,
) -> Tensor:
    """What NeMo-RL's `DistillationLossFn` computes of a token, [B, L - 1], from what
    `get_distillation_topk_logprobs_from_logits` has returned, [B, L - 1, K] each; never below 0.

    The reverse KL of a student over the whole vocabulary (`zero_outside_topk`), which takes log p_T
    = -100 outside of the K classes, is refused.
    """
    mixed = (mixed_kl_weight, 1 - mixed_kl_weight)
    shares = {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "mixed": mixed}
    if kl_type not in shares:
        raise ValueError(f"`kl_type` must be one of forward, reverse, mixed; got {kl_type!r}")
    forward, reverse = shares[kl_type]
    check("`zero_outside_topk` of a reverse KL", zero_outside_topk and reverse > 0, False)
    teacher = TeacherLogits(teacher_topk_logprobs)
    total = student_topk_logprobs.new_zeros(student_topk_logprobs.shape[:-1])
    shared: tuple[tuple[Divergence, float], ...]
    shared = ("forward_kl", forward), ("reverse_kl", reverse)
    for kind, share in shared:
        if share:
            each = vocab_parallel_divergence(student_topk_logprobs, teacher, kind=kind)
            total = total + share * each.loss
    if zero_outside_topk:  # and of the K classes to all: the teacher has no probability there
        total = total - student_topk_logprobs.logsumexp(-1).clamp_max(0)
    return total
