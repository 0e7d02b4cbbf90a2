"""Other losses held to the contract: what is right passes, and what is wrong is said by row."""

from __future__ import annotations

from typing import Any

import pytest

from xentlib.conformance import OPTIONS, Loss, conform
from xentlib.parity.cases import BASE, Case, named
from xentlib.parity.cases import GRID as ALL

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional

SMALL = Case("small", 61, 24, 157)
OPTIONED = Case("optioned", 61, 24, 157, layout="HV", where=True, options={"softcap": 5.0})
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
        ("A0", "A2", "A5", "A6", "A14", "A11", "A8", "A7", "A16"), True
    )
    assert "holds all 9 rows" in str(found)


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


WRONG = {
    "mean of all tokens": (lambda h, w, y: eager(h, w, y) * (y != -100).float().mean(), "A2"),
    "NaN of nothing": (lambda h, w, y: F.cross_entropy(h @ w.T, y), "A0"),
    "a head without half of its gradient": (
        lambda h, w, y: eager(h, (w + w.detach()) / 2, y),
        "A6",
    ),
    "hidden states without theirs": (lambda h, w, y: eager((h + h.detach()) / 2, w, y), "A5"),
    "another number each time": (
        lambda h, w, y: eager(h, w, y) * (1 + torch.rand(()) / 1e6),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "numpy"}, "`backend` must be 'torch' or 'jax'"),
        ({"options": ("smoothing",)}, "`options` must be a tuple of names among bias"),
        ({"options": "bias"}, "`options` must be a tuple of names"),
        ({"dtypes": ("bf16",)}, "`dtypes` must be a tuple of names among float32"),
    ],
)
def test_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conform(Loss(**{"name": "it", "backend": "torch", "function": eager, **given}))
