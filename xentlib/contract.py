"""The accuracy contract: what is measured, how, and the bound, as data.

u = 2^-24. o = the float64 oracle of `reference/`. Tests, the parity run and the documentation
cite row ids, never a bare tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from xentlib.ulp import FORMATS, bits_unequal, round_to, spacing, ulp_distance

__all__ = [
    "ROWS",
    "ROW_OF",
    "SHARES",
    "Bound",
    "Measurement",
    "Row",
    "U",
    "check",
    "failures",
]

U = 2.0**-24


@dataclass(frozen=True, slots=True)
class Bound:
    """One metric and its bound; `at_least` turns the comparison."""

    metric: str
    value: float
    at_least: bool = False

    def holds(self, measured: float) -> bool:
        """False for NaN, whichever way the comparison goes."""
        return measured >= self.value if self.at_least else measured <= self.value

    def measured(self, row: str, value: float, entries: int, **of: Any) -> Measurement:
        """A number held against it; `of` are backend, case and quantity."""
        fields: dict[str, Any] = {"metric": self.metric, "bound": self.value}
        fields |= {"at_least": self.at_least, "passed": self.holds(value)}
        return Measurement(row=row, value=value, entries=entries, **fields, **of)

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the case it covers, the quantity, its bounds."""

    id: str
    inputs: str
    quantity: str
    bounds: tuple[Bound, ...]

    @property
    def metric(self) -> str:
        return "; ".join(bound.metric for bound in self.bounds)

    @property
    def bound_text(self) -> str:
        return "; ".join(str(bound) for bound in self.bounds)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number held against one bound of the contract."""

    row: str  # contract row id, "A5"
    backend: str  # "torch", "jax" or "torch/jax"
    case: str  # what was computed: sizes, dtypes, options
    quantity: str  # "d hidden"
    metric: str  # "tau", "rho", "ULP", "unequal entries", "bf16 correctly rounded"
    value: float
    bound: float
    passed: bool
    entries: int  # numbers compared
    at_least: bool = False  # the bound is a floor, not a ceiling


BITS = Bound("unequal entries", 0)
TAU_4, TAU_8, RHO_64 = Bound("tau", 4), Bound("tau", 8), Bound("rho / u", 64)
RHO_37 = Bound("rho / u", 37)  # four times the worst of fifty seeds, docs/data/bounds.json
ULP_2, ULP_4, ULP_5 = Bound("ULP", 2), Bound("ULP", 4), Bound("ULP", 5)
RELATIVE, RATIO_4 = Bound("relative", 5e-7), Bound("error ratio", 4)
NO_MUTANT = Bound("mutants passed", 0.0)
# fp16 has three digits more than bf16, so that a float32 sum is beside a tie eight times as often:
# 0.94 % at worst, where bf16 has 0.34 %.
ROUNDED = Bound("bf16 correctly rounded", 0.995, at_least=True)
ROUNDED_FP16 = Bound("fp16 correctly rounded", 0.96, at_least=True)
EQUAL = Bound("bf16 bit-equal", 0.995, at_least=True)
OF_BF16, OF_FP16 = Bound("bf16 ULP unless cancelled", 1), Bound("fp16 ULP unless cancelled", 1)

IN_ORDER = (
    Row(
        "A0",
        "any",
        "counts, masks, dtypes; gradient of invalid rows; loss of no valid token",
        (BITS,),
    ),
    Row(
        "A1",
        "fp32, bf16 or fp16, computed in fp64",
        "every output and gradient, torch against JAX",
        (BITS,),
    ),
    Row("A2", "fp32", "loss", (ULP_4,)),
    Row("A3", "logits given", "lse, ULP of max(|m|, log S)", (ULP_5,)),
    Row("A4", "logits given", "log-probability and target gradient", (RELATIVE,)),
    Row("A5", "fp32", "d hidden", (TAU_4, RHO_64)),
    Row("A6", "fp32", "d weight, d bias", (TAU_8, RHO_64)),
    Row("A7", "bf16", "gradients", (OF_BF16,)),
    Row("A8", "bf16 or fp16", "loss", (ULP_4,)),
    Row("A9", "production dtypes", "torch against JAX", (RHO_37, RATIO_4)),
    Row("A10", "CPU", "per-token outputs and d hidden rows under any chunk size", (BITS,)),
    Row("A11", "one device", "run to run, thread count", (BITS,)),
    Row("A12", "fp32", "accumulation of micro-batches against one batch", (TAU_8,)),
    Row("A13", "fp32", "1 to 4 vocabulary shards", (BITS, ULP_2, TAU_4)),
    Row("A14", "every other row", "mutants that its check lets pass", (NO_MUTANT,)),
    Row(
        "A15",
        "any head placement (plain, DDP, FSDP2, ZeRO-3, sharded vocabulary, JAX mesh); "
        "1, 7, 64 chunks; 0, 1, N valid tokens",
        "collectives of each kind against the budget, on every rank",
        (BITS,),
    ),
    Row("A16", "fp16", "gradients", (OF_FP16,)),
    Row(
        "A17",
        "CPU; fp32 or bf16",
        "per-token outputs and d hidden rows, whatever the other tokens and the chunks",
        (BITS,),
    ),
    Row(
        "A18",
        "CPU; 1 to 8 vocabulary shards cut at multiples of 128 columns",
        "log-probability, lse, entropy, correct, predicted, divergence",
        (BITS,),
    ),
    Row(
        "A19",
        "bf16 or fp16",
        "gradients, rounded where both backends round",
        (ROUNDED, ROUNDED_FP16, EQUAL),
    ),
    Row(
        "A20",
        "logits of student and teacher given; divergences of 1e-7 and more",
        "divergence",
        (Bound("relative", 1e-6),),
    ),
    Row(
        "A21",
        "logits of student and teacher given; divergences from 1e-9 to 1e-7",
        "divergence",
        (Bound("relative", 5e-6),),
    ),
    Row(
        "A22",
        "logits of student and teacher given, noise of at most 1 apart",
        "d logits; their sum over the classes",
        (TAU_4, Bound("sum / (u * sum of terms)", 2)),
    ),
    Row("A23", "fp32 hidden states of student and teacher", "divergence", (TAU_4,)),
    Row(
        "A24",
        "any",
        "divergence and gradients of equal logits; divergences below 0",
        (BITS,),
    ),
    Row(
        "A25",
        "bf16 hidden states 0.1 to 0.001 apart",
        "gradients of a divergence",
        (Bound("rho", 3e-3),),
    ),
    Row("A26", "logits given", "d logits beside the target's", (Bound("tau", 2),)),
)
ROWS = {row.id: row for row in IN_ORDER}


def largest(gap: Any, unit: Any) -> float:
    """Of gaps in units; none is 0 in any unit."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.max(np.where(gap == 0, 0.0, gap / unit), initial=0.0))


