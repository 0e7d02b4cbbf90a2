"""One route after the other: what it sends, and the plan that its memory and its time follow from.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share the rows, T tokens of a
rank in a chunk, C chunks, K rows of every rank in a block, r columns of an adapter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xentlib.options import ITEMSIZE
from xentlib.plan.route_config import GRADIENTS, STATISTICS, TRUNK, Exchange, RouteConfig
from xentlib.plan.route_memory import (
    Moments,
    of_full_logits,
    of_head,
    of_hidden,
    of_state,
    of_stream,
)
from xentlib.plan.route_result import Route
from xentlib.plan.split import ROOM, ChunkPlan, schedule, sum_rows
from xentlib.plan.time import gpu_time, product_time

LABEL = 8  # bytes
# Integers of 8 bytes that ranks exchange first, on the host, whatever the route.
HANDSHAKE = 32 * 8
# Bytes of a logit that autograd moves behind the products: a cast (6), log-probabilities (8), zeros
# for their gradient (4), the softmax's backward (12) and a cast back (6), each read once.
AUTOGRAD = 36
# Of a logit that an adapter is added to, in float32, and dz that it reads twice in 16 bits.
LOW_RANK = 12


def routes_of(s: RouteConfig) -> dict[str, Route]:
    """Those that there are: over nodes and with adapters, of ZeRO-3 and of tensor parallelism some
    are refused."""
    routes = [_full_logits(s), _head(s)] if s.tensor_parallel == 1 else [_head(s)]
    whole_rows = not s.zero3 or (s.vocab_size % s.ranks == 0 and not s.low_rank)
    if whole_rows:
        routes.append(_hidden(s))
        if not s.low_rank:
            routes.append(_stream(s))
            if s.nodes > 1 and s.replicas == s.tensor_parallel == 1 and not s.zero3:
                routes.append(_hybrid(s))
    return {route.name: route for route in routes}


def _route(
    s: RouteConfig,
    name: str,
    exchanges: list[Exchange],
    moments: Moments,
    plan: ChunkPlan,
    *,
    columns: int,
    products: int,
    ranks: int = 1,
    block_rows: int = 0,
) -> Route:
    """`products` of a head that is trained, with `columns`, of the tokens of `ranks`."""
    sent = tuple(x for x in exchanges if x.ranks > 1 and x.count)
    tokens, left = plan.num_tokens, products - s.frozen
    flops = 2 * tokens * s.hidden_size * columns * left
    flops += 6 * tokens * s.low_rank * (columns + s.hidden_size)
    whole, gpu = replace(plan, vocab_size=columns), s.gpu
    if name == "full logits":
        moved = AUTOGRAD * tokens * columns
        seconds = product_time(whole, left, gpu) + moved / gpu.bandwidth
    else:
        recompute, softcap = products > 3, "softcap" in s.options
        seconds = gpu_time(whole, recompute=recompute, softcap=softcap, frozen=s.frozen, gpu=gpu)
    if s.low_rank:
        seconds += LOW_RANK * tokens * columns / gpu.bandwidth
    in_chunk = plan.chunk_tokens // ranks
    return Route(
        name,
        sent,
        flops,
        left,
        seconds,
        moments,
        of_state(s),
        min(in_chunk, s.tokens_per_rank) if ranks == 1 else in_chunk,
        plan.num_chunks,
        block_rows,
        s.micro_batches,
        s.rates,
    )


def _full_logits(s: RouteConfig) -> Route:
    exchanges, tokens = _of_wrapper(s, regathers=not s.kept), s.tokens_per_rank
    plan = replace(s.plan_of_own(), chunk_tokens=tokens)
    moments = of_full_logits(s)
    return _route(s, "full logits", exchanges, moments, plan, columns=s.vocab_size, products=3)


def _head(s: RouteConfig) -> Route:
    plan = s.plan_of_own()
    exchanges = _of_wrapper(s, regathers=(s.recompute or s.module) and not s.kept)
    of_shards, twice = _of_shards(s, plan)
    products = 4 if s.recompute or twice else 3
    exchanges[1:1] = of_shards
    moments, blocks = of_head(s, plan), s.plan_of_classes()
    if blocks is not None:
        plan = replace(blocks, vocab_size=plan.vocab_size)
    return _route(s, "head", exchanges, moments, plan, columns=s.classes, products=products)


def _of_wrapper(s: RouteConfig, *, regathers: bool) -> list[Exchange]:
    """Of a head that FSDP2 gathers, with its bias and its adapters, in one piece; or ZeRO-3, which
    cuts memory evenly, and reduces in each micro-batch."""
    rows, ranks = s.ranks * s.rows, s.ranks
    held, trained = s.held(rows), s.trained(rows)
    if s.zero3:
        sizes = (s.vocab_size * x for x in (s.hidden_size, int(s.bias), s.low_rank))
        head, bias, low = (-(-x // ranks) * ranks for x in sizes)
        held, trained = head + bias + low, low or head + bias
    low_in = ranks * s.low_entries
    gathered = (held + low_in) * ITEMSIZE[s.head_dtype]
    reduced = (trained + low_in) * ITEMSIZE[s.reduce_dtype]
    where = ranks, s.nodes
    late: Any = {"backward": True, "under": TRUNK, "per_sync": not s.zero3}
    return [
        Exchange("all_gather", "head", 1, gathered, *where),
        Exchange("all_gather", "head", int(regathers), gathered, *where, backward=True),
        Exchange("reduce_scatter", "d weight", 1, reduced, *where, **late),
        _over_replicas(s, 1, reduced // ranks, under=TRUNK),
    ]


def _over_replicas(s: RouteConfig, count: int, size: int, under: str = "") -> Exchange:
    at, late = (s.replicas, s.replicas), True
    return Exchange("all_reduce", "d weight of replicas", count, size, *at, late, late, under)


def _rows_over_replicas(s: RouteConfig) -> Exchange:
    """Of rows that stay: one of each parameter."""
    count = 2 if s.low_rank or s.bias else 1
    size = (s.trained(s.rows) + s.low_entries) * s.size
    return _over_replicas(s, count, size)


def _of_shards(s: RouteConfig, plan: ChunkPlan) -> tuple[list[Exchange], bool]:
    """Of tensor parallelism, whose ranks have the same tokens, and whether logits are made twice:
    statistics of each chunk, or of all, and d hidden once."""
    if s.tensor_parallel == 1:
        return [], False
    once = not s.recompute and "softcap" not in s.options
    each = schedule(plan, s.platform, sharded=True, once=once) == "each chunk"
    # The first MAX has room for all tokens.
    later = s.tokens_per_rank - plan.chunk_tokens if each else 0
    exchanges = _over_shards(s, plan.num_chunks if each else 1, later)
    return exchanges, not each and plan.num_chunks > 1


def _over_shards(s: RouteConfig, times: int = 1, later: int = 0) -> list[Exchange]:
    """Statistics of a rank's tokens in so many parts, and d hidden."""
    ranks, tokens = s.tensor_parallel, s.tokens_per_rank
    largest = tokens + later + 3 * ROOM + 3 * ranks
    entropy, more = _more_sums(s, ranks)
    if not s.on_cpu:  # as many in every call of a function
        entropy, more = True, 0 if s.recompute else 1 + ranks
    sums = tokens * sum_rows(s.size, entropy=entropy, more=more)
    return [
        Exchange("all_reduce", "largest logits", times, largest * s.size, ranks),
        Exchange("all_reduce", "sums of the softmax", times, sums * s.size, ranks),
        _d_hidden_over_shards(s),
    ]


