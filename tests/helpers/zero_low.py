"""A rank of `test_lowrank_zero.py`, started by torchrun: heads with adapters under a real
`deepspeed.initialize`, trained for a few steps; results as a file."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from helpers.torchrun import settle, start
from helpers.wrapped import run
from helpers.zero_routes import Trained, engine_of, trained, window_of


def refused(road: str, gather: str) -> str:
    setup = Trained(gather=gather, road=road)
    (((ids, labels), *_), total) = window_of(setup, 0)
    try:
        run(setup, engine_of(setup), ids, labels, total)
        return "nothing"
    except ValueError as error:
        return str(error)


def main(folder: str) -> None:
    start()
    setups = pickle.loads(Path(folder, "setups").read_bytes())
    found: dict[Any, Any] = {}
    for name, setup in setups.items():
        found[name] = trained(setup)
        settle()
    # Of two ranks: four refuse for the same reason, and that costs 2.5 s.
    for road in ("LowRankHead", "PEFT") if torch.distributed.get_world_size() == 2 else ():
        for gather in ("hidden", "stream"):
            found["refused", road, gather] = refused(road, gather)
    Path(folder, f"rank{torch.distributed.get_rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
