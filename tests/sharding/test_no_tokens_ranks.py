"""Calls of no token where ranks or devices share the head: on one rank of two, and on all devices
of a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.tokenless import ALL, V, arrays
from xentlib.contract import check, failures
from xentlib.tools.harness.ranks import run_ranks

pytestmark = pytest.mark.slow
# Of functions whose logits, or whose probabilities of all classes, stay with their tokens.
STAY = ("given", "probabilities", "divergence of logits", "low rank")
TRAVEL = [name for name in ALL if not name.startswith(STAY) or name == "probabilities of a few"]
OF_HEAD = [name for name in ALL if not name.startswith("given")]


@pytest.mark.torch
def test_one_rank_without_tokens() -> None:
    """A9: nothing of its own, and the gradient of its rows from the other rank's tokens."""
    pytest.importorskip("torch")
    from helpers import tokenless_ranks

    of_ranks = run_ranks("torch", tokenless_ranks.one_without, [TRAVEL], 2)
    for name, *results in zip(TRAVEL, *(x for (x,) in of_ranks), strict=True):
        *right, whole = (x.numpy() for x in results[0])
        ours = results[0][0].numpy(), results[1][0].numpy()
        assert not np.any(ours[1]), name
        d_weight = np.concatenate([x[1].numpy() for x in results])
        assert d_weight.shape == whole.shape
        pairs = (d_weight, whole), (ours[0], right[-1])
        for got, exact in pairs:
            measured = check("A9", got, exact.astype(np.float64), metrics=("rho / u",), case=name)
            assert not failures(measured)


WAYS = ("shards", "types unchecked", "within", "tokens", "explicit", "hidden")


# Outside of a program each operation is one, of ten seconds in all: types do not change them, and
# of the ways that name an axis each has a third of the functions.
EAGER = [pytest.param(way, False, marks=[pytest.mark.full] * ("types" in way)) for way in WAYS]
THIRDS = {"shards": ["probabilities", *OF_HEAD[::3]], "within": OF_HEAD[2::3]}
THIRDS["tokens"] = [name for name in OF_HEAD[1::3] if name in TRAVEL]


@pytest.mark.jax
@pytest.mark.parametrize(("way", "jit"), [*((way, True) for way in WAYS), *EAGER])
def test_no_token_on_a_mesh(way: str, jit: bool) -> None:
    """D3: 0, with gradients of 0. Catches: XLA, which ends in an error where a function inside
    `shard_map` has nothing but empty arrays."""
    jax = pytest.importorskip("jax")
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import xentlib.jax as X

    a = arrays((0,))
    tokens = way in ("tokens", "explicit", "hidden")
    axis, rows = ("x", P("x")) if way not in ("explicit", "hidden") else ("data", P("model"))
    rows = P("data") if way == "hidden" else rows
    specs = {name: P(axis) if tokens else P() for name in a}
    specs |= dict.fromkeys(("weight", "teacher_weight", "low_out"), rows) | {"low_in": P()}
    if way in ("shards", "types unchecked", "within"):
        specs["dense"] = P(None, "x")
    names = OF_HEAD if way not in ("tokens", "hidden") else TRAVEL
    names = names if jit else THIRDS.get(way, names)
    how: dict[str, Any] = {"gather": "hidden"} if way == "hidden" else {}
    if axis == "x":
        how = {"vocab_parallel": "x"} | ({"tokens_parallel": "x"} if tokens else {})
    for name in names:

        def loss(hidden: Any, weight: Any, rest: Any, name: str = name) -> Any:
            args = rest | {"hidden": hidden, "weight": weight}
            total = ALL[name](X, args, **how).sum()
            return jax.lax.psum(total, "x") if way == "tokens" else total

        kind = AxisType.Auto if axis == "x" else AxisType.Explicit
        shape, axes = ((4,), ("x",)) if axis == "x" else ((2, 2), ("data", "model"))
        mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(shape))
        rest = {k: v for k, v in a.items() if k not in ("hidden", "weight", "logits")}
        in_specs = (specs["hidden"], specs["weight"], {k: specs[k] for k in rest})
        step = jax.value_and_grad(loss, argnums=(0, 1))
        if axis == "x":
            types = way != "types unchecked"
            place = {"mesh": mesh, "in_specs": in_specs, "check_vma": types}
            if way == "within":
                step = jax.shard_map(step, out_specs=(P(), in_specs[:2]), **place)
            else:
                step = jax.value_and_grad(jax.shard_map(loss, out_specs=P(), **place), (0, 1))
        with jax.set_mesh(mesh):
            inputs = jax.tree.map(
                lambda x, spec, mesh=mesh: jax.device_put(x, NamedSharding(mesh, spec)),
                (a["hidden"], a["weight"], rest),
                in_specs,
            )
            value, made = (jax.jit(step) if jit else step)(*inputs)
        assert float(value) == 0.0, name
        assert made[1].shape == (V, a["weight"].shape[1])
        assert not np.asarray(made[1]).any(), name
