"""Where a head, logits and tokens are: process groups, meshes, DTensors, mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def check_group(group: object, name: str = "vocab_parallel") -> NoReturn:
    """Refuse what is neither a process group nor a mesh of one dimension."""
    dimensions = getattr(group, "ndim", None)
    if isinstance(dimensions, int):
        raise ValueError(
            f"`{name}` must be a one-dimensional DeviceMesh; got {dimensions} dimensions. Pass "
            f"`mesh['name']`, the dimension of these ranks."
        )
    raise TypeError(
        f"`{name}` must be a ProcessGroup or a one-dimensional DeviceMesh; got "
        f"{type(group).__name__}. Pass the group of these ranks, or None."
    )


def check_same_ranks(group: Sequence[int], mesh: Sequence[int]) -> None:
    """Refuse a DTensor on a mesh of other ranks than the group that is named."""
    if list(group) != list(mesh):
        raise ValueError(
            f"`vocab_parallel` must hold the ranks of the mesh that `logits` is on, {list(mesh)}; "
            f"got {list(group)}. Leave it out: the DTensor says over which ranks it is sharded."
        )


def check_same_tokens(vocab: Sequence[int], tokens: Sequence[int]) -> None:
    """Refuse tokens that are spread over other ranks than the vocabulary."""
    if list(vocab) != list(tokens):
        raise ValueError(
            f"`tokens_parallel` must hold the ranks of `vocab_parallel`, {list(vocab)}; got "
            f"{list(tokens)}. Pass the same group."
        )


def check_nodes(mesh: bool, dimensions: int | None, kind: str) -> None:
    """Refuse what does not say which ranks are in which node."""
    if not mesh or dimensions != 2:
        came = f"one of {dimensions} dimensions" if mesh else f"a {kind}"
        raise ValueError(
            f"`tokens_parallel` must be a DeviceMesh of two dimensions, nodes and the ranks of a "
            f"node, with `gather='hidden'`; got {came}. Pass `init_device_mesh(device, (nodes, "
            f"ranks))`, or leave it out: hidden states then travel over all ranks."
        )


def check_nodes_ranks(same: bool, ranks: Sequence[int], nodes: Sequence[Sequence[int]]) -> None:
    """Refuse nodes of other ranks than those that share the head, or in another order."""
    if not same:
        raise ValueError(
            f"`tokens_parallel` must hold the ranks that `fully_shard` spreads the head over, "
            f"{list(ranks)}, node by node and in that order; got {list(map(list, nodes))}. Pass a "
            f"mesh of those ranks, or call `fully_shard` over the mesh flattened."
        )


def refuse_nodes(wrapper: str) -> NoReturn:
    """Where rows are not spread over all ranks by FSDP2."""
    raise ValueError(
        f"`tokens_parallel` must be None, with `gather='hidden'`, for a head of {wrapper}; got a "
        f"mesh, over whose nodes `fully_shard` without replicas spreads the rows. Leave it out: "
        f"hidden states then travel over the ranks that share the head."
    )


def check_placement(name: str, cut: bool, axis: int, placements: object) -> None:
    """Refuse a DTensor head that is not sharded over its vocabulary."""
    if not cut:
        raise ValueError(
            f"`{name}` must be sharded over its vocabulary, dimension {axis}, on a "
            f"one-dimensional mesh; got {placements}. Pass "
            f"`{name}.redistribute(placements=[Shard({axis})])`."
        )


def check_logits_placement(cut: bool, placements: object) -> None:
    """Refuse DTensor logits that are neither whole nor in columns."""
    if not cut:
        raise ValueError(
            f"`logits` must be a DTensor sharded over its classes, the last dimension, on a "
            f"one-dimensional mesh, or a plain tensor; got placements {placements}. Pass "
            f"`logits.to_local()`: of whole rows, where each rank has tokens of its own or all "
            f"have the same, with this rank's labels and without `vocab_parallel`; of columns on a "
            f"mesh of several dimensions, with `vocab_parallel=mesh['name']`."
        )


def check_replicated(name: str, whole: bool, placements: object) -> None:
    """Refuse tokens that this rank has only a part of."""
    if not whole:
        raise ValueError(
            f"`{name}` must be whole on every rank, a plain tensor or a DTensor with Replicate(); "
            f"got {placements}. Pass `{name}.redistribute(placements=[Replicate()])`, whose "
            f"backward takes this rank's slice."
        )


def refuse_dtensor(name: str, placements: object) -> NoReturn:
    """Refuse a sharded head of which no wrapper is known that reduces its gradient."""
    raise ValueError(
        f"`{name}` must be a plain tensor, a parameter that `fully_shard` keeps, or come with "
        f"`vocab_parallel`; got a DTensor with {placements}, whose gradient reduction is "
        f"unknown. Pass the parameter itself, or `vocab_parallel=mesh`; or, where each rank has "
        f"tokens of its own, `{name}.full_tensor(grad_placements=[Partial()])`, a sum over them."
    )


def check_axis(name: object, argument: str = "vocab_parallel") -> NoReturn:
    """Refuse what is no mesh axis of the `shard_map` that the call is in."""
    raise ValueError(
        f"`{argument}` must be the name of a mesh axis inside `shard_map`; got {name!r}, which is "
        f"not bound here. Call inside `jax.shard_map` over that axis, or pass None."
    )


def check_varying(name: str, varies: bool, axis: object) -> None:
    """Refuse a head that is the same on all devices of the axis that it should be spread over."""
    if not varies:
        raise ValueError(
            f"`{name}` must be spread over mesh axis {axis!r}; got one that does not vary over it. "
            f"Name the axis in the vocabulary's dimension of its `in_specs`, or pass "
            f"`vocab_parallel=None`."
        )


def check_mesh_axes(named: Sequence[object], axes: Sequence[object], spread: int, of: int) -> None:
    """Refuse names that are not of the mesh, or a spec of more dimensions than tokens have."""
    unknown = [name for name in named if name not in axes]
    if unknown:
        raise ValueError(
            f"`tokens` and `vocab_parallel` must name axes of the mesh that the arrays are on, "
            f"{tuple(axes)}; got {unknown[0]!r}. Place the parameters on that mesh, or enter it "
            f"with `jax.set_mesh`."
        )
    if spread > of:
        raise ValueError(
            f"`tokens` must spread at most the {of} leading dimensions of `hidden`; got a spec of "
            f"{spread}. Leave the others out."
        )
