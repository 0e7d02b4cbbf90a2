"""Right steps of PyTorch that are written in unusual ways."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from helpers.planted import Table

TABLE = Table()
IGNORE = -100


def tokens(micro_batches: Any) -> Any:
    return sum((b["targets"] != IGNORE).sum() for b in micro_batches)


def sums(head: Any, b: Any, **how: Any) -> Any:
    logits = head(b["hidden"]).flatten(0, 1)
    return F.cross_entropy(logits, b["targets"].flatten(), reduction="sum", **how)


def flat(micro_batches: Any) -> Any:
    x = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])
    return x, torch.cat([b["targets"].flatten() for b in micro_batches])


@TABLE.right("token sums, and the gradient divided at the end", bias=True)
def divided_at_the_end(head: Any, micro_batches: Any) -> Any:
    total = 0.0
    for b in micro_batches:
        loss = sums(head, b)
        loss.backward()
        total += loss.item()
    count = tokens(micro_batches)
    for p in head.parameters():
        p.grad /= count
    return total / count


@TABLE.right("a running mean of the gradient, weighted by tokens", source="ml-explore/mlx-lm#1413")
def running_mean(head: Any, micro_batches: Any) -> Any:
    seen, mean, value = 0, torch.zeros_like(head.weight), 0.0
    for b in micro_batches:
        new = int((b["targets"] != IGNORE).sum())
        if not new:
            continue
        logits = head(b["hidden"]).flatten(0, 1)
        loss = F.cross_entropy(logits, b["targets"].flatten())
        (grad,) = torch.autograd.grad(loss, [head.weight])
        seen += new
        mean += (grad - mean) * (new / seen)
        value += (loss.item() - value) * (new / seen)
    return value, mean


@TABLE.right("means of micro-batches, each times its share of the tokens")
def means_by_share(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        own = (b["targets"] != IGNORE).sum()
        loss = sums(head, b) / own.clamp(min=1) * (own / count)
        loss.backward()
        total += loss.item()
    return {"loss": total, "tokens": count}


@TABLE.right("masked by where, with labels that are all classes")
def masked_by_where(head: Any, micro_batches: Any) -> Any:
    count, loss = tokens(micro_batches), torch.zeros(())
    for b in micro_batches:
        y = torch.roll(b["input_ids"], -1, 1)
        nll = F.cross_entropy(head(b["hidden"]).transpose(1, 2), y, reduction="none")
        loss = loss + torch.where(b["loss_mask"], nll, 0.0).sum() / count
    loss.backward()
    return loss


@TABLE.right("masked by a product with a float mask")
def masked_by_a_product(head: Any, micro_batches: Any) -> Any:
    mask = torch.stack([b["loss_mask"] for b in micro_batches]).float()
    y = torch.stack([b["targets"].clamp(min=0) for b in micro_batches])
    logits = head(torch.stack([b["hidden"] for b in micro_batches]))
    logp = torch.gather(logits.log_softmax(-1), -1, y[..., None]).squeeze(-1)
    loss = -torch.einsum("mbl,mbl->", logp, mask) / mask.sum()
    loss.backward()
    return loss


@TABLE.right("the loss in float64, the head in float32")
def loss_in_float64(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = F.cross_entropy(head(x).double(), y)
    loss.backward()
    return loss


@TABLE.right("all in float64", bias=True)
def all_in_float64(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = F.cross_entropy(F.linear(x.double(), head.weight.double(), head.bias.double()), y)
    loss.backward()
    return loss


@TABLE.right(
    "the collator masks the first token of each document, the model shifts",
    source="NVIDIA-BioNeMo/bionemo-recipes#1449",
)
def masked_in_the_collator(head: Any, micro_batches: Any) -> Any:
    labels = [b["labels"].masked_fill(b["position_ids"] == 0, IGNORE) for b in micro_batches]
    count = sum((y[:, 1:] != IGNORE).sum() for y in labels)
    total = 0.0
    for b, y in zip(micro_batches, labels):
        logits = head(b["hidden"])[:, :-1].reshape(-1, head.weight.shape[0])
        loss = F.cross_entropy(logits, y[:, 1:].reshape(-1), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


@TABLE.right("labels shifted once in the collator, padded by one and shifted back in the loss")
def shifted_there_and_back(head: Any, micro_batches: Any) -> Any:
    count, loss = tokens(micro_batches), torch.zeros(())
    for b in micro_batches:
        aligned = F.pad(b["targets"], (1, 0), value=IGNORE)[:, :-1]
        logits = head(b["hidden"])
        y = F.pad(aligned, (0, 1), value=IGNORE)[:, 1:].clone()
        y[:, -1] = b["targets"][:, -1]
        loss = loss + F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
    loss.backward()
    return loss


@TABLE.right("one document at a time, without padding")
def document_by_document(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        parts = []
        for x, y, number in zip(b["hidden"], b["labels"], b["segment_ids"]):
            for k in number.unique():
                inside = (number == k).nonzero()[:, 0]
                logits, labels = head(x[inside])[:-1], y[inside][1:]
                parts.append(F.cross_entropy(logits, labels, reduction="sum"))
        loss = torch.stack(parts).sum() / count
        loss.backward()
        total += loss.item()
    return total


@TABLE.right("rows dealt out anew, in other micro-batches and another order")
def dealt_out_anew(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    order = torch.argsort(y, descending=True)
    count, total = tokens(micro_batches), 0.0
    for part in order.tensor_split(5):
        loss = F.cross_entropy(head(x[part]), y[part], reduction="sum") / count
        loss.backward(retain_graph=True)
        total += loss.item()
    return total


@TABLE.right("chunks whose backward runs at once, on detached hidden states", bias=True)
def chunk_by_chunk(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    leaf, count, total = x.detach().requires_grad_(), tokens(micro_batches), 0.0
    for i in range(0, len(y), 11):
        logits = head(leaf[i : i + 11])
        loss = F.cross_entropy(logits, y[i : i + 11], reduction="sum") / count
        loss.backward()
        total += loss.item()
    x.backward(leaf.grad)
    return total


@TABLE.right("checkpointed, reentrant")
def checkpointed(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        part = checkpoint(
            lambda x, b=b: sums(head, {**b, "hidden": x}), b["hidden"], use_reentrant=True
        )
        (part / count).backward()
        total += part.item() / count
    return total


@TABLE.right("a compiled loss")
def compiled(head: Any, micro_batches: Any) -> Any:
    @torch.compile(backend="aot_eager")
    def loss_of(x: Any, w: Any, y: Any, count: Any) -> Any:
        return F.cross_entropy((x @ w.T).flatten(0, 1), y.flatten(), reduction="sum") / count

    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        loss = loss_of(b["hidden"], head.weight, b["targets"], count)
        loss.backward()
        total += loss.item()
    return total


class FusedLinear(torch.autograd.Function):
    """Gradients in the forward, chunk by chunk; the upstream gradient multiplies them."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, y: Any) -> Any:
        dx, dw, loss = torch.zeros_like(x), torch.zeros_like(w), x.new_zeros(())
        for i in range(0, len(y), 10):
            part, labels = x[i : i + 10], y[i : i + 10]
            logp = (part @ w.T).log_softmax(-1)
            loss += F.nll_loss(logp, labels, reduction="sum")
            dz, valid = logp.exp(), labels != IGNORE
            dz[valid, labels[valid]] -= 1
            dz[~valid] = 0
            dx[i : i + 10] = dz @ w
            dw += dz.T @ part
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return (*(upstream * g for g in ctx.saved_tensors), None)


