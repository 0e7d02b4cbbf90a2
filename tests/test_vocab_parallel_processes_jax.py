"""Vocabularies spread over the devices of two processes, and over eight devices of one.

The file is also what each of the two processes runs.
"""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from helpers.vocab_shards import same_on_all_ranks
from xentlib.parity.problem import build
from xentlib.processes import end_with_parent

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import OPTIONS, hold_shards, sharded  # noqa: E402


def process(rank: int, port: str, path: str) -> None:
    """One of two processes, with two of the four devices: its results in files."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    for kind in ("nll", "logprobs"):
        # No NaN: `device_put` asserts that the processes' arrays are equal.
        found = sharded(build(OPTIONS, 7), kind, mesh_of(tp=4), 40, fill=(np.inf,))
        np.savez(f"{path}/{kind}-{rank}.npz", **found)
    jax.distributed.shutdown()


def test_two_processes(tmp_path):
    """A2, A5, A6, A13: a vocabulary over the devices of two processes, the same on both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=2"
    command, environment = [sys.executable, __file__], {**os.environ, "XLA_FLAGS": flags}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for kind in ("nll", "logprobs"):
        found = [dict(np.load(tmp_path / f"{kind}-{rank}.npz")) for rank in range(2)]
        got = {name: same_on_all_ranks([x[name] for x in found]) for name in found[0]}
        hold_shards(build(OPTIONS, 7), kind, got)


EIGHT = """
from helpers.mesh_jax import mesh_of
from helpers.vocab_shards_jax import OPTIONS, hold_shards, sharded
from xentlib.parity.problem import build
for kind in ("nll", "logprobs"):
    hold_shards(build(OPTIONS, 7), kind, sharded(build(OPTIONS, 7), kind, mesh_of(tp=8), 20))
print("held")
"""


def test_eight_devices():
    """A2, A5, A6, A13: JAX counts its host devices once, so eight need a process of their own."""
    flags = "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "held\n", done.stderr


if __name__ == "__main__":
    end_with_parent(os.getppid())
    process(int(sys.argv[1]), *sys.argv[2:])
