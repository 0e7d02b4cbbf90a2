"""Whether the suite notices a change of one node of the package.

    python .ci/mutants.py [--seed 1] [--number 40] [--full] [--table .ci/mutants.tsv]

Draws nodes of functions of the package, each with a change; rows that the table has are taken
again. A run of the suite with a probe before each node's statement says which tests reach it, in
whichever of their processes. Then each change is made by itself and those tests run, until one
fails. The table names it. `--full` runs, for each row that survives, the files of its tests with
whole products of options: none may be rejected there. A kernel's text is Triton's and takes no
probe: the tests of kernels run.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "mutants"  # a copy, which is what is changed
PACKAGES = ("xentlib", "torch_impl", "jax_impl")
KERNELS = (
    "tests/kernels/test_kernels*.py",
    "tests/kernels/test_*_triton.py",
)  # reach what Triton reads as text
HEADER = ("file", "line", "function", "was", "becomes", "of", "plain", "full")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
PROBE = '''
import os

FILE, WORKER = os.environ["XENTLIB_REACHED"], os.environ.get("PYTEST_XDIST_WORKER", "")
running, reached = [0, ""], set()


def at(number):
    """Of each process the first time in a test."""
    test = running[1]
    if running[0] != os.getpid():  # a rank: its environment is that of the first that was started
        with open(FILE + WORKER) as file:
            test = file.read()
    if (number, test) not in reached:
        reached.add((number, test))
        with open(FILE, "a") as file:
            file.write(f"{number}\\t{test}\\n")


def begins(item, when):
    running[:] = os.getpid(), f"{item.nodeid}\\t{when}"
    with open(FILE + WORKER, "w") as file:
        file.write(running[1])


try:
    import pytest
except ImportError:
    pass
else:

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(item):
        begins(item, "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(item):
        begins(item, "call")
'''


class Mutant(NamedTuple):
    file: str
    line: int
    function: str
    was: str
    becomes: str
    of: int  # the how manieth in its function that reads like this
    span: tuple[int, int, int, int]
    statement: int  # the line where the innermost statement begins
    traced: bool  # by Triton, which reads the text

    @property
    def key(self) -> tuple[str, ...]:
        return (self.file, self.function, self.was, self.becomes, str(self.of))


def main() -> int:
    """Fill the table's column; returns 1 if a row survives that whole products reject."""
    args = parser().parse_args()
    column = "full" if args.full else "plain"
    rows = read(args.table)
    mutants = drawn(args.seed, args.number, rows)
    reached = reach(mutants, args.workers)
    for mutant in mutants:
        rows.setdefault(mutant.key, {}).update(zip(HEADER[:6], map(str, mutant)))
    plant([])  # without probes, which ask for their log
    # Those of few tests first: one that survives a thousand takes as long as all others.
    for mutant, tests in sorted(zip(mutants, reached), key=lambda pair: len(pair[1])):
        row = rows[mutant.key]
        wanted = not args.full or not rejected(row.get("plain"))
        if wanted and not row.get(column) and not args.only_reach:
            files_of = {test.partition("::")[0] for test in tests}
            row[column] = verdict(mutant, [*files_of] if args.full else tests, args.full)
            print(*row.values(), sep="\t", flush=True)
            write(args.table, rows)
    lost = [r for r in rows.values() if rejected(r.get("full")) and not rejected(r.get("plain"))]
    print(Counter(rejected(row.get(column)) for row in rows.values()), "lost:", lost)
    return bool(lost)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    new.add_argument("--seed", type=int, default=1)
    new.add_argument("--number", type=int, default=40)
    new.add_argument("--full", action="store_true")
    new.add_argument("--workers", type=int, default=4, help="processes of the run with probes")
    new.add_argument("--only-reach", action="store_true", help="run with the probes and stop")
    new.add_argument("--table", type=Path, default=ROOT / ".ci" / "mutants.tsv")
    return new


def rejected(verdict: str | None) -> bool:
    """By a test that has a name: a run that ended otherwise says nothing."""
    return verdict is not None and not verdict.startswith(("survives", "ended"))


