"""The field's words: names and sentences that stood here once, and for which an engineer of the
field has others."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

from helpers.modules import MODULES, PACKAGES, ROOT

if not all((ROOT / folder).is_dir() for folder in PACKAGES):
    pytest.skip("the sources are not there", allow_module_level=True)

# As identifiers: arguments are `args`, this rank's part is `local`, and what a value is has a name.
WORDS = {"given", "own", "places", "made", "beside", "again", "few"}
LIBRARY = [x for x in MODULES if not x.startswith("xentlib.tools")]
# Of sentences for which there is a plain one, the words that no other sentence has.
SENTENCES = (
    "its gradient goes home",
    "Heads in pieces",
    "logits that are there already",
    "must be an option of the head's function",
    "outside of its gather nothing is left but its name",
    "no public road",
    "Call the trunk first",
    "Rows of a sharded head that pass by in blocks",
    "a rank goes by what it remembers",
    "at one place of every node",
    "as those of the walk's",
    "what weighs classes",
    "Of those over which a walk varies",
    "asked of logits that are not made",
    "for all three ways to pass the head",
    "the larger of the walk over chunks",
    "what travels to meet what",
    "Memory is beside the inputs",
    "reading it would mean to wait for the device",
    "On GPUs the code is untried",
    "are MKL's, xentlib's oneDNN's",
    "only where the class's name tells it",
    "the loss is of float32 logits, which models in bf16 round first",
    "the devices that share those",
    "by hand, without what Flax does for fp8",
    "are not given the choice",
    "that come from other ranks, beside this rank's own",
    "routes whose rows do",
    "What a function brings to its loop",
    "is made of entropies",
    "Chunks that hold some tokens of every rank",
    "None that a token's weight has",
    "that a loss of the labels is of",
    "before their temperature, which then divides them",
    "Of an operator whose results are a loss",
    "the graph is not walked again",
    "derivatives that would be dropped without a word",
    "In eager nothing asks for it",
    "which are looked for first",
    "NaN is equal to nothing",
    "None of class probabilities that a token has few of",
    "What a caller tells of a micro-batch",
    "is faster once what",
    "whose trade it is",
)


def identifiers(path: Path) -> set[str]:
    with path.open(encoding="utf-8") as file:
        tokens = tokenize.generate_tokens(file.readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}


def plain(text: str) -> str:
    """In one line, whatever breaks it: comments, quotes, a page's width."""
    return re.sub(r"[\s#\"`*>]+", " ", text)


@pytest.mark.parametrize("name", LIBRARY)
def test_names_are_the_fields(name):
    assert not identifiers(MODULES[name]) & WORDS


def test_sentences_are_plain():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for path in (*MODULES.values(), *pages):
        text = plain(path.read_text(encoding="utf-8"))
        assert not [x for x in SENTENCES if plain(x) in text], path


def test_few_names_begin_with_of() -> None:
    """A noun says what a value is, not what it belongs to. May only get smaller; one is public,
    `VocabShard.of_ranks`."""
    names = {name for module in LIBRARY for name in identifiers(MODULES[module])}
    assert len([name for name in names if name.startswith("of_")]) <= 69
