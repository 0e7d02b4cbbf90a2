"""Steps of PyTorch whose defects the audit reads from single tokens' factors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.audited_torch import IGNORE, bf16, one_batch, options, raw, shifted, step, targets

__all__ = ["READ", "WRONG_THERE"]


def count(micro_batches: Any) -> Any:
    return sum((b["targets"] != IGNORE).sum() for b in micro_batches)


def tokens_of(logits: Any, micro_batches: Any) -> Any:
    """Logits, labels and who counts, of all micro-batches laid flat."""
    z = torch.cat([logits(b["hidden"]).flatten(0, 1) for b in micro_batches])
    y = torch.cat([b["targets"].flatten() for b in micro_batches])
    return z, y.clamp(min=0), y != IGNORE


def smoothed(eps: float, over: str = "valid", others: bool = False, z_loss: float = 0.0) -> Any:
    """Label smoothing and z-loss by hand, over all positions or those that count."""

    def run(head: Any, micro_batches: Any) -> Any:
        z, y, valid = tokens_of(head, micro_batches)
        log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
        nll = -log_p.gather(1, y[:, None])[:, 0]
        uniform = -log_p.mean(1)
        if others:
            vocab = z.shape[1]
            uniform = (-log_p.sum(1) - nll) / (vocab - 1)
        also = torch.ones_like(valid) if over == "all" else valid
        loss = (1 - eps) * nll * valid + (eps * uniform + z_loss * lse**2) * also
        loss = loss.sum() / valid.sum()
        loss.backward()
        return loss

    return run


def by_mask(head: Any, micro_batches: Any) -> Any:
    """The mask of the position itself, with the next token."""
    total, number = torch.zeros(()), 0
    for b in micro_batches:
        log_p = head(b["hidden"][:, :-1]).log_softmax(-1)
        ahead = b["input_ids"][:, 1:]
        mask = b["labels"][:, :-1] != IGNORE
        total = total - (log_p.gather(-1, ahead[..., None])[..., 0] * mask).sum()
        number += mask.sum()
    (total / number).backward()
    return total / number


def chunk_means(size: int) -> Any:
    def run(head: Any, micro_batches: Any) -> Any:
        means = []
        for b in micro_batches:
            z, y, _ = tokens_of(head, [b])
            y = b["targets"].flatten()
            for z_part, y_part in zip(z.split(size), y.split(size)):
                if (y_part != IGNORE).any():
                    means.append(F.cross_entropy(z_part, y_part))
        loss = torch.stack(means).mean()
        loss.backward()
        return loss

    return run


def clipped(norm: float, each: bool) -> Any:
    """Gradients of micro-batches clipped one by one, or what was added up so far."""

    def run(head: Any, micro_batches: Any) -> Any:
        number, total = count(micro_batches), 0.0
        sums = [torch.zeros_like(p) for p in head.parameters()]
        for b in micro_batches:
            z, y = head(b["hidden"]).flatten(0, 1), b["targets"].flatten()
            loss = F.cross_entropy(z, y, reduction="sum") / number
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), norm)
            total += loss.item()
            if each:
                sums = [s + p.grad for s, p in zip(sums, head.parameters())]
                head.zero_grad()
        if each:
            for s, p in zip(sums, head.parameters()):
                p.grad = s
        return total

    return run


def added_in_bf16(head: Any, micro_batches: Any) -> Any:
    number, total = count(micro_batches), 0.0
    added = torch.zeros_like(head.weight, dtype=torch.bfloat16)
    for b in micro_batches:
        z, y = head(b["hidden"]).flatten(0, 1), b["targets"].flatten()
        loss = F.cross_entropy(z, y, reduction="sum") / number
        loss.backward()
        added += head.weight.grad.bfloat16()
        head.zero_grad()
        total += loss.item()
    head.weight.grad = added.float()
    return total


class Straight(torch.autograd.Function):
    """tanh, whose derivative is 1."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


