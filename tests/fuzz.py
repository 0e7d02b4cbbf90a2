"""Random calls of the three functions, for as long as asked: both backends against the oracle, and
the oracle against the losses of torch and of optax in float64.

    python tests/fuzz.py --seed 1 --seconds 60        (`make fuzz`)
    python tests/fuzz.py --seed 1 --only 4711         one case again, as a failure says it

A case is drawn from (seed, number) alone. What a compiler must know (sizes, dtype, options) is the
same for PERIOD / 2 even numbers, as JAX compiles for each; odd numbers have sizes of their own, and
run in PyTorch alone. Where the contract claims nothing, a check is left out under a name of
UNCLAIMED and counted. Not drawn: shards, heads that are spread, operands of two dtypes.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from test_reference import VALUE_ULP, tau_bound, torch_full_logits, units
from xentlib import reference
from xentlib.contract import ROW_OF, ROWS, Measurement, U, failures
from xentlib.parity import findings as parity_findings
from xentlib.parity.backends import run, run_given, run_logprobs
from xentlib.parity.device import contract_settings
from xentlib.parity.problem import Case, Problem, Upstream, build, upstream_of
from xentlib.reference.softmax import softmax
from xentlib.ulp import FORMATS, dtype_named, round_to, ulp_distance

PERIOD = 128
RUN: dict[str, Callable[..., Any]] = {
    "chunked_nll": run,
    "chunked_logprobs": run_logprobs,
    "vocab_parallel_logprobs": run_given,
}
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")
VALUES = ("logprobs", "entropy", "lse")
# A logit so low that exp of it is 0, where -inf would be multiplied by 0.
LOW = -1e30

UNCLAIMED = {
    "data": "rho, the share correctly rounded and the loss by its terms are claimed for logits of "
    "standard deviation 0.3 to 6, some tens of tokens and classes, nothing masked or offset, no "
    "softcap that saturates, no weights that cancel, no smoothing that does (docs/contract.md)",
    "entries": "rho, the share correctly rounded and the error ratio of a handful of entries are "
    "one rounding's luck",
    "even entropy": "the gradient of the entropy of nearly even classes, p (log p + entropy), "
    "cancels, so that more of it lies beside a tie",
    "near tie": "logits closer than their float32 error are equal, or the other way round",
    "float16 range": "dz has room to grow 32-fold, results end at 65504 (docs/numerics.md)",
    "A1, next to a boundary": "two float64 results on either side of a rounding boundary of the "
    "output's dtype (docs/numerics.md, Audit mode)",
    "A3": "its 2 ULP were measured on the logits of `logit_sets`. Others leave them in both "
    "backends: 2.6 with 31 classes and a standard deviation of 1, up to 4.25 with 2 to 8 classes. "
    "Their lse is held to the 4 ULP of A2, of |m| + log S",
    "A4, divided": "A4 is of logits that are given: a temperature or smoothing rounds them again",
    "A4, float64": "the oracle, float64 itself, does not put the rounding of z - m back",
    "others, softcap": "1 - tanh^2, which autograd takes, has no digits where the cap saturates",
    "others, class weights": "optax has none",
}


@dataclass(frozen=True)
class Drawn:
    """One case: what is called, with what, and by whom."""

    number: int
    seed: int
    function: str
    case: Case
    backends: tuple[str, ...] = ("torch", "jax")
    leading: int = 0  # a dimension put before the tokens, of which it is a divisor
    offset: float = 0.0  # of all logits, by the bias where there is a head
    ties: bool = False
    masked: float = 0.0  # share of the classes that are at `mask`
    mask: float = -np.inf
    poison: bool = False  # NaN in what is ignored
    chunk: int | None = None
    audit: bool = False
    used: tuple[bool, ...] = (True, True, True)  # outputs with a gradient
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        shown = [f"{self.function} on {'+'.join(self.backends)}, {self.case.text}"]
        names = ("leading", "offset", "ties", "poison", "chunk", "audit")
        shown += [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        if self.masked:
            shown.append(f"{self.masked:.0%} at {self.mask:g}")
        if self.function != "chunked_nll":
            shown.append(f"used={''.join('01'[u] for u in self.used)}")
        return " ".join(shown)


def number32(x: float) -> float:
    """A number that float32 has, so that both backends and the oracle compute with the same."""
    return float(np.float32(x))


def draw(seed: int, number: int) -> Drawn:
    """Case `number` of a seed."""
    shared = number % 2 == 0
    form = np.random.default_rng([seed, 0, number // PERIOD] if shared else [seed, 1, number])
    data = np.random.default_rng([seed, 2, number])

    def chance(rng: np.random.Generator, share: float) -> bool:
        return bool(rng.random() < share)

    # What a compiler must know.
    function = str(form.choice(list(RUN), p=[0.5, 0.25, 0.25]))
    head, nll = function != "vocab_parallel_logprobs", function == "chunked_nll"
    tokens = int(form.integers(0 if head else 1, 72) if chance(form, 0.85) else 200)
    vocab = int(form.integers(1, 300) if chance(form, 0.9) else form.integers(1000, 5000))
    if chance(form, 0.1):
        vocab = int(form.integers(1, 5))
    leading = int(form.integers(1, 5)) if tokens and chance(form, 0.3) else 0
    tokens = tokens // leading * leading if tokens >= leading > 0 else tokens
    leading = leading if tokens >= leading else 0
    dtype = str(form.choice(DTYPES))
    audit = dtype != "float64" and chance(form, 0.25)
    options: dict[str, Any] = {}
    reduction = str(form.choice(["mean", "sum"]))
    denominator = nll and chance(form, 0.2)
    if nll:
        options["reduction"] = reduction
    if nll and chance(form, 0.25):
        options["z_loss"] = number32(10 ** form.uniform(-5, -1.5))
    if function != "chunked_logprobs" and chance(form, 0.3):
        options["label_smoothing"] = float(form.choice([0.1, 0.3, 1.0]))
    if head and chance(form, 0.25):
        options["softcap"] = number32(10 ** form.uniform(-0.3, 1.7))
    scaled, heated = head and chance(form, 0.3), chance(form, 0.2)
    used = tuple(chance(form, 0.6) for _ in range(3))
    case = Case(
        str(number),
        tokens,
        int(form.integers(1, 72)) if head else tokens,
        vocab,
        bias=head and chance(form, 0.5),
        where=chance(form, 0.3),
        token_weights=nll and chance(form, 0.3),
        class_weights=nll and chance(form, 0.25),
        token_temperature=chance(form, 0.25),
        layout="HV" if head and chance(form, 0.3) else "VH",
        dtype=dtype,
    )
    if chance(form, 0.15):
        options["ignore_index"] = int(form.choice([-1, 0]))
    # What it need not.
    if scaled:
        sign = -1 if chance(data, 0.2) else 1
        options["logit_scale"] = number32(sign * 10 ** data.uniform(-0.7, 0.5))
    if heated:
        options["temperature"] = number32(10 ** data.uniform(-0.5, 0.5))
    if denominator:
        options["denominator"] = number32(10 ** data.uniform(-1, 5))
    plain = chance(data, 0.4)  # within the contract's data
    std = 10 ** (data.uniform(-0.5, 0.75) if plain else data.uniform(-3, 1.78))
    drawn = Drawn(
        number,
        seed,
        function,
        replace(
            case,
            std=float(std),
            ignored=float(data.choice([0.0, 0.2, 0.2, 0.7] if plain else [0.0, 0.3, 0.9, 1.0])),
            confident=float(data.choice([0.0, 0.5] if plain else [0.0, 0.5, 1.0])),
            options=options,
        ),
        ("torch", "jax") if shared else ("torch",),
        leading,
        chunk=int(form.choice([8, 16, 40, 64])) if chance(form, 0.5) else None,
        audit=audit,
        used=used if any(used) else (True, False, False),
        poison=chance(data, 0.2),
    )
    if plain:
        return drawn
    can_offset, can_mask = case.bias or not head, "label_smoothing" not in options
    can_mask &= "softcap" not in options and options.get("logit_scale", 1.0) > 0
    lowest = -1e300 if dtype == "float64" else float(np.finfo(np.float32).min)
    lowest = -5e4 if dtype == "float16" else -3.3e38 if dtype == "bfloat16" else lowest
    return (
        replace(
            drawn,
            offset=float(data.choice([10.0, -300.0, 1e4, -1e4])) if chance(data, 0.2) else 0.0,
            ties=chance(data, 0.2),
            masked=float(data.uniform(0.05, 0.95)) if chance(data, 0.25) and can_mask else 0.0,
            mask=float(data.choice([-np.inf, lowest])),
        )
        if can_offset
        else replace(drawn, ties=chance(data, 0.2))
    )


def problem_of(d: Drawn) -> Problem:
    """The arrays of a case. Given logits are a head whose states are the unit matrix."""
    rng = np.random.default_rng([d.seed, 3, d.number])
    dtype = dtype_named(d.case.dtype)
    p = build(d.case, d.seed)
    vocab, tokens = d.case.vocab, d.case.tokens
    alive = np.ones(vocab, bool)
    if d.masked:
        alive = rng.random(vocab) >= d.masked
        alive[rng.integers(vocab)] = True
    kept = np.flatnonzero(alive)
    if d.function == "vocab_parallel_logprobs":
        logits = rng.standard_normal((tokens, vocab)) * d.case.std + d.offset
        if d.ties:
            logits = np.round(logits / d.case.std * 2) * d.case.std / 2
        logits = np.where(alive, logits, d.mask).astype(dtype)
        top = rng.random(tokens) < d.case.confident
        best = logits.astype(np.float64).argmax(axis=1)
        labels = np.where(top & (p.labels >= 0), best, p.labels)
        p = p.changed(weight=np.ascontiguousarray(logits.T), labels=labels, bias=None)
    elif d.ties:
        own = rng.integers(0, max(vocab // 2, 1), vocab)  # each class is one of half of them
        tied = p.weight[:, own] if d.case.layout == "HV" else p.weight[own]
        p = p.changed(
            weight=np.ascontiguousarray(tied), bias=p.bias if p.bias is None else p.bias[own]
        )
    if p.bias is not None:
        bias = np.where(alive, p.bias.astype(np.float64) + d.offset, d.mask)
        p = p.changed(bias=bias.astype(dtype))
    labels = np.where(p.labels >= 0, kept[p.labels % len(kept)], p.labels) if d.masked else p.labels
    labels = np.where(labels < 0, p.options.get("ignore_index", -100), labels)
    p = p.changed(labels=labels.astype(np.int32))
    if p.token_weights is not None:
        # Some tokens of weight 0. A sum that cancels has no digits to divide by.
        weights = np.where(rng.random(tokens) < 0.1, np.float32(0), p.token_weights)
        mean = p.options.get("reduction") == "mean" and "denominator" not in p.options
        p = p.changed(token_weights=np.abs(weights) if mean else weights)
    if d.poison and d.function != "vocab_parallel_logprobs":
        p = p.changed(hidden=np.where(p.valid[:, None], p.hidden, dtype.type(np.nan)))
    return p.changed(text=d.text)


def shaped(p: Problem, leading: int) -> Problem:
    """With a dimension before that of the tokens."""
    if not leading:
        return p

    def cut(x: Any) -> Any:
        per_token = isinstance(x, np.ndarray) and x.shape[:1] == p.labels.shape
        return x.reshape(leading, -1, *x.shape[1:]) if per_token else x

    options = p.options | {"temperature": cut(p.options.get("temperature", 1.0))}
    arrays = {name: cut(getattr(p, name)) for name in ("labels", "where", "token_weights")}
    return p.changed(hidden=cut(p.hidden), options=options, **arrays)


# --- What is right, and how far a correct result may be from it -----------------------------------


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


GRADIENTS = ("d_hidden", "d_weight", "d_bias")


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
    s = softmax(p.hidden, p.weight, p.labels, p.bias, p.where, *shared)
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


# --- What is held -------------------------------------------------------------------------------


class Findings(parity_findings.Findings):
    """With the checks that were left out, by name."""

    def __init__(self, left_out: Counter[str]) -> None:
        super().__init__(("torch", "jax"))
        self.left_out = left_out

    def claims(self, name: str, holds: bool) -> bool:
        """Whether to go on; False is counted under the name."""
        assert name in UNCLAIMED
        self.left_out[name] += not holds
        return holds

    def other(self, whose: str, quantity: str, metric: str, value: float, bound: float, case: str):
        """The oracle against a loss that is not ours; its bounds are those of test_reference."""
        passed = bool(value <= bound)
        self.measurements.append(
            Measurement("oracle", whose, case, quantity, metric, value, bound, passed, 1)
        )


def hold(d: Drawn, runs: Mapping[str, Callable[..., Any]], left_out: Counter[str]) -> list[str]:
    """Sentences of what falls short."""
    given, findings = problem_of(d), Findings(left_out)
    upstream = None
    if d.function != "chunked_nll":
        drawn = upstream_of(given, d.seed + d.number)
        upstream = Upstream(*(g if use else None for g, use in zip(drawn, d.used)))
    truth = truth_of(d, given, upstream)
    if not findings.claims("float16 range", truth.fits):
        return []
    called = shaped(given, d.leading)
    inputs: list[Any] = [called]
    if upstream is not None:
        cut = called.labels.shape
        inputs.append(Upstream(*(None if g is None else g.reshape(cut) for g in upstream)))
    more: dict[str, Any] = {"audit": d.audit}
    if d.function == "vocab_parallel_logprobs":
        more["label_smoothing"] = given.options.get("label_smoothing", 0.0)
    outcomes = {}
    for backend in d.backends:
        call = partial(runs[d.function], backend, *inputs, **more)
        outcomes[backend] = outcome = call(chunk_tokens=d.chunk)
        _held(findings, d, given, truth, backend, outcome)
        if d.chunk is not None and backend == "torch" and not d.audit:
            _same_chunks(findings, d, outcome, call())
    if len(outcomes) == 2:
        _between(findings, d, truth, *outcomes.values())
    _others(findings, d, truth, upstream)
    return failures(findings.measurements)


def _named(d: Drawn, outcome: Any) -> dict[str, Any]:
    """Gradients by name, flat."""
    if d.function == "vocab_parallel_logprobs":
        return {"d_logits": outcome.d_logits.reshape(d.case.tokens, d.case.vocab)}
    found = outcome.gradients()
    return found | {"d_hidden": found["d_hidden"].reshape(d.case.tokens, d.case.hidden)}


def _held(
    findings: Findings, d: Drawn, given: Problem, truth: Truth, backend: str, outcome: Any
) -> None:
    dtype, o, valid = d.case.dtype, truth.values, given.valid
    low = dtype in ROW_OF
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    details: dict[str, Any] = {"backend": backend, "case": d.text}

    def error(value: Any, exact: Any) -> Any:
        """In units of 2^-53 where that is what float64 is held to."""
        if dtype != "float64":
            return value
        return np.where(value == exact, value, exact + (value - exact) * 2.0**29)

    def exact_bits(quantity: str, got: Any, want: Any) -> None:
        findings.check("A0", got, want, quantity=quantity, **details)

    def near(quantity: str, got: Any, exact: Any, scale: Any) -> None:
        row = "A8" if low else "A2"
        got, exact = np.asarray(got, np.float64), np.asarray(exact)
        findings.check(row, error(got, exact), exact, magnitude=scale, quantity=quantity, **details)

    # A0: shapes, dtypes, what is not valid, what is counted
    gradients = _named(d, outcome)
    shape = (d.leading, d.case.tokens // d.leading) if d.leading else (d.case.tokens,)
    seen = {name: getattr(outcome, name) for name in VALUES}
    seen = {name: value for name, value in seen.items() if value is not None}
    wrong = sum(x.dtype != wide or x.shape != shape for x in seen.values())
    inner = {"d_logits": given.weight, "d_bias": given.bias, "d_weight": given.weight}
    rounded = np.float32 if d.audit and "d_logits" in gradients else None
    wrong += sum(
        g.dtype != (rounded or inner.get(name, given.hidden).dtype) for name, g in gradients.items()
    )
    exact_bits("dtypes and shapes", np.int64(wrong), np.int64(0))
    rows = [x.reshape(-1)[~valid] for x in seen.values()]
    rows += [gradients[name][~valid] for name in ("d_hidden", "d_logits") if name in gradients]
    for x in rows:
        exact_bits("what is not valid", x, np.zeros_like(x))
    sure = valid & ~truth.near_tie
    findings.left_out["near tie"] += int((valid & truth.near_tie).sum())
    correct = outcome.correct.reshape(-1)
    exact_bits("correct", correct[sure], o.correct[sure])
    exact_bits("correct, not valid", correct[~valid], o.correct[~valid])
    if d.function == "chunked_nll":
        count = np.asarray(outcome.num_tokens).astype(np.int64)
        exact_bits("token count", count, np.int64(o.num_tokens))
        predicted = outcome.predicted.reshape(-1)
        exact_bits("predicted", predicted[sure | ~valid], o.predicted[sure | ~valid])
        if not valid.any():
            nothing = [np.ravel(outcome.loss), *(np.ravel(g) for g in gradients.values())]
            for x in nothing:
                exact_bits("loss and gradients of nothing", x, np.zeros_like(x))
        # A2, A8
        terms = truth.loss_terms
        if findings.claims("data", truth.claimed):
            terms = o.loss_magnitude
        near("loss", outcome.loss, o.loss, terms)
        near("z-loss", outcome.z_loss, o.z_loss, truth.loss_terms)
        near("weight sum", outcome.weight_sum, o.weight_sum, truth.weight_terms)
    scale = np.maximum(np.abs(o.lse), truth.terms)
    for name, got in seen.items():
        near(name, got.reshape(-1)[valid], getattr(o, name)[valid], scale[valid])
    exact_bits("above 0", np.int64((outcome.logprobs > 0).sum()), np.int64(0))
    if d.function == "vocab_parallel_logprobs" and not low:
        _given(findings, d, truth, error, seen, gradients["d_logits"], details)
    # A5, A6, A7, A16
    for name, got in gradients.items():
        oracle, bound, magnitude = truth.gradients[name]
        if got.dtype.name in ROW_OF:
            row = ROW_OF[got.dtype.name]
            share = findings.claims("data", truth.claimed)
            share = share and findings.claims("even entropy", not truth.even)
            share = share and findings.claims("entries", got.size >= 4096)
            metrics = [b.metric for b in ROWS[row].bounds if share or not b.at_least]
            findings.check(
                row, got, oracle, magnitude=magnitude, metrics=metrics, quantity=name, **details
            )
            continue
        row = "A6" if name in ("d_weight", "d_bias") else "A5"
        claimed = findings.claims("data", truth.claimed and not low)
        claimed = claimed and findings.claims("entries", got.size >= 256)
        findings.check(
            row,
            error(got.astype(np.float64), oracle),
            oracle,
            bound,
            metrics=None if claimed else ("tau",),
            quantity=name,
            **details,
        )


def _given(
    findings: Findings, d: Drawn, truth: Truth, error: Callable[[Any, Any], Any],
    seen: dict[str, Any], d_logits: Any, details: dict[str, Any],
) -> None:  # fmt: skip
    """A3 and A4 of logits that are given."""
    o, valid = truth.values, truth.p.valid
    z = truth.p.weight.T / np.reshape(truth.p.options.get("temperature", 1.0), (-1, 1))
    peak = z.max(axis=1)
    if findings.claims("A3", truth.claimed and d.case.std >= 3):
        lse = error(seen["lse"].reshape(-1).astype(np.float64), o.lse)
        scale = np.maximum(np.abs(peak), o.lse - peak)
        findings.check("A3", lse[valid], o.lse[valid], magnitude=scale[valid], **details)
    plain = not {"temperature", "label_smoothing"} & set(truth.p.options)
    if not findings.claims("A4, divided", plain):
        return
    if not findings.claims("A4, float64", d.case.dtype != "float64"):
        return
    tiny = 2.0 ** (-1022 if d.case.dtype == "float64" else -126)
    pairs = [("log-probability", seen["logprobs"].reshape(-1).astype(np.float64), o.logprobs)]
    if d.used == (True, False, False):
        target = np.where(valid, truth.p.labels, 0)[:, None]
        pairs.append(
            ("target gradient", *(np.take_along_axis(x.astype(np.float64), target, 1)[:, 0]
                                  for x in (d_logits, truth.gradients["d_logits"][0])))
        )  # fmt: skip
    for name, got, exact in pairs:
        normal = valid & (np.abs(exact) >= 4 * tiny)
        findings.check("A4", error(got, exact)[normal], exact[normal], quantity=name, **details)


def _same_chunks(findings: Findings, d: Drawn, outcome: Any, whole: Any) -> None:
    """A10."""
    for name in (*VALUES, "correct", "predicted", "d_hidden", "d_logits"):
        got, want = getattr(outcome, name, None), getattr(whole, name, None)
        if got is not None:
            findings.check("A10", got, want, backend="torch", case=d.text, quantity=name)


def _between(findings: Findings, d: Drawn, truth: Truth, ours: Any, theirs: Any) -> None:
    """A1 in audit mode, A9 elsewhere."""
    details: dict[str, Any] = {"backend": "torch/jax", "case": d.text}
    gradients = _named(d, ours), _named(d, theirs)
    if not d.audit:
        if not findings.claims("data", truth.claimed) or d.case.dtype == "float64":
            return
        for name, got in gradients[0].items():
            if not findings.claims("entries", got.size >= 4096):
                continue
            metrics = parity_findings.BETWEEN
            findings.check(
                "A9",
                got,
                truth.gradients[name][0],
                other=gradients[1][name],
                metrics=metrics[d.case.dtype],
                quantity=name,
                **details,
            )
        return
    for name in ours._fields:
        got, other = getattr(ours, name), getattr(theirs, name)
        if got is None:
            continue
        if name == "num_tokens":
            got, other = got.astype(np.int64), other.astype(np.int64)
        if name in ("correct", "predicted"):  # equal classes may have unequal logits
            got, other = (x.reshape(-1)[~truth.near_tie] for x in (got, other))
        if name in gradients[0]:
            got, other = gradients[0][name], gradients[1][name]
            # Each is what the oracle rounds to, if it were off by the float64 error.
            oracle, bound, _ = truth.gradients[name]
            stray = 2 * tau_bound("A6") * 2.0**-53 * bound
            least, most = (
                round_to(round_to(x, "float32"), got.dtype.name)
                for x in (oracle - stray, oracle + stray)
            )
            x, y = got.astype(np.float64), other.astype(np.float64)
            excused = (x != y) & (np.minimum(x, y) >= least) & (np.maximum(x, y) <= most)
            findings.left_out["A1, next to a boundary"] += int(excused.sum())
            got = np.where(excused, other, got)
        findings.check("A1", got, other, quantity=name, **details)


# --- The oracle against the losses of others ------------------------------------------------------


def _others(findings: Findings, d: Drawn, truth: Truth, upstream: Upstream | None) -> None:
    p = truth.p
    if not p.labels.size or not p.valid.any():
        return
    cap = p.options.get("softcap")
    reach = d.case.std * abs(p.options.get("logit_scale", 1.0)) * 4 + abs(d.offset)
    if not findings.claims("others, softcap", cap is None or reach <= 2 * cap):
        return
    values = [("torch", partial(torch_per_token, upstream) if upstream else torch_full_logits)]
    if "jax" in d.backends and findings.claims("others, class weights", p.class_weights is None):
        values.append(("optax", partial(optax_full_logits, upstream)))
    o, names = oracle_of(p, upstream), GRADIENTS if p.bias is not None else GRADIENTS[:2]
    for whose, others in values:
        loss, gradients = others(p)
        if upstream is None:
            scale = max(truth.loss_terms, 2.0**-900)
            distance = float(ulp_distance(o.loss, np.asarray(loss), "float64", scale))
            findings.other(whose, "loss", "ULP", distance, 2 * VALUE_ULP, d.text)
        for name, got in zip(names, gradients):
            bound, magnitude = (getattr(o, name.replace("d_", x)) for x in ("bound_", "magnitude_"))
            # The length of the sums, which the bound leaves out: equal terms are rounded alike.
            length = d.case.vocab if name == "d_hidden" else d.case.tokens
            bound = bound + length * magnitude + 2.0**-960
            value = units(np.asarray(got), getattr(o, name), bound)
            most = 2 * tau_bound("A5" if name == "d_hidden" else "A6")
            findings.other(whose, name, "tau", value, most, d.text)


def torch_per_token(upstream: Upstream, p: Problem) -> tuple[float, list[Any]]:
    """Per-token outputs from full logits, by `F.cross_entropy`, `logsumexp` and `softmax`."""
    import torch

    o = p.options
    leaves = [
        torch.tensor(x, requires_grad=True) for x in (p.hidden, p.weight, p.bias) if x is not None
    ]
    z = leaves[0] @ (leaves[1] if o.get("weight_layout") == "HV" else leaves[1].T)
    z = o.get("logit_scale", 1.0) * (z + leaves[2] if len(leaves) == 3 else z)
    if o.get("softcap") is not None:
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    z = (z / torch.as_tensor(o.get("temperature", 1.0)).double().reshape(-1, 1))[p.valid]
    labels = torch.tensor(p.labels[p.valid]).long()
    logprobs = -torch.nn.functional.cross_entropy(
        z, labels, reduction="none", label_smoothing=o.get("label_smoothing", 0.0)
    )
    entropy = -(z.softmax(1) * z.log_softmax(1)).sum(1)
    outputs = (logprobs, entropy, z.logsumexp(1))
    total = sum(
        (torch.tensor(g[p.valid]).double() * x).sum()
        for g, x in zip(upstream, outputs)
        if g is not None
    )
    return 0.0, [g.numpy() for g in torch.autograd.grad(total, leaves)]


def optax_full_logits(upstream: Upstream | None, p: Problem) -> tuple[float, list[Any]]:
    """Loss or per-token outputs from full logits, by optax."""
    import jax
    import jax.numpy as jnp

    o = p.options
    with jax.enable_x64(True):
        divisor = None
        if upstream is None:
            divisor = o.get("denominator", 1.0 if o["reduction"] == "sum" else None)
        leaves = [jnp.asarray(x) for x in (p.hidden, p.weight, p.bias) if x is not None]
        weights = np.ones(p.labels.size) if p.token_weights is None else p.token_weights
        weights = np.where(p.valid, weights.astype(np.float64), 0.0)
        given = () if upstream is None else tuple(
            np.where(p.valid, g.astype(np.float64), 0.0) if g is not None else None
            for g in upstream
        )  # fmt: skip
        temperature = np.asarray(o.get("temperature", 1.0), np.float64).reshape(-1, 1)
        loss, gradients = _optax_gradients()(
            leaves,
            np.where(p.valid, p.labels, 0),
            weights,
            given,
            temperature,
            o.get("logit_scale", 1.0),
            weights.sum() or 1.0 if divisor is None else divisor,
            p.upstream,
            softcap=o.get("softcap"),
            smoothing=o.get("label_smoothing", 0.0),
            z_loss=o.get("z_loss", 0.0),
            turned=o.get("weight_layout") == "HV",
        )
        return float(loss), [np.asarray(g) for g in gradients]


_COMPILED: list[Any] = []


def _optax_gradients() -> Any:
    """Compiled for each form; JAX is loaded by the first call."""
    if _COMPILED:
        return _COMPILED[0]
    import jax
    import optax

    def loss(
        leaves: Any, labels: Any, weights: Any, given: Any, temperature: Any, scale: Any,
        divisor: Any, *, softcap: Any, smoothing: float, z_loss: float, turned: bool,
    ) -> Any:  # fmt: skip
        z = leaves[0] @ (leaves[1] if turned else leaves[1].T)
        z = scale * (z + leaves[2][None, :] if len(leaves) == 3 else z)
        z = z if softcap is None else softcap * jax.numpy.tanh(z / softcap)
        z = z / temperature
        lse = jax.nn.logsumexp(z, axis=1)
        if smoothing:
            wanted = optax.smooth_labels(jax.nn.one_hot(labels, z.shape[1]), smoothing)
            nll = optax.softmax_cross_entropy(z, wanted)
        else:
            nll = optax.softmax_cross_entropy_with_integer_labels(z, labels)
        if not given:
            return (weights * (nll + z_loss * lse**2)).sum() / divisor
        entropy = -(jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(axis=1)
        return sum((g * x).sum() for g, x in zip(given, (-nll, entropy, lse)) if g is not None)

    def both(leaves: Any, *rest: Any, **options: Any) -> Any:
        *rest, upstream = rest
        value, gradients = jax.value_and_grad(loss)(leaves, *rest, **options)
        return value, [g if rest[2] else upstream * g for g in gradients]

    static = ("softcap", "smoothing", "z_loss", "turned")
    _COMPILED.append(jax.jit(both, static_argnames=static))
    return _COMPILED[0]


# --- The run ------------------------------------------------------------------------------------


class Report(NamedTuple):
    """How many cases and calls, how many checks were left out, sentences of what falls short."""

    calls: Counter[str]
    left_out: Counter[str]
    failed: list[str]


def simpler(d: Drawn) -> Iterator[Drawn]:
    """The same case with one thing less."""
    plain = Case(d.case.id, d.case.tokens, d.case.hidden, d.case.vocab)
    for name in ("offset", "ties", "masked", "poison", "chunk", "leading"):
        if getattr(d, name):
            yield replace(d, **{name: Drawn.__dataclass_fields__[name].default})
    for name in d.case.options:
        if name != "reduction":
            rest = {k: v for k, v in d.case.options.items() if k != name}
            yield replace(d, case=replace(d.case, options=rest))
    for name in ("where", "token_weights", "class_weights", "token_temperature"):
        if getattr(d.case, name):
            yield replace(d, case=replace(d.case, **{name: False}))
    for name in ("std", "ignored", "confident", "layout"):
        value = 0.0 if name == "ignored" else getattr(plain, name)
        if getattr(d.case, name) != value:
            yield replace(d, case=replace(d.case, **{name: value}))
    if d.case.bias and not d.offset and not d.masked:
        yield replace(d, case=replace(d.case, bias=False))
    if d.leading:
        return
    for name in ("tokens", "vocab", "hidden"):
        if name == "hidden" and d.function == "vocab_parallel_logprobs":
            continue
        size = getattr(d.case, name)
        for smaller in (size // 2, size - 1):
            if smaller >= 1:
                yield replace(d, case=replace(d.case, **{name: smaller}))


def shrunken(d: Drawn, said: str, again: Callable[[Drawn], list[str]], most: int = 60) -> str:
    """The simplest case found that falls short of the same row and quantity."""

    def key(sentence: str) -> str:
        return sentence.split(": ", maxsplit=1)[0]

    while most > 0:
        for candidate in simpler(d):
            most -= 1
            found = [s for s in again(candidate) if key(s) == key(said)]
            if found:
                d, said = candidate, found[0]
                break
            if most <= 0:
                break
        else:
            break
    return said


def attempt(runs: Mapping[str, Callable[..., Any]], left_out: Counter[str], d: Drawn) -> list[str]:
    """As `hold`; what is raised falls short too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about inf and NaN
        try:
            return hold(d, runs, left_out)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was looked for
            return [f"raised: {type(error).__name__}: {error} ({d.text})"]


