"""Run each recipe of examples/ with xentlib and with all logits, and write what it took.

    python .ci/recipes.py [NAME ...]     (`make recipes`) writes docs/data/recipes.json

A recipe is a file with lines marked `# xentlib`. It is run by the command in its own docstring:
once as it is, for its distance to full logits, which it prints; then one step at larger sizes,
without that comparison and with `--full-logits`, for the peak resident memory of its largest
process. Names on the command line replace their entries alone.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "recipes.json"
VOCAB, LENGTH = 65536, 512
LARGE = ["--vocab", str(VOCAB), "--length", str(LENGTH), "--steps", "1"]


def command_of(path: Path) -> list[str]:
    """The indented line of a file's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    lines = [line.strip() for line in doc.splitlines() if line.startswith("    ")]
    return ["env", *shlex.split(lines[0])]


def run(command: list[str]) -> tuple[str, int]:
    """What a command prints, and the peak resident bytes of the largest process in it."""
    binaries = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "torch_extensions"),
        "DS_BUILD_OPS": "0",
    }
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} ended with {process.returncode}:\n{printed}")
    return printed, used.ru_maxrss * 1024


def measured(path: Path) -> dict[str, Any]:
    command = command_of(path)
    printed, _ = run(command)
    found = re.findall(r"relative distance.*?(\d\.\d+e-\d+)", printed)
    if not found:
        sys.exit(f"{path.name} must print its relative distance to full logits; got\n{printed}")
    ours, full = (
        run([*command, *LARGE, option])[1] for option in ("--skip-comparison", "--full-logits")
    )
    distance = max(map(float, found))
    print(f"{path.stem:20} {ours >> 20:6,} MiB {full >> 20:6,} MiB {distance:.0e}", flush=True)
    return {"distance": distance, "peak_bytes": ours, "peak_bytes_full_logits": full}


def main() -> None:
    """Write the file."""
    recipes = {
        path.stem: path
        for path in sorted((ROOT / "examples").glob("*.py"))
        if "# xentlib\n" in path.read_text(encoding="utf-8")
    }
    names = sys.argv[1:] or list(recipes)
    before = json.loads(DATA.read_text(encoding="utf-8"))["recipes"] if DATA.is_file() else {}
    found = {name: measured(recipes[name]) for name in names}
    kept = {name: found.get(name) or before[name] for name in recipes if name in {*found, *before}}
    data = {"vocab": VOCAB, "length": LENGTH, "recipes": kept}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
