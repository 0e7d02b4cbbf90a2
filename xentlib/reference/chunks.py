"""The loss of many tokens in float64, some of them at a time.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xentlib.reference.nll import NLLReference, divided_by, nll_reference
from xentlib.reference.softmax import Float64, f64

# `nll_reference` holds about so many [N, V] arrays of float64 at once.
ARRAYS = 20
CHUNK_BYTES = 256 << 20
# One row for each token; the rest are sums.
ROWS = (
    *("logprobs", "entropy", "lse", "correct", "predicted", "margin"),
    *("bound_logprobs", "bound_tokens", "d_hidden", "bound_hidden", "magnitude_hidden"),
)
PER_TOKEN = ("where", "token_weights", "temperature")


def summed_reference(
    hidden: Any, weight: Any, labels: Any, *, chunk_bytes: int = CHUNK_BYTES, **options: Any
) -> NLLReference:
    """`nll_reference` of `hidden` [N, H] and `labels` [N], in chunks of tokens.

    Its [N, V] arrays take `chunk_bytes` at most, or one token. Those that are [V, H], a dozen of
    float64, are there at once; `head=False` leaves out all but the weight and its absolute value.
    """
    num_tokens, vocab_size = len(labels), weight.shape[options.get("weight_layout") == "HV"]
    options = {**options, "denominator": divisor_of(labels, options), "reduction": "sum"}
    size = max(1, chunk_bytes // (ARRAYS * 8 * vocab_size))
    hidden, weight = f64(hidden), f64(weight)
    rows: dict[str, list[Float64]] = {name: [] for name in ROWS}
    sums: dict[str, Any] = {}
    for start in range(0, max(num_tokens, 1), size):
        part = slice(start, start + size)
        options = {
            name: value[part] if name in PER_TOKEN and np.ndim(value) else value
            for name, value in options.items()
        }
        reference = nll_reference(hidden[part], weight, labels[part], **options)
        for name, value in reference._asdict().items():
            if name in ROWS:
                rows[name].append(value)
            elif name in sums:
                sums[name] += value
            else:
                sums[name] = np.array(value)
    values = sums | {name: np.concatenate(x) for name, x in rows.items()}
    return NLLReference(**values)


def divisor_of(labels: Any, options: dict[str, Any]) -> float:
    """What `nll_reference` divides the sum by, from its labels [N] and options."""
    arrays = {"where": None, "token_weights": None, "class_weights": None, **options}
    valid = np.asarray(labels) != options.get("ignore_index", -100)
    if arrays["where"] is not None:
        valid = valid & np.asarray(arrays["where"])
    weights = np.ones(len(valid)) if arrays["token_weights"] is None else arrays["token_weights"]
    weights = np.where(valid, f64(weights), 0.0)
    if arrays["class_weights"] is not None:
        weights = weights * f64(arrays["class_weights"])[np.where(valid, labels, 0)]
    how = options.get("reduction", "mean"), options.get("denominator")
    return divided_by(int(valid.sum()), float(weights.sum()), *how)
