"""A call of `pairs.py` over ranks: shards of any widths, tokens of each rank, none of one of them,
a head that is gathered, micro-batches. What the ranks get is put together and held as one call's.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fuzzing.pairs import OF_LOGITS, Edge, Pair, draw
from fuzzing.pairs_held import held
from xentlib.labels import SoftLabels
from xentlib.shards import VocabShard
from xentlib.teacher import TeacherHead, TeacherLogits
from xentlib.tools.harness.backends import Call, Outcome, outcome_of
from xentlib.tools.harness.device import numpy_of, on_torch
from xentlib.tools.harness.ranks import start_gloo
from xentlib.ulp import bits_unequal

# Shards with the same tokens, or with their own; FSDP2 along each route; windows over DDP.
WAYS = ("shards", "tokens", "head", "hidden", "stream", "window")
OF_HIDDEN = ("hidden", "stream")  # which gather tokens
OF_TOKENS = ("where", "token_weights", "temperature", "kept", "ids")


class Spread(NamedTuple):
    """One call, the rows of the head and the tokens of each rank, and its micro-batches' tokens."""

    pair: Pair
    way: str
    rows: tuple[slice, ...]
    tokens: tuple[slice, ...]
    micro_batches: tuple[tuple[slice, ...], ...]


def cuts(rng: Any, count: int, parts: int, start: int = 0) -> tuple[slice, ...]:
    """Parts of any sizes, also of none."""
    ends = [0, *sorted(rng.integers(0, count + 1, parts - 1).tolist()), count]
    return tuple(slice(start + a, start + b) for a, b in itertools.pairwise(ends))


def spread(seed: int, number: int, world: int, edge: Edge | None = None) -> Spread:
    """Call `number` of a seed, and how it is spread."""
    pair, rng = flat(draw(seed, number, edge)), np.random.default_rng([seed, 7, number])
    call = pair.call
    way = str(rng.choice(ways_of(call)))
    pair = CHANGED.get(way, lambda pair: pair)(pair)
    vocab = vocab_of(pair)
    count = len(next(iter(pair.call.leaves.values())))
    tokens = cuts(rng, count, world)
    micro = tuple(
        cuts(rng, part.stop - part.start, int(rng.integers(1, 4)), part.start) for part in tokens
    )
    most = max(map(len, micro))  # of every rank as many, of no tokens in the end
    micro = tuple((*x, *[slice(x[-1].stop, x[-1].stop)] * (most - len(x))) for x in micro)
    return Spread(pair, way, cuts(rng, vocab, world), tokens, micro)


def ways_of(call: Call) -> list[str]:
    """All but those that are refused."""
    teacher, soft = call.keywords.get("teacher"), isinstance(call.labels, SoftLabels)
    if call.function in OF_LOGITS:
        return ["shards"]
    without = set() if call.function in WINDOWS else {"window"}
    if isinstance(teacher, TeacherLogits) or dense(call.labels):
        without |= {*OF_HIDDEN, "tokens"}
    without |= set(OF_HIDDEN) if isinstance(teacher, TeacherHead) else set()
    without |= {"stream"} if soft else set()
    if "vocab" in call.keywords:  # which is of whole heads
        without |= {"shards", "tokens", *OF_HIDDEN}
    return [way for way in WAYS if way not in without]


def dense(labels: Any) -> bool:
    """Probabilities of all classes, bfloat16 among them."""
    return isinstance(labels, np.ndarray) and labels.dtype.kind in "fV"


def vocab_of(pair: Pair) -> int:
    leaves = pair.call.leaves
    if "logits" in leaves:
        return int(leaves["logits"].shape[-1])
    return int(leaves["weight"].shape[axis_of(pair)])


def axis_of(pair: Pair) -> int:
    return int(pair.call.keywords.get("weight_layout", "VH") == "HV")


# --- the same call in another form ----------------------------------------------------------------


def each_of_tokens(pair: Pair, change: Callable[[Any], Any]) -> Pair:
    """With all arrays that have tokens changed, the outputs' gradients too."""
    call = pair.call

    def of(x: Any) -> Any:
        if isinstance(x, TeacherHead):
            return x._replace(hidden=change(x.hidden))
        if isinstance(x, tuple):
            return type(x)(*(change(y) if isinstance(y, np.ndarray) else y for y in x))
        return change(x) if isinstance(x, np.ndarray) else x

    leaves = {n: of(x) if n in ("hidden", "logits") else x for n, x in call.leaves.items()}
    names = (*OF_TOKENS, "teacher")
    keywords = {n: of(x) if n in names else x for n, x in call.keywords.items()}
    reduced = call.keywords.get("reduction", "none") != "none"
    upstream = {
        name: g if name == "loss" and reduced else change(g) for name, g in pair.upstream.items()
    }
    changed = call._replace(leaves=leaves, labels=of(call.labels), keywords=keywords)
    return pair._replace(call=changed, upstream=upstream)


