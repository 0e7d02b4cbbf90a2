"""MaxText's loss with vocabulary tiling, by `chunked_nll`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh_axes

from xentlib.arguments import Arguments
from xentlib.checks.head import refuse_module
from xentlib.jax.losses.index import nll
from xentlib.jax.placement import configured
from xentlib.options import Gather

__all__ = ["vocab_tiling_nnx_loss"]

TOKENS = ("activation_embed_and_logits_batch", "activation_length")
HEAD = ("embed_vocab", "vocab")


def vocab_tiling_nnx_loss(
    model: Any,
    hidden_states: Any,
    data: Any,
    config: Any,
    is_train: bool,
    *,
    gather: Gather = "head",
    tokens_per_rank: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What MaxText's function of the same name returns, from one pass over the head.

        from maxtext.trainers.pre_train import train
        train.vocab_tiling_nnx_loss = vocab_tiling_nnx_loss      # with num_vocab_tiling > 1

    total_loss = sum over tokens with a segment of (nll + z_loss_multiplier * lse^2)

    MaxText divides it by its own count of those tokens. The final norm and dropout, the tied or
    untied head, its scale and soft cap are the model's; on a mesh with Auto axes tokens and head
    are where `config.logical_axis_rules` say.

    Args:
        model: MaxText's NNX `Transformer`: `decoder`, `token_embedder`, `mesh`.
        hidden_states: [B, L, H] before the final norm.
        data: "targets" [B, L] and "targets_segmentation" [B, L], 0 where there is no target.
        config: MaxText's.
        is_train: whether dropout is on, if `config.enable_dropout`.
        gather: as in `chunked_nll`; bind it with `functools.partial`. "hidden" is for rules that
            spread the vocabulary, and not the width, over an axis that spreads tokens.
        tokens_per_rank: with `gather="auto"`.

    Returns:
        (total_loss [], its z-loss part []), float32; the first carries the gradient.

    Raises:
        TypeError: a quantised head. Else what `chunked_nll` raises.

    Numerics: those of `chunked_nll`. A tied head is rounded to bfloat16 first, as MaxText does.
    Logits are not rounded to `config.dtype`, where MaxText's are.
    """
    decoder = model.decoder
    softcap, scale = None, 1.0
    hidden = decoder.decoder_norm(hidden_states)
    hidden = decoder.dropout(hidden, deterministic=not (is_train and config.enable_dropout))
    if config.logits_via_embedding:
        weight, bias, names = model.token_embedder.embedding[...], None, HEAD[::-1]
        weight = weight.astype(jnp.bfloat16)
        softcap = config.final_logits_soft_cap or None
        if config.normalize_embedding_logits:
            scale = hidden.shape[-1] ** -0.5
    else:
        head, names = decoder.logits_dense, HEAD
        if head.quant is not None or getattr(head, "kernel_scale", None) is not None:
            refuse_module("MaxText's DenseGeneral that is quantised", "Keep MaxText's own loss.")
        hidden, weight = hidden.astype(head.dtype), head.kernel[...].astype(head.dtype)
        bias = None if head.bias is None else head.bias[...]
    args = Arguments(
        hidden,
        weight,
        data["targets"],
        bias=bias,
        where=data["targets_segmentation"] != 0,
        z_loss=config.z_loss_multiplier,
        reduction="sum",
        weight_layout="VH" if names[0] == "vocab" else "HV",
        softcap=softcap,
        logit_scale=scale,
        gather=gather,
        tokens_per_rank=tokens_per_rank,
    )
    rules = config.logical_axis_rules
    specs = (logical_to_mesh_axes(axes, rules) or () for axes in (TOKENS, names))
    out = nll(args, configured(args, model.mesh, *specs))
    return out.loss, out.z_loss
