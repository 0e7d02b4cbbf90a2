"""Steps through DeepSpeed ZeRO for the audit, which `torchrun` calls by name: real engines."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import helpers.preloaded  # noqa: F401  # no operator is compiled
from xentlib.torch import chunked_nll


class Model(torch.nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Any, labels: Any, denominator: Any) -> Any:
        return chunked_nll(hidden, self.head, labels, denominator=denominator).loss


def zero(stage: int, factor: float = 1.0) -> Any:
    def step(head: Any, micro_batches: Any) -> Any:
        number, world = len(micro_batches), dist.get_world_size()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": number,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        parameters = [*head.parameters()]
        engine = deepspeed.initialize(
            model=Model(head), config=config, model_parameters=parameters
        )[0]
        count = sum((b["targets"] != -100).sum() for b in micro_batches)
        dist.all_reduce(count)
        loss = torch.zeros(())
        for k, b in enumerate(micro_batches):
            # DeepSpeed divides by the ranks and by the micro-batches.
            part = engine(b["hidden"], b["targets"], factor * count / (world * number))
            engine.backward(part)
            loss += part.detach() / (world * number)
            if k + 1 < number:
                engine.step()
        dist.all_reduce(loss)
        return loss, {"weight": safe_get_full_grad(head.weight).clone()}

    return step


stage_1, stage_2, stage_3 = map(zero, (1, 2, 3))
twice_over_ranks = zero(3, 0.5)
