"""Divergences of other libraries as adapters of `conform_divergence`, those that run on a CPU.

Who has heads in its arguments is given logits by heads that multiply exactly: hidden states are the
identity, the head is the logits transposed. Logits of -inf cannot be given so, as 0 * -inf is NaN.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from xentlib.tools.conformance import DivergenceLoss

KINDS: dict[str, float | None] = {"forward_kl": None, "reverse_kl": None, "jsd": 0.3}
# The teacher's share in TRL and Liger, whose two ends are the KLs.
SHARES = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}
MASKED = ("where", "temperature")
ABSENT = {
    "Liger, Triton (JSD, KLDiv, FusedLinearJSD, FusedLinearKLDiv)": ("liger-kernel", "needs CUDA"),
    "verl, forward_kl_topk": ("verl", "takes the teacher's K classes; needs ray to be imported"),
}


def adapters(backend: str) -> dict[str, list[DivergenceLoss]]:
    """By the name of who is installed; one for each kind that it has."""
    return {
        name: [
            DivergenceLoss(name, backend, partial(function, kind), kind, KINDS[kind], **about)
            for kind in kinds
        ]
        for name, (needed, function, kinds, about) in PEERS[backend].items()
        if find_spec(needed) is not None
    }


# --- PyTorch --------------------------------------------------------------------------------------


def ours(kind: str, s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
    from xentlib.torch import TeacherLogits, vocab_parallel_divergence

    how: dict[str, Any] = {"kind": kind, "beta": KINDS[kind], "temperature": temperature}
    each = vocab_parallel_divergence(s, TeacherLogits(t), where=where, **how).loss
    return each.mean() if where is None else each.sum() / where.sum().clamp(min=1)


def kl_div(kind: str, s: Any, t: Any) -> Any:
    """As PyTorch's documentation has it, of log-probabilities in the dtype of the logits."""
    from torch.nn import functional as F

    pair = s.log_softmax(-1), t.log_softmax(-1)
    inputs, target = pair if kind == "forward_kl" else pair[::-1]
    return F.kl_div(inputs, target, reduction="batchmean", log_target=True)


def gkd(kind: str, s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    loss = import_module("trl.experimental.gkd").GKDTrainer.generalized_jsd_loss
    labels = labels_of(s, where)[None]
    return loss(s[None], t[None], labels, SHARES[kind], temperature)


def trl_chunked(kind: str, s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
    loss = import_module("trl.trainer.distillation_trainer")._chunked_divergence_loss
    mask = (labels_of(s, where) == 0)[None]
    states = identity(s)[None]
    return loss(states, states, s.T, t.T, mask, SHARES[kind], temperature=temperature)[0]


def liger_chunked(kind: str, s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
    loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=SHARES[kind],
        temperature=temperature,
        compiled=False,
    )
    return loss(identity(s), s.T, identity(s), t.T, labels_of(s, where))


def identity(s: Any) -> Any:
    import torch

    return torch.eye(len(s), dtype=s.dtype)


def labels_of(s: Any, where: Any) -> Any:
    """0, or -100 where a token does not count."""
    import torch

    labels = torch.zeros(len(s), dtype=torch.long)
    return labels if where is None else labels.masked_fill(~where, -100)


# --- JAX ------------------------------------------------------------------------------------------


def ours_jax(kind: str, s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
    import jax.numpy as jnp

    from xentlib.jax import TeacherLogits, vocab_parallel_divergence

    how: dict[str, Any] = {"kind": kind, "beta": KINDS[kind], "temperature": temperature}
    each = vocab_parallel_divergence(s, TeacherLogits(t), where=where, **how).loss
    return each.mean() if where is None else each.sum() / jnp.maximum(where.sum(), 1)


def optax_kl(kind: str, s: Any, t: Any, where: Any = None) -> Any:
    import jax
    import jax.numpy as jnp

    kl = import_module("optax").losses.kl_divergence_with_log_targets
    pair = jax.nn.log_softmax(s), jax.nn.log_softmax(t)
    return jnp.mean(kl(*(pair if kind == "forward_kl" else pair[::-1])))


Peer = tuple[str, Callable[..., Any], tuple[str, ...], dict[str, Any]]
ALL, KLS = tuple(KINDS), ("forward_kl", "reverse_kl")
HEADS: dict[str, Any] = {"options": MASKED, "infinite": False}
PEERS: dict[str, dict[str, Peer]] = {
    "torch": {
        "xentlib": ("xentlib", ours, ALL, {"options": MASKED}),
        "F.kl_div": ("torch", kl_div, KLS, {}),
        "TRL, GKDTrainer": ("trl", gkd, ALL, {"options": MASKED}),
        "TRL, DistillationTrainer": ("trl", trl_chunked, ALL, HEADS),
        "Liger, chunked JSD": ("liger_kernel", liger_chunked, ALL, HEADS),
    },
    "jax": {
        "xentlib, JAX": ("xentlib", ours_jax, ALL, {"options": MASKED}),
        "optax, kl_divergence_with_log_targets": ("optax", optax_kl, KLS, {}),
    },
}