def fuzz(
    seed: int,
    numbers: Iterable[int],
    *,
    seconds: float = np.inf,
    runs: Mapping[str, Callable[..., Any]] = RUN,
    say: Callable[[str], None] = print,
    shrink: bool = True,
) -> Report:
    """Cases of a seed by their numbers, until time is up. The caller sets what `main` sets."""
    report, count = Report(Counter(), Counter(), []), 0
    started = time.monotonic()
    for number in numbers:
        if time.monotonic() - started >= seconds:
            break
        d = draw(seed, number)
        report.calls["cases"] += 1
        report.calls.update(f"{d.function} in {backend}" for backend in d.backends)
        found = attempt(runs, report.left_out, d)
        if found:
            count += 1
            say(f"--seed {seed} --only {number}: {found[0]}")
            if shrink:
                say("  shrunken: " + shrunken(d, found[0], partial(attempt, runs, Counter())))
            for more in found[1:6]:
                say(f"  and {more}")
        report.failed.extend(f"--seed {seed} --only {number}: {text}" for text in found)
        if report.calls["cases"] % 1000 == 0:
            spent = time.monotonic() - started
            say(f"{report.calls['cases']} cases, {count} failed, {spent:.0f} s")
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Random calls against the oracle.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="so many, whatever time they take")
    parser.add_argument("--seconds", type=float, help="60 if nothing else is said")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case of the seed")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for simpler cases")
    asked = parser.parse_args(arguments)
    numbers: Iterable[int] = itertools.count()
    seconds = np.inf if asked.seconds is None else asked.seconds
    if asked.only is not None:
        numbers = [asked.only]
    elif asked.cases is not None:
        numbers = range(asked.cases)
    elif asked.seconds is None:
        seconds = 60.0
    # What the contract's rows hold under; JAX reads it when it is first loaded.
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_allow_excess_precision=false".strip()
    started = time.monotonic()
    with contract_settings(("torch", "jax")):
        report = fuzz(asked.seed, numbers, seconds=seconds, shrink=not asked.no_shrink)
    spent = time.monotonic() - started
    for name, count in sorted(report.left_out.items()):
        print(f"{count:7d}  left out, {name}: {UNCLAIMED[name]}")
    for name, count in sorted(report.calls.items()):
        print(f"{count:7d}  {name}")
    rate = report.calls["cases"] / spent
    failed = {line.split(":")[0] for line in report.failed}
    print(f"seed {asked.seed}: {len(failed)} failed, {spent:.0f} s, {rate:.1f} cases a second")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
