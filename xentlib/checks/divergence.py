"""A divergence's kind and teacher, and what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xentlib.arguments import DivergenceArguments, LogitsDivergenceArguments
from xentlib.checks.validators import (
    ArraySpec,
    Refusals,
    check_choice,
    check_device,
    check_flag,
    check_floating,
    check_rule,
    quoted,
)
from xentlib.math.divergence import KINDS
from xentlib.math.top_k import MOST
from xentlib.options import (
    DIVERGENCE_OUTPUTS,
    DIVERGENCES,
    RULES,
    TAILS,
    VOCABS,
    DivergenceReduction,
)
from xentlib.teacher import UNSTATED, TeacherHead, TeacherLogits, TeacherTopK

REDUCTIONS: tuple[DivergenceReduction, ...] = ("mean", "sum", "none")
DIVERGING = Refusals(
    ValueError,
    cut_alike="a teacher's head must be sharded as the student's, over `vocab_parallel` and then "
    "by `fully_shard`, with `gather='hidden'`; got one that is not. Shard it so: each rank of the "
    "student has the same rows of both.",
    split="a teacher's head must be whole beside a student's whole head; got one that DeepSpeed "
    "AutoTP has split. Leave the teacher out of `tensor_parallel`, or pass its logits.",
    beta="`beta` must be given with `kind='jsd'`, and with nothing else; got {beta} with "
    "{kind!r}. {way}",
    labels="`labels` must be given with `nll_weight`; got None with {nll_weight:g}. Pass the "
    "class of each token, or leave `nll_weight` out.",
    unlabelled="`labels` must be given where `outputs` has 'logprobs'; got None. Pass the class of "
    "each token.",
    each="`denominator` must be None with `reduction='none'`, which divides nothing; got one. "
    "Divide the loss of each token, or pass `reduction='sum'`.",
    outputs="`outputs` must be a tuple of names from {names}; got {outputs!r}. Pass for instance "
    "`outputs=('divergence',)`.",
    tokens="`{what}` must be of the same tokens as the student's `{name}` {leading}; got shape "
    "{shape}. Pass what the teacher computes for the same sequences.",
    vocabulary="a teacher must have the same {size} classes as the student; got {other}. Pass "
    "`vocab='intersect'` where the first classes are the same, or the rows, or columns, that both "
    "have: a class that one of them lacks has no logit there, and no probability.",
    intersect="`vocab` must be 'same' {where}; got 'intersect', which takes the first rows of "
    "whole heads. {way}",
    nll_of_common="`nll_weight` must be 0 with `vocab='intersect'` for a student of more classes "
    "than its teacher ({student} and {teacher}); got {nll_weight:g}, whose NLL would be over the "
    "first {teacher} alone. Add `nll_weight * chunked_nll(hidden, weight, labels).loss`, and pass "
    "`where=labels < {teacher}` here where labels are mixed in.",
    shard="a teacher must have the {size} classes that this rank has of the student's; got "
    "{other}. Pass these columns of its logits, or these rows of its head.",
    stream="`gather` must be 'head' or 'hidden' for a divergence; got 'stream', by which the rows "
    "of one head pass. Pass 'hidden', with which no rank holds [V, H] either.",
    logits_stay="a teacher must be a `TeacherHead` where hidden states travel; got `TeacherLogits` "
    "with {route!r}: each rank has logits of its own tokens. Pass the teacher's hidden states and "
    "head, or `gather='head'`.",
    probabilities="`logits` of a `TeacherLogits` must be logits, or log-probabilities; got rows of "
    "numbers >= 0 that add up to 1. Pass what the softmax is taken of, or their `log()`.",
    placed="a teacher must be placed as the student is: tokens and vocabulary over the same axes "
    "of one mesh; got another placement. Shard its head and hidden states alike.",
    entropy_of_few="`outputs` must not have 'teacher_entropy' for a `TeacherTopK`, whose other "
    "classes are not known; got it. Leave it out.",
    stored="`temperature` must be that of the stored log-probabilities; got {call} beside a "
    "`TeacherTopK` of {stored}. State the one at which they were computed, "
    "`TeacherTopK(ids, logprobs, temperature=...)`, and pass the same.",
    tempered_few="`temperature` must be 1 with `nll_weight` for a `TeacherTopK`; got another, and "
    "the labels' NLL is of logits without it. Add `chunked_nll` of the same hidden states instead.",
    dropped="`tail` must be 'class' or 'renormalize' with kind={kind!r}; got 'drop'. Pass 'class'.",
    ids_shape="`{name}` must have shape {leading} + (K,), as the teacher's `ids`; got {shape}. "
    "Pass one log-probability for each class.",
    mass="`logprobs` must be log-probabilities, of which those of a token add up to 1 at most; got "
    "{total:.4g}. Pass log-softmax values over the whole vocabulary, not logits.",
    unstated="`{name}` must be passed to `TeacherHead` where the student has one; got {value} for "
    "the student alone. Pass the teacher's, or `{name}={absent}` for a teacher without.",
    wider="a teacher must not be float64 beside a student in {dtype}; got float64. Cast it, or "
    "pass `compute_dtype='float64'`.",
)
TEACHERS = Refusals(
    TypeError,
    teacher="`teacher` must be a `TeacherHead`, `TeacherLogits` or `TeacherTopK`; got {came}. Wrap "
    "it: `TeacherHead(hidden, weight)` of its hidden states and head, or `TeacherLogits(logits)`.",
    logits="`teacher` must be `TeacherLogits`; got {came}. Wrap its logits, or call "
    "`chunked_divergence` with the hidden states of both.",
)


@contextmanager
def of_teacher() -> Iterator[None]:
    """What is refused within is of the teacher's arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"of `teacher`: {error}") from None


