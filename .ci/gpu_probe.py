"""What the design rests on, timed on a device: products as the head makes them, and the head itself
by kernels and chunk size.

    python .ci/gpu_probe.py --out probe.json [--device cuda] [--seconds 90] [--tiny]

Shapes: N tokens, T tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xentlib.plan import pad_columns, peak_bytes, plan_chunks
from xentlib.torch import chunked_logprobs, chunked_nll
from xentlib.torch.core.gemm import addmm_, mm, operand, storage_dtype
from xentlib.torch.core.kernels import runnable

# Name, N, H, V, options of the call
HEADS: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("llama3-8b", 8192, 4096, 128_256, {}),
    ("qwen3-0.6b", 8192, 1024, 151_936, {}),
    ("gemma2-2b", 8192, 2304, 256_000, {"softcap": 30.0}),
    ("gpt2", 8192, 768, 50_257, {}),
    ("llama3-8b, 32768 tokens", 32_768, 4096, 128_256, {}),
]
TINY = [("tiny", 16, 32, 257, {}), ("tiny, softcap", 16, 32, 257, {"softcap": 30.0})]
CHUNKS = (2048, 4096, 8192)


class Clock:
    """Milliseconds of a call, its median over some."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def __call__(self, call: Callable[[], Any]) -> dict[str, float]:
        for _ in range(2):
            call()
        times = []
        for _ in range(self.rounds):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return {"ms_median": statistics.median(times), "ms_best": min(times)}

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def peak_of(device: str, call: Callable[[], Any]) -> int:
    """Bytes that a call adds at its peak; 0 where nobody counts them."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def products(device: str, dtype: torch.dtype, shape: tuple[int, int, int], clock: Clock) -> Any:
    """Each product of a chunk, and where its logits' rows begin: at multiples of 256 bytes, every
    4 V bytes, and, for dz of 16 bits, over the upper half of a row of logits."""
    tokens, width, vocab = shape
    dtype = storage_dtype(dtype, torch.float32, torch.device(device))
    x = torch.randn(tokens, width, device=device).to(dtype)
    w = torch.randn(vocab, width, device=device).to(dtype)
    dx = torch.empty(tokens, width, device=device)
    dw = torch.empty(vocab, width, device=device)
    times = {}
    for name, columns in {"aligned": pad_columns(vocab), "every 4 V bytes": vocab}.items():
        buffer = torch.zeros(tokens, columns, device=device)
        z = buffer[:, :vocab]
        low = buffer.view(dtype)[:, -columns:][:, :vocab] if dtype.itemsize == 2 else z
        beside = torch.zeros(tokens, vocab, device=device, dtype=low.dtype)
        times[f"logits, {name}"] = clock(lambda z=z: mm(x, w.T, out=z))
        for where, dz in {"over logits": low, "beside": beside}.items():
            times[f"d hidden, {name}, {where}"] = clock(lambda dz=dz: mm(dz, w, out=dx))
            for first in (True, False):
                label = f"d weight, {name}, {where}{', first' if first else ''}"
                times[label] = clock(lambda dz=dz, first=first: addmm_(dw, dz.T, x, first=first))
    return times


def floor_of(x: Tensor, w: Tensor, chunk: int, clock: Clock) -> dict[str, float]:
    """The three products of a head, in chunks, with float32 results and one sum of d weight."""
    x, w = (operand(a, a.dtype, torch.float32) for a in (x, w))
    logits = torch.empty(chunk, w.shape[0], device=x.device)
    dz = torch.zeros(chunk, w.shape[0], device=x.device, dtype=x.dtype)
    dx, dw = torch.empty(x.shape, device=x.device), torch.empty(w.shape, device=x.device)

    def all_three() -> None:
        for start in range(0, len(x), chunk):
            part = x[start : start + chunk]
            mm(part, w.T, out=logits[: len(part)])
            mm(dz[: len(part)], w, out=dx[start : start + chunk])
            addmm_(dw, dz[: len(part)].T, part, first=start == 0)

    return clock(all_three)


def waves_of(device: str, width: int, vocab: int, chunks: list[int], clock: Clock) -> Any:
    """Milliseconds of d hidden by tokens of a chunk: it has few tiles, which fill the last of the
    device's multiprocessors or leave it idle."""
    w = operand(torch.randn(vocab, width, device=device).bfloat16(), torch.bfloat16, torch.float32)
    times = {}
    for tokens in chunks:
        dz = torch.zeros(tokens, vocab, device=device, dtype=w.dtype)
        dx = torch.empty(tokens, width, device=device)
        times[str(tokens)] = clock(lambda dz=dz, dx=dx: mm(dz, w, out=dx))["ms_median"]
    return times


