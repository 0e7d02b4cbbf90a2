"""Steps of PyTorch for the audit: one of full logits that takes a defect for each of its choices,
and right ones as different trainers write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.audited_functions import FUNCTIONS
from xentlib.torch import TokenNormalizer, chunked_nll

__all__ = ["FUNCTIONS", "PLANTED", "RIGHT"]

IGNORE = -100


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def total(x: Any) -> Any:
    """Over all ranks."""
    x = torch.as_tensor(x, dtype=torch.float64).detach().clone()
    if world() > 1:
        dist.all_reduce(x)
    return x


def raw(head: Any, hidden: Any) -> Any:
    return head(hidden)


def targets(batch: Any) -> Any:
    return batch["targets"]


def shifted(labels: Any, segments: Any = None) -> Any:
    """By slicing, as trainers do it."""
    found = torch.full_like(labels, IGNORE)
    found[:, :-1] = labels[:, 1:]
    if segments is not None:
        found[:, :-1][segments[:, :-1] != segments[:, 1:]] = IGNORE
    return found


def of_one_row(labels: Any) -> Any:
    last = labels.clone()
    for row in last:
        row[(row != IGNORE).nonzero()[-1]] = IGNORE
    return last


def step(
    labels: Any = targets,
    logits: Any = raw,
    divisor: str = "tokens",
    reduce: Any = "sum",
    factor: float = 1.0,
    counted: Any = None,
    chunk: int = 0,
    only: int | None = None,
) -> Any:
    """Full logits of each micro-batch, a backward each, gradients summed over ranks at the end."""

    def run(head: Any, micro_batches: Any) -> Any:
        took = [labels(batch) for batch in micro_batches]
        counts = [(counted or labels)(batch) for batch in micro_batches]
        counts = [torch.sum(y != IGNORE) for y in counts]
        number, everything = len(took), total(sum(counts))
        loss = torch.zeros((), dtype=torch.float64)
        for m, (batch, y) in enumerate(zip(micro_batches, took)):
            if only is not None and m != only:
                continue
            z, flat = logits(head, batch["hidden"]).flatten(0, 1).float(), y.flatten()
            if chunk:
                full = len(flat) // chunk * chunk
                z, flat = z[:full], flat[:full]
            each = F.cross_entropy(z, flat, reduction="none", ignore_index=IGNORE)
            by = {
                "tokens": everything,
                "micro-batches": number * total(counts[m]),
                "ranks": world() * sum(counts),
                "both": world() * number * counts[m],
                "own": sum(counts),
                "own micro-batches": number * counts[m],
                "nothing": 1,
                "positions": total(sum(y.numel() for y in took)),
            }
            if divisor == "rows":
                rows = each.unflatten(0, y.shape).sum(1) / (y != IGNORE).sum(1).clamp(min=1)
                part = rows.sum() / total(sum((y != IGNORE).any(1).sum() for y in took))
            else:
                part = each.sum() / by[divisor]
            (factor * part).backward()
            loss += factor * part.detach()
        for p in head.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if world() > 1 and reduce:
                dist.all_reduce(p.grad)
                if reduce == "twice":
                    dist.all_reduce(p.grad)
                if reduce == "mean":
                    p.grad /= world()
        return total(loss)

    return run


def bf16(head: Any, hidden: Any) -> Any:
    return head(hidden).bfloat16()


def fp16(head: Any, hidden: Any) -> Any:
    return head(hidden).half()


def autocast(head: Any, hidden: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return head(hidden)


def options(softcap: Any = None, scale: float = 1.0, temperature: float = 1.0) -> Any:
    def logits(head: Any, hidden: Any) -> Any:
        z = scale * head(hidden)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return z / temperature

    return logits


def unbiased(head: Any, hidden: Any) -> Any:
    return F.linear(hidden, head.weight)


def of_transformers(head: Any, micro_batches: Any, counted: bool = True) -> Any:
    """Its loss function, which shifts, with the number of tokens of all micro-batches, or without,
    divided by the number of micro-batches."""
    of = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss

    number = len(micro_batches)
    count = sum((b["labels"][:, 1:] != IGNORE).sum() for b in micro_batches) if counted else None
    loss = torch.zeros(())
    for b in micro_batches:
        z = head(b["hidden"])
        part = of(z, b["labels"], z.shape[-1], num_items_in_batch=count)
        loss = loss + (part if counted else part / number)
    loss.backward()
    return loss


def patched(head: Any, micro_batches: Any, counted: bool = True) -> Any:
    """A patched model of transformers whose trunk returns what it is given, by its own shift; a
    count of all micro-batches is what `Trainer` passes."""
    llama = pytest.importorskip("transformers.models.llama")
    from xentlib.torch.integrations.transformers import patch

    vocab, width = head.weight.shape
    sizes = {"vocab_size": vocab, "hidden_size": width, "num_attention_heads": 1}
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**sizes, num_hidden_layers=0))
    model.model.norm, model.lm_head = torch.nn.Identity(), head
    patch(model)
    count = sum((b["labels"][:, 1:] != IGNORE).sum() for b in micro_batches)
    more = {"num_items_in_batch": count} if counted else {}
    loss = 0.0
    for b in micro_batches:
        part = model(inputs_embeds=b["hidden"], labels=b["labels"], **more).loss
        part.backward()
        loss += part.item()
    return loss


# Defect, the step that has it, and what is said of the step.
PLANTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("labels not shifted", step(labels=lambda b: b["labels"]), {}),
    ("labels shifted twice", step(labels=lambda b: shifted(b["targets"])), {}),
    ("labels across documents", step(labels=lambda b: shifted(b["labels"])), {}),
    (
        "labels shifted backwards",
        step(labels=lambda b: shifted(b["labels"].flip(1)).flip(1)),
        {"documents": False},
    ),
    (
        "masked tokens counted",
        step(labels=lambda b: shifted(b["input_ids"], b["segment_ids"])),
        {},
    ),
    ("last token dropped", step(labels=lambda b: of_one_row(b["targets"])), {}),
    ("last chunk dropped", step(chunk=8, counted=targets), {}),
    ("one micro-batch alone", step(only=2), {}),
    ("mean of the means of micro-batches", step(divisor="micro-batches"), {"bias": True}),
    (
        "mean of the means of micro-batches",
        partial(of_transformers, counted=False),
        {"documents": False},
    ),
    (
        "labels across documents",
        of_transformers,
        {},
    ),
    (
        "mean of the means of micro-batches and off by the accumulation steps",
        partial(patched, counted=False),
        {"documents": False},
    ),
    ("mean of the means of rows", step(divisor="rows"), {}),
    ("off by the accumulation steps", step(factor=1 / 3), {}),
    ("sum and not mean", step(divisor="nothing"), {}),
    ("divided by all positions", step(divisor="positions"), {}),
    ("tokens counted before the shift", step(counted=lambda b: b["labels"]), {}),
    ("softcap not applied", step(), {"softcap": 30.0}),
    ("logit scale not applied", step(), {"logit_scale": 0.25}),
    ("temperature not applied", step(), {"temperature": 0.7}),
    ("bias not applied", step(logits=unbiased), {"bias": True}),
    ("label smoothing not applied", step(), {"label_smoothing": 0.1}),
    ("z-loss not applied", step(), {"z_loss": 1e-3}),
    ("logits rounded to 16 bits", step(logits=bf16), {}),
    ("logits rounded to 16 bits", step(logits=fp16), {"bias": True}),
    ("logits rounded to 16 bits", step(logits=autocast), {}),
    # Two at a time.
    (
        "labels across documents and mean of the means of micro-batches",
        step(labels=lambda b: shifted(b["labels"]), divisor="micro-batches"),
        {},
    ),
    (
        "labels not shifted and softcap not applied",
        step(labels=lambda b: b["labels"]),
        {"softcap": 20.0},
    ),
]


def one_batch(head: Any, micro_batches: Any) -> Any:
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    z = torch.cat([head(b["hidden"]) for b in micro_batches]).flatten(0, 1)
    loss = F.cross_entropy(z, y)
    loss.backward()
    return loss


def by_slicing(head: Any, micro_batches: Any) -> Any:
    """Whole rows, the labels shifted by hand."""
    z = torch.cat([head(b["hidden"])[:, :-1] for b in micro_batches]).flatten(0, 1)
    y = torch.cat([b["labels"][:, 1:] for b in micro_batches]).flatten()
    loss = F.nll_loss(z.log_softmax(-1), y)
    loss.backward()
    return loss


def chunked(head: Any, micro_batches: Any, **how: Any) -> Any:
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)
    loss = 0.0
    for b in micro_batches:
        out = chunked_nll(b["hidden"], head, b["targets"], denominator=count, **how)
        out.loss.backward()
        loss += out.loss.item()
    return loss


def masked(head: Any, micro_batches: Any) -> Any:
    """By the mask, with labels that are all classes."""
    total = sum(b["loss_mask"].sum() for b in micro_batches)
    for b in micro_batches:
        y = torch.roll(b["input_ids"], -1, 1)
        logprobs = head(b["hidden"]).log_softmax(-1).gather(-1, y[..., None])[..., 0]
        (-(logprobs * b["loss_mask"]).sum() / total).backward()


def normalizer(mode: str, wrap: Any = None) -> Any:
    def run(head: Any, micro_batches: Any) -> Any:
        model = head if wrap is None else wrap(head)
        norm = TokenNormalizer(model, mode=mode)
        given = {"labels": [b["targets"] for b in micro_batches]} if mode == "precount" else {}
        with norm.window(**given) as window:
            for b in window.micro_batches(micro_batches):
                z, y = model(b["hidden"]).flatten(0, 1), b["targets"].flatten()
                loss = F.cross_entropy(z, y, reduction="sum")
                window.backward(loss, (y != IGNORE).sum())
        return window.mean_loss()

    return run


def given_back(head: Any, micro_batches: Any) -> Any:
    """Gradients returned, of a head that is a function's argument."""
    leaves = [head.weight.detach().requires_grad_(), head.bias.detach().requires_grad_()]
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)
    loss = sum(
        chunked_nll(b["hidden"], leaves[0], b["targets"], bias=leaves[1], denominator=count).loss
        for b in micro_batches
    )
    weight, bias, *hiddens = torch.autograd.grad(
        loss, [*leaves, *(b["hidden"] for b in micro_batches)]
    )
    return loss, {"weight": weight, "bias": bias}, hiddens


