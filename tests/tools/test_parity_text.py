"""What the training part of the parity run trains: its text, and its twin models."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.small_training import (
    LENGTH,
    SIZES,
    STEPS,
    VOCAB,
    small_documents,
    small_windows,
)
from xentlib.contract import check, failures
from xentlib.tools.parity.training.comparison import run_training
from xentlib.tools.parity.training.model import initial_weights
from xentlib.tools.parity.training.text import (
    IGNORE_INDEX,
    TextWindow,
    encode_documents,
    make_windows,
    read_documents,
    train_tokenizer,
)

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return small_documents()


@pytest.fixture(scope="module")
def windows() -> list[TextWindow]:
    return small_windows()


# --- text ----------------------------------------------------------------------------------------


def test_text_and_windows_follow_from_the_seed(documents, windows):
    tokenizer = train_tokenizer(documents, VOCAB)
    encoded = encode_documents(tokenizer, documents)
    again = make_windows(encoded, steps=STEPS, batch=2, length=LENGTH, seed=3)
    other = make_windows(encoded, steps=STEPS, batch=2, length=LENGTH, seed=4)
    first, second, third = (np.concatenate([w.tokens for w in x]) for x in (windows, again, other))
    assert not failures(check("A0", second, first))
    assert failures(check("A0", third, first))


def test_tokens_decode_to_the_text(documents):
    tokenizer = train_tokenizer(documents, VOCAB)
    text = documents[0][:2000] + " é 漢字\n"
    (tokens,) = encode_documents(tokenizer, [text])
    assert tokenizer.decode(tokens.tolist()) == text


def test_windows_are_ragged(windows):
    assert [w.num_tokens.index(0) for w in windows if 0 in w.num_tokens] == [1]
    for window in windows:
        assert window.tokens.shape == (2 if window is windows[-1] else 4, 2, LENGTH)
        assert len(set(window.num_tokens)) > 1, "micro-batches of one size hide a mean of means"
        padded = window.segments == 0
        assert padded.any()
        assert (window.labels[padded] == IGNORE_INDEX).all()
        assert (window.labels[~padded] == window.tokens[~padded]).all()
        # Padding comes last, and a row's documents are numbered in order.
        assert (np.diff(padded.astype(int), axis=-1) >= 0).all()
        steps = np.diff(window.segments, axis=-1)
        assert np.isin(steps[window.segments[..., 1:] > 0], [0, 1]).all()
    assert max(w.segments.max() for w in windows) > 1, "no row packs two documents"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_numpy_counts_what_next_token_labels_leaves(backend, windows):
    framework = pytest.importorskip("torch" if backend == "torch" else "jax.numpy")
    if backend == "torch":
        from xentlib.torch import next_token_labels
    else:
        from xentlib.jax import next_token_labels

    for window in windows:
        labels = next_token_labels(
            framework.asarray(window.labels), segment_ids=framework.asarray(window.segments)
        )
        counted = (np.asarray(labels) != IGNORE_INDEX).sum(axis=(1, 2))
        assert not failures(check("A0", counted, np.array(window.num_tokens)))


def test_small_text_gives_a_small_vocabulary(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("to be or not to be\n", encoding="utf-8")
    documents = read_documents(path)
    tokenizer = train_tokenizer(documents)
    assert 256 <= tokenizer.get_vocab_size() < 300
    (window,) = make_windows(encode_documents(tokenizer, documents), steps=1, length=16)
    assert window.total > 0


def test_text_is_cut_between_characters(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("漢字" * 10, encoding="utf-8")
    assert read_documents(path, max_bytes=7) == ["漢字"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "it is empty"),
        (b" \n\t ", "it is empty"),
        (b"caf\xe9 noir", "byte 3 is not UTF-8"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, content, reason):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"`text` must be .*{reason}.*Pass another file"):
        run_training(("torch",), text=path)


def test_text_too_short_to_predict_anything(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a", encoding="utf-8")
    with pytest.raises(ValueError, match="Pass a longer text"):
        run_training(("torch",), text=path)


# --- the twins -----------------------------------------------------------------------------------


def test_models_are_twins(windows):
    torch = pytest.importorskip("torch")
    nnx = pytest.importorskip("flax.nnx")
    import jax

    from xentlib.tools.parity.training import in_jax, in_torch

    weights = initial_weights(SIZES, seed=5)
    tokens, segments = windows[0].tokens[0], windows[0].segments[0]
    with torch.no_grad():
        ours = in_torch.LanguageModel(SIZES, weights)(
            torch.asarray(tokens), torch.asarray(segments)
        )
    with jax.default_matmul_precision("highest"):
        call = nnx.jit(lambda model, *arrays: model(*arrays))
        theirs = np.asarray(call(in_jax.LanguageModel(SIZES, weights), tokens, segments))
    rho = {"metrics": ("rho / u",)}
    assert not failures(check("A9", ours.numpy(), None, other=theirs, **rho))
    # A token sees its own document's past: another first document leaves the second one alone.
    b, start = np.argwhere(segments == 2)[0]
    changed = tokens.copy()
    changed[b, :start] = (changed[b, :start] + 1) % VOCAB
    with torch.no_grad():
        moved = in_torch.LanguageModel(SIZES, weights)(
            torch.asarray(changed), torch.asarray(segments)
        )
    second = segments[b] == 2
    assert not failures(
        check("A9", moved[b, second].numpy(), None, other=ours[b, second].numpy(), **rho)
    )
    assert failures(
        check("A9", moved[b, :start].numpy(), None, other=ours[b, :start].numpy(), **rho)
    )


def test_no_parameter_is_left_out(windows):
    torch = pytest.importorskip("torch")
    nnx = pytest.importorskip("flax.nnx")
    from xentlib.tools.parity.training import in_jax, in_torch

    weights = initial_weights(SIZES, seed=5)
    total = sum(value.size for value in weights.values())
    ours = in_torch.LanguageModel(SIZES, weights)
    theirs = in_jax.LanguageModel(SIZES, weights)
    assert sum(p.numel() for p in ours.parameters()) == total
    assert sum(p.size for _, p in nnx.to_flat_state(nnx.state(theirs, nnx.Param))) == total
    # Those of a teacher go from one backend to the other.
    for name, given in weights.items():
        for model in (ours, theirs):
            assert not failures(check("A11", model.arrays()[name], given))
    # The given weights are copied: training writes to the model's own.
    with torch.no_grad():
        ours.head.zero_()
    assert weights["head"].any()
