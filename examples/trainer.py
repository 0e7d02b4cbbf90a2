"""`transformers.Trainer` with `chunked_nll`: `compute_loss_func` and `num_items_in_batch`.

    torchrun --nproc-per-node 2 examples/trainer.py

Two CPU ranks train a small random Llama on rows of very uneven lengths, in windows of three
micro-batches and a last one of two. The model returns hidden states and never makes logits. What
every step has added to the parameters is compared with a step of one process on the mean over all
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

from xentlib.torch import chunked_nll, next_token_labels

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


# Trainer looks at the name: of a "...ForCausalLM" it counts the labels that are left after the
# shift, as `next_token_labels` leaves them. Of any other class it counts the first column too.
class HiddenLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids: Tensor) -> Tensor:
        """Hidden states. Rows are padded on the right, where a causal model needs no mask."""
        hidden: Tensor = self.model(input_ids, use_cache=False).last_hidden_state
        return hidden


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
    model = HiddenLlamaForCausalLM(CONFIG)
    data, snapshots = rows(), Snapshots()

    def loss_of(hidden: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        # The count is that of all micro-batches and ranks. Trainer itself multiplies the loss by
        # the number of ranks, over which DDP takes the mean.
        y, head = next_token_labels(labels), model.lm_head.weight
        loss: Tensor = chunked_nll(hidden, head, y, denominator=num_items_in_batch).loss
        return loss

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
        remove_unused_columns=False,  # labels are no argument of the model, and would be removed
        ddp_find_unused_parameters=False,  # the head is used outside of the forward
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=data, compute_loss_func=loss_of, callbacks=[snapshots]
    )
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
                f"chunked_nll {apart:.1e}   mean of means {naive:.1e}"
            )


if __name__ == "__main__":
    main()
