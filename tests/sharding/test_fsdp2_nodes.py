"""A mesh of nodes as `tokens_parallel` beside heads under real `fully_shard`, on 4 gloo ranks,
against one process that has the whole batch; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from helpers.collected import collected
from helpers.held import hold_parameters
from helpers.ranks import launch
from helpers.refused import said_by
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.fully_sharded import Sharded, on_rank  # noqa: E402
from helpers.wrapped import (  # noqa: E402
    batches,
    gradients_of_one_process,
    loss_of,
    model_of,
    part_of,
)
from xentlib.tools.harness.ranks import DEVICE  # noqa: E402

NODES = Sharded(gather="hidden", nodes=2, world=4)
PIECES = (("reshard_after_forward", True),)
TOKENS = "chunked_logprobs"
HELD = {
    "plain": replace(NODES, model=("bias",)),
    "many chunks, rank without tokens": replace(NODES, chunk=8, idle=True),
    "a rank without rows": replace(NODES, vocab=5),
    "per token": replace(NODES, function=TOKENS, chunk=8, model=("bias",)),
    "inside": replace(NODES, model=("inside",)),
    "frozen trunk": replace(NODES, frozen=True),
    "two calls": replace(NODES, calls=2),
    "two calls, per token": replace(NODES, calls=2, function=TOKENS),
    "checkpoint": replace(NODES, checkpoint=True),
    "three micro-batches": replace(NODES, steps=3, model=("bias",)),
    "three micro-batches, per token": replace(NODES, steps=3, function=TOKENS),
    "divided by 1": replace(NODES, divide=1.0),
    "divided by 1, three micro-batches": replace(NODES, divide=1.0, steps=3),
    "offload": replace(NODES, policy="offload"),
    "NLLHead": replace(NODES, road="NLLHead", model=("bias",)),
    "NLLHead, per token": replace(NODES, road="NLLHead", function=TOKENS),
    "module": replace(NODES, road="module", model=("bias",)),
    "root, tied": replace(NODES, own=False, model=("tied",), wrap=PIECES),
    "one node": replace(NODES, nodes=1, model=("bias",)),
    "nodes of one rank": replace(NODES, nodes=4, model=("bias",)),
    "nodes of one rank, per token": replace(NODES, nodes=4, function=TOKENS),
}
EXACT = {
    "audit": replace(NODES, audit=True, model=("bias",)),
    "audit, many chunks": replace(NODES, audit=True, chunk=8),
    "audit, per token": replace(NODES, audit=True, function=TOKENS),
}
SETUPS = HELD | EXACT


@pytest.fixture(scope="module")
def found(request: Any) -> dict[str, list[Any]]:
    """Every setup: one start."""
    names = collected(request, SETUPS)
    ranks = launch(4, on_rank, [SETUPS[name] for name in names])
    return dict(zip(names, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", HELD)
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A12, D7: all gradients, on every rank, the wrapper's mean over all ranks included. Catches:
    division by the ranks or the number of nodes, a sum over one node, rows in another order."""
    expected = gradients_of_one_process(replace(SETUPS[name], gather="head"))
    for grads, _ in found[name]:
        hold_parameters(grads, expected)


@pytest.mark.parametrize("name", EXACT)
def test_head_gradients_are_one_sum_of_all_tokens(found: Any, name: str) -> None:
    """A12, A1: in float64, of the hidden states that the ranks have, rounded once."""
    setup = replace(SETUPS[name], gather="head")
    model, (((ids, labels),), total) = model_of(setup), batches(setup)
    with torch.no_grad():
        hidden = torch.cat([model(ids[part_of(rank, 4)]) for rank in range(4)])
    loss_of(setup, labels, total, hidden, model.head).backward()
    for grads, _ in found[name]:
        for parameter, p in model.head.named_parameters():
            assert not failures(
                check("A1", grads[f"head.{parameter}"], p.grad.float().cpu().numpy())
            )


V, H, N = 157, 23, 12


def tokens_of(rank: int) -> tuple[Any, Any]:
    torch.manual_seed(rank)
    return torch.randn(N, H), torch.randint(V, (N,))


HELD: list[Any] = []  # FSDP2 knows a parameter for as long as its module is there


