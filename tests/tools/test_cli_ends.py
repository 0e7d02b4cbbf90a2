"""How a command ends when nobody reads it, when the disk is full, and when it is told to."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.played import but_for_times, sections
from xentlib.tools.harness.writing import write_whole

if sys.platform == "win32":
    pytest.skip("of pipes, limits and signals", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]
# `xentlib parity` with its sections played, in a process of its own.
PLAYED = """
import os, resource, signal, sys, time
sys.path.append({tests!r})
from pytest import MonkeyPatch
from helpers.played import parity, staged
from pathlib import Path

stage = staged(MonkeyPatch())

def before(name, action):
    found = stage.parts[name]
    stage.parts[name] = lambda: action() and found or found

{code}
sys.exit(parity(Path(sys.argv[1]), *sys.argv[2:]))
"""
FULL = """
before("two", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (99, resource.RLIM_INFINITY)))
"""
ROOM = """
before("training", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2))
"""
TERMINATED = """
before("two", lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(20))
"""


def played(tmp_path, code, *options, **streams):
    program = PLAYED.format(tests=str(TESTS), code=code)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    command = [sys.executable, "-c", program, str(tmp_path), *options]
    return subprocess.run(command, text=True, check=False, **streams)


def xentlib(*arguments, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    command = [sys.executable, "-m", "xentlib", *arguments]
    # Without a buffer argparse itself hushes what it cannot print.
    buffered = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, text=True, check=False, env=buffered, **streams)


PLAN = ("plan", "--vocab", "1003", "--hidden", "64", "--ranks", "8", "--tokens", "99")


@pytest.fixture
def unread():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


# --- nobody reads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [PLAN, ("--help",), ("plan", "--help")])
def test_a_closed_pipe_ends_quietly(unread, arguments):
    done = xentlib(*arguments, stdout=unread)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_that_nobody_hears_ends_and_fails_no_section(tmp_path, unread):
    """`xentlib parity 2>&1 | head -1`."""
    done = played(tmp_path, "", stdout=unread, stderr=unread)
    assert done.returncode == 141
    assert not (tmp_path / "out" / "parity.json").exists()
    # Its table alone: what was measured is there.
    done = played(tmp_path, "", stdout=unread)
    assert done.returncode == 141
    assert "Error" not in done.stderr
    assert set(sections(tmp_path).values()) == {"done"}


def test_another_broken_pipe_is_not_hushed(tmp_path):
    """Of a section it is an error of that section."""
    code = "stage.parts['two'] = BrokenPipeError(32, 'of ranks')"
    done = played(tmp_path, code)
    assert done.returncode == 1
    assert "two could not be run: BrokenPipeError" in done.stdout


# --- a full disk ----------------------------------------------------------------------------------


def test_a_full_disk_is_a_sentence_after_the_table(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert played(whole, "").returncode == 0
    done = played(tmp_path, FULL)
    assert done.returncode == 2
    out = tmp_path / "out"
    notes = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert notes[0] == f"note: '{out}' cannot be written: File too large; the run goes on"
    assert notes[1:] == [
        (
            f"xentlib: `--out` must be a folder that can be written; got '{out}': File too large; "
            f"1 of 3 sections are kept there, make room and go on with `xentlib parity --out {out} "
            "--resume`."
        )
    ]
    assert "PyTorch holds all 3 rows" in done.stdout
    assert list(sections(tmp_path).values()) == ["done", "not run", "not run"]
    assert {path.name for path in out.iterdir()} == {"parity.json", "parity.html"}
    resumed = played(tmp_path, "", "--resume")
    assert resumed.returncode == 0
    assert "] one" not in resumed.stderr
    assert but_for_times(tmp_path) == but_for_times(whole)


def test_a_disk_that_has_room_again_loses_nothing(tmp_path):
    done = played(tmp_path, FULL + ROOM)
    assert done.returncode == 0
    assert set(sections(tmp_path).values()) == {"done"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_full_standard_output():
    for arguments in (PLAN, ("--help",)):
        with Path("/dev/full").open("w") as full:
            done = xentlib(*arguments, stdout=full)
        assert (done.returncode, done.stderr) == (
            2,
            "xentlib: what is left cannot be written: No space left on device.\n",
        )


def test_other_errors_of_the_system_are_not_hidden(tmp_path):
    code = "stage.operators = None\nimport xentlib.tools.cli.parity as p\n"
    code += "def fails(*_): raise PermissionError(13, 'no')\np.run_before = fails"
    done = played(tmp_path, code)
    assert done.returncode == 1
    assert "PermissionError" in done.stderr


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_whole(file, "before")

    def fails(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "before"


# --- SIGTERM --------------------------------------------------------------------------------------


def test_sigterm_says_how_to_go_on(tmp_path):
    done = played(tmp_path, TERMINATED, "--seed", "3")
    assert done.returncode == 143
    out = tmp_path / "out"
    assert done.stderr.splitlines()[-2:] == [
        f"note: 1 of 3 sections are kept in '{out / 'parity.json'}'",
        f"xentlib: terminated; go on with `xentlib parity --out {out} --seed 3 --resume`",
    ]
    assert played(tmp_path, "", "--seed", "3", "--resume").returncode == 0


def test_sigterm_before_anything_is_done(tmp_path):
    done = played(tmp_path, TERMINATED.replace("two", "one"))
    assert done.returncode == 143
    assert done.stderr.splitlines()[-1] == "xentlib: terminated"


def test_sigterm_of_who_ignores_it_is_ignored(tmp_path):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "before('two', lambda: os.kill(os.getpid(), signal.SIGTERM))"
    assert played(tmp_path, code).returncode == 0
