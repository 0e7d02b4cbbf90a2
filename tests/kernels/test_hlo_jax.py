"""The program that XLA makes of a head for an H200, compiled without one: its products, what is
done to d weight, the bytes of its elementwise passes, and its memory. `make hlo` runs it.

Shapes: T rows of a chunk, V columns (filled up to whole blocks), H width.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any, NamedTuple

import pytest

from xentlib.plan import (
    GPU_COLUMN_MULTIPLE,
    ChunkPlan,
    default_chunk_bytes,
    peak_bytes,
    plan_chunks,
)

jax = pytest.importorskip("jax")
pytestmark = [
    pytest.mark.jax,
    pytest.mark.hlo,
    pytest.mark.optimized,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="the wheels of JAX's CUDA plugin are not installed; `make hlo` has them",
    ),
]

import jax.numpy as jnp  # noqa: E402

from helpers.gpu_hlo import compiled_for_h200  # noqa: E402
from helpers.instructions import Instruction, Program  # noqa: E402
from xentlib.jax import chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.jax.core.gradients import LABEL_GROUP  # noqa: E402


class Head(NamedTuple):
    vocab: int
    layout: str = "VH"
    dtype: str = "bfloat16"
    tokens: int = 8192
    hidden: int = 4096
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def plan(self) -> ChunkPlan:
        given = dict(self.options).get("max_chunk_bytes")
        return plan_chunks(
            self.tokens,
            self.vocab,
            self.hidden,
            dtype=self.dtype,
            max_chunk_bytes=given or default_chunk_bytes("gpu"),
        )

    @property
    def columns(self) -> int:
        return self.vocab + -self.vocab % GPU_COLUMN_MULTIPLE

    @property
    def logits(self) -> tuple[int, int]:
        return self.plan.even_tokens, self.columns

    @property
    def weight(self) -> tuple[int, int]:
        shape = self.columns, self.hidden
        return shape if self.layout == "VH" else shape[::-1]

    @property
    def text(self) -> str:
        return " ".join(str(x) for x in (*self[:5], *(f"{k}={v}" for k, v in self.options)))


# Two chunks of 5312 tokens: in two of 4096 XLA puts more into one place, as T is H.
ODD = 50_257, 10_624
PLAIN = [Head(128_256, layout) for layout in ("VH", "HV")]
PLAIN += [Head(ODD[0], layout, tokens=ODD[1]) for layout in ("VH", "HV")]
WIDE = [Head(ODD[0], "VH", "float32", ODD[1]), Head(ODD[0], "HV", "float16", ODD[1])]
heads = pytest.mark.parametrize("head", [*PLAIN, *WIDE], ids=lambda head: head.text)


@cache
def compiled(head: Head, kind: str) -> Any:
    options = dict(head.options)
    biased = options.pop("bias", False)

    def loss(hidden, weight, labels, bias=None):
        given = {"bias": bias, "weight_layout": head.layout, **options}
        if kind == "recompute":
            return chunked_nll(hidden, weight, labels, recompute=True, **given).loss
        if kind.startswith("nll"):
            return chunked_nll(hidden, weight, labels, **given).loss
        return chunked_logprobs(hidden, weight, labels, **given).logprobs.sum()

    wanted = (0, 1, 3) if biased else (0, 1)
    step = loss if kind.endswith("values") else jax.value_and_grad(loss, wanted)
    shape = (head.vocab, head.hidden) if head.layout == "VH" else (head.hidden, head.vocab)
    dtype = jnp.dtype(head.dtype)
    return compiled_for_h200(
        step,
        ((head.tokens, head.hidden), dtype),
        (shape, dtype),
        ((head.tokens,), jnp.dtype(jnp.int32)),
        *([((head.vocab,), dtype)] if biased else []),
    )


def program(head: Head, kind: str) -> Program:
    return Program(compiled(head, kind).as_text())


def products(head: Head, block: list[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """Those with the head's columns on a side or in the result; and the others."""
    known = {x.name: x.result.dims for x in block}
    large, small = [], []
    for one in block:
        if one.product:
            sides = [one.result.dims, *(known[name] for name in one.operands)]
            (large if any(head.columns in dims for dims in sides) else small).append(one)
    return large, small


def block_of(head: Head) -> Head:
    """Of classes, as log-probabilities and calls without a gradient read a head."""
    plan = head.plan.in_blocks("jax")
    return head._replace(vocab=plan.vocab_size, tokens=plan.even_tokens)


def loops_of(head: Head, made: Program) -> list[list[Instruction]]:
    """Those with a product of the head."""
    return [loop for loop in made.loops if products(head, made.inner(loop))[0]]


