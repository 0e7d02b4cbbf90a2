"""The text of the package page: README.md without relative links, which would lead nowhere there.

Links and pictures become those of the repository, whose address is `Source` in `[project.urls]` of
pyproject.toml and stands nowhere else. While there is none, their words alone are left.

And the backends of a checkout without symbolic links, git's default on Windows, where
`xentlib/torch` is a file of text: built of the folders that the links lead to.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LINKS = {"xentlib.torch": "torch_impl", "xentlib.jax": "jax_impl"}
PICTURE = re.compile(r'(?s)<picture>.*? alt="([^"]*)".*?</picture>')
FILE = re.compile(r'\b(src|srcset)="(?!\w+:)([^"]+)"')
RELATIVE = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^()\s]+)\)")


def package_page(readme: str, source: str | None) -> str:
    """`readme` as it can be read anywhere: no link or picture that depends on a place."""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        return f"[{words}]({source}/blob/HEAD/{target})" if source else words

    parts = re.split(r"(?ms)(^```.*?^```$)", readme)
    text = "".join(x if x.startswith("```") else RELATIVE.sub(link, x) for x in parts)
    if not source:
        return PICTURE.sub(r"\1", text)
    return FILE.sub(lambda found: f'{found[1]}="{source}/raw/HEAD/{found[2]}"', text)


class WithoutLinks(build_py):
    """Packages that no link leads to; with links all are found already."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.package_dir = self.package_dir or {}
        for package, folder in LINKS.items():
            if package not in self.packages:
                self.package_dir[package] = folder
                self.packages += [package, *(f"{package}.{x}" for x in find_packages(folder))]


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        cmdclass={"build_py": WithoutLinks},
        long_description=package_page(readme, project.get("urls", {}).get("Source")),
        long_description_content_type="text/markdown",
    )
