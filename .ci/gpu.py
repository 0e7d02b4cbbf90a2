"""Timings, kernels, products, the contract's rows, behaviour tests and the benchmark on a device,
in two sittings of at most nine minutes.

    python .ci/gpu.py [--parts timings checks] [--device cuda] [--out build/gpu] [--peers DIR]

For a machine that has PyTorch, JAX, pytest, hypothesis and mpmath, NVIDIA's images for example, and
no network: nothing is installed, this folder is put on the path. Wheels of peers that lie in DIR
are unpacked and take part in the benchmark.

Timings have the device to themselves, one after the other: `smoke`, `probe`, `bench`. Checks wait
for the CPU and run side by side: `first`, `tests`, `ranks`, `parity-triton`, `parity`; then
`sanitizer`.
Each part has a share of the time, is stopped when that is used up, and keeps what it has by then: a
test, a head, a contestant, a section. Everything is in one JSON, gpu.json, which is written after
each part; what it was read from is in gpu.tar.gz. Exit status 1 if a part fell short or could not
be run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import site
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What only a device can show, and the kernels, row A3 first: an exponential with a bias would leave
# it. Then tests of the operators, which take a device; others are about ranks, wrappers or the CPU.
FIRST = ("kernels", "kernels_triton", "contract_triton", "classes_triton", "device_torch")
TESTS = (
    *("nll", "nll_edges", "logprobs", "given_logits", "batch_invariance"),
    *("behaviour_torch", "compile_torch", "work_torch", "modes_torch"),
    *("divergence", "divergence_torch", "soft_labels", "soft_labels_torch", "top_k"),
    *("most_probable", "classes", "classes_torch", "lowrank", "lowrank_torch", "heads_torch"),
    *("module", "labels", "segments", "segments_traced", "distillation"),
    *("behaviour_jax", "program_jax"),
    *("logprobs_jax", "logprobs_traced_jax", "logprobs_program_jax"),
)
# Ranks that share the device, over gloo: vocabularies in shards, and the routes of a sharded head.
# FSDP2's own gathers end such a process without a word.
RANKS = ("routes", "nodes", "routes_differing", "vocab_parallel", "vocab_parallel_uneven")
# Seconds of each. A part that is late has GRACE more to write what it has.
TIMINGS = {"smoke": 40, "probe": 140, "bench": 300}
CHECKS = {"first": 400, "tests": 400, "ranks": 400, "parity-triton": 400, "parity": 400}
AFTER = {"sanitizer": 60}
PARTS = TIMINGS | CHECKS | AFTER
SITTINGS = {"timings": (*TIMINGS,), "checks": (*CHECKS, *AFTER)}
GRACE = 15
# Tokens of 8,192 first: a case of 32,768 takes as long as four.
CASES = ("qwen3-8b", "gemma2-2b", "llama3-8b")
# Contestants of the bench beside ours, and what each needs: a process for each, so that an
# interruption costs what is under way and no more.
PEERS = {
    "torch": (
        ("quack", "QuACK"),
        ("liger_kernel", "Liger-Kernel, Triton"),
        ("cutlass", "Liger-Kernel, SM90"),
        ("cutlass", "Liger-Kernel, SM90, per token"),
        ("torch", "eager, full logits"),
        ("cut_cross_entropy", "Cut Cross-Entropy, no filter"),
        ("torch", "torch.compile, full logits"),
        ("trl", "TRL, chunked"),
        ("liger_kernel", "Liger-Kernel, Triton, float32 d weight"),
        ("cut_cross_entropy", "Cut Cross-Entropy"),
    ),
    "jax": (
        ("optax", "optax, full logits"),
        ("tokamax", "tokamax, xla"),
        ("jax", "MaxText-style tiling"),
    ),
}
PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy", "optax", "flax", "pytest", "hypothesis")
TAIL = 4000  # characters, at both ends of the output, of a part that did not end well

WRITING = Lock()


def main() -> int:
    """Run the parts that are asked for; returns the exit status."""
    args = parser().parse_args()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)  # a mount, perhaps, in which somebody keeps a log
    shutil.rmtree(out / "parts", ignore_errors=True)
    (out / "parts").mkdir(exist_ok=True)
    peers = unpacked(args.peers, out / "parts" / "peers")
    path = [str(ROOT), str(ROOT / ".ci"), *peers]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(path),
        XENTLIB_DEVICE=args.device,
        # Several processes share the device, and JAX would take three quarters of it each.
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    asked = [p for name in args.parts for p in SITTINGS.get(name, (name,))]
    parts: dict[str, Any] = {"environment": versions(args.device)}
    write(parts, out)

    def do(part: str) -> None:
        commands = COMMANDS[part](args, out / "parts")
        parts[part] = run(part, commands, environment, PARTS[part] * args.share, out / "parts")
        parts[part] |= READ[part](out / "parts")
        write(parts, out)
        print(f"{part}: {in_words(parts[part])}", flush=True)

    for part in (p for p in asked if p in TIMINGS):
        do(part)
    with ThreadPoolExecutor(len(CHECKS)) as side_by_side:
        list(side_by_side.map(do, (p for p in asked if p in CHECKS)))
    for part in (p for p in asked if p in AFTER):
        do(part)
    with tarfile.open(out / "gpu.tar.gz", "w:gz") as archive:
        archive.add(out / "parts", "parts", filter=lambda x: None if "/peers" in x.name else x)
    print(out / "gpu.json")
    return 0 if all(parts[part]["rc"] == 0 for part in asked) else 1


def write(parts: dict[str, Any], out: Path) -> None:
    with WRITING:  # parts end side by side
        (out / "gpu.json").write_text(json.dumps(dict(parts), indent=1) + "\n", encoding="utf-8")


def unpacked(wheels: Path | None, folder: Path) -> list[str]:
    """Wheels of peers as files, which Triton reads; CuTe has modules where a .pth of its says."""
    archives, before = sorted(wheels.glob("*.whl")) if wheels is not None else [], {*sys.path}
    for archive in archives:
        zipfile.ZipFile(archive).extractall(folder)
    if archives:
        site.addsitedir(str(folder))
    return [x for x in sys.path if x not in before]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    result.add_argument("--device", default="cuda", help="cpu tries the command itself")
    result.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    result.add_argument("--parts", nargs="+", choices=[*SITTINGS, *PARTS], default=[*SITTINGS])
    result.add_argument("--share", type=float, default=1.0, help="of each part's time")
    result.add_argument("--peers", type=Path, help="folder with wheels of other libraries")
    result.add_argument("--tests", nargs="+", default=list(TESTS), help="names of test modules")
    result.add_argument("--ranks", nargs="+", default=list(RANKS), help="those of ranks")
    result.add_argument("--first", nargs="+", default=list(FIRST), help="those that run first")
    result.add_argument("--tiny", action="store_true", help="sizes of the probe that say nothing")
    result.add_argument("--cases", nargs="+", default=list(CASES), help="of the bench")
    result.add_argument("--rounds", default="5", help="of the bench; with 1 no memory")
    result.add_argument("--suite", default="standard", help="of the parity run")
    result.add_argument("--rows", nargs="+", default=[], help="of the contract, of the parity run")
    return result


def commit() -> str:
    """What the checkout is at; nothing where it is no checkout."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    if not shutil.which("git"):
        return ""
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def versions(device: str) -> dict[str, str]:
    result = {"device": device, "python": platform.python_version(), "commit": commit()}
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = "none"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(asked[0]):
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
        result["nvidia-smi"] = said.stdout.strip()
    return result


