"""What explains the difference of log-probabilities: data, and the text that a person reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import fill

from xentlib.tools.harness.table import aligned

SCHEMA = "xentlib.explain/1"
NONE_OF_THESE = (
    "None of the causes that were looked for, which are listed below, explains it, alone or in a "
    "pair. What is left cannot be distinguished here: another head, other hidden states, or a "
    "cause that is not listed."
)
NUMBERS = ("", "One cause", "Two causes", "Three causes", "Four causes")
REMAINS = "other hidden states, another head, or a cause beyond these"


@dataclass(frozen=True, slots=True)
class Effect:
    """A cause in a set that explains a difference.

    Attributes:
        name: of `CAUSES`.
        form: which of its forms, empty where it has one alone.
        sentence: how the log-probabilities were computed.
        page: what to do, a page of docs/.
        mean, most: by how much it moves the log-probabilities, beside the others of its set.
    """

    name: str
    form: str
    sentence: str
    page: str
    mean: float
    most: float

    @property
    def title(self) -> str:
        return f"{self.name} ({self.form})" if self.form else self.name


@dataclass(frozen=True, slots=True)
class Side:
    """Log-probabilities against the float64 oracle's.

    Attributes:
        of: "sampler" or "trainer".
        mean, most: of their |difference|.
        units: largest difference in units of what float32 rounding may give; 1 or less is none.
        causes: sets of causes that explain it, each by size; several where these tokens cannot
            distinguish them, none where nothing does.
        whole: whether they explain all of it, up to rounding.
        left: mean |difference| beside the first set.
        one_rounding: what it would be after one more rounding of the hidden states to bfloat16,
            to compare with; None where all is explained.
    """

    of: str
    mean: float
    most: float
    units: float
    causes: tuple[tuple[Effect, ...], ...]
    whole: bool
    left: float
    one_rounding: float | None = None

    @property
    def passed(self) -> bool:
        return self.units <= 1.0

    def lines(self) -> list[str]:
        who = f"The {self.of}'s log-probabilities"
        if self.passed:
            bound = f"{self.units:.2g} of what float32 rounding may give"
            off = f"off by {self.most:.2g} at most, {bound}"
            return [_filled(f"{who} are right, {off}. There is nothing to explain."), ""]
        off = f"{who} are off by {self.mean:.2g} in the mean, {self.most:.2g} at most"
        rounding = f"{self.one_rounding or 0.0:.2g}"
        compare = f"One more rounding of the hidden states to bfloat16 gives {rounding}."
        if not self.causes:
            return [_filled(f"{off}. {NONE_OF_THESE} {compare}"), ""]
        first, *others = self.causes
        number = f"{NUMBERS[len(first)]} explain{'s' * (len(first) == 1)}"
        how = "it, up to rounding" if self.whole else "a part of it"
        lines = [_filled(f"{off}. {number} {how}{', the larger first' * (len(first) > 1)}:")]
        for effect in first:
            size = f"It moves them by {effect.mean:.2g} in the mean, {effect.most:.2g} at most."
            lines.append(f"  {effect.title}")
            lines.append(_filled(f"{effect.sentence} {size}", "    "))
            lines.append(f"    what to do: docs/{effect.page}")
        if others:
            sets = "; or ".join(" and ".join(effect.title for effect in some) for some in others)
            lines.append(_filled(f"These tokens cannot distinguish it from: {sets}.", "  "))
        if not self.whole:
            left = f"What remains is {self.left:.2g} in the mean, which none explains: {REMAINS}."
            lines.append(_filled(f"{left} {compare}", "  "))
        return [*lines, ""]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Importance ratios exp(trainer - sampler).

    Attributes:
        removed: "nothing", or which cause is removed beside those before it.
        outside: share outside of [0.9, 1.1].
        most: largest |ratio - 1|.
    """

    removed: str
    outside: float
    most: float


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `explain`. `str(report)` is the text, `report.passed` whether nothing is off.

    Attributes:
        tokens, of_tokens: how many were used, of how many.
        vocab_size, hidden_size: of the head.
        sides: the sampler's log-probabilities, and the trainer's if they were given.
        ratios: as given, then with one cause after the other removed, the largest first.
        looked_for: causes that would have shown.
        not_looked_for: the others, each with the reason.
    """

    tokens: int
    of_tokens: int
    vocab_size: int
    hidden_size: int
    sides: tuple[Side, ...]
    ratios: tuple[Ratios, ...]
    looked_for: tuple[str, ...]
    not_looked_for: dict[str, str]

    @property
    def passed(self) -> bool:
        return all(side.passed for side in self.sides)

    def __str__(self) -> str:
        used = f"{self.tokens:,}" + f" of {self.of_tokens:,}" * (self.tokens < self.of_tokens)
        sizes = f"V = {self.vocab_size:,}, H = {self.hidden_size:,}"
        lines = [f"{used} tokens, {sizes}, against the float64 oracle", ""]
        lines += [line for side in self.sides for line in side.lines()]
        trainer = "the trainer's" if len(self.sides) > 1 else "the oracle's as the trainer's"
        lines.append(f"importance ratios exp(trainer - sampler), {trainer}:")
        rows = [("removed", "outside [0.9, 1.1]", "max |ratio - 1|")]
        rows += [
            (f"{'and ' * (k > 1)}{x.removed}", f"{x.outside:.1%}", f"{x.most:.2g}")
            for k, x in enumerate(self.ratios)
        ]
        lines += [f"  {line}" for line in aligned(rows, right=(1, 2))]
        lines += ["", _filled(f"looked for: {_names(self.looked_for)}")]
        others = [f"{name} ({why})" for name, why in self.not_looked_for.items()]
        lines.append(_filled(f"not looked for: {_names(others)}"))
        return "\n".join(lines)

    def to_json(self) -> str:
        document = {"schema": SCHEMA, "passed": self.passed, **asdict(self)}
        return json.dumps(document, indent=1, default=float) + "\n"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _filled(text: str, indent: str = "") -> str:
    return fill(text, 98, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
