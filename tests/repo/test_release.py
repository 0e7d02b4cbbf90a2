"""A release that lacks something is refused before anything is built; the workflows run commands of
this repository, with no more rights than they need."""

from __future__ import annotations

import datetime as dt
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.scripts import load

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
if not WORKFLOWS.is_dir():
    pytest.skip("a checkout alone has the workflows", allow_module_level=True)


release = load(ROOT / ".ci" / "release.py")
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-05-04\n\n- New.\n\n## [0.1.0]\n\nOld.\n"
)
GOOD = {
    "tag": "v0.2.0",
    "module": '"""A package."""\n\n__version__ = "0.2.0"\n',
    "changelog": CHANGELOG,
    "project": {"urls": {"Source": "https://example.org/x"}},
    "changed": "",
    "today": dt.date(2026, 5, 4),
}
BAD = {
    "another tag": (
        {"tag": "v0.2.1"},
        "The tag must be v0.2.0, of xentlib.__version__; got v0.2.1.",
    ),
    "a tag without v": ({"tag": "0.2.0"}, "The tag must be v0.2.0, of xentlib.__version__"),
    "a version of two numbers": (
        {"tag": "v0.2", "module": '__version__ = "0.2"\n'},
        "xentlib/__init__.py must have a version such as 0.2.0; got '0.2'.",
    ),
    "no version": (
        {"module": ""},
        "xentlib/__init__.py must have a version such as 0.2.0; got ''.",
    ),
    "no section": (
        {"changelog": CHANGELOG.replace("[0.2.0]", "[0.1.1]")},
        "CHANGELOG.md must begin with a section [0.2.0]; got 0.1.1.",
    ),
    "no date": (
        {"changelog": CHANGELOG.replace(" - 2026-05-04", "")},
        "CHANGELOG.md must have `## [0.2.0] - YYYY-MM-DD`, not after today; got no date.",
    ),
    "no such day": (
        {"changelog": CHANGELOG.replace("05-04", "02-30")},
        "CHANGELOG.md must have `## [0.2.0] - YYYY-MM-DD`, not after today; got 2026-02-30.",
    ),
    "a day to come": (
        {"today": dt.date(2026, 5, 3)},
        "CHANGELOG.md must have `## [0.2.0] - YYYY-MM-DD`, not after today; got 2026-05-04.",
    ),
    "an empty section": (
        {"changelog": CHANGELOG.replace("- New.\n", "")},
        "CHANGELOG.md must say what is in [0.2.0]; got an empty section.",
    ),
    "what is unreleased": (
        {"changelog": CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- Newer.\n")},
        "CHANGELOG.md must have nothing under [Unreleased]: move it to [0.2.0].",
    ),
    "no address": ({"project": {"urls": {}}}, "pyproject.toml must have the repository's address"),
    "an address of another kind": (
        {"project": {"urls": {"Source": "git@example.org:x"}}},
        "pyproject.toml must have the repository's address as `Source` in [project.urls]; got git@",
    ),
    "a file that is not committed": (
        {"changed": " M README.md\n?? new.py\n"},
        "All files must be committed; got changes of README.md, new.py.",
    ),
}


def test_a_release_that_has_everything_passes():
    assert release.missing(**GOOD) == []


@pytest.mark.parametrize("bad", BAD)
def test_a_release_that_lacks_something_is_refused(bad):
    changes, sentence = BAD[bad]
    found = release.missing(**{**GOOD, **changes})
    assert [line for line in found if line.startswith(sentence)], found


def test_the_check_reads_this_tree():
    """As the workflow runs it. A tag that no version is lacks something."""
    command = [sys.executable, ".ci/release.py", "--check", "v0.0.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.match(r"The tag must be v\d+\.\d+\.\d+, of", done.stdout)


@pytest.fixture(scope="module")
def workflows():
    yaml = pytest.importorskip("yaml")
    return {x.name: yaml.safe_load(x.read_text(encoding="utf-8")) for x in WORKFLOWS.iterdir()}


def test_an_action_is_pinned_by_its_commit():
    """A tag can be moved to other code."""
    for path in WORKFLOWS.iterdir():
        uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
        assert uses
        for action in uses:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_the_upload_alone_can_ask_for_a_token(workflows):
    """And it runs no command: what `build` made is all that comes there."""
    assert workflows["ci.yml"]["permissions"] == {"contents": "read"}
    assert workflows["release.yml"]["permissions"] == {}
    jobs = workflows["release.yml"]["jobs"]
    assert jobs["build"]["permissions"] == {"contents": "read"}
    publish = jobs["publish"]
    assert (publish["permissions"], publish["needs"]) == ({"id-token": "write"}, "build")
    assert publish["environment"]["name"] == "pypi"
    assert [step for step in publish["steps"] if "run" in step] == []
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS.iterdir()]
    assert not [text for text in texts if "secrets." in text or "pull_request_target" in text]


def test_commands_of_the_workflows_are_here(workflows):
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [
        step["run"]
        for workflow in workflows.values()
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(commands) == 3
    for command in commands:
        if command.startswith("make "):
            assert f"\n{command.removeprefix('make ')}:" in made
        else:
            assert (ROOT / command.removeprefix("python ").split()[0]).is_file()
    assert ".ci/build.py --check" in made
    assert 'release.py --check "$GITHUB_REF_NAME"' in " ".join(commands)
