"""`xentlib doctor`: ranges and versions are those of the project, what is missing or broken is said
with its way out, and a row that falls short is no success."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partialmethod
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import xentlib
from xentlib.tools import cli
from xentlib.tools.cli import doctor as command
from xentlib.tools.doctor import backends, packages
from xentlib.tools.doctor.packages import PACKAGES, Package, inspect, ranges, within
from xentlib.tools.harness import backends as parity_backends
from xentlib.tools.harness import findings
from xentlib.tools.parity import suite

ROOT = Path(__file__).resolve().parents[2]


def doctor(capsys, *arguments):
    """Exit status, and what was said."""
    status = cli.main(["doctor", *arguments])
    return status, capsys.readouterr()


def found_of(text):
    return {one["name"]: one for one in json.loads(text)["findings"]}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the command sets for JAX is taken back; of packages those are imported that compute."""
    needed = (*command.NEEDED, *command.BACKENDS)
    monkeypatch.setattr(command, "PACKAGES", [x for x in PACKAGES if x.name in needed])
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)


# --- packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_versions_and_extras_are_those_of_the_project(package):
    """Each version that is said to be tested is pinned for some run of the suite."""
    if not (ROOT / "constraints.txt").is_file():
        pytest.skip("the sources are not there")
    texts = [
        (ROOT / f"constraints{which}.txt").read_text(encoding="utf-8").splitlines()
        for which in ("-oldest", "", "-newest")
    ]
    start = f"{package.name}=="
    pinned = [x.removeprefix(start) for text in texts for x in text if x.startswith(start)]
    assert package.tested == tuple(dict.fromkeys(pinned)) or package.name == "torchtitan"
    if package.extra:
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extra = project["optional-dependencies"][package.extra]
        assert any(x.startswith(package.name) for x in extra)
    assert packages.release(package.tested[0]) <= packages.release(package.tested[-1])


def test_ranges_are_those_of_pyproject():
    found = ranges()
    assert found["jax"] == ">=0.10.2,<0.13"
    assert found["torch"].startswith(">=2.")
    assert found["numpy"].startswith(">=1.")


def test_ranges_without_the_sources_are_those_of_the_installation(monkeypatch, tmp_path):
    there = tmp_path / "site" / "xentlib" / "__init__.py"
    monkeypatch.setattr(packages.xentlib, "__file__", str(there))
    said = ["numpy>=1.26", "jax<0.12,>=0.10.2; extra == 'jax'", "xentlib[torch]; extra == 'hf'"]
    monkeypatch.setattr(metadata, "requires", lambda name: said)
    assert ranges() == {"numpy": ">=1.26", "jax": "<0.12,>=0.10.2"}


@pytest.mark.parametrize(
    ("version", "admits", "inside"),
    [
        ("0.10.2", ">=0.10.2,<0.12", True),
        ("0.11.9", ">=0.10.2,<0.12", True),
        ("0.12.0", ">=0.10.2,<0.12", False),
        ("0.9.2", ">=0.10.2,<0.12", False),
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("5.0.0", ">=5", True),
        ("4.57.0", ">=5", False),
        ("1.0", "", True),
    ],
)
def test_a_version_is_in_its_range(version, admits, inside):
    assert within(version, admits) is inside


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("1.1", "bad", "outside of what xentlib admits"),
        ("1.4", "ok", "tested with 1.2 to 1.4"),
        ("1.9", "note", "newer than what was tested"),
        ("1.1.5", "note", "older than what was tested"),
    ],
)
def test_a_package_is_judged_by_its_version(monkeypatch, version, status, words):
    monkeypatch.setattr(packages, "version_of", lambda name: version)
    package = Package("numpy", "numpy", "trainers", "hf", "something", ("1.2", "1.4"))
    found = inspect(package, {"numpy": ">=1.1.5"})
    assert (found.status, words in found.said) == (status, True)
    assert bool(found.cure) is (status == "bad")


