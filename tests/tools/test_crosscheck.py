"""`CrossCheck` around the steps of a plain loop in PyTorch."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from helpers.corrupt_rows import PLANTED, plant  # noqa: E402
from helpers.corrupted import WRONG_AT, wrong_torch  # noqa: E402
from helpers.handed import options_missed  # noqa: E402
from xentlib.tools.crosscheck import CrossCheckError, CrossCheckWarning  # noqa: E402
from xentlib.torch import CrossCheck, chunked_nll  # noqa: E402

H, V = 24, 157
OPTIONS: dict[str, Any] = {"softcap": 3.0, "z_loss": 1e-3, "temperature": 0.7}
OPTIONS |= {"label_smoothing": 0.1, "logit_scale": 1.3}


def steps(
    number: int,
    check: CrossCheck | None = None,
    *,
    dtype: Any = torch.float32,
    autocast: bool = False,
    before: Any = None,
    **options: Any,
) -> list[Any]:
    """Losses of a run, and its head at the end."""
    torch.manual_seed(0)
    body, head = torch.nn.Linear(H, H, dtype=dtype), torch.nn.Linear(H, V, dtype=dtype)
    optimizer, found = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.3), []
    for step in range(number):
        if before is not None:
            before(step)
        x, y = torch.randn(3, 21, H, dtype=dtype), torch.randint(V, (3, 21))
        y[0, :5] = -100
        with check.step() if check else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = chunked_nll(body(x), head, y, max_chunk_bytes=16 * V * 4, **options).loss
            (1.7 * loss).backward()
            optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *head.parameters()]


CASES = {
    "plain": {},
    "options": OPTIONS,
    "sum": {"reduction": "sum", "denominator": 77.0},
    "weights": {"token_weights": torch.linspace(-0.5, 2, 63).reshape(3, 21)},
    "per token": {"temperature": torch.linspace(0.5, 2, 63).reshape(3, 21)},
    "bf16": {"dtype": torch.bfloat16},
    "recompute": {"recompute": True},
    "recompute, bf16": {"recompute": True, "dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
    "autocast": {"autocast": True},
    "audit": {"compute_dtype": "float64"},
}


@pytest.mark.parametrize("tokens", [None, 9])
@pytest.mark.parametrize("case", CASES)
def test_a_right_run_passes_and_says_what_was_held(case: str, tokens: int | None) -> None:
    check = CrossCheck(every=2, tokens=tokens, rows=tokens, exceeded="raise")
    steps(3, check, **CASES[case])
    assert [x.step for x in check.results] == [0, 2]
    named = {m.quantity for x in check.results for m in x.measurements}
    assert named == {
        *("token count", "loss", "log-probability", "log-probability of all tokens"),
        *("lse of all tokens", "d hidden", "d hidden of invalid rows", "d weight", "d bias"),
        *("d weight of all rows", "d bias of all rows"),
    }


@pytest.mark.jax
@pytest.mark.parametrize("case", ["plain", "options", "bf16", "weights"])
def test_against_the_other_backend(case: str) -> None:
    pytest.importorskip("jax")
    check = CrossCheck(every=2, against="other", exceeded="raise")
    steps(3, check, **CASES[case])
    measured = check.results[-1].measurements
    rows = {m.row for m in measured if m.quantity[0] in "dl" and "invalid" not in m.quantity}
    assert rows == ({"A9", "A19"} if case == "bf16" else {"A9"})


def test_bits_are_those_of_a_run_that_is_not_checked() -> None:
    want = steps(4)
    for how in ({"every": 1}, {"every": 2, "tokens": 5}, {"every": 3, "against": "other"}):
        for got, x in zip(steps(4, CrossCheck(**how)), want, strict=True):
            assert torch.equal(got, x)


@pytest.mark.parametrize("tokens", [None, 20])
def test_a_step_that_is_made_wrong_is_caught(monkeypatch: Any, tokens: int | None) -> None:
    def before(step: int) -> None:
        if step == WRONG_AT:
            wrong_torch(monkeypatch)

    check = CrossCheck(every=10, tokens=tokens)
    with pytest.warns(CrossCheckWarning, match="step 30.*A5 torch d hidden") as said:
        steps(WRONG_AT + 1, check, before=before)
    assert [x.passed for x in check.results] == [True, True, True, False]
    assert len(said) == 1
    assert "A6 torch d weight of all rows" in str(said[0].message)


@pytest.mark.parametrize("kind", PLANTED)
def test_any_row_of_d_weight_is_covered(kind: str) -> None:
    """With the default sample, in each of 20 steps; every second row is a label's."""
    for seed in range(20):
        torch.manual_seed(seed)
        x, head = torch.randn(63, H), torch.nn.Linear(H, 3001, bias=False)
        y = torch.randint(100, (63,))
        with pytest.MonkeyPatch.context() as patches:
            of_error = int(y[seed]) if seed % 2 else 149 * seed + 107
            plant(patches, kind, of_error)
            check = CrossCheck(every=1, seed=seed)
            row = 0 if kind == "all NaN" else of_error
            with pytest.warns(CrossCheckWarning, match=f"worst is row {row}"), check.step():
                chunked_nll(x.requires_grad_(), head, y).loss.backward()
        assert not check.results[0].passed


