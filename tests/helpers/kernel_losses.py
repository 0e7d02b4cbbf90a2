"""The loss of a block in one pass of Triton's programs, and what the oracle makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from helpers.kernel_blocks import Block, V, draw
from xentlib.arguments import Scalars
from xentlib.contract import check
from xentlib.math.softmax import WantedStats
from xentlib.reference import nll_reference
from xentlib.torch.core.kernels import DzOutput, LogitsBlock, LogitTransform, LossTerms
from xentlib.torch.triton.launch import Triton

WIDTH = 320  # of a row in memory, in float32
B = 7  # rows: a program each, which the interpreter takes 10 ms for


class Terms:
    """What a loss is made of beside its block."""

    def __init__(self, smoothing: float, z_loss: float, *, weights: bool) -> None:
        rng = np.random.default_rng(7)
        self.smoothing, self.z_loss = smoothing, z_loss
        self.token_weights = (0.5 + rng.random(B)).astype(np.float32)
        self.weights = (0.5 + rng.random(V)).astype(np.float32) if weights else None


def loss_of(
    block: Block, terms: Terms, dtype: torch.dtype, *, beside: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Values [7, B], and dz of all columns. 16-bit dz lies over its logits, or `beside` them."""

    def tensor(x: Any) -> Any:
        return None if x is None else torch.tensor(x)

    buffer_BL = torch.full((B, WIDTH), torch.nan)
    z_BV = buffer_BL[:, :V].copy_(tensor(block.product))
    into_BV = None
    if beside:
        into_BV = torch.full((B, V), torch.nan, dtype=dtype)
    elif dtype != torch.float32:
        into_BV = buffer_BL.view(dtype)[:, WIDTH : WIDTH + V]
    weights = tensor(terms.weights)
    shape = LogitTransform(
        V, tensor(block.bias), tensor(block.scale), Scalars(block.softcap), weights
    )
    every, labels = slice(0, B), tensor(block.labels)
    temperature, valid = tensor(block.temperature), tensor(block.valid)
    rows = LogitsBlock(every, every, z_BV, labels[:, None], temperature, valid, None)
    values, dz_y = torch.full((7, B), torch.nan), torch.full((B,), torch.nan)
    Triton(B, V, torch.float32, torch.get_default_device(), shape).loss(
        rows,
        WantedStats(entropy=True, smoothing=terms.smoothing > 0, predicted=True),
        LossTerms(
            tensor(terms.token_weights),
            Scalars(label_smoothing=terms.smoothing, z_loss=terms.z_loss),
            None if weights is None else weights.sum(),
            values,
            dz_y,
        ),
        DzOutput(into_BV, dtype),
    )
    dz = (z_BV if into_BV is None else into_BV).float()
    assert not dz[torch.arange(B), labels].any()
    dz[torch.arange(B), labels] = dz_y
    return values.cpu().numpy(), dz.cpu().numpy()


LOSSES = {
    "plain": ({}, Terms(0.0, 0.0, weights=False)),
    "smoothed": ({}, Terms(0.1, 1e-3, weights=False)),
    "class weights": ({}, Terms(0.2, 1e-3, weights=True)),
    "weights alone": ({}, Terms(0.0, 0.0, weights=True)),
    "softcap": ({"softcap": 8.0, "scale": 0.7}, Terms(0.0, 1e-4, weights=False)),
    "everything": (
        {"bias": True, "scale": 1.3, "softcap": 30.0, "temperature": True},
        Terms(0.1, 1e-3, weights=True),
    ),
}


def drawn(seed: int, options: Any) -> Block:
    """A block whose masked classes the oracle's bound knows."""
    block = draw(seed, **options)
    block.product[2, 1::2] = -30.0
    temperature = None if block.temperature is None else block.temperature[:B]
    labels, valid = block.labels[:B], block.valid[:B].copy()
    valid[4] = False
    return block._replace(
        product=block.product[:B], labels=labels, valid=valid, temperature=temperature
    )


def oracle(block: Block, terms: Terms) -> Any:
    """With the identity for hidden states the logits are the block, and d weight is dz."""
    return nll_reference(
        np.eye(B, dtype=np.float32),
        block.product.T,
        block.labels,
        where=block.valid,
        token_weights=terms.token_weights,
        class_weights=terms.weights,
        label_smoothing=terms.smoothing,
        z_loss=terms.z_loss,
        reduction="sum",
        **block.options(),
    )


def held(block: Block, terms: Terms, reference: Any, made: Any) -> list[Any]:
    """Values [7, B] and dz of `made` against the oracle: A0, A2 to A5."""
    values, dz = made
    count = block.valid
    total, z_term, logprob, entropy, lse, correct, predicted = (x[count] for x in values)
    weighted = (total.astype(np.float64) * terms.token_weights[count]).sum()
    z_terms = (z_term.astype(np.float64) * terms.token_weights[count]).sum()
    measured = check("A2", weighted, reference.loss, magnitude=reference.loss_magnitude)
    measured += check("A2", z_terms, reference.z_loss, magnitude=reference.loss_magnitude)
    scale = np.maximum(np.abs(reference.lse[count]), 1.0)
    measured += check("A3", lse, reference.lse[count], magnitude=scale)
    if block.as_given:
        measured += check("A4", logprob, reference.logprobs[count])
    measured += check("A0", correct > 0, reference.correct[count])
    clear = reference.margin[count] > 1e-6
    found = predicted.astype(np.int64)[clear]
    measured += check("A0", found, reference.predicted[count][clear])
    # The contract has no row of entropies alone: theirs is that of a log-probability at log V.
    exact = reference.entropy[count] + np.log(V)
    measured += check("A4", entropy.astype(np.float64) + np.log(V), exact)
    measured += check("A0", values[:, ~count], np.zeros_like(values[:, ~count]))
    return measured + check("A5", dz, reference.d_weight.T, reference.bound_weight.T)
