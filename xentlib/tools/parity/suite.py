"""The operator part of a parity run: every row of the contract over the case grid, in sections.

Each backend is held against the float64 oracle and the two against each other, through their public
functions. What a section measures stands in `rows/`, one file a group of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from xentlib.contract import ROW_OF
from xentlib.tools.harness import cases
from xentlib.tools.harness.cases import AUDIT, BASE, CONFIDENT, logit_sets, low_precision, named
from xentlib.tools.harness.device import contract_settings, on_device
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.tools.parity.progress import Planned, Progress
from xentlib.tools.parity.result import Section
from xentlib.tools.parity.rows import collectives, nll, nll_mutants, per_token, sharded, windows

# Of a section: its name, the problems, and what measures one of them.
Rows = tuple[str, Sequence[Any], Callable[[Findings, Any], None]]
BETWEEN_BACKENDS = (nll.audit, per_token.audit, windows.audit)
ON_RANKS = (sharded.sharded, collectives.collectives)
# Of audit mode, for per-token outputs: one of each standard deviation, with options and without.
FOUR = named(AUDIT, "audit-0", "audit-1", "audit-2", "audit-3")


def operator_sections(
    backends: tuple[str, ...], suite: str, seed: int, device: str = "cpu"
) -> list[Planned]:
    """Sections that measure the rows of the contract for the installed backends.

    Args:
        backends: "torch", "jax" or both; rows between backends need both.
        suite: "quick" or "full" (more cases and three seeds).
        seed: of every array.
        device: the default one of both frameworks. Ranks and devices of a mesh are on the CPU, and
            their sections are left out elsewhere.
    """
    full = suite == "full"
    grid = cases.FULL_GRID if full else cases.GRID
    seeds, audit_seeds = (range(seed, seed + (count if full else 1)) for count in (3, 5))
    bf16, fp16 = low_precision(grid), low_precision(grid, "float16")
    sections: list[Rows] = [
        ("fp32 against the oracle", _problems(grid, seeds), nll.against_oracle),
        ("bf16 against the oracle", _problems(bf16, seeds), nll.against_oracle),
        ("fp16 against the oracle", _problems(fp16, seeds), nll.against_oracle),
        ("audit mode, bit for bit", _problems(AUDIT, audit_seeds), nll.audit),
        ("log-probabilities of given logits", logit_sets(seed), nll.logits),
        ("chunk sizes", _problems(cases.CHUNK_CASES, [seed]), nll.chunks),
        ("run to run", _problems((BASE, cases.WITH_OPTIONS), [seed]), nll.repeat),
        ("windows of micro-batches", _problems((BASE, CONFIDENT), seeds), windows.windows),
        ("mutants", _problems((BASE,), [seed]), nll_mutants.mutants),
        ("per-token outputs, fp32", _problems(grid, seeds), per_token.against_oracle),
        ("per-token outputs, bf16", _problems(bf16, seeds), per_token.against_oracle),
        ("per-token outputs, fp16", _problems(fp16, seeds), per_token.against_oracle),
        ("per-token outputs of given logits", logit_sets(seed), per_token.logits),
        ("per-token outputs, chunk sizes", _problems(cases.CHUNK_CASES, [seed]), per_token.chunks),
        ("per-token outputs, run to run", _problems((BASE,), [seed]), per_token.repeat),
        ("per-token outputs, mutants", _problems((BASE,), [seed]), per_token.mutants),
        ("vocabularies over ranks", [seed], sharded.sharded),
        ("collectives", [suite], collectives.collectives),
        ("per-token outputs in audit mode", _problems(FOUR, [seed]), per_token.audit),
        ("windows in audit mode", _problems((BASE, CONFIDENT), seeds), windows.audit),
    ]
    return _planned(sections, backends, device)


def few_sections(backends: tuple[str, ...], device: str = "cpu") -> list[Planned]:
    """One small problem for each of the rows that a user's device decides on: what `xentlib doctor`
    measures. Sizes, ranks, windows and mutants are left to `xentlib parity`."""
    low = [case for dtype in ROW_OF for case in low_precision((BASE,), dtype)]
    audit = named(AUDIT, "audit-fp16-options")
    sections: list[Rows] = [
        ("fp32 against the oracle", _problems((BASE,), [0]), nll.against_oracle),
        ("16 bits against the oracle", _problems(low, [0]), nll.against_oracle),
        ("log-probabilities of given logits", logit_sets(0, "gaps-31"), nll.logits),
        ("per-token outputs, fp32", _problems((BASE,), [0]), per_token.against_oracle),
        ("run to run", _problems((BASE,), [0]), nll.repeat),
        ("audit mode, bit for bit", _problems(audit, [0]), nll.audit),
    ]
    return _planned(sections, backends, device)


def _planned(sections: list[Rows], backends: tuple[str, ...], device: str) -> list[Planned]:
    """Those that can be run with these backends on this device."""

    def run(rows: Rows, progress: Progress, slowness: float) -> Section:
        name, items, measure = rows
        findings = Findings(backends, slowness)
        progress.stage(name, len(items))
        with contract_settings(backends), on_device(device, backends):
            for item in items:
                problem = item() if callable(item) else item
                measure(findings, problem)
                progress.advance(getattr(problem, "text", ""))
        return Section(name, tuple(findings.measurements), tuple(findings.histograms))

    return [
        Planned(rows[0], len(rows[1]), partial(run, rows))
        for rows in sections
        if (len(backends) == 2 or rows[2] not in BETWEEN_BACKENDS)
        and (device == "cpu" or rows[2] not in ON_RANKS)
    ]


def _problems(grid: Iterable[Case], seeds: Iterable[int]) -> list[Callable[[], Problem]]:
    """Problems that are built when their turn comes: those of the full suite fill 1.6 GiB."""
    return [partial(build, case, seed) for seed in seeds for case in grid]