class Copies(TorchDispatchMode):
    """Operators that copy to the host or wait for a device, and all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_other_steps_run_the_same_operators() -> None:
    def ran(check: CrossCheck | None) -> list[str]:
        x, w = torch.ones(4, H, requires_grad=True), torch.ones(V, H, requires_grad=True)
        with Copies() as copies, check.step(3) if check else contextlib.nullcontext():
            chunked_nll(x, w, torch.arange(4)).loss.backward()
        return copies.found

    check = CrossCheck(every=2)
    with check.step(0):
        chunked_nll(torch.ones(1, H), torch.ones(V, H), torch.zeros(1, dtype=torch.long))
    assert ran(check) == ran(None) != []
    assert len(check.results) == 1


def test_calls_that_cannot_be_held_are_loud() -> None:
    x, w, y = torch.ones(4, H), torch.ones(V, H), torch.arange(4)
    check = CrossCheck(every=2)
    forgotten = CrossCheck(1)
    forgotten.step()
    with pytest.raises(CrossCheckError, match="`step` must be entered"):
        forgotten.step()
    with pytest.raises(CrossCheckError, match="got none in step 0"), check.step():
        pass
    with check.step(4):
        chunked_nll(x, w, y)  # a loss without a backward
    assert {m.quantity for m in check.results[0].measurements} == {
        *("token count", "loss", "log-probability"),
        *("lse of all tokens", "log-probability of all tokens"),
    }
    with pytest.warns(CrossCheckWarning, match="inf or NaN"), check.step(6):
        chunked_nll(x * torch.inf, w, y)
    with pytest.raises(KeyError), check.step(8):
        raise KeyError("of the step itself")
    with warnings.catch_warnings(), check.step(9):
        pass  # not a checked one


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": 0}, "`every` must be a positive number"),
        ({"every": True}, "`every` must be a positive number"),
        ({"every": 1, "against": "torch"}, "`against` must be 'oracle' or 'other'"),
        ({"every": 1, "tokens": 0}, "`tokens` must be the number of tokens"),
        ({"every": 1, "tokens": 3, "against": "other"}, "`tokens` must be None with"),
        ({"every": 1, "rows": 3, "against": "other"}, "`rows` must be None with"),
        ({"every": 1, "rows": 0}, "`rows` must be the number of rows"),
        ({"every": 1, "exceeded": "stop"}, "`exceeded` must be 'warn' or 'raise'"),
        ({"every": 1, "seed": -1}, "`seed` must be an integer, 0 or more; got -1"),
        ({"every": 1, "seed": "a"}, "`seed` must be an integer, 0 or more; got 'a'"),
    ],
)
def test_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossCheck(**given)


def test_every_option_is_handed_over() -> None:
    """One that is not would be reported as an error of the step."""
    check = CrossCheck(every=1)

    def call(**given: Any) -> None:
        with check.step():
            chunked_nll(**given)

    assert options_missed(check, call, torch.from_numpy, "float64") == []
