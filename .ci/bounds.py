"""The worst of each bound of the contract over many seeds, instruction sets and libraries of
products: docs/data/bounds.json. What bounds that are measured, not derived, are made of.

Each setting is a process of its own. `make bounds` takes ten minutes of one core; `--seeds 5` is
for a look.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from xentlib.contract import Measurement
from xentlib.tools.harness import cases
from xentlib.tools.harness.cases import CONFIDENT, SHORT, low_precision, named
from xentlib.tools.harness.device import contract_settings
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build
from xentlib.tools.parity.rows import classes, divergences, soft, windows
from xentlib.tools.parity.rows.head import nll, per_token

HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "docs" / "data" / "bounds.json"
XLA = "--xla_allow_excess_precision=false"
# AVX2 in place of what the processor has, in PyTorch's own operators, MKL, oneDNN and XLA.
NARROW = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "XLA_FLAGS": f"{XLA} --xla_cpu_max_isa=AVX2",
}
SETTINGS: dict[str, dict[str, str]] = {
    "as the processor is": {},
    "AVX2": NARROW,
    "without oneDNN": {"WITHOUT_ONEDNN": "1"},
}
BOTH = ("torch", "jax")
# Bounds of 16 bits are derived, and windows are compiled anew for each call of JAX: a tenth of the
# seeds.
TENTH = 10
Measure = Callable[[Findings, Any], None]
# Of all cases those that were nearest to a bound of A5, A6, A9, A12 or A26 in three seeds.
NEAREST = (
    *("base", "peaked", "sharp", "confident", "saturated", "one-token", "options"),
    *("logits-100", "far-label", "given-logits", "logits-1e4"),
)
PER_TOKEN = ("peaked", "sharp", "confident", "one-token")


def grid(seed: int, setting: str) -> Iterator[tuple[tuple[str, ...], Case, Measure]]:
    """Of one seed: backends, cases, and what measures them."""
    few = seed % TENTH == 0
    for dtype in SHORT if few else ():
        for case in low_precision(named(cases.GRID, "base", "confident"), dtype):
            yield BOTH, case, nll.against_oracle
    if setting == "without oneDNN":  # which has PyTorch's products in 16 bits
        return
    for case in named(cases.GRID, *NEAREST):
        yield BOTH, case, nll.against_oracle
        if case.id in PER_TOKEN:
            yield BOTH, case, per_token.against_oracle
    for case in named(divergences.GRID, "tempered-reverse_kl", "mixed-jsd"):
        yield BOTH, case, divergences.against_oracle
    for case in named(classes.GRID, "ids", "kept-sharp"):
        yield BOTH, case, classes.of_classes.against_oracle
    for case in named(soft.GRID, "probs", "probs-options"):
        yield BOTH, case, soft.soft.against_oracle
    yield BOTH if few else ("torch",), CONFIDENT, windows.windows


def measured(setting: str, seeds: int) -> dict[str, Any]:
    """The worst by row, metric, backend and quantity, with its case and seed."""
    worst: dict[str, Any] = {}
    if "WITHOUT_ONEDNN" in os.environ:
        import torch

        torch.backends.mkldnn.set_flags(False)
    start = time.process_time()
    for seed in range(seeds):
        for backends, case, measure in grid(seed, setting):
            findings = Findings(backends)
            with contract_settings(backends):
                measure(findings, build(case, seed))
            for m in findings.measurements:
                if m.row != "A14":
                    keep(worst, m, seed)
        print(seed, round(time.process_time() - start), file=sys.stderr, flush=True)
    return worst


def keep(worst: dict[str, Any], m: Measurement, seed: int) -> None:
    key = ", ".join((m.row, m.metric, m.backend, m.quantity))
    old = worst.setdefault(key, {"value": m.value, "numbers": 0, "case": m.case, "seed": seed})
    old["numbers"] += m.entries
    if (m.value < old["value"]) if m.at_least else not m.value <= old["value"]:
        old |= {"value": m.value, "case": m.case, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--setting", choices=SETTINGS, help="of a child")
    arguments = parser.parse_args()
    if arguments.setting:
        print(json.dumps(measured(arguments.setting, arguments.seeds)))
        return
    worst = {}
    for setting, variables in SETTINGS.items():
        command = [sys.executable, str(HERE), "--setting", setting, "--seeds", str(arguments.seeds)]
        environment = {**os.environ, "XLA_FLAGS": XLA, **variables}
        run = partial(subprocess.run, check=True, stdout=subprocess.PIPE, text=True)
        worst[setting] = json.loads(run(command, env=environment).stdout.splitlines()[-1])
    made = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "seeds": arguments.seeds}
    DATA.write_text(json.dumps({"made": made, "worst": worst}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
