"""Which derivatives are wanted, and those that are refused because they would be dropped."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

__all__ = ["Needs", "differentiated_once", "primal_values", "wanted"]


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
    for name, primal in constants._asdict().items():
        if primal is not None and primal.perturbed:
            raise ValueError(
                f"`{name}` must be a constant; got an array that is differentiated, whose gradient "
                f"is not computed. Pass `jax.lax.stop_gradient({name})`."
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


def primal_values(primals: Any) -> Any:
    """The arrays of arguments that come with `.perturbed`."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))
