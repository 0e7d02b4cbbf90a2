"""Routes to a sharded head on paper: bytes by their closed forms, and what grows with what.
`test_plan_time.py` has their seconds, `test_plan_ranks.py` holds the plan against real ranks."""

from __future__ import annotations

import inspect
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xentlib.contract import check, failures
from xentlib.plan import Rates, choose_gather, head_routes, peak_bytes, plan_chunks
from xentlib.plan.memory import D_HIDDEN, D_WEIGHT
from xentlib.plan.routes import RouteOptions

LLAMA = {"vocab_size": 128_256, "hidden_size": 4096}
PIECES = ("head", "hidden", "stream", "hybrid")
heads = st.fixed_dictionaries(
    {
        "tokens_per_rank": st.integers(1, 70_000),
        "vocab_size": st.integers(1, 300_000),
        "hidden_size": st.integers(1, 6000),
        "ranks": st.integers(1, 1024),
    }
)
ways = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "head_dtype": st.sampled_from(["float32", "bfloat16"]),
        "reduce_dtype": st.sampled_from(["float32", "bfloat16"]),
        "replicas": st.integers(1, 4),
        "micro_batches": st.integers(1, 8),
        "recompute": st.booleans(),
        "module": st.booleans(),
        "kept": st.booleans(),
        "bias": st.booleans(),
        "low_rank": st.integers(0, 20),
        "options": st.sets(st.sampled_from(["softcap", "entropy", "predicted", "temperature"])),
        "max_chunk_bytes": st.integers(1, 1 << 32),
        "platform": st.sampled_from(["cpu", "gpu"]),
    },
)


def exact(got: list[float], want: list[float]) -> None:
    assert not failures(check("A15", got, want))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", [(), ("softcap",), ("entropy", "lse", "temperature")])
