"""The forms that each defect comes in: what a `Hypothesis` has in place of what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xentlib.tools.audit.hypotheses import Head, Labelled, Reduced, Upstream
from xentlib.tools.audit.problem import IGNORE, Array, Problem, next_labels

Forms = Callable[[Problem], list[Any]]


# --- labels -------------------------------------------------------------------------------------


def unshifted(p: Problem) -> list[Any]:
    return [Labelled(p.labels)]


def twice(p: Problem) -> list[Any]:
    """The given targets shifted again, across documents or not; two tokens ahead."""
    shifted = [next_labels(p.targets, None), next_labels(p.targets, p.segments)]
    if p.kind != "logprobs":
        shifted.append(next_labels(p.labels, p.segments, by=2))
    return [Labelled(x) for x in shifted]


def backwards(p: Problem) -> list[Any]:
    """Position t is given token t - 1."""
    back = np.full_like(p.labels, IGNORE)
    back[..., 1:] = p.labels[..., :-1]
    return [Labelled(back)]


def across(p: Problem) -> list[Any]:
    return [Labelled(next_labels(p.labels, None))] if p.options.documents else []


def masked(p: Problem) -> list[Any]:
    """The mask of the labels is not used; padding counts too, or does not."""
    ids = p.ids
    within = np.where(p.attention, ids, IGNORE)
    return [Labelled(next_labels(x, s)) for x in (within, ids) for s in (p.segments, None)]


def last_token(p: Problem) -> list[Any]:
    """Of each row: the last target, or the one of the last position that can have one; of each
    document: its last target."""
    valid = p.targets != IGNORE
    rest = np.cumsum(valid[..., ::-1], axis=-1)[..., ::-1]
    place = np.ones(valid.shape, np.bool_)
    place[..., -2:] = False
    last = next_labels(p.targets, p.segments) != IGNORE
    masks = [rest > 1, place, last]
    return [Labelled(None, keep, counted) for keep in masks for counted in (True, False)]


def last_chunk(p: Problem) -> list[Any]:
    """The end of each micro-batch, laid flat: k positions, or what is over of its valid tokens in
    chunks of c; of one rank's rows, or of all ranks' rows one after the other. Some of each is
    left, or it is another defect."""
    ranks, m, b, n = p.targets.shape
    valid = p.targets != IGNORE
    masks: dict[bytes, Array] = {}

    def add(keep: Array) -> None:
        rest = keep & valid
        if not (keep | ~valid).all() and rest.any(axis=(2, 3)).all():
            masks.setdefault(rest.tobytes(), keep)

    for joined in (False, True) if ranks > 1 else (False,):
        tokens = (ranks if joined else 1) * b * n
        shape = (1 if joined else ranks, m, tokens)

        def flat(x: Array, joined: bool = joined, shape: tuple[int, ...] = shape) -> Array:
            return (x.transpose(1, 0, 2, 3)[None] if joined else x).reshape(shape)

        def back(x: Array, joined: bool = joined) -> Array:
            if joined:
                return x.reshape(m, ranks, b, n).transpose(1, 0, 2, 3)
            return x.reshape(ranks, m, b, n)

        order = np.cumsum(flat(valid), axis=-1)
        counts = order[..., -1:]
        for k in range(1, tokens):
            add(back(np.broadcast_to(np.arange(tokens) < tokens - k, shape)))
            add(back(order <= counts // k * k))
    return [Labelled(None, keep, counted) for keep in masks.values() for counted in (True, False)]


def one_micro_batch(p: Problem) -> list[Any]:
    variants = []
    for m in range(p.micro_batches) if p.micro_batches > 1 else ():
        keep = np.zeros(p.targets.shape, np.bool_)
        keep[:, m] = True
        variants += [Labelled(None, keep, counted) for counted in (True, False)]
    return variants


# --- heads --------------------------------------------------------------------------------------


def without(name: str, off: Any) -> Forms:
    def forms(p: Problem) -> list[Any]:
        there = getattr(p.options, name) != off
        return [Head(changes=((name, off),))] if there else []

    return forms


def without_bias(p: Problem) -> list[Any]:
    return [Head(bias=False)] if p.bias is not None else []


def rounded(*stages: tuple[str, ...]) -> Forms:
    """In either dtype, as far as each of `stages` says."""
    dtypes = ("bfloat16", "float16")
    return lambda p: [Head(dtype=dtype, rounded=stage) for dtype in dtypes for stage in stages]


LOGITS_ROUNDED = rounded(
    ("logits",),
    ("logits", "gradient"),
    ("operands", "logits", "gradient"),
    ("operands", "logits", "gradient", "result"),
)
OPERANDS_ROUNDED = rounded(("operands",), ("operands", "gradient"))
GRADIENT_ROUNDED = rounded(("gradient",), ("result",), ("gradient", "result"))


# --- sums ---------------------------------------------------------------------------------------


def several(*values: Any) -> Forms:
    return lambda p: list(values) if p.ranks > 1 else []


def own_gradient(p: Problem) -> list[Any]:
    if p.ranks == 1:
        return []
    roots = [Reduced(own, root=k) for own in ("part", "times", "mean") for k in range(p.ranks)]
    return [*(Reduced(own, rows=True) for own in ("part", "times", "mean")), *roots]


def number(find: Callable[[Problem], float]) -> Forms:
    def forms(p: Problem) -> list[Any]:
        value = find(p)
        return [value] if value not in (1.0, 0.0) else []

    return forms


def before_shift(p: Problem) -> float:
    return p.count / float((p.labels != IGNORE).sum())


def several_batches(value: Any) -> Forms:
    return lambda p: [value] if p.micro_batches > 1 else []


def of_entropies(factor: float) -> Forms:
    return lambda p: [Upstream(entropy=factor)] if p.options.entropy else []
