"""Row A15 of the contract: how many collectives a call may need, wherever its head is, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xentlib.collectives import KINDS
from xentlib.contract import Measurement, check

__all__ = ["BUDGETS", "Budget", "budget_entries", "check_budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Row A15: the collectives of one call, by kind, whatever its chunks and its valid tokens.

    Attributes:
        forward: number of each kind; kinds that are not named are 0.
        backward: likewise.
        theirs: kinds that the wrapper reduces gradients with as it sees fit, which are not counted
            in the backward.
        each: of what travels in rounds, chunks of hidden states or blocks of rows, beside that: the
            number of each kind in a round of the forward, which all ranks have as many of.
        each_backward: likewise in the backward.
    """

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    theirs: tuple[str, ...] = ()
    each: Mapping[str, int] = field(default_factory=dict)
    each_backward: Mapping[str, int] = field(default_factory=dict)


GATHER, SCATTER, REDUCE = ({kind: 1} for kind in ("all_gather", "reduce_scatter", "all_reduce"))
TWO_GATHERS, THREE_GATHERS, TWO_REDUCES = {"all_gather": 2}, {"all_gather": 3}, {"all_reduce": 2}
# Of a round: what comes and what leaves, and between them MAX and SUM of its tokens.
BOTH, ROUND = GATHER | SCATTER, GATHER | TWO_REDUCES | SCATTER
REDUCTIONS = ("all_reduce", "reduce_scatter", "all_to_all", "other")

# "recompute" is `chunked_logprobs`, whose backward reads the head's values again; the others are
# `chunked_nll`, whose gradients exist after the forward.
BUDGETS = {
    "plain": Budget(),
    "DDP": Budget(theirs=("all_reduce",)),
    "FSDP2": Budget(GATHER, SCATTER),
    "FSDP2, recompute": Budget(GATHER, BOTH),
    "FSDP2, classes, recompute": Budget(GATHER, BOTH),
    # The module's own forward, whose result FSDP2's hooks would gather the head for once more.
    "FSDP2, NLLHead": Budget(GATHER, SCATTER),
    # `last_block.set_modules_to_forward_prefetch([head])`: the trunk's forward holds the gather.
    "FSDP2, prefetched": Budget(backward=SCATTER),
    "FSDP2, replicas": Budget(GATHER, SCATTER | REDUCE),
    "ZeRO-3": Budget(GATHER, theirs=REDUCTIONS),
    "ZeRO-3, recompute": Budget(GATHER, GATHER, theirs=REDUCTIONS),
    "ZeRO-3, classes, recompute": Budget(GATHER, GATHER, theirs=REDUCTIONS),
    # MAX, SUM, and the SUM of d hidden, which is there after the forward.
    "vocabulary shard": Budget({"all_reduce": 3}),
    "vocabulary shard, recompute": Budget(TWO_REDUCES, REDUCE),
    # With kept sets, `ids` or `top_k`: the logits of these classes, which one shard has each.
    "vocabulary shard, classes, recompute": Budget({"all_reduce": 3}, REDUCE),
    "FSDP2, vocabulary shard": Budget(GATHER | {"all_reduce": 3}, SCATTER),
    # A handshake, labels with factors; in each chunk its hidden states, MAX, SUM and d hidden.
    # Upstream gradients, which must be the same.
    "tokens over the ranks": Budget(TWO_GATHERS, GATHER, each=ROUND),
    "tokens over the ranks, recompute": Budget(
        TWO_GATHERS | TWO_REDUCES, TWO_GATHERS, each=GATHER, each_backward=BOTH
    ),
    "tokens over the ranks, classes, recompute": Budget(
        TWO_GATHERS | {"all_reduce": 3}, TWO_GATHERS, each=GATHER, each_backward=BOTH
    ),
    # The same in a node, by its own chunks; over nodes the handshake, rows and d weight. A bias is
    # one gather more, and its gradient one reduce-scatter.
    "rows over nodes": Budget(THREE_GATHERS | SCATTER, GATHER, each=ROUND),
    "rows over nodes, recompute": Budget(
        THREE_GATHERS | TWO_REDUCES, THREE_GATHERS | SCATTER, each=GATHER, each_backward=BOTH
    ),
    # d A, once; with a mask, that of each chunk.
    "tokens over the ranks, low rank": Budget(TWO_GATHERS | REDUCE, GATHER, each=ROUND),
    "tokens over the ranks, low rank, mask": Budget(
        TWO_GATHERS | REDUCE, GATHER, each=TWO_GATHERS | TWO_REDUCES | SCATTER
    ),
    "tokens over the ranks, low rank, recompute": Budget(
        TWO_GATHERS | TWO_REDUCES, TWO_GATHERS | REDUCE, each=GATHER, each_backward=BOTH
    ),
    "tokens over the ranks, low rank, mask, recompute": Budget(
        TWO_GATHERS | TWO_REDUCES,
        TWO_GATHERS | REDUCE,
        each=TWO_GATHERS,
        each_backward=TWO_GATHERS | SCATTER,
    ),
    # A handshake; each block twice, once for statistics, once for gradients. A bias
    # is one gather more, and its gradient one reduce-scatter.
    "stream": Budget(GATHER, GATHER, each=TWO_GATHERS | SCATTER),
    "stream, recompute": Budget(GATHER, GATHER, each=GATHER, each_backward=BOTH),
    # One compiled program, forward and backward, in which the numbers of tokens and the losses of
    # all devices are added up as the compiler likes.
    "JAX, data axis": Budget(backward=BOTH, theirs=("all_reduce",)),
    "JAX, data axis, recompute": Budget(backward=BOTH, theirs=("all_reduce",)),
    # A round is the loop's body, or the two loops'. Classes before it, and the factors or other
    # numbers of each token.
    "JAX, hidden route": Budget(backward=TWO_GATHERS, theirs=("all_reduce",), each_backward=BOTH),
    "JAX, hidden route, recompute": Budget(
        backward=TWO_GATHERS, theirs=("all_reduce",), each_backward=TWO_GATHERS | SCATTER
    ),
}
# Of two heads, which no parity run counts: in each chunk MAX and SUM of both, and the SUM of the
# terms, two of a JSD. A loss of each token makes the logits again.
OF_DIVERGENCES = {
    "FSDP2, divergence": Budget(TWO_GATHERS, SCATTER),
    "vocabulary shard, divergence": Budget(REDUCE, each={"all_reduce": 5}),
    "vocabulary shard, JSD": Budget(REDUCE, each={"all_reduce": 6}),
    "vocabulary shard, JSD, recompute": Budget({}, REDUCE, each={"all_reduce": 6}),
    "tokens over the ranks, divergence": Budget(
        {"all_gather": 4}, GATHER, each=TWO_GATHERS | {"all_reduce": 5} | SCATTER
    ),
    "tokens over the ranks, JSD": Budget(
        {"all_gather": 4}, GATHER, each=TWO_GATHERS | {"all_reduce": 6} | SCATTER
    ),
    "tokens over the ranks, JSD, recompute": Budget(
        {"all_gather": 4},
        {"all_gather": 4},
        each=TWO_GATHERS | {"all_reduce": 6},
        each_backward=TWO_GATHERS | SCATTER,
    ),
}


