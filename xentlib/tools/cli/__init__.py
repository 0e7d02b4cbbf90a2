"""The `xentlib` command: `parity`, which shows the backends to be the same, `bench`, and `doctor`.

Nothing heavy is imported before the arguments are understood, and no framework before the
environment variables it reads at import are set.
"""

from __future__ import annotations

from xentlib.tools.cli.command import main

__all__ = ["main"]
