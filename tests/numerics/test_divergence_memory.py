"""Memory of `chunked_divergence`: beside the gradients the same however many tokens there are, and
no more than the logits of a chunk of both heads ask for."""

from __future__ import annotations

from typing import Any

import pytest

V, H, WIDTH = 2053, 16, 24
BUDGET = 4 << 20
FEW, MANY = 512, 2048
# Numbers of a token: its d hidden, its outputs on the way and at the end.
OF_TOKEN = 4 * (2 * H + 40)


def of_torch(tokens: int, **how: Any) -> int:
    """Peak bytes beside the inputs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import TeacherHead, chunked_divergence

    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, H).requires_grad_(), torch.randn(V, H).requires_grad_()
    teacher = TeacherHead(torch.randn(tokens, WIDTH), torch.randn(V, WIDTH))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        out = chunked_divergence(hidden, weight, teacher, max_chunk_bytes=BUDGET, **how)
        out.loss.sum().backward()
    total = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def of_jax(tokens: int, **how: Any) -> int:
    import jax

    from xentlib.jax import TeacherHead, chunked_divergence

    shapes = ((tokens, H), (V, H), (tokens, WIDTH), (V, WIDTH))
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def loss(hidden: Any, weight: Any, *teacher: Any) -> Any:
        options = {"max_chunk_bytes": BUDGET, **how}
        return chunked_divergence(hidden, weight, TeacherHead(*teacher), **options).loss.sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    analysis = step.lower(*arrays).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("how", [{}, {"kind": "jsd", "beta": 0.5, "reduction": "none"}], ids=len)
def test_no_more_for_more_tokens(backend: str, how: dict[str, Any]) -> None:
    measure = {"torch": of_torch, "jax": of_jax}[backend]
    few, many = (measure(tokens, **how) for tokens in (FEW, MANY))
    assert many - few <= (MANY - FEW) * OF_TOKEN
    # Full logits of both, in float32, are 32 MiB, and of their log-softmax as many. XLA keeps some
    # arrays of a chunk beside each other, PyTorch those of a block.
    assert many <= {"torch": 6, "jax": 10}[backend] * BUDGET