def check_loop(
    head: Head, made: Program, loop: list[Instruction], number: int, *, block: bool = False
) -> None:
    """Of the head's products, with what is around them; of a `block` the targets' terms come in
    another loop."""
    inner = made.inner(loop)  # JAX 0.11 has products of a slice in a fusion with it
    known = {x.name: x.result for x in inner}
    large, small = products(head, inner)
    assert len(large) == number
    for one in large:
        assert one.result.dtype == "f32"
        assert {known[name].dtype for name in one.operands[:2]} == {
            {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[head.dtype]
        }
    (logits,) = (x for x in large if x.result.dims == head.logits)
    assert not re_used(logits)
    # Nothing is done to a whole head or chunk that does not come out of a product or go into one.
    least = min(head.weight[0], head.weight[1], head.logits[0]) * head.vocab // 2
    moves = ("copy", "copy-start", "pad", "slice", "transpose", "concatenate")
    assert not [
        (x.opcode, x.result.dims)
        for x in (loop if block else inner)  # what fills a block up is fused with its slice
        if x.opcode in moves and math.prod(x.result.dims) >= least
    ]
    if number == 1:
        assert not small
        return
    # d weight: added to by a product in place, then by scatters of the targets' terms.
    (d_weight,) = (x for x in large if x.result.dims == head.weight)
    assert re_used(d_weight)
    assert made.moved(loop, {head.weight}) == 0
    assert len(small) == (0 if block else -(-head.logits[0] // LABEL_GROUP))
    work = sum(2 * x.result.dims[0] * x.result.dims[1] * LABEL_GROUP for x in small)
    assert work <= 0.01 * 3 * 2 * math.prod(head.logits) * head.hidden


def re_used(one: Instruction) -> bool:
    return "output_to_operand_aliasing={{0}: (2," in one.rest


def bytes_a_logit(head: Head, made: Program, loop: list[Instruction]) -> float:
    return made.moved(loop, {head.logits}) / math.prod(head.logits)


@heads
def test_nll_and_gradients(head: Head) -> None:
    """D5, M18: three products a chunk, from operands in their own dtype to float32; d weight in
    place; 14 bytes a logit (max 4, both sums 4, dz 4 + 2), or 16 where dz is float32. Catches: an
    array of exp(z - m) (22), a head or d weight that is padded in each chunk."""
    made = program(head, "nll")
    (loop,) = made.loops
    check_loop(head, made, loop, 3)
    assert bytes_a_logit(head, made, loop) == (16 if head.dtype == "float32" else 14)


@pytest.mark.parametrize("head", PLAIN, ids=lambda head: head.text)
def test_logprobs_and_gradients(head: Head) -> None:
    """D5: four products a chunk of a block of classes; 8 bytes a logit forwards and 6 backwards.
    Catches: a sum of d weight that is as large as the head."""
    head = head._replace(hidden=2048)  # not as many as tokens of a chunk
    made, block = program(head, "logprobs"), block_of(head)
    assert not products(head, [x for loop in made.loops for x in made.inner(loop)])[0]
    first, second = loops_of(block, made)
    check_loop(block, made, first, 1, block=True)
    check_loop(block, made, second, 3, block=True)
    assert bytes_a_logit(block, made, first) == 8
    assert bytes_a_logit(block, made, second) == 6


@pytest.mark.parametrize("kind", ["nll values", "logprobs values"])
def test_values_alone(kind: str) -> None:
    made, block = program(PLAIN[0], kind), block_of(PLAIN[0])
    (loop,) = loops_of(block, made)
    check_loop(block, made, loop, 1, block=True)
    assert bytes_a_logit(block, made, loop) == 8


@pytest.mark.parametrize(
    ("option", "expected"),
    [(("label_smoothing", 0.1), 14), (("outputs", ("predicted", "entropy")), 14),
     (("softcap", 30.0), 18), (("bias", True), 18)],
    ids=str,
)  # fmt: skip
def test_options(option: tuple[str, Any], expected: int) -> None:
    """What they cost. Catches: a softcap whose derivative is kept for dz (26)."""
    head = PLAIN[0]._replace(options=(option,))
    made = program(head, "nll")
    (loop,) = made.loops
    if option[0] != "bias":  # which has thin products of float32 dz
        check_loop(head, made, loop, 3)
    assert bytes_a_logit(head, made, loop) == expected


def test_each_label_once_in_a_scatter() -> None:
    """A11: a GPU adds with atomics, in any order, unless no column comes twice."""
    for head in PLAIN:
        for kind, one, groups in (
            ("nll", head, -(-head.logits[0] // LABEL_GROUP)),
            ("logprobs", block_of(head), 1),  # in a loop
        ):
            scatters = [
                x
                for block in program(head, kind).blocks.values()
                for x in block
                if x.opcode == "scatter" and x.result.dims == one.weight
            ]
            assert len(scatters) == groups
            assert all("unique_indices=true" in x.rest for x in scatters)


MEMORY = [
    *PLAIN,
    *WIDE,
    Head(128_256, tokens=2000),
    Head(128_256, tokens=32_768, options=(("max_chunk_bytes", 2**32),)),
    Head(256_000, hidden=2304),
    Head(32_000, tokens=32_768, hidden=2048),
]


@pytest.mark.parametrize("kind", ["nll", "recompute", "logprobs", "nll values"])
@pytest.mark.parametrize("head", MEMORY, ids=lambda head: head.text)
def test_memory_is_the_formula(head: Head, kind: str) -> None:
    """M16: within 7 % of `plan.peak_bytes`; no array of N times V entries."""
    if head.plan.num_chunks > 1:
        everything = [x for block in program(head, kind).blocks.values() for x in block]
        assert max(math.prod(a.dims) for x in everything for a in x.results) < (
            head.tokens * head.vocab
        )
    found = compiled(head, kind).memory_analysis()
    total = found.temp_size_in_bytes + found.output_size_in_bytes
    expected = peak_bytes(
        head.plan,
        backend="jax",
        dtype=head.dtype,
        gradient=kind != "nll values",
        recompute=kind in ("recompute", "logprobs"),
        platform="gpu",
    )
    assert 0.93 * total <= expected <= 1.07 * total
