"""What a person's editor shows of the public names, without running anything."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xentlib.call import Arguments, LogitsArguments

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "torch": [
        "chunked_nll",
        "chunked_logprobs",
        "vocab_parallel_logprobs",
        "next_token_labels",
        "gather_head",
        "count_collectives",
        "CollectiveCount",
        "TokenNormalizer",
        "Window",
        "WindowStats",
        "Evaluation",
        "NLLHead",
    ],
    "jax": [
        "chunked_nll",
        "chunked_logprobs",
        "vocab_parallel_logprobs",
        "next_token_labels",
        "count_collectives",
        "CollectiveCount",
        "accumulate_grads",
        "token_normalized",
        "TokenNormalizedState",
        "WindowStats",
        "Evaluation",
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
        for name in re.findall(
            r"^class ([A-Z]\w*(?:Error|Exception))\b", path.read_text(), re.MULTILINE
        )
    }
    assert own
    assert own <= exported
