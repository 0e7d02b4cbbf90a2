"""The most probable classes of each token against the oracle, in both backends: which they are, and
their log-probabilities and gradients, which are those of the same classes as `ids`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.math.classes import Wanted
from xentlib.math.softmax import NonTargetStats
from xentlib.teacher import TeacherTopK
from xentlib.tools.harness.backends import (
    Call,
    Outcome,
    further,
    outcome_of,
    run_logprobs,
    with_ids,
)
from xentlib.tools.harness.cases import logit_sets
from xentlib.tools.harness.device import numpy_of, on_jax, on_torch
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import (
    Case,
    Problem,
    build,
    logits_problem,
    upstream_of,
    with_classes,
)

K = 7
EXTRAS: dict[str, Any] = {"where": True, "token_temperature": True}
CASES = {
    "alone": Case("top", 61, 24, 301, std=3.0, confident=0.5),
    "bf16": Case("top-bf16", 61, 24, 301, std=3.0, dtype="bfloat16", kept=12, ids=5, **EXTRAS),
    "options": Case("top-all", 61, 23, 301, std=3.0, confident=0.5, kept=12, ids=5, **EXTRAS,
                    options={"softcap": 5.0, "logit_scale": 0.8}),
}  # fmt: skip


def run(backend: str, problem: Problem, top_k: int, **more: Any) -> tuple[Outcome, Problem]:
    """A call with entropy and gradients of all it returns; and the problem that has what it found
    as `ids`, which is what the oracle is given."""
    keywords = {**problem.per_token_options, **further(problem), "where": problem.where, **more}
    keywords |= {"entropy": True, "top_k": top_k}
    shape = len(problem.labels), top_k
    d_top = np.random.default_rng(9).standard_normal(shape).astype(np.float32)
    upstream = with_ids(problem, upstream_of(problem, 5)) | {"top_logprobs": d_top}
    call = Call("chunked_logprobs", problem.leaves, problem.labels, keywords)
    got = outcome_of(backend, call, upstream)
    pairs = (problem.ids, got.top_ids), (problem.d_ids, d_top)
    ids, d_ids = (np.concatenate([x for x in pair if x is not None], 1) for pair in pairs)
    return got, problem.changed(ids=ids, d_ids=d_ids)


def right_ids(problem: Problem, logits: Any, top_k: int) -> Any:
    """The largest logits of each token, of several that are equal the lowest classes; of a kept set
    those that were kept."""
    rows = np.arange(len(logits))[:, None]
    there = np.ones(logits.shape, bool)
    if problem.kept is not None:
        kept = np.where(problem.valid[:, None], problem.kept, -1)
        there = np.zeros((len(logits), logits.shape[1] + 1), bool)
        there[rows, kept] = True  # -1 is the column more
        there = there[:, :-1] | (kept < 0).all(1)[:, None]
    order = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), -logits, ~there))
    ids = order[:, :top_k]
    return np.where(there[rows, ids] & problem.valid[:, None], ids, -1)


def integers(problem: Problem) -> Problem:
    """Small ones, so that logits are exact, and many are equal; all below the 0 of columns that are
    no class."""
    dtype = problem.hidden.dtype
    leaves = {name: np.rint(x / 2) for name, x in problem.leaves.items() if x is not None}
    leaves["bias"] -= 64
    options = {"temperature": np.where(np.arange(len(problem.labels)) % 2, 2.0, 0.5)}
    options = {name: x.astype(np.float32) for name, x in options.items()}
    changed: dict[str, Any] = {name: x.astype(dtype) for name, x in leaves.items()}
    return problem.changed(**changed, options=options)


def exact_logits(problem: Problem) -> Any:
    hidden, weight, bias = (np.float64(x) for x in problem.leaves.values())
    return hidden @ weight.T + bias


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_ids(backend: str, name: str) -> None:
    """A5, A6, A7: of every output together, in float32 and bf16."""
    problem = build(CASES[name], 7)
    got, of_ids = run(backend, problem, K)
    dz_dtype = "float64" if problem.hidden.dtype == np.float32 else problem.hidden.dtype.name
    reference = of_ids.per_token_reference(upstream_of(problem, 5), dz_dtype=dz_dtype)
    findings = Findings((backend,))
    findings.gradients({backend: got}, reference, of_ids)
    assert len(findings.measurements) > 2
    assert not failures(findings.measurements)
    exact = np.asarray(reference.ids_logprobs)[:, -K:]
    there = got.top_ids >= 0
    assert there.any(1).tolist() == problem.valid.tolist()
    assert (there.all(1) == problem.valid).all() == (problem.kept is None)
    none = np.where(problem.valid[:, None], -np.inf, 0.0)
    assert np.array_equal(got.top_logprobs[~there], np.broadcast_to(none, there.shape)[~there])
    pair = got.top_logprobs[there], exact[there]
    assert not failures(check("A9", *pair, metrics=("rho / u",)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [19, pytest.param(2309, marks=pytest.mark.full(backend="jax"))])
def test_of_equal_logits_the_lowest_classes(backend: str, dtype: str, width: int) -> None:
    """Exactly. Catches: `torch.topk`, which takes any of them; an order within them that is not
    stable; a zero that is above its negative; padding columns of 0 above negative logits."""
    case = Case("ties", 61, 8, width, dtype=dtype, kept=9, ids=3, where=True)
    problem = integers(build(case, 7))
    for some in (problem, problem.changed(kept=None, ids=None, d_ids=None)):
        logits = exact_logits(some)
        assert (np.diff(np.sort(logits, 1)[:, -K - 1 :]) == 0).any(1).mean() > 0.5
        got, _ = run(backend, some, K)
        assert np.array_equal(got.top_ids, right_ids(some, logits, K))


def test_zeros_of_either_sign_are_equal(backend: str) -> None:
    """Given as logits: nothing that is multiplied leaves a -0."""
    rng, labels = np.random.default_rng(1), np.arange(9, dtype=np.int32)
    logits = np.where(rng.random((9, 41)) < 0.5, -0.0, 0.0).astype(np.float32)
    logits[:, ::5] = -1.0
    call = Call("vocab_parallel_logprobs", {"logits": logits}, labels, {"top_k": K})
    problem = logits_problem(logits, labels, "zeros")
    assert np.array_equal(outcome_of(backend, call, {}).top_ids, right_ids(problem, logits, K))


MODULES = {"torch": "xentlib.torch.losses.classes", "jax": "xentlib.jax.losses.classes"}


def test_a_nan_stays_in_its_token(backend: str) -> None:
    """What a backward reads is in bounds, of candidates of several shards too, of which it keeps a
    few: a NaN is the largest, and first, as in `torch.topk`."""
    classes = import_module(MODULES[backend]).CLASSES
    xp, ids = classes.xp, np.array([[4, 0, 3, 1, 5, 2]])
    z = np.array([[1.0, np.nan, 0.5, 2.0, np.nan, 3.0]], np.float32)
    cross = on_torch if backend == "torch" else on_jax
    found = cross(np.stack((ids.astype(np.float32), z))).swapaxes(1, 2)
    label, none = cross(np.zeros((1, 1), np.float32)), cross(np.zeros((1, 0), np.int32))
    rest = NonTargetStats(label[0], label[0] + 1, label[0], None, None, None)
    want = Wanted(cross(np.array([6], np.int32)), cross(np.ones(1, bool)), none, -1)
    _, kept, top = classes.values_and_top(label, rest, want, found, 2)
    assert kept.log_p.shape == (3, 1)
    assert int(kept.top[0]) in range(3)
    assert numpy_of(top.ids).tolist() == [[0, 5]]
    assert bool(xp.isnan(kept.lse).all())


SETS = [
    pytest.param(item, id=item[0], marks=[] if k in (1, 6) else pytest.mark.full(backend="jax"))
    for k, item in enumerate(logit_sets(7))
]


@pytest.mark.parametrize("item", SETS)
def test_values_of_given_logits(backend: str, item: Any) -> None:
    """A4, of classes whose p is anything, those at -inf included."""
    text, logits, labels = item
    top_k = min(K, logits.shape[1])
    plain = logits_problem(logits, labels, text)
    logits = np.ascontiguousarray(plain.weight.T)
    case = Case(text, len(logits), 1, logits.shape[1], kept=min(logits.shape[1], 20))
    kept = with_classes(plain, case, np.random.default_rng(3))
    for problem in (plain, kept):
        keywords = {**further(problem), "top_k": top_k}
        call = Call("vocab_parallel_logprobs", {"logits": logits}, plain.labels, keywords)
        got = outcome_of(backend, call, {})
        assert np.array_equal(got.top_ids, right_ids(problem, logits, top_k))
        upstream = upstream_of(problem, 1)._replace(d_entropy=None)
        reference = problem.changed(ids=got.top_ids).per_token_reference(upstream)
        exact = np.asarray(reference.ids_logprobs)
        there = np.isfinite(exact) & (got.top_ids >= 0)
        assert there.any()
        assert np.array_equal(np.isfinite(got.top_logprobs), there | ~problem.valid[:, None])
        assert not failures(check("A4", got.top_logprobs[there], exact[there]))


def test_the_backward_searches_for_none(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what the forward has found."""
    problem, upstream = build(CASES["alone"], 1), np.ones((61, K), np.float32)
    leaves, labels, count = problem.leaves, problem.labels, []
    if backend == "torch":
        from xentlib.torch.core import eager

        found = eager.largest
        monkeypatch.setattr(eager, "largest", lambda *x: count.append(x) or found(*x))
        call = Call("chunked_logprobs", leaves, labels, {"top_k": K})
        outcome_of("torch", call, {"top_logprobs": upstream})
        assert len(count) == 1
        return
    import jax

    from xentlib.jax import chunked_logprobs

    def loss(hidden: Any, weight: Any, bias: Any) -> Any:
        out = chunked_logprobs(hidden, weight, labels, bias=bias, top_k=K)
        return (out.top_logprobs * upstream).sum()

    assert str(jax.make_jaxpr(jax.grad(loss))(*leaves.values())).count("top_k[") == 1


