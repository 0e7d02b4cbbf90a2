"""A `TeacherTopK` with what is no log-probability, no class, or a tail of a few digits: right,
refused, or NaN where it cannot be read; both backends, against float64.

Shapes: N tokens, V vocabulary, H hidden width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.teacher import TeacherTopK

N, H, V, K = 12, 6, 41, 3
RNG = np.random.default_rng(5)
HIDDEN, WEIGHT = (RNG.standard_normal(x).astype(np.float32) for x in ((N, H), (V, H)))
IDS = np.argsort(RNG.random((N, V)), axis=1)[:, :K].astype(np.int32)
LOG_Q = np.log(RNG.dirichlet(np.ones(K + 1), N)[:, :K]).astype(np.float32)
KINDS = ("forward_kl", "reverse_kl")


def run(
    backend: str, ids: Any, log_q: Any, tail: str = "class", *, traced: bool = False, **how: Any
) -> tuple[Any, Any]:
    """The output and d hidden; `traced` in a program, where no number can be read."""
    x64 = how.get("compute_dtype") == "float64"
    step = program(backend, tail, **how) if traced else step_of(backend, tail, **how)
    if backend == "torch":
        torch = pytest.importorskip("torch")
        hidden = torch.tensor(HIDDEN).requires_grad_()
        out = step(hidden, torch.tensor(ids), torch.tensor(log_q))
        (gradient,) = torch.autograd.grad(out.loss.sum(), hidden)
        return [None if x is None else x.detach().numpy() for x in out], gradient.numpy()
    jax = pytest.importorskip("jax")
    with jax.enable_x64(x64):
        gradient, out = step(HIDDEN, ids, log_q)
        return jax.tree.map(np.asarray, tuple(out)), np.asarray(gradient)


def step_of(
    backend: str, tail: str, *, stored: Any = None, bias: Any = None, **how: Any
) -> Callable[..., Any]:
    """Of hidden states, ids and log-probabilities: the output, in JAX after d hidden."""
    if backend == "torch":
        torch = pytest.importorskip("torch")
        from xentlib.torch import chunked_divergence

        weight, bias = torch.tensor(WEIGHT), None if bias is None else torch.tensor(bias)

        def step(hidden: Any, ids: Any, log_q: Any) -> Any:
            teacher = TeacherTopK(ids, log_q, tail, stored)
            return chunked_divergence(hidden, weight, teacher, bias=bias, **how)

        return step
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_divergence as in_jax

    def loss(hidden: Any, ids: Any, log_q: Any) -> Any:
        teacher = TeacherTopK(ids, log_q, tail, stored)
        out = in_jax(hidden, WEIGHT, teacher, bias=bias, **how)
        return out.loss.sum(), out

    return jax.grad(loss, has_aux=True)


@cache
def program(backend: str, tail: str, **how: Any) -> Callable[..., Any]:
    """Compiled once for all numbers, a second each."""
    step = step_of(backend, tail, **how)
    if backend == "torch":
        return pytest.importorskip("torch").compile(step, fullgraph=True, backend="aot_eager")
    return pytest.importorskip("jax").jit(step)


def exact(ids: Any, log_q: Any, kind: str, tail: str, bias: Any = 0.0) -> tuple[Any, Any]:
    """Divergences [N] and the gradient of their sum by the hidden states, in float64."""
    z = HIDDEN.astype(np.float64) @ WEIGHT.T + bias
    p_all = np.exp(z - z.max(1, keepdims=True))
    p_all /= p_all.sum(1, keepdims=True)
    p, q = np.take_along_axis(p_all, ids, 1), np.exp(log_q.astype(np.float64))
    if tail == "class":
        p, q = (np.c_[x, 1 - x.sum(1)] for x in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = (q, p) if kind == "forward_kl" else (p, q)
        value = np.where(a > 0, a * (np.log(a) - np.log(b)), 0.0).sum(1)
        # By log p of each class, then by the logits.
        slope = np.where(p > 0, p * (np.log(p) - np.log(q) + 1), 0.0)
    slope = -np.where(p > 0, q, 0.0) if kind == "forward_kl" else slope
    per_class = np.zeros((N, V))
    np.put_along_axis(per_class, ids, slope[:, :K], 1)
    if tail == "class":
        rest = np.ones((N, V), bool)
        np.put_along_axis(rest, ids, False, 1)
        per_class += np.where(rest, p_all / p[:, K:] * slope[:, K:], 0.0)
    dz = per_class - p_all * per_class.sum(1, keepdims=True)
    return value, dz @ WEIGHT.astype(np.float64)


def padded(log_q: Any) -> Any:
    return np.where(np.arange(K) == K - 1, np.float32(0.0), log_q)


WRONG = {"probabilities": np.exp, "logits": lambda x: x + 9, "padding of probability 1": padded}


@pytest.mark.parametrize("tail", ["class", "renormalize", "drop"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_log_probability(backend: str, name: str, tail: str) -> None:
    """D3: refused, or NaN in a program, with its gradient; other tokens are what they were."""
    if backend == "jax" and tail != "class":
        pytest.skip("one factor for every tail")
    wrong = LOG_Q.copy()
    wrong[4] = WRONG[name](LOG_Q)[4]
    with pytest.raises(ValueError, match="of `teacher`: `logprobs` must be log-probabilities"):
        run(backend, IDS, wrong, tail)
    how: dict[str, Any] = {"reduction": "none", "traced": True}
    out, gradient = run(backend, IDS, wrong, tail, **how)
    right, of_right = run(backend, IDS, LOG_Q, tail, **how)
    others = np.arange(N) != 4
    for got, exact_ in ((out[0], right[0]), (gradient, of_right)):
        assert np.isnan(got[4]).all()
        assert not failures(check("A10", got[others], exact_[others]))


def test_a_token_without_a_class(backend: str) -> None:
    """D3, A10: refused; in a program no token, as with `where`. Catches: no entropies, or those of
    the K classes."""
    ids = IDS.copy()
    ids[[2, 7]] = -1
    with pytest.raises(ValueError, match=r"of `teacher`: `ids` must hold a class .* got 2 tokens"):
        run(backend, ids, LOG_Q)
    out, gradient = run(backend, ids, LOG_Q, traced=True, outputs=("divergence", "entropy"))
    assert out[1] == N - 2
    some = np.setdiff1d(np.arange(N), [2, 7])
    exact_value, exact_gradient = exact(IDS, LOG_Q, "forward_kl", "class")
    z = HIDDEN.astype(np.float64) @ WEIGHT.T
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    pairs = [(out[0], exact_value[some].mean()), (gradient[some], exact_gradient[some] / (N - 2))]
    pairs += [
        (out[4][some], exact_value[some]),
        (out[6][some], -(np.exp(log_p) * log_p).sum(1)[some]),
    ]
    for got, right in pairs:
        assert not failures(check("A9", got, right, metrics=("rho / u",)))
    for none in (out[4][[2, 7]], out[6][[2, 7]], gradient[[2, 7]]):
        assert not none.any()


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_of_0_without_a_tail(backend: str, kind: str) -> None:
    """A9: 0 times the log of 0 is 0, of the teacher's in a forward and of the student's in a
    reverse KL. Catches: NaN, or a gradient of it."""
    log_q, bias = LOG_Q.copy(), np.zeros(V, np.float32)
    if kind == "forward_kl":
        log_q[:, 1] = -np.inf
        ids = IDS
    else:
        bias[7] = -np.inf
        ids = np.where(IDS == 7, 8, IDS)
        ids[:, 1] = 7
        ids[:, 0] = np.where(ids[:, 0] == ids[:, 2], 9, ids[:, 0])
    out, gradient = run(backend, ids, log_q, "drop", kind=kind, bias=bias, reduction="none")
    value, of_hidden = exact(ids, log_q, kind, "drop", bias)
    for got, right in ((out[0], value), (gradient, of_hidden)):
        assert not failures(check("A9", got, right, metrics=("rho / u",)))


def test_a_thin_tail(backend: str) -> None:
    """A9, reverse KL: what K classes leave, 1e-5 to 1e-3, has the digits of the log-probabilities.
    Catches: 1 less a rounded sum, 2.5e-4 of the gradient."""
    rest = np.geomspace(1e-5, 1e-3, N)
    share = RNG.dirichlet(np.ones(K), N)
    log_q = np.log(share * (1 - rest)[:, None]).astype(np.float32)
    out, gradient = run(backend, IDS, log_q, kind="reverse_kl", reduction="none")
    value, of_hidden = exact(IDS, log_q, "reverse_kl", "class")
    for got, right in ((out[0], value), (gradient, of_hidden)):
        assert not failures(check("A9", got, right, metrics=("rho / u",)))


def test_audit_mode_keeps_float64(backend: str) -> None:
    """A0: no rounding to float32 on the way. Catches: 3e-3 of D where the two are 2e-9 apart."""
    how: dict[str, Any] = {"kind": "reverse_kl", "compute_dtype": "float64", "reduction": "none"}
    out, gradient = run(backend, IDS, LOG_Q, **how)
    value, of_hidden = exact(IDS, LOG_Q, "reverse_kl", "class")
    for got, right in ((out[0], value), (gradient, of_hidden)):
        assert not failures(check("A8", got, right))


def of(backend: str, x: Any) -> Any:
    """An array of the backend."""
    if backend == "torch":
        return pytest.importorskip("torch").tensor(x)
    return pytest.importorskip("jax").numpy.asarray(x)


def test_a_stored_temperature(backend: str) -> None:
    """A10: one that is the call's changes nothing, a number or an array; another one is refused."""
    each = np.geomspace(0.5, 2.0, N).astype(np.float32)
    right, of_hidden = run(backend, IDS, LOG_Q, stored=2.0, temperature=2.0, reduction="none")
    two, twos = of(backend, np.float32(2.0)), of(backend, np.full(N, 2.0, np.float32))
    for stored, call in [(two, 2.0), (2.0, two), (twos, 2.0)]:
        how: dict[str, Any] = {"stored": stored, "temperature": call, "reduction": "none"}
        out, gradient = run(backend, IDS, LOG_Q, **how)
        for got, exact_value in ((out[0], right[0]), (gradient, of_hidden)):
            assert not failures(check("A10", got, exact_value))
    each, other = of(backend, each), of(backend, each[::-1].copy())
    run(backend, IDS, LOG_Q, stored=each, temperature=each)
    for stored, call in [(None, 2.0), (2.0, 1.0), (2.0, other), (other, 2.0), (other, each)]:
        with pytest.raises(ValueError, match="`temperature` must be that of the stored"):
            run(backend, IDS, LOG_Q, stored=stored, temperature=call)
