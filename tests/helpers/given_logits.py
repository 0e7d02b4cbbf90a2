"""`vocab_parallel_logprobs` for tests: calls of both backends, NumPy in and out, and their oracle.

Shapes: N tokens, V classes, C columns of a rank, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from xentlib import reference
from xentlib.contract import ROW_OF, SHARES, check, failures
from xentlib.tools.harness.device import numpy_of, on_torch
from xentlib.ulp import dtype_named

V = 157
FLOAT32_MIN = float(np.finfo(np.float32).min)
VALUES = ("logprobs", "entropy", "lse", "correct")


@dataclass(frozen=True)
class Call:
    """Arguments of a call as NumPy arrays; `upstream` are gradients of VALUES[:3]."""

    logits: Any
    labels: Any
    upstream: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> Any:
        return (self.labels != -100) & self.options.get("where", True)


def make(
    seed: int = 1, *, shape: tuple[int, ...] = (61,), columns: int = V, dtype: str = "float32",
    std: float = 3.0, offset: float = 0.0, ignored: float = 0.2, dead: int = 0,
    mask: float = -np.inf, temperature: bool = False, where: bool = False, smoothing: float = 0.0,
) -> Call:  # fmt: skip
    """`dead` classes at `mask`; where that is -inf the first token's label is among them."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((*shape, columns)) * std + offset).astype(dtype_named(dtype))
    labels = rng.integers(0, columns - dead, shape).astype(np.int32)
    labels = np.where(rng.random(shape) < 0.3, logits[..., : columns - dead].argmax(-1), labels)
    labels = np.where(rng.random(shape) < ignored, -100, labels).astype(np.int32)
    if dead:
        logits[..., columns - dead :] = mask
        labels[0] = columns - 1 if mask == -np.inf else labels[0]
    options: dict[str, Any] = {}
    if temperature:
        options["temperature"] = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    if where:
        options["where"] = rng.random(shape) < 0.8
    if smoothing:
        options["label_smoothing"] = smoothing
    upstream = rng.standard_normal((3, *shape)).astype(np.float32)
    return Call(logits, labels, upstream, options)


def in_torch(call: Call, *, logits: Any = None, **more: Any) -> dict[str, Any]:
    import torch

    from xentlib.torch import vocab_parallel_logprobs

    x = on_torch(call.logits if logits is None else logits).requires_grad_()
    options = {name: on_torch(value) for name, value in call.options.items()}
    labels = on_torch(call.labels)
    out = vocab_parallel_logprobs(x, labels, **({"entropy": True} | options | more))
    given = [torch.tensor(g, dtype=y.dtype) for g, y in zip(call.upstream, out) if y is not None]
    torch.autograd.backward([y for y in out[:3] if y is not None], given)
    found = {k: None if y is None else numpy_of(y) for k, y in zip(VALUES, out)}
    return found | {"d_logits": numpy_of(x.grad)}


@cache  # so that calls which differ in their arrays alone are one program
def step_in_jax(spread: Any, jit: bool, options: tuple[tuple[str, Any], ...]) -> Any:
    """Outputs and d logits, by logits, labels, options that are arrays, and upstream gradients."""
    import jax
    import jax.numpy as jnp

    from xentlib.jax import vocab_parallel_logprobs

    def plain(x: Any, labels: Any, arrays: Any, **inside: Any) -> Any:
        return vocab_parallel_logprobs(x, labels, **(dict(options) | arrays | inside))

    function = plain if spread is None else spread(plain)

    def step(x: Any, labels: Any, arrays: Any, upstream: Any) -> Any:
        def used(x: Any) -> Any:
            out = function(x, labels, arrays)
            return out[:3], out

        values, pull, out = jax.vjp(used, x, has_aux=True)
        given = zip(values, upstream)
        return out, *pull(tuple(None if v is None else jnp.asarray(g, v.dtype) for v, g in given))

    return jax.jit(step) if jit else step


def in_jax(
    call: Call, *, logits: Any = None, spread: Any = None, jit: bool = False, **more: Any
) -> dict[str, Any]:
    """`spread` is what makes the function of logits, labels and options out of the plain one. One
    program with `jit`: `shard_map` compiles each operator for itself without."""
    import jax
    import jax.numpy as jnp

    logits = call.logits if logits is None else logits
    with jax.enable_x64(logits.dtype == np.float64):
        options = {"entropy": True} | call.options | more
        arrays = {k: jnp.asarray(x) for k, x in options.items() if isinstance(x, np.ndarray)}
        rest = tuple((k, x) for k, x in options.items() if k not in arrays)
        step = step_in_jax(spread, jit, rest)
        out, d_logits = step(jnp.asarray(logits), jnp.asarray(call.labels), arrays, call.upstream)
        for x in out:  # a copy on every device
            for shard in () if x is None else x.addressable_shards:
                held = check("A13", np.asarray(shard.data), np.asarray(x), metrics=[BITS])
                assert not failures(held)
        found = {name: None if x is None else np.asarray(x) for name, x in zip(VALUES, out)}
        return found | {"d_logits": np.asarray(d_logits)}


