"""Row A17: a token's outputs and its row of d hidden have the same bits whatever the other tokens.
The measurements are the parity run's own (`parity/rows/invariant.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.invariance import problems
from helpers.measured import hold
from xentlib.contract import check, failures
from xentlib.tools.harness.findings import Findings
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.defects import DEFECTS, moved, statistics
from xentlib.tools.parity.rows.head import nll, per_token

pytestmark = pytest.mark.optimized
# Two whole blocks of columns and a part of one. Of JAX, which has a program for each shape, the
# cases that differ in what a program is.
PROBLEMS = problems(203, 24, 331)
EVERYWHERE = ("options", "class weights", "bf16")
CASES = [
    pytest.param(name, marks=[] if name in EVERYWHERE else pytest.mark.full(backend="jax"))
    for name in PROBLEMS
]
FUNCTIONS = {"chunked_nll": nll, "chunked_logprobs": per_token}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_tokens_do_not_show(backend: str, function: str, name: str) -> None:
    """A17: another order, masked neighbours that are NaN, micro-batches, three and one alone, all
    twice, other chunks, labels that are not read. Catches: a sum whose order follows the rows; a
    product with few rows."""
    findings = Findings((backend,))
    invariant.batch(FUNCTIONS[function], findings, backend, PROBLEMS[name])
    assert len(findings.measurements) > 20
    assert not failures(findings.measurements)


@pytest.mark.torch
def test_lora_does_not_show() -> None:
    """A17 of a head with a low-rank part, whose products have few columns."""
    torch = pytest.importorskip("torch")
    from helpers.lowrank import low_problem
    from xentlib.tools.harness.problems import Case
    from xentlib.torch import LowRankHead, chunked_logprobs

    for rank in (3, 16):
        p = low_problem(Case("low", 149, 24, 331, std=3.0, ignored=0.0, bias=False), rank)
        found = []
        for places in (slice(None), slice(0, 40), slice(40, 149), slice(7, 8)):
            arrays = (p.base.weight, p.a, p.b)
            head = LowRankHead(*(torch.from_numpy(x) for x in arrays), p.scale)
            x = torch.from_numpy(p.base.hidden[places].copy()).requires_grad_()
            out = chunked_logprobs(x, head, torch.from_numpy(p.base.labels[places]), entropy=True)
            (out.logprobs.sum() - out.entropy.sum()).backward()
            values = (out.logprobs, out.entropy, out.lse, x.grad)
            found.append((places, [v.detach().numpy() for v in values]))
        (_, whole), *others = found
        for places, got in others:
            for g, w in zip(got, whole, strict=True):
                assert not failures(check("A17", g, w[places]))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_shows_in_bits_alone(defect: str) -> None:
    """A14: cut into parts the defect has other bits, in few units; right statistics have the same
    bits in any parts of whole blocks."""
    problem = PROBLEMS["bias"].of_tokens(PROBLEMS["bias"].valid)
    logits, labels = invariant.logits_of(problem), problem.labels
    whole = statistics(logits, labels, (len(problem.weight),))
    for sizes in ((128, 203), (256, 75), (128, 128, 75), (0, 256, 0, 75)):
        assert not failures(check("A18", statistics(logits, labels, sizes), whole))
        if len(sizes) > 2:  # a part of one block has no maximum of its own
            continue
        wrong = moved(whole, logits, labels, sizes, defect)
        assert failures(check("A18", wrong, whole))
        scale = np.maximum(np.abs(whole), 1.0)
        assert not failures(check("A3", wrong, whole, magnitude=scale))


def test_the_section_rejects_its_mutants(backend: str) -> None:
    """A14, A17: what a parity run does, of few tokens."""
    if backend == "jax":
        pytest.skip("the same in NumPy")
    hold(lambda f, p: invariant.batches(nll, f, p), (backend,), PROBLEMS["bias"])


def test_companies_have_all_tokens() -> None:
    """Every token is in a micro-batch, and in each order."""
    pytest.importorskip("torch")
    found: dict[str, Any] = {}
    for company in invariant.companies(nll, "torch", PROBLEMS["bias"]):
        found.setdefault(company.how, []).extend(company.places)
    assert {len(set(places)) for how, places in found.items() if "order" in how} == {203}
    assert len(set(found["in a micro-batch of 51"])) == 203
