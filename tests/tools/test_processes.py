"""Ranks of a parity run: their time, and what is heard of those that fail."""

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xentlib import processes
from xentlib.tools.harness import ranks
from xentlib.tools.harness.ranks import torch_rank

SPIN = """
import os, sys
from xentlib.processes import end_with_parent
end_with_parent(os.getppid())
if sys.argv[1:]: os.sched_setaffinity(0, {int(sys.argv[1])})
while True: pass"""


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
        RuntimeError, match=r"^1 of 1 torch ranks .* which is the limit at this machine's speed"
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
        while started[0].stderr.stat().st_size < 10**6 + 4:
            assert started[0].process.exitcode is None
            time.sleep(0.05)
        return ["waiting"]

    monkeypatch.setattr(processes, "_wait", wait)
    code = "import sys, time\nsys.stderr.write('x' * 10**6 + 'here')\nsys.stderr.flush()"
    with pytest.raises(RuntimeError, match=r"made no progress for 600 s(.|\n)*xxxhere"):
        ranks.run_ranks("torch", torch_rank, [Does(f"{code}\ntime.sleep(3600)")], 1)


def slow(rank, world, folder, of_processor):
    """So much processor time on a core, between two times shared with what spins for ever."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    end = time.process_time() + of_processor
    while time.process_time() < end:
        pass
    return time.monotonic()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the clock on the wall decides")
def test_a_busy_machine_makes_no_rank_late():
    """One core for a rank and two that spin: 1 s of it takes 3 s or more, with 2 s to be late."""
    core = str(min(os.sched_getaffinity(0)))
    others = [subprocess.Popen([sys.executable, "-c", SPIN, core]) for _ in range(2)]
    try:
        began = time.monotonic()
        (ended,) = processes.launch(slow, 1, 1.0, seconds=2, preload=ranks.PRELOADED)
        assert ended - began > 2  # it was to be slower than that
    finally:
        for other in others:
            other.kill()
            other.wait()


def does(rank, world, folder, code):
    exec(code, {})


def asked_of_gloo(rank, world, folder):
    """Of a collective that the other rank never enters."""
    import torch

    ranks.start_gloo(rank, world, folder)
    torch.distributed.barrier()
    if rank == 0:
        torch.distributed.all_reduce(torch.ones(3))
    time.sleep(3600)


@pytest.mark.slow
def test_ranks_that_wait_for_ever_in_gloo_are_late():
    pytest.importorskip("torch")
    with pytest.raises(processes.RanksLate) as late:
        processes.launch(asked_of_gloo, 2, seconds=3, preload=ranks.PRELOADED)
    assert (len(late.value.outputs), late.value.why) == (2, "made no progress for 3 s")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the clock on the wall decides")
def test_a_rank_that_spins_for_ever_is_late(monkeypatch):
    """By processor time; what a rank has started counts as its own."""
    monkeypatch.setattr(processes, "SPINNING", 0.2)
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    for code in ("while True: pass", child):
        with pytest.raises(processes.RanksLate) as late:
            processes.launch(does, 1, code, seconds=5, preload=ranks.PRELOADED)
        assert late.value.why == "were not done in 1 s of processor time each"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of pages is Linux's")
def test_pages_that_are_read_from_disk_are_progress(tmp_path):
    """Catches: ranks called late where memory is short: they wait for their own code."""
    file = tmp_path / "pages"
    file.write_bytes(os.urandom(400 * mmap.PAGESIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
        os.fsync(opened.fileno())
        pages.madvise(mmap.MADV_RANDOM)  # nothing is read ahead
        before, faults = processes._processor_seconds([os.getpid()])[0], page_faults()
        for page in range(0, len(pages), mmap.PAGESIZE):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            pages[page]
        faults = page_faults() - faults
        used = processes._processor_seconds([os.getpid()])[0] - before
    if not faults:
        pytest.skip("the folder is in memory")
    assert used >= faults * processes.PAGE_SECONDS


def page_faults():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def test_a_process_that_is_ended_has_ended():
    """Killed alone it stays, as one that nobody has asked for its exit status."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,))
    process.start()
    processes._end(process)
    assert process._popen.returncode == -signal.SIGKILL


def left_behind(at, pid):
    folder = at / f"xentlib-{pid}-x"
    folder.mkdir()
    (folder / "work").touch()
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="of locks")
def test_folders_of_killed_processes_are_removed_by_the_next_start(tmp_path, monkeypatch):
    """And no other's: of a process that lives here, or that has the lock, in another container for
    example."""
    code = "from xentlib.processes import own_folder; import sys\n"
    code += "with own_folder() as folder: print(folder, flush=True); sys.stdin.read()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as killed:
        theirs = Path(killed.stdout.readline().strip())
        monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
        with processes.own_folder() as own:
            assert theirs.is_dir()  # it lives
            assert Path(own).parent == tmp_path
        killed.kill()
    locked, alive = left_behind(tmp_path, killed.pid), left_behind(tmp_path, os.getpid())
    others = [tmp_path / name for name in (f"other-{killed.pid}-x", "xentlib-x", "xentlib-1x-y")]
    for other in others:
        other.mkdir()
    link = tmp_path / f"xentlib-{killed.pid}-link"
    link.symlink_to(others[0])
    assert theirs.is_dir()
    with (locked / "lock").open("wb") as lock:
        assert processes._lock(lock)
        with processes.own_folder():
            assert not theirs.exists()
            assert all(x.is_dir() for x in (locked, alive, link, *others))
            assert not [*others[0].iterdir()]  # nor is anything made behind a link
    with processes.own_folder() as own:
        assert not locked.exists()
    assert not Path(own).exists()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    of_another = left_behind(tmp_path, killed.pid)
    with processes.own_folder():
        assert of_another.is_dir()


def folder_of(rank, world, folder):
    return folder


def test_ranks_are_in_a_folder_of_that_kind():
    (folder,) = processes.launch(folder_of, 1, seconds=600)
    assert Path(folder).name.startswith(f"xentlib-{os.getpid()}-")
    assert not Path(folder).exists()
