"""Bits and collectives of fixed calls of the public functions, in two states of the sources.

    python .ci/bits.py BASE             at a commit, and here; exit status 1 where they differ
    python .ci/bits.py --write FILE     here alone, as JSON
    python .ci/bits.py --parts torch jax BASE

The calls are in bits_torch.py, bits_ranks.py and bits_jax.py. They use nothing but the public
functions, so that they stand while what is behind these is rebuilt. Of each call every output and
gradient is written down as a hash of its dtype, shape and bytes, of every rank, and the collectives
of its forward and its backward with their bytes; of a jaxpr its text. Hashes are of one machine:
another's products may round otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "build" / "bits"  # a copy of the other state
PARTS = {
    "torch": ("bits_torch.py", {}),
    "triton": ("bits_torch.py", {"TRITON_INTERPRET": "1", "XENTLIB_KERNELS": "triton"}),
    "ranks": ("bits_ranks.py", {}),
    "zero": ("bits_ranks.py", {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}),
    "jax": ("bits_jax.py", {"JAX_PLATFORMS": "cpu"}),
    "jaxprs": ("bits_jax.py", {"JAX_PLATFORMS": "cpu"}),
}

Calls = dict[str, dict[str, Any]]


def main() -> int:
    """Compare, or write."""
    args = parser().parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    here = calls_of(ROOT, args.parts)
    if args.write:
        args.write.write_text(json.dumps(here, indent=1) + "\n", encoding="utf-8")
    if args.base is None:
        return 0
    copy(args.base)
    before = calls_of(BASE, args.parts)
    unequal = differences(before, here, "bits")
    collectives = differences(before, here, "collectives")
    for line in (*unequal, *collectives):
        print(line)
    if args.table:
        # Of ranks that send the same, one line
        lines = sorted({re.sub(r", rank \d+ of", ", of", line) for line in collectives})
        args.table.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    numbers = sum(len(call["bits"]) for call in here.values())
    print(
        f"{len(here)} calls, {numbers} arrays: {len(unequal)} unequal bits, "
        f"{len(collectives)} other collectives"
    )
    return 1 if unequal or collectives else 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    new.add_argument("base", nargs="?", help="a commit")
    new.add_argument("--write", type=Path)
    new.add_argument("--table", type=Path, help="writes the collectives that are not the same")
    new.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    return new


def copy(commit: str) -> None:
    """The sources of a commit; the calls are those of here."""
    packed = subprocess.run(
        ["git", "archive", commit, "xentlib", "torch_impl", "jax_impl"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    shutil.rmtree(BASE, ignore_errors=True)
    BASE.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(BASE, filter="tar")


def calls_of(sources: Path, parts: list[str]) -> Calls:
    calls: Calls = {}
    for part in parts:
        script, variables = PARTS[part]
        environment = {**os.environ, **variables, "PYTHONPATH": str(sources)}
        environment["OMP_NUM_THREADS"] = "1"
        imported = printed_by(["-c", "import xentlib; print(xentlib.__file__)"], environment)
        if not Path(imported).is_relative_to(sources):  # or it would be compared with itself
            raise RuntimeError(f"the calls must be those of {sources}; got xentlib from {imported}")
        text = printed_by([str(ROOT / ".ci" / script), part], environment)
        calls |= {f"{part}: {name}": call for name, call in json.loads(text).items()}
    return calls


def printed_by(arguments: list[str], environment: dict[str, str]) -> str:
    """The last line."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT / "build",  # no sources beside it
    )
    return done.stdout.splitlines()[-1]


def differences(before: Calls, here: Calls, of: str) -> list[str]:
    """A line for each value that is another one, or is in one state alone."""
    return [
        f"{name}, {key}: {before.get(name, {}).get(of, {}).get(key)}"
        f" -> {here.get(name, {}).get(of, {}).get(key)}"
        for name in {**before, **here}
        for key in {**before.get(name, {}).get(of, {}), **here.get(name, {}).get(of, {})}
        if before.get(name, {}).get(of, {}).get(key) != here.get(name, {}).get(of, {}).get(key)
    ]


if __name__ == "__main__":
    sys.exit(main())
