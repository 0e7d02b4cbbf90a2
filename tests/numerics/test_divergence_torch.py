"""Divergences beside what else a PyTorch program has: the compiler, autocast, LoRA, `no_grad`, meta
tensors, a frozen head, a second loss.

Shapes: N tokens, V vocabulary, H hidden width of the student, W of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.leaves_torch import same  # noqa: E402
from xentlib.torch import (  # noqa: E402
    LowRankHead,
    TeacherHead,
    TeacherLogits,
    chunked_divergence,
    chunked_nll,
    vocab_parallel_divergence,
)

N, H, W, V = 40, 16, 24, 301
Tensors = list[Any]


def arrays(dtype: Any = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype)  # noqa: E731
    return {
        "hidden": draw(2, N // 2, H).requires_grad_(),
        "weight": draw(V, H).requires_grad_(),
        "teacher": TeacherHead(draw(2, N // 2, W), draw(V, W), draw(V)),
        "labels": torch.randint(0, V, (2, N // 2)),
    }


def mixed(hidden: Any, weight: Any, teacher: Any, labels: Any) -> Any:
    how: dict[str, Any] = {"kind": "jsd", "beta": 0.4, "nll_weight": 0.5, "temperature": 2.0}
    return chunked_divergence(hidden, weight, teacher, labels=labels, **how).loss


def clipped(hidden: Any, weight: Any, teacher: Any, labels: Any) -> Any:
    out = chunked_divergence(hidden, weight, teacher, kind="reverse_kl", reduction="none")
    return out.loss.clamp(max=30.0).mean()


def of_logits(hidden: Any, weight: Any, teacher: Any, labels: Any) -> Any:
    logits = TeacherLogits(teacher.hidden @ teacher.weight.T)
    return vocab_parallel_divergence(hidden @ weight.T, logits).loss.sum()


LOSSES = [mixed, clipped, of_logits]


def with_gradients(loss: Callable[..., Any], x: dict[str, Any]) -> Tensors:
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


@pytest.mark.parametrize("loss", [mixed, clipped])
def test_autocast(loss: Callable[..., Any]) -> None:
    """Of student and teacher: operands of bf16, gradients in the dtype of the leaves."""
    x = arrays()
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(loss, x)
    assert [y.dtype for y in got] == [torch.float32] * 3
    low = {name: x[name].detach().bfloat16().requires_grad_() for name in ("hidden", "weight")}
    states, rows, bias = x["teacher"][:3]
    teacher = TeacherHead(states.bfloat16(), rows.bfloat16(), bias)
    right = with_gradients(loss, x | low | {"teacher": teacher})
    for ours, by_hand in zip(got, right, strict=True):
        assert same(ours.to(by_hand.dtype), by_hand)
    assert not same(got[0], with_gradients(loss, x)[0])


@pytest.mark.parametrize("loss", [mixed, clipped])
def test_lora_of_both(loss: Callable[..., Any]) -> None:
    """In float64, as the merged heads: a student learns A and B alone, or all three."""
    x, rank = arrays(torch.float64), 4
    weight, (states, rows, bias) = x["weight"], x["teacher"][:3]
    low = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((rank, H), (V, rank))]
    of_teacher = [torch.randn(*s, dtype=torch.float64) for s in ((rank, W), (V, rank))]
    merged = TeacherHead(states, rows + 0.5 * of_teacher[1] @ of_teacher[0], bias)
    teacher = TeacherHead(states, LowRankHead(rows, *of_teacher, scale=0.5), bias)
    for base, leaves in ((weight.detach(), low), (weight, [x["hidden"], weight, *low])):
        head = LowRankHead(base, *low, scale=2.0)
        got = torch.autograd.grad(loss(x["hidden"], head, teacher, x["labels"]), leaves)
        whole = weight + 2.0 * low[1] @ low[0]
        right = torch.autograd.grad(loss(x["hidden"], whole, merged, x["labels"]), leaves)
        for ours, exact in zip(got, right, strict=True):
            assert exact.norm() > 0
            assert (ours - exact).norm() < 1e-12 * exact.norm()


@pytest.mark.parametrize("loss", LOSSES)
def test_without_gradients_and_of_a_frozen_head(loss: Callable[..., Any]) -> None:
    """The same bits, of those gradients that are wanted."""
    x = arrays()
    value, d_hidden, _ = with_gradients(loss, x)
    with torch.no_grad():
        quiet = loss(**x)
    assert not quiet.requires_grad
    frozen = x | {"weight": x["weight"].detach()}
    out = loss(**frozen)
    (alone,) = torch.autograd.grad(out, x["hidden"])
    for got, want in ((quiet, value), (out.detach(), value), (alone, d_hidden)):
        assert same(got, want)


def test_a_second_loss() -> None:
    """One backward of a divergence and an NLL of the same head adds their gradients."""
    x = arrays(torch.float64)
    nll = lambda hidden, weight, teacher, labels: chunked_nll(hidden, weight, labels).loss  # noqa: E731
    right = [sum(g) for g in zip(with_gradients(mixed, x), with_gradients(nll, x), strict=True)]
    both = with_gradients(lambda **x: mixed(**x) + nll(**x), x)
    for ours, exact in zip(both, right, strict=True):
        assert (ours - exact).norm() < 1e-12 * exact.norm()


@pytest.mark.parametrize("loss", LOSSES)
def test_on_meta(loss: Callable[..., Any]) -> None:
    """Shapes and dtypes, with nothing computed or read."""
    x = arrays()
    there = {name: x[name].detach().to("meta").requires_grad_() for name in ("hidden", "weight")}
    teacher = TeacherHead(*(y.to("meta") for y in x["teacher"][:3]))
    got = with_gradients(loss, there | {"teacher": teacher, "labels": x["labels"].to("meta")})
    for ours, real in zip(got, with_gradients(loss, x), strict=True):
        assert ours.is_meta
        assert (ours.shape, ours.dtype) == (real.shape, real.dtype)
