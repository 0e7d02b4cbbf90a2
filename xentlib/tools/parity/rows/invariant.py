"""Rows of bits that do not depend on what else a call has: A17, other tokens; A18, the shards that
a vocabulary is cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.cases import Extent
from xentlib.tools.harness.device import nothing_read
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, build, logits_problem, upstream_of
from xentlib.tools.harness.ranks import Sharded, ShardedCall, run_calls
from xentlib.tools.parity.on_ranks import OnRanks
from xentlib.tools.parity.rows.defects import DEFECTS, moved
from xentlib.tools.parity.rows.head import OF_TOKENS, HeadRows, same

Array = npt.NDArray[Any]
SEED = 11
CUTS = 128  # columns that shards are cut at multiples of: what is promised, whatever blocks are
# Two whole blocks of columns and a part of one.
BATCH = Case(
    *("batch", 1021, 32, 331),
    std=3.0,
    confident=0.3,
    token_weights=True,
    token_temperature=True,
    options={"reduction": "sum", "softcap": 8.0},
)
BATCH_LOW = Case(
    *("batch-bf16", 1021, 32, 331), std=3.0, dtype="bfloat16", options={"denominator": 700.0}
)
SHARDS = Case(
    *("invariant", 129, 64, 1981), std=3.0, confident=0.3, where=True, token_temperature=True
)
# Of divergences, where logits are close and where they are not.
DIVERGENCES = tuple(
    Case("invariant-divergence", 129, 64, 1981, std=3.0, teacher=64, far=0.3, options=options)
    for options in ({"kind": "forward_kl"}, {"kind": "jsd", "beta": 0.7})
)
CLASSES = Case("invariant-classes", 129, 64, 2005, std=3.0, kept=9, ids=5, where=True)
SHARDS_LOW = Case("invariant-bf16", 129, 64, 1981, std=3.0, dtype="bfloat16", layout="HV")
WORLDS = (2, 3, 4, 8)
FEW_WORLDS = (2, 3)  # of the second the mutants are made
# Of PyTorch, whose shards may have any sizes: blocks of each but the last, which has the rest.
UNEVEN = {2: (13,), 3: (0, 10), 4: (1, 8, 0), 8: (1, 0, 5, 1, 2, 1, 4)}
# Quantities that shards do not show in.
OF_SHARDS = (
    "logprobs",
    "entropy",
    "lse",
    "correct",
    "predicted",
    "divergence",
    "teacher_entropy",
    "ids_logprobs",
)
OF_DEFECTS = ("logprobs", "lse", "entropy")


# --- A17 -----------------------------------------------------------------------------------------


class Company(NamedTuple):
    """A call with some of a problem's tokens, and what it gave."""

    how: str
    places: Array  # of its tokens, within all
    outcome: Outcome


def batches(rows: HeadRows, findings: Findings, problem: Problem, *, few: bool = False) -> None:
    """A17, and what A14 has of it."""
    for backend in findings.backends:
        whole = batch(rows, findings, backend, problem, few=few)
        sizes = blocks(problem.weight.shape[problem.vocab_axis], (1,))
        reject(findings, "A17", backend, problem, whole, sizes, f"outputs{rows.of}")


def batch(
    rows: HeadRows, findings: Findings, backend: str, problem: Problem, *, few: bool = False
) -> Outcome:
    """A17: per-token outputs and d hidden of tokens in other company; of all tokens in one call."""
    whole = rows.call(backend, problem)
    for how, places, outcome in companies(rows, backend, problem, few=few):
        details: dict[str, Any] = {"backend": backend, "case": f"{problem.text}, {how}"}
        expected = of_tokens(whole, places)
        same(findings, "A17", outcome, expected, rows.label, OF_TOKENS, **details)
    return whole


