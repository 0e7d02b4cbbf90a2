"""`Evaluation` in PyTorch: the mean loss over batches of uneven counts, in one process and on
ranks.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from helpers.windows import H, N, batch_of, changed, mean_of, net, normalizer, token_losses  # noqa: E402
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
    many = Evaluation().add(loss_sum=3.0e9, num_tokens=2**30)
    for _ in range(3):
        many.add(loss_sum=torch.tensor(1.0), num_tokens=torch.tensor(1))
    assert float(many.mean_loss()) == (3e9 + 3) / (2**30 + 3)
    assert torch.isnan(Evaluation().mean_loss())
    assert torch.isnan(Evaluation().add(head(model[0](x), y)).mean_loss())  # without a token
    given = {"loss_sum": np.float32(np.inf), "num_tokens": np.int32(3)}
    assert torch.isinf(Evaluation().add(**given).mean_loss())


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


DIVIDED = "must be a sum over tokens; got one that `chunked_nll` has divided"
SINCE = "got one that was divided by its number of tokens since"
NOT_MEAN = "`loss_mean` must be a mean over its tokens; got a loss that `chunked_nll` has not"
COUNTED = (
    "`num_tokens` must be the number of tokens that `chunked_nll` has counted for this loss, 7;"
)
NAMELESS = "`loss` must be an `NLLOutput`, which says whether it is a sum; got one number"


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_output_knows_its_own_sum(around: Any) -> None:
    """A mean that is put in its place, without a graph too, was 0.31 for 6.56. What is added to
    the sum is not refused."""
    model, _ = normalizer()
    x, y = batch_of(0, 7)
    with around():
        out = mean_of(model, x, y, reduction="sum")
        for n in (out.num_tokens, 7):
            with pytest.raises(ValueError, match=SINCE):
                Evaluation().add(out._replace(loss=out.loss / n))
        more = Evaluation().add(out._replace(loss=out.loss + 0.7)).mean_loss()
    want = (out.loss.item() + 0.7) / 7
    assert not failures(check("A9", more.item(), want, magnitude=want, metrics=("rho / u",)))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_mean_is_known_without_a_graph(around: Any) -> None:
    """`add(out.loss, out.num_tokens)` where nothing has a `grad_fn`: a mean gave 0.352 for 6.987.
    What is right by itself, or by its name, is the sum; what is known to be something else is
    refused, and one number of which nothing is known."""
    model, _ = normalizer()
    x, y = batch_of(0, 7)
    weights = torch.rand(N)
    with around():
        out, mean = (mean_of(model, x, y, reduction=how) for how in ("sum", "mean"))
        n, want = out.num_tokens, out.loss.item()
        weighed = mean_of(model, x, y, token_weights=weights)
        total = weighed.weight_sum
        by_five = mean_of(model, x, y, denominator=5.0).loss
        times, more = mean_of(model, x, y).loss, mean_of(model, x, y, reduction="sum").loss
        times *= n
        more += mean_of(model, x, y, reduction="sum").loss
        right: list[dict[str, Any]] = [
            {"loss": out},
            {"loss": out, "num_tokens": 7},
            {"loss": out.loss, "num_tokens": n},
            {"loss_sum": out.loss, "num_tokens": n},
            {"loss_sum": want, "num_tokens": 7},
            {"loss_mean": mean},
            {"loss_mean": mean.loss, "num_tokens": n},
            {"loss_mean": mean.loss.item(), "num_tokens": 7},
            {"loss_sum": times, "num_tokens": n},  # written to: what it was says nothing
            {"loss_sum": more, "num_tokens": 2 * n},  # of another count than its first part
        ]
        for given in right:
            loss = Evaluation().add(**given).mean_loss().detach().numpy()
            assert not failures(check("A9", loss, np.float64(want / 7), metrics=("rho / u",)))
        for given in ({"loss_mean": weighed}, {"loss_mean": weighed.loss, "num_tokens": total}):
            loss = Evaluation().add(**given).mean_loss().detach().numpy()
            alike = weighed.loss.detach().double().numpy()
            assert not failures(check("A9", loss, alike, metrics=("rho / u",)))
        wrong: dict[str, list[dict[str, Any]]] = {
            DIVIDED: [
                {"loss": mean.loss, "num_tokens": n},
                {"loss": mean.loss},
                {"loss_sum": mean.loss, "num_tokens": n},
                {"loss_sum": mean},
                {"loss": by_five, "num_tokens": n},
                {"loss": mean._replace(denominator=None)},
            ],
            NOT_MEAN: [
                {"loss_mean": out},
                {"loss_mean": out.loss, "num_tokens": n},
                {"loss_mean": by_five, "num_tokens": n},
            ],
            COUNTED: [
                {"loss": out, "num_tokens": y.numel()},
                {"loss": out.loss, "num_tokens": y.numel()},
                {"loss_sum": out.loss, "num_tokens": n + 1},
                {"loss_mean": mean.loss, "num_tokens": y.numel()},
            ],
            NAMELESS: [
                {"loss": out.loss.detach(), "num_tokens": n},
                {"loss": out.loss * 1, "num_tokens": n},
                {"loss": want, "num_tokens": 7},
            ],
        }
        for said, calls in wrong.items():
            for call in calls:
                with pytest.raises(ValueError, match=re.escape(said)):
                    Evaluation().add(**call)
        none = Evaluation().add(loss_mean=torch.nan, num_tokens=0).add(out)
        assert float(none.mean_loss()) == float(Evaluation().add(out).mean_loss())
    for names in ({}, {"loss_sum": 1.0, "loss_mean": 1.0}):
        with pytest.raises(TypeError, match="must have one of `loss`, `loss_sum` and `loss_mean`"):
            Evaluation().add(**names, num_tokens=3)


def test_what_is_made_of_a_mean_is_known_by_its_graph() -> None:
    """As far as nothing was multiplied; a sum that is divided by its count is a mean."""
    model, _ = normalizer()
    x, y = batch_of(0, 7)
    out, mean = (mean_of(model, x, y, reduction=how) for how in ("sum", "mean"))
    n, counted = out.num_tokens, (y != -100).sum()
    made = (mean.loss + 0.0, mean.loss.clone(), mean.loss.double(), mean.loss[None].sum())
    for loss in (*made, mean.loss / 2):
        with pytest.raises(ValueError, match=re.escape(DIVIDED)):
            Evaluation().add(loss_sum=loss, num_tokens=n)
    for divisor in (n, counted, 7, 7.0, counted.double(), out.weight_sum):
        loss = out.loss / divisor
        with pytest.raises(ValueError, match=re.escape(SINCE)):
            Evaluation().add(loss_sum=loss, num_tokens=n)
        Evaluation().add(loss_mean=loss, num_tokens=n)
    two = out.loss + mean_of(model, x, y, reduction="sum").loss
    for loss in (mean.loss * n, out.loss / 2, 0.5 * out.loss, out.loss + 1.0):
        Evaluation().add(loss_sum=loss, num_tokens=n)
    Evaluation().add(loss_sum=two, num_tokens=14)
    loss = out.loss / n
    loss.backward()  # after it the divisor is gone
    Evaluation().add(loss_sum=loss, num_tokens=n)


def test_a_loss_that_knows_its_divisor_is_a_tensor_like_any_other() -> None:
    """It is copied, saved, and loaded by what loads tensors alone; under a compiler, without a
    graph break, fake tensors and `vmap` it knows nothing, or is refused all the same."""
    model, _ = normalizer()
    x, y = batch_of(0, 7)
    with torch.no_grad():
        loss = mean_of(model, x, y).loss
        file = io.BytesIO()
        torch.save({"loss": loss}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["loss"]
        for same in (loaded, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            assert torch.equal(same, loss)
            with pytest.raises(ValueError, match="got one"):
                Evaluation().add(same, 7)

        def whole(x: Any) -> Any:
            return mean_of(model, x, y)

        out = torch.compile(whole, fullgraph=True, backend="eager")(x)
        with pytest.raises(ValueError, match=re.escape(DIVIDED)):
            Evaluation().add(out)
        with pytest.raises(ValueError, match="got one"):
            Evaluation().add(out.loss, 7)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert whole(torch.empty(N, H)).loss.shape == ()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_loss_that_was_written_to_is_not_that_of_its_tokens(around: Any) -> None:
    """As `dist.all_reduce(out.loss)` for the log does, in place and outside of the graph."""
    model, _ = normalizer()
    x, y = batch_of(0, 7)
    with around():
        out = mean_of(model, x, y, reduction="sum")
        logged = out.loss.detach().clone().mul_(2.0)
        Evaluation().add(out)
        with torch.no_grad():
            out.loss.data.copy_(logged)  # which counts no version, as a collective
        with pytest.raises(ValueError, match="got one whose loss was written to since"):
            Evaluation().add(out)


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
                losses = token_losses(model(x), y)
                evaluation.add(loss_sum=losses.sum(), num_tokens=(y != -100).sum())
            found[name] = evaluation.mean_loss().item()
        assert count.counts() == {"all_reduce": 1}
    both = Evaluation().add(loss_sum=float(rank), num_tokens=rank + 1)
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