def test_audit_mode_bit_for_bit() -> None:
    """A1: which classes, log-probabilities and gradients."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    for problem in (build(CASES["options"], 3), integers(build(CASES["options"], 3))):
        ours, theirs = (
            run(backend, problem, K, compute_dtype="float64")[0].by_name()
            for backend in ("torch", "jax")
        )
        assert {"top_ids", "top_logprobs", "d_hidden"} <= ours.keys() == theirs.keys()
        for name, x in ours.items():
            assert np.array_equal(x, theirs[name]), name


def test_every_class_and_none(backend: str) -> None:
    """All V of them add up to 1, and change nothing else; 0 is none."""
    problem = build(replace(CASES["alone"], vocab=37), 2)
    upstream = upstream_of(problem, 5)
    got, _ = run(backend, problem, 37)
    plain = run_logprobs(backend, problem, upstream)
    assert plain.top_ids is None
    assert np.array_equal(np.sort(got.top_ids[problem.valid], 1)[0], np.arange(37))
    total = np.exp(np.float64(got.top_logprobs[problem.valid])).sum(1)
    assert not failures(check("A9", total, np.ones_like(total), metrics=("rho / u",)))
    for name in ("logprobs", "entropy", "lse"):
        pair = getattr(got, name), np.float64(getattr(plain, name))
        assert not failures(check("A9", *pair, metrics=("rho / u",)))
    assert np.array_equal(got.correct, plain.correct)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_that_is_the_student(backend: str, dtype: str) -> None:
    """Its stored classes are as far from it as rounding is: nothing, to the last digits."""
    problem = build(Case("stored", 61, 24, 301, std=3.0, bias=False, dtype=dtype), 7)
    got, _ = run(backend, problem, K)
    ours = import_module(f"xentlib.{backend}")
    cross = on_torch if backend == "torch" else on_jax
    teacher = TeacherTopK(cross(got.top_ids.astype(np.int32)), cross(got.top_logprobs))
    arrays = [cross(x) for x in (problem.hidden, problem.weight)]
    labels = cross(problem.labels)
    kinds = ["forward_kl", "reverse_kl"]
    if backend == "jax":  # each is a program, of either dtype
        kinds = kinds[:1] if dtype == "float32" else kinds[1:]
    for kind in kinds:
        options: dict[str, Any] = {"kind": kind, "reduction": "none", "labels": labels}
        loss = numpy_of(ours.chunked_divergence(*arrays, teacher, **options).loss)
        assert (loss >= 0).all()
        assert loss.max() < np.finfo(np.float32).eps
