"""`transformers.Trainer` with `patch`: one line, and no logits.

    torchrun --nproc-per-node 2 examples/trainer.py

Two CPU ranks train a small random Llama on rows of very uneven lengths, in windows of three
micro-batches and a last one of two. The patched model computes its loss without logits. What every
step has added to the parameters is compared with a step of one process on the mean over all
the window's tokens, and so is the loss that Trainer logs. Ten seconds on two cores; needs
`pip install 'xentlib[hf]'`.
"""

from __future__ import annotations

import itertools
import tempfile

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from xentlib.torch.integrations.transformers import patch

VOCAB, LENGTH, ROWS, RATE = 256, 64, 128, 0.5
WORLD, BATCH, ACCUMULATE = 2, 2, 3
WINDOW = WORLD * BATCH * ACCUMULATE  # rows: ten windows of 12 and a last one of 8
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def rows() -> list[dict[str, Tensor]]:
    """Tokens that go up by 3, and labels that are -100 after the first 4 to LENGTH of them."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(LENGTH)
    ids = (torch.randint(VOCAB, (ROWS, 1), generator=generator) + 3 * place) % VOCAB
    # Few long rows and many short ones.
    lengths = 4 + (LENGTH - 4) * torch.rand(ROWS, 1, generator=generator) ** 3
    labels = torch.where(place < lengths, ids, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]


class Snapshots(TrainerCallback):
    """The parameters before the first step and after each."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []

    def on_train_begin(self, *args, model: torch.nn.Module, **kwargs) -> None:
        self.taken.append({k: p.detach().clone() for k, p in model.state_dict().items()})

    on_step_end = on_train_begin


def change(
    start: dict[str, Tensor], batches: list[list[dict[str, Tensor]]]
) -> tuple[Tensor, float]:
    """A step of one process on the mean of the batches' means, with the logits and the loss of
    transformers: what it adds to the parameters, and the loss."""
    alone = LlamaForCausalLM(CONFIG)
    alone.load_state_dict(start)
    total = 0.0
    for batch in batches:
        stacked = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
        loss = alone(**stacked).loss / len(batches)
        loss.backward()
        total += loss.item()
    return torch.cat([-RATE * p.grad.flatten() for p in alone.parameters()]), total


def main() -> None:
    torch.manual_seed(0)
    model = patch(LlamaForCausalLM(CONFIG))  # the line to add
    data, snapshots = rows(), Snapshots()

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        train_sampling_strategy="sequential",  # so that we know a window's rows
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[snapshots])
    trainer.remove_callback(PrinterCallback)
    assert arguments.world_size == WORLD, "run it under torchrun, on two ranks"
    trainer.train()

    windows = [data[i : i + WINDOW] for i in range(0, ROWS, WINDOW)]
    assert len(snapshots.taken) == len(windows) + 1
    lead = trainer.is_world_process_zero()
    if lead:
        print("each step's relative distance to that of one process")
    steps = zip(windows, itertools.pairwise(snapshots.taken), trainer.state.log_history)
    for step, (window, (before, after), logged) in enumerate(steps, 1):
        want, loss = change(before, [window])
        means, _ = change(before, [window[i : i + BATCH] for i in range(0, len(window), BATCH)])
        got = torch.cat([(after[name] - before[name]).flatten() for name in before])
        apart, naive = (float((x - want).norm() / want.norm()) for x in (got, means))
        assert apart < 1e-5, f"step {step}: relative distance {apart:.1e} to one process"
        assert abs(logged["loss"] - loss) < 1e-5 * loss
        if lead and (step % 3 == 1 or len(window) < WINDOW):
            tokens = sum(int((row["labels"][1:] != -100).sum()) for row in window)
            print(
                f"step {step:2}   {tokens:3} tokens in {len(window):2} rows   loss {loss:.3f}   "
                f"patched {apart:.1e}   mean of means {naive:.1e}"
            )


if __name__ == "__main__":
    main()
