"""A run that is killed leaves no process behind, and no lock that the next one would wait for."""

import os
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from helpers.orphans import ENDS_WITH, MARK, remove_locks
from helpers.ranks import launch

HERE = Path(__file__).parent
TESTS = HERE.parent
PROGRAM = "import sys; sys.path[:0] = {here!r}; sys.argv[1:] = {arguments!r}\n{code}"
SAY = "import os, pathlib, time\npathlib.Path({folder!r}, str(os.getpid())).touch()\n"
HANG = "time.sleep(3600)"


@contextmanager
def started(code, *arguments, **environment):
    """A process of its own, which nothing marks as of this run: its own guard is to be seen."""
    program = PROGRAM.format(
        here=[str(HERE), str(TESTS)], arguments=arguments, code=textwrap.dedent(code)
    )
    variables = {name: value for name, value in os.environ.items() if name != MARK}
    process = subprocess.Popen([sys.executable, "-c", program], env=variables | environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(folder, process, count=1):
    """The processes that `SAY` names in a folder, once there are so many."""
    while len(names := [path.name for path in folder.iterdir()]) < count:
        assert process.poll() is None, "ended before its children had started"
        time.sleep(0.05)
    return [psutil.Process(int(name)) for name in names]


def gone(processes, seconds=600):
    """Whether all of them are, in time that only a hang takes; any others are ended here."""
    left = processes
    for _ in range(round(seconds / 0.1)):
        left = [process for process in left if running(process)]
        if not left:
            return True
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return False


def running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- children ------------------------------------------------------------------------------------

CHILD = """
import sys
sys.platform = {platform!r}
from xentlib.processes import end_with_parent
end_with_parent({parent})
{say}
{hang}
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(3600)
"""


@pytest.mark.parametrize("platform", [sys.platform, "elsewhere"])
def test_a_child_ends_with_its_parent(tmp_path, platform):
    """By the kernel on Linux, by a thread elsewhere."""
    say = SAY.format(folder=str(tmp_path))
    child = CHILD.format(platform=platform, parent="__import__('os').getppid()", say=say, hang=HANG)
    with started(PARENT, child) as parent:
        children = said(tmp_path, parent)
        time.sleep(1.5)  # the thread has looked more than once
        assert running(children[0])
        parent.kill()
        assert gone(children)


@pytest.mark.parametrize("platform", [sys.platform, "elsewhere"])
def test_a_child_whose_parent_is_gone_already_ends_at_once(tmp_path, platform):
    child = CHILD.format(platform=platform, parent=2**22 + 1, say="", hang=HANG)
    done = subprocess.run([sys.executable, "-c", child], check=False)
    assert done.returncode == -9


@pytest.mark.slow
def test_ranks_of_a_parity_run_end_with_it(tmp_path):
    pytest.importorskip("torch")
    code = SAY.format(folder=str(tmp_path)) + HANG
    program = f"""
    from xentlib.tools.harness.ranks import run_ranks, torch_rank
    class Hang:
        def __reduce__(self):  # read once the rank has tied itself to this process
            return exec, ({code!r},)
    run_ranks("torch", torch_rank, [Hang()], 2)
    """
    with started(program) as parent:
        ranks = said(tmp_path, parent, 2)
        parent.kill()
        assert gone(ranks)


def hang(rank, world, folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(3600)


@pytest.mark.slow
def test_ranks_of_a_test_end_with_its_process(tmp_path):
    """Their parent is the forkserver, which waits for them."""
    pytest.importorskip("torch")
    program = f"""
    from helpers.ranks import launch
    from test_orphans import hang
    launch(2, hang, {str(tmp_path)!r})
    """
    with started(program) as parent:
        ranks = said(tmp_path, parent, 2)
        server = ranks[0].parent()
        parent.kill()
        assert gone([*ranks, server])


# --- the guard -----------------------------------------------------------------------------------

# A process that ends with nobody, in a session of its own, as ranks of torchrun are and compilers.
STRAY = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
{HANG}
"""


@pytest.mark.parametrize("killed", ["run", "make"])
def test_the_guard_ends_what_is_left_of_a_run(tmp_path, killed):
    stray = SAY.format(folder=str(tmp_path)) + HANG
    code = f"from helpers.orphans import guard\nguard()\n{STRAY}"
    with started("import time; time.sleep(3600)") as make:
        other = {ENDS_WITH: str(make.pid)}
        with started(code, stray, **other) as run:
            strays = said(tmp_path, run)
            (run if killed == "run" else make).kill()
            assert gone([*strays, psutil.Process(run.pid)])
            assert run.wait() == -9


def test_the_guard_of_one_run_leaves_another_alone(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    code = f"from helpers.orphans import guard\nguard()\n{STRAY}"
    one.mkdir()
    two.mkdir()
    with (
        started(code, SAY.format(folder=str(one)) + HANG) as first,
        started(code, SAY.format(folder=str(two)) + HANG) as second,
    ):
        strays, others = said(one, first), said(two, second)
        first.kill()
        assert gone(strays)
        assert all(map(running, others))
        assert second.poll() is None
        second.kill()
        assert gone(others)


def test_the_suite_is_guarded():
    """`conftest.py` has done it before anything was started."""
    assert MARK in os.environ
    assert ENDS_WITH not in os.environ


# --- locks ---------------------------------------------------------------------------------------

HOLDS = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
import pathlib; pathlib.Path(sys.argv[2]).touch()
time.sleep(3600)
"""


def test_the_lock_of_a_dead_process_is_removed_and_no_other(tmp_path):
    """torch's own, held by a process that is alive and then killed."""
    baton = pytest.importorskip("torch.utils.file_baton")
    built, others = tmp_path / "built", tmp_path / "others"
    for folder in (built / "op", others):
        folder.mkdir(parents=True)
    lock = built / "op" / "lock"
    with started(HOLDS, str(lock), str(others / "held")) as holder:
        while not (others / "held").exists():
            assert holder.poll() is None
            time.sleep(0.05)
        assert remove_locks(str(built)) == []
        assert lock.exists()
        holder.kill()
        holder.wait()
        assert not baton.FileBaton(str(lock)).try_acquire()  # whoever comes next waits
        assert remove_locks(str(built)) == [lock]
    assert baton.FileBaton(str(lock)).try_acquire()


def one(rank, world):
    return 1


def test_ranks_start_without_the_locks_of_a_killed_run(tmp_path, monkeypatch):
    """DeepSpeed runs in ranks of many tests; those of torchrun are in `test_zero.py`."""
    pytest.importorskip("torch")
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert launch(1, one) == [1]
    assert not (tmp_path / "op" / "lock").exists()


# --- the time limit of a test --------------------------------------------------------------------

HANGING = """
from helpers.ranks import launch
from test_orphans import hang
def test_that_hangs(): launch(2, hang, {folder!r})
def test_after_it(): pass
"""


@pytest.mark.slow
def test_a_test_that_hangs_fails_by_name_and_the_others_run(tmp_path):
    """pytest-timeout under pytest-xdist, in a test that waits for ranks."""
    pytest.importorskip("torch")
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "test_hanging.py").write_text(HANGING.format(folder=str(marks)))
    settings = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
    limit = [
        "-o",
        "timeout=8",
        "-o",
        f"pythonpath={HERE} {TESTS}",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *settings, *limit, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_hanging.py::test_that_hangs" in done.stdout.splitlines()[-2]
    assert "Failed: Timeout (>8.0s) from pytest-timeout." in done.stdout
    ranks = [int(mark.name) for mark in marks.iterdir()]  # few on a machine that is busy
    assert gone([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)])


def test_the_suite_has_time_limits(pytestconfig):
    """First the test is failed; where that has no effect, its process is ended."""
    limit, last = (float(pytestconfig.getini(x)) for x in ("timeout", "faulthandler_timeout"))
    assert 0 < limit < last
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
