"""A head that is given as a module in JAX: layers of NNX, Linen and Equinox, and what is none.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
from xentlib.jax import (  # noqa: E402
    LinenNLLHead,
    NLLHead,
    TeacherHead,
    chunked_divergence,
    chunked_logprobs,
    chunked_nll,
    vocab_parallel_logprobs,
)

N, V, H = 12, 17, 8
RNG = np.random.default_rng(3)
HIDDEN = jnp.asarray(RNG.standard_normal((N, H), np.float32))
LABELS = jnp.asarray(RNG.integers(0, V, N), jnp.int32).at[3].set(-100)
WEIGHT = jnp.asarray(RNG.standard_normal((V, H), np.float32))
BIAS = jnp.asarray(RNG.standard_normal(V, np.float32))
VARIABLES = {"params": {"kernel": WEIGHT.T, "bias": BIAS}}


def linear(kind: Any = nnx.Linear, bias: bool = True, **options: Any) -> Any:
    layer = kind(H, V, use_bias=bias, rngs=nnx.Rngs(0), **options)
    layer.kernel[...] = WEIGHT.T.astype(layer.kernel.dtype)
    if bias:
        layer.bias[...] = BIAS.astype(layer.bias.dtype)
    return layer


def embed(**options: Any) -> Any:
    layer = nnx.Embed(V, H, rngs=nnx.Rngs(0), **options)
    layer.embedding[...] = WEIGHT.astype(layer.embedding.dtype)
    return layer


def nll(head: Any, hidden: Any = HIDDEN, **options: Any) -> Any:
    return chunked_nll(hidden, head, LABELS, outputs=("lse",), **options)


HV = {"weight_layout": "HV"}
# A module of NNX, and the same call with its arrays.
NNX = {
    "Linear": (linear, {"head": WEIGHT.T, "bias": BIAS, **HV}),
    "Linear without a bias": (partial(linear, bias=False), {"head": WEIGHT.T, **HV}),
    "Embed": (embed, {"head": WEIGHT}),
    "NLLHead": (partial(linear, NLLHead), {"head": WEIGHT.T, "bias": BIAS, **HV}),
    "NLLHead, tied": (lambda: NLLHead.from_linear(embed()), {"head": WEIGHT}),
    "Param": (lambda: embed().embedding, {"head": WEIGHT}),
}


@pytest.mark.parametrize("name", NNX)
def test_a_module_of_nnx_is_its_arrays(name: str) -> None:
    """Bit for bit: results and gradients, by NNX's transformations and by JAX's over a state.
    Catches: a layout that is not the module's, a bias left out, a head that gets no gradient."""
    make, arrays = NNX[name]
    head = make()
    assert same(nll(head), nll(**arrays))

    model, own = nnx.Dict(lm_head=head), [x for k, x in arrays.items() if k != "weight_layout"]

    def of_arrays(own: Any, hidden: Any) -> Any:
        how = {"weight_layout": arrays.get("weight_layout", "VH")}
        return nll(own[0], hidden, bias=own[1] if own[1:] else None, **how).loss

    def of_model(model: Any, hidden: Any) -> Any:
        return nll(model.lm_head, hidden).loss

    loss, (of_own, of_hidden) = jax.jit(jax.value_and_grad(of_arrays, (0, 1)))(own, HIDDEN)
    want = of_own[::-1]  # NNX sorts by name: bias, kernel
    got = nnx.jit(nnx.value_and_grad(of_model, argnums=(0, 1)))(model, HIDDEN)
    assert same(got, (loss, (want, of_hidden)))
    graph, state = nnx.split(model)
    got = jax.jit(jax.grad(lambda state: of_model(nnx.merge(graph, state), HIDDEN)))(state)
    assert same(got, want)
    assert all(np.asarray(x).any() for x in want)


class Tied(nn.Module):
    """Linen: a head that is defined in `setup`, and hidden states from the head's other end."""

    tied: bool

    def setup(self) -> None:
        self.head = nn.Embed(V, H) if self.tied else nn.Dense(V)

    def __call__(self, hidden: Any) -> Any:
        return chunked_nll(hidden, self.head, LABELS, outputs=("lse",))


