"""What the design rests on, timed on a device: products as the head makes them, and the head itself
by kernels and chunk size.

    python .ci/gpu_probe.py --out probe.json [--device cuda] [--seconds 90] [--tiny]

Shapes: N tokens, T tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xentlib.plan import gpu_time, pad_columns, peak_bytes, plan_chunks
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
# Width, vocabulary and tokens of chunks: what 2 GiB of logits hold, and what fills tiles.
TILES = {
    "llama3-8b": [4096, 128_256, 4096, 4160],
    "gemma2-2b": [2304, 256_000, 1792, 1920, 2048],
    "gemma3-27b": [5376, 262_208, 1536, 1792, 1984],
    "qwen3-0.6b": [1024, 151_936, 3328, 3456, 3520],
    "gpt2": [768, 50_257, 5632, 8192],
    "mistral-7b": [4096, 32_000, 7296, 8192],
}
TINY_TILES = {"tiny": [32, 257, 12, 16]}
ONCE = {
    "llama3-8b": [4096, 128_256, 1024, 2048, 4096, 8192],
    "gemma2-2b": [2304, 256_000, 1024, 2048, 8192],
    "qwen3-0.6b": [1024, 151_936, 1024, 4096, 8192],
    "gpt2": [768, 50_257, 1024, 4096, 8192],
}
TINY_ONCE = {"tiny": [32, 257, 8, 16]}
SPLIT = (4096, 4096, 32_000)
WARPS = [8, 16, 4, 32]


class Clock:
    """Milliseconds of a call, its median over some rounds of `calls` without a wait between."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def __call__(self, call: Callable[[], Any], calls: int = 1) -> dict[str, float]:
        for _ in range(2):
            call()
        times = []
        for _ in range(self.rounds):
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start) / calls)
        return {"ms_median": statistics.median(times), "ms_best": min(times)}

    def median(self, call: Callable[[], Any], calls: int = 1) -> float:
        return self(call, calls)["ms_median"]

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
        buffer = torch.empty(tokens, columns, device=device)
        z = buffer[:, :vocab]
        low = buffer.view(dtype)[:, -columns:][:, :vocab] if dtype.itemsize == 2 else z
        # Of zeros an H200 makes products 13 % faster, as it draws less power.
        beside = torch.randn(tokens, vocab, device=device).to(low.dtype)
        times[f"logits, {name}"] = clock(lambda z=z: mm(x, w.T, out=z))
        low.copy_(beside)
        for where, dz in {"over logits": low, "beside": beside}.items():
            times[f"d hidden, {name}, {where}"] = clock(lambda dz=dz: mm(dz, w, out=dx))
            for first in (True, False):
                label = f"d weight, {name}, {where}{', first' if first else ''}"
                times[label] = clock(lambda dz=dz, first=first: addmm_(dw, dz.T, x, first=first))
    return times


def floor_of(
    x: Tensor, w: Tensor, chunk: int, clock: Clock, logits_chunk: int | None = None
) -> dict[str, float]:
    """The three products of a head, in chunks, with float32 results and one sum of d weight; of
    the logits in smaller chunks, if `logits_chunk`."""
    x, w = (operand(a, a.dtype, torch.float32) for a in (x, w))
    part = logits_chunk or chunk
    logits = torch.empty(part, w.shape[0], device=x.device)
    dz = torch.randn(chunk, w.shape[0], device=x.device, dtype=x.dtype)
    dx, dw = torch.empty(x.shape, device=x.device), torch.empty(w.shape, device=x.device)

    def all_three() -> None:
        for start in range(0, len(x), chunk):
            rows = x[start : start + chunk]
            for piece in rows.split(part):
                mm(piece, w.T, out=logits[: len(piece)])
            mm(dz[: len(rows)], w, out=dx[start : start + chunk])
            addmm_(dw, dz[: len(rows)].T, rows, first=start == 0)

    return clock(all_three)


def tiles_of(device: str, heads: dict[str, list[int]], clock: Clock) -> Any:
    """By head and tokens of a chunk, milliseconds of its three products for 1,000 tokens: d hidden
    has few tiles, which fill the last of the device's multiprocessors or leave it idle. In turns,
    as a device under load becomes slower."""
    times: dict[str, Any] = {}
    for name, (width, vocab, *chunks) in heads.items():
        calls = {tokens: chunk_of(device, tokens, width, vocab) for tokens in chunks}
        taken: dict[int, list[float]] = {tokens: [] for tokens in chunks}
        for _ in range(1 + 2 * clock.rounds):
            for tokens, call in calls.items():
                clock.wait()
                start = time.perf_counter()
                call()
                clock.wait()
                taken[tokens].append(1e6 * (time.perf_counter() - start) / tokens)
        times[name] = {str(k): statistics.median(x[1:]) for k, x in taken.items()}
    return times


