"""Set-ups in which every two choices meet once, where all combinations would be too many."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest

__all__ = ["every_pair", "every_pair_of", "pairwise", "parameters"]

Row = dict[str, Any]


def pairwise(
    choices: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool], seed: int = 0
) -> list[Row]:
    """Rows of one choice each, the most open pairs first: of 50 random rows the best, greedily.

    A pair that no row has in 2,000 more attempts is taken for impossible.
    """
    draw = random.Random(seed)
    left = {
        ((a, x), (b, y))
        for a, b in combinations(choices, 2)
        for x in choices[a]
        for y in choices[b]
    }
    rows = []
    while left:
        wanted = dict(min(left, key=repr))
        drawn = [random_row(draw, choices) | wanted for _ in range(50)]
        fitting = [row for row in drawn if possible(row)]
        if not fitting:
            more = (random_row(draw, choices) | wanted for _ in range(2_000))
            fitting = [row for row in more if possible(row)][:1]
        if not fitting:
            left.remove(min(left, key=repr))
            continue
        rows.append(max(fitting, key=lambda row: len(left & set(combinations(row.items(), 2)))))
        left -= set(combinations(rows[-1].items(), 2))
    return rows


def random_row(draw: random.Random, choices: Mapping[str, Sequence[Any]]) -> Row:
    return {name: draw.choice(values) for name, values in choices.items()}


def every_pair_of(setups: Mapping[str, Any], named: Collection[str] = ()) -> list[str]:
    """Names of as few set-ups, which are dataclasses, as have every two values of fields that one
    has; those that a test asks for by name are among them."""
    fields = {name: tuple(map(repr, asdict(setup).values())) for name, setup in setups.items()}
    kept = {*every_pair(fields.values(), first=[fields[name] for name in named])}
    return [name for name in setups if name in named or fields[name] in kept]


def every_pair(
    keys: Iterable[tuple[Any, ...]], together: int = 2, first: Iterable[tuple[Any, ...]] = ()
) -> list[tuple[Any, ...]]:
    """Of keys that name a choice in each place, as few as have every two choices that one has, or
    every three `together`, beside those that are taken `first`.

    Greedily: the key with the most open pairs, the first of them in the order given. A key that is
    shorter than another chooses None where it ends.
    """
    rest = list(keys)
    longest = max(map(len, rest))
    pairs = {
        key: set(combinations(enumerate((*key, *[None] * (longest - len(key)))), together))
        for key in rest
    }
    left = set().union(*pairs.values())
    found = [*first]
    left -= set().union(*(pairs[key] for key in found))
    while left:
        found.append(max(rest, key=lambda key: len(left & pairs[key])))
        left -= pairs[found[-1]]
    return found


def parameters(keys: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Of a test: those that are not kept run under --full alone."""
    full = pytest.mark.full
    return [pytest.param(key, id=str(key), marks=() if key in kept else full) for key in keys]
