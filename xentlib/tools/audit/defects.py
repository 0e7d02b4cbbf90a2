"""The defects that are looked for, as data: name, what is read instead, one sentence, the cure.

A defect replaces one choice of a `Hypothesis`; it may come in several forms, such as the length of
the chunk that is dropped. What it needs of a problem to be there at all is data too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xentlib.tools.audit.hypotheses import Head, Hypothesis, Labelled, Reduced, Upstream
from xentlib.tools.audit.problem import IGNORE, Array, Problem, next_labels

Forms = Sequence[Any] | Callable[[Problem], Sequence[Any]]

STEP, LOSS, LOGPROBS = ("step",), ("loss",), ("logprobs",)
LOSSES = (*STEP, *LOSS)
ANY = (*LOSSES, *LOGPROBS)

# What a problem must have, in the words of a report.
DIVERGENCE = "a divergence"
NEEDS: dict[str, Callable[[Problem], bool]] = {
    "": lambda p: True,
    "several ranks": lambda p: p.ranks > 1,
    "several micro-batches": lambda p: p.micro_batches > 1,
    "several documents in a row": lambda p: p.options.documents,
    "a softcap": lambda p: p.options.softcap is not None,
    "a logit scale": lambda p: p.options.logit_scale != 1.0,
    "a temperature": lambda p: p.options.temperature != 1.0,
    "a bias": lambda p: p.bias is not None,
    "label smoothing": lambda p: p.options.label_smoothing != 0.0,
    "a z-loss": lambda p: p.options.z_loss != 0.0,
    "entropies": lambda p: p.options.entropy,
    DIVERGENCE: lambda p: p.teacher is not None,
    "a divergence that is not symmetric": lambda p: bool(exchanged(p)),
    "a divergence with a temperature": lambda p: tempered(p),  # noqa: PLW0108 - defined below
    "a divergence times its temperature squared": lambda p: (
        tempered(p) and p.options.temperature_squared
    ),
    "a divergence without its temperature squared": lambda p: (
        tempered(p) and not p.options.temperature_squared
    ),
}
RANKS, BATCHES = "several ranks", "several micro-batches"


# --- which labels -------------------------------------------------------------------------------


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


def masked(p: Problem) -> list[Any]:
    """The mask of the labels is not used; padding counts too, or does not. A divergence needs no
    next token, so that the last one may count."""
    within = np.where(p.attention, p.ids, IGNORE)
    shifted = [Labelled(next_labels(x, s)) for x in (within, p.ids) for s in (p.segments, None)]
    return shifted if p.teacher is None else [*shifted, Labelled(within), Labelled(p.ids)]


def without(masks: Sequence[Array]) -> list[Any]:
    """What a mask leaves out is counted still, or is not."""
    return [Labelled(None, keep, counted) for keep in masks for counted in (True, False)]


def last_token(p: Problem) -> list[Any]:
    """Of each row: the last target, or the one of the last position that can have one; of each
    document: its last target."""
    valid = p.targets != IGNORE
    rest = np.cumsum(valid[..., ::-1], axis=-1)[..., ::-1]
    place = np.ones(valid.shape, np.bool_)
    place[..., -2:] = False
    last = next_labels(p.targets, p.segments) != IGNORE
    return without([rest > 1, place, last])


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

    # Rows that are laid flat together: a rank's, or all ranks'.
    for groups in (ranks, 1) if ranks > 1 else (1,):
        tokens = ranks // groups * b * n
        by_batch = (groups, ranks // groups, m, b, n)

        def back(flat: Array, by_batch: tuple[int, ...] = by_batch) -> Array:
            g, r, m, b, n = by_batch
            return flat.reshape(g, m, r, b, n).swapaxes(1, 2).reshape(g * r, m, b, n)

        flat = valid.reshape(by_batch).swapaxes(1, 2).reshape(groups, m, tokens)
        order = np.cumsum(flat, axis=-1)
        for k in range(1, tokens):
            add(back(np.broadcast_to(np.arange(tokens) < tokens - k, flat.shape)))
            add(back(order <= order[..., -1:] // k * k))
    return without([*masks.values()])


def one_micro_batch(p: Problem) -> list[Any]:
    masks = np.zeros((p.micro_batches, *p.targets.shape), np.bool_)
    for m, keep in enumerate(masks):
        keep[:, m] = True
    return without([*masks])


# --- which gradients and numbers ----------------------------------------------------------------


OWN = [Reduced(own) for own in ("part", "times", "mean")]


def own_gradient(p: Problem) -> list[Any]:
    roots = [how._replace(root=k) for how in OWN for k in range(p.ranks)]
    return [*(how._replace(rows=True) for how in OWN), *roots]


def scaled(number: float) -> list[float]:
    """0 and 1 are no defect."""
    return [] if number in (0.0, 1.0) else [number]


def either(number: int) -> list[float]:
    """Divided by a number, or multiplied by it."""
    return [1.0 / number, float(number)]


def rounded(*stages: tuple[str, ...]) -> list[Any]:
    """In either dtype, as far as each of `stages` says."""
    dtypes = ("bfloat16", "float16")
    return [Head(dtype=dtype, rounded=stage) for dtype in dtypes for stage in stages]


LOGITS_ROUNDED = rounded(
    ("logits",),
    ("logits", "gradient"),
    ("operands", "logits", "gradient"),
    ("operands", "logits", "gradient", "result"),
)
OPERANDS_ROUNDED = rounded(("operands",), ("operands", "gradient"))
GRADIENT_ROUNDED = rounded(("gradient",), ("result",), ("gradient", "result"))


# --- of a divergence ------------------------------------------------------------------------------


def exchanged(p: Problem) -> list[Any]:
    """Which divergence it is with student and teacher in each other's place."""
    kind, beta = p.options.divergence, p.options.beta
    if kind == "jsd":
        return [] if beta == 0.5 else [Head(changes=(("beta", 1.0 - (beta or 0.0)),))]
    other = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}
    return [Head(changes=(("kind", other[kind]),))] if kind in other else []


