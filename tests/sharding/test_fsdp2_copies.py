"""Copies that a user gathers of a head that FSDP2 shards: refused, unless their gradient is what
FSDP2 makes of the parameter's.

Shapes: N tokens of a rank, V vocabulary, H hidden width, r rank of an adapter.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch
from helpers.refused import said_by

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

V, H, N, R = 101, 15, 12, 3


class Head(torch.nn.Linear):
    """With the two matrices of an adapter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(H, V)
        self.a, self.b = (torch.nn.Parameter(torch.randn(x) / 4) for x in ((R, H), (V, R)))


def head_of(world: int, layout: str = "shards", divide: float | None = None) -> tuple[Any, Any]:
    """Under `fully_shard`, and the mesh of its vocabulary, if it is spread over ranks too."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    head, names = Head(), {"replicas": ("replica", "x"), "tp": ("x", "tp")}
    shape = (world,) if layout == "shards" else (2, world // 2)
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names.get(layout))
    tp = mesh["tp"] if layout == "tp" else None
    for name in ("weight", "bias") if tp is not None else ():
        part = distribute_tensor(getattr(head, name).data, tp, [Shard(0)])
        head.register_parameter(name, torch.nn.Parameter(part))
    fully_shard(head, mesh=mesh if tp is None else mesh["x"])
    if divide is not None:
        head.set_gradient_divide_factor(divide)
        head.set_force_sum_reduction_for_comms(True)
    return head, tp


def tokens(rank: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(N, H, generator=generator, requires_grad=True)
    return hidden, torch.randint(V, (N,), generator=generator)


def whole(x: Any, *placements: Any) -> Any:
    return x.full_tensor(grad_placements=placements or None)


def refused(rank: int, world: int) -> list[dict[str, str]]:
    """What is said of each."""
    from torch.distributed.tensor import Partial, Replicate

    from xentlib.torch import LowRankHead, chunked_logprobs, chunked_nll

    (head, _), (h, y) = head_of(world), tokens(rank)
    w, b = head.weight, head.bias
    summed, _ = head_of(world, divide=1.0)
    calls = {
        "bare": lambda: chunked_nll(h, whole(w), y),
        "per token": lambda: chunked_logprobs(h, whole(w), y),
        "cast after": lambda: chunked_nll(h, whole(w).double().float(), y),
        "cast before": lambda: chunked_nll(h, whole(w.bfloat16()).float(), y),
        "transposed": lambda: chunked_nll(h, whole(w).T, y, weight_layout="HV"),
        "redistributed": lambda: chunked_nll(
            h, w.redistribute(placements=[Replicate()]).to_local(), y
        ),
        "replicated": lambda: chunked_nll(h, whole(w, Replicate()), y),
        "summed": lambda: chunked_nll(h, whole(w, Partial()), y),
        "averaged": lambda: chunked_nll(h, whole(summed.weight, Partial("avg")), y),
        "shard": lambda: chunked_nll(h, w.to_local(), y % (V // world)),
        "summed shard": lambda: chunked_nll(h, summed.weight.to_local(), y % (V // world)),
        "merged": lambda: chunked_nll(h, whole(w) + whole(head.b) @ whole(head.a), y),
        "bias": lambda: chunked_nll(h, w, y, bias=whole(b)),
        "low rank": lambda: chunked_nll(h, LowRankHead(w, head.a, whole(head.b), 1.0), y),
    }
    if world == 4:
        replicas, _ = head_of(world, "replicas")
        copy = whole(replicas.weight, Partial("avg"), Replicate())
        calls["half of the ranks"] = lambda: chunked_nll(h, copy, y)
    return [said_by(calls)]


@pytest.mark.parametrize("world", [2, 4])
def test_a_copy_whose_gradient_fsdp2_would_not_have_is_refused(world: int) -> None:
    """M24: the loss is right, and the gradient of a bare `full_tensor` this rank's own."""
    for (said,) in launch(world, refused):
        for name, words in said.items():
            argument = {"bias": "bias", "low rank": "b"}.get(name, "weight")
            assert words.startswith(f"`{argument}` must be the parameter that `fully_shard` "), name
            assert "Pass the parameter itself" in words
        assert "to the mean over the ranks; got a copy with grad_placements=None" in said["bare"]
        assert "to the sum divided by 1 over" in said["averaged"]
        assert f"ranks; got a shard, (Shard(dim=0),) of ({V}, {H}). Pass" in said["shard"]


def gradients(rank: int, world: int) -> list[dict[str, Any]]:
    """Of each way that is right, with those of the parameter itself."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from xentlib import VocabShard
    from xentlib.torch import chunked_nll

    mean, found = Partial("avg"), []
    ways: dict[str, tuple[Any, ...]] = {
        "shards": ((mean,), None),
        "summed": ((Partial(),), 1.0),
        "half": ((mean,), float(world)),
    }
    if world == 4:
        ways["replicas"] = (mean, mean), None
        ways["tp"] = (mean, Shard(0)), None
    for way, (placements, divide) in ways.items():
        layout = way if way in ("replicas", "tp") else "shards"
        (head, tp), both = head_of(world, layout, divide), []
        h, y = tokens(rank if tp is None else rank // 2)
        for copied in (False, True):
            w, options = head.weight, {} if tp is None else {"vocab_parallel": tp}
            if copied:
                to = [Shard(0) if p.is_shard() else Replicate() for p in placements]
                w = w.redistribute(placements=to).to_local(grad_placements=placements)
                if tp is not None:  # a plain tensor, which does not say what part it is
                    options = {"vocab_parallel": VocabShard.of_ranks(len(w), tp)}
            chunked_nll(h, w, y, **options).loss.backward()
            both.append(head.weight.grad.full_tensor().numpy().copy())
            head.zero_grad()
        found.append(both)
    # A plain vocabulary shard, whose tokens are the same on all ranks
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    spread = torch.nn.Parameter(distribute_tensor(Head().weight.data, mesh, [Shard(0)]))
    plain, (h, y) = Head(), tokens(0)
    for w in (plain.weight, whole(spread)):
        chunked_nll(h, w, y).loss.backward()
    found.append([plain.weight.grad.numpy(), spread.grad.full_tensor().numpy()])
    # Rows, with the hidden states of all ranks
    (head, _), (h, y) = head_of(world), tokens(rank)
    group = {"vocab_parallel": mesh, "tokens_parallel": mesh}
    chunked_nll(h, head.weight.to_local(), y, **group, denominator=world).loss.backward()
    rows = head.weight.grad.full_tensor().numpy().copy()
    head.zero_grad()
    chunked_nll(h, head.weight, y, denominator=1).loss.backward()
    found.append([head.weight.grad.full_tensor().numpy(), rows])
    # Hidden states may come from wherever they do, and without a gradient nothing is wrong.
    trunk, _ = head_of(world)
    out = DTensor.from_local(h @ whole(trunk.a).T @ whole(trunk.a), mesh, [Replicate()])
    chunked_nll(out.full_tensor(), head.weight, y).loss.backward()
    chunked_nll(h, whole(head.weight).detach(), y).loss.backward()
    with torch.no_grad():
        chunked_nll(h, whole(head.weight), y)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_copies_whose_gradient_is_right_are_taken(world: int) -> None:
    """A12: where `grad_placements` say what FSDP2 does, and where it is not FSDP2's to reduce."""
    for rank in launch(world, gradients):
        for want, got in rank:
            hold_in_norm([got], [want])
