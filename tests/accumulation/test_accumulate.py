"""Token-normalised windows: their algebra, and every road of both backends against the oracle of
one batch.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from helpers.measured import hold
from xentlib.accumulate import STEPS, Lifecycle, WindowState, WindowStateError, reduction_of
from xentlib.contract import check, failures
from xentlib.tools.harness.cases import BASE, CONFIDENT
from xentlib.tools.harness.problems import build
from xentlib.tools.parity.rows import windows


@pytest.mark.parametrize(
    ("said", "scale"),
    [
        ({"wrapper": "plain"}, 1),
        ({"wrapper": "DDP", "ranks": 4}, 4),
        ({"wrapper": "DDP", "ranks": 4, "sums": True}, 1),
        ({"wrapper": "FSDP2", "ranks": 4}, 4),
        ({"wrapper": "FSDP2", "ranks": 4, "divide": 0.3}, Fraction(0.3)),
        ({"wrapper": "DeepSpeed", "ranks": 4, "steps": 3}, 12),
        ({"wrapper": "DeepSpeed", "ranks": 4}, 4),
        ({"wrapper": "DeepSpeed", "ranks": 4, "steps": 3, "sums": True}, 3),
        ({"wrapper": "DDP", "ranks": 2, "steps": 5}, 10),
    ],
)
def test_the_table_of_wrappers(said: dict[str, Any], scale: Fraction) -> None:
    """D8: the factor on the token sum is this over T, exactly."""
    assert reduction_of(**said).scale == scale


def test_states_of_a_window() -> None:
    """In order, and abort from anywhere."""
    life = Lifecycle()
    for action in ("count", "open", "backward", "backward", "seal", "finish", "read", "close"):
        life.step(action)
    assert life.state is WindowState.IDLE
    for state in WindowState:
        life.state = state
        life.step("abort")
        assert life.state is WindowState.IDLE


@pytest.mark.parametrize("state", WindowState)
def test_every_misuse_is_refused(state: WindowState) -> None:
    """What may not be done in a state says what state it needs, what came, and the way out."""
    for action, allowed in STEPS.items():
        life = Lifecycle()
        life.state = state
        if state in allowed:
            life.step(action)
            continue
        with pytest.raises(WindowStateError, match=f"`{action}` needs.* is {state.value}\\. [A-Z]"):
            life.step(action)
        assert life.state is state


# --- every road of both backends -----------------------------------------------------------------


@pytest.mark.slow
def test_a_problem_in_a_window(backend: str) -> None:
    """A0, A2, A12: uneven micro-batches, one without a valid token, against the oracle of one
    batch; A14: the mean of means, among others."""
    hold(windows.windows, (backend,), build(BASE, 7))


@pytest.mark.slow
@pytest.mark.parametrize("case", [BASE, CONFIDENT], ids=lambda case: case.id)
def test_windows_have_the_same_bits_in_both_backends(case: Any) -> None:
    """A1: in audit mode."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    hold(windows.audit, ("torch", "jax"), build(case, 7))


@pytest.mark.torch
def test_audit_mode_does_not_know_of_windows() -> None:
    """A12, A1: a float64 head's window, rounded to float32, has the bits of one batch."""
    torch = pytest.importorskip("torch")
    from helpers.windows import H, V
    from xentlib.torch import TokenNormalizer, chunked_nll

    torch.manual_seed(1)
    x, y = torch.randn(40, H, dtype=torch.float64), torch.arange(40) % V
    y[[3, 4, 5, 20, 39]] = -100
    head = torch.nn.Linear(H, V).double()
    want = torch.autograd.grad(
        chunked_nll(x, head.weight, y, bias=head.bias, compute_dtype="float64").loss,
        tuple(head.parameters()),
    )
    for mode in ("precount", "postscale"):
        head.zero_grad()
        batches = [(x[a:b], y[a:b]) for a, b in ((0, 3), (3, 6), (6, 39), (39, 40))]
        declared = {"labels": [b for _, b in batches]} if mode == "precount" else {}
        with TokenNormalizer(head, mode=mode).window(**declared) as window:
            for a, b in window.micro_batches(batches):
                how = {"bias": head.bias, "compute_dtype": "float64", "reduction": "sum"}
                window.backward(chunked_nll(a, head.weight, b, **how))
        for p, whole in zip(head.parameters(), want, strict=True):
            assert not failures(check("A1", p.grad.float().numpy(), whole.float().numpy()))
