"""What the documentation takes from the code and from runs, put in while it is built.

A page holds a marker, `<!-- contract -->` for instance, or `<!-- recipe NAME -->`; `PARTS` has them
all. In its place it gets the contract's rows, what was committed of runs (`docs/data/*.json`,
`bench/results/*.md`), a file of `examples/`, or a command's options as its own parser has them. So
no page can say what the code does not.

`python docs/hooks.py` prints what README.md has of it: its table of speed and memory, and what the
opening figure shows. A test compares.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# mkdocs and the tests load this file by its path.
sys.path.insert(0, str(Path(__file__).parent))

from measured import (
    CAUSAL_LM,
    EXAMPLES,
    RECIPES,
    bounds_part,
    causal_lm_part,
    conformance_divergences_part,
    conformance_part,
    cross_check_part,
    defects_part,
    kernels_part,
    log,
    marked,
    missing,
    recipe_part,
    recipes_part,
    routes_part,
    smallest_rejected_part,
    table,
)

__all__ = ["CAUSAL_LM", "RECIPES", "log", "marked"]  # what the tests ask for

ROOT = Path(__file__).resolve().parents[1]
PARITY = ROOT / "docs" / "data" / "parity.json"
TOKENS = ROOT / "docs" / "data" / "tokens.json"
BENCH = ROOT / "bench" / "results"
SHOWN = "cpu"  # of the committed runs, that of one head
FLOAT32 = 1e-6  # relative; below it two losses differ by the rounding of float32
# What the table of README.md compares, and which contestants of the run each is.
WAYS = {
    "xentlib": r"^xentlib$",
    "full logits": r", full logits$",
    "`F.linear_cross_entropy`": r"^F\.linear_cross_entropy \w+$",
}
IMAGES = (".png", ".svg")

# --- tables ---------------------------------------------------------------------------------------


def contract_table() -> str:
    """The rows of `xentlib.contract`: what each covers, what is measured, the bound."""
    from xentlib.contract import ROWS, Measurement
    from xentlib.tools.parity.report.summary import bound_text

    def bounds(row: Any) -> Iterator[str]:
        for b in row.bounds:
            m = Measurement(row.id, "", "", "", b.metric, 0.0, b.value, True, 0, b.at_least)
            yield f"{b.metric} {bound_text(m)}"

    return table(
        ("row", "input", "what is held", "bound"),
        [(row.id, row.inputs, row.quantity, "; ".join(bounds(row))) for row in ROWS.values()],
    )


def parity_tables(text: str) -> str:
    """A run that `xentlib parity` wrote: verdict, rows, training, and what it was run with."""
    from xentlib.tools.parity.report.document import from_json
    from xentlib.tools.parity.report.summary import (
        backend_name,
        bound_text,
        duration,
        number,
        row_statements,
        summarise,
        value_text,
        verdict,
    )

    result = from_json(text)
    rows = summarise(result, row_statements())
    lines: list[tuple[str, ...]] = []
    for row in rows:
        metrics = [(label, value_text(m), bound_text(m)) for label, m in row.worst]
        for i, metric in enumerate(metrics or [("", "", "")]):
            first = i == 0
            lines.append(
                (
                    row.id if first else "",
                    row.statement if first else "",
                    *metric,
                    number(row.entries) if first and row.entries else "",
                    row.status if first else "",
                )
            )
    taken = f"{len(result.measurements):,} measurements in {duration(result.seconds)}"
    parts = [
        f"**{verdict(result, rows)}.** {taken}.",
        table(
            ("row", "what", "metric", "worst", "bound", "numbers compared", "result"),
            lines,
            right=("worst", "bound", "numbers compared"),
        ),
    ]
    for section in result.sections:
        if not section.curves:
            continue
        curves = [
            (
                backend_name(curve.backend),
                str(len(curve.losses)),
                f"{sum(curve.tokens):,}",
                f"{curve.losses[0]:.6f}",
                f"{curve.losses[-1]:.6f}",
                duration(curve.seconds),
            )
            for curve in section.curves
        ]
        names = (section.name, "steps", "valid tokens", "first loss", "last loss", "time")
        parts.append(table(names, curves, right=names[1:]))
    ran = [(name, f"`{value}`") for name, value in result.environment.items()]
    parts.append(table(("run with", ""), ran))
    return "\n\n".join(parts)


def parser_of(command: str) -> argparse.ArgumentParser:
    """The one that prints `xentlib COMMAND --help`."""
    from xentlib.tools.cli import main

    found: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser) -> None:
        found.append(parser)

    kept = mock.patch.object(argparse.ArgumentParser, "print_help", keep)
    with kept, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return found[0]


def options_table(command: str) -> str:
    """The options of `xentlib COMMAND`, from its parser: names, values, and what `--help` says."""
    parser = parser_of(command)
    rows = []
    for option in parser._actions:
        if isinstance(option, argparse._HelpAction) or not option.option_strings:
            continue
        names = ", ".join(f"`{name}`" for name in option.option_strings)
        values = [option.metavar or option.dest.upper()] if option.nargs != 0 else []
        if option.choices and not option.metavar:
            values = list(option.choices)
        help_ = parser._get_formatter()._expand_help(option) if option.help else ""
        if option.default and "default" not in help_:
            given = option.default if isinstance(option.default, list) else [option.default]
            help_ = f"{help_} (default: {' '.join(map(str, given))})".strip()
        rows.append((names, ", ".join(f"`{value}`" for value in values), help_))
    return table(("option", "value", "what it says"), rows)


# --- where they go --------------------------------------------------------------------------------


def parity_part() -> str:
    name = PARITY.relative_to(ROOT).as_posix()
    if not PARITY.is_file():
        return missing(
            f"`{name}`", f"Run `make parity`, then copy `build/parity/parity.json` to `{name}`."
        )
    return parity_tables(PARITY.read_text(encoding="utf-8"))


def bench_part() -> str:
    files = sorted(BENCH.glob("*.md"))
    if not files:
        return missing(
            f"`{BENCH.relative_to(ROOT).as_posix()}/*.md`",
            "Run `make bench`, then copy `build/bench/bench.md` and its plot there.",
        )
    parts = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\./)?([^()\s/]+\.(?:png|svg))\)", r"](bench-results/\1)", text)
        titled = text.lstrip().startswith("#")
        # Two levels down: the page has its own title, and a part for the benchmark.
        text = re.sub(r"(?m)^(#+ )", r"##\1", text) if titled else f"### {file.stem}\n\n{text}"
        parts.append(text.strip())
    return "\n\n".join(parts)


def speed_table() -> str:
    """Time and extra memory of loss and gradients in the CPU run, and how far the loss is from
    xentlib's where 16-bit logits move it."""
    runs = json.loads((BENCH / "cpu.json").read_text(encoding="utf-8"))["runs"]
    lines = []
    for run in (run for run in runs if run["case"]["name"] == SHOWN):
        found = [row for row in run["rows"] if row["kind"] == "loss + gradient" and row["ratio"]]
        ours = next(row for row in found if row["contestant"] == "xentlib")
        cells = []
        for pattern in WAYS.values():
            rows = [row for row in found if re.search(pattern, row["contestant"])]
            off = max((abs(row["loss"] / ours["loss"] - 1) for row in rows), default=0.0)
            parts = [
                least_to_most("ms", (1e3 * row["time"]["median"] for row in rows)),
                least_to_most("MiB", (row["peak_bytes"] / 2**20 for row in rows)),
                f"loss off by {100 * off:.1f} %" if off > FLOAT32 else "",
            ]
            cells.append(", ".join(part for part in parts if part))
        lines.append((f"{run['backend']}, {run['dtype']}", *cells))
    return table(("", *WAYS), lines, tuple(WAYS))


