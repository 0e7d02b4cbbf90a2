"""A router's loss in a window of ranks, one micro-batch of which has no label."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.cpu, pytest.mark.torch]

from xentlib.torch import TokenNormalizer, chunked_nll  # noqa: E402

V, H, N, WORLD, STEPS = 37, 7, 11, 2, 3


class Routed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate, self.head = torch.nn.Linear(H, 4), torch.nn.Linear(H, V, bias=False)

    def forward(self, x: Any) -> Any:
        return x, self.gate(x).softmax(-1).mean(0).square().sum()


def batches(rank: int) -> list[Any]:
    torch.manual_seed(rank)
    labels = [torch.randint(V, (N,)) for _ in range(STEPS)]
    for k, y in enumerate(labels):
        y[: 3 * k + rank] = -100
    if rank == 1:
        labels[1][:] = -100
    return [(torch.randn(N, H), y) for y in labels]


def step(rank: int, world: int) -> Any:
    model = torch.nn.parallel.DistributedDataParallel(Routed())
    head, mine = model.module.head.weight, batches(rank)
    norm = TokenNormalizer(model)
    with norm.window(labels=[y for _, y in mine]) as window:
        for x, y in window.micro_batches(mine):
            hidden, aux = model(x)
            out = chunked_nll(hidden, head, y, reduction="sum", denominator=window.denominator)
            window.backward(out.loss + 0.5 * aux / STEPS, out.num_tokens, normalized=True)
    return [p.grad.numpy() for p in model.parameters()]


def test_is_a_mean_over_micro_batches() -> None:
    """A12: of all ranks, also of one without labels. Catches: a refusal on its rank alone, while
    the others wait in DDP's reduction; a mean that labels weigh."""
    model = Routed()
    every = [pair for rank in range(WORLD) for pair in batches(rank)]
    sums = [chunked_nll(x, model.head.weight, y, reduction="sum") for x, y in every]
    loss = sum(out.loss for out in sums) / sum(out.num_tokens for out in sums)
    (loss + 0.5 * sum(model(x)[1] for x, _ in every) / len(every)).backward()
    want = [p.grad.numpy() for p in model.parameters()]
    for got in launch(WORLD, step):
        hold_in_norm(got, want)


def uncounted(rank: int, world: int) -> str:
    model = torch.nn.parallel.DistributedDataParallel(Routed())
    norm = TokenNormalizer(model, mode="postscale")

    def window_of_all() -> None:
        with norm.window() as window:
            for x, y in window.micro_batches(batches(rank)):
                hidden, aux = model(x)
                out = chunked_nll(hidden, model.module.head.weight, y, reduction="sum")
                window.backward(out.loss + aux, out.num_tokens)

    with pytest.raises(ValueError, match="got 0 and a loss of") as caught:
        window_of_all()
    return str(caught.value)


def test_a_loss_of_no_token_is_refused_on_every_rank() -> None:
    """A10: after DDP's reduction, which the other ranks are in."""
    first, second = launch(WORLD, uncounted)
    assert first == second
