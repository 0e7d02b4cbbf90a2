"""A patched model in `Trainer`: the gradient of a step is that of one batch with all its tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from helpers.patched import LENGTH, ROWS, V, batch, gpt2, held, llama, step  # noqa: E402
from xentlib.torch.integrations.transformers import LazyLogits, patch  # noqa: E402


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, *args, model, **kwargs) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters()}


def counted(trainer: Trainer) -> torch.Tensor:
    """Labels of the batch, as it counts those of a model of its own: transformers 5.0 counts the
    first column's too, whatever the model (huggingface/transformers#46204)."""
    labels = batch()["labels"]
    shifted = labels[:, 1:] if hasattr(trainer, "_loss_shifts_labels") else labels
    return (shifted != -100).sum()


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_step_of_trainer(make, accumulate, tmp_path) -> None:
    """Rows of 2 to 11 tokens, whose first column has a label. Catches: means of means, and a number
    of tokens that counts the first column."""
    rows = [{key: x[k] for key, x in batch().items()} for k in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=ROWS // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
        optim="sgd",
        max_grad_norm=0,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    callback = Gradients()
    trainer = Trainer(patch(make()), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    want = step(make(), num_items_in_batch=counted(trainer))
    del want["loss"]
    held(callback.found, want)


def test_a_model_that_trainer_builds(tmp_path) -> None:
    """From a function, which patches it."""
    rows = [{key: x[k] for key, x in batch().items()} for k in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        max_steps=1,
        max_grad_norm=0,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    callback = Gradients()
    how = {"train_dataset": rows, "callbacks": [callback], "model_init": lambda: patch(llama())}
    trainer = Trainer(args=arguments, **how)
    trainer.train()
    assert isinstance(trainer.model(**batch()).logits, LazyLogits)
    want = step(llama(), num_items_in_batch=counted(trainer))
    del want["loss"]
    held(callback.found, want)


def evaluated(model, folder, metrics):
    rows = [{key: x[k] for key, x in batch().items()} for k in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, eval_dataset=rows, compute_metrics=metrics)
    return trainer.evaluate()


def test_evaluation_of_trainer(tmp_path) -> None:
    """The loss alone, metrics of what is made of the logits, and the sentence without it."""

    def accuracy(found):
        right = found.predictions[:, :-1] == found.label_ids[:, 1:]
        return {"accuracy": float(right[found.label_ids[:, 1:] != -100].mean())}

    want = evaluated(llama(), tmp_path, lambda found: {"shape": found.predictions.shape})
    assert want["eval_shape"] == (ROWS, LENGTH, V)
    alone = evaluated(patch(llama()), tmp_path, None)
    predicted = patch(llama(), in_place_of_logits=lambda logits: logits.argmax(-1))
    found = evaluated(predicted, tmp_path, accuracy)
    assert 0 <= found["eval_accuracy"] <= 1
    for got in (alone, found):
        held({"loss": torch.tensor(got["eval_loss"])}, {"loss": torch.tensor(want["eval_loss"])})
    with pytest.raises(TypeError, match=r"LazyLogits'>, .*pass `in_place_of_logits` to `patch`"):
        evaluated(patch(llama()), tmp_path, accuracy)
