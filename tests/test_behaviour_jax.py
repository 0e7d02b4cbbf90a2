"""What JAX does around the operator: transformations, tracing, buffers, the compiled program.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from xentlib.call import Arguments
from xentlib.contract import check, failures
from xentlib.parity.backends import run
from xentlib.parity.problem import Case, Problem, build
from xentlib.plan import plan_chunks
from xentlib.ulp import bits_unequal

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

from xentlib.interop import to_jax  # noqa: E402
from xentlib.jax import (  # noqa: E402
    chunked_logprobs,
    chunked_nll,
    vocab_parallel_logprobs,
)

OUTPUTS = ("logprobs", "entropy", "lse", "correct")
N, H, V = 221, 24, 157
CASE = Case("behaviour", N, H, V, ignored=0.2, confident=0.3)
BUDGET = 64 * V * 4  # 64 rows a chunk: four chunks, the last one ragged


def arrays(case: Case = CASE, seed: int = 3) -> tuple[tuple, Problem]:
    """(hidden, weight, bias), labels, and the problem they came from."""
    p = build(case, seed)
    leaves = tuple(to_jax(x, copy=True) for x in (p.hidden, p.weight, p.bias))
    return (*leaves, to_jax(p.labels, copy=True)), p


def nll(hidden, weight, bias, labels, **options):
    options = {"max_chunk_bytes": BUDGET} | options
    return chunked_nll(hidden, weight, labels, bias=bias, **options)


def scaled(upstream, *leaves, **options):
    """The loss times a random number: the upstream gradient is never 1."""
    return jnp.float32(upstream) * nll(*leaves, **options).loss


def same(a, b) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and bits_unequal(np.asarray(x), np.asarray(y)) == 0
        for x, y in zip(a, b, strict=True)
    )


def held_to_contract(p: Problem, got: dict) -> None:
    """A5 and A6 for gradients by name."""
    o = p.reference()
    found = []
    for name, row in (("hidden", "A5"), ("weight", "A6"), ("bias", "A6")):
        if name in got:
            oracle, bound = getattr(o, f"d_{name}"), getattr(o, f"bound_{name}")
            found += check(row, np.asarray(got[name]), oracle, bound, quantity=name)
    assert found
    assert failures(found) == []


NAMES = ("hidden", "weight", "bias")


# ---------------------------------------------------------------------------------
# Transformations


def test_jit_grad_and_value_and_grad():
    """A5, A6, A11, M19: each road to the gradients gives the same bits."""
    leaves, p = arrays()
    loss = partial(scaled, p.upstream)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    value, got = jax.value_and_grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, got)
    assert same(value, loss(*leaves))
    assert same(want, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*leaves))
    held_to_contract(p, dict(zip(NAMES, want)))


def test_vmap_is_a_loop():
    """M19: a batch of problems with unequal valid tokens, head shared; A5 and A6."""
    problems = [build(Case(f"b{i}", N, H, V, ignored=i / 3), i) for i in range(4)]
    assert len({int(p.valid.sum()) for p in problems}) == 4
    weight, bias = problems[0].weight, problems[0].bias
    problems = [p.changed(weight=weight, bias=bias) for p in problems]
    upstream = jnp.asarray([p.upstream for p in problems], jnp.float32)
    batch = [jnp.stack([getattr(p, k) for p in problems]) for k in ("hidden", "labels")]

    def step(factor, hidden, labels):
        def loss(*leaves):
            out = nll(*leaves, labels, outputs=OUTPUTS)
            return factor * out.loss, out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
            hidden, jnp.asarray(weight), jnp.asarray(bias)
        )

    (values, outs), gradients = jax.vmap(step)(upstream, *batch)
    for i, p in enumerate(problems):
        o = p.reference()
        found = check("A2", outs.loss[i], o.loss, magnitude=o.loss_magnitude)
        assert failures(found) == []
        assert int(outs.num_tokens[i]) == o.num_tokens
        assert np.array_equal(np.asarray(outs.correct[i]), o.correct)
        if o.num_tokens:
            held_to_contract(p, {k: g[i] for k, g in zip(NAMES, gradients)})
        else:
            assert float(values[i]) == 0
            assert not any(np.asarray(g[i]).view(np.uint32).any() for g in gradients)  # A0: +0


def test_remat():
    """A11: the recomputed forward gives the same bits."""
    leaves, p = arrays()
    loss = partial(scaled, p.upstream)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))(*leaves))
    policy = jax.checkpoint_policies.nothing_saveable
    again = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2)))
    assert same(want, again(*leaves))


def micro_batches(remat: bool):
    """Gradients of four micro-batches in one `lax.scan`, and of their concatenation."""
    leaves, p = arrays(Case("scan", 64, H, V, ignored=0.3))
    hidden, weight, bias, labels = leaves
    window = jnp.float32(p.valid.sum())

    def total(hidden, weight, bias):
        def body(carry, batch):
            return carry + nll(batch[0], weight, bias, batch[1], denominator=window).loss, None

        body = jax.checkpoint(body) if remat else body
        batches = (hidden.reshape(4, 16, H), labels.reshape(4, 16))
        carry, _ = jax.lax.scan(body, jnp.float32(0), batches)
        return jnp.float32(p.upstream) * carry

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(hidden, weight, bias), p


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_scan_over_micro_batches(remat):
    """A12, M15: accumulation equals one batch, differentiated through the scan."""
    got, p = micro_batches(remat)
    o = p.reference()
    found = []
    for name, gradient in zip(NAMES, got):
        oracle, bound = getattr(o, f"d_{name}"), getattr(o, f"bound_{name}")
        found += check("A12", np.asarray(gradient), oracle, bound, quantity=name)
    assert failures(found) == []


def test_checkpointed_scan_keeps_the_bits():
    """A11: remat inside the scan changes nothing."""
    assert same(micro_batches(False)[0], micro_batches(True)[0])


def test_forward_mode_raises():
    """D12: what is not computed is refused; JAX says so for a custom_vjp."""
    leaves, _ = arrays()
    hidden, *rest = leaves
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: nll(h, *rest).loss, (hidden,), (hidden,))


def test_second_pull_is_the_same():
    """M10: a vjp may be pulled again, with another cotangent in between."""
    leaves, p = arrays()
    value, pull = jax.vjp(lambda *x: nll(*x, leaves[3]).loss, *leaves[:3])
    upstream = jnp.asarray(p.upstream, value.dtype)
    first = pull(upstream)
    pull(jnp.asarray(-1.7, value.dtype))
    assert same(first, pull(upstream))
    held_to_contract(p, dict(zip(NAMES, first)))


def test_only_the_loss_has_a_gradient():
    """D6: per-token outputs, counts and the z-loss part are constants."""
    leaves, _ = arrays()

    def rest(hidden):
        out = nll(hidden, *leaves[1:], outputs=OUTPUTS, z_loss=0.1)
        return 1.3 * (out.lse.sum() + out.entropy.sum() + out.z_loss + out.weight_sum)

    assert not np.asarray(jax.grad(rest)(leaves[0])).any()


FUNCTIONS = {
    "nll": lambda h, w, y: nll(h, w, None, y, outputs=OUTPUTS)[:8],
    "logprobs": lambda h, w, y: chunked_logprobs(h, w, y, entropy=True, max_chunk_bytes=BUDGET),
    "given": lambda z, _, y: vocab_parallel_logprobs(z, y, entropy=True, max_chunk_bytes=BUDGET),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exported_for_any_number_of_tokens(name):
    """A10: forward and backward of one exported program with symbolic [b, t] give the bits of each
    call by itself. Catches: a plan that needs N as a number, a chunk that N may not fill."""
    leaves, _ = arrays()
    x, weight = leaves[:2]
    x = x @ weight.T if name == "given" else x

    def step(x, labels):
        def total(x):
            out = FUNCTIONS[name](x, weight, labels)
            return sum(x.sum() for x in out if x is not None and x.dtype == jnp.float32), out

        d_x, out = jax.grad(total, has_aux=True)(x)
        return (d_x, *out[4 if name == "nll" else 0 :])  # A10 says nothing of a mean

    sizes = export.symbolic_shape("b, t")
    exported = export.export(jax.jit(step))(
        jax.ShapeDtypeStruct((*sizes, x.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct(sizes, jnp.int32),
    )
    for b, t in ((13, 17), (1, 3), (2, 32)):  # four chunks, a part of one, one
        given = x[: b * t].reshape(b, t, -1), leaves[3][: b * t].reshape(b, t)
        assert same(exported.call(*given), step(*given))


# ---------------------------------------------------------------------------------
# What is refused, and what cannot be


@pytest.mark.parametrize("bad", [-1, V, V + 5])
def test_label_out_of_range_under_jit(bad):
    """M11: NaN for that token and for what sums over it, nothing plausible; the other
    tokens keep their bits. Eager on CPU it raises."""
    leaves, p = arrays()
    labels = leaves[3].at[7].set(bad)
    with pytest.raises(ValueError, match=rf"must lie in \[0, {V}\).*got {bad}\."):
        nll(*leaves[:3], labels)
    call = jax.jit(partial(nll, outputs=OUTPUTS))
    good = call(*leaves[:3], leaves[3].at[7].set(0))
    out = call(*leaves[:3], labels)
    others = np.arange(N) != 7
    assert np.isnan(out.loss)
    for name in ("logprobs", "entropy", "lse"):
        want, got = np.asarray(getattr(good, name)), np.asarray(getattr(out, name))
        assert np.isnan(got[7]), name
        assert bits_unequal(want[others], got[others]) == 0
    gradients = jax.jit(jax.grad(partial(scaled, p.upstream), argnums=(0, 1)))(*leaves[:3], labels)
    assert np.isnan(gradients[0][7]).all()
    assert np.isnan(gradients[1]).any()


@pytest.mark.parametrize("name", ["token_weights", "temperature", "logit_scale", "denominator"])
def test_constants_are_not_differentiated(name):
    """D12: a gradient that is not computed is refused, with the way out."""
    leaves, _ = arrays()
    shape = () if name in ("logit_scale", "denominator") else (N,)

    def loss(value, stop):
        value = jax.lax.stop_gradient(value) if stop else value
        return 1.3 * nll(*leaves, **{name: value}).loss

    with pytest.raises(ValueError, match=rf"`{name}` must be a constant.*stop_gradient\({name}\)"):
        jax.grad(loss)(jnp.ones(shape), False)
    assert not np.asarray(jax.grad(loss)(jnp.ones(shape), True)).any()


def test_float64_needs_64_bit_types():
    """D12: JAX would narrow to float32 without a word; so it is refused."""
    leaves, p = arrays()
    with pytest.raises(ValueError, match=r"64-bit types.*jax\.enable_x64\(True\)"):
        nll(*leaves, compute_dtype="float64")
    with pytest.raises(ValueError, match="64-bit types"):
        nll(p.hidden.astype(np.float64), *leaves[1:])
    with jax.enable_x64(True):
        assert nll(*leaves, compute_dtype="float64").loss.dtype == jnp.float32
        assert nll(leaves[0].astype(jnp.float64), *leaves[1:]).loss.dtype == jnp.float64


def test_numpy_inputs():
    """D6: NumPy arrays come in as they are, same bits; they are not written to."""
    leaves, p = arrays()
    own = [p.hidden, p.weight, p.bias, p.labels]
    before = [x.copy() for x in own]
    want = nll(*leaves, outputs=OUTPUTS)
    assert same(want, nll(*own, outputs=OUTPUTS))
    loss = partial(scaled, p.upstream)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, jax.grad(loss, argnums=(0, 1, 2))(*own))
    assert all(bits_unequal(a, b) == 0 for a, b in zip(before, own))


def test_donated_buffers():
    """D6: donating hidden and weight to the step changes no bit of what it returns."""
    leaves, p = arrays()
    step = jax.grad(partial(scaled, p.upstream), argnums=(0, 1))
    want = jax.jit(step)(*leaves)
    donating = jax.jit(step, donate_argnums=(0, 1))
    got = donating(*[jnp.array(x, copy=True) for x in leaves])
    assert same(want, got)


def test_leading_dimensions_are_free():
    """D6: `[..., H]`; the same bits as the flat call."""
    (hidden, weight, bias, labels), _ = arrays(Case("leading", 60, H, V))
    flat = nll(hidden, weight, bias, labels, outputs=OUTPUTS)
    deep = nll(hidden.reshape(3, 4, 5, H), weight, bias, labels.reshape(3, 4, 5), outputs=OUTPUTS)
    assert {getattr(deep, name).shape for name in OUTPUTS} == {(3, 4, 5)}
    assert same(flat, jax.tree.map(lambda x: x.reshape(-1) if x.ndim else x, deep))


def test_runs_do_not_change_bits():
    """A11: run to run."""
    p = build(Case("runs", 257, 64, 1031, token_weights=True), 5)
    first, second = (run("jax", p, chunk_tokens=64) for _ in range(2))
    for name, want, got in zip(first._fields, first, second):
        assert failures(check("A11", got, want, quantity=name)) == []


# ---------------------------------------------------------------------------------
# The compiled program

BIG = {"tokens": 4096, "hidden": 64, "vocab": 2048}
CHUNK = 256


def abstract(dtype=jnp.float32, **sizes):
    sizes = BIG | sizes
    shape = jax.ShapeDtypeStruct
    return (
        shape((sizes["tokens"], sizes["hidden"]), dtype),
        shape((sizes["vocab"], sizes["hidden"]), dtype),
        shape((sizes["vocab"],), dtype),
        shape((sizes["tokens"],), jnp.int32),
    )


def compiled(argnums: tuple[int, ...], *, budget=CHUNK * BIG["vocab"] * 4, **options):
    def loss(*leaves):
        return jnp.float32(1.3) * nll(*leaves, max_chunk_bytes=budget, **options).loss

    step = jax.grad(loss, argnums=argnums) if argnums else loss
    return jax.jit(step).lower(*abstract()).compile()


def largest_buffer(text: str) -> int:
    """Entries of the largest array type in a program's text."""
    shapes = re.findall(r"\b(?:f64|f32|f16|bf16|s32|s64|pred|u8|u32)\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in dims.split(",")])) for dims in shapes)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "outputs": OUTPUTS}], ids=str
)
def test_memory_is_the_formula(options):
    """M16: no [N, V] buffer in the program; temporaries within the plan's terms."""
    tokens, width, vocab = BIG.values()
    program = compiled((0, 1, 2), **options)
    assert largest_buffer(program.as_text()) < tokens * vocab / 4
    temporary = program.memory_analysis().temp_size_in_bytes
    plan = plan_chunks(tokens, vocab, width, max_chunk_bytes=CHUNK * vocab * 4)
    # Logits, exp, target mask and softcap slope of a chunk, double buffered at worst by the loop.
    buffers = 6 * plan.chunk_bytes
    gradients = 2 * 4 * (vocab * width + tokens * width)
    assert temporary <= buffers + gradients + 4 * tokens * 32
    assert temporary < tokens * vocab * 4

    # Full logits: what the two assertions above do not let pass.
    def eager(hidden, weight, bias, labels):
        z = hidden @ weight.T + bias[None, :]
        picked = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return 1.3 * (jax.nn.logsumexp(z, 1) - picked).mean()

    full = jax.jit(jax.grad(eager, argnums=(0, 1, 2))).lower(*abstract()).compile()
    assert largest_buffer(full.as_text()) >= tokens * vocab
    assert full.memory_analysis().temp_size_in_bytes >= tokens * vocab * 4


