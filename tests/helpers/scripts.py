"""Scripts beside the package, such as those of .ci/ and docs/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path, name: str | None = None) -> ModuleType:
    """A file as a module; with a name, also for those that look it up by that, as pickle does."""
    spec = importlib.util.spec_from_file_location(name or f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if name is not None:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
