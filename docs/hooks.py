"""What the documentation takes from the code and from runs, put in while it is built.

A page holds a marker, `<!-- contract -->` for instance, or `<!-- recipe NAME -->`; `PARTS` has them
all. In its place it gets the contract's rows, what was committed of runs (`docs/data/*.json`,
`bench/results/*.md`), a file of `examples/`, or a command's options as its own parser has them. So
no page can say what the code does not.

`python docs/hooks.py` prints what README.md holds of it: the contract's table, two of the CPU
benchmark, and what the opening figure shows. A test compares.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PARITY = ROOT / "docs" / "data" / "parity.json"
KERNELS = ROOT / "docs" / "data" / "kernels.json"
CAUSAL_LM = ROOT / "docs" / "data" / "causal_lm.json"
RECIPES = ROOT / "docs" / "data" / "recipes.json"
CONFORMANCE = ROOT / "docs" / "data" / "conformance.json"
CROSS_CHECK = ROOT / "docs" / "data" / "cross_check.json"
TOKENS = ROOT / "docs" / "data" / "tokens.json"
EXAMPLES = ROOT / "examples"
BENCH = ROOT / "bench" / "results"
SHOWN = "cpu"
IMAGES = (".png", ".svg")

log = logging.getLogger("mkdocs.hooks")  # a warning here fails a strict build


# --- tables ---------------------------------------------------------------------------------------


def table(names: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[str, ...] = ()) -> str:
    rule = ["---:" if name in right else "---" for name in names]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (names, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (cells[0], rule, *cells[1:]))


def contract_table() -> str:
    """The rows of `xentlib.contract`: what each covers, what is measured, the bound."""
    from xentlib.contract import ROWS, Measurement
    from xentlib.parity.report.numbers import bound_text

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
    from xentlib.parity.report.document import from_json
    from xentlib.parity.report.numbers import bound_text, duration, number, value_text
    from xentlib.parity.report.summary import backend_name, row_statements, summarise, verdict

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
    if result.curves:
        curves = [
            (
                backend_name(curve.backend),
                str(len(curve.losses)),
                f"{sum(curve.tokens):,}",
                f"{curve.losses[0]:.6f}",
                f"{curve.losses[-1]:.6f}",
                duration(curve.seconds),
            )
            for curve in result.curves
        ]
        names = ("training", "steps", "valid tokens", "first loss", "last loss", "time")
        parts.append(table(names, curves, right=names[1:]))
    ran = [(name, f"`{value}`") for name, value in result.environment.items()]
    parts.append(table(("run with", ""), ran))
    return "\n\n".join(parts)


def parser_of(command: str) -> argparse.ArgumentParser:
    """The one that prints `xentlib COMMAND --help`."""
    from xentlib.cli import main

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


def missing(what: str, way_out: str) -> str:
    log.warning("%s is missing. %s", what, way_out)
    return f"*{what} is not there yet.* {way_out}"


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
        # One level down: the page has its own title.
        text = re.sub(r"(?m)^(#+ )", r"#\1", text) if titled else f"## {file.stem}\n\n{text}"
        parts.append(text.strip())
    return "\n\n".join(parts)


def bench_runs() -> list[dict[str, Any]]:
    """Those of the CPU suite that `README.md` shows: one head."""
    runs = json.loads((BENCH / "cpu.json").read_text(encoding="utf-8"))["runs"]
    return [run for run in runs if run["case"]["name"] == SHOWN]


def bench_summary() -> str:
    """Loss + gradient of the CPU run: time over the floor, extra memory, distance of the loss."""
    rows = []
    for run in bench_runs():
        found = [row for row in run["rows"] if row["kind"] == "loss + gradient" and row["ratio"]]
        ours = next(row for row in found if row["contestant"] == "xentlib")
        for row in sorted(found, key=lambda row: row["ratio"]["median"]):
            if row["contestant"].startswith("bare GEMMs"):
                continue
            off = "" if row is ours else f"{abs(row['loss'] / ours['loss'] - 1):.0e}"
            rows.append(
                (
                    f"{run['backend']}, {run['dtype']}",
                    row["contestant"],
                    f"{row['ratio']['median']:.2f}",
                    f"{row['peak_bytes'] / 2**20:.0f}",
                    off,
                )
            )
    right = ("time / bare GEMMs", "extra MiB", "loss off by")
    return table(("", "loss + gradient", *right), rows, right)


def bench_savings() -> str:
    """Loss + gradient of the CPU run: extra memory with full logits, and with xentlib."""
    rows = []
    for run in bench_runs():
        found = {r["contestant"]: r for r in run["rows"] if r["kind"] == "loss + gradient"}
        full = next(row for name, row in found.items() if name.endswith(", full logits"))
        mib = [f"{row['peak_bytes'] / 2**20:.0f} MiB" for row in (full, found["xentlib"])]
        rows.append((f"{run['backend']}, {run['dtype']}", *mib))
    right = ("extra memory with full logits", "with xentlib")
    return table(("", *right), rows, right)


def tokens_said() -> tuple[str, str, str]:
    """Of the figure that README and site open with: what each half shows, and its caption."""
    found = json.loads(TOKENS.read_text(encoding="utf-8"))
    last = max(row["tokens"] for row in found["rows"])
    rows = [row for row in found["rows"] if row["tokens"] == last]
    mib = "; ".join(f"{row['way']} {row['peak_bytes'] / 2**20:,.0f}" for row in rows)
    ms = "; ".join(f"{row['way']} {1e6 * row['seconds'] / last:,.0f}" for row in rows)
    return (
        f"Extra memory against tokens. MiB at {last:,} tokens: {mib}.",
        f"Processor time against tokens. Milliseconds a thousand tokens, at {last:,}: {ms}.",
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


def kernels_part() -> str:
    """What `make ptx` has read in the code of each Triton program."""
    found = json.loads(KERNELS.read_text(encoding="utf-8"))
    arches = list(next(iter(found["programs"].values())))

    def said(row: Any) -> str:
        a_logit = " + ".join(f"{x:.0f}" for x in row["a logit"])
        return f"{row['registers']} registers" + (f", {a_logit}" if a_logit else "")

    rows = [
        (f"`{name.partition(', ')[0]}`", name.partition(", ")[2], *(said(of[x]) for x in arches))
        for name, of in found["programs"].items()
    ]
    return f"{table(('program', 'of', *arches), rows)}\n\nTriton {found['triton']}."


def causal_lm_part() -> str:
    """What `make classes` has written of transformers: how many, who is refused, who is patched."""
    data = json.loads(CAUSAL_LM.read_text(encoding="utf-8"))

    def counts(classes: dict[str, Any]) -> str:
        refused = sum(entry["refused"] is not None for entry in classes.values())
        return f"{len(classes) - refused} are patched, {refused} refused"

    classes = {**data["causal"], **data["images"]}
    refused = [(f"`{x}`", entry["refused"]) for x, entry in classes.items() if entry["refused"]]
    patched = [
        (f"`{x}`", ", ".join(f"`{name}`" for name in entry["types"]))
        for x, entry in classes.items()
        if not entry["refused"]
    ]
    numbers = (
        f"Of the {len(data['causal'])} causal LM classes of transformers {data['transformers']}, "
        f"{counts(data['causal'])}; of {len(data['images'])} that take images too, on text alone, "
        f"{counts(data['images'])}."
    )
    tables = table(("refused", "why"), refused), table(("patched", "model types"), patched)
    return "\n\n".join((numbers, *tables))


def recipe_numbers(name: str) -> dict[str, str]:
    """What `make recipes` has measured of `examples/NAME.py`."""
    found = json.loads(RECIPES.read_text(encoding="utf-8"))
    one = found["recipes"][name]
    return {
        "sizes": f"{found['vocab']:,} classes and rows of {found['length']} tokens",
        "ours": f"{one['peak_bytes'] / 2**20:,.0f} MiB",
        "full": f"{one['peak_bytes_full_logits'] / 2**20:,.0f} MiB",
        "distance": f"{one['distance']:.1e}",
    }


def marked(name: str) -> list[int]:
    """The lines of `examples/NAME.py` that adopting xentlib adds or changes."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return [k for k, line in enumerate(lines, 1) if line.endswith("# xentlib")]


