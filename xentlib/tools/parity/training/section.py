"""The training part of a parity run: text, vocabulary, windows, weights, both runs, the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xentlib.tools.parity.eta import Planned
from xentlib.tools.parity.progress import Progress, SilentProgress
from xentlib.tools.parity.result import Section
from xentlib.tools.parity.training.comparison import TrainingReport, compare
from xentlib.tools.parity.training.model import ModelSizes, initial_weights
from xentlib.tools.parity.training.text import encode_documents, read_documents, train_tokenizer
from xentlib.tools.parity.training.windows import make_windows

STEPS = 40


def run_training(
    backends: Sequence[str] = ("torch", "jax"),
    *,
    text: Path | None = None,
    seed: int = 0,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> TrainingReport:
    """The whole training part: text, vocabulary of 8192, windows, weights, both runs, the report.

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
    progress = progress or SilentProgress()
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
        found = run_training(backends, text=text, seed=seed, progress=progress)
        return Section("training", tuple(found.measurements), curves=tuple(found.curves))

    return Planned("training", STEPS, run)
