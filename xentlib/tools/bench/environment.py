"""Where a benchmark ran: enough to judge its numbers, nothing about whose machine it was."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xentlib

PACKAGES = ("numpy", "torch", "triton", "jax", "jaxlib", "optax")
PEERS = ("liger-kernel", "cut-cross-entropy", "trl", "quack-kernels", "tokamax")
CPUINFO = Path("/proc/cpuinfo")
# What decides the speed of a GEMM on x86.
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def environment() -> dict[str, str]:
    """CPU, cores, operating system, versions, date, and how busy the machine was."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cpu_units": ", ".join(unit for unit in UNITS if unit in cpu_flags()),
        "cores": str(usable_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "xentlib": xentlib.__version__,
    }
    for package in PACKAGES + PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if hasattr(os, "getloadavg"):
        found["load_before"] = f"{os.getloadavg()[0]:.2f}"
    return found


def cpu_model() -> str:
    return cpu_line("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    return cpu_line("flags").split()


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
