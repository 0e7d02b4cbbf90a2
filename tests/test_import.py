"""What `import xentlib.torch` and `import xentlib.jax` load of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
