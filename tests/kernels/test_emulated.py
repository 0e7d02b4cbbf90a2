"""Device tests on an emulated device: what a test does wrong there, it does wrong on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.cpu, pytest.mark.slow]
TESTS = Path(__file__).parents[1]
# What the emulation has not: compilers, fake tensors, functional transforms, a choice of kernels;
# products of a device, for which it has MKL's, whose bits depend on the number of threads.
BEYOND = ("graph", "compile", "memory_is_what", "checkpoint", "the_choice", "nothing_compiles_for")
BEYOND += ("run_to_run", "threads_and_runs")
EAGER = ("nll", "nll_edges", "logprobs", "given_logits", "work_torch")
TRITON = ("kernels", "kernels_triton", "contract_triton", "device_torch")


def emulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.emulated"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=TESTS.parent,
        env=os.environ | {"XENTLIB_DEVICE": "cuda", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("modules", "asked"),
    [
        (EAGER, ""),
        (("device_torch",), "no_call_waits and plain-eager"),
        pytest.param(TRITON, "", marks=pytest.mark.full),
    ],
    ids=["eager", "no wait", "Triton"],
)
def test_device_tests_are_right_about_the_device(modules: tuple[str, ...], asked: str) -> None:
    """Catches: `.numpy()` of what is on the device, operands on two, a number that is read."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        pytest.skip("PyTorch or Triton is not installed")
    named = " and ".join(f"not {word}" for word in BEYOND)
    folders = {path.name: str(path) for path in TESTS.glob("*/test_*.py")}
    files = [folders[f"test_{name}.py"] for name in modules]
    done = emulated("--quick", "-k", f"{named} and ({asked})" if asked else named, *files)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


# Parts of `make gpu` as they will run, and words of what each has then kept. Timings say nothing.
# `tests` is a run of pytest as `first` is; rows of parity take the interpreter over three minutes.
PARTS = {
    "smoke": "predicted_bytes",
    "probe": "tiles",
    "bench": "xentlib",
    "first": "passed",
}


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_make_gpu(tmp_path: Path, part: str) -> None:
    """Catches: what is given or read on the wrong side in a script that no other test runs."""
    here = [TESTS / "helpers" / "emulated_site", TESTS, TESTS.parent]
    command = [sys.executable, ".ci/gpu.py", "--device", "cuda", "--out", str(tmp_path)]
    command += ["--parts", part, "--tiny", "--share", "9", "--cases", "tiny", "--rounds", "1"]
    command += ["--first", "device_torch"]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, here)),
            "PYTEST_ADDOPTS": f"-k '{' and '.join(f'not {word}' for word in BEYOND)}'",
        },
        check=False,
    )
    parts = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert parts[part]["rc"] == done.returncode == 0, parts[part]
    assert PARTS[part] in json.dumps(parts[part])


FAULTS = {
    "x.numpy()": "can't convert cuda:0",
    "x + torch.ones(3, device='cpu')": "Expected all tensors on one device",
    "torch.rand(3, generator=torch.Generator())": "Expected a 'cuda' device type for generator",
    "torch.cuda.set_sync_debug_mode('error') or x.sum().item()": "synchronizing CUDA operation",
}


def test_the_emulation_refuses_what_a_device_refuses(tmp_path: Path) -> None:
    code = ["import conftest, pytest, torch", "def test_right():"]
    code += ["    assert torch.ones(3).cpu().numpy().sum() == 3"]
    for number, (fault, words) in enumerate(FAULTS.items()):
        code += [f"def test_{number}():", "    x = torch.ones(3)"]
        code += [f"    with pytest.raises((TypeError, RuntimeError), match={words!r}):"]
        code += [f"        {fault}"]
    (tmp_path / "test_faults.py").write_text("\n".join(code) + "\n")
    done = emulated(str(tmp_path / "test_faults.py"))
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{len(FAULTS) + 1} passed" in done.stdout
