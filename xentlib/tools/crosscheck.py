"""Every k steps of a run, a step's loss and head gradient computed a second time: what both
backends' `CrossCheck` share. Frameworks are loaded on demand.

Shapes: N tokens, K of them that are compared, V vocabulary, H hidden width.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.checks.crosscheck import check_schedule
from xentlib.contract import ROW_OF, Measurement, check, failures
from xentlib.reference.chunks import divisor_of, summed_reference
from xentlib.tools.harness.findings import GRADIENT_ROWS, check_gradient, part_of
from xentlib.tools.harness.problems import Problem
from xentlib.ulp import dtype_named, round_to

__all__ = [
    "CheckedCall",
    "CheckedStep",
    "CrossCheckError",
    "CrossCheckWarning",
    "Schedule",
]

Array = npt.NDArray[Any]
UNLESS_CANCELLED = ("bf16 ULP unless cancelled", "fp16 ULP unless cancelled")
LARGEST_FLOAT16 = 65504.0
# float32 numbers below are 0 on devices that flush them, of which a step may be made.
SMALLEST = 2.0**-126
log = logging.getLogger("xentlib.crosscheck")


class CrossCheckWarning(UserWarning):
    """A row of the contract is exceeded in a checked step."""


class CrossCheckError(RuntimeError):
    """The same, where `exceeded="raise"`; or a checked step in which nothing could be checked."""


class Whole(NamedTuple):
    """Of all N tokens of a call of which K are compared."""

    problem: Problem  # its hidden states are those of the K tokens
    logprobs: Array
    lse: Array


@dataclass
class CheckedCall:
    """One call of a step: its arguments and what it returned, as NumPy arrays.

    `problem` has the tokens that are compared, flat, `rows` of the call's or all; `gradients` are
    theirs, d weight and d bias those of all. `whole` is of all tokens, for the sum of a loss whose
    other tokens are not compared.
    """

    problem: Problem
    gemm_dtype: str
    rows: Array | None
    loss: Array
    num_tokens: Array
    logprobs: Array  # [K]
    whole: Whole | None = None
    gradients: dict[str, Array] | None = None  # None: no backward came

    @classmethod
    def of(cls, problem: Problem, gemm_dtype: str, rows: Any, *values: Any) -> CheckedCall:
        """Of a problem whose hidden states are those of `rows`, the rest of all tokens: all of
        those rows, divided as before. `values`: loss, number of tokens, log-probabilities, lse."""
        loss, num_tokens, logprobs, lse = values
        vocab = problem.weight.shape[problem.options["weight_layout"] == "HV"]
        sizes = f"N={len(problem.labels)} H={problem.hidden.shape[-1]} V={vocab} {gemm_dtype}"
        problem = problem.changed(text=sizes)
        if rows is None:
            return cls(problem, gemm_dtype, rows, loss, num_tokens, logprobs)
        every = {x: getattr(problem, x) for x in ("where", "token_weights", "class_weights")}
        divisor = divisor_of(problem.labels, {**problem.options, **every})
        options = {**problem.options, "denominator": divisor}
        if np.ndim(options.get("temperature", 1.0)):
            options["temperature"] = options["temperature"][rows]
        per_token = {x: every[x][rows] for x in ("where", "token_weights") if every[x] is not None}
        text = f"{sizes}, {len(rows)} of its tokens"
        some = problem.changed(labels=problem.labels[rows], options=options, text=text, **per_token)
        whole = Whole(problem, logprobs, lse)
        return cls(some, gemm_dtype, rows, loss, num_tokens, logprobs[rows], whole)

    def receive(
        self, upstream: Any, gradients: Mapping[str, Any], cut: Callable[[Any, Any], Array]
    ) -> None:
        """What the backward has made, by the names of arguments; `cut` copies rows, or all. d
        weight and d bias are sums over all tokens, and say nothing of some."""
        self.problem = self.problem.changed(upstream=float(upstream))
        self.gradients = {
            f"d {name}": cut(gradient, self.rows)
            for name, gradient in gradients.items()
            if gradient is not None and (self.rows is None or name == "hidden")
        }


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """What a checked step has shown.

    Attributes:
        step: its number.
        measurements: one for each metric of each quantity of each call.
        calls: how many calls were compared.
        seconds: that the comparison took, without the copies.
        note: why something was not compared, or nothing.
    """

    step: int
    measurements: tuple[Measurement, ...]
    calls: int
    seconds: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.note and all(m.passed for m in self.measurements)

    @property
    def worst(self) -> dict[str, float]:
        """The worst of each quantity and metric, "loss ULP" and "d weight tau" for instance."""
        worst: dict[str, float] = {}
        for m in self.measurements:
            turn = min if m.at_least else max
            name = f"{m.quantity} {m.metric}"
            worst[name] = turn(worst.get(name, m.value), m.value)
        return worst

    def __str__(self) -> str:
        worst = {k: x for k, x in self.worst.items() if x or "unequal" not in k}
        texts = [f"{name} {value:.3g}" for name, value in worst.items()]
        texts += [self.note] if self.note else []
        return f"cross-check of step {self.step}: {', '.join(texts)} ({self.seconds:.2f} s)"


class Schedule:
    """Which steps are checked and how, and what they have shown. See `CrossCheck`."""

    backend = ""
    counterpart = ""

    def __init__(
        self,
        every: int,
        *,
        against: str = "oracle",
        tokens: int | None = None,
        exceeded: str = "warn",
        seed: int = 0,
    ) -> None:
        check_schedule(every, against, tokens, exceeded, seed, self.counterpart)
        self.every, self.against, self.tokens = every, against, tokens
        self.exceeded = exceeded
        self.random = np.random.default_rng(seed)
        self.results: list[CheckedStep] = []
        self.start()

    def start(self) -> None:
        """What a backend keeps beside that."""

    def due(self, step: int) -> bool:
        """Whether a step is checked: the first one is, so that what is wrong shows at once."""
        return step % self.every == 0

    def finish(self, step: int, calls: Sequence[CheckedCall]) -> CheckedStep:
        """Compare the calls of a step; log it, and warn or raise where a row is exceeded."""
        start, measured, left_out, note = time.perf_counter(), [], [], ""
        for number, call in enumerate(calls):
            case = f"step {step}, call {number + 1} of {len(calls)}: {call.problem.text}"
            if not finite(call.problem):
                left_out.append(f"{number + 1}")
                continue
            if self.against == "other":
                measured += with_backend(call, self.counterpart, backend=self.backend, case=case)
            else:
                measured += with_oracle(call, backend=self.backend, case=case)
        if left_out:
            note = (
                f"call {', '.join(left_out)} of {len(calls)} could not be compared, as its hidden "
                f"states, head or upstream gradient hold inf or NaN"
            )
        result = CheckedStep(step, tuple(measured), len(calls), time.perf_counter() - start, note)
        self.results.append(result)
        log.info("%s", result)
        if not result.passed:
            what = "; ".join([*failures(measured), *([note] if note else [])])
            message = f"cross-check of step {step} with the {self.named}: {what}"
            if self.exceeded == "raise":
                raise CrossCheckError(message)
            warnings.warn(message, CrossCheckWarning, stacklevel=3)
        return result

    def chosen(self, labels_N: Array, where_N: Array | None, ignore_index: int) -> Array | None:
        """Indices of the tokens that are compared, ascending; None for all."""
        valid_N = labels_N != ignore_index
        there = np.flatnonzero(valid_N if where_N is None else valid_N & where_N)
        if self.tokens is None or there.size <= self.tokens:
            return None
        return np.sort(self.random.choice(there, self.tokens, replace=False))

    @property
    def named(self) -> str:
        return "float64 oracle" if self.against == "oracle" else f"{self.counterpart} backend"


def finite(problem: Problem) -> bool:
    """Of what a loss is made of; a bias may be -inf, and a token that is not valid anything."""
    rows = np.asarray(problem.hidden, np.float32)[problem.valid]
    head = np.asarray(problem.weight, np.float32)
    return bool(np.isfinite(rows).all() and np.isfinite(head).all()) and np.isfinite(
        problem.upstream
    )


# --- one call -------------------------------------------------------------------------------------


def with_oracle(call: CheckedCall, **details: Any) -> list[Measurement]:
    """One call against the float64 oracle."""
    problem, got = rounded(call.problem, call.gemm_dtype), call.gradients or {}
    low = call.gemm_dtype in ROW_OF
    reference = summed_reference(
        **{name: x for name, x in problem.of_the_oracle.items() if name != "compute_dtype"},
        dz_dtype=call.gemm_dtype if low else "float64",
        head="d weight" in got or "d bias" in got,
    )
    measured, valid, row = exact(call, **details), problem.valid, "A8" if low else "A2"
    # Errors of tokens are independent of each other, so they add up in quadrature.
    spread = np.sqrt(np.square(reference.bound_tokens).sum())
    loss, scale, of = reference.loss, reference.loss_magnitude + spread, "loss"
    if call.whole is not None:
        (loss, scale), of = summed(call, call.whole), "loss of the log-probabilities"
    if loss is not None:
        measured += check(row, call.loss, loss, magnitude=scale, quantity=of, **details)
    logprobs = reference.logprobs[valid]
    scale = np.abs(logprobs) + reference.bound_logprobs[valid]
    given = call.logprobs[valid]
    measured += check(row, given, logprobs, magnitude=scale, quantity="log-probability", **details)
    for name, given in got.items():
        field = name.replace(" ", "_")
        short = ROW_OF.get(call.gemm_dtype) or ROW_OF.get(given.dtype.name)
        measured += check_gradient(
            short or GRADIENT_ROWS[field],
            field,
            without_ends(name, given, part_of(reference, field), problem),
            reference,
            metrics=UNLESS_CANCELLED if short else ("tau",),
            quantity=name,
            **details,
        )
    return measured


def with_backend(call: CheckedCall, by: str, **details: Any) -> list[Measurement]:
    """One call against the other backend, which is given the same numbers in its own arrays."""
    from xentlib.tools.harness.backends import run

    if call.gemm_dtype == "float16" and call.gradients:
        raise CrossCheckError(
            "`against` must be 'oracle' for a head in float16; got 'other', and no row of the "
            "contract holds float16 gradients of two backends to each other."
        )
    problem, dtype = rounded(call.problem, call.gemm_dtype), dtype_named(call.gemm_dtype)
    cast = {name: getattr(problem, name).astype(dtype) for name in ("hidden", "weight")}
    cast["labels"] = problem.labels.astype(np.int32)
    other = run(by, problem.changed(**cast), outputs=(), gradient=bool(call.gradients))
    details["backend"] = f"{details['backend']}/{by}"
    measured = exact(call, **details)
    loss = np.asarray(other.loss)
    norm = ("rho / u",)
    measured += check("A9", call.loss, loss, metrics=norm, quantity="loss", **details)
    for name, given in (call.gradients or {}).items():
        ours, theirs = given, np.asarray(getattr(other, name.replace(" ", "_")))
        row, metrics = "A9", norm
        if "bfloat16" in (call.gemm_dtype, given.dtype.name):
            ours, theirs = (x.astype(dtype_named("bfloat16")) for x in (given, theirs))
            row, metrics = "A19", ("bf16 bit-equal",)
        measured += check(
            row, ours, theirs, other=theirs, metrics=metrics, quantity=name, **details
        )
    return measured


def exact(call: CheckedCall, **details: Any) -> list[Measurement]:
    """A0: the number of valid tokens, and the gradient of the others."""
    problem = call.problem
    every = problem if call.whole is None else call.whole.problem
    number = np.asarray(every.valid.sum(), np.int64)
    got = np.asarray(call.num_tokens).astype(np.int64)
    measured = check("A0", got, number, quantity="token count", **details)
    if call.gradients and "d hidden" in call.gradients:
        rows = call.gradients["d hidden"][~problem.valid]
        of = "d hidden of invalid rows"
        measured += check("A0", rows, np.zeros_like(rows), quantity=of, **details)
    return measured


def summed(call: CheckedCall, whole: Whole) -> tuple[Any, Any]:
    """The loss of all tokens by their own log-probabilities, and its scale; of label smoothing,
    which is of all logits, nothing."""
    options, every = call.problem.options, whole.problem
    if options.get("label_smoothing"):
        return None, None
    labels = np.where(every.valid, every.labels, 0)
    of_class = every.class_weights
    own = np.ones(len(labels)) if of_class is None else of_class[labels].astype(np.float64)
    lse = whole.lse.astype(np.float64)
    terms = options.get("z_loss", 0.0) * lse * lse - own * whole.logprobs.astype(np.float64)
    weights = 1.0 if every.token_weights is None else every.token_weights.astype(np.float64)
    terms = np.where(every.valid, terms * weights, 0.0) / options["denominator"]
    return terms.sum(), np.abs(terms).sum()


def rounded(problem: Problem, gemm_dtype: str) -> Problem:
    """Operands as the products take them: under autocast rounded once to its dtype."""
    if gemm_dtype not in ROW_OF:
        return problem
    names = ("hidden", "weight")
    wide = {x: getattr(problem, x) for x in names if getattr(problem, x).dtype.name != gemm_dtype}
    return problem.changed(**{name: round_to(x, gemm_dtype) for name, x in wide.items()})


def without_ends(name: str, given: Array, truth: Any, problem: Problem) -> Array:
    """A gradient with the truth in place of what a format's ends alone make of it: numbers below
    the smallest normal one, which devices flush to 0, and infinities above the largest."""
    terms = 1.0
    if name == "d weight":
        terms = len(problem.labels) * peak(problem.hidden[problem.valid])
    elif name == "d hidden":
        terms = max(problem.weight.shape) * peak(problem.weight)
    lost = SMALLEST * (1.0 + max(terms, len(problem.labels))) * max(1.0, abs(problem.upstream))
    wide = np.asarray(given, np.float64)
    with np.errstate(invalid="ignore"):
        ends = np.abs(wide - truth) <= lost
        if given.dtype == np.float16:
            ends |= (wide == np.sign(truth) * np.inf) & (np.abs(truth) > LARGEST_FLOAT16)
    return np.where(ends, truth, wide)


def peak(x: Array) -> float:
    return float(np.max(np.abs(np.asarray(x, np.float64)), initial=0.0))
