"""`Evaluation` in PyTorch: the mean loss over batches of uneven counts, in one process and on
ranks.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import N, batch_of, changed, mean_of, net, normalizer, token_losses  # noqa: E402
from xentlib.torch import Evaluation, NLLHead  # noqa: E402


def test_an_evaluation_is_one_batch() -> None:
    """M26 (torchtitan#4167): batches of uneven counts, one without a token, under whatever keeps
    no graph; in float64, where a hundred million float32 tokens would lose the last batches."""
    model, _ = normalizer()
    head = NLLHead.from_linear(model[1], reduction="sum")
    batches = [batch_of(0), batch_of(1, 3), batch_of(2, 0)]
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    want = torch.nn.functional.cross_entropy(net().double()(x.double()), y).item()
    for around in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        evaluation = Evaluation()
        for k, (x, y) in enumerate(batches):
            with around() if k < 2 else torch.no_grad():
                evaluation = evaluation.add(head(model[0](x), y))
        loss = evaluation.mean_loss()
        assert not failures(check("A9", loss.numpy(), want, metrics=("rho / u",)))
        assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float64, (), False)
        assert float(evaluation.mean_loss()) == float(loss)
    many = Evaluation().add(3.0e9, 2**30)
    for _ in range(3):
        many.add(torch.tensor(1.0), torch.tensor(1))
    assert float(many.mean_loss()) == (3e9 + 3) / (2**30 + 3)
    assert torch.isnan(Evaluation().mean_loss())
    assert torch.isnan(Evaluation().add(head(model[0](x), y)).mean_loss())  # without a token
    assert torch.isinf(Evaluation().add(np.float32(np.inf), np.int32(3)).mean_loss())


def test_an_evaluation_takes_sums() -> None:
    """A mean that `chunked_nll` has taken is refused, and what else is seen to be no sum."""
    model, _ = normalizer()
    x, y = batch_of(0)
    out = mean_of(model, x, y)
    wrong: dict[str, tuple[Any, ...]] = {
        "must be a sum over tokens; got one that `chunked_nll` has divided. Pass reduction='sum'": (
            (out,),
            (changed(out),),
            (mean_of(model, x, y, denominator=7.0),),
            (out.loss, N),
        ),
        "`num_tokens` must be given with a loss that is no `NLLOutput`": ((out.loss.detach(),),),
        "must be the number of tokens that the loss is the sum of; got 0": ((2.0, 0),),
        "must be one number, the sum over this rank's valid": (
            (torch.ones(3), 3),
            ([2.0], 3),
            ({"loss": 2.0}, 3),
        ),
    }
    for said, calls in wrong.items():
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(said)):
                Evaluation().add(*call)


def evaluated(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist

    from xentlib.torch import Evaluation, count_collectives

    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mesh = dist.init_device_mesh("cpu", (world,))
    model, found = net(), {}
    for name, number in (("uneven", 3 * rank + 1), ("none", 2 * rank), ("nobody", 0)):
        evaluation = Evaluation()
        with torch.no_grad(), count_collectives() as count:
            for k in range(number):
                x, y = batch_of(10 * rank + k, 9 - k - rank)
                evaluation.add(token_losses(model(x), y).sum(), (y != -100).sum())
            found[name] = evaluation.mean_loss().item()
        assert count.counts() == {"all_reduce": 1}
    both = Evaluation().add(float(rank), rank + 1)
    found["group"] = both.mean_loss(pairs[rank // 2]).item()
    found["mesh"] = both.mean_loss(data_parallel=mesh).item()
    with pytest.raises(TypeError, match="`data_parallel` must be a ProcessGroup or a one-dim"):
        both.mean_loss(data_parallel="data")
    return found


def test_an_evaluation_over_ranks() -> None:
    """M26 (torchtitan#4167): uneven numbers of batches and tokens, and a rank that has none and
    takes part all the same; one collective, and one number on all."""
    model = net().double()

    def want(numbers: list[int]) -> float:
        batches = [batch_of(10 * r + k, 9 - k - r) for r, n in enumerate(numbers) for k in range(n)]
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        return torch.nn.functional.cross_entropy(model(x.double()), y).item()

    ranks = launch(3, evaluated)
    for name, oracle in (("uneven", want([1, 4, 7])), ("none", want([0, 2, 4]))):
        for rank in ranks:
            measured = check("A9", np.float64(rank[name]), oracle, metrics=("rho / u",))
            assert not failures(measured), name
        assert len({rank[name] for rank in ranks}) == 1
    assert all(np.isnan(rank["nobody"]) for rank in ranks)
    assert [rank["group"] for rank in ranks] == [1 / 3, 1 / 3, 2 / 3]
    assert [rank["mesh"] for rank in ranks] == [0.5] * 3
