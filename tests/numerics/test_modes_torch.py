"""PyTorch's modes around all three functions: forward-mode derivatives, tracers and fake tensors,
tensors on meta, batches of gradients, sizes that a compiler does not know, other default dtypes.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from xentlib.contract import check, failures
from xentlib.tools.harness.device import numpy_of

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*:UserWarning"),
]

from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from xentlib.torch import (  # noqa: E402
    chunked_logprobs,
    chunked_nll,
    next_token_labels,
    vocab_parallel_logprobs,
)
from xentlib.torch.operators import operator  # noqa: E402

N, V, H = 6, 9, 4
FLOAT_OPTIONS = {"temperature": 0.7}


def nll(hidden: Any, weight: Any, labels: Any) -> Any:
    # Per-token outputs too, which have their own shapes.
    outputs = ("logprobs", "entropy", "lse", "correct")
    return chunked_nll(hidden, weight, labels, outputs=outputs, **FLOAT_OPTIONS).loss


def logprobs(hidden: Any, weight: Any, labels: Any) -> Any:
    out = chunked_logprobs(hidden, weight, labels, entropy=True, **FLOAT_OPTIONS)
    return out.logprobs.sum() + out.entropy.sum()


def given(hidden: Any, weight: Any, labels: Any) -> Any:
    logits = hidden @ weight.T
    out = vocab_parallel_logprobs(logits, labels, entropy=True, **FLOAT_OPTIONS)
    return out.logprobs.sum() + out.entropy.sum()


FUNCTIONS = [nll, logprobs, given]
each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def leaves(device: Any = None) -> list[Any]:
    device = torch.get_default_device() if device is None else device
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    labels = torch.tensor([0, 8, -100, 3, 4, 4])
    return [
        hidden.to(device).requires_grad_(),
        weight.to(device).requires_grad_(),
        labels.to(device),
    ]


def gradients(function: Any, inputs: list[Any]) -> tuple[Any, ...]:
    return torch.autograd.grad(function(*inputs), inputs[:2])


def equal(got: Any, want: Any) -> None:
    """A11: the same bits."""
    for a, b in zip(got, want, strict=True):
        assert not failures(check("A11", numpy_of(a), numpy_of(b)))


@each
@pytest.mark.parametrize("slot", [0, 1], ids=["hidden", "weight"])
@pytest.mark.parametrize("way", ["jvp", "jacfwd", "dual", "dual that requires grad"])
def test_forward_mode_is_refused(function: Any, slot: int, way: str) -> None:
    """An operator without a rule for tangents drops them: jvp was 0, a dual tensor's None."""
    forward_mode_is_refused(function, slot, way)


# Dynamo traces each for 4 s: every function and either input.
@pytest.mark.parametrize(("function", "slot"), [(nll, 0), (logprobs, 1), (given, 0)])
def test_forward_mode_is_refused_in_a_graph(function: Any, slot: int) -> None:
    forward_mode_is_refused(function, slot, "compiled")


def forward_mode_is_refused(function: Any, slot: int, way: str) -> None:
    inputs = [x.detach() for x in leaves()]
    x = inputs[slot]

    def of(x: Any) -> Any:
        return function(*inputs[:slot], x, *inputs[slot + 1 :])

    def jvp(x: Any) -> Any:
        return torch.func.jvp(of, (x,), (torch.ones_like(x),))

    def dual(x: Any) -> Any:
        with forward_ad.dual_level():
            return of(forward_ad.make_dual(x, torch.ones_like(x)))

    torch.compiler.reset()
    ways = {
        "jvp": jvp,
        "jacfwd": torch.func.jacfwd(of),
        "dual": dual,
        "dual that requires grad": lambda x: dual(x.clone().requires_grad_()),
        "compiled": torch.compile(jvp, backend="eager"),
    }
    with pytest.raises(RuntimeError, match="must be differentiated in reverse mode; got an input"):
        ways[way](x)


