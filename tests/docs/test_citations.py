"""The numbers that sources, tests and pages cite (D4, M11) are there, and mean one thing."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "hooks.py").is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def named(path):
    return path.relative_to(ROOT).as_posix()


NUMBERED = {"D": DOCS / "design.md", "M": DOCS / "failure-modes.md"}
FOLDERS = (".ci", ".github", "bench", "docs", "examples", "jax_impl", "tests", "torch_impl")
TEXTS = {
    named(path): path.read_text(encoding="utf-8", errors="replace")
    for found in (ROOT.glob("*"), *((ROOT / name).rglob("*") for name in (*FOLDERS, "xentlib")))
    for path in sorted(found)
    if path.is_file() and path.name != ".git" and path.suffix in ("", ".md", ".py", ".toml", ".yml")
}
# Of a docstring, a comment or a page; not of a string in quotes, as an SVG path or a dtype is.
CITED = re.compile(r"(?:(?<=\"\"\")|(?<![\w\"']))([DM]\d+)\b")
# Documents that sources once cited, and that a reader of the repository does not have.
ELSEWHERE = re.compile(r"\b(SPE[C]|ANCHOR[S]|STYL[E])\b")


def entries(kind):
    """The numbered parts of a page, by number, in their order."""
    text = NUMBERED[kind].read_text(encoding="utf-8")
    pattern = rf"^## ({kind}\d+)\. [^\n]* \{{#(\w+)\}}$(.*?)(?=^## |\Z)"
    found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    assert all(number.lower() == anchor for number, anchor, _ in found)
    return {number: body for number, _, body in found}


def cited(start=""):
    """(number, file) of each citation in the files whose names start so."""
    texts = {name: text for name, text in TEXTS.items() if name.startswith(start)}
    return {(number, name) for name, text in texts.items() for number in CITED.findall(text)}


@pytest.mark.parametrize("kind", NUMBERED)
def test_numbers_are_one_after_the_other(kind):
    """Every heading has one, with its anchor: a number that is taken twice, or left out, would make
    a citation mean something else."""
    headings = re.findall(rf"^## {kind}\d+", NUMBERED[kind].read_text("utf-8"), re.MULTILINE)
    assert list(entries(kind)) == [f"{kind}{k}" for k in range(1, len(headings) + 1)]


def test_numbers_that_are_cited_exist():
    known = {number for kind in NUMBERED for number in entries(kind)}
    found = cited()
    assert {kind for number, _ in found for kind in number[0]} == set(NUMBERED)
    assert sorted((number, path) for number, path in found if number not in known) == []


def test_every_failure_mode_is_cited_by_a_test_or_says_why_not():
    tests = {number for number, name in cited("tests/") if "/test_" in name}
    for number, body in entries("M").items():
        assert number in tests or "No test:" in body, f"{number} is cited by no test"


def test_tests_that_a_page_names_exist():
    text = "".join(text for name, text in TEXTS.items() if name.startswith("tests/"))
    known = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert name in known, f"{named(page)} names {name}"


def test_nothing_cites_what_is_not_here():
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in TEXTS.items()
        for number, line in enumerate(text.splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert found == []
