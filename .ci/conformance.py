"""Which rows of the contract the losses of other libraries hold: docs/data/conformance.json.

The adapters of losses are those of the benchmark, those of divergences in `.ci/divergences.py`. Who
is not installed, or needs CUDA, is named. Each is held in a process of its own. Written by `make
conformance`; `--only NAME` renews one.
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

from divergences import ABSENT, PEERS, adapters
from smallest import smallest_rejected

from xentlib.tools.conformance import (
    Conformance,
    DivergenceConformance,
    Loss,
    conform,
    conform_divergence,
)
from xentlib.tools.parity.report.summary import bound_text, row_statements, summarise, value_text

HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "docs" / "data" / "conformance.json"
# Labels of -100 are taken out, of the divisor too; the others have no such label.
IGNORE = ("xentlib", "eager", "torch.compile", "F.linear_cross_entropy", "Liger", "Cut", "QuACK")
LEFT_OUT = ("torch.compile, full logits",)  # eager's operators, by a compiler
PACKAGES = {
    "eager": "torch",
    "F.linear": "torch",
    "F.kl_div": "torch",
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


def as_data(found: Conformance | DivergenceConformance) -> dict[str, Any]:
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


def divergence_data(found: DivergenceConformance) -> dict[str, Any]:
    missed = {
        name: [*dict.fromkeys(m.case.partition(", ")[2] for m in found.of(name) if not m.passed)]
        for name in found.checks
    }
    return {
        **as_data(found),
        "misses": {name: cases for name, cases in missed.items() if cases},
        "distances": [x._asdict() for x in found.distances],
    }


def one_divergence(backend: str, name: str) -> None:
    """Of all its kinds, or that it is not installed."""
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"  # before JAX is loaded
    version = version_of(name)
    each = adapters(backend).get(name)
    if each is None:
        print(json.dumps({"absent": f"not installed: pip install {version}", "version": version}))
        return
    kinds = {x.kind: divergence_data(conform_divergence(x)) for x in each}
    print(json.dumps({"backend": backend, "version": version, "kinds": kinds}))


def one(backend: str, name: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"  # before JAX is loaded
    peer = next(x for x in peers(backend) if x.name == name)
    excuse = peer.excuse("loss + gradient", "cpu", None)
    found = {"absent": excuse, "backend": backend, "version": version_of(name)}
    print(json.dumps(found if excuse else as_data(conform(adapter(peer, backend)))))


def stamp() -> str:
    """When, and by which version."""
    import xentlib

    return f"{datetime.now(UTC).strftime('%Y-%m-%d')} with xentlib {xentlib.__version__}"


def in_a_process(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(HERE), *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) == 3:
        one_divergence(*arguments[1:])
        return
    if len(arguments) == 2 and arguments[0] != "--only":
        one(*arguments)
        return
    only = arguments[1] if arguments else ""
    before = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}
    found: dict[str, dict[str, Any]] = {"losses": {}, "divergences": {}}
    made = dict(before.get("made", {}))

    def renew(group: str, key: str, *process: str) -> Any:
        """Of one, unless another one alone is asked for."""
        if only and key != only:
            kept = before.get(group, {})
            found[group] |= {key: kept[key]} if key in kept else {}
            return None
        found[group][key] = in_a_process(*process)
        made[group] = stamp()
        return found[group][key]

    for backend in ("torch", "jax"):
        for peer in peers(backend):
            key = f"{peer.name}, JAX" if peer.name == "xentlib" and backend == "jax" else peer.name
            new = renew("losses", key, backend, peer.name)
            if new:
                held = {name: row["holds"] for name, row in new.get("rows", {}).items()}
                print(key, new.get("absent") or held, new.get("errors"), flush=True)
        for name in PEERS[backend]:
            new = renew("divergences", name, "divergence", backend, name)
            if new:
                print(name, new.get("absent") or [*new["kinds"]], flush=True)
    for name, (package, why) in ABSENT.items():
        found["divergences"][name] = {"absent": why, "version": package}
    found["smallest rejected"] = smallest_rejected()
    DATA.write_text(json.dumps({"made": made, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
