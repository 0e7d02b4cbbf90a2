"""The ranks that share a head: what all of them must have the same, and how they learn it: in a few
numbers that travel with the first MAX of a sharded vocabulary; or, where tokens or rows of a head
travel, in a handshake from host to host, first in a call, on all of them.

Shapes: N tokens, E numbers, R ranks, S numbers of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.arguments import SCALARS, Scalars
from xentlib.checks.call import CALLS
from xentlib.checks.shards import SHARDS, refuse_inconsistent
from xentlib.plan.split import ROOM
from xentlib.torch.core.device import chunk_bytes, host_readable
from xentlib.torch.core.tokens import bad_ids, check_ids, check_labels, counted
from xentlib.torch.operators import HeadCall

FUNCTIONS = (
    "chunked_nll",
    "chunked_logprobs",
    "the backward of chunked_logprobs",
    "vocab_parallel_logprobs",
    "chunked_divergence",
    "the backward of chunked_divergence",
    "the teacher of chunked_divergence",
    "vocab_parallel_divergence",
    "the backward of chunked_nll",
)
# Sums with random signs, each in units of the root of its sum of squares: those of other tokens
# differ by about 1.4, those of one tensor in two roundings of bfloat16 by 0.004.
SIGNS, SIGNED_TOLERANCE = 4, 0.1
# Of plain sums and of numbers that each rank computes for itself.
TOLERANCE = 1e-5
SOFTMAX_TOKENS = 8  # at which a softmax of one rank's columns is looked for


# torch 2.13 has other names for them, and warns of the old ones.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Of groups that reach devices alone, the same ranks over gloo
HOST_GROUPS: Any = WeakIdKeyDictionary()


class PendingCollective(NamedTuple):
    """A collective under way, and the tensors that it works on."""

    work: Any
    result: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R n, ...] of [n, ...], rank by rank."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    gather_into(result, x, group=group)
    return result


def filled(x: Tensor, count: int) -> Tensor:
    """[count, ...] of [n, ...], 0 beyond it."""
    result = x.new_zeros(count, *x.shape[1:])
    result[: x.shape[0]] = x
    return result


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> PendingCollective:
    """[R n, ...] of [n, ...], rank by rank."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    return PendingCollective(gather_into(result, x, group=group, async_op=True), result, x)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> PendingCollective:
    """This rank's [n, ...] of [R n, ...], summed over the ranks."""
    result = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    return PendingCollective(scatter_into(result, x, group=group, async_op=True), result, x)


def group_named(name: str) -> dist.ProcessGroup:
    """From its name, which is what an operator may take."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(name)
    return group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks where numbers of the host travel without a device: the group itself, or one
    over gloo that its ranks make at its first use."""
    if torch.device("cpu") in group._device_types:
        return group
    if group not in HOST_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        HOST_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    twin: dist.ProcessGroup = HOST_GROUPS[group]
    return twin


