"""Arrays of a call of `explain` from a file: NumPy's .npz, or .safetensors, which needs no package.

In .npz bfloat16 of `ml_dtypes` has no dtype that NumPy names: items of two bytes, read as such.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import ml_dtypes
import numpy as np
from numpy.lib.npyio import NpzFile

from xentlib.checks.explain import EXPLAINED
from xentlib.tools.explain.compare import ARRAYS, NUMBERS
from xentlib.tools.explain.readings import Array

SAFETENSORS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
}  # fmt: skip
# What NumPy and a header that is none raise.
DAMAGED = (ValueError, TypeError, AttributeError, LookupError, EOFError, BadZipFile)
REQUIRED, NAMES = ARRAYS[:4], (*ARRAYS, *NUMBERS)


def read(path: Path) -> dict[str, Any]:
    """Arguments of `explain` by name; numbers such as `temperature` may be there, as one item.

    Raises:
        ValueError: the file is damaged or of another kind, lacks an array, or has another one.
        OSError: it cannot be opened.
    """
    kinds = {".npz": _npz, ".safetensors": _safetensors}
    EXPLAINED.require("kind", path.suffix in kinds, path=path)
    try:
        arrays = kinds[path.suffix](path)
    except DAMAGED as error:
        EXPLAINED.refuse("damaged", path=path, kind=path.suffix, error=f"{error}".rstrip("."))
    missing = [name for name in REQUIRED if name not in arrays]
    unknown = [name for name in arrays if name not in NAMES]
    there = ", ".join(arrays) or "none"
    names = ", ".join(REQUIRED)
    EXPLAINED.require(
        "missing", not missing, path=path, names=names, missing=", ".join(missing), there=there
    )
    names = ", ".join(NAMES)
    EXPLAINED.require("unknown", not unknown, path=path, names=names, unknown=", ".join(unknown))
    return {k: x.reshape(()) if k in NUMBERS and x.size == 1 else x for k, x in arrays.items()}


def _npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file, NpzFile(file) as arrays:  # which loads no pickles by itself
        items = {name: arrays[name] for name in arrays.files}
    raw = np.dtype("V2")
    return {k: x.view(ml_dtypes.bfloat16) if x.dtype == raw else x for k, x in items.items()}


def _safetensors(path: Path) -> dict[str, Array]:
    """Eight bytes with the size of a JSON header, the header, and the items of all tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 1 << 26)))
    items = np.memmap(path, np.uint8, "r", 8 + size)
    arrays = {}
    for name, of in header.items():
        if name != "__metadata__":
            start, stop = of["data_offsets"]
            arrays[name] = items[start:stop].view(SAFETENSORS[of["dtype"]]).reshape(of["shape"])
    return arrays
