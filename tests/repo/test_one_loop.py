"""What the house of losses promises: one loop that adds up gradients, few operators, losses that do
not borrow from each other; and a page for a first reader that is true."""

from __future__ import annotations

import ast
import re

import pytest

from helpers.modules import ROOT

TORCH, JAX, PAGE = ROOT / "torch_impl", ROOT / "jax_impl", ROOT / "docs" / "tour.md"
if not (TORCH.is_dir() and PAGE.is_file()):
    pytest.skip("the sources are not there", allow_module_level=True)

# May only get smaller, but for a function with an operator of its own.
OPERATORS = 9  # of PyTorch: nll, log-probabilities, classes, divergences, and a check of ranks
# Files, `__init__.py` apart. All that a loss is stands in them, and none has more than 400 lines.
LOSSES = {"torch_impl": 11, "jax_impl": 10}
# What losses share, and those that others are made of: a top-K divergence of log-probabilities of
# classes and a divergence, class probabilities of the operators of both.
SHARED = {"loss", "paired", "pairs", "soft_logits", "teacher"}
MADE_OF = {
    "top_k": {"classes", "divergence", "teacher", "loss"},
    "soft_labels": {"classes", "divergence", "logprobs"},
    "logprobs": {"classes", "soft_labels", "teacher"},  # dispatch, and what operators merge
    "classes": {"logprobs"},
    "index": {"soft_labels"},
    "divergence": {"top_k"},
}


def calls(tree: ast.AST, name: str) -> int:
    return sum(
        isinstance(x, ast.Call) and getattr(x.func, "attr", getattr(x.func, "id", "")) == name
        for x in ast.walk(tree)
    )


def test_one_loop_adds_up_gradients() -> None:
    """Only `run` asks for passes over rows of a head, and so makes dz of their blocks."""
    found = {
        path.relative_to(TORCH).as_posix(): count
        for path in TORCH.rglob("*.py")
        if (count := calls(ast.parse(path.read_text("utf-8")), "passes"))
    }
    assert found == {"core/loop.py": 1}


def test_operators() -> None:
    text = "\n".join(path.read_text("utf-8") for path in TORCH.rglob("*.py"))
    found = re.findall(
        r'^@operator\($\n    "|^@operator\("|^@torch\.library\.custom_op\(', text, re.MULTILINE
    )
    assert len(found) == OPERATORS


@pytest.mark.parametrize("column", LOSSES)
def test_losses_do_not_borrow(column: str) -> None:
    """A loss stands in one place: what two share is in the files for that."""
    files = {path.stem: path for path in (ROOT / column / "losses").glob("[!_]*.py")}
    assert len(files) == LOSSES[column]
    for name, path in files.items():
        text = path.read_text("utf-8")
        borrowed = set(re.findall(rf"from xentlib\.{column[:-5]}\.losses\.(\w+) import", text))
        assert borrowed <= SHARED | MADE_OF.get(name, set()), name


def test_the_tour_is_short_and_true() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.split()) <= 600
    named = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", text)
    assert len(named) > 15
    for name in named:
        assert any((top / name).exists() for top in (ROOT, TORCH)), name
    for name in re.findall(r"`(\w+)` (?:of|stands in) `((?:\w+/)+\w+\.py)`", text):
        path = next(top / name[1] for top in (ROOT, TORCH) if (top / name[1]).exists())
        assert re.search(rf"\b(?:def|class) {name[0]}\b", path.read_text("utf-8")), name