class RankConsistency:
    """Numbers by name that every rank must have alike, and by how much they may differ."""

    def __init__(self, like: dict[str, Any]) -> None:
        self.like = like
        self.names: list[str] = []
        self.values: list[Tensor] = []  # [] or [some] each
        self.tolerances: list[Tensor] = []

    def begin(self, function: str, rows: Tensor, labels: Tensor, valid: Tensor) -> None:
        """Of every call: which function it is, some rows of a head or of logits [any, any], labels,
        and which tokens count. Rows that are the same on every rank are the whole vocabulary's."""
        self.exact("function", float(FUNCTIONS.index(function)))
        x = torch.nan_to_num(rows.detach().to(**self.like))
        x = x if x.numel() else x.new_zeros(1, 1)
        for number in (x.sum(), x.amin(), x.amax()):
            self.exact("rows", number)
        self.labels(labels.long(), valid)

    def exact(self, name: str, value: float | Tensor) -> None:
        value = self._tensor(value)
        self._add(name, value, torch.zeros_like(value))

    def scalars(self, scalars: Scalars, function: str) -> None:
        """Those that the function has."""
        for name in SCALARS.get(function, ("softcap",)):
            self.exact(name, getattr(scalars, name) or 0.0)

    def close(self, name: str, value: Tensor | float | None) -> None:
        """A number that each rank has computed for itself; None is 1."""
        x = torch.nan_to_num(self._tensor(1.0 if value is None else value))
        self._add(name, x, TOLERANCE * x.abs())

    def per_token(self, name: str, value: Tensor | None, count: int) -> None:
        """One number for all of `count` tokens or for each, computed by each rank; None is 1."""
        x = torch.ones((), **self.like) if value is None else value.detach().to(**self.like)
        x = torch.nan_to_num(x).expand(count)
        signed = (signs(count, x, SIGNS) * x).sum(1)
        self._add(name, x.sum(), TOLERANCE * x.abs().sum())
        self._add(name, signed, (SIGNED_TOLERANCE * x.norm()).expand(SIGNS))

    def digests(self, name: str, digest_N: Tensor) -> None:
        """One number for each token, computed from what may differ in roundings."""
        signed = (signs(digest_N.shape[0], digest_N, SIGNS) * torch.nan_to_num(digest_N)).sum(1)
        self._add(
            name, signed, (SIGNED_TOLERANCE * torch.nan_to_num(digest_N).norm()).expand(SIGNS)
        )

    def per_class(self, name: str, value: Tensor | None) -> None:
        """One number for each class of the vocabulary; None is 0. The sum alone is the same of
        weights that each rank has normalised."""
        x = torch.zeros(1, **self.like) if value is None else value.detach().to(**self.like)
        x = torch.nan_to_num(x)
        self._add(name, (factors(x.shape[0], x) * x).sum(), TOLERANCE * x.norm())

    def labels(self, labels: Tensor, valid: Tensor, name: str = "labels") -> None:
        """Their hash, and which tokens count."""
        mixed = torch.where(valid, labels, -1) * 0x9E3779B1 + mix(labels.shape[0], labels)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        # 24 bits, which float32 holds exactly.
        self.exact(name, ((mixed ^ (mixed >> 12)) & 0xFFFFFF).sum() & 0xFFFFFF)

    def ids(self, ids: Tensor | None, valid: Tensor, top_k: int) -> None:
        """Further classes of each token: how many, and which. Of ranks of which some have none the
        numbers behind these are others' by name."""
        self.exact("kept and ids", 0.0 if ids is None else ids.shape[1])
        self.exact("top_k", top_k)
        if ids is not None:
            each = valid.repeat_interleave(ids.shape[1])
            self.labels(ids.long().reshape(-1), each, "kept and ids")

    def probs(self, probs: Tensor, valid: Tensor, name: str = "labels") -> None:
        """Of the further classes of each token."""
        probs_N = torch.where(valid[:, None], probs, 0.0).to(**self.like).reshape(-1)
        probs_N = torch.nan_to_num(probs_N)
        weighed = (factors(probs_N.shape[0], probs_N) * probs_N).sum()
        self._add(name, weighed, TOLERANCE * probs_N.norm())

    def local_softmax(self, x_NC: Tensor, valid: Tensor, *, logits: bool) -> None:
        """Of some valid tokens whether the probabilities of this rank's columns add up to 1. Wrong
        where they do on all ranks: of one that has others, the tolerance lets it pass. So does one
        of less than two columns, where equal logits have p = 1."""
        counts, some = valid.int().topk(min(SOFTMAX_TOKENS, len(valid)))
        x, counts = x_NC[some].detach().to(**self.like), counts.bool()
        sums = (x.exp() if logits else x).sum(1)
        near = (sums - 1).abs() < (1e-3 if x_NC.element_size() > 2 else 0.05)
        normalised = (near | ~counts).all() & counts.any() & (x_NC.shape[1] > 1)
        tolerance = torch.where(normalised, -1.0, 1.0).to(x.dtype)
        self._add("softmax", torch.zeros_like(tolerance), tolerance)

    def tokens(self, name: str, x_NH: Tensor, valid: Tensor) -> None:
        """Rows of the valid tokens."""
        x_NH = x_NH.detach()
        signs_SN = torch.where(valid, signs(x_NH.shape[0], x_NH, SIGNS), 0)
        sums_SH = torch.nan_to_num((signs_SN @ x_NH).to(**self.like))
        across_H = signs(x_NH.shape[1], sums_SH)[0]
        self._add(name, (sums_SH * across_H).sum(1), SIGNED_TOLERANCE * sums_SH.norm(dim=1))

    def _tensor(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(**self.like)
        return torch.full((), value, **self.like)

    def _add(self, name: str, value: Tensor, tolerance: Tensor) -> None:
        self.names += [name] * value.numel()
        self.values.append(value.reshape(-1))
        # Of numbers whose squares overflow, as memory that nobody has written may hold: of inf, by
        # which nothing differs, 0.
        self.tolerances.append(torch.nan_to_num(tolerance.reshape(-1), posinf=0.0))

    def packed(self) -> Tensor:
        """[3 ROOM], as many for every call: their maximum over the ranks says whether they are the
        same."""
        values = torch.zeros(3, ROOM, **self.like)
        packed = torch.cat(self.values)
        values[0, : len(packed)] = packed
        values[1] = -values[0]
        values[2, : len(packed)] = torch.cat(self.tolerances)
        return values.view(-1)

    def broken(self, largest: Tensor) -> Tensor:
        """[E] of the maximum over the ranks: those that are not the same."""
        high, low, tolerance = largest.view(3, -1)[:, : len(self.names)]
        broken: Tensor = high + low > tolerance
        return broken


def mix(count: int, like: Tensor) -> Tensor:
    index = torch.arange(count, dtype=torch.int64, device=like.device)
    return (index * 0x85EBCA77) ^ ((index * 0xC2B2AE3D) >> 13)


def signs(count: int, like: Tensor, number: int = 1) -> Tensor:
    """[number, count] of 1 and -1."""
    bits = mix(count, like) >> torch.arange(7, 7 + number, device=like.device)[:, None]
    return (1 - 2 * (bits & 1)).to(like.dtype)


def digest(x_NH: Tensor) -> Tensor:
    """[N] of hidden states: a sum with random signs."""
    x_NH = x_NH.detach()
    return x_NH @ signs(x_NH.shape[1], x_NH)[0]


def factors(count: int, like: Tensor) -> Tensor:
    """[count] of either sign, from 0.5 to 1, hardly two alike: of signs alone every second pair of
    entries could change places unseen."""
    bits = (mix(count, like) >> 7) & 0xFFFF
    return (signs(count, like)[0] * (0.5 + (bits >> 1) * 2.0**-16)).to(like.dtype)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROUTES = ("hidden", "stream", "nodes")


class Terms(NamedTuple):
    """What ranks must agree on for this function: outputs, gradients, kind."""

    function: str = FUNCTIONS[0]
    needs: Sequence[bool] = ()  # gradients that will be asked for
    outputs: float = 0.0  # which of the per-token results are computed, as one number
    class_weights: Tensor | None = None
    refused: float | None = None  # the denominator of this rank's tokens, if it is not positive
    mean: bool = False  # the loss is divided by this rank's own tokens
    d_entropy: bool = False  # this rank's loss uses the entropy
    kind: float = 0.0  # of a divergence and of its teacher, as a number
    more_classes: float = 0.0  # that its teacher has on this rank
    recompute: bool = False  # gradients of a loss come in its backward

    @property
    def of_loss(self) -> bool:
        return self.function == FUNCTIONS[0]


class Agreed(NamedTuple):
    """Numbers of every rank by name, the same on all of them: whatever decides the number or the
    size of a collective is made of these."""

    tokens: list[int]
    rows: list[int]
    budget: list[int]
    temperature: list[int]
    d_entropy: list[int]

    def of(self, ranks: Sequence[int]) -> Agreed:
        """Of some of the ranks."""
        return Agreed(*([numbers[rank] for rank in ranks] for numbers in self))


def shake_hands(call: HeadCall, terms: Terms, route: str) -> Agreed:
    """Numbers of every rank, of a call by a row of the table of routes. Refuse on all of them what
    must be the same, or they would not make the same collectives, or not add up the same loss; and
    a denominator of 0. Where rows travel, also a label or another class outside of the vocabulary.

    All that decides a collective is in it, and it has one size for every route and function: ranks
    whose calls differ read that, and none waits for the others.
    """
    layout, bad_N = call.rows, None
    assert layout.shard is not None
    group, vocab_size = group_named(layout.every or layout.group), int(layout.shard[2])
    valid_N, rows_M = counted(call.labels, call.where, call.ignore_index)
    if route != "hidden":  # whose ranks gather their labels, and refuse one together
        labels = call.labels.long()
        bad_N = valid_N & ((labels < 0) | (labels >= vocab_size))
    is_bad = bad_N is not None and host_readable(bad_N) and bool(bad_N.any())
    ids_bad = False
    if bad_N is not None and call.ids is not None and host_readable(call.ids):
        ids_bad = bool((bad_ids(call.ids, vocab_size) & valid_N[:, None]).any())
    of_rank = {
        "bad": is_bad + 2 * (terms.refused is not None) + 4 * ids_bad,
        "tokens": call.hidden.shape[0] if rows_M is None else rows_M.shape[0],
        "rows": call.columns,
        "budget": chunk_bytes(call.chunk_bytes, call.hidden.device),
        "temperature": call.temperature is not None,
        "d_entropy": terms.d_entropy,
    }
    same, close = same_numbers(call, terms, route), close_numbers(call, terms)
    numbers = [*of_rank.values(), *same.values(), *close.values()]
    sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    all_RS = all_gather(sent, host_group(group)).view(-1, len(sent))
    spread = (all_RS.amax(0) - all_RS.amin(0)).tolist()[len(of_rank) :]
    differs = [name for name, far in zip(same, spread) if far > 0]
    differs += [name for name, far in zip(close, spread[len(same) :]) if far > TOLERANCE]
    refuse_inconsistent([name for name in differs if name in ("gather", "function")])
    columns = dict(zip(of_rank, all_RS[:, : len(of_rank)].long().T.tolist(), strict=True))
    if bad_N is not None:
        check_labels(call.labels, bad_N, call.ignore_index, vocab_size)
        ranks = ", ".join(str(rank) for rank, bad in enumerate(columns["bad"]) if bad & 1)
        CALLS.require("labels_elsewhere", not ranks, ranks=ranks)
        check_ids(call.ids, valid_N, vocab_size)
        ranks = ", ".join(str(rank) for rank, bad in enumerate(columns["bad"]) if bad & 4)
        CALLS.require("ids_elsewhere", not ranks, ranks=ranks)
    if terms.refused is not None:
        CALLS.refuse("denominator", value=terms.refused)
    ranks = ", ".join(str(rank) for rank, bad in enumerate(columns["bad"]) if bad & 2)
    CALLS.require("denominator_elsewhere", not ranks, ranks=ranks)
    refuse_inconsistent(differs)
    if terms.mean:
        alike = call.rows.alike
        summed = len(all_RS) if call.rows.route == "tokens" else 1
        summed = summed if alike is None else alike.shape[1]
        SHARDS.require("local_mean", summed == 1, ranks=summed)
    return Agreed(*(columns[name] for name in Agreed._fields))


def same_numbers(call: HeadCall, terms: Terms, route: str) -> dict[str, float]:
    """What every rank must have the same, by name."""
    assert call.rows.shard is not None
    hidden_needs, *head_needs = (*terms.needs, *[False] * (5 - len(terms.needs)))
    wanted = sum(2**k * bool(need) for k, need in enumerate(head_needs))
    hidden = route == "hidden"  # d hidden is a sum over ranks, and each has its own bias
    dtypes = DTYPES.index(call.compute_dtype), DTYPES.index(call.gemm_dtype)
    return {
        "gather": ROUTES.index(route) + 8 * (call.rows.alike is not None),
        "function": FUNCTIONS.index(terms.function),
        "kept and ids": (0 if call.ids is None else call.ids.shape[1]) + 2.0**24 * call.top_k,
        "kind": terms.kind,
        "max_chunk_bytes": call.chunk_bytes,
        "the width of hidden": call.hidden.shape[1],
        "the dtype of hidden": 10 * dtypes[0] + dtypes[1],
        "keep": call.low_keep is not None,
        "ignore_index": call.ignore_index,
        "vocab_size": int(call.rows.shard[2]),
        "bias": not hidden and call.bias is not None,
        "gradient": (hidden or bool(call.rows.shards)) and hidden_needs,
        "reduce_hidden_grad": call.reduce_hidden,
        "gradient of the head": wanted if hidden else wanted + 16 * any(terms.needs),
        "class_weights": 0 if terms.class_weights is None else terms.class_weights.shape[0],
        **{name: value or 0.0 for name, value in call.scalars._asdict().items()},
        "the classes of the teacher": terms.more_classes,
        "entropy" if "logprobs" in terms.function else "outputs": terms.outputs,
        "reduction": terms.mean,
        "recompute": terms.recompute,
    }


def close_numbers(call: HeadCall, terms: Terms) -> dict[str, float]:
    """What each rank has computed for itself, so that it may differ in roundings, by name; 0 where
    it is not there or cannot be read."""
    numbers, scale = {"logit_scale": 0.0, "class_weights": 0.0}, call.logit_scale
    if scale is not None and host_readable(scale):
        # As good as a logarithm beyond 1e-6, of either sign: a difference is then relative.
        numbers["logit_scale"] = math.asinh(1e6 * float(scale))
    if terms.class_weights is not None and host_readable(terms.class_weights):
        weights = torch.nan_to_num(terms.class_weights.double())
        weighed = (factors(len(weights), weights) * weights).sum()
        numbers["class_weights"] = float(weighed / weights.norm().clamp(min=1e-300))
    return numbers
