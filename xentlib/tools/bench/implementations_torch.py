"""Implementations of a language-model head's loss in PyTorch: other libraries' and the plain ones.

Each is called as (hidden, weight, labels, softcap, reduction), see `Implementation`; a library's
function is looked up when it is called.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xentlib.torch
from xentlib.tools.bench.cases import Arrays, OnHost
from xentlib.tools.bench.implementation import (
    PER_TOKEN,
    BareProducts,
    Implementation,
    Kind,
    Lineup,
    not_installed,
    of_package,
    ours,
)

# As documented: in bfloat16 only "auto" accumulates in float32, the others in bfloat16.
POLICIES = ("auto", "accurate", "balanced", "compact")
# What TRL's own trainers pass.
TRL_CHUNK = 32_768
LIGER = ("liger-kernel", "liger_kernel.transformers.functional.liger_fused_linear_cross_entropy")
# Of the same wheel, written in CuTe for Hopper (compute capability 9.0) and bfloat16. The first:
# N a multiple of 128, V of 256, d weight in one product. The second stores no logits.
CUTE = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
LIGER_SM90 = ("liger-kernel", f"{CUTE}.liger_fused_linear_cross_entropy_sm90")
CUT = ("cut-cross-entropy", "cut_cross_entropy.linear_cross_entropy")
QUACK = ("quack-kernels", "quack.linear_cross_entropy.chunked_linear_cross_entropy")

Softcap = float | None


def eager(
    x_NH: Tensor, w_VH: Tensor, y_N: Tensor, softcap: Softcap, reduction: str, upcast: bool = False
) -> Tensor:
    """With `upcast` the usual training script: logits rounded by the head, upcast by the loss."""
    z_NV = F.linear(x_NH, w_VH)
    if upcast:
        z_NV = z_NV.float()
    if softcap is not None:
        z_NV = softcap * torch.tanh(z_NV / softcap)
    return F.cross_entropy(z_NV, y_N, reduction=reduction)


@cache
def program() -> Any:
    """For any size, so that one program of a dtype serves all cases of its process."""
    return torch.compile(partial(eager, upcast=True), dynamic=True)


def compiled(*call: Any) -> Any:
    return program()(*call)


def core(x_NH: Tensor, w_VH: Tensor, y_N: Tensor, _: None, reduction: str, policy: str) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)  # type: ignore[arg-type]
    return F.linear_cross_entropy(x_NH, w_VH, y_N, reduction=reduction, options=options)


def trl(x_NH: Tensor, w_VH: Tensor, y_N: Tensor, softcap: Softcap, reduction: str) -> Tensor:
    chunked = import_module("trl.kernels").ChunkedLogProbFunction
    # No bias, temperature 1, logit scale 1, and nothing beside the log-probabilities.
    nll_N: Tensor = -chunked.apply(x_NH, w_VH, None, y_N, 1.0, TRL_CHUNK, softcap, 1.0, ())[0]
    return nll_N.mean() if reduction == "mean" else nll_N


def liger_scaled(x_NH: Tensor, w_VH: Tensor, y_N: Tensor, _: None, reduction: str) -> Tensor:
    """Liger's loss of each token for Hopper."""
    module = import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    nll_N: Tensor = module.LigerFusedScaledCrossEntropySM90Function.apply(x_NH, w_VH, y_N)
    return nll_N.mean() if reduction == "mean" else nll_N


def implementations(dtype: torch.dtype) -> list[Implementation]:
    """Ours first; whoever is not here has an excuse."""
    old = None if hasattr(F, "linear_cross_entropy") else "needs torch 2.13"
    cute = not_installed("liger-kernel", "liger_kernel") or not_installed(
        "nvidia-cutlass-dsl", "cutlass"
    )
    if dtype != torch.bfloat16:
        cute = "knows bfloat16 alone"
    upcast = Implementation("eager, float32 logits", partial(eager, upcast=True))
    return [
        ours(xentlib.torch),
        Implementation("eager, full logits", eager),
        *([] if dtype == torch.float32 else [upcast]),
        Implementation("torch.compile, full logits", compiled),
        *(
            Implementation(
                f"F.linear_cross_entropy {x}", partial(core, policy=x), old, softcap=False
            )
            for x in POLICIES
        ),
        of_package("Liger-Kernel, Triton", *LIGER, accum_dtype=None),
        of_package("Liger-Kernel, Triton, float32 d weight", *LIGER, accum_dtype=torch.float32),
        of_package("Liger-Kernel, SM90", *LIGER_SM90, softcap=False, per_token=False)._replace(
            absent=cute
        ),
        Implementation("Liger-Kernel, SM90, per token", liger_scaled, cute, "cuda", softcap=False),
        of_package("Cut Cross-Entropy", *CUT, filter_eps="high"),
        of_package("Cut Cross-Entropy, no filter", *CUT, filter_eps=None),
        Implementation("TRL, chunked", trl, not_installed("trl")),
        of_package("QuACK", *QUACK, softcap=False, per_token=False),
    ]