# d bias is summed by two thin products beside the GEMMs (`column_sums`).
NEEDS = {
    "loss only": ((), 1),
    "everything": ((0, 1, 2), 3 + 2),
    "frozen head": ((0,), 2),
    "frozen trunk": ((1, 2), 2 + 2),
    "bias only": ((2,), 1 + 2),
}


@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name):
    """M18, D5: three GEMMs, two with one side frozen, one for the loss.

    Counted in the optimised program, under both names that XLA has for one on CPU.
    """
    argnums, expected = NEEDS[name]
    text = compiled(argnums).as_text()
    assert len(re.findall(r" dot\(|__onednn\$matmul", text)) == expected


def test_gradients_of_frozen_calls():
    """M18: what is not wanted changes nothing of what is: hidden and weight to the bit.

    XLA may fuse the sum of d bias another way in another program, so that one is held to A6.
    """
    leaves, p = arrays()
    loss = partial(scaled, p.upstream)
    full = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    for name, (argnums, _) in NEEDS.items():
        if argnums:
            got = jax.grad(loss, argnums=argnums)(*leaves)
            held_to_contract(p, {NAMES[i]: g for i, g in zip(argnums, got)})
            pairs = [(full[i], g) for i, g in zip(argnums, got) if NAMES[i] != "bias"]
            assert all(same(a, b) for a, b in pairs), name


