"""Class probabilities beside what else a PyTorch program has: the compiler, autocast, LoRA,
`no_grad`, a frozen head, meta tensors, windows of micro-batches.

Shapes: N tokens, V vocabulary, H hidden width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.leaves_torch import same  # noqa: E402
from xentlib.contract import check, failures  # noqa: E402
from xentlib.torch import (  # noqa: E402
    Evaluation,
    LowRankHead,
    SoftLabels,
    TokenNormalizer,
    chunked_nll,
    vocab_parallel_logprobs,
)

N, H, V, K = 40, 16, 301, 6


def arrays(dtype: Any = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(2, N // 2, H, dtype=dtype).requires_grad_(),
        "weight": torch.randn(V, H, dtype=dtype).requires_grad_(),
        "q": torch.randn(2, N // 2, V).mul(3).softmax(-1),
        "ids": torch.randint(-1, V, (2, N // 2, K)),
        "where": torch.rand(2, N // 2) > 0.2,
    }


def of_all(hidden: Any, weight: Any, q: Any, ids: Any, where: Any) -> Any:
    return chunked_nll(hidden, weight, q, where=where, label_smoothing=0.1, z_loss=1e-3).loss


def of_few(hidden: Any, weight: Any, q: Any, ids: Any, where: Any) -> Any:
    labels = SoftLabels(ids, q[..., :K])
    return chunked_nll(hidden, weight, labels, where=where, softcap=5.0).loss


def of_logits(hidden: Any, weight: Any, q: Any, ids: Any, where: Any) -> Any:
    logits = hidden @ weight.T
    out = vocab_parallel_logprobs(logits, q, where=where, entropy=True)
    few = vocab_parallel_logprobs(logits, SoftLabels(ids, q[..., :K]), temperature=2.0)
    return (out.logprobs * q[..., 0] + 0.1 * out.entropy).sum() + few.logprobs.sum()


LOSSES = [of_all, of_few, of_logits]


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


@pytest.mark.parametrize("loss", [of_all, of_few])
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
    """A9: gradients of A and B as of the head that is merged."""
    x = arrays()
    a, b = torch.randn(3, H).requires_grad_(), torch.randn(V, 3).requires_grad_()
    frozen = x["weight"].detach()
    merged = frozen + 0.5 * b @ a
    for loss in (of_all, of_few):
        want = torch.autograd.grad(loss(**{**x, "weight": merged}), (a, b), retain_graph=True)
        got = torch.autograd.grad(loss(**{**x, "weight": LowRankHead(frozen, a, b, 0.5)}), (a, b))
        for exact, ours in zip(want, got, strict=True):
            pair = ours.numpy(), exact.double().numpy()
            assert not failures(check("A9", *pair, metrics=("rho / u",)))


def test_no_grad_and_a_frozen_head() -> None:
    """The same values, and no gradient of what is frozen."""
    x = arrays()
    frozen = {**x, "weight": x["weight"].detach()}
    for loss in LOSSES:
        with torch.no_grad():
            value = loss(**x)
        assert same(value, loss(**x))
        want = with_gradients(loss, x)[1]
        (got,) = torch.autograd.grad(loss(**frozen), x["hidden"])
        assert same(want, got)


def test_meta_tensors() -> None:
    """Shapes and dtypes; no operator reads a number."""
    x = {
        name: y.detach().to("meta").requires_grad_(name in ("hidden", "weight"))
        for name, y in arrays(torch.bfloat16).items()
    }
    for loss in (of_all, of_few):
        value = loss(**x)
        assert value.shape == ()
        assert value.dtype == torch.float32
        for gradient in torch.autograd.grad(value, (x["hidden"], x["weight"])):
            assert gradient.dtype == torch.bfloat16
    q, ids = x["q"], x["ids"]
    for labels in (q, SoftLabels(ids, q[..., :K])):
        assert vocab_parallel_logprobs(q[..., :], labels).logprobs.shape == (2, N // 2)


def test_the_gradient_of_the_gradient_and_of_an_output_are_refused() -> None:
    x = arrays()
    for loss in LOSSES:
        with pytest.raises(RuntimeError, match="must be differentiated once"):
            torch.autograd.grad(loss(**x), x["hidden"], create_graph=True)
    out = chunked_nll(x["hidden"], x["weight"], x["q"], outputs=("entropy",))
    with pytest.raises(RuntimeError, match="`entropy` of `chunked_nll` must not be differentiated"):
        (out.loss - out.entropy.sum()).backward()


def test_a_window_of_micro_batches_is_one_batch() -> None:
    """A12; an evaluation's mean over the same batches."""
    x = arrays()
    hidden, where, head = x["hidden"].detach(), x["where"], torch.nn.Linear(H, V, bias=False)
    for labels in (x["q"], SoftLabels(x["ids"], x["q"][..., :K])):
        rows: list[Any] = list(x["q"])
        if isinstance(labels, SoftLabels):
            rows = [SoftLabels(*pair) for pair in zip(*labels, strict=True)]
        whole = chunked_nll(hidden, head, labels, where=where)
        (want,) = torch.autograd.grad(whole.loss, head.weight)
        head.weight.grad, evaluation = None, Evaluation()
        with TokenNormalizer(head).window(labels=rows, where=list(where)) as window:
            for row in window.micro_batches(range(2)):
                how = {"where": where[row], "reduction": "sum"}
                out = chunked_nll(hidden[row], head, rows[row], **how)
                evaluation.add(out)
                window.backward(out)
        assert head.weight.grad is not None
        pairs = (head.weight.grad, want), (evaluation.mean_loss(), whole.loss.detach())
        for got, exact in pairs:
            pair = got.numpy(), exact.double().numpy()
            assert not failures(check("A9", *pair, metrics=("rho / u",)))


@pytest.mark.parametrize("probs", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_of_another_dtype_than_the_logits(logits: Any, probs: Any) -> None:
    """A9: a few classes' as those of all, which are the same numbers."""
    x = arrays()
    z = (x["hidden"] @ x["weight"].T).detach().to(logits).requires_grad_()
    ids = torch.rand(2, N // 2, V).argsort(-1)[..., :K]
    few = torch.randn(*ids.shape).softmax(-1).to(probs)
    dense = torch.zeros(*ids.shape[:-1], V, dtype=probs).scatter(-1, ids, few)
    ours, right = (
        torch.autograd.grad(out.logprobs.sum(), z)[0].double().numpy()
        for out in (vocab_parallel_logprobs(z, y) for y in (SoftLabels(ids, few), dense))
    )
    assert not failures(check("A9", ours, right, metrics=("rho / u",)))
