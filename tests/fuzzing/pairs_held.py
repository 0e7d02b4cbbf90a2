"""A call of `pairs.py` through a backend, and what it gives against full logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fuzzing.full_logits import bounded
from fuzzing.pairs import Pair
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import Outcome, outcome_of
from xentlib.tools.harness.device import numpy_of

ROW = {"d_hidden": "A5"}


def run_torch(pair: Pair) -> Outcome:
    return outcome_of("torch", pair.call, pair.upstream)


_STEPS: dict[Any, Any] = {}


def run_jax(pair: Pair) -> Outcome:
    """In a program, of which arrays are arguments: one for all calls of a form."""
    import jax

    from xentlib import jax as ours

    call, upstream = pair.call, pair.upstream
    leaf = next(iter(call.leaves.values()))
    x64 = "float64" in (call.keywords.get("compute_dtype"), leaf.dtype.name)
    arrays = {n: x for n, x in call.keywords.items() if n == "teacher" or isinstance(x, np.ndarray)}
    rest = {name: x for name, x in call.keywords.items() if name not in arrays}
    teacher = arrays.get("teacher")
    of_teacher = {} if teacher is None else teacher._asdict()
    still = {n: x for n, x in of_teacher.items() if not isinstance(x, np.ndarray)}
    moving = {n: x for n, x in of_teacher.items() if isinstance(x, np.ndarray)}
    arrays.pop("teacher", None)

    def value(leaves: Any, labels: Any, arrays: Any, moving: Any, upstream: Any) -> Any:
        keywords = {**rest, **arrays}
        if teacher is not None:
            keywords["teacher"] = type(teacher)(**still, **moving)
        out = call.of(ours, leaves, labels, keywords)
        values = [(getattr(out, name), g) for name, g in upstream.items()]
        finite = jax.numpy.isfinite
        total = sum(
            (jax.numpy.where(finite(x), x, 0) * g.astype(x.dtype)).sum().astype(leaf.dtype)
            for x, g in values
        )
        return total, {n: x for n, x in out._asdict().items() if x is not None}

    inputs = (call.leaves, call.labels, arrays, moving, upstream)
    with jax.enable_x64(x64):
        shapes = str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), inputs))
        key = (call.function, type(teacher), shapes, str((rest, still)))
        if key not in _STEPS:
            if len(_STEPS) > 16:  # a program has mappings, which a process has no end of
                _STEPS.clear()
                jax.clear_caches()
            _STEPS[key] = jax.jit(jax.value_and_grad(value, has_aux=True))
        (_, out), gradients = _STEPS[key](*inputs)
        out = {name: x for name, x in out.items() if name in Outcome._fields}
        out |= {f"d_{name}": g for name, g in gradients.items()}
        return Outcome(**{name: numpy_of(x) for name, x in out.items()})


def held(backend: str, pair: Pair, got: Outcome, without: tuple[str, ...] = ()) -> list[str]:
    """Sentences of what falls short; `without` some outputs."""
    right, bounds = bounded(pair, got.top_ids)
    values, case = got.by_name(), pair.text
    hold = partial(check, backend=backend, case=case)
    measured = []
    for name in right.out.keys() - set(without):
        exact = right.out[name]
        if name not in values:
            measured += [f"{backend} {name}: is missing ({case})"]
            continue
        ours = np.asarray(values[name]).astype(np.float64)
        want = exact.detach().numpy().reshape(ours.shape)
        same = np.isinf(want) & (ours == want)
        ours, want = (np.where(same, 0.0, x) for x in (ours, want))
        bound = np.asarray(bounds[name]).reshape(ours.shape)
        row = ROW.get(name, "A6")
        found = hold(row, ours, want, bound, metrics=("tau",), quantity=name)
        measured += failures(found)
    if got.top_ids is not None:
        measured += of_top(backend, right, got, bounds, case)
    return measured


def of_top(backend: str, right: Any, got: Outcome, bounds: Any, case: str) -> list[str]:
    """Classes that differ, whose log-probabilities are the largest."""
    ids = np.asarray(got.top_ids).reshape(right.count, np.shape(got.top_ids)[-1])
    for row in ids:
        there = row[row >= 0]
        if len(set(there.tolist())) != len(there):
            return [f"{backend} top_ids: one is there twice ({case})"]
    best, ours = right.best.numpy(), right.out["top_logprobs"].detach().numpy()
    there = np.isfinite(best)
    if not np.array_equal(there & right.valid.numpy()[:, None], ids >= 0):
        return [f"{backend} top_ids: too many or too few ({case})"]
    bound = np.asarray(bounds["top_logprobs"]).reshape(best.shape)
    best, ours = (np.where(there, x, 0.0) for x in (best, ours))
    return failures(
        check("A6", ours, best, bound, metrics=("tau",), backend=backend, quantity="top", case=case)
    )
