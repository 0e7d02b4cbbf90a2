"""Arguments of the command, as tables, and its exit status."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

import xentlib
from xentlib.tools.errors import (
    FULL,
    Terminated,
    UsageError,
    give_up_output,
    reader_gone,
    terminable,
)

# A module each, loaded when it is asked for.
COMMANDS = {
    "parity": "hold both backends to the accuracy contract and train the same model in each",
    "doctor": "say what of this environment is usable, what is not, and what to install",
    "bench": "time and peak memory beside the bare matrix products",
    "audit": "hold a step of yours against the float64 oracle, and name what is wrong with it",
    "explain": "say why a sampler's log-probabilities are not what a trainer computes",
    "plan": "say what each route to a sharded head sends, needs and takes, from sizes alone",
}
PIPE_CLOSED = 141  # as of who is ended by SIGPIPE
# A flag, or a name; a type, a tuple of choices, or bool for a switch; default; metavar; help; and a
# dictionary of what `add_argument` is to have beside these, if anything.
Row = tuple[Any, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 holds, 1 falls short, 2 could not be run, or what
    a shell has for a signal."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with terminable():
            try:
                status = _run(argv)
            except SystemExit:  # argparse has printed its help
                sys.stdout.flush()
                raise
        sys.stdout.flush()
    except OSError as error:  # of what is printed, or of a temporary file
        if isinstance(error, BrokenPipeError) and reader_gone():
            give_up_output()
            return PIPE_CLOSED
        if error.errno not in FULL:
            raise
        give_up_output()
        where = f" to '{error.filename}'" if error.filename else ""
        return refused(f"what is left cannot be written{where}: {error.strerror}.")
    return status


def _run(argv: Sequence[str]) -> int:
    try:
        args = _parser(argv).parse_args(argv)
        args.argv = argv
        return int(import_module(f"xentlib.tools.cli.{args.command}").run(args))
    except UsageError as error:
        return refused(f"{error}")
    except KeyboardInterrupt as error:
        print(f"xentlib: {stopped(error)}", file=sys.stderr)
        return status_of(error)


def refused(sentence: str) -> int:
    print(f"xentlib: {sentence}", file=sys.stderr)
    return 2


def stopped(error: KeyboardInterrupt) -> str:
    return "terminated" if isinstance(error, Terminated) else "interrupted"


def status_of(error: KeyboardInterrupt) -> int:
    """As of a shell: 128 and the number of the signal."""
    return 143 if isinstance(error, Terminated) else 130


class OneSentence(argparse.ArgumentParser):
    """Refuses in a sentence, without all of its options before it; its sub-commands too."""

    def error(self, message: str) -> NoReturn:
        known = {x for action in self._actions for x in action.option_strings}
        for parser in getattr(self._subparsers, "_group_actions", []):
            known |= {x for one in parser.choices.values() for x in one._option_string_actions}
        wrong = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = get_close_matches(wrong[1], sorted(known), 1) if wrong else []
        way_out = (
            f"did you mean `{near[0]}`" if near else f"`{self.prog} --help` lists what it takes"
        )
        raise UsageError(f"{message}; {way_out}{'?' if near else '.'}")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = OneSentence(
        prog="xentlib",
        description="One language-model loss head, in PyTorch and in JAX, held to the same bits.",
    )
    parser.add_argument("--version", action="version", version=f"xentlib {xentlib.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for name, words in COMMANDS.items():
        command = commands.add_parser(name, help=words, allow_abbrev=name != "plan")
        if argv[:1] == [name]:
            try:
                module = import_module(f"xentlib.tools.cli.{name}")
            except ModuleNotFoundError as error:
                if name != "bench":
                    raise
                raise UsageError(
                    f"`xentlib bench` needs {error.name}, which is not installed; "
                    f"install it with `pip install 'xentlib[plot]'`."
                ) from error
            add_arguments(command, module)
    return parser


def add_arguments(parser: argparse.ArgumentParser, module: Any) -> None:
    """Those of a command's table; help ends with the default where there is one."""
    parser.description = getattr(module, "DESCRIPTION", None)
    for flag, kind, default, metavar, words, *more in module.ARGUMENTS:
        if kind is bool:
            parser.add_argument(*flag.split(", "), action="store_true", help=words)
            continue
        end = "" if default is None else f" (default: %(default){'g' if kind is number else 's'})"
        of: dict[str, Any] = {"choices" if isinstance(kind, tuple) else "type": kind}
        of |= {"default": default, "metavar": metavar, "help": words + end}
        parser.add_argument(flag, **of, **(more[0] if more else {}))


def whole(text: str, least: int = 1) -> int:
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more; got {text!r}")
    return value


SEEDS = 1 << 32  # all that JAX and PyTorch take


def seed(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) <= 10 else SEEDS
    if value >= SEEDS:
        most = SEEDS - 1
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {most}; got {text!r}")
    return value


UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}


def size(text: str) -> int:
    """Bytes of a number with its unit."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    units = {unit.lower(): count for unit, count in UNITS.items()}
    if not parts or parts[2].lower() not in units or float(parts[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a size with its unit ({', '.join(UNITS)}), such as 80GB; got {text!r}"
        )
    return round(float(parts[1]) * units[parts[2].lower()])


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number; got {text!r}")
    return value
