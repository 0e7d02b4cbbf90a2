"""TRL's trainers with their head replaced: real trainers, one step each."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="TRL is in the extra `trainers`")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402
from trl.trainer import utils  # noqa: E402

from helpers.patched import V, held, llama  # noqa: E402
from xentlib.torch import chunked_logprobs  # noqa: E402
from xentlib.torch.integrations import trl  # noqa: E402

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


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {f"w{k}": k for k in range(V)}
    made = Tokenizer(models.WordLevel(known, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2")


def sft(folder, **options):
    data = [
        {"input_ids": rows(k, 6 + k), "completion_mask": [0] * 3 + [1] * (3 + k)} for k in range(4)
    ]
    arguments = SFTConfig(str(folder), **COMMON, max_length=None, **options)
    model = llama()
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer()
    )
    return trainer, model


def dpo(folder, **options):
    data = [
        {"prompt": words(k, 4), "chosen": words(9 + k, 5), "rejected": words(19 + k, 3 + k)}
        for k in range(4)
    ]
    arguments = DPOConfig(str(folder), **COMMON, **options)
    model = llama()
    trainer = DPOTrainer(
        model,
        ref_model=llama(),
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    return trainer, model


def grpo(folder, **options):
    data = [{"prompt": words(k, 4)} for k in range(4)]
    sizes = {"num_generations": 2, "max_completion_length": 5, "temperature": 0.7}
    arguments = GRPOConfig(str(folder), **COMMON, **sizes, **options)
    model = llama()
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(sum(map(ord, x)) % 97) for x in completions],
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    return trainer, model


class Gradients(TrainerCallback):
    """Of the step, before the optimizer takes it."""

    def on_pre_optimizer_step(self, *args, model, **kwargs) -> None:
        self.found = {name: p.grad.clone() for name, p in model.named_parameters()}


def trained(make, folder, **options):
    trainer, _ = make(folder, **options)
    callback = Gradients()
    trainer.add_callback(callback)
    trainer.train()
    logged = trainer.state.log_history[0]
    numbers = {
        k: torch.tensor(x) for k, x in logged.items() if "time" not in k and "per_second" not in k
    }
    return callback.found, {k: x for k, x in numbers.items() if not k.startswith("total")}


CASES = {
    "SFT": (sft, {}),
    "SFT, padding-free": (sft, {"padding_free": True}),
    "SFT, dft": (sft, {"loss_type": "dft"}),
    "DPO": (dpo, {}),
    "GRPO": (grpo, {"beta": 0.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_trl(name, tmp_path, monkeypatch) -> None:
    """Of a float32 model, whose logits TRL rounds as little as we do."""
    make, options = CASES[name]
    want, logged = trained(make, tmp_path, **options)
    calls = []
    monkeypatch.setattr(
        trl, "chunked_logprobs", lambda *a, **k: calls.append(1) or chunked_logprobs(*a, **k)
    )
    theirs = utils._ChunkedLogProbFunction
    with trl.use():
        got, also = trained(make, tmp_path, **options)
    assert calls
    assert utils._ChunkedLogProbFunction is theirs
    assert any(x.abs().max() > 0 for x in want.values())
    held(got, want)
    assert also.keys() == logged.keys()
    for key, x in logged.items():  # rounded for the log
        assert abs(also[key] - x) <= 2**-10 * abs(x), key


@pytest.mark.parametrize("bias", [False, True])
def test_the_mean_logit(bias) -> None:
    x, w, y = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
    b = torch.randn(11) if bias else None
    call = (x, w, b, y, 0.5, 32, None, 3.0, ("log_probs", "mean_logits"))
    want = utils._ChunkedLogProbFunction.apply(*call)
    with trl.use():
        found = utils._ChunkedLogProbFunction.apply(*call)
    held({"mean": found[3]}, {"mean": want[3]})


@pytest.mark.parametrize(("softcap", "more"), [(3.0, "mean_logits"), (None, "log_sum_sq_probs")])
def test_numbers_that_only_trl_has_stay_trls(softcap, more) -> None:
    x, w, y = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
    call = (x, w, None, y, 1.0, 32, softcap, 1.0, ("log_probs", more))
    want = utils._ChunkedLogProbFunction.apply(*call)
    with trl.use():
        found = utils._ChunkedLogProbFunction.apply(*call)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, want, strict=True))
