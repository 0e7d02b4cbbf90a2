"""Which cases `make test` runs, and how many lines of code a folder may have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.collected import collected
from helpers.scripts import load
from helpers.seconds import spread

CI = Path(__file__).parents[2] / ".ci"
if not CI.is_dir():
    pytest.skip("the sources are not there", allow_module_level=True)
cases, lines = load(CI / "cases.py", "cases"), load(CI / "lines.py", "lines")


def of(*shown: str, seconds: float = 1.0) -> Any:
    return cases.Case(seconds, seconds, frozenset(shown))


@pytest.mark.parametrize("count", [1, 2, 7, 65])
def test_cases_at_equal_distances_begin_with_the_first(count: int) -> None:
    for kept in range(1, count + 2):
        chosen = spread(count, kept)
        assert chosen[0] == 0
        assert len(set(chosen)) == min(kept, count)
        assert max(chosen) < count
        gaps = {b - a for a, b in zip(chosen, [*chosen[1:], count])}
        assert max(gaps) - min(gaps) <= 1


def test_each_function_has_a_case_and_all_that_was_shown_is() -> None:
    functions = {
        "dear": [of("A5", seconds=9.0), of("A5", "A7", seconds=9.0)],
        "cheap": [of(seconds=0.1)] * 5,
        "last": [of(), of(), of("`weight` must", seconds=0.5)],
        "test_examples::all": [of(seconds=9.0)] * 3,
    }
    kept = cases.kept_of(functions, 1.0)
    assert kept == {"dear": 2, "cheap": 5, "last": 3, "test_examples::all": 3}
    functions["dear"][1] = of("A5", seconds=9.0)
    functions["last"][2] = of(seconds=0.5)
    assert cases.kept_of(functions, 1.0) == kept | {"dear": 1, "last": 1}
    assert cases.cost(functions, kept) == 18 + 0.5 + 2.5 + 27


def test_ranks_start_for_what_was_collected() -> None:
    """Catches: cases of another module or function, keys in the order of the cases, a key of two
    parameters that is taken for one."""

    def case(path: str, test: str, **params: Any) -> Any:
        spec = {"callspec": SimpleNamespace(params=params)} if params else {}
        return SimpleNamespace(path=path, originalname=test, **spec)

    items = [case("here", "one", name="c"), case("here", "two", name="a"), case("here", "none")]
    items += [case("there", "one", name="b"), case("here", "pair", k=2, name="d", of=[])]
    node, session = SimpleNamespace(path="here"), SimpleNamespace(items=items)
    request = SimpleNamespace(node=node, session=session)
    assert collected(request, "abcde") == ["a", "c", "d"]
    assert collected(request, {"a": 1, "b": 2, "c": 3}, "b", test="one") == ["b", "c"]
    items.append(case("here", "pair", k=1, name="a"))
    assert collected(request, [(1, "a"), (1, "d"), (2, "d")]) == [(1, "a")]
    assert collected(request, range(4)) == [1, 2]


def test_a_folder_does_not_outgrow_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "lines.tsv"
    table.write_text("10\txentlib\n7\tjax_impl\n")
    monkeypatch.setattr(lines, "BUDGET", table)
    assert lines.over_budget(Counter({"xentlib": 10, "jax_impl": 6})) == 0
    assert not capsys.readouterr().out
    assert lines.over_budget(Counter({"xentlib": 11, "jax_impl": 7})) == 1
    assert lines.over_budget(Counter({"xentlib/new": 1})) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("xentlib has 11 lines of code and .ci/lines.tsv allows 10: ")
    assert said[1].startswith("xentlib/new has 1 lines of code and .ci/lines.tsv allows 0: ")