def by_rows(p: Problem) -> list[float]:
    """How many tokens a row has that count, where the mask is used, or padding alone is left out,
    or nothing."""
    counts = p.count, int(p.attention.sum()), p.targets.size
    return [number / (p.targets.size / p.targets.shape[-1]) for number in counts]


def tempered(p: Problem) -> bool:
    return p.teacher is not None and p.options.temperature != 1.0


# --- the table ----------------------------------------------------------------------------------


class Defect(NamedTuple):
    """One entry of `DEFECTS`.

    Attributes:
        name: as a report has it.
        axis: the field of `Hypothesis` that it replaces.
        sentence: what was done instead of what is right.
        cure: page of docs/, by backend where they differ.
        forms: values of that field, or what gives them for a problem that has what it `needs`.
        kinds: of which steps.
        needs: what a problem must have, by its name in `NEEDS`.
    """

    name: str
    axis: str
    sentence: str
    cure: str | dict[str, str]
    forms: Forms
    kinds: tuple[str, ...] = LOSSES
    needs: str = ""

    def page(self, backend: str) -> str:
        return self.cure if isinstance(self.cure, str) else self.cure[backend]


ACCUMULATION = {"torch": "accumulation.md", "jax": "accumulation-jax.md"}
DIVIDED = {"torch": "accumulation.md#what-each-wrapper-divides-by", "jax": "jax-trainers.md#meshes"}
GATHERED = {"torch": "fsdp2.md#what-goes-wrong-elsewhere", "jax": "flax-meshes.md"}
COUNT = "labels-and-losses.md#what-the-loss-is-divided-by"
LABELS = "labels-and-losses.md#labels"
OPTIONS = "labels-and-losses.md#other-options"
SMOOTHING = "labels-and-losses.md#label-smoothing-by-its-convention"
ROUNDING = "numerics.md#rounding-points-in-order"
UPSTREAM, LOW_GRADIENTS, ENTROPIES, CHUNKS = (f"failure-modes.md#m{k}" for k in (1, 2, 12, 17))
TEMPERATURE, DIVERGENCES = "logprobs.md", "divergences.md"

