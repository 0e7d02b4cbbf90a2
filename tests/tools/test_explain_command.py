"""`xentlib explain FILE`: what it reads, prints and returns; and what it says to a hurried user."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helpers.pages import groups
from xentlib.tools.cli import main
from xentlib.tools.explain import CAUSES, explain
from xentlib.tools.explain.file import NAMES, read

N, V, H, K = 40, 61, 12, 7


def arrays():
    """A sampler without the temperature, in NumPy's float32."""
    draw = np.random.default_rng(0)
    hidden = draw.standard_normal((N, H)).astype(np.float32)
    weight = draw.standard_normal((V, H)).astype(np.float32)
    return {"hidden": hidden, "weight": weight} | sampled(hidden, weight)


def sampled(hidden, weight, temperature=1.0):
    logits = hidden.astype(np.float32) @ weight.astype(np.float32).T / np.float32(temperature)
    ids = np.random.default_rng(1).integers(V, size=N)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return {"ids": ids, "sampler_logprobs": logprobs[np.arange(N), ids]}


def joined(text):
    return " ".join(text.split())


@pytest.fixture
def command(tmp_path, capsys):
    """The command on a file with these arrays."""

    def run(given, *more, name="sampled.npz"):
        path = tmp_path / name
        if name == "sampled.npz":
            np.savez(path, **given)
        status = main(["explain", str(path), *more])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_exit_status_text_and_json(command, tmp_path):
    out = tmp_path / "report.json"
    status, said, _ = command(arrays(), "--temperature", "0.7", "--out", str(out))
    assert status == 1
    assert "One cause explains it, up to rounding: temperature not applied" in joined(said)
    assert "what to do: docs/ratios.md#temperature-not-applied" in said
    document = json.loads(out.read_text())
    assert document["schema"] == "xentlib.explain/1"
    assert document["sides"][0]["causes"][0][0]["name"] == "temperature not applied"
    assert json.loads(explain(**arrays(), temperature=0.7).to_json()) == document
    status, said, _ = command(arrays(), "--out", str(out))
    assert status == 0
    assert "There is nothing to explain." in said
    assert json.loads(out.read_text())["passed"] is True


def test_options_are_in_the_file_or_on_the_line(command):
    """A flag goes before what the file has."""
    given = arrays() | {"temperature": 0.7, "softcap": np.float32(50)}
    assert command(given)[0] == 1
    assert "softcap not applied" in command(given)[1]
    assert command(given, "--temperature", "1", "--softcap", "1e9")[0] == 0
    status, said, _ = command(given, "--max-tokens", "32")
    assert (status, said[:12]) == (1, "32 of 40 tok")
    flags = ("--top-k", "5"), ("--top-p", "0.5"), ("--logit-scale", "2"), ("--vocab-size", str(V))
    assert [command(arrays(), *flag)[0] for flag in flags] == [1, 1, 1, 0]


def test_bfloat16_and_every_name_in_both_formats(tmp_path):
    """Written by the package where it is there, and by hand, without the package."""
    low = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays().items() if x.dtype == "f4"}
    given = arrays() | low
    given |= {"bias": np.zeros(V, np.float16), "kept_ids": np.full((N, K), -1, np.int32)}
    given |= {"old_weight": low["weight"], "trainer_logprobs": arrays()["sampler_logprobs"]}
    given |= {"temperature": np.array([0.5]), "logit_scale": np.array(2.0), "softcap": np.array(9)}
    given |= {"top_p": np.array(0.9), "top_k": np.array(5), "vocab_size": np.array([V])}
    assert set(given) == set(NAMES)
    np.savez(tmp_path / "x.npz", **given)
    header, items = {"__metadata__": {"format": "np"}}, b""
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
    names |= {"int32": "I32", "int64": "I64"}
    for name, x in given.items():
        offsets = [len(items), len(items) + x.nbytes]
        header[name] = {"dtype": names[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        items += x.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + items)
    for path in (tmp_path / "x.npz", tmp_path / "x.safetensors"):
        back = read(path)
        assert set(back) == set(given)
        for name, x in given.items():
            assert back[name].dtype == x.dtype, name
            assert back[name].tobytes() == x.tobytes(), name
        assert back["temperature"].shape == ()
        assert explain(**back).of_tokens == N


@pytest.mark.torch
def test_a_file_of_the_safetensors_package(tmp_path):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {name: torch.from_numpy(x) for name, x in arrays().items()}
    tensors |= {name: tensors[name].bfloat16() for name in ("hidden", "weight")}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"made": "by a trainer"})
    back = read(tmp_path / "x.safetensors")
    assert back["weight"].dtype == ml_dtypes.bfloat16
    assert explain(**back) == explain(**tensors)


