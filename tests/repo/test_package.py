"""What is built of the sources: the text of the package page, and archives of settled bytes. That
they are the same twice, and that the wheel is whole, `make check-wheel` says."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import xentlib
from helpers.scripts import load

pytest.importorskip("setuptools")  # which Python brings no longer, from 3.12 on

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "setup.py").is_file():
    pytest.skip("the sources are not there", allow_module_level=True)


setup, build = load(ROOT / "setup.py"), load(ROOT / ".ci" / "build.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^()\s]+)\)")


def test_the_package_page_has_no_link_that_depends_on_a_place():
    plain = setup.package_page(README, None)
    assert [x for x in LINK.findall(plain) if not x.startswith(("http", "#"))] == []
    assert "split" not in LINK.findall(plain)
    linked = setup.package_page(README, "https://example.org/x")
    targets = [x for x in LINK.findall(README) if not x.startswith(("http", "#"))]
    assert targets
    for target in targets:
        assert f"](https://example.org/x/blob/HEAD/{target})" in linked
    assert "<!--" not in plain


def test_pictures_on_the_package_page_are_the_repository_s_or_said_in_words():
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(shown) == 4
    linked = setup.package_page(README, "https://example.org/x")
    assert re.findall(r'(?:src|srcset)="([^"]+)"', linked) == [
        f"https://example.org/x/raw/HEAD/{path}" for path in shown
    ]
    plain = setup.package_page(README, None)
    assert "<img" not in plain
    for said in re.findall(r'alt="([^"]+)"', README):
        assert said in plain


def test_code_on_the_package_page_is_that_of_the_readme():
    """And nothing of what the suite runs around it."""
    blocks = re.compile(r"(?ms)^```.*?^```$")
    shown = blocks.findall(setup.package_page(README, None))
    assert shown == blocks.findall(README)
    assert setup.package_page("```python\nx[0](a)\n```\n[b](c)\n", None) == (
        "```python\nx[0](a)\n```\nb\n"
    )


def test_the_changelog_begins_with_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)[0] == xentlib.__version__


def test_pythons_that_are_run_are_classified():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [x.rpartition(" ")[2] for x in project["classifiers"] if " :: Python :: 3." in x]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={pythons[0]}"


def archive(path, date, mode, names):
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.mode, member.uname, member.size = date, mode, "someone", 2
            made.addfile(member, io.BytesIO(b"ab"))


def test_an_archive_has_one_date_and_no_owner(tmp_path):
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    archive(one, 1.5e9, 0o644, ["x/b", "x/a"])
    archive(other, 1.6e9, 0o664, ["x/a", "x/b"])
    assert one.read_bytes() != other.read_bytes()
    for path in (one, other):
        build.settle(path, 1_700_000_000)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as settled:
        for member in settled.getmembers():
            assert (member.mtime, member.mode, member.uname) == (1_700_000_000, 0o644, "")
            assert settled.extractfile(member).read() == b"ab"


@pytest.mark.slow
@pytest.mark.parametrize("left", [True, False], ids=["files of text", "nothing"])
def test_a_checkout_without_symbolic_links_builds_the_whole_package(left, tmp_path):
    """As git makes it on Windows, and as some programs unpack an archive."""
    contents = []
    for links in (True, False):
        tree = tmp_path / f"tree {links}"
        for name in ("xentlib", "torch_impl", "jax_impl"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
            shutil.copy(ROOT / name, tree)
        for link in () if links else (tree / "xentlib" / "torch", tree / "xentlib" / "jax"):
            target = str(link.readlink())
            link.unlink()
            if left:
                link.write_text(target, encoding="utf-8")
        made = tmp_path / f"made {links}"
        made.mkdir()
        code = "import sys; import setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
        command = [sys.executable, "-W", "ignore", "-c", code, str(made)]
        subprocess.run(command, cwd=tree, check=True, capture_output=True)
        (wheel,) = made.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            contents.append(
                {x: packed.read(x) for x in packed.namelist() if x.startswith("xentlib/")}
            )
    with_links, without = contents
    assert {"xentlib/torch/losses/index.py", "xentlib/jax/core/logits.py"} <= set(with_links)
    assert without == with_links
