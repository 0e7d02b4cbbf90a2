"""A tiny step of a trainer of TRL: options, data and what its optimizer was given."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from helpers.patched import V

COMMON = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "max_steps": 1,
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
}


def rows(seed: int, length: int) -> list[int]:
    return torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def words(seed: int, length: int) -> str:
    return "".join(f" w{k}" for k in rows(seed, length))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {f"w{k}": k for k in range(V)}
    made = Tokenizer(models.WordLevel(known, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2")


CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} w3 {% generation %}"
    "{{ m['content'] | trim }} w2{% endgeneration %}{% else %} w4{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)


def turns(seed: int) -> list[dict[str, str]]:
    said = {"user": words(seed, 4), "assistant": words(9 + seed, 3 + seed)}
    return [{"role": role, "content": text} for role, text in said.items()]


class Gradients(TrainerCallback):
    """Of the step, before the optimizer takes it."""

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters()}


def trained(make: Any, folder: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of a step by name, and the numbers that it logs."""
    trainer, _ = make(folder, **options)
    callback = Gradients()
    trainer.add_callback(callback)
    trainer.train()
    logged = trainer.state.log_history[0]
    numbers = {
        k: torch.tensor(x) for k, x in logged.items() if "time" not in k and "per_second" not in k
    }
    return callback.found, {k: x for k, x in numbers.items() if not k.startswith("total")}
