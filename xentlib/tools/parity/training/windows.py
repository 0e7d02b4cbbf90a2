"""Windows of ragged sequences: what each optimizer step of the training reads.

Everything follows from the documents and a seed.

Shapes: M micro-batches of a window, B sequences of a micro-batch, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xentlib.tools.parity.training.text import MIN_DOCUMENT

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class TextWindow:
    """Tokens of one optimizer step: M micro-batches of B sequences, documents packed, ends padded.

    A micro-batch may be all padding.

    Attributes:
        tokens: [M, B, L] int32 token ids; 0 where padded.
        segments: [M, B, L] int32 number of the document within its row, from 1; 0 where padded.
        labels: [M, B, L] int32 the token ids again, `IGNORE_INDEX` where padded, not yet shifted.
        num_tokens: [M] valid tokens of each micro-batch after the shift, counted by NumPy.
    """

    tokens: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    num_tokens: tuple[int, ...]

    @property
    def total(self) -> int:
        """Valid tokens of the window: the denominator of each of its losses."""
        return sum(self.num_tokens)


def make_windows(
    documents: Sequence[npt.NDArray[np.int32]],
    *,
    steps: int = 40,
    micro_batches: int = 4,
    batch: int = 4,
    length: int = 128,
    seed: int = 0,
) -> list[TextWindow]:
    """Windows of ragged sequences, [M, B, L]; the last one has half the micro-batches.

    Every micro-batch draws how full its rows are, from a quarter to all of L, so that their token
    counts differ: the mean of their means is not the mean of the window. The second one of the
    second window is empty. A row packs parts of documents until it is that full. A document is
    drawn in proportion to its tokens.

    Raises:
        ValueError: no document has a token to predict.
    """
    documents = [tokens for tokens in documents if tokens.size >= MIN_DOCUMENT]
    if not documents:
        raise ValueError(
            f"`documents` must hold a document of {MIN_DOCUMENT} tokens or more; got none. "
            f"Pass a longer text."
        )
    rng = np.random.default_rng(seed)
    sizes = np.array([tokens.size for tokens in documents])
    shares = sizes / sizes.sum()
    windows = []
    for step in range(steps):
        number = micro_batches if step < steps - 1 else max(1, micro_batches // 2)
        tokens = np.zeros((number, batch, length), np.int32)
        segments = np.zeros_like(tokens)
        for m in range(number):
            if (step, m) == (1, 1):
                continue
            fullness = rng.uniform(0.25, 1.0)
            for b in range(batch):
                full = round(length * min(1.0, fullness * rng.uniform(0.8, 1.2)))
                filled, segment = 0, 1
                while full - filled >= MIN_DOCUMENT:
                    document = documents[rng.choice(len(documents), p=shares)]
                    longest = min(full - filled, document.size)
                    size = int(rng.integers(MIN_DOCUMENT, longest + 1))
                    start = int(rng.integers(0, document.size - size + 1))
                    piece = slice(filled, filled + size)
                    tokens[m, b, piece] = document[start : start + size]
                    segments[m, b, piece] = segment
                    filled, segment = filled + size, segment + 1
        windows.append(_window(tokens, segments))
    return windows


def _window(tokens: npt.NDArray[np.int32], segments: npt.NDArray[np.int32]) -> TextWindow:
    labels = np.where(segments > 0, tokens, np.int32(IGNORE_INDEX))
    # A position is valid if its successor exists and is of the same document.
    predicted = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
    return TextWindow(tokens, segments, labels, tuple(int(n) for n in predicted.sum(axis=(1, 2))))
