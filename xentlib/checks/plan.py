"""Sizes, rates and budgets of routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xentlib.checks.validators import check_choice, check_chunk_bytes, check_flag, check_number
from xentlib.dtypes import FLOATS

SIZES = (
    *("tokens_per_rank", "vocab_size", "hidden_size", "ranks", "nodes", "replicas"),
    "micro_batches",
)


def check_routes(given: Mapping[str, Any], known: Sequence[str], rates: Any) -> frozenset[str]:
    """The options by name; refuse what no sharded head can be. `given` are the arguments of
    `head_routes`."""
    for name in (*SIZES, "chunk_tokens", "block_rows"):
        value = given[name]
        if name in SIZES or value is not None:
            ok = isinstance(value, int) and value >= 1
            check_number(name, value, "an integer >= 1", ok=ok)
    for name in ("dtype", "head_dtype", "reduce_dtype", "param_dtype"):
        check_choice(name, given[name], FLOATS)
    for name in ("recompute", "module", "kept", "kernels"):
        check_flag(name, given[name])
    check_choice("platform", given["platform"], ("gpu", "cpu"))
    check_chunk_bytes(given["max_chunk_bytes"])
    options = given["options"]
    if isinstance(options, str):
        raise ValueError(
            f"`options` must be a tuple of names; got the string {options!r}. Write ({options!r},)."
        )
    for option in options:
        check_choice("options", option, known)
    if given["ranks"] % given["nodes"]:
        raise ValueError(
            f"`ranks` must be spread over `nodes` evenly; got {given['ranks']} ranks on "
            f"{given['nodes']} nodes. Pass the ranks that share the head, and their nodes."
        )
    for name, rate in (rates._asdict() if rates else {}).items():
        least = 0 if name == "latency" else 1
        ok = isinstance(rate, (int, float)) and least <= rate < float("inf")
        check_number(f"rates.{name}", rate, f"a finite number >= {least}", ok=ok)
    return frozenset(options)


def check_memory(memory: int | None) -> None:
    if memory is not None:
        ok = isinstance(memory, int) and memory >= 1
        check_number("memory", memory, "None or an integer >= 1, bytes", ok=ok)
