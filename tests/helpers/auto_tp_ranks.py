"""A rank of `test_zero_auto_tp.py`, started by torchrun: engines whose model DeepSpeed AutoTP has
split, results as a file."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.refused import said_by
from helpers.torchrun import settle, start

V, H, F, B, L = 101, 14, 24, 4, 7
FACTOR = -0.5  # a teacher's hidden states


@dataclass(frozen=True)
class Split:
    """An engine over pairs of ranks, and how its head is handed over."""

    stage: int = 0
    head: str = "gathered"  # or "local": DeepSpeed's `vocab_parallel_lm_head`
    bias: bool = False
    tied: bool = False
    function: str = "chunked_nll"
    road: str = "module"  # or "parameter", "group", "window", the latter of two micro-batches
    world: int = 2


class Net(nn.Module):
    """Split over columns, over rows, and over the vocabulary."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, H)
        self.up, self.down = nn.Linear(H, F, bias=False), nn.Linear(F, H, bias=False)
        self.lm_head = nn.Linear(H, V, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight

    def loss_function(self, logits: Any, labels: Any, **_: Any) -> Any:
        """Where DeepSpeed puts its own."""
        raise NotImplementedError

    def forward(self, ids: Any, labels: Any = None) -> Any:
        x = self.embed(ids)
        return x + self.down(torch.tanh(self.up(x)))


def batch(step: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(V, (B, L), generator=generator)
    labels = torch.roll(ids, -1, 1)
    labels[torch.rand(B, L, generator=generator) < 0.3] = -100
    return ids, labels


def engine_of(setup: Split, **more: Any) -> Any:
    import deepspeed

    kinds = {"up": "column", "down": "row", "lm_head": "column"} | more.pop("kinds", {})
    specs = [
        {"patterns": [rf".*{name}\.weight$"], "partition_type": kind}
        for name, kind in kinds.items()
    ]
    specs[-1]["gather_output"] = kinds["lm_head"] == "column"
    parallel: dict[str, Any] = {"autotp_size": 2}
    if setup.head == "local":
        parallel["vocab_parallel_lm_head"] = True
    parallel["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2 if setup.road == "window" else 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": setup.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": parallel,
    }
    model = more.pop("model", None) or Net(bias=setup.bias, tied=setup.tied)
    parameters = list(model.parameters())
    return deepspeed.initialize(model=model, config=config, model_parameters=parameters)[0]


def leaves_logits_local() -> bool:
    """Whether this DeepSpeed can leave each rank the logits of its own rows."""
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    return "vocab_parallel_lm_head" in TPTrainingConfig.model_fields


def tensor_group() -> Any:
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()


def loss_of(setup: Split, hidden: Any, head: Any, labels: Any, denominator: Any = None) -> Any:
    """Sum over these tokens, divided by what is given."""
    import xentlib.torch as ours
    from xentlib import VocabShard

    options: dict[str, Any] = {}
    weight = head
    if setup.road != "module":
        weight, options["bias"] = head.weight, head.bias
    if setup.road == "group":
        rows = len(head.weight)
        options["vocab_parallel"] = VocabShard.of_ranks(rows, tensor_group())
    if setup.function == "chunked_nll":
        more = {"reduction": "sum"} if denominator is None else {"denominator": denominator}
        out = ours.chunked_nll(hidden, weight, labels, **options, **more)
        return out if denominator is None else out.loss
    if setup.function == "chunked_divergence":
        teacher = ours.TeacherHead(FACTOR * hidden.detach(), head)
        return ours.chunked_divergence(
            hidden, weight, teacher, labels=labels, denominator=denominator, **options
        ).loss
    return -ours.chunked_logprobs(hidden, weight, labels, **options).logprobs.sum() / denominator


def measured(setup: Split) -> tuple[float, dict[str, Any]]:
    """The loss, and this rank's parts of all gradients."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    from xentlib.torch import TokenNormalizer

    engine = engine_of(setup)
    replicas = setup.world // 2
    part = slice(dist.get_rank() // 2 * B // replicas, (dist.get_rank() // 2 + 1) * B // replicas)
    head = engine.module.lm_head
    if setup.road == "window":
        steps = [tuple(x[part] for x in batch(step)) for step in range(2)]
        with TokenNormalizer(engine).window(labels=[y for _, y in steps]) as window:
            for ids, labels in window.micro_batches(steps):
                window.backward(loss_of(setup, engine(ids), head, labels))
        loss = torch.zeros(())
    else:
        ids, labels = batch()
        count = int((labels != -100).sum())
        loss = loss_of(setup, engine(ids[part]), head, labels[part], count / replicas)
        engine.backward(loss)
    named = engine.module.named_parameters()
    found = {}
    for name, p in named:
        gradient = p.grad if setup.stage == 0 else safe_get_full_grad(p)
        found[name] = gradient.float().numpy().copy()
    return loss.item(), found


def called(road: str = "module", head: Any = None, **more: Any) -> Any:
    from xentlib.torch import chunked_nll

    setup = Split(road=road)
    engine = engine_of(setup, **more.pop("engine", {}))
    ids, labels = batch()
    labels = labels.clamp(max=40)  # of the first rank's part alone
    head = engine.module.lm_head if head is None else head(engine.module.lm_head)
    return chunked_nll(engine(ids), head, labels, **more)


def other_group() -> Any:
    """As many ranks, but others."""
    return torch.distributed.new_group([torch.distributed.get_rank()])


def gathered() -> Any:
    from xentlib.torch import gather_head

    head = engine_of(Split()).module.lm_head
    with gather_head(head.weight) as (weight, _):
        return weight


def taught(*, student: bool = False, **more: Any) -> Any:
    """By a head that is split, of a whole one; or the other way round."""
    from xentlib.torch import TeacherHead, chunked_divergence

    heads = [torch.randn(V, H), engine_of(Split()).module.lm_head]
    hidden = torch.randn(B, L, H)
    whole, part = reversed(heads) if student else heads
    return chunked_divergence(hidden, whole, TeacherHead(hidden, part), **more)


def converted() -> Any:
    """An `NLLHead`, in whose place AutoTP puts its own layer."""
    from xentlib.torch import NLLHead

    model = Net()
    model.lm_head = NLLHead.from_linear(model.lm_head)
    engine = engine_of(Split(), model=model)
    ids, labels = batch()
    return engine.module.lm_head(engine(ids), labels)


def copied() -> Any:
    """A layer whose weight does not say any more that it is a part."""
    return called(head=copy.deepcopy)


def patched() -> Any:
    from helpers.patched import llama
    from xentlib.torch.integrations.transformers import patch

    return patch(engine_of(Split(), model=llama()).module)


ROW = {"kinds": {"lm_head": "row"}}
CALLS = {
    "split over the width": lambda: called(engine=ROW),
    "split over the width, its weight": lambda: called(engine=ROW, head=lambda x: x.weight),
    "a cast copy": lambda: called(head=lambda x: x.weight.double().float()),
    "transposed": lambda: called(head=lambda x: x.weight.T, weight_layout="HV"),
    "other ranks": lambda: called(vocab_parallel=other_group()),
    "hidden": lambda: called(gather="hidden"),
    "gather_head": gathered,
    "a teacher": taught,
    "a teacher of more classes": lambda: taught(vocab="intersect"),
    "a whole teacher": lambda: taught(student=True),
    "a copy of the layer": copied,
    "patch": patched,
    "NLLHead": converted,
}


def main(folder: str) -> None:
    start()
    setups = pickle.loads(Path(folder, "setups").read_bytes())
    found: dict[str, Any] = {}
    for name, setup in setups.items():
        if setup is None:
            found[name] = said_by(CALLS)
            continue
        found[name] = measured(setup)
        settle()
    Path(folder, f"rank{torch.distributed.get_rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
