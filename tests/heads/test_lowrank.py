"""A head with a low-rank part in both backends: the same bits in audit mode, the dense head that it
stands for, and the same sentences for what is refused.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.lowrank import CASES, dense, given_to, held_to, hold, low_problem, oracle
from xentlib.head import LowRankHead
from xentlib.tools.harness.device import numpy_of, on_jax, on_torch
from xentlib.tools.harness.problems import upstream_of

pytestmark = [pytest.mark.torch, pytest.mark.jax]
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import xentlib.jax  # noqa: E402
import xentlib.torch  # noqa: E402

NAMES = ("hidden", "a", "b", "weight")
FUNCTIONS = pytest.mark.parametrize("function", ["chunked_nll", "chunked_logprobs"])
Found = dict[str, Any]


def arrays_of(p: Any) -> dict[str, Any]:
    return {"hidden": p.base.hidden, "a": p.a, "b": p.b, "weight": p.base.weight}


def in_torch(p: Any, function: str, budget: int | None = None) -> Found:
    leaves = {name: on_torch(x).requires_grad_() for name, x in arrays_of(p).items()}
    head = LowRankHead(leaves["weight"], leaves["a"], leaves["b"], p.scale, on_torch(p.keep))
    given = {name: on_torch(x) for name, x in given_to(p, function).items()}
    given |= {"compute_dtype": "float64", "max_chunk_bytes": budget, **asked(function)}
    out = getattr(xentlib.torch, function)(leaves["hidden"], head, on_torch(p.base.labels), **given)
    if function == "chunked_nll":
        out.loss.backward(torch.tensor(p.base.upstream, dtype=out.loss.dtype))
    else:
        upstream = [on_torch(x) for x in upstream_of(p.base, 5)]
        torch.autograd.backward([out.logprobs, out.entropy, out.lse], upstream)
    return outputs_of(out) | {f"d {name}": numpy_of(x.grad) for name, x in leaves.items()}


def in_jax(p: Any, function: str, budget: int | None = None) -> Found:
    with jax.enable_x64(True):
        given = {name: on_jax(x) for name, x in given_to(p, function).items()}
        given |= {"compute_dtype": "float64", "max_chunk_bytes": budget, **asked(function)}
        labels, keep = on_jax(p.base.labels), on_jax(p.keep)

        def call(hidden: Any, a: Any, b: Any, weight: Any) -> Any:
            head = LowRankHead(weight, a, b, p.scale, keep)
            out = getattr(xentlib.jax, function)(hidden, head, labels, **given)
            if function == "chunked_nll":
                return out.loss, out
            return (out.logprobs, out.entropy, out.lse), out

        leaves = [on_jax(x) for x in arrays_of(p).values()]
        _, pull, out = jax.vjp(call, *leaves, has_aux=True)
        upstream: Any = jax.numpy.float32(p.base.upstream)
        if function != "chunked_nll":
            upstream = tuple(map(on_jax, upstream_of(p.base, 5)))
        found = pull(upstream)
        return outputs_of(out) | {f"d {name}": numpy_of(x) for name, x in zip(NAMES, found)}


def asked(function: str) -> dict[str, Any]:
    return {"outputs": ("lse", "logprobs")} if function == "chunked_nll" else {"entropy": True}


def outputs_of(out: Any) -> Found:
    names = ("loss", "lse", "logprobs", "entropy")
    found = {name: getattr(out, name, None) for name in names}
    return {name: numpy_of(x) for name, x in found.items() if x is not None}


@FUNCTIONS
@pytest.mark.parametrize("name", CASES)
def test_audit_mode_gives_the_same_bits(function: str, name: str) -> None:
    """A1: values, and gradients of the adapters, the hidden states and a head that trains."""
    p = low_problem(CASES[name])
    ours, theirs = in_torch(p, function, 4096), in_jax(p, function, 128 * 157 * 8)
    assert set(ours) == set(theirs) > {"lse", *(f"d {name}" for name in NAMES)}
    for key, x in ours.items():
        held_to("A1", theirs[key], x, quantity=key)


@pytest.mark.parametrize("adapter", ["bfloat16", "float32"])
def test_audit_mode_of_sixteen_bits(adapter: str) -> None:
    """A1: of a bfloat16 head, each gradient rounded once to the dtype of its array; with a mask."""
    from dataclasses import replace

    p = low_problem(replace(CASES["plain"], dtype="bfloat16"), 5, adapter=adapter, dropped=0.3)
    ours, theirs = in_torch(p, "chunked_nll"), in_jax(p, "chunked_nll")
    assert [theirs[f"d {x}"].dtype.name for x in NAMES] == [
        "bfloat16",
        adapter,
        adapter,
        "bfloat16",
    ]
    for key, x in ours.items():
        held_to("A1", theirs[key], x, quantity=key)


@pytest.mark.parametrize("run", [in_torch, in_jax])
@pytest.mark.parametrize("name", ["options", "HV"])
def test_it_is_the_dense_head(run: Any, name: str) -> None:
    """A1: weight + scale B A in float64, rounded once; and the oracle's gradients."""
    p = low_problem(CASES[name])
    whole, found = dense(p).reference(), run(p, "chunked_nll")
    held_to("A1", found["loss"], whole.loss.astype(np.float32))
    hold(oracle(p), {name: found[f"d {name}"] for name in NAMES})


