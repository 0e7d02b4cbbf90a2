"""A small transformer on a batch, in one process: what wrappers of it are held against.

Shapes: B rows of a batch, L tokens of a row, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from xentlib.torch import NLLHead

V, H, B, L = 101, 16, 4, 12
RANK, SCALE = 3, 0.7  # of adapters
RATE = 0.1


class Model(nn.Module):
    """A transformer of one layer. With `inside` its forward computes the loss."""

    def __init__(
        self, *, vocab: int = V, tied: bool = False, bias: bool = False, inside: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocab, H)
        self.layer = nn.TransformerEncoderLayer(H, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(H, vocab, bias=bias)
        self.inside = inside
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any, loss: Any = None) -> Any:
        hidden = self.layer(self.embedding(ids))
        return loss(hidden, self.head) if self.inside else hidden


@dataclass(frozen=True)
class Setup:
    """A model, and how its loss is taken."""

    model: tuple[str, ...] = ()  # "tied", "bias", "inside"
    function: str = "chunked_nll"
    recompute: bool = False
    frozen: bool = False  # all but the head
    fixed: tuple[str, ...] = ()  # of the head, what is not trained
    checkpoint: bool = False
    steps: int = 1  # micro-batches
    idle: bool = False  # rank 0 has no valid token
    chunk: int | None = None  # tokens
    # To the head: read "parameter", "module", "NLLHead", "gather_head", DeepSpeed's; a frozen one
    # with adapters, "LowRankHead" or "PEFT", of which one process computes full logits.
    road: str = "parameter"
    audit: bool = False
    calls: int = 1  # of the head, each for its part of the rows, before one backward
    gather: str = "head"
    vocab: int = V


@dataclass(frozen=True)
class Zero(Setup):
    """Under DeepSpeed."""

    stage: int = 3
    world: int = 2
    offload: bool = False  # parameters and optimizer to the CPU
    hpz: int = 0  # ranks that have a second copy of the parameters between them
    windows: int = 1  # of SGD; gradients are those of the last


def batch(setup: Setup, step: int) -> tuple[Any, Any]:
    generator = torch.Generator("cpu").manual_seed(step)
    ids = torch.randint(setup.vocab, (B, L), generator=generator, device="cpu")
    labels = torch.roll(ids, -1, 1)
    labels[torch.rand(B, L, generator=generator, device="cpu") < 0.2] = -100
    if setup.idle:
        labels[: B // 2] = -100
    return ids.to(torch.get_default_device()), labels.to(torch.get_default_device())


def loss_of(
    setup: Setup, labels: Any, denominator: float, hidden: Any, head: Any, **more: Any
) -> Any:
    """Sum over these tokens, divided by what is given; `more` are arguments of the function."""
    from xentlib import torch as ours

    if setup.calls > 1:
        parts = zip(
            hidden.chunk(setup.calls, dim=-2), labels.chunk(setup.calls, dim=-1), strict=True
        )
        part = replace(setup, calls=1)
        return sum(loss_of(part, y, denominator, x, head, **more) for x, y in parts)
    budget = None if setup.chunk is None else setup.chunk * setup.vocab * 4
    more["max_chunk_bytes"] = budget
    if setup.gather != "head":
        more["gather"] = setup.gather
    if setup.audit:
        more["compute_dtype"] = "float64"
    if setup.function == "chunked_nll":
        more |= {"denominator": denominator, "recompute": setup.recompute}

    def result(hidden: Any) -> Any:
        if setup.road == "NLLHead":
            return head(hidden, labels, **more)
        function = getattr(ours, setup.function)
        if setup.road == "gather_head":
            with ours.gather_head(head.weight, head.bias) as (weight, bias):
                if setup.audit or setup.function == "chunked_logprobs":
                    return function(hidden, weight, labels, bias=bias, **more)
                logits = torch.nn.functional.linear(hidden, weight, bias)  # a user's own code
                return torch.nn.functional.cross_entropy(
                    logits.flatten(0, -2), labels.flatten(), reduction="sum"
                )
        if setup.road == "GatheredParameters" and hasattr(head.weight, "ds_status"):
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters(list(head.parameters())):
                return function(hidden, head.weight, labels, bias=head.bias, **more)
        if setup.road in ("LowRankHead", "PEFT") and not torch.distributed.is_initialized():
            logits = full_logits(setup, hidden, head).flatten(0, -2)
            return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        if setup.road == "LowRankHead":
            low = ours.LowRankHead(head, head.a, head.b, SCALE)
            return function(hidden, low, labels, **more)
        if setup.road in ("module", "PEFT"):
            return function(hidden, head, labels, **more)
        # Read the head's parameters where they are: what the field's fused losses do.
        return function(hidden, head.weight, labels, bias=head.bias, **more)

    def call(hidden: Any) -> Any:
        out = result(hidden)
        if isinstance(out, torch.Tensor):
            return out / denominator
        if setup.function == "chunked_nll":
            return out.loss
        return -out.logprobs.sum() / denominator

    if setup.checkpoint:
        return torch.utils.checkpoint.checkpoint(call, hidden, use_reentrant=False)
    return call(hidden)


def full_logits(setup: Setup, hidden: Any, head: Any) -> Any:
    if setup.road == "PEFT":
        return head(hidden)
    return torch.nn.functional.linear(hidden, head.weight + SCALE * head.b @ head.a, head.bias)


def adapt(setup: Setup, model: Model) -> None:
    """Adapters on the head, which is frozen with its bias; B is as large as after training."""
    head = model.head.requires_grad_(False)
    if setup.road == "LowRankHead":
        head.a = nn.Parameter(torch.randn(RANK, H) / H**0.5)
        head.b = nn.Parameter(torch.randn(setup.vocab, RANK) / 4)
        return
    from peft import LoraConfig, inject_adapter_in_model

    trained = [p for p in model.parameters() if p.requires_grad]
    config = LoraConfig(r=RANK, lora_alpha=2, target_modules=["head"], init_lora_weights=False)
    inject_adapter_in_model(config, model)  # which freezes what it finds
    for p in trained:
        p.requires_grad_()


def model_of(setup: Setup) -> Model:
    model = Model(vocab=setup.vocab, **dict.fromkeys(setup.model, True))
    if setup.road in ("LowRankHead", "PEFT"):
        adapt(setup, model)
    if setup.road == "NLLHead":
        per_token = setup.function == "chunked_logprobs"
        model.head = NLLHead.from_linear(model.head, per_token=per_token)
    if setup.frozen:
        trained = [p for p in model.head.parameters() if p.requires_grad]
        model.requires_grad_(False)
        for p in trained:
            p.requires_grad_()
    for name in setup.fixed:
        model.head.get_parameter(name).requires_grad_(False)
    return model


def batches(setup: Setup) -> tuple[list[Any], float]:
    """Micro-batches, and how many valid tokens they hold."""
    steps = [batch(setup, step) for step in range(setup.steps)]
    return steps, float(sum((labels != -100).sum() for _, labels in steps))


def gradients_of_one_process(setup: Setup) -> dict[str, Any]:
    model, (steps, total) = model_of(setup), batches(setup)
    for window in range(getattr(setup, "windows", 1)):
        if window:
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            optimizer.step()
            optimizer.zero_grad()
        for ids, labels in steps:
            run(setup, model, ids, labels, total).backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def mean_over_ranks(setup: Setup, world: int, dtype: torch.dtype) -> dict[str, Any]:
    """What ranks compute in `dtype`, each for its own rows, one after the other in one process; the
    mean in float64, rounded once to float32."""
    (ids, labels), (_, total) = batch(setup, 0), batches(setup)
    sums: dict[str, Any] = {}
    for rank in range(world):
        model, rows = model_of(setup).to(dtype), part_of(rank, world)
        run(setup, model, ids[rows], labels[rows], total / world).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad.double() / world
    return {name: x.float() for name, x in sums.items()}


def part_of(rank: int, world: int) -> slice:
    """This rank's rows of a batch."""
    return slice(rank * B // world, (rank + 1) * B // world)


def run(setup: Setup, model: Any, ids: Any, labels: Any, denominator: float, **more: Any) -> Any:
    loss = partial(loss_of, setup, labels, denominator, **more)
    out = model(ids, loss)
    return out if "inside" in setup.model else loss(out, model.head)
