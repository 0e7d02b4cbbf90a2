"""A rank of `test_lowrank_zero.py`, started by torchrun: heads with adapters under a real
`deepspeed.initialize`, trained for a few steps; results as a file."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch

from helpers.zero_routes import mutated, trained
from xentlib.processes import end_with_parent


def main(folder: str) -> None:
    import deepspeed

    end_with_parent(os.getppid())  # torchrun, which does not take its ranks along when killed
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    setups = pickle.loads(Path(folder, "setups").read_bytes())
    found = {}
    for name, setup in setups.items():
        with mutated(setup.mutant):
            found[name] = trained(setup)
    Path(folder, f"rank{torch.distributed.get_rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
