"""`xentlib doctor` imports what it judges: packages that raise, hang, kill their process or print
what they like are planted on the path, and each is a line of the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import xentlib
from xentlib.tools.cli import doctor as command
from xentlib.tools.doctor import backends, imports
from xentlib.tools.doctor.imports import Tried, first_line, try_imports
from xentlib.tools.doctor.packages import PACKAGES, Finding, inspect

RAISES = (
    "import sys\nsys.half_imported = True\nraise OSError('libcudart.so: not found\\nand more')\n"
)
NUMPYS = (
    "raise ImportError('\\n\\nIMPORTANT: the C-extensions failed.') from OSError('no libblas')\n"
)
KILLS = (
    "import os, signal\nos.write(2, b'double free\\n\\n')\nos.kill(os.getpid(), signal.SIGKILL)\n"
)
EXITS = "import os\nos._exit(0)\n"
PRINTS = """
import os, sys
for stream in (sys.stdout, sys.stderr):
    print('{"package": "raises", "done": "", "plugins": []}\\n' * 9999, "\\x00", file=stream)
os.write(1, b"\\xff")
"""
FRESH = "import sys\nassert not hasattr(sys, 'half_imported')\n"
PLANTED = {
    "raises": (RAISES, "`import raises` raises OSError: libcudart.so: not found"),
    "as_numpy": (
        NUMPYS,
        "`import as_numpy` raises ImportError: IMPORTANT: the C-extensions failed. (from OSError",
    ),
    "fresh": (FRESH, ""),
    "kills": (KILLS, "`import kills` ends the process by SIGKILL, with double free"),
    "stops": (EXITS, "`import stops` ends the process with status 0"),
    "leaves": ("import sys\nsys.exit(7)\n", "`import leaves` raises SystemExit: 7"),
    "prints": (PRINTS, ""),
    "asks": ("input('?')\n", "`import asks` raises EOFError: EOF when reading a line"),
    "lacks": ("import no_such\n", "`import lacks` raises ModuleNotFoundError: No module named"),
    "last": ("", ""),
}


def plant(folder, **sources):
    for name, source in sources.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(source)
    return folder


def test_what_becomes_of_broken_packages(tmp_path, monkeypatch):
    """In one chain: those behind a broken one are imported in another process."""
    plant(tmp_path, **{name: source for name, (source, _) in PLANTED.items()})
    monkeypatch.syspath_prepend(tmp_path)
    found = try_imports([{name: (name,) for name in PLANTED}])
    assert {*found} == {*PLANTED}
    for name, (_, said) in PLANTED.items():
        assert found[name].wrong.startswith(said)
        assert bool(found[name].wrong) == bool(said), found[name]


HANGS = """
import os, subprocess, sys, time
late = "import sys, time; file = open(sys.argv[1], 'w'); time.sleep(30); print('lived', file=file)"
subprocess.Popen([sys.executable, "-c", late, {fifo!r}])
open({marker!r}, "w").close()
time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="of sessions")
def test_a_package_that_never_comes_back(tmp_path, monkeypatch):
    """The limit is of a step, not of a chain; what the package has started ends with it."""
    fifo, marker = str(tmp_path / "fifo"), str(tmp_path / "marker")
    os.mkfifo(fifo)
    plant(tmp_path, hangs=HANGS.format(fifo=fifo, marker=marker), good="")
    monkeypatch.syspath_prepend(tmp_path)
    now, looks, left, sleep = [0.0], [0], [], imports.time.sleep

    def later(seconds):
        sleep(seconds)
        looks[0] += Path(marker).exists()
        if looks[0] == 2:  # what it has written down has been read
            left.append(os.open(fifo, os.O_RDONLY))  # open now, so that its end is an end of file
            now[0] += imports.LIMIT + 1

    monkeypatch.setattr(imports, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=later))
    found = try_imports([{"hangs": ("hangs",), "good": ("good",)}])
    assert found == {"hangs": Tried("`import hangs` is not done after 120 s"), "good": Tried()}
    with os.fdopen(left[0]) as reader:
        assert reader.read() == ""


