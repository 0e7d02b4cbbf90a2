"""An option is written once: a new one in a copy of the package, and what happens without a part of
it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.new_option import EDITS, NAME, PARTS, ROOT, edited
from xentlib.arguments import SCALARS, Scalars
from xentlib.tools.harness.cases import GRID
from xentlib.tools.parity.rows.divergences import GRID as DIVERGENCES
from xentlib.tools.parity.rows.soft import GRID as PROBABILITIES

pytest.importorskip("torch")
pytest.importorskip("jax")
if not (ROOT / "torch_impl").is_dir():
    pytest.skip("the sources are not there", allow_module_level=True)

SITES = 7  # with a sentence in the docs


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")])}
    variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    return subprocess.run(  # noqa: PLW1510 - the status is what is asked
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **variables, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def written(folder: Path, *left_out: str) -> subprocess.CompletedProcess[str]:
    edited(folder, *left_out)
    return run(folder, ".ci/public.py")


def of_the_copy(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    return run(folder, str(ROOT / "tests" / "helpers" / "new_option.py"), *parts)


def test_few_files_are_edited():
    assert len(EDITS) + 1 <= SITES


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Asserts a part. All are run in one process: most of what one costs is two frameworks'
    imports."""
    folder = tmp_path_factory.mktemp("written")
    assert written(folder).returncode == 0
    ran = of_the_copy(folder, *PARTS)
    _, whole, parts = ran.stdout.rpartition("done:")
    assert whole, ran.stdout + ran.stderr

    def held(part: str) -> None:
        assert part in parts.split(), ran.stdout + ran.stderr

    return held


@pytest.mark.parametrize("part", ["oracle", "handed", "elsewhere", "differs"])
def test_what_is_written_is_enough(part: str, done: Callable[[str], None]) -> None:
    done(part)


def test_a_rule_that_is_missing_is_named(tmp_path):
    """Or `bind` would drop the option."""
    done = written(tmp_path, "xentlib/options.py")
    assert done.returncode == 1
    assert f"`{NAME}` must have a rule in RULES" in done.stderr


@pytest.mark.parametrize(
    ("left_out", "said"),
    [("xentlib/reference/nll.py", NAME), ("xentlib/math/softmax.py", "not the oracle's")],
)
def test_a_part_that_is_missing_is_noticed(tmp_path: Path, left_out: str, said: str) -> None:
    assert written(tmp_path, left_out).returncode == 0
    done = of_the_copy(tmp_path, "oracle")
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]


def test_class_probabilities_refuse_what_is_not_marked_for_them(
    done: Callable[[str], None],
) -> None:
    """A factor of the label's own probability, say, of which they have none; its author forgot
    them."""
    done("unmarked")


@pytest.mark.parametrize("name", Scalars._fields)
def test_every_option_is_in_a_case_and_on_a_page(name):
    assert any(name in case.options for case in (*GRID, *DIVERGENCES))
    pages = (path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert any(f"`{name}`" in text for text in pages)


@pytest.mark.parametrize("name", SCALARS["chunked_nll"])
def test_every_option_of_a_loss_is_in_a_case_of_class_probabilities(name):
    """Whose loss would ignore one that is written for class indices alone."""
    assert any(name in case.options for case in PROBABILITIES)
