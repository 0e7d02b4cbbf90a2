"""The defects that are looked for, as data: name, what is read instead, one sentence, the cure.

A defect replaces one choice of a `Hypothesis`; it may come in several forms, such as the length of
the chunk that is dropped. What it needs of a problem to be there at all is data too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from xentlib.tools.audit import which_logits as logits
from xentlib.tools.audit import which_tokens as tokens
from xentlib.tools.audit.hypotheses import (
    SOFTMAX,
    UNIFORM,
    Z_LOSS,
    Head,
    Hypothesis,
    Labelled,
    Reduced,
    Terms,
    Upstream,
)
from xentlib.tools.audit.problem import IGNORE, Problem, next_labels

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
    "a softcap and a temperature": lambda p: (
        p.options.softcap is not None and p.options.temperature != 1.0 and p.teacher is None
    ),
    "a bias and a temperature": lambda p: (
        p.bias is not None and p.options.temperature != 1.0 and p.teacher is None
    ),
    "a softcap of labels' logits": lambda p: p.options.softcap is not None and p.teacher is None,
    "a bias and a logit scale": lambda p: (
        p.bias is not None and p.options.logit_scale != 1.0 and p.teacher is None
    ),
    "a softcap and a logit scale": lambda p: (
        p.options.softcap is not None and p.options.logit_scale != 1.0 and p.teacher is None
    ),
    "label smoothing": lambda p: p.options.label_smoothing != 0.0,
    "a z-loss": lambda p: p.options.z_loss != 0.0,
    "label smoothing and a z-loss": lambda p: 0.0 not in p.options.of_loss.values(),
    "entropies": lambda p: p.options.entropy,
    "labels alone": lambda p: p.teacher is None and not any(p.options.of_loss.values()),
    DIVERGENCE: lambda p: p.teacher is not None,
    "a divergence that is not symmetric": lambda p: bool(logits.exchanged(p)),
    "a divergence with a temperature": logits.tempered,
    "a divergence times its temperature squared": lambda p: (
        logits.tempered(p) and p.options.temperature_squared
    ),
    "a divergence without its temperature squared": lambda p: (
        logits.tempered(p) and not p.options.temperature_squared
    ),
}
RANKS, BATCHES = "several ranks", "several micro-batches"


# --- which gradients and numbers ----------------------------------------------------------------


OWN = [Reduced(own) for own in ("part", "times", "mean")]
SYNCED = [how._replace(first=True) for how in OWN]


def own_gradient(p: Problem) -> list[Any]:
    roots = [how._replace(root=k) for how in OWN for k in range(p.ranks)]
    return [*(how._replace(rows=True) for how in OWN), *roots]


def scaled(number: float) -> list[float]:
    """0 and 1 are no defect."""
    return [] if number in (0.0, 1.0) else [number]


def either(number: int) -> list[float]:
    """Divided by a number, or multiplied by it."""
    return [1.0 / number, float(number)]


def by_rows(p: Problem) -> list[float]:
    """How many tokens a row has that count, where the mask is used, or padding alone is left out,
    or nothing."""
    counts = p.count, int(p.attention.sum()), p.targets.size
    return [number / (p.targets.size / p.targets.shape[-1]) for number in counts]


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
        LABELS, tokens.twice, ANY),
    Defect("labels shifted backwards", "labels",
        "Each position was scored against the token before it.",
        LABELS, tokens.backwards, STEP),
    Defect("labels across documents", "labels",
        "The last token of a document was scored against the first of the next one.",
        LABELS, lambda p: [Labelled(next_labels(p.labels, None))],
        STEP, "several documents in a row"),
    Defect("masked tokens counted", "labels",
        "Tokens that the labels leave out took part in the sum and in the count.",
        LABELS, tokens.masked, STEP),
    Defect("last token dropped", "labels",
        "The last token that has a label was left out, of each row or of each document.",
        LABELS, tokens.last_token),
    Defect("last chunk dropped", "labels",
        "What was left over after the last full chunk of tokens was left out.",
        CHUNKS, tokens.last_chunk),
    Defect("one micro-batch alone", "labels",
        "One micro-batch took part and the others did not: gradients were cleared, or not added "
        "up, between them, or each pass took the same one.",
        ACCUMULATION, tokens.one_micro_batch, STEP, BATCHES),
    Defect("first micro-batch left out", "labels",
        "The first micro-batch took no part: its gradient was cleared.",
        ACCUMULATION, lambda p: tokens.no_micro_batch(p, 0), STEP, BATCHES),
    Defect("last micro-batch left out", "labels",
        "The last micro-batch took no part: its gradient was not added, or came too late.",
        ACCUMULATION, lambda p: tokens.no_micro_batch(p, -1), STEP, BATCHES),
    Defect("padding alone counted", "labels",
        "The mask of the labels was used, and padding was counted: its token was a target.",
        LABELS, tokens.padding_alone, STEP),
    Defect("loss mask not shifted", "labels",
        "Each position was scored against the next token, but counted by its own token's mask and "
        "not by the next one's.",
        LABELS, tokens.unshifted_mask, STEP),
    Defect("first token of each document masked", "labels",
        "The first token of each document was scored against nothing.",
        LABELS, tokens.first_of_documents, STEP, "several documents in a row"),
    Defect("-100 clipped to 0", "labels",
        "Labels that are left out were clipped to class 0, and scored against it.",
        LABELS, tokens.clipped_to_0, LOSSES),
    Defect("labels across rows", "labels",
        "The last token of a row was scored against a first one: the next row's, of rows that were "
        "laid flat before the shift, or its own row's, of a roll.",
        LABELS, tokens.next_row, STEP),
    Defect("last token of each document masked", "labels",
        "The last token of each document was no target, as where all ends of text are masked.",
        LABELS, tokens.last_of_documents, STEP, "several documents in a row"),
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
    Defect("micro-batches weighted by all tokens but padding", "divisor",
        "The mean of each micro-batch was weighted by the tokens that its attention mask has.",
        ACCUMULATION, ["attended"], STEP, BATCHES),
    Defect("mean of the means of documents", "divisor",
        "Each document was divided by its own number of tokens, and these means were averaged.",
        COUNT, ["documents"], STEP, "several documents in a row"),
    Defect("mean of the means of chunks", "divisor",
        "Each chunk of tokens was divided by its own number of tokens, and these means were "
        "averaged.",
        CHUNKS, tokens.chunks, LOSSES),
    Defect("each micro-batch clipped", "divisor",
        "The gradient of each micro-batch, or what was added up so far, was clipped to one norm, "
        "and not that of the whole step.",
        ACCUMULATION, ["clipped"], STEP, BATCHES),
    Defect("not reduced over ranks", "reduced",
        "Each rank has its own tokens' part alone.",
        DIVIDED, OWN, STEP, RANKS),
    Defect("reduced at the first micro-batch alone", "reduced",
        "Gradients of the first micro-batch were reduced over ranks; each rank has its own of the "
        "others.",
        DIVIDED, SYNCED, STEP, "several ranks"),
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
    Defect("divided by all tokens but padding", "scale",
        "The sum was divided by the number of tokens that the attention mask has.",
        COUNT, lambda p: scaled(p.count / float(p.attention.sum())), STEP),
    Defect("tokens counted before the shift", "scale",
        "The sum was divided by the number of labels before they were shifted.",
        COUNT, lambda p: scaled(p.count / float((p.labels != IGNORE).sum())), STEP),
    Defect("upstream gradient ignored", "scale",
        "The gradient that arrives from what follows the loss was taken to be 1.",
        UPSTREAM, lambda p: [1.0 / p.upstream], LOSS),
    Defect("sign", "scale", "Everything has the opposite sign.", COUNT, [-1.0], ANY),
    Defect("weight decay in the gradient", "decay",
        "A multiple of the head was added to its gradient.", COUNT, [0.01], STEP),
    Defect("each value clipped", "clip",
        "Entries of the gradient were clipped to one size.", COUNT, [0.5], STEP),
    Defect("softcap not applied", "head", "The logits were not capped.",
        OPTIONS, [Head(changes=(("softcap", None),))], ANY, "a softcap"),
    Defect("logit scale not applied", "head", "The logits were not multiplied by their scale.",
        OPTIONS, [Head(changes=(("logit_scale", 1.0),))], ANY, "a logit scale"),
    Defect("temperature not applied", "head", "The logits were not divided by the temperature.",
        TEMPERATURE, [Head(changes=(("temperature", 1.0),))], ANY, "a temperature"),
    Defect("bias not applied", "head", "The head's bias was not added, and has no gradient.",
        OPTIONS, [Head(bias=False)], ANY, "a bias"),
    Defect("temperature inverted", "head",
        "The logits were multiplied by the temperature, not divided by it.",
        TEMPERATURE, lambda p: [Head(changes=(("temperature", 1.0 / p.options.temperature),))],
        ANY, "a temperature"),
    Defect("temperature applied twice", "head",
        "The logits were divided by the temperature twice.",
        TEMPERATURE, lambda p: [Head(changes=(("temperature", p.options.temperature**2),))],
        ANY, "a temperature"),
    Defect("logit scale before the bias", "head",
        "The bias was added after the logit scale.",
        OPTIONS, [Head(order="scale before the bias")], ANY, "a bias and a logit scale"),
    Defect("softcap before the logit scale", "head",
        "The logits were capped first, and then multiplied by their scale.",
        OPTIONS, [Head(order="softcap before the scale")], ANY, "a softcap and a logit scale"),
    Defect("softcap with the logits as its factor", "head",
        "The hyperbolic tangent of logit / cap was multiplied by the logit, not by the cap.",
        OPTIONS, [Head(order="softcap of the logits")], ANY, "a softcap of labels' logits"),
    Defect("temperature before the bias", "head",
        "The bias was added after the division by the temperature.",
        TEMPERATURE, [Head(order="temperature before the bias")], ANY, "a bias and a temperature"),
    Defect("temperature before the softcap", "head",
        "The logits were divided by the temperature first, and then capped.",
        TEMPERATURE, [Head(order="temperature before the softcap")], ANY,
        "a softcap and a temperature"),
    Defect("softcap without its derivative", "head",
        "The logits were capped, and their gradient was not multiplied by the cap's derivative.",
        OPTIONS, [Head(constant=True)], ANY, "a softcap of labels' logits"),
    Defect("bias gradient lost", "lost", "The bias was added, and its gradient is 0.",
        OPTIONS, [True], ANY, "a bias"),
    Defect("label smoothing not applied", "terms", "The loss is that of one class for each token.",
        SMOOTHING, tokens.no_smoothing, LOSSES, "label smoothing"),
    Defect("label smoothing over the other classes", "terms",
        "The smoothed part was spread over V - 1 classes, all but the label.",
        SMOOTHING, tokens.over_others, LOSSES, "label smoothing"),
    Defect("z-loss not applied", "terms", "The squares of the log-sum-exps were not added.",
        OPTIONS, [Terms(z_loss=0.0)], LOSSES, "a z-loss"),
    Defect("label smoothing over ignored tokens", "terms",
        "Tokens that the labels leave out have the uniform part of label smoothing.",
        SMOOTHING, lambda p: tokens.of_terms(p, UNIFORM), LOSSES, "label smoothing"),
    Defect("softmax of ignored tokens counted", "terms",
        "Tokens that the labels leave out have the probabilities' part of the gradient, without a "
        "label's.",
        COUNT, lambda p: [Terms(everywhere=(SOFTMAX,), padding=x) for x in (True, False)], STEP,
        "labels alone"),
    Defect("z-loss over ignored tokens", "terms",
        "Tokens that the labels leave out have a z-loss.",
        OPTIONS, lambda p: tokens.of_terms(p, Z_LOSS), LOSSES, "a z-loss"),
    Defect("label smoothing and z-loss over ignored tokens", "terms",
        "Tokens that the labels leave out have the uniform part of label smoothing, and a z-loss.",
        SMOOTHING, lambda p: tokens.of_terms(p, UNIFORM, Z_LOSS), LOSSES,
        "label smoothing and a z-loss"),
    Defect("logits rounded to 16 bits", "head",
        "The logits were stored in bfloat16 or float16 on the way to the softmax. Some libraries "
        "choose to, for speed; it is another computation.",
        ROUNDING, logits.LOGITS_ROUNDED, ANY),
    Defect("operands rounded to 16 bits", "head",
        "Hidden states and head were rounded to 16 bits before their product.",
        ROUNDING, logits.OPERANDS_ROUNDED, ANY),
    Defect("gradients rounded to 16 bits", "head",
        "The gradient of the logits, or of the head, went through bfloat16 or float16.",
        LOW_GRADIENTS, logits.GRADIENT_ROUNDED, ANY),
    Defect("gradients added in 16 bits", "head",
        "Gradients, of micro-batches or chunks or ranks, were added up in bfloat16 or float16.",
        LOW_GRADIENTS, logits.ADDED, STEP, BATCHES),
    Defect("products in TF32", "head",
        "Hidden states and head had 11 bits in their product, as tensor cores read float32.",
        ROUNDING, logits.TF32, ANY),
    Defect("entropy without its gradient", "upstream",
        "The gradient of the entropies is missing: a bonus for them does nothing.",
        ENTROPIES, [Upstream(entropy=0.0)], LOGPROBS, "entropies"),
    Defect("entropy's gradient negated", "upstream",
        "The gradient of the entropies has the opposite sign.",
        ENTROPIES, [Upstream(entropy=-1.0)], LOGPROBS, "entropies"),
    Defect("first upstream gradient for all tokens", "upstream",
        "Every token got the gradient that arrived for the first one.",
        UPSTREAM, [Upstream(same="first")], LOGPROBS),
    Defect("mean of the upstream gradients for all tokens", "upstream",
        "Every token got the mean of the gradients that arrived for all.",
        UPSTREAM, [Upstream(same="mean")], LOGPROBS),
    Defect("student and teacher exchanged", "head",
        "The divergence is that of the teacher from the student: the other KL, or a JSD whose "
        "beta is the student's share.",
        f"{DIVERGENCES}#which-kind", logits.exchanged, STEP, "a divergence that is not symmetric"),
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