def tau(got: Any, oracle: Any, bound: Any) -> float:
    """max |g - o| / (u * B): how many times the running error bound."""
    gap = np.abs(np.asarray(got, np.float64) - oracle)
    return largest(gap, U * np.asarray(bound, np.float64))


def rho(got: Any, oracle: Any) -> float:
    """||g - o||_F / ||o||_F in units of u."""
    oracle = np.asarray(oracle, np.float64)
    gap = float(np.linalg.norm((np.asarray(got, np.float64) - oracle).ravel()))
    with np.errstate(divide="ignore"):
        return 0.0 if gap == 0 else float(np.divide(gap, np.linalg.norm(oracle.ravel()) * U))


def relative(got: Any, oracle: Any) -> float:
    """max |g - o| / |o|."""
    oracle = np.asarray(oracle, np.float64)
    return largest(np.abs(np.asarray(got, np.float64) - oracle), np.abs(oracle))


def cancelled_sum(got: Any, oracle: Any, terms: Any) -> float:
    """max |sum of a row| / (u * sum of the terms that it is made of), where that of the oracle,
    which is taken off, is 0."""
    gap = np.asarray(got, np.float64) - np.asarray(oracle, np.float64)
    return largest(np.abs(gap.sum(axis=-1)), U * np.asarray(terms, np.float64).sum(axis=-1))


# What is measured of a whole array says something of so many entries: of 101, a share of 99.5 % is
# every one, and the errors of two backends are one rounding's luck.
SHARES = {"bfloat16": ROUNDED.metric, "float16": ROUNDED_FP16.metric}  # of row A19
OF_WHOLE = dict.fromkeys((*SHARES.values(), EQUAL.metric, RATIO_4.metric), 1000)

# The row of gradients in each 16-bit dtype.
ROW_OF = {"bfloat16": "A7", "float16": "A16"}


def rounded_fraction(got: Any, oracle: Any, dtype: str = "bfloat16") -> float:
    """Share of the entries that are the oracle rounded once."""
    got = np.asarray(got, np.float64)
    return float(np.mean(got == round_to(oracle, dtype))) if got.size else 1.0


