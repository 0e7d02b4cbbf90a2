"""`xentlib doctor --model`: the head of a configuration, and what `patch` makes of its class."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from xentlib.tools.cli import main
from xentlib.tools.doctor.model import FAIL_IN_A_CALL, findings, read_config
from xentlib.tools.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1009,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "dtype": "float32",
}


def found_of(config, tokens=4096):
    return {one.name: one for one in findings(config, tokens)}


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_file_that_is_no_configuration(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="`--model` must be"):
        read_config(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--no-rows"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("xentlib: `--model` must be")
    assert said.out == ""


def test_weights_are_not_read(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"[1]")
    monkeypatch.setattr(Path, "read_text", None)
    with pytest.raises(UsageError, match="no JSON"):
        read_config(tmp_path / "model.safetensors")


def test_an_adapter_s_folder_and_one_without_the_file(tmp_path):
    with pytest.raises(UsageError, match=r"got '.*config\.json': No such file"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="an adapter's folder"):
        read_config(tmp_path)


@pytest.mark.parametrize("sizes", [{"vocab_size": 0}, {"vocab_size": -5}, {"hidden_size": 0}])
def test_sizes_that_no_head_has(monkeypatch, sizes):
    monkeypatch.setattr("xentlib.tools.doctor.model.there", lambda name: False)
    found = found_of({**LLAMA, **sizes})
    assert found["head"].status == "bad"
    assert "of 1 or more" in found["head"].said


@pytest.mark.torch
@pytest.mark.parametrize(
    ("left_out", "size"), [("vocab_size", "V = 32,000"), ("hidden_size", "H =")]
)
def test_a_size_that_the_class_fills_in_is_said(left_out, size):
    """The head of the file may be another one than the class's default."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = {k: x for k, x in LLAMA.items() if k != left_out}
    config |= {"head_dim": 8, "final_logit_softcapping": 30.0}
    head = found_of(config)["head"]
    assert head.status == "note"
    assert size in head.said
    assert f"the file names no `{left_out}`, so that is the default" in head.said
    assert head.said.endswith("; final_logit_softcapping=30.0")
    assert "Compare with" in head.cure
    assert "`softcap=`" in head.cure


@pytest.mark.torch
def test_sizes_under_the_names_of_the_class_are_there():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = {"architectures": "GPT2LMHeadModel", "model_type": "gpt2", "vocab_size": 50}
    head = found_of({**config, "n_embd": 8, "n_head": 2, "n_layer": 1})["head"]  # a name, no list
    assert head.status == "ok"
    assert "V = 50, H = 8" in head.said


def test_a_configuration_without_a_head(monkeypatch):
    monkeypatch.setattr("xentlib.tools.doctor.model.there", lambda name: False)
    found = found_of({"model_type": "resnet"})
    assert found["head"].status == "bad"


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 50, "n_embd": 8},
        {"vocab_size": 50, "d_model": 8},
        {"text_config": {"vocab_size": 50, "hidden_size": 8}, "hidden_size": 9},
    ],
)
def test_numbers_of_the_file_where_transformers_is_not_there(monkeypatch, config):
    monkeypatch.setattr("xentlib.tools.doctor.model.there", lambda name: False)
    found = found_of({**config, "final_logit_softcapping": 30.0, "logit_scale": 1.0})
    assert "V = 50, H = 8, tied or not is not said, bfloat16" in found["head"].said
    assert found["head"].said.endswith("; final_logit_softcapping=30.0")


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_a_class_is_built_and_patched(tied):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = found_of({**LLAMA, "tie_word_embeddings": tied})
    assert found["patch"].status == "ok"
    assert "takes LlamaForCausalLM" in found["patch"].said
    kept = "tied to the embedding" if tied else "not tied"
    assert found["head"].said.startswith(f"LlamaForCausalLM: V = 1,009, H = 32, {kept}, float32")


@pytest.mark.torch
def test_memory_is_that_of_the_plan():
    from xentlib.plan import plan_chunks
    from xentlib.plan.memory import peak_bytes

    config = {**LLAMA, "vocab_size": 128256, "hidden_size": 4096, "dtype": "bfloat16"}
    config["architectures"] = ["NobodyKnows"]
    budgets = {"cpu": None, "gpu": 2**30}
    for backend in ("torch", "jax"):
        said = found_of(config, tokens=8192)[f"chunked_nll in {backend}"].said
        for platform, budget in budgets.items():
            plan = plan_chunks(8192, 128256, 4096, dtype="bfloat16", max_chunk_bytes=budget)
            how = {"backend": backend, "dtype": "bfloat16", "platform": platform}
            need, less = (peak_bytes(plan, **how, recompute=x) / 2**30 for x in (False, True))
            where = {"cpu": "on the CPU", "gpu": "on a GPU"}[platform]
            chunks = f"{plan.num_chunks} chunks ({less:.2f} with recompute=True)"
            assert f"{need:.2f} GiB {where} in {chunks}" in said
            assert less < need / 2


@pytest.mark.torch
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["NobodyKnows"], "auto_map": {}}, "has no class NobodyKnows"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "get_output_embeddings"),
        ({"architectures": []}, "the configuration names no class in `architectures`"),
        # transformers 5.0 checks no types, and divides by it.
        ({"num_attention_heads": "many"}, "'num_attention_heads': TypeError: F|: TypeError: uns"),
        ({"num_attention_heads": 0}, "LlamaForCausalLM cannot be built"),
    ],
)
def test_a_class_that_is_refused_says_why(config, words):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = found_of({**LLAMA, **config})
    assert found["patch"].status == "bad"
    assert re.search(words, found["patch"].said)
    assert found["patch"].cure


@pytest.mark.torch
def test_code_of_the_model_s_own_is_not_run(tmp_path):
    """A folder that brings its class, as `trust_remote_code` would have it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('run')\n")
    own = {"architectures": ["Mine"], "model_type": "mine"}
    own["auto_map"] = {
        "AutoConfig": "modeling_mine.Mine",
        "AutoModelForCausalLM": "modeling_mine.M",
    }
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **own}))
    found = found_of(read_config(tmp_path))
    assert "code of the model's own is not run" in found["patch"].said
    assert "V = 1,009, H = 32" in found["head"].said


def test_classes_that_fail_in_a_call_are_those_of_the_page():
    """`patch` itself refuses the others (`test_transformers_classes.py`)."""
    data = ROOT / "docs" / "data" / "causal_lm.json"
    if not data.is_file():
        pytest.skip("the documentation is not beside the tests")
    causal = json.loads(data.read_text(encoding="utf-8"))["causal"]
    for name, why in FAIL_IN_A_CALL.items():
        assert causal[name]["refused"].startswith(why)
