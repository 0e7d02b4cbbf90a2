"""`xentlib.jax.NLLHead` and `LinenNLLHead`: linear layers of Flax in all but what a call takes.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.contract import check, failures
from xentlib.tools.harness.problems import Case, build

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.leaves_jax import same  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from xentlib.jax import LinenNLLHead, NLLHead, chunked_logprobs, chunked_nll, count_collectives  # noqa: E402

N, H, V = 220, 24, 156
PROBLEM = build(Case("module", N, H, V, layout="HV", confident=0.3), 3)
HIDDEN, LABELS = jnp.asarray(PROBLEM.hidden), jnp.asarray(PROBLEM.labels)
KEY = jax.random.key(5)


def linear(**arguments):
    """An `nnx.Linear` that holds the problem's head."""
    layer = nnx.Linear(H, V, rngs=nnx.Rngs(0), **arguments)
    return filled(layer)


def filled(layer):
    layer.kernel[...] = jnp.asarray(PROBLEM.weight, layer.kernel.dtype)
    layer.bias[...] = jnp.asarray(PROBLEM.bias, layer.bias.dtype)
    return layer


def plain(function=chunked_nll, hidden=HIDDEN, **options):
    weight, bias = jnp.asarray(PROBLEM.weight), jnp.asarray(PROBLEM.bias)
    return function(hidden, weight, LABELS, bias=bias, weight_layout="HV", **options)


def linen(**arguments):
    return LinenNLLHead(features=V, **arguments)


VARIABLES = {"params": {"kernel": jnp.asarray(PROBLEM.weight), "bias": jnp.asarray(PROBLEM.bias)}}


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "outputs": ("lse",), "z_loss": 1e-3}])
def test_the_function_s_bits(options):
    """D6: with labels `chunked_nll`, without the layer's logits. Catches: options that are not
    handed on, a call's that do not win, a bias left out."""
    want, other = plain(**options), plain(**options | {"softcap": 3.0})
    layer = linear()
    for head in (
        filled(NLLHead(H, V, rngs=nnx.Rngs(1), **options)),
        NLLHead.from_linear(layer, **options),
        NLLHead.from_linear(NLLHead.from_linear(layer, **options)),
        partial(linen(options=options).apply, VARIABLES),
    ):
        assert same(head(HIDDEN, LABELS), want)
        assert same(head(HIDDEN, LABELS, softcap=3.0), other)
        assert same(head(HIDDEN), layer(HIDDEN))
        assert same(head(HIDDEN), nn.Dense(V).apply(VARIABLES, HIDDEN))


def test_per_token():
    options = {"temperature": 2.0, "entropy": True}
    want = plain(chunked_logprobs, **options)
    head = NLLHead.from_linear(linear(), per_token=True, **options)
    assert same(head(HIDDEN, LABELS), want)
    head = linen(per_token=True, options=options)
    assert same(head.apply(VARIABLES, HIDDEN, LABELS), want)


@pytest.mark.slow
def test_gradients_and_transformations():
    """A5, A6, A11: `nnx.grad`, `nnx.jit`, `nnx.remat`, split and merge, Linen's `apply`."""
    head = NLLHead.from_linear(linear())
    upstream = jnp.float32(PROBLEM.upstream)

    def loss(head, hidden):
        return upstream * head(hidden, LABELS).loss

    want, state = nnx.grad(loss, argnums=(0, 1))(head, HIDDEN)[::-1]
    o = PROBLEM.reference()
    found = check("A5", want, o.d_hidden, o.bound_hidden)
    found += check("A6", state["kernel"][...], o.d_weight, o.bound_weight)
    assert not failures(found + check("A6", state["bias"][...], o.d_bias, o.bound_bias))
    for step in (nnx.jit(nnx.grad(loss)), nnx.grad(nnx.remat(loss))):
        assert same(step(head, HIDDEN), state)
    value, again = nnx.jit(nnx.value_and_grad(loss))(head, HIDDEN)
    assert same(again, state)
    graph, parameters = nnx.split(head)
    merged = jax.jit(lambda x: loss(nnx.merge(graph, x), HIDDEN))
    assert same(merged(parameters), value)
    assert same(jax.grad(merged)(parameters), state)

    def linen_loss(variables):
        return upstream * linen().apply(variables, HIDDEN, LABELS).loss

    assert same(jax.jit(jax.grad(linen_loss))(VARIABLES), state)


