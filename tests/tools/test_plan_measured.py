"""`xentlib plan --measure`: rates of this machine, by one process and by ranks. What they are is
not asked: that they are there, alike on all ranks, and put together as the plan takes them apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from helpers.ranks import launch
from xentlib.contract import check, failures
from xentlib.plan import Exchange, Rates
from xentlib.tools.cli import main

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZES = ("--vocab", "1003", "--hidden", "64", "--measure", "--json")
GIVEN = Rates(1e15, 2e11, 3e10, 4e-6, 5e-7, 6e12)


def rates_in(text: str) -> Rates:
    return Rates(**json.loads(text)["setup"]["rates"])


def test_one_process_measures_no_links(capsys) -> None:
    assert main(["plan", *SIZES, "--node-rate", "123"]) == 0
    found = rates_in(capsys.readouterr().out)
    assert (found.node, found.network, found.latency, found.step) == (123e9, *Rates()[2:5])
    assert found.gemm != Rates().gemm
    assert found.memory != Rates().memory


def measured(rank: int, world: int) -> list[tuple[Rates, bool]]:
    """In one node, in nodes of two, in nodes of one; what `of_links` makes of links that are known:
    seconds of the plan's own collectives."""
    from unittest.mock import patch

    from xentlib.tools.cli import measure

    def known(group: Any, device: Any) -> tuple[float, float]:
        ranks = torch.distributed.get_world_size(group)
        nodes = max(1, ranks // int(os.environ["LOCAL_WORLD_SIZE"]))

        def seconds(size: int) -> float:
            return Exchange("all_gather", "x", 1, size, ranks, nodes).seconds(GIVEN)

        return seconds(0), seconds(1 << 20) / (1 << 20) - seconds(0) / (1 << 20)

    found = []
    small = measure.Sizes(64, torch.float32, 1 << 16, 1 << 12, 1 << 16)
    for local in (4, 2, 1):
        here = patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local))
        with here, patch.dict(measure.ON, cpu=small):
            found.append(measure.measure(GIVEN))
            with patch.object(measure, "fitted", known):
                blank = Rates(node=1.0, network=1.0, latency=1.0, step=GIVEN.step)
                found.append((measure.of_links(blank, torch.device("cpu")), rank == 0))
    return found


def test_ranks_measure_their_links() -> None:
    """In one node no network, in nodes of one rank nothing within them; a step's seconds from two
    numbers of ranks alone."""
    every = launch(4, measured)
    assert all([rates for rates, _ in found] == [rates for rates, _ in every[0]] for found in every)
    assert [[first for _, first in found] for found in every] == [[True] * 6] + [[False] * 6] * 3
    rates = [rates for rates, _ in every[0]]
    for one, known in (rates[0:2], rates[2:4], rates[4:6]):
        assert one.gemm != GIVEN.gemm
        assert min(one) >= 0
        assert known.gemm == Rates().gemm
    assert [x.network == GIVEN.network for x in rates[::2]] == [True, False, False]
    assert [x.node == GIVEN.node for x in rates[::2]] == [False, False, True]
    assert [x.step == GIVEN.step for x in rates[::2]] == [True, False, True]
    want = [(GIVEN.node, 1.0), (GIVEN.node, GIVEN.network), (1.0, GIVEN.network)]
    for known, (node, network) in zip(rates[1::2], want, strict=True):
        got = [known.node, known.network, known.latency, known.step]
        exact = [node, network, GIVEN.latency, GIVEN.step]
        rounded = [[float(f"{x:.6g}") for x in values] for values in (got, exact)]
        assert not failures(check("A15", *rounded))


def test_the_first_rank_prints_under_torchrun() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "xentlib", "plan", *SIZES, "--ranks", "2"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = rates_in(done.stdout)
    assert found.node != Rates().node
    assert found.network == Rates().network
