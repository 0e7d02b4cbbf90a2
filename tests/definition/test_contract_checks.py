"""The measures of the contract: distances, what `check` refuses, and that no test goes round it."""

from __future__ import annotations

import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

from xentlib.budgets import check_budget
from xentlib.collectives import Collective, CollectiveCount
from xentlib.contract import ROWS, Bound, U, check, failures, rho, tau, worst_rounding
from xentlib.ulp import bits_unequal, dtype_named, round_to, spacing, ulp_distance

DTYPES = ["float64", "float32", "bfloat16", "float16"]
# Joined here so that this file does not match itself.
LOOSE = ["a" + "tol", "r" + "tol", "all" + "close", "assert_" + "close", "app" + "rox"]


def values(dtype: str, count: int = 2000) -> np.ndarray:
    """Numbers of `dtype` over its whole range, powers of two among them.

    Subnormals only in float16: the contract's settings flush denormals (D10), NumPy's thread too.
    """
    rng = np.random.default_rng(7)
    kind = {8: np.uint64, 4: np.uint32, 2: np.uint16}[dtype_named(dtype).itemsize]
    bits = rng.integers(0, np.iinfo(kind).max, count, dtype=kind, endpoint=True)
    x = bits.view(dtype_named(dtype))
    powers = np.ldexp(1.0, np.arange(-14, 15)).astype(dtype_named(dtype))
    x = np.concatenate([x, powers, -powers])
    with np.errstate(invalid="ignore"):  # the cast of a signalling NaN
        size = np.abs(x.astype(np.float64))
    least = {"float64": 2.0**-960, "float16": 0.0}.get(dtype, 2.0**-126)
    # The largest binade has no neighbour above. A comparison with NaN is False.
    return x[(size >= least) & (size < float(ml_dtypes.finfo(x.dtype).max) / 2)]


def test_no_tolerance_without_a_row():
    """D10: no bare tolerance under tests/; a test cites a contract row."""
    pattern = re.compile(r"\b\w*(" + "|".join(LOOSE) + r")\b")
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_spacing_is_the_gap_to_the_next_number(dtype):
    """A2, A3, A8: the unit of every ULP is the neighbour's distance in that dtype."""
    x = np.abs(values(dtype))
    after = np.nextafter(x, np.asarray(np.inf, x.dtype))
    gap = after.astype(np.float64) - x.astype(np.float64)
    assert bits_unequal(spacing(x, dtype), gap) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_ulp_apart(dtype):
    """A2, A3, A8: one step is one ULP, two steps two, none is none."""
    x = np.abs(values(dtype))
    inf = np.asarray(np.inf, x.dtype)
    one = np.nextafter(x, inf)
    exact = x.astype(np.float64)
    assert set(ulp_distance(x, exact, dtype)) == {0.0}
    assert set(ulp_distance(one, exact, dtype)) == {1.0}
    inside = spacing(one, dtype) == spacing(x, dtype)  # a step over a power of two is longer
    assert set(ulp_distance(np.nextafter(one, inf), exact, dtype)[inside]) == {2.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_round_to_is_the_cast_of_float32(dtype):
    """A7: rounded once, ties to even; a float32 is cast in one rounding by ml_dtypes."""
    x = values("float32")
    x = np.concatenate([x, values(dtype).astype(np.float32) * np.float32(1 + 2.0**-9)])
    x = np.concatenate([x, np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2.0**-12)])
    x = x[np.abs(x) < float(ml_dtypes.finfo(dtype_named(dtype)).max) / 2]
    assert bits_unequal(round_to(x, dtype), x.astype(dtype_named(dtype)).astype(np.float64)) == 0


def test_round_to_rounds_a_float64_once():
    """A7: through float32 this number would land on a tie and go to 1."""
    x = 1 + 2.0**-8 + 2.0**-40
    assert round_to(np.asarray(x), "bfloat16") == 1 + 2.0**-7
    assert np.float32(x).astype(ml_dtypes.bfloat16) == 1


