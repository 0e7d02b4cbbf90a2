"""Which cases `make test` runs: writes .ci/seconds.tsv, of build/seconds.tsv of a whole run.

    python .ci/cases.py [--share 0.36]

Each function has the same number of processor seconds in each backend, as many as the budget
allows, and as many cases as that is of its own, but one at least: what is cheap runs whole, and
what is dear by its first case and others at equal distances. Functions of WHOLE run whole. Each
row of the contract and each refusal that some test has shown is shown by a case that runs: where
none of them does, the cheapest function that does is run whole.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))

from helpers.seconds import BUILD, HEADER, TABLE, spread  # noqa: E402 - of these sources

WHOLE = ("test_examples::", "test_docs_errors::")  # the README's snippets are of a function alone


class Case(NamedTuple):
    processor: float
    took: float
    shown: frozenset[str]


Functions = dict[str, list[Case]]


def read(path: Path) -> Functions:
    functions: Functions = defaultdict(list)
    for line in path.read_text().splitlines():
        processor, took, function, _, *shown = line.split("\t")
        functions[function].append(Case(float(processor), float(took), frozenset(shown)))
    return functions


def kept_of(functions: Functions, share: float) -> dict[str, int]:
    """So many cases of each function, at so many seconds of each."""
    kept = {}
    for name, cases in functions.items():
        each = sum(case.processor for case in cases) / len(cases)
        whole = name.startswith(WHOLE) or each * len(cases) <= share
        kept[name] = len(cases) if whole else max(1, int(share / each))
    chosen = {
        name: [cases[i] for i in spread(len(cases), kept[name])]
        for name, cases in functions.items()
    }
    missing = shown_by(functions) - shown_by(chosen)
    by_cost = sorted(functions, key=lambda name: sum(x.processor for x in functions[name]))
    for name in by_cost:
        if missing & {x for case in functions[name] for x in case.shown}:
            kept[name] = len(functions[name])
            missing -= {x for case in functions[name] for x in case.shown}
    return kept


def shown_by(functions: Functions) -> set[str]:
    return {x for cases in functions.values() for case in cases for x in case.shown}


def cost(functions: Functions, kept: dict[str, int]) -> float:
    return sum(
        sum(case.processor for case in cases) / len(cases) * kept[name]
        for name, cases in functions.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.36, help="of the seconds of all cases")
    parser.add_argument("--seconds", type=Path, default=BUILD / "seconds.tsv")
    asked = parser.parse_args()
    functions = read(asked.seconds)
    everything = {name: len(cases) for name, cases in functions.items()}
    budget = asked.share * cost(functions, everything)
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        within = cost(functions, kept_of(functions, middle)) <= budget
        low, high = (middle, high) if within else (low, middle)
    kept = kept_of(functions, low)
    rows = [
        (sum(x.processor for x in cases), sum(x.took for x in cases), len(cases), kept[name], name)
        for name, cases in functions.items()
    ]
    rows.sort(key=lambda row: (-row[1], row[4]))
    lines = [f"{x:.1f}\t{y:.1f}\t{n}\t{k}\t{name}\n" for x, y, n, k, name in rows]
    TABLE.write_text(HEADER + "".join(lines))
    count = sum(len(cases) for cases in functions.values())
    print(
        f"{sum(kept.values())} of {count} cases, {cost(functions, kept):.0f} processor seconds, "
        f"{low:.2f} of each function in each backend"
    )


if __name__ == "__main__":
    main()
