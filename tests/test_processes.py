"""Ranks of a parity run: their time, and what is heard of those that fail."""

import time

import pytest

from xentlib import processes
from xentlib.parity import ranks
from xentlib.parity.shards import torch_rank


class Does:
    """Something that a rank is given: code that is run when it is read."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def test_ranks_have_longer_on_a_slower_machine(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(ranks, "SECONDS", 0.001)
    with pytest.raises(
        RuntimeError, match=r"^1 of 1 torch ranks were not done in 0\.0 s, which is"
    ):
        ranks.run_ranks("torch", torch_rank, [Does("import time; time.sleep(3600)")], 1, 0.001)
    assert ranks.run_ranks("torch", torch_rank, [], 1, 600_000.0) == [[]]


def test_a_rank_that_fails_is_not_waited_for_by_the_others(monkeypatch):
    """It says why; the other one would have said that it lost a connection."""
    monkeypatch.setattr(processes, "AFTER_FAILURE", 0.1)
    code = """
import multiprocessing, time
if multiprocessing.current_process().name == "rank 0": raise ValueError("here")
time.sleep(3600)"""
    with pytest.raises(RuntimeError, match=r"^1 torch ranks failed, one with ValueError: here\n"):
        ranks.run_ranks("torch", torch_rank, [Does(code)], 2)


def test_what_a_late_rank_has_said_is_in_the_error(monkeypatch):
    """However much that is."""

    def wait(started, seconds):
        while started[0].said.stat().st_size < 10**6 + 4:
            assert started[0].process.exitcode is None
            time.sleep(0.05)
        return ["late"]

    monkeypatch.setattr(processes, "_wait", wait)
    code = "import sys, time\nsys.stderr.write('x' * 10**6 + 'here')\nsys.stderr.flush()"
    with pytest.raises(RuntimeError, match=r"were not done in 10 min(.|\n)*xxxhere"):
        ranks.run_ranks("torch", torch_rank, [Does(f"{code}\ntime.sleep(3600)")], 1)
