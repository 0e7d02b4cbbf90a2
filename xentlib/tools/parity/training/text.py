"""Real text for training: documents, and their tokens in a byte-level BPE vocabulary.

NumPy and `tokenizers` only. Everything follows from the text, so that two backends, and two runs,
see the same tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
