"""Where precomputed logits are, in PyTorch: whole on this rank, or columns of them.

Shapes: N tokens, C columns.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from xentlib.checks.placement import PLACEMENTS
from xentlib.checks.shards import check_shard
from xentlib.shards import VocabShard
from xentlib.torch.array_spec import is_dtensor
from xentlib.torch.core.vocab import numbers_of
from xentlib.torch.operators import RowLayout
from xentlib.torch.placement.rows import shard_of_rank, unpadded


def local_logits(
    logits: Any, parallel: Any, shard: VocabShard | None
) -> tuple[Tensor, Any, VocabShard | None]:
    """This rank's columns as a plain tensor, what they are spread over, and which they are: a
    DTensor says so itself."""
    if not is_dtensor(logits):
        return logits, parallel, shard
    mesh, placements = logits.device_mesh, tuple(logits.placements)
    if parallel is None and all(p.is_replicate() for p in placements):
        return logits.to_local(), None, shard
    first, last = placements[0], logits.ndim - 1
    cut = mesh.ndim == 1 and type(first).__name__ == "Shard" and first.dim % logits.ndim == last
    PLACEMENTS.require("columns", cut, placements=placements)
    group, vocab_size = unpadded(mesh if parallel is None else parallel)
    ranks, others = (dist.get_process_group_ranks(g) for g in (group, mesh.get_group()))
    PLACEMENTS.require("same_ranks", ranks == others, mesh=others, group=ranks)
    if shard is None:
        shard = shard_of_rank(logits.shape[-1], group, vocab_size)
    return logits.to_local(), group, shard


def local_columns(logits: Tensor, parallel: Any, shard: VocabShard | None) -> RowLayout:
    """Where this rank's columns [N, C] belong."""
    if parallel is None:
        return RowLayout()
    group, vocab_size = unpadded(parallel)
    if shard is None and isinstance(parallel, VocabShard):
        shard = parallel
    if shard is not None:
        check_shard(shard, logits.shape[1])
    return RowLayout(group.group_name, numbers_of(shard, vocab_size))
