"""What the packages show: names, signatures, docstrings; in an editor too, which runs nothing."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xentlib import evaluation as evaluation_spec
from xentlib import labels as labels_spec
from xentlib import logprobs as logprobs_spec
from xentlib import nll as nll_spec
from xentlib import segments as segments_spec
from xentlib.arguments import Arguments, LogitsArguments

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "torch": [
        "chunked_nll",
        "chunked_logprobs",
        "vocab_parallel_logprobs",
        "next_token_labels",
        "segment_mean",
        "segment_sum",
        "gather_head",
        "count_collectives",
        "CollectiveCount",
        "TokenNormalizer",
        "Window",
        "WindowStats",
        "Evaluation",
        "NLLHead",
        "PaddedVocab",
        "VocabShard",
    ],
    "jax": [
        "chunked_nll",
        "chunked_logprobs",
        "vocab_parallel_logprobs",
        "next_token_labels",
        "segment_mean",
        "segment_sum",
        "count_collectives",
        "CollectiveCount",
        "accumulate_grads",
        "token_normalized",
        "TokenNormalizedState",
        "WindowStats",
        "Evaluation",
        "PaddedVocab",
        "VocabShard",
    ],
}


def test_copies_are_those_of_the_definition():
    """`make public`: signatures, docstrings and the arguments of a call are copies."""
    if not (ROOT / ".ci" / "public.py").exists():
        pytest.skip("the sources are not there")
    done = subprocess.run(
        [sys.executable, ".ci/public.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, names in NAMES.items() for name in names]
)
def test_an_editor_shows_the_signature_and_the_docstring(backend, name):
    """jedi, which reads sources and runs none of them."""
    jedi = pytest.importorskip("jedi")
    package = pytest.importorskip(f"xentlib.{backend}")
    script = jedi.Script(
        f"from xentlib.{backend} import {name}\n{name}(",
        project=jedi.Project(ROOT, added_sys_path=[str(ROOT)]),
    )
    (found,) = script.infer(2, 1)
    public = getattr(package, name)
    assert inspect.getdoc(public).splitlines()[0] in found.docstring()
    signatures = [*script.get_signatures(), *found.get_signatures()]
    shown = [[parameter.name for parameter in s.params] for s in signatures]
    if not issubclass(type(public), type) or not hasattr(public, "_fields"):  # jedi knows no fields
        assert list(inspect.signature(public).parameters) in shown


def test_a_call_has_every_argument_of_its_function(backend):
    """One field an option, the public default beside it."""
    package = pytest.importorskip(f"xentlib.{backend}")
    kinds = {
        "chunked_nll": Arguments,
        "chunked_logprobs": Arguments,
        "vocab_parallel_logprobs": LogitsArguments,
    }
    for name, kind in kinds.items():
        for parameter in inspect.signature(getattr(package, name)).parameters.values():
            assert parameter.name in kind._fields
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert kind._field_defaults[parameter.name] == parameter.default


def test_what_is_raised_is_exported(backend):
    """An exception that a docstring names can be caught by its name in that package."""
    package = pytest.importorskip(f"xentlib.{backend}")
    if backend == "jax":
        pytest.importorskip("flax")  # of the heads as modules
    named = set()
    for name in package.__all__:
        public = getattr(package, name)
        texts = [public, *(vars(public).values() if isinstance(public, type) else ())]
        for text in filter(None, map(inspect.getdoc, texts)):
            named |= set(re.findall(r"^ +(\w+Error): ", text, re.MULTILINE))
    assert {"ValueError"} < named
    assert named - set(dir(builtins)) <= set(package.__all__)


def test_what_a_module_raises_is_exported():
    """Every exception of the definition, by a backend that raises it."""
    exported = set()
    for backend in NAMES:
        exported |= set(pytest.importorskip(f"xentlib.{backend}").__all__)
    own = {
        name
        for path in sorted((ROOT / "xentlib").glob("*.py"))
        if path.stem != "processes"  # the command's ranks, whose error it prints
        for name in re.findall(
            r"^class ([A-Z]\w*(?:Error|Exception))\b", path.read_text(), re.MULTILINE
        )
    }
    assert own
    assert own <= exported


@pytest.mark.torch
@pytest.mark.jax
def test_both_backends_show_the_same_names():
    """D2: `__all__`, signatures and docstrings are equal."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    import xentlib.jax
    import xentlib.torch

    assert set(xentlib.torch.__all__) ^ set(xentlib.jax.__all__) == ONE_BACKEND
    for name in (set(xentlib.torch.__all__) & set(xentlib.jax.__all__)) - {"CrossCheck", "NLLHead"}:
        ours, theirs = getattr(xentlib.torch, name), getattr(xentlib.jax, name)
        assert inspect.getdoc(ours) == inspect.getdoc(theirs)
        if inspect.isfunction(ours):
            assert shape(ours) == shape(theirs)


