"""The run that is in a folder already, and whether this one can go on from it."""

from __future__ import annotations

from pathlib import Path

from xentlib.tools.cli.errors import UsageError, note
from xentlib.tools.parity.result import ParityResult


def run_before(out: Path, environment: dict[str, str], resume: bool) -> ParityResult | None:
    """The run that is in `out`, if this one can go on from it; with `resume` it has to."""
    from xentlib.tools.parity.report.document import from_json
    from xentlib.tools.parity.report.files import DATA

    path = out / DATA
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not resume:
            return None
        raise UsageError(
            f"`--resume` goes on from '{path}', which is not there; run without it."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not resume:
            return None
        raise UsageError(
            f"`--resume` goes on from '{path}', which cannot be read as a parity run; "
            f"run without it."
        ) from error
    other = [
        f"{name} {found.environment.get(name, 'none')!r} and not {environment.get(name, 'none')!r}"
        for name in dict.fromkeys([*environment, *found.environment])
        if name != "date" and found.environment.get(name) != environment.get(name)
    ]
    if not other and not resume and (found.missing or found.failed):
        run = len(found.sections) - len(found.failed)
        note(
            f"this run replaces the one in '{path}', which has {run} of {len(found.planned)} "
            f"sections; `--resume` would have gone on from it"
        )
    if other and resume:
        raise UsageError(
            f"`--resume` goes on with the same run, and '{path}' is of {', '.join(other)}; "
            f"run without it."
        )
    return found
