"""Functions of hidden states, head and labels in PyTorch, and right steps that distil."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.planted import Table

TABLE = Table()
IGNORE = -100


class ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, labels: Any) -> Any:
        with torch.enable_grad():
            leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
            loss = F.cross_entropy(leaves[0] @ leaves[1].T, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return (*ctx.saved_tensors, None)


@TABLE.wrong("the upstream gradient is ignored", "upstream", kind="loss")
def fused_that_ignores_upstream(hidden: Any, weight: Any, labels: Any) -> Any:
    return ForwardOnly.apply(hidden, weight, labels)


@TABLE.wrong("a mean over all rows, ignored ones too", "mask|ignored|position|padd", kind="loss")
def mean_over_all_rows(hidden: Any, weight: Any, labels: Any) -> Any:
    return F.cross_entropy(hidden @ weight.T, labels, reduction="none").mean()


@TABLE.wrong("labels are shifted within the function", "shift", kind="loss")
def shifts_by_itself(hidden: Any, weight: Any, labels: Any) -> Any:
    return F.cross_entropy((hidden @ weight.T)[:-1], labels[1:])


@TABLE.wrong("the mean of chunks of 4 rows' means", "chunk|mean", kind="loss")
def chunk_means(hidden: Any, weight: Any, labels: Any) -> Any:
    parts = [
        F.cross_entropy(x @ weight.T, y)
        for x, y in zip(hidden.split(4), labels.split(4))
        if (y != IGNORE).any()
    ]
    return torch.stack(parts).mean()


@TABLE.wrong("log-probabilities rounded to bf16", "16|bf16|round", kind="logprobs")
def bf16_logprobs(hidden: Any, weight: Any, labels: Any) -> Any:
    logits = (hidden @ weight.T).bfloat16()
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0].float()


@TABLE.wrong(
    "entropy of the logits before the temperature",
    "entropy",
    source="OpenRLHF/OpenRLHF#1319",
    kind="logprobs",
    temperature=0.7,
)
def entropy_before_the_temperature(hidden: Any, weight: Any, labels: Any) -> Any:
    logits = hidden @ weight.T
    plain = logits.log_softmax(-1)
    entropy = -(plain.exp() * plain).sum(-1)
    logp = (logits / 0.7).log_softmax(-1)
    return logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0], entropy


@TABLE.wrong(
    "one factor for all tokens' upstream gradients: their mean",
    "upstream|gradient|wrong",
    kind="logprobs",
)
def mean_of_upstream(hidden: Any, weight: Any, labels: Any) -> Any:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mean().expand_as(grad)

    logp = (hidden @ weight.T).log_softmax(-1)
    return Same.apply(logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0])


@TABLE.right("the mean as a sum over a count", kind="loss", bias=True)
def sum_over_count(hidden: Any, weight: Any, labels: Any, bias: Any) -> Any:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != IGNORE).sum()


@TABLE.right("label's logit minus log-sum-exp", kind="logprobs", temperature=0.6)
def selective(hidden: Any, weight: Any, labels: Any) -> Any:
    logits = hidden @ weight.T / 0.6
    return logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)


@TABLE.right("entropy from p and logits", kind="logprobs")
def entropy_from_logits(hidden: Any, weight: Any, labels: Any) -> Any:
    logits = hidden @ weight.T
    lse, p = logits.logsumexp(-1), logits.softmax(-1)
    z_y = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return z_y - lse, lse - (p * logits).sum(-1)


@TABLE.right(
    "a reverse divergence by kl_div, masked by where", divergence="reverse_kl", temperature=1.5
)
def reverse_by_kl_div(head: Any, micro_batches: Any) -> Any:
    count = sum(b["loss_mask"].sum() for b in micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        student = (head(b["hidden"]) / 1.5).log_softmax(-1)
        teacher = (b["teacher_logits"] / 1.5).log_softmax(-1)
        each = F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
        loss = loss + torch.where(b["loss_mask"], each, 0.0).sum() / count
    loss.backward()
    return loss


@TABLE.right(
    "cross-entropy of the teacher less its entropy, times T^2",
    divergence="forward_kl",
    temperature=2.0,
    temperature_squared=True,
)
def soft_cross_entropy(head: Any, micro_batches: Any) -> Any:
    mask = torch.cat([b["loss_mask"].flatten() for b in micro_batches])
    x = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])[mask]
    t = torch.cat([b["teacher_logits"].flatten(0, 1) for b in micro_batches])[mask] / 2
    p = t.softmax(-1)
    loss = F.cross_entropy(head(x) / 2, p) + (p * t.log_softmax(-1)).sum(-1).mean()
    loss = 4 * loss
    loss.backward()
    return loss
