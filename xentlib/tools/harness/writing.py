"""Files that are there as a whole at every moment: the one before, or this one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Where there is no room for it, the file is as it was, and none is left beside it."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
