"""Sizes, rates and budgets of routes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from xentlib.checks.validators import check_choice, check_chunk_bytes, check_flag, check_number
from xentlib.dtypes import FLOATS


def check_routes(
    *,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    flags: Mapping[str, bool],
    options: Collection[str],
    known: Collection[str],
    limits: Mapping[str, int | None],
    max_chunk_bytes: int | None,
    platform: str,
    rates: Mapping[str, float] | None,
) -> frozenset[str]:
    """The options by name; refuse what no sharded head can be."""
    for name, value in (*sizes.items(), *limits.items()):
        if name in sizes or value is not None:
            ok = isinstance(value, int) and value >= 1
            check_number(name, value, "an integer >= 1", ok=ok)
    for name, dtype in dtypes.items():
        check_choice(name, dtype, FLOATS)
    for name, flag in flags.items():
        check_flag(name, flag)
    check_choice("platform", platform, ("gpu", "cpu"))
    check_chunk_bytes(max_chunk_bytes)
    if isinstance(options, str):
        raise ValueError(
            f"`options` must be a tuple of names; got the string {options!r}. Write ({options!r},)."
        )
    for option in options:
        check_choice("options", option, tuple(known))
    if sizes["ranks"] % sizes["nodes"]:
        raise ValueError(
            f"`ranks` must be spread over `nodes` evenly; got {sizes['ranks']} ranks on "
            f"{sizes['nodes']} nodes. Pass the ranks that share the head, and their nodes."
        )
    for name, rate in (rates or {}).items():
        least = 0 if name == "latency" else 1
        ok = isinstance(rate, (int, float)) and least <= rate < float("inf")
        check_number(f"rates.{name}", rate, f"a finite number >= {least}", ok=ok)
    return frozenset(options)


def check_memory(memory: int | None) -> None:
    if memory is not None:
        ok = isinstance(memory, int) and memory >= 1
        check_number("memory", memory, "None or an integer >= 1, bytes", ok=ok)
