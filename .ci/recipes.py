"""Compare the first gradient of each file of examples/ with full logits, and measure its memory.

    python .ci/recipes.py [NAME ...]              (`make recipes`) writes docs/data/recipes.json
    python .ci/recipes.py --compare [NAME ...]    (part of `make examples`) writes nothing

An example is run as the last command of its docstring says: on two ranks, or on four devices. Its
gradient is compared with that of one process, or device, that has full logits of the whole batch.
Peak memory is that of the largest process in one step at larger sizes, with xentlib, also with
other values of `gather`, and with full logits. Names on the command line replace their entries
alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "recipes.json"
RUNNER = "tests/helpers/recipe.py"
GUARD = ["python", "-P", "tests/helpers/orphans.py"]
VOCAB, LENGTH = 65536, 512
LARGE = ["--vocab", str(VOCAB), "--length", str(LENGTH), "--steps", "1"]
RANKS = 2
# Of a head whose rows may stay on their ranks
ROUTES = {"fsdp2": ("hidden", "stream"), "zero3": ("hidden",)}
BOUND = 1e-5


def command_of(path: Path) -> list[str]:
    """The last indented line of a file's docstring, which runs `tests/helpers/recipe.py` here."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    *words, _ = shlex.split([x for x in doc.splitlines() if x.startswith("    ")][-1])
    if "torchrun" in words:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [*GUARD, *words, RUNNER, path.stem]
    return ["env", *words[:-1], *GUARD, RUNNER, path.stem]


def run(command: list[str]) -> int:
    """The peak resident bytes of the largest process in a command."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "torch_extensions"),
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
    }
    with tempfile.TemporaryFile("w+") as printed:
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT
        ) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            sys.exit(f"{shlex.join(command)} ended with {process.returncode}:\n{printed.read()}")
    return used.ru_maxrss * 1024


def distance_of(path: Path) -> float:
    """Relative, of the first gradient to that of full logits of the whole batch."""
    command = command_of(path)
    ranks = RANKS if "torch.distributed.run" in command else 1
    alone = [*GUARD, RUNNER, path.stem, "--full-logits", "--steps", "1"]
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{k}.npy" for k in range(2)]
        run([*command, "--steps", "1", "--keep", files[0]])
        run([*alone, "--together", str(ranks), "--keep", files[1]])
        got, want = (np.load(x).astype(np.float64) for x in files)
    distance = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not distance < BOUND:
        sys.exit(f"{path.name}: the first gradient is {distance:.1e} away from that of full logits")
    return distance


def measured(path: Path, distance: float) -> dict[str, Any]:
    def peak(*more: str) -> int:
        return run([*command_of(path), *LARGE, *more])

    ours, full = peak(), peak("--full-logits")
    print(f"{path.stem:20} {ours >> 20:6,} MiB {full >> 20:6,} MiB", flush=True)
    found = {"distance": distance, "peak_bytes": ours, "peak_bytes_full_logits": full}
    ways = {way: peak("--gather", way) for way in ROUTES.get(path.stem, ())}
    return found | ({"peak_bytes_by_gather": ways} if ways else {})


def main() -> None:
    """Compare, and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    recipes = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
    before = json.loads(DATA.read_text(encoding="utf-8"))["recipes"] if DATA.is_file() else {}
    figures = {}
    for name in options.names or recipes:
        distance = distance_of(recipes[name])
        print(f"{name:20} relative distance to full logits {distance:.1e}", flush=True)
        if not options.compare:
            figures[name] = measured(recipes[name], distance)
    if not options.compare:
        figures = {k: (before | figures)[k] for k in recipes if k in before | figures}
        data = {"vocab": VOCAB, "length": LENGTH, "recipes": figures}
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