# Where a concept exists in one framework only: FSDP2 and ZeRO-3 keep parameters, Flax has two APIs,
# windows are objects in PyTorch, and counts are int32 in JAX.
ONE_BACKEND = {
    "CountMismatchError",
    "CountOverflowError",
    "LinenNLLHead",
    "TokenNormalizedState",
    "TokenNormalizer",
    "UnsupportedWrapperError",
    "Window",
    "WindowStateError",
    "accumulate_grads",
    "gather_head",
    "token_normalized",
}


def test_an_evaluation_has_the_methods_of_its_definition(backend: str) -> None:
    """Signatures are written once, in the spec, which does not compute."""
    ours = __import__(f"xentlib.{backend}", fromlist=["_"]).Evaluation
    for name in ("add", "mean_loss"):
        definition = getattr(evaluation_spec.Evaluation, name)
        assert shape(getattr(ours, name)) == shape(definition)
        with pytest.raises(NotImplementedError, match=r"xentlib\.torch\.Evaluation"):
            definition(None, None)
    assert ours.__doc__ == evaluation_spec.Evaluation.__doc__


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


DEFINITIONS = {
    name: getattr(module, name)
    for module, names in (
        (nll_spec, ["chunked_nll"]),
        (labels_spec, ["next_token_labels"]),
        (segments_spec, ["segment_mean", "segment_sum"]),
        (logprobs_spec, ["chunked_logprobs", "vocab_parallel_logprobs"]),
    )
    for name in names
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_signature_and_docstring_are_the_definition_s(backend, name):
    """D2: written once, in the spec."""
    package = __import__(f"xentlib.{backend}", fromlist=["_"])
    definition = DEFINITIONS[name]
    function = getattr(package, name)
    assert shape(function) == shape(definition)
    assert function.__doc__ == definition.__doc__
    documented = inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^    {parameter}: ", documented, re.MULTILINE), parameter
    assert package.NLLOutput is nll_spec.NLLOutput


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_definition_does_not_compute(name):
    """D2: no dispatch layer; users name their backend."""
    definition = DEFINITIONS[name]
    positional = [p for p in inspect.signature(definition).parameters.values() if p.kind == 1]
    with pytest.raises(NotImplementedError, match=rf"xentlib\.torch\.{name}"):
        definition(*[None] * len(positional))


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("xentlib", ["torch", "jax", "jaxlib", "flax"]),
        ("xentlib.interop", ["torch", "jax", "jaxlib"]),
        ("xentlib.tools.harness.problems", ["torch", "jax", "jaxlib"]),
        ("xentlib.torch", ["jax", "jaxlib", "flax"]),
        ("xentlib.jax", ["torch", "flax"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_import_loads(package, absent):
    """D2: `import xentlib` loads neither framework, a backend never the other one."""
    if package in ("xentlib.torch", "xentlib.jax"):
        pytest.importorskip(package.removeprefix("xentlib."))
    code = f"import sys, {package}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


BLOCKED = """
import sys
sys.modules[{blocked!r}] = None
try:
    import xentlib.{backend}
except ModuleNotFoundError as error:
    print(error.name, error, sep=": ")
"""


@pytest.mark.parametrize(("backend", "framework"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_an_import_without_the_framework_names_the_extra(backend, framework):
    done = run(BLOCKED.format(blocked=backend, backend=backend))
    assert done == (
        f"{backend}: `xentlib.{backend}` needs {framework}, which is not installed. Run: pip "
        f"install 'xentlib[{backend}]'\n"
    )


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_an_installed_framework_lacks_is_its_own_to_say(backend):
    pytest.importorskip(backend)
    needed = {"torch": "torch._tensor", "jax": "jax._src"}[backend]
    done = run(BLOCKED.format(blocked=needed, backend=backend))
    assert done.startswith(needed)
    assert "xentlib[" not in done


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
