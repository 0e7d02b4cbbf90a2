"""`CrossCheck` in JAX of heads that are spread over a mesh axis by hand, and of heads with a
low-rank part."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from xentlib.jax import CrossCheck, LowRankHead, SoftLabels, chunked_nll  # noqa: E402
from xentlib.jax.crosscheck_devices import CallRecord, Leaves  # noqa: E402
from xentlib.shards import PaddedVocab  # noqa: E402
from xentlib.tools.crosscheck import (  # noqa: E402
    CheckedStep,
    CrossCheckError,
    CrossCheckWarning,
)

H, V, N, R = 24, 157, 22, 3
PADDED = 160
WANTED = {"loss", "log-probability", "d hidden", "d weight", "d weight of all rows", "d bias"}
LOW = {"d b", "d b of all rows", "d a of all rows"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.3},
    "HV": {"weight_layout": "HV"},
    "bf16": {"dtype": jnp.bfloat16},
    "LoRA": {"rank": R, "keep": True},
    "LoRA, frozen": {"rank": R, "frozen": True, "scale": jnp.float32(0.7)},
    "LoRA, bf16": {"rank": R, "dtype": jnp.bfloat16},
}


def arrays(seed: int, dtype: Any, rank: int, layout: str) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"hidden": (N, H), "weight": (PADDED, H), "bias": (PADDED,)}
    shapes |= {"a": (R, H), "b": (PADDED, R)} if rank else {}
    made = {k: jnp.asarray(rng.standard_normal(s), dtype) for k, s in shapes.items()}
    if layout == "HV":
        made["weight"] = made["weight"].T
    return made


def run(
    check: CrossCheck | None, where: str, steps: int = 2, change: Any = None, **options: Any
) -> Any:
    """`steps` steps; the gradients of the last. `change`: of a gradient by its name."""
    dtype, rank = options.pop("dtype", jnp.float32), options.pop("rank", 0)
    frozen, scale = options.pop("frozen", False), options.pop("scale", 0.7)
    layout = options.get("weight_layout", "VH")
    keep = np.random.default_rng(7).random((N, H)) < 0.8 if options.pop("keep", False) else None
    y = np.random.default_rng(8).integers(V, size=N)
    y[:3] = -100
    sharded = where != "whole"
    options |= {"vocab_parallel": PaddedVocab("tp", V)} if sharded else {}
    both = where == "with data"

    def loss_of(p: dict[str, Any], step: Any, keep: Any, y: Any) -> Any:
        call = partial(check.nll, step) if check else chunked_nll
        weight = jax.lax.stop_gradient(p["weight"]) if frozen else p["weight"]
        head = LowRankHead(weight, p["a"], p["b"], scale, keep) if rank else weight
        more = {"denominator": jax.lax.psum((y >= 0).sum(), "data")} if both else {}
        out = call(p["hidden"], head, y, bias=p["bias"], **options, **more)
        return 1.7 * (jax.lax.psum(out.loss, "data") if both else out.loss)

    function: Any = loss_of
    if sharded:
        rows = P(None, "tp") if layout == "HV" else P("tp")
        data = P("data") if both else P()
        of = {"hidden": data, "weight": rows, "bias": P("tp"), "a": P(), "b": P("tp")}
        of = {k: of[k] for k in arrays(0, dtype, rank, layout)}
        mesh = jax.make_mesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
        types = where != "without types"
        function = jax.shard_map(
            loss_of, mesh=mesh, in_specs=(of, P(), data, data), out_specs=P(), check_vma=types
        )
    step = jax.jit(jax.grad(function))
    for k in range(steps):
        p = arrays(k, dtype, rank, layout)
        if not sharded:
            rows = (slice(None), slice(V)) if layout == "HV" else slice(V)
            p["weight"], p["bias"] = p["weight"][rows], p["bias"][:V]
            p |= {"b": p["b"][:V]} if rank else {}
        got = step(p, k, keep, y)
    if check:
        check.wait()
    return jax.tree.map(np.asarray, got)


PLACES = ("whole", "sharded", "without types", "with data")
PAIRS = {
    ("LoRA", "whole"),
    ("options", "sharded"),
    ("LoRA, frozen", "sharded"),
    ("bf16", "without types"),
    ("HV", "with data"),
    ("LoRA, bf16", "with data"),
}


def cases(pairs: Any, chosen: Any) -> list[Any]:
    """The chosen ones; the others in a run of whole products."""
    return [pytest.param(*x, marks=() if x in chosen else pytest.mark.full) for x in pairs]


@pytest.mark.parametrize(("case", "where"), cases(itertools.product(CASES, PLACES), PAIRS))
def test_a_right_step_passes_and_keeps_its_bits(case: str, where: str) -> None:
    if where == "whole" and "LoRA" not in case:
        pytest.skip("in test_crosscheck_jax.py")
    if where != "whole" and jax.device_count() < 4:
        pytest.skip("there are fewer than four devices")
    check = CrossCheck(every=1, tokens=9, rows=9, exceeded="raise")
    got = run(check, where, **CASES[case])
    # The tokens of two devices have one gradient of the head, those of two copies each its own.
    times = {"whole": 1, "sharded": 2, "without types": 2, "with data": 1}[where]
    assert [x.step for x in check.results] == [0] * times + [1] * times
    for result in check.results:
        named, of = {m.quantity for m in result.measurements}, CASES[case]
        want = WANTED | (LOW if "rank" in of else set())
        # Parts of a sum that were rounded to bfloat16 are left out.
        want -= {"d hidden"} if "dtype" in of and where == "without types" else set()
        want -= {"d a of all rows"} if "dtype" in of and where == "without types" else set()
        want -= {"d weight", "d weight of all rows"} if "frozen" in of else set()
        assert want <= named, want - named
    assert jax.tree.all(jax.tree.map(np.array_equal, got, run(None, where, **CASES[case])))


def test_an_evaluation_over_shards() -> None:
    """A loss without a gradient."""
    if jax.device_count() < 4:
        pytest.skip("there are fewer than four devices")
    check, p = CrossCheck(every=1, exceeded="raise"), arrays(0, jnp.float32, 0, "VH")
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))

    def loss(p: dict[str, Any], step: Any, y: Any) -> Any:
        named = {"bias": p["bias"], "vocab_parallel": PaddedVocab("tp", V)}
        return check.nll(step, p["hidden"], p["weight"], y, **named).loss

    specs = {"hidden": P(), "weight": P("tp"), "bias": P("tp")}
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P())
    jax.jit(mapped)(p, 0, jnp.arange(N))
    check.wait()
    (result,) = check.results
    assert {"loss", "log-probability", "lse of all tokens"} < {
        m.quantity for m in result.measurements
    }


PLANTED = ("zero row", "NaN", "1e-3", "all NaN")


def plant(monkeypatch: Any, kind: str, field: str, row: int) -> None:
    """On the second device of the vocabulary's axis, in that row of a gradient of the head."""
    import xentlib.jax.losses.index as module

    right = module.scale_gradients

    def scale_gradients(*given: Any) -> dict[str, Any]:
        values = right(*given)
        x = values[field]
        if kind == "all NaN":
            wrong = jnp.full_like(x, jnp.nan)
        elif kind == "1e-3":
            some = np.random.default_rng(row).standard_normal(x.shape[1])
            added = jnp.asarray(1e-3 * some / np.linalg.norm(some), x.dtype)
            wrong = x.at[row].add(added * jnp.linalg.norm(x[row]))
        else:
            wrong = x.at[row].set(0.0 if kind == "zero row" else jnp.nan)
        second = jax.lax.axis_index("tp") == 1
        return {**values, field: jnp.where(second, wrong, x)}

    monkeypatch.setattr(module, "scale_gradients", scale_gradients)
    jax.clear_caches()