def head_of(shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("shard",), **how: Any) -> Any:
    """Over the last dimension of a mesh, as replicas over the other."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(9)
    head = torch.nn.Linear(H, V, bias=False)
    HELD.append(head)
    mesh = torch.distributed.init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    return fully_shard(head, mesh=mesh if names[0] != "other" else mesh[names[1]], **how)


def narrow(rank: int, world: int) -> tuple[Any, Any]:
    """d weight of this rank's rows under a policy of 16 bits, with sums in float64; and in one
    process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh(DEVICE, (2, 2))
    head = head_of(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    dense = head.weight.detach().full_tensor().requires_grad_()
    more: dict[str, Any] = {"compute_dtype": "float64", "reduction": "sum"}
    every = [tokens_of(k) for k in range(world)]
    hidden, labels = every[rank]
    out = chunked_nll(
        hidden.bfloat16(), head.weight, labels, gather="hidden", tokens_parallel=mesh, **more
    )
    out.loss.backward()
    with torch.autocast(DEVICE, torch.bfloat16):
        hidden, labels = (torch.cat(x) for x in zip(*every, strict=True))
        chunked_nll(hidden.bfloat16(), dense, labels, **more).loss.backward()
    got = head.weight.grad.full_tensor() * world
    return got.cpu().numpy(), dense.grad.cpu().numpy()


def test_what_is_sent_in_16_bits_is_added_up_in_more() -> None:
    """A1: rows travel in the dtype of the policy, their gradient never does."""
    for got, want in launch(4, narrow):
        assert not failures(check("A1", got, want))


def of_policy(rank: int, world: int) -> list[tuple[Any, Any]]:
    """By each route, of hidden states in float32: loss and d weight under a policy of
    16 bits, and under autocast without one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from xentlib.torch import chunked_nll

    mesh, (hidden, labels) = torch.distributed.init_device_mesh(DEVICE, (2, 2)), tokens_of(rank)
    found = []
    for gather, over in (("hidden", mesh), ("hidden", None), ("stream", None)):
        for policy in (True, False):
            bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            head = head_of(**({"mp_policy": bf16} if policy else {}))
            more = {"gather": gather, "tokens_parallel": over}
            with torch.autocast(DEVICE, torch.bfloat16, enabled=not policy):
                out = chunked_nll(hidden, head.weight, labels, **more)
            out.loss.backward()
            found.append(
                (out.loss.detach().cpu().numpy(), head.weight.grad.full_tensor().cpu().numpy())
            )
    return list(zip(found[::2], found[1::2], strict=True))


def test_products_have_the_dtype_of_the_policy() -> None:
    """A1. Catches: a route that multiplies in the dtype of the parameters."""
    for routes in launch(4, of_policy):
        for both in routes:
            for got, want in zip(*both, strict=True):
                assert not failures(check("A1", got, want))


def called(rank: int, nodes: Any, *, head: Any = None, **more: Any) -> Any:
    from xentlib.torch import chunked_nll

    hidden, labels = tokens_of(rank)
    weight = (head_of() if head is None else head).weight
    named = {"gather": "hidden", "labels": labels, **more}
    return chunked_nll(hidden, weight, tokens_parallel=nodes, **named)


def bad_label(rank: int, nodes: Any) -> Any:
    labels = tokens_of(rank)[1]
    labels[3] = V if rank == 3 else labels[3]
    return called(rank, nodes, labels=labels)


def one_node_freezes(rank: int, nodes: Any) -> Any:
    head = head_of()
    head.requires_grad_(rank < 2)
    return called(rank, nodes, head=head)


def one_node_scales(rank: int, nodes: Any) -> Any:
    return (called(rank, nodes).loss * (1 + rank // 2)).backward()


def of_logprobs(rank: int, nodes: Any) -> Any:
    from xentlib.torch import chunked_logprobs

    hidden, labels = tokens_of(rank)
    more = {"entropy": rank == 1, "tokens_parallel": nodes, "gather": "hidden"}
    return chunked_logprobs(hidden, head_of().weight, labels, **more)


def low_rank(rank: int, nodes: Any) -> Any:
    from xentlib.torch import LowRankHead, chunked_nll

    hidden, labels = tokens_of(rank)
    head = LowRankHead(head_of().weight, torch.randn(2, H), torch.randn(V, 2))
    return chunked_nll(hidden, head, labels, gather="hidden", tokens_parallel=nodes)


def refused(rank: int, world: int) -> dict[str, str]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    group, nodes = torch.distributed.group.WORLD, init_device_mesh(DEVICE, (2, 2))
    calls: dict[str, Callable[[], Any]] = {
        "a group": lambda: called(rank, group),
        "a flat mesh": lambda: called(rank, init_device_mesh(DEVICE, (4,))),
        "backwards": lambda: called(rank, DeviceMesh(DEVICE, [[2, 3], [0, 1]])),
        "other ranks": lambda: called(rank, nodes, head=head_of((2, 2), ("other", "shard"))),
        "replicas": lambda: called(rank, nodes, head=head_of((2, 2), ("replica", "shard"))),
        "head": lambda: called(rank, nodes, gather="head"),
        "stream": lambda: called(rank, nodes, gather="stream"),
        "auto": lambda: called(rank, nodes, gather="auto", tokens_per_rank=N),
        "shards": lambda: called(rank, nodes, vocab_parallel=group),
        "unreduced": lambda: called(rank, nodes, reduce_hidden_grad=False),
        "label": lambda: bad_label(rank, nodes),
        "budget": lambda: called(rank, nodes, max_chunk_bytes=1024 * (1 + rank // 2)),
        "dtype": lambda: called(rank, nodes, compute_dtype="float64" if rank > 1 else None),
        "softcap": lambda: called(rank, nodes, softcap=30.0 + rank // 2),
        "smoothing": lambda: called(rank, nodes, label_smoothing=0.1 * (rank == 3)),
        "z-loss": lambda: called(rank, nodes, z_loss=1e-4 * (rank // 2)),
        "outputs": lambda: called(rank, nodes, outputs=("entropy",) if rank == 1 else ()),
        "entropy": lambda: of_logprobs(rank, nodes),
        "frozen": lambda: one_node_freezes(rank, nodes),
        "low rank": lambda: low_rank(rank, nodes),
        "upstream": lambda: one_node_scales(rank, nodes),
    }
    return said_by(calls)


TWO = (
    "`tokens_parallel` must be a DeviceMesh of two dimensions, nodes and the ranks of a node, with"
)
ORDER = "`tokens_parallel` must hold the ranks that `fully_shard` spreads the head over, "
ALONE = "`tokens_parallel` must come with `vocab_parallel`, of the same ranks; got it alone"
SAME = "must be the same on every rank of `vocab_parallel`; got ranks that differ"
SAID = {
    "a group": f"{TWO} `gather='hidden'`; got a ProcessGroup",
    "a flat mesh": f"{TWO} `gather='hidden'`; got one of 1 dimensions",
    "backwards": f"{ORDER}[0, 1, 2, 3], node by node and in that order; got [[2, 3], [0, 1]]",
    "other ranks": f"{ORDER}[",
    "replicas": "`tokens_parallel` must be None, with `gather='hidden'`, for a head of FSDP2 with",
    "head": ALONE,
    "stream": ALONE,
    "auto": ALONE,
    "shards": "`gather` must be 'head' with `vocab_parallel` unless `fully_shard` shards those",
    "unreduced": "`reduce_hidden_grad` must be True with `tokens_parallel`",
    "label": "`labels` must ",
    "budget": f"`max_chunk_bytes` {SAME}",
    "dtype": f"`the dtype of hidden` {SAME}",
    "softcap": f"`softcap` {SAME}",
    "smoothing": f"`label_smoothing` {SAME}",
    "z-loss": f"`z_loss` {SAME}",
    "outputs": f"`outputs` {SAME}",
    "entropy": f"`entropy` {SAME}",
    "frozen": "`weight` and `bias` must require grad on every rank of `vocab_parallel`",
    "low rank": "`weight` must be one array here; got a `LowRankHead` with ",
    "upstream": "the gradient of `loss` must be the same on every rank of `tokens_parallel`",
}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return launch(4, refused)


@pytest.mark.parametrize("name", SAID)
def test_a_wrong_call_says_so_on_every_rank(said: Any, name: str) -> None:
    """D7: on the ranks of all nodes, before one waits for another."""
    for found in said:
        assert found[name].startswith(SAID[name]), found[name]
