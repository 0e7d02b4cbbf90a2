"""How work is split, from sizes alone: chunks of tokens, shards of a vocabulary, memory, and how
tokens and rows that are spread over ranks meet."""

from xentlib.plan.chunks import (
    CPU_BLOCK_BYTES,
    GPU_COLUMN_MULTIPLE,
    MAX_ROWS,
    ChunkPlan,
    block_bytes,
    block_tokens,
    default_chunk_bytes,
    pad_columns,
    pad_rows,
    plan_chunks,
)
from xentlib.plan.exchanges import Exchange, Rates
from xentlib.plan.memory import given_peak_bytes, peak_bytes
from xentlib.plan.route import Route
from xentlib.plan.routes import choose_gather, crossover_tokens, head_routes
from xentlib.plan.shards import (
    PaddedVocab,
    VocabShard,
    exchanges_per_chunk,
    shard_of,
    spread_tokens,
    stream_rows,
)

__all__ = [
    "CPU_BLOCK_BYTES",
    "GPU_COLUMN_MULTIPLE",
    "MAX_ROWS",
    "ChunkPlan",
    "Exchange",
    "PaddedVocab",
    "Rates",
    "Route",
    "VocabShard",
    "block_bytes",
    "block_tokens",
    "choose_gather",
    "crossover_tokens",
    "default_chunk_bytes",
    "exchanges_per_chunk",
    "given_peak_bytes",
    "head_routes",
    "pad_columns",
    "pad_rows",
    "peak_bytes",
    "plan_chunks",
    "shard_of",
    "spread_tokens",
    "stream_rows",
]
