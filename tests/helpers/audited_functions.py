"""Functions of hidden states, head and labels in PyTorch for the audit, right and wrong ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xentlib.torch import chunked_logprobs, chunked_nll

OF_TRL = {"temperature": 0.6, "softcap": 30.0, "logit_scale": 2.0}


def cross_entropy(hidden: Any, weight: Any, labels: Any) -> Any:
    return F.cross_entropy(hidden @ weight.T, labels)


def with_bias(labels: Any, hidden: Any, bias: Any, weight: Any) -> Any:
    """By name, in another order."""
    return F.cross_entropy(F.linear(hidden, weight, bias), labels)


def smoothed(hidden: Any, weight: Any, labels: Any, label_smoothing: float) -> Any:
    return F.cross_entropy(hidden @ weight.T, labels, label_smoothing=label_smoothing)


class NoUpstream(torch.autograd.Function):
    """Gradients made in the forward, whatever arrives in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, labels: Any) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
            loss = cross_entropy(*leaves, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return (*ctx.saved_tensors, None)


def no_upstream(hidden: Any, weight: Any, labels: Any) -> Any:
    return NoUpstream.apply(hidden, weight, labels)


def hidden_alone(hidden: Any, weight: Any, labels: Any) -> Any:
    """The gradient that arrives reaches d hidden with the opposite sign."""
    return cross_entropy(2 * hidden.detach() - hidden, weight, labels)


def by_softmax(entropy: Any = "whole", temperature: float = 1.0) -> Any:
    def logprobs(hidden: Any, weight: Any, labels: Any) -> Any:
        log_p = (hidden @ weight.T / temperature).log_softmax(-1)
        mine = log_p.gather(-1, labels[:, None])[:, 0]
        if not entropy:
            return mine
        found = -(log_p.exp() * log_p).sum(-1)
        return mine, found if entropy == "whole" else found.detach()

    return logprobs


def of_trl(ours: bool) -> Any:
    """The head of TRL's trainers, and ours in its place."""

    def logprobs(hidden: Any, weight: Any, labels: Any) -> Any:
        utils = pytest.importorskip("trl.trainer.utils")
        from xentlib.torch.integrations import trl

        with trl.use() if ours else nullcontext():
            call = (hidden, weight, None, labels, 0.6, 32, 30.0, 2.0, ("log_probs", "entropy"))
            found = utils._ChunkedLogProbFunction.apply(*call)
        return found[0], found[1]

    return logprobs


FUNCTIONS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("", cross_entropy, "loss", {}),
    ("", with_bias, "loss", {"bias": True}),
    ("", smoothed, "loss", {"label_smoothing": 0.1}),
    ("", chunked_nll, "loss", {}),
    ("", by_softmax(), "logprobs", {}),
    ("", by_softmax(entropy=None), "logprobs", {}),
    ("", by_softmax(temperature=0.6), "logprobs", {"temperature": 0.6}),
    ("", lambda h, w, y: chunked_logprobs(h, w, y, entropy=True), "logprobs", {}),
    ("", of_trl(ours=False), "logprobs", OF_TRL),
    ("", of_trl(ours=True), "logprobs", OF_TRL),
    ("upstream gradient ignored", no_upstream, "loss", {}),
    ("sum and not mean", lambda h, w, y: F.cross_entropy(h @ w.T, y, reduction="sum"), "loss", {}),
    ("labels shifted twice", lambda h, w, y: cross_entropy(h[:-1], w, y[1:]), "loss", {}),
    ("sign", hidden_alone, "loss", {}),
    ("last chunk dropped", lambda h, w, y: cross_entropy(h[:48], w, y[:48]), "loss", {}),
    (
        "logits rounded to 16 bits",
        lambda h, w, y: F.cross_entropy((h @ w.T).bfloat16(), y),
        "loss",
        {},
    ),
    ("temperature not applied", by_softmax(), "logprobs", {"temperature": 0.6}),
    ("entropy without its gradient", by_softmax(entropy="detached"), "logprobs", {}),
]
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    FUNCTIONS.append(("", F.linear_cross_entropy, "loss", {}))
