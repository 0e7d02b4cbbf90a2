"""How work is cut: `plan_chunks` is frozen integers that depend on the budget and on V alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xentlib import ChunkPlan, plan_chunks
from xentlib.plan import default_chunk_bytes, exchanges_per_chunk, gpu_time, pad_rows, peak_bytes
from xentlib.shards import shard_of

sizes = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(0, 100_000),
        "vocab_size": st.integers(1, 300_000),
        "hidden_size": st.integers(1, 20_000),
    }
)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
budgets = st.none() | st.integers(1, 1 << 34)


def make(size: dict[str, int], **options) -> ChunkPlan:
    return plan_chunks(size["num_tokens"], size["vocab_size"], size["hidden_size"], **options)


@settings(max_examples=300, deadline=None)
@given(size=sizes, dtype=dtypes, budget=budgets)
def test_bounds_tile_the_tokens(size, dtype, budget):
    """A0: [0, N) once, ascending, every chunk but the last one full."""
    plan = make(size, dtype=dtype, max_chunk_bytes=budget)
    bounds = list(plan.bounds()) if plan.num_chunks < 20_000 else []
    if not bounds:
        assert plan.num_chunks == 0 or plan.num_chunks >= 20_000
        return
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size["num_tokens"]
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    assert {stop - start for start, stop in bounds[:-1]} <= {plan.chunk_tokens}
    assert 0 < bounds[-1][1] - bounds[-1][0] <= plan.chunk_tokens
    assert len(bounds) == plan.num_chunks
    assert plan.num_chunks * plan.chunk_tokens >= size["num_tokens"]


@settings(max_examples=300, deadline=None)
@given(size=sizes, dtype=dtypes, budget=budgets)
def test_the_budget_is_respected(size, dtype, budget):
    """D5, M16: [T, V] fits the budget unless T is already the least, 8 rows."""
    plan = make(size, dtype=dtype, max_chunk_bytes=budget)
    limit = (128 << 20) if budget is None else budget
    assert plan.compute_itemsize == (8 if dtype == "float64" else 4)
    assert plan.chunk_bytes == plan.chunk_tokens * size["vocab_size"] * plan.compute_itemsize
    assert plan.chunk_bytes <= limit or plan.chunk_tokens == 8


@settings(max_examples=300, deadline=None)
@given(size=sizes, dtype=dtypes, budget=budgets, least=st.integers(1, 128))
def test_a_backend_s_least_rows_are_part_of_the_plan(size, dtype, budget, least):
    """D5: what a backend walks is what the plan says, its number of chunks too."""
    without = make(size, dtype=dtype, max_chunk_bytes=budget)
    plan = make(size, dtype=dtype, max_chunk_bytes=budget, least=least)
    assert plan.chunk_tokens == max(without.chunk_tokens, least)
    assert plan.num_chunks == -(-size["num_tokens"] // plan.chunk_tokens)


@settings(max_examples=300, deadline=None)
@given(size=sizes, budget=budgets)
def test_chunks_are_multiples_of_eight(size, budget):
    """A10: row counts whose GEMM rows keep their bits; whole tiles of 64 from 64 on."""
    plan = make(size, max_chunk_bytes=budget)
    assert plan.chunk_tokens % 8 == 0
    if plan.chunk_tokens > 64 and plan.num_chunks > 1:
        assert plan.chunk_tokens % 64 == 0


@settings(max_examples=300, deadline=None)
@given(size=sizes, other=st.integers(0, 100_000), budget=budgets)
def test_the_chunk_does_not_depend_on_the_tokens(size, other, budget):
    """D5, M25 (Unsloth): T comes from the budget and V; N only ends it early."""
    plan = make(size, max_chunk_bytes=budget)
    cut = make(size | {"num_tokens": 1 << 40}, max_chunk_bytes=budget).chunk_tokens
    for tokens in (size["num_tokens"], other):
        chosen = make(size | {"num_tokens": tokens}, max_chunk_bytes=budget).chunk_tokens
        assert chosen == min(cut, max(pad_rows(tokens), 8))
    assert plan.num_chunks <= 1 or plan.chunk_tokens == cut


@settings(max_examples=200, deadline=None)
@given(size=sizes, budget=st.integers(1, 1 << 30))
def test_a_larger_budget_never_cuts_finer(size, budget):
    """The chunk grows with the budget and holds all tokens when they fit, up to 8192."""
    small = make(size, max_chunk_bytes=budget)
    large = make(size, max_chunk_bytes=2 * budget)
    assert large.chunk_tokens >= small.chunk_tokens
    whole = max(pad_rows(size["num_tokens"]), 64) * size["vocab_size"] * 4 + 64 * 4
    assert make(size, max_chunk_bytes=2 * whole).num_chunks <= -(-size["num_tokens"] // 8192)


@settings(max_examples=200, deadline=None)
@given(size=sizes, budget=budgets, block=st.integers(1, 1 << 28))
def test_blocks_lie_inside_a_chunk(size, budget, block):
    """M16: elementwise scratch fits its bytes unless it is one row, within a chunk."""
    plan = make(size, max_chunk_bytes=budget)
    rows = plan.block_tokens(block)
    assert 1 <= rows <= plan.chunk_tokens
    assert rows == 1 or rows * size["vocab_size"] * plan.compute_itemsize <= block


def test_a_plan_is_frozen_and_equal_by_value():
    """D2: plans are data made once; a backend only loops over them."""
    plan = plan_chunks(1000, 501, 64, max_chunk_bytes=100_000)
    assert plan == plan_chunks(1000, 501, 64, max_chunk_bytes=100_000)
    assert hash(plan) == hash(plan_chunks(1000, 501, 64, max_chunk_bytes=100_000))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.chunk_tokens = 1
    assert (plan.chunk_tokens, plan.num_chunks, list(plan.bounds())[-1]) == (48, 21, (960, 1000))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 10, 4), {}, "`num_tokens` must be an integer >= 0; got -1"),
        ((8, 0, 4), {}, "`vocab_size` must be an integer >= 1; got 0"),
        ((8, 10, 0), {}, "`hidden_size` must be an integer >= 1; got 0"),
        ((8.0, 10, 4), {}, "`num_tokens` must be an integer >= 0; got 8.0"),
        ((8, 10, 4), {"max_chunk_bytes": 0}, "`max_chunk_bytes` must be a positive integer"),
        ((8, 10, 4), {"max_chunk_bytes": True}, "`max_chunk_bytes` must be a positive integer"),
        ((8, 10, 4), {"dtype": "int8"}, "`dtype` must be one of 'float16'"),
        ((8, 10, 4), {"compute_dtype": "bfloat16"}, "`compute_dtype` must be one of 'float32'"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, options, message):
    """D12: the argument, what was expected, what came."""
    with pytest.raises(ValueError, match=message):
        plan_chunks(*arguments, **options)


def test_when_shards_exchange_in_every_chunk():
    """Three GEMMs and two collectives a chunk where a chunk's GEMM is the dearer: never for one
    chunk, by the size of a chunk and not by their number."""
    small, large = ((8192, 16_000, hidden) for hidden in (16, 4096))
    assert not exchanges_per_chunk(plan_chunks(*small), "cpu")
    assert exchanges_per_chunk(plan_chunks(*large), "cpu")
    assert not exchanges_per_chunk(plan_chunks(*large), "cuda")  # 1.4e11 FLOP a chunk
    assert exchanges_per_chunk(plan_chunks(*large, max_chunk_bytes=1 << 28), "cuda")
    assert not exchanges_per_chunk(plan_chunks(*large, max_chunk_bytes=1 << 40), "cuda")


def test_shards_from_their_sizes():
    """Offsets are sums, not products; what lies beyond the vocabulary is padding."""
    assert [shard_of((3, 0, 4), rank).start for rank in range(3)] == [0, 3, 3]
    padded = [shard_of((4, 4, 4), rank, 7) for rank in range(3)]
    assert [(s.start, s.stop, s.padding) for s in padded] == [(0, 4, 0), (4, 7, 1), (7, 7, 4)]
    with pytest.raises(ValueError, match=r"must spread 13 classes over its ranks; got shards of"):
        shard_of((4, 4, 4), 0, 13)
    assert [shard_of((4, 4, 4), rank, 4).padding for rank in range(3)] == [0, 4, 4]


@pytest.mark.parametrize("tokens", [1, 63, 832, 833, 1024, 1665, 8192])
@pytest.mark.parametrize("budget", [1000, 1 << 20, 64 << 20])
def test_even_chunks_are_as_many_and_waste_little(tokens: int, budget: int) -> None:
    """D5: no more rows than a chunk may have, all tokens, and less than a tile more in each."""
    plan = plan_chunks(tokens, 18_992, 128, max_chunk_bytes=budget)
    rows = plan.even_tokens * plan.num_chunks
    assert plan.even_tokens <= plan.chunk_tokens
    assert tokens <= rows < tokens + 64 * plan.num_chunks


def test_even_chunks_of_a_known_case() -> None:
    """Two chunks of 832 rows, the second of which would be computed whole."""
    plan = plan_chunks(1024, 18_992, 128, max_chunk_bytes=64 << 20)
    assert (plan.chunk_tokens, plan.num_chunks, plan.even_tokens) == (832, 2, 512)


def test_a_default_chunk_is_512_rows_within_8_and_64_mib() -> None:
    """D5: on a CPU; larger chunks of a small vocabulary are new memory and nothing else."""
    rows = {vocab: plan_chunks(4096, vocab, 64).chunk_tokens for vocab in (1000, 4096, 32_768)}
    assert rows == {1000: 2048, 4096: 512, 32_768: 512}
    assert plan_chunks(4096, 128_000, 64).chunk_tokens == 128
    assert default_chunk_bytes("cpu") == default_chunk_bytes("cpu", row_bytes=1 << 20) == 64 << 20
    assert default_chunk_bytes("gpu", row_bytes=4) == 1 << 30


@pytest.mark.parametrize(
    ("memory", "vocab", "width", "expected"),
    [
        (80, 128_256, 2047, 2 << 30),
        (80, 128_256, 2048, 1 << 30),
        (80, 151_936, 4096, 2048 * 151_936 * 4),
        (80, 256_000, 2304, 2048 * 256_000 * 4),
        (80, 262_208, 5376, 2 << 30),
        (80, 0, 4096, 2 << 30),  # a shard
        (40, 128_256, 4096, 1 << 30),
        (24, 128_256, 4096, 512 << 20),
    ],
)
def test_a_default_chunk_of_a_wide_head_has_2048_rows(memory, vocab, width, expected) -> None:
    """D5: on large cards, within 1 and 2 GiB."""
    sizes = {"row_bytes": 4 * vocab, "hidden_size": width}
    found = default_chunk_bytes("cuda", memory=memory << 30, **sizes)
    assert found == expected
    assert default_chunk_bytes("tpu", memory=memory << 30, **sizes) == min(expected, 1 << 30)


@pytest.mark.parametrize(
    ("wrong", "more"),
    [
        ({"backend": "pytorch"}, {}),
        ({"platform": "tpu"}, {}),
        ({"kind": "kl"}, {}),
        ({"backend": "jax"}, {"kept": 4}),
        ({"platform": "gpu"}, {"ids": 4}),
        ({"platform": "gpu"}, {"backend": "jax", "teacher_size": 16}),
    ],
)
def test_memory_of_what_there_is_no_formula_for(wrong, more):
    """A name that is none of the two gave the other one's bytes."""
    (name,) = wrong
    plan = plan_chunks(64, 50, 8, teacher_size=more.pop("teacher_size", 0))
    with pytest.raises(ValueError, match=f"`{name}` must be one of"):
        peak_bytes(plan, **{"backend": "torch", **more, **wrong})


