"""A head with a low-rank part in JAX: values and gradients of A, B and the hidden states against
float64, under JAX's transformations, and the program that is compiled.

Shapes: N tokens, V vocabulary, H hidden width, R rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402

from helpers.hlo import products  # noqa: E402
from helpers.leaves_jax import same  # noqa: E402
from helpers.lowrank import (  # noqa: E402
    CASES,
    V,
    dense,
    held_to,
    hold,
    low_problem,
    oracle,
    rejected,
)
from helpers.lowrank_jax import CHUNK, NAMES, called, gradients, leaves_of  # noqa: E402
from xentlib.jax import LowRankHead, chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.jax.core import gradients as sums  # noqa: E402
from xentlib.jax.core import logits as chunked  # noqa: E402
from xentlib.jax.core import lora as part  # noqa: E402
from xentlib.tools.harness.device import on_jax  # noqa: E402
from xentlib.tools.harness.problems import Case, upstream_of  # noqa: E402

PLAIN = CASES["bias, confident"]
ROWS = {"bfloat16": ("A7", "bf16"), "float16": ("A16", "fp16")}
FUNCTIONS = pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    """A2, A3, A5, A6: values are those of the dense head in float64."""
    p = low_problem(CASES[name])
    out, got = gradients(p)
    whole, reference = dense(p).reference(), oracle(p)
    held_to("A2", out.loss, whole.loss, magnitude=whole.loss_magnitude)
    held_to("A3", out.lse, whole.lse, magnitude=np.fmax(np.abs(whole.lse), 4.0))
    hold(reference, got)
    if name == "no token":
        assert not any(x.view(np.uint32).any() for x in got.values())  # A0: +0
        return
    for key, x in got.items():
        for wrong in (0 * x, -x, x * 1.001, np.roll(x, 1, 0)):
            assert rejected(reference, {key: wrong}), key


@pytest.mark.parametrize("name", ["bias, confident", "options", "HV"])
def test_gradients_of_log_probabilities(name: str) -> None:
    """A5, A6: upstream gradients of all three outputs, and of a weight that trains too."""
    p = low_problem(CASES[name])
    for names in (NAMES, (*NAMES, "weight")):
        _, got = gradients(p, chunked_logprobs, names=names, entropy=True)
        hold(oracle(p, upstream_of(p.base, 5)), got)


def test_a_dropout_s_mask() -> None:
    """A5, A6: what the low-rank part does not see has no gradient through it."""
    p = low_problem(PLAIN, dropped=0.4)
    _, got = gradients(p)
    hold(oracle(p), got)
    assert rejected(oracle(p._replace(keep=None)), got)
    leading = jax.tree.map(lambda x: x.reshape(1, *x.shape), leaves_of(p)["hidden"])
    head = LowRankHead(*(leaves_of(p)[x] for x in ("weight", "a", "b")), p.scale, p.keep[None])
    labels = on_jax(p.base.labels)[None]
    deep = chunked_nll(leading, head, labels, bias=on_jax(p.base.bias), max_chunk_bytes=CHUNK)
    assert same(deep.loss, called(p, leaves_of(p)).loss)


@pytest.mark.parametrize(
    ("dtype", "adapter"),
    [
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("float16", "float16"),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.full),
        pytest.param("bfloat16", "float16", marks=pytest.mark.full),
        pytest.param("float16", "float32", marks=pytest.mark.full),
    ],
)
def test_sixteen_bits(dtype: str, adapter: str) -> None:
    """A7, A8, A16: adapters in any dtype, beside the head in another too; those in float32 are not
    rounded."""
    p = low_problem(Case("low 16", 149, 96, V, dtype=dtype), 16, adapter=adapter)
    out, got = gradients(p)
    whole, reference = dense(p).reference(), oracle(p, dz_dtype=dtype)
    held_to("A8", out.loss, whole.loss, magnitude=whole.loss_magnitude)
    for name, x in got.items():
        assert x.dtype.name == (dtype if name == "hidden" else adapter)
        metrics, rounded = None, x.dtype.name
        if rounded == "float32":  # not rounded at the end, as dz is before
            rounded, metrics = dtype, (f"{ROWS[dtype][1]} ULP unless cancelled",)
        hold(reference, {name: x}, ROWS[rounded][0], metrics)


@pytest.mark.optimized
@pytest.mark.parametrize("rank", [2, *(pytest.param(r, marks=pytest.mark.full) for r in (1, 8))])
@pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])
def test_chunks_do_not_show(rank: int, function: Any) -> None:
    """A10: per-token outputs and d hidden."""
    p, found = low_problem(replace(PLAIN, tokens=300), rank), []
    for chunk in (CHUNK, None):
        out, got = gradients(p, function, max_chunk_bytes=chunk, **entropy(function))
        found.append((out.lse, out.logprobs, got["hidden"]))
    for one, x in zip(*found, strict=True):
        held_to("A10", x, one)


def entropy(function: Any) -> dict[str, Any]:
    return {} if function is chunked_nll else {"entropy": True}


ROADS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "jitted remat": lambda f: jax.jit(jax.checkpoint(f)),
}


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dropped", "road"),
    [
        (chunked_nll, 0.0, "remat"),
        (chunked_nll, 0.0, "jitted remat"),
        (chunked_logprobs, 0.4, "jit"),
        (chunked_logprobs, 0.4, "jitted remat"),
        *(
            pytest.param(function, dropped, road, marks=pytest.mark.full)
            for function, dropped in ((chunked_nll, 0.4), (chunked_logprobs, 0.0))
            for road in ROADS
        ),
    ],
)
def test_each_road_to_the_gradients_gives_the_same_bits(
    function: Any, dropped: float, road: str
) -> None:
    """A11. Catches: u made again inside of the product that uses it."""
    p = low_problem(PLAIN, dropped=dropped)
    got = gradients(p, function, wrap=ROADS[road], **entropy(function))[1]
    assert same(got, eager(function, dropped))


@cache
def eager(function: Any, dropped: float) -> Any:
    return gradients(low_problem(PLAIN, dropped=dropped), function, **entropy(function))[1]


@pytest.mark.slow
@FUNCTIONS
def test_gradients_of_frozen_parts(function: Any) -> None:
    """M18: what is not wanted changes no bit of what is."""
    p = low_problem(PLAIN)
    full = gradients(p, function, names=(*NAMES, "weight"), **entropy(function))[1]
    for names in (("a",), ("b",), ("hidden",), ("a", "b"), ("weight", "b")):
        got = gradients(p, function, names=names, **entropy(function))[1]
        assert set(got) == set(names)
        assert all(same(x, full[name]) for name, x in got.items()), names


@pytest.mark.slow
def test_vmap_is_a_loop() -> None:
    """A5, A6: a batch of adapters of one frozen head, with scales of their own."""
    problems = [low_problem(replace(PLAIN, ignored=k / 3), seed=3 + k) for k in range(3)]
    base = problems[0].base
    problems = [
        p._replace(scale=0.5 + k, base=p.base.changed(weight=base.weight, bias=base.bias))
        for k, p in enumerate(problems)
    ]
    scales = jnp.asarray([p.scale for p in problems], jnp.float32)
    upstream = jnp.asarray([p.base.upstream for p in problems], jnp.float32)
    stacked = [jnp.stack([leaves_of(p)[name] for p in problems]) for name in NAMES]
    labels = jnp.stack([on_jax(p.base.labels) for p in problems])

    def loss(hidden: Any, a: Any, b: Any, scale: Any, labels: Any, upstream: Any) -> Any:
        head = LowRankHead(on_jax(base.weight), a, b, scale)
        out = chunked_nll(hidden, head, labels, bias=on_jax(base.bias), max_chunk_bytes=CHUNK)
        return upstream * out.loss

    found = jax.vmap(jax.grad(loss, (0, 1, 2)))(*stacked, scales, labels, upstream)
    for k, p in enumerate(problems):
        hold(oracle(p), {name: x[k] for name, x in zip(NAMES, found, strict=True)})


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_micro_batches(remat: bool) -> None:
    """A12, M15: accumulation equals one batch, differentiated through the scan."""
    p = low_problem(Case("low scan", 256, 24, V, bias=False, options={"denominator": 97.0}))
    leaves, labels = leaves_of(p), on_jax(p.base.labels)

    def loss(hidden: Any, a: Any, b: Any) -> Any:
        def body(carry: Any, batch: Any) -> tuple[Any, None]:
            head = LowRankHead(leaves["weight"], a, b, p.scale)
            return carry + chunked_nll(batch[0], head, batch[1], denominator=97.0).loss, None

        body = jax.checkpoint(body) if remat else body
        batches = (hidden.reshape(4, 64, -1), labels.reshape(4, 64))
        return p.base.upstream * jax.lax.scan(body, jnp.float32(0), batches)[0]

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*(leaves[name] for name in NAMES))
    hold(oracle(p), dict(zip(NAMES, found, strict=True)), "A12")


# --- the program ----------------------------------------------------------------------------------

BIG = (256, 512, 2048, 4)  # tokens, width, classes, rank


def compiled(function: Any, names: tuple[str, ...], *, merged: bool = False) -> Any:
    tokens, width, vocab, rank = BIG
    shapes = {"hidden": (tokens, width), "weight": (vocab, width)}
    shapes |= {"a": (rank, width), "b": (vocab, rank)}
    leaves = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}

    def loss(wanted: Any, rest: Any, labels: Any) -> Any:
        x = wanted | rest
        head: Any = LowRankHead(x["weight"], x["a"], x["b"], 0.7)
        if merged:
            head = x["weight"] + 0.7 * x["b"] @ x["a"]
        out = function(x["hidden"], head, labels, max_chunk_bytes=64 * vocab * 4)
        return 1.3 * (out.loss if function is chunked_nll else out.logprobs.sum())

    step = jax.grad(loss) if names else loss
    wanted = {name: leaves.pop(name) for name in names}
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return jax.jit(step).lower(wanted, leaves, labels).compile()


@pytest.mark.cpu
@FUNCTIONS
def test_nothing_is_as_large_as_the_head(function: Any) -> None:
    """M16: temporaries of forward and backward, and what they return; a merged weight is what it
    would find."""
    head = BIG[2] * BIG[1] * 4

    def bytes_of(program: Any) -> int:
        found = program.memory_analysis()
        return int(found.temp_size_in_bytes + found.output_size_in_bytes)

    assert bytes_of(compiled(function, NAMES)) < head
    assert bytes_of(compiled(function, NAMES, merged=True)) >= head
    assert bytes_of(compiled(function, (*NAMES, "weight"))) >= head


# Of the weight, and of the low-rank part: logits, u and u B.T; d hidden, r' and r' A; d A, d B.
NEEDS = {
    "loss only": ((), 1 + 2),
    "adapters": (("a", "b"), 1 + 2 + 1 + 1 + 1),
    "A": (("a",), 1 + 2 + 1 + 1),
    "B": (("b",), 1 + 2 + 1),
    "hidden": (("hidden",), 2 + 2 + 2),
    "a frozen head": (NAMES, 2 + 2 + 2 + 1 + 1),
    "everything": ((*NAMES, "weight"), 3 + 2 + 2 + 1 + 1),
}


@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name: str) -> None:
    """M18, D5: as many products as there are."""
    names, expected = NEEDS[name]
    text = compiled(chunked_nll, names).as_text()
    assert products(text) == expected


MUTANTS = {
    "B's gradient dropped": (sums, "to_b", lambda *a: 0.0, {"b"}),
    "A's gradient dropped": (sums, "to_a", lambda *a: 0.0, {"a"}),
    "d hidden without it": (sums, "from_hidden", lambda *a: 0.0, {"hidden"}),
    "logits without it": (chunked, "add_logits", lambda low, z, seen: z, {"hidden", "a", "b"}),
}


@pytest.fixture
def uncached() -> Any:
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(monkeypatch: Any, uncached: None, name: str) -> None:
    """A14: and no other gradient than those that are wrong."""
    where, method, wrong, expected = MUTANTS[name]
    p = low_problem(PLAIN)
    monkeypatch.setattr(where, method, wrong)
    _, got = gradients(p)
    assert {key for key, x in got.items() if rejected(oracle(p), {key: x})} == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_scale_that_is_forgotten_is_rejected(monkeypatch: Any, uncached: None, way: str) -> None:
    """A14."""
    p = low_problem(PLAIN)
    where, name = (chunked, "activations_of") if way == "forward" else (sums, "backprop_lora")
    right = getattr(where, name)
    wrong = lambda low, *given: right(low._replace(scale=jnp.float32(1)), *given)  # noqa: E731
    monkeypatch.setattr(where, name, wrong)
    _, got = gradients(p)
    rejects = {key for key, x in got.items() if rejected(oracle(p), {key: x})}
    assert rejects == ({"hidden", "a", "b"} if way == "forward" else {"hidden", "a"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_of_an_operand_are_the_operand(dtype: str) -> None:
    """What is multiplied with dz in 16 bits: float32 values, small ones of LoRA's B too, to the
    bit. Catches: one part, which has 8 or 11 of the 24 bits."""
    x = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32) * np.float32(1e-4)

    @jax.jit
    def of(x: Any) -> tuple[Any, Any, Any]:
        parts = part.parts_of(x, "float32", dtype)
        return (parts.array, *(parts.whole(p.astype(jnp.float32), 3) for p in (
            parts.array, parts.array[:, :3])))  # fmt: skip

    array, whole, alone = of(jnp.asarray(x))
    assert array.dtype == dtype
    held_to("A1", whole, x)
    assert not np.array_equal(np.asarray(alone), x)
