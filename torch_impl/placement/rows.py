"""This rank's part of a call: rows of a head that the caller has cut, or that FSDP2 or ZeRO-3 has
sharded where they stay on their ranks, columns of logits, and the ranks that hold the others; and
what is done with a wrapper's gradient as the wrapper would do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.arguments import Arguments
from xentlib.checks.head import LOW_RANK
from xentlib.checks.placement import PLACEMENTS, check_group
from xentlib.checks.shards import ROUTES, SHARDS
from xentlib.checks.validators import plain
from xentlib.head import LowRankHead
from xentlib.shards import PaddedVocab, VocabShard, shard_of
from xentlib.torch.array_spec import is_dtensor, summed_over_copies
from xentlib.torch.core.consistency import all_gather, filled
from xentlib.torch.core.vocab import numbers_of
from xentlib.torch.head.modules import replaced, split_lora
from xentlib.torch.operators import RowLayout

if TYPE_CHECKING:
    from xentlib.torch.wrappers.fsdp2 import Owner

R = TypeVar("R")
# Of groups of one mesh dimension, by ranks, those of two
JOINT_GROUPS: Any = WeakIdKeyDictionary()


def find_group(parallel: Any, name: str = "vocab_parallel") -> dist.ProcessGroup:
    """The process group of a ProcessGroup or of a one-dimensional DeviceMesh."""
    if is_device_mesh(parallel) and parallel.ndim == 1:
        parallel = parallel.get_group()
    if not isinstance(parallel, dist.ProcessGroup):
        check_group(parallel, name)
    group: dist.ProcessGroup = parallel
    return group


def is_device_mesh(x: Any) -> bool:
    """A PyTorch without distributed support has no such class."""
    return isinstance(x, getattr(getattr(dist, "device_mesh", None), "DeviceMesh", ()))


def unpadded(parallel: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The group, and the number of classes where it was declared."""
    if isinstance(parallel, PaddedVocab):
        return find_group(parallel.over), plain(parallel.vocab_size)
    if isinstance(parallel, VocabShard):
        if parallel.over is None:
            raise TypeError(
                f"`vocab_parallel` must say which ranks share the vocabulary; got {parallel}. Pass "
                f"`VocabShard.of_ranks(rows, group)`, made once, or the group of these ranks."
            )
        return find_group(parallel.over), parallel.vocab_size
    return find_group(parallel), None


def local_head(
    args: Arguments, low: LowRankHead[Tensor] | None
) -> tuple[Arguments, LowRankHead[Tensor] | None, RowLayout]:
    """A call with this rank's rows and with plain tensors in place of DTensors, and where the rows
    belong."""
    parallel = args.vocab_parallel
    weight, bias, local = local_rows(args.weight, args.bias, parallel, args.weight_layout)
    if low is not None:  # A as every rank has it, and this rank's rows of B
        a, b = replicated("a", low.a), low.b
        if is_dtensor(b):
            if parallel is None:
                PLACEMENTS.refuse("dtensor", name="b", placements=tuple(b.placements))
            b = local_part("b", b, 0)
        low = replaced(low, a=a, b=b)
    if args.tokens_parallel is not None and parallel is not None:
        same_tokens(unpadded(parallel)[0], args.tokens_parallel)
        local = replaced(local, route="tokens")
    hidden, labels = replicated("hidden", args.hidden), replicated("labels", args.labels)
    args = replaced(args, hidden=hidden, labels=labels, weight=weight, bias=bias)
    return args, low, local


def same_tokens(vocab: dist.ProcessGroup, tokens_parallel: Any) -> None:
    """Refuse tokens that are spread over other ranks than the rows that the caller has cut."""
    over = vocab, find_group(tokens_parallel, "tokens_parallel")
    ranks, tokens = map(dist.get_process_group_ranks, over)
    PLACEMENTS.require("same_tokens", ranks == tokens, vocab=ranks, tokens=tokens)


def local_rows(
    weight: Tensor, bias: Tensor | None, parallel: Any, layout: str
) -> tuple[Tensor, Tensor | None, RowLayout]:
    """This rank's rows of the head as plain tensors, and where they belong."""
    whole = RowLayout()
    if weight.ndim != 2:  # refused where shapes are checked
        return weight, bias, whole
    if parallel is None:
        for name, x in (("weight", weight), ("bias", bias)):
            if is_dtensor(x):
                PLACEMENTS.refuse("dtensor", name=name, placements=tuple(x.placements))
        return weight, bias, whole
    axis = 0 if layout == "VH" else 1
    group, vocab_size = unpadded(parallel)
    shard = None
    if is_dtensor(bias):
        bias = local_part("bias", bias, 0)
    if is_dtensor(weight):
        shard = shard_of_rank(weight.shape[axis], group, vocab_size)
        weight = local_part("weight", weight, axis)
    elif isinstance(parallel, VocabShard):
        rows, size, padding = weight.shape[axis], parallel.size, parallel.padding
        SHARDS.require("rows", size + padding == rows, rows=rows, size=size, padding=padding)
        shard = parallel
    return weight, bias, RowLayout(group.group_name, numbers_of(shard, vocab_size))