def test_state_and_names_are_the_layer_s():
    """Parameters, names, initial values and checkpoints are the layer's."""
    layer, head = nnx.Linear(H, V, rngs=nnx.Rngs(2)), NLLHead(H, V, rngs=nnx.Rngs(2), softcap=2.0)
    assert same(nnx.state(layer), nnx.state(head))
    assert nnx.to_pure_dict(nnx.state(layer)).keys() == nnx.to_pure_dict(nnx.state(head)).keys()
    nnx.update(head, nnx.state(filled(layer)))
    assert same(head(HIDDEN, LABELS), plain(softcap=2.0))
    assert NLLHead(H, V, rngs=nnx.Rngs(2), use_bias=False)(HIDDEN, LABELS).num_tokens > 0
    abstract = nnx.eval_shape(lambda: NLLHead(H, V, rngs=nnx.Rngs(2), softcap=2.0))
    assert abstract.kernel.shape == (H, V)
    want = nn.Dense(V).init(KEY, HIDDEN)
    for given in ((HIDDEN,), (HIDDEN, LABELS)):
        got = linen(options={"softcap": 2.0}).init(KEY, *given)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert same(got, want)


def test_shared_parameters_stay_shared():
    """The head's parameters are the layer's own. Catches: a copy."""
    layer = linear()
    head = NLLHead.from_linear(layer)
    assert head.kernel is layer.kernel
    assert head.bias is layer.bias
    layer.kernel[...] = layer.kernel[...] * 2
    assert same(head(HIDDEN), layer(HIDDEN))


class Tied(nnx.Module):
    def __init__(self, pieces=None, **told):
        init = nnx.initializers.normal(0.2)
        init = nnx.with_partitioning(init, pieces) if pieces else init
        self.embed = nnx.Embed(V, H, rngs=nnx.Rngs(3), embedding_init=init)
        self.head = NLLHead.from_linear(self.embed, **told)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tp": 2}], ids=str)