def recipe_part(name: str) -> str:
    """A file of `examples/`, its marked lines highlighted, and what was measured of it."""
    said = recipe_numbers(name)
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").rstrip()
    lines = " ".join(map(str, marked(name)))
    return (
        f"[Download `{name}.py`](examples/{name}.py). With {said['sizes']}, a process of it takes "
        f"{said['ours']} at its peak, and {said['full']} without xentlib (`--full-logits`). The "
        f"relative distance of its first step to full logits is {said['distance']}.\n\n"
        f'```python title="examples/{name}.py" hl_lines="{lines}"\n{text}\n```'
    )


def recipes_part() -> str:
    """All of them, with the page that explains each."""
    rows = []
    for name in json.loads(RECIPES.read_text(encoding="utf-8"))["recipes"]:
        said = recipe_numbers(name)
        pages = sorted((ROOT / "docs").glob("*.md"))
        page = next(
            (p for p in pages if f"<!-- recipe {name} -->" in p.read_text(encoding="utf-8")), None
        )
        if page is None:
            return missing(f"a page with `<!-- recipe {name} -->`", "Write one.")
        doc = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").removeprefix('"""')
        rows.append(
            (
                f"[{doc.partition(':')[0]}]({page.name}#recipe)",
                f"[`{name}.py`](examples/{name}.py)",
                str(len(marked(name))),
                said["ours"],
                said["full"],
                said["distance"],
            )
        )
    right = ("lines", "peak memory", "without xentlib", "distance")
    return table(("trainer", "file", *right), rows, right)


