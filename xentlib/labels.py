"""Which label belongs to which token: the definition that both backends carry out."""

from __future__ import annotations

from typing import Any

__all__ = ["next_token_labels"]


def next_token_labels(
    labels: Any,
    *,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
) -> Any:
    """Shift token ids so that position t carries the label it must predict, the token at t + 1.

    out[..., t] = labels[..., t + 1] where t + 1 exists and belongs to the same packed document,
    `ignore_index` elsewhere. Count tokens after this shift, never before: a document of n tokens
    has n - 1 targets.

    Args:
        labels: [..., L] integers, token ids or labels already masked with `ignore_index`.
        segment_ids: [..., L] integers, the number of the document that each token belongs to.
        cu_seqlens: [documents + 1] integers, offsets of the documents of one packed row,
            `0, len_0, len_0 + len_1, ...`; empty documents are allowed.
        ignore_index: written where there is nothing to predict.
        sequence_parallel: the ranks that the sequence is spread over: in PyTorch a ProcessGroup or
            a one-dimensional DeviceMesh, in JAX the name of a mesh axis inside `shard_map`.
            `labels` and `segment_ids` are then this rank's consecutive slice, in rank order; in
            PyTorch slices may differ in length, and be empty. `cu_seqlens` are the offsets of the
            whole row, the same on every rank. One column is exchanged, in one collective. Where a
            rank holds two slices (zig-zag context parallelism), shift before cutting instead.

    Returns:
        [..., L] of the dtype of `labels`; the input is not written to.

    Raises:
        TypeError: not integers, a dtype that cannot hold `ignore_index`, or no process group.
        ValueError: shapes that do not belong together, both descriptions of the packing, a mesh of
            several dimensions, or a mesh axis that is not there.

    Numerics: integers only (contract row A0).
    """
    raise NotImplementedError(
        "call xentlib.torch.next_token_labels or xentlib.jax.next_token_labels"
    )