def pytest_of(modules: list[str], report: Path, *more: str) -> list[str]:
    # An image may lack the plugins that pyproject.toml sets options of.
    plain = ["-o", "addopts=", "-o", "minversion=0", "-W", "default", "-p", "no:cacheprovider"]
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    if importlib.util.find_spec("xdist"):
        plain += ["-n", str(workers), "--dist", "load"]
    # A name that no file has goes on as it is: without a file pytest would run all of them.
    folders = {path.name: str(path) for path in (ROOT / "tests").glob("*/test_*.py")}
    files = [folders.get(f"test_{name}.py", name) for name in modules]
    lines = ["-p", "gpu_reports", "--lines", str(report)]
    return [sys.executable, "-m", "pytest", "-q", *plain, *more, *lines, *files]


def ranks(args: argparse.Namespace, out: Path) -> list[list[str]]:
    # Ranks are started for a file.
    more = ("-m", "torch", *(("--dist", "loadfile") if importlib.util.find_spec("xdist") else ()))
    return [pytest_of(args.ranks, out / "ranks.jsonl", *more)]


def smoke(args: argparse.Namespace, out: Path) -> list[list[str]]:
    """Every way through a head once, in sizes of no account."""
    given = ["--device", args.device, "--out", str(out / "smoke.json"), "--tiny"]
    return [[sys.executable, str(ROOT / ".ci" / "gpu_probe.py"), *given]]


