"""Which rows of the contract the losses of other libraries hold: docs/data/conformance.json.

The adapters are those of the benchmark. Who is not installed, or needs CUDA, is named. Each loss is
held in a process of its own. Written by `make conformance`; `--only NAME` renews one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xentlib.tools.conformance import Conformance, Loss, conform
from xentlib.tools.parity.report.summary import bound_text, row_statements, summarise, value_text

HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "docs" / "data" / "conformance.json"
# Labels of -100 are taken out, of the divisor too; the others have no such label.
IGNORE = ("xentlib", "eager", "torch.compile", "F.linear_cross_entropy", "Liger", "Cut", "QuACK")
LEFT_OUT = ("torch.compile, full logits",)  # eager's operators, by a compiler
PACKAGES = {
    "eager": "torch",
    "F.linear": "torch",
    "Liger": "liger-kernel",
    "Cut": "cut-cross-entropy",
    "TRL": "trl",
    "QuACK": "quack-kernels",
    "optax": "optax",
    "tokamax": "tokamax",
    "MaxText": "jax",
    "xentlib": "xentlib",
}


def peers(backend: str) -> list[Any]:
    if backend == "torch":
        import torch

        from xentlib.tools.bench.implementations_torch import implementations

        return [x for x in implementations(torch.bfloat16) if x.name not in LEFT_OUT]
    from xentlib.tools.bench import implementations_jax

    return implementations_jax.implementations()


def adapter(peer: Any, backend: str) -> Loss:
    """A dozen lines: the benchmark's call in the contract's words."""

    def function(hidden: Any, weight: Any, labels: Any, softcap: float | None = None) -> Any:
        return peer.run(hidden, weight, labels, softcap, "mean")

    return Loss(
        peer.name,
        backend,
        function,
        options=("softcap",) if peer.softcap else (),
        ignores=peer.name.startswith(IGNORE),
        version=version_of(peer.name),
    )


def version_of(name: str) -> str:
    package = next(package for start, package in PACKAGES.items() if name.startswith(start))
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def as_data(found: Conformance) -> dict[str, Any]:
    """What the page shows."""
    rows = {}
    for row in summarise(found.result, row_statements()):
        if row.passed is not None:
            worst = [f"{label} {value_text(m)} ({bound_text(m)})" for label, m in row.worst]
            rows[row.id] = {"holds": row.passed, "worst": worst, "numbers": row.entries}
    errors = sorted({x.error.partition("\n")[0][:160] for x in found.result.failed})
    return {
        "backend": found.loss.backend,
        "version": found.loss.version,
        "rows": rows,
        "left_out": len(found.left_out),
        "errors": errors,
        "choices": found.choices,
    }


def one(backend: str, name: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"  # before JAX is loaded
    peer = next(x for x in peers(backend) if x.name == name)
    excuse = peer.excuse("loss + gradient", "cpu", None)
    found = {"absent": excuse, "backend": backend, "version": version_of(name)}
    print(json.dumps(found if excuse else as_data(conform(adapter(peer, backend)))))


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] != "--only":
        one(*sys.argv[1:])
        return
    before = json.loads(DATA.read_text(encoding="utf-8"))["losses"] if DATA.is_file() else {}
    found: dict[str, Any] = {}
    for backend in ("torch", "jax"):
        for peer in peers(backend):
            key = f"{peer.name}, JAX" if peer.name == "xentlib" and backend == "jax" else peer.name
            if len(sys.argv) == 3 and key != sys.argv[2]:
                found |= {key: before[key]} if key in before else {}
                continue
            done = subprocess.run(
                [sys.executable, str(HERE), backend, peer.name],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found[key] = json.loads(done.stdout.splitlines()[-1])
            held = {name: row["holds"] for name, row in found[key].get("rows", {}).items()}
            print(key, found[key].get("absent") or held, found[key].get("errors"), flush=True)
    import xentlib

    date = datetime.now(UTC).strftime("%Y-%m-%d")
    data = {"date": date, "xentlib": xentlib.__version__, "losses": found}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
