"""What the audit reads from a gradient without a list of defects, and what it says of it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import numpy as np
import pytest

from xentlib.tools.audit import report as reports
from xentlib.tools.audit.defects import BY_NAME, forms
from xentlib.tools.audit.diagnose import judge, oracle_of
from xentlib.tools.audit.hypotheses import LABELS, SHIFTS, Head, Hypothesis, Numbers, Reduced, Terms
from xentlib.tools.audit.naming import LIMIT, distance
from xentlib.tools.audit.problem import Options
from xentlib.tools.audit.reader import EXACT, TERMS, printed, read, stacked

READ = [] if find_spec("torch") is None else importlib.import_module("helpers.audited_read").READ
SMOOTHED = Options(True, label_smoothing=0.1, z_loss=0.05)


@pytest.mark.torch
@pytest.mark.parametrize("k", range(len(READ)), ids=lambda k: f"{READ[k][0] or 'right'}-{k}")
def test_a_planted_defect_is_named(k):
    from xentlib.torch.audit import audit

    name, step, options = READ[k]
    report = audit(step, kind="step", **options)
    titles = [finding.title for finding in report.findings]
    if name == "products in TF32":  # float16 has as many bits
        assert [*map(set, report.findings[0].defects)] in ([{name}], [{*titles}]) or name in titles[
            0
        ]
    else:
        assert titles == [name] * bool(name), report


def gradient(oracle, factors, rank=0):
    """Of the head, for factors [N] of each term."""
    dz = sum(f[:, None] * oracle.units_of(Head())[name].dz for name, f in factors.items())
    return dz.T @ oracle.x


def drawn(oracle, terms, seed=0):
    """A factor of each term for every other token, of another place of the label each."""
    rng = np.random.default_rng(seed)
    tokens = len(oracle.x)
    factors = {name: rng.normal(size=tokens) * (rng.random(tokens) < 0.5) for name in terms}
    for name in terms:  # where an earlier place has the class it is that one's
        for first in LABELS[: LABELS.index(name)] if name in LABELS else ():
            factors[name][oracle.classes[name] == oracle.classes[first]] = 0.0
    return factors


@pytest.mark.parametrize(
    ("options", "ranks", "terms"),
    [
        (Options(), 1, (*SHIFTS,)),
        (Options(), 1, ("+1", "softmax", "uniform")),
        (Options(), 1, ("+1", "class 0")),
        (Options(), 2, ("+1", "+2")),
        (Options(), 4, ("+1", "-1")),
        (SMOOTHED, 1, ("+1", "uniform", "z-loss")),
        (SMOOTHED, 2, ("+1", "0", "uniform", "z-loss")),
        (Options(divergence="reverse_kl"), 2, ("divergence",)),
    ],
)
def test_every_factor_is_read(options, ranks, terms):
    """In float64 to the digits of the solution, of float32 as far as it says itself."""
    oracle = oracle_of("step", options, ranks)
    want = {name: x[None] for name, x in drawn(oracle, terms).items()}
    exact = gradient(oracle, {name: x[0] for name, x in want.items()})
    dz = sum(f[0][:, None] * oracle.units_of(Head())[name].dz for name, f in want.items())
    # In units of its own.
    beside = 1.7 * (dz @ oracle.w).reshape(oracle.problem.hidden.shape)
    found = read(oracle, exact[None], Head(), beside=beside)
    for name in TERMS:
        got, right = (x.get(name, np.zeros((1, len(oracle.x)))) for x in (found.factors, want))
        assert LIMIT.holds(distance([1.0 + got], [1.0 + right])), name
    of_float32 = read(oracle, exact[None].astype(np.float32).astype(np.float64), Head())
    assert of_float32.residual < EXACT
    away = np.abs(stacked(of_float32.factors) - stacked({**of_float32.factors, **want}))
    assert (away <= of_float32.close).all()
    assert of_float32.close.max() < np.inf


@pytest.mark.parametrize("terms", [(*SHIFTS,), ("+1", "softmax")])
def test_factors_of_hidden_states_are_read_too(terms):
    oracle = oracle_of("step", Options(), 1)
    want = drawn(oracle, terms)
    dz = sum(f[:, None] * oracle.units_of(Head())[name].dz for name, f in want.items())
    found = read(oracle, (dz @ oracle.w).reshape(oracle.problem.hidden.shape), Head(), hidden=True)
    for name in terms:
        assert LIMIT.holds(distance([1.0 + found.factors[name][0]], [1.0 + want[name]])), name


def test_what_no_factors_give_is_left_over():
    """Also where there are nearly as many unknowns as equations."""
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 4):
        oracle = oracle_of("step", Options(), ranks)
        assert read(oracle, rng.normal(size=(1, *oracle.w.shape)), Head()).residual > 0.3


def wrong(oracle, factors):
    right = oracle.numbers(Hypothesis())
    d_weight = gradient(oracle, factors)[None].astype(np.float32)
    return judge("torch", oracle, Numbers(right.loss, d_weight, None))


def test_without_a_name_the_map_says_who_counts():
    """Tokens of the second micro-batch doubled against the token after the next."""
    oracle = oracle_of("step", Options(), 1)
    factors = {name: x[0].copy() for name, x in oracle.factors(Hypothesis()).items()}
    of = np.indices(oracle.problem.ids.shape)[1].reshape(-1)
    twice = np.where((of == 1) & (oracle.classes["+2"] != oracle.classes["+1"]), 2.0, 0.0)
    (finding,) = wrong(oracle, {**factors, "+2": twice}).findings
    assert finding.title == "wrong, and none of these"
    lines = [line.split() for line in finding.map]
    start = lines.index(["label", "at", "t+2"])
    cells = {row[0]: row[1:] for row in lines[start + 1 : start + 7]}
    got = [cells[f"{m}.{b}"] for m in range(3) for b in range(2)]
    want = np.where(twice.reshape(6, 13) == 2.0, "2", ".").tolist()
    assert got == want
    assert ["label", "at", "t+1"] in lines


def test_a_right_token_is_1_and_a_masked_one_a_dot():
    oracle = oracle_of("step", SMOOTHED, 1)
    factors = oracle.factors(Hypothesis())
    exact = gradient(oracle, {name: x[0] for name, x in factors.items()})
    head, terms, *rows = printed(oracle, read(oracle, exact[None], Head()))
    assert head.startswith("read from it (1: as it should be, .: no part)")
    assert terms.strip() == "softmax, label at t+1, uniform, z-loss"
    marks = np.where(factors["+1"][0].reshape(6, 13) != 0, "1", ".").tolist()
    assert [row.split()[1:] for row in rows] == marks


def test_what_each_rank_has_is_said_where_it_differs():
    oracle = oracle_of("step", Options(), 2)
    alone = oracle.numbers(Hypothesis(divisor="micro-batches"))
    d_weight = np.concatenate([alone.d_weight[:1], 3 * alone.d_weight[1:]])
    report = judge("torch", oracle, alone._replace(d_weight=d_weight.astype(np.float32)))
    said = str(report)
    assert "what rank 0 has" in said
    assert "what rank 1 has" in said


def blocks(finding):
    """Titles, without the line above them and the rows."""
    rows = {f"{m}.{b}" for m in range(3) for b in range(2)}
    return [line.strip() for line in finding.map[1:] if line.split()[0] not in rows]


def test_equal_factors_have_one_block_of_the_shift_that_gives_them():
    oracle = oracle_of("step", Options(), 1)
    reading = next(forms(BY_NAME["labels shifted twice"], oracle.problem))
    two = oracle.numbers(reading)
    found = judge("torch", oracle, two._replace(d_weight=two.d_weight.astype(np.float32)))
    assert blocks(found.findings[0]) == ["softmax, label at t+2"]


def test_a_term_that_no_token_has_is_none():
    oracle = oracle_of("step", Options(), 1)
    factor = oracle.factors(Hypothesis())["+1"][0]
    (finding,) = wrong(oracle, {"+1": factor, "softmax": -factor}).findings
    assert blocks(finding) == ["softmax: none", "label at t+1"]


def test_a_z_loss_has_a_factor_of_its_own():
    oracle = oracle_of("step", Options(z_loss=0.05), 1)
    reading = Hypothesis(terms=Terms(z_loss=0.5))
    halved = oracle.numbers(reading)._replace(d_hidden=oracle.d_hidden(reading))
    (finding,) = judge("torch", oracle, halved).findings
    assert blocks(finding) == ["softmax, label at t+1", "z-loss"]
    cells = {cell for line in finding.map[-6:] for cell in line.split()[1:]}
    assert cells == {".", "0.5"}


@pytest.mark.parametrize("factor", [65536.0, -3.5])
def test_a_factor_of_all_tokens_is_divided_off(factor):
    oracle = oracle_of("step", Options(), 1)
    factors = {name: factor * x[0] for name, x in oracle.factors(Hypothesis()).items()}
    (finding,) = wrong(oracle, factors).findings
    assert finding.title.startswith(f"off by a factor of {factor:g}")
    assert f"divided by {factor:g}" in finding.map[0]
    assert {cell for line in finding.map[2:] for cell in line.split()[1:]} == {"1", "."}


def test_what_no_factors_give_has_no_map():
    oracle = oracle_of("step", Options(softcap=5.0), 1)
    right = oracle.numbers(Hypothesis())
    noise = np.random.default_rng(0).standard_normal(right.d_weight.shape).astype(np.float32)
    (finding,) = judge("torch", oracle, right._replace(d_weight=noise)).findings
    assert finding.map == ()
    assert "no weighting of the tokens explains it" in finding.note
    assert "softcap not applied" in finding.note


def test_a_bias_that_alone_is_wrong_is_said_and_named():
    oracle = oracle_of("step", Options(bias=True), 2)
    right = oracle.numbers(Hypothesis())
    own = oracle.numbers(Hypothesis(reduced=Reduced("part"))).d_bias
    for d_bias, title in (
        (own, "not reduced over ranks"),
        (0 * own, "bias gradient lost"),
        (own[::-1] ** 2, "wrong, and none of these"),
    ):
        (finding,) = judge("torch", oracle, right._replace(d_bias=d_bias)).findings
        assert (finding.of, finding.title) == ("gradient of the bias", title)
        assert finding.note == "the gradient of the head's weight is right"
    means = oracle.numbers(Hypothesis(divisor="ranks"))
    (finding,) = judge("torch", oracle, means._replace(d_bias=own)).findings
    assert finding.title == "mean of the means of ranks"
    assert "the gradient of the bias is wrong in another way" in finding.note


def test_a_loss_that_alone_is_wrong_has_no_cleared_gradients():
    oracle = oracle_of("step", Options(), 1)
    right = oracle.numbers(Hypothesis())
    reading = next(forms(BY_NAME["one micro-batch alone"], oracle.problem))
    report = judge("torch", oracle, right._replace(loss=oracle.numbers(reading).loss))
    assert report.findings[0].defects == (("one micro-batch alone",),)
    assert "cleared" not in str(report)


# --- on what breaks real runs ---------------------------------------------------------------------

THERE = [] if not READ else importlib.import_module("helpers.audited_read").WRONG_THERE


@pytest.mark.torch
@pytest.mark.parametrize("k", range(len(THERE)), ids=lambda k: THERE[k][0].__name__)
def test_what_breaks_a_right_step_is_a_line_each(k):
    from xentlib.torch.audit import audit

    step, there = THERE[k]
    report = audit(step)
    assert not report.findings
    assert not report.passed
    assert report.there.keys() == there.keys(), report
    assert all(report.there[name].startswith(what) for name, what in there.items()), report
    assert str(report).startswith(f"right on plain numbers, and wrong with {', '.join(there)}")
    assert set(report.right_there).isdisjoint(there)


@pytest.mark.torch
def test_inf_at_padding_is_a_note():
    pytest.importorskip("torch")
    from helpers.audited_torch import chunked, one_batch
    from xentlib.torch.audit import audit

    plain, ours = audit(one_batch), audit(chunked)
    assert plain.passed
    assert ours.passed
    assert plain.notes[0].startswith("with inf and NaN at padding, gradients of the head: inf or")
    assert ours.notes == ()
    assert "inf and NaN at padding" in ours.right_there


@pytest.mark.jax
def test_what_breaks_a_right_step_of_jax():
    jax = pytest.importorskip("jax")
    from helpers.audited_jax import step
    from xentlib.jax.audit import audit

    def means(head, hidden):
        z = hidden @ head.weight.T
        return jax.numpy.log(jax.numpy.exp(z))

    report = audit(step(logits=means))
    assert report.there == {"logits beyond 100": "gradients of the head: inf or NaN"}, report
    assert audit(step()).there == {}


# --- the report -----------------------------------------------------------------------------------


def test_of_rounding_the_cosine_is_said():
    """1 - cosine is no distance."""
    oracle = oracle_of("step", Options(), 1)
    reading = Hypothesis(head=Head(dtype="bfloat16", rounded=("logits",)))
    found = oracle.numbers(reading)
    report = judge("torch", oracle, found._replace(d_weight=found.d_weight.astype(np.float32)))
    text = " ".join(str(report).split())
    assert "the error points as that rounding's does, cosine 1" in text
    assert "to what this gives" not in text


def test_a_page_has_an_address_where_the_package_has_one(monkeypatch):
    class Metadata:
        def __init__(self, *urls):
            self.urls = urls

        def get_all(self, name):
            return [*self.urls] if name == "Project-URL" else None

    def cited(*urls):
        monkeypatch.setattr(reports, "metadata", lambda name: Metadata(*urls))
        reports.page.cache_clear()
        return reports.page("accumulation.md")

    version = reports.xentlib.__version__
    address = f"https://example.org/x/blob/v{version}/docs/accumulation.md"
    assert cited("Other, https://example.com", "Source, https://example.org/x/") == address
    assert cited() == f"docs/accumulation.md of xentlib {version}'s sources"
    reports.page.cache_clear()
