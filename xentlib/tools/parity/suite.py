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
from xentlib.tools.harness.device import contract_settings, forget_programs, on_device
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.tools.parity.on_ranks import OnRanks
from xentlib.tools.parity.progress import Planned, Progress
from xentlib.tools.parity.result import Section
from xentlib.tools.parity.rows import (
    classes,
    collectives,
    divergences,
    invariant,
    mutants,
    parts,
    sharded,
    soft,
    windows,
)
from xentlib.tools.parity.rows.head import nll, per_token, recomputed

# Of a section: its name, the rows that it measures, the seconds of a step, the problems, and what
# measures one of them.
Rows = tuple[str, str, float, Sequence[Any], Callable[[Findings, Any], None]]
BETWEEN_BACKENDS = (
    *(nll.audit, recomputed.audit, per_token.audit, windows.audit),
    *(divergences.audit, classes.of_classes.audit, soft.soft.audit),
)
# Ends of names of sections about rows A10 and A17, which are of CPUs: a GPU's library of products
# chooses a program by the number of tokens.
OF_CPUS = ("chunk sizes", "batch invariance")


def operator_sections(
    backends: tuple[str, ...], suite: str, seed: int, device: str = "cpu"
) -> list[Planned]:
    """Sections that measure the rows of the contract for the installed backends.

    Args:
        backends: "torch", "jax" or both; rows between backends need both.
        suite: "quick" (each row of each function, on few cases), "standard", or "full" (more cases
            and three seeds).
        seed: of every array.
        device: the default one of both frameworks. Ranks and devices of a mesh are on the CPU, and
            rows A10 and A17 are of CPUs: their sections are left out elsewhere.
    """
    full, few, extent = suite == "full", suite == "quick", [cases.Extent(seed, suite)]
    seeds, audit_seeds = (range(seed, seed + (count if full else 1)) for count in (3, 5))
    grid = {"quick": cases.QUICK_GRID, "standard": cases.GRID, "full": cases.FULL_GRID}[suite]
    low_grid = grid[:1] if few else grid
    fp32, bf16 = _problems(grid, seeds), _problems(low_precision(low_grid), seeds)
    fp16 = _problems(low_precision(low_grid, "float16"), seeds)
    base = _problems((BASE,), [seed])
    blocks = (cases.BLOCKS, cases.WITH_OPTIONS)[: 1 if few else None]
    in_blocks, low_in_blocks = (_problems(x, [seed]) for x in (blocks, low_precision(blocks)))
    # Of few the two functions have one each: of 16 bits, and of float32 with options.
    chunks, batches = (
        _problems(x, [seed]) for x in (cases.CHUNK_CASES, (invariant.BATCH, invariant.BATCH_LOW))
    )
    of_nll, of_tokens = (slice(-1, None), slice(-2, -1)) if few else (slice(None), slice(None))
    repeats = base if few else base + _problems((cases.WITH_OPTIONS,), [seed])
    two = base if few else _problems((BASE, CONFIDENT), seeds)
    audit = _problems(
        named(AUDIT, "audit-5", "audit-9", "audit-fp16-options") if few else AUDIT, audit_seeds
    )
    logits = logit_sets(seed, *(("gaps-31", "offset") if few else ()))
    gaps = logits[: 1 if few else None]
    # For per-token outputs: one of each standard deviation, with options and without.
    four = named(AUDIT, "audit-0", "audit-1", "audit-2", "audit-3")[: 2 if few else None]
    company_of_nll, company_of_tokens = batches[of_nll], batches[of_tokens]
    token_chunks = partial(per_token.chunks, few=few)
    nll_batches, token_batches = (
        partial(invariant.batches, rows, few=few) for rows in (nll, per_token)
    )
    of_divergence = _problems(divergences.ONCE if few else divergences.GRID, [seed])
    close = _problems(divergences.CLOSE[-1 if few else 0 :], [seed])
    repeated = of_divergence[:1] if few else _problems(divergences.ONCE, [seed])
    low_divergence = _problems(
        low_precision(divergences.GRID[4:5] if few else divergences.GRID), [seed]
    )
    tempered = _problems(named(divergences.GRID, "tempered-forward_kl"), [seed])
    company = _problems((divergences.BATCH,), [seed])
    divergence_chunks = partial(divergences.divergences.chunks, few=few)
    of_batches = partial(divergences.batches, divergences.divergences, few=few)
    of_classes, kept = classes.of_classes, _problems(classes.GRID, [seed])
    both, audited_kept = kept[2:3], kept[1:4]  # a kept set and further classes, with options
    kept, audited_kept = (both, both) if few else (kept, audited_kept)
    low_classes, mutated = (
        _problems(x, [seed])
        for x in (low_precision(classes.GRID[2:3] if few else classes.GRID[:4]), (classes.MUTATED,))
    )
    (batch,) = _problems((classes.BATCH,), [seed])
    class_batches = partial(invariant.batches, of_classes, few=few)
    of_soft, soft_batch = (_problems(x, [seed]) for x in (soft.GRID, (soft.BATCH,)))
    one_soft, two_soft = of_soft[2:3], of_soft[1:3]  # all classes and a few, with options
    of_soft, soft_chunks = two_soft if few else of_soft, partial(soft.soft.chunks, few=few)
    low_soft, soft_mutated = (
        _problems(x, [seed])
        for x in (low_precision(soft.GRID[1 : 2 if few else 3]), (soft.MUTATED,))
    )
    soft_batches = partial(invariant.batches, soft.soft, few=few)
    sections: list[Rows] = [
        ("fp32 against the oracle", "A0 A2 A5 A6 A9 A26", 2.6, fp32, nll.against_oracle),
        ("bf16 against the oracle", "A7 A8 A9 A19", 2.4, bf16, nll.against_oracle),
        ("fp16 against the oracle", "A8 A9 A16 A19", 2.3, fp16, nll.against_oracle),
        ("audit mode, bit for bit", "A1", 2.2, audit, nll.audit),
        ("log-probabilities of given logits", "A3 A4", 1.8, logits, nll.logits),
        ("chunk sizes", "A10", 3.9, chunks[of_nll], partial(nll.chunks, few=few)),
        ("run to run", "A11", 2.0, repeats, nll.repeat),
        ("windows of micro-batches", "A0 A2 A12 A14", 5.8, two, windows.windows),
        ("mutants", "A14", 7.6, base, mutants.nll_mutants),
        ("recomputed loss, fp32", "A0 A2 A5 A6 A9", 2.6, in_blocks, recomputed.against_oracle),
        ("recomputed loss, bf16", "A7 A8 A9 A19", 2.4, low_in_blocks, recomputed.against_oracle),
        ("recomputed loss in audit mode", "A1", 2.2, in_blocks[:1], recomputed.audit),
        ("per-token outputs, fp32", "A0 A5 A6 A9", 2.3, fp32, per_token.against_oracle),
        ("per-token outputs, bf16", "A7 A9 A19", 2.8, bf16, per_token.against_oracle),
        ("per-token outputs, fp16", "A9 A16 A19", 3.1, fp16, per_token.against_oracle),
        ("per-token outputs of given logits", "A3 A4", 1.4, gaps, per_token.logits),
        ("per-token outputs, chunk sizes", "A10", 5.7, chunks[of_tokens], token_chunks),
        ("per-token outputs, run to run", "A11", 3.3, base, per_token.repeat),
        ("per-token outputs, mutants", "A14", 4.0, base, mutants.per_token_mutants),
        (
            "divergences, fp32",
            "A0 A5 A6 A9 A23 A24",
            3.1,
            of_divergence,
            divergences.against_oracle,
        ),
        ("divergences, bf16", "A7 A9 A19", 2.1, low_divergence, divergences.against_oracle),
        ("divergences of given logits", "A14 A20 A21 A22 A24", 6.9, extent, divergences.given),
        ("divergences of close heads in bf16", "A25", 2.4, close, divergences.close_heads),
        (
            "divergences, chunk sizes",
            "A10",
            2.3,
            of_divergence[:1],
            divergence_chunks,
        ),
        (
            "divergences, run to run",
            "A11",
            3.1,
            repeated,
            divergences.divergences.repeat,
        ),
        ("divergences, batch invariance", "A17", 7.7, company, of_batches),
        ("divergences, mutants", "A14", 3.5, tempered, divergences.mutants),
        ("classes of a token, fp32", "A0 A5 A6 A9", 3.7, kept, of_classes.against_oracle),
        ("classes of a token, bf16", "A7 A9 A19", 3.3, low_classes, of_classes.against_oracle),
        ("classes of a token of given logits", "A0 A3 A4", 3.0, gaps, classes.given),
        ("classes of a token, chunk sizes", "A10", 3.4, both, partial(of_classes.chunks, few=few)),
        ("classes of a token, run to run", "A11", 3.8, both, of_classes.repeat),
        ("classes of a token, mutants", "A14", 3.8, mutated, classes.mutants),
        ("classes of a token, batch invariance", "A14 A17", 6.6, [batch], class_batches),
        ("class probabilities, fp32", "A0 A2 A5 A6 A9", 2.5, of_soft, soft.soft.against_oracle),
        ("class probabilities, bf16", "A7 A8 A9 A19", 2.8, low_soft, soft.soft.against_oracle),
        ("class probabilities of given logits", "A0 A3 A4", 1.9, gaps, soft.given),
        ("class probabilities, chunk sizes", "A10", 3.0, one_soft, soft_chunks),
        ("class probabilities, run to run", "A11", 1.9, one_soft, soft.soft.repeat),
        ("class probabilities, mutants", "A14", 3.2, soft_mutated, soft.mutants),
        ("class probabilities, batch invariance", "A14 A17", 5.2, soft_batch, soft_batches),
        ("vocabularies over ranks", "A1 A6 A10 A13 A14 A20 A22 A24", 9.1, extent, sharded.sharded),
        ("batch invariance", "A14 A17", 4.1, company_of_nll, nll_batches),
        ("per-token outputs, batch invariance", "A14 A17", 4.1, company_of_tokens, token_batches),
        ("parts of a vocabulary in one process", "A18", 9.2, [seed], parts.parts),
        ("shard invariance", "A14 A18", 11.0, extent, invariant.shards),
        ("collectives", "A14 A15", 0.1, extent, collectives.collectives),
        ("per-token outputs in audit mode", "A1", 1.5, _problems(four, [seed]), per_token.audit),
        ("classes of a token in audit mode", "A1", 2.5, audited_kept, of_classes.audit),
        ("class probabilities in audit mode", "A1", 1.9, two_soft, soft.soft.audit),
        ("divergences in audit mode", "A1", 2.0, low_divergence, divergences.audit),
        ("windows in audit mode", "A1", 3.6, two, windows.audit),
    ]
    return _planned(sections, backends, device)


