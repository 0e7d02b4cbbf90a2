"""Which derivatives are wanted, and those that are refused because they would be dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import GetAttrKey

from xentlib.checks.call import refuse_derivative
from xentlib.checks.validators import to_learn
from xentlib.jax.core.device import traced_for_its_platform

T = TypeVar("T")

REFUSED = ("z_loss", "logprobs", "entropy", "lse")  # results of `chunked_nll` without a derivative


def differentiable(
    function: Callable[..., T], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., T]:
    """`function(options, arrays)` with its derivatives, all traced for the options' platform."""
    function, forward, backward = map(traced_for_its_platform, (function, forward, backward))
    whole = jax.custom_vjp(function, nondiff_argnums=(0,))
    whole.defvjp(forward, backward, symbolic_zeros=True)
    return whole


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    low_in: bool = False
    low_out: bool = False


def wanted(constants: Any, *primals: Any) -> Needs:
    """Which gradients a `custom_vjp` is asked for: what is frozen costs no GEMM.

    With symbolic zeros its arguments come with `.perturbed`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(constants, is_leaf=is_primal)
    for path, primal in leaves:
        if primal.perturbed:
            names = [x.name if isinstance(x, GetAttrKey) else str(x.key) for x in path]
            name = names[-1]
            if names[0] == "teacher":  # whose hidden states are logits, without a weight
                logits = name == "hidden" and constants.teacher.weight is None
                name = f"teacher.{'logits' if logits else name}"
            raise ValueError(
                f"`{name}` must be a constant; got an array that is differentiated, whose gradient "
                f"is not computed. Pass `jax.lax.stop_gradient({name})`{to_learn(name)}."
            )
    return Needs(*(p is not None and bool(p.perturbed) for p in primals))


@jax.custom_jvp
def differentiated_once(values: Any) -> Any:
    """The values, whose own derivative is refused. A loop refuses it backwards by itself, in other
    words; forwards, and of one chunk without a loop, it would be whatever the steps, roundings and
    clamps included, have as derivatives."""
    return values


@differentiated_once.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise RuntimeError(
        "`xentlib.jax` must be differentiated once; got a derivative of its gradient, which it "
        "does not compute. Use full logits for those."
    )


def is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def primal_values(primals: Any) -> Any:
    """The arrays of arguments that come with `.perturbed`."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=is_primal)


def refused(cotangent: Any, names: Sequence[str] = REFUSED) -> jax.Array | None:
    """The upstream gradient of the loss, None without one; NaN where a loss depends on a result
    without a derivative: an entropy bonus would add 0 to every gradient without a word. A trace
    cannot raise, as scans and checkpoints fill in zeros for what was not used."""
    known = {name: getattr(cotangent, name) for name in ("loss", *names)}
    known = {k: g for k, g in known.items() if g is not None and not isinstance(g, SymbolicZero)}
    upstream: jax.Array | None = known.pop("loss", None)
    for g in known.values():
        cotangent = jnp.zeros((), g.dtype) if upstream is None else upstream
        upstream = jnp.where((g != 0).any(), jnp.nan, cotangent)
    return upstream


def named(results: dict[str, jax.Array], function: str = "chunked_nll") -> dict[str, jax.Array]:
    """Results without a derivative, which raises where its value is known, outside `jit`."""
    try:
        return _named(function, results)
    except NotImplementedError:  # an eager `shard_map` has no rule: there `refused` gives NaN
        return results


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _named(function: str, results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return results


def _named_bwd(function: str, _: None, cotangents: dict[str, Any]) -> Any:
    for name, g in cotangents.items():
        if not isinstance(g, SymbolicZero | jax.core.Tracer) and (g != 0).any():
            refuse_derivative(name, f"jax.lax.stop_gradient({name})", function)
    zero = SymbolicZero
    return ({name: None if isinstance(g, zero) else g for name, g in cotangents.items()},)


_named.defvjp(lambda _, results: (primal_values(results), None), _named_bwd, symbolic_zeros=True)