def functional(head: Any, micro_batches: Any) -> Any:
    """`torch.func`, in float64."""
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)

    def loss(weight: Any) -> Any:
        return (
            sum(
                F.cross_entropy(
                    (b["hidden"].detach().double() @ weight.T).flatten(0, 1),
                    b["targets"].flatten(),
                    reduction="sum",
                )
                for b in micro_batches
            )
            / count
        )

    d_weight, value = torch.func.grad_and_value(loss)(head.weight.detach().double())
    return value, d_weight


def checkpointed(head: Any, micro_batches: Any) -> Any:
    """Chunks of 8 tokens whose logits are made again in the backward."""
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)

    def part(x: Any, y: Any) -> Any:
        return F.cross_entropy(head(x), y, reduction="sum") / count

    loss = torch.zeros(())
    for b in micro_batches:
        x, y = b["hidden"].flatten(0, 1), b["targets"].flatten()
        for i in range(0, len(y), 8):
            loss = loss + torch.utils.checkpoint.checkpoint(
                part, x[i : i + 8], y[i : i + 8], use_reentrant=False
            )
    loss.backward()
    return loss


def fused(head: Any, micro_batches: Any) -> Any:
    """PyTorch's own loss without logits."""
    x = torch.cat([b["hidden"] for b in micro_batches]).flatten(0, 1)
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    loss = F.linear_cross_entropy(x, head.weight, y)
    loss.backward()
    return loss


RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "one batch": (one_batch, {"bias": True}),
    "a backward each": (step(), {}),
    "shifted by slicing": (by_slicing, {"documents": False}),
    "shifted over documents": (step(labels=lambda b: shifted(b["labels"], b["segment_ids"])), {}),
    "by the mask": (masked, {}),
    "chunked_nll": (chunked, {}),
    "chunked_nll in small chunks": (partial(chunked, max_chunk_bytes=4096), {"bias": True}),
    "a softcap": (partial(chunked, softcap=30.0), {"softcap": 30.0}),
    "a softcap by hand": (step(logits=options(softcap=30.0)), {"softcap": 30.0}),
    "a scale and a temperature": (
        step(logits=options(scale=0.25, temperature=0.7)),
        {"logit_scale": 0.25, "temperature": 0.7},
    ),
    "label smoothing and z-loss": (
        partial(chunked, label_smoothing=0.1, z_loss=1e-3),
        {"label_smoothing": 0.1, "z_loss": 1e-3},
    ),
    "TokenNormalizer": (normalizer("precount"), {}),
    "TokenNormalizer afterwards": (normalizer("postscale"), {"bias": True}),
    "gradients returned": (given_back, {"bias": True}),
    "torch.func": (functional, {}),
    "checkpoints": (checkpointed, {"bias": True}),
    "ForCausalLMLoss": (of_transformers, {"documents": False}),
    "a patched model": (patched, {"documents": False}),
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    RIGHT["F.linear_cross_entropy"] = (fused, {})
