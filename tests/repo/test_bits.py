"""`make bits`: what its jaxprs tell apart, and that no public function is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.scripts import load

CI = Path(__file__).parents[2] / ".ci"
if not (CI / "bits.py").is_file():
    pytest.skip("the sources are not there", allow_module_level=True)


@pytest.mark.jax
def test_a_jaxpr_is_what_is_computed_and_not_how_it_is_called(monkeypatch: Any) -> None:
    """Catches: a name or an address in the text, a constant that is not."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp
    import numpy as np

    monkeypatch.syspath_prepend(str(CI))
    traced = load(CI / "bits_jax.py").traced
    table = np.arange(3.0, dtype=np.float32)

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return x * 2.0

    doubled.defvjp(lambda x: (x * 2.0, x), lambda x, g: (g * x,))

    def one(x: Any) -> Any:
        return doubled(jax.jit(jnp.sin)(x)).sum() + jnp.asarray(table).sum()

    def other(y: Any) -> Any:
        def renamed(x: Any) -> Any:
            return jnp.sin(x)

        return doubled(jax.jit(renamed)(y)).sum() + jnp.asarray(table).sum()

    x = np.ones(3, np.float32)
    assert traced(one, x) == traced(other, x)
    assert traced(jax.grad(one), x) == traced(jax.grad(other), x)
    assert traced(one, x) != traced(lambda x: one(2.0 * x), x)
    assert traced(one, x) != traced(one, x[:2])
    before = traced(one, x)
    table[1] += 1.0
    assert traced(one, x) != before


@pytest.mark.parametrize("file", ["bits_torch.py", "bits_jax.py"])
def test_every_public_function_is_called(file: str) -> None:
    """Catches: a new function, which no change of bits would be seen of."""
    backend = pytest.importorskip("xentlib.torch" if "torch" in file else "xentlib.jax")
    starts = ("chunked_", "vocab_parallel_", "segment_", "next_token_")
    names = [name for name in backend.__all__ if name.startswith(starts)]
    text = (CI / file).read_text()
    assert len(names) > 7
    assert [name for name in names if name not in text] == []
