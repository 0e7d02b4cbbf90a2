"""The `xentlib` command: `parity`, which shows the backends to be the same, and `bench`.

Nothing heavy is imported before the arguments are understood, and no framework before the
environment variables it reads at import are set.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata, util
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import xentlib
from xentlib.parity.result import ParityResult, Section

if TYPE_CHECKING:
    from xentlib.parity.progress import Progress
    from xentlib.parity.result import Planned

__all__ = ["main"]

BACKENDS = ("torch", "jax")
DEVICES = ("cpu", "cuda")
TRAINING_NEEDS = {"torch": ("tokenizers",), "jax": ("tokenizers", "flax", "optax")}
EXTRA_OF = {"tokenizers": "cli", "flax": "flax", "optax": "flax"}
VERSIONS_OF = ("torch", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "tokenizers")


class _UsageError(Exception):
    """What the user can put right: one sentence on stderr, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 holds, 1 falls short, 2 could not be run."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(argv).parse_args(argv)
        if args.command == "bench":
            from xentlib.bench import cli as bench

            return int(bench.run(args) or 0)
        return _parity(args, argv)
    except _UsageError as error:
        print(f"xentlib: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("xentlib: interrupted", file=sys.stderr)
        return 130


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xentlib",
        description="One language-model loss head, in PyTorch and in JAX, held to the same bits.",
    )
    parser.add_argument("--version", action="version", version=f"xentlib {xentlib.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    parity = commands.add_parser(
        "parity",
        help="hold both backends to the accuracy contract and train the same model in each",
        description="Hold the backends to the accuracy contract, each against the float64 oracle "
        "and PyTorch against JAX, and train the same small language model in each. "
        "Exit status 1 if any row of the contract falls short or a section could not be run.",
    )
    parity.add_argument(
        "--suite",
        choices=("quick", "full"),
        default="quick",
        help="how many cases (default: %(default)s)",
    )
    parity.add_argument(
        "--backend",
        choices=(*BACKENDS, "both"),
        help="default: both where both are installed, else the one that is",
    )
    parity.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where it computes; on cuda without ranks and training (default: %(default)s)",
    )
    parity.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of data and weights (default: 0)"
    )
    parity.add_argument(
        "--out",
        type=Path,
        default=Path("build/parity"),
        metavar="DIR",
        help="folder for parity.json and parity.html, created if need be (default: %(default)s)",
    )
    parity.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text to train on (default: the Python standard library's own sources)",
    )
    parity.add_argument(
        "--resume",
        action="store_true",
        help="go on from the sections that are in the folder, of the same run",
    )
    parity.add_argument(
        "--json", action="store_true", help="print the JSON to stdout instead of the table"
    )

    bench = commands.add_parser(
        "bench", help="time and peak memory beside the bare matrix products"
    )
    if argv[:1] == ["bench"]:  # its arguments are its own, and loaded only when it is asked for
        try:
            from xentlib.bench.cli import add_arguments
        except ModuleNotFoundError as error:
            raise _UsageError(
                f"`xentlib bench` needs {error.name}, which is not installed; "
                f"install it with `pip install 'xentlib[bench]'`."
            ) from error
        add_arguments(bench)
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more; got {text!r}")
    return int(text)


# --- xentlib parity ------------------------------------------------------------------------------


def _parity(args: argparse.Namespace, argv: Sequence[str]) -> int:
    backends = _backends(args.backend)
    left_out = _training_left_out(backends, args.text, args.device)
    _check_paths(args.text, args.out)
    _prepare(backends, args.device)
    _check_device(args.device, backends)
    environment = _environment(args, backends, left_out)
    before = _before(args.out, environment, args.resume)

    from xentlib.parity.progress import Pace, progress_on
    from xentlib.parity.report import DATA, print_table, to_json, write_report
    from xentlib.parity.suite import operator_sections

    plan = operator_sections(backends, args.suite, args.seed, args.device)
    if not left_out:
        from xentlib.parity.training import training_section

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
                section = _run(part, progress, pace.slowness)
                pace.done(part.name, None if section.error else section.seconds)
                result.add(section)
                write_report(result, args.out)
                kept += not section.error
                if section.error:
                    _note(f"{part.name} could not be run: {section.reason}")
    except KeyboardInterrupt:
        if not kept:
            raise
        again = [*argv, *(["--resume"] if "--resume" not in argv else [])]
        _note(f"{kept} of {len(plan)} sections are kept in '{args.out / DATA}'")
        print(f"xentlib: interrupted; go on with `xentlib {shlex.join(again)}`", file=sys.stderr)
        return 130

    paths = write_report(result, args.out)
    if args.json:
        sys.stdout.write(to_json(result))
    else:
        print_table(result, sys.stdout)
    print("\n".join(map(str, paths)), file=sys.stderr if args.json else sys.stdout)
    return 0 if result.passed else 1


def _run(part: Planned, progress: Progress, slowness: float) -> Section:
    """What the section finds. What stops it is an error of it alone: the others are run."""
    start = time.perf_counter()
    try:
        found = part.run(progress, slowness)
    except Exception as error:  # noqa: BLE001 - hours of other sections do not hang on it
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        found = Section(part.name, error=f"{said}\n{traceback.format_exc()}")
    return replace(found, seconds=time.perf_counter() - start)


