"""`xentlib parity`: section after section, each written down as soon as it is done."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from xentlib.kernels import CHOICES
from xentlib.tools.cli.command import Row, seed
from xentlib.tools.cli.requirements import (
    BACKENDS,
    backends_for,
    check_device,
    check_kernels,
    check_paths,
    prepare,
    training_left_out,
)
from xentlib.tools.errors import UsageError, note
from xentlib.tools.harness.environment import environment_of
from xentlib.tools.parity.result import ParityResult, Section

if TYPE_CHECKING:
    from xentlib.tools.parity.progress import Planned, Progress


DESCRIPTION = (
    "Hold the backends to the accuracy contract, each against the float64 oracle and PyTorch "
    "against JAX, and train the same small language model in each. Exit status 1 if any row of the "
    "contract falls short or a section could not be run."
)
KERNELS = (
    "of PyTorch: its eager operators, or Triton's programs, interpreted on the CPU, without "
    "training"
)
DEVICE = "where it computes; on cuda without ranks and training"
FOLDER = "folder for parity.json and parity.html, created if need be"
TEXT = "UTF-8 text to train on (default: the Python standard library's own sources)"
RESUME = "go on from the sections that are in the folder, of the same run"
WHICH = "default: both where both are installed, else the one that is"
ARGUMENTS: tuple[Row, ...] = (
    ("--suite", ("quick", "full"), "quick", None, "how many cases"),
    ("--backend", (*BACKENDS, "both"), None, None, WHICH),
    ("--device", ("cpu", "cuda"), "cpu", None, DEVICE),
    ("--kernels", CHOICES, "auto", None, KERNELS),
    ("--seed", seed, 0, "N", "of data and weights"),
    ("--out", Path, Path("build/parity"), "DIR", FOLDER),
    ("--text", Path, None, "FILE", TEXT),
    ("--resume", bool, None, None, RESUME),
    ("--json", bool, None, None, "print the JSON to stdout instead of the table"),
)


def run(args: argparse.Namespace) -> int:
    backends = backends_for(args.backend)
    check_kernels(args.kernels, args.device, backends)
    left_out = training_left_out(backends, args.text, args.device, args.kernels)
    check_paths(args.text, args.out)
    prepare(backends, args.device)
    check_device(args.device, backends)
    environment = environment_of(args, backends, left_out)
    before = run_before(args.out, environment, args.resume)

    from xentlib.tools.parity.progress import Pace, progress_on
    from xentlib.tools.parity.report.document import DATA, to_json, write_report
    from xentlib.tools.parity.report.table import print_table
    from xentlib.tools.parity.suite import operator_sections

    plan = operator_sections(backends, args.suite, args.seed, args.device)
    if not left_out:
        from xentlib.tools.parity.training.comparison import training_section

        plan.append(training_section(backends, text=args.text, seed=args.seed))
    result = before if args.resume and before else ParityResult(environment=environment)
    result.planned = [part.name for part in plan]
    done = {section.name for section in result.sections if not section.error}
    kept = len(done)
    pace = Pace(plan)
    for section in result.sections:
        if section.name in done:
            pace.done(section.name, section.seconds)
    try:
        with progress_on(sys.stderr, pace) as progress:
            for part in plan:
                if part.name in done:
                    continue
                pace.begin(part.name)
                section = _section(part, progress, pace.slowness)
                pace.done(part.name, None if section.error else section.seconds)
                result.add(section)
                write_report(result, args.out)
                kept += not section.error
                if section.error:
                    note(f"{part.name} could not be run: {section.reason}")
    except KeyboardInterrupt:
        if not kept:
            raise
        again = [*args.argv, *(["--resume"] if "--resume" not in args.argv else [])]
        note(f"{kept} of {len(plan)} sections are kept in '{args.out / DATA}'")
        print(f"xentlib: interrupted; go on with `xentlib {shlex.join(again)}`", file=sys.stderr)
        return 130

    paths = write_report(result, args.out)
    if args.json:
        sys.stdout.write(to_json(result))
    else:
        print_table(result, sys.stdout)
    print("\n".join(map(str, paths)), file=sys.stderr if args.json else sys.stdout)
    return 0 if result.passed else 1


def _section(part: Planned, progress: Progress, slowness: float) -> Section:
    """What the section finds. What stops it is an error of it alone: the others are run."""
    start = time.perf_counter()
    try:
        section = part.run(progress, slowness)
    except Exception as error:  # noqa: BLE001 - hours of other sections do not hang on it
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        section = Section(part.name, error=f"{message}\n{traceback.format_exc()}")
    return replace(section, seconds=time.perf_counter() - start)


def run_before(out: Path, environment: dict[str, str], resume: bool) -> ParityResult | None:
    """The run that is in `out`, if this one can go on from it; with `resume` it has to."""
    from xentlib.tools.parity.report.document import DATA, from_json

    path = out / DATA
    try:
        before = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not resume:
            return None
        raise UsageError(
            f"`--resume` goes on from '{path}', which is not there; run without it."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not resume:
            return None
        raise UsageError(
            f"`--resume` goes on from '{path}', which cannot be read as a parity run; "
            f"run without it."
        ) from error
    other = [
        f"{name} {before.environment.get(name, 'none')!r} and not {environment.get(name, 'none')!r}"
        for name in dict.fromkeys([*environment, *before.environment])
        if name != "date" and before.environment.get(name) != environment.get(name)
    ]
    if not other and not resume and (before.missing or before.failed):
        run = len(before.sections) - len(before.failed)
        note(
            f"this run replaces the one in '{path}', which has {run} of {len(before.planned)} "
            f"sections; `--resume` would have gone on from it"
        )
    if other and resume:
        raise UsageError(
            f"`--resume` goes on with the same run, and '{path}' is of {', '.join(other)}; "
            f"run without it."
        )
    return before
