"""The float64 oracle against three other ways to the same numbers.

Bounds are the contract's own, in units of 2^-53 instead of 2^-24: the oracle's running error bound
follows each rounding once, whatever the unit, so a correct float64 oracle meets tau as correct
float32 code does.
"""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest

from helpers.oracle import VALUE_ULP, tau_bound, torch_full_logits, units
from xentlib.reference import nll_reference
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.ulp import ulp_distance

GRADIENTS = (
    ("d_hidden", "hidden", "A5"),
    ("d_weight", "weight", "A6"),
    ("d_bias", "bias", "A6"),
)

ALL = {"logit_scale": 0.7, "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.05}
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "denominator": {"denominator": 7.0},
    "scale": {"logit_scale": -1.3},
    "softcap": {"softcap": 2.0},
    "temperature": {"temperature": 0.6},
    "smoothing": {"label_smoothing": 0.2},
    "smoothing 1": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 0.1},
    "class weights": {"class_weights": True},
    "class weights, smoothing": {"class_weights": True, "label_smoothing": 0.3, "z_loss": 0.1},
    "all": ALL,
    "all, HV": ALL | {"weight_layout": "HV"},
}


def problem(
    name: str, *, tokens=4, hidden=3, vocab=5, extras=True, std=1.5, ignored=0.3
) -> Problem:
    options = dict(OPTIONS[name])
    layout, weighted = options.pop("weight_layout", "VH"), options.pop("class_weights", False)
    case = Case(
        name, tokens, hidden, vocab, std=std, ignored=ignored, confident=0.5, where=extras,
        token_weights=extras, token_temperature=extras and "temperature" not in options,
        layout=layout, dtype="float64", options=options, class_weights=weighted,
    )  # fmt: skip
    made = build(case, 11)
    return made if made.valid.any() else made.changed(labels=np.arange(tokens) % vocab)


# ---------------------------------------------------------------------------------
# 50 digits


def mp_values(p: Problem, hidden, weight_VH, bias) -> dict:
    """The definition of D3, in mpmath; arrays are lists of mpf."""
    o = p.options
    mpf, log, exp, fsum = mpmath.mpf, mpmath.log, mpmath.exp, mpmath.fsum
    eps, coefficient = mpf(o.get("label_smoothing", 0.0)), mpf(o.get("z_loss", 0.0))
    total = z_total = weight_sum = mpf(0)
    rows = {"logprobs": [], "entropy": [], "lse": [], "correct": []}
    for n, label in enumerate(p.labels.tolist()):
        if not p.valid[n]:
            for values in rows.values():
                values.append(mpf(0))
            continue
        u = [
            mpf(o.get("logit_scale", 1.0))
            * (fsum(x * w for x, w in zip(hidden[n], row)) + (bias[v] if bias else 0))
            for v, row in enumerate(weight_VH)
        ]
        cap = o.get("softcap")
        s = u if cap is None else [mpf(cap) * mpmath.tanh(x / mpf(cap)) for x in u]
        t = mpf(float(np.broadcast_to(o.get("temperature", 1.0), len(p.labels))[n]))
        z = [x / t for x in s]
        lse = log(fsum(exp(x) for x in z))
        logprob = z[label] - lse
        c = (
            [mpf(1)] * len(z)
            if p.class_weights is None
            else [mpf(float(x)) for x in p.class_weights]
        )
        smooth = fsum(w * (x - lse) for w, x in zip(c, z))
        nll = -(1 - eps) * c[label] * logprob - eps / len(z) * smooth
        factor = mpf(1 if p.token_weights is None else float(p.token_weights[n]))
        total += factor * (nll + coefficient * lse**2)
        z_total += factor * coefficient * lse**2
        weight_sum += factor * c[label]
        rows["logprobs"].append(logprob)
        rows["entropy"].append(-fsum(exp(x - lse) * (x - lse) for x in z))
        rows["lse"].append(lse)
        rows["correct"].append(mpf(all(z[label] > x for v, x in enumerate(z) if v != label)))
    divisor = mpf(o.get("denominator", 1 if o.get("reduction") == "sum" else 0)) or weight_sum
    return rows | {"loss": total / divisor, "z_loss": z_total / divisor, "weight_sum": weight_sum}


