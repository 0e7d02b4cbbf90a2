"""A head with a low-rank part in JAX: leaves by name, a call, and its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from helpers.lowrank import LowProblem, V, given_to
from xentlib.jax import LowRankHead, chunked_nll
from xentlib.tools.harness.device import numpy_of, on_jax
from xentlib.tools.harness.problems import Upstream, upstream_of

CHUNK = 64 * V * 4  # of as few tokens as a CPU has in one: several chunks from 65 on
NAMES = ("hidden", "a", "b")


def leaves_of(p: LowProblem) -> dict[str, Any]:
    named = {"hidden": p.base.hidden, "weight": p.base.weight, "a": p.a, "b": p.b}
    return {name: on_jax(x) for name, x in named.items()}


def head_of(p: LowProblem, leaves: dict[str, Any]) -> LowRankHead[jax.Array]:
    keep = None if p.keep is None else jnp.asarray(p.keep)
    return LowRankHead(leaves["weight"], leaves["a"], leaves["b"], p.scale, keep)


def called(p: LowProblem, leaves: dict[str, Any], function: Any = chunked_nll, **more: Any) -> Any:
    if function is chunked_nll:
        more.setdefault("outputs", ("lse", "logprobs"))
    given = {name: on_jax(x) for name, x in given_to(p, function.__name__).items()}
    given |= {"max_chunk_bytes": CHUNK, **more}
    return function(leaves["hidden"], head_of(p, leaves), on_jax(p.base.labels), **given)


def total(
    p: LowProblem, wanted: dict[str, Any], rest: dict[str, Any], function: Any, **more: Any
) -> tuple[Any, Any]:
    """A loss whose gradients of the outputs are the upstream ones, and the outputs."""
    out = called(p, rest | wanted, function, **more)
    if function is chunked_nll:
        return out.loss * jnp.asarray(p.base.upstream, out.loss.dtype), out
    upstream: Upstream = upstream_of(p.base, 5)
    pairs = zip(upstream, (out.logprobs, out.entropy, out.lse), strict=True)
    return sum((jnp.asarray(g, x.dtype) * x).sum() for g, x in pairs), out


def gradients(
    p: LowProblem,
    function: Any = chunked_nll,
    *,
    names: tuple[str, ...] = NAMES,
    wrap: Any = lambda f: f,
    **more: Any,
) -> tuple[Any, dict[str, Any]]:
    """Outputs, and gradients of the named leaves; the others are frozen."""
    leaves = leaves_of(p)
    wanted = {name: leaves.pop(name) for name in names}

    def loss(wanted: dict[str, Any], rest: dict[str, Any]) -> tuple[Any, Any]:
        return total(p, wanted, rest, function, **more)

    found, out = wrap(jax.grad(wrap(loss), has_aux=True))(wanted, leaves)
    return out, {name: numpy_of(x) for name, x in found.items()}
