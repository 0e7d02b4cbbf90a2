"""`CrossCheck` of calls that `torch.compile` has traced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.corrupted import wrong_torch  # noqa: E402
from xentlib.tools.crosscheck import CrossCheckWarning  # noqa: E402
from xentlib.torch import CrossCheck, chunked_nll  # noqa: E402

H, V, N = 24, 157, 21


def run(check: CrossCheck, head: Any, loss_of: Any, steps: int, **cast: Any) -> None:
    for seed in range(steps):
        given = torch.Generator().manual_seed(seed)
        x = torch.randn(N, H, generator=given, **cast).requires_grad_()
        y = torch.randint(V, (N,), generator=given)
        y[:3] = -100
        with check.step():
            (1.7 * loss_of(head, x, y)).backward()


def loss_of(head: Any, x: Any, y: Any, **more: Any) -> Any:
    return chunked_nll(x.tanh(), head, y, softcap=5.0, **more).loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_head_is_checked_as_its_operator_runs(
    dtype: Any, recompute: bool, monkeypatch: Any
) -> None:
    """Catches: a loss that recomputes, whose gradients are not there to be looked at."""
    head = torch.nn.Linear(H, V, dtype=dtype)
    call = partial(loss_of, recompute=recompute)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    check = CrossCheck(every=2, tokens=5, rows=5, exceeded="raise")
    run(check, head, compiled, 3, dtype=dtype)
    assert [(x.step, x.calls, x.passed) for x in check.results] == [(0, 1, True), (2, 1, True)]
    named = {m.quantity for m in check.results[0].measurements}
    assert {"loss", "d hidden", "d weight", "d bias of all rows"} < named
    wrong_torch(monkeypatch)
    wrong = CrossCheck(every=1)
    with pytest.warns(CrossCheckWarning, match="d weight of all rows"):
        run(wrong, head, compiled, 1, dtype=dtype)


def test_a_call_is_looked_at_once_under_a_mode_that_sees_operators() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    check = CrossCheck(every=1, exceeded="raise")
    with FlopCounterMode(display=False):
        run(check, torch.nn.Linear(H, V), loss_of, 1)
    assert [x.calls for x in check.results] == [1]
