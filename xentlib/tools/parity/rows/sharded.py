"""The rows of vocabularies spread over ranks: A13, and A1 of shards, over one to four of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.backends import run, run_logprobs
from xentlib.tools.harness.cases import EXTRAS, OPTIONS, few_chunks_of, logit_sets
from xentlib.tools.harness.findings import Findings, check_gradient, label
from xentlib.tools.harness.problems import (
    Case,
    Problem,
    Upstream,
    build,
    logits_problem,
    upstream_of,
)
from xentlib.tools.harness.shards import Sharded, ShardedCall, run_calls
from xentlib.tools.parity.mutants import array_mutants

Array = npt.NDArray[Any]
SEED = 7
EVEN = Case("shards", 257, 64, 1008, std=3.0, confident=0.3)
UNEVEN = Case("shards-options", 257, 64, 1009, std=3.0, options=OPTIONS, **EXTRAS)
LOW = Case("shards-bf16", 257, 64, 1009, std=3.0, dtype="bfloat16", layout="HV")
# A shard of 251 rows is shorter than one chunk of its tokens, and longer than several.
CHUNKED = Case("shards-chunks", 256, 32, 1003, ignored=0.0)
GRADIENT_ROWS = {"d_hidden": "A13", "d_weight": "A6", "d_bias": "A6"}


def splits(vocab: int) -> dict[str, tuple[int, ...]]:
    """Sizes of 1 to 4 shards, and of 3 whose last one is empty."""
    sizes_of = {}
    for ranks, name in enumerate(("one", "two", "three", "four"), 1):
        columns = -(-vocab // ranks)
        sizes_of[name] = tuple(min(columns, vocab - k * columns) for k in range(ranks))
    return {**sizes_of, "two and an empty one": (*sizes_of["two"], 0)}


def calls_for(seed: int, audit: bool) -> list[ShardedCall]:
    """Both functions of a head over every split, in one chunk and in several; given logits."""
    calls = []
    for case, chunk in ((EVEN, None), (UNEVEN, 64), *(((LOW, 64),) if audit else ())):
        problem = build(case, seed)
        upstream = upstream_of(problem, SEED)
        for sizes in splits(case.vocab).values():
            if case is not UNEVEN:
                calls.append(ShardedCall("chunked_nll", problem, sizes, None, audit, chunk))
            if case is not EVEN:
                calls.append(
                    ShardedCall("chunked_logprobs", problem, sizes, upstream, audit, chunk)
                )
    for text, logits, labels in logit_sets(seed, "gaps-31", "gaps-1000"):
        problem, sizes_of = logits_problem(logits, labels, text), splits(logits.shape[1])
        for name in ("two", "three", "four"):
            upstream = upstream_of(problem, SEED)
            calls.append(
                ShardedCall("vocab_parallel_logprobs", problem, sizes_of[name], upstream, audit)
            )
    return calls


def chunked_calls(backend: str, seed: int) -> list[ShardedCall]:
    """Both functions of a head over four shards, in one chunk first and then in several."""
    problem = build(CHUNKED, seed)
    return [
        ShardedCall(function, problem, splits(CHUNKED.vocab)["four"], upstream, False, chunk)
        for function, upstream in (
            ("chunked_nll", None),
            ("chunked_logprobs", upstream_of(problem, SEED)),
        )
        for chunk in (None, *few_chunks_of(backend))
    ]


def chunked(
    findings: Findings, backend: str, calls: list[ShardedCall], results: list[Sharded]
) -> None:
    """A10 of calls from `chunked_calls`."""
    whole: dict[str, Any] = {}
    for call, result in zip(calls, results, strict=True):
        one = whole.setdefault(call.function, result.outcome)
        for name in ("logprobs", "entropy", "lse", "correct", "d_hidden"):
            findings.check(
                "A10",
                getattr(result.outcome, name),
                getattr(one, name),
                backend=backend,
                case=f"{_text(call)}, chunks of {call.chunk_tokens}",
                quantity=f"{label(name)} over shards",
            )


def sharded(findings: Findings, seed: int) -> None:
    """A10 and A13 of each backend; A1 of one against the other, and of shards against no shards."""
    calls, exact = calls_for(seed, False), calls_for(seed, True)
    audits = {}
    for backend in findings.backends:
        cut = chunked_calls(backend, seed)
        results_of_all = run_calls(backend, [*cut, *calls, *exact], findings.slowness)
        chunked(findings, backend, cut, results_of_all[: len(cut)])
        results_of_all = results_of_all[len(cut) :]
        for call, result in zip(calls, results_of_all):
            _measure(findings, backend, call, result)
        _mutants(findings, backend, calls[0], results_of_all[0])
        audits[backend] = results_of_all[len(calls) :]
    for index, call in enumerate(exact):
        results = {backend: audits[backend][index].outcome for backend in findings.backends}
        if len(results) == 2:
            _equal(findings, "torch/jax", call, results["torch"], results["jax"])
        for backend, outcome in results.items():
            if call.function != "vocab_parallel_logprobs":
                _equal(findings, backend, call, outcome, _dense(backend, call))


def _text(call: ShardedCall) -> str:
    return f"{call.function}, shards of {call.sizes}; {call.problem.text}"


def _dense(backend: str, call: ShardedCall) -> Any:
    if call.upstream is None:
        return run(backend, call.problem, audit=True)
    return run_logprobs(backend, call.problem, call.upstream, audit=True)


def _equal(findings: Findings, backend: str, call: ShardedCall, ours: Any, theirs: Any) -> None:
    for name in ours._fields:
        got, other = getattr(ours, name), getattr(theirs, name)
        if name == "num_tokens":
            got, other = got.astype(np.int64), other.astype(np.int64)
        if got is not None:
            quantity = f"{label(name)} over shards"
            findings.check("A1", got, other, backend=backend, case=_text(call), quantity=quantity)


def _measure(findings: Findings, backend: str, call: ShardedCall, result: Sharded) -> None:
    outcome, problem = result.outcome, call.problem
    details: dict[str, Any] = {"backend": backend, "case": _text(call)}
    reference = _reference(problem, call.upstream)
    same = {"correct": (outcome.correct, reference.correct)}
    if result.unequal is not None:
        same["on every rank"] = (np.int64(result.unequal), np.int64(0))
    for name, (got, expected) in same.items():
        bits = {"metrics": ("unequal entries",), "quantity": name}
        findings.check("A13", got, expected, **bits, **details)
    if call.function == "vocab_parallel_logprobs":
        findings.check(
            "A13",
            outcome.logprobs,
            reference.logprobs,
            magnitude=_scale(problem, reference),
            metrics=("ULP",),
            quantity="log-probability of given logits",
            **details,
        )
        return
    for name, got in outcome.gradients().items():
        details["metrics"] = ("tau",) if name == "d_hidden" else None
        details["quantity"] = f"{label(name)} over shards"
        findings.measurements += check_gradient(
            GRADIENT_ROWS[name], name, got, reference, **details
        )


def _reference(problem: Problem, upstream: Upstream | None) -> Any:
    return problem.reference() if upstream is None else problem.per_token_reference(upstream)


def _scale(problem: Problem, reference: Any) -> Array:
    """What a log-probability is the difference of: an ULP of the larger one."""
    logits = problem.weight.T.astype(np.float64)
    own, peak = logits[np.arange(len(logits)), problem.labels], np.abs(logits).max(axis=1)
    scale: Array = np.maximum(np.maximum(np.abs(own), np.abs(reference.lse)), peak)
    return scale


def _mutants(findings: Findings, backend: str, call: ShardedCall, result: Sharded) -> None:
    """A14: what known bugs of shards return (M9) must not pass for d hidden."""
    problem, got = call.problem, result.outcome.d_hidden
    reference = _reference(problem, call.upstream)
    half = problem.weight.shape[0] // 2
    wrong = array_mutants(got, reference.d_hidden)
    wrong["summed twice"] = 2 * got
    wrong["of one shard"] = _reference(
        problem.changed(weight=np.where(np.arange(2 * half)[:, None] < half, problem.weight, 0)),
        call.upstream,
    ).d_hidden.astype(got.dtype)
    offset = np.where(problem.labels >= half, problem.labels - half, problem.labels)
    wrong["labels of the first shard"] = _reference(
        problem.changed(labels=offset.astype(np.int32)), call.upstream
    ).d_hidden.astype(got.dtype)
    findings.reject(
        "A13",
        wrong,
        reference.d_hidden,
        reference.bound_hidden,
        metrics=("tau",),
        backend=backend,
        quantity="d hidden over shards",
    )
