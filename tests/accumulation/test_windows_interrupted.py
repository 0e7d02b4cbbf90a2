"""Windows of `TokenNormalizer` that end in their middle, on real ranks: nothing of them is left,
and what was there before is kept.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from helpers.ranks import launch
from xentlib.accumulate import WindowStateError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import N, batch_of, of_one_batch, run_window, token_losses  # noqa: E402
from helpers.windows_ranks import (  # noqa: E402
    WRAPPERS,
    as_it_wants,
    interrupt,
    near,
    stepped,
    window_of,
    wrapped,
)
from xentlib.torch import TokenNormalizer  # noqa: E402


def interrupted(rank: int, world: int) -> dict[str, list[Any]]:
    """A window that ends in its second micro-batch of three, before or after the backward, while
    somebody holds its iterator; then one that does not."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    found = {}
    bad = [batch_of(50 + 10 * rank + k) for k in range(3)]
    good = [batch_of(10 * rank + k, 9 - 3 * k - rank) for k in range(3)]
    for name in WRAPPERS:
        for mode in ("precount", "postscale"):
            model = wrapped(name)
            norm = TokenNormalizer(model, mode=mode)
            call, held = as_it_wants(model), []
            with pytest.raises(RuntimeError, match="in the middle"):
                interrupt(norm, call, bad, held)
            assert getattr(model, "require_backward_grad_sync", True)
            run_window(norm, call, good)
            found[f"{name}, {mode}"] = stepped(name, model)
            held.clear()
    return found


@pytest.mark.slow
def test_an_interrupted_window_leaves_nothing_behind() -> None:
    """Gradients that a wrapper has not reduced yet are kept beside the parameters, in FSDP2 and
    ZeRO-2; a flag that says not to reduce must not stay."""
    pytest.importorskip("deepspeed")
    good = [batch_of(10 * rank + k, 9 - 3 * k - rank) for rank in range(2) for k in range(3)]
    want = of_one_batch(good)
    for rank in launch(2, interrupted):
        for name, grads in rank.items():
            near(name, grads, want)


KEPT = ("DDP", "DDP, views", "FSDP2", "FSDP2, whole", "FSDP2, bf16", "FSDP2, not reduced")


def with_gradients(rank: int, world: int) -> dict[str, Any]:
    """Gradients from before a window that is interrupted, after it, and after one that is not."""
    found: dict[str, Any] = {}
    for name in KEPT:
        model = wrapped(name)
        norm = TokenNormalizer(model)
        wrapper, call = norm.wrapper, as_it_wants(model)
        late = name.endswith("not reduced")
        wrapper.micro_batch(last=not late)
        x, y = batch_of(90 + rank)
        (token_losses(call(x), y).sum() / N).backward()
        wrapper.restore()
        before = [(id(x), place, g.clone()) for x, place, g in wrapper.gradients()]
        with pytest.raises(RuntimeError, match="in the middle"):
            interrupt(norm, call, window_of(rank), [])
        after = [(id(x), place, g) for x, place, g in wrapper.gradients()]
        assert [x[:2] for x in before] == [x[:2] for x in after], name
        assert all(torch.equal(x[2], y[2]) for x, y in zip(before, after, strict=True)), name
        run_window(norm, call, window_of(rank))
        found[name] = stepped(name, model)
        if late:
            wrapper.micro_batch(last=False)
            call(x).sum().backward()
            model.zero_grad()
            with pytest.raises(WindowStateError, match="gradients must be None when a window"):
                TokenNormalizer(model, mode="postscale").window().__enter__()
    return found


def test_gradients_from_before_an_interrupted_window_are_kept() -> None:
    """To the bit, those that FSDP2 has not reduced yet too; and a window adds to them."""
    rest = of_one_batch([b for r in range(2) for b in window_of(r)])
    first = of_one_batch([batch_of(90 + r) for r in range(2)])
    want = [a + b for a, b in zip(first, rest, strict=True)]
    for rank in launch(2, with_gradients):
        for name, grads in rank.items():
            near(name, grads, want)
