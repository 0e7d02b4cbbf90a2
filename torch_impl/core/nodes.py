"""Rows that are gathered from the ranks at this rank's place of all nodes, before they meet the
tokens of their own node; their d weight goes back.

Shapes: V vocabulary, H hidden width, G nodes, L ranks of a node, v = ceil(V / G L) rows of a rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from xentlib.torch.core.class_order import class_order_of
from xentlib.torch.core.gradients import Gradients, GradientSums
from xentlib.torch.core.groups import gather_into, group_named, scatter_into
from xentlib.torch.core.logits import ChunkedLogits
from xentlib.torch.core.loop import HeadLoop, LocalRows, Sums
from xentlib.torch.operators import HeadCall


class NodeRows(LocalRows):
    """The rows of this rank's place in all nodes, G v of them. Nodes make collectives of their own
    within a call, as many as they have chunks."""

    def __init__(self, call: HeadCall) -> None:
        super().__init__(call)
        assert call.shard is not None
        assert call.nodes is not None
        group, self.peers = group_named(call.group), group_named(call.peers)
        self.nodes, self.shard, self.own_rows = (
            dist.get_world_size(self.peers),
            call.shard,
            self.size,
        )
        self.each = -(-int(call.shard[2]) // (self.nodes * dist.get_world_size(group)))
        self.size = self.nodes * self.each
        device = call.hidden.device
        self.order = class_order_of(call.nodes, call.shard, dist.get_rank(group), device)
        # In the dtype of the products: what travels loses nothing.
        weight = self._gathered(call.weight.to(call.gemm_dtype))
        bias = None if call.bias is None else self._gathered(call.bias)
        self.call = call._replace(weight=weight, bias=bias)

    def _gathered(self, own: Tensor) -> Tensor:
        """[v, ...] of every node; rows that the last ranks lack are 0 and no class."""
        if own.shape[0] < self.each:
            filled = own.new_zeros(self.each, *own.shape[1:])
            filled[: own.shape[0]] = own
            own = filled
        result = own.new_empty(self.size, *own.shape[1:])
        gather_into(result, own.contiguous(), group=self.peers)
        return result

    def scattered(self, whole: Tensor) -> Tensor:
        """This rank's rows [v, ...] of a gradient, summed over the nodes."""
        result = whole.new_empty(self.each, *whole.shape[1:])
        scatter_into(result, whole, group=self.peers)
        # What is kept until the backward has no room for rows that there are not.
        return result if self.own_rows == self.each else result[: self.own_rows].clone()

    def sums(self, loop: HeadLoop, needs: list[bool]) -> Sums:
        return NodeSums(self, self.block(loop), needs)


class NodeSums(GradientSums):
    """Sums of the tokens of this node, and in the end of all nodes."""

    def __init__(self, rows: NodeRows, logits: ChunkedLogits, needs: list[bool]) -> None:
        super().__init__(logits, needs, rows.size)
        self.rows = rows

    def finish(self, exponent: Tensor | None) -> Gradients:
        """d hidden of this rank's tokens, d weight and d bias of its rows and of all tokens, each
        node's without its own power of two."""
        gradients, logits = super().finish(exponent), self.logits
        logits.operand_VH = logits.operand_VH.new_empty(0, logits.hidden_size)  # not beside those
        if self.needs[1]:
            gradients = gradients._replace(weight=self.rows.scattered(gradients.weight))
        if self.needs[2]:
            gradients = gradients._replace(bias=self.rows.scattered(gradients.bias))
        return gradients
