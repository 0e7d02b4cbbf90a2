"""What a reader meets who follows one call: how many types of ours, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

from helpers.modules import ROOT

if not (ROOT / "torch_impl").is_dir():
    pytest.skip("the sources are not there", allow_module_level=True)

# May only get smaller.
TYPES = {
    ("torch", "nll"): 40,
    ("torch", "divergence"): 51,
    ("jax", "nll"): 29,
    ("jax", "divergence"): 39,
}
SEEN = """
import sys

sys.path.append({tests!r})
found = set()
{frameworks}

def hook(frame, event, value):
    if event == "return" and "xentlib" in frame.f_globals.get("__name__", ""):
        for x in (*frame.f_locals.values(), value):
            of = x if isinstance(x, type) else type(x)
            found.update([of.__qualname__] if of.__module__.startswith("xentlib") else [])


for loss in {losses}:
    call = made(loss)
    found.clear()
    sys.setprofile(hook)
    call()
    sys.setprofile(None)
    print(*sorted(found))
"""
FRAMEWORKS = {
    "torch": """
import torch
import xentlib.torch as X

x, w, y = torch.ones(16, 8, requires_grad=True), torch.ones(32, 8), torch.arange(16)
teacher = X.TeacherHead(torch.zeros(16, 8), w)

def made(loss):
    call = lambda: eval(loss).backward()
    call()
    return call
    """,
    "jax": """
import jax, jax.numpy as jnp
import xentlib.jax as X
from helpers.compiling import Compiling

Compiling().set(True)

y, teacher = jnp.arange(16), X.TeacherHead(jnp.zeros((16, 8)), jnp.ones((32, 8)))

def made(loss):
    step = jax.value_and_grad(eval("lambda x, w: " + loss), (0, 1))
    arrays = jnp.ones((16, 8)), jnp.ones((32, 8))
    call = lambda: step(*arrays)
    jax.eval_shape(step, *arrays)  # which imports all that a call does, and compiles nothing
    jax.clear_caches()
    return call
    """,
}
LOSSES = {
    "nll": "X.chunked_nll(x, w, y).loss",
    "divergence": "X.chunked_divergence(x, w, teacher).loss",
}


@cache
def types(name: str) -> dict[str, list[str]]:
    """Of each function; both in one process."""
    code = SEEN.format(
        tests=str(ROOT / "tests"), frameworks=FRAMEWORKS[name], losses=[*LOSSES.values()]
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(LOSSES, map(str.split, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("name", "function"), TYPES)
def test_types_that_a_reader_meets(name: str, function: str) -> None:
    pytest.importorskip(name)
    found = types(name)[function]
    assert len(found) == TYPES[name, function], found
