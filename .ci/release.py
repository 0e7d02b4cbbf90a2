"""May this commit be released under this tag?

    python .ci/release.py --check v0.2.0

Prints what is missing, a line each, and exits with status 1; prints nothing where all is there. The
workflow of a release asks it before anything is built; ask it yourself before you tag.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)
SECTION = re.compile(r"^## \[([^\]]+)\](.*)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", metavar="TAG", required=True, help="v and the version: v0.2.0")
    tag = parser.parse_args().check
    status = ["git", "status", "--porcelain"]
    sentences = missing(
        tag,
        module=(ROOT / "xentlib" / "__init__.py").read_text(encoding="utf-8"),
        changelog=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        project=tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"],
        changed=subprocess.check_output(status, cwd=ROOT, text=True),
        today=dt.datetime.now(dt.UTC).date(),
    )
    for line in sentences:
        print(line)
    return 1 if sentences else 0


def missing(
    tag: str,
    *,
    module: str,
    changelog: str,
    project: dict[str, Any],
    changed: str,
    today: dt.date,
) -> list[str]:
    """A sentence for each thing that a release of `tag` lacks."""
    sentences = []
    stated = VERSION.search(module)
    version = stated[1] if stated else ""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sentences.append(f"xentlib/__init__.py must have a version such as 0.2.0; got {version!r}.")
    if tag != f"v{version}":
        sentences.append(f"The tag must be v{version}, of xentlib.__version__; got {tag}.")
    sentences += missing_in_changelog(changelog, version, today)
    source = project.get("urls", {}).get("Source", "")
    if not source.startswith("https://"):
        sentences.append(
            "pyproject.toml must have the repository's address as `Source` in [project.urls]; got "
            f"{source or 'none'}."
        )
    if changed:
        names = ", ".join(line[3:] for line in changed.splitlines())
        sentences.append(f"All files must be committed; got changes of {names}.")
    return sentences


def missing_in_changelog(text: str, version: str, today: dt.date) -> list[str]:
    """Its newest section must be that of the version, dated, with everything in it."""
    parts = SECTION.split(text)[1:]
    sections = [(parts[i], parts[i + 1], parts[i + 2].strip()) for i in range(0, len(parts), 3)]
    if sections and sections[0][0] == "Unreleased":
        _, _, body = sections.pop(0)
        if body:
            return [f"CHANGELOG.md must have nothing under [Unreleased]: move it to [{version}]."]
    if not sections or sections[0][0] != version:
        newest = sections[0][0] if sections else "none"
        return [f"CHANGELOG.md must begin with a section [{version}]; got {newest}."]
    _, title, body = sections[0]
    try:
        date = dt.date.fromisoformat(title.removeprefix(" - "))
    except ValueError:
        date = None
    if date is None or date > today:
        stated = title.removeprefix(" - ") or "no date"
        return [
            f"CHANGELOG.md must have `## [{version}] - YYYY-MM-DD`, not after today; got {stated}."
        ]
    return [] if body else [f"CHANGELOG.md must say what is in [{version}]; got an empty section."]


if __name__ == "__main__":
    sys.exit(main())
