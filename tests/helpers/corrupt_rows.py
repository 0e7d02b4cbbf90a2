"""A gradient of the head that the backward of `chunked_nll` returns wrong, in PyTorch."""

from __future__ import annotations

from typing import Any

PLANTED = ("zero row", "NaN", "1e-3", "all NaN")


def plant(monkeypatch: Any, kind: str, row: int, slot: int = 1) -> None:
    """In this row of d weight, or of that of another argument, from now on: a zero row, a NaN, or
    an error of 1e-3 of its norm in some direction; or NaN everywhere."""
    import torch

    import xentlib.torch.losses.index as recomputing
    import xentlib.torch.losses.loss as keeping

    def planted(values: Any) -> Any:
        x = values[slot]
        if x is None or not len(x):
            return values
        at = row % len(x)
        if kind == "zero row":
            x[at] = 0.0
        elif kind == "NaN":
            x[at, -1] = torch.nan
        elif kind == "all NaN":
            x.fill_(torch.nan)
        else:
            some = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(row))
            x[at] += 1e-3 * x[at].norm() * some / some.norm()
        return values

    scaled, recomputed = keeping.scale_gradients, recomputing.as_inputs
    monkeypatch.setattr(keeping, "scale_gradients", lambda *x, **more: planted(scaled(*x, **more)))
    monkeypatch.setattr(recomputing, "as_inputs", lambda *x: planted(recomputed(*x)))
