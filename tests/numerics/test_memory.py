"""Peak memory against the formula of the plan, within 5 % (D5, M16)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from helpers.near_plan import near_plan
from helpers.pairs import every_pair, parameters
from xentlib.plan import block_bytes, peak_bytes, plan_chunks

SIZES = ((1024, 256, 16000), (1100, 64, 8192), (600, 128, 32003), (1024, 512, 4000))
DTYPES = ("float32", "bfloat16")


NLL = "chunked_nll"
FUNCTIONS = {
    NLL: lambda out: out.loss,
    "chunked_logprobs": lambda out: out.logprobs.sum(),
}


def function_of(ours: Any, name: str) -> Any:
    """By a name of the above."""
    name, *options = name.split(", ")
    return partial(getattr(ours, name), **dict.fromkeys(options, True))


def summed(function: str, out: Any) -> Any:
    """With the log-probabilities of `ids`, if they were asked for."""
    more = getattr(out, "ids_logprobs", None)
    return FUNCTIONS[function.split(", ", maxsplit=1)[0]](out) + (
        0.0 if more is None else more.sum()
    )


def measured_torch(
    function: str,
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: str,
    *,
    gradient: bool,
    further: dict[str, int] | None = None,
) -> int:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    from xentlib import torch as ours

    kind = getattr(torch, dtype)
    x = torch.randn(tokens, hidden).to(kind).requires_grad_(gradient)
    w = torch.randn(vocab, hidden).to(kind).requires_grad_(gradient)
    y = torch.randint(0, vocab, (tokens,))
    of = {name: torch.randint(0, vocab, (tokens, k)) for name, k in (further or {}).items()}
    if "kept" in of:
        of["kept"][:, 0] = y
    # The formula is that of a CPU without AMX, whose units need no scratch of a product's blocks.
    no_amx = patch("xentlib.torch.core.gemm.has_amx", return_value=False)
    with no_amx, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = summed(function, function_of(ours, function)(x, w, y, **of))
        if gradient:
            loss.backward()
    # Every allocation and release of the CPU allocator, in order.
    total = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def measured_jax(
    function: str, tokens: int, hidden: int, vocab: int, dtype: str, *, gradient: bool
) -> int:
    jax = pytest.importorskip("jax")
    from helpers.compiling import PLANNED
    from xentlib import jax as ours

    shapes = (
        jax.ShapeDtypeStruct((tokens, hidden), dtype),
        jax.ShapeDtypeStruct((vocab, hidden), dtype),
        jax.ShapeDtypeStruct((tokens,), "int32"),
        jax.ShapeDtypeStruct((), "float32"),
    )

    def loss(x: object, w: object, y: object, upstream: object) -> object:
        return upstream * summed(function, function_of(ours, function)(x, w, y))

    step = jax.value_and_grad(loss, (0, 1)) if gradient else loss
    analysis = jax.jit(step).lower(*shapes).compile(PLANNED).memory_analysis()
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


MEASURES: dict[str, Callable[..., int]] = {"torch": measured_torch, "jax": measured_jax}


HOW = [(False, "float32"), *((True, dtype) for dtype in DTYPES)]
CALLS = [*product(FUNCTIONS, SIZES, HOW)]
# In blocks of classes, as log-probabilities are
IN_BLOCKS = (*SIZES[:3], (512, 256, 16000))  # the last one in one chunk
RECOMPUTED = [*product((f"{NLL}, recompute", "chunked_logprobs"), IN_BLOCKS, DTYPES)]


@pytest.mark.parametrize("call", parameters(CALLS, every_pair(CALLS)))
def test_peak_is_the_formula_of_the_plan(backend: str, call: Any) -> None:
    """Both ways: more would be a leak, less a formula that nobody needs to believe."""
    hold_plan(backend, call)


@pytest.mark.optimized  # where arrays lie is up to XLA's passes
@pytest.mark.parametrize("call", parameters(RECOMPUTED, every_pair(RECOMPUTED)))
def test_peak_of_a_backward_in_blocks(backend: str, call: Any) -> None:
    """As above."""
    function, size, dtype = call
    hold_plan(backend, (function, size, (True, dtype)))


def hold_plan(backend: str, call: Any) -> None:
    function, (tokens, hidden, vocab), (gradient, dtype) = call
    plan = plan_chunks(tokens, vocab, hidden, dtype=dtype)
    twice = function != NLL
    expected = peak_bytes(plan, backend=backend, dtype=dtype, gradient=gradient, recompute=twice)
    measured = MEASURES[backend](function, tokens, hidden, vocab, dtype, gradient=gradient)
    rows = plan.block_tokens(block_bytes("cpu")) if backend == "torch" else 0
    block = rows * vocab * plan.compute_itemsize
    copied = vocab * hidden if backend == "jax" and dtype == "bfloat16" else 0
    near = near_plan(measured, expected, block, copied)
    assert near, f"{measured} bytes, the plan says {expected}"


CLASSES = tuple((name, number) for name in ("kept", "ids") for number in (80, 900, 2000))
FURTHER = [*product(CLASSES, (False, True), DTYPES)]


@pytest.mark.parametrize("call", parameters(FURTHER, every_pair(FURTHER)))
def test_peak_of_further_classes(call: Any) -> None:
    """As above; of few classes the loop has the most, of many what is made for all tokens."""
    (name, number), gradient, dtype = call
    tokens, hidden, vocab = 900, 48, 3200
    plan = plan_chunks(tokens, vocab, hidden, dtype=dtype)
    how = {"gradient": gradient, name: number}
    expected = peak_bytes(plan, backend="torch", dtype=dtype, **how)
    sizes = (tokens, hidden, vocab, dtype)
    how = {"gradient": gradient, "further": {name: number}}
    measured = measured_torch("chunked_logprobs", *sizes, **how)
    block = plan.block_tokens(block_bytes("cpu")) * vocab * plan.compute_itemsize
    assert near_plan(measured, expected, block), f"{measured} bytes, the plan says {expected}"


@pytest.mark.torch
@pytest.mark.parametrize(("width", "budget"), [(2047, 2 << 30), (2048, 1 << 30)])
def test_a_default_chunk_follows_the_head(
    width: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: on a card of 80 GB, as if that budget had been asked for."""
    torch = pytest.importorskip("torch")
    from helpers.on_meta import as_on_a_gpu
    from xentlib.torch import chunked_nll

    monkeypatch.setattr("xentlib.torch.core.device.memory_of", lambda device: 80 << 30)
    sizes, peaks = {"dtype": torch.bfloat16, "device": "meta"}, []
    labels = torch.empty(8192, dtype=torch.int64, device="meta")
    weight = torch.empty(128_256, width, **sizes)
    for asked in (None, budget):
        hidden = torch.empty(8192, width, **sizes, requires_grad=True)
        with as_on_a_gpu() as seen:
            chunked_nll(hidden, weight, labels, max_chunk_bytes=asked).loss.backward()
        peaks.append(seen.peak)
    assert peaks[0] == peaks[1] > budget


DIGEST = """
import hashlib
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.cases import BASE
from xentlib.tools.harness.problems import build
outcome = run("jax", build(BASE, 0), chunk_tokens=128)
digest = hashlib.sha256(b"".join(x.tobytes() for x in outcome.by_name().values())).hexdigest()
"""
ON_ONE = """
import os
os.sched_setaffinity(0, {{{cpu}}})
os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"
{digest}
print(digest)
"""


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "sched_setaffinity"), reason="Linux only")
def test_jax_has_the_same_bits_on_one_core_and_on_all() -> None:
    """Row A11: XLA sizes its thread pool by the cores it may use, so one needs another process."""
    import os

    pytest.importorskip("jax")
    # What was compiled for all cores must not be run on one.
    own = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    script = ON_ONE.format(cpu=min(os.sched_getaffinity(0)), digest=DIGEST)
    one = subprocess.run(
        [sys.executable, "-c", script], env=own, capture_output=True, text=True, check=True
    )
    here: dict[str, Any] = {}
    exec(DIGEST, here)
    assert one.stdout.split() == [here["digest"]]
