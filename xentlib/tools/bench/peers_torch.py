"""Ways to the loss of a language-model head in PyTorch: other libraries' and the plain ones.

Each is called as (hidden, weight, labels, softcap, reduction), see `Peer`; a library's function is
looked up when it is called.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xentlib.tools.bench.contestant import OURS, Peer, not_installed
from xentlib.torch import chunked_logprobs, chunked_nll

# As documented: in bfloat16 only "auto" accumulates in float32, the others in bfloat16.
POLICIES = ("auto", "accurate", "balanced", "compact")
# What TRL's own trainers pass.
TRL_CHUNK = 32_768


def ours(x_NH: Tensor, w_VH: Tensor, y_N: Tensor, softcap: float | None, reduction: str) -> Tensor:
    if reduction == "none":
        logprobs_N: Tensor = chunked_logprobs(x_NH, w_VH, y_N, softcap=softcap).logprobs
        return -logprobs_N
    loss: Tensor = chunked_nll(x_NH, w_VH, y_N, softcap=softcap).loss
    return loss


def eager(
    x_NH: Tensor,
    w_VH: Tensor,
    y_N: Tensor,
    softcap: float | None,
    reduction: str,
    upcast: bool = False,
) -> Tensor:
    """With `upcast` the usual training script: logits rounded by the head, upcast by the loss."""
    z_NV = F.linear(x_NH, w_VH)
    if upcast:
        z_NV = z_NV.float()
    if softcap is not None:
        z_NV = softcap * torch.tanh(z_NV / softcap)
    return F.cross_entropy(z_NV, y_N, reduction=reduction)


@cache
def compiled() -> Any:
    """For any size, so that one program of a dtype serves all cases of its process."""
    return torch.compile(partial(eager, upcast=True), dynamic=True)


def torch_compile(*call: Any) -> Tensor:
    loss: Tensor = compiled()(*call)
    return loss


def core(
    x_NH: Tensor, w_VH: Tensor, y_N: Tensor, softcap: None, reduction: str, policy: str
) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)  # type: ignore[arg-type]
    return F.linear_cross_entropy(x_NH, w_VH, y_N, reduction=reduction, options=options)


def liger(
    x_NH: Tensor,
    w_VH: Tensor,
    y_N: Tensor,
    softcap: float | None,
    reduction: str,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    fused = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    loss: Tensor = fused(
        x_NH, w_VH, y_N, reduction=reduction, softcap=softcap, accum_dtype=accum_dtype
    )
    return loss


def cut(
    x_NH: Tensor,
    w_VH: Tensor,
    y_N: Tensor,
    softcap: float | None,
    reduction: str,
    filter_eps: str | None,
) -> Tensor:
    function = import_module("cut_cross_entropy").linear_cross_entropy
    loss: Tensor = function(
        x_NH, w_VH, y_N, softcap=softcap, reduction=reduction, filter_eps=filter_eps
    )
    return loss


def trl(x_NH: Tensor, w_VH: Tensor, y_N: Tensor, softcap: float | None, reduction: str) -> Tensor:
    chunked = import_module("trl.kernels").ChunkedLogProbFunction
    # No bias, temperature 1, logit scale 1, and nothing beside the log-probabilities.
    nll_N: Tensor = -chunked.apply(x_NH, w_VH, None, y_N, 1.0, TRL_CHUNK, softcap, 1.0, ())[0]
    return nll_N.mean() if reduction == "mean" else nll_N


def quack(x_NH: Tensor, w_VH: Tensor, y_N: Tensor, softcap: None, reduction: str) -> Tensor:
    chunked = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    loss: Tensor = chunked(x_NH, w_VH, y_N, reduction=reduction)
    return loss


def peers(dtype: torch.dtype) -> list[Peer]:
    """Ours first; whoever is not here has an excuse."""
    old = None if hasattr(F, "linear_cross_entropy") else "needs torch 2.13"
    no_liger = not_installed("liger-kernel")
    no_cut = not_installed("cut-cross-entropy")
    listed = [Peer(OURS, ours), Peer("eager, full logits", eager)]
    if dtype != torch.float32:
        listed.append(Peer("eager, float32 logits", partial(eager, upcast=True)))
    listed.append(Peer("torch.compile, full logits", torch_compile))
    listed += [
        Peer(f"F.linear_cross_entropy {policy}", partial(core, policy=policy), old, softcap=False)
        for policy in POLICIES
    ]
    return [
        *listed,
        Peer("Liger-Kernel", liger, no_liger, on="cuda"),
        Peer(
            "Liger-Kernel, float32 d weight",
            partial(liger, accum_dtype=torch.float32),
            no_liger,
            on="cuda",
        ),
        Peer("Cut Cross-Entropy", partial(cut, filter_eps="high"), no_cut, on="cuda"),
        Peer("Cut Cross-Entropy, no filter", partial(cut, filter_eps=None), no_cut, on="cuda"),
        Peer("TRL, chunked", trl, not_installed("trl")),
        Peer(
            "QuACK",
            quack,
            not_installed("quack-kernels", "quack"),
            on="cuda",
            softcap=False,
            per_token=False,
        ),
    ]
