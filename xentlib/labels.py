"""Labels: which one belongs to which token, and probabilities of classes in place of one class."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["SoftLabels", "next_token_labels"]

A = TypeVar("A")  # a tensor or an array of the backend


class SoftLabels(NamedTuple, Generic[A]):
    """Probabilities of a few classes of each token, for `labels` in place of an array of all
    classes: the others have 0. No gradient is computed of it.

    Attributes:
        ids: [..., K] integers, the classes of each token, -1 where there are fewer; what a class
            that is there twice has adds up.
        probs: [..., K] floating, their probabilities; anything where the id is -1.
    """

    ids: A
    probs: A


def next_token_labels(
    labels: Any,
    *,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    position_ids: Any = None,
    where: Any = None,
    shift: int = 1,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
    layout: str = "contiguous",
) -> Any:
    """Shift token ids so that position t carries the label it must predict, the token at t + 1.

    out[..., t] = labels[..., t + shift] where t + shift exists and belongs to the same packed
    document, `ignore_index` elsewhere. Count tokens after this shift, never before: a document of n
    tokens has n - shift targets, or none.

    Args:
        labels: [..., L] integers, token ids or labels already masked with `ignore_index`.
        segment_ids: [..., L] integers, the number of the document that each token belongs to. A
            document is an unbroken run: an id that comes back after another one is a new document.
        cu_seqlens: [documents + 1] integers, offsets of the documents of one packed row,
            `0, len_0, len_0 + len_1, ...`; empty documents are allowed.
        position_ids: [..., L] integers, each token's place in its document. A document begins where
            that is not the place before plus one, wherever it starts to count; so each token of
            left padding (1, 1, 1 or 0, 0, 0 before 0, 1, 2) is a document of its own. Places that
            repeat or leave some out within a document (those of images, say) would split it there:
            pass `segment_ids` then. Of the three descriptions, one may be passed.
        where: [..., L] bool or integers 0 and 1, which tokens count: an attention mask, say. A
            token has a label if it and its target do both, so padding on either side neither
            predicts nor is predicted. As `segment_ids` a mask would make a document of the padding.
        shift: how many tokens ahead the target is, an integer >= 1: 1 for the next token, 2 and
            more for the further heads of multi-token prediction. From L on, nothing is predicted.
        ignore_index: written where there is nothing to predict.
        sequence_parallel: the ranks that the sequence is spread over: in PyTorch a ProcessGroup or
            a one-dimensional DeviceMesh, in JAX the name of a mesh axis inside `shard_map`.
            `labels`, `segment_ids`, `position_ids` and `where` are then this rank's part of those
            of the whole row. `cu_seqlens` are the offsets of the whole row, the same on every rank,
            as `shift` is. The first `shift` columns of each slice or piece are exchanged, in one
            collective; targets may lie several slices ahead.
        layout: which part of the row a rank has. "contiguous": a slice of consecutive tokens, in
            rank order; in PyTorch slices may differ in length, and be empty. "zigzag", with R
            ranks: pieces r and 2 R - 1 - r of 2 R equal pieces of the row on rank r, one after the
            other, so that causal attention costs each rank as much. Where every document is cut
            into such pieces (the THD format of TransformerEngine), shift before slicing.

    Returns:
        [..., L] of the dtype of `labels`; the input is not written to.

    Raises:
        TypeError: not integers (uint64 is refused too), a dtype that cannot hold `ignore_index`,
            or no process group.
        ValueError: a shift below 1, shapes that do not belong together, two descriptions of the
            packing, a mesh of several dimensions, a mesh axis that is not there, or a NumPy array's
            64-bit numbers that a JAX without 64-bit types would change; pieces that differ in
            length and, in PyTorch, `cu_seqlens` that are others on another rank. What only another
            rank knows is not read on a GPU: each label is then one that no vocabulary has, and a
            loss is NaN.

    Numerics: integers only (contract row A0).
    """
    raise NotImplementedError(
        "call xentlib.torch.next_token_labels or xentlib.jax.next_token_labels"
    )


# How many pieces of the row a rank has.
PIECES = {"contiguous": 1, "zigzag": 2}


def any_of_next(begins: Any, columns: int) -> Any:
    """Whether a document begins at any of the `columns` tokens behind each, by doubling. A running
    count would make JAX's compiler gather whole rows where an Auto axis spreads them."""
    reach = 1
    while reach < columns:
        step = min(reach, columns - reach)
        begins = begins[..., :-step] | begins[..., step:]
        reach += step
    return begins[..., 1:]
