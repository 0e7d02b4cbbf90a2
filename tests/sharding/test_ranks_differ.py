"""What ranks may differ in, on two and three ranks, on the host and as on a device: every rank
raises the same, or has NaN, or is right. What could make ranks wait for each other is not called,
and stands in a table of the docs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

N, H, V = 22, 7, 30
WAYS = ("vocab_parallel", "tokens_parallel", "hidden", "stream")
# What each rank passes; the last one differs. None: what all others pass.
DIFFER: dict[str, Callable[[bool], dict[str, Any]]] = {
    "nothing": lambda last: {},
    "softcap": lambda last: {"softcap": 30.0 if last else None},
    "another softcap": lambda last: {"softcap": 30.0 + last},
    "label_smoothing": lambda last: {"label_smoothing": 0.1 * last},
    "z_loss": lambda last: {"z_loss": 1e-3 * last},
    "recompute": lambda last: {"recompute": last},
    "logit_scale": lambda last: {"logit_scale": 1.0 + last / 16},
    "class weights on one": lambda last: {"class_weights": torch.ones(V) if last else None},
    "class weights": lambda last: {"class_weights": torch.linspace(0.5, 1.5, V).roll(int(last))},
    "long class weights": lambda last: {"class_weights": torch.ones(V + last)},
    "outputs": lambda last: {"outputs": ("entropy",) if last else ()},
    "predicted": lambda last: {"outputs": ("predicted",) if last else ()},
    "ignore_index": lambda last: {"ignore_index": -5 if last else -100},
    "max_chunk_bytes": lambda last: {"max_chunk_bytes": 32 * V * (2 if last else 1)},
    "compute_dtype": lambda last: {"compute_dtype": "float64" if last else None},
    "rows undeclared": lambda last: {},
    "function": lambda last: {},
    "ids": lambda last: {"ids": torch.arange(2 + last).expand(N, -1)},
    "divergence": lambda last: {"kind": "reverse_kl" if last else "forward_kl"},
    "teacher": lambda last: {},
    "temperature of a teacher": lambda last: {},
    "mean of most probable": lambda last: {"reduction": "sum" if last else "mean"},
    "entropy of ids": lambda last: {"entropy": last, "ids": torch.arange(2).expand(N, -1)},
    "reduction": lambda last: {"reduction": "sum" if last else "mean"},
    "no_grad": lambda last: {},
    "a frozen head": lambda last: {},
    "route": lambda last: {},
    "number of tokens": lambda last: {},
}
# Of `vocab_parallel`, whose ranks compare in the first MAX: what changes the size or the number of
# collectives, and is not compared before them. The docs' table has the same rows.
SIZES = ("compute_dtype", "number of tokens", "recompute")  # of the MAX itself: on a host too
OF_CALLS = ("function", "ids", "divergence", "no_grad", "rows undeclared")
WAITS = (*OF_CALLS, "max_chunk_bytes", "softcap", *SIZES)
# In rows of others: "divergence" and "ids".
ALSO_WAIT = ("teacher", "entropy of ids")
# Of shards alone: elsewhere logits are refused, and ids need no sum over ranks.
OF_SHARDS = (*ALSO_WAIT, "temperature of a teacher")
# Each rank's own where tokens are: right.
OWN = ("number of tokens", "rows undeclared")
# Not alike, and no rank's result depends on it.
RIGHT = {("vocab_parallel", "ignore_index"), ("vocab_parallel", "a frozen head")}


def called(rank: int, world: int, way: str, name: str) -> Any:
    """One call of this rank, whose result is NaN or not."""
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import (
        chunked_divergence,
        chunked_logprobs,
        chunked_nll,
        vocab_parallel_logprobs,
    )

    last, group = rank == world - 1, dist.group.WORLD
    torch.manual_seed(0 if way == "vocab_parallel" else rank)
    count = N - 3 * last if name == "number of tokens" else N
    hidden = torch.randn(N, H)[:count].requires_grad_()
    labels = torch.randint(V, (N,))[:count]
    options = DIFFER[name](last)
    torch.manual_seed(1)
    head = torch.nn.Linear(H, V, bias=False)
    if name == "a frozen head" and last:
        head.requires_grad_(False)
    if way in ("vocab_parallel", "tokens_parallel"):
        sizes = [V // world] * world
        if name == "rows undeclared":
            sizes = [V // world + 1] + [V // world] * (world - 2) + [V // world - 1]
        weight = head.weight.detach().split(sizes)[rank].clone()
        weight.requires_grad_(head.weight.requires_grad)
        options |= {"vocab_parallel": group}
        if way == "tokens_parallel" and not (name == "route" and last):
            options |= {"tokens_parallel": group}
    else:
        fully_shard(head, mesh=dist.init_device_mesh("cpu", (world,)))
        weight = head.weight
        other = "stream" if way == "hidden" else "hidden"
        options |= {"gather": other if name == "route" and last else way}
    function: Any = chunked_nll
    if name == "ids" or (name == "function" and last):
        function = chunked_logprobs
    target: Any = labels
    if name in ("divergence", "teacher", "temperature of a teacher", "mean of most probable"):
        function, target = chunked_divergence, teacher_of(name, weight, last=last)
    if way == "tokens_parallel" and function is not chunked_logprobs and name != "entropy of ids":
        options = {"reduction": "sum", **options}  # a mean is refused of all alike
    if name == "entropy of ids":
        out = vocab_parallel_logprobs((hidden @ weight.T).detach(), labels, **options)
        return bool(torch.isnan(out[0]).any())
    with torch.no_grad() if name == "no_grad" and last else nullcontext():
        out = function(hidden, weight, target, **options)
    return bool(torch.isnan(out[0]).any())


def teacher_of(name: str, weight: Any, *, last: bool) -> Any:
    from xentlib.torch import TeacherHead, TeacherLogits, TeacherTopK

    if name in ("divergence", "mean of most probable"):
        ids = torch.arange(4).expand(N, -1)
        return TeacherTopK(ids, torch.full(ids.shape, -2.0))
    if name == "teacher" and last:
        return TeacherHead(torch.ones(N, H), weight.detach())
    temperature = 1.0 + last if name == "temperature of a teacher" else 1.0
    return TeacherLogits(torch.zeros(N, len(weight)), temperature)


def skipped(way: str, name: str, device: bool) -> bool:
    if name == "route":  # "head" or `vocab_parallel` alone beside a route waits
        return way in ("vocab_parallel", "tokens_parallel")
    if way == "vocab_parallel":
        return name in ((*WAITS, *ALSO_WAIT) if device else SIZES)
    if name in OF_SHARDS:
        return True
    return way != "tokens_parallel" and name == "rows undeclared"


def on_rank(rank: int, world: int) -> dict[tuple[str, str, bool], Any]:
    from helpers.routed import as_on_a_device

    results: dict[tuple[str, str, bool], Any] = {}
    for way in WAYS:
        for name in DIFFER:
            for device in (False, True):
                if skipped(way, name, device):
                    continue
                with as_on_a_device() if device else nullcontext():
                    try:
                        results[way, name, device] = called(rank, world, way, name)
                    except ValueError as error:
                        results[way, name, device] = str(error)
    return results


@pytest.fixture(scope="module", params=[2, 3])
def found(request: Any) -> list[dict[Any, Any]]:
    return launch(request.param, on_rank)


def expected(way: str, name: str, device: bool) -> str:
    if name == "nothing" or (way, name) in RIGHT:
        return "right"
    if name in OWN and way != "vocab_parallel":
        return "right"
    if way == "vocab_parallel":
        return "nan" if device else "raises"
    if device and name in ("class weights", "logit_scale"):
        return "nan" if way != "stream" else "right"  # whose values no rank can read
    return "raises"


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", DIFFER)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differ(found: Any, way: str, name: str, device: bool) -> None:
    if skipped(way, name, device):
        assert not any((way, name, device) in rank for rank in found)
        return
    outcomes = [rank[way, name, device] for rank in found]
    want = expected(way, name, device)
    if want == "raises":
        assert all(isinstance(x, str) for x in outcomes), outcomes
    else:
        assert outcomes == [want == "nan"] * len(outcomes), outcomes


def test_the_docs_say_what_can_wait() -> None:
    page = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"
    if not page.is_file():
        pytest.skip("the pages are not there")
    text = page.read_text("utf-8")
    rows = text[text.index("What can still wait") :].split("\n\n")[1].splitlines()[2:]
    assert len(rows) == len(WAITS) + 1  # and another route


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_whose_squares_overflow_are_compared(dtype: Any) -> None:
    """As of memory that a broadcast in another dtype has not filled. Catches: a tolerance of inf,
    by which hidden states of any two ranks are the same."""
    from xentlib.torch.core.consistency import RankConsistency

    def packed(x: Any) -> Any:
        checks.append(RankConsistency({"dtype": dtype, "device": "cpu"}))
        checks[-1].tokens("hidden", x, torch.ones(len(x), dtype=torch.bool))
        return checks[-1].packed()

    checks: list[Any] = []
    right = torch.randn(6, 4, dtype=dtype)
    wrong = right.clone()
    wrong[0, 0] = torch.finfo(dtype).max ** 0.75
    for other, differs in ((wrong, True), (right + 1e-9, False)):
        largest = torch.maximum(packed(right), packed(other))
        assert bool(checks[-1].broken(largest).any()) == differs
    assert not checks[-1].broken(torch.maximum(packed(wrong), packed(wrong.clone()))).any()
