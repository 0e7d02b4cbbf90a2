"""What the program of `gather="hidden"` sends on 8, 64 and 1,024 devices, in JAX, lowered for a
mesh that is not there: what is planned, to the byte, but for what only PyTorch compares.

Shapes: N tokens of a device, V vocabulary, H hidden width, T tokens of all devices in a chunk.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from xentlib.plan import head_routes

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AbstractMesh, AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from xentlib.jax import chunked_nll  # noqa: E402

N, V, H, BUDGET = 16, 8192, 64, 1 << 16
SIZES = {"i32": 4, "f32": 4, "bf16": 2}
OPERATION = re.compile(
    r'"stablehlo\.(all_gather|reduce_scatter|all_reduce)".*?: \(tensor<(\S+)>\) -> tensor<(\S+)>',
    re.DOTALL,
)


def lowered(devices: int) -> str:
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def loss(hidden: Any, rows: Any, labels: Any) -> Any:
        how = {"vocab_parallel": "data", "tokens_parallel": "data", "max_chunk_bytes": BUDGET}
        out = chunked_nll(hidden, rows, labels, reduction="sum", **how)
        return jax.lax.psum(out.loss, "data")

    spread = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P())
    shapes = ((N * devices, H), (V, H), (N * devices,))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    given = [jax.ShapeDtypeStruct(*both) for both in zip(shapes, dtypes, strict=True)]
    traced = jax.jit(jax.value_and_grad(spread, (0, 1))).trace(*given)
    text: str = traced.lower(lowering_platforms=("cpu",)).as_text()
    return text


def size_of(tensor: str) -> int:
    *dimensions, dtype = tensor.split("x")
    return math.prod(map(int, dimensions)) * SIZES[dtype]


@pytest.mark.parametrize("devices", [8, 64, 1024])
def test_a_program_sends_what_is_planned(devices: int) -> None:
    """A15. The loop's body has one gather of hidden states, MAX and SUM of their tokens, and one
    scatter of d hidden; before it two gathers of a number for each token."""
    found = [(kind, *map(size_of, of)) for kind, *of in OPERATION.findall(lowered(devices))]
    plan = head_routes(
        N,
        V,
        H,
        devices,
        reduce_dtype="bfloat16",
        param_dtype="bfloat16",
        max_chunk_bytes=BUDGET,
        platform="gpu",
    )["hidden"]
    sent = {x.what: x for x in plan.exchanges}
    chunks = plan.num_chunks
    gathers = [after for kind, _, after in found if kind == "all_gather"]
    labels, factors, states = sorted(gathers, key=lambda size: size == max(gathers))
    assert states * chunks == sent["hidden states"].bytes
    tokens = devices * plan.chunk_tokens
    assert (
        labels == factors == 4 * tokens * chunks
    )  # of 4 bytes each, where PyTorch's labels have 8
    ((_, before, after),) = [x for x in found if x[0] == "reduce_scatter"]
    assert before * chunks == sent["d hidden"].bytes
    assert after * devices == before
    of_tokens = [before for kind, before, _ in found if kind == "all_reduce" and before > 8]
    assert of_tokens == [4 * tokens, sent["sums of the softmax"].bytes // chunks]
