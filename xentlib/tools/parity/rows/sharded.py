"""The rows of vocabularies spread over ranks: A13, and A1 of shards, over one to four of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.cases import EXTRAS, OPTIONS, Extent, chunks_of, logit_sets
from xentlib.tools.harness.findings import BOTH, GRADIENT_ROWS, Findings, check_gradient, label
from xentlib.tools.harness.problems import (
    Case,
    Problem,
    Upstream,
    build,
    logits_problem,
    upstream_of,
)
from xentlib.tools.harness.ranks import Sharded, ShardedCall, run_calls
from xentlib.tools.parity.on_ranks import OnRanks
from xentlib.tools.parity.rows import divergences
from xentlib.tools.parity.rows.head import OF_TOKENS, same
from xentlib.tools.parity.rows.mutants import answers, array_mutants

Array = npt.NDArray[Any]
SEED = 7
EVEN = Case("shards", 257, 64, 1008, std=3.0, confident=0.3)
UNEVEN = Case("shards-options", 257, 64, 1009, std=3.0, options=OPTIONS, **EXTRAS)
LOW = Case("shards-bf16", 257, 64, 1009, std=3.0, dtype="bfloat16", layout="HV")
# A shard of 251 rows is shorter than one chunk of its tokens, and longer than several.
CHUNKED = Case("shards-chunks", 256, 32, 1003, ignored=0.0)
GIVEN = "vocab_parallel_logprobs"


def splits(vocab: int) -> dict[str, tuple[int, ...]]:
    """Sizes of 1 to 4 shards, and of 3 whose last one is empty."""
    sizes_of = {}
    for ranks, name in enumerate(("one", "two", "three", "four"), 1):
        columns = -(-vocab // ranks)
        sizes_of[name] = tuple(min(columns, vocab - k * columns) for k in range(ranks))
    return {**sizes_of, "two and an empty one": (*sizes_of["two"], 0)}


def calls_for(seed: int, audit: bool, *, few: bool = False) -> list[ShardedCall]:
    """Both functions of a head over every split, in one chunk and in several; given logits. If
    `few`, over three shards, and over two and an empty one."""
    calls = []
    names: Sequence[str] = tuple(splits(1))
    if few:  # in audit mode the empty one alone
        names = ("three", "two and an empty one")[audit:]
    of_logits = ("three",) if few else ("two", "three", "four")
    for case, chunk in ((EVEN, None), (UNEVEN, 64), *(((LOW, 64),) if audit else ())):
        problem = build(case, seed)
        for sizes in (splits(case.vocab)[name] for name in names):
            for function, upstream in functions(problem):
                if case is not (EVEN if upstream else UNEVEN):
                    calls.append(ShardedCall(function, problem, sizes, upstream, audit, chunk))
    for text, logits, labels in logit_sets(seed, "gaps-31", *([] if few else ["gaps-1000"])):
        problem, sizes_of = logits_problem(logits, labels, text), splits(logits.shape[1])
        calls += [
            ShardedCall(GIVEN, problem, sizes_of[name], upstream_of(problem, SEED), audit)
            for name in of_logits
        ]
    return calls


def functions(problem: Problem) -> tuple[tuple[str, Upstream | None], ...]:
    """The functions of a head, and the gradient that each takes beside the problem."""
    return (("chunked_nll", None), ("chunked_logprobs", upstream_of(problem, SEED)))


def chunked_calls(backend: str, seed: int, *, few: bool = False) -> list[ShardedCall]:
    """Both functions of a head over four shards, in one chunk first and then in several."""
    problem, sizes = build(CHUNKED, seed), splits(CHUNKED.vocab)["four"]
    return [
        ShardedCall(function, problem, sizes, upstream, False, chunk)
        for function, upstream in functions(problem)
        for chunk in (None, *chunks_of(backend, few=True)[-1 if few else 0 :])
    ]


def chunked(
    findings: Findings, backend: str, calls: list[ShardedCall], results: list[Sharded]
) -> None:
    """A10 of calls from `chunked_calls`."""
    whole: dict[str, Outcome] = {}
    for call, result in zip(calls, results, strict=True):
        ours, one = result.outcome, whole.setdefault(call.function, result.outcome)
        case = f"{_text(call)}, chunks of {call.chunk_tokens}"
        names = set(OF_TOKENS) - {"predicted"}
        same(findings, "A10", ours, one, over_shards, names, backend=backend, case=case)


class Calls(NamedTuple):
    """Of a section, by the rows that they are for."""

    cut: list[ShardedCall]  # A10
    diverging: list[ShardedCall]  # A20
    plain: list[ShardedCall]  # A13
    exact: list[ShardedCall]  # A1


def calls_of(backend: str, extent: Extent) -> Calls:
    seed, few = extent.seed, extent.few
    cut, diverging = chunked_calls(backend, seed, few=few), divergences.shard_calls(extent)
    return Calls(cut, diverging, *(calls_for(seed, audit, few=few) for audit in (False, True)))


def launch(backend: str, extent: Extent, slowness: float) -> list[Sharded]:
    return run_calls(backend, [*chain(*calls_of(backend, extent))], slowness)


def measure(findings: Findings, extent: Extent, of_ranks: dict[str, list[Sharded]]) -> None:
    """A10, A13 and A20 of each backend; A1 of one against the other, and of shards against no
    shards."""
    audits = {}
    for backend in findings.backends:
        cut, diverging, calls, exact = calls_of(backend, extent)
        every = iter(of_ranks[backend])
        chunked(findings, backend, cut, [*islice(every, len(cut))])
        divergences.over_shards(findings, backend, diverging, [*islice(every, len(diverging))])
        results = [*every]
        for call, result in zip(calls, results):
            _measure(findings, backend, call, result)
        _mutants(findings, backend, calls[0], results[0].outcome)
        audits[backend] = results[len(calls) :]
    for index, call in enumerate(exact):
        outcomes = {backend: audits[backend][index].outcome for backend in findings.backends}
        if len(outcomes) == 2:
            ours, theirs = outcomes.values()
            same(findings, "A1", ours, theirs, over_shards, backend=BOTH, case=_text(call))
        for backend, outcome in outcomes.items():
            if call.function != GIVEN:
                dense = call.run(backend, chunk_tokens=None)
                details = {"backend": backend, "case": _text(call)}
                same(findings, "A1", outcome, dense, over_shards, **details)


sharded = OnRanks(launch, measure)


def _text(call: ShardedCall) -> str:
    return f"{call.function}, shards of {call.sizes}; {call.problem.text}"


def over_shards(name: str) -> str:
    return f"{label(name)} over shards"


def _measure(findings: Findings, backend: str, call: ShardedCall, result: Sharded) -> None:
    outcome, reference = result.outcome, _reference(call)
    details: dict[str, Any] = {"backend": backend, "case": _text(call)}
    bits = {"metrics": ("unequal entries",), **details}
    findings.check("A13", outcome.correct, reference.correct, quantity="correct", **bits)
    if result.unequal is not None:
        unequal, none = np.int64(result.unequal), np.int64(0)
        findings.check("A13", unequal, none, quantity="on every rank", **bits)
    if call.function == GIVEN:
        details |= {"magnitude": _scale(call.problem, reference), "metrics": ("ULP",)}
        details["quantity"] = "log-probability of given logits"
        findings.check("A13", outcome.logprobs, reference.logprobs, **details)
        return
    for name, got in outcome.gradients().items():
        row, metrics = ("A13", ("tau",)) if name == "d_hidden" else (GRADIENT_ROWS[name], None)
        details |= {"metrics": metrics, "quantity": over_shards(name)}
        findings.measurements += check_gradient(row, name, got, reference, **details)


def _reference(call: ShardedCall, **changes: Any) -> Any:
    """The oracle of a call, or of another problem in its place."""
    problem = call.problem.changed(**changes)
    if call.upstream is None:
        return problem.reference()
    return problem.per_token_reference(call.upstream)


def _scale(problem: Problem, reference: Any) -> Array:
    """The largest of a log-probability and of what it is the difference of. Of two terms of one
    binade the difference may be in the next, whose own rounding is one ULP of theirs."""
    logits = problem.weight.T.astype(np.float64)
    own, peak = logits[np.arange(len(logits)), problem.labels], np.abs(logits).max(axis=1)
    terms = (np.abs(own), np.abs(reference.lse), peak, np.abs(reference.logprobs))
    scale: Array = np.max(terms, axis=0)
    return scale


def _mutants(findings: Findings, backend: str, call: ShardedCall, outcome: Outcome) -> None:
    """A14: what known bugs of shards return (M9) must not pass for d hidden."""
    got, reference, problem = outcome.d_hidden, _reference(call), call.problem
    vocab, labels = len(problem.weight), problem.labels
    half = vocab // 2
    of_one = np.where(np.arange(vocab)[:, None] < half, problem.weight, 0)
    offset = np.where(labels >= half, labels - half, labels).astype(np.int32)
    others = {
        "of one shard": _reference(call, weight=of_one),
        "labels of the first shard": _reference(call, labels=offset),
    }
    wrong = array_mutants(got, reference.d_hidden) | answers(others, "d_hidden", got.dtype)
    wrong["summed twice"] = 2 * got
    oracle, bound = reference.d_hidden, reference.bound_hidden
    details: dict[str, Any] = {"backend": backend, "quantity": over_shards("d_hidden")}
    findings.reject("A13", wrong, oracle, bound, metrics=("tau",), **details)