@pytest.mark.parametrize("tied", [True, False])
def test_a_bound_module_of_linen_is_its_arrays(tied: bool) -> None:
    """Inside the model, in `init` too, where no forward of a Dense has made its kernel; or bound by
    hand, with boxed parameters."""
    model = Tied(tied)
    shapes = jax.tree.map(jnp.shape, model.init(jax.random.key(0), HIDDEN)["params"]["head"])
    own = {"embedding": WEIGHT} if tied else VARIABLES["params"]
    assert shapes == {name: x.shape for name, x in own.items()}
    variables = {"params": {"head": own}}

    def of_arrays(own: Any) -> Any:
        if tied:
            return nll(own["embedding"])
        return nll(own["kernel"], bias=own["bias"], **HV)

    assert same(model.apply(variables, HIDDEN), of_arrays(own))
    got = jax.grad(lambda v: model.apply(v, HIDDEN).loss)(variables)["params"]["head"]
    assert same(got, jax.grad(lambda own: of_arrays(own).loss)(own))
    boxed = {name: nn.Partitioned(x, (None,) * x.ndim) for name, x in own.items()}
    assert same(nll(model.bind({"params": {"head": boxed}}).head), of_arrays(own))
    bound = LinenNLLHead(V).bind(VARIABLES)
    assert same(nll(bound), of_arrays(own)) or tied


def test_a_layer_of_equinox_is_its_arrays() -> None:
    eqx = pytest.importorskip("equinox")
    made = eqx.nn.Linear(H, V, key=jax.random.key(0))
    layer = eqx.tree_at(lambda x: (x.weight, x.bias), made, (WEIGHT, BIAS))
    assert same(nll(layer), nll(WEIGHT, bias=BIAS))
    got = eqx.filter_jit(eqx.filter_grad(lambda layer: nll(layer).loss))(layer)
    want = jax.jit(jax.grad(lambda w, b: nll(w, bias=b).loss, (0, 1)))(WEIGHT, BIAS)
    assert same((got.weight, got.bias), want)
    assert same(nll(eqx.nn.Embedding(weight=WEIGHT)), nll(WEIGHT))

    class Scaled(eqx.nn.Linear):
        def __call__(self, x: Any, *, key: Any = None) -> Any:
            return 2 * super().__call__(x, key=key)

    with pytest.raises(TypeError, match=r"got .*'s Scaled, whose forward is its own"):
        nll(Scaled(H, V, key=jax.random.key(0)))
    with pytest.raises(TypeError, match="got a Linear whose `weight` is nothing yet"):
        nll(eqx.partition(layer, lambda x: False)[0])


def test_a_layer_that_stands_for_equinox_s(monkeypatch: Any) -> None:
    """Known by name where Equinox is loaded, and unknown where it is not."""

    class Linear:
        weight, bias = WEIGHT, BIAS

        def __call__(self, x: Any) -> Any:
            return self.weight @ x + self.bias

    class Scaled(Linear):
        def __call__(self, x: Any) -> Any:
            return 2 * super().__call__(x)

    monkeypatch.delitem(sys.modules, "equinox.nn", raising=False)
    for head in (Linear(), Scaled()):
        with pytest.raises(TypeError, match="whose forward is its own"):
            nll(head)
    monkeypatch.setitem(sys.modules, "equinox.nn", SimpleNamespace(Linear=Linear))
    assert same(nll(Linear()), nll(WEIGHT, bias=BIAS))
    with pytest.raises(TypeError, match="'s Scaled, whose forward is its own"):
        nll(Scaled())


def test_log_probabilities_and_a_bias_beside_it() -> None:
    """The other function; a bias as a variable for a module without one; a layout that agrees."""
    want = chunked_logprobs(HIDDEN, WEIGHT.T, LABELS, bias=BIAS, entropy=True, **HV)
    assert same(chunked_logprobs(HIDDEN, linear(), LABELS, entropy=True), want)
    bare, bias = linear(bias=False), linear().bias
    got = chunked_logprobs(HIDDEN, bare, LABELS, bias=bias, entropy=True, **HV)
    assert same(got, want)


def test_the_layer_s_own_dtype() -> None:
    """The bits of what NNX's and Linen's `promote_dtype` makes of the operands. Catches: float32
    products where the layer says bfloat16, hidden states that a tied layer would round."""
    low = [x.astype(jnp.bfloat16) for x in (HIDDEN, WEIGHT, BIAS)]
    want = chunked_nll(low[0], low[1].T, LABELS, bias=low[2], outputs=("lse",), **HV)
    assert not same(want, nll(linear()))
    assert same(nll(linear(dtype=jnp.bfloat16)), want)
    assert same(nll(nn.Dense(V, dtype=jnp.bfloat16).bind(VARIABLES)), want)
    tied = chunked_nll(low[0], low[1], LABELS, outputs=("lse",))
    assert same(nll(embed(param_dtype=jnp.bfloat16)), tied)
    table = {"params": {"embedding": WEIGHT}}
    assert same(nll(nn.Embed(V, H, dtype=jnp.bfloat16).bind(table)), tied)

    def halved(arrays: Any, dtype: Any = None) -> Any:
        return (0.5 * arrays[0], *arrays[1:])

    got = nll(linear(promote_dtype=halved))
    assert same(got, nll(WEIGHT.T, 0.5 * HIDDEN, bias=BIAS, **HV))
    mixed = nll(linear(param_dtype=jnp.bfloat16))  # without a dtype, as the call itself
    assert same(mixed, nll(low[1].T, bias=low[2], **HV))


