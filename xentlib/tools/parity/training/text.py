"""Real text for training: documents, their tokens in a byte-level BPE vocabulary, and windows of
ragged sequences, what each optimizer step reads.

NumPy and `tokenizers` only. Everything follows from the text and a seed, so that two backends, and
two runs, see the same tokens.

Shapes: M micro-batches of a window, B sequences of a micro-batch, L tokens of a sequence.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_BYTES = 4 << 20  # of text: 3 s to train 8192 tokens on two cores; 40 steps read a tenth of it
NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MIN_DOCUMENT = 2  # tokens; a shorter one has nothing to predict


def read_documents(text: Path | None = None, *, max_bytes: int = MAX_BYTES) -> list[str]:
    """Documents of a UTF-8 file, or of the running interpreter's standard library.

    Args:
        text: a file, taken as one document; None for the standard library, one document a module.
        max_bytes: no more than this is read. Library modules are taken in the order of a hash of
            their names, so that the cut does not keep one end of the alphabet.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, or holds nothing but white space.
    """
    if text is None:
        return _standard_library(max_bytes)
    try:
        with Path(text).open("rb") as file:
            data = file.read(max_bytes)
        # A character cut in two by max_bytes is left out; one that is wrong raises.
        decoder = codecs.getincrementaldecoder("utf-8")()
        document = decoder.decode(data, final=len(data) < max_bytes)
    except OSError as error:
        raise _no_text(text, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _no_text(text, f"byte {error.start} is not UTF-8") from error
    if not document.strip():
        raise _no_text(text, "it is empty")
    return [document]


def _no_text(text: Path, reason: str) -> ValueError:
    return ValueError(
        f"`text` must be a readable UTF-8 file with text in it; got {str(text)!r}: {reason}. "
        f"Pass another file, or none for the Python standard library's own sources."
    )


def _standard_library(max_bytes: int) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if NOT_SOURCES.isdisjoint(path.relative_to(root).parts[:-1])
    ]
    documents, room = [], max_bytes
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        data = (root / name).read_bytes()
        if data.strip() and len(data) <= room:
            documents.append(data.decode("utf-8", errors="replace"))
            room -= len(data)
    if not documents:
        raise ValueError(
            f"the standard library must be there as source files; found none of up to {max_bytes} "
            f"bytes. Pass a text file of your own."
        )
    return documents


def train_tokenizer(documents: Sequence[str], vocab_size: int = 8192) -> Tokenizer:
    """Byte-level BPE (as in GPT-2) with up to `vocab_size` tokens, fewer where the text gives out.

    Raises:
        ValueError: a vocabulary smaller than the 256 bytes.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the vocabulary is trained with `tokenizers`, which is not installed. "
            "Run `pip install 'xentlib[cli]'`.",
            name="tokenizers",
        ) from error
    if vocab_size < 256:
        raise ValueError(
            f"`vocab_size` must hold the 256 bytes; got {vocab_size}. Pass 256 or more."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> list[npt.NDArray[np.int32]]:
    """[tokens] int32 of each document; documents too short to predict anything are left out."""
    encoded = [np.asarray(e.ids, np.int32) for e in tokenizer.encode_batch_fast(list(documents))]
    return [tokens for tokens in encoded if tokens.size >= MIN_DOCUMENT]


IGNORE_INDEX = -100


class TextWindow(NamedTuple):
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
        labels = np.where(segments > 0, tokens, np.int32(IGNORE_INDEX))
        # A position is valid if its successor exists and is of the same document.
        predicted = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
        num_tokens = tuple(int(n) for n in predicted.sum(axis=(1, 2)))
        windows.append(TextWindow(tokens, segments, labels, num_tokens))
    return windows