def chunk_of(device: str, tokens: int, width: int, vocab: int) -> Callable[[], None]:
    dtype = storage_dtype(torch.bfloat16, torch.float32, torch.device(device))
    w = torch.randn(vocab, width, device=device).to(dtype)
    x = torch.randn(tokens, width, device=device).to(dtype)
    columns = pad_columns(vocab)
    z = torch.empty(tokens, columns, device=device)[:, :vocab]
    dz = torch.randn(tokens, columns, device=device).to(dtype)[:, :vocab]
    dx, dw = torch.empty(tokens, width, device=device), torch.zeros(vocab, width, device=device)

    def products() -> None:
        mm(x, w.T, out=z)
        mm(dz, w, out=dx)
        addmm_(dw, dz.T, x, first=False)

    return products


def chunks_of_logits(device: str, heads: dict[str, list[int]], clock: Clock) -> Any:
    """Three products of 8,192 tokens, by tokens of a chunk of logits and of one of gradients."""
    times = {}
    for name, (width, vocab, *pairs) in heads.items():
        dtype = torch.bfloat16
        x = torch.randn(max(pairs), width, device=device).to(dtype)
        w = torch.randn(vocab, width, device=device).to(dtype)
        times[name] = {
            f"{of_logits}, {chunk}": floor_of(x, w, chunk, clock, of_logits)["ms_median"]
            for chunk in pairs
            for of_logits in pairs
            if of_logits <= chunk
        }
    return times


def pass_of(device: str, tokens: int, vocab: int, many: list[int], clock: Clock) -> Any:
    """The pass over logits by warps of a program and by registers of a thread, 0 for as many as it
    wants, beside a sum and a copy, which read and write what it does."""
    import xentlib.torch.triton.launch as launch
    from xentlib.arguments import Scalars
    from xentlib.math.softmax import WantedStats
    from xentlib.torch.core.kernels import DzOutput, LogitsBlock, LogitTransform, LossTerms

    if device != "cuda":
        return {}
    z = torch.empty(tokens, pad_columns(vocab), device=device).normal_(0, 2)[:, :vocab]
    dz = torch.empty(tokens, pad_columns(vocab), device=device, dtype=torch.bfloat16)[:, :vocab]
    y = torch.randint(0, vocab, (tokens, 1), device=device)
    every, wanted = slice(0, tokens), WantedStats(entropy=False, smoothing=False, predicted=False)
    factor, values = torch.ones(tokens, device=device), torch.empty(7, tokens, device=device)
    times = {"two reads, one write": clock.median(lambda: (z.sum(), dz.copy_(z)))}
    usual, options = (launch.WARPS, launch.WIDE), launch.options
    for warps, registers in product(many, (0, 64)):
        for gradient in (True, False)[: 1 if registers else 2]:
            launch.WARPS = launch.WIDE = warps
            more = {"maxnreg": registers} if registers else {}
            launch.options = lambda *x, more=more: options(*x) | more
            kernels = launch.Triton(
                tokens, vocab, z.dtype, z.device, LogitTransform(vocab, scalars=Scalars())
            )
            rows = LogitsBlock(every, every, z, y, None, None, None)
            dz_y = torch.empty(tokens, device=device) if gradient else None
            terms = LossTerms(factor, Scalars(), None, values, dz_y)
            out = DzOutput(into_BV=dz)
            label = f"{warps} warps, {registers} registers, {'dz' if gradient else 'loss alone'}"
            try:
                times[label] = clock.median(partial(kernels.loss, rows, wanted, terms, out), 3)
            except Exception as error:  # noqa: BLE001 - a probe of what the device takes
                times[label] = f"{type(error).__name__}: {error}"[:200]
    (launch.WARPS, launch.WIDE), launch.options = usual, options
    return times


def small_calls(device: str, sizes: list[int], clock: Clock) -> Any:
    """Calls so short that the host may take longer than the device: of a head of V = 32,000,
    H = 1024 and a few tokens, the time with its gradients, and without a wait between calls."""
    times = {}
    for count in sizes:
        x = torch.randn(count, 1024, device=device).bfloat16().requires_grad_()
        w = (torch.randn(32_000, 1024, device=device) / 16).bfloat16().requires_grad_()
        y = torch.randint(0, 32_000, (count,), device=device)
        call = partial(calls_of(x, w, y, {})["loss + gradient"], 1 << 31)
        floor = floor_of(x.detach(), w.detach(), count, clock)["ms_median"]
        times[str(count)] = [clock.median(call), clock.median(call, 10), floor]
    return times