def test_chunks_without_a_valid_token_cost_nothing():
    """D5: valid tokens are packed to the front and their number bounds the loop.

    The trip count is read by running the program with every loop interpreted in Python.
    """
    leaves, _ = arrays()
    trips = []
    original = jax.lax.fori_loop

    def counting(low, high, body, carry):
        trips.append(int(high) - int(low))
        return original(low, high, body, carry)

    from xentlib.jax import nll as module
    from xentlib.jax.call import bind, flat

    patch = pytest.MonkeyPatch()
    patch.setattr(module.lax, "fori_loop", counting)
    try:
        for valid in (0, 65):
            labels = jnp.where(jnp.arange(N) >= N - valid, 3, -100)  # the last ones, so far apart
            with jax.disable_jit():
                given = Arguments(*leaves[:2], labels, leaves[2], max_chunk_bytes=BUDGET)
                options, arrays_of_call, _ = bind(given)
                module.nll_forward(options, (True, True, True), *flat(arrays_of_call))
    finally:
        patch.undo()
    assert trips == [0, 2]  # all of them would be 4


def test_the_loop_of_the_program_is_bounded_by_a_value():
    """D5: a `while` whose bound is data, not a constant of the trace."""
    text = str(jax.make_jaxpr(partial(nll, max_chunk_bytes=BUDGET))(*arrays()[0]))
    assert "while[" in text
    assert "scan[" not in text


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_invalid_rows_reach_nothing(poison):
    """A0, M4: inf and NaN in rows that are not valid; +0 gradient, other bits the same."""
    leaves, p = arrays()
    hidden = jnp.where(jnp.asarray(p.valid)[:, None], leaves[0], jnp.float32(poison))
    loss = partial(scaled, p.upstream)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    want, got = step(*leaves), step(hidden, *leaves[1:])
    assert same(want, got)
    assert not np.asarray(got[1][0])[~p.valid].view(np.uint32).any()


