"""`CrossCheckCallback` in the `Trainer` of transformers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from helpers.corrupted import WRONG_AT, wrong_torch  # noqa: E402
from helpers.patched import ROWS, batch, llama  # noqa: E402
from xentlib.tools.crosscheck import CrossCheckError, CrossCheckWarning  # noqa: E402
from xentlib.torch.integrations.trainer import CrossCheckCallback  # noqa: E402
from xentlib.torch.integrations.transformers import patch  # noqa: E402


def train(model: Any, path: Any, callbacks: list[Any], steps: int, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=steps,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=5,
        **options,
    )
    rows = [{key: x[k] for key, x in batch().items()} for k in range(ROWS)]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer


class Corrupt(TrainerCallback):
    def __init__(self, monkeypatch: Any) -> None:
        self.monkeypatch = monkeypatch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WRONG_AT:
            wrong_torch(self.monkeypatch)


def test_a_step_of_trainer_that_is_made_wrong_is_caught(tmp_path, monkeypatch) -> None:
    checked = CrossCheckCallback(10)
    with pytest.warns(CrossCheckWarning, match="step 30 with the float64 oracle.*A6 torch d weigh"):
        trainer = train(patch(llama()), tmp_path, [checked, Corrupt(monkeypatch)], WRONG_AT + 1)
    assert [x.step for x in checked.check.results] == [0, 10, 20, 30]
    assert [x.passed for x in checked.check.results] == [True, True, True, False]
    logged = [x for x in trainer.state.log_history if "crosscheck/d weight tau" in x]
    assert [x["step"] for x in logged][:3] == [5, 15, 25]


def test_every_micro_batch_is_checked_and_bits_stay(tmp_path) -> None:
    models = [patch(llama()), patch(llama())]
    checked = CrossCheckCallback(2, exceeded="raise")
    for model, callbacks in zip(models, ([], [checked]), strict=True):
        train(model, tmp_path, callbacks, 3, gradient_accumulation_steps=2, bf16=True)
    assert [(x.step, x.calls) for x in checked.check.results] == [(0, 2), (2, 2)]
    for got, want in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(got, want)


def test_a_run_that_ended_in_a_checked_step_is_forgotten(tmp_path) -> None:
    """Nobody tells a callback of an exception; the next run must not feed its check."""

    class Broken(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("on purpose")

    first, second = CrossCheckCallback(1), CrossCheckCallback(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(patch(llama()), tmp_path, [first, Broken()], 1, gradient_accumulation_steps=2)
    assert len(first.check.taken) == 1
    train(patch(llama()), tmp_path, [second], 1)
    assert first.check.taken == []
    assert [x.calls for x in second.check.results] == [1]


def test_two_callbacks_in_one_trainer(tmp_path) -> None:
    checked = [CrossCheckCallback(1), CrossCheckCallback(2, tokens=5)]
    train(patch(llama()), tmp_path, checked, 2)
    assert [[x.step for x in c.check.results] for c in checked] == [[0, 1], [0]]


def test_a_model_that_is_not_patched_is_loud(tmp_path) -> None:
    with pytest.raises(CrossCheckError, match="got none in step 0"):
        train(llama(), tmp_path, [CrossCheckCallback(10)], 2)
