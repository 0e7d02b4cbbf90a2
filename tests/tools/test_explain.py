"""`explain` names the causes that were planted in a sampler in PyTorch, alone, in pairs and beside
what nobody can compute; and names nothing where there is rounding alone."""

from __future__ import annotations

import json
import tracemalloc
from itertools import combinations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.sampled import (  # noqa: E402
    PLANTED,
    named,
    of_ids,
    only,
    said,
    sampler,
    small,
    wide,
)
from xentlib.reference import logprobs_reference  # noqa: E402
from xentlib.reference.softmax import Softmax  # noqa: E402
from xentlib.tools.explain import CAUSES, explain, readings  # noqa: E402
from xentlib.tools.explain.compare import LEAST  # noqa: E402

SAMPLER = sampler()
# Declared by `Sampler.arguments`, so that others cannot be there; beyond it in tests of their own.
BESIDES = {
    "another temperature",
    "top-p or top-k not declared",
    "padding of the vocabulary left out",
}


def compatible(names):
    """Whether they change different things."""
    return len({field for name in names for field in PLANTED[name]}) == len(names)


FORMS = {
    "ids shifted by one": "the id after",
    "log-probabilities shifted by one": "the token after",
    "padding of the vocabulary takes part": "6 rows of the head",
    "operands rounded to 16 bits": "both to bfloat16",
    "logits rounded to 16 bits": "to bfloat16, once",
    "log-probabilities rounded to 16 bits": "to bfloat16",
}
ALONE = [(name,) for name in PLANTED]
PAIRS = [names for names in combinations(PLANTED, 2) if compatible(names)]


def filtered(names):
    """With kept ids, unless these would leave out the id after a token's own, or the padding."""
    open_to_all = {"ids shifted by one", "padding of the vocabulary takes part"}
    return "kept ids not applied" in names or not open_to_all & set(names)


def planted(names):
    return {field: value for name in names for field, value in PLANTED[name].items()}


def test_every_cause_is_planted():
    assert {cause.name for cause in CAUSES} == set(PLANTED) | BESIDES
    assert len(PAIRS) > 70


@pytest.mark.parametrize("names", ALONE + PAIRS, ids=" and ".join)
def test_planted_causes_are_named_and_no_others(names):
    which = filtered(names)
    report = explain(**SAMPLER.arguments(which, **planted(names)))
    side = only(report)
    assert not report.passed
    assert named(side) == [set(names)]
    assert side.whole
    for effect in side.causes[0]:
        assert effect.form == FORMS.get(effect.name, "")
    # By size, as the sampler itself has it: how far it is from one without the cause.
    sampled = SAMPLER.logprobs(which, **planted(names)).double()
    for effect in side.causes[0]:
        rest = [name for name in names if name != effect.name]
        moved = (sampled - SAMPLER.logprobs(which, **planted(rest)).double()).abs()
        if {"ids shifted by one", "log-probabilities shifted by one"} & set(names):
            continue  # these have no number at a row's end
        assert abs(effect.mean - moved.mean()) < 1e-5
        assert abs(effect.most - moved.max()) < 1e-5
    sizes = [effect.mean for effect in side.causes[0]]
    assert sizes == sorted(sizes, reverse=True)
    # All removed, nothing but rounding is left of the ratios.
    assert [x.removed for x in report.ratios[1:]] == [x.title for x in side.causes[0]]
    assert report.ratios[0].most > 1e-3
    assert report.ratios[-1].most < 2e-5
    assert report.ratios[-1].outside == 0.0


@pytest.mark.parametrize("how", [False, True])
def test_nothing_is_named_where_nothing_is_wrong(how):
    report = explain(**SAMPLER.arguments(how))
    assert report.passed
    assert named(only(report)) == []
    assert "are right, off by" in said(report)
    assert report.ratios == report.ratios[:1]


