"""Class probabilities and a teacher's logits over padded shards, and what is refused once ranks
have exchanged numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import xentlib.torch as X
from helpers.refused import said_on_ranks

N, H, V, ROWS = 7, 5, 23, 10  # of three ranks: 10, 10, and 3 beside 7 rows of padding
WEIGHTS, EPS = torch.linspace(0.5, 1.5, V), 0.1
Call = Callable[[dict[str, Any]], Tensor]


def nll(a: dict[str, Any], **how: Any) -> Tensor:
    return X.chunked_nll(a["hidden"], a["weight"], a["probs"], **how).loss


def weighed(a: dict[str, Any], **how: Any) -> Tensor:
    how |= {"class_weights": WEIGHTS, "label_smoothing": EPS}
    return X.chunked_nll(a["hidden"], a["weight"], a["probs"], **how).loss


def logprobs(a: dict[str, Any], **how: Any) -> Tensor:
    return -X.vocab_parallel_logprobs(a["logits"], a["probs"], **how).logprobs.mean()


def divergence(a: dict[str, Any], **how: Any) -> Tensor:
    teacher = X.TeacherLogits(a["teacher"])
    return X.chunked_divergence(a["hidden"], a["weight"], teacher, **how).loss


def of_logits(a: dict[str, Any], **how: Any) -> Tensor:
    return X.vocab_parallel_divergence(
        a["logits"], X.TeacherLogits(a["teacher"]), **how
    ).loss.mean()


PADDED: dict[str, Callable[..., Tensor]] = {
    "nll": nll,
    "nll, weights and smoothing": weighed,
    "logprobs": logprobs,
    "divergence": divergence,
    "divergence of logits": of_logits,
}


def arrays() -> dict[str, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    probs, teacher = torch.rand(N, V), 2 * torch.randn(N, V)
    return {
        "hidden": hidden,
        "weight": weight,
        "logits": hidden @ weight.T,
        "probs": probs,
        "teacher": teacher,
    }


def of_rank(rank: int, world: int) -> dict[str, Tensor]:
    """This rank's rows and columns, with NaN for padding."""
    whole, more = arrays(), ROWS * world - V
    padded = dict(whole, weight=F.pad(whole["weight"], (0, 0, 0, more), value=float("nan")))
    for name in ("logits", "probs", "teacher"):
        padded[name] = F.pad(whole[name], (0, more), value=float("nan"))
    part = slice(ROWS * rank, ROWS * (rank + 1))
    return {
        "hidden": whole["hidden"],
        "weight": padded["weight"][part].clone(),
        **{name: padded[name][:, part].clone() for name in ("logits", "probs", "teacher")},
    }


def array_of(name: str) -> str:
    return "probs" if name.startswith(("nll", "logprobs")) else "teacher"


def exact(name: str) -> tuple[Tensor, Tensor]:
    """In float64: the value, and the gradient by the head or the logits."""
    a = {k: v.double() for k, v in arrays().items()}
    leaf = a["logits" if "log" in name else "weight"].requires_grad_()
    z = leaf if "log" in name else a["hidden"] @ leaf.T
    log_p, log_t = z.log_softmax(-1), a["teacher"].log_softmax(-1)
    probs = a["probs"]
    if name == "nll, weights and smoothing":
        probs = (probs * (1 - EPS) + EPS / V) * WEIGHTS.double()
    terms = -probs * log_p if array_of(name) == "probs" else log_t.exp() * (log_t - log_p)
    value = terms.sum(-1).mean()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def values(rank: int, world: int) -> dict[str, tuple[Any, Any]]:
    """Of each function the value and this rank's gradient."""
    over, found = X.PaddedVocab(dist.group.WORLD, V), {}
    for name, function in PADDED.items():
        a = of_rank(rank, world)
        leaf = a["logits" if "log" in name else "weight"].requires_grad_()
        value = function(a, vocab_parallel=over)
        found[name] = value.item(), torch.autograd.grad(value, leaf)[0].numpy()
    return found


def refused(rank: int, world: int) -> list[str]:
    """What each rank says of mistakes, of one rank or of all."""
    over, last = X.PaddedVocab(dist.group.WORLD, V), rank == world - 1
    calls: dict[str, Call] = {}

    def wrong(name: str, function: Any, of_arrays: str, change: Any, every: bool = False) -> None:
        a = of_rank(rank, world)
        if last or every:
            a[of_arrays] = change(a[of_arrays])
        calls[name] = lambda: function(a, vocab_parallel=over)

    def negative(x: Tensor) -> Tensor:
        return torch.where(torch.arange(x.shape[1]) == 1, -x, x)

    for name, function in PADDED.items():
        array = array_of(name)
        for some, every in (("one", False), ("all", True)):
            wrong(f"{name}, fewer columns on {some}", function, array, lambda x: x[:, :-1], every)
            wrong(
                f"{name}, all columns on {some}", function, array, lambda x: x.repeat(1, 3), every
            )
            if array == "probs":
                wrong(f"{name}, negative on {some}", function, array, negative, every)
    whole, labels = of_rank(rank, world), torch.zeros(N, dtype=torch.int64)
    ids = torch.arange(2).expand(N, -1)
    none = torch.where(torch.arange(N)[:, None] == 3, -1, ids)

    def few(ids: Any, probs: float, name: str) -> Any:
        soft = X.SoftLabels(ids, torch.full(ids.shape, probs))
        if name == "nll":
            return X.chunked_nll(whole["hidden"], whole["weight"], soft, vocab_parallel=over)
        if name == "logprobs":
            return X.vocab_parallel_logprobs(whole["logits"], soft, vocab_parallel=over)
        teacher = X.TeacherTopK(ids, torch.full(ids.shape, probs))
        return X.chunked_divergence(whole["hidden"], whole["weight"], teacher, vocab_parallel=over)

    for name in ("nll", "logprobs"):
        calls[f"{name}, a token of no class"] = lambda name=name: few(none, 0.5, name)
        calls[f"{name}, negative of few"] = lambda name=name: few(ids, -0.5, name)
        calls[f"{name}, an id too large"] = lambda name=name: few(ids + V, 0.5, name)
    calls["teacher of no class"] = lambda: few(none, -1.0, "teacher")
    calls["teacher of logits"] = lambda: few(ids, 1.0, "teacher")
    calls["teacher's id too large"] = lambda: few(ids + V, -1.0, "teacher")
    heads = {"hidden": whole["hidden"], "weight": whole["weight"], "vocab_parallel": over}
    head = X.TeacherHead(whole["hidden"], whole["weight"])
    for name, label in (("label", labels + V), ("label of padding", labels + V + 1)):
        calls[f"nll, {name}"] = lambda y=label: X.chunked_nll(labels=y, **heads)
        calls[f"divergence, {name}"] = lambda y=label: X.chunked_divergence(
            teacher=head, labels=y, nll_weight=1.0, **heads
        )
    return said_on_ranks(calls)
