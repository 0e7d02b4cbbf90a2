"""Multi-token prediction under FSDP2: one call for the hidden states of the main and of a further
head, each with a denominator of its own, against a call for each.

Shapes: K heads, B rows of a batch, L tokens of a row, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from xentlib.budgets import check_budget
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from torch import nn  # noqa: E402

from xentlib.torch import NLLHead, chunked_nll, count_collectives, next_token_labels  # noqa: E402

V, H, B, L, STEPS = 101, 15, 3, 11, 2
FACTORS = torch.tensor([1.0, 0.3])


class Model(nn.Module):
    """Hidden states [K, B, L, H] of two heads that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H)
        self.block = nn.Sequential(nn.Linear(H, H), nn.Tanh())
        self.ahead = nn.Sequential(nn.Linear(H, H), nn.Tanh())
        self.head = NLLHead(H, V, bias=False)

    def forward(self, tokens: Any) -> Any:
        hidden = self.block(self.embedding(tokens))
        return torch.stack([hidden, self.ahead(hidden)])


def together(model: Any, hidden: Any, labels: Any, factors: Any, module: bool) -> Any:
    weights = factors[:, None, None].expand(labels.shape)
    options = {"token_weights": weights, "reduction": "sum", "outputs": ("logprobs",)}
    head = model.head if module else model.head.weight
    if module:
        return head(hidden, labels, **options)
    return chunked_nll(hidden, head, labels, max_chunk_bytes=16 * V * 4, **options)


def stepped(how: str, rank: int, world: int) -> list[Any]:
    """Of each step: what the forward and the backward sent, the losses of both heads, gradients."""
    from torch.distributed.fsdp import fully_shard

    model, found = Model(), []
    for part in (model.block, model.ahead, model.head, model):
        fully_shard(part, reshard_after_forward=part is model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(V, (B, L), generator=generator)
        documents = torch.arange(L) // 4 + torch.zeros(B, 1, dtype=torch.int64)
        labels = torch.stack(
            [next_token_labels(tokens, segment_ids=documents, shift=k) for k in (1, 2)]
        )
        labels[:, rank:, rank:5] = -100  # other numbers on other ranks
        counts = (labels != -100).sum(dim=(1, 2))
        torch.distributed.all_reduce(counts)
        hidden = model(tokens)
        with count_collectives() as forward:
            if how == "apart":
                outs = [
                    chunked_nll(h, model.head.weight, y, denominator=n / world)
                    for h, y, n in zip(hidden, labels, counts, strict=True)
                ]
                loss = sum(f * out.loss for f, out in zip(FACTORS, outs, strict=True))
                losses = torch.stack([out.loss.detach() for out in outs]) / world
            else:
                shared = counts if how != "one denominator" else counts.sum()
                factors = FACTORS * world / shared
                out = together(model, hidden, labels, factors, how == "NLLHead")
                loss, losses = out.loss, -out.logprobs.detach().sum(dim=(1, 2)) / counts
        with count_collectives() as backward:
            loss.backward()
        torch.distributed.all_reduce(losses)
        named = model.named_parameters()
        grads = {name: p.grad.full_tensor().numpy().copy() for name, p in named}
        sent = forward.counts(), backward.counts()
        found.append((sent, losses.numpy(), grads))
        optimizer.step()
        optimizer.zero_grad()
    return found


WAYS = ("function", "NLLHead", "apart", "one denominator")


def on_rank(rank: int, world: int) -> dict[str, list[Any]]:
    return {how: stepped(how, rank, world) for how in WAYS}


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[Any]]]:
    return launch(2, on_rank)


def gradients_off(got: Any, want: Any) -> list[Any]:
    """Of a step; the row's bound in norm, as each way rounds sums of its own."""
    assert got.keys() == want.keys()
    return [
        one
        for name in want
        for one in failures(check("A9", got[name], want[name], metrics=("rho / u",), quantity=name))
    ]


@pytest.mark.parametrize("how", ["function", "NLLHead"])
def test_one_call_has_the_gradients_of_a_call_for_each(found: Any, how: str) -> None:
    """A9, A2: each head over its own number of tokens on all ranks; the losses of each from the
    log-probabilities. Catches: a denominator for both."""
    for rank in found:
        for (_, losses, got), (_, separate, want) in zip(rank[how], rank["apart"], strict=True):
            assert min(np.abs(x).max() for x in want.values()) > 0
            assert not gradients_off(got, want)
            assert not failures(check("A2", losses, separate))
        assert gradients_off(rank["one denominator"][0][2], rank["apart"][0][2])


@pytest.mark.parametrize("how", ["function", "NLLHead"])
def test_one_call_gathers_the_head_once(found: Any, how: str) -> None:
    """A15: and a call for each once for each; the gradient is reduced once either way."""
    trunk = 3  # parts that are kept whole for the backward, and reduced in it
    for step in range(STEPS):
        for way, off in ((how, False), ("apart", True)):
            sent = [rank[way][step][0] for rank in found]
            forward, backward = ([said[k] for said in sent] for k in (0, 1))
            own = [{**x, "reduce_scatter": x["reduce_scatter"] - trunk} for x in backward]
            assert bool(failures(check_budget("FSDP2", forward, own))) == off
        assert forward == [{"all_gather": 2}] * 2
