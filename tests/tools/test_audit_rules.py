"""The rules of the audit, without a framework: what the oracle says that a defect would give is
named as that defect, and wrong numbers that no rule gives are not given a name."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from xentlib.tools.audit.defects import DEFECTS, forms
from xentlib.tools.audit.diagnose import judge, oracle_of
from xentlib.tools.audit.hypotheses import Hypothesis, Numbers
from xentlib.tools.audit.problem import IGNORE, Options

ALL = Options(True, 30.0, 0.5, 1.3, 0.1, 1e-3)
PLAIN = Options()
KL = Options(True, temperature=1.3, divergence="forward_kl", temperature_squared=True)
JSD = Options(softcap=5.0, temperature=1.7, divergence="jsd", beta=0.3)
OF_LOGPROBS = replace(ALL, label_smoothing=0.0, z_loss=0.0)
PROBLEMS = {
    "one rank": ("step", PLAIN, 1),
    "one rank, all options": ("step", ALL, 1),
    "two ranks": ("step", replace(PLAIN, bias=True), 2),
    "two ranks, one document": ("step", replace(PLAIN, documents=False), 2),
    "four ranks": ("step", PLAIN, 4),
    "loss": ("loss", ALL, 1),
    "logprobs": ("logprobs", OF_LOGPROBS, 1),
    "a divergence": ("step", KL, 1),
    "a divergence, two ranks": ("step", JSD, 2),
    "logprobs alone": ("logprobs", replace(OF_LOGPROBS, entropy=False), 1),
}


# Of one row the last token is a chunk too; float16 and TF32 have as many bits.
LAST = {"last token dropped", "last chunk dropped"}
BITS_11 = {"operands rounded to 16 bits", "products in TF32"}


def rounded(numbers):
    return Numbers(*(None if x is None else x.astype(np.float32) for x in numbers))


def returned(oracle, reading):
    """In float32, as a step would."""
    found = oracle.numbers(reading)
    hidden = oracle.d_hidden(reading) if reading.reduced.root is None else None
    return rounded(found._replace(d_hidden=hidden))


def titles(report):
    return ", ".join(finding.title for finding in report.findings)


def test_every_defect_is_in_a_problem_here():
    there = {
        defect.name
        for kind, options, ranks in PROBLEMS.values()
        for defect in DEFECTS
        if list(forms(defect, oracle_of(kind, options, ranks).problem))
    }
    assert there == {defect.name for defect in DEFECTS}


# On four ranks a defect reads as on two.
FULL = {"four ranks": pytest.mark.full}
# What no factors of tokens give is looked for under every head, for a second where others take
# 0.03: in one of these three, beside the smaller problems, "loss" and "a divergence, two ranks".
UNDER_EVERY_HEAD = {
    "one rank, all options": {
        "weight decay in the gradient",
        "each value clipped",
        "gradients added in 16 bits",
    },
    "two ranks": {"logits rounded to 16 bits", "operands rounded to 16 bits"},
    "two ranks, one document": {"gradients rounded to 16 bits", "products in TF32"},
}
SLOW = {name for names in UNDER_EVERY_HEAD.values() for name in names}


@pytest.mark.parametrize("which", [pytest.param(x, marks=FULL.get(x, ())) for x in PROBLEMS])
def test_every_defect_is_named(which, request):
    """In one of its forms, another one in each problem; in several under `--full`."""
    oracle, turn = oracle_of(*PROBLEMS[which]), [*PROBLEMS].index(which)
    elsewhere = SLOW - UNDER_EVERY_HEAD.get(which, SLOW)
    assert {defect.name for defect in DEFECTS} >= SLOW
    for defect in DEFECTS:
        found = list(forms(defect, oracle.problem))
        some = found[turn % max(len(found), 1) :][: defect.name not in elsewhere]
        if request.config.getoption("--full"):
            some = found[:: max(len(found) // 2, 1)]
        for reading in some:
            report = judge("torch", oracle, returned(oracle, reading))
            (finding,) = report.findings
            named = {name for names in finding.defects for name in names}
            assert {*map(len, finding.defects)} == {1}, report
            alike = [x for x in (LAST, BITS_11) if defect.name in x]
            if alike and (oracle.problem.kind == "loss" or alike == [BITS_11]):
                assert defect.name in named <= alike[0], (reading, str(report))
            else:
                assert named == {defect.name}, (reading, str(report))


@pytest.mark.parametrize("which", PROBLEMS)
def test_sizes_tell_each_other_apart(which):
    """V was 43, as was the number of tokens that count."""
    problem = oracle_of(*PROBLEMS[which]).problem
    classes, width = problem.weight.shape
    positions = [math.prod(problem.ids.shape[k:]) for k in range(4)]
    counts = {problem.count, *positions}
    for tokens in (problem.targets != IGNORE, problem.labels != IGNORE):
        for axes in ((2, 3), (1, 2, 3), (0, 2, 3)):  # of a micro-batch, a rank, a step of all ranks
            counts |= {*tokens.sum(axes).ravel().tolist()}
    counts -= {0, 1, 2, 4}  # ranks, whose multiples they are
    alike = [(n, m) for n in counts for m in (classes, width) if not (n % m and m % n)]
    assert not alike
    assert classes % width
    assert problem.kind == "logprobs" or all(n % problem.count for n in positions)
    for upstream in (problem.d_logprobs, problem.d_entropy):
        assert not upstream.any() or np.abs(upstream).min() > 0.2


@pytest.mark.parametrize("which", PROBLEMS)
def test_right_numbers_are_right(which):
    oracle = oracle_of(*PROBLEMS[which])
    report = judge("jax", oracle, returned(oracle, Hypothesis()))
    assert report.passed
    assert set(report.looked_for).isdisjoint(report.not_looked_for)
    kind = oracle.problem.kind
    known = {defect.name for defect in DEFECTS if kind in defect.kinds}
    assert known == {*report.looked_for, *report.not_looked_for}


def changed(numbers, **more):
    return numbers._replace(**more)


def test_wrong_numbers_that_no_rule_gives_have_no_name():
    oracle = oracle_of("step", PLAIN, 1)
    right = returned(oracle, Hypothesis())
    w = right.d_weight
    noise = np.random.default_rng(0).standard_normal(w.shape).astype(np.float32)
    row, one = w.copy(), w.copy()
    row[:, 7] = 0
    one[:, 1] += np.float32(1e-3) * np.abs(w).max() * noise[:, 1]
    nan = w.copy()
    nan[0, 3, 3] = np.nan
    for wrong in (row, one, nan, 0 * w, w + np.float32(1e-4) * np.abs(w).max() * noise, noise):
        report = judge("torch", oracle, changed(right, d_weight=wrong))
        assert titles(report) == "wrong, and none of these"
        assert "cure" not in str(report)


def test_a_number_that_is_left_over_is_said():
    oracle = oracle_of("step", PLAIN, 1)
    right = returned(oracle, Hypothesis())
    report = judge("torch", oracle, changed(right, d_weight=right.d_weight * np.float32(1.001)))
    assert titles(report) == "off by a factor of 1.001"
    means = returned(oracle, Hypothesis(divisor="micro-batches"))
    report = judge("torch", oracle, changed(means, d_weight=means.d_weight * np.float32(65536)))
    assert titles(report) == (
        "mean of the means of micro-batches and off by a factor of 65536 (2^16, as of a loss scale)"
    )


def test_three_defects_at_once():
    oracle = oracle_of("step", ALL, 2)
    by_name = {defect.name: defect for defect in DEFECTS}
    names = ("labels across documents", "mean of the means of ranks", "temperature not applied")
    reading = Hypothesis()
    for name in names:
        (reading,) = forms(by_name[name], oracle.problem, reading)
    report = judge("torch", oracle, returned(oracle, reading))
    assert report.findings[0].defects == (names,)


def test_two_that_cannot_be_told_apart_are_both_named():
    """On three ranks with three micro-batches the two numbers are one."""
    oracle = oracle_of("step", PLAIN, 3)
    report = judge("torch", oracle, returned(oracle, Hypothesis(scale=1 / 3)))
    assert titles(report) == "off by the number of ranks, or off by the accumulation steps"


def test_what_the_loss_says_beside_the_gradients():
    oracle = oracle_of("step", PLAIN, 2)
    right, means = (returned(oracle, Hypothesis(divisor=x)) for x in ("tokens", "ranks"))
    for loss, note in (
        (right.loss, "the loss is right"),
        (means.loss, "the loss is wrong in the same way"),
        (right.loss + 1, "the loss is wrong too"),
    ):
        (finding,) = judge("torch", oracle, changed(means, loss=loss)).findings
        assert (finding.of, finding.note) == ("gradients of the head", note)
    (finding,) = judge("torch", oracle, changed(right, loss=right.loss * 2)).findings
    assert (finding.of, finding.title) == ("loss", "reduced twice over ranks")
    report = judge("torch", oracle, changed(right, loss=None))
    assert report.passed
    assert report.not_compared == ("loss",)


def test_hidden_states_may_have_a_factor_of_their_own_in_a_step_alone():
    for which, passed in (("two ranks", True), ("loss", False)):
        oracle = oracle_of(*PROBLEMS[which])
        right = returned(oracle, Hypothesis())
        report = judge("torch", oracle, changed(right, d_hidden=right.d_hidden * 2))
        assert report.passed is passed
        report = judge("torch", oracle, changed(right, d_hidden=-right.d_hidden))
        assert titles(report) == "sign"
        assert report.findings[0].of == "gradient of the hidden states"


def test_counts_of_the_problem_all_differ():
    """Or two defects would have one number."""
    problem = oracle_of("step", PLAIN, 2).problem
    valid = problem.targets != IGNORE
    for axes in ((0, 2, 3), (1, 2, 3), (2, 3)):
        counts = valid.sum(axis=axes).ravel().tolist()
        assert len(set(counts)) > len(counts) // 2
        assert max(counts) > 1.3 * min(counts) > 0
    # The end of a micro-batch has labels, of which a dropped chunk takes some.
    assert valid[:, :, -1, -3:-1].all()


def test_a_report_is_json():
    oracle = oracle_of("step", PLAIN, 1)
    report = judge("jax", oracle, returned(oracle, Hypothesis(divisor="micro-batches")))
    found = json.loads(report.to_json())
    assert found["findings"][0]["of"] == "gradients of the head"
    assert found["looked_for"] == list(report.looked_for)
    assert "docs/accumulation-jax.md" in str(report)
