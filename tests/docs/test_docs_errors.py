"""The pages of errors and of the command line say what the package says: each message that is
quoted is there, each that a user can meet is quoted, each option is the parser's."""

from __future__ import annotations

import ast
import re
import string
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from helpers.scripts import load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "hooks.py").is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

PAGE = (DOCS / "errors.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^\| `` (.+?) `` \|", PAGE, re.MULTILINE)
PACKAGES = ("xentlib", "torch_impl", "jax_impl")
# What developers of xentlib meet, or readers of its reports; a row that nobody calls by hand.
NOT_MET = re.compile(r"/(parity|bench|reference)/|/(contract|budgets|reference|ulp|operators)\.py")
NOT_QUOTED = ("`wrapper` must be plain, DDP, FSDP2 or DeepSpeed",)
OTHERS = ("AttributeError", "NotImplementedError")  # Python's own, and "call the backend's"


# Made when a test asks: every worker of the suite imports this file, and one runs it.
@cache
def sources():
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def template(node):
    """Characters of a string, None for each place that is filled; None of anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [*node.value]
    if isinstance(node, ast.JoinedStr):
        parts = ([*x.value] if isinstance(x, ast.Constant) else [None] for x in node.values)
        return [c for part in parts for c in part]
    if isinstance(node, ast.BinOp) and (left := template(node.left)):  # "..." + (...)
        return [*left, None]
    return None


def rows(tree):
    """Templates of the tables of messages, whose places are in braces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Refusals":
            for keyword in node.keywords:
                parts = string.Formatter().parse(ast.literal_eval(keyword.value))
                places = [[*text] + [None] * (name is not None) for text, name, *_ in parts]
                yield [c for part in places for c in part]


@cache
def strings():
    return [
        found
        for tree in sources().values()
        for found in (*map(template, ast.walk(tree)), *rows(tree))
        if found
    ]


@cache
def phrases():
    """What may fill a place, by its first letter: "a number in [0, 1]" or, of one with places, its
    head."""
    heads = defaultdict(set)
    for found in strings():
        text = "".join(found[: found.index(None) if None in found else None])
        if " " in text and "\n" not in text:
            heads[text[0]].add(text)
    return heads


def begins(quote, found):
    """Whether a message made of the template begins with the quote. What fills a place has no
    space, or is one of the package's own phrases; an ellipsis skips anything. A quote ends with
    words that are the package's."""
    states, seen = [(0, 0, False)], set()
    while states:
        i, k, own = state = states.pop()
        if i == len(quote):
            if own:
                return True
            continue
        if state in seen:
            continue
        seen.add(state)
        if quote[i] == "…":
            states += [(i + 1, n, own) for n in range(k, len(found) + 1)]
        elif k == len(found):
            continue
        elif found[k] is None:
            states.append((i, k + 1, own))
            states += [(i + 1, k, False)] if quote[i] != " " else []
            for phrase in phrases()[quote[i]]:
                if quote.startswith(phrase, i):
                    states.append((i + len(phrase), k + 1, True))
                elif len(quote) - i >= 10 and phrase.startswith(quote[i:]):
                    return True
        elif quote[i] == found[k]:
            states.append((i + 1, k + 1, True))
    return False


def literal(found):
    """Whether it has words of its own: a quote must not match by filled places alone."""
    return sum(c is not None for c in found) > 12


@pytest.mark.parametrize("quote", QUOTES)
def test_quoted_message_is_the_package_s(quote):
    assert any(begins(quote, found) for found in strings() if literal(found)), quote


def raised():
    for name, tree in sources().items():
        if NOT_MET.search(name):
            continue
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or ast.unparse(call.func) in OTHERS:
                continue
            if call.args and (found := template(call.args[0])):
                yield name, found
        yield from ((name, found) for found in rows(tree))


def test_every_message_that_a_user_can_meet_is_quoted():
    messages = [(name, found) for name, found in raised() if literal(found)]
    assert len(messages) > 80
    assert sum(name.startswith("xentlib/checks/") for name, _ in messages) > 100
    missing = []
    for name, found in messages:
        text = "".join(c or "…" for c in found)
        if not text.startswith(NOT_QUOTED) and not any(begins(q, found) for q in QUOTES):
            missing.append(f"{name}: {text}")
    assert missing == []


def test_what_is_not_a_message_is_found_out():
    """A quote is held to the words: another word, another argument's, or filled places alone."""
    good = "`bias` must have shape …, one entry per row of the head"
    assert good in QUOTES
    for bad in (
        good.replace("row", "column"),
        "`weight` must have at least one vocabulary column",
        "`bias` must have shape …, one entry for each class of the whole vocabulary, on no rank",
        "`labels` must be nice",
        "anything at all",
    ):
        assert not any(begins(bad, found) for found in strings() if literal(found)), bad


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["parity", "bench", "doctor", "audit", "explain", "plan"])
def test_every_option_of_help_is_on_the_page(command, capsys):
    from xentlib.tools.cli import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    page = load(DOCS / "hooks.py").fill((DOCS / "command-line.md").read_text(encoding="utf-8"))
    part = page.partition(f"## `xentlib {command}`")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(--[\w-]+)`(?:, `-\w`)? \|", part, re.MULTILINE)
    assert shown == re.findall(r"^  (--[\w-]+)", said, re.MULTILINE)
    for option in re.findall(r"`(--[\w-]+)[` ]", part):
        assert option in shown, option
    for words in re.findall(
        r"xentlib (?:parity|bench|doctor|audit|explain|plan)((?: -[^\n`]*)?)$", part, re.MULTILINE
    ):
        assert set(re.findall(r"--[\w-]+", words)) <= set(shown)


# --- the tables of messages -----------------------------------------------------------------------


def tables():
    """Of each table of messages, by name: for each row the names of its places."""
    return {
        node.targets[0].id: {
            row.arg: {
                re.match(r"\w+", field)[0]
                for _, field, *_ in string.Formatter().parse(ast.literal_eval(row.value))
                if field is not None
            }
            for row in node.value.keywords
        }
        for tree in sources().values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "Refusals"
    }


def test_who_refuses_names_a_row_and_fills_its_places():
    """No type checker sees a wrong name, and only a refused call would."""
    rows, unused = tables(), {(table, row) for table, all_of in tables().items() for row in all_of}
    wrong = []
    for name, tree in sources().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        words = {x.value for x in ast.walk(tree) if isinstance(x, ast.Constant)}
        for node in calls:
            table, _, method = ast.unparse(node.func).partition(".")
            if table not in rows or method not in ("require", "refuse"):
                continue
            if not isinstance(node.args[0], ast.Constant):  # one of several, which stand beside it
                unused -= {(table, row) for row in rows[table] if row in words}
                continue
            row, places = node.args[0].value, {keyword.arg for keyword in node.keywords}
            unused.discard((table, row))
            missing = rows[table].get(row, {"no such row"}) - places
            more = places - {None} - rows[table].get(row, set())
            if (
                (missing and None not in places)
                or more
                or len(node.args) != 1 + (method == "require")
            ):
                wrong.append(f"{name}:{node.lineno}: {table} {row} {missing | more}")
    assert len(rows) > 5
    assert (wrong, unused) == ([], set())