def test_on_explicit_axes() -> None:
    """Where the module's arrays are is where its gradients go."""
    mesh = mesh_of(AxisType.Explicit, data=4)
    with jax.set_mesh(mesh):
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
        head, hidden, labels = linear(bias=False), place(HIDDEN, "data"), place(LABELS, "data")
        head.kernel.set_value(place(WEIGHT.T, "data"))

        def loss(head: Any) -> Any:
            return chunked_nll(hidden, head, labels).loss

        grads = nnx.grad(loss)(head)["kernel"][...]
        want = jax.grad(lambda w: chunked_nll(hidden, w, labels, **HV).loss)(head.kernel[...])
    assert grads.sharding.spec == P("data", None)
    assert same(grads, want)


# --- refused -------------------------------------------------------------------------------------


class Doubled(nnx.Linear):
    def __call__(self, x: Any, out_sharding: Any = None) -> Any:
        return 2 * super().__call__(x)


class Capped(nnx.Embed):
    def attend(self, x: Any, out_sharding: Any = None) -> Any:
        return jnp.tanh(super().attend(x))


class Quantised:
    """What a package keeps in place of an array: integers and scales."""


def quantised(*arguments: Any, **options: Any) -> Any:
    return jax.lax.dot_general(*arguments, **options)


def packed() -> Any:
    layer = linear()
    layer.kernel = nnx.Param(Quantised())
    return layer


def emptied() -> Any:
    layer = linear()
    layer.kernel = nnx.data(None)
    return layer


LOW = r"Pass `LowRankHead\(kernel\[...\], lora_a\[...\].T, lora_b\[...\].T\)` of its arrays"
REFUSED = {
    "LoRALinear": (lambda: linear(nnx.LoRALinear, lora_rank=2), "LoRALinear of NNX.*" + LOW),
    "LoRA": (lambda: nnx.LoRA(H, 2, V, rngs=nnx.Rngs(0)), "LoRA of NNX.*" + LOW),
    "a forward of its own": (lambda: linear(Doubled), "'s Doubled, whose forward is its own. Pass"),
    "another product": (
        lambda: Capped(V, H, rngs=nnx.Rngs(0)),
        "'s Capped, whose forward is its own. Pass a linear or an embedding layer",
    ),
    "no linear layer": (lambda: nnx.LayerNorm(H, rngs=nnx.Rngs(0)), "got flax's LayerNorm, whose"),
    "a model": (lambda: nnx.Sequential(linear()), "got flax's Sequential"),
    "its products": (
        lambda: linear(dot_general=quantised),
        "a Linear with a `dot_general` of its own, which may quantise. Leave that out, or pass",
    ),
    "Linen's products": (
        lambda: nn.Dense(V, dot_general_cls=lambda: quantised).bind(VARIABLES),
        "a Dense with a `dot_general` of its own",
    ),
    "quantised": (packed, "a Linear whose `kernel` is a Quantised, no array. Pass .* dequantises"),
    "no kernel": (emptied, "a Linear whose `kernel` is nothing yet"),
    "unbound": (lambda: nn.Dense(V), r"an unbound Dense, .* Pass `model.bind\(variables\).head`"),
    "bound to nothing": (lambda: nn.Dense(V).bind({}), "a Dense whose `kernel` is nothing yet"),
    "variables": (lambda: VARIABLES["params"], r"got a dict. Pass .* `weight\['kernel'\]` with"),
    "a state": (lambda: nnx.state(linear()), "got a State. Pass an array of it"),
    "options of a head": (
        lambda: NLLHead(H, V, rngs=nnx.Rngs(0), softcap=30.0),
        r"a NLLHead with options of its own, which would be lost. Call it with the labels, `head\(",
    ),
    "axes of a head": (
        lambda: LinenNLLHead(V, tokens="data").bind(VARIABLES),
        "a LinenNLLHead with options of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_is_refused(name: str) -> None:
    """D12: by its class's name, with the way out; a kernel alone would be another head (LoRA on
    one: 7.88 for a loss of 8.00)."""
    make, words = REFUSED[name]
    begins = "`weight` must be a head, or a module that multiplies with one and does nothing else; "
    with pytest.raises(TypeError, match="^" + begins + "got .*" + words.removeprefix("got ")):
        nll(make())


def test_a_torch_module_is_converted_first() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        TypeError, match=r"got torch's Linear\. Pass `xentlib\.interop\.to_jax\(weight"
    ):
        nll(torch.nn.Linear(H, V))
    with pytest.raises(TypeError, match=r"got torch\.Parameter\. Pass `xentlib\.interop\.to_jax"):
        nll(torch.nn.Linear(H, V).weight)


def test_a_kernel_that_was_loaded_transposed() -> None:
    with pytest.raises(ValueError, match="transpose a module's"):
        nll(nnx.Linear(V, H, rngs=nnx.Rngs(0)))


def test_what_a_module_has_itself() -> None:
    with pytest.raises(ValueError, match=r"`bias` must be None .* got a Linear and a bias"):
        nll(linear(), bias=BIAS)
    with pytest.raises(ValueError, match=r"`weight_layout` must be left out .* got 'HV' with a E"):
        nll(embed(), **HV)
    with pytest.raises(TypeError, match=r"`weight` must be floating point .* got int8"):
        nll(linear(param_dtype=jnp.int8, kernel_init=nnx.initializers.zeros, bias=False))


def test_a_kernel_that_lora_stands_for() -> None:
    """The way out of its message: gradients reach the adapters, and the base."""
    layer = linear(nnx.LoRALinear, lora_rank=2)
    layer.lora.lora_b[...] = jnp.ones((2, V))

    def loss(layer: Any) -> Any:
        kernel = layer.kernel[...] + layer.lora.lora_a[...] @ layer.lora.lora_b[...]
        return chunked_nll(HIDDEN, kernel, LABELS, bias=layer.bias, **HV).loss

    logits = layer(HIDDEN)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1)[:, 0]
    full = -jnp.where(LABELS >= 0, picked, 0).sum() / (N - 1)
    got = loss(layer)
    assert abs(got - full) < 2.0**-20 * abs(full)
    assert all(np.asarray(x).any() for x in jax.tree.leaves(nnx.grad(loss)(layer)))


