"""What is right, and how far a correct result may be from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fuzzing.draw import Drawn
from xentlib import reference
from xentlib.contract import ROW_OF, U
from xentlib.reference.softmax import Softmax
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.ulp import FORMATS

GRADIENTS = ("d_hidden", "d_weight", "d_bias")
# A logit so low that exp of it is 0, where -inf would be multiplied by 0.
LOW = -1e30


class Truth(NamedTuple):
    """The oracle of a case, flat, with scales for what the reference has none of."""

    p: Problem  # as the oracle and the other losses take it: finite, float64
    values: Any  # NLLReference or LogprobReference
    terms: Any  # [N] sums of the absolute terms that a log-probability is made of
    loss_terms: float
    weight_terms: float
    near_tie: Any  # [N] bool
    gradients: dict[str, tuple[Any, Any, Any]]  # by name: oracle, bound, magnitude
    claimed: bool
    even: bool  # nearly even classes, and a gradient of their entropy
    fits: bool  # float16 holds every dz and result


def widened(p: Problem, d: Drawn) -> Problem:
    """In float64, and finite: -inf as LOW, rows that are ignored as 0."""
    weight = np.maximum(p.weight.astype(np.float64), LOW)
    hidden = np.where(p.valid[:, None], p.hidden.astype(np.float64), 0.0)
    if d.function == "vocab_parallel_logprobs":
        hidden = np.eye(d.case.tokens)
    bias = None if p.bias is None else np.maximum(p.bias.astype(np.float64), LOW)
    return p.changed(hidden=hidden, weight=weight, bias=bias)


def oracle_of(p: Problem, upstream: Upstream | None, dz_dtype: str = "float64") -> Any:
    """Of a head, or of given logits, which may be smoothed."""
    if upstream is None:
        return p.reference(dz_dtype=dz_dtype)
    given = {name: g for name, g in upstream._asdict().items() if g is not None}
    smoothing = p.options.get("label_smoothing", 0.0)
    return reference.logprobs_reference(
        p.hidden, p.weight, p.labels, bias=p.bias, where=p.where, label_smoothing=smoothing,
        dz_dtype=dz_dtype, **p.per_token_options, **given,
    )  # fmt: skip


def truth_of(d: Drawn, given: Problem, upstream: Upstream | None) -> Truth:
    p, low = widened(given, d), d.case.dtype if d.case.dtype in ROW_OF and not d.audit else None
    options = p.per_token_options
    shared = [options.get(name, default) for name, default in (
        ("ignore_index", -100), ("logit_scale", 1.0), ("softcap", None), ("temperature", 1.0),
        ("weight_layout", "VH"),
    )]  # fmt: skip
    s = Softmax(p.hidden, p.weight, p.labels, p.bias, p.where, *shared)
    smoothing, z_loss = (p.options.get(name, 0.0) for name in ("label_smoothing", "z_loss"))
    rows, y = np.arange(d.case.tokens), s.onehot.argmax(axis=1)
    valid, alive = s.valid, s.z > LOW / 1e6
    lse = np.where(valid, s.lse, 0.0)
    terms = s.a[rows, y] + s.expected_a[:, 0] + np.abs(s.lse - s.log_total) + s.log_total
    spread = np.where(alive, s.a + np.abs(s.z - s.lse[:, None]), 0.0).mean(axis=1)
    if smoothing:
        terms = terms + spread
    # Each of the two may be off by its own A and by three roundings.
    first, second = np.partition(np.c_[s.z, np.full(len(rows), -np.inf)], -2, axis=1)[:, :-3:-1].T
    strays = 4 * U * np.where(alive, s.a + np.abs(s.z), 0.0).max(axis=1)
    if d.function == "vocab_parallel_logprobs":  # without a temperature they are what they are
        heated = "temperature" in options
        strays = strays if heated else np.zeros_like(strays)
    near_tie = (first - second <= strays) if strays.any() else np.zeros(len(rows), bool)
    loss_terms = weight_terms = 0.0
    values = oracle_of(
        p, upstream, low if low and d.function != "vocab_parallel_logprobs" else "float64"
    )
    if upstream is None:
        c_V = np.ones(s.z.shape[1]) if p.class_weights is None else p.class_weights.astype(float)
        w_N = np.ones(len(rows)) if p.token_weights is None else p.token_weights.astype(float)
        mean = p.options["reduction"] == "mean"
        divisor = p.options.get("denominator", float(values.weight_sum) if mean else 1.0) or 1.0
        f_N = np.where(valid, np.abs(w_N / divisor), 0.0)
        slope_N = c_V.max() + 2 * z_loss * np.abs(lse)
        loss_terms = float((f_N * (slope_N * terms + z_loss * lse**2)).sum())
        weight_terms = float(np.abs(w_N * c_V[y])[valid].sum())
        claimed = abs(values.weight_sum) > weight_terms / 8
        largest = f_N.max(initial=0.0) * abs(p.upstream)
    else:
        claimed = True
        given_N = sum(np.abs(g.astype(np.float64)) for g in upstream if g is not None)
        f_N = np.where(valid, given_N, 0.0)
        slope_N, largest = np.full(len(rows), 8.0), f_N.max(initial=0.0)
    # Numbers below the smallest normal one may be taken to 0, in every term of a sum.
    tiny = 2.0 ** (-1022 if d.case.dtype == "float64" else -126)
    grow_N = np.abs(np.broadcast_to(s.outer, (len(rows), 1))[:, 0]) * slope_N
    x_top, w_top = (np.abs(x).max(initial=0.0, where=np.abs(x) < 1e6) for x in (p.hidden, p.weight))
    lost = (
        tiny * (sum(s.z.shape) + 1) * (1 + largest * grow_N.max(initial=0.0)) * (2 + x_top + w_top)
    )
    found = {}
    for name in GRADIENTS:
        oracle, bound, magnitude = (
            getattr(values, name.replace("d_", f"{part}_", 1))
            for part in ("d", "bound", "magnitude")
        )
        # Both sides round where both are float64.
        bound = bound * (2 if d.case.dtype == "float64" else 1) + lost / U
        if d.case.dtype in ROW_OF:
            # dz may be off by its float32 error before it is rounded, and a subnormal one by as
            # much as it is.
            magnitude = magnitude + 2.0 ** FORMATS[d.case.dtype][0] * (4 * U * bound + lost)
            if d.case.dtype == "float16":
                magnitude = magnitude + U * largest * (1 + x_top + w_top)
        found[name] = oracle, bound, magnitude
    if d.function == "vocab_parallel_logprobs":
        oracle, bound, magnitude = (x.T for x in found["d_weight"])
        if d.case.dtype in ROW_OF:  # one rounding at the end, of each entry by itself
            digits, least = FORMATS[d.case.dtype]
            stray = 4 * U * bound + lost + (2.0 ** (least - digits) if digits == 10 else 0)
            magnitude = np.abs(oracle) + 2.0**digits * stray
        found = {"d_logits": (oracle, bound, magnitude)}
    elif p.bias is None:
        del found["d_bias"]
    top = float(np.abs(s.z[alive & valid[:, None]]).max(initial=0.0))
    cap = options.get("softcap")
    outer_N = np.abs(s.outer[valid if len(s.outer) == len(valid) else ...])
    deviation = d.case.std * outer_N.min(initial=1.0), d.case.std * outer_N.max(initial=1.0)
    claimed &= deviation[0] >= 0.3 and deviation[1] <= 6 and s.z.shape[1] >= 31
    claimed &= smoothing <= 0.3
    claimed &= bool(valid.sum() >= 31) and not d.masked and not d.offset
    claimed &= cap is None or cap >= 2 * d.case.std * abs(options.get("logit_scale", 1.0))
    even = deviation[0] < 1 and upstream is not None and upstream.d_entropy is not None
    fits = True
    if d.case.dtype == "float16":
        room = (f_N * grow_N).max(initial=0.0) <= 30 * f_N.max(initial=0.0)
        fits = room and all(np.abs(o).max(initial=0.0) < 6e4 for o, _, _ in found.values())
        fits = bool(fits and top < 6e4)
    return Truth(
        p, values, terms, loss_terms, weight_terms, near_tie, found, bool(claimed), even, fits
    )
