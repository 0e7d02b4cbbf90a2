"""Given logits that a divergence is called with, and what is measured of its results.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF, U, relative, rho
from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.findings import Findings
from xentlib.tools.parity.rows.divergences import given_logits, oracle_of
from xentlib.tools.parity.rows.head import nothing
from xentlib.ulp import dtype_named, round_to

Array = npt.NDArray[Any]
# With fewer classes a few terms are most of a sum, and two roundings of each exceed A22's bound of
# its sum: 2.3 at worst of 40 draws of 521 classes, 1.6 of 60 of 2053.
N, V = 13, 2053
LOW = np.float32(-200)  # what the oracle has for -inf: of other logits up to 13, p = 1e-92
TWO = 2.0  # a temperature by which the division is exact, so that the formula alone is measured

CLAIMED = 1e-4  # nearer logits than these are below 1e-9 nats: no row claims more than the sign

# Names of what is measured, in the order of a report.
VALUE, GRADIENT, SIGN = "value", "gradient", "never negative"
EQUAL, EQUAL_GRADIENT = "equal logits", "gradient of equal logits"
MASKED, EMPTY = "masked tokens", "no valid token"
NAMES = (VALUE, GRADIENT, SIGN, EQUAL, EQUAL_GRADIENT, MASKED, EMPTY)


class Given(NamedTuple):
    """One case: logits of a student that are `far` from the teacher's, by noise of that size."""

    name: str
    far: float
    dtype: str = "float32"
    offset: float = 0.0
    temperature: float = 1.0
    masked: float = 0.0  # share of the tokens that do not count
    dead: bool = False  # some classes at -inf
    sums: bool = True  # whether A22's sum over the classes is claimed

    @property
    def needs(self) -> set[str]:
        """Options by which it is given."""
        needed = {"temperature"} if self.temperature != 1.0 else set()
        return needed | ({"where"} if self.masked else set())


DISTANCES = tuple(Given(f"logits {far:g} apart", far) for far in (1e-1, 1e-3, 1e-4, 1e-5, 1e-7))
CASES = (
    *DISTANCES,
    Given("equal logits", 0.0),
    Given("logits near 1000", 1e-2, offset=1000.0, sums=False),
    Given("logits of -inf", 1e-1, dead=True, sums=False),
    Given("a temperature", 1e-1, temperature=TWO),
    Given("a temperature, near", 1e-3, temperature=TWO),
    Given("some tokens masked", 1e-1, masked=0.4),
    Given("all tokens masked", 1e-1, masked=1.0),
    *(
        Given(f"logits {far:g} apart, {dtype}", far, dtype)
        for dtype in ("bfloat16", "float16")
        for far in (1e-1, 1e-2)
    ),
)
# Of A14, where a difference of two rounded lse is 100 times what A20 allows.
MUTANTS = Given("mutants", 1e-2)


class Arrays(NamedTuple):
    student: Array  # [N, V] in the case's dtype
    teacher: Array  # [N, V]
    where: Array | None  # [N], True for tokens that count
    upstream: Array  # [N], or [] of a loss that is one number


class Called(NamedTuple):
    """What a function returned of a case."""

    values: Array  # [N] of each token
    loss: Array  # as it was returned: [N], or []
    d_logits: Array  # [N, V]


def build(case: Given, kind: str, reduction: str, seed: int) -> Arrays:
    """Of `reverse_kl` both have classes at -inf, else the teacher alone: a student that gives them
    any probability is infinitely far."""
    student, teacher, upstream = given_logits(seed, case.far or 1.0, V, N)
    student = student if case.far else teacher
    rng = np.random.default_rng([seed, 13])
    where = None
    if case.masked:
        where = rng.random(N) >= case.masked
    student, teacher = student + np.float32(case.offset), teacher + np.float32(case.offset)
    if case.dead:
        dead = rng.random(teacher.shape) < 0.3
        teacher = np.where(dead, -np.inf, teacher).astype(np.float32)
        student = np.where(dead & (kind == "reverse_kl"), -np.inf, student).astype(np.float32)
    dtype = dtype_named(case.dtype)
    # What arrives is a number of 16 bits, so that a 16-bit loss can be given it as it is.
    upstream = round_to(upstream, "bfloat16").astype(np.float32)
    if reduction != "none":
        upstream = np.asarray(upstream[0])
    return Arrays(student.astype(dtype), teacher.astype(dtype), where, upstream)