class Cut(torch.autograd.Function):
    """A product whose operands have 11 bits, backward too."""

    @staticmethod
    def cut(x: Any) -> Any:
        return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return Cut.cut(x) @ Cut.cut(w).T

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = (Cut.cut(y) for y in ctx.saved_tensors)
        g = Cut.cut(g)
        return g @ w, g.flatten(0, 1).T @ x.flatten(0, 1)


def all_but_last(head: Any, micro_batches: Any) -> Any:
    number, total = count(micro_batches), 0.0
    for m, b in enumerate(micro_batches):
        z, y = head(b["hidden"]).flatten(0, 1), b["targets"].flatten()
        loss = F.cross_entropy(z, y, reduction="sum") / number
        if m + 1 < len(micro_batches):
            loss.backward()
        total += loss.item()
    return total


def running_mean(head: Any, micro_batches: Any) -> Any:
    """Each micro-batch's mean, kept as a mean over all tokens so far."""
    kept, tokens, total = torch.zeros_like(head.weight), 0, 0.0
    for b in micro_batches:
        number = int((b["targets"] != IGNORE).sum())
        loss = F.cross_entropy(head(b["hidden"]).flatten(0, 1), b["targets"].flatten())
        loss.backward()
        tokens += number
        kept += (head.weight.grad - kept) * (number / tokens)
        total += (loss.item() - total) * (number / tokens)
        head.zero_grad()
    head.weight.grad = kept
    return total


def multiplied(factor: float) -> Any:
    def run(head: Any, micro_batches: Any) -> Any:
        loss = one_batch(head, micro_batches)
        head.weight.grad = (head.weight.grad.double() * factor).float()
        return loss

    return run


def padded(b: Any) -> Any:
    """0 for padding, which is a class."""
    return shifted(torch.where(b["attention_mask"], b["labels"], b["input_ids"]), b["segment_ids"])


def ends_masked(b: Any) -> Any:
    segments = b["segment_ids"]
    last = torch.ones_like(b["attention_mask"])
    last[:, :-1] = segments[:, 1:] != segments[:, :-1]
    return shifted(torch.where(last, IGNORE, b["labels"]), segments)


def flat_shift(b: Any) -> Any:
    y = b["labels"].flatten()
    return torch.cat([y[1:], y.new_tensor([IGNORE])]).view_as(b["labels"])


def before_the_bias(head: Any, hidden: Any) -> Any:
    return F.linear(hidden, head.weight) / 0.7 + head.bias


def cap(head: Any, hidden: Any) -> Any:
    return 10.0 * Straight.apply(head(hidden) / 10.0)


def lost(head: Any, hidden: Any) -> Any:
    return F.linear(hidden, head.weight, head.bias.detach())


