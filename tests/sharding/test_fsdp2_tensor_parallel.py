"""Heads that tensor parallelism has cut and FSDP2 shards further, by routes that leave their rows
where they are: every function and option on four gloo ranks beside one process, the collectives,
and what is refused on every rank.

Shapes: V vocabulary, H hidden width, N tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.ranks import launch
from helpers.refused import said_by
from xentlib.budgets import check_budget
from xentlib.contract import check, failures
from xentlib.tools.harness.device import numpy_of, on_torch
from xentlib.tools.harness.ranks import DEVICE

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

V, H, N, F, T = 53, 12, 10, 2, 2
HELD: list[Any] = []  # FSDP2 knows a parameter for as long as its module is there
WEIGHTS = 0.5 + np.arange(V) / V
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weights": WEIGHTS, "softcap": 3.0},
    "padded": {"vocab_size": V - 5},
    "per token": {"function": "chunked_logprobs"},
    "classes": {"function": "chunked_logprobs", "ids": True},
    "top": {"function": "chunked_logprobs", "top_k": 3},
    "divergence": {"function": "chunked_divergence"},
    "class probabilities": {"soft": True},
    # Tokens that others have more of, or a rank none
    "uneven": {"label_smoothing": 0.1},
    "uneven, per token": {"function": "chunked_logprobs"},
}
WAYS = ("head", "hidden", "stream", "head, sequence", "hidden, sequence")
REFUSED = {
    *(("stream", name) for name in ("divergence", "top", "class probabilities")),
    ("head, sequence", "divergence"),
}
NAMES = [(way, name) for way in WAYS for name in CALLS if (way, name) not in REFUSED]


COUNTED = [
    (way, function, rows)
    for way in WAYS[1:]
    for function in ("chunked_nll", "chunked_logprobs")
    for rows in (0, 1)
]


def numbers() -> tuple[Any, ...]:
    """Hidden states and labels of all ranks [F, T, N, ...], a weight and a bias."""
    torch.manual_seed(0)
    x, y = torch.randn(F, T, N, H, dtype=torch.float64), torch.randint(V - 5, (F, T, N))
    y[0, 0, 3] = y[1, 1] = -100
    return x, y, torch.randn(V, H, dtype=torch.float64), torch.randn(V, dtype=torch.float64)


def there(name: str, *, sequence: bool) -> Any:
    """[F, T, N] which tokens are there at all, on ranks that have the same or their own."""
    counts = torch.full((F, T), N)
    if "uneven" in name:
        counts = torch.tensor([[N, N], [N - 3, 0]]) if sequence else torch.tensor([[N, 4], [0, 0]])
    return torch.arange(N) < counts[:, :, None]


def mesh_of() -> Any:
    return torch.distributed.init_device_mesh(DEVICE, (F, T), mesh_dim_names=("fsdp", "tp"))


def head_of(mesh: Any, *, bias: bool = True, seed: float = 1.0) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    _, _, weight, of_bias = numbers()
    head = torch.nn.Linear(H, V, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(weight * seed)
        if bias:
            head.bias.copy_(of_bias * seed)
    for name, p in list(head.named_parameters()):
        piece = torch.nn.Parameter(distribute_tensor(p.data, mesh["tp"], [Shard(0)]))
        head.register_parameter(name, piece)
    fully_shard(head, mesh=mesh["fsdp"], reshard_after_forward=True)
    HELD.append(head)
    return head


def total(options: dict[str, Any], hidden: Any, head: Any, labels: Any, more: Any) -> Any:
    """The sum of a call's losses, of tokens that do not depend on how they are spread."""
    from xentlib import PaddedVocab
    from xentlib import torch as ours

    options = {k: on_torch(x) for k, x in {"function": "chunked_nll", **options}.items()}
    function, more = getattr(ours, options.pop("function")), dict(more)
    size = options.pop("vocab_size", None)
    weight, bias = head
    if options.pop("soft", False):
        more["where"], q = labels != -100, torch.tensor([0.4, 0.3, 0.2], dtype=torch.float64)
        ids = torch.stack([labels.clamp(min=0), (labels + 7) % V, (labels + 9) % V], -1)
        labels = ours.SoftLabels(ids, q.expand(ids.shape))
    if size is not None:
        if "vocab_parallel" in more:
            more["vocab_parallel"] = PaddedVocab(more["vocab_parallel"], size)
        else:
            weight, bias = weight[:size], bias[:size]
    if function is ours.chunked_nll:
        return function(hidden, weight, labels, bias=bias, reduction="sum", **options, **more).loss
    if function is ours.chunked_divergence:
        teacher = ours.TeacherHead(hidden.detach() * 0.5, *more.pop("teacher", (weight, bias)))
        labels = torch.where(labels < 0, labels, (labels + 1) % V)
        out = function(hidden, weight, teacher, labels=labels, bias=bias, reduction="sum", **more)
        return out.loss
    if options.pop("ids", False):
        options["ids"] = torch.stack([labels.clamp(min=0), (labels + 7) % V, labels * 0 - 1], -1)
    out = function(hidden, weight, labels, bias=bias, entropy=True, **options, **more)
    valid = labels != -100
    parts = [out.logprobs, 0.3 * out.entropy, 0.1 * out.lse]
    if "ids" in options:
        parts.append((out.ids_logprobs * torch.tensor([0.2, -0.3, 0.0])).nan_to_num(0).sum(-1))
    if "top_k" in options:
        parts.append((out.top_logprobs * torch.tensor([0.2, -0.3, 0.1])).sum(-1))
    return sum(torch.where(valid, part, 0.0).sum() for part in parts)


