"""Kernels, products, the contract's rows, behaviour tests and the benchmark on a device, in under
ten minutes.

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
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What only a device can show, and the kernels, row A3 first: an exponential with a bias would leave
# it. Then tests of the operators, which take a device; others are about ranks, wrappers or the CPU.
FIRST = ("kernels", "kernels_triton", "contract_triton", "device_torch")
TESTS = ("nll", "logprobs", "given_logits")
TESTS += ("behaviour_torch", "compile_torch", "work_torch", "modes_torch")
TESTS += ("behaviour_jax", "program_jax")
TESTS += ("logprobs_jax", "logprobs_traced_jax", "logprobs_program_jax")
# Seconds of each: ten minutes in all.
PARTS = {"first": 90, "probe": 110, "parity-triton": 70, "tests": 110, "parity": 70, "bench": 130}
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
        seconds = PARTS[part] * args.share
        found[part] = run(COMMANDS[part](args, out), environment, seconds)
        found[part].update(READ[part](out))
        (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {said(found[part])}", flush=True)
    print(out / "gpu.json")
    return 0 if all(found[part]["rc"] == 0 for part in args.parts) else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    result.add_argument("--device", default="cuda", help="cpu tries the command itself")
    result.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    result.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    result.add_argument("--share", type=float, default=1.0, help="of each part's time")
    result.add_argument("--tests", nargs="+", default=list(TESTS), help="names of test modules")
    result.add_argument("--first", nargs="+", default=list(FIRST), help="those that run first")
    result.add_argument("--tiny", action="store_true", help="sizes of the probe that say nothing")
    result.add_argument(
        "--cases", nargs="+", default=["llama3-8b", "qwen3-0.6b"], help="of the bench"
    )
    result.add_argument("--rounds", default="5", help="of the bench; with 1 no memory")
    result.add_argument("--suite", default="quick", help="of the parity run")
    return result


def commit() -> str:
    """What the checkout is at; nothing where it is no checkout."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    if not shutil.which("git"):
        return ""
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def versions(device: str) -> dict[str, str]:
    found = {"device": device, "python": platform.python_version(), "commit": commit()}
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


def pytest_of(modules: list[str], report: Path) -> list[str]:
    # An image may lack the plugins that pyproject.toml sets options of.
    plain = ["-o", "addopts=", "-o", "minversion=0", "-W", "default", "-p", "no:cacheprovider"]
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    if importlib.util.find_spec("xdist"):
        plain += ["-n", str(workers), "--dist", "load"]
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in modules]
    return [sys.executable, "-m", "pytest", "-q", *plain, f"--junitxml={report}", *files]


def first(args: argparse.Namespace, out: Path) -> list[str]:
    return pytest_of(args.first, out / "first.xml")


def tests(args: argparse.Namespace, out: Path) -> list[str]:
    return pytest_of(args.tests, out / "tests.xml")


def probe(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["--device", args.device, "--out", str(out / "probe.json")]
    given += ["--seconds", str(0.8 * PARTS["probe"] * args.share)]
    given += ["--tiny"] if args.tiny else []
    return [sys.executable, str(ROOT / ".ci" / "gpu_probe.py"), *given]


def parity(args: argparse.Namespace, out: Path) -> list[str]:
    """Both backends; in PyTorch the eager operators."""
    given = ["--device", args.device, "--suite", args.suite, "--out", str(out / "parity")]
    given += ["--kernels", "eager"]
    return [sys.executable, "-m", "xentlib", "parity", *given]


def parity_triton(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["--device", args.device, "--suite", args.suite, "--out", str(out / "parity-triton")]
    given += ["--kernels", "triton", "--backend", "torch"]
    return [sys.executable, "-m", "xentlib", "parity", *given]


def bench(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["--device", args.device, "--out", str(out / "bench"), "--rounds", args.rounds]
    given += ["--no-memory"] if args.rounds == "1" else []
    dtypes = ["--dtype", "bfloat16"]
    return [sys.executable, "-m", "xentlib", "bench", "--case", *args.cases, *dtypes, *given]


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


def read_tests(path: Path) -> dict[str, Any]:
    """How many, and the first line of what each of the others said."""
    if not path.exists():
        return {}
    counts = dict.fromkeys(("passed", "failure", "error", "skipped"), 0)
    failed = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        kind = next((child for child in case if child.tag in counts), None)
        counts["passed" if kind is None else kind.tag] += 1
        if kind is not None and kind.tag != "skipped":
            name = f"{case.get('classname')}::{case.get('name')}"
            failed[name] = (kind.get("message") or "").partition("\n")[0][:300]
    return {"counts": counts, "failed": failed}


def read_parity(path: Path) -> dict[str, Any]:
    """The worst of each row, metric and backend, and what could not be run."""
    if not path.exists():
        return {}
    run = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for m in run["measurements"]:
        row = rows.setdefault(
            f"{m['row']} {m['backend']} {m['metric']}", {"measured": 0, "failed": 0}
        )
        row["measured"] += 1
        if m["value"] is not None:
            worst = min if m.get("at_least") else max
            row["worst"] = worst(row.get("worst", m["value"]), m["value"])
        if not m["passed"]:
            row["failed"] += 1
            row.setdefault("first", {k: m[k] for k in ("case", "quantity", "value", "bound")})
    sections = {s["name"]: s["error"] for s in run["sections"] if s.get("error")}
    return {"passed": run["passed"], "rows": rows, "errors": sections}


def read_json(path: Path, name: str) -> dict[str, Any]:
    return {name: json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}


COMMANDS: dict[str, Callable[[argparse.Namespace, Path], list[str]]] = {
    "first": first,
    "probe": probe,
    "parity-triton": parity_triton,
    "tests": tests,
    "parity": parity,
    "bench": bench,
}
READ: dict[str, Callable[[Path], dict[str, Any]]] = {
    "first": lambda out: read_tests(out / "first.xml"),
    "probe": lambda out: read_json(out / "probe.json", "probe"),
    "parity-triton": lambda out: read_parity(out / "parity-triton" / "parity.json"),
    "tests": lambda out: read_tests(out / "tests.xml"),
    "parity": lambda out: read_parity(out / "parity" / "parity.json"),
    "bench": lambda out: read_json(out / "bench" / "bench.json", "bench"),
}


def said(found: dict[str, Any]) -> str:
    """One line for people."""
    ending = "stopped" if found.get("late") else f"exit status {found['rc']}"
    text = f"{ending} after {found['seconds']:.0f} s"
    if "counts" in found:
        text += ", " + ", ".join(f"{n} {name}" for name, n in found["counts"].items() if n)
    if "rows" in found:
        short = sorted(name for name, row in found["rows"].items() if row["failed"])
        text += f", falls short: {'; '.join(short)}" if short else ", every row holds"
    return text


if __name__ == "__main__":
    sys.exit(main())
