"""Seconds of routes on paper: steps and bytes of collectives, what overlaps, against timelines of
the loops; and what a choice follows from."""

from __future__ import annotations

from typing import Any

import pytest

from xentlib.contract import check, failures
from xentlib.plan import (
    Exchange,
    Gpu,
    Rates,
    choose_gather,
    crossover_tokens,
    gpu_time,
    head_routes,
    plan_chunks,
)
from xentlib.plan.routes import RouteOptions

LLAMA = {"vocab_size": 128_256, "hidden_size": 4096}
PIECES = ("head", "hidden", "stream", "hybrid")
FREE = Rates(latency=0.0, step=0.0)


def exact(got: list[float], want: list[float]) -> None:
    """But for the order of a sum."""
    assert not failures(
        check("A15", [float(f"{x:.12g}") for x in got], [float(f"{x:.12g}") for x in want])
    )


# --- what is sent ---------------------------------------------------------------------------------


def test_the_slower_of_two_paths_is_what_a_collective_takes() -> None:
    """64 ranks of 8 nodes: 7/8 of the bytes by 8 adapters of a node, 63/64 of them in it."""
    rates = Rates(gemm=1.0, node=100.0, network=5.0, latency=0.25, step=0.0)
    flat = Exchange("all_gather", "x", 2, 6400, ranks=64, nodes=8)
    exact([flat.seconds(rates)], [2 * 0.25 + 6400 * (7 / 8) / 8 / 5])
    wide = rates._replace(network=50.0)
    exact([flat.seconds(wide)], [2 * 0.25 + 6400 * (63 / 64) / 100])
    alone = Exchange("all_reduce", "x", 1, 6400, ranks=8, nodes=8)
    exact([alone.seconds(rates)], [0.25 + 2 * 6400 * (7 / 8) / 5])


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "steps"),
    [
        ("all_gather", 8, 1, 7),
        ("reduce_scatter", 64, 8, 63),
        ("all_gather", 1024, 128, 1023),
        ("all_reduce", 8, 1, 14),  # a chain there and back, which is no shorter than the ring
        ("all_reduce", 64, 8, 2 * (7 + 3)),
        ("all_reduce", 1024, 128, 2 * (7 + 7)),
        ("all_reduce", 12, 3, 2 * (3 + 2)),
        ("all_reduce", 1024, 1024, 2 * 10),
    ],
)
def test_a_collective_has_as_many_steps_as_its_ring_or_its_tree(
    kind: str, ranks: int, nodes: int, steps: int
) -> None:
    """Those that NCCL's own model of its time has (`src/graph/tuning.cc`)."""
    rates = Rates(latency=5.0, step=0.5)
    sent = Exchange(kind, "x", 3, 0, ranks, nodes)
    exact([sent.seconds(rates)], [3 * (5.0 + 0.5 * steps)])