def companies(
    rows: HeadRows, backend: str, problem: Problem, *, few: bool = False
) -> Iterator[Company]:
    """Of JAX as few shapes as there can be: each is a program. `few` leaves out what row A10 has,
    and twice as many tokens."""
    upstream, count = rows.upstream(problem), len(problem.labels)
    rng, every, jax = np.random.default_rng(SEED), np.arange(count), backend == "jax"
    counted = np.flatnonzero(problem.valid) if problem.valid.any() else every

    def company(how: str, places: Array, given: Problem | None = None, **more: Any) -> Company:
        own = problem.of_tokens(places) if given is None else given
        outcome = rows.run(backend, own, *(x.of_tokens(places) for x in upstream), **more)
        return Company(how, places, outcome)

    yield company("in another order", rng.permutation(every))
    kept = rng.random(count) < 0.5
    yield of_kept(company("beside masked tokens", every, masked(problem, ~kept)), kept)
    size = -(-count // 4)
    # In JAX a program, as "three alone" is.
    for start in () if few and jax else (*range(0, count - size, size), count - size):
        yield company(f"in a micro-batch of {size}", every[start : start + size])
    # Among their own kind, so that most of a tile, a chunk or a call is padding.
    yield company("three alone", rng.choice(counted, 3, replace=False))
    if not few and (not jax or problem.hidden.dtype == np.float32):
        twice = np.concatenate([rng.permutation(every), every])
        yield company("twice, once in another order", twice)
    for chunk in () if few else (200,) if jax else (8, 200):
        yield company(f"in chunks of {chunk}", every, chunk_tokens=chunk)
    if not jax:
        yield company("one alone", counted[-1:])
        with nothing_read():
            yield company("with labels that are not read", every)
            yield of_kept(company("masked, not read", every, masked(problem, ~kept)), kept)


def masked(problem: Problem, left_out: Array) -> Problem:
    """With these tokens ignored, whose hidden states are no numbers."""
    hidden, labels = problem.hidden.copy(), problem.labels.copy()
    hidden[left_out], labels[left_out] = np.nan, -100
    return problem.changed(hidden=hidden, labels=labels)


def of_kept(company: Company, kept: Array) -> Company:
    outcome = of_tokens(company.outcome, kept)
    return Company(company.how, company.places[kept], outcome)


def of_tokens(outcome: Outcome, places: Any) -> Outcome:
    """Of some tokens, what is per token."""
    there = outcome.by_name()
    return outcome._replace(**{name: there[name][places] for name in OF_TOKENS if name in there})


# --- A18 -----------------------------------------------------------------------------------------


def blocks(vocab: int, of_each: Sequence[int]) -> tuple[int, ...]:
    """Sizes of shards of so many blocks of columns, and of one that has the rest."""
    sizes = [CUTS * count for count in of_each]
    return (*sizes, vocab - sum(sizes))


def even(vocab: int, ranks: int) -> tuple[int, ...]:
    """Sizes of shards of as many blocks; the last ones have fewer, or none."""
    columns = CUTS * -(-vocab // (CUTS * ranks))
    return tuple(min(columns, max(0, vocab - k * columns)) for k in range(ranks))


def shard_calls(backend: str, extent: Extent) -> list[list[ShardedCall]]:
    """Lists of calls that are to give the same bits, the first over one shard."""
    seed, few, jax = extent.seed, extent.few, backend == "jax"
    worlds = FEW_WORLDS if few else WORLDS
    head, low = build(SHARDS, seed), build(SHARDS_LOW, seed)
    upstream, given = upstream_of(head, SEED), given_problem(head)
    every = [
        ("chunked_nll", head, None),
        ("chunked_logprobs", head, upstream),
        ("chunked_nll", low, None),
        ("vocab_parallel_logprobs", given, upstream),
    ]
    diverging = DIVERGENCES[1:] if few else DIVERGENCES
    every += [("chunked_divergence", build(case, seed), None) for case in diverging]
    classes = build(CLASSES, seed)
    every.append(("chunked_logprobs", classes, upstream_of(classes, SEED)))
    lists = []
    for function, problem, gradient in every:
        vocab = problem.weight.shape[problem.vocab_axis]
        cuts = [even(vocab, ranks) for ranks in worlds]
        cuts += [] if jax else [blocks(vocab, UNEVEN[ranks]) for ranks in worlds]
        # In JAX each is a program: several chunks where the others are one.
        ways = [(sizes, 64 if k % 2 else None) for k, sizes in enumerate(cuts)]
        if not jax and problem is not given:
            ways += [(sizes, None if chunk else 64) for sizes, chunk in ways]
        ways = ways[1:] if jax and few else [((vocab,), None), *ways]
        of = (function, problem)
        lists.append([ShardedCall(*of, sizes, gradient, False, chunk) for sizes, chunk in ways])
    return lists


def given_problem(problem: Problem) -> Problem:
    """Its logits, made here: no product of a library is in the way."""
    logits = problem.hidden @ problem.weight.T + problem.bias
    own = logits_problem(logits, problem.labels, f"{problem.text}, logits given")
    return own.changed(where=problem.where, options=problem.options)


def launch(backend: str, extent: Extent, slowness: float) -> list[Sharded]:
    return run_calls(backend, [*chain(*shard_calls(backend, extent))], slowness)


def measure(findings: Findings, extent: Extent, of_ranks: dict[str, list[Sharded]]) -> None:
    """A18: over one to eight shards, or of JAX a few, and without any."""
    for backend in findings.backends:
        outcomes = iter(of_ranks[backend])
        for of_one in shard_calls(backend, extent):
            one, *others = [next(outcomes).outcome for _ in of_one]
            first, *rest = of_one
            whole = dense(first, backend)
            for call, got in zip([first, *rest], [whole, *others], strict=True):
                over = f"shards of {call.sizes}" if call is not first else "no shards"
                chunk = f", chunks of {call.chunk_tokens}" if call.chunk_tokens else ""
                case = f"{call.function}, {over}{chunk}; {call.problem.text}"
                same(findings, "A18", got, one, names=OF_SHARDS, backend=backend, case=case)
            if first.function in ("chunked_nll", "vocab_parallel_logprobs"):
                name = f"outputs of {first.function}"
                sizes = even(sum(first.sizes), FEW_WORLDS[1])
                reject(findings, "A18", backend, first.problem, one, sizes, name)


shards = OnRanks(launch, measure)


def dense(call: ShardedCall, backend: str) -> Outcome:
    """Without shards; in JAX inside `jit` too, where options that are numbers are constants, with
    which XLA computes before it runs."""
    if backend == "torch":
        return call.run(backend, chunk_tokens=None)
    import jax

    return call.run(backend, chunk_tokens=None, wrap=lambda function, leaves: jax.jit(function))


# --- A14 -----------------------------------------------------------------------------------------


def reject(
    findings: Findings,
    row: str,
    backend: str,
    problem: Problem,
    outcome: Outcome,
    sizes: Sequence[int],
    quantity: str,
) -> None:
    """A14: statistics whose bits follow the parts that columns are in must not pass. Of A17 these
    are parts that a program with few tokens makes to have more to do."""
    kept = problem.valid
    some = problem.of_tokens(kept)
    logits = logits_of(some)
    right = np.stack([getattr(outcome, name)[kept] for name in OF_DEFECTS])
    wrong = {name: moved(right, logits, some.labels, sizes, name) for name in DEFECTS}
    findings.reject(row, wrong, right, backend=backend, quantity=quantity)


def logits_of(problem: Problem) -> Array:
    """In float32 with what tells tokens apart; a softcap and a scale are left out."""
    hidden, weight = (x.astype(np.float32) for x in (problem.hidden, problem.weight))
    logits = hidden @ (weight.T if problem.vocab_axis == 0 else weight)
    if problem.bias is not None:
        logits += problem.bias.astype(np.float32)
    temperature = np.asarray(problem.options.get("temperature", 1.0), np.float32)
    divided: Array = logits / temperature.reshape(-1, 1)
    return divided
