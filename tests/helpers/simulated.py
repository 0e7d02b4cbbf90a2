"""One rank of very many: PyTorch's fake process group, whose collectives send nothing, under the
real `fully_shard` and the real call. What is computed is of no use, what is sent is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from helpers.routed import as_on_a_device
from xentlib.collectives import CollectiveCount
from xentlib.torch import chunked_logprobs, chunked_nll
from xentlib.torch.collectives import Counter

__all__ = ["Simulated", "sent_by"]


class Simulated(NamedTuple):
    """One call of a head of [vocab, hidden] under FSDP2 on a mesh."""

    shape: tuple[int, ...]  # of FSDP2's ranks; or those and the ranks of tensor parallelism
    gather: str = "head"
    function: str = "chunked_nll"
    nodes: int = 1  # over which rows are gathered first
    sequence: bool = False  # tokens are spread over tensor parallelism
    vocab: int = 8003
    hidden: int = 20
    tokens: int = 16

    @property
    def ranks(self) -> int:
        return self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)


Sent = dict[tuple[str, int], tuple[int, int]]


class ByRanks(Counter):
    """Number and bytes of the collectives, by kind and by how many ranks take part."""

    def __init__(self) -> None:
        super().__init__(CollectiveCount())
        self.sent: Sent = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.count)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        scripts = [x for x in args if isinstance(x, torch.ScriptObject)]
        groups = [x for x in scripts if "ProcessGroup" in str(x._type())]
        if groups and len(self.count) > before:
            sent = self.count.found[-1]
            key = sent.kind, dist.ProcessGroup.unbox(groups[0]).size()
            count, size = self.sent.get(key, (0, 0))
            self.sent[key] = count + 1, size + sent.bytes
        return result


@contextmanager
def world(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sent_by(setup: Simulated) -> Sent:
    """Of a forward and a backward."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    with world(setup.ranks), as_on_a_device(), ByRanks() as counted:
        names = ("fsdp", "tp")[: len(setup.shape)]
        mesh = dist.init_device_mesh("cpu", setup.shape, mesh_dim_names=names)
        head = torch.nn.Linear(setup.hidden, setup.vocab, bias=False)
        more: dict[str, Any] = {"gather": setup.gather}
        if "tp" in names:
            more["vocab_parallel"] = mesh["tp"]
            if setup.sequence:
                more["tokens_parallel"] = mesh["tp"]
                more |= {"reduction": "sum"} if setup.function == "chunked_nll" else {}
            piece = distribute_tensor(head.weight.data, mesh["tp"], [Shard(0)])
            head.weight = torch.nn.Parameter(piece)
        if setup.nodes > 1:
            over = setup.nodes, setup.ranks // setup.nodes
            more["tokens_parallel"] = dist.init_device_mesh("cpu", over)
        fully_shard(head, mesh=mesh["fsdp"], reshard_after_forward=True)
        hidden = torch.randn(setup.tokens, setup.hidden, requires_grad=True)
        labels = torch.randint(setup.vocab, (setup.tokens,))
        counted.sent.clear()  # of what set it up
        if setup.function == "chunked_nll":
            loss = chunked_nll(hidden, head.weight, labels, **more).loss
        else:
            loss = chunked_logprobs(hidden, head.weight, labels, **more).logprobs.sum()
        loss.backward()
    return counted.sent
