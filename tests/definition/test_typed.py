"""What a type checker says of a call, in a file that a user might write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "torch_impl").is_dir():
    pytest.skip("the sources are not there", allow_module_level=True)

CALLS = """
from xentlib.{package} import chunked_nll, {window}
from {package} import {array}
def f(h: {array}, w: {array}, y: {array}) -> None:
    chunked_nll(h, w, y, reduction="meen")
    chunked_nll(h, w, y, weight_layout="hv")
    chunked_nll(h, w, y, compute_dtype="bfloat16")
    chunked_nll(h, w, y, outputs="lse")
    chunked_nll(h, w, y, outputs=("lsee",))
    {window}(h, nonfinite="dropp")
    chunked_nll(h, w, y).los
    reveal_type(chunked_nll(h, w, y, reduction="sum", outputs=("lse",)).loss)
"""
PATHS = ("", ".api", ".accumulate")
READ = [f"xentlib.{x}{path}" for x in ("torch", "jax") for path in PATHS]
READ += ["torch", "jax", "xentlib.nll", "xentlib.logprobs", "xentlib.options", "xentlib.results"]
READ += ["xentlib.checks.call"]  # of a decorator
SETTINGS = f"""
[mypy]
python_version = 3.11
follow_imports = skip
[mypy-{",".join(READ)}]
follow_imports = silent
"""
KINDS = {"torch": ("Tensor", "TokenNormalizer"), "jax": ("Array", "token_normalized")}


@pytest.mark.slow
def test_a_type_checker_finds_a_wrong_option_and_knows_the_result(tmp_path):
    """`reduction="meen"` is an error in an editor, and `loss` a tensor or an array. What has no
    signature of ours is skipped, and the frameworks are stubs of one class each: mypy would read
    the whole of them for half a minute."""
    pytest.importorskip("mypy")
    for package, (array, window) in KINDS.items():
        (tmp_path / "stubs" / package).mkdir(parents=True)
        (tmp_path / "stubs" / package / "__init__.pyi").write_text(f"class {array}: ...\n")
        text = CALLS.format(package=package, array=array, window=window)
        (tmp_path / f"of_{package}.py").write_text(text)
    files = [f"of_{package}.py" for package in KINDS]
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"MYPYPATH": f"stubs:{ROOT}"},
    )
    for package, (array, _) in KINDS.items():
        lines = [x for x in done.stdout.splitlines() if x.startswith(f"of_{package}.py:")]
        said = [(int(x.split(":")[1]), x) for x in lines]
        wrong = {line: text for line, text in said if ": error: " in text}
        assert sorted(wrong) == [5, 6, 7, 8, 9, 10, 11], done.stdout + done.stderr
        assert "'mean'" in wrong[5]
        assert "'VH'" in wrong[6]
        assert 'no attribute "los"' in wrong[11]
        (shown,) = [text for _, text in said if "Revealed type" in text]
        assert f'"{package}.{array}"' in shown