def test_signed_zeros_and_nan_payloads_are_different_bits():
    """A0, A1: +0 and -0 are told apart; a shape or dtype is never broadcast away."""
    zero = np.zeros(3, np.float32)
    assert bits_unequal(zero, -zero) == 3
    assert bits_unequal(zero, zero.copy()) == 0
    with pytest.raises(ValueError, match="one shape and dtype"):
        bits_unequal(zero, np.zeros((3, 1), np.float32))
    with pytest.raises(ValueError, match="one shape and dtype"):
        bits_unequal(zero, np.zeros(3, np.float64))


def test_ulp_of_nan_and_infinity():
    """A NaN is infinitely far from a number and at no distance from a NaN."""
    got = np.array([np.nan, 1.0, np.nan, np.inf, np.inf, -np.inf])
    exact = np.array([1.0, np.nan, np.nan, np.inf, 1.0, np.inf])
    distance = ulp_distance(got, exact)
    assert distance.tolist() == [np.inf, np.inf, 0.0, 0.0, np.inf, np.inf]


@pytest.mark.parametrize("row", [row for row in ROWS if row != "A14"])
def test_nan_meets_no_bound(row):
    """Every row: a NaN, in all entries or in one, falls short of each metric that sees size."""
    oracle = np.linspace(1.0, 2.0, 1000).astype(np.float32)
    ones = np.ones(1000)
    kind = {"other": oracle, "magnitude": ones}
    for got in (np.full(1000, np.nan, np.float32), np.where(np.arange(1000) == 3, np.nan, oracle)):
        if ROWS[row].bounds[0].metric == "unequal entries" or np.isnan(got).all():
            measured = check(row, got.astype(np.float32), oracle, ones, **kind)
        else:
            if row == "A19":  # shares: one entry in a thousand may be off
                continue
            names = [b.metric for b in ROWS[row].bounds]
            measured = check(row, got, oracle, ones, metrics=names, **kind)
        assert measured
        assert [m.metric for m in measured if m.passed] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row != "A14"])
def test_the_oracle_itself_passes(row):
    """Every row passes what it measures against; so a failure says something."""
    oracle = round_to(np.linspace(1.0, 2.0, 1000), "bfloat16").astype(np.float32)
    measured = check(row, oracle, oracle, np.ones(1000), other=oracle, magnitude=np.ones(1000))
    assert failures(measured) == []
    assert [m.metric for m in measured] == [bound.metric for bound in ROWS[row].bounds]
    assert {m.entries for m in measured} == {1000}


OF_BITS = [
    row for row, held in ROWS.items() if {b.metric for b in held.bounds} == {"unequal entries"}
]


@pytest.mark.parametrize("mutant", ["zero", "minus", "1.001 g"])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in (*OF_BITS, "A14")])
def test_a_mutant_is_rejected(row, mutant):
    """A14: 0, -g and 1.001 g fail on data whose bound is as tight as one term's; of A25, whose
    gradients are of a dz in bf16, 1.004 g; of A7 and A16 two ULP of 1."""
    oracle = round_to(np.random.default_rng(3).uniform(1, 2, 1000), "bfloat16")
    more = {"A25": 1.004, "A7": 1 + 2.0**-6, "A16": 1 + 2.0**-9}.get(row, 1.001)
    got = {"zero": 0 * oracle, "minus": -oracle, "1.001 g": more * oracle}[mutant]
    measured = check(row, got, oracle, np.ones(1000), other=oracle, magnitude=oracle)
    assert failures(measured)


def test_bounds_are_inclusive_and_turn():
    """A bound of 4 holds at 4; a floor of 0.995 at 0.995; NaN on neither side."""
    assert Bound("tau", 4).holds(4.0)
    assert not Bound("tau", 4).holds(np.nextafter(4.0, 5.0))
    assert Bound("share", 0.995, at_least=True).holds(0.995)
    assert not Bound("share", 0.995, at_least=True).holds(0.99)
    assert not Bound("share", 0.995, at_least=True).holds(float("nan"))
    assert not Bound("tau", 4).holds(float("nan"))