def test_ratios_are_those_of_the_arrays():
    how = planted(["temperature not applied"])
    right = SAMPLER.logprobs(True).double()
    ratio = (right - SAMPLER.logprobs(True, **how).double()).exp()
    given = explain(**SAMPLER.arguments(True, **how)).ratios[0]
    assert given.removed == "nothing"
    assert given.outside == ((ratio < 0.9) | (ratio > 1.1)).double().mean().item() > 0.1
    assert abs(given.most - (ratio - 1).abs().max().item()) < 1e-4


# --- rounding alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batch_changes_bits_and_is_no_cause(dtype):
    """Float32 sums, of operands in either dtype, of 64 rows together and of each alone."""
    hidden, weight, ids = wide()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    x, w = hidden.float(), weight.float()
    together = of_ids(x @ w.T, ids)
    alone = torch.cat([of_ids(x[k : k + 1] @ w.T, ids[k : k + 1]) for k in range(64)])
    report = explain(hidden, weight, ids, alone, trainer_logprobs=together)
    assert report.passed, report
    assert [side.of for side in report.sides] == ["sampler", "trainer"]
    assert max(side.units for side in report.sides) < 0.5
    assert report.ratios[0].most == (together - alone).double().exp().sub(1).abs().max().item()


def test_logits_in_bfloat16_flip_where_the_batch_does():
    """A rounding that could go either way is inside of the tolerance, and no more than that is."""
    hidden, weight, ids = (x.to(torch.bfloat16) if x.is_floating_point() else x for x in wide())
    alone = torch.cat([of_ids(hidden[k : k + 1] @ weight.T, ids[k : k + 1]) for k in range(64)])
    report = explain(hidden, weight, ids, alone)
    assert named(only(report)) == [{"logits rounded to 16 bits"}]
    moved = alone.clone()
    moved[7] += 2**-8  # one token of 64, by one unit in the last place of a logit
    assert not only(explain(hidden, weight, ids, moved)).whole


def test_logits_that_stay_in_bfloat16():
    """Scale, softcap and temperature in PyTorch's own bfloat16, for many logits."""
    hidden, weight, ids = wide(vocab=1003, width=64, tokens=512)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = 8.0 * torch.tanh(hidden @ weight.T * 1.3 / 8.0) / 0.7
    assert logits.dtype == torch.bfloat16
    options = {"logit_scale": 1.3, "softcap": 8.0, "temperature": 0.7}
    side = only(explain(hidden, weight, ids, of_ids(logits, ids), **options))
    assert [effect.title for effect in side.causes[0]] == [
        "logits rounded to 16 bits (to bfloat16, each time)"
    ]
    assert side.whole


def test_a_rounding_that_goes_either_way():
    """Of a logit between two of bfloat16: float32 loses the 1e-9 that decides."""
    _, weight, ids = wide(vocab=61, width=24)
    hidden = torch.zeros(64, 24)
    hidden[:, :3] = 1.0
    weight = weight.to(torch.bfloat16).float()  # so that no operand is rounded
    weight[:, 2] = 1e-9
    weight[ids[:9], :2] = torch.tensor([1, 2**-8])
    logits = (hidden @ weight.T).to(torch.bfloat16)
    assert (logits[0, ids[:9]] == 1.0).all()
    for ends in (1.0, 1 + 2**-7):
        logits[:, ids[:9]] = ends
        side = only(explain(hidden, weight, ids, of_ids(logits, ids)))
        assert named(side) == [{"logits rounded to 16 bits"}]
        assert side.whole
    logits[:, ids[0]] = 1 + 2**-4
    assert not only(explain(hidden, weight, ids, of_ids(logits, ids))).whole


@pytest.mark.parametrize("sampled", [-1.0, -1 - 2**-7])
def test_a_log_probability_that_rounds_either_way(sampled):
    """-1 - 2^-8 is halfway between two of bfloat16."""
    tie = 1 + 2**-8
    bias = np.array([0.0, np.log(np.exp(tie) - 1)])
    hidden, ids = np.zeros((40, 4)), np.arange(40) % 2
    other = float(torch.tensor(bias[1] - tie).bfloat16())
    both = np.where(ids == 0, sampled, other)
    side = only(explain(hidden, np.zeros((2, 4)), ids, both, bias=bias))
    assert {"log-probabilities rounded to 16 bits"} in named(side)
    assert side.whole


