"""TRL's trainers with their head replaced: real trainers, one step each."""

from __future__ import annotations

import warnings
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="TRL is in the extra `trainers`")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from datasets import Dataset  # noqa: E402
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer import utils  # noqa: E402

from helpers.patched import held, llama  # noqa: E402
from helpers.trl_runs import CHAT, COMMON, rows, tokenizer, trained, turns, words  # noqa: E402
from xentlib.tools.crosscheck import CrossCheckError  # noqa: E402
from xentlib.torch import chunked_logprobs  # noqa: E402
from xentlib.torch.integrations import trl  # noqa: E402
from xentlib.torch.integrations.trainer import CrossCheckCallback  # noqa: E402
from xentlib.torch.integrations.transformers import patch  # noqa: E402


def sft(folder, *, chat=False, patched=False, **options):
    data = [
        {"input_ids": rows(k, 6 + k), "completion_mask": [0] * 3 + [1] * (3 + k)} for k in range(4)
    ]
    if chat:
        data = [{"messages": turns(k)} for k in range(4)]
    known = tokenizer()
    known.chat_template = CHAT
    told = {"max_length": None, "completion_only_loss": not chat}  # else the mask is not read
    arguments = SFTConfig(str(folder), **{**COMMON, **told, **options})
    model = patch(llama()) if patched else llama()
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(data), processing_class=known
    )
    return trainer, model


def kto(folder, **options):
    data = [
        {"prompt": words(k, 4), "completion": words(9 + k, 3 + k), "label": k % 2 == 0}
        for k in range(4)
    ]
    trainer = KTOTrainer(
        model := llama(),
        ref_model=llama(),
        args=KTOConfig(str(folder), **COMMON, **options),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
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


def online(kind, config, folder, **options):
    data = [{"prompt": words(k, 4)} for k in range(4)]
    sizes = {"num_generations": 2, "max_completion_length": 5, "temperature": 0.7}
    trainer = kind(
        model := llama(),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, x)) % 97) for x in completions],
        args=config(str(folder), **COMMON, **sizes, **options),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    return trainer, model


grpo = partial(online, GRPOTrainer, GRPOConfig)
rloo = partial(online, RLOOTrainer, RLOOConfig)


CASES = {
    "SFT": (sft, {}),
    "SFT, padding-free": (sft, {"padding_free": True}),
    "SFT, dft": (sft, {"loss_type": "dft"}),
    "SFT, packed": (sft, {"packing": True, "max_length": 16}),
    "SFT, wrapped": (sft, {"packing": True, "packing_strategy": "wrapped", "max_length": 7}),
    "SFT, assistant": (sft, {"chat": True, "assistant_only_loss": True}),
    "SFT, whole rows": (sft, {"completion_only_loss": False}),
    "DPO": (dpo, {}),
    "KTO": (kto, {}),
    "GRPO": (grpo, {"beta": 0.0}),
    "RLOO": (rloo, {"beta": 0.0}),
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


def test_a_block_that_replaces_nothing_warns(tmp_path) -> None:
    """As a bare statement, and around the constructor alone: the run was TRL's, without a word."""
    with pytest.warns(UserWarning, match="around `trainer.train.*; got one without `with`"):
        trl.use()
    unused = "got a block that ended without a call of TRL's head"
    with pytest.warns(UserWarning, match=unused), trl.use():
        sft(tmp_path)
    with pytest.warns(UserWarning, match=unused):
        trl.use()(sft)(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), trl.use():  # what ends a block early says so
            raise KeyError


def test_a_patched_model_is_warned_of(tmp_path, monkeypatch) -> None:
    """TRL calls its own head past the patch: that of the block, or TRL's."""
    want, _ = trained(sft, tmp_path)
    with pytest.warns(UserWarning, match="is patched, and trl has put a forward of its own"):
        got, _ = trained(sft, tmp_path, patched=True)
    assert all(torch.equal(got[name], x) for name, x in want.items())
    calls = []
    monkeypatch.setattr(
        trl, "chunked_logprobs", lambda *a, **k: calls.append(1) or chunked_logprobs(*a, **k)
    )
    with trl.use():
        got, _ = trained(sft, tmp_path, patched=True)
    assert calls
    held(got, want)


@pytest.mark.parametrize("patched", [False, True])
def test_a_cross_check_of_trl_s_head_is_refused(tmp_path, patched) -> None:
    """It calls `chunked_logprobs`, in a patched model too."""
    trainer, _ = sft(tmp_path, patched=patched)
    trainer.add_callback(CrossCheckCallback(1))
    refused = "got none in step 0.*`chunked_logprobs`, which TRL's trainers call, is not looked at"
    with trl.use(), pytest.raises(CrossCheckError, match=refused):
        trainer.train()


def test_what_trl_says_of_liger(tmp_path) -> None:
    """Its loss is refused by TRL; its layers need its package, and leave the head alone."""
    with pytest.raises(ValueError, match="which this trainer patches with a fused LM head"):
        sft(
            tmp_path,
            use_liger_kernel=True,
            liger_kernel_config={"fused_linear_cross_entropy": True},
        )


@pytest.mark.parametrize("bias", [False, True])
def test_the_mean_logit(bias) -> None:
    x, w, y = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
    b = torch.randn(11) if bias else None
    call = (x, w, b, y, 0.5, 32, None, 3.0, ("log_probs", "mean_logits"))
    want = utils._ChunkedLogProbFunction.apply(*call)
    with trl.use():
        found = utils._ChunkedLogProbFunction.apply(*call)
    held({"mean": found[3]}, {"mean": want[3]})
    with trl.use(), torch.autocast("cpu", torch.bfloat16):  # `bf16=True`, TRL's default
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