WHERE = (("sharded", "weight"), ("with data", "low_out"))
CAUGHT = {("zero row", *WHERE[0]), ("1e-3", *WHERE[1])}


@pytest.mark.parametrize(
    ("kind", "where", "field"), cases([(x, *y) for x in PLANTED for y in WHERE], CAUGHT)
)
def test_a_planted_error_is_caught(where: str, field: str, kind: str, monkeypatch: Any) -> None:
    """Rows 80 to 156 are the second device's."""
    if jax.device_count() < 4:
        pytest.skip("there are fewer than four devices")
    check = CrossCheck(every=1, tokens=9, rows=9)
    options = {"rank": R} if field == "low_out" else {}
    try:
        plant(monkeypatch, kind, field, 31)
        name, row = "b" if options else "weight", 80 if kind == "all NaN" else 111
        with pytest.warns(CrossCheckWarning, match=f"d {name} of all rows.*worst is row {row}"):
            run(check, where, **options)
    finally:
        monkeypatch.undo()
        jax.clear_caches()


def test_misuse_is_loud() -> None:
    check, y = CrossCheck(every=1), jnp.zeros(N, jnp.int32)
    p = arrays(0, jnp.float32, R, "VH")
    with pytest.raises(ValueError, match="`vocab_parallel` must be"):
        check.nll(0, p["hidden"], p["weight"], y, vocab_parallel="tp")
    few = SoftLabels(y[:, None], jnp.ones((N, 1)))
    for probs in (few, jnp.full((N, PADDED), 1 / PADDED)):
        with pytest.raises(CrossCheckError, match="labels that are classes; got class probab"):
            check.nll(0, p["hidden"], p["weight"], probs)
    other = CrossCheck(every=1, against="other")
    head = LowRankHead(p["weight"], p["a"], p["b"])
    with pytest.raises(CrossCheckError, match="`against` must be 'oracle' for a head whose rows"):
        other.nll(0, p["hidden"], head, y)
    with pytest.raises(ValueError, match="`scale` must be a constant"):
        jax.grad(lambda s: check.nll(0, p["hidden"], head._replace(scale=s), y).loss)(0.7)