def read(table: Path) -> dict[tuple[str, ...], dict[str, str]]:
    lines = table.read_text().splitlines()[1:] if table.is_file() else []
    rows = [dict(zip(HEADER, line.split("\t"))) for line in lines]
    return {tuple(r[x] for x in ("file", "function", "was", "becomes", "of")): r for r in rows}


def write(table: Path, rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    lines = ["\t".join(row.get(name, "") for name in HEADER) for row in rows.values()]
    table.write_text("\n".join(["\t".join(HEADER), *lines]) + "\n")


# --- what can be changed ----------------------------------------------------------------------


def drawn(seed: int, number: int, rows: dict[tuple[str, ...], dict[str, str]]) -> list[Mutant]:
    everything = [m for path in files() for m in mutants_of(path)]
    if rows:
        by_key = {mutant.key: mutant for mutant in everything}
        for key in rows.keys() - by_key.keys():
            print("gone:", *key, sep="\t")
        return [by_key[key] for key in rows if key in by_key]
    return random.Random(seed).sample(everything, number)


def files() -> list[Path]:
    folders = [ROOT / name for name in PACKAGES]
    return sorted(p for folder in folders for p in folder.rglob("*.py") if not linked(p))


def linked(path: Path) -> bool:
    return any(part.is_symlink() for part in (path, *path.parents))


def mutants_of(path: Path) -> list[Mutant]:
    source, mutants, counts = path.read_text(), [], Counter()  # type: ignore[var-annotated]
    for function, traced, statement, node, changed in nodes(ast.parse(source)):
        was, becomes = (re.sub(r"\s+", " ", ast.unparse(x)) for x in (node, changed))
        name = path.relative_to(ROOT).as_posix()
        counts[key := (function, was, becomes)] += 1
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        where = (name, node.lineno, function)
        mutants.append(Mutant(*where, was, becomes, counts[key], span, statement, traced))
    return mutants


def nodes(module: ast.Module) -> Iterator[tuple[str, bool, int, Any, Any]]:
    """The function's name, whether Triton compiles it, its statement's line, a node and another."""

    def visit(node: ast.AST, function: str, traced: bool, statement: int) -> Iterator[Any]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".strip(".")
            traced = traced or any("jit" in ast.unparse(x) for x in node.decorator_list)
            body = node.body
            if isinstance(node, ast.ClassDef):  # what is outside functions runs when imported
                body = [x for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
            for child in body:
                yield from visit(child, function, traced, child.lineno)
            return
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.ImportFrom | ast.Import):
            return  # words; positions that are none in Python 3.11; what types alone ask for
        if isinstance(node, ast.stmt):
            statement = node.lineno
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            for changed in changes(node):
                yield function, traced, statement, *changed
            for name, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and name not in ("annotation", "keywords"):
                        yield from visit(child, function, traced, statement)
            for keyword in getattr(node, "keywords", ()):
                yield from visit(keyword.value, function, traced, statement)

    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from visit(node, "", False, node.lineno)


def changes(node: Any) -> Iterator[tuple[Any, Any]]:
    """One of each kind, all smaller than a statement or a statement of one call."""
    new = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            new.ops = [SWAPS[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            new.op = SWAPS[type(op)]()
        case ast.UnaryOp(op=ast.Not() | ast.USub()) if not isinstance(node.operand, ast.Constant):
            new = new.operand
        case ast.Constant(value=bool() as value):
            new = ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            new = ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, ast.UnaryOp(ast.Not(), copy.deepcopy(test))
            return
        case ast.Expr(value=ast.Call()):
            yield node, ast.Expr(ast.Constant(None))
            return
        case ast.Call(keywords=[_, *_]):
            for k, keyword in enumerate(node.keywords):
                if keyword.arg is not None:
                    less = copy.deepcopy(node)
                    del less.keywords[k]
                    yield node, less
            return
        case _:
            return
    yield node, new


# --- which tests reach it ---------------------------------------------------------------------


def reach(mutants: list[Mutant], workers: int) -> list[list[str]]:
    """Of each, its tests; a whole file where a fixture came past. A log is of one draw from one
    state of the sources."""
    index = subprocess.check_output(["git", "write-tree"], cwd=ROOT)  # what `plant` copies
    of = hashlib.sha256(repr((index, mutants)).encode()).hexdigest()[:12]
    log = ROOT / "build" / f"reached-{of}.tsv"
    if not log.is_file():
        plant(mutants)
        (TREE / "reached.py").write_text(PROBE)
        part = log.with_suffix(".part")
        part.unlink(missing_ok=True)
        suite(["-p", "reached", "-n", str(workers), "--dist", "loadfile"], False, part)
        part.replace(log)
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    tests: dict[int, set[str]] = defaultdict(set)
    for number, test, when in (line for line in lines if len(line) == 3):
        tests[int(number)].add(test.partition("::")[0] if when == "setup" else test)
    kernels = [p.relative_to(ROOT).as_posix() for x in KERNELS for p in ROOT.glob(x)]
    return [
        kernels
        if m.traced
        else [t for t in names if "::" not in t or t.split("::")[0] not in names]
        for m, names in ((m, tests[number]) for number, m in enumerate(mutants))
    ]


def plant(mutants: list[Mutant]) -> None:
    """A new copy, with a probe before each one's statement."""
    shutil.rmtree(TREE, ignore_errors=True)
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={TREE}/"], cwd=ROOT, check=True)
    for name in {m.file for m in mutants}:
        at = defaultdict(list)
        for number, m in enumerate(mutants):
            if m.file == name and not m.traced:
                at[m.statement].append(number)
        tree = Probes(at).visit(ast.parse((ROOT / name).read_text()))
        (TREE / name).write_text(ast.unparse(ast.fix_missing_locations(tree)))


class Probes(ast.NodeTransformer):
    def __init__(self, at: dict[int, list[int]]) -> None:
        self.at = at

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                new = []
                for statement in block:
                    if isinstance(statement, ast.stmt):
                        for number in self.at.pop(statement.lineno, ()):
                            new += ast.parse(f"__import__('reached').at({number})").body
                    new.append(statement)
                setattr(node, name, new)
        return super().generic_visit(node)


# --- whether they notice ----------------------------------------------------------------------


def verdict(mutant: Mutant, tests: list[str], full: bool) -> str:
    """The first test that fails, or how many did not."""
    if not tests:
        return "survives: no test reaches it"
    source = (ROOT / mutant.file).read_bytes()
    (TREE / mutant.file).write_bytes(changed(source, mutant))
    chosen = ROOT / "build" / "chosen"
    chosen.write_text("\n".join(sorted(tests)) + "\n")
    workers = (
        ["-n", "2", "--dist", "loadfile"] if len({t.partition("::")[0] for t in tests}) > 1 else []
    )
    done = suite(["-x", *workers, f"@{chosen}"], full, ROOT / "build" / "unused.tsv")
    (TREE / mutant.file).write_bytes(source)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done, re.MULTILINE)
    if failed:
        again = suite([failed[1]], full, ROOT / "build" / "unused.tsv")
        unchanged = re.search(r"\d+ passed", again) and not re.search(r"\d+ (failed|error)", again)
        return failed[1] if unchanged else f"ended: {failed[1]} fails without the change"
    passed = re.search(r"(\d+) passed", done)
    return f"survives {passed[1]} tests" if passed else f"ended: {done.strip()[-200:]!r}"


def changed(source: bytes, mutant: Mutant) -> bytes:
    lines = source.splitlines(keepends=True)
    first, start, last, end = mutant.span
    before = b"".join(lines[: first - 1]) + lines[first - 1][:start]
    after = lines[last - 1][end:] + b"".join(lines[last:])
    text = mutant.becomes if re.match(r".* [-+*/%|&@]?= ", mutant.was) else f"({mutant.becomes})"
    ast.parse(new := before + text.encode() + after)
    return new


def suite(arguments: list[str], full: bool, log: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(TREE),
        "XENTLIB_REACHED": str(log),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "jax_cache"),
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "torch_extensions"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-o", "timeout=900"]  # a change that makes a test wait for ever is noticed
    return subprocess.run(
        [*command, *["--full"] * full, *arguments],
        cwd=TREE,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
