"""A call that a message prints is a program: it is made as it is printed, in the situation that was
refused, and has the number that it promises. Of ranks: tests/sharding/test_advice_ranks.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.advice import code_of, keywords_of, refusal, with_advice
from xentlib.contract import check, failures

TESTS = Path(__file__).parents[1]
N, H, V, W = 5, 3, 7, 4  # tokens, width, classes; width of a teacher
Case = Callable[["Arrays"], tuple[Any, Any]]
CASES: dict[str, tuple[str, Case]] = {}
# What is made where the situation is set up anyway: the function that takes the code out.
ELSEWHERE = {
    "PLACEMENTS.copied": "test_mesh_of_two_dimensions.py",
    "PLACEMENTS.over_vocabulary_of_two": "test_mesh_of_two_dimensions.py",
    "PLACEMENTS.replicated_of_two": "test_mesh_of_two_dimensions.py",
}
# What is to be left out, of a training step.
LEFT_OUT = {"STEPS.backward", "STEPS.graph", "STEPS.unchanged"}


class Arrays:
    """A backend with the arrays of a call."""

    def __init__(self, backend: str) -> None:
        self.backend, self.X = backend, pytest.importorskip(f"xentlib.{backend}")
        if backend == "torch":
            import torch

            self.xp: Any = torch
            self.array: Any = torch.from_numpy
        else:
            import jax.numpy as jnp

            self.xp, self.array = jnp, jnp.asarray
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Any:
            return self.array(rng.standard_normal(shape).astype(np.float32))

        self.hidden, self.weight, self.logits = normal(N, H), normal(V, H), normal(N, V)
        self.teacher_hidden, self.teacher_weight = normal(N, W), normal(V, W)
        self.labels = self.array(np.arange(N, dtype=np.int32))

    def nll(self, **how: Any) -> Any:
        return self.X.chunked_nll(self.hidden, self.weight, how.pop("labels", self.labels), **how)

    def divergence(self, teacher: Any = None, **how: Any) -> Any:
        if teacher is None:
            teacher = self.X.TeacherHead(self.teacher_hidden, self.teacher_weight)
        return self.X.chunked_divergence(self.hidden, self.weight, teacher, **how)


def case(name: str, backends: str = "torch jax") -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES[f"{name}, {function.__name__}"] = (backends, function)
        return function

    return keep


@case("CALLS.one_hot")
def of_one_hot_rows(a: Arrays) -> tuple[Any, Any]:
    labels = a.array(np.eye(V, dtype=np.int32)[:N])
    code = code_of(lambda: a.nll(labels=labels), "CALLS.one_hot")
    return a.nll(labels=eval(code, {"labels": labels})).loss, a.nll().loss


@case("CALLS.outputs")
def of_no_output(a: Arrays) -> tuple[Any, Any]:
    code = code_of(lambda: a.nll(outputs="lse"), "CALLS.outputs")
    return a.nll(**keywords_of(code)).lse, a.nll(outputs=("lse", "entropy")).lse


@case("CALLS.top_k")
def of_too_many(a: Arrays) -> tuple[Any, Any]:
    def call(k: int) -> Any:
        return a.X.chunked_logprobs(a.hidden, a.weight, a.labels, top_k=k).top_ids

    code = code_of(lambda: call(V + 2), "CALLS.top_k")
    return call(eval(code, {"k": V + 2, "vocab_size": V})), call(V)


@case("CALLS.narrowed", "jax")
def of_64_bits(a: Arrays) -> tuple[Any, Any]:
    import jax

    labels, found = np.arange(N), {}
    labels[1] = far = 2**40

    def call() -> None:
        found["loss"] = a.nll(labels=labels, ignore_index=far).loss

    code = code_of(call, "CALLS.narrowed")
    exec(f"{code}\n    call()", {"jax": jax, "call": call})
    return found["loss"], a.nll(where=a.array(labels != far)).loss


@case("DIVERGING.each")
def of_a_divisor_of_each(a: Arrays) -> tuple[Any, Any]:
    how = {"reduction": "none", "denominator": 7.0}
    code = code_of(lambda: a.divergence(**how), "DIVERGING.each")
    return a.divergence(**how | keywords_of(code)).loss, a.divergence(reduction="sum").loss / 7.0


@case("DIVERGING.nll_of_common")
def of_an_nll_of_common_classes(a: Arrays) -> tuple[Any, Any]:
    few, labels = V - 2, a.array(np.array([0, 1, V - 1, 2, 3], np.int32))
    how = {"vocab": "intersect", "reduction": "sum"}
    of_few = a.X.TeacherHead(a.teacher_hidden, a.teacher_weight[:few])

    def refused() -> Any:
        return a.divergence(of_few, labels=labels, nll_weight=0.3, **how)

    nll = code_of(refused, "DIVERGING.nll_of_common", "nll_weight")
    where = code_of(refused, "DIVERGING.nll_of_common", "where")
    names = {"nll_weight": 0.3, "chunked_nll": a.X.chunked_nll, "hidden": a.hidden}
    of_loss = eval(nll, names | {"weight": a.weight, "labels": labels})
    masked = keywords_of(where, labels=labels)
    alone = a.divergence(of_few, **how, where=a.array(np.array([1, 1, 0, 1, 1], bool))).loss
    got = a.divergence(of_few, labels=labels, **how, **masked).loss + of_loss
    return got, alone + 0.3 * a.nll(labels=labels).loss


@case("DIVERGING.outputs")
def of_no_output_of_it(a: Arrays) -> tuple[Any, Any]:
    code = code_of(lambda: a.divergence(outputs="lse"), "DIVERGING.outputs")
    got = a.divergence(**keywords_of(code), reduction="sum")
    return got.divergence.sum(), got.loss


@case("DIVERGING.probabilities")
def of_probabilities(a: Arrays) -> tuple[Any, Any]:
    p = np.exp(np.asarray(a.logits))
    logits = a.array(p / p.sum(-1, keepdims=True))
    code = code_of(
        lambda: a.divergence(a.X.TeacherLogits(logits)), "DIVERGING.probabilities", "log"
    )
    if a.backend == "jax":  # whose arrays have no such method
        logs = eval(f"jnp.{code[:-1]}logits)", {"jnp": a.xp, "logits": logits})
    else:
        logs = eval(f"logits.{code}", {"logits": logits})
    return (
        a.divergence(a.X.TeacherLogits(logs)).loss,
        a.divergence(a.X.TeacherLogits(a.logits)).loss,
    )


@case("DIVERGING.stored")
def of_a_stored_temperature(a: Arrays) -> tuple[Any, Any]:
    X, ids = a.X, a.array(np.tile(np.arange(2, dtype=np.int32), (N, 1)))
    logprobs = a.array(np.full((N, 2), np.log(0.4), np.float32))
    teacher = X.TeacherTopK(ids, logprobs)
    code = code_of(lambda: a.divergence(teacher, temperature=2.0), "DIVERGING.stored", "Teacher")
    names = {"TeacherTopK": X.TeacherTopK, "ids": ids, "logprobs": logprobs}
    stored = eval(code.replace("...", "2.0"), names)
    halved = X.chunked_divergence(a.hidden / 2.0, a.weight, teacher)
    return a.divergence(stored, temperature=2.0).loss, halved.loss


@case("DIVERGING.vocabulary")
def of_fewer_classes(a: Arrays) -> tuple[Any, Any]:
    few = a.X.TeacherHead(a.teacher_hidden, a.teacher_weight[: V - 2])
    code = code_of(lambda: a.divergence(few), "DIVERGING.vocabulary")
    of_common = a.X.chunked_divergence(a.hidden, a.weight[: V - 2], few)
    return a.divergence(few, **keywords_of(code)).loss, of_common.loss


@case("DIVERGING.wider")
def of_a_teacher_in_float64(a: Arrays) -> tuple[Any, Any]:
    wide = [np.asarray(x).astype(np.float64) for x in (a.teacher_hidden, a.teacher_weight)]
    with x64(a):
        teacher = a.X.TeacherHead(*map(a.array, wide))
        code = code_of(lambda: a.divergence(teacher), "DIVERGING.wider")
        return np.asarray(a.divergence(teacher, **keywords_of(code)).loss), a.divergence().loss


@case("LOW_RANK_TYPES.wide")
def of_adapters_in_float64(a: Arrays) -> tuple[Any, Any]:
    low, wide = (
        [a.array(np.ones(shape, dtype)) for shape in ((2, H), (V, 2))]
        for dtype in (np.float32, np.float64)
    )
    with x64(a):
        if a.backend == "jax":
            wide = [a.array(np.ones(shape)) for shape in ((2, H), (V, 2))]

        def call(parts: Any, **how: Any) -> Any:
            head = a.X.LowRankHead(a.weight, *parts)
            return a.X.chunked_nll(a.hidden, head, a.labels, **how).loss

        code = code_of(lambda: call(wide), "LOW_RANK_TYPES.wide")
        return np.asarray(call(wide, **keywords_of(code))), np.asarray(call(low))


def x64(a: Arrays) -> Any:
    from contextlib import nullcontext

    if a.backend == "torch":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


@case("TEACHERS.teacher")
def of_a_bare_teacher(a: Arrays) -> tuple[Any, Any]:
    names = {"TeacherHead": a.X.TeacherHead, "TeacherLogits": a.X.TeacherLogits}
    names |= {"hidden": a.teacher_hidden, "weight": a.teacher_weight, "logits": a.logits}
    got, want = [], []
    for opening, bare in (("TeacherHead", a.teacher_hidden), ("TeacherLogits", a.logits)):
        code = code_of(lambda bare=bare: a.divergence(bare), "TEACHERS.teacher", opening)
        got.append(a.divergence(eval(code, names)).loss)
    want = [a.divergence().loss, a.divergence(a.X.TeacherLogits(a.logits)).loss]
    return np.array(list(map(float, got))), np.array(list(map(float, want)))


@case("SEGMENT_TYPES.count")
def of_a_count_that_is_no_integer(a: Arrays) -> tuple[Any, Any]:
    values, ids = a.logits[:, 0], a.labels
    count = a.array(np.array(N, np.int32))
    code = code_of(lambda: a.X.segment_sum(values, ids, count), "SEGMENT_TYPES.count", "int")
    number = eval(code.replace("...", "count"), {"count": count})
    return a.X.segment_sum(values, ids, number), values


@case("SOFT.shape")
def of_a_few_classes(a: Arrays) -> tuple[Any, Any]:
    probs = a.array(np.tile(np.float32([0.25, 0.75]), (N, 1)))
    ids = a.array(np.tile(np.int32([2, 4]), (N, 1)))
    code = code_of(lambda: a.nll(labels=probs), "SOFT.shape")
    labels = eval(code, {"SoftLabels": a.X.SoftLabels, "ids": ids, "probs": probs})
    dense = np.zeros((N, V), np.float32)
    dense[:, [2, 4]] = 0.25, 0.75
    return a.nll(labels=labels).loss, a.nll(labels=a.array(dense)).loss


IN_BACKENDS = [
    pytest.param(backend, name, marks=getattr(pytest.mark, backend))
    for name, (backends, _) in CASES.items()
    for backend in backends.split()
]


@pytest.mark.parametrize(("of", "name"), IN_BACKENDS)
def test_what_is_printed_is_right(of: str, name: str) -> None:
    pytest.importorskip(of)
    got, want = (np.asarray(x, np.float64) for x in CASES[name][1](Arrays(of)))
    assert got.size
    assert not failures(check("A3", got, want, magnitude=np.maximum(np.abs(want), 1.0)))


def test_every_call_that_is_printed_is_made() -> None:
    """Here, on ranks or elsewhere. Catches: a message with a new call that nobody has made."""
    from helpers import advised_dtensors, advised_mesh, advised_windows

    others = (x.CASES for x in (advised_dtensors, advised_mesh, advised_windows))
    here = {name.split(",")[0] for cases in (CASES, *others) for name in cases}
    assert {*with_advice()} == here | {*ELSEWHERE} | LEFT_OUT
    for name, file in ELSEWHERE.items():
        (path,) = TESTS.glob(f"*/{file}")
        assert re.search(r"\beval\(", path.read_text()), name


def test_what_is_no_advice_is_refused() -> None:
    a = Arrays("torch")
    with pytest.raises(AssertionError, match=r"CALLS\.one_hot"):
        refusal(lambda: a.nll(outputs="lse"), "CALLS.one_hot")
    with pytest.raises(AssertionError, match=r"CALLS\.outputs"):
        code_of(lambda: a.nll(outputs="lse"), "CALLS.outputs", "labels")