def test_devices_that_are_elsewhere() -> None:
    if jax.device_count() < 4:
        pytest.skip("there are fewer than four devices")
    check = CrossCheck(every=1)
    with pytest.raises(CrossCheckError, match="its rows or its tokens spread by hand"):
        run(check, "sharded", tokens_parallel="tp")
    nothing = CallRecord(0, (0, 0), Leaves(None, None), None, {}, None, 1.0, Leaves(None, None))
    assert check.waiting.all_of("a call", 1, nothing, 2) == []
    check.results.append(CheckedStep(0, (), 0, 0.0))
    with pytest.raises(CrossCheckError, match="all devices of its mesh axes in one process"):
        check.wait()
    assert check.waiting.all_of("a call", 0, nothing, 2) == [nothing] * 2
    check.wait()


def test_micro_batches_and_two_heads_over_shards() -> None:
    """Each call of a scan, and of each head, is put together by itself, with tokens over another
    axis."""
    if jax.device_count() < 4:
        pytest.skip("there are fewer than four devices")
    check, p = CrossCheck(every=1, exceeded="raise"), arrays(0, jnp.float32, 0, "VH")
    mesh = jax.make_mesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    p["other"] = p["weight"][::-1]

    def loss(p: dict[str, Any], step: Any, y: Any) -> Any:
        def both(total: Any, micro_batch: Any) -> Any:
            x, y = micro_batch
            how: dict[str, Any] = {"vocab_parallel": PaddedVocab("tp", V), "reduction": "sum"}
            heads = (check.nll(step, x, p[name], y, **how).loss for name in ("weight", "other"))
            return total + sum(heads), None

        parts = p["hidden"].reshape(-1, 1, H), y.reshape(-1, 1)
        start = jax.lax.pcast(jnp.zeros(()), "data", to="varying")
        return jax.lax.psum(jax.lax.scan(both, start, parts)[0], "data")

    specs = {"hidden": P("data"), "weight": P("tp"), "bias": P("tp"), "other": P("tp")}
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P())
    y = jnp.arange(N) % V
    p["hidden"], y = p["hidden"][:8], y[:8]
    jax.jit(jax.grad(mapped))(p, 0, y)
    check.wait()
    assert [x.calls for x in check.results] == [2] * 8  # four micro-batches, two heads
    for result in check.results:
        assert {"d hidden", "d weight of all rows"} < {m.quantity for m in result.measurements}
