"""A backend whose framework is not installed."""

from __future__ import annotations

from typing import NoReturn


def refuse_missing(missing: ModuleNotFoundError, backend: str, framework: str) -> NoReturn:
    """Name the extra; what a framework that is installed lacks is its own to say."""
    if missing.name not in (backend, f"{backend}lib"):
        raise missing
    raise ModuleNotFoundError(
        f"`xentlib.{backend}` needs {framework}, which is not installed. Run: pip install "
        f"'xentlib[{backend}]'",
        name=missing.name,
    ) from missing
