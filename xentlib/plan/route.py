"""One route after the other: what it sends, and the plan that its memory follows from.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share the rows, T tokens of a
rank in a chunk, C chunks, K rows of every rank in a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xentlib.dtypes import ITEMSIZE
from xentlib.plan.route_config import Exchange, Rates, RouteConfig
from xentlib.plan.route_memory import Moments, of_full_logits, of_head, of_hidden, of_stream
from xentlib.plan.split import ROOM, ChunkPlan, sum_rows

LABEL = 8  # bytes
# Integers of 8 bytes that ranks exchange first, on the host, whatever the route.
HANDSHAKE = 30 * 8


@dataclass(frozen=True, slots=True)
class Route:
    """One way for tokens and rows to meet.

    Attributes:
        name: "full logits", which is no route of ours, "head", "hidden", "stream" or "hybrid".
        exchanges: what is sent in a call, in order.
        flops: of the products of a rank.
        moments: what stands on a rank at once, in bytes by name, by moment.
        chunk_tokens: T, of this rank.
        num_chunks: C.
        block_rows: K, 0 if rows are not gathered in blocks.
        micro_batches: of a window; what is sent once in a window counts as a part of a call.
        rates: for the seconds.
    """

    name: str
    exchanges: tuple[Exchange, ...]
    flops: int
    moments: Moments
    chunk_tokens: int
    num_chunks: int
    block_rows: int
    micro_batches: int
    rates: Rates

    @property
    def peak(self) -> Mapping[str, int]:
        """What stands at the moment that needs most, in bytes by name."""
        most = max(self.moments.values(), key=lambda parts: sum(parts.values()))
        return {name: size for name, size in most.items() if size}

    @property
    def peak_bytes(self) -> int:
        """Of one call beside its inputs, results included."""
        return sum(self.peak.values())

    def counts(self, *, backward: bool | None = None) -> dict[str, int]:
        """Number of each kind of collective in a call that reduces gradients."""
        counts: dict[str, int] = {}
        for x in self._of(backward):
            counts[x.kind] = counts.get(x.kind, 0) + x.count
        return counts

    def bytes(self, kind: str | None = None, *, backward: bool | None = None) -> int:
        """Of one kind, or of all, as `count_collectives` counts, in such a call."""
        return sum(x.bytes for x in self._of(backward) if kind in (None, x.kind))

    def _of(self, backward: bool | None) -> list[Exchange]:
        return [x for x in self.exchanges if backward in (None, x.backward)]

    @property
    def received(self) -> float:
        """Bytes that a rank receives in a call."""
        return sum(x.received / self._calls(x) for x in self.exchanges)

    @property
    def gemm_seconds(self) -> float:
        return self.flops / self.rates.gemm

    @property
    def link_seconds(self) -> float:
        """Of all that is sent, one after the other."""
        return sum(x.seconds(self.rates) / self._calls(x) for x in self.exchanges)

    @property
    def seconds(self) -> float:
        """Products, and what is sent while nothing is computed. Passes over logits, and reading and
        writing the sum of d weight, are not in it."""
        return self.gemm_seconds + self.link_seconds

    def _calls(self, x: Exchange) -> int:
        return self.micro_batches if x.per_sync else 1


def routes_of(s: RouteConfig) -> dict[str, Route]:
    routes = [_full_logits(s), _head(s), _hidden(s), _stream(s)]
    if s.nodes > 1 and s.replicas == 1:
        routes.append(_hybrid(s))
    return {route.name: route for route in routes}


def _route(
    s: RouteConfig,
    name: str,
    exchanges: list[Exchange],
    moments: Moments,
    flops: int,
    chunks: tuple[int, int],
    block_rows: int = 0,
) -> Route:
    """`chunks`: tokens of one, and their number."""
    sent = tuple(x for x in exchanges if x.ranks > 1 and x.count)
    return Route(name, sent, flops, moments, *chunks, block_rows, s.micro_batches, s.rates)


def _flops(s: RouteConfig, rows: int, columns: int, products: int) -> int:
    """`products` of `rows` of hidden states and `columns` of the head."""
    return 2 * rows * columns * s.hidden_size * products


def _full_logits(s: RouteConfig) -> Route:
    exchanges, tokens = _of_fsdp2(s, again=not s.kept), s.tokens_per_rank
    flops = _flops(s, tokens, s.vocab_size, 3)
    return _route(s, "full logits", exchanges, of_full_logits(s), flops, (tokens, 1))


def _head(s: RouteConfig) -> Route:
    plan, tokens = s.plan_of_own(), s.tokens_per_rank
    exchanges = _of_fsdp2(s, again=(s.recompute or s.module) and not s.kept)
    flops = _flops(s, tokens, s.vocab_size, 4 if s.recompute else 3)
    chunks = min(plan.chunk_tokens, tokens), plan.num_chunks
    return _route(s, "head", exchanges, of_head(s, plan), flops, chunks)


def _of_fsdp2(s: RouteConfig, *, again: bool) -> list[Exchange]:
    entries = s.ranks * s.rows * s.hidden_size
    gathered, reduced = entries * ITEMSIZE[s.head_dtype], entries * ITEMSIZE[s.reduce_dtype]
    where = s.ranks, s.nodes
    return [
        Exchange("all_gather", "head", 1, gathered, *where),
        Exchange("all_gather", "head", int(again), gathered, *where, backward=True),
        Exchange("reduce_scatter", "d weight", 1, reduced, *where, backward=True, per_sync=True),
        _over_replicas(s, reduced // s.ranks),
    ]


def _over_replicas(s: RouteConfig, size: int) -> Exchange:
    at, when = (s.replicas, s.replicas), {"backward": True, "per_sync": True}
    return Exchange("all_reduce", "d weight of replicas", 1, size, *at, **when)


def _hidden(s: RouteConfig) -> Route:
    plan = s.plan_of_shared(s.rows, s.ranks)
    exchanges = [*_handshakes(s), *_of_tokens(s, plan, s.ranks, s.nodes)]
    exchanges.append(_over_replicas(s, s.rows * s.hidden_size * s.size))
    moments = of_hidden(s, plan, s.rows, s.ranks, gathered=False)
    return _route(s, "hidden", exchanges, moments, *_products(s, plan, s.rows, s.ranks))


def _products(
    s: RouteConfig, plan: ChunkPlan, rows: int, ranks: int
) -> tuple[int, tuple[int, int]]:
    """FLOP and chunks where the tokens of `ranks` meet `rows` of the head."""
    flops = _flops(s, plan.num_tokens, rows, 4 if _twice(s, plan.num_chunks) else 3)
    return flops, (plan.chunk_tokens // ranks, plan.num_chunks)


def _twice(s: RouteConfig, chunks: int) -> bool:
    """Whether logits are computed, and hidden states gathered, twice: the derivative of a softcap
    is gone once it has been applied, so statistics of all chunks come first."""
    return s.recompute or ("softcap" in s.options and chunks > 1)


def _handshakes(s: RouteConfig) -> list[Exchange]:
    """Of all ranks that share the head, before each loop over its logits."""
    size, where = s.ranks * HANDSHAKE, (s.ranks, s.nodes)
    return [
        Exchange("all_gather", "handshake", 1, size, *where),
        Exchange("all_gather", "handshake", int(s.recompute), size, *where, backward=True),
    ]


def _of_tokens(s: RouteConfig, plan: ChunkPlan, ranks: int, nodes: int) -> list[Exchange]:
    """Hidden states to rows, and what belongs to each token; of `ranks` on `nodes`, all of which or
    one node's."""
    tokens, where = plan.num_tokens, (ranks, nodes)
    chunks = plan.num_chunks
    states = tokens * s.hidden_size * s.gemm_size
    factor = 0 if s.recompute else s.size
    numbers = LABEL + factor + s.size * ("temperature" in s.options)
    more = ("label_smoothing" in s.options) + ranks * ("predicted" in s.options)
    sums = sum_rows(s.size, entropy="entropy" in s.options, more=more)
    at_once = _twice(s, chunks)
    same = 3 * ROOM + 3 * ranks
    times = 1 if at_once else chunks
    forward = chunks * (2 if at_once and not s.recompute else 1)
    exchanges = [
        Exchange("all_gather", "labels and factors", 1, tokens * numbers, *where),
        Exchange("all_gather", "hidden states", forward, forward // chunks * states, *where),
        Exchange("all_reduce", "largest logits", times, (tokens + same) * s.size, *where),
        Exchange("all_reduce", "sums of the softmax", times, tokens * sums * s.size, *where),
    ]
    if s.recompute:
        last = {"backward": True}
        # Three upstream gradients and four statistics, with the label and the temperature.
        numbers += 7 * s.size
        exchanges += [
            Exchange("all_gather", "labels and upstream", 1, tokens * numbers, *where, **last),
            Exchange("all_gather", "hidden states", chunks, states, *where, **last),
        ]
    else:
        of_all = 2 * s.ranks * s.size, s.ranks, s.nodes
        exchanges.append(Exchange("all_gather", "upstream", 1, *of_all, backward=True))
    d_hidden, late = tokens * s.hidden_size * s.size, {"backward": s.recompute}
    return [*exchanges, Exchange("reduce_scatter", "d hidden", chunks, d_hidden, *where, **late)]


def _stream(s: RouteConfig) -> Route:
    """Logits, and rows on their way, twice: statistics of all blocks come first."""
    rows, plan = s.plan_of_blocks()
    blocks = -(-s.rows // rows)
    where, entries = (s.ranks, s.nodes), blocks * s.ranks * rows * s.hidden_size
    passed = entries * s.gemm_size
    late, once = {"backward": s.recompute}, int(not s.recompute)
    exchanges = [
        *_handshakes(s),
        Exchange("all_gather", "blocks of rows", blocks, passed, *where),
        Exchange("all_gather", "blocks of rows", blocks, passed, *where, **late),
        Exchange("reduce_scatter", "d weight", blocks, entries * s.size, *where, **late),
        Exchange("all_gather", "upstream", once, 2 * s.ranks * s.size, *where, backward=True),
        _over_replicas(s, s.rows * s.hidden_size * s.size),
    ]
    flops = _flops(s, s.tokens_per_rank, s.ranks * s.rows, 4)
    chunks = min(plan.chunk_tokens, s.tokens_per_rank), plan.num_chunks
    return _route(s, "stream", exchanges, of_stream(s, plan, rows), flops, chunks, rows)


def _hybrid(s: RouteConfig) -> Route:
    """Rows of the same place of all nodes, which meet the tokens of their own node: "hidden" with a
    mesh of nodes."""
    ranks, rows = s.ranks // s.nodes, s.nodes * s.rows
    plan = s.plan_of_shared(rows, ranks)
    over, entries = (s.nodes, s.nodes), rows * s.hidden_size
    passed, again = entries * s.gemm_size, int(s.recompute)
    exchanges = [
        *_handshakes(s),
        Exchange("all_gather", "rows of all nodes", 1, passed, *over),
        *_of_tokens(s, plan, ranks, 1),
        Exchange("all_gather", "rows of all nodes", again, passed, *over, backward=True),
        Exchange("reduce_scatter", "d weight", 1, entries * s.size, *over, backward=s.recompute),
    ]
    moments = of_hidden(s, plan, rows, ranks, gathered=True)
    return _route(s, "hybrid", exchanges, moments, *_products(s, plan, rows, ranks))