@pytest.mark.parametrize("options", [{}, {"logit_scale": 1.3, "temperature": 0.7}])
def test_the_right_numbers_and_their_tolerance_are_the_oracle_s(options):
    """The tolerance is four times its running error bound, with |x| |w| in place of the sum of
    |x_h w_h|, which is 2 / pi of that for these numbers."""
    hidden, weight, ids = (x.numpy() for x in wide(vocab=301, width=64))
    bias = np.linspace(-2, 2, 301, dtype=np.float32)
    right = readings.Reading(**options, classes=(301, 0))
    problem = readings.Problem(hidden, {"weight": weight}, ids, right, len(ids), bias)
    at = np.arange(len(ids))
    values = problem.values([right, right._replace(softcap=8.0)], at)
    for reading, of in values.items():
        capped = options | {"softcap": reading.softcap, "bias": bias}
        oracle = logprobs_reference(hidden, weight, ids, **capped)
        assert np.abs(of.logprobs - oracle.logprobs).max() < 1e-12
    full = {"logit_scale": 1.0, "temperature": 1.0} | options
    s = Softmax(
        hidden, weight, ids, bias, None, -100,
        full["logit_scale"], None, full["temperature"], "VH",
    )  # fmt: skip
    bound = s.a[at, ids] + s.expected_a[:, 0] + np.abs(s.lse) + np.abs(s.logprob) + 2
    share = values[right].tolerance / (4 * 2**-24 * bound)
    assert ((share > 1.2) & (share < 2.8)).all(), (share.min(), share.max())


# --- beyond the planted ones ----------------------------------------------------------------------


def test_a_temperature_that_was_not_declared():
    hidden, weight, logits, ids = small()
    side = only(explain(hidden, weight, ids, of_ids(logits / 0.6, ids)))
    assert [effect.title for effect in side.causes[0]] == ["another temperature (0.6)"]
    assert side.whole


@pytest.mark.parametrize(
    ("words", "options"), [("top_k=5", {"top_k": 5}), ("top_p=0.9", {"top_p": 0.9})]
)
def test_top_k_and_top_p_declared_or_not(words, options):
    hidden, weight, logits, _ = small()
    down = logits.sort(-1, descending=True)
    p = down.values.softmax(-1)
    kept = torch.arange(p.shape[1]) < 5 if "top_k" in options else p.cumsum(-1) - p < 0.9
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, down.indices, kept.expand_as(p))
    narrow = logits.masked_fill(~mask, -torch.inf)
    ids = torch.multinomial(narrow.softmax(-1), 1, generator=torch.Generator().manual_seed(3))[:, 0]
    inside, whole = of_ids(narrow, ids), of_ids(logits, ids)
    side = only(explain(hidden, weight, ids, inside))
    titles = [[effect.title for effect in effects] for effects in side.causes]
    assert [f"top-p or top-k not declared ({words})"] in titles
    assert explain(hidden, weight, ids, inside, **options).passed
    assert named(only(explain(hidden, weight, ids, whole, **options))) == [{"kept ids not applied"}]
    # The same by ids, padded, and one row of the whole vocabulary.
    kept_ids = torch.where(kept, down.indices, -1)
    kept_ids[5] = -1
    inside[5] = whole[5]
    assert explain(hidden, weight, ids, inside, kept_ids=kept_ids).passed
    assert not explain(hidden, weight, ids, whole, kept_ids=kept_ids).passed


def test_padding_that_the_file_has_and_the_sampler_has_not_and_the_reverse():
    hidden, weight, logits, ids = small()
    padded = torch.cat([weight, torch.zeros(5, 24)])
    side = only(explain(hidden, padded, ids, of_ids(logits, ids)))
    assert named(side) == [{"padding of the vocabulary left out"}]
    assert side.causes[0][0].form == "187 of 192 rows"
    side = only(explain(hidden, weight, ids, of_ids(hidden @ padded.T, ids)))
    assert named(side) == [{"padding of the vocabulary takes part"}]
    assert side.causes[0][0].form == "5 rows of zeros"