def _before(out: Path, environment: dict[str, str], resume: bool) -> ParityResult | None:
    """The run that is in `out`, if this one can go on from it; with `resume` it has to."""
    from xentlib.parity.report import DATA, from_json

    path = out / DATA
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not resume:
            return None
        raise _UsageError(
            f"`--resume` goes on from '{path}', which is not there; run without it."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not resume:
            return None
        raise _UsageError(
            f"`--resume` goes on from '{path}', which cannot be read as a parity run; "
            f"run without it."
        ) from error
    other = [
        f"{name} {found.environment.get(name, 'none')!r} and not {environment.get(name, 'none')!r}"
        for name in dict.fromkeys([*environment, *found.environment])
        if name != "date" and found.environment.get(name) != environment.get(name)
    ]
    if not other and not resume and (found.missing or found.failed):
        run = len(found.sections) - len(found.failed)
        _note(
            f"this run replaces the one in '{path}', which has {run} of {len(found.planned)} "
            f"sections; `--resume` would have gone on from it"
        )
    if other and resume:
        raise _UsageError(
            f"`--resume` goes on with the same run, and '{path}' is of {', '.join(other)}; "
            f"run without it."
        )
    return found


def _backends(asked: str | None) -> tuple[str, ...]:
    """The backends to run: those asked for, which must be installed, or those that are."""
    installed = tuple(name for name in BACKENDS if find_spec(name) is not None)
    wanted = BACKENDS if asked == "both" else (asked,) if asked else installed
    missing = [name for name in wanted if name not in installed]
    if missing:
        raise _UsageError(
            f"`--backend {asked}` needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed; install with "
            f"`pip install 'xentlib[{','.join(missing)}]'`"
            + (f" or pass `--backend {installed[0]}`." if installed else ".")
        )
    if not wanted:
        raise _UsageError(
            "`xentlib parity` needs PyTorch or JAX and found neither; install with "
            "`pip install 'xentlib[torch,jax]'`."
        )
    if asked is None and len(wanted) == 1:
        _note(
            f"only {wanted[0]} is installed: it is held against the float64 oracle alone; "
            f"`pip install 'xentlib[torch,jax]'` to compare the two"
        )
    return wanted


def _check_device(device: str, backends: Sequence[str]) -> None:
    from xentlib.parity.device import missing_on

    missing = missing_on(device, backends)
    if missing:
        raise _UsageError(
            f"`--device {device}` needs a device that {' and '.join(missing)} can use, and there "
            f"is none; install a build for it, name the other backend with `--backend`, or run "
            f"without `--device`."
        )


def _training_left_out(backends: Sequence[str], text: Path | None, device: str) -> str:
    """Why the training part cannot be run, or nothing."""
    if device != "cpu":
        if text is not None:
            raise _UsageError("`--text` is for the training part, which is run on the CPU alone.")
        return "left out, as it is run on the CPU alone"
    needed = dict.fromkeys(name for backend in backends for name in TRAINING_NEEDS[backend])
    missing = [name for name in needed if find_spec(name) is None]
    if not missing:
        return ""
    extras = ",".join(dict.fromkeys(EXTRA_OF[name] for name in missing))
    way_out = f"`pip install 'xentlib[{extras}]'`"
    if text is not None:
        raise _UsageError(
            f"`--text` is for the training part, which needs {' and '.join(missing)}; "
            f"install with {way_out}."
        )
    reason = f"left out, as it needs {' and '.join(missing)}: {way_out}"
    _note(f"training is {reason}")
    return reason


def _check_paths(text: Path | None, out: Path) -> None:
    """Before the minutes of the run, not after them."""
    if text is not None:
        from xentlib.parity.text import read_documents

        try:
            read_documents(text)
        except ValueError as error:
            raise _UsageError(str(error)) from error
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _UsageError(
            f"`--out` must be a folder that can be written; got '{out}': {error.strerror}."
        ) from error


def _prepare(backends: Sequence[str], device: str) -> None:
    """What must be in the environment before JAX is loaded."""
    if "jax" not in backends:
        return
    # XLA may otherwise keep a bf16 value in fp32 between two operations: other bits than written.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_allow_excess_precision" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_allow_excess_precision=false".strip()
    if device == "cpu":  # a GPU build would take the GPU
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return
    os.environ.setdefault("JAX_PLATFORMS", f"{device},cpu")
    # JAX would take three quarters of the memory at its start, and PyTorch is in the same process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _environment(
    args: argparse.Namespace, backends: Sequence[str], left_out: str
) -> dict[str, str]:
    """What a reader needs to run it again. No host name and no path but the user's own."""
    found = {
        "xentlib": xentlib.__version__,
        "suite": args.suite,
        "backends": ", ".join(backends),
        "seed": str(args.seed),
        "text": _text_name(args.text) if args.text else "the Python standard library",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "code": _code(),
        "python": platform.python_version(),
    }
    if left_out:
        found["training"] = left_out
        del found["text"]
    if args.device != "cpu":
        from xentlib.parity.device import described

        found["device"] = ", ".join(f"{described(args.device, b)} in {b}" for b in backends)
        found["ranks"] = "left out, as they are run on the CPU alone"
    for name in VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["system"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        if "jax" in backends and name in os.environ:
            found[name] = os.environ[name]
    return found


def _text_name(text: Path) -> str:
    return f"{text.name}, SHA-256 {hashlib.sha256(text.read_bytes()).hexdigest()[:12]}"


def _code() -> str:
    """A digest of the package's own sources."""
    found = hashlib.sha256()
    for package in ("xentlib", *(f"xentlib.{name}" for name in BACKENDS)):
        spec = util.find_spec(package)  # loads no framework
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(f"{package} {path.relative_to(folder).as_posix()}\n".encode())
                found.update(path.read_bytes())
    return f"SHA-256 {found.hexdigest()[:12]}"


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
