"""Every k steps of a run, a step's loss and head gradient computed a second time: what both
backends' `CrossCheck` share. Frameworks are loaded on demand.

Shapes: N tokens, K of them that are compared, V vocabulary, H hidden width.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.checks.crosscheck import SAMPLE, check_schedule
from xentlib.contract import BITS, ROW_OF, Bound, Measurement, check, failures
from xentlib.tools.harness.findings import GRADIENT_ROWS
from xentlib.tools.harness.problems import Problem
from xentlib.tools.recompute import Recomputed, Sample
from xentlib.tools.recompute.call import Kit, Returned
from xentlib.ulp import dtype_named, round_to

__all__ = [
    "CheckedCall",
    "CheckedStep",
    "CrossCheckError",
    "CrossCheckWarning",
    "Schedule",
]

Array = npt.NDArray[Any]
NAMES = {"low_in": "a", "low_out": "b"}  # as `LowRankHead` has them
UNLESS_CANCELLED = ("bf16 ULP unless cancelled", "fp16 ULP unless cancelled")
LARGEST_FLOAT16 = 65504.0
# Of the errors of a probe, which add up in quadrature.
PROBED = Bound("tau", 8)
# float32 numbers below are 0 on devices that flush them, of which a step may be made.
SMALLEST = 2.0**-126
log = logging.getLogger("xentlib.crosscheck")


class CrossCheckWarning(UserWarning):
    """A row of the contract is exceeded in a checked step."""


class CrossCheckError(RuntimeError):
    """The same, where `exceeded="raise"`; or a checked step in which nothing could be checked."""


class CheckedCall:
    """One call of a step. Of the float64 oracle what was measured, as soon as it can be; for the
    other backend what it is to be given, in arrays of NumPy."""

    def __init__(self, problem: Problem, gemm_dtype: str, returned: Returned) -> None:
        vocab = problem.weight.shape[problem.vocab_axis]
        sizes = f"N={len(problem.labels)} H={problem.hidden.shape[-1]} V={vocab}"
        self.text, self.gemm_dtype = f"{sizes} {gemm_dtype}", gemm_dtype
        self.returned, self.problem = returned, problem
        self.upstream, self.backward, self.seconds = 1.0, False, 0.0
        self.gradients: dict[str, Any] = {}

    @property
    def finite(self) -> bool:
        """Of what a loss is made of; a bias may be -inf, and a token that is not valid anything."""
        problem = self.problem
        given = (problem.hidden[problem.valid], problem.weight, self.upstream)
        return all(np.isfinite(np.asarray(x, np.float32)).all() for x in given)

    def receive(self, upstream: float, gradients: dict[str, Any], head: float = 0.0) -> None:
        """What the backward has made, by the names of arguments."""
        self.upstream, self.backward = upstream, True
        self.problem = self.problem.changed(upstream=upstream)
        self.gradients = {f"d {name}": x for name, x in gradients.items() if x is not None}

    def measurements(self, backend: str, by: str, case: str) -> list[Measurement]:
        return with_backend(self, by, backend=backend, case=f"{case}: {self.text}")


class RecomputedCall(CheckedCall):
    """With the float64 oracle: computed at once, so that nothing of the call has to be kept."""

    def __init__(
        self, kit: Kit, problem: Problem, gemm_dtype: str, returned: Returned, **how: Any
    ) -> None:
        super().__init__(problem, gemm_dtype, returned)
        start = time.perf_counter()
        self.turned = problem.vocab_axis == 1
        self.kit, self.again = kit, Recomputed(kit, problem, gemm_dtype, returned, **how)
        del self.problem, self.returned
        again, low = self.again, gemm_dtype in ROW_OF
        self.measured: list[Measurement] = []
        if again.finite:
            self.hold_values(again, low)
        self.seconds = time.perf_counter() - start

    def hold_values(self, again: Recomputed, low: bool) -> None:
        row = "A8" if low else "A2"
        count = np.asarray(len(again.valid), np.int64)
        self.hold("A0", again.num_tokens.astype(np.int64), count, quantity="token count")
        loss, scale = again.loss_of_tokens
        self.hold(row, again.loss, loss, magnitude=scale, quantity="loss")
        value, _, scale = again.sampled_logprobs
        given = again.logits_logprobs
        self.hold(row, given, value, magnitude=scale, quantity="log-probability")
        for name, (given, value, bound) in again.of_tokens().items():
            self.hold("A5", given, value, bound, metrics=("tau",), quantity=name)

    @property
    def finite(self) -> bool:
        return self.again.finite and bool(np.isfinite(self.upstream))

    def hold(self, *given: Any, **named: Any) -> None:
        self.measured += check(*given, **named)

    def receive(self, upstream: float, gradients: dict[str, Any], head: float = 0.0) -> None:
        """`head`: the upstream gradient of d weight and d bias, where that is another."""
        self.upstream, self.backward = upstream, True
        of_head, start = head or upstream, time.perf_counter()
        if not self.finite or not np.isfinite(of_head):
            return
        again, kit = self.again, self.kit
        for name, given in gradients.items():
            if given is None:
                continue
            if name == "low_in":
                if again.ranks.whole_a:
                    self.all_rows("a", *again.low_in(given, of_head), len(given))
                continue
            gradient = given.T if name == "weight" and self.turned else given
            rows = kit.array(again.places if name == "hidden" else again.rows)
            by = upstream if name == "hidden" else of_head
            self.hold_sample(name, kit.host(gradient[rows]), getattr(again, f"d_{name}"), by)
            if name == "hidden":
                unequal = kit.not_zero(gradient[kit.array(again.invalid)])
                self.measured.append(
                    BITS.measured(
                        "A0",
                        unequal,
                        len(again.invalid),
                        quantity="d hidden of invalid rows",
                        backend="",
                        case="",
                    )
                )
                continue
            worst, row = again.probe(name, gradient, by, self.lost(name))
            self.all_rows(NAMES.get(name, name), worst, row, len(gradient))
        self.seconds += time.perf_counter() - start

    def all_rows(self, name: str, worst: float, row: int, count: int) -> None:
        of = {"quantity": f"d {name} of all rows", "case": f", the worst is row {row}"}
        self.measured.append(PROBED.measured("A6", worst, count, backend="", **of))

    def hold_sample(self, name: str, given: Array, sample: Sample, by: float) -> None:
        """Of rows of a gradient, entry by entry."""
        value, bound, terms = sample.value * by, sample.bound * abs(by), sample.magnitude
        short = ROW_OF.get(self.gemm_dtype) or ROW_OF.get(given.dtype.name)
        self.hold(
            short or GRADIENT_ROWS.get(f"d_{name}", "A6"),
            without_ends(given, value, self.lost(name)),
            value,
            bound,
            magnitude=terms * abs(by),
            metrics=UNLESS_CANCELLED if short else ("tau",),
            quantity=f"d {NAMES.get(name, name)}",
        )

    def lost(self, name: str) -> float:
        """What numbers below the smallest normal one, which devices flush to 0, may take of an
        entry."""
        again, terms = self.again, 1.0
        count = max(again.count, 1)
        if name == "weight":
            terms = count * again.peak_hidden
        elif name == "hidden":
            terms = again.vocab_size * again.peak_weight
        return SMALLEST * (1.0 + max(terms, count)) * max(1.0, abs(self.upstream))

    def measurements(self, backend: str, by: str, case: str) -> list[Measurement]:
        text = f"{case}: {self.text}"
        return [replace(x, backend=backend, case=text + x.case) for x in self.measured]


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """What a checked step has shown.

    Attributes:
        step: its number.
        measurements: one for each metric of each quantity of each call.
        calls: how many calls were compared.
        seconds: that the comparison took.
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
        tokens: int | None = SAMPLE,
        rows: int | None = SAMPLE,
        exceeded: str = "warn",
        seed: int = 0,
    ) -> None:
        check_schedule(every, against, tokens, rows, exceeded, seed, self.counterpart)
        self.every, self.against, self.tokens, self.rows = every, against, tokens, rows
        self.exceeded = exceeded
        self.random = np.random.default_rng(seed), np.random.default_rng(seed)
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
            if not call.finite:
                left_out.append(f"{number + 1}")
                continue
            case = f"step {step}, call {number + 1} of {len(calls)}"
            measured += call.measurements(self.backend, self.counterpart, case)
        if left_out:
            note = (
                f"call {', '.join(left_out)} of {len(calls)} could not be compared, as its hidden "
                f"states, head or upstream gradient hold inf or NaN"
            )
        seconds = time.perf_counter() - start + sum(call.seconds for call in calls)
        result = CheckedStep(step, tuple(measured), len(calls), seconds, note)
        self.results.append(result)
        log.info("%s", result)
        if not result.passed:
            what = "; ".join([*failures(measured), *([note] if note else [])])
            message = f"cross-check of step {step} with the {self.named}: {what}"
            if self.exceeded == "raise":
                raise CrossCheckError(message)
            warnings.warn(message, CrossCheckWarning, stacklevel=3)
        return result

    def taken_of(
        self, kit: Kit, problem: Problem, gemm_dtype: str, returned: Returned, **parts: Any
    ) -> CheckedCall:
        """A call that was made."""
        if self.against == "other":
            return CheckedCall(problem, gemm_dtype, returned)
        how: dict[str, Any] = {"tokens": self.tokens, "rows": self.rows, "random": self.random}
        return RecomputedCall(kit, problem, gemm_dtype, returned, **how | parts)

    @property
    def named(self) -> str:
        return "float64 oracle" if self.against == "oracle" else f"{self.counterpart} backend"


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
    measured += check(
        "A9", np.asarray(call.returned.loss), loss, metrics=norm, quantity="loss", **details
    )
    for name, given in call.gradients.items():
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
    number = np.asarray(problem.valid.sum(), np.int64)
    got = np.asarray(call.returned.num_tokens).astype(np.int64)
    measured = check("A0", got, number, quantity="token count", **details)
    if "d hidden" in call.gradients:
        rows = call.gradients["d hidden"][~problem.valid]
        of = "d hidden of invalid rows"
        measured += check("A0", rows, np.zeros_like(rows), quantity=of, **details)
    return measured


def rounded(problem: Problem, gemm_dtype: str) -> Problem:
    """Operands as the products take them: under autocast rounded once to its dtype."""
    if gemm_dtype not in ROW_OF:
        return problem
    names = ("hidden", "weight")
    wide = {x: getattr(problem, x) for x in names if getattr(problem, x).dtype.name != gemm_dtype}
    return problem.changed(**{name: round_to(x, gemm_dtype) for name, x in wide.items()})


def without_ends(given: Array, truth: Any, lost: float) -> Array:
    """A gradient with the truth in place of what a format's ends alone make of it: numbers below
    the smallest normal one, and infinities above the largest."""
    wide = np.asarray(given, np.float64)
    with np.errstate(invalid="ignore"):
        ends = np.abs(wide - truth) <= lost
        if given.dtype == np.float16:
            ends |= (wide == np.sign(truth) * np.inf) & (np.abs(truth) > LARGEST_FLOAT16)
    return np.where(ends, truth, wide)
