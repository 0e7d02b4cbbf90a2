"""Kept sets and several classes a token beside what else a PyTorch program has: the compiler,
autocast, LoRA, `no_grad`, meta tensors, labels on the host.

Shapes: N tokens, V vocabulary, H hidden width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.leaves_torch import same  # noqa: E402
from xentlib.torch import LowRankHead, chunked_logprobs, vocab_parallel_logprobs  # noqa: E402

N, H, V, K = 40, 16, 301, 6


def arrays(dtype: Any = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    labels = torch.randint(0, V, (2, N // 2))
    kept = torch.rand(2, N // 2, V).argsort(-1)[..., :K]
    kept[..., 0] = labels
    labels[0, ::5] = -100
    return {
        "hidden": torch.randn(2, N // 2, H, dtype=dtype).requires_grad_(),
        "weight": torch.randn(V, H, dtype=dtype).requires_grad_(),
        "labels": labels,
        "kept": kept,
        "ids": torch.randint(0, V, (2, N // 2, K)),
    }


def of_kept(hidden: Any, weight: Any, labels: Any, kept: Any, ids: Any) -> Any:
    out = chunked_logprobs(hidden, weight, labels, kept=kept, entropy=True)
    return (out.logprobs * labels.cos()).sum() - 0.1 * out.entropy.sum()


def of_ids(hidden: Any, weight: Any, labels: Any, kept: Any, ids: Any) -> Any:
    out = chunked_logprobs(hidden, weight, labels, ids=ids)
    return (out.ids_logprobs.exp() * ids.cos()).sum() + out.lse.sum()


def of_top(hidden: Any, weight: Any, labels: Any, kept: Any, ids: Any) -> Any:
    out = chunked_logprobs(hidden, weight, labels, top_k=K)
    return (out.top_logprobs.exp() * out.top_ids.cos()).sum() + out.lse.sum()


def of_logits(hidden: Any, weight: Any, labels: Any, kept: Any, ids: Any) -> Any:
    logits = hidden @ weight.T
    out = vocab_parallel_logprobs(logits, labels, kept=kept, ids=kept.flip(-1), top_k=2)
    return (out.ids_logprobs * kept.cos()).sum() + out.logprobs.sum() + out.top_logprobs.sum()


LOSSES = [of_kept, of_ids, of_top, of_logits]


def with_gradients(loss: Callable[..., Any], x: dict[str, Any]) -> list[Any]:
    value = loss(**x)
    return [value.detach(), *torch.autograd.grad(value, (x["hidden"], x["weight"]))]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("loss", LOSSES)
def test_compiled_is_eager_to_the_bit(loss: Callable[..., Any]) -> None:
    """A11: in one graph, forward and backward."""
    torch.compiler.reset()
    x = arrays()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for want, got in zip(with_gradients(loss, x), with_gradients(compiled, x), strict=True):
        assert want.any()
        assert same(want, got)


@pytest.mark.parametrize("loss", LOSSES[:3])
def test_autocast(loss: Callable[..., Any]) -> None:
    """Operands of bf16, gradients in the dtype of the leaves."""
    x = arrays()
    low = {name: y.detach().bfloat16().requires_grad_() for name, y in list(x.items())[:2]}
    want = with_gradients(loss, {**x, **low})
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(loss, x)
    assert same(want[0], got[0])
    for exact, ours in zip(want[1:], got[1:], strict=True):
        assert ours.dtype == torch.float32
        assert same(exact, ours.bfloat16())


def test_lora() -> None:
    """Gradients of A and B as of the head that is merged."""
    x = arrays()
    a, b = torch.randn(3, H).requires_grad_(), torch.randn(V, 3).requires_grad_()
    merged = x["weight"].detach() + 0.5 * b @ a
    frozen = x["weight"].detach()
    for loss in LOSSES[:3]:
        want = torch.autograd.grad(loss(**{**x, "weight": merged}), (a, b), retain_graph=True)
        head = LowRankHead(frozen, a, b, 0.5)
        got = torch.autograd.grad(loss(**{**x, "weight": head}), (a, b))
        for exact, ours in zip(want, got, strict=True):
            assert (ours - exact).norm() < 2e-5 * exact.norm()


def test_no_grad_and_a_frozen_head() -> None:
    """The same values, and no gradient of what is frozen."""
    x = arrays()
    for loss in LOSSES:
        with torch.no_grad():
            value = loss(**x)
        assert same(value, loss(**x))
    frozen = {**x, "weight": x["weight"].detach()}
    for loss in LOSSES:
        want = with_gradients(loss, x)[1]
        (got,) = torch.autograd.grad(loss(**frozen), x["hidden"])
        assert same(want, got)


def test_meta_tensors() -> None:
    """Shapes and dtypes; no operator reads a number."""
    x = {name: y.detach().to("meta").requires_grad_(y.is_floating_point())
         for name, y in arrays(torch.bfloat16).items()}  # fmt: skip
    out = chunked_logprobs(**x, entropy=True, top_k=3)
    assert out.ids_logprobs.shape == (2, N // 2, K)
    assert (out.top_ids.shape, out.top_ids.dtype) == ((2, N // 2, 3), torch.int64)
    for y in (out.logprobs, out.entropy, out.ids_logprobs, out.top_logprobs):
        assert y.dtype == torch.float32
    (out.ids_logprobs.sum() + out.logprobs.sum() + out.top_logprobs.sum()).backward()
    assert x["weight"].grad.shape == (V, H)


def test_the_gradient_of_the_gradient_is_refused() -> None:
    x = arrays()
    for loss in LOSSES:
        with pytest.raises(RuntimeError, match="must be differentiated once"):
            torch.autograd.grad(loss(**x), x["hidden"], create_graph=True)