def shard_of_rank(
    classes: int, group: dist.ProcessGroup, vocab_size: int | None = None
) -> VocabShard:
    """This rank's part of a DTensor."""
    return shard_of(chunked(classes, dist.get_world_size(group)), dist.get_rank(group), vocab_size)


def chunked(classes: int, ranks: int) -> tuple[int, ...]:
    """Sizes of a DTensor's shards: it is split as torch.chunk splits."""
    columns = -(-classes // ranks)
    return tuple(max(0, min(columns, classes - k * columns)) for k in range(ranks))


def local_part(name: str, x: Any, axis: int) -> Tensor:
    """Of a DTensor that is sharded along the vocabulary."""
    placements, flat = tuple(x.placements), x.device_mesh.ndim == 1
    said = "over_vocabulary" if flat else "over_vocabulary_of_two"
    cut, summed = flat and placements[0].is_shard(axis), summed_over_copies(placements)
    PLACEMENTS.require(said, cut, name=name, axis=axis, placements=placements, summed=summed)
    part: Tensor = x.to_local()
    return part


def replicated(name: str, x: Any) -> Any:
    """A DTensor that every rank has whole, as the tensor that it is; a plain one as it comes."""
    if not is_dtensor(x):
        return x
    placements = tuple(x.placements)
    whole = all(p.is_replicate() for p in placements)
    said = "replicated" if x.device_mesh.ndim == 1 else "replicated_of_two"
    PLACEMENTS.require(said, whole, name=name, placements=placements)
    return x.to_local()


class LocalHead(NamedTuple):
    """A placement: this rank's rows, whose gradients are complete."""

    weight: Tensor | LowRankHead[Tensor]
    bias: Tensor | None
    layout: RowLayout
    scale: float  # as the wrapper averages over its ranks, or divides by what it was told
    gemm_dtype: torch.dtype | None = None  # of its policy, where that is one of 16 bits

    def run(self, function: Callable[..., R], call: Arguments) -> R:
        layout = replaced(self.layout, head_scale=self.scale, route=call.gather)
        call = replaced(call, weight=self.weight, bias=self.bias)
        if self.gemm_dtype is None:
            return function(call, layout)
        # The policy's dtype is that of the products; the rows' gradient stays as wide as the rows.
        with torch.autocast(call.hidden.device.type, self.gemm_dtype):
            return function(call, layout)


def zero3_rows(call: Arguments) -> LocalHead:
    """Of a head that DeepSpeed's ZeRO-3 keeps."""
    from xentlib.torch.wrappers import deepspeed

    if call.tokens_parallel is not None:
        PLACEMENTS.refuse("no_nodes", wrapper="ZeRO-3")
    head = (call.weight, call.bias, call.weight_layout, call.gather)
    weight, bias, group = deepspeed.rows_of(*head)
    ranks = dist.get_world_size(group)
    shard = shard_of((weight.shape[0],) * ranks, dist.get_rank(group))
    return LocalHead(weight, bias, RowLayout(group.group_name, numbers_of(shard)), 1.0 / ranks)


def fsdp2_rows(call: Arguments, owner: Owner) -> LocalHead:
    """Of a head that `fully_shard` shards. What it does with a gradient is done with that of the
    rows: the same division, and one sum over replicas where it would sum over them."""
    from xentlib.torch.wrappers import fsdp2

    plain, lora = split_lora(call)
    weight: Any = plain.weight
    bias: Any = plain.bias
    group = owner.group
    info, policy = group.mesh_info, owner.policy(weight)
    replicas = getattr(info, "replicate_process_group", None)
    over = getattr(info, "shard_process_group", None)
    hooks = {
        "an all-reduce hook": group._all_reduce_hook is not None,
        "a reduce-scatter of its own": type(group._reduce_scatter_comm).__module__
        != type(group).__module__.replace("_param_group", "_collectives"),
    }
    placements, layout = tuple(weight.placements), call.weight_layout
    as_placed = by_rows(owner, weight, *([] if bias is None else [bias])) and layout == "VH"
    ROUTES.require("fully_shard", as_placed, placements=placements, layout=layout)
    hooked = ", ".join(x for x, there in hooks.items() if there)
    ROUTES.require("hooked", not hooked, hooked=hooked)
    if lora is not None:
        LOW_RANK.require("together", by_rows(owner, lora.a, lora.b))
        rows, (*of_b, rank) = weight.shape[0], lora.b.shape
        LOW_RANK.require("b", of_b == [rows], rows=rows, rank=rank, shape=tuple(lora.b.shape))
    fsdp2.never_gathered(group)
    assert over is not None
    if call.vocab_parallel is not None:
        ROUTES.require("rows_alone", shards_of(owner, weight) is not None, gather=call.gather)
        rows_layout = layout_of_shards(call, weight, over)
    else:
        if call.tokens_parallel is not None and replicas is not None:
            PLACEMENTS.refuse("no_nodes", wrapper="FSDP2 with replicas")
        if shards_of(owner, weight) is not None:
            PLACEMENTS.refuse("dtensor", name="weight", placements=placements)
        rows_layout = layout_of(weight.shape[0], over, call.tokens_parallel)

    def local(whole: Any) -> Tensor:
        rows: Tensor = whole.to_local().to(call.hidden.device)  # from the CPU, if it is offloaded
        if replicas is not None and rows.requires_grad:
            held = next(p for p in group.fsdp_params if p.sharded_param is whole)
            rows = AllReduceGrad.apply(rows, group, held, replicas)  # type: ignore[no-untyped-call]
        return rows

    head: Any = local(weight)
    if lora is not None:
        a = AllGatherRows.apply(local(lora.a), lora.a.shape[0], over)  # type: ignore[no-untyped-call]
        head = replaced(lora, weight=head, a=a, b=local(lora.b))
    narrow = policy.param_dtype in (torch.bfloat16, torch.float16)
    return LocalHead(
        head,
        None if bias is None else local(bias),
        rows_layout,
        1.0 / (group.gradient_divide_factor or info.mesh.size()),
        policy.param_dtype if narrow else None,
    )


def layout_of(classes: int, every: dist.ProcessGroup, mesh: Any) -> RowLayout:
    """This rank's rows of a head that a wrapper spreads over `every` rank, and who has the others.

    With `mesh`, of nodes and the ranks of a node: once rows are gathered over nodes.
    """
    layout = RowLayout(every.group_name, numbers_of(shard_of_rank(classes, every)))
    if mesh is None:
        return layout
    ranks = dist.get_process_group_ranks(every)
    of_mesh, dimensions = is_device_mesh(mesh), getattr(mesh, "ndim", None)
    came = f"one of {dimensions} dimensions" if of_mesh else f"a {type(mesh).__name__}"
    PLACEMENTS.require("nodes", of_mesh and dimensions == 2, came=came)
    part = {rank: part for part, rank in enumerate(ranks)}
    table = mesh.mesh.tolist()
    parts = [[part.get(rank, -1) for rank in node] for node in table]
    # Rows of one rank then come in the order of their classes, those that there are first.
    ascend = all(list(place) == sorted(place) for place in zip(*parts, strict=True))
    same = sorted(part for node in parts for part in node) == list(range(len(ranks)))
    PLACEMENTS.require("nodes_ranks", same and ascend, ranks=ranks, nodes=table)
    if len(parts) == 1:
        return layout
    peers, among = mesh.get_group(0), mesh.get_group(1)
    each = chunked(classes, len(ranks))
    sizes = tuple(sum(each[part] for part in place) for place in zip(*parts, strict=True))
    return RowLayout(
        among.group_name,
        numbers_of(shard_of(sizes, dist.get_rank(among))),
        nodes=torch.tensor(parts, device="cpu"),
        peers=peers.group_name,
        every=every.group_name,
    )


def layout_of_shards(call: Arguments, weight: Any, over: dist.ProcessGroup) -> RowLayout:
    """This rank's rows of a head that tensor parallelism has cut, and FSDP2 its shards over the
    ranks of `over`, and who has the others.

    A DTensor is cut as torch.chunk cuts, first over tensor parallelism: its rank t has rows one
    after the other, and of them FSDP2's rank f a part.
    """
    mesh, classes = weight.device_mesh, weight.shape[0]
    (tp, vocab_size), sequence = unpadded(call.vocab_parallel), call.tokens_parallel
    ranks = dist.get_process_group_ranks(tp)
    ROUTES.require("same_shards", ranks == _ranks_along(mesh, -1), mesh=mesh, ranks=ranks)
    if sequence is not None:
        same_tokens(tp, sequence)
        ROUTES.require("stream_tokens", call.gather == "hidden", gather=call.gather)
    names = mesh.mesh
    if names.ndim > 2:  # replicas, each with all rows: of this rank's
        names = names[(names == dist.get_rank()).nonzero()[0, 0]]
    every = joint_group(over, names.flatten().tolist())
    t, f, of_shards = dist.get_rank(tp), dist.get_rank(over), chunked(classes, len(ranks))
    if call.gather == "stream":
        shard = replace(shard_of(of_shards, t, vocab_size), largest=max(of_shards))
        layout = RowLayout(over.group_name, numbers_of(shard))
        return replaced(layout, every=every.group_name, shards=tp.group_name)
    parts = [x for rows in of_shards for x in chunked(rows, len(names))]
    shard = replace(shard_of(tuple(parts), t * len(names) + f, vocab_size), largest=max(parts))
    layout = RowLayout(every.group_name, numbers_of(shard))
    if sequence is None:
        return replaced(layout, shards=tp.group_name, over=over.group_name)
    alike = [[dist.get_group_rank(every, rank) for rank in row] for row in names.tolist()]
    return replaced(layout, alike=torch.tensor(alike, device="cpu"))


def _ranks_along(mesh: Any, dimension: int) -> list[int]:
    """This rank's, of one dimension."""
    return dist.get_process_group_ranks(mesh.get_group(dimension % mesh.ndim))


def shards_of(owner: Owner, weight: Any) -> dist.ProcessGroup | None:
    """The ranks over which tensor parallelism has cut a head, before FSDP2 its shards."""
    mesh = weight.device_mesh
    if mesh.ndim == owner.group.mesh_info.mesh.ndim:
        return None
    group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return group


def by_rows(owner: Owner, *head: Any) -> bool:
    """Whether FSDP2, alone or behind tensor parallelism, shards the parameters of a head, over
    their rows and in one group."""
    from xentlib.torch.wrappers.fsdp2 import find_owner

    info = owner.group.mesh_info
    over = getattr(info, "shard_process_group", None)

    def rows(x: Any) -> bool:
        if not (is_dtensor(x) and find_owner(x) == owner and x.placements[-1].is_shard(0)):
            return False
        mesh, more = x.device_mesh, x.device_mesh.ndim - info.mesh.ndim
        # Of a shard of tensor parallelism's: a strided one, and not `is_shard` in every version.
        cut = more == 1 and getattr(x.placements[-2], "dim", None) == 0
        of_fsdp = cut and _ranks_along(mesh, -2) == dist.get_process_group_ranks(over)
        return more == 0 or of_fsdp

    return over is not None and all(map(rows, head))


def ranks_of(owner: Owner) -> int:
    """That share the rows of a head."""
    return dist.get_world_size(owner.group.mesh_info.shard_process_group)


def joint_group(of: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Of these ranks, of which `of` has some; they make it at its first use, and nobody else has
    to: a mesh that is flattened waits for ranks that have no head."""
    groups, named = JOINT_GROUPS.setdefault(of, {}), tuple(sorted(ranks))
    if len(ranks) == dist.get_world_size():
        groups[named] = dist.group.WORLD
    elif named not in groups:
        groups[named] = dist.new_group(list(named), use_local_synchronization=True)
    group: dist.ProcessGroup = groups[named]
    return group


class AllGatherRows(torch.autograd.Function):
    """All `count` rows of a parameter [r, H], of which each rank has as torch.chunk cuts, and whose
    gradient each rank has of all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, over: Any) -> Tensor:
        each = -(-count // dist.get_world_size(over))
        ctx.start, ctx.stop = (min(k * each, count) for k in (over.rank(), over.rank() + 1))
        return all_gather(filled(rows, each), over)[:count]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[ctx.start : ctx.stop].clone(), None, None


class AllReduceGrad(torch.autograd.Function):
    """Rows as they are; their gradient summed over replicas when FSDP2 would: until then it is
    kept, as `sharded_param.grad` would be summed by nobody."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, held: Any, replicas: Any) -> Tensor:
        ctx.group, ctx.held, ctx.replicas = group, held, replicas
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from xentlib.torch.wrappers.fsdp2 import PARTIAL

        before = getattr(ctx.held, PARTIAL, None)
        if before is not None:
            gradient = before + gradient
        if not (ctx.group.reduce_grads and ctx.group.all_reduce_grads):
            setattr(ctx.held, PARTIAL, gradient)
            return None, None, None, None
        setattr(ctx.held, PARTIAL, None)
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.replicas)
        return gradient, None, None, None
