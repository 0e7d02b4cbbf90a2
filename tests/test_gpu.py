"""`make gpu`, tried on the CPU: what runs on a device for ten minutes has to be right at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def gpu(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, ".ci/gpu.py", "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (out / "gpu.json").exists(), done.stderr
    return done.returncode, json.loads((out / "gpu.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_part(tmp_path):
    pytest.importorskip("matplotlib")
    rc, found = gpu(tmp_path, "--parts", "first", "probe", "tests", "bench", "--first", "plan",
                    "--tests", "plan", "--cases", "tiny", "--rounds", "1", "--tiny",
                    "--share", "2")  # fmt: skip
    assert rc == 0, found
    assert found["first"]["counts"]["passed"] > 10
    assert found["tests"]["counts"]["passed"] > 10
    assert found["bench"]["bench"]["runs"]
    rows = found["probe"]["probe"]["heads"]
    assert {row["kernels"] for row in rows} >= {"eager"}
    assert all(row["predicted_bytes"] > 0 for row in rows)


@pytest.mark.slow
def test_what_fails_is_kept(tmp_path):
    rc, found = gpu(tmp_path, "--parts", "tests", "--tests", "no_such_module")
    assert rc == 1
    assert "no tests ran" in found["tests"]["output"]


@pytest.mark.slow
def test_what_is_late_is_stopped(tmp_path):
    rc, found = gpu(tmp_path, "--parts", "parity", "--share", "0.02")
    assert rc == 1
    assert found["parity"]["late"]
    assert found["parity"]["rc"]
