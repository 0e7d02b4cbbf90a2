"""The audit of a step that distils: the defect of its divergence is named, in both backends."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

T = 2.0
KL: dict[str, Any] = {"divergence": "forward_kl", "temperature": T, "temperature_squared": True}
REVERSE: dict[str, Any] = {"divergence": "reverse_kl"}
JSD: dict[str, Any] = {"divergence": "jsd", "beta": 0.3, "softcap": 5.0}
BACKENDS = [
    pytest.param(name, marks=getattr(pytest.mark, name))
    for name in ("torch", "jax")
    if find_spec(name) is not None
]


def audit(backend: str, step: Any, **options: Any) -> Any:
    return importlib.import_module(f"xentlib.{backend}.audit").audit(step, **options)


def with_gradients(backend: str, loss_of: Any) -> Any:
    """A step of a loss of logits and micro-batches, with the functions that it needs."""
    if backend == "torch":
        import torch

        def in_torch(head: Any, micro_batches: Any) -> Any:
            logits = [head(batch["hidden"]) for batch in micro_batches]
            loss = loss_of(torch, torch.log_softmax, logits, micro_batches)
            loss.backward()
            return loss

        return in_torch

    import jax
    from jax import numpy as jnp

    def in_jax(head: Any, micro_batches: Any) -> Any:
        def loss(head: Any) -> Any:
            logits = [batch["hidden"] @ head.weight.T for batch in micro_batches]
            return loss_of(jnp, jax.nn.log_softmax, logits, micro_batches)

        return jax.value_and_grad(loss)(head)

    return in_jax


def distil(
    options: dict[str, Any], mask: Any = lambda b: b["loss_mask"], exchanged: bool = False,
    squared: bool = True, of_student: float = T, of_teacher: float = T, late: int = 0,
    divided: str = "tokens",
) -> Any:  # fmt: skip
    """Of full logits, as trainers write it; each choice may be a wrong one."""

    def loss_of(np_: Any, log_softmax: Any, logits: Any, micro_batches: Any) -> Any:
        each = []
        for raw, batch in zip(logits, micro_batches):
            cap = options.get("softcap")
            s = raw if cap is None else cap * np_.tanh(raw / cap)
            t = np_.roll(batch["teacher_logits"], late, 1)
            tempered = "temperature" in options
            s, t = (s / of_student, t / of_teacher) if tempered else (s, t)
            s, t = log_softmax(s, -1), log_softmax(t, -1)
            s, t = (t, s) if exchanged else (s, t)
            if options["divergence"] == "jsd":
                beta = options["beta"]
                m = np_.log(beta * np_.exp(t) + (1 - beta) * np_.exp(s))
                terms = beta * np_.exp(t) * (t - m) + (1 - beta) * np_.exp(s) * (s - m)
            elif options["divergence"] == "forward_kl":
                terms = np_.exp(t) * (t - s)
            else:
                terms = np_.exp(s) * (s - t)
            each.append(np_.where(mask(batch)[..., None], terms, np_.zeros_like(terms)))
        number = sum(float(mask(batch).sum()) for batch in micro_batches)
        number = number * each[0].shape[-1] if divided == "classes" else number
        number = len(each) * len(each[0]) if divided == "rows" else number
        factor = T**2 if squared and options.get("temperature_squared") else 1.0
        return factor * sum(x.sum() for x in each) / number

    return loss_of


def everywhere(batch: Any) -> Any:
    return batch["input_ids"] >= 0


# Defect, what the step does, and what is said of it.
PLANTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("", {}, KL),
    ("", {}, REVERSE),
    ("", {}, JSD),
    ("student and teacher exchanged", {"exchanged": True}, KL),
    ("student and teacher exchanged", {"exchanged": True}, REVERSE),
    ("student and teacher exchanged", {"exchanged": True}, JSD),
    ("temperature squared missing", {"squared": False}, KL),
    ("temperature squared applied", {}, {**KL, "temperature_squared": False}),
    ("temperature of the student alone", {"of_teacher": 1.0}, KL),
    ("teacher's logits of another position", {"late": 1}, KL),
    ("teacher's logits of another position", {"late": -1}, JSD),
    ("masked tokens counted", {"mask": everywhere}, KL),
    ("masked tokens counted", {"mask": lambda b: b["attention_mask"]}, REVERSE),
    ("labels not shifted", {"mask": lambda b: b["labels"] != -100}, KL),
    ("divided by rows, not by tokens", {"divided": "rows"}, KL),
    (
        "masked tokens counted and divided by rows, not by tokens",
        {"mask": everywhere, "divided": "rows"},
        JSD,
    ),
    ("divided by the classes too", {"divided": "classes"}, REVERSE),
    (
        "masked tokens counted and divided by the classes too",
        {"mask": everywhere, "divided": "classes"},
        KL,
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", range(len(PLANTED)), ids=lambda k: PLANTED[k][0] or "right")
def test_a_planted_defect_is_named(backend: str, k: int) -> None:
    name, choices, declared = PLANTED[k]
    # What is declared is what is audited; the step squares whatever that says.
    done = {**declared, "temperature_squared": "temperature" in declared}
    report = audit(backend, with_gradients(backend, distil(done, **choices)), **declared)
    assert [x.title for x in report.findings] == [name] * bool(name), report
    assert report.passed == (not name)


@pytest.mark.torch
def test_ours() -> None:
    pytest.importorskip("torch")
    from xentlib.torch import TeacherLogits, chunked_divergence

    def step(head: Any, micro_batches: Any) -> Any:
        number = sum(batch["loss_mask"].sum() for batch in micro_batches)
        for batch in micro_batches:
            chunked_divergence(
                batch["hidden"],
                head,
                TeacherLogits(batch["teacher_logits"]),
                kind="jsd",
                beta=0.3,
                softcap=5.0,
                where=batch["loss_mask"],
                denominator=number,
            ).loss.backward()

    report = audit("torch", step, **JSD)
    assert report.passed, report
    assert "student and teacher exchanged" in report.looked_for


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_does_not_distil_has_no_teacher(backend: str) -> None:
    """And one line says what was not looked for."""
    seen: list[Any] = []

    def loss_of(np_: Any, log_softmax: Any, logits: Any, micro_batches: Any) -> Any:
        seen.extend(micro_batches)
        return logits[0].sum()

    step = with_gradients(backend, loss_of)
    text = audit(backend, step).text(verbose=True)
    assert all("teacher_logits" not in batch for batch in seen)
    assert text.count("needs a divergence") == 1
    seen.clear()
    audit(backend, step, **KL)
    assert [np.shape(batch["teacher_logits"]) for batch in seen[:3]] == [(2, 13, 47)] * 3


@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_a_symmetric_divergence_has_no_exchanged_one(backend: str) -> None:
    options = {**JSD, "beta": 0.5}
    report = audit(backend, with_gradients(backend, distil(options, exchanged=True)), **options)
    assert report.passed
    why = report.not_looked_for["student and teacher exchanged"]
    assert why == "needs a divergence that is not symmetric"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "`divergence` must be one of 'forward_kl', 'reverse_kl', 'jsd'"),
        ({"divergence": "jsd"}, r"`beta` must be given with `divergence='jsd'`.* Pass 0.5"),
        ({**KL, "beta": 0.5}, "`beta` must be given with .* 'forward_kl'. Leave it out"),
        ({**JSD, "beta": 1.0}, "`beta` must be a number between 0 and 1, neither of them"),
        ({"beta": 0.5}, "`beta` must be given with `divergence`, or left out; got 0.5 alone"),
        ({"temperature_squared": True}, "`temperature_squared` must be given with `divergence`"),
        ({**KL, "temperature_squared": 4.0}, "`temperature_squared` must be True or False"),
        ({**KL, "label_smoothing": 0.1}, "`label_smoothing` must be 0 with `divergence`"),
        ({**KL, "z_loss": 1e-3}, "`z_loss` must be 0 with `divergence`.* got 0.001. Leave"),
        ({**KL, "kind": "loss"}, "`divergence` must be that of a step, .* got kind='loss'. Write"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_options_that_do_not_go_together(backend: str, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        audit(backend, lambda head, micro_batches: None, **options)