# What is wrong with a head, in NumPy, and how its sentence begins.
WRONG = {
    "a": (lambda h: h._replace(a=h.a.T), ValueError, "`a` must have shape (rank, 24)"),
    "b": (lambda h: h._replace(b=h.b[:-1]), ValueError, "`b` must have shape (157, 3)"),
    "scale": (lambda h: h._replace(scale=np.inf), ValueError, "`scale` must be a finite number"),
    "text": (lambda h: h._replace(scale="2"), ValueError, "`scale` must be a finite number"),
    "flag": (lambda h: h._replace(scale=True), ValueError, "`scale` must be a finite number"),
    "double": (
        lambda h: h._replace(b=h.b.astype(np.float64)), TypeError,
        "`b` must be float32 or below",
    ),
    "integers": (
        lambda h: h._replace(a=h.a.astype(np.int32)), TypeError, "`a` must be floating point",
    ),
    "no array": (
        lambda h: h._replace(b=None), TypeError, "`b` of `LowRankHead` must be an array",
    ),
    "mask": (lambda h: h._replace(keep=h.a), TypeError, "`keep` must be bool or None"),
    "mask's shape": (
        lambda h: h._replace(keep=np.ones(3, bool)), ValueError,
        "`keep` must have the shape of `hidden`",
    ),
    "twice": (
        lambda h: LowRankHead(h, h.a, h.b), TypeError,
        "`weight` of `LowRankHead` must have no low-rank part of its own",
    ),
}  # fmt: skip


def refusal(package: Any, cross: Any, head: Any, error: type[Exception], **more: Any) -> str:
    p = low_problem(CASES["plain"])

    def crossed(x: Any) -> Any:
        return LowRankHead(*map(crossed, x)) if isinstance(x, LowRankHead) else cross(x)

    with pytest.raises(error) as caught:
        package.chunked_nll(cross(p.base.hidden), crossed(head), cross(p.base.labels), **more)
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_head_is_refused(name: str) -> None:
    """D12: in one sentence, the same in both."""
    change, error, begins = WRONG[name]
    p = low_problem(CASES["plain"])
    head = change(LowRankHead(p.base.weight, p.a, p.b, p.scale))
    ours = refusal(xentlib.torch, on_torch, head, error)
    with jax.enable_x64(True):
        theirs = refusal(xentlib.jax, on_jax, head, error)
    assert ours == theirs
    assert ours.startswith(begins)


def test_a_route_is_refused() -> None:
    p = low_problem(CASES["plain"])
    head = LowRankHead(p.base.weight, p.a, p.b, p.scale)
    of_torch, of_jax = (xentlib.torch, on_torch), (xentlib.jax, on_jax)
    for where, gather in ((of_torch, "stream"), (of_jax, "stream"), (of_jax, "hidden")):
        said = refusal(*where, head, ValueError, gather=gather)
        assert said.startswith("`weight` must be one array here; got a `LowRankHead` with gather=")
