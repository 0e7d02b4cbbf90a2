"""Python on README and docs/ is run, on real ranks and devices where it needs them, and prints what
the page shows after it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from helpers.pages import FOUND, RUN, execute, groups, on_rank, torchrun
from helpers.ranks import launch

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "hooks.py").is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
}
PACKAGES = ("torch", "jax", "flax", "optax", "deepspeed", "trl", "lightning", "tunix")
WARN = ("trl", "lightning")  # of their own code, and of what it calls
GROUPS = {
    f"{page}-{group.blocks[0].line}": group
    for page, text in PAGES.items()
    for group in groups(page, text)
}


def parameters(*how):
    found = {name: group for name, group in GROUPS.items() if group.how in how}
    return [pytest.param(group, id=name, marks=marks(group)) for name, group in found.items()]


def marks(group):
    frameworks = ("torch", "jax")
    found = [getattr(pytest.mark, x) for x in frameworks if re.search(rf"\b{x}\b", group.code)]
    if re.search(rf"^(?:import|from) ({'|'.join(WARN)})\b", group.code, re.MULTILINE):
        found.append(pytest.mark.filterwarnings("ignore"))
    return found


def needed(group):
    for package in PACKAGES:
        if re.search(rf"^ *(?:import|from) {package}\b", group.code, re.MULTILINE):
            pytest.importorskip(package)


def held(group, printed):
    assert not isinstance(printed, str), printed
    for block, got in zip(group.blocks, printed, strict=True):
        assert got == block.shown, f"{block.page}, line {block.line}"


@pytest.mark.parametrize("group", parameters("alone", "together"))
def test_python_on_a_page_prints_what_the_page_shows(group):
    needed(group)
    held(group, execute(group.blocks))


@pytest.mark.parametrize("group", parameters("two ranks"))
def test_python_for_ranks_prints_what_the_page_shows(group):
    needed(group)
    held(group, launch(2, on_rank, group.blocks)[0])


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory):
    pytest.importorskip("deepspeed")
    found = [group for group in GROUPS.values() if group.how == "torchrun"]
    printed = torchrun(found, tmp_path_factory.mktemp("torchrun"))
    return dict(zip((group.blocks for group in found), printed))


@pytest.mark.slow
@pytest.mark.parametrize("group", parameters("torchrun"))
def test_python_for_torchrun_prints_what_the_page_shows(group, under_torchrun):
    held(group, under_torchrun.get(group.blocks, "torchrun ended before it"))


def test_each_call_in_the_table_of_columns_is_run():
    """docs/logprobs.md: which column is which token, here and in trainers."""
    page = PAGES["docs/logprobs.md"]
    calls = re.findall(r"`([^`|]*chunked_logprobs\([^`|]*)` \|$", page, re.MULTILINE)
    run = [line for group in groups("page", page) for line in group.code.splitlines()]
    assert len(calls) == 10
    for call in calls:
        assert f"out = {call}" in run


def test_every_way_to_run_is_in_use():
    assert {group.how for group in GROUPS.values()} == set(RUN)


@pytest.mark.parametrize("page", PAGES)
def test_no_python_is_shown_that_is_not_run(page):
    """A block is Python, a command, or text; and text is no Python."""
    rest = FOUND.sub("", PAGES[page])  # Python that is run, with what it prints
    for language, text in re.findall(
        r"^ *```([^\n]*)\n(.*?)^ *```$", rest, re.MULTILINE | re.DOTALL
    ):
        assert language in ("text", "bash", "console")
        assert language != "text" or not python(text), text


def python(text: str) -> bool:
    """Whether it is Python that does something."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    return any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in statements)


def test_what_a_page_shows_is_compared():
    """A wrong result, an error, and a mode that nobody knows."""
    (wrong,) = groups("page", "```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="page, line 2"):
        held(wrong, execute(wrong.blocks))
    (breaks,) = groups("page", "\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as found:
        execute(breaks.blocks)
    assert (found.traceback[-1].path, found.traceback[-1].lineno) == ("page", 2)  # from 0
    with pytest.raises(ValueError, match="three ranks"):
        list(groups("page", "<!-- run: three ranks -->\n"))


def test_blocks_share_a_namespace_where_the_page_says_so():
    text = (
        "<!-- run: together\nx = 1\n-->\n```python\ny = x\n```\n\n```python\nprint(y)\n```\n"
        "\n```text\n1\n```\n<!-- run: alone -->\n```python\nprint('x' in globals())\n```\n"
    )
    together, alone = groups("page", text)
    assert execute(together.blocks) == ["", "", "1\n"]
    assert execute(alone.blocks) == ["False\n"]
