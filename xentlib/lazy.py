"""Names of a package whose modules load when they are first asked for; and a backend whose
framework is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn


def loading(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, of which `modules` has each module's names, a space apart."""
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in module_of and f"{package}.{name}" in modules:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def refuse_missing(missing: ModuleNotFoundError, backend: str, framework: str) -> NoReturn:
    """Name the extra; what a framework that is installed lacks is its own to say."""
    if missing.name not in (backend, f"{backend}lib"):
        raise missing
    raise ModuleNotFoundError(
        f"`xentlib.{backend}` needs {framework}, which is not installed. Run: pip install "
        f"'xentlib[{backend}]'",
        name=missing.name,
    ) from missing
