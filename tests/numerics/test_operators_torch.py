"""Each operator of PyTorch as a compiler sees it: schema, registered gradient, and results of the
shapes, dtypes and strides that the fake ones have (D6); of a head, and of logits in both layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from xentlib.torch import (  # noqa: E402
    SoftLabels,
    TeacherHead,
    TeacherLogits,
    chunked_divergence,
    chunked_logprobs,
    chunked_nll,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)
from xentlib.torch.operators import Operator, flatten  # noqa: E402

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
N, V, H = 9, 13, 5
Call = Callable[[Any, Any, Any], Any]  # of hidden states, a head and labels, or of x, None, labels


def ids(y: Any) -> Any:
    return torch.stack([y, (y + 3) % V], 1)


def probs(y: Any) -> Any:
    return torch.nn.functional.one_hot(y, V) * 0.5 + 0.5 / V


def few(y: Any) -> Any:
    return SoftLabels(ids(y), torch.full((len(y), 2), 0.5))


def teacher(x: Any, w: Any) -> Any:
    return TeacherHead(x.detach(), w.detach() / 2)


def mixed(out: Any) -> Any:
    """A number of every result that has a gradient."""
    return sum(x.sum() for x in out if x is not None and x.requires_grad)


HEADS: dict[str, Call] = {
    "nll": lambda x, w, y: (
        chunked_nll(
            x, w, y, class_weights=torch.rand(V), label_smoothing=0.1, max_chunk_bytes=512
        ).loss
    ),
    "recompute": lambda x, w, y: (
        chunked_nll(x, w, y, class_weights=torch.rand(V), recompute=True, outputs=("lse",)).loss
    ),
    "logprobs": lambda x, w, y: mixed(chunked_logprobs(x, w, y, entropy=True, max_chunk_bytes=512)),
    "kept": lambda x, w, y: mixed(chunked_logprobs(x, w, y, kept=ids(y), entropy=True)),
    "top_k": lambda x, w, y: mixed(chunked_logprobs(x, w, y, top_k=2, ids=ids(y))),
    "probabilities": lambda x, w, y: chunked_nll(x, w, probs(y), z_loss=0.1).loss,
    "divergence": lambda x, w, y: chunked_divergence(x, w, teacher(x, w)).loss,
    "divergences": lambda x, w, y: chunked_divergence(
        x, w, teacher(x, w), reduction="none", kind="jsd", beta=0.3
    ).loss.sum(),
}
LOGITS: dict[str, Call] = {
    "logprobs": lambda x, _, y: mixed(
        vocab_parallel_logprobs(x, y, entropy=True, label_smoothing=0.1, temperature=2.0)
    ),
    "kept": lambda x, _, y: mixed(vocab_parallel_logprobs(x, y, kept=ids(y), entropy=True)),
    "top_k": lambda x, _, y: mixed(vocab_parallel_logprobs(x, y, top_k=2, ids=ids(y))),
    "probabilities": lambda x, _, y: mixed(vocab_parallel_logprobs(x, probs(y), entropy=True)),
    "few": lambda x, _, y: mixed(vocab_parallel_logprobs(x, few(y), temperature=0.5)),
    "divergence": lambda x, _, y: vocab_parallel_divergence(
        x, TeacherLogits(x.detach().roll(1, 1)), kind="jsd", beta=0.3
    ).loss.sum(),
}
CALLS = {f"head, {name}": call for name, call in HEADS.items()}
CALLS |= {
    f"logits {layout}, {name}": call for layout in ("NV", "VN") for name, call in LOGITS.items()
}


def leaves_of(name: str, count: int = N) -> tuple[list[Any], Any]:
    """What gradients are of, and labels of which one is masked."""
    rng = torch.Generator().manual_seed(3)
    y = torch.randint(0, V, (count,), generator=rng)
    if name.startswith("head"):
        return [torch.randn(n, H, generator=rng, requires_grad=True) for n in (count, V)], y
    shape = (V, count) if "VN" in name else (count, V)
    return [torch.randn(shape, generator=rng, requires_grad=True)], y


def computed(name: str, leaves: list[Any], y: Any) -> Any:
    x = leaves[0].T if "VN" in name else leaves[0]
    return CALLS[name](x, leaves[-1], y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(monkeypatch: Any, name: str) -> None:
    """Of the operators that the call reaches, forward and backward, with their own arguments."""
    reached: list[tuple[Operator, list[Any]]] = []
    real = Operator.__call__

    def call(self: Operator, *parts: Any) -> Any:
        reached.append((self, flatten(parts, self.layouts)))
        return real(self, *parts)

    monkeypatch.setattr(Operator, "__call__", call)
    leaves, y = leaves_of(name)
    torch.autograd.grad(computed(name, leaves, y), leaves)
    # Of `chunked_nll` and of a reduced divergence the forward has computed the gradients.
    forward_only = name in ("head, nll", "head, probabilities", "head, divergence")
    assert len(reached) == 1 if forward_only else len(reached) == 2
    for operator, values in reached:
        leaves = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in values
        ]
        result = torch.library.opcheck(operator.op, leaves, test_utils=CHECKS)
        assert set(result.values()) == {"SUCCESS"}


@cache
def in_a_graph(kind: str) -> dict[str, list[Any]]:
    """Gradients of each call of a kind, eager and compiled, at two sizes; all in one graph, which
    takes two thirds of the time of one for each."""
    names = [name for name in CALLS if name.startswith(kind)]
    found: dict[str, list[Any]] = {name: [] for name in names}

    def step(inputs: Any) -> Any:
        return [computed(name, *inputs[name]) for name in names]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for count, run in product((N, N + 4), (step, compiled)):
        inputs = {name: leaves_of(name, count) for name in names}
        torch.manual_seed(0)  # of class weights
        of_all = [x for leaves, _ in inputs.values() for x in leaves]
        gradients = iter(torch.autograd.grad(sum(run(inputs)), of_all))
        for name, (leaves, _) in inputs.items():
            found[name].append([next(gradients) for _ in leaves])
    return found


# Of logits in the layout that is not contiguous: `test_opcheck` holds the strides of both.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", [name for name in CALLS if "NV" not in name])
def test_compiled_for_any_number_of_tokens(name: str) -> None:
    """One graph, `dynamic=True`, with the eager bits at two sizes."""
    eager, compiled, *of_more = in_a_graph(name.partition(",")[0])[name]
    assert eager[0].shape != of_more[0][0].shape
    for want, got in ((eager, compiled), of_more):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
