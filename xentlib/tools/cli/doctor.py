"""`xentlib doctor`: what of this environment is usable, what is not, why, and what to install."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import xentlib
from xentlib.contract import Measurement
from xentlib.tools.cli.arguments import Row, add_rows, whole
from xentlib.tools.cli.errors import UsageError
from xentlib.tools.cli.requirements import BACKENDS, check_device, prepare
from xentlib.tools.doctor.backends import imported, jax_findings, system, torch_findings
from xentlib.tools.doctor.finding import Finding, bad
from xentlib.tools.doctor.model import ConfigError, findings, read_config
from xentlib.tools.doctor.packages import PACKAGES, inspect, ranges
from xentlib.tools.parity.report.document import finite

SCHEMA = "xentlib.doctor/1"
PARTS = ("backends", "devices", "kernels", "trainers", "commands", "contract", "model")
MARKS = {"ok": "ok", "note": "note", "absent": "-", "bad": "BAD"}


DESCRIPTION = (
    "Look at backends, versions, kernels, trainers and devices, and measure a few rows of the "
    "contract. Exit status 1 if something that is installed cannot be used."
)
HEAD = "a model's folder, or its config.json: what its head needs, and what `patch` says"
PLACE = "where rows are measured; auto takes cuda where every installed backend has it"
ARGUMENTS: tuple[Row, ...] = (
    ("--model", Path, None, "PATH", HEAD),
    ("--tokens", whole, 8192, "N", "of a batch, for the memory of --model"),
    ("--device", ("auto", "cpu", "cuda"), "auto", None, PLACE),
    ("--no-rows", bool, None, None, "measure nothing"),
    ("--json", bool, None, None, "print JSON to stdout instead of the report"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add_rows(parser, ARGUMENTS)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where something that is installed cannot be used, 2 where nothing computes."""
    try:
        config = None if args.model is None else read_config(args.model)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    installed = [name for name in BACKENDS if find_spec(name) is not None]
    findings_so_far = system()
    prepare(installed, args.device)
    admits = ranges()
    findings_so_far += [inspect(package, admits) for package in PACKAGES]
    broken = {name: imported(name) for name in installed}
    findings_so_far += [one for one in broken.values() if one is not None]
    usable = tuple(name for name in installed if broken[name] is None)
    for name, look in (("torch", torch_findings), ("jax", jax_findings)):
        if name in usable:
            of_backend = look()
            findings_so_far += of_backend
            if any(one.part == "devices" for one in bad(of_backend)):  # nothing to compute on
                usable = tuple(other for other in usable if other != name)

    device = "cpu"
    measured: list[Measurement] = []
    if usable:
        from xentlib.tools.doctor.rows import as_finding, device_of, measure

        check_device("cpu" if args.device == "auto" else args.device, usable)
        device = device_of(usable) if args.device == "auto" else args.device
        if not args.no_rows:
            measured, failed, seconds = measure(usable, device)
            findings_so_far.append(as_finding(measured, failed, seconds, device))
    if config is not None:
        findings_so_far += findings(config, args.tokens)

    status = 2 if not usable else 1 if bad(findings_so_far) else 0
    if args.json:
        print(json.dumps(finite(document(findings_so_far, measured, usable, status)), indent=1))
    else:
        print("\n".join(lines(findings_so_far)))
    verdict = said(findings_so_far, usable)
    print(
        f"\n{verdict}" if status == 0 and not args.json else f"xentlib: {verdict}",
        file=sys.stdout if status == 0 and not args.json else sys.stderr,
    )
    return status


def document(
    findings: list[Finding], measured: list[Measurement], usable: tuple[str, ...], status: int
) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "xentlib": xentlib.__version__,
        "status": status,
        "usable": list(usable),
        "findings": [asdict(one) for one in findings],
        "measurements": [asdict(one) for one in measured],
    }


def lines(findings: list[Finding]) -> Iterator[str]:
    """The report: a line a finding, and one for what to do."""
    yield f"xentlib {xentlib.__version__}"
    width = max(len(one.name) for one in findings)
    for part in PARTS:
        of_it = [one for one in findings if one.part == part]
        if of_it:
            yield f"\n{part}"
        for one in of_it:
            yield f"  {MARKS[one.status]:<5}{one.name:<{width}}  {one.said}"
            if one.cure:
                yield f"       {'':<{width}}  -> {one.cure}"


def said(findings: list[Finding], usable: tuple[str, ...]) -> str:
    """The verdict, in a sentence."""
    wrong = ", ".join(one.name for one in bad(findings))
    if not usable and wrong:
        return f"nothing can be computed here, as what is marked BAD cannot be used: {wrong}."
    if not usable:
        return (
            "nothing can be computed here, as neither PyTorch nor JAX is installed; install with "
            "`pip install 'xentlib[torch]'`, `pip install 'xentlib[jax]'` or both."
        )
    here = " and ".join(f"xentlib.{name}" for name in usable)
    if wrong:
        return f"{here} can be imported, and what is marked BAD cannot be used as it is: {wrong}."
    return f"{here} can be used."