def profile_of(device: str, count: int, width: int, vocab: int) -> Any:
    """Microseconds of a call's device programs and of the host's functions, the longest first."""
    x = torch.randn(count, width, device=device).bfloat16().requires_grad_()
    w = (torch.randn(vocab, width, device=device) * 2 / width**0.5).bfloat16().requires_grad_()
    y = torch.randint(0, vocab, (count,), device=device)
    call = partial(calls_of(x, w, y, {})["loss + gradient"], 1 << 31)
    call(), call()
    if device != "cuda":
        return []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    programs = [(x.device_time_total, x.count, x.key[:90]) for x in profile.key_averages()]
    host = cProfile.Profile()
    host.enable()
    for _ in range(20):
        call()
    host.disable()
    torch.cuda.synchronize()
    functions = [
        (round(1e6 * took / 20), round(1e6 * own / 20), calls // 20, f"{Path(file).name}:{name}")
        for (file, _, name), (_, calls, own, took, _) in pstats.Stats(host).stats.items()
    ]
    return [sorted(programs, reverse=True)[:25], sorted(functions, reverse=True)[:120]]


def split_products(device: str, tokens: int, width: int, vocab: int) -> Any:
    """float32 products of JAX by algorithm: milliseconds, and the largest error over the root of
    the sum of squares of the terms."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    on = jax.devices("cuda" if device == "cuda" else "cpu")[0]
    keys = jax.random.split(jax.random.key(0), 2)
    with jax.default_device(on):
        a = jax.random.normal(keys[0], (tokens, width), jnp.float32)
        b = jax.random.normal(keys[1], (vocab, width), jnp.float32)
    few = np.asarray(a[:64], np.float64)
    exact, size = few @ np.asarray(b, np.float64).T, np.sqrt(few**2 @ np.asarray(b).T ** 2)
    result = {}
    names = ["HIGHEST", "DEFAULT", "F32_F32_F32", "TF32_TF32_F32", "TF32_TF32_F32_X3"]
    for name in [*names, "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"]:
        precision: Any = getattr(jax.lax.Precision, name, None)
        if precision is None:
            precision = getattr(jax.lax.DotAlgorithmPreset, name)
        dot = jax.jit(
            lambda a, b, precision=precision: jax.lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), precision=precision
            )
        )
        try:
            error = np.abs(np.asarray(dot(a, b)[:64], np.float64) - exact) / size
            times = []
            for _ in range(5):
                start = time.perf_counter()
                dot(a, b).block_until_ready()
                times.append(1e3 * (time.perf_counter() - start))
            result[name] = [statistics.median(times), error.max(), float((error**2).mean() ** 0.5)]
        except Exception as error:  # noqa: BLE001 - what a device does not have
            result[name] = f"{type(error).__name__}: {error}"[:200]
    return result


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
            args.kernels or reversed(list(runnable())),
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
                "model_ms": 1e3
                * gpu_time(
                    plan,
                    gradient=kind != "loss",
                    recompute=kind.startswith("log"),
                    softcap="softcap" in options,
                ),
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


def sections(args: argparse.Namespace, clock: Clock) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and what measures it, in the order of their use."""
    tiny, device = args.tiny, args.device
    shape = (16, 32, 257) if tiny else (4096, 4096, 128_256)
    odd = (16, 32, 259) if tiny else (4096, 768, 50_257)
    copied = torch.empty(1 << (10 if tiny else 30), device=device, dtype=torch.uint8)
    yield "copy_bytes_per_second", lambda: 2e3 * copied.numel() / clock(copied.clone)["ms_best"]
    for of, dtype in product((shape, odd), (torch.bfloat16, torch.float32)):
        label = f"products {list(of)}, {str(dtype).removeprefix('torch.')}"
        yield label, partial(products, device, dtype, of, clock)
    yield "pass", lambda: pass_of(device, shape[0], shape[2], [8] if tiny else WARPS, clock)
    yield "profile", lambda: profile_of(device, 2 * shape[0], *shape[1:])
    yield "profile of a small call", lambda: profile_of(device, 64, 1024, 32_000)
    yield "small calls", lambda: small_calls(device, [8] if tiny else [64, 256, 1024, 4096], clock)
    yield "tiles", lambda: tiles_of(device, TINY_TILES if tiny else TILES, clock)
    yield "chunks of logits", lambda: chunks_of_logits(device, TINY_ONCE if tiny else ONCE, clock)
    yield "split products", lambda: split_products(device, *((8, 32, 257) if tiny else SPLIT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernels", nargs="+", help="of the heads, without which all")
    parser.add_argument("--sections", nargs="+", help="beginnings of names, without which all")
    args = parser.parse_args()
    start = time.monotonic()
    clock = Clock(args.device, 1 if args.tiny else 7)
    report: dict[str, Any] = {"heads": [], "errors": {}, "seconds": {}}

    def write() -> None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def measure(name: str, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            report[name] = call()
        except Exception as error:  # noqa: BLE001 - the other sections say what they can
            report["errors"][name] = f"{type(error).__name__}: {error}"[:1000]
            print(name, report["errors"][name], flush=True)
        report["seconds"][name] = time.monotonic() - began
        write()

    def measure_heads() -> list[Any]:
        for row in heads(args, clock, start + args.seconds):
            report["heads"].append(row)
            write()
        return report["heads"]

    for name, call in sections(args, clock):
        asked = not args.sections or name.startswith(tuple(args.sections))
        if asked and time.monotonic() < start + args.seconds:
            measure(name, call)
    measure("heads", measure_heads)
    if report["errors"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