def _d_hidden_over_shards(s: RouteConfig) -> Exchange:
    """Of tokens that its ranks have alike; nothing without tensor parallelism."""
    size = s.tokens_per_rank * s.hidden_size * s.size
    return Exchange("all_reduce", "d hidden", 1, size, s.tensor_parallel, backward=s.recompute)


def _more_sums(s: RouteConfig, ranks: int) -> tuple[bool, int]:
    more = ("label_smoothing" in s.options) + ranks * ("predicted" in s.options)
    return "entropy" in s.options, more


def _hidden(s: RouteConfig) -> Route:
    plan = s.plan_of_shared(s.rows, s.ranks)
    exchanges = [*_handshakes(s), *_of_tokens(s, plan, s.ranks, s.nodes), _d_hidden_over_shards(s)]
    if s.low_rank:
        size, where = s.ranks * s.low_entries, (s.ranks, s.nodes)
        d_a, late = s.low_rank * s.hidden_size * s.size, s.recompute
        gathered = size * ITEMSIZE[s.param_dtype]
        exchanges += [
            Exchange("all_gather", "A of the adapter", 1, gathered, *where),
            Exchange("all_reduce", "d A of the adapter", 1, d_a, *where, backward=late),
        ]
    exchanges.append(_rows_over_replicas(s))
    moments = of_hidden(s, plan, s.rows, s.ranks, gathered=False)
    return _of_chunks(s, "hidden", exchanges, moments, plan, s.rows, s.ranks)


def _of_chunks(
    s: RouteConfig,
    name: str,
    exchanges: list[Exchange],
    moments: Moments,
    plan: ChunkPlan,
    rows: int,
    ranks: int,
) -> Route:
    """Where the tokens of `ranks` meet `rows` of the head."""
    products = 4 if _twice(s, plan.num_chunks) else 3
    sizes: Any = {"columns": rows, "products": products, "ranks": ranks}
    return _route(s, name, exchanges, moments, plan, **sizes)


def _twice(s: RouteConfig, chunks: int) -> bool:
    """Whether logits are computed, and hidden states gathered, twice: the derivative of a softcap
    is gone once it has been applied, so statistics of all chunks come first."""
    return s.recompute or ("softcap" in s.options and chunks > 1)


def _handshakes(s: RouteConfig) -> list[Exchange]:
    """Of all ranks that share the head, before each loop over its logits."""
    size, where = s.all_ranks * HANDSHAKE, (s.all_ranks, s.nodes)
    return [
        Exchange("all_gather", "handshake", 1, size, *where),
        Exchange("all_gather", "handshake", int(s.recompute), size, *where, backward=True),
    ]


