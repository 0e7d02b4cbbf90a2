"""Vocabularies spread over the devices of two processes, and over eight devices of one."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.compiling import Compiling
from helpers.vocab_shards import same_on_all_ranks
from xentlib.processes import launch
from xentlib.tools.harness.problems import build

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import OPTIONS, hold_shards, sharded  # noqa: E402

KINDS = ("nll", "logprobs")


def process(rank: int, world: int, folder: str, port: str, kinds: list[str]) -> dict[str, Any]:
    """One of two processes, with two of the four devices."""
    Compiling().set(fast=True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=world, process_id=rank)
    # No NaN: `device_put` asserts that the processes' arrays are equal.
    found = {
        kind: sharded(build(OPTIONS, 7), kind, mesh_of(tp=4), 40, fill=(np.inf,)) for kind in kinds
    }
    jax.distributed.shutdown()
    return found


@pytest.fixture(scope="module")
def found(request):
    """Of each kind what both processes have: one start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=2"
    kinds = collected(request, KINDS, test="test_two_processes")
    return launch(process, 2, port, kinds, seconds=600, environment={"XLA_FLAGS": flags})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes(found, kind):
    """A2, A5, A6, A13: a vocabulary over the devices of two processes, the same on both."""
    ranks = [rank[kind] for rank in found]
    got = {name: same_on_all_ranks([x[name] for x in ranks]) for name in ranks[0]}
    hold_shards(build(OPTIONS, 7), kind, got)


EIGHT = """
import sys
from helpers.compiling import Compiling
from helpers.mesh_jax import mesh_of
from helpers.vocab_shards_jax import OPTIONS, hold_shards, sharded
from xentlib.tools.harness.problems import build
Compiling().set(fast=True)
kind = sys.argv[1]
hold_shards(build(OPTIONS, 7), kind, sharded(build(OPTIONS, 7), kind, mesh_of(tp=8), 20))
print("held")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_eight_devices(kind):
    """A2, A5, A6, A13: JAX counts its host devices once, so eight need a process of their own."""
    flags = "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT, kind],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "held\n", done.stderr
