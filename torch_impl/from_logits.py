"""Per-token log-probabilities of given logits, in PyTorch: the steps of `xentlib.logprobs`.

Shapes: N tokens, C columns of this rank, B rows of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.algebra import WantedStats
from xentlib.arguments import LogitsArguments
from xentlib.logprobs import LogprobOutput
from xentlib.torch.binding import bind_logits
from xentlib.torch.core.from_logits import GivenLogits
from xentlib.torch.core.stats import given_stats
from xentlib.torch.logprobs import (
    FIVE,
    Cotangents,
    Forward,
    Residuals,
    Values,
    clean_upstream,
    coefficients,
    fake_outputs,
    keep,
    kept_of,
    kept_values,
    outputs_of,
    shaped,
)
from xentlib.torch.operators import LogitsCall, operator


def given_forward(given: GivenLogits, entropy: bool, output_dtype: torch.dtype) -> Forward:
    """Steps 3 to 5 for logits that are there."""
    given.check_consistent()
    smoothing = given.scalars.label_smoothing
    stats = given_stats(given, WantedStats(entropy, smoothing > 0))
    return outputs_of(given.tokens, kept_values(stats), stats, output_dtype, smoothing)


def given_backward(upstream: Cotangents, given: GivenLogits) -> Tensor:
    """Step 6, in the logits' dtype: every row is written once, its target's column with it."""
    residuals, entropy = Residuals(*upstream.residuals), upstream.d_entropy is not None
    g_3N = clean_upstream(given.tokens, upstream, given.compute_dtype)
    tokens, logits, size = given.tokens, given.logits, given.local_size
    whole = tokens.computed == logits.shape[0]
    d_logits = torch.empty_like(logits) if whole else torch.zeros_like(logits)
    d_logits[:, size:] = 0.0
    kernels = given.kernels()
    for rows in given.blocks():
        g_3B = g_3N[:, rows.places]
        if rows.temperature_B is not None:
            g_3B = g_3B / rows.temperature_B
        kept = Residuals(*(x[rows.places] for x in residuals))
        dz = coefficients(
            g_3B,
            kept,
            entropy=entropy,
            smoothing=given.scalars.label_smoothing,
            vocab_size=given.vocab.size,
        )
        # A gradient has the strides of its logits, which may be those of a transposed view.
        direct = isinstance(rows.places, slice) and d_logits.stride(1) == 1
        into_BV = d_logits[rows.places, :size] if direct else None
        kernels.dz(rows, kept.lse, dz, into_BV=into_BV, with_target=True)
        if into_BV is None:
            d_logits[rows.places, :size] = rows.z_BV[:, :size].to(logits.dtype)
    return d_logits


@operator("given_forward", LogitsCall, Values, returns=FIVE)
def given_op(call: LogitsCall, values: Values) -> tuple[Tensor, ...]:
    """`given_forward` as one operator, opaque to the compiler; returns what `logprobs_op` does."""
    output, residuals = given_forward(GivenLogits(call), *values[:2])
    return (*output, torch.stack(residuals))


@given_op.fake
def _(call: LogitsCall, values: Values) -> tuple[Tensor, ...]:
    return fake_outputs(call.logits, values.output_dtype, call.compute_dtype)


@operator("given_backward", Cotangents, LogitsCall, returns="Tensor")
def given_backward_op(upstream: Cotangents, call: LogitsCall) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    return given_backward(upstream, GivenLogits(call))


@given_backward_op.fake
def _(upstream: Cotangents, call: LogitsCall) -> Tensor:
    return torch.empty_like(call.logits)


def _given_backward(ctx: Any, *gradients: Tensor | None) -> dict[str, Tensor | None] | None:
    kept = kept_of(ctx, "vocab_parallel_logprobs", gradients)
    if kept is None:
        return None
    call, upstream = kept
    return {"logits": given_backward_op(upstream, call)}


given_op.gradient(keep, _given_backward)


def given_logprobs(given: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` of its arguments."""
    given, problem, call = bind_logits("vocab_parallel_logprobs", given)
    values = Values(given.entropy, getattr(torch, problem.output_dtype), [])
    return shaped(given_op(call, values), problem.leading, given.entropy)
