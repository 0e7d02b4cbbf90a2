"""What a command says to its user beside its results."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

# No space, a quota (which Windows lacks), a limit of a file's size.
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


class UsageError(Exception):
    """What the user can put right: one sentence on stderr, exit status 2."""


@contextmanager
def writing(flag: str, path: Path, what: str = "file") -> Iterator[None]:
    """Around what writes to the path that a flag names."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"`{flag}` must be a {what} that can be written; got '{path}': {error.strerror}."
        ) from error


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it: what is begun is ended as by an interrupt."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, where nobody has another wish."""
    of_main = threading.current_thread() is threading.main_thread()
    if not of_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def reader_gone() -> bool:
    """Whether nobody reads standard output or error any more."""
    return any(map(_unread, (sys.stdout, sys.stderr)))


def _unread(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # Windows, no file, closed
        return False


def give_up_output() -> None:
    """Python would try once more at its end what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
