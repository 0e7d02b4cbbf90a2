"""Arguments of the command, and its exit status."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import xentlib
from xentlib.kernels import CHOICES
from xentlib.tools.cli.errors import UsageError
from xentlib.tools.cli.requirements import BACKENDS

DEVICES = ("cpu", "cuda")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 holds, 1 falls short, 2 could not be run."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(argv).parse_args(argv)
        if args.command == "doctor":
            from xentlib.tools.cli import doctor

            return doctor.run(args)
        if args.command == "bench":
            from xentlib.tools.cli import bench

            return int(bench.run(args) or 0)
        if args.command == "audit":
            from xentlib.tools.cli import audit

            return audit.run(args)
        if args.command == "plan":
            from xentlib.tools.cli import plan

            return plan.run(args)
        from xentlib.tools.cli import parity

        return parity.run(args, argv)
    except UsageError as error:
        print(f"xentlib: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("xentlib: interrupted", file=sys.stderr)
        return 130


class OneSentence(argparse.ArgumentParser):
    """Refuses in a sentence, without all of its options before it; its sub-commands too."""

    def error(self, message: str) -> NoReturn:
        known = {x for action in self._actions for x in action.option_strings}
        for parser in getattr(self._subparsers, "_group_actions", []):
            known |= {x for one in parser.choices.values() for x in one._option_string_actions}
        wrong = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = get_close_matches(wrong[1], sorted(known), 1) if wrong else []
        way_out = f"did you mean `{near[0]}`" if near else "`xentlib plan --help` lists the options"
        raise UsageError(f"{message}; {way_out}{'?' if near else '.'}")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    kind = OneSentence if argv[:1] == ["plan"] else argparse.ArgumentParser
    parser = kind(
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
        "--kernels",
        choices=CHOICES,
        default="auto",
        help="of PyTorch: its eager operators, or Triton's programs, interpreted on the CPU, "
        "without training (default: %(default)s)",
    )
    parity.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of data and weights (default: 0)"
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

    doctor = commands.add_parser(
        "doctor",
        help="say what of this environment is usable, what is not, and what to install",
        description="Look at backends, versions, kernels, trainers and devices, and measure a few "
        "rows of the contract. Exit status 1 if something that is installed cannot be used.",
    )
    if argv[:1] == ["doctor"]:
        from xentlib.tools.cli.doctor import add_arguments as add_doctor_arguments

        add_doctor_arguments(doctor)

    bench = commands.add_parser(
        "bench", help="time and peak memory beside the bare matrix products"
    )
    if argv[:1] == ["bench"]:  # its arguments are its own, and loaded only when it is asked for
        try:
            from xentlib.tools.cli.bench import add_arguments
        except ModuleNotFoundError as error:
            raise UsageError(
                f"`xentlib bench` needs {error.name}, which is not installed; "
                f"install it with `pip install 'xentlib[plot]'`."
            ) from error
        add_arguments(bench)

    audit = commands.add_parser(
        "audit",
        help="hold a step of yours against the float64 oracle, and name what is wrong with it",
        description="Import a function that returns a loss and the head's gradients, hold it "
        "against the float64 oracle, and name the defect if there is one. Exit status 1 if "
        "anything is wrong.",
    )
    if argv[:1] == ["audit"]:
        from xentlib.tools.cli.audit import add_arguments as of_audit

        of_audit(audit)

    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="say what each route to a sharded head sends, needs and takes, from sizes alone",
        description="Bytes, products, memory and predicted time of a sharded head over "
        "ranks, by what travels: the head, the hidden states, or the head in blocks; beside full "
        "logits. Nothing is computed but numbers, for up to thousands of ranks.",
    )
    if argv[:1] == ["plan"]:
        from xentlib.tools.cli.plan import add_arguments as of_plan

        of_plan(plan)
    return parser


def seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more; got {text!r}")
    return int(text)