def _of_tokens(s: RouteConfig, plan: ChunkPlan, ranks: int, nodes: int) -> list[Exchange]:
    """Hidden states to rows, and what belongs to each token; of `ranks` on `nodes`, all of which or
    one node's."""
    tokens, chunks, where = plan.num_tokens, plan.num_chunks, (ranks, nodes)
    every = ranks * s.tensor_parallel  # that share the vocabulary
    states = tokens * s.hidden_size * s.gemm_size
    factor = 0 if s.recompute else s.size
    numbers = LABEL + factor + s.size * ("temperature" in s.options)
    numbers += s.size * (s.tensor_parallel > 1)  # to compare hidden states by
    entropy, more = _more_sums(s, every)
    sums = sum_rows(s.size, entropy=entropy, more=more)
    at_once, same, late = _twice(s, chunks), 3 * ROOM + 3 * every, s.recompute
    times, first = 1 if at_once else chunks, chunks if at_once else 0
    # Three upstream gradients and four statistics, with the label and the temperature.
    upstream = tokens * (numbers + 7 * s.size) if late else 2 * s.all_ranks * s.size
    of_all = where if late else (s.all_ranks, s.nodes)
    d_hidden = tokens * s.hidden_size * s.size
    timing: Any = {"backward": late, "under": GRADIENTS}
    return [
        Exchange("all_gather", "labels and factors", 1, tokens * numbers, *where),
        Exchange("all_gather", "hidden states", first, states, *where, under=STATISTICS),
        Exchange("all_reduce", "largest logits", times, (tokens + same) * s.size, every, nodes),
        Exchange("all_reduce", "sums of the softmax", times, tokens * sums * s.size, every, nodes),
        Exchange("all_gather", "hidden states", chunks, states, *where, **timing),
        Exchange("reduce_scatter", "d hidden", chunks, d_hidden, *where, **timing),
        Exchange("all_gather", "upstream", 1, upstream, *of_all, backward=True),
    ]


def _stream(s: RouteConfig) -> Route:
    """Logits, and rows on their way, twice: statistics of all blocks come first."""
    rows, plan = s.plan_of_blocks()
    blocks = -(-s.rows // rows)
    where, entries = (s.ranks, s.nodes), blocks * s.ranks * rows * s.hidden_size
    passed, size = entries * s.gemm_size, s.size
    once, of_all = int(not s.recompute), (s.all_ranks, s.nodes)
    timing: Any = {"backward": s.recompute, "under": GRADIENTS}
    exchanges = [
        *_handshakes(s),
        *_of_bias(s, s.ranks, s.nodes),
        Exchange("all_gather", "blocks of rows", blocks, passed, *where, under=STATISTICS),
        Exchange("all_gather", "blocks of rows", blocks, passed, *where, **timing),
        Exchange("reduce_scatter", "d weight", blocks, entries * size, *where, **timing),
        *_over_shards(s),
        Exchange("all_gather", "upstream", once, 2 * s.all_ranks * size, *of_all, backward=True),
        _rows_over_replicas(s),
    ]
    moments = of_stream(s, plan, rows)
    sizes: Any = {"columns": s.ranks * s.rows, "products": 4, "block_rows": rows}
    return _route(s, "stream", exchanges, moments, plan, **sizes)


def _of_bias(s: RouteConfig, ranks: int, nodes: int) -> list[Exchange]:
    """Beside rows that come from `ranks`: in its own dtype, and its gradient back."""
    entries, where, late = s.bias * ranks * s.rows, (ranks, nodes), s.recompute
    gathered, count = entries * ITEMSIZE[s.param_dtype], int(s.bias)
    return [
        Exchange("all_gather", "bias", count, gathered, *where),
        Exchange("all_gather", "bias", count * late, gathered, *where, backward=True),
        Exchange("reduce_scatter", "d bias", count, entries * s.size, *where, backward=late),
    ]


def _hybrid(s: RouteConfig) -> Route:
    """Rows of the same place of all nodes, which meet the tokens of their own node: "hidden" with a
    mesh of nodes."""
    ranks, rows = s.ranks // s.nodes, s.nodes * s.rows
    plan = s.plan_of_shared(rows, ranks)
    over, entries = (s.nodes, s.nodes), rows * s.hidden_size
    passed, regathers, late = entries * s.gemm_size, int(s.recompute), s.recompute
    exchanges = [
        *_handshakes(s),
        Exchange("all_gather", "rows of all nodes", 1, passed, *over),
        *_of_bias(s, *over),
        *_of_tokens(s, plan, ranks, 1),
        Exchange("all_gather", "rows of all nodes", regathers, passed, *over, backward=True),
        Exchange("reduce_scatter", "d weight", 1, entries * s.size, *over, backward=late),
    ]
    moments = of_hidden(s, plan, rows, ranks, gathered=True)
    return _of_chunks(s, "hybrid", exchanges, moments, plan, rows, ranks)
