"""`transformers.Trainer` on real ranks, under the wrappers that its arguments name: what its second
step changes in every parameter."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from helpers.accelerated import start_over
from helpers.patched import LENGTH, V, gpt2, llama
from xentlib.torch.integrations.transformers import patch

ROWS = 8  # of a step, on both ranks together
RATE = 1024.0  # of the second step: so large that parameters do not round their change away


class Case(NamedTuple):
    make: str
    wrapper: str
    accumulate: int
    patched: bool = True
    gather: str = "head"


class Found(NamedTuple):
    """Of a case: the wrapper's class, the parameters before the second step, what the step has
    taken from them, divided by its rate, and the loss that Trainer logs for it."""

    wrapper: str
    before: dict[str, Tensor]
    change: dict[str, Tensor]
    loss: float


MODELS: dict[str, Any] = {"Llama": llama, "GPT2": gpt2}
MODELS["even Llama"] = partial(llama, vocab_size=V + 1)  # as many rows on both ranks


def rows() -> list[dict[str, Tensor]]:
    """Of two steps: 1 to 11 labels that count, and one in the first column that does not."""
    ids = torch.randint(3, V, (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    found = []
    for k, x in enumerate(ids):
        labels = x.clone()
        labels[2 + (5 * k) % (LENGTH - 1) :] = -100
        found.append({"input_ids": x, "labels": labels})
    return found


def one_process(make: str, before: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the second step's rows as one batch, with all logits."""
    model = MODELS[make]()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    full = {key: torch.stack([row[key] for row in rows()[ROWS:]]) for key in rows()[0]}
    number = (full["labels"][:, 1:] != -100).sum()
    loss = model(**full, num_items_in_batch=number).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


def wrapping(wrapper: str) -> dict[str, Any]:
    """What `TrainingArguments` are told of it."""
    if wrapper == "DDP":
        return {"use_cpu": True}
    if wrapper == "FSDP2":
        return {"fsdp": True, "fsdp_config": {"version": 2}}
    zero = {"stage": int(wrapper.removeprefix("ZeRO-")), "stage3_param_persistence_threshold": 0}
    own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    auto = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto")
    return {"deepspeed": {"zero_optimization": zero, "gradient_clipping": 0.0, **own, **auto}}


def whole(model: Any) -> dict[str, Tensor]:
    """Its parameters, gathered where they are sharded."""
    found = {}
    for name, p in model.named_parameters():
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        else:
            full = p.full_tensor() if hasattr(p, "full_tensor") else p
            found[name] = full.detach().clone()
    return found


class Steps(TrainerCallback):
    """The parameters after each step."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.taken.append(whole(model))


class TwoSteps(Trainer):
    """One with a rate of 1, one with `RATE`."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        rates = (1 / RATE, 1.0, 1.0)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
        return self.lr_scheduler


def trained(case: Case) -> Found:
    start_over(cpu_alone=case.wrapper == "DDP")
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS // 2 // case.accumulate,
            gradient_accumulation_steps=case.accumulate,
            max_steps=2,
            optim="sgd",
            learning_rate=RATE,
            max_grad_norm=0,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **wrapping(case.wrapper),
        )
        model = MODELS[case.make]()
        if case.patched:
            patch(model, gather=case.gather)
        trainer = TwoSteps(model, arguments, train_dataset=rows(), callbacks=[steps])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    before, after = steps.taken
    change = {name: (x - after[name]) / RATE for name, x in before.items()}
    kind = type(trainer.model_wrapped).__name__
    return Found(kind, before, change, trainer.state.log_history[1]["loss"])


def on_rank(rank: int, world: int, cases: list[Case]) -> list[Found]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return [trained(case) for case in cases]
