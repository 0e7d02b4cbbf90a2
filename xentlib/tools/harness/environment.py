"""Where and with what a run was made: enough to judge its numbers, nothing about whose machine it
was."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path

import xentlib

# Of a benchmark and its peers, and of a parity run
MEASURED = ("numpy", "torch", "triton", "jax", "jaxlib", "optax")
PEERS = ("liger-kernel", "cut-cross-entropy", "trl", "quack-kernels", "tokamax")
COMPARED = ("torch", "triton", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "tokenizers")
BACKENDS = ("torch", "jax")
CPUINFO = Path("/proc/cpuinfo")
# What decides the speed of a GEMM on x86.
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    of_each = ((package, version_of(package)) for package in packages)
    return {package: version for package, version in of_each if version is not None}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def environment() -> dict[str, str]:
    """Of a benchmark: CPU, cores, operating system, versions, date, and how busy the machine
    was."""
    facts = {
        "date": now(),
        "cpu": cpu_line("model name") or platform.processor() or platform.machine(),
        "cpu_units": ", ".join(unit for unit in UNITS if unit in cpu_line("flags").split()),
        "cores": str(usable_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "xentlib": xentlib.__version__,
        **versions(MEASURED + PEERS),
    }
    if hasattr(os, "getloadavg"):
        facts["load_before"] = f"{os.getloadavg()[0]:.2f}"
    return facts


def environment_of(
    args: argparse.Namespace, backends: Sequence[str], left_out: str
) -> dict[str, str]:
    """Of a parity run: what a reader needs to run it again. No host name and no path but the
    user's own."""
    facts = {
        "xentlib": xentlib.__version__,
        "suite": args.suite,
        "backends": ", ".join(backends),
        "seed": str(args.seed),
        "text": _text_name(args.text) if args.text else "the Python standard library",
        "date": now(),
        "code": code_digest(),
        "python": platform.python_version(),
    }
    if args.only:
        facts["only"] = " ".join(args.only)
    if left_out:
        facts["training"] = left_out
        del facts["text"]
    if args.device != "cpu":
        from xentlib.tools.harness.device import described

        facts["device"] = ", ".join(f"{described(args.device, b)} in {b}" for b in backends)
        facts["ranks"] = "left out, as they are run on the CPU alone"
    if args.kernels != "auto":
        facts["kernels"] = args.kernels
    facts |= versions(COMPARED)
    facts["system"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        if "jax" in backends and name in os.environ:
            facts[name] = os.environ[name]
    return facts


def _text_name(text: Path) -> str:
    return f"{text.name}, SHA-256 {hashlib.sha256(text.read_bytes()).hexdigest()[:12]}"


def code_digest() -> str:
    """A digest of the package's own sources."""
    digest = hashlib.sha256()
    for package in ("xentlib", *(f"xentlib.{name}" for name in BACKENDS)):
        spec = util.find_spec(package)  # loads no framework
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package} {path.relative_to(folder).as_posix()}\n".encode())
                digest.update(path.read_bytes())
    return f"SHA-256 {digest.hexdigest()[:12]}"


def cpu_line(key: str) -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