def flat(pair: Pair) -> Pair:
    """With one dimension of tokens."""
    first = next(iter(pair.call.leaves.values()))
    leading = first.ndim - 1
    count = int(np.prod(first.shape[:-1], dtype=int))
    return each_of_tokens(pair, lambda x: np.asarray(x).reshape(count, *x.shape[leading:]))


def with_keywords(pair: Pair, **changes: Any) -> Pair:
    return pair._replace(
        call=pair.call._replace(keywords={**pair.call.keywords, **changes}),
        text=" ".join([pair.text, *(f"{n}={x}" for n, x in changes.items())]),
    )


def of_sums(pair: Pair) -> Pair:
    """A mean would be of each rank's tokens."""
    how = pair.call.keywords
    mean = how.get("reduction") == "mean" and "denominator" not in how
    return with_keywords(pair, denominator=7.0) if mean else pair


def of_rows(pair: Pair) -> Pair:
    """FSDP2 shards the first dimension."""
    pair = of_sums(pair)
    if axis_of(pair):
        leaves = dict(pair.call.leaves)
        leaves["weight"] = np.ascontiguousarray(leaves["weight"].T)
        call = pair.call._replace(leaves=leaves)
        pair = with_keywords(pair._replace(call=call), weight_layout="VH")
    return pair


def of_window(pair: Pair) -> Pair:
    """The mean over all tokens, whose gradient is 1."""
    pair = of_rows(pair)
    pair = with_keywords(pair, reduction="mean")
    pair.call.keywords.pop("denominator", None)
    return pair._replace(upstream={"loss": np.float32(1.0)})


CHANGED: dict[str, Callable[[Pair], Pair]] = {
    "tokens": of_sums,
    **dict.fromkeys(("head", *OF_HIDDEN), of_rows),
    "window": of_window,
}
WINDOWS = ("chunked_nll", "chunked_divergence")


def rows_of(pair: Pair, rows: slice, over: Any) -> Pair:
    """A shard of the vocabulary, of whatever has one."""
    call, axis = pair.call, axis_of(pair)

    def part(x: Any, dimension: int) -> Any:
        index = (slice(None),) * dimension + (rows,)
        return None if x is None else np.ascontiguousarray(x[index])

    axes = {"weight": axis, "bias": 0, "logits": 1}
    leaves = {n: part(x, axes[n]) if n in axes else x for n, x in call.leaves.items()}
    labels = part(call.labels, 1) if dense(call.labels) else call.labels
    teacher = call.keywords.get("teacher")
    if isinstance(teacher, TeacherLogits):
        teacher = teacher._replace(logits=part(teacher.logits, 1))
    if isinstance(teacher, TeacherHead):
        weight = part(teacher.weight, int(teacher.weight_layout == "HV"))
        teacher = teacher._replace(weight=weight, bias=part(teacher.bias, 0))
    keywords = {**call.keywords, "vocab_parallel": over}
    keywords |= {} if teacher is None else {"teacher": teacher}
    return pair._replace(call=call._replace(leaves=leaves, labels=labels, keywords=keywords))


# --- a rank of PyTorch ----------------------------------------------------------------------------


Item = tuple[int, int, Edge | None]  # seed and number


def of_rank(rank: int, world: int, folder: str, items: list[Item]) -> list[Any]:
    """The rank's `Outcome` of each call, or the sentence of what it raised."""
    start_gloo(rank, world, folder)
    found: list[Any] = []
    for seed, number, edge in items:
        case = spread(seed, number, world, edge)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(RUN[case.way](case, rank, world))
            except Exception as error:  # noqa: BLE001 - whatever it is, it was looked for
                found.append(f"raised {type(error).__name__}: {error}")
    return found


def over_ranks(case: Spread, rank: int) -> Any:
    import torch.distributed as dist

    rows = case.rows[rank]
    return VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)


def local_tokens(case: Spread, rank: int) -> Pair:
    return each_of_tokens(case.pair, lambda x: x[case.tokens[rank]])


def run_shards(case: Spread, rank: int, world: int) -> Outcome:
    pair = rows_of(case.pair, case.rows[rank], over_ranks(case, rank))
    return outcome_of("torch", pair.call, pair.upstream)


def run_tokens(case: Spread, rank: int, world: int) -> Outcome:
    import torch.distributed as dist

    pair = rows_of(local_tokens(case, rank), case.rows[rank], over_ranks(case, rank))
    pair = with_keywords(pair, tokens_parallel=dist.group.WORLD)
    return outcome_of("torch", pair.call, pair.upstream)


