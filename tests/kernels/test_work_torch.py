"""What the operator works with in PyTorch: which GEMMs run and how precisely, threads, memory.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from xentlib.contract import check, failures
from xentlib.plan import CPU_BLOCK_BYTES, plan_chunks
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.problems import Case, build

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from helpers.leaves_torch import OUTPUTS, loss_and_gradients, same, tensors  # noqa: E402
from xentlib.torch import chunked_nll  # noqa: E402
from xentlib.torch.core import device, gemm, logits  # noqa: E402
from xentlib.torch.core import gradients as sums  # noqa: E402


class Gemms(TorchDispatchMode):
    """Counts matrix products by the kernel that runs, inside the custom operator too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.mkldnn._linear_pointwise,
        ):
            self.sizes.append(tuple(args[-1].shape))
        return function(*args, **(kwargs or {}))


# Of a vocabulary that fills lines of memory: a GPU makes one of 157 classes in two parts.
EVEN = Case("even", 61, 24, 160, ignored=0.2, confident=0.3)
NEEDS = {
    "loss only": ((), 1),
    "everything": (("hidden", "weight", "bias"), 3),
    "frozen head": (("hidden",), 2),
    "frozen trunk": (("weight", "bias"), 2),
    "bias only": (("bias",), 1),
    "no bias": (("hidden", "weight"), 3),
}


def count_gemms(leaves: dict, upstream: float) -> tuple[int, list]:
    """Number of GEMMs of one chunk, by the profiler: it sees what runs inside the operator."""
    from torch.profiler import ProfilerActivity, profile

    wanted = [x for x in leaves.values() if x.requires_grad]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = chunked_nll(**leaves).loss
        got = torch.autograd.grad(loss, wanted, torch.tensor(upstream)) if wanted else ()
    gemms = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::matmul")
    gemms += ("mkldnn::_linear_pointwise",)
    return sum(e.count for e in profiler.key_averages() if e.key in gemms), [loss, *got]


@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name):
    """M18, D5: three GEMMs, two with one side frozen, one for the loss; same bits."""
    wanted, expected = NEEDS[name]
    leaves, p = tensors(EVEN)
    full = dict(zip(("loss", "hidden", "weight", "bias"), count_gemms(leaves, p.upstream)[1]))
    for leaf in ("hidden", "weight", "bias"):
        leaves[leaf].requires_grad_(leaf in wanted)
    count, got = count_gemms(leaves, p.upstream)
    assert count == expected
    for key, value in zip(("loss", *wanted), got):
        assert same(value, full[key])


def test_no_grad_costs_one_gemm():
    """D5: a call that needs no gradient runs one."""
    leaves, _ = tensors(EVEN)
    with torch.no_grad(), Gemms() as seen:
        out = chunked_nll(**leaves)
    assert not out.loss.requires_grad
    assert len(seen.sizes) <= 1  # the mode may see the operator alone; the profiler sees inside
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    assert count_gemms(leaves, 1.5)[0] == 1


WHOLE = [(16, 24, 40), (16, 24, 41), (16, 25, 41), (3, 7, 5), (16, 24, 7)]


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", WHOLE, ids=str)
def test_products_of_a_gpu_have_whole_lines(monkeypatch, sizes, dtype):
    """Catches: columns or terms left out or added twice where a product is made in two parts, and
    the larger part of an odd number of columns, for which cuBLAS has slow programs alone."""
    # The way of a GPU, whose products return float32 of 16-bit operands.
    monkeypatch.setitem(device.KINDS, "cpu", device.KINDS["cuda"])
    made = []

    def product(real, *tensors, out_dtype=None, out):
        made.append(tuple(x.shape for x in tensors))
        return real(*(x.float() for x in tensors), out=out)

    monkeypatch.setattr(torch, "mm", partial(product, torch.mm))
    monkeypatch.setattr(torch, "addmm", partial(product, torch.addmm))
    monkeypatch.setattr(Tensor, "addmm_", lambda x, a, b: torch.addmm(x, a, b, out=x))
    rows, depth, columns = sizes
    line = 16 // dtype.itemsize
    a = torch.randint(-4, 5, (rows, 64)).to(dtype)[:, :depth]  # whose products are exact
    b = torch.randint(-4, 5, (depth, columns)).to(dtype)
    exact = a.double() @ b.double()
    out = torch.full((rows, 64), torch.nan)[:, :columns]
    gemm.mm(a, b, out)
    assert torch.equal(out.double(), exact)
    gemm.addmm_(out, a, b, first=False)
    assert torch.equal(out.double(), 2 * exact)
    for *_, (_, k), (_, n) in made:
        assert k % line == 0 or k < line
        assert n % 4 == 0 or n < 4


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_stays_float32(monkeypatch, precision):
    """Rounding point 1: operands exact, whatever the process has chosen for its own products."""
    leaves, p = tensors(Case("precise", 96, 128, 600))
    want = loss_and_gradients(leaves, p.upstream)
    seen = []

    def mm(*args, **kwargs):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return torch_nll_mm(*args, **kwargs)

    torch_nll_mm = gemm.mm
    monkeypatch.setattr(logits, "mm", mm)
    monkeypatch.setattr(sums, "mm", mm)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = loss_and_gradients(leaves, p.upstream)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    # Not every CPU rounds when it may: the setting is looked at as well as the bits.
    assert set(seen) == {"ieee"}
    assert all(same(a, b) for a, b in zip(want, got))


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_threads_do_not_leave_the_process_at_another_precision(monkeypatch, precision):
    """A11. Eight threads, products of float32 and, as where there is AMX, of bfloat16: each has its
    own bits, and the process its own setting. Catches: a switch that each thread gives back as it
    found it (31 of 150 rounds ended at "bf16")."""
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    both = [tensors(Case("threads", 64, 32, 300, dtype=d)) for d in ("float32", "bfloat16")]
    want = [loss_and_gradients(leaves, p.upstream) for leaves, p in both]
    settings, rounds = torch.backends.mkldnn.matmul, 10
    before, interval = torch.get_float32_matmul_precision(), sys.getswitchinterval()
    torch.set_float32_matmul_precision(precision)
    sys.setswitchinterval(1e-6)
    try:
        found = settings.fp32_precision
        with ThreadPoolExecutor(8) as pool:

            def work(k):
                leaves, p = both[k % 2]
                return [loss_and_gradients(leaves, p.upstream) for _ in range(rounds)]

            results = list(pool.map(work, range(8)))
        assert settings.fp32_precision == found
        assert torch.get_float32_matmul_precision() == precision
    finally:
        sys.setswitchinterval(interval)
        torch.set_float32_matmul_precision(before)
    for k, every in enumerate(results):
        for got in every:
            assert all(same(a, b) for a, b in zip(want[k % 2], got))


