"""Training and distillation as sections of a parity run: text, vocabulary, windows, weights, both
runs, and these held against each other.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import Bound, Measurement, check
from xentlib.reference import divergence_reference, nll_reference
from xentlib.tools.parity.progress import Planned, Progress
from xentlib.tools.parity.result import Section, TrainingCurve
from xentlib.tools.parity.training.loop import (
    ADAMW,
    DISTILLATION,
    AdamW,
    HeadStep,
    Teacher,
    train,
)
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
    teacher: Teacher | None = None,
    optimizer: AdamW = ADAMW,
    progress: Progress | None = None,
) -> Section:
    """Train in each of `backends`, from a `teacher` if there is one, and hold the runs against each
    other, as the module says.

    With one backend there are its curve, its counts, its head gradients against the oracle and
    whether it learns; nothing of the other framework is loaded.
    """
    measurements: list[Measurement] = []
    curves: list[TrainingCurve] = []
    micro_batches, batch, length = windows[0].tokens.shape
    name = "distillation" if teacher else "training"
    width = f"H={sizes.hidden}" + (f" from {teacher.sizes.hidden}" if teacher else "")
    case = f"{name}, fp32, {micro_batches} x [{batch}, {length}] a window, {width}, V={sizes.vocab}"
    both = {"torch", "jax"} <= set(backends)
    for backend in backends:

        def observe(at: HeadStep, backend: str = backend) -> None:
            step = f"{case}, step {at.step + 1}"
            if both and backend == "torch":
                measurements.extend(against_jax(at, step))
            if at.step in {0, len(windows) - 1}:
                measurements.extend(against_oracle(at, backend, step))

        how: dict[str, Any] = {"sizes": sizes, "teacher": teacher, "optimizer": optimizer}
        curve, _ = train(backend, windows, weights, observe=observe, progress=progress, **how)
        curves.append(curve)
        measurements.extend([*counts(curve, windows, case), _learnt(curve, case)])
    if both:
        measurements.append(compare_curves(curves, case))
    return Section(name, tuple(measurements), curves=tuple(curves))


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
    oracle: Any = partial(divergence_reference, **DISTILLATION) if at.taught else nll_reference
    for hidden, labels, *taught in zip(at.hidden, at.labels, *at.taught[:1], strict=True):
        valid = labels != IGNORE_INDEX
        arrays = (hidden[valid], at.head, *(x[valid] for x in taught), *at.taught[1:])
        part = oracle(*arrays, labels=labels[valid], denominator=float(total))
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
DISTILLATION_STEPS = 20  # of the teacher, and of the student
QUICK_STEPS = 8
BATCH, QUICK_BATCH = 4, 2  # sequences of a micro-batch
NARROWER = 2  # the student's widths are this part of its teacher's
# At twice the rate a student's steps amplify what rounding parts: two PyTorch runs from weights
# 1e-7 apart are 5e-3 apart after 40 steps, and 3e-7 at this one.
STUDENTS = ADAMW._replace(lr=5e-4)


def run_training(
    backends: Sequence[str] = ("torch", "jax"),
    *,
    text: Path | None = None,
    seed: int = 0,
    steps: int = STEPS,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Section:
    """The whole training part: text, vocabulary of 8192, windows, weights, both runs.

    Args:
        backends: what is installed and wanted: ("torch", "jax"), or one of them.
        text: the user's file; None for the standard library's sources.
        seed: of the windows and of the weights.
        steps: optimizer steps.
        batch: sequences of a micro-batch.
        progress: told about the vocabulary and about every step.

    Raises:
        ValueError: a text that cannot be used.
        ModuleNotFoundError: `tokenizers`, or a framework that was asked for, is missing.
    """
    progress = progress or Progress()
    windows, sizes = _text_windows(text, seed, steps, batch, progress)
    weights = initial_weights(sizes, seed)
    return compare(backends, windows, weights, sizes=sizes, progress=progress)


def run_distillation(
    backends: Sequence[str] = ("torch", "jax"),
    *,
    text: Path | None = None,
    seed: int = 0,
    steps: int = DISTILLATION_STEPS,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Section:
    """The same for a student of half the width, which learns from the model of `run_training`: that
    is trained first, in one backend, and is the teacher in both. Arguments as there."""
    progress = progress or Progress()
    windows, sizes = _text_windows(text, seed, steps, batch, progress)
    weights = initial_weights(sizes, seed)
    _, trained = train(backends[0], windows, weights, sizes=sizes, progress=progress)
    student = replace(sizes, hidden=sizes.hidden // NARROWER, mlp=sizes.mlp // NARROWER)
    how: dict[str, Any] = {"teacher": Teacher(sizes, trained), "optimizer": STUDENTS}
    weights = initial_weights(student, seed)
    return compare(backends, windows, weights, sizes=student, progress=progress, **how)


def _text_windows(
    text: Path | None, seed: int, steps: int, batch: int, progress: Progress
) -> tuple[list[TextWindow], ModelSizes]:
    progress.stage("training, vocabulary", 2)
    encoded, vocab = _encoded(text)
    progress.advance(f"{vocab:,} tokens")
    sizes = ModelSizes(vocab=vocab)
    windows = make_windows(encoded, steps=steps, batch=batch, length=sizes.length, seed=seed)
    progress.advance()
    return windows, sizes


@lru_cache(1)
def _encoded(text: Path | None) -> tuple[list[npt.NDArray[np.int32]], int]:
    """The documents in tokens, and the size of their vocabulary: one for training and distillation,
    as it takes seconds."""
    documents = read_documents(text)
    tokenizer = train_tokenizer(documents)
    return encode_documents(tokenizer, documents), tokenizer.get_vocab_size()


def training_sections(
    backends: Sequence[str], *, text: Path | None, seed: int, few: bool = False
) -> list[Planned]:
    """Training and distillation as sections of a parity run; of a quick one, with `few` steps."""
    steps, of_students, batch = STEPS, DISTILLATION_STEPS, BATCH
    if few:
        steps, of_students, batch = QUICK_STEPS, QUICK_STEPS, QUICK_BATCH

    def section(
        part: Callable[..., Section], steps: int, progress: Progress, slowness: float
    ) -> Section:
        how: dict[str, Any] = {"steps": steps, "batch": batch, "progress": progress}
        return part(backends, text=text, seed=seed, **how)

    learnt = partial(section, run_training, steps)
    taught = partial(section, run_distillation, of_students)
    rows = ("A0", "A6", *(["A9"] if len(backends) == 2 else []), "curve")
    return [
        Planned("training", steps, learnt, 1.6, rows),
        Planned("distillation", of_students, taught, 2.8, rows),
    ]
