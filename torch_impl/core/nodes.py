"""Rows that are gathered over nodes, and meet the tokens of their own node: a walk whose head comes
first from the ranks at this rank's place of all nodes, and whose d weight goes back to them.

Shapes: V vocabulary, H hidden width, G nodes, L ranks of a node, v = ceil(V / G L) rows of a rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from xentlib.plan import VocabShard
from xentlib.torch.core.gradients import Gradients, GradientSums
from xentlib.torch.core.spread import Terms, shake_hands
from xentlib.torch.core.tokens import select_tokens
from xentlib.torch.core.vocab import gather_into, group_named, scatter_into
from xentlib.torch.core.walk import Walk
from xentlib.torch.operators import HeadCall


class NodeWalk(Walk):
    """Over the rows of this rank's place in all nodes, G v of them, and the tokens of its node.

    Nodes make collectives of their own within a call, as many as they have chunks: all ranks meet
    before the first one, and those of a place after the last.
    """

    def __init__(
        self,
        call: HeadCall,
        terms: Terms,
    ) -> None:
        assert call.shard is not None
        self.peers = group_named(call.peers)
        self.nodes = dist.get_world_size(self.peers)
        vocab_size = int(call.shard[2])
        shard = VocabShard(0, vocab_size, vocab_size)
        tokens = select_tokens(
            call.labels, call.where, call.ignore_index, vocab_size, shard, call.hidden.device
        )
        # What ranks of one node would refuse, while those of others wait for their rows.
        every = group_named(call.every)
        shake_hands(every, call, terms, "nodes", chunk_bytes=call.chunk_bytes, tokens=tokens)
        self.own_rows = call.weight.shape[0]
        ranks = self.nodes * dist.get_world_size(group_named(call.group))
        self.each = -(-vocab_size // ranks)
        # In the dtype of the products: what travels loses nothing.
        rows = self._gathered(call.weight.to(call.gemm_dtype))
        bias = None if call.bias is None else self._gathered(call.bias)
        super().__init__(call._replace(weight=rows, bias=bias), terms)

    def _gathered(self, own: Tensor) -> Tensor:
        """[v, ...] of every node; rows that the last ranks lack are 0 and no class."""
        if own.shape[0] < self.each:
            filled = own.new_zeros(self.each, *own.shape[1:])
            filled[: own.shape[0]] = own
            own = filled
        result = own.new_empty(self.nodes * self.each, *own.shape[1:])
        gather_into(result, own.contiguous(), group=self.peers)
        return result

    def scattered(self, whole: Tensor) -> Tensor:
        """This rank's rows [v, ...] of a gradient, summed over the nodes."""
        result = whole.new_empty(self.each, *whole.shape[1:])
        scatter_into(result, whole, group=self.peers)
        # What is kept until the backward has no room for rows that there are not.
        return result if self.own_rows == self.each else result[: self.own_rows].clone()


class NodeSums(GradientSums):
    """Sums of the tokens of this node, and in the end of all nodes."""

    walk: NodeWalk

    def __init__(self, walk: NodeWalk, needs: list[bool]) -> None:
        super().__init__(walk, needs, walk.nodes * walk.each)

    def finish(self, exponent: Tensor | None) -> Gradients:
        """d hidden of this rank's tokens, d weight and d bias of its rows and of all tokens, each
        node's without its own power of two."""
        found = super().finish(exponent)
        walk = self.walk
        walk.operand_VH = walk.operand_VH.new_empty(0, walk.hidden_size)  # not beside what is sent
        if self.needs[1]:
            found = found._replace(weight=walk.scattered(found.weight))
        if self.needs[2]:
            found = found._replace(bias=walk.scattered(found.bias))
        return found