def test_a_constant_with_a_tangent_is_refused() -> None:
    """As one that requires grad is."""
    hidden, weight, labels = leaves()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(N), torch.ones(N))
        for name in ("token_weights", "temperature"):
            with pytest.raises(RuntimeError, match="`chunked_nll` must be differentiated in rev"):
                chunked_nll(hidden, weight, labels, **{name: dual})
        # Tangents of something else are nobody's business.
        chunked_nll(hidden, weight, labels).loss.backward()


@each
@pytest.mark.parametrize("way", ["grad", "vjp", "jacrev", "vmap of grad", "grad of vmap"])
def test_derivatives_by_torch_func_are_refused(function: Any, way: str) -> None:
    """PyTorch's own message asks for a `setup_context`; what is no input of it stays right."""
    hidden, weight, labels = (x.detach() for x in leaves())
    batch = torch.stack([hidden, hidden.flip(1)])
    func = torch.func

    def of(x: Any) -> Any:
        return function(x, weight, labels)

    ways = {
        "grad": lambda: func.grad(of)(hidden),
        "vjp": lambda: func.vjp(lambda w: function(hidden, w, labels), weight),
        "jacrev": lambda: func.jacrev(of)(hidden),
        "vmap of grad": lambda: func.vmap(func.grad(of))(batch),
        "grad of vmap": lambda: func.grad(lambda x: func.vmap(of)(x).sum())(batch),
    }
    with pytest.raises(RuntimeError, match="must be differentiated by `backward` or `torch"):
        ways[way]()
    by_loss = func.grad(lambda x: x.sum() * function(hidden, weight, labels))(torch.ones(()))
    equal([by_loss], [function(hidden, weight, labels)])
    with_loss = func.grad(lambda x: x.sum() * torch.no_grad()(of)(x))(hidden)
    equal([with_loss], [function(hidden, weight, labels).expand(hidden.shape)])


# torch 2.13: where Dynamo breaks a graph inside `vmap` it asks each entry for its `.grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("function", "compiled"),
    [
        *((function, False) for function in FUNCTIONS),
        (nll, True),
        (given, True),
        pytest.param(logprobs, True, marks=pytest.mark.full),  # the operator's rule is that of nll
    ],
)
def test_vmap_keeps_gradients(function: Any, compiled: bool) -> None:
    """An entry of a batch does not say that the batch requires grad: d hidden was None."""
    batch, weight, labels = torch.stack([leaves()[0], leaves()[0].flip(1)]).detach(), *leaves()[1:]
    inputs = [batch.requires_grad_(), weight]
    upstream = torch.tensor([0.3, -1.7])

    def mapped(batch: Any, weight: Any) -> Any:
        return (torch.func.vmap(lambda x: function(x, weight, labels))(batch) * upstream).sum()

    def apart(batch: Any, weight: Any) -> Any:
        return sum(function(x, weight, labels) * u for x, u in zip(batch, upstream, strict=True))

    torch.compiler.reset()
    run = torch.compile(mapped, backend="eager") if compiled else mapped
    pairs = zip(*(torch.autograd.grad(f(*inputs), inputs) for f in (run, apart)), strict=True)
    for got, want in pairs:
        assert not failures(check("A9", got, want, metrics=("rho / u",)))
    frozen = batch.detach()
    with pytest.raises(ValueError, match="`temperature` must be a constant"):
        torch.func.vmap(lambda t: chunked_nll(frozen[0], weight, labels, temperature=t).loss)(
            torch.ones(2).requires_grad_()
        )