# --- arrays --------------------------------------------------------------------------------------

GOOD = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS}


class OfTorch:
    """Its tensors, by name and module."""


OfTorch.__name__, OfTorch.__module__ = "Tensor", "torch"

TO_JAX = "; got torch.Tensor. Pass `xentlib.interop.to_jax({})`."
ARRAYS = {
    "labels of torch": ("labels", OfTorch(), TO_JAX),
    "hidden of torch": ("hidden", OfTorch(), TO_JAX),
    "weight of torch": ("weight", OfTorch(), TO_JAX),
    "where of torch": ("where", OfTorch(), TO_JAX),
    "class weights in a list": ("class_weights", [0.5] * V, "; got list. Pass `jnp.asarray({})`."),
    "token weights in a list": ("token_weights", [1.0], "; got list. Pass `jnp.asarray({})`."),
    "labels in a list": ("labels", [1, 2, 3], "; got list. Pass `jnp.asarray({})`."),
    "weight in a list": ("weight", [[0.5]], "; got list. Pass `jnp.asarray({})`."),
    "hidden of layers": ("hidden", (HIDDEN, HIDDEN), "; got tuple. Pass `jnp.stack({})`."),
    "no hidden": ("hidden", None, "; got NoneType. Pass an array of numbers."),
    "no weight": ("weight", None, "; got NoneType. Pass an array of numbers."),
    "a module as bias": ("bias", nnx.Dict(), "; got Dict. Pass an array of numbers."),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_no_array_is_refused(name: str) -> None:
    """D12: one sentence for what people pass, and the call that converts it."""
    argument, value, words = ARRAYS[name]
    with pytest.raises(TypeError) as caught:
        chunked_nll(**GOOD | {argument: value})
    said = f"`{argument}` must be a JAX or NumPy array" + words.format(argument)
    assert str(caught.value) == said


@pytest.mark.parametrize("argument", ["logits", "labels", "where"])
def test_of_given_logits_too(argument: str) -> None:
    good = {"logits": HIDDEN, "labels": LABELS % H, "where": LABELS >= 0}
    assert vocab_parallel_logprobs(**good).logprobs.shape == (N,)
    with pytest.raises(TypeError, match=f"`{argument}` must be a JAX or NumPy array; got list"):
        vocab_parallel_logprobs(**good | {argument: [1, 2]})


def test_a_softcap_of_a_divergence_may_be_a_variable():
    cap, teacher = jnp.float32(5.0), TeacherHead(-HIDDEN, WEIGHT, softcap=None)
    loss = jax.jit(lambda cap: chunked_divergence(HIDDEN, WEIGHT, teacher, softcap=cap).loss)
    assert loss(nnx.Param(cap)) == loss(cap) != loss(2 * cap)
