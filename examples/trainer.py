"""`transformers.Trainer` with `patch`: one line, and no logits.

    torchrun --nproc-per-node 2 examples/trainer.py

Two CPU ranks train a small random Llama on rows of very uneven lengths, in windows of three
micro-batches and a last one of two. The patched model computes its loss without logits. What every
step has added to the parameters is compared with a step of one process on the mean over all
the window's tokens, and so is the loss that Trainer logs. Ten seconds on two cores; needs
`pip install 'xentlib[hf]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` leaves the model as it is.
"""

from __future__ import annotations

import argparse
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

from xentlib.torch.integrations.transformers import patch  # xentlib

WORLD, BATCH, ACCUMULATE, RATE = 2, 2, 3, 0.5
WINDOW = WORLD * BATCH * ACCUMULATE  # rows of a step; the last of several has 8


def small(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_attention_heads=4, **sizes))


def rows(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Tokens that go up by 3, and labels that are -100 after the first 4 or more of them."""
    generator = torch.Generator().manual_seed(0)
    number, place = options.steps * WINDOW - 4 * (options.steps > 1), torch.arange(options.length)
    ids = torch.randint(options.vocab, (number, 1), generator=generator) + 3 * place
    ids %= options.vocab
    # Few long rows and many short ones.
    lengths = 4 + (options.length - 4) * torch.rand(number, 1, generator=generator) ** 3
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
    alone = small(len(start["lm_head.weight"]))
    alone.load_state_dict(start)
    total = 0.0
    for batch in batches:
        stacked = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
        loss = alone(**stacked).loss / len(batches)
        loss.backward()
        total += loss.item()
    return torch.cat([-RATE * p.grad.flatten() for p in alone.parameters()]), total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=11)
    options = parser.parse_args()
    model = small(options.vocab)
    if not options.full_logits:
        patch(model)  # xentlib
    data, snapshots = rows(options), Snapshots()

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

    windows = [data[i : i + WINDOW] for i in range(0, len(data), WINDOW)]
    assert len(snapshots.taken) == len(windows) + 1
    lead = trainer.is_world_process_zero()
    if options.full_logits or options.skip_comparison:
        return
    if lead:
        print("each step of the patched model, and the mean of means, beside one process")
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
                f"relative distance {apart:.1e}, mean of means {naive:.1e}"
            )


if __name__ == "__main__":
    main()