def test_a_step_that_is_done_begins_the_limit_anew(tmp_path, monkeypatch):
    plant(tmp_path, first="", second="")
    monkeypatch.syspath_prepend(tmp_path)
    steps = tmp_path / "steps"
    monkeypatch.setattr(imports, "LIMIT", 1.0)
    chain = imports._Chain({"first": ("first",)}, steps, imports.ExitStack())
    chain._process.wait()
    monkeypatch.setattr(chain, "_process", SimpleNamespace(poll=lambda: None, pid=0))
    monkeypatch.setattr(imports, "_end", lambda process: None)
    now = [0.0]
    monkeypatch.setattr(imports, "time", SimpleNamespace(monotonic=lambda: now[0]))
    chain._since, chain._size = 0.0, 0
    now[0] = 5.0
    assert not chain.ended()  # it has written since
    now[0] = 7.0
    assert chain.ended()
    assert chain.late


def test_functions_are_called_and_what_they_raise_is_for_others(tmp_path, monkeypatch):
    code = "import os\ndef raises(): raise ValueError\ndef kills(): os._exit(3)\n"
    plant(tmp_path, calls=code, others=code, good="")
    monkeypatch.syspath_prepend(tmp_path)
    chain = {"calls": ("calls", "calls:raises"), "others": ("others:kills",), "good": ("good",)}
    assert try_imports([chain]) == {
        "calls": Tried(),
        "others": Tried("`others.kills()` ends the process with status 3"),
        "good": Tried(),
    }


def test_a_broken_package_is_bad_whatever_its_version():
    (package,) = (x for x in PACKAGES if x.name == "numpy")
    found = inspect(package, {}, Tried("`import numpy` raises OSError: no"))
    assert (found.status, found.said.partition(": ")[2]) == (
        "bad",
        "`import numpy` raises OSError: no",
    )
    assert found.cure.startswith("pip install --force-reinstall numpy")
    assert inspect(package, {}, Tried()).status == "ok"


def test_a_long_line_is_cut():
    assert first_line("\n \n" + "x" * 300 + "\nrest") == "x" * 199 + "…"
    assert first_line("") == ""


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path):
    """A folder of packages with NumPy and ml_dtypes alone."""
    for name in ("numpy", "ml_dtypes"):
        home = metadata.distribution(name).locate_file("")
        for path in Path(str(home)).glob(f"{name}*"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "xentlib").symlink_to(Path(xentlib.__file__).parent)
    return tmp_path


def alone(folder, *arguments):
    code = f"import sys; sys.path.append({str(folder)!r}); from xentlib.tools.cli import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_report_of_broken_packages(bare):
    plant(bare, torch=KILLS, jax=RAISES, flax=PRINTS, optax="x = 1", rich=NUMPYS)
    done = alone(bare)
    assert done.returncode == 2, done.stderr
    lines = done.stdout.splitlines()
    assert done.stderr == (
        "xentlib: nothing can be computed here, as what is marked BAD cannot be used: torch, jax, "
        "rich.\n"
    )
    for name, said in (
        ("torch", "`import torch` ends the process by SIGKILL, with double free"),
        ("jax", "`import jax` raises OSError: libcudart.so: not found"),
        ("rich", "`import rich` raises ImportError: IMPORTANT: the C-extensions failed. (from"),
    ):
        (at,) = [k for k, x in enumerate(lines) if x.startswith(f"  BAD  {name} ")]
        assert said in lines[at]
        assert "-> pip install --force-reinstall " in lines[at + 1]
    assert any(x.startswith("  note flax ") for x in lines)
    (absent,) = [x for x in lines if "not installed" in x]
    assert absent == (
        "not installed, and nothing here asks for it: triton (pip install triton); deepspeed (pip "
        "install 'xentlib[deepspeed]'); transformers, accelerate, peft (pip install 'xentlib[hf]')"
        "; trl, lightning (pip install 'xentlib[trainers]'); torchtitan (pip install torchtitan); "
        "tokenizers (pip install 'xentlib[cli]'); matplotlib (pip install 'xentlib[plot]')"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (NUMPYS, "`import numpy` raises ImportError: IMPORTANT: the C-extensions failed. (from "),
        (KILLS, "`import numpy` ends the process by SIGKILL, with double free"),
        (None, "not installed (the definition)"),
    ],
    ids=["raises", "kills", "absent"],
)
def test_numpy_is_what_all_need(bare, source, said):
    """The command says it, though nothing of xentlib's own can be computed with."""
    for path in bare.glob("numpy*"):
        path.unlink()
    if source is not None:
        plant(bare, numpy=source)
    for arguments in ((), ("--json",)):
        done = alone(bare, *arguments)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith(
            "xentlib: nothing can be computed here, as all of xentlib needs numpy:"
        )
        assert said in line
        assert line.endswith(" numpy, or a fresh environment." if source else " install numpy.")
    assert json.loads(done.stdout)["usable"] == []


