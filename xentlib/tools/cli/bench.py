"""`xentlib bench`: time and memory of the loss head beside its bare GEMMs and its peers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from xentlib.plan import peak_bytes, plan_chunks
from xentlib.tools.bench.cases import CASES, DTYPES, SUITES, Suite
from xentlib.tools.bench.implementation import BARE, KINDS, OURS, PER_TOKEN, TRAINING, Kind
from xentlib.tools.bench.report import (
    Report,
    Run,
    as_markdown,
    environment_line,
    print_run,
    write_json,
)
from xentlib.tools.bench.worker import Request, WorkerError, ask
from xentlib.tools.cli.command import Row, seed, whole
from xentlib.tools.errors import UsageError, note, writing
from xentlib.tools.harness.environment import BACKENDS, environment
from xentlib.tools.parity.progress import Pace, PlainProgress, Planned, Progress
from xentlib.tools.parity.result import Section

SHORT = {"fp32": "float32", "bf16": "bfloat16"}
ABOUT_SUITES = "; ".join(f"{name} ({suite.about})" for name, suite in SUITES.items())
ABOUT_CASES = "; ".join(f"{case.name} ({case.about})" for case in CASES.values())
SHAPES = f"shapes: {ABOUT_CASES} (default: cpu)"
COMPUTED = f"what is computed: {', '.join(KINDS)} (default: all)"
WHOSE = "whose functions; both takes those that are installed"
OF_MORE = "several shapes at once, with dtypes, kinds and rounds that suit them: "
OUT = "folder for bench.json, bench.md and bench.pdf, .png and .svg"
RESIDENT = "growth of resident memory as well: one more process a contestant"
WHO = "who is timed beside the bare GEMMs and xentlib (default: all that can be)"
DTYPE = f"of hidden and weight: {', '.join(DTYPES)} (default: all)"
SEVERAL = {"nargs": "+"}
ARGUMENTS: tuple[Row, ...] = (
    ("--backend", (*BACKENDS, "both"), "both", None, WHOSE),
    ("--suite", tuple(SUITES), None, None, OF_MORE + ABOUT_SUITES),
    ("--rounds", whole, None, "N", "each runs every contestant once (default: 10)"),
    ("--device", ("auto", "cpu", "cuda"), "auto", None, "auto takes what the framework takes"),
    ("--out", Path, None, "DIR", OUT),
    ("--seed", seed, 0, "N", "of the inputs"),
    ("--no-memory", bool, None, None, "leave memory out"),
    ("--resident", bool, None, None, RESIDENT),
    ("--case", tuple(sorted(CASES)), None, "NAME", SHAPES, SEVERAL),
    ("--kind", KINDS, None, "KIND", COMPUTED, SEVERAL),
    ("--contestant", str, None, "NAME", WHO, SEVERAL),
    ("--dtype", DTYPES, None, "DTYPE", DTYPE, SEVERAL | {"type": lambda x: SHORT.get(x, x)}),
)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where a process failed, 2 where there is no framework to run."""
    asked = BACKENDS if args.backend == "both" else (args.backend,)
    backends = [name for name in asked if find_spec(name) is not None]
    if not backends:
        print(f"no {' or '.join(asked)} here: pip install 'xentlib[{asked[0]}]'", file=sys.stderr)
        return 2
    report, full = Report(environment()), None
    asked_for = requests(args, backends)
    pace = BenchPace([Planned(name_of(x), 1, no_section, expected(x)) for x in asked_for])
    lines = None if sys.stderr.isatty() else PlainProgress(sys.stderr, pace)
    if args.out is not None:
        with writing("--out", args.out, "folder"):
            args.out.mkdir(parents=True, exist_ok=True)
    try:
        for request in asked_for:
            pace.begin(name_of(request))
            if lines:
                lines.stage(name_of(request), 0)
            begin = time.monotonic()
            measured = run_one(request, args.resident, pace)
            pace.done(name_of(request), time.monotonic() - begin)
            show("")
            print_run(measured)
            report.runs.append(measured)
            full = keep(report, args.out)  # a suite that is stopped leaves what it has
    except WorkerError as error:
        show("")
        print(error, file=sys.stderr)
        return 1
    print(environment_line(report))
    if full is None and args.out is not None:
        with writing("--out", args.out, "folder"):
            write(report, args.out)
    if full is not None:
        raise UsageError(
            f"`--out` must be a folder that can be written; got '{args.out}': {full.strerror}."
        )
    return 0


