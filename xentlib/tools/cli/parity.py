"""`xentlib parity`: section after section, each written down as soon as it is done."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xentlib.options import KERNELS as CHOICES
from xentlib.tools.cli import requirements
from xentlib.tools.cli.command import Row, seed, status_of, stopped
from xentlib.tools.errors import UsageError, note
from xentlib.tools.harness.environment import BACKENDS, environment_of
from xentlib.tools.parity.result import ParityResult

if TYPE_CHECKING:
    from xentlib.tools.parity.progress import Planned

DESCRIPTION = (
    "Hold the backends to the accuracy contract, each against the float64 oracle and PyTorch "
    "against JAX, train the same small language model in each, and distil it into a smaller one. "
    "Exit status 1 if any row of the contract falls short or a section could not be run."
)
KERNELS = (
    "of PyTorch: its eager operators, or Triton's programs, interpreted on the CPU, without "
    "training"
)
DEVICE = "where it computes; on cuda without ranks and training"
FOLDER = "folder for parity.json and parity.html, created if need be"
TEXT = "UTF-8 text to train on (default: the Python standard library's own sources)"
ONLY = "rows of the contract, such as A18 A20: only the sections that measure them, only these rows"
RESUME = "go on from the sections that are in the folder, of the same run"
WHICH = "default: both where both are installed, else the one that is"
ARGUMENTS: tuple[Row, ...] = (
    ("--suite", ("quick", "standard", "full"), "quick", None, "how many cases"),
    ("--backend", (*BACKENDS, "both"), None, None, WHICH),
    ("--device", ("cpu", "cuda"), "cpu", None, DEVICE),
    ("--kernels", CHOICES, "auto", None, KERNELS),
    ("--seed", seed, 0, "N", "of data and weights"),
    ("--only", str, None, "ROW", ONLY, {"nargs": "+", "action": "extend"}),
    ("--out", Path, Path("build/parity"), "DIR", FOLDER),
    ("--text", Path, None, "FILE", TEXT),
    ("--resume", bool, None, None, RESUME),
    ("--json", bool, None, None, "print the JSON to stdout instead of the table"),
)


def run(args: argparse.Namespace) -> int:
    backends = requirements.backends_for(args.backend)
    requirements.check_kernels(args.kernels, args.device, backends)
    left_out = requirements.training_left_out(backends, args.text, args.device, args.kernels)
    requirements.check_paths(args.text, args.out)
    requirements.prepare(backends, args.device)
    requirements.check_device(args.device, backends)

    from xentlib.tools.parity.on_ranks import launch_ahead
    from xentlib.tools.parity.progress import Pace, progress_on
    from xentlib.tools.parity.report.document import DATA, to_json
    from xentlib.tools.parity.report.summary import print_table
    from xentlib.tools.parity.suite import operator_sections

    plan = operator_sections(backends, args.suite, args.seed, args.device)
    if not left_out:
        from xentlib.tools.parity.training.comparison import training_sections

        few = args.suite == "quick"
        plan.extend(training_sections(backends, text=args.text, seed=args.seed, few=few))
    if args.only:
        args.only = known_rows(args.only, plan)
        plan = [part for part in plan if set(part.rows) & set(args.only)]
        if args.text and "curve" not in {row for part in plan for row in part.rows}:
            raise UsageError(
                f"`--text` is for the training part, which `--only {' '.join(args.only)}` leaves "
                f"out; pass one of the two."
            )
    environment = environment_of(args, backends, left_out)
    before = run_before(args.out, environment, args.resume)
    result = before if args.resume and before else ParityResult(environment=environment)
    result.planned = [part.name for part in plan]
    done = {section.name for section in result.sections if not section.error}
    pace = Pace(plan)
    for section in result.sections:
        if section.name in done:
            pace.done(section.name, section.seconds)
    files = _Files(args.out, {*done})
    launch_ahead(part for part in plan if part.name not in done)
    try:
        with progress_on(sys.stderr, pace) as progress:
            for part in plan:
                if part.name in done:
                    continue
                pace.begin(part.name)
                section = part.section(progress, pace.slowness)
                pace.done(part.name, None if section.error else section.seconds)
                if args.only:
                    section = section.of_rows(args.only)
                result.add(section)
                files.write(result)
                if section.error:
                    note(f"{part.name} could not be run: {section.reason}")
                else:
                    done.add(part.name)
    except KeyboardInterrupt as error:
        if not files.kept:
            raise
        note(f"{len(files.kept)} of {len(plan)} sections are kept in '{args.out / DATA}'")
        print(f"xentlib: {stopped(error)}; go on with `{again(args)}`", file=sys.stderr)
        return status_of(error)

    paths = files.write(result)
    if args.json:
        sys.stdout.write(to_json(result))
    else:
        print_table(result, sys.stdout)
    if files.error:
        kept = f"{len(files.kept)} of {len(plan)} sections are kept there"
        raise UsageError(
            f"`--out` must be a folder that can be written; got '{args.out}': "
            f"{files.error.strerror}; {kept}"
            + (f", make room and go on with `{again(args)}`." if files.kept else ".")
        )
    print("\n".join(map(str, paths)), file=sys.stderr if args.json else sys.stdout)
    return 0 if result.passed else 1


class _Files:
    """What is written of a run: `kept` are sections that are done and there. Where nothing can be
    written the run goes on, for its table."""

    def __init__(self, out: Path, kept: set[str]) -> None:
        self.error: OSError | None = None
        self.kept, self._out = kept, out

    def write(self, result: ParityResult) -> Sequence[Path]:
        from xentlib.tools.parity.report.document import write_report

        try:
            paths = write_report(result, self._out)
        except OSError as error:
            if self.error is None:
                note(f"'{self._out}' cannot be written: {error.strerror}; the run goes on")
            self.error = error
            return ()
        self.error = None
        self.kept |= {section.name for section in result.sections if not section.error}
        return paths


def again(args: argparse.Namespace) -> str:
    """The command that goes on from what is kept."""
    more = [] if "--resume" in args.argv else ["--resume"]
    return f"xentlib {shlex.join([*args.argv, *more])}"


def known_rows(asked: Sequence[str], plan: Sequence[Planned]) -> list[str]:
    """The rows that were asked for, each measured by a section, in the contract's order."""
    from xentlib.contract import ROWS

    measured = {row for part in plan for row in part.rows}
    known = [*(row for row in ROWS if row in measured), *sorted(measured - set(ROWS))]
    for row in asked:
        if row not in known:
            where = ", which a run of both backends on the CPU measures" if row in ROWS else ""
            raise UsageError(
                f"`--only` must name rows that a section of this run measures, with spaces between "
                f"({', '.join(known)}); got '{row}'{where}."
            )
    return [row for row in known if row in asked]


def run_before(out: Path, environment: dict[str, str], resume: bool) -> ParityResult | None:
    """The run that is in `out`, if this one can go on from it; with `resume` it has to."""
    from xentlib.tools.parity.report.document import DATA, from_json

    path = out / DATA
    try:
        before = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not resume:
            return None
        there = not isinstance(error, FileNotFoundError)
        what = "cannot be read as a parity run" if there else "is not there"
        raise UsageError(
            f"`--resume` goes on from '{path}', which {what}; run without it."
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
