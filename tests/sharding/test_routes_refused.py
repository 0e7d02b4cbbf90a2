"""Routes to a sharded head, called wrongly: one sentence on every rank, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from helpers.ranks import launch
from helpers.refused import said_by

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.routed import as_on_a_device  # noqa: E402

V, H, N = 22, 7, 12
HELD: list[Any] = []  # FSDP2 knows a parameter for as long as its module is there


def own_rows(rank: int, world: int, group: Any, hidden: Any, labels: Any, **more: Any) -> Any:
    """A call of `tokens_parallel` with this rank's rows."""
    from xentlib.torch import chunked_nll

    torch.manual_seed(1)
    rows = torch.randn(V, hidden.shape[-1]).chunk(world)[rank].requires_grad_()
    more = {"vocab_parallel": group, "tokens_parallel": group, "reduction": "sum", **more}
    return chunked_nll(hidden, rows, labels, **more)


def tokens_of(rank: int, width: int = H) -> tuple[Any, Any]:
    torch.manual_seed(rank)
    return torch.randn(N, width, requires_grad=True), torch.randint(V, (N,))


def fsdp_head(how: dict[str, Any] | None = None, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import NLLHead

    torch.manual_seed(2)
    head = NLLHead(H, V, bias=False, **options)
    fully_shard(head, mesh=torch.distributed.init_device_mesh("cpu", (2,)), **(how or {}))
    HELD.append(head)
    return head


def routed(head: Any, rank: int, gather: Any, **more: Any) -> Any:
    from xentlib.torch import chunked_nll

    hidden, labels = tokens_of(rank)
    return chunked_nll(hidden, head.weight, labels, gather=gather, **more)


def of_integers(rank: int) -> Any:
    from xentlib.torch import chunked_nll

    hidden, labels = tokens_of(rank)
    head = fsdp_head()
    return chunked_nll(hidden.long(), head.weight, labels, gather="auto", tokens_per_rank=12)


def differing_upstream(rank: int, group: Any) -> Any:
    out = own_rows(rank, 2, group, *tokens_of(rank))
    return (out.loss * (rank + 1)).backward()


def bad_label(rank: int, gather: str) -> Any:
    hidden, labels = tokens_of(rank)
    labels[3] = V if rank == 1 else labels[3]
    from xentlib.torch import chunked_nll

    return chunked_nll(hidden, fsdp_head().weight, labels, gather=gather)


def of_nothing(rank: int, call: Callable[..., Any], *, weight: float = 1.0) -> Any:
    """The tokens of rank 1 are masked, and those of rank 0 are divided by 0."""
    tokens = torch.full((N,), rank == 0), torch.full((N,), weight)
    out = call(where=tokens[0], token_weights=tokens[1], denominator=float(rank))
    return out.loss.backward()


def hooked(rank: int) -> Any:
    head = fsdp_head()
    head.set_all_reduce_hook(lambda x: None)
    return routed(head, rank, "hidden")


def plain(rank: int, gather: str) -> Any:
    from xentlib.torch import chunked_nll

    hidden, labels = tokens_of(rank)
    return chunked_nll(hidden, torch.randn(V, H), labels, gather=gather)


def one_rank_trains(rank: int, group: Any, what: str) -> Any:
    hidden, labels = tokens_of(rank)
    from xentlib.torch import chunked_nll

    torch.manual_seed(1)
    rows = torch.randn(V, H).chunk(2)[rank].requires_grad_(what != "head" or rank == 0)
    hidden = hidden.detach().requires_grad_(what != "hidden" or rank == 0)
    return chunked_nll(hidden, rows, labels, vocab_parallel=group, tokens_parallel=group)


def differing(rank: int, world: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Calls of several chunks of which those of one rank are others: they would make other
    collectives."""
    from xentlib import PaddedVocab
    from xentlib.torch import chunked_logprobs

    group, chunks = torch.distributed.group.WORLD, {"max_chunk_bytes": 1}
    weights = torch.linspace(0.5, 1.5, V + 1)

    def own(**more: Any) -> Any:
        return own_rows(rank, world, group, *tokens_of(rank), **chunks, **more)

    def by(gather: str, **more: Any) -> Any:
        return routed(fsdp_head(), rank, gather, **chunks, **more)

    def logprobs(gather: str, **more: Any) -> Any:
        hidden, labels = tokens_of(rank)
        return chunked_logprobs(hidden, fsdp_head().weight, labels, gather=gather, **more)

    def without_grad(call: Callable[[], Any]) -> Any:
        with torch.set_grad_enabled(rank == 0):
            return call()

    def with_bias(gather: str) -> Any:
        from torch.distributed.fsdp import fully_shard

        from xentlib.torch import chunked_nll

        head = fully_shard(torch.nn.Linear(H, V))
        hidden, labels = tokens_of(rank)
        bias = head.bias if rank else None
        return chunked_nll(hidden, head.weight, labels, bias=bias, gather=gather)

    calls: dict[str, Callable[[], Any]] = {
        "tokens, softcap": lambda: own(softcap=30.0 if rank else None),
        "tokens, no grad": lambda: without_grad(own),
        "tokens, denominator": lambda: of_nothing(rank, own),
        "tokens, no weight": lambda: of_nothing(rank, own, weight=0.0),
        "tokens, vocabulary": lambda: own(vocab_parallel=PaddedVocab(group, V - rank)),
        "route": lambda: by(("hidden", "stream")[rank]),
        "nodes on one": lambda: by("hidden", tokens_parallel=mesh if rank else None),
        "nodes and stream": lambda: by(
            ("stream", "hidden")[rank], tokens_parallel=mesh if rank else None
        ),
    }
    everywhere: dict[str, dict[str, Any]] = {
        "hidden": {"gather": "hidden"},
        "stream": {"gather": "stream"},
        "nodes": {"gather": "hidden", "tokens_parallel": mesh},
    }
    for name, how in everywhere.items():
        calls |= {
            f"{name}, softcap": lambda how=how: by(**how, softcap=30.0 if rank else None),
            f"{name}, no grad": lambda how=how: without_grad(lambda: by(**how)),
            f"{name}, logprobs, no grad": lambda how=how: without_grad(lambda: logprobs(**how)),
            f"{name}, entropy": lambda how=how: logprobs(**how, entropy=rank == 1),
            f"{name}, function": lambda how=how: (by, logprobs)[rank](**how),
            f"{name}, class weights": lambda how=how: by(
                **how, class_weights=weights[:V] if rank else None
            ),
            f"{name}, long class weights": lambda how=how: by(
                **how, class_weights=weights[: V + rank]
            ),
            f"{name}, too many class weights": lambda how=how: by(**how, class_weights=weights),
            f"{name}, denominator": lambda how=how: of_nothing(rank, partial(by, **how)),
            f"{name}, no weight": lambda how=how: of_nothing(rank, partial(by, **how), weight=0.0),
        }
    return calls | {"stream, bias": lambda: with_bias("stream")}


def copied(rank: int, world: int, group: Any) -> dict[str, Callable[[], Any]]:
    """The same tokens on all ranks: refused where that doubles d weight and can be read."""
    from xentlib.torch import chunked_logprobs, chunked_nll

    def of(
        function: Any = chunked_nll, *, trains: bool = True, change: Any = None, **more: Any
    ) -> Any:
        hidden, labels = (x.detach().clone() for x in tokens_of(0))
        if change is not None and rank == 1:
            change(hidden, labels)
        torch.manual_seed(1)
        rows = torch.randn(V, H).chunk(world)[rank].requires_grad_(trains)
        more = {"vocab_parallel": group, "tokens_parallel": group, **more}
        more |= {"reduction": "sum"} if function is chunked_nll else {}
        return function(hidden.requires_grad_(), rows, labels, **more)

    def on_a_device() -> Any:
        with as_on_a_device():
            return of()

    def without_grad() -> Any:
        with torch.no_grad():
            return of()

    def smallest(hidden: Any, labels: Any) -> None:
        hidden[3, 5] = torch.nextafter(hidden[3, 5], torch.tensor(9.0))

    def another(hidden: Any, labels: Any) -> None:
        labels[-1] = (labels[-1] + 1) % V

    def masked(hidden: Any, labels: Any) -> None:
        labels[-1] = -100

    masks = torch.zeros(N, dtype=torch.bool)
    return {
        "copies": of,
        "copies, chunks": lambda: of(max_chunk_bytes=1),
        "copies, logprobs": lambda: of(chunked_logprobs),
        "copies, on a device": on_a_device,
        "copies, no grad": without_grad,
        "copies, a frozen head": lambda: of(trains=False),
        "copies, of nothing": lambda: of(where=masks),
        "copies, a wrapper's mean": lambda: chunked_nll(
            tokens_of(0)[0], fsdp_head().weight, tokens_of(0)[1], gather="hidden"
        ),
        "copies, one bit": lambda: of(change=smallest),
        "copies, a label": lambda: of(change=another),
        "copies, a mask": lambda: of(change=masked),
        "copies, weights": lambda: of(reduction="sum", token_weights=torch.full((N,), 1.0 + rank)),
    }


def on_rank(rank: int, world: int) -> dict[str, str]:
    group = torch.distributed.group.WORLD
    alone = [torch.distributed.new_group([k]) for k in range(world)][rank]
    calls: dict[str, Callable[[], Any]] = {
        "other ranks": lambda: own_rows(
            rank, world, group, *tokens_of(rank), tokens_parallel=alone
        ),
        "alone": lambda: own_rows(rank, world, None, *tokens_of(rank), tokens_parallel=group),
        "own mean": lambda: own_rows(rank, world, group, *tokens_of(rank), reduction="mean"),
        "unreduced": lambda: own_rows(
            rank, world, group, *tokens_of(rank), reduce_hidden_grad=False
        ),
        "budget": lambda: own_rows(
            rank, world, group, *tokens_of(rank), max_chunk_bytes=1000 + rank
        ),
        "width": lambda: own_rows(rank, world, group, *tokens_of(rank, H + rank)),
        "dtype": lambda: own_rows(
            rank, world, group, *tokens_of(rank), compute_dtype="float64" if rank else None
        ),
        "ignore_index": lambda: own_rows(rank, world, group, *tokens_of(rank), ignore_index=-rank),
        "outputs": lambda: own_rows(
            rank, world, group, *tokens_of(rank), outputs=("entropy",) if rank else ()
        ),
        "smoothing": lambda: own_rows(
            rank, world, group, *tokens_of(rank), label_smoothing=rank / 10
        ),
        "upstream": lambda: differing_upstream(rank, group),
        "a frozen head": lambda: one_rank_trains(rank, group, "head"),
        "a frozen trunk": lambda: one_rank_trains(rank, group, "hidden"),
        "hidden, label": lambda: bad_label(rank, "hidden"),
        "stream, label": lambda: bad_label(rank, "stream"),
        "stream, budget": lambda: routed(
            fsdp_head(), rank, "stream", max_chunk_bytes=1024 + 1024 * rank
        ),
        "stream, softcap": lambda: routed(fsdp_head(), rank, "stream", softcap=30.0 + rank),
        "stream, smoothing": lambda: routed(fsdp_head(), rank, "stream", label_smoothing=rank / 10),
        "stream, z-loss": lambda: routed(fsdp_head(), rank, "stream", z_loss=rank / 1000),
        "stream, outputs": lambda: routed(
            fsdp_head(), rank, "stream", outputs=("entropy",) if rank else ()
        ),
        "misspelt": lambda: plain(rank, "hiden"),
        "plain": lambda: plain(rank, "hidden"),
        "count": lambda: routed(fsdp_head(), rank, "hidden", tokens_per_rank=12),
        "no count": lambda: routed(fsdp_head(), rank, "auto"),
        "count of words": lambda: routed(fsdp_head(), rank, "auto", tokens_per_rank=0),
        "integers": lambda: of_integers(rank),
        "shards too": lambda: routed(fsdp_head(), rank, "hidden", vocab_parallel=group),
        "layout": lambda: routed(fsdp_head(), rank, "hidden", weight_layout="HV"),
        "hooked": lambda: hooked(rank),
    }
    mesh = torch.distributed.init_device_mesh("cpu", (world, 1))
    return said_by(calls | differing(rank, world, mesh) | copied(rank, world, group))


SAME = "must be the same on every rank of `vocab_parallel`"
OF_HEAD = "`tokens_parallel` must be the same on every rank of the head"
SAID = {
    "other ranks": "`tokens_parallel` must hold the ranks of `vocab_parallel`, [0, 1]; got [",
    "alone": "`tokens_parallel` must come with `vocab_parallel`, of the same ranks; got it alone",
    "own mean": "`reduction` must be 'sum', or come with a `denominator`, with `tokens_parallel`",
    "unreduced": "`reduce_hidden_grad` must be True with `tokens_parallel`",
    "budget": f"`max_chunk_bytes` {SAME}",
    "width": f"`the width of hidden` {SAME}",
    "dtype": f"`the dtype of hidden` {SAME}",
    "ignore_index": f"`ignore_index` {SAME}",
    "outputs": f"`outputs` {SAME}",
    "smoothing": f"`label_smoothing` {SAME}",
    "upstream": "the gradient of `loss` must be the same on every rank of `tokens_parallel`",
    "a frozen head": "`weight` and `bias` must require grad on every rank of `vocab_parallel`",
    "a frozen trunk": "`hidden` must require grad on every rank of `vocab_parallel`, or on none",
    "hidden, label": f"`labels` must lie in [0, {V})",
    "stream, label": "`labels` must ",
    "stream, budget": f"`max_chunk_bytes` {SAME}",
    "stream, softcap": f"`softcap` {SAME}",
    "stream, smoothing": f"`label_smoothing` {SAME}",
    "stream, z-loss": f"`z_loss` {SAME}",
    "stream, outputs": f"`outputs` {SAME}",
    "misspelt": "`gather` must be one of 'head', 'hidden', 'stream', 'auto'; got 'hiden'",
    "plain": "`gather` must be 'head' for a head that is whole on this rank",
    "count": "`tokens_per_rank` must be given with `gather='auto'`, and with nothing else",
    "no count": "`tokens_per_rank` must be given with `gather='auto'`, and with nothing else",
    "count of words": "`tokens_per_rank` must be a positive integer or None; got 0",
    "integers": "`hidden` must be floating point (float16, bfloat16, float32, float64); got int64",
    "shards too": "`gather` must be 'head' with `vocab_parallel` unless `fully_shard` shards those",
    "layout": "`gather` must be 'head' unless `fully_shard` shards `weight` [V, H] over",
    "hooked": "`gather` must be 'head' where FSDP2 reduces in a way of the user's own",
    "tokens, softcap": f"`softcap` {SAME}",
    "tokens, no grad": "`hidden` must require grad on every rank of `vocab_parallel`, or on none",
    "tokens, vocabulary": f"`vocab_size` {SAME}",
    "route": f"`gather` and {OF_HEAD}",
    "nodes on one": f"`gather` and {OF_HEAD}",
    "nodes and stream": f"`gather` and {OF_HEAD}",
    "stream, bias": f"`bias` {SAME}",
}
COPIES = (
    "`hidden` must be this rank's own tokens with `tokens_parallel`; got the same labels and "
    "hidden states on all 2 ranks, whose gradient of the head would be 2 times too large. Leave "
)
SAID |= {f"copies{name}": COPIES for name in ("", ", chunks", ", logprobs")}
TAKEN = (
    *("on a device", "no grad", "a frozen head", "of nothing", "a wrapper's mean"),
    *("one bit", "a label", "a mask", "weights"),
)
SAID |= {f"copies, {name}": "nothing" for name in TAKEN}
for way in ("tokens", "hidden", "stream", "nodes"):
    SAID |= {
        f"{way}, denominator": "`denominator` must be positive ",
        f"{way}, no weight": "nothing",
    }
WANTED = "must require grad on every rank of `vocab_parallel`"
for way in ("hidden", "stream", "nodes"):
    trains = f"`hidden` {WANTED}" if way == "hidden" else f"`weight` and `bias` {WANTED}"
    SAID |= {
        f"{way}, softcap": f"`softcap` {SAME}",
        f"{way}, no grad": trains,
        f"{way}, logprobs, no grad": trains,
        f"{way}, entropy": f"`entropy` {SAME}",
        f"{way}, function": "the function must be the same on every rank of the head",
        f"{way}, class weights": f"`class_weights` {SAME}",
        f"{way}, long class weights": f"`class_weights` {SAME}",
        f"{way}, too many class weights": f"`class_weights` must have shape ({V},)",
    }


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return launch(2, on_rank)


@pytest.mark.parametrize("name", SAID)
def test_a_wrong_call_says_so_on_every_rank(said: Any, name: str) -> None:
    """D7: before a collective that the other ranks would wait in."""
    for found in said:
        assert found[name].startswith(SAID[name]), found[name]