def on_rank(rank: int, calls: list[Any], counted: list[Any]) -> dict[Any, Any]:
    """Gradients of the hidden states, of the head, and the collectives."""
    from xentlib.torch import count_collectives

    x, y, *_ = numbers()
    mesh = mesh_of()
    f, t = (mesh[name].get_local_rank() for name in ("fsdp", "tp"))
    found = {}
    for way, name in calls:
        gather, *sequence = way.split(", ")
        # The same tokens on the ranks of "tp", or each rank's own
        own = there(name, sequence=bool(sequence))
        place = (f, t) if sequence else (f,)
        hidden, labels = x[place][own[place]], y[place][own[place]]
        hidden, head = hidden.clone().requires_grad_(), head_of(mesh)
        more = {"vocab_parallel": mesh["tp"], "gather": gather, "max_chunk_bytes": 1}
        if sequence:
            more["tokens_parallel"] = mesh["tp"]
        if name == "divergence":
            teacher = head_of(mesh, seed=0.7)
            more["teacher"] = teacher.weight, teacher.bias
        total(CALLS[name], hidden, (head.weight, head.bias), labels, more).backward()
        got = [p.grad.full_tensor() * F for p in (head.weight, head.bias)]  # FSDP2's mean
        found[way, name] = [x.cpu().numpy() for x in (hidden.grad, *got)]
    for way, function, rows in counted:  # rows of a rank in a chunk or in a block
        gather, *sequence = way.split(", ")
        hidden, labels = (x[f, t], y[f, t]) if sequence else (x[f].flatten(0, 1), y[f].flatten())
        hidden, head = hidden.clone().requires_grad_(), head_of(mesh, bias=False)
        more = {"vocab_parallel": mesh["tp"], "gather": gather}
        more["max_chunk_bytes"] = 1 if rows else None
        if sequence:
            more["tokens_parallel"] = mesh["tp"]
        with count_collectives() as forward:
            loss = total({"function": function}, hidden, (head.weight, None), labels, more)
        with count_collectives() as backward:
            loss.backward()
        found[way, function, rows] = forward.counts(), backward.counts()
    return found


@pytest.fixture(scope="module")
def both(request: Any) -> list[tuple[dict[Any, Any], dict[str, str]]]:
    """What each rank has computed, and what is refused: one start of four ranks."""
    return launch(F * T, on_each_rank, collected(request, NAMES), collected(request, COUNTED))


def on_each_rank(
    rank: int, world: int, calls: list[Any], counted: list[Any]
) -> tuple[dict[Any, Any], dict[str, str]]:
    torch.set_num_threads(1)
    fewest(rank, world)
    windows()
    return on_rank(rank, calls, counted), wrongly(rank, world)


