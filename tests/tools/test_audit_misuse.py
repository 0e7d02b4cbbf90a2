"""Steps that the audit cannot read, or that are wrong in a way that no defect has: what it says."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest

from xentlib.checks.audit import described

BACKENDS = [
    pytest.param(name, marks=getattr(pytest.mark, name))
    for name in ("torch", "jax")
    if find_spec(name) is not None
]


def audit(backend: str, step: Any, **options: Any) -> Any:
    return importlib.import_module(f"xentlib.{backend}.audit").audit(step, **options)


def right(backend: str) -> Any:
    """(loss, {"weight": gradient}) of a step, in either backend."""
    if backend == "torch":
        steps = importlib.import_module("helpers.audited_torch")

        def run(head: Any, micro_batches: Any) -> Any:
            loss = steps.one_batch(head, micro_batches)
            gradient, head.weight.grad = head.weight.grad, None
            return loss, {"weight": gradient}

        return run
    steps = importlib.import_module("helpers.audited_jax")

    def run_jax(head: Any, micro_batches: Any) -> Any:
        loss, gradients = steps.step()(head, micro_batches)
        return loss, {"weight": gradients.weight}

    return run_jax


# What is returned of a right (loss, gradients), and what is said to it.
RETURNED: dict[str, tuple[Any, str]] = {
    "nothing": (lambda loss, g: None, "got None and no such gradient"),
    "the loss alone": (lambda loss, g: loss, "got one number and no such gradient"),
    "gradients alone": (lambda loss, g: g, "that is one number, .*; got a dict with 'weight'"),
    "gradients first": (lambda loss, g: (g["weight"], loss), r"got an array of shape \(47, 34\)"),
    "a metric second": (
        lambda loss, g: (loss, 0.5, g),
        r"of `weight` of shape \(47, 34\); got \(\)",
    ),
    "other names": (
        lambda loss, g: (loss, {"head": g["weight"]}),
        r"\(one number, a dict with 'head'\)",
    ),
    "metrics third": (lambda loss, g: (loss, g, {"acc": 1}), "as its third result .* 3 micro-batc"),
    "a number third": (lambda loss, g: (loss, g, 0.5), "as its third result .*; got 0.5"),
    "hidden of one": (
        lambda loss, g: (loss, g, [g["weight"]] * 3),
        r"of `hidden` of shape \(2, 13",
    ),
    "words": (lambda loss, g: ("done", g), "that is one number, .*; got str"),
    "a flag": (lambda loss, g: (True, g), "that is one number, .*; got True"),
    "a generator": (lambda loss, g: (x for x in g), "that is one number, .*; got generator"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RETURNED)
def test_what_a_step_returns_in_another_form_is_named(backend: str, case: str) -> None:
    made, message = RETURNED[case]
    with pytest.raises(ValueError, match=message):
        audit(backend, lambda head, batches: made(*right(backend)(head, batches)))


FORMS = {
    "a dict with the loss beside it": lambda loss, g: ((loss, {"acc": 1}), g),  # has_aux=True
    "numbers": lambda loss, g: (loss.item(), g),
    "a list": lambda loss, g: [loss, [g["weight"]]],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_that_can_be_read_are(backend: str, form: str) -> None:
    report = audit(backend, lambda head, batches: FORMS[form](*right(backend)(head, batches)))
    assert report.passed, report
    assert "loss" in report.held


def test_a_dict_with_the_loss() -> None:
    steps = pytest.importorskip("helpers.audited_torch")
    report = audit("torch", lambda head, batches: {"loss": steps.one_batch(head, batches)})
    assert report.passed
    assert "loss" in report.held


class Trainer:
    def step(self, head: Any, micro_batches: Any) -> None: ...


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Trainer, "`step` must be a function; got the class Trainer"),
        (Trainer.step, r"got \(self, head, micro_batches\), a method of the class"),
        (lambda batch: None, r"arguments of step\(head, micro_batches\) or of loss\(hidden, .*got"),
    ],
)
def test_what_is_no_step(backend: str, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        audit(backend, given)


NO_VALUE = {
    "a number": lambda loss: 3.0,
    "nothing": lambda loss: None,
    "a dict": lambda loss: {"nll": loss},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", NO_VALUE)
def test_a_function_whose_value_cannot_be_differentiated(backend: str, case: str) -> None:
    own = importlib.import_module(f"helpers.audited_{backend}").FUNCTIONS[0][1]
    with pytest.raises(ValueError, match="must return an array that can be differentiated with"):
        audit(backend, lambda h, w, y: NO_VALUE[case](own(h, w, y)), kind="loss")
    with pytest.raises(ValueError, match=r"of 53 tokens; got (3\.0|None|a dict with 'nll')\. "):
        audit(backend, lambda h, w, y: NO_VALUE[case](own(h, w, y)), kind="logprobs")


@pytest.mark.torch
def test_a_function_that_does_too_much() -> None:
    own = pytest.importorskip("helpers.audited_torch").FUNCTIONS[0][1]

    def walked(hidden: Any, weight: Any, labels: Any) -> Any:
        loss = own(hidden, weight, labels)
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="must leave the backward to the audit with kind='loss'"):
        audit("torch", walked)
    with pytest.raises(ValueError, match=r"got one number, which cannot\. Return it without `det"):
        audit("torch", lambda h, w, y: own(h, w, y).detach(), kind="loss")


def test_a_long_tuple_is_cut_in_a_message() -> None:
    assert described([0.5] * 53) == "(0.5, 0.5, 0.5, 0.5, ...)"
    assert described((None, {})) == "(None, a dict with nothing in it)"


# --- right in form, wrong in a way that has no name -----------------------------------------------


def drawn(backend: str) -> Any:
    """Noise on the hidden states, of another draw in each call."""
    if backend == "torch":
        import torch

        return lambda x: x + torch.randn_like(x)
    import jax

    draws = iter(jax.random.split(jax.random.key(0), 100))
    return lambda x: x + jax.random.normal(next(draws), x.shape)


def hinted(backend: str, change: Any) -> str:
    def step(head: Any, micro_batches: Any) -> Any:
        return change(*right(backend)(head, micro_batches))

    return str(audit(backend, step)).replace("\n   ", "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_seen_in_numbers_without_a_name_is_said(backend: str) -> None:
    inf = hinted(backend, lambda loss, g: (loss, {"weight": g["weight"] * float("inf")}))
    assert "wrong, and none of these" in inf
    assert "the loss is right; it holds inf or NaN" in inf
    assert "it holds inf or NaN" in hinted(backend, lambda loss, g: (loss * float("nan"), g))
    zero = hinted(backend, lambda loss, g: (loss, {"weight": 0 * g["weight"]}))
    assert "it is 0 everywhere" in zero
    same = hinted(backend, lambda loss, g: (loss, {"weight": g["weight"] + 1}))
    assert "none of these" in same
    assert "second call" not in same


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_draws_at_random_says_so(backend: str) -> None:
    noise = drawn(backend)

    def step(head: Any, micro_batches: Any) -> Any:
        noisy = [{**b, "hidden": noise(b["hidden"])} for b in micro_batches]
        return right(backend)(head, noisy)

    (finding,) = audit(backend, step).findings
    assert finding.defects == ()
    assert "a second call gave other gradients" in finding.note

    calls = []

    def once(head: Any, micro_batches: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("once")
        return step(head, micro_batches)

    (finding,) = audit(backend, once).findings
    assert "a second call raised RuntimeError" in finding.note


@pytest.mark.torch
def test_a_step_that_writes_to_what_it_is_given_says_so() -> None:
    torch = pytest.importorskip("torch")

    def step(head: Any, micro_batches: Any) -> Any:
        with torch.no_grad():
            micro_batches[1]["hidden"].mul_(0.9)
        return right("torch")(head, micro_batches)

    def decayed(head: Any, micro_batches: Any) -> Any:
        with torch.no_grad():
            head.weight.mul_(0.9)
        return right("torch")(head, micro_batches)

    def masked(hidden: Any, weight: Any, labels: Any) -> Any:
        labels[::3] = 3
        return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)

    for given, name in ((step, "hidden"), (decayed, "the head's weight"), (masked, "labels")):
        (finding,) = audit("torch", given).findings
        assert f"written to what it was given: {name}" in finding.note

    def harmless(head: Any, micro_batches: Any) -> Any:
        micro_batches[0]["labels"].zero_()  # which it does not read
        return right("torch")(head, micro_batches)

    assert audit("torch", harmless).passed


@pytest.mark.torch
def test_torchrun_without_a_group_is_refused(monkeypatch: Any) -> None:
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"must be initialised before `audit` .*; got 2 processes"):
        audit("torch", right("torch"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert audit("torch", right("torch")).passed
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_called_once_where_its_defect_has_a_name(backend: str) -> None:
    calls = []

    def step(head: Any, micro_batches: Any) -> Any:
        calls.append(1)
        loss, gradients = right(backend)(head, micro_batches)
        return loss, {"weight": -gradients["weight"]}

    assert audit(backend, step).findings[0].title == "sign"
    assert len(calls) == 1
