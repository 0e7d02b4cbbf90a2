"""The operator part of a parity run: every row of the contract over the case grid.

Each backend is held against the float64 oracle and the two against each other, through their public
functions. One function a group of rows; `operator_sections` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF, Measurement, check, failures
from xentlib.parity import heads, per_token, sharded, windows
from xentlib.parity.backends import Outcome, run
from xentlib.parity.cases import (
    AUDIT,
    BASE,
    CHUNK_CASES,
    CONFIDENT,
    FULL_GRID,
    GRID,
    WITH_OPTIONS,
    chunks_of,
    logit_sets,
    low_precision,
    named,
)
from xentlib.parity.device import on_device
from xentlib.parity.mutants import array_mutants, problem_mutants
from xentlib.parity.problem import Case, Problem, build, logits_problem
from xentlib.parity.progress import Progress
from xentlib.parity.result import Histogram, Planned, Section
from xentlib.reference import NLLReference
from xentlib.ulp import ulp_distance

__all__ = ["operator_sections"]

Array = npt.NDArray[Any]
BOTH = "torch/jax"
GRADIENT_ROWS = {"d_hidden": "A5", "d_weight": "A6", "d_bias": "A6"}
# Of row A9: bits alone would let one dropped row of 509 pass; its error would not.
BETWEEN = {"bfloat16": ("bf16 bit-equal", "error ratio"), "float16": ("error ratio",)}
# Of audit mode, for per-token outputs: one of each standard deviation, with options and without.
FOUR = named(AUDIT, "audit-0", "audit-1", "audit-2", "audit-3")
# Distances of ULP in powers of two: from exact to 2^24, where no digit is right.
EDGES = (0.0, 0.5, *(2.0**k for k in range(25)), np.inf)


class Findings:
    """What has been measured so far.

    `slowness` is this machine's beside two idle cores, which time limits follow.
    """

    def __init__(self, backends: tuple[str, ...], slowness: float = 1.0) -> None:
        self.backends = backends
        self.slowness = slowness
        self.measurements: list[Measurement] = []
        self._counts: dict[tuple[str, str, str], npt.NDArray[np.int64]] = {}

    def check(self, row: str, got: Any, oracle: Any, bound: Any = None, **details: Any) -> None:
        self.measurements += check(row, got, oracle, bound, **details)

    def reject(
        self,
        row: str,
        wrong: dict[str, Array],
        oracle: Any,
        bound: Any = None,
        *,
        backend: str,
        quantity: str,
        named: bool = True,
        **details: Any,
    ) -> None:
        """One A14 measurement: how many of the mutants, by name, pass the row's check.

        The case says so, and names the row if `named`.
        """
        passed = [
            name
            for name, got in wrong.items()
            if not failures(check(row, got, oracle, bound, **details))
        ]
        case = f"{len(wrong)} mutants" + "".join(f"; passed: {name}" for name in passed)
        self.measurements.append(
            Measurement(
                row="A14",
                backend=backend,
                case=f"{row}, {case}" if named else case,
                quantity=f"{row} {quantity}",
                metric="mutants passed",
                value=float(len(passed)),
                bound=0.0,
                passed=not passed,
                entries=len(wrong),
            )
        )

    def count_ulps(self, row: str, backend: str, quantity: str, got: Any, oracle: Any) -> None:
        distances = ulp_distance(got, oracle, np.asarray(got).dtype.name)
        counts = np.histogram(np.minimum(distances, 2.0**24), EDGES)[0]
        key = (row, backend, quantity)
        self._counts[key] = self._counts.get(key, np.zeros_like(counts)) + counts

    @property
    def histograms(self) -> list[Histogram]:
        return [
            Histogram(*key, EDGES, tuple(int(n) for n in counts))
            for key, counts in self._counts.items()
        ]


Measure = Callable[[Findings, Any], None]


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
    grid = FULL_GRID if full else GRID
    seeds = range(seed, seed + (3 if full else 1))
    stages: list[tuple[str, list[Any], Measure]] = [
        ("fp32 against the oracle", _cases(grid, seeds), _single),
        ("bf16 against the oracle", _cases(low_precision(grid), seeds), _low),
        ("fp16 against the oracle", _cases(low_precision(grid, "float16"), seeds), _low),
        ("audit mode, bit for bit", _cases(AUDIT, range(seed, seed + (5 if full else 1))), _audit),
        ("log-probabilities of given logits", logit_sets(seed), _logits),
        ("chunk sizes", _cases(CHUNK_CASES, [seed]), _chunks),
        ("run to run", _cases((BASE, WITH_OPTIONS), [seed]), _repeat),
        ("windows of micro-batches", _cases((BASE, CONFIDENT), seeds), windows.windows),
        ("mutants", _cases((BASE,), [seed]), _mutants),
        ("per-token outputs, fp32", _cases(grid, seeds), per_token.single),
        ("per-token outputs, bf16", _cases(low_precision(grid), seeds), per_token.low),
        ("per-token outputs, fp16", _cases(low_precision(grid, "float16"), seeds), per_token.low),
        ("per-token outputs of given logits", logit_sets(seed), per_token.logits),
        ("per-token outputs, chunk sizes", _cases(CHUNK_CASES, [seed]), per_token.chunks),
        ("per-token outputs, run to run", _cases((BASE,), [seed]), per_token.repeat),
        ("per-token outputs, mutants", _cases((BASE,), [seed]), per_token.mutants),
        ("vocabularies over ranks", [seed], sharded.sharded),
        ("collectives", [suite], heads.heads),
        ("per-token outputs in audit mode", _cases(FOUR, [seed]), per_token.audit),
        ("windows in audit mode", _cases((BASE, CONFIDENT), seeds), windows.audit),
    ]
    between_backends = (_audit, per_token.audit, windows.audit)
    on_ranks = (sharded.sharded, heads.heads)
    return [
        Planned(name, len(items), partial(_section, backends, device, name, items, measure))
        for name, items, measure in stages
        if (len(backends) == 2 or measure not in between_backends)
        and (device == "cpu" or measure not in on_ranks)
    ]


def _section(
    backends: tuple[str, ...],
    device: str,
    name: str,
    items: list[Any],
    measure: Measure,
    progress: Progress,
    slowness: float,
) -> Section:
    findings = Findings(backends, slowness)
    progress.stage(name, len(items))
    with _gate(backends), on_device(device, backends):
        for given in items:
            item = given() if callable(given) else given
            measure(findings, item)
            progress.advance(getattr(item, "text", ""))
    return Section(name, tuple(findings.measurements), tuple(findings.histograms))


def _cases(cases: Iterable[Case], seeds: Iterable[int]) -> list[Callable[[], Problem]]:
    """Problems that are built when their turn comes: those of the full suite fill 1.6 GiB."""
    return [partial(build, case, seed) for seed in seeds for case in cases]


@contextmanager
def _gate(backends: tuple[str, ...]) -> Iterator[None]:
    """Denormals to zero in PyTorch, as XLA has them on CPU, and one thread: small operators on two
    threads run ten times slower beside a busy process, and row A11 says the bits are the same."""
    if "torch" not in backends:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def _oracle_gradient(reference: NLLReference, name: str, part: str = "d") -> Array:
    result: Array = getattr(reference, name.replace("d_", f"{part}_", 1))
    return result


def _label(name: str) -> str:
    return name.replace("_", " ")


def _single(findings: Findings, problem: Problem) -> None:
    """A0, A2, A5, A6 of one fp32 problem, and A9 where both backends run."""
    reference = problem.reference()
    outcomes = {backend: run(backend, problem) for backend in findings.backends}
    for backend, outcome in outcomes.items():
        details = {"backend": backend, "case": problem.text}
        _exact(findings, problem, outcome, reference, **details)
        findings.check(
            "A2", outcome.loss, reference.loss, magnitude=reference.loss_magnitude, **details
        )
        for name, got in outcome.gradients().items():
            row, oracle = GRADIENT_ROWS[name], _oracle_gradient(reference, name)
            bound = _oracle_gradient(reference, name, "bound")
            findings.check(row, got, oracle, bound, quantity=_label(name), **details)
            findings.count_ulps(row, backend, _label(name), got, oracle)
    if len(outcomes) == 2:
        for name, got in outcomes["torch"].gradients().items():
            findings.check(
                "A9",
                got,
                _oracle_gradient(reference, name),
                other=getattr(outcomes["jax"], name),
                metrics=("rho / u", "error ratio"),
                backend=BOTH,
                case=problem.text,
                quantity=_label(name),
            )


def _exact(
    findings: Findings, problem: Problem, outcome: Outcome, reference: NLLReference, **details: Any
) -> None:
    """A0: counts, masks, dtypes, invalid rows, the loss of no valid token."""
    findings.check(
        "A0",
        outcome.num_tokens.astype(np.int64),
        np.asarray(reference.num_tokens, np.int64),
        quantity="token count",
        **details,
    )
    findings.check("A0", outcome.correct, reference.correct, quantity="correct", **details)
    sure = ~(reference.margin < 2.0**-16)  # closer logits are equal in float32, or the other way
    assert outcome.predicted is not None
    predicted = np.where(sure, outcome.predicted, 0), np.where(sure, reference.predicted, 0)
    findings.check("A0", *predicted, quantity="predicted", **details)
    rows = outcome.gradients()["d_hidden"][~problem.valid]
    findings.check("A0", rows, np.zeros_like(rows), quantity="d hidden of invalid rows", **details)
    per_token = [getattr(outcome, name) for name in ("logprobs", "entropy", "lse")]
    invalid = np.stack(per_token)[:, ~problem.valid]
    findings.check(
        "A0", invalid, np.zeros_like(invalid), quantity="outputs of invalid rows", **details
    )
    expected = [np.dtype(np.float32)] * 4 + [problem.hidden.dtype, problem.weight.dtype]
    got = [outcome.loss, *per_token, outcome.d_hidden, outcome.d_weight]
    wrong = sum(a.dtype != b for a, b in zip(got, expected, strict=True))
    findings.check("A0", np.int64(wrong), np.int64(0), quantity="dtypes", **details)
    if not problem.valid.any():
        nothing = np.concatenate(
            [np.ravel(x).astype(np.float64) for x in (outcome.loss, *outcome.gradients().values())]
        )
        findings.check(
            "A0",
            nothing,
            np.zeros_like(nothing),
            quantity="loss and gradients of nothing",
            **details,
        )


def _low(findings: Findings, problem: Problem) -> None:
    """A7 or A16, and A8, of one 16-bit problem; A9 where both backends run, of bf16 in bits."""
    dtype = problem.hidden.dtype.name
    row, reference = ROW_OF[dtype], problem.reference(dz_dtype=dtype)
    outcomes = {backend: run(backend, problem) for backend in findings.backends}
    for backend, outcome in outcomes.items():
        details = {"backend": backend, "case": problem.text}
        findings.check(
            "A8", outcome.loss, reference.loss, magnitude=reference.loss_magnitude, **details
        )
        for name, got in outcome.gradients().items():
            magnitude = _oracle_gradient(reference, name, "magnitude")
            oracle = _oracle_gradient(reference, name)
            bound = _oracle_gradient(reference, name, "bound")
            findings.check(
                row, got, oracle, bound, magnitude=magnitude, quantity=_label(name), **details
            )
            findings.count_ulps(row, backend, _label(name), got, oracle)
    if len(outcomes) == 2:
        for name, got in outcomes["torch"].gradients().items():
            findings.check(
                "A9",
                got,
                _oracle_gradient(reference, name),
                other=getattr(outcomes["jax"], name),
                metrics=BETWEEN[dtype],
                backend=BOTH,
                case=problem.text,
                quantity=_label(name),
            )


def _audit(findings: Findings, problem: Problem) -> None:
    """A1: everything that the two backends return in audit mode, bit for bit; which logit is the
    largest where float64 can tell."""
    ours, theirs = (run(backend, problem, audit=True) for backend in ("torch", "jax"))
    sure = ~(problem.reference().margin < 2.0**-40)
    for name in (*Outcome._fields,):
        got, other = getattr(ours, name), getattr(theirs, name)
        if got is None:
            continue
        if name == "num_tokens":
            got, other = got.astype(np.int64), other.astype(np.int64)
        if name in ("correct", "predicted"):
            got, other = got[sure], other[sure]
        findings.check("A1", got, other, backend=BOTH, case=problem.text, quantity=_label(name))


def _logits(findings: Findings, item: tuple[str, Array, Array]) -> None:
    """A3 and A4: lse, log-probability and target gradient of logits that are given."""
    text, logits, labels = item
    problem = logits_problem(logits, labels, text)
    reference = problem.reference()
    rows = np.arange(len(labels))
    peak = np.abs(logits.max(axis=1).astype(np.float64))
    scale = np.maximum(peak, reference.lse - logits.max(axis=1))
    oracle = reference.d_weight[labels, rows]
    for backend in findings.backends:
        outcome = run(backend, problem)
        details = {"backend": backend, "case": text}
        gradient = outcome.gradients()["d_weight"][labels, rows]
        findings.check("A3", outcome.lse, reference.lse, magnitude=scale, **details)
        findings.count_ulps("A3", backend, "lse", outcome.lse, reference.lse)
        findings.check(
            "A4", outcome.logprobs, reference.logprobs, quantity="log-probability", **details
        )
        findings.count_ulps("A4", backend, "log-probability", outcome.logprobs, reference.logprobs)
        findings.check("A4", gradient, oracle, quantity="target gradient", **details)


def _chunks(findings: Findings, problem: Problem) -> None:
    """A10: per-token outputs and d hidden under chunks of 8 rows and more."""
    names = ("logprobs", "entropy", "lse", "correct", "predicted", "d_hidden")
    for backend in findings.backends:
        whole = run(backend, problem)
        for chunk in chunks_of(backend):
            outcome = run(backend, problem, chunk_tokens=chunk)
            for name in names:
                findings.check(
                    "A10",
                    getattr(outcome, name),
                    getattr(whole, name),
                    backend=backend,
                    case=f"{problem.text}, chunks of {chunk}",
                    quantity=_label(name),
                )


def _repeat(findings: Findings, problem: Problem) -> None:
    """A11: run to run, and PyTorch on two threads against one."""
    for backend in findings.backends:
        first = run(backend, problem, chunk_tokens=128)
        again = {"run to run": run(backend, problem, chunk_tokens=128)}
        if backend == "torch":
            import torch

            torch.set_num_threads(2)
            try:
                again["two threads"] = run(backend, problem, chunk_tokens=128)
            finally:
                torch.set_num_threads(1)
        for text, outcome in again.items():
            for name in Outcome._fields:
                findings.check(
                    "A11",
                    getattr(outcome, name),
                    getattr(first, name),
                    backend=backend,
                    case=f"{problem.text}, {text}",
                    quantity=_label(name),
                )


def _mutants(findings: Findings, problem: Problem) -> None:
    """A14: every check with a right answer and its mutants; counts those it lets pass."""
    reference = problem.reference()
    lows = [build(low_precision((BASE,), dtype)[0], 0) for dtype in ROW_OF]
    for backend in findings.backends:
        right = run(backend, problem)
        for low in lows:
            _low_mutants(findings, low, backend)
        for name in right.gradients():

            def pick(ref: NLLReference, name: str = name) -> Array:
                return _oracle_gradient(ref, name)

            details: dict[str, Any] = {"backend": backend, "quantity": _label(name)}
            got = getattr(right, name)
            oracle, bound = pick(reference), _oracle_gradient(reference, name, "bound")
            wrong = {**array_mutants(got, oracle), **problem_mutants(problem, pick, got.dtype)}
            for row in (GRADIENT_ROWS[name], "A12"):
                findings.reject(row, wrong, oracle, bound, **details)
            for row in ("A1", "A10", "A11"):
                findings.reject(row, wrong, got, **details)
            fp32 = {"other": got, "metrics": ("rho / u", "error ratio")}
            findings.reject("A9", wrong, oracle, **fp32, **details)
        _loss_mutants(findings, "A2", problem, right, reference, backend)
        counts = {"N_total": np.asarray(problem.labels.size), "zero": np.asarray(0)}
        count = np.asarray(reference.num_tokens)
        findings.reject("A0", counts, count, backend=backend, quantity="token count")
        lse, logprobs = np.asarray(right.lse), np.asarray(right.logprobs)
        scale = np.maximum(np.abs(reference.lse), 1.0)
        wrong = array_mutants(lse, reference.lse)
        findings.reject(
            "A3", wrong, reference.lse, magnitude=scale, backend=backend, quantity="lse"
        )
        wrong = {
            **array_mutants(logprobs, reference.logprobs),
            **problem_mutants(problem, lambda ref: ref.logprobs, logprobs.dtype),
        }
        del wrong["N_total for N_valid"]  # a log-probability knows no denominator
        findings.reject(
            "A4", wrong, reference.logprobs, backend=backend, quantity="log-probability"
        )


def _low_mutants(findings: Findings, problem: Problem, backend: str) -> None:
    """A14 of the rows of one 16-bit problem."""
    dtype = problem.hidden.dtype.name
    right, reference = run(backend, problem), problem.reference(dz_dtype=dtype)
    for name, got in right.gradients().items():

        def pick(ref: NLLReference, name: str = name) -> Array:
            return _oracle_gradient(ref, name)

        oracle, magnitude = pick(reference), _oracle_gradient(reference, name, "magnitude")
        wrong = {
            **array_mutants(got, oracle),
            **problem_mutants(problem, pick, got.dtype, dz_dtype=dtype),
        }
        details: dict[str, Any] = {"backend": backend, "quantity": _label(name)}
        bound = _oracle_gradient(reference, name, "bound")
        findings.reject(ROW_OF[dtype], wrong, oracle, bound, magnitude=magnitude, **details)
        if dtype == "bfloat16":
            details |= {"quantity": f"{_label(name)} bf16", "other": got}
            findings.reject("A9", wrong, oracle, metrics=BETWEEN[dtype], **details)
    _loss_mutants(findings, "A8", problem, right, reference, backend)


def _loss_mutants(
    findings: Findings,
    row: str,
    problem: Problem,
    right: Outcome,
    reference: NLLReference,
    backend: str,
) -> None:
    """A14 of a loss."""
    wrong = {
        **array_mutants(right.loss, reference.loss),
        **problem_mutants(problem, lambda ref: ref.loss, np.float32),
    }
    scale, quantity = reference.loss_magnitude, f"loss of {problem.hidden.dtype.name}"
    findings.reject(row, wrong, reference.loss, magnitude=scale, backend=backend, quantity=quantity)
