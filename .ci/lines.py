"""Lines of code of the package, by folder: without docstrings, comments, blank lines, `__all__` and
the files that `make public` writes.

    python .ci/lines.py             here
    python .ci/lines.py COMMIT      at a commit, and here
    python .ci/lines.py --budget    exit status 1 where a folder has more than .ci/lines.tsv says
    python .ci/lines.py --write     .ci/lines.tsv, of what is here
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / ".ci" / "lines.tsv"
PACKAGE = ("xentlib", "torch_impl", "jax_impl")
# Also under the names that they had before the redesign: `call.py` and `public.py`.
GENERATED = {"xentlib/arguments.py", "xentlib/call.py"}
GENERATED |= {f"{column}/{name}.py" for column in PACKAGE[1:] for name in ("api", "public")}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE = LAYOUT | {tokenize.COMMENT, tokenize.ENDMARKER, tokenize.ENCODING}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--budget", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    commit = asked.commit
    here = counted({name: (ROOT / name).read_text("utf-8") for name in names_here()})
    if asked.write:
        BUDGET.write_text("".join(f"{lines}\t{name}\n" for name, lines in sorted(here.items())))
        return 0
    if asked.budget:
        return over_budget(here)
    before = counted(texts_at(commit)) if commit else here
    for folder in sorted(before | here):
        print(f"{folder:28} {before[folder]:7,} {here[folder]:7,}")
    total = before.total(), here.total()
    print(f"{'sum':28} {total[0]:7,} {total[1]:7,}   {total[1] - total[0]:+,}")
    return 0


def over_budget(here: Counter[str]) -> int:
    """A folder outgrows its number in a commit that says so, or not at all."""
    rows = [line.split("\t") for line in BUDGET.read_text("utf-8").splitlines()]
    allowed = {name: int(lines) for lines, name in rows}
    over = {name: lines for name, lines in here.items() if lines > allowed.get(name, 0)}
    for name, lines in sorted(over.items()):
        most = allowed.get(name, 0)
        print(
            f"{name} has {lines:,} lines of code and .ci/lines.tsv allows {most:,}: take some out, "
            f"or change the number in the same commit and say why"
        )
    return 1 if over else 0


def names_here() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for folder in PACKAGE
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def texts_at(commit: str) -> dict[str, str]:
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, *PACKAGE], check=True, stdout=subprocess.PIPE
    ).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                texts[member.name] = file.read().decode("utf-8")
    return texts


def counted(texts: dict[str, str]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        if name not in GENERATED:
            lines["/".join(name.split("/")[:-1])] += lines_of_code(text)
    return lines


def lines_of_code(text: str) -> int:
    """Physical lines with a token that is code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in left_out(ast.parse(text)):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def left_out(tree: ast.Module) -> list[ast.stmt]:
    """Docstrings and `__all__`."""
    nodes: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                nodes.append(first)
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            nodes.append(node)
    return nodes


if __name__ == "__main__":
    raise SystemExit(main())
