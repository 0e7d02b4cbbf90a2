"""`xentlib bench`: time and memory of the loss head beside its bare GEMMs and its peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from xentlib.plan import peak_bytes, plan_chunks
from xentlib.tools.bench.cases import CASES, DTYPES, SUITES, HeadSizes, Suite
from xentlib.tools.bench.contestant import BARE, KINDS, OURS, PER_TOKEN, TRAINING, Kind
from xentlib.tools.bench.report import as_markdown, environment_line, print_run, write_json
from xentlib.tools.bench.result import Report, Run
from xentlib.tools.bench.worker import Request, WorkerError, ask
from xentlib.tools.harness.environment import environment

BACKENDS = ("torch", "jax")
SHORT = {"fp32": "float32", "bf16": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=[*BACKENDS, "both"],
        default="both",
        help="whose functions; both takes those that are installed (default: both)",
    )
    parser.add_argument(
        "--suite",
        choices=SUITES,
        help="several shapes at once, with dtypes, kinds and rounds that suit them: "
        + "; ".join(f"{name} ({suite.about})" for name, suite in SUITES.items()),
    )
    parser.add_argument(
        "--case",
        nargs="+",
        choices=sorted(CASES),
        metavar="NAME",
        help="shapes: "
        + "; ".join(f"{c.name} ({c.about})" for c in CASES.values())
        + " (default: cpu)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        type=lambda name: SHORT.get(name, name),
        metavar="DTYPE",
        help=f"of hidden and weight: {', '.join(DTYPES)} (default: all)",
    )
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=KINDS,
        metavar="KIND",
        help=f"what is computed: {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument(
        "--contestant",
        nargs="+",
        metavar="NAME",
        help="who is timed beside the bare GEMMs and xentlib (default: all that can be)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="each runs every contestant once (default: 10)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda; auto takes what the framework takes"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for bench.json, bench.md and bench.pdf, .png and .svg",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the inputs (default: 0)"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave memory out")
    parser.add_argument(
        "--resident",
        action="store_true",
        help="growth of resident memory as well: one more process a contestant",
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where a process failed, 2 where there is no framework to run."""
    asked = BACKENDS if args.backend == "both" else (args.backend,)
    backends = [name for name in asked if find_spec(name) is not None]
    if not backends:
        print(f"no {' or '.join(asked)} here: pip install 'xentlib[{asked[0]}]'", file=sys.stderr)
        return 2
    report = Report(environment())
    progress = StatusLine()
    try:
        for job in jobs(args):
            for backend in backends:
                found = run_one(job, backend, args, progress)
                progress.clear()
                print_run(found)
                report.runs.append(found)
                if args.out is not None:  # a suite that is stopped leaves what it has
                    args.out.mkdir(parents=True, exist_ok=True)
                    write_json(report, args.out / "bench.json")
    except WorkerError as error:
        progress.clear()
        print(error, file=sys.stderr)
        return 1
    print(environment_line(report))
    if args.out is not None:
        write(report, args.out)
    return 0


class Job(NamedTuple):
    case: HeadSizes
    dtype: str
    kinds: tuple[Kind, ...]
    rounds: int


def jobs(args: argparse.Namespace) -> list[Job]:
    """What is asked for; a suite decides what is not."""
    suite = SUITES[args.suite] if args.suite else Suite(("cpu",), ("cpu",), DTYPES, 10, "")
    cases = tuple(args.case or suite.cases)
    found = []
    for dtype in args.dtype or suite.dtypes:
        for name in cases:
            whole = args.case or name in suite.every_kind
            kinds = tuple(args.kind or (KINDS if whole else (TRAINING,)))
            found.append(Job(CASES[name], dtype, kinds, args.rounds or suite.rounds))
    return found


def run_one(job: Job, backend: str, args: argparse.Namespace, progress: StatusLine) -> Run:
    """All contestants in one process; then resident memory, each in its own."""
    case, dtype, kinds, rounds = job
    what = f"{case.name} {dtype} {backend}"
    request = Request(
        "time",
        backend,
        case,
        dtype,
        args.device,
        rounds,
        (*BARE, OURS, *args.contestant) if args.contestant else None,
        kinds,
        not args.no_memory,
        args.seed,
    )
    answer = ask(request, lambda done: progress.show(f"{what}: {done}"))
    found = Run(backend, case, dtype, answer["device"], answer["threads"], rounds, answer["rows"])
    if unknown := set(args.contestant or ()) - {row.contestant for row in found.rows}:
        raise WorkerError(f"no contestant {', '.join(sorted(unknown))} in {backend}'s table")
    found.pair_with_floor()
    if found.device == "cpu":  # the formula is of the CPU's paths
        for kind in kinds:
            found.row(OURS, kind).plan_bytes = planned(found, kind)
    if args.resident:
        add_resident(found, request, lambda done: progress.show(f"{what}: resident, {done}"))
    return found


def add_resident(found: Run, request: Request, tick: Callable[[str], None]) -> None:
    for row in found.rows:
        if row.failed is None and row.contestant not in BARE:
            tick(f"{row.contestant}, {row.kind}")
            one = replace(request, task="resident", only=(row.contestant,), kinds=(row.kind,))
            (probed,) = ask(one)["rows"]
            row.resident_bytes = probed.resident_bytes


def planned(found: Run, kind: Kind) -> int:
    case = found.case
    plan = plan_chunks(case.num_tokens, case.vocab_size, case.hidden_size, dtype=found.dtype)
    return peak_bytes(
        plan,
        backend="jax" if found.backend == "jax" else "torch",
        dtype=found.dtype,
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


class StatusLine:
    """One line on a terminal that says what is running; silent elsewhere."""

    def __init__(self) -> None:
        self.on = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self.on:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.show("")
