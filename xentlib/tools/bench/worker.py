"""One framework in a process of its own: `python -m xentlib.tools.bench.worker REQUEST`, in JSON.

PyTorch and JAX both keep a pool of threads; neither is to wait on cores that the other's hold. Says
what it is doing and what it found on standard output, one JSON object a line. Time is measured in
rounds in which everyone runs once, so that what disturbs one disturbs its neighbours; memory as the
growth of resident memory in a call too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from typing import Any, Literal, TypeVar

from xentlib.processes import end_with_parent
from xentlib.tools.bench.cases import HeadSizes, make_arrays
from xentlib.tools.bench.implementation import BARE, FLOOR, KINDS, Kind, Lineup, TimedCall
from xentlib.tools.bench.report import Result

# Who needs this many times the floor is known well enough after one round.
SLOW = 3.0
SLOW_ROUNDS = 1
# A first call that took this many seconds is not made again to warm up.
LONG = 0.5

T = TypeVar("T")


class WorkerError(RuntimeError):
    """A worker ended without an answer."""


@dataclass(frozen=True, slots=True)
class Request:
    backend: str
    case: HeadSizes
    dtype: str
    kinds: tuple[Kind, ...] = KINDS
    rounds: int = 0
    device: str = "auto"
    only: tuple[str, ...] | None = None  # implementations; None is all
    memory: bool = True  # the framework's count of it
    seed: int = 0
    task: Literal["time", "resident"] = "time"


def ask(request: Request, tick: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The answer of a fresh process: {"device", "threads", "rows"}."""
    command = [sys.executable, "-m", "xentlib.tools.bench.worker", json.dumps(asdict(request))]
    environment = {
        # Memory is asked for when it is needed, so that the frameworks can take turns on a device.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Threads that spin while they wait hold the core that the last one of them needs, where
        # another process has the other: 2.8 s instead of 0.34 at N=1024, H=512, V=16,032.
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
    }
    answer: dict[str, Any] | None = None
    # torch's profiler writes to standard error whatever it is told; it is shown when things fail.
    with TemporaryFile("w+", errors="replace") as errors:
        with Popen(command, stdout=PIPE, stderr=errors, text=True, env=environment) as process:
            for line in process.stdout or ():
                message = json.loads(line) if line.startswith("{") else {}
                if "tick" in message:
                    tick(message["tick"])
                else:
                    answer = message or answer
        if process.returncode or answer is None:
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-20:])
            raise WorkerError(
                f"the {request.task} worker of {request.backend} ended with status "
                f"{process.returncode}:\n{tail}"
            )
    answer["rows"] = [Result(**row) for row in answer["rows"]]
    return answer


# --- time -----------------------------------------------------------------------------------------


def order_of_round(items: Sequence[T], index: int) -> list[T]:
    """Another one first in every round, and every second round backwards.

    A call then has each of its two neighbours before it equally often: what one leaves in
    the caches and the allocator is not always left to the same one.
    """
    start = (index // 2) % max(len(items), 1)
    turned = [*items[start:], *items[:start]]
    return turned[::-1] if index % 2 else turned


def measure(
    lineup: Lineup, rounds: int, tick: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """One row for each call. `tick` hears what was just done.

    The clock stops when the result is there (`block_until_ready`, `torch.cuda.synchronize`);
    results are released before the next call starts, outside the clock.
    """
    rows = [Result(call.name, call.kind) for call in lineup.calls]
    lanes = list(zip(lineup.calls, rows))
    for call, row in lanes:
        warm_up(lineup, call, row)
        tick("warm-up")
    running = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            gc.collect()
            for call, row in order_of_round(lanes, index):
                if row.failed is None and not sits_out(row, rows, index):
                    row.seconds.append(clock(lineup, call))
            tick(f"round {index + 1} of {rounds}")
    finally:
        if running:
            gc.enable()
    return rows


def warm_up(lineup: Lineup, call: TimedCall, row: Result) -> None:
    """Compile, touch memory for the first time, and note the loss or why there is none."""
    row.failed = call.excuse
    if row.failed is not None:
        return
    try:
        for _ in range(2):
            start = time.perf_counter()
            result = lineup.result(call)
            if call.name not in BARE:
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


def add_peaks(lineup: Lineup, rows: Sequence[Result]) -> None:
    """Memory as the framework counts it, of whoever ran; in any process, as it counts its own."""
    for call, row in zip(lineup.calls, rows):
        if row.failed is None and call.peak_bytes is not None:
            row.peak_bytes = call.peak_bytes()


def clock(lineup: Lineup, call: TimedCall) -> float:
    lineup.wait()
    start = time.perf_counter()
    result = call.run()
    lineup.ready(result)
    return time.perf_counter() - start


def sits_out(row: Result, rows: Sequence[Result], index: int) -> bool:
    if index < SLOW_ROUNDS or row.contestant == FLOOR:
        return False
    floor = next(r for r in rows if (r.contestant, r.kind) == (FLOOR, row.kind))
    return min(row.seconds) > SLOW * min(floor.seconds)


# --- resident memory ------------------------------------------------------------------------------


STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the peak of resident memory becomes what is resident now


def probe(lineup: Lineup) -> list[Result]:
    """Growth for every call of `lineup`, which is to be one implementation's in a fresh process."""
    rows = [Result(call.name, call.kind) for call in lineup.calls]
    for call, row in zip(lineup.calls, rows):
        try:
            lineup.result(call)
            row.resident_bytes = resident_growth(partial(lineup.result, call))
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


def main(argument: str) -> None:
    fields = json.loads(argument)
    fields["case"] = HeadSizes(**fields["case"])
    request = Request(**fields)

    def say(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    module = import_module(f"xentlib.tools.bench.implementations_{request.backend}")
    draws = module.draws(request.device, request.seed)
    arrays = make_arrays(request.case, request.dtype, draws)
    lineup: Lineup = module.Field(arrays, request.device, request.only, request.kinds)
    if request.task == "time":
        rows = measure(lineup, request.rounds, lambda done: say(tick=done))
        if request.memory:
            say(tick="memory")
            add_peaks(lineup, rows)
    else:
        rows = probe(lineup)
    say(device=lineup.device, threads=lineup.threads, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    end_with_parent(os.getppid())
    main(sys.argv[1])