def defects_part() -> str:
    """`xentlib.audit.DEFECTS`: name, what was done, of which kinds of step, and the pages."""
    from xentlib.audit import DEFECTS

    def links(cure: str | dict[str, str]) -> str:
        if isinstance(cure, str):
            return f"[cure]({cure})"
        return f"[PyTorch]({cure['torch']}), [JAX]({cure['jax']})"

    rows = [(x.name, x.sentence, ", ".join(x.kinds), x.needs, links(x.cure)) for x in DEFECTS]
    return table(("defect", "what was done", "kinds", "needs", "cure"), rows)


def cross_check_part() -> str:
    """What `make cross-check` has measured of a step."""
    found = json.loads(CROSS_CHECK.read_text(encoding="utf-8"))
    plain = found["ways"]["no check"]
    rows = [
        (
            name,
            f"{x['seconds']:.2f} s",
            f"{(x['peak_bytes'] - plain['peak_bytes']) / 2**20:,.0f} MiB",
        )
        for name, x in found["ways"].items()
    ]
    said = (
        f"Measured on {found['date']} with torch {found['torch']} on {found['threads']} cores of a "
        f"CPU: {found['tokens']:,} tokens, {found['width']} wide, {found['vocab']:,} classes, "
        f"float32."
    )
    right = ("a step", "peak memory beyond the first row's")
    return f"{table(('of each step is checked', *right), rows, right)}\n\n{said}"


def conformance_part() -> str:
    """What `make conformance` has found of other losses: rows that each holds, and the worst."""
    found = json.loads(CONFORMANCE.read_text(encoding="utf-8"))
    ran = {name: x for name, x in found["losses"].items() if "rows" in x}
    ids = list(dict.fromkeys(row for x in ran.values() for row in x["rows"]))
    ids.sort(key=lambda row: int(row[1:]))

    def held(x: dict[str, Any], row: str) -> str:
        return "–" if row not in x["rows"] else "yes" if x["rows"][row]["holds"] else "no"

    summary = [
        (name, x["version"], *(held(x, row) for row in ids), " ".join(x["choices"]))
        for name, x in ran.items()
    ]
    worst = [
        (name, row, "; ".join(x["rows"][row]["worst"]))
        for name, x in ran.items()
        for row in ids
        if row in x["rows"] and not x["rows"][row]["holds"]
    ]
    raised = [(name, error) for name, x in ran.items() for error in x["errors"]]
    absent = [
        (name, x["version"], x["absent"]) for name, x in found["losses"].items() if "absent" in x
    ]
    return "\n\n".join(
        (
            f"Made on {found['date']} with xentlib {found['xentlib']}, on a CPU.",
            table(("loss", "version", *ids, "what it rounds"), summary),
            "Of the rows that are not held, the worst that was measured, and the bound:",
            table(("loss", "row", "worst (bound)"), worst),
            *(["Raised:", table(("loss", "what"), raised)] if raised else []),
            *(["Not run:", table(("loss", "package", "why"), absent)] if absent else []),
        )
    )


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
    "parity_options": lambda: options_table("parity"),
    "bench_options": lambda: options_table("bench"),
    "doctor_options": lambda: options_table("doctor"),
    "audit_options": lambda: options_table("audit"),
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
    print(contract_table(), bench_savings(), bench_summary(), *tokens_said(), sep="\n\n")
