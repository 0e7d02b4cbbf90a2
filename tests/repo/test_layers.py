"""The layers of the house: a module imports from its own and from lower ones alone."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from helpers.modules import MODULES, PACKAGES, ROOT

if not all((ROOT / folder).is_dir() for folder in PACKAGES):
    pytest.skip("the sources are not there", allow_module_level=True)

# Lowest first: modules and folders of the definition, and of both backends.
LAYERS = {
    "definition": {
        "xentlib": "nll logprobs labels accumulate evaluation arguments options head "
        "collectives interop processes lazy results divergence teacher segments math"
    },
    "rules": {"xentlib": "shards plan checks contract budgets ulp reference"},
    "core": {
        "backend": "core triton operators derivatives collectives array_spec hooks micro_batch"
    },
    "wrappers": {"backend": "wrappers"},
    "placement": {"backend": "head placement"},
    "binding": {"backend": "binding"},
    "functions": {"backend": "losses triton.pairs"},
    "api": {"backend": "api"},
    "heads": {
        "backend": "module head.module head.lazy_logits integrations accumulate window "
        "evaluation labels segments"
    },
    "packages": {},  # `xentlib`, `xentlib.torch` and `xentlib.jax` themselves
    "tools": {
        "xentlib": "tools __main__",
        "backend": "audit crosscheck crosscheck_ranks crosscheck_devices integrations.trainer "
        "integrations.lightning",
    },
}
ORDER = [*LAYERS]
BACKENDS = ("xentlib.torch", "xentlib.jax")


def layer_of(module: str) -> str:
    if module in ("xentlib", *BACKENDS):
        return "packages"
    backend = next((x for x in BACKENDS if module.startswith(f"{x}.")), None)
    path = module.removeprefix(f"{backend or 'xentlib'}.")
    column = "backend" if backend else "xentlib"
    for room in (path, path.partition(".")[0]):  # a module of a folder may be of another layer
        names = [x for x, rooms in LAYERS.items() if room in rooms.get(column, "").split()]
        if names:
            (name,) = names
            return name
    raise KeyError(module)


def imported_anywhere(path: Path, *, types: bool = False) -> set[str]:
    """In functions too, which put off an import and do not turn it round; `types`: also what is
    imported for types alone."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.unparse(x.test) and not types
    ]
    skipped = {id(x) for block in for_types for x in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {x if x in MODULES else str(node.module) for x in whole}
    return names & MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_lower_layers(module):
    own = ORDER.index(layer_of(module))
    upwards = {x for x in imported_anywhere(MODULES[module]) if ORDER.index(layer_of(x)) > own}
    assert upwards == set()


def test_the_definition_imports_in_no_circle():
    """Not for types either: eleven files from `arguments.py` to `plan/` once did."""
    below = ("definition", "rules")
    graph = {x: MODULES[x] for x in MODULES if layer_of(x) in below}
    imports = {x: imported_anywhere(path, types=True) & {*graph} for x, path in graph.items()}
    list(TopologicalSorter(imports).static_order())  # a CycleError names the circle
