"""How work is split, from sizes alone: chunks of tokens, shards of a vocabulary, memory, and how
tokens and rows that are spread over ranks meet."""

from typing import TYPE_CHECKING

from xentlib.lazy import loading
from xentlib.plan.split import (
    BLOCK_CLASSES,
    CPU_BLOCK_BYTES,
    CPU_COLUMN_MULTIPLE,
    GPU_COLUMN_MULTIPLE,
    GROUP_TOKENS,
    MAX_ROWS,
    SMALL_TPU_BYTES,
    SMALL_TPUS,
    TPU_ROW_MULTIPLE,
    XLA_BLOCK_CLASSES,
    ChunkPlan,
    block_bytes,
    block_tokens,
    default_chunk_bytes,
    even_classes,
    exchanges_per_chunk,
    pad_columns,
    pad_rows,
    plan_chunks,
    schedule,
    spread_tokens,
    stream_rows,
    sum_rows,
)

if TYPE_CHECKING:
    from xentlib.plan.memory import given_peak_bytes, peak_bytes
    from xentlib.plan.route_config import Exchange, Rates
    from xentlib.plan.route_result import Route
    from xentlib.plan.routes import choose_gather, crossover_tokens, head_routes
    from xentlib.plan.time import Gpu, gpu_time

__all__ = [
    "BLOCK_CLASSES",
    "CPU_BLOCK_BYTES",
    "CPU_COLUMN_MULTIPLE",
    "GPU_COLUMN_MULTIPLE",
    "GROUP_TOKENS",
    "MAX_ROWS",
    "SMALL_TPUS",
    "SMALL_TPU_BYTES",
    "TPU_ROW_MULTIPLE",
    "XLA_BLOCK_CLASSES",
    "ChunkPlan",
    "Exchange",
    "Gpu",
    "Rates",
    "Route",
    "block_bytes",
    "block_tokens",
    "choose_gather",
    "crossover_tokens",
    "default_chunk_bytes",
    "even_classes",
    "exchanges_per_chunk",
    "given_peak_bytes",
    "gpu_time",
    "head_routes",
    "pad_columns",
    "pad_rows",
    "peak_bytes",
    "plan_chunks",
    "schedule",
    "spread_tokens",
    "stream_rows",
    "sum_rows",
]

# What plans a run, and no call. A type checker does not run this: it has the names above.
if not TYPE_CHECKING:
    __getattr__ = loading(
        __name__,
        {
            "xentlib.plan.memory": "given_peak_bytes peak_bytes",
            "xentlib.plan.route_result": "Route",
            "xentlib.plan.route_config": "Exchange Rates",
            "xentlib.plan.routes": "choose_gather crossover_tokens head_routes",
            "xentlib.plan.time": "Gpu gpu_time",
        },
    )