@pytest.mark.cpu
def test_precision_is_left_alone_where_it_does_not_matter(monkeypatch):
    """Nothing is switched where the process asks for float32 already, for float64, or for bfloat16
    without AMX."""
    written = []

    class Settings:
        fp32_precision = property(lambda self: "none", lambda self, value: written.append(value))

    monkeypatch.setattr(torch.backends.mkldnn, "matmul", Settings())
    monkeypatch.setattr(gemm, "ONEDNN", True)
    monkeypatch.setattr(gemm, "has_amx", lambda: False)
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with gemm.gemm_precision(dtype, cpu):
            pass
    assert not written
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    # Two threads: the first to come is the first to go.
    first, second = (gemm.gemm_precision(torch.bfloat16, cpu) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert written == ["bf16"]
    second.__exit__(None, None, None)
    assert written == ["bf16", "none"]


# --- runs, threads and memory --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_and_runs_do_not_change_bits(dtype):
    """A11: one thread, two threads, and again."""
    case = Case("threads", 257, 64, 1031, dtype=dtype, token_weights=True, layout="VH")
    p = build(case, 5)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            seen.append(run("torch", p, chunk_tokens=64))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for name, want in seen[0].by_name().items():
            got = getattr(other, name)
            assert failures(check("A11", got, want, quantity=name)) == []


def allocations(function) -> tuple[int, int]:
    """Largest single allocation and peak of live bytes while `function` runs, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    live = peak = largest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak, largest = max(peak, live), max(largest, event.nbytes())
    del kept
    return largest, peak


@pytest.mark.cpu
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "outputs": OUTPUTS}], ids=str)
def test_memory_is_the_formula(options):
    """M16: no [N, V] buffer; peak within 5 % of the plan's terms."""
    tokens, width, vocab = 4096, 64, 2048
    leaves, p = tensors(Case("memory", tokens, width, vocab, ignored=0.0, bias=False))
    budget = 256 * vocab * 4
    plan = plan_chunks(tokens, vocab, width, max_chunk_bytes=budget)
    wanted = [leaves["hidden"], leaves["weight"]]

    def step():
        loss = chunked_nll(**leaves, max_chunk_bytes=budget, **options).loss
        return torch.autograd.grad(loss, wanted, torch.tensor(p.upstream))

    step()  # what is allocated once
    largest, peak = allocations(step)
    full = tokens * vocab * 4
    assert largest < full / 8
    block = plan.block_tokens(CPU_BLOCK_BYTES) * vocab * 4
    terms = {
        "chunk": plan.chunk_bytes,
        "block scratch": 2 * block + block,  # diff, onehot, one temporary of a block
        "d weight": vocab * width * 4,
        "d hidden": tokens * width * 4,
        "per token": tokens * 4 * 24,
        "rows of a chunk": 4 * plan.chunk_tokens * width * 4,
    }
    assert peak <= 1.05 * sum(terms.values())
    assert peak < full / 2
    # Eager holds the logits: what the bound above would not let pass.
    eager, _ = allocations(
        lambda: F.cross_entropy(wanted[0] @ wanted[1].T, leaves["labels"].long()).backward()
    )
    assert eager >= full