# --- how they are run ---------------------------------------------------------------------------


def place(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def draws(device: str, seed: int) -> OnHost:
    where = place(device)
    return OnHost(seed) if where == "cpu" else OnDevice(where, seed)


class OnDevice(OnHost):
    """NumPy would take ten seconds for the 660 million numbers of Llama's head."""

    def __init__(self, device: str, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.where: dict[str, Any] = {"device": device, "generator": generator}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.where)

    def integers(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), **self.where)

    def rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().float()


class Field(Lineup):
    """The field of PyTorch."""

    def place(self, arrays: Arrays, device: str) -> tuple[list[Implementation], str]:
        device, dtype = place(device), getattr(torch, arrays.dtype)
        kind_of_device = torch.device(device).type
        self.on_cuda = kind_of_device == "cuda"
        self.device = torch.cuda.get_device_name(device) if self.on_cuda else "cpu"
        self.threads = torch.get_num_threads()
        self.hidden_NH = torch.as_tensor(arrays.hidden_NH).to(device, dtype)
        self.weight_VH = torch.as_tensor(arrays.weight_VH).to(device, dtype)
        self.labels_N = torch.as_tensor(arrays.labels_N).to(device)
        self.upstream_N = torch.as_tensor(arrays.upstream_N).to(device)
        return implementations(dtype), kind_of_device

    def bare(self, *, reuse: bool) -> BareProducts:
        """On CPU no `mm` returns float32 from bfloat16, so operands are float32 copies and oneDNN
        is told to use bfloat16 units for them: products stay exact, sums float32. The copies are
        made here, outside the clock."""
        device, dtype = self.hidden_NH.device, self.hidden_NH.dtype
        on_cpu = device.type == "cpu"
        precision = cpu_bf16_units if on_cpu and dtype == torch.bfloat16 else nullcontext
        store = torch.float32 if on_cpu else dtype
        num_tokens, vocab_size = len(self.hidden_NH), len(self.weight_VH)
        shapes = ((num_tokens, vocab_size), self.hidden_NH.shape, self.weight_VH.shape)
        buffers = [torch.zeros(shape, device=device) if reuse else None for shape in shapes]
        more: dict[str, Any] = {} if store == torch.float32 else {"out_dtype": torch.float32}
        dz_NV = torch.randn(shapes[0], device=device, dtype=store) if more else None

        def product(slot: int, a: Tensor, b: Tensor, axis_a: int, axis_b: int) -> Tensor:
            a, b = a if axis_a == 1 else a.T, b if axis_b == 0 else b.T
            with precision():
                return torch.mm(a, b, out=buffers[slot], **more)

        return BareProducts(product, self.hidden_NH.to(store), self.weight_VH.to(store), dz_NV)

    def call(self, row: Implementation, kind: Kind) -> dict[str, Any]:
        # Leaves of this call's own: no gradient is ever accumulated, so nothing is shared.
        leaves = self.hidden_NH.detach().requires_grad_(), self.weight_VH.detach().requires_grad_()
        reduction = "none" if kind == PER_TOKEN else "mean"

        def value() -> tuple[Tensor]:
            with torch.no_grad():
                inputs = self.hidden_NH, self.weight_VH, self.labels_N
                return (row.run(*inputs, self.softcap, reduction),)

        def value_and_gradient() -> tuple[Tensor, ...]:
            out = row.run(*leaves, self.labels_N, self.softcap, reduction)
            upstream = self.upstream_N.to(out.dtype) if kind == PER_TOKEN else None
            return (out.detach(), *torch.autograd.grad(out, leaves, upstream))

        run = value if kind == "loss" else value_and_gradient
        peak_bytes = cuda_peak_bytes if self.on_cuda else cpu_peak_bytes
        return {"run": run, "peak_bytes": partial(peak_bytes, run)}

    def wait(self) -> None:
        if self.on_cuda:  # on a CPU operators have returned when they return
            torch.cuda.synchronize()

    def ready(self, result: Any) -> None:
        self.wait()


@contextmanager
def cpu_bf16_units() -> Iterator[None]:
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


# --- memory -------------------------------------------------------------------------------------


def cuda_peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes by which the caching allocator's peak rose above what was there, results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return int(peak)


def cpu_peak_bytes(run: Callable[[], Any]) -> int:
    """The same on CPU, from every allocation and release of a tensor in the profiler's trace.

    Exact, byte for byte, for what is a tensor; blind to the scratch that GEMM libraries allocate
    for themselves, which the growth of resident memory shows (`resident_growth`).
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = run()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        now += int(event["args"]["Bytes"])
        peak = max(peak, now)
    return peak
