"""The compiled program of `chunked_nll` in JAX: its memory, its GEMMs, its loop, and how many there
are.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from helpers.held import hold_gradients
from xentlib.arguments import Arguments
from xentlib.contract import check, failures
from xentlib.plan import plan_chunks

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402

from helpers.hlo import entries, products  # noqa: E402
from helpers.leaves_jax import BUDGET, NAMES, OUTPUTS, N, arrays, same  # noqa: E402
from helpers.nll_jax import nll, scaled  # noqa: E402
from xentlib.jax import chunked_logprobs, chunked_nll  # noqa: E402

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


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "outputs": OUTPUTS}], ids=str
)
def test_memory_is_the_formula(options):
    """M16: no [N, V] buffer in the program; temporaries within the plan's terms."""
    tokens, width, vocab = BIG.values()
    program = compiled((0, 1, 2), **options)
    assert max(entries(program.as_text())) < tokens * vocab / 4
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
    assert max(entries(full.as_text())) >= tokens * vocab
    assert full.memory_analysis().temp_size_in_bytes >= tokens * vocab * 4


# d bias is summed by two thin products beside the GEMMs (`column_sums`).
NEEDS = {
    "loss only": ((), 1),
    "everything": ((0, 1, 2), 3 + 2),
    "frozen head": ((0,), 2),
    "frozen trunk": ((1, 2), 2 + 2),
    "bias only": ((2,), 1 + 2),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name):
    """M18, D5: three GEMMs, two with one side frozen, one for the loss, once optimised."""
    argnums, expected = NEEDS[name]
    text = compiled(argnums).as_text()
    assert products(text) == expected


@pytest.mark.slow
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
            hold_gradients(p.reference(), {NAMES[i]: g for i, g in zip(argnums, got)})
            pairs = [(full[i], g) for i, g in zip(argnums, got) if NAMES[i] != "bias"]
            assert all(same(a, b) for a, b in pairs), name


@pytest.mark.slow
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

    from xentlib.jax.binding import bind
    from xentlib.jax.core.call import flat
    from xentlib.jax.derivatives import Needs
    from xentlib.jax.losses import index as module

    patch = pytest.MonkeyPatch()
    patch.setattr(module.lax, "fori_loop", counting)
    try:
        for valid in (0, 65):
            labels = jnp.where(jnp.arange(N) >= N - valid, 3, -100)  # the last ones, so far apart
            with jax.disable_jit():
                given = Arguments(*leaves[:2], labels, leaves[2], max_chunk_bytes=BUDGET)
                options, arrays_of_call = bind(given)
                module.nll_forward(options, Needs(True, True, True), flat(arrays_of_call))
    finally:
        patch.undo()
    assert trips == [0, 2]  # all of them would be 4


def test_the_loop_of_the_program_is_bounded_by_a_value():
    """D5: a `while` whose bound is data, not a constant of the trace."""
    text = str(jax.make_jaxpr(partial(nll, max_chunk_bytes=BUDGET))(*arrays()[0]))
    assert "while[" in text
    assert "scan[" not in text


# --- numbers that are arrays ---------------------------------------------------------------------


@pytest.mark.slow
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
        hold_gradients(o, {"hidden": d_hidden, "weight": d_weight, "bias": d_bias})
    assert len(programs) == 1
    assert same(nll(*leaves, softcap=np.float32(5)), nll(*leaves, softcap=5.0))
    for name in ("softcap", "z_loss"):
        with pytest.raises(ValueError, match=f"`{name}` must be a constant; got an array that is"):
            jax.grad(lambda x, name=name: nll(*leaves, **{name: x}).loss)(jnp.float32(2.0))


@pytest.mark.slow
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


def test_a_loop_computes_few_rows_in_vain():
    """D5: 200 tokens in chunks of at most 192 are two of 128. Catches: a last chunk of 8 tokens
    that is computed as 192."""
    leaves = abstract(tokens=200, vocab=97, hidden=24)
    step = jax.jit(lambda *leaves: nll(*leaves, max_chunk_bytes=192 * 97 * 4).loss)
    text = step.lower(*leaves).as_text()
    # A head has its columns filled to a multiple of 64 on a CPU, of 8 on a GPU.
    rows = re.findall(r"stablehlo.dot_general.*-> tensor<(\d+)x(?:128|104)xf32>", text)
    assert set(rows) == {"128"}


def test_one_chunk_needs_no_loop():
    """D5: d weight is the product itself. A loop would add it to zeros, both in new memory: 76 MB
    of temporaries, not 9, at 64 tokens of 32,000 classes."""

    def program(tokens):
        step = jax.grad(lambda *leaves: nll(*leaves, max_chunk_bytes=64 * 97 * 4).loss, (0, 1))
        leaves = abstract(tokens=tokens, vocab=97, hidden=24)
        return jax.jit(step).lower(*leaves).as_text()

    assert "stablehlo.while" in program(65)
    assert "stablehlo.while" not in program(64)


@pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])
def test_no_leaf_is_converted_to_what_it_is(function, caplog):
    """Outside of `jit` a conversion is a program, to the same dtype too: a copy of the head in each
    step. Catches: `jnp.asarray` of what a gradient is taken for."""
    tokens, width, vocab = (7, 17, 29) if function is chunked_nll else (7, 17, 31)  # no test's
    leaves = [jnp.ones(shape) for shape in ((tokens, width), (vocab, width), (vocab,))]
    labels = jnp.arange(tokens)

    def loss(hidden, weight, bias):
        return sum(function(hidden, weight, labels, bias=bias)[:1]).sum()

    with jax.log_compiles():
        jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    compiled = [x.getMessage() for x in caplog.records if "Compiling" in x.getMessage()]
    assert any(f"[{vocab},{width}]" in x for x in compiled)
    assert not [x for x in compiled if "convert_element_type" in x and f"[{vocab}" in x]
