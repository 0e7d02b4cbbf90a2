"""Does the installed wheel hold the whole package, and does it import without its sources?

Run by an interpreter that has the wheel, from a directory that is not the repository:
every module beside this script must be in the wheel and import from there, `import xentlib` and
each backend must leave the other framework alone, and the console command must start.
"""

import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {"xentlib": "xentlib", "torch_impl": "xentlib.torch", "jax_impl": "xentlib.jax"}
# What each import may not bring along.
STRANGERS = {"xentlib": ("torch", "jax"), "xentlib.torch": ("jax",), "xentlib.jax": ("torch",)}


def source_modules() -> list[str]:
    """Return the dotted name, in the wheel, of every module of the three columns."""
    names = []
    for folder, package in COLUMNS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


def main() -> None:
    """Exit with a message at the first thing that is wrong."""
    for package, strangers in STRANGERS.items():
        probe = f"import sys, {package}; print(*(m for m in {strangers!r} if m in sys.modules))"
        loaded = subprocess.run(
            [sys.executable, "-W", "error", "-c", probe],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.split()
        if loaded:
            sys.exit(f"`import {package}` loads {', '.join(loaded)}")

    names = source_modules()
    for name in names:
        if name.endswith("__main__"):
            continue
        file = importlib.import_module(name).__file__
        if file is None or not Path(file).is_relative_to(sys.prefix):
            sys.exit(f"{name} comes from {file}, not from the wheel in {sys.prefix}")

    import xentlib

    if not (Path(xentlib.__file__).parent / "py.typed").is_file():
        sys.exit("the wheel has no py.typed")
    command = Path(sys.executable).with_name("xentlib")
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
    print(f"wheel: {len(names)} modules import from {Path(xentlib.__file__).parent}")


if __name__ == "__main__":
    main()
