"""How work is split, from sizes alone: chunks of tokens, shards of a vocabulary, and memory."""

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
from xentlib.plan.memory import given_peak_bytes, peak_bytes
from xentlib.plan.shards import PaddedVocab, VocabShard, exchanges_per_chunk, shard_of, stream_rows

__all__ = [
    "CPU_BLOCK_BYTES",
    "GPU_COLUMN_MULTIPLE",
    "MAX_ROWS",
    "ChunkPlan",
    "PaddedVocab",
    "VocabShard",
    "block_bytes",
    "block_tokens",
    "default_chunk_bytes",
    "exchanges_per_chunk",
    "given_peak_bytes",
    "pad_columns",
    "pad_rows",
    "peak_bytes",
    "plan_chunks",
    "shard_of",
    "stream_rows",
]