class Exact(NamedTuple):
    """The oracle's of a case, by the logits before their temperature."""

    values: Array  # [N]
    divergence: Array  # [N], without temperature squared
    loss: Array  # [] of a mean or a sum
    dz: Array
    bound_dz: Array
    terms_dz: Array


def exact_of(case: Given, arrays: Arrays, reduction: str, squared: bool, how: Any) -> Exact:
    upstream = per_token(arrays, reduction)
    student, teacher = (
        np.where(np.isneginf(x), LOW, x.astype(np.float32))
        for x in (arrays.student, arrays.teacher)
    )
    own: dict[str, Any] = {"temperature": case.temperature, "temperature_squared": squared}
    oracle = oracle_of(student, teacher, upstream, where=arrays.where, **own, **how)
    total = oracle.loss.sum() / (count(arrays) if reduction == "mean" else 1)
    by_logits = (x / case.temperature for x in (oracle.dz, oracle.bound_dz, oracle.terms_dz))
    return Exact(oracle.loss, oracle.divergence, np.asarray(total), *by_logits)


def count(arrays: Arrays) -> int:
    """Tokens that count, 1 of none."""
    where = arrays.where
    return max(N if where is None else int(where.sum()), 1)


def per_token(arrays: Arrays, reduction: str) -> Array:
    """The gradient that arrives at each token's divergence."""
    each: Array = np.broadcast_to(np.asarray(arrays.upstream, np.float64), (N,))
    return each / count(arrays) if reduction == "mean" else each


def measure(
    findings: Findings, case: Given, arrays: Arrays, got: Called, exact: Exact, /, **of: Any
) -> None:
    """Hold what a function returned to the rows of divergences, under the names above."""

    def zeros(row: str, x: Array, name: str) -> None:
        """Entries that are not 0, of either sign; NaN is not."""
        wrong = np.asarray(x, np.float64) != 0
        findings.check(row, *nothing(wrong.astype(np.int8)), quantity=name, **of)

    if case.masked:
        out = ~np.asarray(arrays.where)
        name = MASKED if case.masked < 1 else EMPTY
        zeros("A0", got.d_logits[out], name)
        if got.loss.ndim or case.masked == 1:  # of a mean, each token was called without a mask
            zeros("A0", got.loss[out] if got.loss.ndim else got.loss, name)
        if case.masked == 1:
            return
        values, divergence = got.values[~out], exact.divergence[~out]
        truth = exact.values[~out]
    else:
        values, truth, divergence = got.values, exact.values, exact.divergence
    # That no value is NaN is in the rows of values, where there are any.
    below = values < 0 if case.far >= CLAIMED else ~(values >= 0)
    zeros("A24", below, SIGN)
    there = np.isfinite(arrays.student.astype(np.float64))
    dz = got.d_logits, exact.dz, exact.bound_dz
    if not case.far:
        zeros("A24", got.values, EQUAL)
        zeros("A24", got.d_logits, EQUAL_GRADIENT)
        findings.check("A22", *dz, metrics=("tau",), quantity=EQUAL_GRADIENT, **of)
        return
    for row, some in (
        ("A20", divergence >= 1e-7),
        ("A21", (divergence >= 1e-9) & (divergence < 1e-7)),
    ):
        if some.any():
            findings.check(row, values[some], truth[some], quantity=VALUE, **of)
            if got.loss.ndim == 0 and some.all():  # of all tokens together
                findings.check(row, got.loss, exact.loss, quantity=VALUE, **of)
    if case.far < CLAIMED:
        return
    if case.dtype in ROW_OF:
        terms = exact.terms_dz
        findings.check(ROW_OF[case.dtype], *dz, magnitude=terms, quantity=GRADIENT, **of)
        return
    if not there.all():
        zeros("A0", got.d_logits[~there], GRADIENT)
    if not case.sums:
        some_dz = (x[there] for x in dz)
        findings.check("A22", *some_dz, metrics=("tau",), quantity=GRADIENT, **of)
        return
    findings.check("A22", *dz, magnitude=exact.terms_dz, quantity=GRADIENT, **of)


def off_by(got: Called, exact: Exact) -> tuple[float, float, float, int]:
    """The largest divergence, the largest relative error of a value, that of the gradient's norm,
    and how many values are negative or NaN."""
    values = np.asarray(got.values, np.float64)
    gradient = rho(got.d_logits, exact.dz) * U
    negative = int((~(values >= 0)).sum())
    return float(exact.values.max()), relative(values, exact.values), gradient, negative


def outcome(got: Called) -> Outcome:
    return Outcome(divergence=got.values, d_logits=got.d_logits)
