"""What the documentation shows of files in docs/data and examples: tables and complete files."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from xentlib.contract import ROWS

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
KERNELS = DATA / "kernels.json"
CAUSAL_LM = DATA / "causal_lm.json"
RECIPES = DATA / "recipes.json"
CONFORMANCE = DATA / "conformance.json"
BOUNDS = DATA / "bounds.json"
CROSS_CHECK = DATA / "cross_check.json"
ROUTES = DATA / "routes.json"
EXAMPLES = ROOT / "examples"

MEASURED = [(row, "rho / u" if row == "A9" else "tau") for row in ("A5", "A6", "A9", "A12", "A26")]
SETTINGS = ("as the processor is", "AVX2")  # of .ci/bounds.py, with products in float32
log = logging.getLogger("mkdocs.hooks")  # a warning here fails a strict build


def table(names: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[str, ...] = ()) -> str:
    rule = ["---:" if name in right else "---" for name in names]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (names, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (cells[0], rule, *cells[1:]))


def missing(what: str, way_out: str) -> str:
    log.warning("%s is missing. %s", what, way_out)
    return f"*{what} is not there yet.* {way_out}"


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
        "routes": "".join(
            f', {size / 2**20:,.0f} MiB with `gather="{way}"`'
            for way, size in one.get("peak_bytes_by_gather", {}).items()
        ),
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
        f"[Download `{name}.py`](examples/{name}.py); the highlighted lines are those to add or to "
        f"change. With {said['sizes']} its largest process takes {said['ours']}{said['routes']}, "
        f"and {said['full']} without xentlib. The relative distance of its first gradient to that "
        f"of full logits is {said['distance']}.\n\n"
        f'```python title="examples/{name}.py" hl_lines="{lines}"\n{text}\n```'
    )


def section(page: Path, name: str) -> str:
    """The anchor of the heading that `<!-- recipe NAME -->` is under."""
    above = page.read_text(encoding="utf-8").partition(f"<!-- recipe {name} -->")[0]
    return re.findall(r"\{#([\w-]+)\}$", above, re.MULTILINE)[-1]


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
        first = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").partition("\n")[0]
        trainer, colon, _ = first.removeprefix('"""').partition(":")
        if not colon:
            way_out = "Begin its docstring with it, as in `Lightning's Trainer: ...`."
            return missing(f"the trainer's name in `examples/{name}.py`", way_out)
        rows.append(
            (
                f"[{trainer}]({page.name}#{section(page, name)})",
                f"[`{name}.py`](examples/{name}.py)",
                str(len(marked(name))),
                said["ours"],
                said["full"],
                said["distance"],
            )
        )
    right = ("lines to change", "peak memory", "without xentlib", "distance")
    return table(("trainer", "file", *right), rows, right)


def defects_part() -> str:
    """`xentlib.tools.audit.DEFECTS`: name, what was done, of which kinds of step, and the pages."""
    from xentlib.tools.audit import DEFECTS

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
            f"{x['ratio']:.2f}",
            f"{(x['peak_bytes'] - plain['peak_bytes']) / 2**20:,.0f} MiB",
        )
        for name, x in found["ways"].items()
    ]
    said = (
        f"Processor seconds, measured on {found['date']} with torch {found['torch']} on one core: "
        f"{found['tokens']:,} tokens, {found['width']} wide, {found['vocab']:,} classes, "
        f"float32."
    )
    right = ("a step", "times one that is not", "peak memory beyond the first row's")
    return f"{table(('of each step is checked', *right), rows, right)}\n\n{said}"


def conformance_part() -> str:
    """What `make conformance` has found of other losses: rows that each holds, and the worst."""
    found = json.loads(CONFORMANCE.read_text(encoding="utf-8"))
    ran = {name: x for name, x in found["losses"].items() if "rows" in x}
    ids = list(dict.fromkeys(row for x in ran.values() for row in x["rows"]))
    ids.sort(key=lambda row: int(row[1:]))

    summary = [
        (name, x["version"], *(_held(x, row) for row in ids), " ".join(x["choices"]))
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
            f"Made on {found['made']['losses']}, on a CPU.",
            table(("loss", "version", *ids, "what it rounds"), summary),
            "Of the rows that are not held, the worst that was measured, and the bound:",
            table(("loss", "row", "worst (bound)"), worst),
            *(["Raised:", table(("loss", "what"), raised)] if raised else []),
            *(["Not run:", table(("loss", "package", "why"), absent)] if absent else []),
        )
    )


def bounds_part() -> str:
    """What `make bounds` has measured: the worst of each bound, by setting."""
    found = json.loads(BOUNDS.read_text(encoding="utf-8"))
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for setting, of in found["worst"].items():
        for key, x in of.items():
            row, metric = key.split(", ")[:2]
            by = worst.setdefault((row, metric), {})
            by[setting] = max(x["value"], by.get(setting, x["value"]))
    rows = []
    for row, metric in MEASURED:
        by = worst[row, metric]
        (bound,) = (x.value for x in ROWS[row].bounds if x.metric == metric)
        most = max(by.values())
        cells = (f"{by[x]:.2f}" for x in SETTINGS)
        rows.append((row, metric, *cells, f"{bound:g}", f"{bound / most:.1f}"))
    return "\n\n".join(
        (
            f"Made on {found['made']['date']}, over {found['made']['seeds']} seeds.",
            table(("row", "metric", *SETTINGS, "bound", "bound over worst"), rows),
        )
    )


