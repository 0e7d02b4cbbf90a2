"""Training as a section of a parity run: text, vocabulary, windows, weights, both runs, and these
held against each other.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xentlib.contract import Bound, Measurement, check
from xentlib.reference import nll_reference
from xentlib.tools.parity.progress import Planned, Progress
from xentlib.tools.parity.result import Section, TrainingCurve
from xentlib.tools.parity.training.loop import ADAMW, AdamW, HeadStep, train
from xentlib.tools.parity.training.model import ModelSizes, Weights, initial_weights
from xentlib.tools.parity.training.text import (
    IGNORE_INDEX,
    TextWindow,
    encode_documents,
    make_windows,
    read_documents,
    train_tokenizer,
)

CURVES = Bound("relative", 1e-3)  # two fp32 runs of 40 steps part by 3e-7
LEARNT = Bound("ratio", 0.98)  # 0.71 after 40 steps; text without a pattern gains little


def compare(
    backends: Sequence[str],
    windows: Sequence[TextWindow],
    weights: Weights,
    *,
    sizes: ModelSizes,
    optimizer: AdamW = ADAMW,
    progress: Progress | None = None,
) -> Section:
    """Train in each of `backends` and hold the runs against each other, as the module says.

    With one backend there are its curve, its counts, its head gradients against the oracle and
    whether it learns; nothing of the other framework is loaded.
    """
    measurements: list[Measurement] = []
    curves: list[TrainingCurve] = []
    micro_batches, batch, length = windows[0].tokens.shape
    case = (
        f"training, fp32, {micro_batches} x [{batch}, {length}] a window, "
        f"H={sizes.hidden}, V={sizes.vocab}"
    )
    both = {"torch", "jax"} <= set(backends)
    for backend in backends:

        def observe(at: HeadStep, backend: str = backend) -> None:
            step = f"{case}, step {at.step + 1}"
            if both and backend == "torch":
                measurements.extend(against_jax(at, step))
            if at.step in {0, len(windows) - 1}:
                measurements.extend(against_oracle(at, backend, step))

        how: dict[str, Any] = {"sizes": sizes, "optimizer": optimizer, "progress": progress}
        curve = train(backend, windows, weights, observe=observe, **how)
        curves.append(curve)
        measurements.extend([*counts(curve, windows, case), _learnt(curve, case)])
    if both:
        measurements.append(compare_curves(curves, case))
    return Section("training", tuple(measurements), curves=tuple(curves))


def against_jax(at: HeadStep, case: str) -> list[Measurement]:
    from xentlib.tools.parity.training.in_jax import head_window

    theirs = head_window(at)
    details: dict[str, Any] = {"backend": "torch/jax", "case": case}
    norm: dict[str, Any] = {"metrics": ("rho / u",), **details}
    valid, gradient = int((at.labels != IGNORE_INDEX).sum()), theirs.gradient
    return [
        *check("A0", theirs.num_tokens, valid, quantity="tokens of a window", **details),
        *check("A9", at.loss, theirs.loss, other=theirs.loss, quantity="loss", **norm),
        *check("A9", at.gradient, gradient, other=gradient, quantity="d weight", **norm),
    ]


def against_oracle(at: HeadStep, backend: str, case: str) -> list[Measurement]:
    gradient, bound = np.zeros(at.head.shape), np.zeros(at.head.shape)
    total = (at.labels != IGNORE_INDEX).sum()
    for hidden, labels in zip(at.hidden, at.labels, strict=True):
        valid = labels != IGNORE_INDEX
        part = nll_reference(hidden[valid], at.head, labels[valid], denominator=float(total))
        gradient += part.d_weight
        bound += part.bound_weight
    details: dict[str, Any] = {"backend": backend, "case": case, "quantity": "d weight"}
    return check("A6", at.gradient, gradient, bound, **details)


def counts(curve: TrainingCurve, windows: Sequence[TextWindow], case: str) -> list[Measurement]:
    tokens, expected = np.array(curve.tokens), np.array([window.total for window in windows])
    details: dict[str, Any] = {"backend": curve.backend, "case": case}
    return check("A0", tokens, expected, quantity="tokens of each window", **details)


def _learnt(curve: TrainingCurve, case: str) -> Measurement:
    last = curve.losses[-max(1, len(curve.losses) // 8) :]
    value = float(np.mean(last)) / curve.losses[0]
    of = {"backend": curve.backend, "case": case, "quantity": "last losses over the first"}
    return LEARNT.measured("curve", value, len(curve.losses), **of)


def compare_curves(curves: Sequence[TrainingCurve], case: str) -> Measurement:
    """The largest relative distance of the two losses over the steps, |torch - jax| / |jax|."""
    losses = {curve.backend: np.array(curve.losses) for curve in curves}
    apart = np.abs(losses["torch"] - losses["jax"]) / np.abs(losses["jax"])
    worst = f"{case}, most at step {int(np.argmax(apart)) + 1}"
    of = {"backend": "torch/jax", "case": worst, "quantity": "loss"}
    return CURVES.measured("curve", float(apart.max()), apart.size, **of)


STEPS = 40


def run_training(
    backends: Sequence[str] = ("torch", "jax"),
    *,
    text: Path | None = None,
    seed: int = 0,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> Section:
    """The whole training part: text, vocabulary of 8192, windows, weights, both runs.

    Args:
        backends: what is installed and wanted: ("torch", "jax"), or one of them.
        text: the user's file; None for the standard library's sources.
        seed: of the windows and of the weights.
        steps: optimizer steps.
        progress: told about the vocabulary and about every step.

    Raises:
        ValueError: a text that cannot be used.
        ModuleNotFoundError: `tokenizers`, or a framework that was asked for, is missing.
    """
    progress = progress or Progress()
    progress.stage("training, vocabulary", 3)
    documents = read_documents(text)
    progress.advance(f"{sum(map(len, documents)):,} characters")
    tokenizer = train_tokenizer(documents)
    sizes = ModelSizes(vocab=tokenizer.get_vocab_size())
    progress.advance(f"{sizes.vocab:,} tokens")
    encoded = encode_documents(tokenizer, documents)
    windows = make_windows(encoded, steps=steps, length=sizes.length, seed=seed)
    progress.advance()
    weights = initial_weights(sizes, seed)
    return compare(backends, windows, weights, sizes=sizes, progress=progress)


def training_section(backends: Sequence[str], *, text: Path | None, seed: int) -> Planned:
    """The training part as a section of a parity run."""

    def run(progress: Progress, slowness: float) -> Section:
        return run_training(backends, text=text, seed=seed, progress=progress)

    return Planned("training", STEPS, run, step_seconds=0.65)
