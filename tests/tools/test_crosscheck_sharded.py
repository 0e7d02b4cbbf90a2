"""`CrossCheck` of heads whose rows are on two ranks: shards of a vocabulary, and routes."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.corrupt_rows import PLANTED, plant
from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from xentlib.shards import VocabShard  # noqa: E402
from xentlib.tools.crosscheck import CrossCheckError, CrossCheckWarning  # noqa: E402
from xentlib.torch import CrossCheck, chunked_nll  # noqa: E402

WORLD, H, V, N = 2, 23, 157, 21
CASES: dict[str, dict[str, Any]] = {
    "shard": {},
    "shard, partial d hidden": {"reduce_hidden_grad": False, "softcap": 5.0},
    "shard, options": {"label_smoothing": 0.1, "z_loss": 1e-3, "temperature": 0.7},
    "shard, bf16": {"dtype": torch.bfloat16},
    "tokens": {"route": "tokens"},
    "hidden": {"route": "hidden"},
    "hidden, recompute": {"route": "hidden", "recompute": True},
    "shard, recompute": {"recompute": True, "dtype": torch.bfloat16},
    "stream": {"route": "stream", "label_smoothing": 0.1},
    "stream, bf16": {"route": "stream", "dtype": torch.bfloat16},
}


def head_of(rank: int, route: str, dtype: Any) -> Any:
    torch.manual_seed(0)
    head = torch.nn.Linear(H, V, dtype=dtype)
    if route in ("hidden", "stream"):
        torch.distributed.fsdp.fully_shard(head)
        return head
    rows = slice(0, 79) if rank == 0 else slice(79, V)
    part = torch.nn.Linear(H, rows.stop - rows.start, dtype=dtype)
    with torch.no_grad():
        part.weight.copy_(head.weight[rows])
        part.bias.copy_(head.bias[rows])
    return part


def step(rank: int, head: Any, seed: int, check: Any, *, route: str = "", **options: Any) -> None:
    group = torch.distributed.group.WORLD
    dtype = options.pop("dtype", torch.float32)
    torch.manual_seed(seed + (10 * rank if route else 0))
    x = torch.randn(N - 2 * rank * bool(route), H, dtype=dtype).requires_grad_()
    y = torch.randint(V, (len(x),))
    y[:3] = -100
    if route in ("hidden", "stream"):
        options |= {"gather": route}
    else:
        options |= {"vocab_parallel": VocabShard.of_ranks(len(head.weight), group)}
        options |= {"tokens_parallel": group, "reduction": "sum"} if route else {}
    with check.step():
        loss = chunked_nll(x, head.weight, y, bias=head.bias, **options).loss
        (1.7 * loss).backward()


def on_rank(rank: int, world: int) -> Any:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        route, dtype = options.get("route", ""), options.get("dtype", torch.float32)
        head = head_of(rank, route, dtype)
        check = CrossCheck(every=1, tokens=5, rows=9, exceeded="raise")
        for seed in range(2):
            step(rank, head, seed, check, **options)
        wrong = CrossCheck(every=1, tokens=5, rows=9)
        kinds = PLANTED if dtype == torch.float32 else [x for x in PLANTED if x != "1e-3"]
        for seed, kind in enumerate(kinds):
            with pytest.MonkeyPatch.context() as patches:
                if rank == 1:
                    plant(patches, kind, 31 * seed + 7)
                    with pytest.warns(CrossCheckWarning, match="d weight of all rows"):
                        step(rank, head, seed, wrong, **options)
                else:
                    step(rank, head, seed, wrong, **options)
        found[name] = (
            [x.passed for x in check.results],
            [x.passed for x in wrong.results],
            {m.quantity for m in check.results[0].measurements},
        )
    other = CrossCheck(every=1, against="other")
    with pytest.raises(CrossCheckError, match="rows are spread over ranks"):
        step(rank, head_of(rank, "", torch.float32), 0, other)
    return found


def test_a_rank_checks_its_own_rows_and_tokens() -> None:
    for rank, found in enumerate(launch(WORLD, on_rank)):
        for name, (right, wrong, quantities) in found.items():
            assert right == [True, True], name
            assert wrong == [rank == 0] * len(wrong), name
            assert {"loss", "d hidden", "d weight", "d bias of all rows"} < quantities, name
