"""`make fuzz-pairs`: some calls of every function hold, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # the other side of each

import fuzz_pairs
from fuzzing.draw import PERIOD
from fuzzing.pairs import SUBJECTS
from fuzzing.pairs_spread import WAYS

SEED = 4


@pytest.mark.cpu
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 240, 80))
def test_some_calls_hold_in_torch(first: int) -> None:
    """40 of all functions; those of few tokens and classes: test_zero_and_one.py."""
    ran, found = fuzz_pairs.fuzz(SEED, range(first, first + 80, 2), ("torch",))
    assert found == []
    assert set(ran) == {f"{function} in torch" for function in SUBJECTS}


@pytest.mark.cpu
@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("form", [0, 1, 2, 4, 5])  # 3 is of the function that 0 is of
def test_some_calls_hold_in_jax(form: int) -> None:
    """Six of a program; those of one class, and of all: test_zero_and_one.py."""
    pytest.importorskip("jax")
    numbers = [form * PERIOD + 2 * k for k in range(6)]
    ran, found = fuzz_pairs.fuzz(SEED, numbers, ("jax",))
    assert found == []
    assert (len(ran), sum(ran.values())) == (1, 6)


@pytest.mark.cpu
@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("form", range(3))
def test_some_calls_hold_over_devices(form: int) -> None:
    """Four of a program, in `shard_map`."""
    pytest.importorskip("jax")
    numbers = [form * PERIOD + 2 * k for k in range(4)]
    ran, found = fuzz_pairs.fuzz(SEED, numbers, ("mesh",))
    assert found == []
    assert sum(ran.values()) == 4


@pytest.mark.cpu
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("first", [81])
def test_some_calls_hold_on_ranks(first: int) -> None:
    """Shards of any widths, FSDP2's routes, windows; also without a row or a token."""
    ran, found = fuzz_pairs.of_parts(SEED, on_ranks(first), parts(first))
    assert found == []
    assert {name.split(", ")[1] for name in ran} == set(WAYS)


def on_ranks(first: int) -> range:
    return range(first, first + 80, 2)


@cache
def parts(first: int) -> list[tuple[Any, ...]]:
    return fuzz_pairs.parts_of(SEED, on_ranks(first))


@pytest.mark.cpu
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "logprobs", "d_hidden", "d_weight"])
def test_what_one_rank_gets_wrong_is_found(name: str) -> None:
    wrong, ways = scaled(name, 1.001), set[str]()
    for number, (*others, last) in zip(on_ranks(81), parts(81), strict=True):
        _, found = fuzz_pairs.of_parts(SEED, [number], [(*others, wrong(last))])
        ways |= {text.split(": ")[1] for text in found}
        if ways >= {"shards", "tokens", "hidden"}:
            return
    pytest.fail(f"found in {ways} alone")


def scaled(name: str, factor: float) -> Callable[[Any], Any]:
    def wrong(outcome: Any) -> Any:
        value = getattr(outcome, name)
        if value is None:
            return outcome
        return outcome._replace(**{name: (value * np.float64(factor)).astype(value.dtype)})

    return wrong


WRONG: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name} 0.1 % off": scaled(name, 1.001)
        for name in (
            *("loss", "divergence", "entropy", "lse", "ids_logprobs", "top_logprobs"),
            *("d_hidden", "d_weight", "d_bias", "d_logits", "weight_sum", "teacher_entropy"),
        )
    },
    "the last class of the most probable twice": lambda out: (
        out
        if out.top_ids is None or out.top_ids.shape[-1] < 2
        else out._replace(top_ids=np.where(out.top_ids < 0, -1, out.top_ids[..., :1]))
    ),
}


@pytest.mark.cpu
@pytest.mark.torch
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    """Within tens of calls."""
    for number in range(1, 120, 2):
        _, found = fuzz_pairs.fuzz(SEED, [number], ("torch",), after=WRONG[name])
        if found:
            break
    else:
        pytest.fail("the run found nothing")
    assert "raised" not in found[0]
    assert fuzz_pairs.fuzz(SEED, [number], ("torch",))[1] == []
