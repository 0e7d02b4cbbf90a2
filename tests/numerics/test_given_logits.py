"""`vocab_parallel_logprobs`, of precomputed logits: both backends against the oracle, on one
device.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.given_logits import (
    FLOAT32_MIN,
    RUN,
    VALUES,
    Call,
    V,
    given_in,
    hold_given,
    in_jax,
    in_torch,
    make,
    oracle,
    same_bits,
)
from xentlib.contract import SHARES, check, failures
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.cases import logit_sets
from xentlib.tools.harness.problems import Case, build

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharp": {"std": 8.0, "ignored": 0.0},
    "leading": {"shape": (3, 4, 5), "temperature": True, "where": True},
    "nothing valid": {"ignored": 1.0},
    "bf16": {"dtype": "bfloat16", "shape": (130,), "temperature": True, "where": True},
    "fp16": {"dtype": "float16", "shape": (130,), "temperature": True, "where": True},
    "float64": {"dtype": "float64", "temperature": True, "where": True},
    "offset": {"offset": 1e4},
    "offset below": {"offset": -1e4, "temperature": True},
    "classes at -inf": {"dead": 40, "ignored": 0.0},
    "all classes but one masked": {"dead": V - 1, "mask": FLOAT32_MIN, "ignored": 0.0},
    "smoothed": {"smoothing": 0.1, "shape": (4, 30), "temperature": True, "where": True},
    "smoothed, bf16": {"smoothing": 0.3, "dtype": "bfloat16", "shape": (130,)},
    "smoothed altogether": {"smoothing": 1.0, "ignored": 0.0},
    "masked by less": {"columns": 32_000, "dead": 31_999, "mask": -1e35, "shape": (3,)},
    "one class": {"columns": 1},
    "one token": {"shape": (1,), "ignored": 0.0},
    "no token": {"shape": (0,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(backend: str, case: str) -> None:
    """A0, A2, A3, A5, A7, A16; a gradient of its own for each token and output. Catches: a dropped
    or turned term of the gradient, a temperature left out of it, distances to masked classes that
    overflow before they meet a factor of 0."""
    call = make(**CASES[case])
    hold_given(call, RUN[backend](call))


@pytest.mark.parametrize("item", logit_sets(7), ids=lambda item: item[0])
def test_confident_tokens(backend: str, item: Any) -> None:
    """A3, A4: probabilities of the label from 1e-30 to 1 - 1e-30. Catches: lse - z, 1 - p."""
    _, logits, labels = item
    rows, zero = np.arange(len(labels)), np.zeros(len(labels), np.float32)
    g = np.random.default_rng(3).standard_normal(len(labels)).astype(np.float32)
    call = Call(logits, labels.astype(np.int32), np.stack([g, zero, zero]))
    got, o = RUN[backend](call), oracle(call)
    peak = logits.max(axis=1).astype(np.float64)
    scale = np.maximum(np.abs(peak), o.lse - peak)
    found = check("A3", got["lse"], o.lse, magnitude=scale)
    found += check("A4", got["logprobs"], o.logprobs)
    found += check("A4", got["d_logits"][rows, labels], o.d_weight[labels, rows])
    assert not failures(found)


@pytest.mark.parametrize(
    "row",
    [[-np.inf] * 5, [np.inf] + [-np.inf] * 4, [np.inf, 0.0, 1.0, 2.0, 3.0], [0.0] + [np.inf] * 4],
    ids=["nothing", "label alone", "label above all", "others above all"],
)
def test_a_row_without_a_finite_maximum_is_nan(backend: str, row: list[float]) -> None:
    """A0: as `log_softmax` has it, and never a log-probability of 0; its lse is the maximum's, as
    `logsumexp` has it, and the row beside it is not touched."""
    call = make(shape=(2,), columns=5, ignored=0.0)
    call = replace(call, labels=np.array([0, 3], np.int32))
    got = RUN[backend](replace(call, logits=np.stack([np.float32(row), call.logits[1]])))
    for name in ("logprobs", "entropy"):
        assert np.isnan(got[name][0]), name
    assert got["lse"][0] == max(row)
    assert np.isnan(got["d_logits"][0]).any()
    want = RUN[backend](call)
    for name in (*VALUES, "d_logits"):
        assert not failures(check("A0", got[name][1], want[name][1], quantity=name))


def test_the_loss_of_a_row_that_is_masked_throughout_is_nan(backend: str) -> None:
    """A0: an evaluation must not look perfect because a mask is wrong; masked by `where`, it is not
    seen. Catches: a log-probability of 0 for a label at -inf that is its row's maximum."""
    problem = build(Case("masked", 4, 8, 11, ignored=0.0), 3)
    problem = problem.changed(bias=np.full(11, -np.inf, np.float32))
    assert np.isnan(run(backend, problem).loss)
    nothing = run(backend, problem.changed(where=np.zeros(4, bool)))
    assert not failures(check("A0", nothing.loss, np.float32(0)))


def test_a_gradient_that_is_subnormal_in_fp16(backend: str) -> None:
    """A16, A19: of a mean over [256, 1000] logits nearly every entry is below 2^-14. Catches: a
    rounding that takes those to 0, which left 0.1 % of them."""
    call = make(shape=(256,), columns=1000, dtype="float16", std=1.0, ignored=0.0)
    mean = np.full(256, 1 / 256, np.float32)
    call = replace(call, upstream=np.stack([mean, 0 * mean, 0 * mean]))
    dz, exact = RUN[backend](call)["d_logits"], oracle(call).d_weight.T
    assert (np.abs(exact) < 2.0**-14).mean() > 0.99
    assert not failures(check("A16", dz, exact, magnitude=np.abs(exact)))
    assert not failures(check("A19", dz, exact, metrics=(SHARES["float16"],)))