def probe(args: argparse.Namespace, out: Path) -> list[list[str]]:
    given = ["--device", args.device, "--out", str(out / "probe.json")]
    given += ["--seconds", str(0.8 * PARTS["probe"] * args.share)]
    given += ["--tiny"] if args.tiny else []
    return [[sys.executable, str(ROOT / ".ci" / "gpu_probe.py"), *given]]


def parity_of(args: argparse.Namespace, out: Path) -> list[str]:
    given = ["--device", args.device, "--suite", args.suite, "--out", str(out)]
    given += ["--only", *args.rows] if args.rows else []
    return [sys.executable, "-m", "xentlib", "parity", *given]


def parity(args: argparse.Namespace, out: Path) -> list[list[str]]:
    """Both backends; in PyTorch the eager operators."""
    return [[*parity_of(args, out / "parity"), "--kernels", "eager"]]


def parity_triton(args: argparse.Namespace, out: Path) -> list[list[str]]:
    return [[*parity_of(args, out / "parity-triton"), "--kernels", "triton", "--backend", "torch"]]


def bench(args: argparse.Namespace, out: Path) -> list[list[str]]:
    """A process for each case, framework and contestant: ours beside the bare products in all
    cases, then everybody who is installed."""
    given = ["--device", args.device, "--rounds", args.rounds, "--dtype", "bfloat16"]
    given += ["--no-memory"] if args.rounds == "1" else []
    frameworks = [name for name in PEERS if importlib.util.find_spec(name)]
    jobs = [(case, name, "xentlib") for case in args.cases for name in frameworks]
    jobs += [
        (case, name, contestant)
        for case in args.cases
        for name in frameworks
        for package, contestant in PEERS[name]
        if importlib.util.find_spec(package)
    ]
    command = [sys.executable, "-m", "xentlib", "bench", *given]
    return [
        [
            *(*command, "--case", case, "--backend", name),
            *("--contestant", contestant, "--out", str(out / f"bench-{number:02}")),
        ]
        for number, (case, name, contestant) in enumerate(jobs)
    ]


def sanitizer(args: argparse.Namespace, out: Path) -> list[list[str]]:
    """Reads and writes out of bounds, and races, of the kernels at tiny sizes."""
    if not shutil.which("compute-sanitizer"):
        return []
    tiny = [sys.executable, str(ROOT / ".ci" / "gpu_probe.py"), "--device", args.device, "--tiny"]
    checked = ["compute-sanitizer", "--error-exitcode", "1"]
    return [
        [*checked, "--tool", tool, *tiny, "--out", str(out / f"{tool}.json")]
        for tool in ("memcheck", "racecheck")
    ]


