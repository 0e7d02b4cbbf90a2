"""What the audit says of the planted steps, against what it should say. Printed as a table by
`python -m helpers.planted.verdicts [MODULE ...]` in `tests/`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib import import_module
from typing import Any, NamedTuple

from helpers.planted import Planted

TORCH = (
    "torch_labels",
    "torch_divisors",
    "torch_logits",
    "torch_numerics",
    "torch_loops",
    "functions",
    "torch_right",
)
RANKS = ("ranks_wrong", "ranks_right")
JAX = ("jax_wrong", "jax_right")
WELL = ("right", "named", "mapped", "vague")
LISTS = (
    r"^(PyTorch, |JAX, |compared|not compared|looked for|not looked for|right with|note:)"
    r".*(\n  .*)*"
)


class Verdict(NamedTuple):
    """of: "right"; of wrong steps "named" (truthfully), "mapped" (numbers without a name that
    explain the gradient), "vague" (wrong, and no more), "misnamed" (nothing of what is wrong is
    said), "missed"; of right ones "false"; "raised"."""

    of: str
    title: str
    text: str


def table(module: str) -> dict[str, Planted]:
    return dict(import_module(f"helpers.planted.{module}").TABLE)


def judged(row: Planted, audit: Any) -> Verdict:
    try:
        report = audit(row.step, **{"kind": "step", **row.options})
    except Exception as error:  # noqa: BLE001 a table has a row for each
        return Verdict("raised", type(error).__name__, str(error))
    text = str(report)
    there = getattr(report, "there", {})  # breaks it, and is not among plain numbers
    title = "; ".join(
        [*(x.title for x in report.findings), *(f"{k}: {x}" for k, x in there.items())]
    )
    if row.expected == "right" or report.passed:
        of = {"right": ("false", "right"), "wrong": ("", "missed")}[row.expected][report.passed]
        return Verdict(of, title, text)
    # Not the lists of what was compared or looked for, which have every word.
    said = re.sub(LISTS, "", text, flags=re.MULTILINE)
    true = all(re.search(pattern, said, re.IGNORECASE) for pattern in row.axis)
    if report.findings and report.findings[0].title.startswith("wrong, and none"):
        left = re.search(r"with (\S+) of it left over", said)
        explained = left is not None and float(left[1]) < 1e-5
        return Verdict("mapped" if explained else "vague", title, text)
    if report.findings and report.findings[0].title.startswith("off by a factor"):
        return Verdict("mapped", title, text)
    return Verdict("named" if true else "misnamed", title, text)


def on_rank(
    rank: int, world: int, modules: tuple[str, ...], names: list[str] | None = None
) -> dict[str, Verdict]:
    """Of the steps of these names, or of all."""
    from xentlib.torch.audit import audit

    rows = {name: row for module in modules for name, row in table(module).items()}
    return {
        name: judged(row, audit) for name, row in rows.items() if names is None or name in names
    }


def main(modules: list[str]) -> None:
    found: dict[str, Verdict] = {}
    rows: dict[str, Planted] = {}
    for module in modules:
        rows.update({f"{module}.{name}": row for name, row in table(module).items()})
        if module in RANKS:
            from helpers.planted.verdicts import on_rank as by_its_module  # not of __main__
            from helpers.ranks import launch

            verdicts, _ = launch(2, by_its_module, (module,))
        else:
            backend = "jax" if module in JAX else "torch"
            audit = import_module(f"xentlib.{backend}.audit").audit
            verdicts = {name: judged(row, audit) for name, row in table(module).items()}
        found.update({f"{module}.{name}": v for name, v in verdicts.items()})
    for name, verdict in found.items():
        needs = f" (needs {rows[name].needs})" if rows[name].needs else ""
        print(f"{verdict.of}\t{name}\t{verdict.title or verdict.text[:90]!r}{needs}")
    print(dict(Counter(x.of for x in found.values())))


if __name__ == "__main__":
    main(sys.argv[1:] or [*TORCH, *RANKS, *JAX])
