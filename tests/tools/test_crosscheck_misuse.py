"""`CrossCheck` of PyTorch where its block is in another place, or there are several."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from xentlib.tools.crosscheck import CrossCheckError, CrossCheckWarning  # noqa: E402
from xentlib.torch import CrossCheck, chunked_nll  # noqa: E402
from xentlib.torch.hooks import LOSS_HOOKS  # noqa: E402

H, V, N = 24, 157, 21


def loss_of(head: Any, seed: int = 0, scale: float = 1.0) -> Any:
    given = torch.Generator().manual_seed(seed)
    x = torch.randn(N, H, generator=given).requires_grad_()
    return chunked_nll(scale * x, head, torch.randint(V, (N,), generator=given)).loss


@pytest.fixture
def head() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(H, V)


def test_a_backward_after_the_block_is_refused(head: Any) -> None:
    check = CrossCheck(every=3)
    refused = r"no backward of any of 2 calls of .* in step 0"
    with pytest.raises(CrossCheckError, match=refused), check.step():
        loss = loss_of(head) + loss_of(head, 1)
    loss.backward()
    assert check.results == []
    with check.step(1):  # not a checked one
        loss = loss_of(head)
    loss.backward()


def test_a_call_beside_that_has_no_backward_is_not(head: Any) -> None:
    """A loss that is logged, and one that a checkpoint computes twice."""
    check = CrossCheck(every=1, exceeded="raise")
    with check.step():
        loss_of(head)
        (2 * loss_of(head, 1)).backward()
    with check.step(), torch.no_grad():
        loss_of(head)
    with check.step():
        again = torch.utils.checkpoint.checkpoint
        again(lambda: loss_of(head).exp(), use_reentrant=False).backward()
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    with check.step():
        loss_of(head).backward()
    assert [x.passed for x in check.results] == [True] * 4
    frozen = {m.quantity for m in check.results[-1].measurements}
    assert "d hidden" in frozen
    assert "d weight" not in frozen


def test_two_checks_see_the_same_step(head: Any) -> None:
    checks = CrossCheck(every=1, exceeded="raise"), CrossCheck(every=2, tokens=5)
    for _ in range(3):
        with checks[0].step(), checks[1].step():
            loss_of(head).backward()
    assert [[x.step for x in check.results] for check in checks] == [[0, 1, 2], [0, 2]]
    assert all({"d hidden"} < {m.quantity for m in x.results[0].measurements} for x in checks)
    assert LOSS_HOOKS == []


def test_a_block_inside_of_a_block_is_refused(head: Any) -> None:
    check = CrossCheck(every=1)
    refused = "`step` must be left before it is entered again"
    with pytest.raises(CrossCheckError, match=refused), check.step(), check.step():
        loss_of(head).backward()
    assert LOSS_HOOKS == []
    with check.step():
        loss_of(head).backward()
    assert len(check.results) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_by_itself(head: Any, copied: Any) -> None:
    check = CrossCheck(every=2)
    with check.step():
        loss_of(head).backward()
    other = copied(check)
    for _ in range(2):
        with other.step():
            loss_of(head).backward()
    assert ([x.step for x in check.results], [x.step for x in other.results]) == ([0], [0, 2])


@pytest.mark.parametrize("number", ["0", 1.0, None.__class__])
def test_a_number_that_is_none(number: Any) -> None:
    with pytest.raises(TypeError, match="`number` must be an integer"), CrossCheck(2).step(number):
        pass
    assert LOSS_HOOKS == []


def test_a_head_that_is_written_to_past_its_version(head: Any) -> None:
    """As optimizers do that write to `p.data`: the next call of the step has another head."""
    check = CrossCheck(every=1, exceeded="raise")
    with check.step():
        for seed in range(2):
            loss_of(head, seed).backward()
            head.weight.data.mul_(0.5)
    assert [x.calls for x in check.results] == [2]


def test_one_copy_of_a_head_serves_all_calls(head: Any) -> None:
    pytest.importorskip("jax")
    check = CrossCheck(every=1, against="other")
    with check.step():
        for seed in range(3):
            loss_of(head, seed).backward()
        first, *others = (taken.problem.weight for taken in check.taken)
        assert all(x is first for x in others)


def test_of_several_calls_the_one_with_inf_is_named(head: Any) -> None:
    check = CrossCheck(every=1)
    left_out = "oracle: call 2 of 3 could not be compared"
    scales = enumerate((1.0, float("inf"), 1.0))
    with pytest.warns(CrossCheckWarning, match=left_out), check.step():
        [loss_of(head, seed, scale).backward() for seed, scale in scales]
    (result,) = check.results
    assert not result.passed
    assert "loss ULP" in str(result)
    assert "call 2 of 3" in str(result)


def test_a_decorated_step(head: Any) -> None:
    check = CrossCheck(every=2)

    @check.step()
    def step() -> None:
        loss_of(head).backward()

    for _ in range(3):
        step()
    assert [x.step for x in check.results] == [0, 2]
