"""Where a head, logits and tokens are: process groups, meshes, DTensors, mesh axes."""

from __future__ import annotations

from typing import NoReturn

from xentlib.checks.validators import Refusals

PLACEMENTS = Refusals(
    ValueError,
    # A mesh of several dimensions.
    mesh="`{name}` must be a one-dimensional DeviceMesh; got {dimensions} dimensions. Pass "
    "`mesh['name']`, the dimension of these ranks.",
    # A DTensor on a mesh of other ranks than the group that is named.
    same_ranks="`vocab_parallel` must hold the ranks of the mesh that `logits` is on, {mesh}; got "
    "{group}. Leave it out: the DTensor says over which ranks it is sharded.",
    # Tokens that are spread over other ranks than the vocabulary.
    same_tokens="`tokens_parallel` must hold the ranks of `vocab_parallel`, {vocab}; got "
    "{tokens}. Pass the same group.",
    # What does not say which ranks are in which node.
    nodes="`tokens_parallel` must be a DeviceMesh of two dimensions, nodes and the ranks of a "
    "node, with `gather='hidden'`; got {came}. Pass `init_device_mesh(device, (nodes, ranks))`, "
    "or leave it out: hidden states then travel over all ranks.",
    # Nodes of other ranks than those that share the head, or in another order.
    nodes_ranks="`tokens_parallel` must hold the ranks that `fully_shard` spreads the head over, "
    "{ranks}, node by node and in that order; got {nodes}. Pass a mesh of those ranks, or call "
    "`fully_shard` over the mesh flattened.",
    # Nodes where rows are not spread over all ranks by FSDP2.
    no_nodes="`tokens_parallel` must be None, with `gather='hidden'`, for a head of {wrapper}; "
    "got a mesh, over whose nodes `fully_shard` without replicas spreads the rows. Leave it out: "
    "hidden states then travel over the ranks that share the head.",
    # A DTensor head that is not sharded over its vocabulary.
    over_vocabulary="`{name}` must be sharded over its vocabulary, dimension {axis}, on a "
    "one-dimensional mesh; got {placements}. Pass "
    "`{name}.redistribute(placements=[Shard({axis})])`.",
    over_vocabulary_of_two="`{name}` must be sharded over its vocabulary, dimension {axis}, on a "
    "one-dimensional mesh; got {placements}. Pass `{name}.to_local(grad_placements={summed})`, a "
    "sum over ranks that have the same part, and as `vocab_parallel` the dimension of the mesh "
    "that shards it.",
    # This rank's part of one that other ranks have too.
    copied="`{name}` must say how its gradient is reduced over ranks that have the same part; got "
    "`to_local()` of a DTensor with {placements}. Pass `to_local(grad_placements={summed})`, whose "
    "gradient is summed over them, or other placements where they have the same tokens.",
    # DTensor logits that are neither whole nor in columns.
    columns="`logits` must be a DTensor sharded over its classes, the last dimension, on a "
    "one-dimensional mesh, or a plain tensor; got placements {placements}. Pass "
    "`logits.to_local()`: of whole rows, where each rank has tokens of its own or all have the "
    "same, with this rank's labels and without `vocab_parallel`; of columns on a mesh of several "
    "dimensions, with `vocab_parallel=mesh['name']`.",
    # Tokens that this rank has only a part of.
    replicated="`{name}` must be whole on every rank, a plain tensor or a DTensor with "
    "Replicate(); got {placements}. Pass `{name}.redistribute(placements=[Replicate()])`, whose "
    "backward takes this rank's slice.",
    replicated_of_two="`{name}` must be whole on every rank, a plain tensor or a DTensor with "
    "Replicate(); got {placements}. Pass `{name}.to_local()`, this rank's tokens, which are the "
    "same along `vocab_parallel`.",
    # A sharded head of which no wrapper is known that reduces its gradient.
    dtensor="`{name}` must be a plain tensor, a parameter that `fully_shard` keeps, or come with "
    "`vocab_parallel`; got a DTensor with {placements}, whose gradient reduction is unknown. Pass "
    "the parameter itself, or `vocab_parallel=mesh['tp']`; or, where each rank has tokens of its "
    "own, `{name}.full_tensor(grad_placements=[Partial()])`, a sum over them.",
    # What is no mesh axis of the `shard_map` that the call is in.
    axis="`{argument}` must be the name of a mesh axis inside `shard_map`; got {name!r}, which is "
    "not bound here. Call inside `jax.shard_map` over that axis, or pass None.",
    # A head that is the same on all devices of the axis that it should be spread over.
    varying="`{name}` must be spread over mesh axis {axis!r}; got one that does not vary over it. "
    "Name the axis in the vocabulary's dimension of its `in_specs`, or pass `vocab_parallel=None`.",
    # Names that are not of the mesh.
    mesh_axes="`tokens` and `vocab_parallel` must name axes of the mesh that the arrays are on, "
    "{axes}; got {unknown!r}. Place the parameters on that mesh, or enter it with `jax.set_mesh`.",
    # A spec of more dimensions than tokens have.
    dimensions="`tokens` must spread at most the {of} leading dimensions of `hidden`; got a spec "
    "of {spread}. Leave the others out.",
)


def check_group(group: object, name: str = "vocab_parallel") -> NoReturn:
    """Refuse what is neither a process group nor a mesh of one dimension."""
    dimensions = getattr(group, "ndim", None)
    if isinstance(dimensions, int):
        PLACEMENTS.refuse("mesh", name=name, dimensions=dimensions)
    raise TypeError(
        f"`{name}` must be a ProcessGroup or a one-dimensional DeviceMesh; got "
        f"{type(group).__name__}. Pass the group of these ranks, or None."
    )