def test_the_order_of_routes_on_64_and_1024_ranks() -> None:
    """By hand: 1.05 GB of head in 16 bits and 2.10 GB of its gradient in float32, in blocks of 126
    and of 8 rows of each rank, of which the last is filled."""
    rates, tokens = Rates(network=50e9, node=1e15, latency=10e-6, step=2e-6), 4096
    for ranks, nodes, blocks, block_rows in ((64, 8, 16, 126), (1024, 128, 16, 8)):
        ring = 10e-6 + 2e-6 * (ranks - 1)

        def sent(size: float, nodes: int = nodes) -> float:
            return size * (nodes - 1) / nodes / 8 / 50e9

        rows = -(-128_256 // ranks)
        head = 2 * ring + sent(ranks * rows * 4096 * (2 + 4))
        passing = blocks * ranks * block_rows * 4096 * (2 * 2 + 4)
        stream = (3 * blocks + 2) * ring + sent(passing)
        routes = head_routes(tokens, ranks=ranks, nodes=nodes, rates=rates, **LLAMA)
        near = {name: routes[name].link_seconds for name in PIECES}
        assert abs(near["head"] - head) < 1e-9
        # A handshake and upstream gradients are a few kilobytes.
        assert abs(near["stream"] - stream) < 1e-5
        # The hidden states: 8192 of all ranks in a chunk, which go through a ring and back.
        chunks = ranks * tokens // 8192
        tree = 10e-6 + 2e-6 * 2 * (7 + (nodes - 1).bit_length())
        hidden = chunks * 2 * (ring + tree) + sent(ranks * tokens * 4096 * (2 + 4))
        assert hidden < near["hidden"] < 1.05 * hidden
        # Rows of all nodes: a gather and a scatter over as many ranks as there are nodes, and in a
        # node as many chunks as eight ranks have.
        over = 2 * (10e-6 + 2e-6 * (nodes - 1))
        over += nodes * rows * 4096 * (2 + 4) * (nodes - 1) / nodes / 50e9
        within = 4 * 2 * (10e-6 + 2e-6 * 7 + 10e-6 + 2e-6 * 14)
        hybrid = 2 * ring + over + within
        assert hybrid < near["hybrid"] < 1.01 * hybrid
        order = sorted(near, key=lambda name: near[name])
        assert order == ["head", "hybrid", "stream", "hidden"]
        want = {64: ["7.2", "26.5", "16.0", "7.7"], 1024: ["12.0", "2435.8", "113.5", "13.0"]}
        assert [f"{1e3 * near[name]:.1f}" for name in PIECES] == want[ranks]


# --- what is computed -----------------------------------------------------------------------------


def test_products_of_few_columns_are_as_fast_as_memory() -> None:
    """By hand: of 8192 tokens and 126 columns at H = 4096 a product has 2 x 8192 x 126 x 4096
    operations and 2 x (8192 x 126 + 8192 x 4096 + 126 x 4096) bytes. Catches: a product of 126
    columns at the rate of one with 128,256."""
    gpu = Gpu(flops=1e15, bandwidth=2e12, clock=1e30)
    few, many = (
        plan_chunks(8192, columns, 4096, dtype="bfloat16", max_chunk_bytes=1 << 33)
        for columns in (126, 128_256)
    )
    flops, size = 2 * 8192 * 126 * 4096, 2 * (8192 * 126 + 8192 * 4096 + 126 * 4096)
    assert size / 2e12 > 4 * flops / 1e15
    softmax = 4.25 * 8192 * 126 / 2e12
    exact([gpu_time(few, gradient=False, gpu=gpu)], [size / 2e12 + softmax])
    whole = 2 * 8192 * 128_256 * 4096 / 1e15 + 4.25 * 8192 * 128_256 / 2e12
    exact([gpu_time(many, gradient=False, gpu=gpu)], [whole])


def test_a_frozen_head_has_no_product_and_no_sum_of_its_own() -> None:
    plan, gpu = plan_chunks(4096, 32_000, 4096, dtype="bfloat16"), Gpu(bandwidth=1e30, clock=1e30)
    two, three = (gpu_time(plan, frozen=x, gpu=gpu) for x in (True, False))
    exact([3 * two], [2 * three])
    slow = Gpu(flops=1e30, clock=1e30, bandwidth=1.0)
    sums = gpu_time(plan, gpu=slow) - gpu_time(plan, frozen=True, gpu=slow)
    entries = 32_000 * 4096
    product = 2 * (4096 * 32_000 + 4096 * 4096 + plan.num_chunks * entries)
    exact([sums], [product + entries * (4 * plan.num_chunks - 2 + 6)])


# --- what overlaps --------------------------------------------------------------------------------


def chunks_in_turn(chunks: int, g: float, s: float, a: float, product: float) -> float:
    """Seconds of the loop of gathered tokens, which ends with the last d hidden: one stream of
    products, one of collectives in the order in which they are begun."""
    computing = sending = 0.0
    sending = arrived = g
    left = 0.0
    for k in range(chunks):
        computing = max(computing, arrived)
        if k + 1 < chunks:
            sending = arrived = max(sending, computing) + g
        computing = max(computing + product, sending) + a  # logits, MAX and SUM
        sending = computing
        computing = max(computing, left) + product  # the last chunk's has come; d hidden
        sending = left = max(sending, computing) + s
        computing += product  # d weight
    return max(computing, left)


def blocks_in_turn(blocks: int, g: float, s: float, product: float) -> float:
    """Seconds of both passes over blocks of rows: the first makes logits, the other all."""
    computing = sending = 0.0
    for products, back in ((1, 0.0), (3, s)):
        sending = arrived = max(sending, computing) + g
        left = 0.0
        for k in range(blocks):
            computing = max(computing, arrived)
            if k + 1 < blocks:
                sending = arrived = max(sending, computing) + g
            computing = max(computing + products * product, left)
            if back:
                sending = left = max(sending, computing) + back
        computing = max(computing, left)
    return computing


@pytest.mark.parametrize("scale", [0.05, 0.5, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("name", ["hidden", "stream"])
def test_what_overlaps_is_what_two_timelines_say(name: str, scale: float) -> None:
    """Links of all speeds, from such as products hide to such as hide products: within a chunk's
    time, or a block's, of the loop played through. Catches: all products beside hidden states that
    MAX waits for; a block's gather beside nothing."""
    rates = Rates(node=350e9 / scale)
    route = head_routes(8192, 128_256, 4096, 8, rates=rates, max_chunk_bytes=1 << 28)[name]
    sent = {(x.kind, x.what, x.under): x for x in route.exchanges}
    of = {key: x.seconds(rates) / x.count for key, x in sent.items()}
    beside = sum(x.seconds(rates) for x in route.exchanges if x.under)
    rest = route.link_seconds - beside
    if name == "hidden":
        rounds = route.num_chunks
        g, s = (
            of["all_gather", "hidden states", "gradients"],
            of["reduce_scatter", "d hidden", "gradients"],
        )
        a = of["all_reduce", "largest logits", ""] + of["all_reduce", "sums of the softmax", ""]
        product = route.compute_seconds / rounds / 3
        played = chunks_in_turn(rounds, g, s, a, product) + rest - rounds * a
    else:
        rounds = sent["reduce_scatter", "d weight", "gradients"].count
        g, s = (
            of["all_gather", "blocks of rows", "gradients"],
            of["reduce_scatter", "d weight", "gradients"],
        )
        product = route.compute_seconds / rounds / 4
        played = blocks_in_turn(rounds, g, s, product) + rest
    assert rounds > 15
    assert abs(route.overlapped_seconds - played) <= g + s + product, (played, route.seconds)
    assert played < route.seconds - 0.3 * min(beside, route.compute_seconds)


def test_one_chunk_and_one_block_have_nothing_beside_them() -> None:
    for name in ("hidden", "stream"):
        more = {"chunk_tokens": 64, "block_rows": 1 << 20}
        route = head_routes(64, ranks=8, rates=FREE, **LLAMA, **more)[name]
        assert route.num_chunks == 1
        exact([route.overlapped_seconds], [route.seconds])


def test_the_wrapper_s_own_reduction_is_beside_the_trunk() -> None:
    """What FSDP2 gathers for the call is not."""
    route = head_routes(8192, ranks=8, micro_batches=4, **LLAMA)["head"]
    gather, reduce = route.exchanges
    assert (gather.under, reduce.under) == ("", "trunk")
    exact([route.overlapped_seconds], [route.compute_seconds + gather.seconds(route.rates)])
    exact([route.seconds - route.overlapped_seconds], [reduce.seconds(route.rates) / 4])


# --- what follows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(
    ("more", "gathers", "reduced"),
    [
        ({}, 1, 4.0),
        ({"module": True}, 2, 4.0),
        ({"reduce_dtype": "bfloat16"}, 1, 2.0),
        ({"micro_batches": 8}, 1, 0.5),
    ],
)
def test_links_cross_where_as_many_bytes_are_sent(
    ranks: int, more: RouteOptions, gathers: int, reduced: float
) -> None:
    """V / R (k b_head + b_reduce / M) / (b + 4) tokens a rank, within 1.5 % where collectives cost
    nothing by themselves: 12 numbers a token are sent beside its state, 8 of them the words of its
    softmax's sum, and those twice."""
    want = LLAMA["vocab_size"] / ranks * (2 * gathers + reduced) / (2 + 4)
    for tokens, fewer in ((0.985 * want, True), (want, False)):
        routes = head_routes(int(tokens), ranks=ranks, nodes=1, rates=FREE, **LLAMA, **more)
        assert (routes["hidden"].link_seconds < routes["head"].link_seconds) is fewer


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("more", [{}, {"nodes": 1}, {"recompute": True}, {"bias": True}])
def test_the_crossover_is_where_the_seconds_are_alike(overlapped: bool, more: Any) -> None:
    """And `choose_gather` changes there."""
    found = crossover_tokens(**LLAMA, ranks=64, overlapped=overlapped, **more)
    assert 500 < found < 1 << 24
    for tokens, want in ((found, "hidden"), (found + 1, "head")):
        routes = head_routes(tokens, ranks=64, **LLAMA, **more)
        seconds = {
            name: routes[name].overlapped_seconds if overlapped else routes[name].seconds
            for name in ("head", "hidden")
        }
        assert min(seconds, key=lambda name: seconds[name]) == want
        assert choose_gather(tokens, ranks=64, **LLAMA, overlapped=overlapped, **more) == want


def test_a_slower_start_of_collectives_moves_the_crossover_down() -> None:
    up_to = [
        crossover_tokens(**LLAMA, ranks=64, overlapped=False, rates=Rates(latency=x, step=y))
        for x, y in ((0.0, 0.0), (10e-6, 2e-6), (100e-6, 2e-6), (100e-6, 10e-6))
    ]
    assert up_to == sorted(up_to, reverse=True)
    assert len(set(up_to)) == 4


def test_one_rank_and_a_route_that_there_is_not_have_no_crossover() -> None:
    assert crossover_tokens(**LLAMA, ranks=1) == 0
    assert crossover_tokens(**LLAMA, ranks=7, zero3=True) == 0
    assert choose_gather(64, **LLAMA, ranks=7, zero3=True) == "head"


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "nodes"),
    [(8, 1, 1), (6, 1, 1), (12, 1, 2), (64, 1, 8), (11, 1, 11), (8, 8, 8), (8, 2, 2), (64, 16, 64)],
)
def test_nodes_that_nobody_names_have_eight_gpus(
    ranks: int, tensor_parallel: int, nodes: int
) -> None:
    """Or fewer, where eight do not divide the ranks, and those of a vocabulary beside each."""
    route = head_routes(64, 1003, 16, ranks, tensor_parallel=tensor_parallel)["head"]
    assert {x.nodes for x in route.exchanges if x.ranks == ranks and x.what == "head"} == {nodes}
