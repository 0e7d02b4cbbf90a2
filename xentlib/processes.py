"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

__all__ = ["end_with_parent"]

KILL = 9  # signal.SIGKILL, a name that Windows lacks
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.5


def end_with_parent(parent: int) -> None:
    """Have this process killed as soon as the process that started it is gone.

    A rank whose starter was killed would otherwise wait for the others, or for a lock, for ever. On
    Linux the kernel does it, whatever this process is busy with; elsewhere a thread looks twice a
    second.

    Args:
        parent: process id of the starter. Linux goes by the starting thread: start from one that
            lives as long as this process should, which the main thread does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, KILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # gone before it could be told
        os.kill(os.getpid(), KILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), KILL)
