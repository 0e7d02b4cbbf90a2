"""`xentlib bench`: time and memory of the loss head beside its bare GEMMs and its peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from xentlib.bench.cases import CASES, DTYPES, HeadSizes
from xentlib.bench.contestant import BARE, OURS
from xentlib.bench.environment import environment
from xentlib.bench.report import as_markdown, environment_line, print_run, write_json
from xentlib.bench.result import ContestantResult, Report, Run
from xentlib.bench.worker import Request, WorkerError, ask
from xentlib.plan import peak_bytes, plan_chunks

__all__ = ["add_arguments", "run"]

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
        "--case",
        nargs="+",
        default=["cpu"],
        choices=sorted(CASES),
        metavar="NAME",
        help="shapes: " + "; ".join(f"{c.name} ({c.about})" for c in CASES.values()),
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=list(DTYPES),
        choices=DTYPES,
        type=lambda name: SHORT.get(name, name),
        metavar="DTYPE",
        help=f"of hidden and weight: {', '.join(DTYPES)} (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=10,
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
        help="folder for bench.json, bench.md, bench.png and bench.svg",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the inputs (default: 0)"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave memory out: one process a contestant less"
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
        for name in args.case:
            for dtype in args.dtype:
                for backend in backends:
                    found = run_one(CASES[name], dtype, backend, args, progress)
                    progress.clear()
                    print_run(found)
                    report.runs.append(found)
    except WorkerError as error:
        progress.clear()
        print(error, file=sys.stderr)
        return 1
    print(environment_line(report))
    if args.out is not None:
        write(report, args.out)
    return 0


def run_one(
    case: HeadSizes, dtype: str, backend: str, args: argparse.Namespace, progress: StatusLine
) -> Run:
    """Time, all contestants in one process; then memory, each in its own."""
    what = f"{case.name} {dtype} {backend}"
    request = Request("time", backend, case, dtype, args.device, args.rounds, None, args.seed)
    answer = ask(request, lambda done: progress.show(f"{what}: {done}"))
    found = Run(
        backend, case, dtype, answer["device"], answer["threads"], args.rounds, answer["rows"]
    )
    found.pair_with_floor()
    if not args.no_memory:
        add_memory(found, args, lambda done: progress.show(f"{what}: memory of {done}"))
    return found


def add_memory(found: Run, args: argparse.Namespace, tick: Callable[[str], None]) -> None:
    names = [row.contestant for row in found.rows if row.failed is None]
    for name in dict.fromkeys(names):
        if name in BARE:
            continue
        tick(name)
        request = Request(
            "memory", found.backend, found.case, found.dtype, args.device, 0, (name,), args.seed
        )
        probed: list[ContestantResult] = ask(request)["rows"]
        for probe in probed:
            row = found.row(probe.contestant, probe.kind)
            row.peak_bytes, row.resident_bytes = probe.peak_bytes, probe.resident_bytes
            if name == OURS and found.device == "cpu":  # the formula is of the CPU's paths
                row.plan_bytes = planned(found, gradient=row.kind != "loss")


def planned(found: Run, *, gradient: bool) -> int:
    case = found.case
    plan = plan_chunks(case.num_tokens, case.vocab_size, case.hidden_size, dtype=found.dtype)
    return peak_bytes(plan, backend=found.backend, dtype=found.dtype, gradient=gradient)


def write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(report, folder / "bench.json")
    plot = None
    if find_spec("matplotlib") is not None:
        from xentlib.bench.plot import save

        save(report, folder)
        plot = "bench.svg"
    else:
        print("no plot: pip install 'xentlib[bench]' for matplotlib", file=sys.stderr)
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