def test_a_poisoned_row_reaches_nothing(backend: str) -> None:
    """A0, M4: inf and NaN in logits, temperatures and upstream gradients of tokens that
    are not valid. Catches: a mask that multiplies."""
    call = make(temperature=True, ignored=0.3)
    gone = ~call.valid
    for poison in (np.inf, -np.inf, np.nan):
        dirty = replace(
            call,
            logits=np.where(gone[:, None], np.float32(poison), call.logits),
            upstream=np.where(gone, np.float32(poison), call.upstream),
            options={"temperature": np.where(gone, np.float32(0), call.options["temperature"])},
        )
        same_bits(RUN[backend](dirty), RUN[backend](call), "A0")


@pytest.mark.cpu  # rows A10 and A17 are of CPUs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_show(backend: str, dtype: str) -> None:
    """A10: values and d logits have the same bits under any budget, one of a byte included."""
    call = make(shape=(221,), columns=1001, dtype=dtype, temperature=True)
    want = RUN[backend](call)
    budgets = (1, 8 * 1001 * 4, 100 * 1001 * 4, 1 << 40)
    # In JAX a chunk has 64 rows at least, and all are in one without a budget too.
    for budget in budgets if backend == "torch" else budgets[1:3]:
        same_bits(RUN[backend](call, max_chunk_bytes=budget), want, "A10")


def test_without_entropy(backend: str) -> None:
    """A10: not asked for it is None, and the rest has the bits that it has beside an entropy
    without gradient."""
    call = make()
    call = replace(call, upstream=call.upstream * np.float32([[1], [0], [1]]))
    got, want = RUN[backend](call, entropy=False), RUN[backend](call)
    assert got.pop("entropy") is None
    hold_given(call, got | {"entropy": want["entropy"]})
    same_bits({k: got[k] for k in ("logprobs", "lse", "correct")},
         {k: want[k] for k in ("logprobs", "lse", "correct")}, "A10")  # fmt: skip


def test_float64_is_the_same_in_both() -> None:
    """A1: float64 logits give bit-equal float32, values and d logits."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    call = make(2, shape=(256,), columns=4099, dtype="float64", temperature=True, where=True)
    ours, theirs = (
        {k: x.astype(np.float32) for k, x in RUN[name](call).items()} for name in ("torch", "jax")
    )
    same_bits(ours, theirs, "A1")


# --- Around the operators ------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_second_backward_is_right_and_double_backward_loud() -> None:
    """M10."""
    torch = pytest.importorskip("torch")
    call = make(ignored=0.0)
    x = torch.tensor(call.logits, requires_grad=True)
    out = given_in("torch", entropy=True)(x, torch.tensor(call.labels))
    loss = sum((torch.tensor(g) * v).sum() for g, v in zip(call.upstream, out))
    first, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match=r"`vocab_parallel_logprobs` must be differentiated on"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_torch_compiles_into_one_graph() -> None:
    """D6: `torch.compile(fullgraph=True)`, the same bits; also of a transposed view."""
    torch = pytest.importorskip("torch")
    call = make(temperature=True)
    y, t = torch.tensor(call.labels), torch.tensor(call.options["temperature"])

    upstream, function = torch.tensor(call.upstream), given_in("torch", entropy=True, temperature=t)

    def step(x: Any) -> Any:
        return sum((g * v).sum() for g, v in zip(upstream, function(x.T, y)))

    x = torch.tensor(np.ascontiguousarray(call.logits.T), requires_grad=True)
    want = torch.autograd.grad(step(x), x)[0]
    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x), x)[0]
    assert torch.equal(want, got)
    assert torch.equal(want.T, torch.tensor(in_torch(call)["d_logits"]))


@pytest.mark.slow
@pytest.mark.jax
def test_jax_transformations() -> None:
    """D6: jit and remat have the eager bits, vmap holds the same rows; a second derivative
    raises."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    calls = [make(seed, shape=(221,), ignored=seed / 3) for seed in range(4)]

    def loss(x: Any, y: Any, g: Any) -> Any:
        out = given_in("jax", entropy=True, max_chunk_bytes=64 * V * 4)(x, y)
        return sum((a * v).sum() for a, v in zip(g, out))

    batch = [jnp.stack([getattr(c, k) for c in calls]) for k in ("logits", "labels", "upstream")]
    step = jax.grad(loss)
    want = np.stack([step(*rows) for rows in zip(*batch)])
    for other in (jax.jit(step), jax.jit(jax.grad(jax.checkpoint(loss)))):
        got = np.stack([other(*rows) for rows in zip(*batch)])
        assert not failures(check("A11", got, want))
    for call, got in zip(calls, np.asarray(jax.vmap(step)(*batch)), strict=True):
        hold_given(call, in_jax(call) | {"d_logits": got})
    with pytest.raises(RuntimeError, match="must be differentiated once"):
        jax.grad(lambda x: step(x, *[b[1] for b in batch[1:]]).sum())(batch[0][1])