PLUGIN = "def initialize():\n    raise RuntimeError('undefined symbol: PJRT')\n"
ONLY = """
import sys
from xentlib.tools.cli import doctor, main

names = ("numpy", "ml_dtypes", "jax")
doctor.PACKAGES = tuple(x for x in doctor.PACKAGES if x.name in names)
doctor.find_spec = lambda name: name == "jax" or None
sys.exit(main(["doctor", "--no-rows", "--json"]))
"""


@pytest.mark.jax
@pytest.mark.cpu
def test_a_plugin_of_jax_that_cannot_be_used_is_a_sentence(tmp_path):
    """JAX writes twenty lines, and computes on the CPU."""
    pytest.importorskip("jax")
    (tmp_path / "jax_plugins").mkdir()
    plant(tmp_path / "jax_plugins", xla_broken=PLUGIN)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ONLY],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stderr
    found = {x["name"]: x for x in json.loads(done.stdout)["findings"]}
    assert found["jax plugin"]["said"] == (
        "a plugin cannot be used, and JAX goes on without it: jax_plugins.xla_broken: "
        "RuntimeError: undefined symbol: PJRT"
    )
    assert (found["jax plugin"]["status"], found["jax"]["status"]) == ("bad", "ok")
    assert done.stderr == (
        "xentlib: xentlib.jax can be imported, and what is marked BAD cannot be used as it is: "
        "jax plugin.\n"
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("accelerator", "cuda", "there", "status"),
    [
        (None, False, (), "bad"),
        ("cpu", True, (), "bad"),
        (None, True, (), "note"),
        ("cuda", False, ("c++",), "note"),
        (None, False, ("c++", "ninja"), None),
    ],
)
def test_a_compiler_where_deepspeed_needs_one(
    monkeypatch, tmp_path, accelerator, cuda, there, status
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if accelerator:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    for name in there:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = backends.compilers()
    assert [x.status for x in found] == [status] * (status is not None)
    for one in found:
        missing = " and ".join(x for x in ("c++", "ninja") if x not in there)
        assert one.said.endswith(f", and cannot find {missing}")
        assert "install ninja" in one.cure


def test_a_compiler_is_looked_for_where_deepspeed_is(monkeypatch):
    """Where it is installed, can be imported, and PyTorch computes."""
    asked = []
    for name, of in {
        "imported": lambda name: None,
        "torch_findings": list,
        "compilers": lambda: asked.append(1) or [Finding("trainers", "compiler", "bad", "no")],
    }.items():
        monkeypatch.setattr(backends, name, of)
    monkeypatch.setattr(command, "find_spec", lambda name: name == "torch" or None)
    monkeypatch.setattr(command, "there", lambda name: True)
    args = SimpleNamespace(model=None, device="cpu", no_rows=True, json=True)
    for wrong, times in (({}, 1), ({"deepspeed": "no"}, 0), ({"torch": "no"}, 0)):
        asked.clear()

        def tried(chains, wrong=wrong):
            return {name: Tried(wrong.get(name, "")) for chain in chains for name in chain}

        monkeypatch.setattr(command, "try_imports", tried)
        assert command.run(args) == (2 if "torch" in wrong else 1)
        assert len(asked) == times


def test_a_model_beside_a_broken_package_is_read_from_its_file():
    pytest.importorskip("transformers")
    from xentlib.tools.doctor import model

    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64}
    found = {x.name: x for x in model.findings(config, 100, {"transformers"})}
    assert found["patch"].said == "not tried, as transformers cannot be imported"
    assert "V = 320, H = 64" in found["head"].said