def least_to_most(unit: str, numbers: Iterable[float]) -> str:
    """`7 ms`, or `3 to 7 ms`; nothing of no numbers."""
    shown = [f"{number:,.0f}" for number in sorted(numbers)]
    return f"{' to '.join(dict.fromkeys((shown[0], shown[-1])))} {unit}" if shown else ""


def tokens_said() -> tuple[str, str, str]:
    """Of the figure that README and site open with: what each half shows, and its caption."""
    found = json.loads(TOKENS.read_text(encoding="utf-8"))
    last = max(row["tokens"] for row in found["rows"])
    rows = [row for row in found["rows"] if row["tokens"] == last]
    mib = "; ".join(f"{row['way']} {row['peak_bytes'] / 2**20:,.0f}" for row in rows)
    ms = "; ".join(f"{row['way']} {1e6 * row['seconds'] / last:,.0f}" for row in rows)
    return (
        f"Extra memory against tokens. MiB at {last:,} tokens: {mib}.",
        f"CPU time against tokens. Milliseconds per 1,000 tokens at {last:,}: {ms}.",
        found["about"],
    )


def opening_part() -> str:
    *halves, caption = tokens_said()
    panels = [
        f"![{said}](figures/{name}-{mode}.svg#only-{mode}){{ width=360 }}\n"
        for name, said in zip(("memory", "time"), halves, strict=True)
        for mode in ("light", "dark")
    ]
    return "".join(panels) + f"\n{caption}"


PARTS = {
    "contract": contract_table,
    "parity": parity_part,
    "bench": bench_part,
    "opening": opening_part,
    "kernels": kernels_part,
    "causal_lm": causal_lm_part,
    "recipes": recipes_part,
    "defects": defects_part,
    "cross_check": cross_check_part,
    "conformance": conformance_part,
    "bounds": bounds_part,
    "smallest_rejected": smallest_rejected_part,
    "conformance_divergences": conformance_divergences_part,
    "parity_options": lambda: options_table("parity"),
    "bench_options": lambda: options_table("bench"),
    "doctor_options": lambda: options_table("doctor"),
    "audit_options": lambda: options_table("audit"),
    "explain_options": lambda: options_table("explain"),
    "plan_options": lambda: options_table("plan"),
    "routes": routes_part,
}
MARKER = re.compile(r"(?m)^<!-- (\w+)(?: (\w+))? -->$")


def fill(markdown: str) -> str:
    """`markdown` with each marker replaced by its part; an unknown marker is a warning."""

    def part(found: re.Match[str]) -> str:
        name = found[1]
        if name == "recipe" and found[2]:
            return recipe_part(found[2])
        if name in PARTS:
            return PARTS[name]()
        return missing(f"a part named {name!r}", f"The parts are {', '.join(PARTS)}.")

    return MARKER.sub(part, markdown)


# --- what mkdocs calls ----------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Read the same package as mkdocstrings does: the sources beside this page."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return config


def on_files(files: Any, config: Any) -> Any:
    """The benchmark's plots and the examples lie outside of docs/."""
    from mkdocs.structure.files import File

    images = [path for path in BENCH.glob("*") if path.suffix in IMAGES]
    for folder, paths in (("bench-results", images), ("examples", EXAMPLES.glob("*.py"))):
        for path in sorted(paths):
            files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return fill(markdown)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(speed_table(), *tokens_said(), sep="\n\n")
