"""Ways to the loss of a language-model head in PyTorch.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xentlib.bench.cases import Arrays
from xentlib.bench.contestant import BARE, OURS, REUSED, Contestant, Field
from xentlib.torch import chunked_nll

__all__ = ["build"]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

# As documented: in bfloat16 only "auto" accumulates in float32, the others in bfloat16.
POLICIES = ("auto", "accurate", "balanced", "compact")


def build(arrays: Arrays, device: str = "auto", only: Collection[str] | None = None) -> Field:
    """The field; `only` names the contestants that are wanted, None wants all."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arrays.dtype)
    hidden_NH = torch.from_numpy(arrays.hidden_NH).to(device, dtype)
    weight_VH = torch.from_numpy(arrays.weight_VH).to(device, dtype)
    labels_N = torch.from_numpy(arrays.labels_N).to(device)
    contestants: list[Contestant] = []
    for name in BARE:
        if only is None or name in only:
            floor = Floor(hidden_NH, weight_VH, reuse=name == REUSED)
            contestants += [
                Contestant(name, "loss", floor.loss),
                Contestant(name, "loss + gradient", floor.loss_and_gradient),
            ]
    for name, loss in losses(dtype).items():
        if only is None or name in only:
            contestants += both_kinds(name, loss, hidden_NH, weight_VH, labels_N)
    on_cuda = torch.device(device).type == "cuda"
    wait = torch.cuda.synchronize if on_cuda else _nothing
    return Field(
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


# --- the others ---------------------------------------------------------------------------------


def losses(dtype: torch.dtype) -> dict[str, Loss]:
    """Everyone's mean loss over the tokens, by name."""
    found: dict[str, Loss] = {OURS: ours, "eager, full logits": eager}
    if dtype != torch.float32:
        found["eager, float32 logits"] = eager_upcast
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None and hasattr(F, "linear_cross_entropy"):
        for policy in POLICIES:
            found[f"F.linear_cross_entropy {policy}"] = fused(options(acc_policy=policy))
    return found


def ours(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> Tensor:
    loss: Tensor = chunked_nll(hidden_NH, weight_VH, labels_N).loss
    return loss


def eager(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_NH, weight_VH), labels_N)


def eager_upcast(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> Tensor:
    """The usual training script: logits rounded to bfloat16 by the head, upcast by the loss."""
    return F.cross_entropy(F.linear(hidden_NH, weight_VH).float(), labels_N)


def fused(options: Any) -> Loss:
    def loss(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> Tensor:
        value: Tensor = F.linear_cross_entropy(hidden_NH, weight_VH, labels_N, options=options)
        return value

    return loss


def both_kinds(
    name: str, loss: Loss, hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor
) -> list[Contestant]:
    # Leaves of this contestant's own: no gradient is ever accumulated, so nothing is shared.
    leaves = hidden_NH.detach().requires_grad_(), weight_VH.detach().requires_grad_()

    def value() -> tuple[Tensor]:
        with torch.no_grad():
            return (loss(hidden_NH, weight_VH, labels_N),)

    def value_and_gradient() -> tuple[Tensor, ...]:
        out = loss(*leaves, labels_N)
        return (out.detach(), *torch.autograd.grad(out, leaves))

    return [
        Contestant(name, "loss", value),
        Contestant(name, "loss + gradient", value_and_gradient),
    ]


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