@pytest.mark.parametrize("chunk", [16, 200])
def test_what_the_hidden_route_sends(recompute: bool, options: tuple[str, ...], chunk: int) -> None:
    """A15: one kind after the other, from the sizes of the tensors."""
    n, v, h, ranks, b, t = 200, 1003, 64, 4, 2, min(chunk, 200)
    more = {"replicas": 3, "recompute": recompute, "options": options, "chunk_tokens": chunk}
    route = head_routes(n, v, h, ranks, **more)["hidden"]
    rows, chunks = 251, -(-n // t)
    twice = "softcap" in options and chunks > 1 and not recompute
    once = recompute or twice
    number = 8 + (0 if recompute else 4) + 4 * ("temperature" in options)
    filled = n  # a multiple of 8
    gathered = ranks * filled * h * b * (2 if twice else 1)
    same = 3 * 47 + 3 * ranks  # with the first MAX
    # The largest logit, the target's, a count, and 8 words of each sum.
    sums = ranks * filled * (3 + 8 * (1 + ("entropy" in options)))
    forward = {
        "all_gather": (
            2 + chunks * (2 if twice else 1),
            ranks * (256 + filled * number) + gathered,
        ),
        "all_reduce": (2 if once else 2 * chunks, 4 * (sums + same)),
        "reduce_scatter": (0 if recompute else chunks, 4 * ranks * filled * h),
    }
    home = (1, rows * h * 4)
    backward = {
        "all_gather": (1, 8 * ranks),
        "all_reduce": home,
        "reduce_scatter": (0, 0),
    }
    if recompute:
        forward["reduce_scatter"] = (0, 0)
        upstream = ranks * (256 + filled * (number + 4 * 7))
        backward["all_gather"] = (2 + chunks, upstream + ranks * filled * h * b)
        backward["reduce_scatter"] = (chunks, 4 * ranks * filled * h)
    assert (route.chunk_tokens, route.num_chunks) == (t, chunks)
    for want, late in ((forward, False), (backward, True)):
        for kind, (count, size) in want.items():
            assert route.counts(backward=late).get(kind, 0) == count, (kind, late)
            exact([route.bytes(kind, backward=late)], [size])
    products = 4 if recompute or twice else 3
    exact([route.flops], [2 * products * ranks * filled * rows * h])


def test_predicted_classes_and_smoothing_are_more_rows_of_a_sum() -> None:
    plain, more = (
        head_routes(64, 1003, 16, 4, options=x)["hidden"].bytes("all_reduce")
        for x in ((), ("predicted", "label_smoothing"))
    )
    exact([more - plain], [4 * 64 * 4 * (4 + 1)])


@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_stream_sends(recompute: bool) -> None:
    """2 B gathers and B scatters, whatever the tokens; the last block is filled."""
    ranks, rows, k, h = 4, 251, 100, 64
    found = [
        head_routes(n, 1003, h, ranks, recompute=recompute, block_rows=k)["stream"]
        for n in (1, 5000)
    ]
    for route in found:
        assert route.counts()["reduce_scatter"] == -(-rows // k) == 3
        assert route.counts()["all_gather"] == 6 + 2  # and sizes, and those again or upstream
        gathered = 6 * ranks * k * h * 2 + ranks * (256 + (256 if recompute else 8))
        exact([route.bytes("all_gather")], [gathered])
        exact([route.bytes("reduce_scatter")], [3 * ranks * k * h * 4])
    exact([found[1].flops], [2 * 4 * 5000 * ranks * rows * h])


def test_what_the_hybrid_sends() -> None:
    """Hidden states stay in a node; over nodes go rows that 1 / L of a gathered head has."""
    n, h, ranks, nodes = 4096, 4096, 64, 8
    route = head_routes(n, LLAMA["vocab_size"], h, ranks, nodes=nodes)["hybrid"]
    over = [x for x in route.exchanges if x.ranks == x.nodes]
    within = [x for x in route.exchanges if x.nodes == 1]
    # What must be alike on all ranks, and upstream gradients.
    rest = [x for x in route.exchanges if x not in (*over, *within)]
    exact([sum(x.bytes for x in rest)], [ranks * 32 * 8 + ranks * 2 * 4])
    assert {(x.ranks, x.nodes) for x in rest} == {(ranks, nodes)}
    rows = nodes * LLAMA["vocab_size"] // ranks
    assert {x.kind: x.bytes for x in over} == {
        "all_gather": rows * h * 2,
        "reduce_scatter": rows * h * 4,
    }
    assert {x.ranks for x in within} == {ranks // nodes}
    states = sum(x.bytes for x in within if "hidden" in x.what)
    exact([states], [8 * n * h * (2 + 4)])
    assert "hybrid" not in head_routes(n, LLAMA["vocab_size"], h, ranks, nodes=1)
    by_eight = head_routes(n, LLAMA["vocab_size"], h, ranks)["hybrid"]
    assert by_eight.exchanges == route.exchanges
    assert "hybrid" not in head_routes(n, LLAMA["vocab_size"], h, ranks, nodes=nodes, replicas=2)


def test_the_head_of_llama_over_eight_ranks() -> None:
    """2.76 GB for the head, 0.71 GB for 4096 hidden states of each rank: figures of the page."""
    routes = head_routes(4096, ranks=8, **LLAMA)
    said = {name: f"{routes[name].received / 1e9:.2f}" for name in ("head", "hidden", "stream")}
    assert said == {"head": "2.76", "hidden": "0.71", "stream": "3.68"}
    again = head_routes(4096, ranks=8, module=True, **LLAMA)["head"]
    assert f"{again.received / 1e9:.2f}" == "3.68"
    kept = head_routes(4096, ranks=8, module=True, kept=True, **LLAMA)["head"]
    assert kept.exchanges == routes["head"].exchanges
    eighth = head_routes(4096, ranks=8, micro_batches=8, **LLAMA)["head"]
    exact([eighth.received], [7 * 128_256 // 8 * 4096 * (2 + 4 / 8)])


def test_nothing_is_sent_by_one_rank_and_no_rank_of_1024_is_beyond_the_plan() -> None:
    assert [x.exchanges for x in head_routes(64, 1000, 16, 1).values()] == [()] * 4
    routes = head_routes(4096, ranks=1024, nodes=128, **LLAMA)
    assert set(routes) == {"full logits", *PIECES}
    assert all(route.seconds > 0 and route.peak_bytes > 0 for route in routes.values())


# --- what follows ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(head=heads, way=ways)
@example({"tokens_per_rank": 1, "vocab_size": 1, "hidden_size": 1, "ranks": 1}, {"replicas": 2})
def test_a_rank_receives_its_part_of_what_is_whole(head, way):
    """(R - 1) / R of every tensor, twice of an all-reduce, a part of a window's calls; and
    collectives in chunks are no fewer bytes than all at once."""
    ranks, calls = head["ranks"], way.get("micro_batches", 1)
    for route in head_routes(**head, nodes=1, **way).values():
        want = sum(
            (2 if x.kind == "all_reduce" else 1)
            * x.bytes
            * (x.ranks - 1)
            / x.ranks
            / (calls if x.per_sync else 1)
            for x in route.exchanges
        )
        assert route.received == want
        assert {x.ranks for x in route.exchanges} <= {ranks, way.get("replicas", 1)}
        assert route.bytes() == sum(route.bytes(kind) for kind in route.counts())
        assert route.seconds >= route.overlapped_seconds >= route.compute_seconds * (1 - 1e-12)
        assert route.num_chunks == -(-head["tokens_per_rank"] // route.chunk_tokens)


@settings(max_examples=100, deadline=None)
@given(head=heads, way=ways)
def test_no_route_of_ours_holds_the_head_but_one(head, way):
    """V x H stays away: what grows with V is a part of R of it, a chunk and a block."""
    routes = head_routes(**(head | {"ranks": 64, "tokens_per_rank": 8}), **way, block_rows=8)
    width, low = head["hidden_size"], way.get("low_rank", 0)
    entries = -(-head["vocab_size"] // 64) * max(width, low) + low * width
    for name in ("hidden", "stream"):
        for parts in routes[name].moments.values() if name in routes else ():
            assert parts.get(D_WEIGHT, 0) <= entries * 8
    whole = head["vocab_size"] * width
    assert routes["head"].moments["forward"]["gathered head"] >= whole * 2


@settings(max_examples=150, deadline=None)
@given(head=heads, way=ways)
def test_the_choice_is_the_fastest_and_nothing_but_sizes(head, way):
    chosen = choose_gather(**head, **way)
    routes = head_routes(**head, **way)
    there = [x for x in ("head", "hidden", "stream") if x in routes and head["ranks"] > 1]
    two = [x for x in there if x != "stream"] or ["head"]
    assert chosen == min(two, key=lambda x: routes[x].overlapped_seconds)
    assert chosen == choose_gather(**head, **way)
    alone = choose_gather(**head, **way, overlapped=False)
    assert alone == min(two, key=lambda x: routes[x].seconds)
    smallest = min(there or ["head"], key=lambda x: routes[x].peak_bytes)
    assert choose_gather(**head, **way, memory=1) == smallest
    fastest = min(there or ["head"], key=lambda x: routes[x].overlapped_seconds)
    assert choose_gather(**head, **way, memory=1 << 60) == fastest


def test_memory_decides_for_a_route_that_is_slower() -> None:
    """On 1024 ranks the head takes 5 GiB, and hidden states seconds of the network."""
    sizes = {"tokens_per_rank": 16_384, "ranks": 1024, **LLAMA}
    assert choose_gather(**sizes) == "head"
    assert choose_gather(**sizes, memory=2 << 30) == "stream"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "platform", "recompute"),
    list(itertools.product(("float32", "bfloat16"), ("cpu", "gpu"), (False, True))),
)
def test_memory_of_one_rank_is_that_of_the_call(dtype: str, platform: str, recompute: bool) -> None:
    """D5: nothing gathered, nothing reduced: `peak_bytes`."""
    route = head_routes(
        4096,
        32_003,
        512,
        1,
        dtype=dtype,
        head_dtype=dtype,
        recompute=recompute,
        max_chunk_bytes=64 << 20,
        platform=platform,
    )["head"]
    plan = plan_chunks(4096, 32_003, 512, dtype=dtype, max_chunk_bytes=64 << 20)
    want = peak_bytes(plan, backend="torch", dtype=dtype, platform=platform, recompute=recompute)
    exact([route.peak_bytes], [want])


def test_what_a_peak_is_made_of_adds_up() -> None:
    route = head_routes(16_384, ranks=64, nodes=8, **LLAMA)["hidden"]
    assert sum(route.peak.values()) == route.peak_bytes
    assert route.peak_bytes == max(sum(parts.values()) for parts in route.moments.values())
    assert route.peak[D_HIDDEN] == 16_384 * 4096 * 4
    assert 0 not in route.peak.values()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens_per_rank": 0}, "`tokens_per_rank` must be an integer >= 1; got 0"),
        ({"vocab_size": 10.0}, "`vocab_size` must be an integer >= 1; got 10.0"),
        ({"hidden_size": True}, "`hidden_size` must be an integer >= 1; got True"),
        ({"ranks": -8}, "`ranks` must be an integer >= 1; got -8"),
        ({"nodes": 3}, "`ranks` must be spread over `nodes` evenly; got 8 ranks on 3 nodes"),
        ({"replicas": 0}, "`replicas` must be an integer >= 1"),
        ({"micro_batches": None}, "`micro_batches` must be an integer >= 1; got None"),
        ({"dtype": "bf16"}, "`dtype` must be one of 'float16'"),
        ({"head_dtype": "int8"}, "`head_dtype` must be one of"),
        ({"reduce_dtype": None}, "`reduce_dtype` must be one of"),
        ({"param_dtype": "fp32"}, "`param_dtype` must be one of"),
        ({"options": "softcap"}, "`options` must be a tuple of names; got the string 'softcap'"),
        ({"options": ("softcaps",)}, "`options` must be one of 'softcap', 'temperature'"),
        ({"platform": "tpu"}, "`platform` must be one of 'gpu', 'cpu'"),
        ({"max_chunk_bytes": 0}, "`max_chunk_bytes` must be a positive integer"),
        ({"chunk_tokens": 0}, "`chunk_tokens` must be an integer >= 1"),
        ({"block_rows": 1.5}, "`block_rows` must be an integer >= 1; got 1.5"),
        ({"rates": Rates(gemm=0)}, "`rates.gemm` must be a finite number >= 1; got 0"),
        ({"rates": Rates(latency=-1)}, "`rates.latency` must be a finite number >= 0; got -1"),
        ({"rates": Rates(step=-1)}, "`rates.step` must be a finite number >= 0; got -1"),
    ],
)
def test_what_no_head_is(wrong: dict[str, object], message: str) -> None:
    """D12: the argument, what was expected, what came."""
    with pytest.raises(ValueError, match=message):
        head_routes(**({"tokens_per_rank": 64, "ranks": 8} | LLAMA | wrong))


@pytest.mark.parametrize("flag", ["recompute", "module", "kept", "kernels"])
def test_a_flag_is_true_or_false(flag: str) -> None:
    with pytest.raises(TypeError, match=f"`{flag}` must be True or False; got 1"):
        head_routes(64, ranks=8, **LLAMA, **{flag: 1})


def test_memory_of_a_choice() -> None:
    with pytest.raises(ValueError, match="`memory` must be None or an integer >= 1, bytes; got 0"):
        choose_gather(64, ranks=8, **LLAMA, memory=0)


def test_options_of_a_choice_are_those_of_the_routes() -> None:
    """A name that is new in one of them is new in the other."""
    known = inspect.signature(head_routes).parameters
    named = [x.name for x in known.values() if x.kind is inspect.Parameter.KEYWORD_ONLY]
    assert list(RouteOptions.__annotations__) == named