def given_in(backend: str, **options: Any) -> Any:
    import importlib

    function = importlib.import_module(f"xentlib.{backend}").vocab_parallel_logprobs
    return lambda x, y: [v for v in function(x, y, **options)[:3] if v is not None]


RUN = {"torch": in_torch, "jax": in_jax}
BITS = "unequal entries"


def oracle(call: Call) -> reference.LogprobReference:
    """Given logits: hidden = I and weight = logits^T, so d weight is d logits transposed. Classes
    at -inf come as a bias, for 0 * -inf is none."""
    flat = call.logits.reshape(-1, call.logits.shape[-1]).astype(np.float64)
    dead = np.isneginf(flat).any(axis=0)
    states = np.eye(len(flat), max(len(flat), 1))
    return reference.logprobs_reference(
        states,
        flat.shape[1] * [[0.0]] if not len(flat) else np.where(dead, 0.0, flat).T,
        call.labels.reshape(-1),
        bias=np.where(dead, -np.inf, 0.0),
        **dict(zip(("d_logprobs", "d_entropy", "d_lse"), call.upstream.reshape(3, -1))),
        **{k: x.ravel() if isinstance(x, np.ndarray) else x for k, x in call.options.items()},
    )  # fmt: skip


def hold_given(call: Call, got: dict[str, Any]) -> None:
    """A0, A3, A5 or A7, A19; the bound of A2 for values whose terms cancel, as for shards. Float64
    is held to the same bounds with 2^-53 for u."""
    o, low = oracle(call), call.logits.dtype.itemsize == 2
    double = call.logits.dtype == np.float64
    wide = np.dtype("float64" if double else "float32")
    shape, valid = call.labels.shape, call.valid
    z = call.logits.astype(np.float64).reshape(-1, call.logits.shape[-1])
    z = z / np.reshape(call.options.get("temperature", 1.0), (-1, 1))
    peak = z.max(axis=1, initial=-np.inf)
    scale = np.maximum(np.abs(o.lse), 1.0)
    found = check("A0", got["correct"], o.correct.reshape(shape))

    def error(value: Any, exact: Any) -> Any:
        """As it would be in float32."""
        return exact + (value.astype(np.float64) - exact) * 2.0**29 if double else value

    for name in ("logprobs", "entropy", "lse"):
        value, exact = got[name].reshape(-1), getattr(o, name)
        assert value.dtype == wide
        assert got[name].shape == shape
        sure = np.isfinite(exact)
        value, exact, unit = value[sure], exact[sure], scale[sure]
        found += check("A2", error(value, exact), exact, magnitude=unit, quantity=name)
        gone = got[name][~valid]
        found += check("A0", gone, np.zeros_like(gone), quantity=f"{name}, not valid")
    assert not np.any(got["logprobs"] > 0)
    near = np.maximum(np.abs(peak), o.lse - peak)
    here = valid.reshape(-1)
    lse = error(got["lse"].reshape(-1), o.lse)
    found += check("A3", lse[here], o.lse[here], magnitude=near[here])
    dz = got["d_logits"]
    assert dz.dtype == call.logits.dtype
    assert dz.shape == call.logits.shape
    gone = dz[~valid]
    found += check("A0", gone, np.zeros_like(gone), quantity="d logits, not valid")
    dz, exact = dz.reshape(z.shape), o.d_weight.T[: len(z)]
    if low:
        found += check(ROW_OF[dz.dtype.name], dz, exact, magnitude=np.abs(exact))
        found += check("A19", dz, exact, metrics=(SHARES[dz.dtype.name],))
    else:
        # p comes from the float32 lse: its rounding, 512 u at 1e4, is in the bound, not in rho.
        metrics = ("tau", "rho / u") if np.abs(o.lse).max(initial=0.0) < 1e3 else ("tau",)
        found += check("A5", error(dz, exact), exact, o.bound_weight.T[: len(z)], metrics=metrics)
    assert not failures(found)


def same_bits(got: dict[str, Any], want: dict[str, Any], row: str) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert not failures(check(row, value, want[name], metrics=[BITS], quantity=name))
