"""Steps of PyTorch that lose bits, overflow, or make a NaN of padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.planted import Table
from helpers.planted.torch_common import IGNORE, flat, mean_of

TABLE = Table()


# --- bits -----------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """To 10 bits of mantissa, the operands of TF32, in the forward and the backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return to_tf32(x) @ to_tf32(w).T

    @staticmethod
    def backward(ctx: Any, dz: Any) -> Any:
        x, w = ctx.saved_tensors
        return to_tf32(dz) @ to_tf32(w), to_tf32(dz).T @ to_tf32(x)


def to_tf32(x: Any) -> Any:
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@TABLE.wrong(
    "products with TF32's operands",
    "tf32|10 bits|round|precision|16 bits",
    source="pytorch/pytorch#47844",
)
def tf32(head: Any, micro_batches: Any) -> Any:
    return mean_of(
        head, micro_batches, lambda x, y, n: F.cross_entropy(Rounded.apply(x, head.weight), y)
    )


@TABLE.wrong("logits in bf16, upcast afterwards", "16|bf16|round")
def bf16_logits(head: Any, micro_batches: Any) -> Any:
    return mean_of(
        head, micro_batches, lambda x, y, n: F.cross_entropy(head(x).bfloat16().float(), y)
    )


@TABLE.wrong("the head in bf16 under autocast, the loss in float32", "16|bf16|round")
def autocast_head(head: Any, micro_batches: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        x, y = flat(micro_batches)
        loss = F.cross_entropy(head(x).float(), y)
    loss.backward()
    return loss


@TABLE.wrong("the head in fp16, with its log-softmax", "16|round")
def fp16_head(head: Any, micro_batches: Any) -> Any:
    def loss(x: Any, y: Any, n: Any) -> Any:
        logits = (x.half() @ head.weight.half().T).log_softmax(-1)
        return F.nll_loss(logits.float(), y)

    return mean_of(head, micro_batches, loss)


class InItsBuffer(torch.autograd.Function):
    """Exact logits whose gradient is kept in 16 bits."""

    @staticmethod
    def forward(ctx: Any, z: Any) -> Any:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, dz: Any) -> Any:
        return dz.bfloat16().float()


@TABLE.wrong(
    "the gradient of the logits is kept in a bf16 buffer",
    "16|bf16|round",
    source="NVIDIA/TransformerEngine#3193",
)
def bf16_gradient_of_logits(head: Any, micro_batches: Any) -> Any:
    return mean_of(
        head, micro_batches, lambda x, y, n: F.cross_entropy(InItsBuffer.apply(head(x)), y)
    )


@TABLE.wrong(
    "the weight's gradient is added up in bf16, chunk by chunk",
    "16|bf16|round|accumul",
    source="linkedin/Liger-Kernel#830",
)
def bf16_accumulator(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    count, total = (y != IGNORE).sum(), 0.0
    added = torch.zeros_like(head.weight, dtype=torch.bfloat16)
    for part, label in zip(x.split(8), y.split(8)):
        loss = F.cross_entropy(head(part), label, reduction="sum") / count
        (d_weight,) = torch.autograd.grad(loss, [head.weight])
        added += d_weight.bfloat16()
        total += loss.item()
    return total, added.float()


@TABLE.wrong(
    "gradients of micro-batches are added in bf16",
    "16|bf16|round|accumul",
    source="deepspeedai/DeepSpeed#1800",
)
def bf16_micro_batches(head: Any, micro_batches: Any) -> Any:
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)
    added, total = torch.zeros_like(head.weight, dtype=torch.bfloat16), 0.0
    for b in micro_batches:
        head.zero_grad()
        logits = head(b["hidden"]).flatten(0, 1)
        loss = F.cross_entropy(logits, b["targets"].flatten(), reduction="sum") / count
        loss.backward()
        added += head.weight.grad.bfloat16()
        total += loss.item()
    head.weight.grad = added.float()
    return total


@TABLE.wrong(
    "gradients are returned in bf16, as the parameters' dtype would have it", "16|bf16|round"
)
def bf16_gradients(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = F.cross_entropy(head(x), y)
    (d_weight,) = torch.autograd.grad(loss, [head.weight])
    return loss, d_weight.bfloat16()


class HeadInLowPrecision(torch.autograd.Function):
    """Right, but d hidden comes from a copy of the weight in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w.bfloat16())
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, dz: Any) -> Any:
        x, w = ctx.saved_tensors
        return dz @ w.float(), dz.T @ x


@TABLE.wrong("hidden states' gradient from a bf16 copy of the weight", "hidden")
def bf16_copy_in_the_backward(head: Any, micro_batches: Any) -> Any:
    return mean_of(
        head,
        micro_batches,
        lambda x, y, n: F.cross_entropy(HeadInLowPrecision.apply(x, head.weight), y),
    )


# --- inf and NaN ----------------------------------------------------------------------------------


@TABLE.wrong("softmax without its maximum: exp overflows", "inf|nan", logit_scale=20.0)
def no_maximum(head: Any, micro_batches: Any) -> Any:
    def loss(x: Any, y: Any, n: Any) -> Any:
        z = 20.0 * head(x[y != IGNORE])
        lse = torch.log(torch.exp(z).sum(-1))
        return (lse - z.gather(-1, y[y != IGNORE][:, None])[:, 0]).mean()

    return mean_of(head, micro_batches, loss)


@TABLE.wrong("log(softmax), where p underflows", "inf|nan", logit_scale=25.0)
def log_of_softmax(head: Any, micro_batches: Any) -> Any:
    def loss(x: Any, y: Any, n: Any) -> Any:
        p = (25.0 * head(x[y != IGNORE])).softmax(-1)
        return -torch.log(p.gather(-1, y[y != IGNORE][:, None])).mean()

    return mean_of(head, micro_batches, loss)


@TABLE.wrong(
    "a NaN at padded positions, of attention over nothing, is multiplied by a mask of 0",
    "nan",
    source="NovaSky-AI/SkyRL#1635",
)
def nan_times_zero(head: Any, micro_batches: Any) -> Any:
    count, total = sum(b["loss_mask"].sum() for b in micro_batches), 0.0
    for b in micro_batches:
        attended = b["attention_mask"].float()[..., None]
        logits = head(b["hidden"] * attended / attended)
        y = b["targets"].clamp(min=0)
        logp = logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
        loss = -(logp * b["loss_mask"]).sum() / count
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong("the loss takes padding out by where, and its gradient is NaN all the same", "nan")
def nan_behind_where(head: Any, micro_batches: Any) -> Any:
    count, total = sum(b["loss_mask"].sum() for b in micro_batches), 0.0
    for b in micro_batches:
        onehot = F.one_hot(b["targets"].clamp(min=0), head.weight.shape[0])
        onehot = onehot * b["loss_mask"][..., None]
        p = (head(b["hidden"]).softmax(-1) * onehot).sum(-1)
        loss = torch.where(b["loss_mask"], -torch.log(p), 0.0).sum() / count
        loss.backward()
        total += loss.item()
    return total