# ---------------------------------------------------------------------------------
# Numbers that are arrays


def test_no_program_for_each_softcap_or_z_loss():
    """Arrays without dimensions, as schedules give them: one compilation for all values, the
    numbers' values within A2 and A5, and no gradient that is dropped."""
    leaves, p = arrays()
    programs = []

    def step(softcap, z_loss):
        programs.append(None)
        loss = partial(scaled, p.upstream, softcap=softcap, z_loss=z_loss)
        return jax.value_and_grad(loss, (0, 1, 2))(*leaves)

    compiled = jax.jit(step)
    for softcap, z_loss in ((5.0, 1e-3), (3.0, 0.0), (7.5, 1e-2)):
        loss, (d_hidden, d_weight, d_bias) = compiled(jnp.float32(softcap), jnp.float32(z_loss))
        changed = p.changed(options={"softcap": softcap, "z_loss": float(np.float32(z_loss))})
        o = changed.reference()
        scale = abs(p.upstream) * o.loss_magnitude
        assert not failures(check("A2", np.asarray(loss), o.loss * p.upstream, magnitude=scale))
        held_to_contract(changed, {"hidden": d_hidden, "weight": d_weight, "bias": d_bias})
    assert len(programs) == 1
    assert same(nll(*leaves, softcap=np.float32(5)), nll(*leaves, softcap=5.0))
    for name in ("softcap", "z_loss"):
        with pytest.raises(ValueError, match=f"`{name}` must be a constant; got an array that is"):
            jax.grad(lambda x, name=name: nll(*leaves, **{name: x}).loss)(jnp.float32(2.0))


def test_arrays_of_numbers_under_vmap_and_per_token_outputs():
    """A vector of softcaps is a batch of calls; `chunked_logprobs` takes one too."""
    leaves, _ = arrays()
    caps = jnp.array([3.0, 5.0], jnp.float32)
    many = jax.vmap(lambda cap: nll(*leaves, softcap=cap).loss)(caps)
    one = jnp.stack([nll(*leaves, softcap=float(cap)).loss for cap in caps])
    exact = np.asarray(one, np.float64)
    found = check("A2", np.asarray(many), exact, magnitude=exact)
    hidden, weight, bias, labels = leaves
    per_token = [
        chunked_logprobs(hidden, weight, labels, bias=bias, softcap=cap).logprobs
        for cap in (caps[0], 3.0)
    ]
    got, exact = (np.asarray(x, np.float64) for x in per_token)
    found += check("A2", got, exact, magnitude=np.maximum(np.abs(exact), 1.0))
    assert not failures(found)
