"""The Python that pages show, and how it is run: as it stands, on real ranks where it needs them.

A comment on a page says how the blocks after it are run, up to the next such comment:

    <!-- run: alone -->       each by itself, in the test's own process; so without any comment
    <!-- run: together -->    one after the other, in one namespace
    <!-- run: two ranks -->   together, on two ranks that find each other as under torchrun
    <!-- run: torchrun -->    together, on two ranks as torchrun starts them

Where the comment goes on after the mode, what it holds is Python too, run before the blocks: for
fragments whose reader has a model already. What ranks print is what rank 0 prints.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers.torchrun import run, start

RUN = ("alone", "together", "two ranks", "torchrun")
FOUND = re.compile(
    r"^<!-- run: (?P<how>[^\n]*?)(?: -->$|\n(?P<setup>.*?)^-->$)"
    r"|^```python\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef)


class Block(NamedTuple):
    """Python of a page, its first line there, and what the page says that it prints."""

    page: str
    line: int
    code: str
    shown: str = ""


class Group(NamedTuple):
    """Blocks that share a namespace, and how they are run."""

    how: str
    blocks: tuple[Block, ...]

    @property
    def code(self) -> str:
        return "".join(block.code for block in self.blocks)


def groups(page: str, text: str) -> Iterator[Group]:
    """All Python of a page, in its order; a comment that nobody knows raises."""
    how, blocks = RUN[0], []
    for found in FOUND.finditer(text):
        if found["how"] is None:
            line = text.count("\n", 0, found.start("code")) + 1
            blocks.append(Block(page, line, found["code"], found["shown"] or ""))
            if how == "alone":
                yield Group(how, (blocks.pop(),))
            continue
        if blocks:
            yield Group(how, tuple(blocks))
        how, blocks = found["how"], []
        if how not in RUN:
            raise ValueError(f"{page}: a block is run {', '.join(RUN)}; got {how!r}")
        if found["setup"]:
            line = text.count("\n", 0, found.start("setup")) + 1
            blocks.append(Block(page, line, found["setup"]))
    if blocks:
        yield Group(how, tuple(blocks))


def losses(page: str, text: str) -> dict[tuple[str, str], str]:
    """Of each loss that a page defines, and of each backend, the code of its block."""
    found = {}
    for group in groups(page, text):
        backend = re.search(r"^from xentlib\.(\w+) import", group.code, re.MULTILINE)
        for name in re.findall(r"^def (\w+_loss)\(", group.code, re.MULTILINE):
            assert backend is not None
            found[name, backend[1]] = group.code
    return found


def defined(page: str, code: str) -> dict[str, Any]:
    """What a block imports and defines, without what it goes on to run: test_docs_code.py does."""
    body = [x for x in ast.parse(code).body if isinstance(x, DEFINITIONS)]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(ast.Module(body, []), page, "exec"), names)
    return names


def execute(blocks: Sequence[Block]) -> list[str]:
    """What each prints. A traceback names the page and its line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in blocks:
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed.append(out.getvalue())
    return printed


def on_rank(rank: int, world: int, blocks: Sequence[Block]) -> list[str]:
    """In a rank of `helpers.ranks.launch`, with the environment that torchrun would have made."""
    import torch.distributed as dist

    port = [dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None]
    ports = [port[0].port if port[0] is not None else 0]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks are clients, rank 0 too
    }
    try:
        return execute(blocks)
    finally:
        if not dist.is_initialized():  # whoever has launched this rank ends its group
            dist.init_process_group("gloo")


def torchrun(groups: Sequence[Group], folder: Path) -> list[Any]:
    """What the blocks of each group print, or the traceback that ended it; one start for all."""
    (folder / "groups").write_bytes(pickle.dumps([tuple(group.blocks) for group in groups]))
    run(2, "helpers.pages", folder)
    return pickle.loads((folder / "printed").read_bytes())


def main(folder: str) -> None:
    import torch

    start()
    printed: list[Any] = []
    for blocks in pickle.loads(Path(folder, "groups").read_bytes()):
        try:
            printed.append(execute(blocks))
        except Exception:  # noqa: BLE001 - the test shows it
            printed.append(traceback.format_exc())
        if os.environ["RANK"] == "0":
            Path(folder, "printed").write_bytes(pickle.dumps(printed))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