class BenchPace(Pace):
    """Sizes say how long requests take beside each other, the first one how long that is here."""

    def text(self) -> str:
        return super().text() if self._expected else "time left not known yet"


def name_of(request: Request) -> str:
    return f"{request.case.name} {request.dtype} {request.backend}"


def no_section(progress: Progress, slowness: float) -> Section:
    raise NotImplementedError


def expected(request: Request) -> float:
    """Something that time goes with: products, of each kind, once more to warm up."""
    case = request.case
    products = case.num_tokens * case.vocab_size * case.hidden_size
    return 1e-9 * products * len(request.kinds) * (request.rounds + 1)


def keep(report: Report, out: Path | None) -> OSError | None:
    """Write down what there is; what stops that. What was there stays."""
    if out is None:
        return None
    try:
        write_json(report, out / "bench.json")
    except OSError as error:
        note(f"'{out}' cannot be written: {error.strerror}; the benchmark goes on")
        return error
    return None


def requests(args: argparse.Namespace, backends: Sequence[str]) -> list[Request]:
    """What is asked for; a suite decides what is not."""
    suite = SUITES[args.suite] if args.suite else Suite(("cpu",), ("cpu",), DTYPES, 10, "")
    only = (*BARE, OURS, *args.contestant) if args.contestant else None
    rounds, memory = args.rounds or suite.rounds, not args.no_memory
    listed = []
    for dtype in args.dtype or suite.dtypes:
        for name in args.case or suite.cases:
            everything = args.case or name in suite.every_kind
            kinds = tuple(args.kind or (KINDS if everything else (TRAINING,)))
            rest = CASES[name], dtype, kinds, rounds, args.device, only, memory, args.seed
            listed += [Request(backend, *rest) for backend in backends]
    return listed


def run_one(request: Request, resident: bool, pace: Pace) -> Run:
    """All implementations in one process; then resident memory, each in its own."""
    backend, case, dtype = request.backend, request.case, request.dtype
    what = name_of(request)
    answer = ask(request, lambda done: show(f"{what}: {done}, {pace.text()}"))
    device, threads, rows = answer["device"], answer["threads"], answer["rows"]
    measured = Run(backend, case, dtype, device, threads, request.rounds, rows)
    if unknown := set(request.only or ()) - {row.contestant for row in rows}:
        raise WorkerError(f"no contestant {', '.join(sorted(unknown))} in {backend}'s table")
    measured.pair_with_floor()
    if device == "cpu":  # the formula is of the CPU's paths
        for kind in request.kinds:
            measured.row(OURS, kind).plan_bytes = planned(measured, kind)
    for row in rows if resident else ():
        if row.failed is None and row.contestant not in BARE:
            show(f"{what}: resident, {row.contestant}, {row.kind}, {pace.text()}")
            one = replace(request, task="resident", only=(row.contestant,), kinds=(row.kind,))
            (probed,) = ask(one)["rows"]
            row.resident_bytes = probed.resident_bytes
    return measured


def planned(measured: Run, kind: Kind) -> int:
    case = measured.case
    plan = plan_chunks(case.num_tokens, case.vocab_size, case.hidden_size, dtype=measured.dtype)
    return peak_bytes(
        plan,
        backend="jax" if measured.backend == "jax" else "torch",
        dtype=measured.dtype,
        gradient=kind != "loss",
        recompute=kind == PER_TOKEN,
    )


def write(report: Report, folder: Path) -> None:
    plot = None
    if find_spec("matplotlib") is not None:
        from xentlib.tools.bench.plot import save

        save(report, folder)
        plot = "bench.svg"
    else:
        print("no plot: pip install 'xentlib[plot]' for matplotlib", file=sys.stderr)
    (folder / "bench.md").write_text(as_markdown(report, plot))


def show(text: str) -> None:
    """What is running, in one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
