"""What kinds of devices differ in, as far as the steps of `xentlib.nll` have to know."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.plan import (
    CPU_COLUMN_MULTIPLE,
    GPU_COLUMN_MULTIPLE,
    SMALL_TPU_BYTES,
    SMALL_TPUS,
    TPU_ROW_MULTIPLE,
    default_chunk_bytes,
)

T = TypeVar("T")

# Of the options whose function is being traced.
PLATFORM: ContextVar[str | None] = ContextVar("PLATFORM", default=None)


class DeviceInfo(NamedTuple):
    """Of the platform that a program is for."""

    # Below 64 rows XLA's CPU GEMM takes another kernel for a row-major right operand, and a row's
    # bits then depend on the number of rows: up to 80 % of the entries at 8 rows, none from 64. Its
    # row sums do so below 32 rows (row A10).
    least_rows: int
    # Entries of a chunk's logits below which XLA's CPU compiler fuses exp into each of its sums: a
    # row of V = 13 then had other bits among 300 tokens than among 500, of entropy one in three.
    least_entries: int = 1
    # It scatters floats of 16 bits in float32: two copies of all N rows, four times the bytes of
    # their gradient, where integers of 16 bits take one.
    scatters_wide: bool = False
    # exp(z - m) is an array of its own, which both of its sums read and whose memory the second one
    # takes. Elsewhere a sum makes it on the way: as an array it cost a GPU 22 bytes a logit, not
    # 14, and half a GB at Llama-3's head.
    stores_exp: bool = False
    # It adds neighbouring columns in windows as fast as whole rows.
    adds_windows: bool = False
    # A scatter adds one label's terms one after the other; a GPU's atomic additions come in any
    # order, and other bits with it (row A11).
    adds_in_order: bool = True
    # Columns of a head, zeros included, that its products take as they are. A GPU's compiler pads
    # any others in each chunk: a copy of the head and two of float32 d weight. A CPU's multiplies
    # V = 981 by another kernel than V = 1024: three logits in four had other bits, and their
    # log-probabilities other ones over shards (row A18).
    column_multiple: int = 1
    # Logits of a chunk lie in memory class by class, and blocks of classes are reduced over that
    # leading axis. A TPU that reduces blocks along a row's lanes copies the chunk to the other
    # order and back: 80 bytes a logit of a loss with its gradients, not 24.
    classes_lead: bool = False
    row_multiple: int = 1  # of a chunk
    # Rows as wide as the vocabulary are read and written where they are, in the order of the
    # tokens: a TPU copies the whole array in each chunk to gather some of its rows.
    slices_rows: bool = False


KINDS = {
    "cpu": DeviceInfo(
        64,
        4096,
        scatters_wide=True,
        stores_exp=True,
        adds_windows=True,
        column_multiple=CPU_COLUMN_MULTIPLE,
    ),
    "gpu": DeviceInfo(least_rows=1, adds_in_order=False, column_multiple=GPU_COLUMN_MULTIPLE),
    "tpu": DeviceInfo(
        least_rows=1,
        column_multiple=BLOCK_COLUMNS,
        classes_lead=True,
        row_multiple=TPU_ROW_MULTIPLE,
        slices_rows=True,
    ),
}
ANOTHER = DeviceInfo(least_rows=1)


class Target(NamedTuple):
    """What a program is for."""

    platform: str
    kind: str  # of its devices, as JAX names it


def target_of(*arrays: Any) -> Target:
    """Of a program of these arrays: the devices of their mesh, which are all that a trace
    has of them, or of the mesh that is set, or those that the arrays are on. Else, as in a trace of
    arrays that are on no mesh, what this process has: a program for a TPU that is compiled ahead of
    time on another machine must have its arguments on a mesh of the TPU's topology.
    """
    arrays = tuple(x for x in arrays if isinstance(x, jax.Array))
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    devices = [x.abstract_device for x in (*meshes, jax.sharding.get_abstract_mesh())]
    devices += [next(iter(x.devices())) for x in arrays if not isinstance(x, jax.core.Tracer)]
    known = [Target(x.platform, x.device_kind) for x in devices if x is not None]
    known += [Target(jax.default_backend(), jax.local_devices()[0].device_kind)]
    return known[0]._replace(platform="gpu") if known[0].platform in ("cuda", "rocm") else known[0]


def traced_for_its_platform(function: Callable[..., T]) -> Callable[..., T]:
    """`function(options, ...)`, in whose trace `device_info` is that of the options' platform, and
    the arguments' Explicit mesh is set: what the trace makes has its type then, as they have."""

    @wraps(function)
    def traced(options: Any, *args: Any) -> T:
        before = PLATFORM.set(options.platform)
        try:
            with explicit_mesh(args):
                return function(options, *args)
        finally:
            PLATFORM.reset(before)

    return traced


def explicit_mesh(args: Any) -> AbstractContextManager[Any]:
    """Of arrays that are whole on each of its devices, where no mesh is set."""
    # Where derivatives are wanted, with `.perturbed` beside each `.value`.
    leaves = (getattr(x, "value", x) for x in jax.tree.leaves(args))
    meshes = [jax.typeof(x).sharding.mesh for x in leaves if isinstance(x, jax.Array)]
    if jax.sharding.get_abstract_mesh().empty:
        for mesh in meshes:
            if AxisType.Explicit in mesh.axis_types:
                return jax.sharding.use_abstract_mesh(mesh)
    return nullcontext()


def device_info() -> DeviceInfo:
    """Of the function that is being traced."""
    return KINDS.get(PLATFORM.get() or jax.default_backend(), ANOTHER)


def chunk_bytes(asked: int | None, target: Target, row_bytes: int = 0, hidden_size: int = 0) -> int:
    """Of a chunk's logits: what was asked for, or what the memory of the device and the width of a
    head allow. A TPU's is known by its kind. A GPU's is asked of the first one here, of which XLA
    has a share that the environment may name; several processes, whose cards may differ where their
    programs may not, do not look."""
    platform, memory = target.platform, SMALL_TPU_BYTES if target.kind in SMALL_TPUS else 0
    alone = platform == "gpu" == jax.default_backend() and jax.process_count() == 1
    if alone and not asked:
        stats = jax.local_devices()[0].memory_stats() or {}
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        memory = int(stats.get("bytes_limit", 0) / share)
    sizes = {"memory": memory, "row_bytes": row_bytes, "hidden_size": hidden_size}
    return asked or default_chunk_bytes(platform, **sizes)


def as_bits(x: jax.Array) -> jax.Array:
    """16-bit floats as integers where floats are scattered wide."""
    low = x.dtype.itemsize == 2 and device_info().scatters_wide
    return lax.bitcast_convert_type(x, jnp.uint16) if low else x


def slice_bits(x: jax.Array) -> jax.Array:
    """bfloat16 as integers where floats of 16 bits are scattered wide: there a slice of bfloat16 is
    one of a float32 copy of the whole array, where a slice of float16 is none."""
    return as_bits(x) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array, like: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, like.dtype) if x.dtype == jnp.uint16 else x
