"""What a run was made with: versions, arguments, a digest of the code."""

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
from xentlib.tools.cli.requirements import BACKENDS

VERSIONS_OF = (
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "ml_dtypes",
    "tokenizers",
)


def environment_of(
    args: argparse.Namespace, backends: Sequence[str], left_out: str
) -> dict[str, str]:
    """What a reader needs to run it again. No host name and no path but the user's own."""
    found = {
        "xentlib": xentlib.__version__,
        "suite": args.suite,
        "backends": ", ".join(backends),
        "seed": str(args.seed),
        "text": _text_name(args.text) if args.text else "the Python standard library",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "code": code_digest(),
        "python": platform.python_version(),
    }
    if left_out:
        found["training"] = left_out
        del found["text"]
    if args.device != "cpu":
        from xentlib.tools.parity.device import described

        found["device"] = ", ".join(f"{described(args.device, b)} in {b}" for b in backends)
        found["ranks"] = "left out, as they are run on the CPU alone"
    if args.kernels != "auto":
        found["kernels"] = args.kernels
    for name in VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["system"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        if "jax" in backends and name in os.environ:
            found[name] = os.environ[name]
    return found


def _text_name(text: Path) -> str:
    return f"{text.name}, SHA-256 {hashlib.sha256(text.read_bytes()).hexdigest()[:12]}"


def code_digest() -> str:
    """A digest of the package's own sources."""
    found = hashlib.sha256()
    for package in ("xentlib", *(f"xentlib.{name}" for name in BACKENDS)):
        spec = util.find_spec(package)  # loads no framework
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(f"{package} {path.relative_to(folder).as_posix()}\n".encode())
                found.update(path.read_bytes())
    return f"SHA-256 {found.hexdigest()[:12]}"