def run(
    part: str, commands: list[list[str]], environment: dict[str, str], seconds: float, out: Path
) -> dict[str, Any]:
    """One after the other; the one that is under way when the time is used up is interrupted, so
    that it can write what it has, and then killed."""
    start = time.monotonic()
    result: dict[str, Any] = {"rc": 0, "ended": 0, "of": len(commands)}
    with (out / f"{part}.log").open("w+", encoding="utf-8", errors="replace") as log:
        for command in commands:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                result["rc"] |= process.wait(max(0.0, seconds - (time.monotonic() - start)))
                result["ended"] += 1
            except subprocess.TimeoutExpired:
                process.send_signal(2)
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                result |= {"rc": process.wait() or 1, "late": True}
                break
        log.seek(0)
        output = log.read()
    result["seconds"] = round(time.monotonic() - start, 1)
    if result["rc"]:
        result["output"] = output if len(output) < 2 * TAIL else output[:TAIL] + output[-TAIL:]
    return result


def read_tests(path: Path) -> dict[str, Any]:
    """How many, and the first line of what each of those said that did not pass. A test counts when
    it has been cleaned up after: one that was interrupted has not passed."""
    if not path.exists():
        return {}
    reports: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        report = json.loads(line)
        reports.setdefault(report["test"], []).append(report)
    counts = dict.fromkeys(("passed", "failed", "skipped", "interrupted"), 0)
    failed = {}
    for test, said in reports.items():
        ended = {report["when"]: report["outcome"] for report in said}
        how = next((o for o in ("failed", "skipped") if o in ended.values()), "passed")
        counts["interrupted" if "teardown" not in ended and how != "failed" else how] += 1
        if how == "failed":
            failed[test] = next(r["said"] for r in said if r["outcome"] == "failed")
    return {"counts": counts, "failed": failed}


def read_bench(out: Path) -> dict[str, Any]:
    files = sorted(out.glob("bench-*/bench.json"))
    return {"runs": [x for f in files for x in json.loads(f.read_text(encoding="utf-8"))["runs"]]}


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


COMMANDS: dict[str, Callable[[argparse.Namespace, Path], list[list[str]]]] = {
    "smoke": smoke,
    "probe": probe,
    "bench": bench,
    "first": lambda args, out: [pytest_of(args.first, out / "first.jsonl")],
    "tests": lambda args, out: [pytest_of(args.tests, out / "tests.jsonl")],
    "ranks": ranks,
    "parity-triton": parity_triton,
    "parity": parity,
    "sanitizer": sanitizer,
}
READ: dict[str, Callable[[Path], dict[str, Any]]] = {
    "smoke": lambda out: read_json(out / "smoke.json", "probe"),
    "probe": lambda out: read_json(out / "probe.json", "probe"),
    "bench": read_bench,
    "first": lambda out: read_tests(out / "first.jsonl"),
    "tests": lambda out: read_tests(out / "tests.jsonl"),
    "ranks": lambda out: read_tests(out / "ranks.jsonl"),
    "parity-triton": lambda out: read_parity(out / "parity-triton" / "parity.json"),
    "parity": lambda out: read_parity(out / "parity" / "parity.json"),
    "sanitizer": lambda out: {},
}


def in_words(result: dict[str, Any]) -> str:
    """One line for people."""
    ending = "stopped" if result.get("late") else f"exit status {result['rc']}"
    text = f"{ending} after {result['seconds']:.0f} s"
    if result["of"] != 1:
        text += f", {result['ended']} of {result['of']} commands ended"
    if "counts" in result:
        text += ", " + ", ".join(f"{n} {name}" for name, n in result["counts"].items() if n)
    if "rows" in result:
        short = sorted(name for name, row in result["rows"].items() if row["failed"])
        text += f", falls short: {'; '.join(short)}" if short else ", every row holds"
    return text


if __name__ == "__main__":
    sys.exit(main())
