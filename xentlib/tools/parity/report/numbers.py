"""The numbers of a run as people read them: what table, page and errors have in common."""

from __future__ import annotations

import math

from xentlib.contract import Measurement


def allowance_used(m: Measurement) -> float:
    """The share of what the bound allows that was used up: 0 exact, 1 at the bound, NaN is inf."""
    if math.isnan(m.value):
        return math.inf
    if not m.at_least:
        value = abs(m.value)
        return value / m.bound if m.bound > 0 else math.inf if value > 0 else 0.0
    if _is_share(m):
        return (1 - m.value) / (1 - m.bound)
    return 0.0 if m.value >= m.bound else math.inf


def number(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits: 34.5, 24,733,308, 2.60e-7. Counts are exact."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    scientific = f"{value:.{digits - 1}e}"  # rounds first: 9.996 is 10.0, not 10.00
    mantissa, exponent = scientific.split("e")
    if -4 < int(exponent) < 6:
        return f"{value:,.{max(digits - 1 - int(exponent), 0)}f}"
    return f"{mantissa}e{int(exponent)}"


def bound_text(m: Measurement) -> str:
    """The bound with its direction: "≤ 4", "≥ 99.5 %", "= 0"."""
    sign = "≥" if m.at_least else "≤" if m.bound else "="
    return f"{sign} {_bound(m)}"


def value_text(m: Measurement) -> str:
    """The value, with as many digits as it takes to be on its own side of the bound."""
    scale, unit, digits = (100.0, " %", 4) if _is_share(m) else (1.0, "", 3)
    value, bound = m.value * scale, float(_bound(m).removesuffix(" %").replace(",", ""))
    text = number(value, digits)
    while digits < 17 and math.isfinite(value):
        shown = float(text.replace(",", ""))
        crossed = shown >= bound > value if m.at_least else shown <= bound < value
        if not crossed and not (unit and shown == 100.0 != value):
            break
        digits += 1
        text = number(value, digits)
    return text + unit


def _bound(m: Measurement) -> str:
    if not _is_share(m):
        return _stripped(number(m.bound, 6))
    return _stripped(number(m.bound * 100.0, 6)) + " %"


def _is_share(m: Measurement) -> bool:
    """A floor below one is a share of the entries, and is read as a percentage."""
    return m.at_least and 0 < m.bound < 1


def _stripped(text: str) -> str:
    mantissa, e, exponent = text.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return mantissa + e + exponent


def duration(seconds: float) -> str:
    """8.4 s, or 3 min 20 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