@each
def test_fake_tensors(function: Any) -> None:
    """Shapes without numbers, forward and backward. Catches: a gradient whose value is read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inputs = leaves()
        found = gradients(function, inputs)
    assert [x.shape for x in found] == [x.shape for x in inputs[:2]]


@each
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_with_its_backward(function: Any, mode: str) -> None:
    """A11: `make_fx` of forward and backward; the graph has the operator and gives its bits."""
    inputs = leaves()
    graph = make_fx(lambda *x: gradients(function, list(x)), tracing_mode=mode)(*inputs)
    assert any("xentlib" in str(node.target) for node in graph.graph.nodes)
    equal(graph(*inputs), gradients(function, inputs))


@each
def test_a_batch_of_gradients(function: Any) -> None:
    """A11: `is_grads_batched`, and the accumulators are not scaled in place by the first one."""
    inputs, upstream = leaves(), torch.tensor([1.0, -2.5, 0.0])
    loss = function(*inputs)
    batch = torch.autograd.grad(loss, inputs[:2], upstream, is_grads_batched=True)
    for k, one in enumerate(upstream):
        equal([g[k] for g in batch], torch.autograd.grad(function(*inputs), inputs[:2], one))


@each
def test_on_meta(function: Any) -> None:
    inputs = leaves("meta")
    loss = function(*inputs)
    found = torch.autograd.grad(loss, inputs[:2])
    assert (loss.shape, loss.device.type) == ((), "meta")
    assert [(x.shape, x.device.type) for x in found] == [((N, H), "meta"), ((V, H), "meta")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "function"), [("flat", nll), *(("rows", function) for function in FUNCTIONS)]
)
def test_sizes_that_a_compiler_does_not_know(function: Any, tokens: str) -> None:
    """A11: unbacked tokens under fullgraph, one graph for any number of them; another number of
    labels is an error when it runs."""
    torch.compiler.reset()
    graphs: list[Any] = []
    called: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(aot_eager(graph, inputs))

        def run(*args: Any) -> Any:
            called[:] = args
            return graphs[-1](*args)

        return run

    compiled = torch.compile(function, fullgraph=True, backend=counting)
    for number in (N, 4):
        hidden, weight, labels = leaves()
        hidden, labels = hidden[:number].detach().clone(), labels[:number].clone()
        if tokens == "rows":
            hidden, labels = hidden.reshape(-1, 2, H), labels.reshape(-1, 2)
        inputs = [hidden.clone().requires_grad_(), weight, labels.clone()]
        for x in (inputs[0], inputs[2]):
            torch._dynamo.decorators.mark_unbacked(x, 0)
        equal(gradients(compiled, inputs), gradients(function, inputs))
    assert len(graphs) == 1
    # Of the graph itself: another call with marks is an error within PyTorch, which leaves its hook
    # on each frame of the process, whose callers then keep their arguments.
    at = next(i for i, x in enumerate(called) if getattr(x, "dtype", None) == torch.int64)
    number, labels = called[at - 1 : at + 1]
    called[at - 1 : at + 1] = number + 1, labels.new_zeros(number + 1, *labels.shape[1:])
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        graphs[0](*called)


@pytest.fixture
def default_dtype() -> Any:
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_dtype_does_not_matter(
    function: Any, dtype: Any, operands: Any, default_dtype: Any
) -> None:
    """A11. Catches: scratch of the default dtype, which crashed every function."""
    inputs = leaves()
    inputs = [*(x.detach().to(operands).requires_grad_() for x in inputs[:2]), inputs[2]]

    def run() -> list[Any]:
        hidden, weight, labels = inputs
        now = [hidden, weight, next_token_labels(labels)]
        return [x.float() for x in (function(*now), *gradients(function, now))]

    want = run()
    default_dtype(dtype)
    assert torch.empty(()).dtype == dtype
    equal(run(), want)


class One(NamedTuple):
    x: torch.Tensor


def test_an_operator_loses_no_argument_and_no_gradient() -> None:
    """D6. Catches: a gradient under a misspelt name, which autograd would take for none; two
    arguments of one name."""

    @operator("test_of_gradients", One, returns="Tensor")
    def double(one: One) -> torch.Tensor:
        return 2 * one.x

    double.gradient(lambda ctx, output, one: None, lambda ctx, g: {"y": 2 * g})
    loss = double.op(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(KeyError, match=r"must be of.*'x'.*got.*'y'"):
        loss.backward()
    with pytest.raises(TypeError, match="names of their own"):
        operator("test_of_names", One, One, returns="Tensor")(double)
