"""Text for the examples: the Python standard library's own sources, as tokens.

Needs `pip install 'xentlib[cli]'`.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def library_tokens(vocab: int, max_characters: int = 4_000_000) -> np.ndarray:
    """[T] ids of a byte-level BPE vocabulary of this size, which is trained on the text first."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    text = "\n".join(texts)[:max_characters]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer=trainer)
    return np.concatenate([encoded.ids for encoded in tokenizer.encode_batch_fast(lines)])
