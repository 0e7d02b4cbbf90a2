"""Behaviour tests, the contract's rows and the benchmark on a device, in under ten minutes.

    python .ci/gpu.py [--device cuda] [--out build/gpu]

For a machine that has PyTorch, JAX, pytest, hypothesis and mpmath, NVIDIA's images for example, and
no network: nothing is installed, this folder is put on the path.
Each part has a share of the time and is stopped when that is used up. What it has found is in one
JSON, gpu.json, which is written after each part. Exit status 1 if a part fell short or could not be
run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Tests of the operators, which take a device; the others are about ranks, wrappers or the CPU.
TESTS = ("nll", "logprobs", "given_logits")
TESTS += ("behaviour_torch", "compile_torch", "work_torch", "modes_torch")
TESTS += ("behaviour_jax", "program_jax")
TESTS += ("logprobs_jax", "logprobs_traced_jax", "logprobs_program_jax")
PARTS = {"tests": 240, "parity": 150, "bench": 150}  # seconds of each
PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy", "optax", "flax", "pytest", "hypothesis")
TAIL = 4000  # characters of the output of a part that did not end well


def main() -> int:
    """Run the parts that are asked for; returns the exit status."""
    args = parser().parse_args()
    out: Path = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = dict(
        os.environ,
        PYTHONPATH=str(ROOT),
        XENTLIB_DEVICE=args.device,
        # Several processes share the device, and JAX would take three quarters of it each.
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    found: dict[str, Any] = {"environment": versions(args.device)}
    for part in args.parts:
        command = {"tests": tests, "parity": parity, "bench": bench}[part](args, out)
        found[part] = run(command, environment, PARTS[part] * args.share)
        found[part].update(READ[part](out))
        (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {said(part, found[part])}", flush=True)
    print(out / "gpu.json")
    return 0 if all(found[part]["rc"] == 0 for part in args.parts) else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    result.add_argument("--device", default="cuda", help="cpu tries the command itself")
    result.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    result.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    result.add_argument("--share", type=float, default=1.0, help="of each part's time")
    result.add_argument("--tests", nargs="+", default=list(TESTS), help="names of test modules")
    result.add_argument("--cases", nargs="+", default=["gpt2", "llama3-8b"], help="of the bench")
    result.add_argument("--rounds", default="5", help="of the bench; with 1 no memory")
    result.add_argument("--suite", default="quick", help="of the parity run")
    return result


def versions(device: str) -> dict[str, str]:
    found = {"device": device, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(asked[0]):
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
        found["nvidia-smi"] = said.stdout.strip()
    return found


def tests(args: argparse.Namespace, out: Path) -> list[str]:
    # An image may lack the plugins that pyproject.toml sets options of.
    plain = ["-o", "addopts=", "-o", "minversion=0", "-W", "default", "-p", "no:cacheprovider"]
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    if importlib.util.find_spec("xdist"):
        plain += ["-n", str(workers), "--dist", "load"]
    modules = [str(ROOT / "tests" / f"test_{name}.py") for name in args.tests]
    report = f"--junitxml={out / 'tests.xml'}"
    return [sys.executable, "-m", "pytest", "-q", *plain, report, *modules]


def parity(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["--device", args.device, "--suite", args.suite, "--out", str(out / "parity")]
    return [sys.executable, "-m", "xentlib.cli", "parity", *given]


def bench(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["--device", args.device, "--out", str(out / "bench"), "--rounds", args.rounds]
    given += ["--no-memory"] if args.rounds == "1" else []
    dtypes = ["--dtype", "bfloat16"]
    return [sys.executable, "-m", "xentlib.cli", "bench", "--case", *args.cases, *dtypes, *given]


def run(command: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """Interrupted when its time is used up, so that it can write what it has; then killed."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = False
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(2)
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
    found = {"rc": process.returncode, "seconds": round(time.monotonic() - start, 1)}
    if late:
        found |= {"rc": process.returncode or 1, "late": True}
    if found["rc"]:
        found["output"] = output[-TAIL:]
    return found


def read_tests(out: Path) -> dict[str, Any]:
    """How many, and the first line of what each of the others said."""
    if not (out / "tests.xml").exists():
        return {}
    counts = dict.fromkeys(("passed", "failure", "error", "skipped"), 0)
    failed = {}
    for case in ET.parse(out / "tests.xml").getroot().iter("testcase"):
        kind = next((child for child in case if child.tag in counts), None)
        counts["passed" if kind is None else kind.tag] += 1
        if kind is not None and kind.tag != "skipped":
            name = f"{case.get('classname')}::{case.get('name')}"
            failed[name] = (kind.get("message") or "").partition("\n")[0][:300]
    return {"counts": counts, "failed": failed}


def read_parity(out: Path) -> dict[str, Any]:
    """The worst of each row, metric and backend, and what could not be run."""
    path = out / "parity" / "parity.json"
    if not path.exists():
        return {}
    run = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for m in run["measurements"]:
        row = rows.setdefault(
            f"{m['row']} {m['backend']} {m['metric']}", {"measured": 0, "failed": 0}
        )
        row["measured"] += 1
        if not m["passed"]:
            row["failed"] += 1
            row.setdefault("first", {k: m[k] for k in ("case", "quantity", "value", "bound")})
    sections = {s["name"]: s["error"] for s in run["sections"] if s.get("error")}
    return {"passed": run["passed"], "rows": rows, "errors": sections}


def read_bench(out: Path) -> dict[str, Any]:
    path = out / "bench" / "bench.json"
    return {"bench": json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}


READ = {"tests": read_tests, "parity": read_parity, "bench": read_bench}


def said(part: str, found: dict[str, Any]) -> str:
    """One line for people."""
    ending = "stopped" if found.get("late") else f"exit status {found['rc']}"
    text = f"{ending} after {found['seconds']:.0f} s"
    if part == "tests" and "counts" in found:
        text += ", " + ", ".join(f"{n} {name}" for name, n in found["counts"].items() if n)
    if part == "parity" and "rows" in found:
        short = sorted(name for name, row in found["rows"].items() if row["failed"])
        text += f", falls short: {'; '.join(short)}" if short else ", every row holds"
    return text


if __name__ == "__main__":
    sys.exit(main())
