"""Ways to the loss of a language-model head in PyTorch.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xentlib.tools.bench.cases import Arrays, Draws, OnHost
from xentlib.tools.bench.contestant import (
    ALL,
    PER_TOKEN,
    REUSED,
    TRAINING,
    Contestant,
    Kind,
    Lineup,
    Peer,
    Wanted,
    contestants_of,
    floors,
)
from xentlib.tools.bench.peers_torch import peers

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def place(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def draws(device: str, seed: int) -> Draws:
    where = place(device)
    return OnHost(seed) if where == "cpu" else OnDevice(where, seed)


class OnDevice:
    """NumPy would take ten seconds for the 660 million numbers of Llama's head."""

    def __init__(self, device: str, seed: int) -> None:
        self.made: dict[str, Any] = {"device": device}
        self.made["generator"] = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.made)

    def integers(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), **self.made)

    def rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().float()


def build(arrays: Arrays, device: str = "auto", wanted: Wanted = ALL) -> Lineup:
    """The field of PyTorch."""
    device = place(device)
    dtype = getattr(torch, arrays.dtype)
    inputs = (
        torch.as_tensor(arrays.hidden_NH).to(device, dtype),
        torch.as_tensor(arrays.weight_VH).to(device, dtype),
        torch.as_tensor(arrays.labels_N).to(device),
        torch.as_tensor(arrays.upstream_N).to(device),
    )
    kind_of_device = torch.device(device).type

    def floor(name: str) -> Floor:
        return Floor(inputs[0], inputs[1], reuse=name == REUSED)

    def make(peer: Peer, kind: Kind) -> Contestant:
        return contestant(peer, kind, inputs, arrays.softcap)

    contestants = [
        *floors(wanted, floor),
        *contestants_of(peers(dtype), wanted, kind_of_device, arrays.softcap, make),
    ]
    on_cuda = kind_of_device == "cuda"
    wait = torch.cuda.synchronize if on_cuda else _nothing
    return Lineup(
        tuple(contestants),
        torch.cuda.get_device_name(device) if on_cuda else "cpu",
        wait,
        lambda result: wait(),
        cuda_peak_bytes if on_cuda else cpu_peak_bytes,
    )


def _nothing() -> None:
    """CPU operators have returned when they return."""


# --- the floor ----------------------------------------------------------------------------------


class Floor:
    """The three products that every loss needs; into buffers that are already there if `reuse`.

    float32 logits and gradients; dz in the input dtype. On CPU no `mm` returns float32 from
    bfloat16, so operands are float32 copies and oneDNN is told to use bfloat16 units for them:
    products stay exact, sums float32. The copies are made here, outside the clock.
    """

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, *, reuse: bool) -> None:
        device, dtype = hidden_NH.device, hidden_NH.dtype
        self.low = device.type != "cpu" and dtype != torch.float32
        self.precision = (
            cpu_bf16_units if device.type == "cpu" and dtype == torch.bfloat16 else nullcontext
        )
        store = dtype if self.low else torch.float32
        self.hidden_NH, self.weight_VH = hidden_NH.to(store), weight_VH.to(store)
        shape = hidden_NH.shape[0], weight_VH.shape[0]
        # float32: the logits stand in for their own gradient, as in a head that works in place.
        self.dz_NV = torch.randn(shape, device=device, dtype=store) if self.low else None
        self.old: tuple[Tensor | None, ...] = (None, None, None)
        if reuse:
            shapes = (shape, hidden_NH.shape, weight_VH.shape)
            self.old = tuple(torch.zeros(shape, device=device) for shape in shapes)

    def _mm(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        if self.low:
            return torch.mm(a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out=out)

    def loss(self) -> tuple[Tensor]:
        precision: AbstractContextManager[None] = self.precision()
        with precision:
            return (self._mm(self.hidden_NH, self.weight_VH.T, self.old[0]),)

    def loss_and_gradient(self) -> tuple[Tensor, Tensor, Tensor]:
        precision: AbstractContextManager[None] = self.precision()
        with precision:
            z_NV = self._mm(self.hidden_NH, self.weight_VH.T, self.old[0])
            dz_NV = z_NV if self.dz_NV is None else self.dz_NV
            dx_NH = self._mm(dz_NV, self.weight_VH, self.old[1])
            dw_VH = self._mm(dz_NV.T, self.hidden_NH, self.old[2])
        return z_NV, dx_NH, dw_VH


@contextmanager
def cpu_bf16_units() -> Iterator[None]:
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


# --- the peers ----------------------------------------------------------------------------------


def contestant(peer: Peer, kind: Kind, inputs: Inputs, softcap: float | None) -> Contestant:
    hidden_NH, weight_VH, labels_N, upstream_N = inputs
    # Leaves of this contestant's own: no gradient is ever accumulated, so nothing is shared.
    leaves = hidden_NH.detach().requires_grad_(), weight_VH.detach().requires_grad_()

    def value() -> tuple[Tensor]:
        with torch.no_grad():
            return (peer.run(hidden_NH, weight_VH, labels_N, softcap, "mean"),)

    def value_and_gradient() -> tuple[Tensor, ...]:
        out = peer.run(*leaves, labels_N, softcap, "mean")
        return (out.detach(), *torch.autograd.grad(out, leaves))

    def per_token() -> tuple[Tensor, ...]:
        out_N = peer.run(*leaves, labels_N, softcap, "none")
        return (out_N.detach(), *torch.autograd.grad(out_N, leaves, upstream_N.to(out_N.dtype)))

    runs: dict[Kind, Callable[[], tuple[Tensor, ...]]] = {
        "loss": value,
        TRAINING: value_and_gradient,
        PER_TOKEN: per_token,
    }
    return Contestant(peer.name, kind, runs[kind])


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
    for themselves, which the growth of resident memory shows (`memory.py`).
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
