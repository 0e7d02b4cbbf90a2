"""Which class each row is, of rows that are gathered from the ranks at one place of every node.

A wrapper gives each rank one part of the head, classes in order, the last parts shorter or empty.
The parts of one place in the nodes are not next to each other, so classes are counted in the order
in which the rows of a node stand: rank by rank, of a rank part by part. Of one rank they ascend.

Shapes: V vocabulary, G nodes, L ranks of a node, R = G L parts, N tokens, C columns of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ClassOrder(NamedTuple):
    """Of the classes of a vocabulary, and of this rank's columns."""

    each: int  # rows of a part
    first_R: Tensor  # place of the first class of a part
    parts_G: Tensor  # of this rank

    def to_place(self, classes: Tensor) -> Tensor:
        """Where classes stand; all of them are in the vocabulary."""
        places: Tensor = self.first_R[classes // self.each] + classes % self.each
        return places

    def to_class(self, columns: Tensor) -> Tensor:
        """Of columns of this rank."""
        classes: Tensor = self.parts_G[columns // self.each] * self.each + columns % self.each
        return classes


def class_order_of(nodes_GL: Tensor, shard: Tensor, rank: int, device: torch.device) -> ClassOrder:
    """From what an operator may take: the part of the head that each rank of each node keeps, a
    shard as `numbers_of` gives it, and this rank's place in its node."""
    vocab_size = int(shard[2])
    each = -(-vocab_size // nodes_GL.numel())
    count_L = (vocab_size - nodes_GL * each).clamp(0, each).sum(0)
    nodes_G1 = torch.arange(nodes_GL.shape[0], device=nodes_GL.device)[:, None]
    first_R = torch.empty(nodes_GL.numel(), dtype=torch.int64, device=nodes_GL.device)
    first_R[nodes_GL] = count_L.cumsum(0) - count_L + nodes_G1 * each
    return ClassOrder(each, first_R.to(device), nodes_GL[:, rank].to(device))
