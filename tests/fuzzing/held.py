"""The rows of the contract that each case is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fuzzing.draw import Drawn
from fuzzing.findings import Findings, gradients_of
from fuzzing.truth import Truth
from helpers.oracle import tau_bound
from xentlib.contract import ROW_OF, SHARES
from xentlib.tools.harness.findings import BETWEEN
from xentlib.tools.harness.problems import Problem
from xentlib.ulp import round_to

VALUES = ("logprobs", "entropy", "lse")


def held(
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
    gradients = gradients_of(d, outcome)
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
    # A5, A6, A7, A16, A19
    for name, got in gradients.items():
        oracle, bound, magnitude = truth.gradients[name]
        if got.dtype.name in ROW_OF:
            row = ROW_OF[got.dtype.name]
            share = findings.claims("data", truth.claimed)
            share = share and findings.claims("even entropy", not truth.even)
            share = share and findings.claims("entries", got.size >= 4096)
            findings.check(row, got, oracle, magnitude=magnitude, quantity=name, **details)
            if share:
                metrics = (SHARES[got.dtype.name],)
                findings.check("A19", got, oracle, metrics=metrics, quantity=name, **details)
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


def same_chunks(findings: Findings, d: Drawn, outcome: Any, whole: Any) -> None:
    """A10."""
    for name in (*VALUES, "correct", "predicted", "d_hidden", "d_logits"):
        got, want = getattr(outcome, name, None), getattr(whole, name, None)
        if got is not None:
            findings.check("A10", got, want, backend="torch", case=d.text, quantity=name)


def between(findings: Findings, d: Drawn, truth: Truth, ours: Any, theirs: Any) -> None:
    """A1 in audit mode, A9 and A19 elsewhere."""
    details: dict[str, Any] = {"backend": "torch/jax", "case": d.text}
    gradients = gradients_of(d, ours), gradients_of(d, theirs)
    if not d.audit:
        if not findings.claims("data", truth.claimed) or d.case.dtype == "float64":
            return
        for name, got in gradients[0].items():
            if not findings.claims("entries", got.size >= 4096):
                continue
            for row, metrics in BETWEEN[d.case.dtype].items():
                findings.check(
                    row,
                    got,
                    truth.gradients[name][0],
                    other=gradients[1][name],
                    metrics=metrics,
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