def calls_of(x: Tensor, w: Tensor, y: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """By kind: functions of a budget."""
    plain_x, plain_w = x.detach(), w.detach()

    def loss_and_gradient(budget: int) -> Any:
        loss = chunked_nll(x, w, y, **options, max_chunk_bytes=budget).loss
        return torch.autograd.grad(loss, (x, w))

    def loss(budget: int) -> Any:
        return chunked_nll(plain_x, plain_w, y, **options, max_chunk_bytes=budget)

    def logprobs_and_gradient(budget: int) -> Any:
        out = chunked_logprobs(x, w, y, **options, max_chunk_bytes=budget)
        return torch.autograd.grad(out.logprobs.sum(), (x, w))

    kinds = (loss_and_gradient, loss, logprobs_and_gradient)
    return dict(zip(("loss + gradient", "loss", "log-probs + gradient"), kinds))


def heads(args: argparse.Namespace, clock: Clock, until: float) -> Iterator[dict[str, Any]]:
    """Each head by kernels, kind and chunk, the fastest kernels of each first."""
    for name, count, width, vocab, options in TINY if args.tiny else HEADS:
        x = torch.randn(count, width, device=args.device).bfloat16().requires_grad_()
        w = (torch.randn(vocab, width, device=args.device) * 2 / width**0.5).bfloat16()
        w.requires_grad_()
        y = torch.randint(0, vocab, (count,), device=args.device)
        floor = floor_of(x.detach(), w.detach(), min(count, 8192), clock)["ms_median"]
        wanted = product(
            reversed(list(runnable())),
            calls_of(x, w, y, options).items(),
            sorted({min(count, chunk) for chunk in CHUNKS}),
        )
        for kernels, (kind, call), chunk in wanted:
            if time.monotonic() > until:
                return
            os.environ["XENTLIB_KERNELS"] = kernels
            budget = chunk * vocab * 4
            plan = plan_chunks(count, vocab, width, dtype="bfloat16", max_chunk_bytes=budget)
            run = partial(call, budget)
            row = clock(run)
            yield {
                "head": name,
                "shape": [count, width, vocab],
                "dtype": "bfloat16",
                "kind": kind,
                "kernels": kernels,
                "chunk_tokens": plan.chunk_tokens,
                **row,
                "floor_ms": floor,
                "ratio": row["ms_median"] / floor,
                "peak_bytes": peak_of(args.device, run),
                "predicted_bytes": peak_bytes(
                    plan,
                    backend="torch",
                    dtype="bfloat16",
                    gradient=kind != "loss",
                    recompute=kind.startswith("log"),
                    platform="gpu",
                    kernels=kernels == "triton",
                ),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    clock = Clock(args.device, 1 if args.tiny else 10)
    shape = (16, 32, 257) if args.tiny else (4096, 4096, 128_256)
    odd = (16, 32, 259) if args.tiny else (4096, 768, 50_257)
    copied = torch.empty(1 << (10 if args.tiny else 30), device=args.device, dtype=torch.uint8)
    rate = clock(copied.clone)["ms_best"]
    report: dict[str, Any] = {
        "copy_bytes_per_second": 2e3 * copied.numel() / rate,
        "products": {},
        "heads": [],
    }
    for of in (shape, odd):
        for dtype in (torch.bfloat16, torch.float32)[: 1 if of is odd else 2]:
            label = f"{list(of)}, {str(dtype).removeprefix('torch.')}"
            report["products"][label] = products(args.device, dtype, of, clock)
    gemma2 = (32, 257, [12, 16]) if args.tiny else (2304, 256_000, [1024, 1792, 2048, 3712, 4096])
    report["waves"] = waves_of(args.device, *gemma2, clock)
    for row in heads(args, clock, until):
        report["heads"].append(row)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
