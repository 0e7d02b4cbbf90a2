"""What `xentlib.checks` may know of a JAX array, and what a trace takes for arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xentlib.checks import LogitsProblem, NLLProblem, Operand
from xentlib.jax.head import Axis, Spread
from xentlib.plan import VocabShard

__all__ = [
    "Arrays",
    "Constants",
    "Needs",
    "Options",
    "as_array",
    "concrete_on_cpu",
    "describe",
    "fixed",
    "flat",
    "need_x64",
    "prepare",
    "values_of",
    "wanted",
    "with_arrays",
]

Needs = tuple[bool, bool, bool]  # gradients of hidden, weight, bias


def describe(x: Any) -> Any:
    """`Operand` of an array; anything else as it is, for the check to accept or refuse."""
    if not is_array(x):
        return x
    device = None
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        devices = x.devices()
        device = str(next(iter(devices))) if len(devices) == 1 else None
    return Operand(tuple(x.shape), str(x.dtype), device)


def as_array(value: Any, neutral: float | None, dtype: str) -> jax.Array | None:
    """A 0-d or per-token array; None where the value changes nothing."""
    if is_array(value):
        return jnp.asarray(value)
    return None if value is None or value == neutral else jnp.asarray(value, dtype=dtype)


def concrete_on_cpu(*arrays: Any) -> bool:
    """Whether values can be read here and now without waiting for an accelerator."""
    for x in arrays:
        if isinstance(x, jax.core.Tracer):
            return False
        if isinstance(x, jax.Array) and not (
            x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices())
        ):
            return False
    return True


def need_x64(compute_dtype: str) -> None:
    """Refuse float64 where JAX would narrow it to float32 without a word."""
    if compute_dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            "`compute_dtype='float64'` must run with 64-bit types; got a JAX that narrows them to "
            "32 bits. Wrap the call in `with jax.enable_x64(True):`."
        )


class Options(NamedTuple):
    """What a trace depends on; hashable, until a trace puts arrays in place of numbers."""

    ignore_index: int
    softcap: Any  # a number; None without one, and until the trace where it is an array
    label_smoothing: float
    z_loss: Any  # a number, 0 until the trace where it is an array
    mean: bool
    entropy: bool
    gemm_dtype: str
    compute_dtype: str
    output_dtype: str
    chunk_bytes: int
    transposed: bool
    axis: Axis | None = None
    spread: Spread | None = None
    predicted: bool = False


class Constants(NamedTuple):
    """Arrays without a gradient, flat; None where absent."""

    where: jax.Array | None
    token_weights: jax.Array | None
    logit_scale: jax.Array | None
    temperature: jax.Array | None
    denominator: jax.Array | None
    shard: jax.Array | None = None  # [2] start and stop of this device's classes, if given
    softcap: jax.Array | None = None  # where it is no number, so that none is compiled for each
    z_loss: jax.Array | None = None
    class_weights: jax.Array | None = None  # [V]


def with_arrays(options: Options, constants: Constants) -> Options:
    """Options of a trace, in the compute dtype."""
    found = {name: getattr(constants, name) for name in ("softcap", "z_loss")}
    given = {k: x.astype(options.compute_dtype) for k, x in found.items() if x is not None}
    return options._replace(**given)


def fixed(value: Any) -> Any:
    """A number that a trace may depend on; None for an array."""
    return None if value is None or is_array(value) else float(value)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


# hidden (or logits), weight, labels, bias, and the rest
Arrays = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None, Constants]


def wanted(constants: Any, *primals: Any) -> Needs:
    """Which gradients a `custom_vjp` is asked for: a frozen head or trunk costs no GEMM.

    With symbolic zeros its arguments come with `.perturbed`.
    """
    for name, primal in constants._asdict().items():
        if primal is not None and primal.perturbed:
            raise ValueError(
                f"`{name}` must be a constant; got an array that is differentiated, whose gradient "
                f"is not computed. Pass `jax.lax.stop_gradient({name})`."
            )
    hidden, weight, bias = (p is not None and bool(p.perturbed) for p in primals)
    return hidden, weight, bias


def values_of(primals: Any) -> Any:
    """The arrays of arguments that come with `.perturbed`."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))


def prepare(
    problem: NLLProblem | LogitsProblem,
    hidden: Any,
    weight: Any,
    labels: Any,
    bias: Any,
    *,
    where: Any,
    logit_scale: Any,
    temperature: Any,
    token_weights: Any = None,
    denominator: Any = None,
    shard: VocabShard | None = None,
    softcap: Any = None,
    z_loss: Any = None,
    class_weights: Any = None,
) -> Arrays:
    """A public call's arguments as arrays."""
    need_x64(problem.compute_dtype)

    def array(x: Any) -> Any:
        return None if x is None else jnp.asarray(x)

    return (
        jnp.asarray(hidden),
        array(weight),
        jnp.asarray(labels),
        array(bias),
        Constants(
            array(where),
            array(token_weights),
            as_array(logit_scale, 1.0, problem.compute_dtype),
            as_array(temperature, 1.0, problem.compute_dtype),
            as_array(denominator, None, problem.compute_dtype),
            None if shard is None else jnp.stack([jnp.int32(shard.start), jnp.int32(shard.stop)]),
            jnp.asarray(softcap) if is_array(softcap) else None,
            jnp.asarray(z_loss) if is_array(z_loss) else None,
            array(class_weights),
        ),
    )


def flat(arrays: Arrays) -> Arrays:
    """Those of `prepare` as a trace takes them: [N, H], and per token [N]."""
    hidden, weight, labels, bias, constants = arrays

    def one(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.reshape(x, (-1,))

    constants = constants._replace(
        where=one(constants.where),
        token_weights=one(constants.token_weights),
        temperature=one(constants.temperature),
    )
    hidden = jnp.reshape(hidden, (labels.size, hidden.shape[-1]))
    return hidden, weight, jnp.reshape(labels, (-1,)), bias, constants
