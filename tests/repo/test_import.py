"""What `import xentlib.torch` and `import xentlib.jax` load of ours."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from helpers.modules import ROOT

MODULES = 60
# What only measures: the tools, the contract, the oracle.
MEASURES = ("xentlib.tools", "xentlib.contract", "xentlib.reference", "xentlib.budgets")
# And what a call without it does not need.
ROOMS = ("integrations", "wrappers.fsdp2", "wrappers.deepspeed", "wrappers.peft", "triton")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(x for x in sys.modules if x.startswith('xentlib')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_an_import_loads_what_a_call_needs(name):
    pytest.importorskip(name)
    package = f"xentlib.{name}"
    loaded = loaded_by(f"import {package}")
    assert len(loaded) <= MODULES, sorted(loaded)
    others = (*MEASURES, *(f"{package}.{room}" for room in ROOMS), "xentlib.plan.routes")
    assert not [x for x in loaded if x.startswith(others)]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_every_public_name_loads(name):
    """Each by itself: none may need another's module to be there."""
    pytest.importorskip(name)
    package = __import__(f"xentlib.{name}", fromlist=["__all__"])
    eager = "import flax\n" if name == "jax" else ""
    if eager:
        pytest.importorskip("flax")
    for public in package.__all__:
        assert getattr(package, public).__name__
    loaded_by(f"{eager}from xentlib.{name} import *")
    with pytest.raises(AttributeError, match=f"module 'xentlib.{name}' has no attribute 'other'"):
        package.other  # noqa: B018 - it raises


# What a profiler's hook sees of ours between the public function and the first product of a second
# call, packages and what `make public` writes apart: in how many files, and the most calls. Both
# only get smaller. 18 and 250 are the goals, of which files one, `losses/loss.py`, has what every
# loss does around its loop.
WALKS = {
    ("torch", "nll"): (17, 250),
    ("torch", "divergence"): (21, 420),
    ("jax", "nll"): (17, 250),
    ("jax", "divergence"): (20, 460),
}
GENERATED = ("__init__.py", "api.py", "arguments.py")
PRODUCT = {"torch": "mm", "jax": "contract"}  # of core/gemm.py

WAY = """
import sys
from pathlib import Path

root, product, written = Path({root!r}).resolve(), {product!r}, {written!r}
calls = []
sys.path.append(str(root / "tests"))


class Reached(Exception):
    pass


def hook(frame, event, _):
    path = Path(frame.f_code.co_filename).resolve()
    if event == "call" and path.is_relative_to(root):
        calls.append(path.relative_to(root))
    if frame.f_code.co_name == product and path.name == "gemm.py":
        sys.setprofile(None)
        raise Reached


{imports}
for loss in ({losses}):
    loss(8)
    calls.clear()
    sys.setprofile(hook)
    try:
        loss(9)
    except Reached:
        pass
    ours = [x for x in calls if x.parts[0] in ("xentlib", "torch_impl", "jax_impl")]
    names = {{x.as_posix(): None for x in ours if x.name not in written}}
    print(len(ours), *names)
"""
IMPORTS = {
    "torch": """
import torch
import xentlib.torch as X

def made(count):
    return (torch.ones(n, 4, requires_grad=True) for n in (count, 6))

def nll(count):
    x, w = made(count)
    X.chunked_nll(x, w, torch.arange(count) % 6)

def divergence(count):
    x, w = made(count)
    X.chunked_divergence(x, w, X.TeacherHead(x.detach(), w.detach()))
    """,
    "jax": """
import jax, jax.numpy as jnp
import xentlib.jax as X
from helpers.compiling import Compiling

Compiling().set(True)

def made(count):
    return (jnp.ones((n, 4)) for n in (count, 16))

def nll(count):
    x, w = made(count)
    y = jnp.arange(count) % 6
    jax.grad(lambda x, w: X.chunked_nll(x, w, y).loss, (0, 1))(x, w)

def divergence(count):
    x, w = made(count)
    X.chunked_divergence(x, w, X.TeacherHead(x, w))
    """,
}


@cache
def walks(name: str) -> dict[str, tuple[int, list[str]]]:
    """Of each function, the calls and the files; both in one process."""
    functions = [function for backend, function in WALKS if backend == name]
    how = {"root": str(ROOT), "product": PRODUCT[name], "written": GENERATED}
    code = WAY.format(imports=IMPORTS[name], losses=", ".join(functions), **how)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {x: (int(calls), files) for x, (calls, *files) in zip(functions, lines, strict=True)}


@pytest.mark.parametrize(("name", "function"), WALKS)
def test_a_call_is_a_short_walk(name, function):
    """The second call, of a size that no program was compiled for."""
    pytest.importorskip(name)
    if not (ROOT / "torch_impl").is_dir():
        pytest.skip("the sources are not there")
    calls, files = walks(name)[function]
    assert any(x.endswith("core/gemm.py") for x in files)
    most_files, most_calls = WALKS[name, function]
    assert len(files) == most_files, files
    assert calls <= most_calls


def test_the_page_says_how_long_a_walk_is():
    page = " ".join((ROOT / "docs" / "design.md").read_text("utf-8").split())
    (files, calls), (in_jax, _) = WALKS["torch", "nll"], WALKS["jax", "nll"]
    assert f"in {files} files in PyTorch and {in_jax} in JAX, and at most {calls} calls" in page


# Between the public function and the first product of one rank, of a head that several share. May
# only get smaller.
ROUTES = {"vocab_parallel": 21, "tokens_parallel": 23, "head": 18, "hidden": 24, "stream": 24}


def files_of_routes(rank, world):
    """By route, the files of ours that a second call goes through before its first product."""
    import torch
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import chunked_nll

    group, files = dist.group.WORLD, []

    def hook(frame, event, _):
        path = Path(frame.f_code.co_filename).resolve()
        if event == "call" and path.is_relative_to(ROOT) and path not in files:
            files.append(path)
        if frame.f_code.co_name == "mm" and path.name == "gemm.py":
            sys.setprofile(None)

    def called(way):
        torch.manual_seed(rank if way != "vocab_parallel" else 0)
        hidden, labels = torch.randn(8, 4).requires_grad_(), torch.arange(8) % 6
        if way.endswith("parallel"):
            weight = (torch.randn(6 // world, 4) + rank).requires_grad_()
            options = {"vocab_parallel": group}
            if way == "tokens_parallel":
                options |= {way: group, "reduction": "sum"}
        else:
            head = torch.nn.Linear(4, 6, bias=False)
            fully_shard(head, mesh=dist.init_device_mesh("cpu", (world,)))
            weight, options = head.weight, {"gather": way}
        for profile in (None, hook):
            files.clear()
            sys.setprofile(profile)
            chunked_nll(hidden, weight, labels, **options)
            sys.setprofile(None)
        names = [x.relative_to(ROOT).as_posix() for x in files if x.name not in GENERATED]
        # PEFT's is there where a test of this process has loaded PEFT.
        ours = [x for x in names if x.startswith(("xentlib/", "torch_impl/"))]
        return [x for x in ours if x != "torch_impl/wrappers/peft.py"]

    return {way: called(way) for way in ROUTES}


@pytest.mark.slow
def test_a_route_goes_through_few_files():
    pytest.importorskip("torch")
    if not (ROOT / "torch_impl").is_dir():
        pytest.skip("the sources are not there")
    from helpers.ranks import launch

    for of_rank in launch(2, files_of_routes):
        counts = {way: len(files) for way, files in of_rank.items()}
        assert counts == ROUTES, of_rank