def test_the_page_shows_what_the_command_prints_and_has_each_cause(command, tmp_path):
    """Digits of what float32 rounding leaves apart, which are a processor's own."""
    pytest.importorskip("torch")
    page = Path(__file__).resolve().parents[2] / "docs" / "ratios.md"
    if not page.is_file():
        pytest.skip("the documentation is not beside the tests")
    text = page.read_text(encoding="utf-8")
    names = {}
    for block in next(groups("ratios.md", text)).blocks[:2]:
        exec(block.code, names)
    (tmp_path / "step.npz").write_bytes(names["file"].getvalue())
    shown = re.search(r"explain step.npz ([^\n]*)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    status, out, _ = command({}, *shown[1].split(), name="step.npz")
    assert status == 1
    tiny = r" +\d(\.\d)?e-0[5-9]"
    assert re.sub(tiny, "", out) == re.sub(tiny, "", shown[2])
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(cause.name for cause in CAUSES)


# --- what a hurried user does ---------------------------------------------------------------------


def changed(name, change):
    return lambda x: x | {name: change(x[name])}


REFUSED = {
    "one hidden state": (changed("hidden", lambda x: x[0]), "`hidden` must have shape [N, H] or"),
    "no tokens": (
        lambda x: x | {k: x[k][:0] for k in ("hidden", "ids", "sampler_logprobs")},
        "`hidden` must have at least one token; got shape (0, 12)",
    ),
    "logits": (
        changed("hidden", lambda x: np.zeros((N, V), "f4")),
        "`weight` must have shape [V, 61] to match `hidden` (40, 61); got (61, 12). Pass `weig",
    ),
    "head turned": (
        changed("weight", lambda x: x.T),
        "`weight` must have shape [V, 12] to match `hidden` (40, 12); got (12, 61). Pass `weig",
    ),
    "another model's head": (
        changed("weight", lambda x: x[:, :7]),
        "got (61, 7). Pass the head of",
    ),
    "fewer ids": (
        changed("ids", lambda x: x[:7]),
        "`ids` must have shape (40,), one entry for each",
    ),
    "ids of the next token": (
        changed("ids", lambda x: x[1:]),
        "got (39,). A hidden state goes with the id after it: `hidden[:-1]` with `ids[1:]`.",
    ),
    "log-probabilities of all classes": (
        changed("sampler_logprobs", lambda x: np.zeros((N, V), "f4")),
        "`sampler_logprobs` must have shape (40,), one entry for each token of `hidden`; got (40,",
    ),
    "padding": (
        changed("ids", lambda x: np.where(np.arange(N) == 3, -100, x)),
        "`ids` must lie in [0, 61); got -100 at token 3. Leave out padding",
    ),
    "ids of another tokenizer": (
        changed("ids", lambda x: np.where(np.arange(N) == 5, V, x)),
        "`ids` must lie in [0, 61); got 61 at token 5",
    ),
    "an id of the padding": (
        lambda x: x | {"vocab_size": 20},
        "`ids` must lie in [0, 20); got ",
    ),
    "ids as floats": (
        changed("ids", lambda x: x.astype("f4")),
        "`ids` must be integers, token ids; got float32. Pass `ids` as int64.",
    ),
    "hidden states as integers": (
        changed("hidden", lambda x: x.astype("i4")),
        "`hidden` must be floating point",
    ),
    "NaN": (
        changed("sampler_logprobs", lambda x: np.where(np.arange(N) == 2, np.nan, x)),
        "`sampler_logprobs` must be finite; got nan at token 2. Leave out tokens",
    ),
    "a token that is not kept": (
        changed("sampler_logprobs", lambda x: np.where(np.arange(N) == 2, -np.inf, x)),
        "`sampler_logprobs` must be finite; got -inf at token 2. Leave out tokens",
    ),
    "a broken head": (
        changed("weight", lambda x: np.where(x > 2, np.inf, x)),
        "`weight` must be finite; got inf",
    ),
    "probabilities": (
        changed("sampler_logprobs", np.exp),
        "and nothing below 0: these are probabilities. Pass their logarithms.",
    ),
    "negated": (
        changed("sampler_logprobs", np.negative),
        "`sampler_logprobs` must be log-probabilities, 0 or less; got ",
    ),
    "trainer's negated": (
        lambda x: x | {"trainer_logprobs": -x["sampler_logprobs"]},
        "`trainer_logprobs` must be log-probabilities, 0 or less; got ",
    ),
    "greedy": (
        lambda x: x | {"temperature": 0.0},
        "`temperature` must be a positive number; got 0, greedy sampling. Pass the temperature",
    ),
    "a temperature below 0": (
        lambda x: x | {"temperature": -1.0},
        "`temperature` must be a positive number; got -1.0",
    ),
    "a top-p in percent": (
        lambda x: x | {"top_p": 95},
        "`top_p` must be a number in (0, 1]; got 95",
    ),
    "a top-k of none": (lambda x: x | {"top_k": 0}, "`top_k` must be an integer, 1 or more; got 0"),
    "a vocabulary beyond the head": (
        lambda x: x | {"vocab_size": V + 1},
        "`vocab_size` must be an integer, 1 to 61; got 62",
    ),
    "another bias": (
        lambda x: x | {"bias": np.zeros(H, "f4")},
        "`bias` must have shape (61,), an entry for each row of `weight`; got (12,)",
    ),
    "another old head": (
        lambda x: x | {"old_weight": np.zeros((V + 1, H), "f4")},
        "`old_weight` must have the shape of `weight`, (61, 12); got (62, 12)",
    ),
    "one set of kept ids": (
        lambda x: x | {"kept_ids": np.arange(K)},
        "`kept_ids` must have shape (40,) and one dimension more",
    ),
    "kept ids padded with 100": (
        lambda x: x | {"kept_ids": np.stack([x["ids"], np.full(N, 100)], 1)},
        "`kept_ids` must lie in [0, 61), or be -1 where a row has fewer; got 100 at token 0",
    ),
    "kept ids padded with -100": (
        lambda x: x | {"kept_ids": np.stack([x["ids"], np.full(N, -100)], 1)},
        "`kept_ids` must lie in [0, 61), or be -1 where a row has fewer; got -100 at token 0",
    ),
    "kept ids of other tokens": (
        lambda x: x | {"kept_ids": (x["ids"][:, None] + 1) % V},
        "`kept_ids` must have each sampled id; got a row without ",
    ),
    "kept ids as floats": (
        lambda x: x | {"kept_ids": x["ids"][:, None] * 1.0},
        "`kept_ids` must be integers, token ids; got float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_one_sentence(command, name):
    """D12. From the function as from the command."""
    change, message = REFUSED[name]
    given = change(arrays())
    status, out, err = command(given)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    with pytest.raises((TypeError, ValueError)) as refused:
        explain(**given)
    assert err == f"xentlib: {refused.value}\n"


DAMAGED = {
    "bad.safetensors": b"\x01" * 40,
    "cut.safetensors": b"\x01",
    "list.safetensors": b"\x02" + b"\0" * 7 + b"[]",
    "header.safetensors": b"\x0c" + b"\0" * 7 + b'{"hidden":1}',
    "renamed.npz": b"PK",
    "empty.npz": b"",
}


def test_a_module_in_place_of_its_weight():
    with pytest.raises(TypeError, match="`weight` must be an array; got object"):
        explain(**arrays() | {"weight": object()})


def test_a_wrong_file_is_one_sentence(command, tmp_path):
    def refused(*arguments, **more):
        status, out, err = command(*arguments, **more)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    lacking = {name: x for name, x in arrays().items() if name != "ids"}
    names = "hidden, weight, ids, sampler_logprobs"
    err = refused(lacking)
    assert (
        f"must have the arrays {names}; it lacks ids, and has hidden, weight, sampler_logp" in err
    )
    err = refused(arrays() | {"token_ids": np.zeros(N)})
    assert "must have no arrays but hidden, weight, ids, " in err
    assert "it has token_ids too" in err
    assert "must be a file that can be read" in refused({}, name="none.safetensors")
    assert "must end with .npz or .safetensors" in refused({}, name="sampled.pt")
    for name, content in DAMAGED.items():
        (tmp_path / name).write_bytes(content)
        kind = name.partition(".")[2]
        assert f"must be a .{kind} file; it could not be read" in refused({}, name=name)
    where = str(tmp_path / "none" / "report.json")
    assert "`--out` must be a file that can be written" in refused(arrays(), "--out", where)
    objects = np.array([None])
    assert "must be a .npz file; it could not be read" in refused(arrays() | {"bias": objects})
