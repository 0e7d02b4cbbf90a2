"""Steps of PyTorch that have a backward of their own, a loop over chunks, or something random."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.planted import Table
from helpers.planted.torch_common import IGNORE, flat, mean_of

TABLE = Table()


# --- backwards of their own -----------------------------------------------------------------------


class NoneReduction(torch.autograd.Function):
    """One loss a token, whose backward multiplies by the first token's upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, y: Any) -> Any:
        logp = (x @ w.T).log_softmax(-1)
        dz = logp.exp()
        valid = y != IGNORE
        dz[valid, y[valid]] -= 1
        dz[~valid] = 0
        ctx.save_for_backward(dz @ w, dz.T @ x)
        return F.nll_loss(logp, y, reduction="none")

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        dx, dw = ctx.saved_tensors
        return upstream[0] * dx, upstream[0] * dw, None


@TABLE.wrong(
    "a fused loss with reduction='none' multiplies all gradients by the first token's",
    "micro-batch|weight|token|zero",
    source="linkedin/Liger-Kernel#1298",
)
def upstream_of_the_first_token(head: Any, micro_batches: Any) -> Any:
    count, total = sum(b["loss_mask"].sum() for b in micro_batches), 0.0
    for b in micro_batches:
        each = NoneReduction.apply(b["hidden"].flatten(0, 1), head.weight, b["targets"].flatten())
        loss = (each * b["loss_mask"].flatten()).sum() / count
        loss.backward()
        total += loss.item()
    return total


class Offloaded(torch.autograd.Function):
    """Computes its loss again in the backward, which fills .grad, and returns the gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, y: Any) -> Any:
        ctx.w, ctx.saved = w, (x.detach(), y)
        return F.cross_entropy(x @ w.T, y, reduction="sum")

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        x, y = ctx.saved
        x = x.requires_grad_()
        w = ctx.w
        with torch.enable_grad():
            before = None if w.grad is None else w.grad.clone()
            w.grad = None
            torch.autograd.backward(F.cross_entropy(x @ w.T, y, reduction="sum"), upstream)
        own = w.grad.clone()
        if before is not None:
            w.grad += before
        return x.grad, own, None


@TABLE.wrong(
    "a recomputing backward adds the head's gradient to .grad and returns it as well",
    "2|twice|doubl|factor",
    source="unslothai/unsloth-zoo#892",
)
def head_gradient_doubled(head: Any, micro_batches: Any) -> Any:
    return mean_of(head, micro_batches, lambda x, y, n: Offloaded.apply(x, head.weight, y) / n)


class BiasOfAll(torch.autograd.Function):
    """d bias is the sum over ignored tokens too."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, y: Any) -> Any:
        logp = F.linear(x, w, b).log_softmax(-1)
        valid = y != IGNORE
        dz = logp.exp()
        dz[valid, y[valid]] -= 1
        d_bias = dz.sum(0)
        dz[~valid] = 0
        ctx.save_for_backward(dz @ w, dz.T @ x, d_bias)
        return F.nll_loss(logp, y, reduction="sum")

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return (*(upstream * g for g in ctx.saved_tensors), None)


@TABLE.wrong("a fused loss whose d bias counts ignored tokens", "bias", bias=True)
def bias_of_ignored_tokens(head: Any, micro_batches: Any) -> Any:
    return mean_of(
        head, micro_batches, lambda x, y, n: BiasOfAll.apply(x, head.weight, head.bias, y) / n
    )


class Stored(torch.autograd.Function):
    """Gradients of the sum, made in the forward; what arrives in the backward is not looked at."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, y: Any) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
            loss = F.cross_entropy(leaves[0] @ leaves[1].T, y, reduction="sum")
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return (*ctx.saved_tensors, None)


@TABLE.wrong("a fused loss ignores what it is divided by afterwards", "sum|divi|tokens|upstream")
def upstream_ignored(head: Any, micro_batches: Any) -> Any:
    return mean_of(head, micro_batches, lambda x, y, n: Stored.apply(x, head.weight, y) / n)


# --- loops over chunks ----------------------------------------------------------------------------


def over_chunks(head: Any, micro_batches: Any, slices: Any) -> Any:
    x, y = flat(micro_batches)
    x, y = x[y != IGNORE], y[y != IGNORE]
    total = 0.0
    for s in slices(len(y)):
        loss = F.cross_entropy(head(x[s]), y[s], reduction="sum") / len(y)
        loss.backward(retain_graph=True)
        total += loss.item()
    return total


@TABLE.wrong(
    "the loop over chunks of 7 tokens leaves out the rest", "last|chunk|tokens|left out|drop"
)
def last_chunk_left_out(head: Any, micro_batches: Any) -> Any:
    return over_chunks(
        head, micro_batches, lambda n: [slice(7 * i, 7 * i + 7) for i in range(n // 7)]
    )


@TABLE.wrong(
    "the last chunk of 16 begins earlier, and counts some tokens twice",
    "twice|chunk|token|last|doubl",
)
def last_chunk_overlaps(head: Any, micro_batches: Any) -> Any:
    def slices(n: int) -> Any:
        return [slice(min(i, n - 16), min(i, n - 16) + 16) for i in range(0, n, 16)]

    return over_chunks(head, micro_batches, slices)


@TABLE.wrong("chunks of 9 tokens end one token early", "chunk|token|left out|drop|missing|last")
def fence_posts(head: Any, micro_batches: Any) -> Any:
    return over_chunks(
        head, micro_batches, lambda n: [slice(i, min(i + 9, n) - 1) for i in range(0, n, 9)]
    )


# --- randomness and other states ------------------------------------------------------------------


@TABLE.wrong("dropout before the head", "differ|dropout|second|random|two calls|again")
def dropout(head: Any, micro_batches: Any) -> Any:
    return mean_of(head, micro_batches, lambda x, y, n: F.cross_entropy(head(F.dropout(x, 0.1)), y))


@TABLE.wrong(
    "labels of a random tenth of the tokens are replaced", "differ|random|second|two calls|again"
)
def noisy_labels(head: Any, micro_batches: Any) -> Any:
    def loss(x: Any, y: Any, n: Any) -> Any:
        other = torch.randint_like(y, head.weight.shape[0])
        return F.cross_entropy(
            head(x), torch.where((torch.rand(len(y)) < 0.1) & (y >= 0), other, y)
        )

    return mean_of(head, micro_batches, loss)


@TABLE.wrong(
    "a fixed tenth of the hidden features is zeroed, of a dropout that is seeded",
    "hidden|wrong|feature|column",
)
def seeded_dropout(head: Any, micro_batches: Any) -> Any:
    mask = torch.rand(head.weight.shape[1], generator=torch.Generator().manual_seed(0)) > 0.1
    return mean_of(head, micro_batches, lambda x, y, n: F.cross_entropy(head(x * mask), y))