def to_mp(x):
    return (
        None if x is None else [to_mp(row) if np.ndim(row) else mpmath.mpf(float(row)) for row in x]
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_against_fifty_digits(name):
    """A2 to A6 stand on the oracle: each value and gradient against mpmath, all options."""
    p = problem(name)
    turned = p.options.get("weight_layout") == "HV"
    with mpmath.workdps(50):
        leaves = {
            "hidden": to_mp(p.hidden),
            "weight": to_mp(p.weight.T if turned else p.weight),
            "bias": to_mp(p.bias),
        }
        exact = mp_values(p, leaves["hidden"], leaves["weight"], leaves["bias"])
        o = p.reference()
        for key in ("loss", "z_loss", "weight_sum", "logprobs", "entropy", "lse", "correct"):
            truth = np.array(exact[key], dtype=np.float64)
            # The scale on which a value is cancelled: nothing is finer than the logits' own ULP.
            scale = max(np.abs(o.lse).max(), float(o.loss_magnitude), 1.0)
            magnitude = np.maximum(np.abs(truth), scale)
            assert ulp_distance(getattr(o, key), truth, "float64", magnitude).max() <= VALUE_ULP
        assert o.num_tokens == p.valid.sum()
        # A central difference with h = 1e-18 is right to 1e-36, far below a float64.
        h = mpmath.mpf(10) ** -18
        for gradient, leaf, row in GRADIENTS:
            flat = leaves[leaf] if leaf != "bias" else [leaves[leaf]]
            truth = np.zeros((len(flat), len(flat[0])))
            for i, j in itertools.product(range(len(flat)), range(len(flat[0]))):
                kept, losses = flat[i][j], []
                for step in (h, -h):
                    flat[i][j] = kept + step
                    losses.append(mp_values(p, *leaves.values())["loss"])
                flat[i][j] = kept
                truth[i, j] = mpmath.mpf(p.upstream) * (losses[0] - losses[1]) / (2 * h)
            got = getattr(o, gradient)
            bound = getattr(o, gradient.replace("d_", "bound_"))
            truth = truth.T if turned and leaf == "weight" else truth.reshape(got.shape)
            assert units(got, truth, bound) <= tau_bound(row), gradient
            assert units(1.001 * got, truth, bound) > 1e6  # A14


# ---------------------------------------------------------------------------------
# Finite differences in float64


@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_against_central_differences(name):
    """The gradient is the slope of the oracle's own loss.

    The truncation of a central difference with step h is a third of its change from 2h to h, to
    leading order; rounding adds 64 units of 2^-52 of the loss, over h. Both are measured here.
    """
    p = problem(name, tokens=7, hidden=5, vocab=11)
    o = p.reference()
    rng = np.random.default_rng(5)
    h = 2.0**-12
    for gradient, leaf, _ in GRADIENTS:
        x = getattr(p, leaf)
        direction = rng.standard_normal(x.shape)
        direction /= np.linalg.norm(direction)

        def slope(step, leaf=leaf, x=x, direction=direction):
            up, down = (
                p.changed(**{leaf: x + s * direction}).reference().loss for s in (step, -step)
            )
            return p.upstream * (up - down) / (2 * step)

        truncation = abs(slope(2 * h) - slope(h))
        rounding = 64 * 2.0**-52 * abs(p.upstream) * float(o.loss_magnitude) / h
        along = float((getattr(o, gradient) * direction).sum())
        assert abs(along - slope(h)) <= truncation + rounding, gradient
        assert truncation + rounding <= 1e-4 * np.linalg.norm(getattr(o, gradient))  # not blind


# ---------------------------------------------------------------------------------
# Autograd through full logits


@pytest.mark.torch
@pytest.mark.parametrize("std", [0.3, 3.0, 6.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_against_autograd(name, std):
    """M21: the label-smoothing convention is torch's; all options through full logits.

    Both sides round here, hence twice the row's bound.
    """
    pytest.importorskip("torch")
    p = problem(name, tokens=29, hidden=8, vocab=37, std=std)
    o = p.reference()
    loss, gradients = torch_full_logits(p)
    distance = ulp_distance(o.loss, np.asarray(loss), "float64", o.loss_magnitude)
    assert distance <= 2 * VALUE_ULP
    for (gradient, _, row), got in zip(GRADIENTS, gradients):
        bound = getattr(o, gradient.replace("d_", "bound_"))
        assert units(got, getattr(o, gradient), bound) <= 2 * tau_bound(row), gradient


# ---------------------------------------------------------------------------------
# Corners in closed form


def test_invalid_rows_reach_nothing():
    """A0, M4: inf and NaN in rows that are not valid; their gradient is +0."""
    p = problem("all", tokens=9)
    clean = p.reference()
    hidden = p.hidden.copy()
    hidden[~p.valid] = np.array([np.inf, np.nan, -np.inf])
    dirty = p.changed(hidden=hidden).reference()
    for name, want, got in zip(clean._fields, clean, dirty):
        assert np.array_equal(want, got), name
    zeros = dirty.d_hidden[~p.valid]
    assert zeros.size
    assert not zeros.view(np.uint64).any()


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"denominator": 0.0}], ids=str)
def test_no_valid_token(options):
    """A0: loss 0, gradients exist and are exactly 0, whatever it would be divided by."""
    p = problem("plain")
    o = nll_reference(p.hidden, p.weight, np.full(4, -100), upstream=-2.0, **options)
    assert (float(o.loss), o.num_tokens, float(o.weight_sum)) == (0.0, 0, 0.0)
    assert not o.d_weight.any()
    assert not o.d_hidden.view(np.uint64).any()


def test_a_confident_token_keeps_its_digits():
    """A4: where F.cross_entropy returns 0, -log1p(r) does not."""
    o = nll_reference(np.eye(1), np.array([[60.0], [0.0], [1.0]]), np.zeros(1, np.int32))
    with mpmath.workdps(50):
        r = mpmath.exp(-60) + mpmath.exp(-59)
        exact = np.float64(-mpmath.log1p(r))
        target = np.float64(-r / (1 + r) * 60 + mpmath.exp(-59) / (1 + r))
    assert ulp_distance(o.logprobs, exact, "float64").max() <= VALUE_ULP
    assert ulp_distance(o.d_hidden, target, "float64").max() <= VALUE_ULP


def test_leading_dimensions_and_rounded_dz():
    """Shapes follow `hidden`; A7 measures against dz rounded before the upstream factor."""
    p = problem("plain", tokens=6, extras=False, ignored=0.0)
    flat = p.reference()
    deep = nll_reference(
        p.hidden.reshape(2, 3, 3),
        p.weight,
        p.labels.reshape(2, 3),
        bias=p.bias,
        upstream=p.upstream,
    )
    assert np.array_equal(deep.d_hidden.reshape(6, 3), flat.d_hidden)
    assert deep.logprobs.shape == (2, 3)
    rounded = p.reference(dz_dtype="bfloat16")
    assert np.array_equal(rounded.d_bias, flat.d_bias)
    gap = np.abs(rounded.d_hidden - flat.d_hidden) / flat.magnitude_hidden
    assert 0 < gap.max() <= 2.0**-8