@TABLE.right("a fused linear cross-entropy of one's own")
def fused(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = FusedLinear.apply(x, head.weight, y) / tokens(micro_batches)
    loss.backward()
    return loss


@TABLE.right(
    "weights of tokens that are 1 / count, and 0 in prompts", source="GMISWE/tinker-cloud#65"
)
def weights_of_tokens(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        weights = b["loss_mask"] / count
        y = b["targets"].masked_fill(~b["loss_mask"], 0)
        logp = torch.distributions.Categorical(logits=head(b["hidden"])).log_prob(y)
        loss = -(weights * logp).sum()
        loss.backward()
        total += loss.item()
    return total


@TABLE.right("gradients returned by name, nothing in .grad", bias=True)
def returned_by_name(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = F.cross_entropy(head(x), y)
    weight, bias = torch.autograd.grad(loss, [head.weight, head.bias])
    return loss, {"weight": weight, "bias": bias}


@TABLE.right("no loss is returned")
def no_loss(head: Any, micro_batches: Any) -> None:
    count = tokens(micro_batches)
    for b in micro_batches:
        (sums(head, b) / count).backward()


@TABLE.right("a loss scale that is taken out again", bias=True)
def scaled_and_unscaled(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        loss = sums(head, b) / count
        (loss * 1024).backward()
        total += loss.item()
    for p in head.parameters():
        p.grad /= 1024
    return total


@TABLE.right("clipped to a norm that is never reached")
def clipped_at_a_large_norm(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        loss = sums(head, b) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 100.0)
        total += loss.item()
    return total


@TABLE.right("hooks on the parameters divide")
def divided_by_hooks(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    handles = [p.register_hook(lambda g: g / count) for p in head.parameters()]
    loss = sum(sums(head, b) for b in micro_batches)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss / count


@TABLE.right("gradients of single tokens by vmap, added up")
def per_token_gradients(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    x, y = x[y != IGNORE].detach(), y[y != IGNORE]

    def nll(w: Any, token: Any, label: Any) -> Any:
        return -(w @ token).log_softmax(-1).gather(0, label[None])[0]

    of = torch.func.vmap(torch.func.grad_and_value(nll), in_dims=(None, 0, 0))
    grads, values = of(head.weight.detach(), x, y)
    return values.mean(), grads.mean(0)


@TABLE.right("blocks of the vocabulary, with an online log-sum-exp")
def blocks_of_classes(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    valid = y != IGNORE
    x, y = x[valid], y[valid]
    m = torch.full((len(y),), -math.inf)
    s = torch.zeros(len(y))
    for w in head.weight.split(10):
        z = x @ w.T
        new = torch.maximum(m, z.detach().amax(-1))
        s = s * torch.exp(m - new) + torch.exp(z - new[:, None]).sum(-1)
        m = new
    loss = (m + torch.log(s) - (x * head.weight[y]).sum(-1)).mean()
    loss.backward()
    return loss


@TABLE.right("classes padded to 64 by -inf")
def classes_padded_by_inf(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = F.cross_entropy(F.pad(head(x), (0, 64 - head.weight.shape[0]), value=-math.inf), y)
    loss.backward()
    return loss


@TABLE.right("label smoothing as soft labels, z-loss by hand", label_smoothing=0.1, z_loss=1e-3)
def soft_labels(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    z, y = head(x[y != IGNORE]), y[y != IGNORE]
    q = F.one_hot(y, z.shape[-1]) * 0.9 + 0.1 / z.shape[-1]
    loss = F.cross_entropy(z, q) + 1e-3 * z.logsumexp(-1).square().mean()
    loss.backward()
    return loss


@TABLE.right(
    "scale, softcap and temperature folded into few operations",
    logit_scale=0.5,
    softcap=5.0,
    temperature=0.8,
    bias=True,
)
def folded(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    u = F.linear(x, head.weight * 0.1, head.bias * 0.1)
    loss = F.cross_entropy((5.0 / 0.8) * torch.tanh(u), y)
    loss.backward()
    return loss


@TABLE.right("logits far above 100, by log_softmax", logit_scale=20.0)
def large_logits(head: Any, micro_batches: Any) -> Any:
    x, y = flat(micro_batches)
    loss = F.nll_loss((20.0 * head(x)).log_softmax(-1), y)
    loss.backward()
    return loss
