"""Which implementation of the steps computes, where there are several: `XENTLIB_KERNELS`."""

from __future__ import annotations

import os

VARIABLE = "XENTLIB_KERNELS"
CHOICES = ("auto", "eager", "triton")


def chosen() -> str:
    """What the environment says, "auto" if nothing."""
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(
            f"`{VARIABLE}` must be one of {', '.join(CHOICES)}; got {choice!r}. Unset it for the "
            f"fastest that the device can run."
        )
    return choice
