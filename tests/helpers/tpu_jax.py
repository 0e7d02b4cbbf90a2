"""A TPU's traits on this device, and what a trace has."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from xentlib.jax.core import device

CPU = device.KINDS["cpu"]


@pytest.fixture
def as_on_a_tpu(monkeypatch: Any) -> Any:
    """Its traits, but for those of products on a CPU: the rows and entries of a chunk."""
    more = {"least_rows": CPU.least_rows, "least_entries": CPU.least_entries, "scatters_wide": True}
    monkeypatch.setattr(device, "KINDS", {"cpu": device.KINDS["tpu"]._replace(**more)})
    jax.clear_caches()
    yield
    jax.clear_caches()


def equations(jaxpr: Any) -> Any:
    """Names and types, without those of variables and functions, which a mesh changes."""
    for one in jaxpr.eqns:
        yield one.primitive.name, *(str(x.aval) for x in (*one.invars, *one.outvars))
        for value in jax.tree.leaves(one.params):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
