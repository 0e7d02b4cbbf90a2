"""The defects that are looked for, as data: name, what is read instead, one sentence, the cure.

A defect replaces one choice of a `Hypothesis`; it may come in several forms, such as the length of
the chunk that is dropped. What it needs of a problem to be there at all is data too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from xentlib.tools.audit.defect_variants import (
    GRADIENT_ROUNDED,
    LOGITS_ROUNDED,
    OPERANDS_ROUNDED,
    Forms,
    across,
    backwards,
    before_shift,
    last_chunk,
    last_token,
    masked,
    number,
    of_entropies,
    one_micro_batch,
    own_gradient,
    several,
    several_batches,
    twice,
    unshifted,
    without,
    without_bias,
)
from xentlib.tools.audit.hypotheses import Hypothesis, Reduced, Upstream
from xentlib.tools.audit.problem import Problem

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
        axis: the field of `Hypothesis` that it replaces.
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
    forms: Forms
    kinds: tuple[str, ...] = LOSSES
    needs: str = ""

    def page(self, backend: str) -> str:
        return self.cure if isinstance(self.cure, str) else self.cure[backend]


RANKS, BATCHES = "several ranks", "several micro-batches"

DEFECTS = (
    Defect(
        "labels not shifted", "labels",
        "Each position was scored against its own token, not against the next one.",
        LABELS, unshifted, ("step",),
    ),
    Defect(
        "labels shifted twice", "labels",
        "Labels that were shifted already were shifted once more: each position was scored against "
        "the token after the next.",
        LABELS, twice, ANY,
    ),
    Defect(
        "labels shifted backwards", "labels",
        "Each position was scored against the token before it.",
        LABELS, backwards, ("step",),
    ),
    Defect(
        "labels across documents", "labels",
        "The last token of a document was scored against the first of the next one.",
        LABELS, across, ("step",), "several documents in a row",
    ),
    Defect(
        "masked tokens counted", "labels",
        "Tokens that the labels leave out took part in the sum and in the count.",
        LABELS, masked, ("step",),
    ),
    Defect(
        "last token dropped", "labels",
        "The last token that has a label was left out, of each row or of each document.",
        LABELS, last_token,
    ),
    Defect(
        "last chunk dropped", "labels",
        "What was left over after the last full chunk of tokens was left out.",
        "failure-modes.md#m17", last_chunk,
    ),
    Defect(
        "one micro-batch alone", "labels",
        "One micro-batch took part and the others did not: gradients were cleared, or not added "
        "up, between them.",
        ACCUMULATION, one_micro_batch, ("step",), BATCHES,
    ),
    Defect(
        "mean of the means of micro-batches", "divisor",
        "Each micro-batch was divided by its own number of tokens, and these means were averaged: "
        "tokens of short micro-batches count more.",
        ACCUMULATION, several_batches("micro-batches"), ("step",), BATCHES,
    ),
    Defect(
        "mean of the means of ranks", "divisor",
        "Each rank divided by its own number of tokens, and these means were averaged.",
        DIVIDED, several("ranks"), ("step",), RANKS,
    ),
    Defect(
        "mean of the means of micro-batches and ranks", "divisor",
        "Each rank divided each micro-batch by its own number of tokens, and all these means were "
        "averaged.",
        ACCUMULATION, several("both"), ("step",), RANKS,
    ),
    Defect(
        "mean of the means of rows", "divisor",
        "Each row was divided by its own number of tokens, and these means were averaged.",
        COUNT, lambda p: ["rows"], ("step",),
    ),
    Defect(
        "not reduced over ranks", "reduced",
        "Each rank has its own tokens' part alone.",
        DIVIDED, several(*(Reduced(own) for own in ("part", "times", "mean"))), ("step",), RANKS,
    ),
    Defect(
        "head's gradient is one rank's own", "reduced",
        "The gradient of the head, or of a rank's slice of its rows, has one rank's tokens alone: "
        "a gathered head whose gradient nothing reduces.",
        {"torch": "fsdp2.md#what-goes-wrong-elsewhere", "jax": "flax-meshes.md"},
        own_gradient, ("step",), RANKS,
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
        COUNT, number(lambda p: float(p.count)),
    ),
    Defect(
        "divided by all positions", "scale",
        "The sum over the tokens that count was divided by the number of all positions.",
        COUNT, number(lambda p: p.count / p.targets.size),
    ),
    Defect(
        "tokens counted before the shift", "scale",
        "The sum was divided by the number of labels before they were shifted.",
        COUNT, number(before_shift), ("step",),
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
        OPTIONS, without("softcap", None), ANY, "a softcap",
    ),
    Defect(
        "logit scale not applied", "head", "The logits were not multiplied by their scale.",
        OPTIONS, without("logit_scale", 1.0), ANY, "a logit scale",
    ),
    Defect(
        "temperature not applied", "head", "The logits were not divided by the temperature.",
        LOGPROBS, without("temperature", 1.0), ANY, "a temperature",
    ),
    Defect(
        "bias not applied", "head", "The head's bias was not added, and has no gradient.",
        OPTIONS, without_bias, ANY, "a bias",
    ),
    Defect(
        "label smoothing not applied", "head", "The loss is that of one class for each token.",
        "labels-and-losses.md#label-smoothing-by-its-convention",
        without("label_smoothing", 0.0), LOSSES, "label smoothing",
    ),
    Defect(
        "z-loss not applied", "head", "The squares of the log-sum-exps were not added.",
        OPTIONS, without("z_loss", 0.0), LOSSES, "a z-loss",
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
        "failure-modes.md#m12", of_entropies(0.0), ("logprobs",), "entropies",
    ),
    Defect(
        "entropy's gradient negated", "upstream",
        "The gradient of the entropies has the opposite sign.",
        "failure-modes.md#m12", of_entropies(-1.0), ("logprobs",), "entropies",
    ),
    Defect(
        "one upstream gradient for all tokens", "upstream",
        "Every token got the gradient that arrived for the first one.",
        "failure-modes.md#m1", lambda p: [Upstream(first=True)], ("logprobs",),
    ),
)  # fmt: skip

BY_NAME = {defect.name: defect for defect in DEFECTS}


def forms(defect: Defect, problem: Problem, base: Hypothesis | None = None) -> Iterator[Hypothesis]:
    """The readings that have the defect, everything else as in `base`."""
    base = Hypothesis() if base is None else base
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
