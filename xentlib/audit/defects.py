"""The defects that are looked for, as data: name, what is read instead, one sentence, the cure.

A defect replaces one choice of a `Reading`; it may come in several forms, such as the length of the
chunk that is dropped. What it needs of a problem to be there at all is data too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xentlib.audit.problem import IGNORE, Array, Problem, next_labels
from xentlib.audit.reading import Head, Labelled, Reading, Reduced, Upstream

__all__ = ["DEFECTS", "Defect", "forms", "scales"]

ANY = ("step", "loss", "logprobs")
LOSSES = ("step", "loss")

ACCUMULATION = {"torch": "accumulation.md", "jax": "accumulation-jax.md"}
DIVIDED = {"torch": "accumulation.md#what-each-wrapper-divides-by", "jax": "jax-trainers.md#meshes"}
COUNT = "labels-and-losses.md#what-the-loss-is-divided-by"
LABELS = "labels-and-losses.md#labels"
OPTIONS = "labels-and-losses.md#other-options"
LOGPROBS = "logprobs.md"


class Defect(NamedTuple):
    """One entry of `DEFECTS`.

    Attributes:
        name: as a report has it.
        axis: the field of `Reading` that it replaces.
        sentence: what was done instead of what is right.
        cure: page of docs/, by backend where they differ.
        forms: values of that field, for a problem; none where the problem cannot have the defect.
        kinds: of which steps.
        needs: what a problem must have, in words, where `forms` may find none.
    """

    name: str
    axis: str
    sentence: str
    cure: str | dict[str, str]
    forms: Callable[[Problem], list[Any]]
    kinds: tuple[str, ...] = LOSSES
    needs: str = ""

    def page(self, backend: str) -> str:
        return self.cure if isinstance(self.cure, str) else self.cure[backend]


# --- labels -------------------------------------------------------------------------------------


def _unshifted(p: Problem) -> list[Any]:
    return [Labelled(p.labels)]


def _twice(p: Problem) -> list[Any]:
    """The given targets shifted again, across documents or not; two tokens ahead."""
    found = [next_labels(p.targets, None), next_labels(p.targets, p.segments)]
    if p.kind != "logprobs":
        found.append(next_labels(p.labels, p.segments, by=2))
    return [Labelled(x) for x in found]


def _backwards(p: Problem) -> list[Any]:
    """Position t is given token t - 1."""
    back = np.full_like(p.labels, IGNORE)
    back[..., 1:] = p.labels[..., :-1]
    return [Labelled(back)]


def _across(p: Problem) -> list[Any]:
    return [Labelled(next_labels(p.labels, None))] if p.options.documents else []


def _masked(p: Problem) -> list[Any]:
    """The mask of the labels is not used; padding counts too, or does not."""
    ids = p.ids
    within = np.where(p.attention, ids, IGNORE)
    return [Labelled(next_labels(x, s)) for x in (within, ids) for s in (p.segments, None)]


def _last_token(p: Problem) -> list[Any]:
    """Of each row: the last target, or the one of the last position that can have one; of each
    document: its last target."""
    valid = p.targets != IGNORE
    rest = np.cumsum(valid[..., ::-1], axis=-1)[..., ::-1]
    place = np.ones(valid.shape, np.bool_)
    place[..., -2:] = False
    last = np.ones(valid.shape, np.bool_)
    following = next_labels(p.targets, p.segments)
    last[...] = following != IGNORE
    masks = [rest > 1, place, last]
    return [Labelled(None, keep, counted) for keep in masks for counted in (True, False)]


def _last_chunk(p: Problem) -> list[Any]:
    """The end of each micro-batch, laid flat: k positions, or what is over of its valid tokens in
    chunks of c; of one rank's rows, or of all ranks' rows one after the other. Some of each is
    left, or it is another defect."""
    ranks, m, b, n = p.targets.shape
    valid = p.targets != IGNORE
    found: dict[bytes, Array] = {}

    def add(keep: Array) -> None:
        rest = keep & valid
        if not (keep | ~valid).all() and rest.any(axis=(2, 3)).all():
            found.setdefault(rest.tobytes(), keep)

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
    return [Labelled(None, keep, counted) for keep in found.values() for counted in (True, False)]


def _one_micro_batch(p: Problem) -> list[Any]:
    found = []
    for m in range(p.micro_batches) if p.micro_batches > 1 else ():
        keep = np.zeros(p.targets.shape, np.bool_)
        keep[:, m] = True
        found += [Labelled(None, keep, counted) for counted in (True, False)]
    return found


# --- heads --------------------------------------------------------------------------------------


def _without(name: str, off: Any) -> Callable[[Problem], list[Any]]:
    def forms(p: Problem) -> list[Any]:
        there = getattr(p.options, name) != off
        return [Head(changes=((name, off),))] if there else []

    return forms


def _without_bias(p: Problem) -> list[Any]:
    return [Head(bias=False)] if p.bias is not None else []


def _rounded(*stages: tuple[str, ...]) -> Callable[[Problem], list[Any]]:
    """In either dtype, as far as each of `stages` says."""
    dtypes = ("bfloat16", "float16")
    return lambda p: [Head(dtype=dtype, rounded=stage) for dtype in dtypes for stage in stages]


LOGITS_ROUNDED = _rounded(
    ("logits",),
    ("logits", "gradient"),
    ("operands", "logits", "gradient"),
    ("operands", "logits", "gradient", "result"),
)
OPERANDS_ROUNDED = _rounded(("operands",), ("operands", "gradient"))
GRADIENT_ROUNDED = _rounded(("gradient",), ("result",), ("gradient", "result"))


# --- sums ---------------------------------------------------------------------------------------


def _several(*values: Any) -> Callable[[Problem], list[Any]]:
    return lambda p: list(values) if p.ranks > 1 else []


def _own_gradient(p: Problem) -> list[Any]:
    if p.ranks == 1:
        return []
    roots = [Reduced(own, root=k) for own in ("part", "times", "mean") for k in range(p.ranks)]
    return [*(Reduced(own, rows=True) for own in ("part", "times", "mean")), *roots]


def _number(find: Callable[[Problem], float]) -> Callable[[Problem], list[Any]]:
    def forms(p: Problem) -> list[Any]:
        value = find(p)
        return [value] if value not in (1.0, 0.0) else []

    return forms


def _before_shift(p: Problem) -> float:
    return p.count / float((p.labels != IGNORE).sum())


def _several_batches(value: Any) -> Callable[[Problem], list[Any]]:
    return lambda p: [value] if p.micro_batches > 1 else []


def _of_entropies(factor: float) -> Callable[[Problem], list[Any]]:
    return lambda p: [Upstream(entropy=factor)] if p.options.entropy else []


RANKS, BATCHES = "several ranks", "several micro-batches"

DEFECTS = (
    Defect(
        "labels not shifted", "labels",
        "Each position was scored against its own token, not against the next one.",
        LABELS, _unshifted, ("step",),
    ),
    Defect(
        "labels shifted twice", "labels",
        "Labels that were shifted already were shifted once more: each position was scored against "
        "the token after the next.",
        LABELS, _twice, ANY,
    ),
    Defect(
        "labels shifted backwards", "labels",
        "Each position was scored against the token before it.",
        LABELS, _backwards, ("step",),
    ),
    Defect(
        "labels across documents", "labels",
        "The last token of a document was scored against the first of the next one.",
        LABELS, _across, ("step",), "several documents in a row",
    ),
    Defect(
        "masked tokens counted", "labels",
        "Tokens that the labels leave out took part in the sum and in the count.",
        LABELS, _masked, ("step",),
    ),
    Defect(
        "last token dropped", "labels",
        "The last token that has a label was left out, of each row or of each document.",
        LABELS, _last_token,
    ),
    Defect(
        "last chunk dropped", "labels",
        "What was left over after the last full chunk of tokens was left out.",
        "failure-modes.md#m17", _last_chunk,
    ),
    Defect(
        "one micro-batch alone", "labels",
        "One micro-batch took part and the others did not: gradients were cleared, or not added "
        "up, between them.",
        ACCUMULATION, _one_micro_batch, ("step",), BATCHES,
    ),
    Defect(
        "mean of the means of micro-batches", "divisor",
        "Each micro-batch was divided by its own number of tokens, and these means were averaged: "
        "tokens of short micro-batches count more.",
        ACCUMULATION, _several_batches("micro-batches"), ("step",), BATCHES,
    ),
    Defect(
        "mean of the means of ranks", "divisor",
        "Each rank divided by its own number of tokens, and these means were averaged.",
        DIVIDED, _several("ranks"), ("step",), RANKS,
    ),
    Defect(
        "mean of the means of micro-batches and ranks", "divisor",
        "Each rank divided each micro-batch by its own number of tokens, and all these means were "
        "averaged.",
        ACCUMULATION, _several("both"), ("step",), RANKS,
    ),
    Defect(
        "mean of the means of rows", "divisor",
        "Each row was divided by its own number of tokens, and these means were averaged.",
        COUNT, lambda p: ["rows"], ("step",),
    ),
    Defect(
        "not reduced over ranks", "reduced",
        "Each rank has its own tokens' part alone.",
        DIVIDED, _several(*(Reduced(own) for own in ("part", "times", "mean"))), ("step",), RANKS,
    ),
    Defect(
        "head's gradient is one rank's own", "reduced",
        "The gradient of the head, or of a rank's slice of its rows, has one rank's tokens alone: "
        "a gathered head whose gradient nothing reduces.",
        {"torch": "fsdp2.md#what-goes-wrong-elsewhere", "jax": "flax-meshes.md"},
        _own_gradient, ("step",), RANKS,
    ),
    Defect(
        "reduced twice over ranks", "scale",
        "As many times too large as there are ranks: a sum over ranks was taken twice, or for a "
        "mean.",
        DIVIDED, lambda p: [float(p.ranks)] if p.ranks > 1 else [],
        ("step",), RANKS,
    ),
    Defect(
        "off by the number of ranks", "scale",
        "Divided by the number of ranks: the count was that of all ranks, and the reduction a mean "
        "over them.",
        DIVIDED, lambda p: [1.0 / p.ranks] if p.ranks > 1 else [], ("step",), RANKS,
    ),
    Defect(
        "off by the accumulation steps", "scale",
        "Multiplied or divided by the number of micro-batches, which appears nowhere in a mean "
        "over tokens.",
        ACCUMULATION, lambda p: [1.0 / p.micro_batches, float(p.micro_batches)],
        ("step",), BATCHES,
    ),
    Defect(
        "off by ranks and accumulation steps", "scale",
        "Multiplied or divided by the number of micro-batches of all ranks, which appears nowhere "
        "in a mean over tokens.",
        ACCUMULATION,
        lambda p: [x for k in [p.micro_batches * p.ranks] for x in (1.0 / k, float(k))]
        if p.ranks > 1 else [],
        ("step",), RANKS,
    ),
    Defect(
        "sum and not mean", "scale",
        "Nothing was divided by the number of tokens.",
        COUNT, _number(lambda p: float(p.count)),
    ),
    Defect(
        "divided by all positions", "scale",
        "The sum over the tokens that count was divided by the number of all positions.",
        COUNT, _number(lambda p: p.count / p.targets.size),
    ),
    Defect(
        "tokens counted before the shift", "scale",
        "The sum was divided by the number of labels before they were shifted.",
        COUNT, _number(_before_shift), ("step",),
    ),
    Defect(
        "upstream gradient ignored", "scale",
        "The gradient that arrives from what follows the loss was taken to be 1.",
        "failure-modes.md#m1", lambda p: [1.0 / p.upstream], ("loss",),
    ),
    Defect(
        "sign", "scale", "Everything has the opposite sign.", COUNT, lambda p: [-1.0], ANY,
    ),
    Defect(
        "softcap not applied", "head", "The logits were not capped.",
        OPTIONS, _without("softcap", None), ANY, "a softcap",
    ),
    Defect(
        "logit scale not applied", "head", "The logits were not multiplied by their scale.",
        OPTIONS, _without("logit_scale", 1.0), ANY, "a logit scale",
    ),
    Defect(
        "temperature not applied", "head", "The logits were not divided by the temperature.",
        LOGPROBS, _without("temperature", 1.0), ANY, "a temperature",
    ),
    Defect(
        "bias not applied", "head", "The head's bias was not added, and has no gradient.",
        OPTIONS, _without_bias, ANY, "a bias",
    ),
    Defect(
        "label smoothing not applied", "head", "The loss is that of one class for each token.",
        "labels-and-losses.md#label-smoothing-by-its-convention",
        _without("label_smoothing", 0.0), LOSSES, "label smoothing",
    ),
    Defect(
        "z-loss not applied", "head", "The squares of the log-sum-exps were not added.",
        OPTIONS, _without("z_loss", 0.0), LOSSES, "a z-loss",
    ),
    Defect(
        "logits rounded to 16 bits", "head",
        "The logits were stored in bfloat16 or float16 on the way to the softmax. Some libraries "
        "choose to, for speed; it is another computation.",
        "numerics.md#rounding-points-in-order", LOGITS_ROUNDED, ANY,
    ),
    Defect(
        "operands rounded to 16 bits", "head",
        "Hidden states and head were rounded to 16 bits before their product.",
        "numerics.md#rounding-points-in-order", OPERANDS_ROUNDED, ANY,
    ),
    Defect(
        "gradients rounded to 16 bits", "head",
        "The gradient of the logits, or of the head, went through bfloat16 or float16.",
        "failure-modes.md#m2", GRADIENT_ROUNDED, ANY,
    ),
    Defect(
        "entropy without its gradient", "upstream",
        "The gradient of the entropies is missing: a bonus for them does nothing.",
        "failure-modes.md#m12", _of_entropies(0.0), ("logprobs",), "entropies",
    ),
    Defect(
        "entropy's gradient negated", "upstream",
        "The gradient of the entropies has the opposite sign.",
        "failure-modes.md#m12", _of_entropies(-1.0), ("logprobs",), "entropies",
    ),
    Defect(
        "one upstream gradient for all tokens", "upstream",
        "Every token got the gradient that arrived for the first one.",
        "failure-modes.md#m1", lambda p: [Upstream(first=True)], ("logprobs",),
    ),
)  # fmt: skip

BY_NAME = {defect.name: defect for defect in DEFECTS}


def forms(defect: Defect, problem: Problem, base: Reading | None = None) -> Iterator[Reading]:
    """The readings that have the defect, everything else as in `base`."""
    base = Reading() if base is None else base
    if problem.kind in defect.kinds:
        for value in defect.forms(problem):
            yield replace(base, **{defect.axis: value})


def scales(problem: Problem) -> dict[str, list[float]]:
    """The numbers that have a name, by the defect's name."""
    return {
        defect.name: defect.forms(problem)
        for defect in DEFECTS
        if defect.axis == "scale" and problem.kind in defect.kinds
    }
