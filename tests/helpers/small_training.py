"""A training small enough for tests: six steps of a model of 400 tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from xentlib.tools.parity.result import TrainingCurve
from xentlib.tools.parity.training.loop import AdamW, Teacher, train
from xentlib.tools.parity.training.model import ModelSizes, initial_weights
from xentlib.tools.parity.training.text import (
    TextWindow,
    encode_documents,
    make_windows,
    read_documents,
    train_tokenizer,
)

VOCAB, LENGTH, STEPS = 400, 48, 6
SIZES = ModelSizes(vocab=VOCAB, length=LENGTH, hidden=32, heads=2, layers=2, mlp=64)
FAST = AdamW(lr=2e-2, weight_decay=1.0)  # six steps have to show what forty do


@cache
def small_documents() -> list[str]:
    return read_documents(max_bytes=200_000)


@cache
def small_windows() -> list[TextWindow]:
    tokenizer = train_tokenizer(small_documents(), VOCAB)
    assert tokenizer.get_vocab_size() == VOCAB
    encoded = encode_documents(tokenizer, small_documents())
    return make_windows(encoded, steps=STEPS, batch=2, length=LENGTH, seed=3)


def small_run(backend: str, windows: list[TextWindow], **options) -> TrainingCurve:
    weights = initial_weights(SIZES, seed=3)
    return train(backend, windows, weights, **{"sizes": SIZES, "optimizer": FAST} | options)[0]


def small_teacher(windows: list[TextWindow]) -> Teacher:
    """Half as wide again as the student, trained in PyTorch."""
    sizes = replace(SIZES, hidden=48, mlp=96)
    how = {"sizes": sizes, "optimizer": FAST}
    return Teacher(sizes, train("torch", windows, initial_weights(sizes, seed=4), **how)[1])
