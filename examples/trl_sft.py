"""TRL's `SFTTrainer` with `chunked_logprobs` in place of its own head: `trl.use()`.

    torchrun --nproc-per-node 2 examples/trl_sft.py

Two CPU ranks train a small random Llama on completions of very uneven lengths, in steps of three
micro-batches. What the first step of SGD has added to the parameters is compared with a step of
one process that has all logits of the whole batch. Fifteen seconds on two cores; needs
`pip install 'xentlib[trainers]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` leaves the loss to TRL's own head, which works in chunks too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
import warnings

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

from xentlib.torch.integrations.trl import use  # xentlib

WORLD, BATCH, ACCUMULATE, RATE = 2, 2, 3, 0.5
WINDOW = WORLD * BATCH * ACCUMULATE  # rows of a step


def small(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_attention_heads=4, **sizes))


def rows(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Tokens that go up by 3; completions of all but the first 3 of 5 to `length` of them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(options.steps * WINDOW):
        start = int(torch.randint(options.vocab, (), generator=generator))
        share = float(torch.rand((), generator=generator)) ** 3
        length = 5 + int((options.length - 5) * share)
        ids = [(start + 3 * k) % options.vocab for k in range(length)]
        found.append({"input_ids": ids, "completion_mask": [0] * 3 + [1] * (length - 3)})
    return found


class Snapshots(TrainerCallback):
    """The parameters before the first step and after each."""

    def __init__(self) -> None:
        self.taken: list[Tensor] = []

    def on_train_begin(self, *args, model: torch.nn.Module, **kwargs) -> None:
        self.taken.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    on_step_end = on_train_begin


def change(vocab: int, batches: list[list[dict[str, list[int]]]]) -> Tensor:
    """A step of one process on the mean of the batches' means, with all logits."""
    alone = small(vocab)
    for batch in batches:
        longest = max(len(row["input_ids"]) for row in batch)
        ids, labels = torch.zeros(2, len(batch), longest, dtype=torch.long)
        labels -= 100
        for x, y, row in zip(ids, labels, batch):
            tokens = torch.tensor(row["input_ids"])
            x[: len(tokens)] = tokens
            y[3 : len(tokens)] = tokens[3:]
        (alone(ids, labels=labels).loss / len(batches)).backward()
    return torch.cat([-RATE * p.grad.flatten() for p in alone.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    known = Tokenizer(models.WordLevel({str(k): k for k in range(options.vocab)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, pad_token="0", eos_token="1")
    arguments = SFTConfig(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        completion_only_loss=True,  # else TRL does not read the mask of these rows
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        train_sampling_strategy="sequential",  # so that we know a step's rows
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    assert arguments.world_size == WORLD, "run it under torchrun, on two ranks"
    data, snapshots = rows(options), Snapshots()
    trainer = SFTTrainer(
        small(options.vocab),
        arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=[snapshots],
    )
    trainer.remove_callback(PrinterCallback)
    with contextlib.nullcontext() if options.full_logits else use():  # xentlib
        trainer.train()

    if trainer.is_world_process_zero() and not (options.full_logits or options.skip_comparison):
        first = data[:WINDOW]
        means = change(options.vocab, [first[i : i + BATCH] for i in range(0, WINDOW, BATCH)])
        want, got = change(options.vocab, [first]), snapshots.taken[1] - snapshots.taken[0]
        apart, naive = (float((x - want).norm() / want.norm()) for x in (got, means))
        assert apart < 1e-5, f"relative distance {apart:.1e} to one process"
        print(f"relative distance to one process {apart:.1e}, mean of means {naive:.1e}")


if __name__ == "__main__":
    main()
