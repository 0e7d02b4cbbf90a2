"""`chunked_nll` of both backends where a definition has its edges: nothing to sum, ties, masks,
probabilities of 0 and of 1; each docstring names the line whose removal it catches."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.cases import BASE
from xentlib.tools.harness.problems import Case, build, logits_problem
from xentlib.tools.harness.ranks import ShardedCall, run_calls


def test_a_confident_token_keeps_its_loss_and_gradient(backend: str) -> None:
    """A4. Catches: the target column left in the sum (p_y = 1 gives loss 0 and gradient 0)."""
    logits = np.zeros((4, 17), np.float32)
    labels = np.array([0, 5, 9, 16])
    logits[np.arange(4), labels] = (20.0, 30.0, 45.0, 60.0)
    problem = logits_problem(logits, labels, "confident")
    reference, outcome = problem.reference(), run(backend, problem)
    assert np.all(outcome.logprobs < 0)
    assert not failures(check("A4", outcome.logprobs, reference.logprobs))
    got = outcome.gradients()["d_weight"][labels, np.arange(4)]
    assert not failures(check("A4", got, reference.d_weight[labels, np.arange(4)]))


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("valid", [0, 1, 40])
def test_what_is_masked_reaches_nothing(backend: str, poison: float, valid: int) -> None:
    """A0, M4. Catches: invalid rows multiplied by 0 where they must be taken out."""
    clean = build(dataclasses.replace(BASE, tokens=64, vocab=131, ignored=0.0), 3)
    labels = np.where(np.arange(64) < valid, clean.labels, -100).astype(np.int32)
    hidden = np.where((labels == -100)[:, None], np.float32(poison), clean.hidden)
    zeros = clean.changed(labels=labels, hidden=np.where((labels == -100)[:, None], 0, hidden))
    ours = run(backend, zeros.changed(hidden=hidden))
    for name, expected in run(backend, zeros).by_name().items():
        assert not failures(check("A0", getattr(ours, name), expected, quantity=name))
    masked = ours.gradients()["d_hidden"][labels == -100]
    assert not failures(check("A0", masked, np.zeros_like(masked)))


def test_nothing_to_do(backend: str) -> None:
    """A0, M4, M17: N = 0."""
    problem = build(dataclasses.replace(BASE, tokens=8), 0)
    empty = problem.changed(hidden=problem.hidden[:0], labels=problem.labels[:0])
    outcome = run(backend, empty)
    assert outcome.loss == 0
    for got in outcome.gradients().values():
        assert not failures(check("A0", got, np.zeros_like(got)))


@pytest.mark.parametrize("infinite", [1, 16])
def test_classes_at_minus_infinity(backend: str, infinite: int) -> None:
    """M3: classes that a bias takes out have p = 0, and entropy stays finite."""
    problem = build(dataclasses.replace(BASE, id="minus-inf", tokens=64, vocab=17, ignored=0.0), 1)
    assert problem.bias is not None
    problem.bias[17 - infinite :] = -np.inf
    problem = problem.changed(labels=np.zeros(64, np.int32))
    outcome, reference = run(backend, problem), problem.reference()
    assert np.isfinite(outcome.entropy).all()
    assert not failures(
        check("A2", outcome.loss, reference.loss, magnitude=reference.loss_magnitude)
    )
    taken_out = outcome.gradients()["d_bias"][17 - infinite :]
    assert not np.any(taken_out)


@pytest.mark.parametrize(
    "zero", [0, 0.0, np.int64(0), np.float32(0), np.zeros((), "float32")], ids=repr
)
def test_a_denominator_of_nothing(backend: str, zero: Any) -> None:
    """A0: 0 with no valid token gives 0, whatever kind of number it is: a window that is masked
    throughout must not end a training. With valid tokens it is refused."""
    problem = build(Case("nothing", 16, 8, 31, ignored=1.0), 3)
    got = run(backend, problem.changed(options={"denominator": zero}))
    for value in (got.loss, *got.gradients().values()):
        assert not failures(check("A0", value, np.zeros_like(value)))
    if os.environ.get("XENTLIB_DEVICE", "cpu") != "cpu":
        return  # where reading a count waits for the device, nothing is read: numerics.md
    some = problem.changed(labels=np.arange(16, dtype=np.int32), options={"denominator": zero})
    with pytest.raises(ValueError, match="`denominator` must be positive where a token is valid"):
        run(backend, some)


@pytest.mark.parametrize("sizes", [None, (8, 8), (4, 4, 4, 4)], ids=str)
def test_the_first_of_several_largest_is_predicted(backend: str, sizes: Any) -> None:
    """A0: ties go to the first class, whichever of them the label is, over shards too, one of whose
    ends lies between them; -1 where a token does not count. Catches: the target, which is taken out
    of the softmax, always first or always last among its equals."""
    logits = np.zeros((7, 16), np.float32)
    for row, tied in enumerate(([3, 9], [3, 9], [0, 15], [0, 15], [7, 8], range(16), [5])):
        logits[row, list(tied)] = 1.0
    labels = np.array([3, 9, 15, 2, 8, 6, -100], np.int32)
    problem = logits_problem(logits, labels, "ties")
    expected = np.array([3, 3, 0, 0, 7, 0, -1])
    if sizes is None:
        outcomes = [run(backend, problem)]
        outcomes += [run(backend, problem, outputs=("predicted",), gradient=False)]
    else:
        call = ShardedCall("chunked_nll", problem, sizes)
        outcomes = [result.outcome for result in run_calls(backend, [call])]
    for outcome in outcomes:
        assert not failures(check("A0", outcome.predicted, expected))
        assert outcome.correct is None or not outcome.correct[:6].any()