def smallest_rejected_part() -> str:
    """What `make conformance` has found of the rows themselves."""
    found = json.loads(CONFORMANCE.read_text(encoding="utf-8"))["smallest rejected"]
    whole, part = "the whole", "exponentials"

    def said(x: dict[str, float], of: str) -> str:
        return f"{x[of]:.1e}" if of in x else "–"

    rows = [(row, _of(row), said(x, whole), said(x, part)) for row, x in found.items()]
    rows.sort(key=lambda row: int(row[0][1:]))
    numbers = ("the whole off by", "exponentials off by")
    return table(("row", "of", *numbers), rows, numbers)


def _of(row: str) -> str:
    return f"{ROWS[row].quantity}, {ROWS[row].inputs}"


def conformance_divergences_part() -> str:
    """What `make conformance` has found of other divergences: rows, and how far off each is."""
    found = json.loads(CONFORMANCE.read_text(encoding="utf-8"))
    each = [
        (name, kind, x)
        for name, of in found["divergences"].items()
        for kind, x in of.get("kinds", {}).items()
    ]
    ids = sorted({row for _, _, x in each for row in x["rows"]}, key=lambda row: int(row[1:]))
    held = [
        (name, f"`{kind}`", *(_held(x, row) for row in ids), " ".join(x["choices"]))
        for name, kind, x in each
    ]
    fars = [f"{x['far']:g}" for x in each[0][2]["distances"]]
    off = [
        (name, f"`{kind}`", *(_off(far) for far in x["distances"]), _missed(x))
        for name, kind, x in each
    ]
    raised = [(name, f"`{kind}`", error) for name, kind, x in each for error in x["errors"]]
    absent = [
        (name, of["version"], of["absent"])
        for name, of in found["divergences"].items()
        if "absent" in of
    ]
    versions = dict.fromkeys(of["version"] for of in found["divergences"].values() if "kinds" in of)
    return "\n\n".join(
        (
            f"Made on {found['made']['divergences']}, on a CPU, with {', '.join(versions)}.",
            table(("divergence", "kind", *ids, "what it rounds"), held),
            "How far off each is, by the distance of the logits:",
            table(("divergence", "kind", *fars, "also missed"), off),
            *(["Raised:", table(("divergence", "kind", "what"), raised)] if raised else []),
            *(["Not run:", table(("divergence", "package", "why"), absent)] if absent else []),
        )
    )


def _held(x: dict[str, Any], row: str) -> str:
    return "–" if row not in x["rows"] else "yes" if x["rows"][row]["holds"] else "no"


def _off(far: dict[str, Any]) -> str:
    return f"{far['value']:.1g}, {far['gradient']:.1g}, {far['negative']}"


def _missed(x: dict[str, Any]) -> str:
    """Cases that the columns of distances do not show."""
    cases = {case for cases in x["misses"].values() for case in cases}
    shown = ("logits of -inf", "logits near 1000", "equal logits", "all tokens masked")
    return ", ".join(case for case in shown if case in cases)


def routes_part() -> str:
    """What `make routes` has worked out of sharded heads."""
    found = json.loads(ROUTES.read_text(encoding="utf-8"))
    names = ("full logits", "head", "hidden", "stream", "hybrid")

    def said(plan: dict[str, Any], what: str, unit: float, digits: int) -> str:
        return " / ".join(
            f"{plan['routes'][name][what] / unit:.{digits}f}" if name in plan["routes"] else "–"
            for name in names
        )

    def up_to(tokens: int) -> str:
        return f"{tokens:,}" if tokens < 1 << 24 else "any"

    rows = [
        (
            plan["head"]["name"],
            f"{plan['ranks']:,}",
            up_to(plan["crossover_tokens"]),
            said(plan, "received_bytes", 1e9, 1),
            said(plan, "peak_bytes", 2**30, 1),
            said(plan, "milliseconds", 1, 0),
            said(plan, "overlapped_milliseconds", 1, 0),
            f"`{plan['fastest']}`",
        )
        for plan in found["plans"]
    ]
    rates = found["rates"]
    about = (
        f"{found['tokens_per_rank']:,} tokens a rank and call, bf16 gathered, float32 reduced, "
        f"eight GPUs a node; in each cell {' / '.join(names)}. Seconds are predicted at "
        f"{rates['gemm'] / 1e12:.0f} TFLOP/s, {rates['memory'] / 1e12:.1f} TB/s of memory, "
        f"{rates['node'] / 1e9:.0f} GB/s within a node, {rates['network'] / 1e9:.0f} GB/s a GPU "
        f"between nodes, and {rates['latency'] * 1e6:.0f} us a collective with "
        f"{rates['step'] * 1e6:.0f} us more for each step."
    )
    right = ("ranks", "`hidden` up to", "GB received", "GiB at the peak", "ms", "overlapped")
    return f"{about}\n\n{table(('head', *right, 'fastest'), rows, right)}"