def test_three_causes_of_a_sampler_in_bfloat16():
    """Beside the temperature: no pair explains it, and the pair that explains most goes on."""
    hidden, weight, _, ids = small()
    low = hidden.bfloat16() @ weight.bfloat16().T
    side = only(explain(hidden, weight, ids, of_ids(low, ids), temperature=0.7))
    rounded = {"operands rounded to 16 bits", "logits rounded to 16 bits"}
    assert named(side) == [{"temperature not applied"} | rounded]
    assert side.whole


def test_both_sides_are_explained():
    """The trainer's own cause is its own, and the ratios are free of both in the end."""
    low = SAMPLER.logprobs(True, logits=torch.bfloat16)
    arguments = SAMPLER.arguments(True, softcap=None) | {"trainer_logprobs": low}
    report = explain(**arguments)
    assert [named(side) for side in report.sides] == [
        [{"softcap not applied"}], [{"logits rounded to 16 bits"}]
    ]  # fmt: skip
    assert [x.removed for x in report.ratios] == [
        "nothing",
        "softcap not applied",
        "logits rounded to 16 bits (to bfloat16, once), of the trainer",
    ]
    assert report.ratios[-1].most < 2e-5 < report.ratios[1].most < report.ratios[0].most
    alone = explain(**SAMPLER.arguments(True) | {"trainer_logprobs": low})
    assert [side.passed for side in alone.sides] == [True, False]
    assert not alone.passed


# --- sizes, kinds of arrays -----------------------------------------------------------------------


def test_many_tokens_are_sampled_in_blocks(monkeypatch):
    """Runs of neighbours over all of them; memory is that of a block, not of all logits."""
    hidden, weight, ids = wide(vocab=997, width=16, tokens=3000)
    sampled = of_ids(hidden @ weight.T, ids)
    monkeypatch.setattr(readings, "BLOCK", 1 << 15)
    monkeypatch.setattr("xentlib.tools.explain.search.BLOCK", 1 << 15)
    arrays = hidden.numpy(), weight.numpy(), ids.numpy(), sampled.numpy()
    tracemalloc.start()
    report = explain(*arrays, temperature=0.9, max_tokens=2000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert named(only(report)) == [{"temperature not applied"}]
    assert (report.tokens, report.of_tokens) == (62 * 32, 3000)
    assert str(report).startswith("1,984 of 3,000 tokens, V = 997, H = 16")
    assert peak < 2000 * 997 * 8 / 2
    at = readings.runs(3000, 2000)
    assert len(set(at)) == 1984
    assert (at[0], at.max()) == (0, 2975)
    monkeypatch.setattr("xentlib.tools.explain.compare.LOGITS", 1 << 16)
    assert explain(*arrays).tokens == LEAST


def test_arrays_of_each_framework_give_the_same_report():
    jnp = pytest.importorskip("jax.numpy")
    arguments = SAMPLER.arguments(True, softcap=None)
    low = {"hidden", "weight", "old_weight"}
    tensors = {
        name: x.bfloat16().requires_grad_() if name in low else x for name, x in arguments.items()
    }
    report = explain(**tensors)
    from xentlib.interop import to_numpy

    numpy = {
        name: to_numpy(x.detach()) if isinstance(x, torch.Tensor) else x
        for name, x in tensors.items()
    }
    assert explain(**numpy) == report
    jax = {
        name: jnp.asarray(x.astype(np.int32) if x.dtype == np.int64 else x)
        if isinstance(x, np.ndarray) else x
        for name, x in numpy.items()
    }  # fmt: skip
    assert explain(**jax) == report


def test_json_has_all_of_it():
    report = explain(**SAMPLER.arguments(True, softcap=None, logits=torch.bfloat16))
    document = json.loads(report.to_json())
    assert document["schema"] == "xentlib.explain/1"
    assert document["passed"] is False
    first = document["sides"][0]["causes"][0][0]
    assert first["name"] == "softcap not applied"
    assert first["page"] == "ratios.md#softcap-not-applied"
    assert len(document["ratios"]) == 3
