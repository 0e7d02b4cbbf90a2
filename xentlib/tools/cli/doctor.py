"""`xentlib doctor`: what of this environment is usable, what is not, why, and what to install.

NumPy may be what is broken: what needs it is imported when it has been tried.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import xentlib
from xentlib.tools.cli.command import Row, whole
from xentlib.tools.cli.requirements import check_device, prepare
from xentlib.tools.doctor.imports import Tried, try_imports
from xentlib.tools.doctor.packages import PACKAGES, Finding, Package, inspect, ranges, system, there
from xentlib.tools.harness.environment import BACKENDS

if TYPE_CHECKING:
    from xentlib.contract import Measurement

SCHEMA = "xentlib.doctor/1"
PARTS = ("backends", "devices", "kernels", "trainers", "commands", "contract", "model")
MARKS = {"ok": "ok", "note": "note", "absent": "-", "bad": "BAD"}
NEEDED = ("numpy", "ml_dtypes")  # by everything, this command too
PLUGIN_CURE = (
    "install the plugin of jaxlib's version (pip install 'jax[cuda13]' or 'jax[cuda12]'), or "
    "uninstall it"
)


DESCRIPTION = (
    "Look at backends, versions, kernels, trainers and devices, import them in other processes, "
    "and measure a few rows of the contract. Exit status 1 if something that is installed "
    "cannot be used."
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
    installed = [name for name in BACKENDS if find_spec(name) is not None]
    findings = system()
    prepare(installed, args.device)
    needed = [package for package in PACKAGES if package.name in NEEDED]
    of_needed, _ = judged(needed)
    findings += of_needed
    if any(one.status in ("bad", "absent") for one in of_needed):
        return report(args, findings, (), [])

    from xentlib.tools.doctor import backends, model
    from xentlib.tools.harness.device import missing_on

    config = None if args.model is None else model.read_config(args.model)
    of_packages, tried = judged([package for package in PACKAGES if package not in needed])
    findings += of_packages
    broken = {name for name, one in tried.items() if one.wrong}
    usable = [name for name in installed if name not in broken]
    for name in [*usable]:
        failed = backends.imported(name)
        look = {"torch": backends.torch_findings, "jax": backends.jax_findings}[name]
        of_backend = look() if failed is None else [failed]
        findings += of_backend
        if failed or any(one.part == "devices" for one in bad(of_backend)):
            usable.remove(name)  # nothing to compute with, or on
    for plugin in tried["jax"].plugins if "jax" in tried else ():
        words = f"a plugin cannot be used, and JAX goes on without it: {plugin}"
        findings.append(Finding("devices", "jax plugin", "bad", words, PLUGIN_CURE))
    if "deepspeed" in tried.keys() - broken and "torch" in usable:
        findings += backends.compilers()

    measured: list[Measurement] = []
    if usable:
        device = args.device
        if device == "auto":
            device = "cpu" if missing_on("cuda", usable) else "cuda"
        check_device(device, usable)
        if not args.no_rows:
            measured, rows = backends.measured_rows(tuple(usable), device)
            findings.append(rows)
    if config is not None:
        findings += model.findings(config, args.tokens, broken)
    return report(args, findings, usable, measured)


def judged(packages: Sequence[Package]) -> tuple[list[Finding], dict[str, Tried]]:
    """What there is to say of packages, and what came of importing those that are there."""
    admits = ranges()
    chains: dict[str, dict[str, Sequence[str]]] = {}
    for one in packages:
        if there(one.module):
            chains.setdefault(one.chain, {})[one.name] = one.steps or (one.module,)
    tried = try_imports([*chains.values()])
    return [inspect(package, admits, tried.get(package.name)) for package in packages], tried


def report(
    args: argparse.Namespace,
    findings: list[Finding],
    usable: Sequence[str],
    measured: list[Measurement],
) -> int:
    """Print it, and return the exit status."""
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
        if measured:
            from xentlib.tools.parity.report.document import finite

            document = finite(document)
        print(json.dumps(document, indent=1))
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
    """The report: a line a finding, and one for what to do; one for all packages that are not
    there."""
    yield f"xentlib {xentlib.__version__}"
    absent = [one for one in findings if one.status == "absent" and one.part != "model"]
    shown = [one for one in findings if one not in absent]
    width = max((len(one.name) for one in shown), default=0)
    for part in PARTS:
        of_it = [one for one in shown if one.part == part]
        if of_it:
            yield f"\n{part}"
        for one in of_it:
            yield f"  {MARKS[one.status]:<5}{one.name:<{width}}  {one.said}"
            if one.cure:
                yield f"       {'':<{width}}  -> {one.cure}"
    if absent:
        cures = dict.fromkeys(one.cure for one in absent)
        of_each = (
            ", ".join(x.name for x in absent if x.cure == cure) + f" ({cure})" for cure in cures
        )
        yield f"\nnot installed, and nothing here asks for it: {'; '.join(of_each)}"


def verdict(findings: list[Finding], usable: Sequence[str]) -> str:
    """In a sentence."""
    wrong = ", ".join(one.name for one in bad(findings))
    needed = next((x for x in findings if x.name in NEEDED and x.status in ("bad", "absent")), None)
    if needed is not None and not usable:
        return (
            f"nothing can be computed here, as all of xentlib needs {needed.name}: {needed.said}; "
            f"{needed.cure}."
        )
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
