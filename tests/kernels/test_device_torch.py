"""What only a device can show: no wait, graphs, a compiler, memory that is written before it is
read, offsets beyond 2^31. `make gpu` runs it on one; the CPU runs what it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conftest import DEVICE, HAS_TORCH

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch
import torch.nn.functional as F

from xentlib.contract import check, failures
from xentlib.plan import peak_bytes, plan_chunks
from xentlib.torch import chunked_logprobs, chunked_nll, vocab_parallel_logprobs
from xentlib.torch.core.kernels import runnable

pytestmark = pytest.mark.torch
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="XENTLIB_DEVICE is not cuda")
KERNELS = pytest.mark.parametrize("kernels", list(runnable()))
N, H, V = 9, 24, 307
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {"temperature": 0.7, "logit_scale": 0.5, "denominator": 100.0, "softcap": 8.0},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 1e-3, "outputs": ("entropy", "predicted")},
}


def leaves(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(5)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels, bias


def step(options: dict[str, Any], given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Losses of a head with a bias and without and, once, log-probabilities; all gradients."""
    hidden, weight, labels, bias = given
    budget = {"max_chunk_bytes": 8 * V * 4}
    out = chunked_nll(hidden, weight, labels, bias=bias, **options, **budget)
    plain = chunked_nll(hidden, weight, labels, **options, **budget)
    values, total = [out.loss, plain.loss], out.loss + plain.loss
    if not options:  # none of which they take
        rows = chunked_logprobs(hidden, weight, labels, entropy=True, **budget)
        of_logits = vocab_parallel_logprobs(hidden @ weight.T, labels, **budget)
        assert rows.entropy is not None
        values += [rows.logprobs, rows.entropy, of_logits.logprobs]
        total = total + (rows.logprobs + rows.entropy + of_logits.logprobs).sum()
    return [*values, *torch.autograd.grad(total, (hidden, weight, bias))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@KERNELS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_memory_is_written_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, kernels: str, options: Any
) -> None:
    """A11. Catches: padding of rows or of chunks that reaches a product, a statistic that is not
    made."""
    monkeypatch.setenv("XENTLIB_KERNELS", kernels)
    clean = step(options, leaves())
    with poisoned():
        assert same(step(options, leaves()), clean)
    assert not any(x.isnan().any() for x in clean)


@on_cuda
@KERNELS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_call_waits(monkeypatch: pytest.MonkeyPatch, kernels: str, options: Any) -> None:
    monkeypatch.setenv("XENTLIB_KERNELS", kernels)
    given = leaves()
    step(options, given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(options, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda
@KERNELS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_graph_has_the_bits_of_a_call(
    monkeypatch: pytest.MonkeyPatch, kernels: str, options: Any
) -> None:
    monkeypatch.setenv("XENTLIB_KERNELS", kernels)
    given = leaves()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(options, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(options, given)
    with torch.no_grad():
        given[0].copy_(given[0].flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert same(kept, step(options, given))


@on_cuda
@KERNELS
def test_a_compiled_call_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("XENTLIB_KERNELS", kernels)
    hidden, weight, labels, _ = leaves()

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chunked_nll(x, w, labels, temperature=0.7, max_chunk_bytes=8 * V * 4).loss

    compiled = torch.compile(loss, fullgraph=True)
    found = [torch.autograd.grad(of(hidden, weight), (hidden, weight)) for of in (loss, compiled)]
    assert same(*map(list, found))


@on_cuda
@KERNELS
def test_offsets_beyond_31_bits(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """A4: a chunk of 8 GiB, whose last row begins beyond 2^31 logits."""
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("32 GiB of memory are needed")
    monkeypatch.setenv("XENTLIB_KERNELS", kernels)
    rows, vocab = 8192, 270_000
    hidden, weight = torch.randn(rows, 8), torch.randn(vocab, 8)
    labels = torch.randint(0, vocab, (rows,))
    out = chunked_nll(hidden, weight, labels, outputs=("logprobs",), max_chunk_bytes=1 << 40)
    assert out.logprobs is not None
    logits = hidden[-8:].double() @ weight.double().T
    exact = -F.cross_entropy(logits, labels[-8:], reduction="none")
    assert not failures(check("A4", out.logprobs[-8:].detach().cpu().numpy(), exact.cpu().numpy()))


@on_cuda
@KERNELS
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_is_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, kernels: str, *, gradient: bool
) -> None:
    monkeypatch.setenv("XENTLIB_KERNELS", kernels)
    rows, width, vocab, budget = 8192, 512, 32_000, 256 << 20
    hidden = torch.randn(rows, width).bfloat16().requires_grad_(gradient)
    weight = torch.randn(vocab, width).bfloat16().requires_grad_(gradient)
    labels = torch.randint(0, vocab, (rows,))

    def call() -> None:
        loss = chunked_nll(hidden, weight, labels, max_chunk_bytes=budget).loss
        if gradient:
            torch.autograd.grad(loss, (hidden, weight))

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    found = torch.cuda.max_memory_allocated() - before
    plan = plan_chunks(rows, vocab, width, dtype="bfloat16", max_chunk_bytes=budget)
    expected = peak_bytes(
        plan,
        backend="torch",
        dtype="bfloat16",
        gradient=gradient,
        platform="gpu",
        kernels=kernels == "triton",
    )
    assert abs(found / expected - 1) <= 0.1, f"{found} bytes, the plan says {expected}"