def test_a_teacher_s_logits_have_half_of_the_budget():
    whole = plan_chunks(999, 1000, 8, max_chunk_bytes=4 * 1000 * 256)
    half = plan_chunks(999, 1000, 8, max_chunk_bytes=4 * 1000 * 256, teacher_size=24)
    assert (whole.chunk_tokens, half.chunk_tokens) == (256, 128)
    with pytest.raises(ValueError, match="`teacher_size` must be an integer >= 0"):
        plan_chunks(999, 1000, 8, teacher_size=-1)


def test_time_is_what_a_device_has_taken():
    """Of the calls that an H100 was timed with, and the 2 ms that its host takes for a call alone.
    Catches: a product too many, bytes of another pass, the sum of d weight of one chunk."""
    file = Path(__file__).parents[2] / "docs" / "data" / "h100.json"
    heads = json.loads(file.read_text(encoding="utf-8"))["heads"]
    large = [row for row in heads if row["shape"][1] >= 1024]
    assert len(large) > 30
    for row in large:
        tokens, width, vocab = row["shape"]
        budget = row["chunk_tokens"] * vocab * 4
        plan = plan_chunks(tokens, vocab, width, dtype="bfloat16", max_chunk_bytes=budget)
        seconds = gpu_time(
            plan,
            gradient=row["kind"] != "loss",
            recompute=row["kind"].startswith("log"),
            softcap=row["head"].startswith("gemma"),
        )
        assert abs((1e3 * seconds + 2) / row["ms_best"] - 1) <= 0.09, row
        row["model"] = seconds
    of_llama = [x for x in large if x["shape"][0] == 32_768 and x["kind"] == "loss + gradient"]
    few, *_, many = sorted(of_llama, key=lambda x: -x["chunk_tokens"])
    more, measured = many["model"] / few["model"], many["ms_median"] / few["ms_median"]
    assert abs(more / measured - 1) <= 0.03
