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

from helpers.sampled import PLANTED, H, V, sampler  # noqa: E402
from xentlib.reference import logprobs_reference  # noqa: E402
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


ALONE = [(name,) for name in PLANTED]
PAIRS = [names for names in combinations(PLANTED, 2) if compatible(names)]


def filtered(names):
    """With kept ids, unless these would leave out the id after a token's own, or the padding."""
    open_to_all = {"ids shifted by one", "padding of the vocabulary takes part"}
    return "kept ids not applied" in names or not open_to_all & set(names)


def planted(names):
    return {field: value for name in names for field, value in PLANTED[name].items()}


def named(side):
    return [{effect.name for effect in effects} for effects in side.causes]


def said(report):
    return " ".join(str(report).split())


def only(report):
    (side,) = report.sides
    return side


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
    # By size, as the sampler itself has it: how far it is from one without the cause.
    came = SAMPLER.logprobs(which, **planted(names)).double()
    for effect in side.causes[0]:
        rest = [name for name in names if name != effect.name]
        moved = (came - SAMPLER.logprobs(which, **planted(rest)).double()).abs()
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


def wide(vocab=2003, width=512, tokens=64):
    """Arrays of a size at which sums are long, and ids."""
    made = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=made)
    weight = torch.randn(vocab, width, generator=made) * 3 / width**0.5
    return hidden, weight, torch.randint(vocab, (tokens,), generator=made)


def of_ids(logits, ids):
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


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


def test_the_right_numbers_are_the_oracle_s():
    """Values and tolerances of readings against the running error bound of the package's oracle."""
    hidden, weight, ids = (x.numpy() for x in wide(vocab=301, width=64))
    bias = np.linspace(-2, 2, 301, dtype=np.float32)
    right = readings.Reading(logit_scale=1.3, softcap=8.0, temperature=0.7, classes=(301, 0))
    problem = readings.Problem(hidden, {"weight": weight}, ids, right, len(ids), bias)
    options = {"bias": bias, "logit_scale": 1.3, "softcap": 8.0, "temperature": 0.7}
    oracle = logprobs_reference(hidden, weight, ids, **options).logprobs
    values = problem.values([right], np.arange(len(ids)))[right]
    assert np.abs(values.logprobs - oracle).max() < 1e-12
    assert (values.tolerance < 1e-3).all()
    assert (values.tolerance > 2**-24).all()


# --- beyond the planted ones ----------------------------------------------------------------------


def small(tokens=128, vocab=187, width=24):
    """Hidden states, head and log-probabilities of everything, in float32."""
    hidden, weight, _ = wide(vocab, width, tokens)
    made = torch.Generator().manual_seed(2)
    logits = hidden @ weight.T
    return hidden, weight, logits, torch.multinomial(logits.softmax(-1), 1, generator=made)[:, 0]


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


# --- what nobody can compute ----------------------------------------------------------------------


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
        assert "None of the causes that can be computed explains it" in said(report)


@pytest.mark.parametrize("name", ["temperature not applied", "softcap not applied", "old head"])
def test_a_cause_beside_other_hidden_states_explains_a_part(name):
    """As of a body with other kernels: each hidden state is off by some roundings to bfloat16."""
    made = torch.Generator().manual_seed(4)
    noise = 1 + 2**-8 * torch.randn(SAMPLER.hidden.shape, generator=made)
    body = SAMPLER._replace(hidden=SAMPLER.hidden * noise)
    came = body.logprobs(**PLANTED[name])
    side = only(explain(**SAMPLER.arguments() | {"sampler_logprobs": came}))
    assert named(side) == [{name}]
    assert not side.whole
    left = (came - SAMPLER.logprobs(**PLANTED[name])).double().abs().mean().item()
    assert abs(side.left - left) < 1e-5
    assert 0.1 < left / side.one_rounding < 10


def test_half_of_a_cause_is_not_that_cause():
    """A slope of 1/2, or of 2, is something else."""
    right, other = SAMPLER.logprobs(), SAMPLER.logprobs(softcap=None)
    for share in (0.6, 2.0):
        came = (right + share * (other - right)).clamp(max=0.0)
        came = came + 1e-4 * torch.sin(torch.arange(came.numel())).reshape(came.shape)
        side = only(explain(**SAMPLER.arguments() | {"sampler_logprobs": came.clamp(max=0.0)}))
        assert {"softcap not applied"} not in named(side)


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


# --- sizes, kinds of arrays -----------------------------------------------------------------------


def test_many_tokens_are_sampled_in_blocks(monkeypatch):
    """Runs of neighbours over all of them; memory is that of a block, not of all logits."""
    hidden, weight, ids = wide(vocab=997, width=16, tokens=3000)
    came = of_ids(hidden @ weight.T, ids)
    monkeypatch.setattr(readings, "BLOCK", 1 << 15)
    monkeypatch.setattr("xentlib.tools.explain.search.BLOCK", 1 << 15)
    arrays = hidden.numpy(), weight.numpy(), ids.numpy(), came.numpy()
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


def test_a_token_beyond_those_that_are_looked_at_first(monkeypatch):
    """What explains the first tokens has to explain all."""
    hidden, weight, logits, ids = small(tokens=512)
    came = of_ids(logits, ids)
    came[500] -= 0.5
    side = only(explain(hidden, weight, ids, came, temperature=0.7))
    assert (named(side), side.whole) == ([{"temperature not applied"}], False)


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
