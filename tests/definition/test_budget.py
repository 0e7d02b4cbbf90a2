"""Row A15 with teeth: regressed copies of an FSDP2 head, on real ranks, against the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import Hang, launch
from xentlib.budgets import check_budget
from xentlib.contract import failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

N, V, H, CHUNKS = 56, 102, 16, 7


def head_of(world: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    head = torch.nn.Linear(H, V, bias=False)
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    fully_shard(head, mesh=mesh, reshard_after_forward=True)
    return head


def ours(hidden: Any, head: Any, labels: Any) -> Any:
    from xentlib.torch import chunked_nll

    return chunked_nll(hidden, head.weight, labels, max_chunk_bytes=N // CHUNKS * V * 4).loss


def gathered_in_the_loop(hidden: Any, head: Any, labels: Any) -> Any:
    parts = zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
    return sum(ours(x, head, y) for x, y in parts) / CHUNKS


def never_reduced(hidden: Any, head: Any, labels: Any) -> Any:
    """TRL 1.16."""
    return torch.nn.functional.cross_entropy(hidden @ head.weight.full_tensor().T, labels)


def reduced_twice(hidden: Any, head: Any, labels: Any) -> Any:
    head.weight.register_post_accumulate_grad_hook(
        lambda p: torch.distributed.all_reduce(p.grad.to_local())
    )
    return ours(hidden, head, labels)


def one_more_on_one_rank(hidden: Any, head: Any, labels: Any) -> Any:
    """Whoever has no tokens skips what the others do, among themselves."""
    alone = torch.distributed.new_group([0])
    if torch.distributed.get_rank() == 0:
        torch.distributed.all_reduce(torch.zeros(1), group=alone)
    return ours(hidden, head, labels)


REGRESSED = [gathered_in_the_loop, never_reduced, reduced_twice, one_more_on_one_rank]


def counted(rank: int, world: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    from xentlib.torch import count_collectives

    found = []
    for loss_of in (ours, *REGRESSED):
        head = head_of(world)
        hidden = torch.randn(N, H, requires_grad=True)
        with count_collectives() as forward:
            loss = loss_of(hidden, head, torch.arange(N))
        with count_collectives() as backward:
            loss.backward()
        found.append((forward.counts(), backward.counts()))
    return found


def test_regressed_copies_are_off_the_budget() -> None:
    """A15, D7: a gather in each chunk, a missing reduction, a second one, a count that depends
    on the rank."""
    ranks = launch(2, counted, seconds=120)
    for k, loss_of in enumerate((ours, *REGRESSED)):
        forward, backward = ([rank[k][phase] for rank in ranks] for phase in (0, 1))
        off = failures(check_budget("FSDP2", forward, backward))
        assert bool(off) == (loss_of is not ours), (loss_of.__name__, forward, backward)
    assert ranks[0][1][0] == {"all_gather": CHUNKS}


def entered_by(rank: int, world: int, all_ranks: bool, folder: Path) -> int:
    """Whoever has no valid token does not gather."""
    head = head_of(world)
    (folder / str(rank)).touch()
    labels = torch.arange(N) if rank else torch.full((N,), -100)
    if all_ranks or bool((labels != -100).any()):
        ours(torch.randn(N, H, requires_grad=True), head, labels).backward()
    torch.distributed.barrier()
    return rank


@pytest.mark.slow
def test_a_gather_that_only_some_ranks_enter_hangs(tmp_path: Path) -> None:
    """M5 (TRL#6696), and that we would notice: every rank enters, with tokens or without."""
    assert launch(2, entered_by, True, tmp_path, seconds=60) == [0, 1]
    for mark in tmp_path.iterdir():
        mark.unlink()
    with pytest.raises(Hang):
        launch(2, entered_by, False, tmp_path, seconds=20)
    assert len(list(tmp_path.iterdir())) == 2  # both were there
