"""Every function of the head as a number or numbers per token of the same arrays, for calls of few
tokens or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

H, V, K = 8, 36, 3
SUM = {"reduction": "sum"}  # a mean of each rank's own tokens is refused
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (2, 0), (0, 3))


def arrays(leading: tuple[int, ...], vocab: int = V) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    few = normal(*leading, K)
    return {
        "hidden": normal(*leading, H),
        "logits": normal(*leading, vocab),
        "weight": normal(vocab, H),
        "labels": rng.integers(0, vocab, leading).astype(np.int32),
        # Other classes in each place, the label's among them.
        "ids": np.cumsum(rng.integers(1, vocab // K, (*leading, K)), -1).astype(np.int32),
        "probs": np.exp(few) / np.exp(few).sum(-1, keepdims=True),
        "log_probs": np.log(0.9) + few - np.log(np.exp(few).sum(-1, keepdims=True)),
        "dense": np.abs(normal(*leading, vocab)),
        "teacher_hidden": normal(*leading, 5),
        "teacher_weight": normal(vocab, 5),
        "low_in": normal(2, H),
        "low_out": normal(vocab, 2),
    }


def nll(X: Any, a: Any, **how: Any) -> Any:
    return X.chunked_nll(a["hidden"], a["weight"], a["labels"], **(SUM | how)).loss


def soft(X: Any, a: Any, **how: Any) -> Any:
    return X.chunked_nll(a["hidden"], a["weight"], a["dense"], **(SUM | how)).loss


def soft_few(X: Any, a: Any, **how: Any) -> Any:
    labels = X.SoftLabels(a["ids"], a["probs"])
    return X.chunked_nll(a["hidden"], a["weight"], labels, **(SUM | how)).loss


def low(X: Any, a: Any, **how: Any) -> Any:
    head = X.LowRankHead(a["weight"], a["low_in"], a["low_out"])
    return X.chunked_nll(a["hidden"], head, a["labels"], **(SUM | how)).loss


def logprobs(X: Any, a: Any, **how: Any) -> Any:
    return X.chunked_logprobs(a["hidden"], a["weight"], a["labels"], entropy=True, **how).entropy


def several(X: Any, a: Any, **how: Any) -> Any:
    args = a["hidden"], a["weight"], a["ids"][..., 0]
    out = X.chunked_logprobs(*args, ids=a["ids"], top_k=2, **how)
    return out.ids_logprobs.sum(-1) + out.top_logprobs.sum(-1)


def kept(X: Any, a: Any, **how: Any) -> Any:
    args = a["hidden"], a["weight"], a["ids"][..., 0]
    return X.chunked_logprobs(*args, kept=a["ids"], **how).logprobs


def diverging(teacher: str, **options: Any) -> Callable[..., Any]:
    def call(X: Any, a: Any, **how: Any) -> Any:
        teachers = {
            "head": lambda: X.TeacherHead(a["teacher_hidden"], a["teacher_weight"]),
            "logits": lambda: X.TeacherLogits(a["dense"]),
            "top": lambda: X.TeacherTopK(a["ids"], a["log_probs"]),
        }
        args = a["hidden"], a["weight"], teachers[teacher]()
        return X.chunked_divergence(*args, **(SUM | options | how)).loss

    return call


def given(X: Any, a: Any, **how: Any) -> Any:
    return X.vocab_parallel_logprobs(a["logits"], a["labels"], **how).logprobs


def given_several(X: Any, a: Any, **how: Any) -> Any:
    args = a["logits"], a["ids"][..., 0]
    out = X.vocab_parallel_logprobs(*args, ids=a["ids"], top_k=2, **how)
    return out.ids_logprobs.sum(-1) + out.top_logprobs.sum(-1)


def given_soft(X: Any, a: Any, **how: Any) -> Any:
    labels = X.SoftLabels(a["ids"], a["probs"])
    return X.vocab_parallel_logprobs(a["logits"], labels, **how).logprobs


def given_divergence(X: Any, a: Any, **how: Any) -> Any:
    return X.vocab_parallel_divergence(a["logits"], X.TeacherLogits(a["dense"]), **how).loss


ALL: dict[str, Callable[..., Any]] = {
    "nll": nll,
    "probabilities": soft,
    "probabilities of a few": soft_few,
    "low rank": low,
    "logprobs": logprobs,
    "ids and top_k": several,
    "kept": kept,
    "divergence": diverging("head"),
    "divergence of logits": diverging("logits"),
    "divergence of each": diverging("head", kind="jsd", beta=0.3, reduction="none"),
    "divergence of a few": diverging("top"),
    "given": given,
    "given ids and top_k": given_several,
    "given probabilities": given_soft,
    "given divergence": given_divergence,
}


def alone(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(X: Any, **a: Any) -> Any:
        return call(X, a)

    return run


CALLS = {name: alone(call) for name, call in ALL.items()}
