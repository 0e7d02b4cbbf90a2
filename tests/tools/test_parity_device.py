"""Where a parity run computes: without a device, on the two that every machine has."""

from __future__ import annotations

import numpy as np
import pytest

from xentlib.tools.harness import device
from xentlib.tools.harness.device import on_device, on_jax


@pytest.mark.torch
@pytest.mark.cpu
def test_what_a_run_makes_is_on_its_device() -> None:
    """PyTorch's meta device has sizes and no numbers. Catches: a run that says cuda and computes
    on the CPU."""
    torch = pytest.importorskip("torch")
    with on_device("meta", ["torch"]):
        assert torch.zeros(3).device.type == "meta"
    assert torch.zeros(3).device.type == "cpu"


@pytest.mark.jax
@pytest.mark.cpu
def test_arrays_go_to_the_device_that_is_the_default() -> None:
    """Of the four host devices, the last one."""
    jax = pytest.importorskip("jax")
    last = jax.devices("cpu")[-1]
    with jax.default_device(last):
        assert on_jax(np.zeros(3, np.float32)).devices() == {last}


@pytest.mark.jax
def test_programs_are_dropped_before_the_system_gives_no_more_memory(monkeypatch):
    """Catches: a run of many cases that LLVM ends, as its memory is in 65,530 pieces."""
    jax = pytest.importorskip("jax")
    double = jax.jit(lambda x: 2 * x)
    double(1.0)
    device.forget_programs(("jax",))
    assert double._cache_size() == 1
    monkeypatch.setattr(device, "MOST_MAPPINGS", 0)
    device.forget_programs(("torch",))
    assert double._cache_size() == 1
    device.forget_programs(("jax",))
    assert double._cache_size() == 0