def check_kind(call: DivergenceArguments | LogitsDivergenceArguments) -> None:
    check_choice("kind", call.kind, DIVERGENCES)
    takes_beta = KINDS[call.kind].takes_beta
    if takes_beta and call.beta is not None:
        check_rule("beta", call.beta, RULES["beta"])
        return
    way = "Pass `beta=0.5` for the symmetric one." if call.beta is None else "Leave it out."
    DIVERGING.require("beta", not takes_beta and call.beta is None, **_beta(call), way=way)


def _beta(call: Any) -> dict[str, Any]:
    return {"beta": call.beta, "kind": call.kind}


def check_only_logits(call: LogitsDivergenceArguments) -> None:
    teacher: object = call.teacher
    if not isinstance(teacher, TeacherLogits):
        TEACHERS.refuse("logits", came=type(teacher).__name__)


def check_divergence(call: DivergenceArguments) -> None:
    """What only `chunked_divergence` has, before the rest of a call is validated."""
    check_kind(call)
    teacher: object = call.teacher
    if not isinstance(teacher, (TeacherHead, TeacherLogits, TeacherTopK)):
        TEACHERS.refuse("teacher", came=type(teacher).__name__)
    if isinstance(teacher, TeacherTopK):
        check_top_k(call, teacher)
    check_choice("vocab", call.vocab, VOCABS)
    check_flag("temperature_squared", call.temperature_squared)
    check_choice("reduction", call.reduction, REDUCTIONS)
    check_rule("nll_weight", call.nll_weight, RULES["nll_weight"])
    DIVERGING.require("each", call.reduction != "none" or call.denominator is None)
    names = call.outputs
    known = isinstance(names, (tuple, list, set, frozenset))
    known = known and all(name in DIVERGENCE_OUTPUTS for name in names)
    DIVERGING.require("outputs", known, names=quoted(DIVERGENCE_OUTPUTS), outputs=names)
    if call.labels is None:
        DIVERGING.require("labels", not call.nll_weight, nll_weight=call.nll_weight)
        DIVERGING.require("unlabelled", "logprobs" not in names)


def stated(call: DivergenceArguments, teacher: TeacherHead[Any]) -> TeacherHead[Any]:
    """With what it was not passed as a head without has it; beside a student that has a softcap or
    scale its own must be passed."""
    without: dict[str, Any] = {}
    for name, absent in (("softcap", None), ("logit_scale", 1.0)):
        if getattr(teacher, name) is UNSTATED:
            value, without[name] = getattr(call, name), absent
            if value is not None and not (isinstance(value, (int, float)) and value == absent):
                DIVERGING.refuse("unstated", name=name, value=shown(value), absent=absent)
    return teacher._replace(**without)


