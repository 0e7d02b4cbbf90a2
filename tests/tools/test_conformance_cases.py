"""Which cases an adapter is given, what is measured of each, and what is kept of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xentlib.tools.conformance.losses import Conformance, Loss, conform, fit, made
from xentlib.tools.harness.cases import GRID as ALL
from xentlib.tools.harness.cases import Case, named
from xentlib.tools.harness.problems import build
from xentlib.ulp import round_to

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional

SMALL = Case("small", 61, 24, 157)


def eager(hidden: Any, weight: Any, labels: Any) -> Any:
    return F.cross_entropy(hidden.float() @ weight.float().T, labels)


def found_of(function: Any, *cases: Case, **about: Any) -> Conformance:
    about = {"dtypes": ("float32",), **about}
    return conform(Loss("it", "torch", function, **about), cases=cases, base=SMALL)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_temperature": True}, "no temperature"),
        ({"layout": "HV"}, "no weight_layout"),
        ({"where": True, "options": {"softcap": 5.0}}, "no softcap, where"),
    ],
)
def test_a_case_needs_what_the_loss_has(changes: dict[str, Any], why: str) -> None:
    case = replace(SMALL, **changes)
    assert fit(case, Loss("it", "torch", eager)) == why
    options = tuple(why.removeprefix("no ").split(", "))
    assert fit(case, Loss("it", "torch", eager, options)) == replace(case, bias=False)


def test_a_loss_that_ignores_nothing_is_given_no_such_label() -> None:
    def plain(hidden: Any, weight: Any, labels: Any) -> Any:
        if (labels < 0).any():
            raise RuntimeError("a label of -100")
        return eager(hidden, weight, labels)

    found = found_of(plain, SMALL, *named(ALL, "all-ignored"), ignores=False)
    assert found.passed
    assert found.left_out == {"all-ignored": "no ignored labels"}


def test_of_no_label_row_a0_is_held_alone() -> None:
    """Torch's NaN of nothing is one row that is not held, and no other."""
    found = found_of(eager, SMALL, *named(ALL, "all-ignored"))
    assert [row for row, holds in found.rows.items() if not holds] == ["A0"]


def test_the_upstream_gradient_is_a_number_of_16_bits() -> None:
    """Rounded by a 16-bit loss, it would put every gradient off."""
    given = np.asarray(made(SMALL, 0).upstream)
    assert given == round_to(given, "bfloat16") != build(SMALL, 0).upstream


def test_each_check_has_its_mutants_and_each_quantity_its_second_run() -> None:
    dtypes = ("float32", "bfloat16", "float16")
    sections = found_of(eager, dtypes=dtypes).result.sections
    quantities = {
        kind: {m.quantity for x in sections if x.name.startswith(kind) for m in x.measurements}
        for kind in ("mutants", "run to run")
    }
    heads = {f"{row} d {of}" for of in ("hidden", "weight") for row in ("A7", "A16")}
    heads |= {"A5 d hidden", "A6 d weight", "A9 d hidden bf16", "A9 d weight bf16"}
    heads |= {f"A19 d {of}{bits}" for of in ("hidden", "weight") for bits in ("", " bf16")}
    losses = {"A2 loss of float32", "A8 loss of bfloat16", "A8 loss of float16"}
    assert quantities["mutants"] == heads | losses
    assert quantities["run to run"] == {"loss", "d_hidden", "d_weight"}


def drifting(of: str) -> Any:
    """One quantity of each call is another one."""
    calls = itertools.count()

    def function(hidden: Any, weight: Any, labels: Any) -> Any:
        c = next(calls) * 2.0**-20
        if of == "loss":
            return eager(hidden, weight, labels) + c
        if of == "d hidden":
            return eager(hidden + (hidden - hidden.detach()) * c, weight, labels)
        return eager(hidden, weight + (weight - weight.detach()) * c, labels)

    return function


@pytest.mark.parametrize("of", ["loss", "d hidden", "d weight"])
def test_one_quantity_that_is_another_in_each_run(of: str) -> None:
    assert not found_of(drifting(of)).rows["A11"]


def test_a_16_bit_loss_is_not_asked_what_its_logits_are() -> None:
    """It has too few digits to tell; without bf16 nothing is asked."""

    def low(hidden: Any, weight: Any, labels: Any) -> Any:
        return F.cross_entropy(hidden @ weight.T, labels)

    found = found_of(low, dtypes=("bfloat16",))
    assert (found.loss_dtype, found.rounds_logits) == ("bfloat16", None)
    found = found_of(low)
    assert (found.loss_dtype, found.rounds_logits) == ("", None)


def test_the_report_has_the_name_what_was_left_out_and_the_choices() -> None:
    def low(hidden: Any, weight: Any, labels: Any) -> Any:
        return F.cross_entropy(hidden @ weight.T, labels)

    weighted = replace(SMALL, id="weighted", where=True)
    text = str(found_of(low, weighted, dtypes=("float32", "bfloat16"), version="1.2.3"))
    assert text.startswith("it 1.2.3\n")
    assert "\nleft out: weighted, no where\n" in text
    assert text.endswith("In bf16 its loss is a number in bfloat16.\n")
