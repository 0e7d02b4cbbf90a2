"""What JAX's programs are compiled with under a test, and under one that is marked `optimized`."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax is not installed", allow_module_level=True)

import jax

from helpers.compiling import OPTIONS

pytestmark = [pytest.mark.jax, pytest.mark.cpu]


@pytest.fixture
def unknown(monkeypatch):
    """XLA raises where it is handed the suite's options."""
    monkeypatch.setitem(OPTIONS, "xla_no_such_option", 1)
    return "No such compile option: 'xla_no_such_option'"


def test_xla_is_handed_the_options(unknown, pytestconfig):
    """Catches: a version of JAX that makes its options elsewhere."""
    if pytestconfig.getoption("--full"):
        pytest.skip("everything is compiled as for a user")
    with pytest.raises(jax.errors.JaxRuntimeError, match=unknown):
        jax.jit(lambda x: 3 * x)(7)


@pytest.mark.optimized
def test_a_user_s_program_has_none_of_them(unknown):
    assert jax.jit(lambda x: 5 * x)(7) == 35
