"""A run that is made wrong at one of its steps, by the kernels of either backend."""

from __future__ import annotations

from typing import Any

WRONG_AT = 30


def wrong_torch(monkeypatch: Any) -> None:
    """One class of each block of logits without its gradient, from now on."""
    from xentlib.torch.core.eager import Eager

    right = Eager.dlogits_

    def dlogits_(self: Any, z_BV: Any, *rest: Any) -> None:
        right(self, z_BV, *rest)
        z_BV[:, 5] = 0.0

    monkeypatch.setattr(Eager, "dlogits_", dlogits_)


def wrong_jax(monkeypatch: Any) -> None:
    """The same, of what is compiled from now on."""
    import jax

    from xentlib.jax.core.kernels import XLA

    right = XLA.dlogits
    monkeypatch.setattr(XLA, "dlogits", lambda *given: right(*given).at[:, 5].set(0.0))
    jax.clear_caches()