def test_tau_and_rho_by_hand():
    """tau is the worst entry over u B, rho the norm; an error where B is 0 is infinite."""
    oracle = np.array([1.0, 2.0, 0.0])
    assert tau(oracle + np.array([0, 6 * U, 0]), oracle, [1, 2, 0]) == 3
    assert tau(oracle + np.array([0, 0, U]), oracle, [1, 2, 0]) == np.inf
    assert tau(oracle, oracle, [0, 0, 0]) == 0
    assert rho(np.array([3.0, 4.0 + 10 * U]), np.array([3.0, 4.0])) == 2
    with np.errstate(divide="ignore"):
        assert rho(np.array([1.0]), np.array([0.0])) == np.inf


def test_one_dz_on_the_other_side_of_a_tie_is_one_unit():
    """A7, by hand. Catches: half an ULP of the binade below, where the result crossed a power of
    two; a dz that cancels held to a rounding of what is left of it."""
    exact = np.linspace(0.9, 1.0, 4097)[:-1]
    moved = round_to(exact * (1 + 2.0**-7), "bfloat16")
    assert (moved >= 1).any()
    assert (moved < 1).any()
    assert 0.5 < worst_rounding(moved, exact, exact) <= 1
    assert worst_rounding(moved, exact, exact / 2) > 1
    assert worst_rounding(moved, exact, exact / 2, exact * 2.0**-8 / U) <= 1


def test_shares_are_taken_of_many_entries():
    """A19: 101 entries cannot hold a share of 99.5 %."""
    few, many = (np.ones(n) for n in (999, 1000))
    names = [[m.metric for m in check("A19", x, x, other=x)] for x in (few, many)]
    assert names == [[], [b.metric for b in ROWS["A19"].bounds]]


def test_a_failure_is_a_sentence():
    """The report says what fell short, by how much, and where."""
    (tau_short, rho_short) = check(
        "A5", [2.0], [1.0], [1.0], backend="torch", case="N=1", quantity="d hidden"
    )
    text = failures([tau_short, rho_short])
    assert text[0] == "A5 torch d hidden: tau is 1.67772e+07, must be <= 4 (N=1)"
    assert len(text) == 2


def test_a_row_without_a_measure_is_refused():
    """A14 counts mutants; `check` does not guess how."""
    with pytest.raises(ValueError, match="without a measure"):
        check("A14", [0.0], [0.0])
    with pytest.raises(KeyError):
        check("A99", [0.0], [0.0])


def test_rows_are_complete_and_ordered():
    """None is missing, and tables list them by number."""
    assert list(ROWS) == [f"A{number}" for number in range(27)]


def test_a_budget_is_held_on_every_rank():
    """A15: one gather too many, one that is missing, and a rank that differs from the others."""
    one, two = {"all_gather": 1}, {"all_gather": 2}
    home = {"reduce_scatter": 1}
    assert not failures(check_budget("FSDP2", [one, one], [home, home]))
    for forward, backward in (
        ([two, two], [home, home]),
        ([one, {}], [home, home]),
        ([one, one], [home, {}]),
        ([one, one], [one | home, home]),
        ([one, one], [home, home | {"all_reduce": 1}]),
    ):
        assert failures(check_budget("FSDP2", forward, backward))


def test_a_wrapper_reduces_as_it_sees_fit():
    """A15: gathers count under ZeRO-3, its reductions do not; in the forward everything does."""
    one, reductions = {"all_gather": 1}, {"reduce_scatter": 3, "all_reduce": 1}
    assert not failures(check_budget("ZeRO-3", [one], [reductions]))
    assert failures(check_budget("ZeRO-3", [one], [one | reductions]))
    assert failures(check_budget("ZeRO-3", [one | reductions], [{}]))


def test_collectives_by_kind():
    """What a user reads."""
    count = CollectiveCount([Collective("all_gather", 40), Collective("all_gather", 8, True)])
    assert count["all_gather"] == len(count) == 2
    assert count["all_reduce"] == 0
    assert count.counts() == {"all_gather": 2}
    assert count.bytes() == count.bytes("all_gather") == 48
    assert count.looped() == [Collective("all_gather", 8, True)]
    assert str(count) == "2 all_gather (48 bytes)"
    assert str(CollectiveCount()) == "none"
    with pytest.raises(ValueError, match="`kind` must be one of all_gather"):
        count["gather"]
