"""`chunked_logprobs` in JAX: against the oracle with another gradient for every token and output,
under JAX's transformations, and what its compiled program holds.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from helpers.measured import by_id
from xentlib import logprobs as spec
from xentlib.contract import check, failures, rho, rounded_fraction
from xentlib.parity.cases import CHUNK_CASES, OPTIONS, logit_sets
from xentlib.parity.problem import Case, Problem, build, logits_problem
from xentlib.reference import LogprobReference, logprobs_reference
from xentlib.ulp import bits_unequal

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.extend.core import jaxprs_in_params  # noqa: E402

from xentlib.interop import to_jax  # noqa: E402
from xentlib.jax import LogprobOutput, chunked_logprobs, chunked_nll  # noqa: E402

N, H, V = 221, 24, 157
CASE = Case("behaviour", N, H, V, ignored=0.2, confident=0.3)
BUDGET = 64 * V * 4  # 64 rows a chunk: four chunks, the last one ragged
NAMES = ("hidden", "weight", "bias")
ROWS = {"hidden": "A5", "weight": "A6", "bias": "A6"}
OURS = {name: value for name, value in OPTIONS.items() if name in ("softcap", "logit_scale")}


def random_upstream(p: Problem, seed: int = 1) -> tuple:
    """Gradients of logprobs, entropy and lse: another one for every token, never 1."""
    rng = np.random.default_rng([seed, 11])
    return tuple(rng.standard_normal((3, *p.labels.shape)).astype(np.float32))


def reference_of(p: Problem, upstream: tuple, **how) -> LogprobReference:
    given = zip(("d_logprobs", "d_entropy", "d_lse"), upstream)
    keywords = {name: g for name, g in given if g is not None}
    return logprobs_reference(
        p.hidden, p.weight, p.labels, bias=p.bias, where=p.where, **keywords, **how, **p.options
    )


def run(p: Problem, upstream: tuple, *, chunk: int | None = None, audit: bool = False) -> tuple:
    """Outputs and gradients by name; no entropy where it has no gradient."""
    options = dict(p.options)
    if chunk is not None:
        vocab = p.weight.shape[1 if options.get("weight_layout") == "HV" else 0]
        options["max_chunk_bytes"] = chunk * vocab * (8 if audit else 4)
    if audit:
        options["compute_dtype"] = "float64"
    with jax.enable_x64(audit):
        cross = {k: to_jax(x, copy=True) for k, x in options.items() if isinstance(x, np.ndarray)}
        labels = to_jax(p.labels, copy=True)
        where = None if p.where is None else to_jax(p.where, copy=True)
        leaves = [x if x is None else to_jax(x, copy=True) for x in (p.hidden, p.weight, p.bias)]

        def used(hidden, weight, bias):
            out = chunked_logprobs(
                hidden,
                weight,
                labels,
                bias=bias,
                where=where,
                entropy=upstream[1] is not None,
                **(options | cross),
            )
            return [x for x, g in zip(out, upstream) if g is not None], out

        values, pull, out = jax.vjp(used, *leaves, has_aux=True)
        grads = pull(
            [
                jnp.asarray(g, v.dtype)
                for v, g in zip(values, (g for g in upstream if g is not None))
            ]
        )
        found = {name: np.asarray(g) for name, g in zip(NAMES, grads) if g is not None}
        return jax.tree.map(np.asarray, out), found


def held_to_contract(p: Problem, upstream: tuple, got: dict, row: str | None = None) -> None:
    """A5 and A6, or A7, for gradients by name."""
    o = reference_of(p, upstream, dz_dtype="bfloat16" if row == "A7" else "float64")
    found = []
    for name, value in got.items():
        found += check(
            row or ROWS[name],
            value,
            getattr(o, f"d_{name}"),
            getattr(o, f"bound_{name}"),
            magnitude=getattr(o, f"magnitude_{name}"),
            quantity=name,
            case=p.text,
        )
    assert found
    assert failures(found) == []


def same(a, b) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and bits_unequal(np.asarray(x), np.asarray(y)) == 0
        for x, y in zip(a, b, strict=True)
    )


# ---------------------------------------------------------------------------------
# Against the oracle

CASES = (
    CASE,
    Case("sharp", 131, 63, 1001, std=6.0, confident=0.3),
    Case("options", 131, 48, 1001, options=OURS, where=True, token_temperature=True),
    Case("kernel-layout", 131, 48, 1001, std=3.0, layout="HV", options=OURS),
    Case("no-bias", 64, 32, 257, bias=False, ignored=0.0),
    Case("one-token", 1, 32, 257, ignored=0.0),
    Case("one-class", 64, 32, 1, ignored=0.0),
    Case("all-ignored", 64, 32, 257, ignored=1.0),
)


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_fp32_against_the_oracle(case):
    """A0, A5, A6."""
    p = build(case, 7)
    upstream = random_upstream(p)
    out, gradients = run(p, upstream, chunk=64)
    o = reference_of(p, upstream)
    held_to_contract(p, upstream, gradients)
    values = np.stack([out.logprobs, out.entropy, out.lse])
    assert values.dtype == np.float32
    exact = check("A0", out.correct, o.correct)
    exact += check("A0", values[:, ~p.valid], np.zeros_like(values[:, ~p.valid]))
    rows = gradients["hidden"][~p.valid]
    exact += check("A0", rows, np.zeros_like(rows))
    assert failures(exact) == []
    assert (out.logprobs <= 0).all()
    assert {name: g.dtype for name, g in gradients.items()} == {
        name: getattr(p, name).dtype for name in gradients
    }


@pytest.mark.parametrize("which", range(3), ids=["logprobs", "entropy", "lse"])
def test_each_output_has_a_gradient_of_its_own(which):
    """A5, A6. Catches: a term that only the sum with another one hides."""
    p = build(CASE, 4)
    upstream = tuple(g if i == which else None for i, g in enumerate(random_upstream(p)))
    held_to_contract(p, upstream, run(p, upstream, chunk=16)[1])


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=by_id)
def test_bf16_against_the_oracle(case):
    """A7. Catches: dz that XLA keeps in float32 for the GEMMs, or d weight summed in bf16."""
    p = build(replace(case, tokens=512, hidden=64, dtype="bfloat16"), 7)
    upstream = random_upstream(p)
    held_to_contract(p, upstream, run(p, upstream, chunk=64)[1], "A7")


@pytest.mark.parametrize(("size", "std"), [(2.0**-8, 1.0), (1.0, 1.0), (2.0**16, 0.05)])
def test_fp16(size, std):
    """p times a small gradient is subnormal in fp16, times a large one inf. Catches: dz rounded
    without its power of two, or returned with it."""
    p = build(replace(CASE, id="fp16", tokens=128, dtype="float16", std=std), 11)
    upstream = tuple(np.float32(size) * g for g in random_upstream(p))
    oracle = reference_of(p, upstream).d_hidden
    normal = np.abs(oracle) >= 2.0**-14
    assert normal.mean() > 0.5
    # dz and the result are rounded to fp16 once each: 2^-11 apiece, in units of u.
    got = run(p, upstream)[1]["hidden"]
    assert rho(got[normal], oracle[normal]) <= 2 * 2.0**-11 / 2.0**-24


def test_audit_mode():
    """Computed in float64 and rounded once: the oracle rounded to float32, but for ties."""
    p = build(replace(CASES[2], std=3.0), 3)
    upstream = random_upstream(p)
    out, gradients = run(p, upstream, chunk=64, audit=True)
    o = reference_of(p, upstream)
    for name in ("logprobs", "entropy", "lse"):
        assert getattr(out, name).dtype == np.float32
        assert rounded_fraction(getattr(out, name), getattr(o, name), "float32") >= 0.995, name
    for name, got in gradients.items():
        assert got.dtype == np.float32
        assert rounded_fraction(got, getattr(o, f"d_{name}"), "float32") >= 0.995, name


def test_values_are_those_of_chunked_nll():
    """The forward walks the same steps: bit for bit."""
    p = build(CASES[2], 5)
    options = {"where": jnp.asarray(p.where), **p.options}
    options["temperature"] = jnp.asarray(options["temperature"])
    call = (p.hidden, p.weight, p.labels)
    ours = chunked_logprobs(*call, bias=p.bias, entropy=True, **options)
    theirs = chunked_nll(*call, bias=p.bias, outputs=LogprobOutput._fields, **options)
    for name in LogprobOutput._fields:
        assert same(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("item", logit_sets(7), ids=lambda item: item[0])
def test_given_logits(item):
    """A3, A4: also probabilities of 1 - 1e-30, where a log-probability is never above 0."""
    text, logits, labels = item
    p = logits_problem(logits, labels, text).changed(options={})
    upstream = (np.ones(len(labels), np.float32), None, None)
    out, gradients = run(p, upstream)
    o = reference_of(p, upstream)
    assert out.entropy is None
    assert (out.logprobs <= 0).all()
    peak, rows = logits.max(axis=1).astype(np.float64), np.arange(len(labels))
    found = check("A3", out.lse, o.lse, magnitude=np.maximum(np.abs(peak), o.lse - peak))
    found += check("A4", out.logprobs, o.logprobs)
    found += check("A4", gradients["weight"][labels, rows], o.d_weight[labels, rows])
    assert failures(found) == []


@pytest.mark.parametrize("case", CHUNK_CASES, ids=by_id)
def test_chunks_do_not_show(case):
    """A10. Catches: sums of products of per-token gradients formed inside the loop."""
    options = {name: value for name, value in case.options.items() if name in OURS}
    p = build(replace(case, options=options), 7)
    upstream = random_upstream(p)
    want, gradients = run(p, upstream)
    for chunk in (64, 200):  # a chunk has 64 rows at least
        out, got = run(p, upstream, chunk=chunk)
        assert same(want, out), chunk
        assert failures(check("A10", got["hidden"], gradients["hidden"])) == []


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 6e4])
@pytest.mark.parametrize(("valid", "dtype"), [(0, "float32"), (40, "float32"), (40, "float16")])
def test_what_is_masked_reaches_nothing(poison, valid, dtype):
    """A0, M4: hidden states, temperatures and upstream gradients of masked tokens. Under
    float16 the largest upstream gradient sets the power of two that dz carries."""
    clean = build(Case("masked", 64, H, V, ignored=0.0, token_temperature=True, dtype=dtype), 3)
    masked = np.arange(64) >= valid
    clean = clean.changed(labels=np.where(masked, -100, clean.labels).astype(np.int32))
    upstream = random_upstream(clean)
    want = run(clean, upstream, chunk=16)
    dirty = clean.changed(
        hidden=np.where(masked[:, None], clean.hidden.dtype.type(poison), clean.hidden),
        options={"temperature": np.where(masked, np.float32(0), clean.options["temperature"])},
    )
    above = np.float32(1e33) * np.float32(poison)
    got = run(dirty, tuple(np.where(masked, above, g) for g in upstream), chunk=16)
    assert same(want, got)
    assert not got[1]["hidden"][masked].view(np.uint8).any()
    if not valid:
        assert not any(g.view(np.uint8).any() for g in got[1].values())


def test_nothing_to_do():
    """A0: N = 0."""
    p = build(CASE, 0)
    p = p.changed(hidden=p.hidden[:0], labels=p.labels[:0])
    out, gradients = run(p, random_upstream(p))
    assert out.logprobs.shape == (0,)
    assert not any(g.view(np.uint32).any() for g in gradients.values())


def test_classes_at_minus_infinity():
    """Classes that a bias takes out have p = 0, a label among them too: nothing is NaN."""
    p = build(replace(CASE, id="minus-inf", ignored=0.0), 1)
    p.bias[100:] = -np.inf
    p = p.changed(labels=np.where(np.arange(N) == 5, 120, p.labels % 100).astype(np.int32))
    upstream = random_upstream(p)
    out, gradients = run(p, upstream, chunk=16)
    assert out.logprobs[5] == -np.inf
    assert np.isfinite(out.entropy).all()
    held_to_contract(p, upstream, gradients)
    assert not gradients["bias"][121:].any()


# ---------------------------------------------------------------------------------
# Transformations


def arrays(case: Case = CASE, seed: int = 3) -> tuple:
    p = build(case, seed)
    leaves = tuple(to_jax(x, copy=True) for x in (p.hidden, p.weight, p.bias))
    return (*leaves, to_jax(p.labels, copy=True)), p


def head(hidden, weight, bias, labels, **options) -> LogprobOutput:
    options = {"max_chunk_bytes": BUDGET, "entropy": True} | options
    return chunked_logprobs(hidden, weight, labels, bias=bias, **options)


def scaled(upstream, *leaves, **options):
    """A loss whose gradients of the outputs are the upstream ones."""
    out = head(*leaves, **options)
    values = (out.logprobs, out.entropy, out.lse)
    return sum((g * x).sum() for g, x in zip(upstream, values) if g is not None)


@pytest.mark.parametrize("budget", [BUDGET, None], ids=["chunks", "one chunk"])
def test_each_road_to_the_gradients_gives_the_same_bits(budget):
    """A5, A6, A11. Catches: a product and its sum in one program, which XLA may contract."""
    leaves, p = arrays()
    upstream = random_upstream(p)
    loss = partial(scaled, upstream, max_chunk_bytes=budget)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    value, got = jax.value_and_grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, got)
    assert same(value, loss(*leaves))
    assert same(want, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*leaves))
    held_to_contract(p, upstream, dict(zip(NAMES, want)))
    assert same(want, jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)))(*leaves))


def test_vmap_is_a_loop():
    """A batch of problems with unequal valid tokens, head shared; A5 and A6."""
    problems = [build(Case(f"b{i}", N, H, V, ignored=i / 3), i) for i in range(4)]
    weight, bias = problems[0].weight, problems[0].bias
    problems = [p.changed(weight=weight, bias=bias) for p in problems]
    ups = [random_upstream(p, i) for i, p in enumerate(problems)]

    def step(upstream, hidden, labels):
        loss = partial(scaled, upstream, labels=labels)
        return jax.grad(loss, argnums=(0, 1, 2))(hidden, jnp.asarray(weight), jnp.asarray(bias))

    upstream = tuple(jnp.stack([u[k] for u in ups]) for k in range(3))
    batch = [jnp.stack([getattr(p, k) for p in problems]) for k in ("hidden", "labels")]
    got = jax.vmap(step)(upstream, *batch)
    for i, p in enumerate(problems):
        assert p.valid.any() or not any(np.asarray(g[i]).view(np.uint32).any() for g in got)
        held_to_contract(p, ups[i], {k: np.asarray(g[i]) for k, g in zip(NAMES, got)})


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_scan_over_micro_batches(remat):
    """A12: four micro-batches in one `lax.scan` are one batch."""
    (hidden, weight, bias, labels), p = arrays(Case("scan", 64, H, V, ignored=0.3))
    upstream = random_upstream(p)

    def total(hidden, weight, bias):
        def body(carry, batch):
            return carry + scaled(batch[2:], batch[0], weight, bias, batch[1]), None

        body = jax.checkpoint(body) if remat else body
        batches = (hidden.reshape(4, 16, H), *(x.reshape(4, 16) for x in (labels, *upstream)))
        return jax.lax.scan(body, jnp.float32(0), batches)[0]

    got = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(hidden, weight, bias)
    o, found = reference_of(p, upstream), []
    for name, gradient in zip(NAMES, got):
        oracle, bound = getattr(o, f"d_{name}"), getattr(o, f"bound_{name}")
        found += check("A12", np.asarray(gradient), oracle, bound, quantity=name)
    assert failures(found) == []


def test_second_pull_is_the_same():
    """A vjp may be pulled again, with another cotangent in between."""
    leaves, p = arrays()
    out, pull = jax.vjp(lambda *x: head(*x, leaves[3])[:3], *leaves[:3])
    upstream = tuple(jnp.asarray(g) for g in random_upstream(p))
    first = pull(upstream)
    pull(tuple(-g for g in upstream))
    assert same(first, pull(upstream))
    assert len(out) == 3


def test_second_and_forward_derivatives_raise():
    """D12: what is not computed is refused."""
    (hidden, *rest), p = arrays()
    loss = partial(scaled, random_upstream(p))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: loss(h, *rest), (hidden,), (hidden,))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda h: jax.grad(loss)(h, *rest).sum())(hidden)


def test_leading_dimensions_and_dtypes():
    """`[..., H]`: the same bits as the flat call; a 16-bit head gives float32 all the same."""
    (hidden, weight, bias, labels), _ = arrays(Case("leading", 60, H, V))
    flat = head(hidden, weight, bias, labels)
    deep = head(hidden.reshape(3, 4, 5, H), weight, bias, labels.reshape(3, 4, 5))
    assert {x.shape for x in deep} == {(3, 4, 5)}
    assert same(flat, jax.tree.map(lambda x: x.reshape(-1), deep))
    low = head(*(x.astype(jnp.bfloat16) for x in (hidden, weight, bias)), labels)
    assert [str(x.dtype) for x in low] == ["float32"] * 3 + ["bool"]
    assert chunked_logprobs.__doc__ == spec.chunked_logprobs.__doc__


def test_a_policy_gradient_step():
    """What it is for: a clipped ratio and an entropy bonus, gradients from the loss itself."""
    leaves, p = arrays()
    rng = np.random.default_rng(0)
    advantage = jnp.asarray(rng.standard_normal(N), jnp.float32)
    old = head(*leaves).logprobs + jnp.asarray(0.2 * rng.standard_normal(N), jnp.float32)

    def objective(logprobs, entropy):
        ratio = jnp.exp(logprobs - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return -(surrogate + 0.01 * entropy).mean()

    def loss(*x):
        out = head(*x)
        return objective(out.logprobs, out.entropy)

    got = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    out = head(*leaves)
    d_logprobs, d_entropy = jax.grad(objective, argnums=(0, 1))(out.logprobs, out.entropy)
    held_to_contract(p, (d_logprobs, d_entropy, None), dict(zip(NAMES, map(np.asarray, got))))


# ---------------------------------------------------------------------------------
# What is refused, and what cannot be


@pytest.mark.parametrize("bad", [-1, V, V + 5])
def test_label_out_of_range_under_jit(bad):
    """NaN for that token's outputs and gradient, with a gradient of 0 too; the others keep their
    bits. Eager on CPU it raises."""
    leaves, p = arrays()
    labels = leaves[3].at[7].set(bad)
    with pytest.raises(ValueError, match=rf"must lie in \[0, {V}\).*got {bad}\."):
        head(*leaves[:3], labels)
    call = jax.jit(head)
    good, out = call(*leaves[:3], leaves[3].at[7].set(0)), call(*leaves[:3], labels)
    others = np.arange(N) != 7
    for name in ("logprobs", "entropy", "lse"):
        want, got = np.asarray(getattr(good, name)), np.asarray(getattr(out, name))
        assert np.isnan(got[7]), name
        assert bits_unequal(want[others], got[others]) == 0
    assert not out.correct[7]
    step = jax.jit(jax.grad(scaled, argnums=(1, 2)))
    for factor in (np.float32(1), (others | (np.arange(N) > N)).astype(np.float32)):
        upstream = tuple(factor * g for g in random_upstream(p))
        d_hidden, d_weight = step(upstream, *leaves[:3], labels)
        assert np.isnan(d_hidden[7]).all()
        assert np.isfinite(np.asarray(d_hidden)[others]).all()
        assert np.isnan(d_weight).any()


@pytest.mark.parametrize("name", ["temperature", "logit_scale"])
def test_constants_are_not_differentiated(name):
    """D12: a gradient that is not computed is refused, with the way out."""
    leaves, p = arrays()
    upstream = random_upstream(p)

    def loss(value, stop):
        value = jax.lax.stop_gradient(value) if stop else value
        return scaled(upstream, *leaves, **{name: value})

    value = jnp.ones(() if name == "logit_scale" else (N,))
    with pytest.raises(ValueError, match=rf"`{name}` must be a constant.*stop_gradient\({name}\)"):
        jax.grad(loss)(value, False)
    assert not np.asarray(jax.grad(loss)(value, True)).any()


def test_float64_needs_64_bit_types():
    """D12: JAX would narrow to float32 without a word; so it is refused."""
    leaves, _ = arrays()
    with pytest.raises(ValueError, match=r"64-bit types.*jax\.enable_x64\(True\)"):
        head(*leaves, compute_dtype="float64")


# ---------------------------------------------------------------------------------
# The compiled program

BIG = {"tokens": 2048, "hidden": 64, "vocab": 2048}


def program(argnums: tuple[int, ...], *, use=("logprobs", "entropy", "lse"), **options):
    """Lowered: a loss of the named outputs, or its gradient."""
    n, h, v = BIG.values()
    shape = jax.ShapeDtypeStruct
    inputs = [shape(s, "float32") for s in ((n, h), (v, h), (v,))] + [shape((n,), "int32")]

    def loss(*leaves):
        out = head(*leaves, max_chunk_bytes=256 * v * 4, **options)
        return sum(1.3 * (getattr(out, name) ** 2).sum() for name in use)

    return jax.jit(jax.grad(loss, argnums=argnums) if argnums else loss).trace(*inputs)


# d bias is summed by two thin products beside the GEMMs (`column_sums`).
NEEDS = {
    "outputs only": ((), 1),
    "everything": ((0, 1, 2), 4 + 2),
    "frozen head": ((0,), 3),
    "frozen trunk": ((1, 2), 3 + 2),
    "bias only": ((2,), 2 + 2),
}


def dots(traced) -> int:
    """GEMMs of the optimised program, under both names that XLA has for one on CPU."""
    return len(re.findall(r" dot\(|__onednn\$matmul", traced.lower().compile().as_text()))


@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name):
    """Four GEMMs, three with one side frozen, one for the outputs; in the trace too, where no
    compiler has taken out what is not used."""
    argnums, expected = NEEDS[name]
    traced = program(argnums)
    assert primitives(traced.jaxpr.jaxpr, "dot_general") == expected
    assert dots(traced) == expected


def test_gradients_of_frozen_calls():
    """What is not wanted changes no bit of what is, and one function may be asked for both."""
    leaves, p = arrays()
    loss = jax.jit(partial(scaled, random_upstream(p)))
    full = jax.grad(loss, argnums=(0, 1))(*leaves)
    for argnum in (0, 1):
        assert same(full[argnum], jax.grad(loss, argnums=argnum)(*leaves))
    assert same(full, jax.grad(loss, argnums=(0, 1))(*leaves))


def test_no_gradient_no_backward():
    """A loss of `correct` alone, or of outputs cut off, has the GEMM of its outputs and no more."""
    leaves, _ = arrays()

    def loss(hidden):
        out = head(hidden, *leaves[1:])
        kept = out.correct.astype(jnp.float32) + jax.lax.stop_gradient(out.lse)
        return 1.3 * (kept.sum() + hidden.sum())

    assert np.array_equal(jax.grad(loss)(leaves[0]), np.full((N, H), np.float32(1.3)))
    traced = jax.jit(jax.grad(loss)).trace(leaves[0])
    assert primitives(traced.jaxpr.jaxpr, "dot_general") == 1
    assert dots(traced) == 0
    out, pull = jax.vjp(lambda h: head(h, *leaves[1:]).correct, leaves[0])
    backward = jax.make_jaxpr(pull)(np.zeros(out.shape, jax.dtypes.float0))
    assert primitives(backward.jaxpr, "dot_general") == 0


def primitives(jaxpr, name: str) -> int:
    """How often a primitive stands in a jaxpr, those inside others included."""
    return sum(
        (eqn.primitive.name == name)
        + sum(primitives(sub, name) for sub in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def test_entropy_that_is_not_asked_for_costs_nothing():
    """One reduction more in the forward with it; in the backward one maximum more with log p, and
    none where the entropy is an output without a gradient."""
    call = {"use": ("logprobs", "lse")}

    def count(name, argnums, **options):
        return primitives(program(argnums, **options).jaxpr.jaxpr, name)

    without, asked = (count("reduce_sum", (), **call, entropy=e) for e in (False, True))
    assert asked == without + 1
    without, unused, used = (
        count("max", (0,), **how)
        for how in ({**call, "entropy": False}, {**call, "entropy": True}, {})
    )
    assert without < unused < used
    leaves, _ = arrays()
    assert head(*leaves, entropy=False).entropy is None


@pytest.mark.cpu
def test_memory_is_that_of_chunks():
    """No [N, V] buffer in the program of the gradients."""
    compiled = program((0, 1, 2)).lower().compile()
    text = compiled.as_text()
    shapes = re.findall(r"\b(?:f64|f32|f16|bf16|s32|s64|pred|u8|u32)\[([\d,]+)\]", text)
    largest = max(int(np.prod([int(n) for n in dims.split(",")])) for dims in shapes)
    n, h, v = BIG.values()
    assert largest < n * v / 4
    # Logits, p and dz of a chunk, the target's mask; both gradients twice over.
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * (4 * 256 * v + 2 * h * (n + v))
