"""Write what a person's editor has to find in the source: the public functions' signatures and
docstrings in both backends, copied from their definition in `xentlib`.

    python .ci/public.py            (`make public`) writes
    python .ci/public.py --check    exit status 1 if a file is not what would be written

The definition of a function of a head is a signature and a docstring (`xentlib/nll.py`,
`xentlib/logprobs.py`). From it come `xentlib/arguments.py`, the arguments of a call as one object,
and `torch_impl/api.py` and `jax_impl/api.py`, functions that make such an object and hand it on.
Other public names stand where they are implemented; their docstring there is a copy.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xentlib.options import RULES  # noqa: E402 - of these sources

# Function, file of its definition, class of its arguments, and who computes it, in both backends.
FUNCTIONS = (
    ("chunked_nll", "nll", "Arguments", "nll"),
    ("chunked_logprobs", "logprobs", "Arguments", "head_logprobs"),
    ("vocab_parallel_logprobs", "logprobs", "LogitsArguments", "logits_logprobs"),
    ("chunked_divergence", "divergence", "DivergenceArguments", "head_divergence"),
    ("vocab_parallel_divergence", "divergence", "LogitsDivergenceArguments", "logits_divergence"),
)
# What a loss does not need is loaded when it is called.
LATER = {
    ("torch_impl", "head_divergence"): "xentlib.torch.losses.divergence",
    ("torch_impl", "logits_divergence"): "xentlib.torch.losses.divergence",
    ("jax_impl", "head_divergence"): "xentlib.jax.losses.divergence",
    ("jax_impl", "logits_divergence"): "xentlib.jax.losses.divergence",
}
# What stands for an array, and for a head, which may be a module; and where they come from.
ARRAYS = {
    "torch_impl": (
        "Tensor",
        "Tensor | nn.Module | LowRankHead[Tensor]",
        "from torch import Tensor, nn",
    ),
    "jax_impl": ("jax.Array", "Any", "import jax"),
}
# Of these the docstring alone is copied: name, file of the definition, files that implement it.
DOCUMENTED = (
    ("next_token_labels", "labels", ("torch_impl/labels.py", "jax_impl/labels.py")),
    ("segment_sum", "segments", ("torch_impl/segments.py", "jax_impl/segments.py")),
    ("segment_mean", "segments", ("torch_impl/segments.py", "jax_impl/segments.py")),
    ("count_collectives", "collectives", ("torch_impl/collectives.py", "jax_impl/collectives.py")),
    ("Evaluation", "evaluation", ("torch_impl/evaluation.py", "jax_impl/evaluation.py")),
    ("gather_head", "head", ("torch_impl/placement/head.py",)),
    ("TokenNormalizer", "accumulate", ("torch_impl/accumulate.py",)),
    ("accumulate_grads", "accumulate", ("jax_impl/accumulate.py",)),
    ("token_normalized", "accumulate", ("jax_impl/accumulate.py",)),
)
CLASSES = """(
    Arguments,
    DivergenceArguments,
    LogitsArguments,
    LogitsDivergenceArguments,
)"""
OPTIONS = """(
    ComputeDtype,
    Divergence,
    DivergenceOutputName,
    DivergenceReduction,
    Gather,
    OutputName,
    Reduction,
    Vocab,
    WeightLayout,
)"""
ARRAY, HEAD = re.compile(r"\bArray\b"), re.compile(r"\bHead\b")
WRITTEN = "Written by `make public`"


def main() -> int:
    """Write every file, or say which is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    wanted = dict(files())
    stale = [path for path, text in wanted.items() if standing(path) != text]
    for path in () if check else stale:
        (ROOT / path).write_text(wanted[path], encoding="utf-8")
    if stale:
        print(f"{'stale, run `make public`' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


def standing(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""


def files() -> Iterator[tuple[str, str]]:
    """Each file and what is to stand in it."""
    definitions = {name: definition(spec, name) for name, spec, *_ in FUNCTIONS}
    yield "xentlib/arguments.py", call_module(definitions)
    for column in ARRAYS:
        yield f"{column}/api.py", public_module(column, definitions)
    texts: dict[str, str] = {}
    for name, spec, paths in DOCUMENTED:
        for path in paths:
            text = texts.get(path) or standing(path)
            texts[path] = with_docstring(text, name, docstring(spec, name))
    yield from texts.items()


def parsed(path: str) -> tuple[str, ast.Module]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text, ast.parse(text)


def named(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The top-level definition of a name; the last one, if some are for type checkers."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node for node in tree.body if isinstance(node, kinds) and node.name == name][-1]


def docstring(spec: str, name: str) -> str:
    """Its literal, quotes included, as it stands in the definition."""
    text, tree = parsed(f"xentlib/{spec}.py")
    found = ast.get_source_segment(text, named(tree, name).body[0])
    assert found is not None
    return found


class Definition:
    """A function's parameters as (name, annotation, default or None), and the rest of it."""

    def __init__(self, spec: str, name: str) -> None:
        _, tree = parsed(f"xentlib/{spec}.py")
        node = named(tree, name)
        assert isinstance(node, ast.FunctionDef)
        assert node.returns is not None
        self.spec, self.name, self.returns = spec, name, ast.unparse(node.returns)
        self.docstring = docstring(spec, name)
        given = [(arg, None) for arg in node.args.args]
        named_only = list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
        self.positional = len(given)
        self.parameters = [
            (arg.arg, unparsed(arg.annotation), None if default is None else unparsed(default))
            for arg, default in [*given, *named_only]
        ]


def unparsed(node: ast.expr | None) -> str:
    assert node is not None
    return ast.unparse(node).replace("'", '"')


def definition(spec: str, name: str) -> Definition:
    return Definition(spec, name)


def call_module(definitions: dict[str, Definition]) -> str:
    """Classes with the parameters of all functions that share them, defaults beside them."""
    text = f'''"""A call of a function of the head as one object: what the user gave, by name.

{WRITTEN} from the signatures in `nll.py`, `logprobs.py` and `divergence.py`, where
options are added. A function leaves at its default what is none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xentlib.labels import SoftLabels
from xentlib.options import (
    ComputeDtype,
    Divergence,
    DivergenceOutputName,
    DivergenceReduction,
    Gather,
    OutputName,
    Reduction,
    Vocab,
    WeightLayout,
)
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

if TYPE_CHECKING:
    from xentlib.shards import VocabShard

__all__ = [
    "SCALARS",
    "Arguments",
    "Array",
    "DivergenceArguments",
    "Head",
    "LogitsArguments",
    "LogitsDivergenceArguments",
    "Scalars",
]

Array = Any  # a tensor or an array of the backend
Head = Any  # an array, or a module of the backend that stands for one
'''
    scalars: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for _, _, kind, _ in FUNCTIONS):
        functions = [name for name, _, other, _ in FUNCTIONS if other == kind]
        fields = {p[0]: p for name in functions for p in definitions[name].parameters}
        by_default = sorted(fields.values(), key=lambda p: p[2] is not None)
        lines = [f"    {n}: {t}" + ("" if d is None else f" = {d}") for n, t, d in by_default]
        for name, (_, annotation, _) in fields.items():
            if "float" in annotation and name not in RULES:  # `bind` would drop it without a word
                raise SystemExit(f"`{name}` must have a rule in RULES of xentlib/options.py")
        scalars |= {n: p for n, p in fields.items() if n in RULES and not RULES[n].tensor}
        who = " and ".join(f"`{name}`" for name in functions)
        text += f'\n\nclass {kind}(NamedTuple):\n    """Of {who}."""\n\n' + "\n".join(lines) + "\n"
    text += (
        '\n\nclass Scalars(NamedTuple):\n    """The numbers of a call that the host knows."""\n\n'
    )
    for name, kind, default in scalars.values():
        text += f"    {name}: {kind.replace(' | Array', '')} = {default}\n"
    text += "\n\n# Of each function\nSCALARS: dict[str, tuple[str, ...]] = {\n"
    for name, found in definitions.items():
        own = tuple(p for p, *_ in found.parameters if p in scalars)
        text += f'    "{name}": {own},\n'.replace("'", '"')
    return text + "}\n"


def public_module(column: str, definitions: dict[str, Definition]) -> str:
    """The functions, which hand on their arguments."""
    array, head, import_array = ARRAYS[column]
    package = f"xentlib.{column.removesuffix('_impl')}"
    imports = "".join(
        sorted(
            f"from {module} import {names}\n"
            for module, names in (
                ("xentlib.arguments", CLASSES),
                ("xentlib.checks.call", "known_names"),
                ("xentlib.logprobs", "LogprobOutput"),
                *((("xentlib.head", "LowRankHead"),) if "LowRankHead" in head else ()),
                ("xentlib.nll", "NLLOutput"),
                ("xentlib.options", OPTIONS),
                ("xentlib.shards", "VocabShard"),
                ("xentlib.labels", "SoftLabels"),
                ("xentlib.teacher", "TeacherHead, TeacherLogits, TeacherTopK"),
                (f"{package}.losses.logprobs", "head_logprobs, logits_logprobs"),
                (f"{package}.losses.index", "nll"),
            )
        )
    )
    text = f'''"""The functions of the head, for people and their editors.

{WRITTEN} from the definitions in `nll.py`, `logprobs.py` and `divergence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

{import_array}

{imports}
if TYPE_CHECKING:
    from xentlib.divergence import DivergenceOutput

__all__ = [
'''
    text += "".join(f'    "{name}",\n' for name in sorted(definitions)) + "]\n"
    for name, _, kind, worker in FUNCTIONS:
        found = definitions[name]
        lines = [
            f"    {parameter}: {HEAD.sub(head, ARRAY.sub(array, annotation))}"
            + ("," if default is None else f" = {default},")
            for parameter, annotation, default in found.parameters
        ]
        lines.insert(found.positional, "    *,")
        given = "".join(f"            {p}={p},\n" for p, _, _ in found.parameters)
        text += (
            f"\n\n@known_names\ndef {name}(\n"
            + "\n".join(lines)
            + f"\n) -> {ARRAY.sub(array, found.returns)}:\n"
        )
        text += f"    {found.docstring}\n"
        if (column, worker) in LATER:
            text += f"    from {LATER[column, worker]} import {worker}\n\n"
        text += f"    return {worker}(\n        {kind}(\n{given}        )\n    )\n"
    return text


def with_docstring(text: str, name: str, literal: str) -> str:
    """The module's text with this docstring in the function or class."""
    node, lines = named(ast.parse(text), name), text.splitlines(keepends=True)
    first = node.body[0]
    has = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    at = first.lineno - 1
    if not has and isinstance(first, (ast.FunctionDef, ast.ClassDef)) and first.decorator_list:
        at = first.decorator_list[0].lineno - 1
    after = first.end_lineno if has else at
    assert after is not None
    gap = "\n" if isinstance(node, ast.ClassDef) and not has else ""
    return "".join([*lines[:at], f"    {literal}\n{gap}", *lines[after:]])


if __name__ == "__main__":
    sys.exit(main())