def fewest(rank: int, world: int) -> None:
    """A shard without rows: of 9 classes four ranks of tensor parallelism have 3, 3, 3 and none."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh(DEVICE, (1, world), mesh_dim_names=("fsdp", "tp"))
    x, y, weight, _ = numbers()
    x, y, weight = x[0, 0], y[0, 0].clamp(max=8), weight[:9]
    head = torch.nn.Linear(H, 9, bias=False, dtype=torch.float64)
    head.weight = torch.nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    fully_shard(head, mesh=mesh["fsdp"])
    want = chunked_nll(x, weight, y).loss.item()
    for gather in ("hidden", "stream"):
        got = chunked_nll(x, head.weight, y, gather=gather, vocab_parallel=mesh["tp"]).loss.item()
        assert np.float32(got) == np.float32(want)


def windows() -> None:
    """Two micro-batches of `TokenNormalizer`: the mean over all tokens, by each route."""
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import TokenNormalizer, chunked_nll

    mesh = mesh_of()
    x, y, weight, bias = numbers()
    f = mesh["fsdp"].get_local_rank()
    for gather in ("head", "hidden", "stream"):
        model = torch.nn.Sequential(head_of(mesh))
        fully_shard(model, mesh=mesh["fsdp"])
        labels = [y[f, 0], y[f, 1]]
        with TokenNormalizer(model).window(labels) as window:
            for hidden, of in window.micro_batches([(x[f, k], labels[k]) for k in range(T)]):
                head = model[0]
                options = {"vocab_parallel": mesh["tp"], "gather": gather, "reduction": "sum"}
                window.backward(chunked_nll(hidden, head.weight, of, bias=head.bias, **options))
        whole = [p.requires_grad_() for p in (weight.detach(), bias.detach())]
        chunked_nll(x.flatten(0, 2), whole[0], y.flatten(), bias=whole[1]).loss.backward()
        for got, want in zip((model[0].weight, model[0].bias), whole, strict=True):
            grads = [numpy_of(got.grad.full_tensor().float()), numpy_of(want.grad.float())]
            assert not failures(check("A1", *grads)), gather


@pytest.fixture(scope="module")
def found(both: Any) -> list[dict[Any, Any]]:
    return [computed for computed, _ in both]


@pytest.mark.parametrize(("way", "name"), NAMES)
def test_gradients_are_those_of_one_process(found: Any, way: str, name: str) -> None:
    """A1, D7: each function and option, of float64. Catches classes of the wrong rank, d hidden
    that is not summed over the shards, or summed twice, padding that counts."""
    x, y, weight, bias = numbers()
    leaves = [p.requires_grad_() for p in (x.flatten(0, 2), weight, bias)]
    hidden, *head = leaves
    more = {"teacher": (weight.detach() * 0.7, bias.detach() * 0.7)} if name == "divergence" else {}
    every = there(name, sequence="sequence" in way)
    total(CALLS[name], hidden, head, y.where(every, -100).flatten(), more).backward()
    d_hidden = hidden.grad.view(F, T, N, H)
    for rank, of_rank in enumerate(found):
        f, t = divmod(rank, T)
        place = (f, t) if "sequence" in way else (f,)
        own = d_hidden[place][every[place]]
        for which, want in zip(of_rank[way, name], (own, weight.grad, bias.grad), strict=True):
            assert not failures(check("A1", which.astype("float32"), numpy_of(want.float())))


@pytest.mark.parametrize(("way", "function", "rows"), COUNTED)
def test_collectives_are_those_of_the_budget(
    found: Any, way: str, function: str, rows: int
) -> None:
    """A15: in rounds of chunks or of blocks, as many on every rank."""
    name = f"FSDP2, vocabulary shard, {way}"
    if "sequence" in way:
        name = "FSDP2, sequence" + ", hidden" * way.startswith("hidden")
    name += ", recompute" * (function == "chunked_logprobs")
    for t in range(T):  # which have as many blocks of a stream as they have rows
        counts = [of_rank[way, function, rows] for of_rank in found[t::T]]
        forward, backward = ([count[k] for count in counts] for k in (0, 1))
        scatters = sum(x.get("reduce_scatter", 0) for x in (forward[0], backward[0]))
        rounds = scatters - way.startswith("head")  # which FSDP2 scatters itself
        assert rounds > rows
        assert not failures(check_budget(name, forward, backward, rounds=rounds)), counts


def wrongly(rank: int, world: int) -> dict[str, str]:
    """What calls say on this rank that its user has got wrong."""
    from xentlib.torch import (
        LowRankHead,
        SoftLabels,
        TeacherHead,
        chunked_divergence,
        chunked_logprobs,
        chunked_nll,
    )

    x, y, weight, _ = numbers()
    mesh = mesh_of()
    f, t = (mesh[name].get_local_rank() for name in ("fsdp", "tp"))
    head, tp, fsdp = head_of(mesh, bias=False), mesh["tp"], mesh["fsdp"]

    def by(gather: str, spread: bool = False, function: Any = chunked_nll, **more: Any) -> Any:
        hidden, labels = (x[f, t], y[f, t]) if spread else (x[f].flatten(0, 1), y[f].flatten())
        hidden = more.pop("hidden", hidden).clone().requires_grad_()
        more = {"vocab_parallel": tp, "gather": gather, **more}
        labels = more.pop("labels", labels)
        return function(hidden, more.pop("weight", head.weight), labels, **more)

    def distilled(hidden: Any, weight: Any, labels: Any, *, teacher: Any, **more: Any) -> Any:
        return chunked_divergence(hidden, weight, teacher, labels=labels, **more)

    def probabilities(of_label: float) -> Any:
        ids = y[f].flatten().clamp(min=0)[:, None]
        return SoftLabels(ids, torch.full(ids.shape, of_label, dtype=torch.float64))

    both, there = {"tokens_parallel": tp}, y[f].flatten() != -100
    other = torch.ones(T * N, dtype=torch.float64) * (1 + t)
    calls: dict[str, Callable[[], Any]] = {
        "no shards": lambda: by("hidden", vocab_parallel=None),
        "another dimension": lambda: by("hidden", vocab_parallel=fsdp),
        "the whole mesh": lambda: by("hidden", vocab_parallel=mesh),
        "tokens elsewhere": lambda: by("hidden", spread=True, tokens_parallel=fsdp),
        "a stream of a sequence": lambda: by("stream", spread=True, **both),
        "own tokens": lambda: by("hidden", spread=True),
        "other hidden": lambda: by("hidden", hidden=x[f].flatten(0, 1) + t),
        "other hidden, per token": lambda: by(
            "hidden", function=chunked_logprobs, hidden=x[f].flatten(0, 1) + t
        ),
        "other hidden, stream": lambda: by("stream", hidden=x[f].flatten(0, 1) + t),
        "other weights": lambda: by("hidden", token_weights=other, reduction="sum"),
        "other denominator": lambda: by("hidden", denominator=1.0 + t),
        "other probabilities": lambda: by(
            "hidden", labels=probabilities(0.4 + 0.1 * t), where=there
        ),
        "copies": lambda: by("hidden", reduction="sum", **both),
        "own means": lambda: by("hidden", spread=True, **both),
        "one says so": lambda: by("hidden", **(both if rank == 3 else {})),
        "hidden and stream": lambda: by(("hidden", "stream")[rank % 2]),
        "not reduced on one": lambda: by("hidden", reduce_hidden_grad=rank != 1),
        "stream, not reduced on one": lambda: by("stream", reduce_hidden_grad=rank != 1),
        "not reduced": lambda: by("hidden", spread=True, reduce_hidden_grad=False, **both),
        "a whole copy": lambda: by("hidden", weight=weight),
        "stream, top": lambda: by("stream", function=chunked_logprobs, top_k=2),
        "a label": lambda: by("hidden", labels=y[f].flatten() + V * (f == 1)),
        "a whole teacher": lambda: by(
            "hidden", function=distilled, teacher=TeacherHead(x[f].flatten(0, 1), weight)
        ),
        "adapters": lambda: by(
            "hidden", weight=LowRankHead(head.weight, weight[:2], weight[:, :2])
        ),
        "nothing wrong": lambda: by("hidden"),
    }
    return said_by(calls)


SAME = "must be the same on every rank of `vocab_parallel`"
SAID = {
    "no shards": "`weight` must be a plain tensor, a parameter that `fully_shard` keeps, or come",
    "another dimension": "`vocab_parallel` must be the last dimension of the mesh that `weight`",
    "the whole mesh": "`vocab_parallel` must be a one-dimensional DeviceMesh; got 2 dimensions",
    "tokens elsewhere": "`tokens_parallel` must hold the ranks of `vocab_parallel`",
    "a stream of a sequence": "`gather` must be 'head' or 'hidden' with `tokens_parallel`",
    "own tokens": f"`labels` {SAME}",
    "other hidden": f"`hidden` {SAME}",
    "other hidden, per token": f"`hidden` {SAME}",
    "other hidden, stream": f"`hidden` {SAME}",
    "other weights": f"`token_weights` {SAME}",
    "other denominator": f"`token_weights` {SAME}",
    "other probabilities": f"`labels` {SAME}",
    "own means": "`reduction` must be 'sum', or come with a `denominator`, with `tokens_par",
    "copies": "`hidden` must be this rank's own tokens with `tokens_parallel`",
    "one says so": "`gather` and `tokens_parallel` must be the same on every rank of the head",
    "hidden and stream": "`gather` and `tokens_parallel` must be the same on every rank of the",
    "not reduced on one": f"`reduce_hidden_grad` {SAME}",
    "stream, not reduced on one": f"`reduce_hidden_grad` {SAME}",
    "not reduced": "`reduce_hidden_grad` must be True with `tokens_parallel`",
    "a whole copy": "`gather` must be 'head' with `vocab_parallel` unless `fully_shard` shards",
    "stream, top": "`top_k` must be 0 with `gather='stream'` behind tensor parallelism; got 2.",
    "a label": f"`labels` must lie in [0, {V})",
    "adapters": "`weight` must be one array here; got a `LowRankHead` with gather='hidden' and",
    "a whole teacher": "of `teacher`: a teacher's head must be sharded as the student's, over",
    "nothing wrong": "nothing",
}


@pytest.fixture(scope="module")
def said(both: Any) -> list[dict[str, str]]:
    return [refused for _, refused in both]


@pytest.mark.parametrize("name", SAID)
def test_a_wrong_call_says_so_on_every_rank(said: Any, name: str) -> None:
    """D7: one sentence on all ranks, and none waits for the others."""
    for of_rank in said:
        assert of_rank[name].startswith(SAID[name]), of_rank[name]
