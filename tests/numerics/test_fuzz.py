"""`make fuzz`: some cases of every function hold, and a wrong implementation or oracle is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fuzz
from xentlib.contract import check, failures
from xentlib.tools.harness import problems as problem

for name in ("torch", "jax", "optax"):
    pytest.importorskip(name)
pytestmark = [pytest.mark.torch, pytest.mark.jax, pytest.mark.cpu]

SEED = 4
# Two cases of each of some forms that JAX compiles, and more that PyTorch alone runs.
FORMS = (1, 2, 5, 6)
NUMBERS = [form * fuzz.PERIOD + k for form in FORMS for k in (0, 2, 1, 3, 5, 7, 9, 11)]


@pytest.mark.slow
def test_some_cases_hold() -> None:
    said: list[str] = []
    report = fuzz.fuzz(SEED, NUMBERS, say=said.append)
    assert report.failed == []
    assert report.calls["cases"] == len(NUMBERS)
    for function in fuzz.RUN:
        for backend in ("torch", "jax"):
            assert report.calls[f"{function} in {backend}"] > 1, (function, backend)


def test_a_case_follows_from_its_number() -> None:
    """Whatever ran before. Catches: a generator that is shared by cases."""
    first, *_, again = [fuzz.problem_of(fuzz.draw(SEED, n)) for n in (37, 38, 41, 37)]
    assert fuzz.draw(SEED, 37) == fuzz.draw(SEED, 37)
    for name in ("hidden", "weight", "labels"):
        assert not failures(check("A0", getattr(first, name), getattr(again, name)))


def scaled(name: str, factor: float) -> Callable[[Any], Any]:
    """A result with one output a little off, in its own dtype."""

    def wrong(outcome: Any) -> Any:
        value = getattr(outcome, name, None)
        if value is None:
            return outcome
        off = (np.asarray(value, np.float64) * factor).astype(value.dtype)
        return outcome._replace(**{name: off})

    return wrong


def changed(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A problem that is subtly another."""

    def wrong(p: Any) -> Any:
        return p.changed(**{name: change(p) for name, change in changes.items()})

    return wrong


def without(option: str) -> Callable[[Any], Any]:
    return changed(options=lambda p: {k: v for k, v in p.options.items() if k != option})


def same(x: Any) -> Any:
    return x


# What becomes of the problem, and what of the result.
WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "d weight 0.1 % off": (same, scaled("d_weight", 1.001)),
    "d hidden 0.1 % off": (same, scaled("d_hidden", 1.001)),
    "d logits 0.1 % off": (same, scaled("d_logits", 1.001)),
    "loss 0.1 % off": (same, scaled("loss", 1.001)),
    "lse 0.001 % off": (same, scaled("lse", 1.00001)),
    "no temperature": (without("temperature"), same),
    "no softcap": (without("softcap"), same),
    "no z-loss": (without("z_loss"), same),
    "no bias": (changed(bias=lambda p: None if p.bias is None else 0 * p.bias), same),
    "no where": (changed(where=lambda _: None), same),
    "no class weights": (changed(class_weights=lambda _: None), same),
    "labels off by one": (
        changed(labels=lambda p: np.where(p.labels > 0, p.labels - 1, p.labels)),
        same,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    """In tens of cases of PyTorch's, and said by number: the run is no decoration."""
    before, after = WRONG[name]

    def wrong(function: str) -> Callable[..., Any]:
        def call(backend: str, p: Any, *rest: Any, **how: Any) -> Any:
            return after(fuzz.RUN[function](backend, before(p), *rest, **how))

        return call

    runs = {function: wrong(function) for function in fuzz.RUN}
    for number in range(1, 80, 2):
        said: list[str] = []
        failed = fuzz.fuzz(SEED, [number], runs=runs, say=said.append).failed
        if failed:
            break
    else:
        pytest.fail("the run found nothing")
    assert "raised" not in " ".join(failed)
    assert said[0] == failed[0]
    assert said[0].startswith(f"--seed {SEED} --only {number}: ")
    assert said[1].startswith("  shrunken: ")
    assert fuzz.fuzz(SEED, [number]).failed == []


@pytest.mark.slow
def test_a_wrong_oracle_is_found_by_the_losses_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the backends wrong in the same way, torch and optax would say so."""
    right = problem.nll_reference

    def wrong(*arrays: Any, label_smoothing: float = 0.0, **options: Any) -> Any:
        return right(*arrays, label_smoothing=label_smoothing * (1 + 1e-9), **options)

    monkeypatch.setattr(problem, "nll_reference", wrong)
    d = fuzz.draw(6, fuzz.PERIOD)
    assert d.function == "chunked_nll"
    assert d.case.options["label_smoothing"] == 0.3
    found = fuzz.attempt(fuzz.RUN, Counter(), d)
    assert {" ".join(text.split()[:2]) for text in found} == {"oracle torch", "oracle optax"}
    monkeypatch.undo()
    assert fuzz.attempt(fuzz.RUN, Counter(), d) == []