def test_tied_embeddings(mesh):
    """A6: one parameter, whose gradient is that of both of its uses, on a mesh, sharded
    over both axes too."""
    ids, told, place = jnp.arange(N, dtype=jnp.int32) % V, {}, nullcontext()
    if mesh:
        mesh = mesh_of(AxisType.Auto, **mesh)
        told, place = {"pieces": ("tp", "data"), "tokens": "data"}, jax.set_mesh(mesh)
    with place:
        model = Tied(**told)
        assert list(nnx.to_pure_dict(nnx.state(model))) == ["embed"]
        assert same(model.head(HIDDEN), model.embed.attend(HIDDEN))
        step = nnx.jit(nnx.grad(lambda m: 1.3 * m.head(m.embed(ids) * 2, LABELS).loss))
        with count_collectives() as count:
            gradient = step(model)
    assert not count.looped()
    # Of one device's half of the vocabulary: the annotation is read as [V, H].
    assert count.bytes("reduce_scatter") == (V // 2 * H * 4 if mesh else 0)
    model, gradient = jax.tree.map(np.asarray, (nnx.state(model), gradient))

    with jax.enable_x64(True):
        table = jnp.asarray(model["embed"]["embedding"][...], jnp.float64)

        def dense(table):
            logits = 2 * table[ids] @ table.T
            picked = jnp.take_along_axis(logits, jnp.maximum(LABELS, 0)[:, None], 1)[:, 0]
            each = jax.nn.logsumexp(logits, axis=1) - picked
            return 1.3 * jnp.where(LABELS >= 0, each, 0.0).sum() / int(PROBLEM.valid.sum())

        want = np.asarray(jax.grad(dense)(table))
    got = gradient["embed"]["embedding"][...]
    assert not failures(check("A6", got, want, metrics=["rho / u"]))


def test_dtype_is_the_layer_s():
    """`dtype` casts what the products take, as in the layer; parameters stay as they are."""
    low = [x.astype(jnp.bfloat16) for x in (HIDDEN, PROBLEM.weight, PROBLEM.bias)]
    want = chunked_nll(low[0], low[1], LABELS, bias=low[2], weight_layout="HV").loss
    head = NLLHead.from_linear(linear(dtype=jnp.bfloat16))
    assert head.kernel.dtype == jnp.float32
    assert same(head(HIDDEN, LABELS).loss, want)
    assert same(linen(dtype=jnp.bfloat16).apply(VARIABLES, HIDDEN, LABELS).loss, want)


def with_options(**options):
    return linen(options=options)


def test_what_is_refused():
    """D12: the argument, and the way out."""
    make, head = partial(NLLHead, H, V, rngs=nnx.Rngs(0)), NLLHead.from_linear(linear())
    for new in (make, with_options):
        with pytest.raises(TypeError, match=r"`sofcap` is not an option of this call.*softcap"):
            new(sofcap=1.0)
        for name in ("bias", "weight_layout"):
            with pytest.raises(TypeError, match=rf"`{name}` is not an option.*leave it out"):
                new(**{name: "HV"})
        with pytest.raises(TypeError, match=r"`temperature` must be.*with each call"):
            new(temperature=jnp.ones(N))
    with pytest.raises(TypeError, match="`z_loss` is not an option of this call"):
        make(per_token=True, z_loss=1e-3)
    with pytest.raises(TypeError, match="pass `labels`"):
        head(HIDDEN, softcap=1.0)
    with pytest.raises(TypeError, match="pass `labels`"):
        linen().apply(VARIABLES, HIDDEN, softcap=1.0)
    with pytest.raises(TypeError, match=r"got a LoRALinear.*Merge.*or call `chunked_nll`"):
        NLLHead.from_linear(nnx.LoRALinear(H, V, lora_rank=2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="got a Conv"):
        NLLHead.from_linear(nnx.Conv(H, V, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"must name axes of the mesh.*got 'data'"):
        make(tokens="data")(HIDDEN, LABELS)
    head = make(tokens=P("data", None))
    with (
        jax.set_mesh(mesh_of(AxisType.Auto, data=4)),
        pytest.raises(ValueError, match="at most the 1 leading dimensions"),
    ):
        head(HIDDEN, LABELS)


def test_without_flax():
    """D2: the package loads without it; the modules say what to install."""
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "import xentlib.jax\n"
        "try: xentlib.jax.NLLHead\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "`NLLHead` needs Flax. Run: pip install 'xentlib[flax]'\n"


# ---------------------------------------------------------------------------------
# On a mesh of four devices

# axes, the kernel's annotation, the bias's, what the head is told
MESHES = {
    "width": ({"data": 4}, ("data", None), (None,), {"tokens": "data"}),
    "vocabulary": ({"data": 4}, (None, "data"), (None,), {"tokens": "data"}),
    "vocabulary parallel": ({"data": 2, "tp": 2}, ("data", "tp"), ("tp",), {"tokens": "data"}),
    "named": (
        {"data": 2, "tp": 2}, ("data", "tp"), ("tp",),
        {"tokens": ("data",), "vocab_parallel": "tp"},
    ),
    "padded": (
        {"data": 2, "tp": 2}, ("data", "tp"), ("tp",),
        {"tokens": P("data"), "vocab_parallel": PaddedVocab("tp", V - 3)},
    ),
    "explicit": ({"data": 2, "tp": 2}, ("data", "tp"), ("tp",), {}),
}  # fmt: skip


def on(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


# Where an annotation is read from is one thing, what is made of it another: each mesh in NNX and in
# Linen, the ways to annotate in Linen on the plainest mesh and on the one of two axes. On Explicit
# axes Linen's boxes constrain, which JAX refuses.
ANNOTATED = [
    *((name, api) for name in MESHES for api in ("nnx", "linen")),
    *((name, f"linen, {x}") for name in ("width", "named") for x in ("boxed", "logical")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "api", "per_token"),
    [
        *((*pair, False) for pair in ANNOTATED),
        *(
            pytest.param(*pair, True, marks=() if pair[0] == "width" else pytest.mark.full)
            for pair in ANNOTATED
            if pair[1] == "nnx" or pair[0] == "width"
        ),
    ],
)
def test_annotated_heads_on_a_mesh(name, api, per_token):
    """A2, A5, A6, A15: gradients of one device, in the annotated places; one gather of the head and
    one reduce-scatter, none in a loop. Catches: an annotation that is not read, a mean over one
    device, a gradient that is not reduced."""
    axes, kernel, bias, told = MESHES[name]
    mesh = mesh_of(None if name == "explicit" else AxisType.Auto, **axes)
    classes = V - 3 if name == "padded" else V
    labels = np.where(PROBLEM.labels >= classes, 0, PROBLEM.labels).astype(np.int32)
    labels[: N // 2] = -100  # a device, or two, without a valid token
    p = PROBLEM.changed(labels=labels)
    p = p.changed(weight=p.weight[:, :classes], bias=p.bias[:classes])
    hidden = on(mesh, P("data"), p.hidden)
    placed = on(mesh, P("data"), labels)
    options = {"max_chunk_bytes": 64 * V * 4}

    def total(out):
        if not per_token:
            return p.upstream * out.loss
        return -p.upstream * out.logprobs.sum() / int(p.valid.sum())

    with jax.set_mesh(mesh):
        if api == "nnx":
            head = NLLHead(
                H, V, rngs=nnx.Rngs(0), per_token=per_token, **told, **options,
                kernel_init=nnx.with_partitioning(nnx.initializers.zeros_init(), kernel),
                bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), bias),
            )  # fmt: skip
            assert head.kernel[...].sharding.spec == P(*kernel)
            head.kernel[...] = on(mesh, P(*kernel), PROBLEM.weight)
            head.bias[...] = on(mesh, P(*bias), PROBLEM.bias)
            step = nnx.jit(nnx.value_and_grad(lambda m, x: total(m(x, placed)), argnums=(0, 1)))
            with count_collectives() as count:
                value, (state, d_hidden) = step(head, hidden)
            found = [state["kernel"][...], state["bias"][...]]
        else:
            wrap, named = nn.with_partitioning, (kernel, bias)
            if api == "linen, logical":
                rules = {"data": "fsdp", "tp": "vocab", None: None}
                wrap = partial(
                    nn.with_logical_partitioning, rules=(("fsdp", "data"), ("vocab", "tp"))
                )
                named = [tuple(rules[x] for x in names) for names in named]
            zeros = nn.initializers.zeros_init()
            head = LinenNLLHead(
                V, per_token=per_token, **told, options=options,
                kernel_init=wrap(zeros, named[0]), bias_init=wrap(zeros, named[1]),
            )  # fmt: skip
            leaves = (on(mesh, P(*kernel), PROBLEM.weight), on(mesh, P(*bias), PROBLEM.bias))
            variables = {"params": dict(zip(("kernel", "bias"), leaves))}
            if api != "linen":
                inits = (head.kernel_init, head.bias_init)
                boxes = [
                    jax.eval_shape(partial(f, shape=x.shape), KEY).replace(value=x)
                    for f, x in zip(inits, leaves)
                ]
                variables = {"params": dict(zip(("kernel", "bias"), boxes))}
            step = jax.value_and_grad(lambda v, x: total(head.apply(v, x, placed)), argnums=(0, 1))
            with count_collectives() as count:
                value, (tree, d_hidden) = jax.jit(step)(variables, hidden)
            tree = nn.meta.unbox(tree)["params"]
            found = [tree["kernel"], tree["bias"]]
    o = p.reference()
    measured = check("A2", value, o.loss * p.upstream, magnitude=o.loss_magnitude * 4)
    measured += check("A5", d_hidden, o.d_hidden, o.bound_hidden)
    d_kernel, d_bias = (np.asarray(x) for x in found)
    assert not d_kernel[:, classes:].any()
    measured += check("A6", d_kernel[:, :classes], o.d_weight, o.bound_weight)
    measured += check("A6", d_bias[:classes], o.d_bias, o.bound_bias)
    assert not failures(measured)
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, P(*kernel)), 2)
    assert [count["all_gather"], count["reduce_scatter"], count.looped()] == [1, 1, []]


def test_inside_the_user_s_own_shard_map():
    """`vocab_parallel` is then what it is for the function."""
    mesh = mesh_of(AxisType.Auto, tp=4)
    head = NLLHead.from_linear(linear(), vocab_parallel="tp")
    graph, state = nnx.split(head)

    def loss(state, hidden, labels):
        return nnx.merge(graph, state)(hidden, labels).loss

    specs = jax.tree.map(lambda x: P(None, "tp") if x.ndim == 2 else P("tp"), state)
    spread = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P())
    value = jax.jit(spread)(state, HIDDEN, LABELS)
    o = PROBLEM.reference()
    assert not failures(check("A2", value, o.loss, magnitude=o.loss_magnitude))
