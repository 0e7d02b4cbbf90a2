"""Hidden states that travel, in JAX: what the programs send and hold, Flax's modules, and what is
refused.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.budgets import check_budget
from xentlib.contract import check, failures
from xentlib.plan import sum_rows
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.problems import Case, build

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.heads_jax import ONE, OPTIONS, TWO, inputs_of, on, run_step  # noqa: E402
from helpers.hlo import Collective, collectives, entries  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import KINDS, hold_shards, value  # noqa: E402
from xentlib.jax import LinenNLLHead, NLLHead, chunked_nll, count_collectives  # noqa: E402


@pytest.mark.parametrize("chunks", [1, 4])
@KINDS
def test_the_budget_holds_whatever_is_valid(kind, chunks):
    """A15, A0: tokens on one device alone, on none and on all: the same program, the same
    collectives. Catches: a loop that a device leaves before the others, which hangs."""
    tokens = 4 * 16 * chunks
    case = replace(OPTIONS, options={}, tokens=tokens, ignored=0.0, where=False, hidden=8, vocab=32)
    p = build(replace(case, token_weights=False, token_temperature=False), 7)
    row, counts = np.arange(tokens), []
    for valid in (row < 0, row == 5, row >= 3 * tokens // 4, row >= 0):
        q = p.changed(labels=np.where(valid, p.labels, -100).astype(np.int32))
        inputs, options = inputs_of(q, kind, mesh_of(**ONE), "data", P("data", None), P("data"))
        options |= {"max_chunk_bytes": 64 * 8 * 4, "gather": "hidden"}
        body = partial(value, kind, None, options)
        got, count = run_step(jax.value_and_grad(body, has_aux=True), inputs)
        counts.append(count.counts())
        if valid.any():
            hold_shards(q.changed(text=f"{valid.sum()} of {tokens}"), kind, got)
        else:
            assert not any(got[name].view(np.uint32).any() for name in GRADIENTS)
            assert kind != "nll" or got["loss"] == 0
    budget = "JAX, hidden route" + (", recompute" if kind == "logprobs" else "")
    assert not failures(check_budget(budget, [{}] * 4, counts, rounds=1))


TOKENS, WIDTH, VOCAB = 1024, 256, 2048  # of memory and counts


def program(kind, **options):
    return lowered(kind, **options).compile()


def lowered(kind, *, frozen=False, **options):
    """Of 256 tokens on each of four devices, which hold 512 rows, in chunks of 16 tokens."""
    mesh = mesh_of(**ONE)

    def abstract(spec, *shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    leaves = (
        abstract(P("data"), TOKENS, WIDTH), abstract(P("data", None), VOCAB, WIDTH),
        abstract(P("data"), VOCAB),
    )  # fmt: skip
    rest = {
        "labels": abstract(P("data"), TOKENS, dtype="int32"),
        "upstream": abstract(P()) if kind == "nll" else abstract(P(None, "data"), 3, TOKENS),
    }
    body = partial(value, kind, None, {"max_chunk_bytes": 16 * VOCAB * 4, **options})
    if frozen:
        hidden, *head = leaves
        step = jax.value_and_grad(lambda x, w, b, rest: body((x, w, b), rest), has_aux=True)
        return jax.jit(step).lower(hidden, *head, rest)
    return jax.jit(jax.value_and_grad(body, has_aux=True)).lower(leaves, rest)


@pytest.mark.parametrize("gather", ["head", "hidden"])
@KINDS
def test_a_frozen_head_costs_no_sum(kind, gather):
    """M18: no product and no array of its gradient, of this device's rows or of all, as the program
    is traced. Catches: a sum that is carried through the loop and thrown away."""
    rows = VOCAB // 4 if gather == "hidden" else VOCAB
    for frozen in (True, False):
        lines = lowered(kind, frozen=frozen, gather=gather).as_text().splitlines()
        made = [x for x in lines if x.endswith(f"-> tensor<{rows}x{WIDTH}xf32>")]
        assert any("dot_general" in x for x in made) != frozen
        zeros = f"tensor<{rows}x{WIDTH}xf32>"
        sums = [x for x in lines if "broadcast_in_dim" in x and x.endswith(zeros)]
        assert bool(sums) != frozen


NLL_ROWS, LOGPROB_ROWS = (sum_rows(4, entropy=True, more=x) for x in (4, 0))
LOOPED = [
    ("add", f"f32[{NLL_ROWS},64]", True), ("add", f"f32[{LOGPROB_ROWS},64]", True),
    ("all-gather", "f32[64,256]", True), ("maximum", "f32[64]", True),
    ("reduce-scatter", "f32[64,256]", True),
]  # fmt: skip


@pytest.mark.slow
@KINDS
def test_nothing_of_a_whole_head(kind):
    """A15, D7, M16: in the loop a gather of hidden states, a MAX, a SUM and a scatter of d hidden,
    each of a chunk's 64 tokens; no array of [V, H], of [N, V / 4] or of all hidden states; and less
    memory than one sum of d weight, which the gathered head does not keep."""
    compiled = program(kind, gather="hidden")
    sent = collectives(compiled.as_text())
    gather, largest, scatter = (Collective(*LOOPED[k]) for k in (2, 3, 4))
    packed = Collective(*LOOPED[0 if kind == "nll" else 1])
    looped = [gather, largest, scatter, packed] + ([gather] if kind == "logprobs" else [])
    assert [one for one in sent if one.looped] == sorted(looped)
    # Classes, and the factor or eight numbers of each token: 4 bytes each.
    outside = [one for one in sent if one.kind == "all-gather" and not one.looped]
    numbers = 1 if kind == "nll" else 8
    assert [sum(entries(x.types)) for x in outside] == [TOKENS * numbers, TOKENS]
    assert not [x for x in sent if x.kind != "all-gather" and not x.looped and "2048" in x.types]
    assert max(entries(compiled.as_text())) == VOCAB // 4 * WIDTH
    whole = 4 * VOCAB * WIDTH
    assert memory(compiled) < whole < memory(program(kind)) - whole


def memory(compiled):
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


# --- Flax -----------------------------------------------------------------------------------------

N, H, V = 220, 23, 156
PROBLEM = build(Case("module", N, H, V, layout="HV", confident=0.3), 3)
# axes, the kernel's annotation, the bias's, vocab_parallel, classes
MESHES = {
    "rows": (ONE, (None, "data"), (None,), None, V),
    "padded": (ONE, (None, "data"), ("data",), PaddedVocab("data", V - 3), V - 3),
    "vocabulary parallel": (TWO, (None, ("tp", "data")), ("tp",), PaddedVocab("tp", V - 3), V - 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "api"), [("rows", "linen"), *((name, "nnx") for name in MESHES)])
def test_annotated_heads(name, api):
    """A2, A5, A6, A15: a head under Auto axes, gradients in the annotated places. Catches: padding
    that counts, an option that the module drops."""
    axes, kernel, bias, parallel, classes = MESHES[name]
    mesh = mesh_of(AxisType.Auto, **axes)
    labels = np.where(PROBLEM.labels >= classes, 0, PROBLEM.labels).astype(np.int32)
    p = PROBLEM.changed(labels=labels, weight=PROBLEM.weight[:, :classes])
    p = p.changed(bias=p.bias[:classes])
    told = {"tokens": "data", "vocab_parallel": parallel}
    options = {"gather": "hidden", "max_chunk_bytes": 64 * V}
    place = partial(on, mesh)
    params = {"kernel": place(P(*kernel), PROBLEM.weight), "bias": place(P(*bias), PROBLEM.bias)}
    zeros = nnx.initializers.zeros_init()
    with jax.set_mesh(mesh):
        if api == "nnx":
            head = NLLHead(
                H, V, rngs=nnx.Rngs(0), **told, **options,
                kernel_init=nnx.with_partitioning(zeros, kernel),
                bias_init=nnx.with_partitioning(zeros, bias),
            )  # fmt: skip
            graph, state = nnx.split(head)
            call = lambda params, *x: nnx.merge(graph, state_of(state, params))(*x)  # noqa: E731
        else:
            head = LinenNLLHead(
                V, **told, options=options, kernel_init=nn.with_partitioning(zeros, kernel),
                bias_init=nn.with_partitioning(zeros, bias),
            )  # fmt: skip
            call = lambda params, *x: head.apply({"params": params}, *x)  # noqa: E731
        y = place(P("data"), labels)
        step = jax.value_and_grad(lambda params, x: p.upstream * call(params, x, y).loss, (0, 1))
        with count_collectives() as count:
            found, (grads, d_hidden) = jax.jit(step)(params, place(P("data"), p.hidden))
    o = p.reference()
    measured = check("A2", found, o.loss * p.upstream, magnitude=o.loss_magnitude * 4)
    measured += check("A5", d_hidden, o.d_hidden, o.bound_hidden)
    d_kernel, d_bias = np.asarray(grads["kernel"]), np.asarray(grads["bias"])
    assert not d_kernel[:, classes:].any()
    measured += check("A6", d_kernel[:, :classes], o.d_weight, o.bound_weight)
    measured += check("A6", d_bias[:classes], o.d_bias, o.bound_bias)
    assert not failures(measured)
    spec = NamedSharding(mesh, P(*kernel))
    assert grads["kernel"].sharding.is_equivalent_to(spec, 2)
    assert not failures(check_budget("JAX, hidden route", [{}], [count.counts()], rounds=1))


def state_of(state, params):
    return jax.tree.map(lambda x: params["kernel" if x.ndim == 2 else "bias"], state)


# --- refused --------------------------------------------------------------------------------------


def whole_arrays(tokens, weight, axes=ONE, head=None, **options):
    """A call on Explicit axes."""
    mesh, (x, w, y) = mesh_of(**axes), ones()
    arrays = (P(tokens), x), (weight, w if head is None else head), (P(tokens), y)
    return chunked_nll(*(on(mesh, spec, x) for spec, x in arrays), **options)


def inside(tokens="data", axes=ONE, **options):
    """A call inside `shard_map`, the vocabulary over "data"."""
    options = {"vocab_parallel": "data"} | options
    spread = jax.shard_map(
        lambda *x: chunked_nll(*x, **options).loss[None], mesh=mesh_of(AxisType.Auto, **axes),
        in_specs=(P(tokens), P("data"), P(tokens)), out_specs=P("data"),
    )  # fmt: skip
    return spread(jnp.ones((8, 4)), jnp.ones((16, 4)), jnp.arange(8))


def module(kernel, **options):
    with jax.set_mesh(mesh_of(AxisType.Auto, **ONE)):
        init = nnx.with_partitioning(nnx.initializers.zeros_init(), kernel)
        head = NLLHead(4, 16, rngs=nnx.Rngs(0), use_bias=False, kernel_init=init, **options)
        return head(jnp.ones((8, 4)), jnp.arange(8))


def ones():
    return jnp.ones((8, 4)), jnp.ones((16, 4)), jnp.arange(8)


def under_auto_axes():
    """Arrays of which the compiler knows alone where they are."""
    mesh = mesh_of(AxisType.Auto, **ONE)
    return jax.jit(lambda *x: chunked_nll(*x, **AUTO))(*(on(mesh, P("data"), x) for x in ones()))


HIDDEN = {"gather": "hidden"}
AUTO = {"gather": "auto", "tokens_per_rank": 2}
COUNT = "`tokens_per_rank` must be given with `gather='auto'`, and with nothing else; "
SPREAD = r"`weight` must be sharded along its vocabulary over mesh axes that spread tokens, with .*"
HERE = r"`gather` must be 'head' for arrays that do not say where on a mesh they are; got 'hidden'"
OWN = {"tokens_parallel": "data"}
REFUSED = {
    "stream": (
        partial(whole_arrays, "data", P("data"), gather="stream"),
        r"`gather` must be 'head', 'hidden' or 'auto' in JAX; got 'stream'. Pass 'hidden'",
    ),
    "no count": (partial(whole_arrays, "data", P("data"), gather="auto"), COUNT + "got None with"),
    "a count of another route": (
        partial(whole_arrays, "data", P("data"), tokens_per_rank=2, **HIDDEN), COUNT + "got 2 with",
    ),
    "no count, a module": (partial(module, (None, "data"), tokens="data", gather="auto"), COUNT),
    "no count, no mesh": (lambda: chunked_nll(*ones(), gather="auto"), COUNT),
    "count of words": (
        partial(whole_arrays, "data", P("data"), gather="auto", tokens_per_rank=0),
        "`tokens_per_rank` must be a positive integer or None; got 0",
    ),
    "a count that is traced": (
        lambda: jax.jit(
            lambda n: whole_arrays("data", P("data"), gather="auto", tokens_per_rank=n)
        )(2),
        "`tokens_per_rank` must be a positive integer or None; got ",
    ),
    "auto, shards too": (
        partial(whole_arrays, "data", P("data"), vocab_parallel="data", **AUTO),
        r"`gather` must be 'head' with `vocab_parallel`.*; got 'auto'",
    ),
    "auto, inside": (partial(inside, **AUTO), r"`gather` must be 'head' with `vocab_parallel`"),
    "auto, a module without axes": (
        partial(module, (None, "data"), **AUTO), HERE.replace("hidden", "auto"),
    ),
    "auto, arrays under Auto axes": (under_auto_axes, HERE.replace("hidden", "auto")),
    "auto, a head of integers": (
        partial(whole_arrays, "data", P("data"), head=jnp.ones((16, 4), jnp.int8), **AUTO),
        "`weight` must be floating point",
    ),
    "a whole head": (
        partial(whole_arrays, "data", P(), **HIDDEN),
        SPREAD + r"got one that is whole on the devices of 'data'. Shard it so, or leave `gather`",
    ),
    "a head over other axes": (
        partial(whole_arrays, "data", P("tp"), TWO, **HIDDEN), SPREAD + "got one that is whole on",
    ),
    "its width": (
        partial(whole_arrays, "data", P(None, "data"), **HIDDEN),
        SPREAD + "got one whose hidden width is, over 'data'",
    ),
    "its width too": (
        partial(whole_arrays, ("data", "tp"), P("tp", "data"), TWO, **HIDDEN),
        SPREAD + "got one whose hidden width is, over 'data'",
    ),
    "whole tokens": (
        partial(whole_arrays, None, P("data"), **HIDDEN),
        SPREAD + "got tokens that are spread over no axis",
    ),
    "a module that is whole": (partial(module, (), tokens="data", **HIDDEN), SPREAD),
    "a module without axes": (partial(module, (None, "data"), **HIDDEN), HERE),
    "no mesh": (
        lambda: chunked_nll(*ones(), **HIDDEN), HERE,
    ),
    "inside, hidden": (partial(inside, vocab_parallel=None, **HIDDEN), HERE),
    "inside, both": (
        partial(inside, **HIDDEN), r"`gather` must be 'head' with `vocab_parallel`.*`tokens_paral",
    ),
    "whole arrays, tokens": (
        partial(whole_arrays, "data", P("data"), vocab_parallel="data", **OWN),
        r"`tokens_parallel` must be None for whole arrays on a mesh.*Pass `gather='hidden'` alone",
    ),
    "no mesh, tokens": (
        lambda: chunked_nll(*ones(), vocab_parallel="data", **OWN),
        "`vocab_parallel` must be the name of a mesh axis inside `shard_map`; got 'data'",
    ),
    "another axis": (
        partial(inside, axes=TWO, tokens_parallel="tp"),
        r"`tokens_parallel` must name the mesh axes of `vocab_parallel`, 'data'; got 'tp'",
    ),
    "the vocabulary's too": (
        partial(inside, tokens_parallel=PaddedVocab("data", 16)),
        r"`tokens_parallel` must name the mesh axes of `vocab_parallel`, 'data'; got PaddedVocab",
    ),
    "tokens that are the same": (
        partial(inside, None, **OWN),
        r"`hidden` must be this device's own tokens with `tokens_parallel`; got one that does not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    """D12: in one sentence, with the way out, before anything is computed."""
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_the_same_rows_on_every_device_are_no_shards():
    """A13: without types nothing but the rows tells; NaN."""
    x = jax.random.normal(jax.random.key(0), (20, 4))
    own = {"vocab_parallel": "data", "tokens_parallel": "data", "reduction": "sum"}
    spread = jax.shard_map(
        lambda x, w, y: chunked_nll(x, w, y, **own).loss[None], mesh=mesh_of(AxisType.Auto, **ONE),
        in_specs=(P("data"), P(), P("data")), out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    assert np.isnan(spread(x, x, jnp.arange(20))).all()
