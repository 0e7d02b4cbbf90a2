"""Build the source archive, and the wheel from it, so that anyone who does it gets the same bytes.

    python .ci/build.py            writes dist/
    python .ci/build.py --check    builds a second time, of files with other dates and rights, and
                                   exits with status 1 if a byte differs

Dates are `SOURCE_DATE_EPOCH`, by default that of the last commit. The tree is copied first: what
lies in it from an earlier build, such as an egg-info, would otherwise get into the archive.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCES = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "*.pyc", ".*_cache")
NOT_SOURCES += (".hypothesis", "shared")
# In an archive the backends lie in the package. These are the names that a checkout has them by.
LINKS = {"torch_impl": "xentlib/torch", "jax_impl": "xentlib/jax"}
YEAR_1980 = 315_619_200  # a wheel is a zip, which knows no earlier one


def main() -> int:
    """Write dist/; with `--check` compare it with a second build."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="build twice and compare")
    check = parser.parse_args().check
    os.environ["SOURCE_DATE_EPOCH"] = epoch = os.environ.get("SOURCE_DATE_EPOCH") or dated()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    first = build(dist, int(epoch), umask=0o022)
    for path, digest in first.items():
        print(f"{digest}  dist/{path}")
    if not check:
        return 0
    os.umask(0o077)
    with tempfile.TemporaryDirectory() as folder:
        second = build(Path(folder), int(epoch), umask=0o002, other_dates=True)
    differ = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    print(f"other bytes the second time: {', '.join(differ)}" if differ else "the same bytes twice")
    return 1 if differ else 0


def dated() -> str:
    """Seconds of the last commit; 1980 where there is no repository."""
    command = ["git", "log", "-1", "--format=%ct"]
    if not (ROOT / ".git").exists():
        return str(YEAR_1980)
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def build(dist: Path, epoch: int, *, umask: int, other_dates: bool = False) -> dict[str, str]:
    """Both files of one copy of the tree; SHA-256 by name."""
    os.umask(0o022)  # of what pip unpacks, and so of what is in the wheel
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCES))
        for path in tree.rglob("*"):
            if path.is_symlink():
                continue
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
            if other_dates:
                os.utime(path, (epoch + 86_400, epoch + 86_400))
        dist.mkdir(parents=True, exist_ok=True)
        code = "import sys; import setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
        sdist = [sys.executable, "-W", "ignore", "-c", code, str(dist)]
        subprocess.run(sdist, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (archive,) = dist.glob("*.tar.gz")
    settle(archive, epoch)
    wheel = ["wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(dist), str(archive)]
    subprocess.run([sys.executable, "-m", "pip", *wheel], check=True)
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in sorted(dist.iterdir())}


def settle(archive: Path, epoch: int) -> None:
    """The same archive with members in order, one date, plain rights and nobody's name, and links
    that make it a checkout for the suite."""
    written = io.BytesIO()
    with tarfile.open(archive) as before, tarfile.open(fileobj=written, mode="w") as after:
        members = before.getmembers()
        folder = members[0].name.partition("/")[0]
        for name, target in LINKS.items():
            link = tarfile.TarInfo(f"{folder}/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, target
            members += [link] if any(f"{folder}/{target}" == x.name for x in members) else []
        for member in sorted(members, key=lambda x: x.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o644 if member.isfile() else 0o755
            member.pax_headers = {}
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    with archive.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed:
        packed.write(written.getvalue())


if __name__ == "__main__":
    sys.exit(main())
