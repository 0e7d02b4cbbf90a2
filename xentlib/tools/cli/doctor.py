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
from xentlib.tools.cli.command import Row, whole
from xentlib.tools.cli.requirements import check_device, prepare
from xentlib.tools.doctor import backends, model
from xentlib.tools.doctor.packages import PACKAGES, Finding, inspect, ranges
from xentlib.tools.harness.device import missing_on
from xentlib.tools.harness.environment import BACKENDS
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


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where something that is installed cannot be used, 2 where nothing computes."""
    config = None if args.model is None else model.read_config(args.model)
    installed = [name for name in BACKENDS if find_spec(name) is not None]
    findings = backends.system()
    prepare(installed, args.device)
    admits = ranges()
    findings += [inspect(package, admits) for package in PACKAGES]
    broken = {name: backends.imported(name) for name in installed}
    findings += [one for one in broken.values() if one is not None]
    usable = tuple(name for name in installed if broken[name] is None)
    for name, look in (("torch", backends.torch_findings), ("jax", backends.jax_findings)):
        if name in usable:
            of_backend = look()
            findings += of_backend
            if any(one.part == "devices" for one in bad(of_backend)):  # nothing to compute on
                usable = tuple(other for other in usable if other != name)

    measured: list[Measurement] = []
    if usable:
        device = args.device
        if device == "auto":
            device = "cpu" if missing_on("cuda", usable) else "cuda"
        check_device(device, usable)
        if not args.no_rows:
            measured, rows = backends.measured_rows(usable, device)
            findings.append(rows)
    if config is not None:
        findings += model.findings(config, args.tokens)

    status = 2 if not usable else 1 if bad(findings) else 0
    if args.json:
        document = {
            "schema": SCHEMA,
            "xentlib": xentlib.__version__,
            "status": status,
            "usable": list(usable),
            "findings": [one._asdict() for one in findings],
            "measurements": [asdict(one) for one in measured],
        }
        print(json.dumps(finite(document), indent=1))
    else:
        print("\n".join(lines(findings)))
    sentence = verdict(findings, usable)
    if status == 0 and not args.json:
        print(f"\n{sentence}")
    else:
        print(f"xentlib: {sentence}", file=sys.stderr)
    return status


def bad(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.status == "bad"]


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


def verdict(findings: list[Finding], usable: tuple[str, ...]) -> str:
    """In a sentence."""
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
