"""What the design expects of an H200, beside what a device has shown.

    python .ci/gpu_predictions.py build/gpu/gpu.json

Each line was written before any device was seen; docs/performance.md has the model. A line that
turns out wrong stays as it is: the design is what changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPERATIONS = 790e12  # a second, of bfloat16 products
BYTES = 4.3e12  # a second
INSTRUCTIONS = 132 * 128 * 1.55e9  # of a lane, a second, at the clock of such products

LLAMA = "[4096, 4096, 128256], bfloat16"
CHUNK = 4096  # tokens, of the heads that the probe times in several chunks


def table(parts: dict[str, Any]) -> str:
    """Markdown; a part that was not run leaves its measurements empty."""
    lines = [("", "expected", "measured"), ("---", "---", "---"), *rows(parts)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows(parts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    probe = parts.get("probe", {}).get("probe", {})
    yield "copy, bytes a second", f"{BYTES:.2g}", number(probe.get("copy_bytes_per_second"))
    for product in ("logits", "d hidden", "d weight"):
        where = "aligned" if product == "logits" else "aligned, over logits"
        took = probe.get(f"products {LLAMA}", {}).get(f"{product}, {where}")
        rate = took and 2e3 * 4096 * 4096 * 128_256 / took["ms_median"]
        yield (
            f"{product} of 4,096 tokens, Llama-3 8B: operations a second",
            f"{OPERATIONS:.2g}; 8.5e14 by the figures that QuACK publishes",
            number(rate),
        )
    tiles = probe.get("tiles", {}).get("gemma2-2b", {})
    took = [tiles.get(str(tokens)) for tokens in (2048, 1792)]
    yield (
        "Gemma 2 2B's products, time a token in chunks of 2,048 to that of 1,792",
        "1.22: 144 tiles of d hidden on 132 SMs are two waves",
        number(all(took) and took[0] / took[1]),
    )
    yield from heads(probe.get("heads", []))
    yield from benchmark(parts.get("bench", {}).get("runs", []))
    yield from contract(parts)
    for part in ("first", "tests"):
        failed = parts.get(part, {}).get("failed")
        others = [test for test in failed or () if not about_chunks(test)]
        yield (
            f"{part}: tests that fail, those of row A10 aside",
            "0",
            "" if failed is None else ", ".join([str(len(others)), *others]),
        )
    ended = parts.get("sanitizer", {})
    done = ended.get("of") and ended["ended"] == ended["of"] and not ended["rc"]
    yield "compute-sanitizer, memcheck and racecheck", "no error", "no error" if done else ""


def heads(measured: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Loss and gradients to the three products, by Triton's programs."""
    for name, width, vocab, instructions in (
        ("llama3-8b", 4096, 128_256, 57),
        ("qwen3-0.6b", 1024, 151_936, 57),
        ("gemma2-2b", 2304, 256_000, 155),
        ("gpt2", 768, 50_257, 57),
        ("llama3-8b, 32768 tokens", 4096, 128_256, 57),
    ):
        wanted = (name, "loss + gradient", "triton")
        ratios = [
            row["ratio"]
            for row in measured
            if (row["head"], row["kind"], row["kernels"]) == wanted
            and 0.9 < row["chunk_tokens"] / CHUNK <= 1  # columns that are filled up take some
        ]
        yield (
            f"{name}, chunks of {CHUNK:,}: time to the three products",
            f"{of_torch(width, vocab, CHUNK, instructions):.2f}",
            number(ratios and ratios[0]),
        )
    peaks = [row["peak_bytes"] / row["predicted_bytes"] for row in measured if row["peak_bytes"]]
    yield "peak memory to the plan's, worst head", "at most 1.01", number(peaks and max(peaks))


def benchmark(runs: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """As a user calls it, beside the bare products alone: chunks by the plan, 2 GiB of logits in
    PyTorch and 1 GiB in JAX."""
    for name, width, vocab, instructions in (
        ("qwen3-8b", 4096, 151_936, 57),
        ("gemma2-2b", 2304, 256_000, 155),
        ("llama3-8b", 4096, 128_256, 57),
    ):
        for backend, chunk in (("torch", 2**29 // vocab), ("jax", 2**28 // vocab)):
            if backend == "torch":
                expected = of_torch(width, vocab, chunk, instructions)
            else:
                expected = of_jax(width, vocab, chunk, 22 if name == "gemma2-2b" else 14)
            ratios = [
                row["ratio"]["median"]
                for run in runs
                if (run["case"]["name"], run["backend"]) == (name, backend)
                for row in run["rows"]
                if (row["contestant"], row["kind"]) == ("xentlib", "loss + gradient")
                and row["ratio"]
            ]
            what = f"{name}, {backend}, {chunk:,} tokens a chunk: time to the three products"
            yield what, f"{expected:.2f}", number(ratios and ratios[0])


def of_torch(width: int, vocab: int, chunk: int, instructions: int) -> float:
    """10 bytes and the instructions of a logit: the longer, and a quarter of the other; d weight in
    float32 once read and once written a chunk."""
    times = 10 / BYTES, instructions / INSTRUCTIONS
    softmax = max(times) + min(times) / 4
    return 1 + (softmax / width + 8 / BYTES / chunk) * OPERATIONS / 6


def of_jax(width: int, vocab: int, chunk: int, per_logit: int) -> float:
    """XLA's bytes of a logit; the product that adds up the tokens of one label."""
    moved = (per_logit / width + 8 / chunk) / BYTES
    return 1 + moved * OPERATIONS / 6 + 1024 / (3 * vocab)


EXPECTED: dict[str, str] = {
    "A3": "holds: its exponential is of fused multiply-adds",
    "A10": "fails: cuBLAS chooses by the number of tokens",
    "A11": "holds",
    "A17": "fails: cuBLAS chooses by the number of tokens",
    "A18": "parts in one process: holds",
    "A1": "not known: float64 products of two callers of cuBLAS",
}


def contract(parts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for part in ("parity-triton", "parity"):
        measured = parts.get(part, {}).get("rows", {})
        for row, expected in EXPECTED.items():
            if (part, row) == ("parity-triton", "A1"):
                continue  # is about two backends
            said = [
                f"{key.split()[1]}: {x['failed']} of {x['measured']} fail"
                for key, x in measured.items()
                if key.split()[0] == row
            ]
            yield f"{part}, row {row}", expected, "; ".join(said)


def about_chunks(test: str) -> bool:
    return "chunks_do_not_show" in test or "any_number_of_tokens" in test


def number(value: Any) -> str:
    return f"{value:.3g}" if value else ""


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
