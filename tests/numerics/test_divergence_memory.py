"""Memory of `chunked_divergence`: what the plan says, and beside the gradients the same however
many tokens there are."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from helpers.near_plan import near_plan
from helpers.pairs import every_pair, parameters
from xentlib.plan import block_bytes, peak_bytes, plan_chunks

V, H, WIDTH = 2053, 16, 24
BUDGET = 2 << 20
FEW, MANY = 256, 1024
# Numbers of a token: its d hidden, its outputs on the way and at the end.
OF_TOKEN = 4 * (2 * H + 40)


Sizes = tuple[int, int, int, int]  # N, H, V and the teacher's width


def of_torch(sizes: Sizes, dtype: str = "float32", *, gradient: bool = True, **how: Any) -> int:
    """Peak bytes beside the inputs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import TeacherHead, chunked_divergence

    torch.manual_seed(0)
    n, h, v, width = sizes
    hidden, weight, *of_teacher = (
        torch.randn(*shape).to(getattr(torch, dtype))
        for shape in ((n, h), (v, h), (n, width), (v, width))
    )
    for x in (hidden, weight):
        x.requires_grad_(gradient)
    no_amx = patch("xentlib.torch.core.gemm.has_amx", return_value=False)
    with no_amx, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = chunked_divergence(hidden, weight, TeacherHead(*of_teacher), **how).loss
        if gradient:
            loss.sum().backward()
    total = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def of_jax(sizes: Sizes, dtype: str = "float32", *, gradient: bool = True, **how: Any) -> int:
    import jax

    from helpers.compiling import PLANNED
    from xentlib.jax import TeacherHead, chunked_divergence

    n, h, v, width = sizes
    shapes = ((n, h), (v, h), (n, width), (v, width))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def loss(hidden: Any, weight: Any, *teacher: Any) -> Any:
        return chunked_divergence(hidden, weight, TeacherHead(*teacher), **how).loss.sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)) if gradient else loss)
    analysis = step.lower(*arrays).compile(PLANNED).memory_analysis()
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


MEASURES = {"torch": of_torch, "jax": of_jax}
SMALL = 4 << 20  # the budget, for chunks of 64 to 256 tokens
KINDS: dict[Any, dict[str, Any]] = {"forward_kl": {}, "reverse_kl": {}, "jsd": {"beta": 0.5}}
SIZES = ((600, 64, 6400, 32), (1000, 160, 2000, 320))
# Of a loss of each token: more classes than a block has, a budget, kind and dtype.
WIDE, NARROW = (600, 404, 20_000, 32), (203, 36, 20_000, 32)
EACH: list[Any] = [
    (NARROW, SMALL, "forward_kl", "float32"),
    (NARROW, SMALL, "jsd", "bfloat16"),
    ((1000, 160, 9001, 320), SMALL, "reverse_kl", "bfloat16"),
    (WIDE, None, "reverse_kl", "float32"),
    (WIDE, None, "forward_kl", "bfloat16"),
]
CALLS = [
    call
    for call in product(SIZES, KINDS, (False, True), ("float32", "bfloat16"))
    if call[2:] != (False, "bfloat16")
]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("call", parameters(CALLS, every_pair(CALLS)))
def test_peak_is_the_formula_of_the_plan(backend: str, call: Any) -> None:
    """D5, both ways: two chunks of half of the budget, and the teacher's head."""
    sizes, kind, gradient, dtype = call
    tokens, hidden, vocab, width = sizes
    of = {"dtype": dtype, "max_chunk_bytes": SMALL, "teacher_size": width}
    plan = plan_chunks(tokens, vocab, hidden, **of)
    expected = peak_bytes(plan, backend=backend, dtype=dtype, gradient=gradient, kind=kind)
    how = {"kind": kind, "max_chunk_bytes": SMALL, **KINDS[kind]}
    measured = MEASURES[backend](sizes, dtype, gradient=gradient, **how)
    rows = plan.block_tokens(block_bytes("cpu")) if backend == "torch" else 0
    block = rows * vocab * plan.compute_itemsize
    copied = vocab * max(hidden, width) if backend == "jax" and dtype == "bfloat16" else 0
    near = near_plan(measured, expected, block, copied)
    assert near, f"{measured} bytes, the plan says {expected}"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "budget", "kind", "dtype"), EACH, ids=str)
def test_peak_of_a_loss_of_each_token(
    sizes: Sizes, budget: int | None, kind: Any, dtype: str
) -> None:
    """D5, both ways: in the backward blocks of classes of both heads, whose default budget is that
    of whole rows. Catches: a sum of d weight in float32 beside that of the head's dtype."""
    tokens, hidden, vocab, width = sizes
    of = {"dtype": dtype, "max_chunk_bytes": budget, "teacher_size": width}
    plan = plan_chunks(tokens, vocab, hidden, **of)
    expected = peak_bytes(plan, backend="torch", dtype=dtype, recompute=True, kind=kind)
    how = {"kind": kind, "max_chunk_bytes": budget, "reduction": "none", **KINDS[kind]}
    measured = of_torch(sizes, dtype, **how)
    block = plan.block_tokens(block_bytes("cpu")) * vocab * plan.compute_itemsize
    near = near_plan(measured, expected, block)
    assert near, f"{measured} bytes, the plan says {expected}"


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("how", [{}, {"kind": "jsd", "beta": 0.5, "reduction": "none"}], ids=len)
def test_no_more_for_more_tokens(backend: str, how: dict[str, Any]) -> None:
    how = {"max_chunk_bytes": BUDGET, **how}
    few, many = (MEASURES[backend]((n, H, V, WIDTH), **how) for n in (FEW, MANY))
    assert many - few <= (MANY - FEW) * OF_TOKEN
    # Full logits of both, in float32, are 16 MiB, and of their log-softmax as many. XLA keeps some
    # arrays of a chunk beside each other, PyTorch those of a block.
    assert many <= {"torch": 6, "jax": 10}[backend] * BUDGET
