"""Windows of `TokenNormalizer` on real ranks: what is uneven between them, which tokens each of
them holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import H, N, V, batch_of, net, of_one_batch, run_window, spoilt  # noqa: E402
from helpers.windows_ranks import refused  # noqa: E402
from xentlib.torch import TokenNormalizer, next_token_labels  # noqa: E402


def uneven(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    model = torch.nn.parallel.DistributedDataParallel(net())
    norm = TokenNormalizer(model)
    mine = [batch_of(k, 10 - k) for k in range(4)][: 1 + 3 * rank]
    window = run_window(norm, model, mine, uneven=True)
    found["uneven"] = [p.grad.clone().numpy() for p in model.parameters()]
    model.zero_grad()
    # A rank without any, whose filler is what memory held.
    run_window(norm, model, mine if rank else [], uneven=True, filler=spoilt(batch_of(9)))
    found["none"] = [p.grad.clone().numpy() for p in model.parameters()]
    found["micro-batches"] = window.stats.micro_batches
    model.zero_grad()
    # Both ranks hold the same tokens, as tensor-parallel ones do.
    alone = dist.new_group([0]), dist.new_group([1])
    twice = torch.nn.parallel.DistributedDataParallel(net(), process_group=alone[rank])
    window = run_window(TokenNormalizer(twice, count_group=dist.group.WORLD), twice, [batch_of(0)])
    found["copies"] = [p.grad.clone().numpy() for p in twice.parameters()]
    assert window.stats.num_tokens == N
    # Replicas stay the same for 50 steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for k in range(50):
        batches = [batch_of(100 * k + 10 * rank + j, (3 * k + 5 * rank + j) % N) for j in range(2)]
        run_window(norm, model, batches)
        optimizer.step()
        optimizer.zero_grad()
    found["replicas"] = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()

    hooked = torch.nn.parallel.DistributedDataParallel(net())

    def own(state, bucket):  # DDP reads annotations, which are text here
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    hooked.register_comm_hook(None, own)
    cut = net()
    mesh = dist.init_device_mesh("cpu", (world,))
    for module in (cut[1], cut):
        fully_shard(module, mesh=mesh)
    cut.set_gradient_divide_factor(3.0)
    partly = net()
    fully_shard(partly[1], mesh=mesh)
    found["refused"] = {
        "hook": refused(hooked),
        "factors": refused(cut),
        "sums": refused(model, sums=True),
        "inside": refused(torch.nn.Sequential(model)),
        "partly": refused(partly),
    }
    return found


def test_what_is_uneven_between_ranks() -> None:
    """D8: numbers of micro-batches, a rank with none, copies of tokens, replicas to the bit."""
    ranks = launch(2, uneven, seconds=120)

    four = [batch_of(k, 10 - k) for k in range(4)]
    cases = {
        "uneven": of_one_batch([four[0], *four]),
        "none": of_one_batch(four),
        "copies": of_one_batch([batch_of(0)]),
    }
    for rank in ranks:
        for name, oracle in cases.items():
            hold_in_norm(rank[name], oracle, name)
        said = rank["refused"]
        assert "communication hook 'own'" in said["hook"]
        assert (
            "gradient divide factors that differ between its modules: 3.0, None" in said["factors"]
        )
        assert "got True for a DistributedDataParallel, whose reduction is read" in said["sums"]
        assert "with a wrapper inside, at '0'" in said["inside"]
        assert "with a wrapper inside, at '1'" in said["partly"]
    assert np.array_equal(ranks[0]["replicas"], ranks[1]["replicas"])
    assert [rank["micro-batches"] for rank in ranks] == [4, 4]


def crossed(rank: int, world: int) -> list[str]:
    """Gradients over ranks 0 and 1, tokens counted over 0 and 2."""
    from torch import distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    others = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = torch.nn.parallel.DistributedDataParallel(net(), process_group=pairs[rank // 2])
    TokenNormalizer(model, count_group=dist.group.WORLD)
    return [refused(model, count_group=others[rank % 2])]


def test_tokens_are_counted_over_the_ranks_that_hold_them() -> None:
    """As many ranks, but others."""
    (said,) = launch(4, crossed)[0]
    assert "`count_group` must hold every data rank" in said
    assert "got ranks [0, 2] for the data ranks [0, 1]" in said


ROWS, LENGTH = 3, 12


def row_batch() -> tuple[Any, Any]:
    """[ROWS, LENGTH, H] inputs and token ids, some of them ignored."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(V, (ROWS, LENGTH), generator=generator)
    ids[0, 2:5] = -100
    ids[2, 7:] = -100
    return torch.randn(ROWS, LENGTH, H, generator=generator), ids


def sliced(rank: int, world: int) -> list[Any]:
    """A rank's slice of every row, as context parallelism has it; a row is a micro-batch."""
    group = torch.distributed.group.WORLD
    x, ids = row_batch()
    here = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    model = torch.nn.parallel.DistributedDataParallel(net())
    labels = [next_token_labels(row[None, here], sequence_parallel=group)[0] for row in ids]
    run_window(TokenNormalizer(model), model, list(zip(x[:, here], labels, strict=True)))
    return [p.grad.numpy() for p in model.parameters()]


def test_slices_of_context_parallel_ranks() -> None:
    """D8: different tokens, so each counts once; labels are shifted before they are cut. The
    last position of a slice predicts the first of the next rank's."""
    x, ids = row_batch()
    labels = next_token_labels(ids)
    want = of_one_batch([(x.flatten(0, 1), labels.flatten())])
    for rank in launch(2, sliced):
        hold_in_norm(rank, want)
