"""Every module of the package, and where it is written."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODULES", "PACKAGES", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"xentlib": "xentlib", "torch_impl": "xentlib.torch", "jax_impl": "xentlib.jax"}


def modules() -> dict[str, Path]:
    """Under the name that each is imported by."""
    paths = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            paths[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return paths


MODULES = modules()
