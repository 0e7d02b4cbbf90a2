"""Losses that are right but for one step of the softmax: what a user's adapter says of each."""

from __future__ import annotations

from typing import Any

import pytest

from xentlib.contract import check
from xentlib.tools.conformance.losses import Loss, conform, fit
from xentlib.tools.harness.cases import BASE, GRID, Case, named
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import build
from xentlib.tools.parity.rows import softmaxes
from xentlib.tools.parity.rows.head import beside

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SMALL = Case("small", 61, 24, 157)
SHOWN = ("logits-100", "logits-1e4", "far-label", "equal-logits", "given-logits", "minus-infinity")
CASES = (SMALL, *named(GRID, *SHOWN))


def given(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Logits of the tokens that count, their labels, and the row of each."""
    some = labels != -100
    logits = hidden.float()[some] @ weight.float().T
    return logits, labels[some], torch.arange(len(logits))


def right(hidden: Any, weight: Any, labels: Any) -> Any:
    z, y, rows = given(hidden, weight, labels)
    return -z.log_softmax(-1)[rows, y].mean()


def no_maximum(hidden: Any, weight: Any, labels: Any) -> Any:
    z, y, rows = given(hidden, weight, labels)
    return (z.exp().sum(-1).log() - z[rows, y]).mean()


def log_of_softmax(hidden: Any, weight: Any, labels: Any) -> Any:
    z, y, rows = given(hidden, weight, labels)
    return -z.softmax(-1).log()[rows, y].mean()


def few_bits(hidden: Any, weight: Any, labels: Any) -> Any:
    """Exponentials rounded to 18 bits."""
    z, y, rows = given(hidden, weight, labels)
    e = (z - z.max(-1, keepdim=True).values).exp()
    mantissa, exponent = torch.frexp(e.detach())
    e = e * torch.ldexp((mantissa * 2**18).round() / 2**18, exponent) / e.detach()
    return (e.sum(-1).log() - (z - z.max(-1, keepdim=True).values)[rows, y]).mean()


WRONG: dict[str, tuple[Any, dict[str, set[str]]]] = {
    "no maximum": (no_maximum, {"logits-100": {"A2", "A5", "A6"}}),
    "log of softmax": (log_of_softmax, {"far-label": {"A2"}}),
    "exponentials of 18 bits": (few_bits, {"given-logits": {"A26"}}),
}


def missed(function: Any, *cases: Case) -> dict[str, set[str]]:
    """Rows that do not hold, by case."""
    found = conform(Loss("it", "torch", function, dtypes=("float32",)), cases=cases, base=SMALL)
    assert not found.result.failed
    rows: dict[str, set[str]] = {}
    for m in found.result.measurements:
        if not m.passed:
            rows.setdefault(m.case.partition(":")[0], set()).add(m.row)
    assert found.passed == (not rows)
    return rows


def test_a_right_loss_holds_every_case() -> None:
    found = conform(Loss("it", "torch", right, dtypes=("float32",)), cases=CASES, base=SMALL)
    assert found.passed
    assert found.rows["A26"]
    assert found.left_out == {"minus-infinity": "no bias"}


@pytest.mark.parametrize("name", WRONG)
def test_each_is_rejected_by_named_rows(name: str) -> None:
    """And by no row where the logits do not show it."""
    function, want = WRONG[name]
    rows = missed(function, *CASES)
    for case, of in want.items():
        assert of <= rows[case], rows
    assert missed(function, SMALL, *named(GRID, "base", "peaked")) == {}


def test_logits_of_100_and_a_far_label_in_16_bits() -> None:
    """What has kernels in bf16 alone is asked too."""
    for function, row in ((no_maximum, "A7"), (log_of_softmax, "A8"), (right, "")):
        loss = Loss("it", "torch", function, dtypes=("bfloat16",))
        found = conform(loss, cases=CASES, base=SMALL)
        assert {x for x, holds in found.rows.items() if not holds and x != "A19"} >= {row} - {""}
        assert found.passed == (not row)


def test_a_class_at_minus_infinity_needs_a_bias() -> None:
    """A0, A2, A5, A6: its probability is 0, and so is its gradient."""
    (case,) = named(GRID, "minus-infinity")

    def biased(hidden: Any, weight: Any, labels: Any, bias: Any) -> Any:
        some = labels != -100
        z = hidden[some] @ weight.T + bias
        return -z.log_softmax(-1)[torch.arange(len(z)), labels[some]].mean()

    def nan(hidden: Any, weight: Any, labels: Any, bias: Any) -> Any:
        return biased(hidden, weight, labels, bias) + 0 * bias.sum()

    for function, holds in ((biased, True), (nan, False)):
        loss = Loss("it", "torch", function, ("bias",), dtypes=("float32",))
        assert fit(case, loss) == case
        assert conform(loss, cases=(case,), base=SMALL).passed == holds


def test_the_mutants_differ_by_their_defect_alone() -> None:
    """A14: without it each holds the row that rejects it."""
    findings = Findings(("torch",))
    softmaxes.mutants(findings)
    assert [m.passed for m in findings.measurements] == [True] * 5
    for defect, name in softmaxes.CASES.items():
        problem = build(*named(GRID, name), 0)
        o, got = problem.reference(), softmaxes.of_defect(problem)
        held = check("A2", got.loss, o.loss, magnitude=o.loss_magnitude)
        if defect == softmaxes.FEW_BITS:
            held += check("A26", *beside(problem, got.d_weight, o))
        assert all(m.passed for m in held)


def test_given_logits_have_no_errors_of_a_product() -> None:
    """A26: at 1e4 two thirds of the bound would be theirs."""
    problem = build(*named(GRID, "logits-1e4"), 0)
    exact, product = (x.reference() for x in (problem, problem.changed(given=False)))
    ours, theirs = (beside(problem, o.d_weight, o)[2] for o in (exact, product))
    assert (2 * ours < theirs).all()


def test_the_cases_are_what_they_say() -> None:
    """Logits of 100 and 1e4, a label of p = e^-200, equal logits, exact ones, one class at -inf."""
    problems = {name: build(*named(GRID, name), 0) for name in SHOWN}
    logits = {n: p.hidden.astype(float) @ p.weight.astype(float).T for n, p in problems.items()}
    assert 105 < logits["logits-100"].max() < 120
    assert abs(logits["logits-1e4"] - 1e4).max() < 20
    assert problems["logits-1e4"].given
    assert problems["given-logits"].given
    far = problems["far-label"]
    assert ((far.reference().logprobs < -195) & far.valid).sum() > 10
    assert not logits["equal-logits"].any()
    bias = problems["minus-infinity"].bias
    assert bias is not None
    assert (bias == float("-inf")).sum() == 1
    assert BASE.unclaimed == ()
