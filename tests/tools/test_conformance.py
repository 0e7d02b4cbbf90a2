"""Other losses held to the contract: what is right passes, and what is wrong is said by row."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from xentlib.tools.conformance.losses import OPTIONS, Loss, conform
from xentlib.tools.harness.cases import BASE, Case, named
from xentlib.tools.harness.cases import GRID as ALL

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional

SMALL = Case("small", 61, 24, 157)
OPTIONED = Case("optioned", 61, 24, 157, layout="HV", where=True, options={"softcap": 5.0})
OTHER = Case("other", 62, 24, 157)
CASES = (SMALL, *named(ALL, "all-ignored"))


def eager(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    logits = F.linear(hidden.float(), weight.float(), options.pop("bias", None))
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def rows(function: Any, dtypes: tuple[str, ...] = ("float32",), **about: Any) -> dict[str, bool]:
    loss = Loss("it", "torch", function, dtypes=dtypes, **about)
    return conform(loss, cases=CASES, base=SMALL).rows


@pytest.fixture(scope="module")
def right() -> dict[str, bool]:
    return rows(eager)


def test_ours_holds_every_row_with_every_option() -> None:
    from xentlib.torch import chunked_nll

    def ours(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
        return chunked_nll(hidden, weight, labels, **options).loss

    cases = (SMALL, *named(ALL, "class-weights", "odd-width"), OPTIONED)
    found = conform(Loss("ours", "torch", ours, OPTIONS), cases=cases)
    assert found.left_out == {}
    assert found.choices == []
    assert found.rows == dict.fromkeys(
        ("A0", "A2", "A5", "A6", "A14", "A11", "A8", "A7", "A19", "A16"), True
    )
    assert "holds all 9 rows" in str(found)  # A19 does not count


@pytest.mark.jax
def test_a_loss_in_jax() -> None:
    pytest.importorskip("jax")
    from xentlib.jax import chunked_nll

    loss = Loss(
        "ours", "jax", lambda *x, **o: chunked_nll(*x, **o).loss, ("bias",), dtypes=("float32",)
    )
    found = conform(loss, cases=CASES, base=SMALL)
    assert set(found.rows.values()) == {True}
    assert len(found.rows) == 6


def test_where_it_rounds_is_reported_and_not_judged() -> None:
    """A loss that keeps dz in float32 is nearer to the exact gradient than ours (A7), and rounds
    elsewhere (A19)."""
    loss = Loss("it", "torch", eager, dtypes=("bfloat16",))
    found = conform(loss, cases=CASES, base=SMALL)
    assert {row for row, holds in found.rows.items() if not holds} == {"A19"}
    assert found.passed
    assert re.search(r"^ *A19 .* differs", str(found), re.MULTILINE)
    assert "holds all 4 rows" in str(found)


CALLS = itertools.count()


def test_one_case_that_misses_is_enough() -> None:
    """Whatever the cases after it hold."""

    def wrong(hidden: Any, weight: Any, labels: Any) -> Any:
        return eager(hidden, weight, labels) * (1.01 if len(labels) == SMALL.tokens else 1.0)

    loss = Loss("it", "torch", wrong, dtypes=("float32",))
    found = conform(loss, cases=(SMALL, OTHER), base=OTHER)
    assert not found.rows["A2"]
    assert found.rows["A11"]


WRONG = {
    "mean of all tokens": (lambda h, w, y: eager(h, w, y) * (y != -100).float().mean(), "A2"),
    "NaN of nothing": (lambda h, w, y: F.cross_entropy(h @ w.T, y), "A0"),
    "a head without half of its gradient": (
        lambda h, w, y: eager(h, (w + w.detach()) / 2, y),
        "A6",
    ),
    "hidden states without theirs": (lambda h, w, y: eager((h + h.detach()) / 2, w, y), "A5"),
    "another number each time": (
        # Not at random: of numbers this near to 1 float32 has few, and two draws may be one.
        lambda h, w, y: eager(h, w, y) * (1 + next(CALLS) * 2.0**-20),
        "A11",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_by_row(name: str, right: dict[str, bool]) -> None:
    function, row = WRONG[name]
    assert right[row]
    assert not rows(function)[row]


def test_what_rounds_to_16_bits_says_so() -> None:
    def upcast(hidden: Any, weight: Any, labels: Any) -> Any:
        return F.cross_entropy((hidden @ weight.T).float(), labels)

    def low(hidden: Any, weight: Any, labels: Any) -> Any:
        return F.cross_entropy(hidden @ weight.T, labels)

    choices = {}
    for function in (eager, upcast, low):
        loss = Loss("it", "torch", function, dtypes=("bfloat16",))
        choices[function.__name__] = conform(loss, cases=(SMALL,), base=SMALL).choices
    assert choices == {
        "eager": [],
        "upcast": ["In bf16 its loss is that of logits rounded to bf16."],
        "low": ["In bf16 its loss is a number in bfloat16."],
    }


def test_what_cannot_be_run_is_said() -> None:
    def narrow(hidden: Any, weight: Any, labels: Any) -> Any:
        if weight.shape[0] != BASE.vocab:
            raise RuntimeError("no kernel for this vocabulary")
        return eager(hidden, weight, labels)

    loss = Loss("it", "torch", narrow, ignores=False, dtypes=("float32",))
    found = conform(loss, cases=(*CASES, *named(ALL, "saturated", "kernel-layout")))
    assert found.left_out == {
        "all-ignored": "no ignored labels",
        "saturated": "no softcap",
        "kernel-layout": "no weight_layout",
    }
    assert [x.reason for x in found.result.failed] == [
        "RuntimeError: no kernel for this vocabulary"
    ]
    assert "could not be run: RuntimeError" in str(found)


RETURNED: dict[str, tuple[Any, str]] = {
    "a number": (lambda h, w, y: eager(h, w, y).item(), r"got \d"),
    "nothing": (lambda h, w, y: None, "got None"),
    "one a token": (lambda h, w, y: -y * h.sum() * w.sum(), r"got an array of shape \(61,\)"),
    "a list of one": (lambda h, w, y: eager(h, w, y)[None], r"got an array of shape \(1,\)"),
    "a tuple": (lambda h, w, y: (eager(h, w, y), h), r"got \(one number, an array of shape"),
    "detached": (lambda h, w, y: eager(h, w, y).detach(), "got one number without a graph"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_an_adapter_that_returns_no_mean(name: str) -> None:
    function, message = RETURNED[name]
    found = conform(Loss("it", "torch", function, dtypes=("float32",)), cases=(SMALL,), base=SMALL)
    assert found.rows == {}
    assert not found.passed
    assert len(found.result.failed) == 3
    for section in found.result.failed:
        assert section.reason.startswith("ValueError: `function` must return the mean, an array of")
        assert re.search(message, section.reason)


@pytest.mark.jax
def test_an_adapter_that_returns_no_mean_in_jax() -> None:
    pytest.importorskip("jax")
    loss = Loss("it", "jax", lambda h, w, y: (h @ w.T)[:, 0], dtypes=("float32",))
    found = conform(loss, cases=(SMALL,), base=SMALL)
    assert "got an array of shape (61,). Of a tuple" in found.result.failed[0].reason


def test_passed_is_all_of_it(right: dict[str, bool]) -> None:
    """Every row, and every case."""

    def passed(function: Any) -> bool:
        loss = Loss("it", "torch", function, dtypes=("float32",))
        return conform(loss, cases=CASES, base=SMALL).passed

    def some(hidden: Any, weight: Any, labels: Any) -> Any:
        if not (labels != -100).any():
            raise RuntimeError("no label")
        return eager(hidden, weight, labels)

    assert passed(eager)
    assert not passed(some)  # the rows that were measured hold
    assert not passed(lambda h, w, y: eager(h, w, y) * 1.01)


def test_a_gradient_that_is_not_there_is_0() -> None:
    assert not rows(lambda h, w, y: eager(h.detach(), w, y))["A5"]
    assert not rows(lambda h, w, y: eager(h, w.detach(), y))["A6"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((eager, {}), "`loss` must be a `Loss`; got function. Wrap"),
        (
            (Loss("it", "torch", "eager"), {}),
            "`function` must be a function of hidden, .*; got str",
        ),
        ((Loss("it", "torch", eager), {"cases": SMALL}), "`cases` must be a tuple .*; got Case"),
        (
            (Loss("it", "torch", eager), {"cases": ("small",)}),
            "`cases` must be a tuple .*; got .str",
        ),
        (
            (Loss("it", "torch", eager), {"base": OPTIONED}),
            "`base` must be a case that .*; got 'optioned', and the loss has no softcap, weight_la",
        ),
    ],
)
def test_what_is_no_adapter_or_no_case(given: Any, message: str) -> None:
    loss, options = given
    with pytest.raises((TypeError, ValueError), match=message):
        conform(loss, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "numpy"}, "`backend` must be 'torch' or 'jax'"),
        ({"options": ("smoothing",)}, "`options` must be a tuple of names among bias"),
        ({"options": "bias"}, "`options` must be a tuple of names"),
        ({"dtypes": ("bf16",)}, "`dtypes` must be a tuple of names among float32"),
        ({"dtypes": ()}, "`dtypes` must be a tuple of names among float32"),
    ],
)
def test_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conform(Loss(**{"name": "it", "backend": "torch", "function": eager, **given}))
