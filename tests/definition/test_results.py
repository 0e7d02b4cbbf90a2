"""A result is a tuple: what a tensor could do is refused by the field that was meant, and what a
tuple can do stays."""

from __future__ import annotations

import copy
import operator
import pickle

import numpy as np
import pytest

MEANT = {
    "chunked_nll": "loss",
    "chunked_logprobs": "logprobs",
    "vocab_parallel_logprobs": "logprobs",
}


def arrays(backend):
    hidden = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    weight = np.linspace(1, -2, 15, dtype=np.float32).reshape(5, 3)
    given = hidden, weight, np.array([0, 4, 2, -100])
    if backend == "torch":
        import torch

        return tuple(map(torch.tensor, given))
    import jax.numpy as jnp

    return tuple(jnp.asarray(x, dtype=x.dtype.name.replace("64", "32")) for x in given)


def result(backend, function="chunked_nll"):
    package = pytest.importorskip(f"xentlib.{backend}")
    hidden, weight, labels = arrays(backend)
    if function == "vocab_parallel_logprobs":
        return package.vocab_parallel_logprobs(hidden @ weight.T, labels)
    return getattr(package, function)(hidden, weight, labels)


def one(backend):
    return arrays(backend)[0].sum()


# How people use the loss of another library, and what the message says came.
USES = {
    "backward": (lambda out, _: out.backward(), "`.backward`"),
    "item": (lambda out, _: out.item(), "`.item`"),
    "detach": (lambda out, _: out.detach(), "`.detach`"),
    "mean": (lambda out, _: out.mean(), "`.mean`"),
    "divided": (lambda out, _: out / 4, "`/`"),
    "divided in place": (lambda out, _: operator.itruediv(out, 4), "`/`"),
    "times 2": (lambda out, _: out * 2, "`*`"),
    "2 times": (lambda out, _: 2 * out, "`*`"),
    "NumPy's number": (lambda out, _: np.float32(2) * out, "`*`"),
    "plus another": (lambda out, _: out + out, "`+`"),
    "added to": (lambda out, _: operator.iadd(0.0, out), "`+`"),
    "summed": (lambda out, _: sum([out, out]), "`+`"),
    "negated": (lambda out, _: -out, "`-`"),
    "float": (lambda out, _: float(out), "`float()`"),
    "less": (lambda out, _: out < 1.0, "`<`"),
    "more than another": (lambda out, _: out > out, "`>`"),
    "equal to a number": (lambda out, _: out == 0, "`==`"),
    "unequal to a number": (lambda out, _: out != 0, "`!=`"),
    "equal to an array": (lambda out, x: out == x, "`==`"),
    "printed": (lambda out, _: f"{out:.3f}", "a format, '.3f'"),
    # An array on the left asks this side in PyTorch, and refuses by itself in JAX.
    "array plus": (lambda out, x: x + out, None),
    "array times": (lambda out, x: x * out, None),
}


@pytest.mark.parametrize("function", MEANT)
@pytest.mark.parametrize("use", USES)
def test_a_result_used_as_a_tensor_says_which_field(backend, use, function):
    """D12, M11: a tuple times 2 would be a tuple twice as long, without a word."""
    out, (act, came) = result(backend, function), USES[use]
    error = AttributeError if use in ("backward", "item", "detach", "mean") else TypeError
    if came is None:
        error, came = (TypeError, f"`{'+' if 'plus' in use else '*'}`")
        if backend == "jax":
            error, came = ValueError, "one where JAX takes an array"
    with pytest.raises(error) as caught:
        act(out, one(backend))
    assert str(caught.value) == (
        f"`{type(out).__name__}` is a tuple of results and must not be used as a tensor or an "
        f"array; got {came}. Use its `.{MEANT[function]}`."
    )


@pytest.mark.jax
def test_the_gradient_of_a_result_says_which_field():
    """JAX would show all fields, and call for a scalar."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_nll

    hidden, weight, labels = arrays("jax")
    for transform in (jax.grad, jax.value_and_grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(ValueError, match=r"must not be used as .* Use its `\.loss`"):
            transform(lambda h: chunked_nll(h, weight, labels))(hidden)


def test_what_a_tuple_can_do_stays(backend):
    out = result(backend)
    loss, num_tokens, *rest = out
    assert (loss is out.loss, num_tokens is out[1], len(rest)) == (True, True, len(out) - 2)
    assert isinstance(out, tuple)
    assert not hasattr(out, "shape")
    assert out._replace(z_loss=None).z_loss is None
    assert out != None  # noqa: E711 - as libraries ask
    assert out == out
    assert str(out) == f"{out}" == repr(out)
    for same in (copy.copy(out), copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        assert type(same) is type(out)
        assert float(same.loss) == float(out.loss)
    assert np.asarray(tuple(out), dtype=object).shape == (len(out),)


@pytest.mark.jax
def test_a_result_is_a_pytree():
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_nll

    hidden, weight, labels = arrays("jax")

    def call(h):
        return chunked_nll(h, weight, labels)

    out = jax.jit(call)(hidden)
    mapped = jax.vmap(call)(hidden[None])
    (_, of_scan), aux = (
        jax.lax.scan(lambda c, h: (c, call(h)), 0, hidden[None]),
        jax.grad(lambda h: (call(h).loss, call(h)), has_aux=True)(hidden)[1],
    )
    for other in (out, mapped, of_scan, aux, jax.device_get(out), jax.tree.map(abs, out)):
        assert type(other) is type(out)
    assert jax.jit(lambda x: x.loss)(out).shape == ()


@pytest.mark.torch
@pytest.mark.slow
def test_a_compiled_function_returns_a_result():
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_nll

    hidden, weight, labels = arrays("torch")
    before_2_12 = torch.__version__.startswith("2.11.")  # traces `_replace` of no NamedTuple

    def call(h):
        out = chunked_nll(h, weight, labels)
        loss, *_ = out
        return loss + out.loss, out if before_2_12 else out._replace(z_loss=None)

    twice, out = torch.compile(call, fullgraph=True)(hidden)
    assert type(out).__name__ == "NLLOutput"
    assert twice == 2 * out.loss
    with pytest.raises(TypeError, match=r"Use its `\.loss`"):
        torch.compile(lambda h: chunked_nll(h, weight, labels) * 2)(hidden)