# Of a head that tensor parallelism has cut and FSDP2 shards further, which no parity run counts:
# MAX and SUM over all of these ranks, or of a stream over the shards, and d hidden over the shards.
OF_TWO_DIMENSIONS = {
    "FSDP2, vocabulary shard, hidden": Budget(TWO_GATHERS | REDUCE, GATHER, each=ROUND),
    "FSDP2, vocabulary shard, hidden, recompute": Budget(
        TWO_GATHERS | TWO_REDUCES, TWO_GATHERS | REDUCE, each=GATHER, each_backward=BOTH
    ),
    "FSDP2, vocabulary shard, stream": Budget(
        GATHER | {"all_reduce": 3}, GATHER, each=TWO_GATHERS | SCATTER
    ),
    "FSDP2, vocabulary shard, stream, recompute": Budget(
        GATHER | TWO_REDUCES, GATHER | REDUCE, each=GATHER, each_backward=BOTH
    ),
    # A sequence that is spread over the shards: tokens of all ranks, or of the shards' alone.
    "FSDP2, sequence, hidden": Budget(TWO_GATHERS, GATHER, each=ROUND),
    "FSDP2, sequence, hidden, recompute": Budget(
        TWO_GATHERS | TWO_REDUCES, TWO_GATHERS, each=GATHER, each_backward=BOTH
    ),
    "FSDP2, sequence": Budget(THREE_GATHERS, GATHER | SCATTER, each=ROUND),
    "FSDP2, sequence, recompute": Budget(
        THREE_GATHERS | TWO_REDUCES, THREE_GATHERS | SCATTER, each=GATHER, each_backward=BOTH
    ),
}


def budget_entries(
    budget: str,
    forward: Sequence[Mapping[str, int]],
    backward: Sequence[Mapping[str, int]],
    rounds: int = 0,
) -> tuple[Any, Any]:
    """What ranks counted (`CollectiveCount.counts()`, by rank) and what a row of `BUDGETS` allows,
    an entry for each rank, phase and kind; `rounds` of what travels in them."""
    allowed = (BUDGETS | OF_DIVERGENCES | OF_TWO_DIMENSIONS)[budget]

    def numbers(counted: Mapping[str, int], theirs: tuple[str, ...] = ()) -> list[int]:
        return [counted.get(kind, 0) for kind in KINDS if kind not in theirs]

    def with_rounds(once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, int]:
        return {kind: once.get(kind, 0) + rounds * each.get(kind, 0) for kind in KINDS}

    got = [n for counted in forward for n in numbers(counted)]
    want = numbers(with_rounds(allowed.forward, allowed.each)) * len(forward)
    for counted in backward:
        got += numbers(counted, allowed.theirs)
        want += numbers(with_rounds(allowed.backward, allowed.each_backward), allowed.theirs)
    return np.array(got), np.array(want)


def check_budget(
    budget: str,
    forward: Sequence[Mapping[str, int]],
    backward: Sequence[Mapping[str, int]],
    *,
    rounds: int = 0,
    backend: str = "",
    case: str = "",
) -> list[Measurement]:
    """Hold what ranks counted, in so many `rounds`, against a row of `BUDGETS`.

    A rank that differs from the others is off the budget, which is the same for all.
    """
    got, want = budget_entries(budget, forward, backward, rounds)
    quantity = f"collectives, {budget}"
    return check("A15", got, want, backend=backend, case=case, quantity=quantity)
