"""What a divergence is measured from: a teacher, as a head of its own or as logits."""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from xentlib.options import Tail, WeightLayout

__all__ = ["TeacherHead", "TeacherLogits", "TeacherTopK"]

A = TypeVar("A")  # a tensor or an array of the backend


class Unstated(Enum):
    """Of an option that nobody has passed, where None is an answer."""

    UNSTATED = "unstated"

    def __repr__(self) -> str:
        return self.value


UNSTATED = Unstated.UNSTATED


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
        logit_scale: number or 0-d array that multiplies its logits. Beside a student with one it
            must be passed, 1.0 for a teacher without; so must a softcap, which changes the loss as
            much: a teacher is often of the student's family.
        softcap: positive number or None, which is what an option that is not passed stands for.
        temperature: positive number, 0-d array or [...]; None for the student's.
        weight_layout: "VH" or "HV".
    """

    hidden: A
    weight: A | Any
    bias: A | None = None
    logit_scale: float | A | Any = UNSTATED
    softcap: float | Unstated | None = UNSTATED
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


class TeacherTopK(NamedTuple, Generic[A]):
    """A teacher's most probable classes and their log-probabilities, as inference servers return
    and data sets store them; no gradient is computed of it.

    Attributes:
        ids: [..., K] integers, the classes of each token, -1 where there are fewer; one that is
            there twice counts once. A valid token without any is refused where that can be read,
            and else, on a GPU and inside `jax.jit`, does not count as a token.
        logprobs: [..., K] floating, their log-probabilities over the whole vocabulary; anything
            where the id is -1. Of a token whose probabilities add up to more than 1.01 they are
            refused or, where they cannot be read, the divergence is NaN.
        tail: what becomes of the probability that they leave out. "class": all other classes are
            one class of K + 1, for the teacher and the student; the divergence is a lower bound of
            the whole one. What rounding leaves of the teacher's is taken as 2^-24 at least (2^-53
            in float64). "renormalize": both are renormalised over the K classes, and nothing
            moves the student's probability to or from others. "drop": terms of the K classes alone,
            sum p_T log(p_T / p_S) or sum p_S log(p_S / p_T) of probabilities over the whole
            vocabulary, as verl has it: that is no divergence, may be negative, and has a gradient
            where both are equal.
        temperature: number, 0-d array or [...], at which the teacher computed them; None for 1. The
            call's must be the same.
    """

    ids: A
    logprobs: A
    tail: Tail = "class"
    temperature: float | A | Any = None
