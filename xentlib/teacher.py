"""What a divergence is measured from: a teacher, as a head of its own or as logits."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from xentlib.options import WeightLayout

__all__ = ["TeacherHead", "TeacherLogits"]

A = TypeVar("A")  # a tensor or an array of the backend


class TeacherHead(NamedTuple, Generic[A]):
    """A teacher's hidden states and its head; its logits are made chunk by chunk, like the
    student's, and never stored. No gradient is computed of it.

    Attributes:
        hidden: [..., Ht] the teacher's hidden states, for the same tokens; Ht is its own width.
            Compute them without gradients (`torch.no_grad()`, `jax.lax.stop_gradient`).
        weight: [V, Ht] or [Ht, V], or whatever `weight` of the student may be; over vocabulary
            shards this rank's rows, of the same classes as the student's. Parameters that require
            grad get none.
        bias: [V] or None.
        logit_scale: number or 0-d array that multiplies its logits.
        softcap: positive number or None.
        temperature: positive number, 0-d array or [...]; None for the student's.
        weight_layout: "VH" or "HV".
    """

    hidden: A
    weight: A | Any
    bias: A | None = None
    logit_scale: float | A | Any = 1.0
    softcap: float | None = None
    temperature: float | A | Any = None
    weight_layout: WeightLayout = "VH"


class TeacherLogits(NamedTuple, Generic[A]):
    """A teacher's precomputed logits; no gradient is computed of them.

    Attributes:
        logits: [..., V] after its own scale and softcap, any floating dtype; over vocabulary shards
            this rank's columns. A class at -inf has the probability 0.
        temperature: positive number, 0-d array or [...]; None for the student's.
    """

    logits: A
    temperature: float | A | Any = None