def check_top_k(call: DivergenceArguments, teacher: TeacherTopK[Any]) -> None:
    """What such a teacher does not go with."""
    with of_teacher():
        check_choice("tail", teacher.tail, TAILS)
    words = {
        "where": "for a `TeacherTopK`",
        "way": "Set its ids that the student does not have to -1, which leaves them to the tail.",
    }
    DIVERGING.require("intersect", call.vocab == "same", **words)
    DIVERGING.require("dropped", KINDS[call.kind].drops or teacher.tail != "drop", kind=call.kind)
    DIVERGING.require("entropy_of_few", "teacher_entropy" not in call.outputs)
    plain = isinstance(call.temperature, (int, float)) and call.temperature == 1
    DIVERGING.require("tempered_few", plain or not call.nll_weight)
    stored, numbers = teacher.temperature, (int, float)
    if stored is None:
        DIVERGING.require("stored", plain, call=shown(call.temperature), stored="none stated")
    elif isinstance(stored, numbers) and isinstance(call.temperature, numbers):
        same = stored == call.temperature
        DIVERGING.require("stored", same, call=call.temperature, stored=stored)


def shown(number: object) -> str:
    return f"{number:g}" if isinstance(number, (int, float)) else "an array"


def check_logprobs(ids: ArraySpec, logprobs: ArraySpec) -> None:
    """Of a teacher's classes, whose ids have been checked."""
    check_floating("logprobs", logprobs)
    same, leading = logprobs.shape == ids.shape, ids.shape[:-1]
    DIVERGING.require("ids_shape", same, name="logprobs", leading=leading, shape=logprobs.shape)
    check_device("logprobs", logprobs, ids, "ids")


def check_mass(total: float) -> None:
    """The largest sum of the probabilities of a token's classes."""
    DIVERGING.require("mass", total <= MOST, total=total)


def check_stored(call: object, stored: object, *, same: bool) -> None:
    """Temperatures of which one is an array, where they can be read."""
    DIVERGING.require("stored", same, call=shown(call), stored=shown(stored))


def check_no_probabilities(some: Any) -> None:
    """Refuse a softmax in place of logits, by those of some valid tokens, [any, V] float32."""
    if not some.shape[0] or some.shape[1] < 2:
        return
    softmax = bool((some >= 0).all()) and bool((abs(some.sum(1) - 1) < 0.01).all())
    DIVERGING.require("probabilities", not softmax)


def check_teacher_logits(
    teacher: TeacherLogits[Any],
    name: str,
    source: ArraySpec,
    columns: int | None,
    compute: str,
    *,
    sharded: bool = False,
) -> None:
    """Those of a student whose argument `name` has the tokens; `columns` on this rank, if they are
    to be compared here."""
    logits, leading = teacher.logits, source.shape[:-1]
    check_floating("logits", logits)
    check_teacher_tokens("logits", logits, name, leading)
    if columns is not None:
        check_vocabulary(columns, logits.shape[-1], sharded=sharded)
    check_device("logits", logits, source)
    DIVERGING.require("wider", logits.dtype != "float64" or compute == "float64", dtype=compute)
    if teacher.temperature is not None:
        check_rule("temperature", teacher.temperature, RULES["temperature"], leading)


def check_teacher_tokens(what: str, x: ArraySpec, name: str, leading: tuple[int, ...]) -> None:
    """Of its hidden states or logits, beside the student's argument `name`."""
    same = x.shape[:-1] == leading and len(x.shape) == len(leading) + 1
    DIVERGING.require("tokens", same, what=what, name=name, leading=leading, shape=x.shape)


def check_whole(whole: object) -> None:
    """Of heads whose first classes are taken."""
    way = (
        "Pass `gather='head'` where a wrapper has sharded them, and over vocabulary shards "
        "`PaddedVocab(group, classes)` of the classes that both have as `vocab_parallel`."
    )
    over = {"where": "where ranks or devices share the vocabulary", "way": way}
    DIVERGING.require("intersect", whole, **over)


def check_common(student: int, teacher: int, nll_weight: float) -> None:
    """Of numbers of classes, whose first are taken."""
    numbers: dict[str, Any] = {"student": student, "teacher": teacher, "nll_weight": nll_weight}
    DIVERGING.require("nll_of_common", not nll_weight or student <= teacher, **numbers)


def check_vocabulary(size: int, other: int, *, sharded: bool = False) -> None:
    """Of numbers of classes, or of those of a shard."""
    name = "shard" if sharded else "vocabulary"
    DIVERGING.require(name, size == other, size=size, other=other)
