"""`chunked_nll` under torch.compile: one graph, eager's bits, any shapes; and the operator's
registrations.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import shutil

import pytest

from xentlib.tools.harness.problems import Case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch._dynamo.testing import CompileCounter  # noqa: E402

import xentlib.torch as X  # noqa: E402
from helpers.leaves_torch import loss_and_gradients, same, tensors  # noqa: E402
from helpers.tokenless import ALL, arrays  # noqa: E402
from xentlib.torch import chunked_nll  # noqa: E402

COMPILERS = ["aot_eager", *(["inductor"] if shutil.which("c++") or shutil.which("g++") else [])]


# torch's own, met on the way; the first is in pyproject.toml too, but `-W error` comes after that.
QUIET = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def quiet(name: str):
    return pytest.param(name, marks=[*QUIET, *([pytest.mark.slow] if name == "inductor" else [])])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", [quiet(name) for name in COMPILERS])
def test_compiled_is_eager_to_the_bit(compiler):
    """A11, D6: fullgraph, forward and backward; the operator is opaque to the compiler."""
    leaves, p = tensors()

    def step(hidden, weight, bias, labels, **options):
        # Something to compile on both sides of the operator, exact in any order.
        out = chunked_nll(hidden * 2, weight, labels, bias=bias, outputs=("lse",), **options)
        return out.loss * 0.5

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    eager = loss_and_gradients(leaves, p.upstream, step)
    for want, got in zip(eager, loss_and_gradients(leaves, p.upstream, compiled)):
        assert same(want, got)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "dynamic",
    [
        None,  # the sizes that change become symbols
        True,  # options too: SymFloat
    ],
    ids=["automatic", "dynamic"],
)
def test_compiled_with_dynamic_shapes(dynamic):
    """D6, M17: two graphs for any number of tokens, same bits as eager."""
    graphs = []

    def counting(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def head(hidden, weight, labels, bias, **options):
        return chunked_nll(hidden, weight, labels, bias=bias, **options)

    compiled = torch.compile(head, fullgraph=True, dynamic=dynamic, backend=counting)
    for tokens in (61, 17, 100, 33):
        leaves, p = tensors(Case("dynamic", tokens, 24, 157))
        for want, got in zip(
            loss_and_gradients(leaves, p.upstream), loss_and_gradients(leaves, p.upstream, compiled)
        ):
            assert same(want, got)
    assert len(graphs) == 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ALL)
def test_twelve_lengths_in_two_graphs(name):
    """Of every function, with `fullgraph=True`. Catches: an operation that guards the number of
    tokens, of which the ninth is refused."""
    counter = CompileCounter()

    def step(args):
        return ALL[name](X, args)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 7, 13, 16, 31, 33, 64, 77, 90, 101, 128, 200):
        args = {k: torch.from_numpy(v) for k, v in arrays((tokens,)).items()}
        got, want = compiled(args), step(args)
        assert same(want, got)
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiler_reads_dtensor_where_it_stands():
    """Out of `sys.modules` it traced 4,500 entries for each tensor that was asked about: a third of
    the time that a head of FSDP2 takes to compile."""
    leaves, _ = tensors()

    def step(hidden, weight, bias, labels):
        return chunked_nll(hidden, weight, labels, bias=bias).loss

    guards = torch._dynamo.explain(step)(**leaves).out_guards
    assert guards
    assert not [x.name for x in guards if "modules['torch" in x.name]


@pytest.mark.cpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_raises_for_a_label_out_of_range():
    """D3, M11: values can be read on CPU, under a compiler too."""
    leaves, _ = tensors()
    leaves["labels"][5] = 157
    compiled = torch.compile(chunked_nll, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"must lie in \[0, 157\).*got 157"):
        compiled(**leaves)
