"""Time: rounds in which everyone runs once, so that what disturbs one disturbs its neighbours; and
the growth of resident memory in a call."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from xentlib.tools.bench.contestant import BARE, FLOOR, Contestant, Lineup
from xentlib.tools.bench.result import ContestantResult

# Who needs this many times the floor is known well enough after one round.
SLOW = 3.0
SLOW_ROUNDS = 1
# A first call that took this many seconds is not made again to warm up.
LONG = 0.5

T = TypeVar("T")


def order_of_round(items: Sequence[T], index: int) -> list[T]:
    """Another one first in every round, and every second round backwards.

    A contestant then has each of its two neighbours before it equally often: what one leaves in
    the caches and the allocator is not always left to the same one.
    """
    start = (index // 2) % max(len(items), 1)
    turned = [*items[start:], *items[:start]]
    return turned[::-1] if index % 2 else turned


def measure(
    field: Lineup, rounds: int, tick: Callable[[str], None] = lambda _: None
) -> list[ContestantResult]:
    """One row for each contestant. `tick` hears what was just done.

    The clock stops when the result is there (`block_until_ready`, `torch.cuda.synchronize`);
    results are released before the next contestant starts, outside the clock.
    """
    rows = [ContestantResult(contestant.name, contestant.kind) for contestant in field.contestants]
    lanes = list(zip(field.contestants, rows))
    for contestant, row in lanes:
        warm_up(field, contestant, row)
        tick("warm-up")
    running = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            gc.collect()
            for contestant, row in order_of_round(lanes, index):
                if row.failed is None and not sits_out(row, rows, index):
                    row.seconds.append(clock(field, contestant))
            tick(f"round {index + 1} of {rounds}")
    finally:
        if running:
            gc.enable()
    return rows


def warm_up(field: Lineup, contestant: Contestant, row: ContestantResult) -> None:
    """Compile, touch memory for the first time, and note the loss or why there is none."""
    row.failed = contestant.excuse
    if row.failed is not None:
        return
    try:
        for _ in range(2):
            start = time.perf_counter()
            result = contestant.run()
            field.ready(result)
            if contestant.name not in BARE:
                row.loss = float(result[0].mean())
            del result
            if time.perf_counter() - start > LONG:
                break
    except Exception as error:  # noqa: BLE001 - other people's code, and memory runs out
        row.failed = why(error)


def why(error: Exception) -> str:
    """What a table can show of it."""
    message = str(error).strip().partition("\n")[0]
    return f"raised {type(error).__name__}" + (f": {message}" if message else "")


def add_peaks(field: Lineup, rows: Sequence[ContestantResult]) -> None:
    """Memory as the framework counts it, of whoever ran; in any process, as it counts its own."""
    for contestant, row in zip(field.contestants, rows):
        if row.failed is not None or contestant.name in BARE:
            continue  # the bare GEMMs hold all logits at once: not what is compared
        if contestant.compiled_bytes is not None:
            row.peak_bytes = contestant.compiled_bytes()
        elif field.peak_bytes is not None:
            row.peak_bytes = field.peak_bytes(contestant.run)


def clock(field: Lineup, contestant: Contestant) -> float:
    field.wait()
    start = time.perf_counter()
    result = contestant.run()
    field.ready(result)
    return time.perf_counter() - start


def sits_out(row: ContestantResult, rows: Sequence[ContestantResult], index: int) -> bool:
    if index < SLOW_ROUNDS or row.contestant == FLOOR:
        return False
    floor = next(r for r in rows if (r.contestant, r.kind) == (FLOOR, row.kind))
    return min(row.seconds) > SLOW * min(floor.seconds)


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
