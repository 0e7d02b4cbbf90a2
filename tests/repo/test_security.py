"""What docs/project.md says of the sources: nothing from the network, no pickle of a user's data,
no text that is evaluated, no process but Python's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("xentlib", "torch_impl", "jax_impl")
if not all((ROOT / folder).is_dir() for folder in PACKAGES):
    pytest.skip("the sources are not there", allow_module_level=True)

# Who may, and for what the page says so.
MAY_IMPORT = {
    "pickle": {"xentlib/processes.py"},  # between ranks, in a private folder
    "socket": {"xentlib/tools/parity/rows/collectives.py"},  # a free port of this machine
    # The same interpreter
    "subprocess": {"xentlib/tools/bench/worker.py", "xentlib/tools/doctor/imports.py"},
    "multiprocessing": {"xentlib/processes.py"},
    "ctypes": {"xentlib/processes.py", "xentlib/tools/bench/worker.py"},
}
NEVER = {
    *("urllib", "http", "ftplib", "smtplib", "requests", "httpx", "aiohttp", "huggingface_hub"),
    *("dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "code", "pty"),
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    *("os.system", "os.popen", "os.execv", "os.execvp", "torch.load", "np.load", "numpy.load"),
    *("torch.hub.load", "transformers.AutoModel.from_pretrained"),
}
# Modules by a name that is not a constant where it is used: from a table of the sources.
NAMED_ELSEWHERE = {
    "xentlib/lazy.py": "a module of this package, by a table",
    "xentlib/tools/doctor/backends.py": "one of the two backends",
    "xentlib/tools/doctor/imports.py": "a package, by a table",
    "xentlib/tools/bench/worker.py": "one of the two backends",
    "xentlib/tools/bench/implementation.py": "a library's own function, by a table",
    "xentlib/tools/parity/rows/windows.py": "one of the two backends",
    "xentlib/tools/parity/training/loop.py": "one of the two backends",
    "torch_impl/integrations/lightning.py": "Lightning's two names",
    "xentlib/tools/cli/command.py": "a command's module, by a table",
    "xentlib/tools/cli/audit.py": "the module that the command is given",
    "xentlib/tools/conformance/losses.py": "one of the two backends",
}


def sources():
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("xentlib/torch/", "xentlib/jax/")):  # of a source archive
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def found_in(name: str, tree: ast.Module) -> list[str]:
    """What the page excludes."""
    found = []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [str(node.module)]
        found += [
            f"{name}:{node.lineno} imports {module}"
            for module in (x.partition(".")[0] for x in modules)
            if module in NEVER or name not in MAY_IMPORT.get(module, {name})
        ]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {x.arg: ast.unparse(x.value) for x in node.keywords}
            if called in CALLS | METHODS or called.endswith(".from_pretrained"):
                found.append(f"{name}:{node.lineno} calls {called}")
            if {"shell", "allow_pickle", "trust_remote_code"} & set(keywords):
                found.append(f"{name}:{node.lineno} passes {', '.join(keywords)}")
            if called.rpartition(".")[2] == "import_module" and name not in NAMED_ELSEWHERE:
                constant = isinstance(node.args[0], ast.Constant)
                if not constant:
                    found.append(f"{name}:{node.lineno} imports {ast.unparse(node.args[0])}")
    return found


def test_sources_do_what_the_security_page_says():
    trees = dict(sources())
    assert len(trees) > 150
    assert [x for name, tree in trees.items() for x in found_in(name, tree)] == []
    assert set(NAMED_ELSEWHERE) | set().union(*MAY_IMPORT.values()) <= set(trees)


@pytest.mark.parametrize(
    "text",
    [
        "from urllib.request import urlopen",
        "import pickle",
        "def f():\n    import socket",
        "eval(text)",
        "import torch\ntorch.load(path)",
        "AutoModel.from_pretrained(name)",
        "run(command, shell=True)",
        "from importlib import import_module\nimport_module(name)",
    ],
)
def test_what_the_page_excludes_is_found(text):
    assert found_in("xentlib/nll.py", ast.parse(text))
