"""The text of the package page: README.md without relative links, which would lead nowhere there.

They become links into the repository, whose address is `Source` in `[project.urls]` of
pyproject.toml and stands nowhere else. While there is none, their words alone are left.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
RELATIVE = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^()\s]+)\)")


def package_page(readme: str, source: str | None) -> str:
    """`readme` as it can be read anywhere: outside of code, no link that depends on a place."""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        return f"[{words}]({source}/blob/HEAD/{target})" if source else words

    parts = re.split(r"(?ms)(^```.*?^```$)", readme)
    text = "".join(x if x.startswith("```") else RELATIVE.sub(link, x) for x in parts)
    # What the suite runs around a block of code is for the suite.
    return re.sub(r"(?s)<!-- run:.*?-->\n*", "", text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=package_page(readme, project.get("urls", {}).get("Source")),
        long_description_content_type="text/markdown",
    )
