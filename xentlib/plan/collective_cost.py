"""What ranks send, and how long it takes: collectives as sizes, and the rates of a machine.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share a head's rows, T tokens
of a rank in a chunk, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Rates(NamedTuple):
    """Of one GPU, an H100 or H200 in a node of eight.

    Attributes:
        gemm: FLOP/s of products in 16 bits.
        node: bytes/s that it receives from the others of its node (NVLink 4).
        network: bytes/s that it receives from other nodes (400 Gbit/s a GPU). A node with fewer
            adapters than GPUs has that much less for each.
        latency: seconds of a collective that moves nothing.
    """

    gemm: float = 790e12
    node: float = 450e9
    network: float = 50e9
    latency: float = 25e-6


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind, and of one purpose, of a call.

    Attributes:
        kind: one of `xentlib.collectives.KINDS`.
        what: is sent.
        count: how many.
        bytes: of all of them, as `count_collectives` counts: the result of an all-gather, what goes
            into a reduce-scatter, the tensor of an all-reduce.
        ranks: that take part.
        nodes: that these ranks are spread over evenly.
        backward: in the backward pass, not in the forward.
        per_sync: only in the micro-batch that reduces gradients, not in each.
    """

    kind: str
    what: str
    count: int
    bytes: int
    ranks: int
    nodes: int = 1
    backward: bool = False
    per_sync: bool = False

    @property
    def received(self) -> float:
        """Bytes that a rank receives: all but its own part, twice in a ring's all-reduce."""
        return self._times * self.bytes * (self.ranks - 1) / self.ranks

    @property
    def _times(self) -> int:
        return 2 if self.kind == "all_reduce" else 1

    def seconds(self, rates: Rates) -> float:
        """Of the slower of two paths that carry at the same time: within a node each rank receives
        all but its own part; from other nodes a node's ranks receive what the node has not, each
        its share."""
        in_node = self.ranks // self.nodes
        within = self.received / rates.node if in_node > 1 else 0.0
        missing = self._times * self.bytes * (self.nodes - 1) / self.nodes
        return self.count * rates.latency + max(within, missing / in_node / rates.network)
