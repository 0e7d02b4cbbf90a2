"""What an audit found: data, and the text that a person reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from textwrap import fill
from typing import Any

import numpy as np

import xentlib
from xentlib.contract import U
from xentlib.tools.audit.defects import BY_NAME

SCHEMA = "xentlib.audit/1"
BACKENDS = {"torch": "PyTorch", "jax": "JAX"}
NONE_OF_THESE = "wrong, and none of these"


@dataclass(frozen=True, slots=True)
class Finding:
    """One quantity that is wrong.

    Attributes:
        of: "gradients of the head", "gradient of the bias" if that of the weight is right, "loss",
            "gradient of the hidden states", "values".
        defects: sets of defects that each explain it; several where they cannot be told apart on
            this problem, none where nothing fits.
        factor: number that is left over beside the defects, 1 if none.
        off: rho / u from the oracle.
        distance: rho / u from the numbers of the defects, or 1 - cosine of the angle between the
            error and what rounding does, if it is `rounded`; None where nothing fits.
        note: what else was seen.
        map: what every token counts for, in lines of text; empty of a loss, and where no factors
            give the gradient.
    """

    of: str
    defects: tuple[tuple[str, ...], ...]
    factor: float
    off: float
    distance: float | None
    note: str = ""
    map: tuple[str, ...] = ()
    rounded: bool = False

    @property
    def title(self) -> str:
        sets = [" and ".join(names) for names in self.defects]
        near = abs(self.factor - 1.0) < 1e-4
        sign, beside = "+" if self.factor > 1.0 else "-", abs(self.factor - 1.0)
        number = f"1 {sign} {beside:.2g}" if near else f"{self.factor:.6g}"
        power = float(np.log2(abs(self.factor) or 1.0))
        scale = (
            f" (2^{round(power)}, as of a loss scale)"
            if power > 7 and abs(power - round(power)) < 1e-6
            else ""
        )
        times = f"off by a factor of {number}{scale}"
        if self.factor != 1.0:
            sets = [f"{names} and {times}" if names else times for names in sets]
        return ", or ".join(sets) or NONE_OF_THESE


@dataclass(frozen=True, slots=True)
class Report:
    """Result of an audit. `str(report)` is the text, `report.passed` whether nothing was found.

    Attributes:
        backend: "torch" or "jax".
        kind: "step", "loss" or "logprobs".
        problem: what the step was given, in words.
        findings: what is wrong; empty if nothing.
        held: rho / u from the oracle of each quantity that was compared.
        looked_for: defects that would have shown.
        not_looked_for: the others, each with the reason.
        not_compared: quantities that the step did not give.
        there: what breaks a step that is right on plain numbers, and what it does there.
        right_there: what does not.
        notes: what is as it may be, and worth knowing.
    """

    backend: str
    kind: str
    problem: str
    findings: tuple[Finding, ...]
    held: dict[str, float]
    looked_for: tuple[str, ...]
    not_looked_for: dict[str, str] = field(default_factory=dict)
    not_compared: tuple[str, ...] = ()
    there: dict[str, str] = field(default_factory=dict)
    right_there: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings and not self.there

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """The verdict first; with `verbose` also what was looked for, and what was not and why."""
        lines: list[str] = []
        for finding in self.findings:
            lines.append(f"{'and ' if lines else ''}{finding.of}: {finding.title}")
        if not lines:
            verdict = f"right on plain numbers, and wrong with {_names(self.there)}"
            lines = [verdict if self.there else "nothing found"]
        lines += [f"{BACKENDS[self.backend]}, {self.kind}: {self.problem}", ""]
        for finding in self.findings:
            lines += self._said(finding)
        if not self.findings:
            compared = ", ".join(f"{name} ({x:.3g})" for name, x in self.held.items())
            lines += [_filled(f"compared (rho / u from the oracle): {compared}")]
        if self.there:
            lines += ["wrong with:"]
            lines += [_filled(f"{name}: {what}", "  ") for name, what in self.there.items()]
        if self.right_there:
            lines += [_filled(f"right with: {_names(self.right_there)}")]
        lines += [_filled(f"note: {note}") for note in self.notes]
        if self.not_compared:
            lines += [_filled(f"not compared, as it was not given: {_names(self.not_compared)}")]
        if not verbose:
            some, others = len(self.looked_for), len(self.not_looked_for)
            return "\n".join([*lines, f"looked for {some} defects, {others} not: -v lists them"])
        lines += [_filled(f"looked for: {_names(self.looked_for)}")]
        reasons: dict[str, list[str]] = {}
        for name, why in self.not_looked_for.items():
            reasons.setdefault(why, []).append(name)
        lines += [
            _filled(f"not looked for ({why}): {_names(names)}") for why, names in reasons.items()
        ]
        return "\n".join(lines)

    def _said(self, finding: Finding) -> list[str]:
        lines = [f"{finding.of}:"]
        pages = []
        for name in dict.fromkeys(name for names in finding.defects for name in names):
            sentence = BY_NAME[name].sentence
            if finding.of in ("loss", "values"):  # after a colon stands what gradients do
                sentence = f"{sentence.partition(':')[0].rstrip('.')}."
            lines.append(_filled(f"{name}: {sentence}", "  "))
            pages.append(page(BY_NAME[name].page(self.backend)))
        size = f"relative distance to the oracle {finding.off * U:.2g}"
        if finding.rounded and finding.distance is not None:
            size += f"; the error points as that rounding's does, cosine {1 - finding.distance:.3g}"
            size += " (1: the same direction, 0: unrelated)"
        elif finding.distance is not None and finding.distance < finding.off:
            size += f", to what this gives {finding.distance * U:.2g}"
        lines.append(_filled(f"{size}{'; ' + finding.note if finding.note else ''}", "  "))
        lines += [f"  cure: {page}" for page in dict.fromkeys(pages)]
        lines += [f"  {line}" for line in finding.map]
        return [*lines, ""]

    def to_json(self) -> str:
        document = {"schema": SCHEMA, "passed": self.passed, **asdict(self)}
        return json.dumps(document, indent=1, default=float) + "\n"


@cache
def page(name: str) -> str:
    """Where a page of docs/ can be read: at the address of the sources that the package has, of
    this version; without one by its name."""
    try:
        urls = metadata("xentlib").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    for url in urls:
        label, _, address = url.partition(", ")
        if label == "Source":
            return f"{address.rstrip('/')}/blob/v{xentlib.__version__}/docs/{name}"
    return f"docs/{name} of xentlib {xentlib.__version__}'s sources"


def _names(names: Any) -> str:
    return ", ".join(names) or "nothing"


def _filled(text: str, indent: str = "") -> str:
    return fill(
        text, 98, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