T = {"temperature": 0.7}
# Defect, the step that has it, and what is said of the step.
READ: list[tuple[str, Any, dict[str, Any]]] = [
    ("last micro-batch left out", all_but_last, {}),
    ("padding alone counted", step(labels=padded), {}),
    ("loss mask not shifted", by_mask, {"documents": False}),
    (
        "label smoothing over ignored tokens",
        smoothed(0.1, over="all"),
        {"label_smoothing": 0.1},
    ),
    ("z-loss over ignored tokens", smoothed(0.0, over="all", z_loss=1e-3), {"z_loss": 1e-3}),
    (
        "label smoothing and z-loss over ignored tokens",
        smoothed(0.1, over="all", z_loss=1e-3),
        {"label_smoothing": 0.1, "z_loss": 1e-3},
    ),
    (
        "label smoothing over the other classes",
        smoothed(0.1, others=True),
        {"label_smoothing": 0.1},
    ),
    ("mean of the means of chunks", chunk_means(8), {}),
    ("last token of each document masked", step(labels=ends_masked), {}),
    ("labels across rows", step(labels=flat_shift), {}),
    ("each micro-batch clipped", clipped(0.1, each=True), {"bias": True}),
    ("each micro-batch clipped", clipped(0.1, each=False), {}),
    ("bias gradient lost", step(logits=lost), {"bias": True}),
    ("temperature before the bias", step(logits=before_the_bias), {**T, "bias": True}),
    ("temperature inverted", step(logits=options(temperature=1 / 0.7)), T),
    ("softcap without its derivative", step(logits=cap), {"softcap": 10.0}),
    (
        "temperature before the softcap",
        step(logits=lambda head, x: 10.0 * torch.tanh(head(x) / 7.0)),
        {**T, "softcap": 10.0},
    ),
    ("gradients added in 16 bits", added_in_bf16, {}),
    (
        "-100 clipped to 0",
        step(labels=lambda b: b["targets"].clamp(min=0)),
        {},
    ),
    (
        "-100 clipped to 0",
        step(labels=lambda b: b["targets"].clamp(min=0), counted=targets),
        {"bias": True},
    ),
    ("products in TF32", step(logits=lambda head, x: Cut.apply(x, head.weight)), {}),
    (
        "off by a factor of 1 + 3.8e-06",
        multiplied(1 + 2**-18),
        {},
    ),
    # Pairs and triples.
    (
        "labels across documents and logits rounded to 16 bits",
        step(labels=lambda b: shifted(b["labels"]), logits=bf16),
        {},
    ),
    (
        "temperature inverted and sum and not mean",
        step(logits=options(temperature=1 / 0.7), divisor="nothing"),
        T,
    ),
    (
        "labels not shifted and mean of the means of rows and sign",
        step(labels=lambda b: b["labels"], divisor="rows", factor=-1.0),
        {},
    ),
    ("", running_mean, {}),
    ("", step(logits=raw), {}),
]


# --- right on plain numbers -----------------------------------------------------------------------


def by_ids(head: Any, micro_batches: Any) -> Any:
    """A mask for padding made of ids, which a real token has too."""
    return step(
        labels=lambda b: torch.where(b["input_ids"].roll(-1, 1) == 0, IGNORE, b["targets"])
    )(head, micro_batches)


def without_maximum(head: Any, micro_batches: Any) -> Any:
    z, y, valid = tokens_of(head, micro_batches)
    lse = z.exp().sum(-1).log()
    loss = (lse - z.gather(1, y[:, None])[:, 0])[valid].mean()
    loss.backward()
    return loss


def mean_of_each(head: Any, micro_batches: Any) -> Any:
    """Each micro-batch's mean times its number of tokens: 0 times NaN without one."""
    number, total = count(micro_batches), torch.zeros(())
    for b in micro_batches:
        z, y = head(b["hidden"]).flatten(0, 1), b["targets"].flatten()
        loss = F.cross_entropy(z, y) * (y != IGNORE).sum() / number
        loss.backward()
        total += loss.detach()
    return total


def mean_of_rows(head: Any, micro_batches: Any) -> Any:
    number, total = count(micro_batches), torch.zeros(())
    for b in micro_batches:
        log_p = head(b["hidden"]).log_softmax(-1)
        nll = -log_p.gather(-1, b["targets"].clamp(min=0)[..., None])[..., 0]
        valid = b["loss_mask"]
        rows = (nll * valid).sum(1) / valid.sum(1)
        loss = (rows * valid.sum(1)).sum() / number
        loss.backward()
        total += loss.detach()
    return total


def wants_labels(head: Any, micro_batches: Any) -> Any:
    for b in micro_batches:
        if not b["loss_mask"].any():
            raise ZeroDivisionError("no label")
    return one_batch(head, micro_batches)


EMPTY, ROW, IDS = (
    "an empty micro-batch",
    "a row without a token that counts",
    "tokens with ids 0, 1 and 2",
)
NAN = "gradients of the head: inf or NaN"
WRONG_THERE: list[tuple[Any, dict[str, str]]] = [
    (by_ids, {IDS: "gradients of the head: relative distance"}),
    (without_maximum, {"logits beyond 100": NAN}),
    (mean_of_each, {EMPTY: "loss: inf or NaN"}),
    (mean_of_rows, {EMPTY: NAN, ROW: NAN}),
    (wants_labels, {EMPTY: "the step raised ZeroDivisionError: no label"}),
]