DEFECTS = (
    Defect("labels not shifted", "labels",
        "Each position was scored against its own token, not against the next one.",
        LABELS, lambda p: [Labelled(p.labels)], STEP),
    Defect("labels shifted twice", "labels",
        "Labels that were shifted already were shifted once more: each position was scored against "
        "the token after the next.",
        LABELS, twice, ANY),
    Defect("labels shifted backwards", "labels",
        "Each position was scored against the token before it.",
        LABELS, backwards, STEP),
    Defect("labels across documents", "labels",
        "The last token of a document was scored against the first of the next one.",
        LABELS, lambda p: [Labelled(next_labels(p.labels, None))],
        STEP, "several documents in a row"),
    Defect("masked tokens counted", "labels",
        "Tokens that the labels leave out took part in the sum and in the count.",
        LABELS, masked, STEP),
    Defect("last token dropped", "labels",
        "The last token that has a label was left out, of each row or of each document.",
        LABELS, last_token),
    Defect("last chunk dropped", "labels",
        "What was left over after the last full chunk of tokens was left out.",
        CHUNKS, last_chunk),
    Defect("one micro-batch alone", "labels",
        "One micro-batch took part and the others did not: gradients were cleared, or not added "
        "up, between them.",
        ACCUMULATION, one_micro_batch, STEP, BATCHES),
    Defect("mean of the means of micro-batches", "divisor",
        "Each micro-batch was divided by its own number of tokens, and these means were averaged: "
        "tokens of short micro-batches count more.",
        ACCUMULATION, ["micro-batches"], STEP, BATCHES),
    Defect("mean of the means of ranks", "divisor",
        "Each rank divided by its own number of tokens, and these means were averaged.",
        DIVIDED, ["ranks"], STEP, RANKS),
    Defect("mean of the means of micro-batches and ranks", "divisor",
        "Each rank divided each micro-batch by its own number of tokens, and all these means were "
        "averaged.",
        ACCUMULATION, ["both"], STEP, RANKS),
    Defect("mean of the means of rows", "divisor",
        "Each row was divided by its own number of tokens, and these means were averaged.",
        COUNT, ["rows"], STEP),
    Defect("not reduced over ranks", "reduced",
        "Each rank has its own tokens' part alone.",
        DIVIDED, OWN, STEP, RANKS),
    Defect("head's gradient is one rank's own", "reduced",
        "The gradient of the head, or of a rank's slice of its rows, has one rank's tokens alone: "
        "a gathered head whose gradient nothing reduces.",
        GATHERED, own_gradient, STEP, RANKS),
    Defect("reduced twice over ranks", "scale",
        "As many times too large as there are ranks: a sum over ranks was taken twice, or for a "
        "mean.",
        DIVIDED, lambda p: [float(p.ranks)], STEP, RANKS),
    Defect("off by the number of ranks", "scale",
        "Divided by the number of ranks: the count was that of all ranks, and the reduction a mean "
        "over them.",
        DIVIDED, lambda p: [1.0 / p.ranks], STEP, RANKS),
    Defect("off by the accumulation steps", "scale",
        "Multiplied or divided by the number of micro-batches, which appears nowhere in a mean "
        "over tokens.",
        ACCUMULATION, lambda p: either(p.micro_batches), STEP, BATCHES),
    Defect("off by ranks and accumulation steps", "scale",
        "Multiplied or divided by the number of micro-batches of all ranks, which appears nowhere "
        "in a mean over tokens.",
        ACCUMULATION, lambda p: either(p.micro_batches * p.ranks), STEP, RANKS),
    Defect("sum and not mean", "scale",
        "Nothing was divided by the number of tokens.",
        COUNT, lambda p: scaled(float(p.count))),
    Defect("divided by all positions", "scale",
        "The sum over the tokens that count was divided by the number of all positions.",
        COUNT, lambda p: scaled(p.count / p.targets.size)),
    Defect("tokens counted before the shift", "scale",
        "The sum was divided by the number of labels before they were shifted.",
        COUNT, lambda p: scaled(p.count / float((p.labels != IGNORE).sum())), STEP),
    Defect("upstream gradient ignored", "scale",
        "The gradient that arrives from what follows the loss was taken to be 1.",
        UPSTREAM, lambda p: [1.0 / p.upstream], LOSS),
    Defect("sign", "scale", "Everything has the opposite sign.", COUNT, [-1.0], ANY),
    Defect("softcap not applied", "head", "The logits were not capped.",
        OPTIONS, [Head(changes=(("softcap", None),))], ANY, "a softcap"),
    Defect("logit scale not applied", "head", "The logits were not multiplied by their scale.",
        OPTIONS, [Head(changes=(("logit_scale", 1.0),))], ANY, "a logit scale"),
    Defect("temperature not applied", "head", "The logits were not divided by the temperature.",
        TEMPERATURE, [Head(changes=(("temperature", 1.0),))], ANY, "a temperature"),
    Defect("bias not applied", "head", "The head's bias was not added, and has no gradient.",
        OPTIONS, [Head(bias=False)], ANY, "a bias"),
    Defect("label smoothing not applied", "head", "The loss is that of one class for each token.",
        SMOOTHING, [Head(changes=(("label_smoothing", 0.0),))], LOSSES, "label smoothing"),
    Defect("z-loss not applied", "head", "The squares of the log-sum-exps were not added.",
        OPTIONS, [Head(changes=(("z_loss", 0.0),))], LOSSES, "a z-loss"),
    Defect("logits rounded to 16 bits", "head",
        "The logits were stored in bfloat16 or float16 on the way to the softmax. Some libraries "
        "choose to, for speed; it is another computation.",
        ROUNDING, LOGITS_ROUNDED, ANY),
    Defect("operands rounded to 16 bits", "head",
        "Hidden states and head were rounded to 16 bits before their product.",
        ROUNDING, OPERANDS_ROUNDED, ANY),
    Defect("gradients rounded to 16 bits", "head",
        "The gradient of the logits, or of the head, went through bfloat16 or float16.",
        LOW_GRADIENTS, GRADIENT_ROUNDED, ANY),
    Defect("entropy without its gradient", "upstream",
        "The gradient of the entropies is missing: a bonus for them does nothing.",
        ENTROPIES, [Upstream(entropy=0.0)], LOGPROBS, "entropies"),
    Defect("entropy's gradient negated", "upstream",
        "The gradient of the entropies has the opposite sign.",
        ENTROPIES, [Upstream(entropy=-1.0)], LOGPROBS, "entropies"),
    Defect("one upstream gradient for all tokens", "upstream",
        "Every token got the gradient that arrived for the first one.",
        UPSTREAM, [Upstream(first=True)], LOGPROBS),
    Defect("student and teacher exchanged", "head",
        "The divergence is that of the teacher from the student: the other KL, or a JSD whose "
        "beta is the student's share.",
        f"{DIVERGENCES}#which-kind", exchanged, STEP, "a divergence that is not symmetric"),
    Defect("teacher's logits of another position", "head",
        "Each position was compared with the teacher's logits of the one before or after it.",
        f"{DIVERGENCES}#the-teacher-and-the-loss", [Head(late=1), Head(late=-1)],
        STEP, DIVERGENCE),
    Defect("temperature of the student alone", "head",
        "The teacher's logits were not divided by the temperature.",
        DIVERGENCES, [Head(changes=(("teacher_temperature", 1.0),))],
        STEP, "a divergence with a temperature"),
    Defect("temperature squared missing", "scale",
        "The divergence was not multiplied by the temperature squared.",
        DIVERGENCES, lambda p: [p.options.temperature**-2], STEP,
        "a divergence times its temperature squared"),
    Defect("temperature squared applied", "scale",
        "The divergence was multiplied by the temperature squared, which the step does not "
        "declare.",
        DIVERGENCES, lambda p: [p.options.temperature**2], STEP,
        "a divergence without its temperature squared"),
    Defect("divided by rows, not by tokens", "scale",
        "The sum was divided by the number of rows and not of tokens, as reduction='batchmean' "
        "of [B, L, V] does.",
        COUNT, by_rows, STEP, DIVERGENCE),
    Defect("divided by the classes too", "scale",
        "The mean was taken over tokens and classes, as reduction='mean' does of one number for "
        "each class.",
        COUNT, lambda p: [1.0 / p.weight.shape[0]], STEP, DIVERGENCE),
)  # fmt: skip

BY_NAME = {defect.name: defect for defect in DEFECTS}


def forms(defect: Defect, problem: Problem, base: Hypothesis | None = None) -> Iterator[Hypothesis]:
    """The readings that have the defect, everything else as in `base`."""
    base = Hypothesis() if base is None else base
    if problem.kind in defect.kinds and NEEDS[defect.needs](problem):
        values = defect.forms(problem) if callable(defect.forms) else defect.forms
        for value in values:
            yield base._replace(**{defect.axis: value})
