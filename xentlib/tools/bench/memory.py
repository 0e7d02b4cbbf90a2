"""Resident memory: by how many bytes one call makes its process grow.

The framework's own count (`measure.add_peaks`; torch: every tensor the allocator hands out; JAX:
what the compiler sets aside) is exact but blind to what GEMM libraries take for themselves. The
growth of resident memory misses nothing, and is taken in a process of the contestant's own.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xentlib.tools.bench.contestant import Contestant, Lineup
from xentlib.tools.bench.measure import why
from xentlib.tools.bench.result import ContestantResult

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the peak of resident memory becomes what is resident now


def probe(field: Lineup) -> list[ContestantResult]:
    """Growth for every contestant of `field`; call it in a fresh process with one contestant."""
    rows = []
    for contestant in field.contestants:
        row = ContestantResult(contestant.name, contestant.kind)
        rows.append(row)

        def run(contestant: Contestant = contestant) -> Any:
            result = contestant.run()
            field.ready(result)
            return result

        try:
            run()
            row.resident_bytes = resident_growth(run)
        except Exception as error:  # noqa: BLE001 - as in `measure`
            row.failed = why(error)
    return rows


def resident_growth(run: Callable[[], Any]) -> int | None:
    """Peak of resident memory while `run` runs and its result lives, less what was resident before.

    None where the kernel keeps no such peak. Free memory that the C library holds back is given to
    the kernel first, so that using it again counts.
    """
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
    trim(0)
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return None
    before = status_bytes("VmRSS")
    result = run()
    peak = status_bytes("VmHWM")
    del result
    return None if before is None or peak is None else peak - before


def status_bytes(key: str) -> int | None:
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) << 10
    return None
