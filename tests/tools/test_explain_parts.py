"""`explain` where hidden states or head are others, so that no cause explains all; and where the
tokens cannot distinguish two causes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.sampled import (  # noqa: E402
    PLANTED,
    H,
    V,
    named,
    of_ids,
    only,
    said,
    sampler,
    small,
)
from xentlib.tools.explain import CAUSES, explain  # noqa: E402

SAMPLER = sampler()


@pytest.mark.parametrize("seed", range(6))
def test_another_head_is_not_taken_for_a_cause(seed):
    """Slightly other, by a step of training, or of another model."""
    made = torch.Generator().manual_seed(seed)
    for std in (0.001, 0.05, 2.0):
        other = SAMPLER.weight + std * torch.randn(V, H, generator=made)
        changed = SAMPLER._replace(weight=other)
        arguments = SAMPLER.arguments() | {"sampler_logprobs": changed.logprobs()}
        del arguments["old_weight"]
        report = explain(**arguments)
        assert not report.passed
        assert named(only(report)) == []
        assert "None of the causes that were looked for, which are listed below" in said(report)


def test_nothing_is_named_of_tokens_that_are_not_compared():
    """In rows of two no token has a neighbour's neighbour."""
    hidden, weight, _, ids = small()
    sampled = of_ids(hidden @ (weight + 0.01).flip(0).T, ids)
    twos = (
        hidden.reshape(-1, 2, hidden.shape[-1]),
        weight,
        ids.reshape(-1, 2),
        sampled.reshape(-1, 2),
    )
    assert named(only(explain(*twos))) == []


@pytest.mark.parametrize("name", ["temperature not applied", "softcap not applied", "old head"])
def test_a_cause_beside_other_hidden_states_explains_a_part(name):
    """As of a body with other kernels: each hidden state is off by some roundings to bfloat16."""
    made = torch.Generator().manual_seed(4)
    noise = 1 + 2**-8 * torch.randn(SAMPLER.hidden.shape, generator=made)
    body = SAMPLER._replace(hidden=SAMPLER.hidden * noise)
    sampled = body.logprobs(**PLANTED[name])
    side = only(explain(**SAMPLER.arguments() | {"sampler_logprobs": sampled}))
    assert named(side) == [{name}]
    assert not side.whole
    left = (sampled - SAMPLER.logprobs(**PLANTED[name])).double().abs().mean().item()
    assert abs(side.left - left) < 1e-5
    assert 0.1 < left / side.one_rounding < 10


@pytest.mark.parametrize("share", [0.6, 0.9, 1.1, 2.0])
def test_a_share_of_a_cause_is_not_that_cause_nor_another(share):
    """A slope of 0.9 is something else, and so is what leaves more than the softcap does."""
    right, other = SAMPLER.logprobs(), SAMPLER.logprobs(softcap=None)
    noise = 1e-3 * torch.randn(right.shape, generator=torch.Generator().manual_seed(5))
    sampled = (right + share * (other - right) + noise).clamp(max=0.0)
    side = only(explain(**SAMPLER.arguments() | {"sampler_logprobs": sampled}))
    assert named(side) == []


# --- what these tokens cannot distinguish ---------------------------------------------------------


def test_two_causes_that_are_the_same_here():
    """Twice a temperature of 2 is no scale of 2."""
    hidden, weight, logits, ids = small()
    options = {"temperature": 2.0, "logit_scale": 2.0}
    report = explain(hidden, weight, ids, of_ids(logits / 2, ids), **options)
    assert named(only(report)) == [{"logit scale not applied"}, {"temperature applied twice"}]
    assert "cannot distinguish it from: temperature applied twice" in said(report)


def test_what_changes_nothing_is_not_looked_for():
    hidden, weight, logits, ids = small()
    report = explain(hidden, weight, ids, of_ids(logits, ids), softcap=1e7)
    assert report.passed
    assert report.not_looked_for["softcap not applied"] == "changes nothing here"
    assert report.not_looked_for["temperature not applied"] == "needs a temperature"
    assert report.not_looked_for["old head"] == "needs `old_weight`"
    assert set(report.looked_for) | set(report.not_looked_for) == {cause.name for cause in CAUSES}
    low = explain(hidden.bfloat16(), weight.bfloat16(), ids, of_ids(logits, ids))
    assert "operands rounded to 16 bits" in low.not_looked_for


def test_a_sequence_is_not_shifted_over_its_end():
    """Rows [B, L]; as [N] the ends are wrong, and the rest explains a part."""
    arguments = SAMPLER.arguments(shift=1)
    assert only(explain(**arguments)).whole
    flat = {
        name: x.reshape(-1, *x.shape[2:]) if name in ("hidden", "ids", "sampler_logprobs") else x
        for name, x in arguments.items()
    }
    side = only(explain(**flat))
    assert (named(side), side.whole) == ([{"ids shifted by one"}], False)


def test_one_token():
    hidden, weight, logits, ids = small()
    one = explain(hidden[:1], weight, ids[:1], of_ids(logits / 0.7, ids)[:1], temperature=0.7)
    assert one.passed
    one = explain(hidden[:1], weight, ids[:1], of_ids(logits, ids)[:1], temperature=0.7)
    assert {"temperature not applied"} in named(only(one))


def test_a_token_beyond_those_that_are_looked_at_first(monkeypatch):
    """What explains the first tokens has to explain all."""
    hidden, weight, logits, ids = small(tokens=512)
    sampled = of_ids(logits, ids)
    sampled[500] -= 0.5
    side = only(explain(hidden, weight, ids, sampled, temperature=0.7))
    assert (named(side), side.whole) == ([{"temperature not applied"}], False)