def worst_rounding(
    got: Any, oracle: Any, magnitude: Any, bound: Any = None, dtype: str = "bfloat16"
) -> float:
    """Largest distance from the oracle beyond the half ULP of the last rounding and the float32
    error, `bound` in units of u, in units of one rounding of dz.

    `magnitude` is the sum of the absolute terms dz * x. A float32 dz may lie on the other side of a
    tie than the oracle's: that moves dz by one ULP, which is up to 2^-7 of it in bf16, and the sum
    by as much of that term. Of a sum whose largest term is nearly all of it that is up to two of
    its own ULP (1.99 * 2^-7 against 2^-7), of one that cancels many. A dz that cancels is off by
    more than that before it is rounded, which is what `bound` knows.
    """
    got, oracle = np.asarray(got, np.float64), np.asarray(oracle, np.float64)
    # The rounding was that of the wider binade, if a power of two lies between the two.
    half = spacing(np.fmax(np.abs(got), np.abs(oracle)), dtype) / 2
    unit = np.ldexp(np.asarray(magnitude, np.float64), -FORMATS[dtype][0])
    error = 0.0 if bound is None else U * np.asarray(bound, np.float64)
    gap = np.maximum(np.abs(got - oracle) - half - error, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(gap == 0, 0.0, gap / unit)
    return float(np.max(np.where(np.isnan(value), np.inf, value), initial=0.0))


def error_ratio(got: Any, other: Any, oracle: Any) -> float:
    """How many times the smaller error the larger one is; errors below u count as u."""
    errors = sorted(max(rho(g, oracle), 1.0) for g in (got, other))
    return errors[1] / errors[0]


def check(
    row: str,
    got: Any,
    oracle: Any,
    bound: Any = None,
    *,
    other: Any = None,
    magnitude: Any = None,
    metrics: Sequence[str] | None = None,
    backend: str = "",
    case: str = "",
    quantity: str = "",
) -> list[Measurement]:
    """Hold `got` against one row of the contract; one Measurement for each of its bounds.

    Args:
        row: id in ROWS.
        got: what an implementation returned, as NumPy.
        oracle: the float64 truth; for rows of bits, the array whose bits `got` must have.
        bound: the running error bound in units of u, for tau and for ULP unless cancelled.
        other: the other implementation's result (A9, A19).
        magnitude: scale of an ULP (A2, A3, A8) or sum of absolute terms (A7).
        metrics: the row's metrics that apply to this quantity; None for all.
        backend: carried into the report.
        case: carried into the report.
        quantity: carried into the report; the row's own by default.
    """
    got = np.asarray(got)
    low = "float16" if row == ROW_OF["float16"] else "bfloat16"
    cancelled = lambda: worst_rounding(got, oracle, magnitude, bound, low)  # noqa: E731
    measures: dict[str, Callable[[], Any]] = {
        "unequal entries": lambda: bits_unequal(got, np.asarray(oracle)),
        "ULP": lambda: np.max(ulp_distance(got, oracle, magnitude=magnitude), initial=0.0),
        "relative": lambda: relative(got, oracle),
        "tau": lambda: tau(got, oracle, bound),
        "sum / (u * sum of terms)": lambda: cancelled_sum(got, oracle, magnitude),
        "rho": lambda: rho(got, oracle) * U,
        "rho / u": lambda: rho(got, oracle if other is None else other),
        **{
            metric: partial(rounded_fraction, got, oracle, dtype)
            for dtype, metric in SHARES.items()
        },
        "bf16 ULP unless cancelled": cancelled,
        "fp16 ULP unless cancelled": cancelled,
        "error ratio": lambda: error_ratio(got, other, oracle),
        "bf16 bit-equal": lambda: 1.0 - bits_unequal(got, other) / got.size if got.size else 1.0,
    }
    of = {"backend": backend, "case": case, "quantity": quantity or ROWS[row].quantity}
    measurements = []
    for limit in ROWS[row].bounds:
        if metrics is not None and limit.metric not in metrics:
            continue
        if 0 < got.size < OF_WHOLE.get(limit.metric, 0):
            continue
        if limit.metric not in measures:
            raise ValueError(f"`row` {row} has a metric without a measure; got {limit.metric!r}.")
        value = float(measures[limit.metric]())
        measurements.append(limit.measured(row, value, got.size, **of))
    return measurements


def failures(measurements: list[Measurement]) -> list[str]:
    """One sentence for each measurement that falls short."""
    return [
        f"{m.row} {m.backend} {m.quantity}: {m.metric} is {m.value:.6g}, must be "
        f"{'>=' if m.at_least else '<='} {m.bound:g} ({m.case})"
        for m in measurements
        if not m.passed
    ]
