"""One framework in a process of its own: `python -m xentlib.tools.bench.worker REQUEST`, in JSON.

PyTorch and JAX both keep a pool of threads; neither is to wait on cores that the other's hold. Says
what it is doing and what it found on standard output, one JSON object a line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from typing import Any, Literal

from xentlib.processes import end_with_parent
from xentlib.tools.bench.cases import HeadSizes, make_arrays
from xentlib.tools.bench.contestant import KINDS, Kind, Lineup, Wanted
from xentlib.tools.bench.measure import add_peaks, measure, probe
from xentlib.tools.bench.result import ContestantResult


class WorkerError(RuntimeError):
    """A worker ended without an answer."""


@dataclass(frozen=True, slots=True)
class Request:
    task: Literal["time", "resident"]
    backend: str
    case: HeadSizes
    dtype: str
    device: str
    rounds: int = 0
    only: tuple[str, ...] | None = None  # contestants; None is all
    kinds: tuple[Kind, ...] = KINDS
    memory: bool = True  # the framework's count of it
    seed: int = 0


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
            for message in messages(process):
                if "tick" in message:
                    tick(message["tick"])
                else:
                    answer = message
        if process.returncode or answer is None:
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-20:])
            raise WorkerError(
                f"the {request.task} worker of {request.backend} ended with status "
                f"{process.returncode}:\n{tail}"
            )
    answer["rows"] = [ContestantResult(**row) for row in answer["rows"]]
    return answer


def messages(process: Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def build_field(request: Request) -> Lineup:
    module = importlib.import_module(f"xentlib.tools.bench.contestants_{request.backend}")
    draws = module.draws(request.device, request.seed)
    arrays = make_arrays(request.case, request.dtype, draws)
    field: Lineup = module.build(arrays, request.device, Wanted(request.only, request.kinds))
    return field


def threads_of(backend: str) -> int | None:
    """XLA does not say how many it has."""
    if backend != "torch":
        return None
    import torch

    return torch.get_num_threads()


def main(argument: str) -> None:
    fields = json.loads(argument)
    fields["case"] = HeadSizes(**fields["case"])
    fields["kinds"] = tuple(fields["kinds"])
    request = Request(**fields)

    def say(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    field = build_field(request)
    if request.task == "time":
        rows = measure(field, request.rounds, lambda done: say(tick=done))
        if request.memory:
            say(tick="memory")
            add_peaks(field, rows)
    else:
        rows = probe(field)
    say(
        device=field.device,
        threads=threads_of(request.backend),
        rows=[asdict(row) for row in rows],
    )


if __name__ == "__main__":
    end_with_parent(os.getppid())
    main(sys.argv[1])