def few_sections(backends: tuple[str, ...], device: str = "cpu") -> list[Planned]:
    """One small problem for each of the rows that a user's device decides on: what `xentlib doctor`
    measures. Sizes, ranks, windows and mutants are left to `xentlib parity`."""
    low = [case for dtype in ROW_OF for case in low_precision((BASE,), dtype)]
    audit = named(AUDIT, "audit-fp16-options")
    base, logits = _problems((BASE,), [0]), logit_sets(0, "gaps-31")
    sections: list[Rows] = [
        ("fp32 against the oracle", "A0 A2 A5 A6 A9", 0.5, base, nll.against_oracle),
        (
            "16 bits against the oracle",
            "A7 A8 A9 A16 A19",
            0.5,
            _problems(low, [0]),
            nll.against_oracle,
        ),
        ("log-probabilities of given logits", "A3 A4", 0.5, logits, nll.logits),
        ("per-token outputs, fp32", "A0 A5 A6 A9", 0.7, base, per_token.against_oracle),
        ("run to run", "A11", 1.0, base, nll.repeat),
        ("audit mode, bit for bit", "A1", 0.4, _problems(audit, [0]), nll.audit),
    ]
    return _planned(sections, backends, device)


def _planned(sections: list[Rows], backends: tuple[str, ...], device: str) -> list[Planned]:
    """Those that can be run with these backends on this device."""

    def run(rows: Rows, progress: Progress, slowness: float) -> Section:
        name, _, _, items, measure = rows
        findings = Findings(backends, slowness)
        progress.stage(name, len(items))
        with contract_settings(backends), on_device(device, backends):
            for item in items:
                problem = item() if callable(item) else item
                measure(findings, problem)
                forget_programs(backends)
                progress.advance(getattr(problem, "text", ""))
        return Section(name, tuple(findings.measurements), tuple(findings.histograms))

    def measured(rows: str) -> tuple[str, ...]:
        return tuple(row for row in rows.split() if len(backends) == 2 or row != "A9")

    return [
        Planned(
            *(name, len(items), partial(run, section), seconds, measured(rows)),
            partial(measure.ahead, backends, *items) if isinstance(measure, OnRanks) else None,
        )
        for section in sections
        for name, rows, seconds, items, measure in [section]
        if (len(backends) == 2 or measure not in BETWEEN_BACKENDS)
        and (device == "cpu" or not (isinstance(measure, OnRanks) or name.endswith(OF_CPUS)))
    ]


def _problems(grid: Iterable[Case], seeds: Iterable[int]) -> list[Callable[[], Problem]]:
    """Problems that are built when their turn comes: those of the full suite fill 1.6 GiB."""
    return [partial(build, case, seed) for seed in seeds for case in grid]
