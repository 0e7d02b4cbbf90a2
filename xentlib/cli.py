"""The `xentlib` command: `parity`, which shows the backends to be the same, and `bench`.

Nothing heavy is imported before the arguments are understood, and no framework before the
environment variables it reads at import are set.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import xentlib
from xentlib.parity.result import ParityResult

__all__ = ["main"]

BACKENDS = ("torch", "jax")
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
        return _parity(args)
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
        "Exit status 1 if any row of the contract falls short.",
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


def _parity(args: argparse.Namespace) -> int:
    backends = _backends(args.backend)
    left_out = _training_left_out(backends, args.text)
    _check_paths(args.text, args.out)
    _prepare(backends)

    from xentlib.parity.progress import progress_on
    from xentlib.parity.report import print_table, to_json, write_report

    result = ParityResult(environment=_environment(args, backends, left_out))
    start = time.perf_counter()
    with progress_on(sys.stderr) as progress:
        from xentlib.parity.operators import run_operators

        measurements, histograms = run_operators(backends, args.suite, args.seed, progress)
        result.measurements += measurements
        result.histograms += histograms
        if not left_out:
            from xentlib.parity.training import run_training

            trained = run_training(backends, text=args.text, seed=args.seed, progress=progress)
            result.measurements += trained.measurements
            result.curves += trained.curves
    result.seconds = time.perf_counter() - start

    paths = write_report(result, args.out)
    if args.json:
        sys.stdout.write(to_json(result))
    else:
        print_table(result, sys.stdout)
    print("\n".join(map(str, paths)), file=sys.stderr if args.json else sys.stdout)
    return 0 if result.passed else 1


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


def _training_left_out(backends: Sequence[str], text: Path | None) -> str:
    """Why the training part cannot be run, or nothing."""
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


def _prepare(backends: Sequence[str]) -> None:
    """What must be in the environment before JAX is loaded."""
    if "jax" not in backends:
        return
    # XLA may otherwise keep a bf16 value in fp32 between two operations: other bits than written.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_allow_excess_precision" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_allow_excess_precision=false".strip()
    # The contract's rows are of the CPU; a GPU build would take the GPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _environment(
    args: argparse.Namespace, backends: Sequence[str], left_out: str
) -> dict[str, str]:
    """What a reader needs to run it again. No host name and no path but the user's own."""
    found = {
        "xentlib": xentlib.__version__,
        "suite": args.suite,
        "backends": ", ".join(backends),
        "seed": str(args.seed),
        "text": args.text.name if args.text else "the Python standard library",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
    }
    if left_out:
        found["training"] = left_out
        del found["text"]
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


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
