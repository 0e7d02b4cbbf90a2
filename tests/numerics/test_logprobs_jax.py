"""`chunked_logprobs` in JAX against the oracle, with another gradient for every token and output.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.held import hold_gradients
from helpers.measured import by_id
from xentlib.contract import check, failures, rho, rounded_fraction
from xentlib.tools.harness.cases import CHUNK_CASES, logit_sets
from xentlib.tools.harness.problems import Case, build, logits_problem, upstream_of

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402

from helpers.leaves_jax import CASE, H, N, V, same  # noqa: E402
from helpers.logprobs_jax import OURS, reference_of, run_logprobs  # noqa: E402
from xentlib.jax import LogprobOutput, chunked_logprobs, chunked_nll  # noqa: E402

# In several chunks: test_logprobs.py has more cases, each in one.
SHAPED = Case("options", 131, 48, 1001, options=OURS, where=True, token_temperature=True)
CASES = (CASE, SHAPED, Case("kernel-layout", 131, 48, 1001, std=3.0, layout="HV", options=OURS))


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_fp32_against_the_oracle(case):
    """A0, A5, A6."""
    p = build(case, 7)
    upstream = upstream_of(p, 1)
    out, gradients = run_logprobs(p, upstream, chunk=64)
    o = reference_of(p, upstream)
    hold_gradients(reference_of(p, upstream), gradients)
    values = np.stack([out.logprobs, out.entropy, out.lse])
    assert values.dtype == np.float32
    exact = check("A0", out.correct, o.correct)
    exact += check("A0", values[:, ~p.valid], np.zeros_like(values[:, ~p.valid]))
    rows = gradients["hidden"][~p.valid]
    exact += check("A0", rows, np.zeros_like(rows))
    assert failures(exact) == []
    assert (out.logprobs <= 0).all()
    assert {name: g.dtype for name, g in gradients.items()} == {
        name: getattr(p, name).dtype for name in gradients
    }


@pytest.mark.slow
@pytest.mark.parametrize("which", range(3), ids=["logprobs", "entropy", "lse"])
def test_each_output_has_a_gradient_of_its_own(which):
    """A5, A6. Catches: a term that only the sum with another one hides."""
    p = build(CASE, 4)
    upstream = tuple(g if i == which else None for i, g in enumerate(upstream_of(p, 1)))
    hold_gradients(reference_of(p, upstream), run_logprobs(p, upstream, chunk=16)[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", [SHAPED], ids=by_id)
def test_bf16_against_the_oracle(case):
    """A7. Catches: dz that XLA keeps in float32 for the GEMMs, or d weight summed in bf16."""
    p = build(replace(case, tokens=512, hidden=64, dtype="bfloat16"), 7)
    upstream = upstream_of(p, 1)
    hold_gradients(
        reference_of(p, upstream, dz_dtype="bfloat16"), run_logprobs(p, upstream, chunk=64)[1], "A7"
    )


@pytest.mark.parametrize(("size", "std"), [(2.0**-8, 1.0), (1.0, 1.0), (2.0**16, 0.05)])
def test_fp16(size, std):
    """p times a small gradient is subnormal in fp16, times a large one inf. Catches: dz rounded
    without its power of two, or returned with it."""
    p = build(replace(CASE, id="fp16", tokens=128, dtype="float16", std=std), 11)
    upstream = tuple(np.float32(size) * g for g in upstream_of(p, 1))
    oracle = reference_of(p, upstream).d_hidden
    normal = np.abs(oracle) >= 2.0**-14
    assert normal.mean() > 0.5
    # dz and the result are rounded to fp16 once each: 2^-11 apiece, in units of u.
    got = run_logprobs(p, upstream)[1]["hidden"]
    assert rho(got[normal], oracle[normal]) <= 2 * 2.0**-11 / 2.0**-24


@pytest.mark.slow
def test_audit_mode():
    """Computed in float64 and rounded once: the oracle rounded to float32, but for ties."""
    p = build(replace(SHAPED, std=3.0), 3)
    upstream = upstream_of(p, 1)
    out, gradients = run_logprobs(p, upstream, chunk=64, audit=True)
    o = reference_of(p, upstream)
    for name in ("logprobs", "entropy", "lse"):
        assert getattr(out, name).dtype == np.float32
        assert rounded_fraction(getattr(out, name), getattr(o, name), "float32") >= 0.995, name
    for name, got in gradients.items():
        assert got.dtype == np.float32
        assert rounded_fraction(got, getattr(o, f"d_{name}"), "float32") >= 0.995, name


def test_values_are_those_of_chunked_nll():
    """The forward walks the same steps: bit for bit."""
    p = build(SHAPED, 5)
    options = {"where": jnp.asarray(p.where), **p.options}
    options["temperature"] = jnp.asarray(options["temperature"])
    call = (p.hidden, p.weight, p.labels)
    ours = chunked_logprobs(*call, bias=p.bias, entropy=True, **options)
    theirs = chunked_nll(*call, bias=p.bias, outputs=LogprobOutput._fields[:4], **options)
    for name in LogprobOutput._fields[:4]:
        assert same(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("item", logit_sets(7, "gaps-1000"), ids=lambda item: item[0])
def test_given_logits(item):
    """A3, A4: also probabilities of 1 - 1e-30, where a log-probability is never above 0; others
    are in test_logprobs.py."""
    text, logits, labels = item
    p = logits_problem(logits, labels, text).changed(options={})
    upstream = (np.ones(len(labels), np.float32), None, None)
    out, gradients = run_logprobs(p, upstream)
    o = reference_of(p, upstream)
    assert out.entropy is None
    assert (out.logprobs <= 0).all()
    peak, rows = logits.max(axis=1).astype(np.float64), np.arange(len(labels))
    found = check("A3", out.lse, o.lse, magnitude=np.maximum(np.abs(peak), o.lse - peak))
    found += check("A4", out.logprobs, o.logprobs)
    found += check("A4", gradients["weight"][labels, rows], o.d_weight[labels, rows])
    assert failures(found) == []


# Few programs: `test_logprobs.py` has others of these cases in both backends.
@pytest.mark.cpu
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.id == "chunks-kernel" else pytest.mark.full)
        for case in CHUNK_CASES
        if case.id != "chunks-small"  # one chunk
    ],
    ids=by_id,
)
def test_chunks_do_not_show(case):
    """A10. Catches: sums of products of per-token gradients formed inside the loop."""
    options = {name: value for name, value in case.options.items() if name in OURS}
    p = build(replace(case, options=options), 7)
    upstream = upstream_of(p, 1)
    want, gradients = run_logprobs(p, upstream)
    for chunk in (64, 200):  # a chunk has 64 rows at least
        out, got = run_logprobs(p, upstream, chunk=chunk)
        assert same(want, out), chunk
        assert failures(check("A10", got["hidden"], gradients["hidden"])) == []


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 6e4])
@pytest.mark.parametrize(("valid", "dtype"), [(0, "float32"), (40, "float32"), (40, "float16")])
def test_what_is_masked_reaches_nothing(poison, valid, dtype):
    """A0, M4: hidden states, temperatures and upstream gradients of masked tokens. Under
    float16 the largest upstream gradient sets the power of two that dz carries."""
    clean = build(Case("masked", 64, H, V, ignored=0.0, token_temperature=True, dtype=dtype), 3)
    masked = np.arange(64) >= valid
    clean = clean.changed(labels=np.where(masked, -100, clean.labels).astype(np.int32))
    upstream = upstream_of(clean, 1)
    want = run_logprobs(clean, upstream, chunk=16)
    dirty = clean.changed(
        hidden=np.where(masked[:, None], clean.hidden.dtype.type(poison), clean.hidden),
        options={"temperature": np.where(masked, np.float32(0), clean.options["temperature"])},
    )
    above = np.float32(1e33) * np.float32(poison)
    got = run_logprobs(dirty, tuple(np.where(masked, above, g) for g in upstream), chunk=16)
    assert same(want, got)
    assert not got[1]["hidden"][masked].view(np.uint8).any()
    if not valid:
        assert not any(g.view(np.uint8).any() for g in got[1].values())


def test_nothing_to_do():
    """A0: N = 0."""
    p = build(CASE, 0)
    p = p.changed(hidden=p.hidden[:0], labels=p.labels[:0])
    out, gradients = run_logprobs(p, upstream_of(p, 1))
    assert out.logprobs.shape == (0,)
    assert not any(g.view(np.uint32).any() for g in gradients.values())


def test_classes_at_minus_infinity():
    """Classes that a bias takes out have p = 0, a label among them too: nothing is NaN."""
    p = build(replace(CASE, id="minus-inf", ignored=0.0), 1)
    p.bias[100:] = -np.inf
    p = p.changed(labels=np.where(np.arange(N) == 5, 120, p.labels % 100).astype(np.int32))
    upstream = upstream_of(p, 1)
    out, gradients = run_logprobs(p, upstream, chunk=16)
    assert out.logprobs[5] == -np.inf
    assert np.isfinite(out.entropy).all()
    hold_gradients(reference_of(p, upstream), gradients)
    assert not gradients["bias"][121:].any()
