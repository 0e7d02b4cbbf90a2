"""`make gpu`, tried on the CPU: what runs on a device for minutes has to be right at once."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from conftest import INSTALLED
from helpers.scripts import load
from xentlib.tools.cli.command import _parser as command_line

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))  # as for a script that lies there
GPU = load(ROOT / ".ci" / "gpu.py")


def gpu(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, ".ci/gpu.py", "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (out / "gpu.json").exists(), done.stderr
    return done.returncode, json.loads((out / "gpu.json").read_text(encoding="utf-8"))


TINY = ["--first", "plan", "--cases", "tiny", "--rounds", "1", "--tiny", "--share", "3"]


@pytest.mark.slow
@pytest.mark.full
def test_parts(tmp_path):
    """In a folder that has been there, with something of somebody's in it."""
    (tmp_path / "kept.log").write_text("kept")
    rc, parts = gpu(tmp_path, "--parts", "smoke", "first", "sanitizer", *TINY)
    assert rc == 0, parts
    assert parts["first"]["counts"]["passed"] > 10
    rows = parts["smoke"]["probe"]["heads"]
    assert {row["kernels"] for row in rows} >= {"eager"}
    assert all(row["predicted_bytes"] > 0 for row in rows)
    assert (tmp_path / "kept.log").exists()
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert {"parts/first.jsonl", "parts/smoke.json"} <= set(archive.getnames())


@pytest.mark.slow
@pytest.mark.full
def test_bench(tmp_path):
    """Ours beside the bare products, then everybody."""
    pytest.importorskip("matplotlib")
    rc, parts = gpu(tmp_path, "--parts", "bench", *TINY)
    assert rc == 0, parts
    runs = parts["bench"]["runs"]
    bare = {"bare GEMMs", "bare GEMMs, old buffers", "xentlib"}
    others = [{row["contestant"] for row in run["rows"]} - bare for run in runs]
    assert [len(x) for x in others] == [0] * len(INSTALLED) + [1] * (len(runs) - len(INSTALLED))
    assert {"eager, full logits"} in others


def test_commands_have_options_that_exist(tmp_path):
    """Of parts that take their time: `bench` and both of `parity`."""
    args = GPU.parser().parse_args(["--out", str(tmp_path)])
    parts = "bench", "parity", "parity-triton"
    commands = [command for part in parts for command in GPU.COMMANDS[part](args, tmp_path)]
    assert len(commands) > len(args.cases) * len(INSTALLED) + 2
    for command in commands:
        assert command[1:3] == ["-m", "xentlib"]
        command_line(command[3:]).parse_args(command[3:])


@pytest.mark.parametrize("framework", INSTALLED)
def test_implementations_have_names_that_exist(framework):
    field = importlib.import_module(f"xentlib.tools.bench.implementations_{framework}")
    given = [importlib.import_module("torch").bfloat16] if framework == "torch" else []
    known = {row.name for row in field.implementations(*given)}
    assert {name for _, name in GPU.PEERS[framework]} < known


@pytest.mark.slow
def test_what_fails_is_kept(tmp_path):
    rc, parts = gpu(tmp_path, "--parts", "tests", "--tests", "no_such_module")
    assert rc == 1
    assert "no tests ran" in parts["tests"]["output"]


@pytest.mark.slow
def test_what_is_late_is_stopped(tmp_path):
    rc, parts = gpu(tmp_path, "--parts", "tests", "--share", "0.002")
    assert rc == 1
    assert parts["tests"]["late"]
    assert parts["tests"]["rc"]


def test_sittings_end_in_nine_minutes():
    timings = sum(GPU.TIMINGS.values()) + len(GPU.TIMINGS) * GPU.GRACE
    checks = max(GPU.CHECKS.values()) + sum(GPU.AFTER.values()) + 2 * GPU.GRACE
    assert max(timings, checks) <= 540


def test_what_was_interrupted_has_not_passed(tmp_path):
    """Its set-up has, and nothing follows; of the others the worst phase counts."""
    ended = [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]
    tests = {
        "ended": ended,
        "under way": ended[:1],
        "called": ended[:2],
        "fails": [ended[0], ("call", "failed"), ended[2]],
        "fails at its end": [*ended[:2], ("teardown", "failed")],
        "skipped": [("setup", "skipped"), ended[2]],
    }
    lines = [
        {"test": test, "when": when, "outcome": outcome, "said": "why"}
        for test, phases in tests.items()
        for when, outcome in phases
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = GPU.read_tests(tmp_path / "lines")
    assert outcomes["counts"] == {"passed": 1, "failed": 2, "skipped": 1, "interrupted": 2}
    assert outcomes["failed"] == {"fails": "why", "fails at its end": "why"}


def test_wheels_of_peers_are_unpacked(tmp_path, monkeypatch):
    """CuTe's come in parts, one of which is a line that says where the modules of another lie."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    wheels, folder = tmp_path / "wheels", tmp_path / "peers"
    wheels.mkdir()
    assert GPU.unpacked(None, folder) == []
    assert GPU.unpacked(wheels, folder) == []  # a folder without any
    line = "import sys, some_peer; sys.path.insert(0, some_peer.__path__[0] + '/in')"
    parts = {"a": {"some_peer.pth": line}, "b": {"some_peer/in/its_language.py": "WORD = 7"}}
    for name, files in parts.items():
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
    assert GPU.unpacked(wheels, folder) == [str(folder / "some_peer/in"), str(folder)]
    assert importlib.import_module("its_language").WORD == 7