def test_a_package_that_is_not_there_names_the_extra():
    found = inspect(Package("nothing", "no_such_module", "trainers", "hf", "x", ("1",)), {})
    assert (found.status, found.cure) == ("absent", "pip install 'xentlib[hf]'")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder of packages with NumPy and ml_dtypes alone, as `pip install xentlib` makes it."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("numpy", "ml_dtypes"):
        home = metadata.distribution(name).locate_file("")
        for path in Path(str(home)).glob(f"{name}*"):
            (folder / path.name).symlink_to(path)
    (folder / "xentlib").symlink_to(Path(xentlib.__file__).parent)
    return folder


def alone(folder, *arguments, **environment):
    code = f"import sys; sys.path.append({str(folder)!r}); from xentlib.tools.cli import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_without_a_framework_it_says_what_to_install(bare):
    done = alone(bare)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "xentlib: nothing can be computed here, as neither PyTorch nor JAX is installed; install "
        "with `pip install 'xentlib[torch]'`, `pip install 'xentlib[jax]'` or both.\n"
    )
    (absent,) = [x for x in done.stdout.splitlines() if "not installed" in x]
    for name, extra in (("torch", "torch"), ("jax", "jax"), ("peft", "hf")):
        assert f"{name} (pip install 'xentlib[{extra}]')" in absent
    assert "numpy" in done.stdout