def module_of(case: Spread) -> Any:
    """The head as a layer."""
    import torch

    leaves = case.pair.call.leaves
    vocab, width = leaves["weight"].shape
    weight, bias = (on_torch(leaves.get(name)) for name in ("weight", "bias"))
    head = torch.nn.Linear(width, vocab, bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head


def run_gathered(case: Spread, rank: int, world: int) -> Outcome:
    import torch
    from torch.distributed.fsdp import fully_shard

    from xentlib import torch as ours

    pair, head = local_tokens(case, rank), module_of(case)
    fully_shard(head, reshard_after_forward=True)
    call = pair.call
    hidden = on_torch(call.leaves["hidden"]).requires_grad_()
    keywords = {name: on_torch(x) for name, x in call.keywords.items()} | {"gather": case.way}
    leaves = {"hidden": hidden, "weight": head}
    out = call.of(ours, leaves, on_torch(call.labels), keywords)
    outputs = [getattr(out, name) for name in pair.upstream]
    gradients = [
        torch.as_tensor(on_torch(g), dtype=x.dtype).reshape(x.shape)
        for x, g in zip(outputs, pair.upstream.values())
    ]
    torch.autograd.backward(outputs, gradients)
    found = {"d_hidden": hidden.grad}
    for name, parameter in head.named_parameters():
        found[f"d_{name}"] = parameter.grad.full_tensor() * world
    return outcome(out, found)


def run_window(case: Spread, rank: int, world: int) -> Outcome:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from xentlib import torch as ours

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = module_of(case)

        def forward(self, x: Any) -> Any:
            return x

    parts = [each_of_tokens(case.pair, lambda x, m=m: x[m]) for m in case.micro_batches[rank]]
    model: Any = DistributedDataParallel(Model())
    normalizer = ours.TokenNormalizer(model, mode="postscale", empty="zero")
    found: list[dict[str, Any]] = []
    head = model.module.head
    with normalizer.window() as window:
        for pair in window.micro_batches(parts):
            call = pair.call
            keywords = {name: on_torch(x) for name, x in call.keywords.items()}
            keywords["reduction"] = "sum"
            hidden = model(on_torch(call.leaves["hidden"]).requires_grad_())
            leaves = {"hidden": hidden, "weight": head.weight}
            leaves |= {} if head.bias is None else {"bias": head.bias}
            out = call.of(ours, leaves, on_torch(call.labels), keywords)
            window.backward(out)
            found.append(outcome(out, {}).by_name())
    mean = window.mean_loss().nan_to_num()
    joined = {name: together([x[name] for x in found]) for name in found[0]}
    joined["loss"] = numpy_of(mean) / world  # as a part of a sum
    gradients = {f"d_{n}": numpy_of(p.grad) for n, p in head.named_parameters()}
    return Outcome(**{**joined, **gradients})


def outcome(out: Any, more: dict[str, Any]) -> Outcome:
    values = {n: x for n, x in out._asdict().items() if n in Outcome._fields and x is not None}
    return Outcome(**{name: numpy_of(x) for name, x in (values | more).items()})


RUN: dict[str, Callable[[Spread, int, int], Outcome]] = {
    "shards": run_shards,
    "tokens": run_tokens,
    **dict.fromkeys(("head", *OF_HIDDEN), run_gathered),
    "window": run_window,
}


# --- together -------------------------------------------------------------------------------------


def together(parts: list[Any]) -> Any:
    """Of all tokens: a number is a sum."""
    return np.concatenate(parts) if np.ndim(parts[0]) else np.sum(parts, 0)


def merged(case: Spread, parts: list[Any]) -> tuple[Outcome, list[str]]:
    """One call's outcome, and sentences of what differs between ranks and must not."""
    along = {"d_weight": axis_of(case.pair), "d_bias": 0, "d_logits": 1}
    of_ranks = [part.by_name() for part in parts]
    joined, wrong = {}, []
    for name in of_ranks[0]:
        values = [of[name] for of in of_ranks]
        if name in along and case.way in ("shards", "tokens"):
            joined[name] = np.concatenate(values, along[name])
        elif case.way == "shards" or name in along:
            joined[name] = values[0]
            if any(bits_unequal(x, values[0]) for x in values[1:]):
                wrong.append(f"{name} is not the same on all ranks")
        else:
            joined[name] = together(values)
    return Outcome(**joined), wrong


def held_together(case: Spread, parts: list[Any]) -> list[str]:
    """Sentences of what falls short."""
    raised = [f"{case.way}: {x} on {parts.count(x)} ranks" for x in parts if isinstance(x, str)]
    if raised:
        return raised[:1]
    got, found = merged(case, parts)
    pair = case.pair
    if case.way not in ("shards", "tokens"):  # gradients of ranks are added in their own dtype
        keywords = {n: x for n, x in pair.call.keywords.items() if n != "compute_dtype"}
        pair = pair._replace(call=pair.call._replace(keywords=keywords))
    # Post-scale scales the gradients of parameters.
    found += held("torch", pair, got, ("d_hidden",) * (case.way == "window"))
    return [f"{case.way}: {text}" for text in found]