def test_without_a_framework_a_model_is_read_all_the_same(bare, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    done = alone(bare, "--model", str(tmp_path), "--tokens", "8192", "--json")
    assert done.returncode == 2
    found = found_of(done.stdout)
    assert "V = 128,256, H = 4,096, not tied, bfloat16" in found["head"]["said"]
    assert "1.96 GiB in bfloat16, 3.91 GiB in float32" in found["full logits"]["said"]
    assert found["patch"]["cure"] == "pip install 'xentlib[hf]'"


def test_a_framework_that_cannot_be_imported_is_named(bare, tmp_path):
    for path in bare.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: not found')\n")
    done = alone(tmp_path, "--json")
    assert done.returncode == 2
    said = [x for x in json.loads(done.stdout)["findings"] if x["status"] == "bad"]
    assert [x["name"] for x in said] == ["torch"]
    assert "OSError: libcudart.so: not found" in said[0]["said"]
    assert "marked BAD cannot be used: torch." in done.stderr


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.cpu
def test_rows_are_measured_and_counted(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(command, "find_spec", lambda name: name == "torch" or None)
    status, said = doctor(capsys, "--json", "--device", "cpu")
    document = json.loads(said.out)
    rows = {one["row"] for one in document["measurements"]}
    assert rows == {"A0", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A11", "A16", "A19"}
    found = found_of(said.out)["rows"]
    assert found["status"] == "ok"
    assert found["said"].startswith(f"{len(document['measurements'])} measurements of rows A0, A2")
    assert document["usable"] == ["torch"]
    assert status == (1 if any(x["status"] == "bad" for x in document["findings"]) else 0)


@pytest.mark.torch
@pytest.mark.cpu
def test_a_row_that_falls_short_is_exit_status_1(capsys, monkeypatch):
    pytest.importorskip("torch")
    right, make = parity_backends.run, findings.Findings.__init__

    def wrong(*arguments, **keywords):
        outcome = right(*arguments, **keywords)
        return outcome._replace(d_weight=(outcome.d_weight * np.float32(1.001)))

    monkeypatch.setattr(findings.Findings, "__init__", partialmethod(make, run=wrong))
    sections = suite.few_sections
    monkeypatch.setattr(suite, "few_sections", lambda *given: sections(*given)[:1])
    monkeypatch.setattr(command, "find_spec", lambda name: name == "torch" or None)
    status, said = doctor(capsys, "--device", "cpu")
    assert status == 1
    assert "A6 torch d weight" in said.out
    assert "BAD" in said.err


@pytest.mark.jax
@pytest.mark.cpu
@pytest.mark.parametrize("platforms", ["nothing", "cuda"])
def test_a_jax_without_a_device_is_not_usable(platforms):
    """JAX raises RuntimeError of the one and AssertionError of the other."""
    pytest.importorskip("jax")
    code = "import sys; from xentlib.tools.cli import doctor as c, main; "
    code += "c.find_spec = lambda name: name == 'jax' or None; "
    # Of others, which take most of the time, nothing is said here.
    code += "c.PACKAGES = [x for x in c.PACKAGES if x.name in (*c.NEEDED, 'jax', 'jaxlib')]; "
    code += "sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": platforms},
    )
    assert done.returncode == 2, done.stderr
    document = json.loads(done.stdout)
    assert (document["usable"], document["measurements"]) == ([], [])
    found = {(x["part"], x["name"]): x for x in document["findings"]}[("devices", "jax")]
    assert found["status"] == "bad"
    assert "JAX_PLATFORMS" in found["cure"]
    assert "marked BAD cannot be used: jax." in done.stderr


@pytest.mark.torch
def test_kernels_that_cannot_be_chosen_are_said(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XENTLIB_KERNELS", "fast")
    status, said = doctor(capsys, "--no-rows", "--json", "--device", "cpu")
    assert status == 1
    found = found_of(said.out)["PyTorch"]
    assert "`XENTLIB_KERNELS` must be one of auto, eager, triton; got 'fast'" in found["said"]
    monkeypatch.setenv("XENTLIB_KERNELS", "eager")
    _, said = doctor(capsys, "--no-rows", "--json", "--device", "cpu")
    assert found_of(said.out)["PyTorch"]["said"].endswith("as XENTLIB_KERNELS=eager says")


@pytest.mark.torch
@pytest.mark.cpu
def test_kernels_are_those_of_the_device_that_is_here():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("of a machine without a GPU")
    assert backends._kernels(torch).said.startswith("eager operators compute on cpu")


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_tokens_are_at_least_one(capsys, value):
    status, said = doctor(capsys, "--tokens", value)
    assert status == 2
    assert f"must be a whole number, 1 or more; got '{value}'" in said.err


# --- machines that are not here -------------------------------------------------------------------


def a_torch(devices=0, cuda=None):
    """What is asked of PyTorch on a machine with so many GPUs, of a build for this CUDA."""
    card = SimpleNamespace(name="H200", total_memory=140 * 2**30, major=9, minor=0)
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: devices > 0,
            device_count=lambda: devices,
            get_device_properties=lambda index: card,
        ),
        version=SimpleNamespace(cuda=cuda, hip=None),
        get_num_threads=lambda: 2,
    )


def test_every_gpu_of_pytorch_is_listed():
    found = backends.torch_devices(a_torch(devices=2, cuda="13.0"))
    assert [x.name for x in found] == ["torch cuda:0", "torch cuda:1"]
    assert {x.said for x in found} == {"H200, 140 GiB, compute capability 9.0"}


@pytest.mark.parametrize(
    ("cuda", "driver", "status", "words"),
    [
        (None, False, "ok", ""),
        (None, True, "note", "install PyTorch's CUDA build"),
        ("13.0", True, "note", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_pytorch_does_not_see(monkeypatch, cuda, driver, status, words):
    monkeypatch.setattr(backends, "driver", lambda: driver)
    (found,) = backends.torch_devices(a_torch(cuda=cuda))
    assert (found.status, words in found.cure) == (status, True)


@pytest.mark.jax
@pytest.mark.cpu
@pytest.mark.parametrize("driver", [False, True])
def test_a_gpu_that_jax_has_no_plugin_for(monkeypatch, driver):
    pytest.importorskip("jax")
    monkeypatch.setattr(backends, "driver", lambda: driver)
    monkeypatch.delenv("JAX_PLATFORMS")
    found, _ = backends.jax_findings()
    assert (found.status, "jax[cuda13]" in found.cure) == ("note" if driver else "ok", driver)
