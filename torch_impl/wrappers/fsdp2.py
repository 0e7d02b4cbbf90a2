"""FSDP2 (`fully_shard`): how it gathers a head, and how it reduces gradients.

A head is gathered, and its gradient reduced, by the wrapper's own hooks, so that its mean over
ranks, divide factor, dtypes and streams are FSDP2's own. PyTorch has no public API from a parameter
to its FSDP group; this file relies on private attributes of torch 2.11 to 2.15.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.accumulate import UnsupportedWrapperError, WindowStateError, reduction_of
from xentlib.checks.placement import PLACEMENTS
from xentlib.torch.array_spec import summed_over_copies
from xentlib.torch.wrappers import differentiable, is_a, with_attribute
from xentlib.torch.wrappers.plain import NoWrapper

T = TypeVar("T")
OWNERS: Any = WeakIdKeyDictionary()  # of parameters that were asked for, with what is sharded
# On FSDP2's record of a parameter: a gradient of rows that has not been summed over replicas.
PARTIAL = "_xentlib_partial_grad"
# There: what a module has of it while it is not whole. With `reshard_after_forward=<int>` that is
# the second, over fewer ranks, from a forward to the next gather.
SHARDED = ("sharded_param", "_sharded_post_forward_param")
ACCUMULATED = "unsharded_accumulated_grad"
ACCUMULATE = "to_accumulated_grad_if_needed"  # its method, of a gradient that is not reduced yet


class Owner(NamedTuple):
    """Who shards a parameter."""

    module: Any  # that `fully_shard` was called on
    state: Any
    group: Any  # its parameters are gathered and reduced together

    def policy(self, parameter: Tensor) -> Any:
        """In which dtypes a parameter is gathered and its gradient reduced: up to torch 2.14 those
        of the group, then of each parameter."""
        return next(p.mp_policy for p in self.group.fsdp_params if p.sharded_param is parameter)

    def dtypes(self, parameter: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """In which a parameter is gathered, and its gradient reduced: where the policy does not
        say, in that of the gather up to torch 2.14, since then in the parameter's own."""
        policy, stored = self.policy(parameter), parameter.dtype
        gathered = policy.param_dtype or stored
        of_gather = hasattr(self.group, "mp_policy")
        return gathered, policy.reduce_dtype or (gathered if of_gather else stored)

    def whole(self, parameter: Tensor | None) -> Tensor | None:
        """What the group gathers for a parameter: a leaf, whose gradient the group reduces."""
        held = self.group.fsdp_params
        gathered = (p.unsharded_param for p in held if p.sharded_param is parameter)
        return next(gathered, parameter)

    def kind(self, parameter: Tensor) -> Tensor | None:
        """The same, before a first gather too: of its placement, as its values may be gone."""
        if not all(hasattr(held, "_unsharded_param") for held in self.group.fsdp_params):
            self.module.unshard()
        return self.whole(parameter)


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters of one FSDP module: torch 2.11 has one at most, by another name."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def find_owner(parameter: Tensor) -> Owner | None:
    """None for what no `fully_shard` keeps."""
    return locate(parameter)[0]


def locate(parameter: Tensor) -> tuple[Owner | None, Tensor]:
    """Who shards a parameter, and the optimizer's parameter of what its module has after a
    forward."""
    if parameter in OWNERS:
        known: tuple[Owner, Tensor] = OWNERS[parameter]
        return known
    for owner, held in every_parameter():
        if any(vars(held).get(name) is parameter for name in SHARDED):
            OWNERS[parameter] = owner, held.sharded_param
            return locate(parameter)
    # Not remembered: `load_state_dict(assign=True)` gives an owner to a tensor that had none, and
    # wraps no module. Asking took 2 us where none is wrapped, 1 ms among 128 blocks of 12 tensors.
    return None, parameter


def with_rows(parameter: Tensor) -> Tensor:
    """The optimizer's parameter, of which this rank has its rows at any time, of one that its group
    has whole at the moment, as it has from the group's forward on where that group has other
    modules' parameters or is the root's."""
    owner, sharded = locate(parameter)
    if owner is None:
        whole = (x for _, x in every_parameter() if vars(x).get("_unsharded_param") is parameter)
        sharded = next((held.sharded_param for held in whole), parameter)
    return sharded


def every_parameter() -> Iterator[tuple[Owner, Any]]:
    """Of all modules that `fully_shard` was called on, FSDP2's record of each parameter."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None:
        return
    from torch.distributed import _composable_state

    for module in list(_composable_state._module_state_mapping):
        state = _composable_state._get_module_state(module)
        if isinstance(state, fsdp.FSDPState):
            for group in groups_of(state):
                for held in group.fsdp_params:
                    yield Owner(module, state, group), held


def keeps_alone(module: nn.Module, weight: Any, hooks: tuple[str, ...]) -> bool:
    """Whether a `fully_shard` of the module alone keeps all its parameters in one group, sharded
    just now, and no hook but that one's is in the module's dictionaries `hooks`."""
    owner = find_owner(weight)
    if owner is None or len(groups_of(owner.state)) > 1:
        return False
    # Those of a `fully_shard` of several modules are closures, and others.
    fsdp_hooks = (owner.state._pre_forward, owner.state._post_forward)
    hooks_there = [hook for name in hooks for hook in getattr(module, name).values()]
    return bool(hooks_there) and all(hook in fsdp_hooks for hook in hooks_there)


def divisors(owner: Owner) -> set[Any]:
    """What the groups of an owner's model divide the sum over their ranks by, None for the number
    of ranks; of those that have more than one rank."""
    groups = [g for state in owner.state._state_ctx.all_states for g in groups_of(state)]
    return {g.gradient_divide_factor for g in groups if g.mesh_info.mesh.size() > 1}


def never_gathered(group: Any) -> None:
    """Let a micro-batch end without a reduction though the group was never gathered, as where rows
    stay: up to torch 2.15 FSDP2 then reads gradients of `_unsharded_param`, which there is not, if
    a policy has a `reduce_dtype` (pytorch#194058)."""
    for held in group.fsdp_params:
        vars(held).setdefault(ACCUMULATE, partial(accumulate_if_gathered, held))


def accumulate_if_gathered(held: Any) -> None:
    if hasattr(held, "_unsharded_param"):
        getattr(type(held), ACCUMULATE)(held)


def call_with_head(
    owner: Owner,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    function: Callable[[Tensor, Tensor, Tensor | None], T],
    *,
    recompute: bool,
) -> T:
    """`function(hidden, weight, bias)` with the head whole, as if it were the module's forward.

    One all-gather, and one reduce-scatter in the backward. Gradients that exist after the forward
    need no values of the head in the backward, only its shape: unless they are a `recompute`, the
    module is not told that its parameters will be asked for again, and does not gather them.
    """
    results: list[T] = []

    def forward(hidden: Tensor) -> list[Tensor]:
        whole = owner.whole(weight)
        assert whole is not None
        results.append(function(hidden, whole, owner.whole(bias)))
        # Hooks go on these. What the module returns may be cast to the policy's output dtype, and
        # is not used: ours stay float32.
        return differentiable(results[0]) if recompute else []

    uses = owner.group._post_forward_indices
    used = len(uses)
    with with_attribute(owner.module, "forward", forward), without_styles(owner.module):
        owner.module(hidden)
    if not recompute:
        # Recorded as the last forward, it would be prefetched by the next group's backward.
        order = owner.group.comm_ctx.post_forward_order
        if len(uses) > used and order[-1] is owner.group:
            uses.pop()
            order.pop()
        for x in differentiable(results[0]):
            x.register_hook(lambda _: owner.state._register_root_post_backward_final_callback())
    return results[0]


@contextmanager
def without_styles(module: Any) -> Iterator[None]:
    """Without the hooks of tensor parallelism, `ColwiseParallel`'s or of a norm in the same group
    `SequenceParallel`'s: they place inputs and outputs of the module's own forward."""
    hooks = () if is_compiling() else (module._forward_pre_hooks, module._forward_hooks)
    before = [dict(x) for x in hooks]
    for kept, all_of in zip(hooks, before, strict=True):
        for key, hook in all_of.items():
            if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
                del kept[key]
    try:
        yield
    finally:
        for kept, all_of in zip(hooks, before, strict=True):
            kept.clear()  # in the order that they had
            kept.update(all_of)


def copies(owner: Owner, *parameters: Tensor | None) -> list[Tensor | None]:
    """Whole copies, whose gradients the group reduces at the end of the backward."""
    here = owner.group.is_unsharded
    owner.module.unshard()
    try:
        whole = [None if p is None else owner.whole(p) for p in parameters]
        cloned = [None if w is None else w.clone() for w in whole]
    finally:
        if not here:
            owner.module.reshard()
    for x in differentiable(tuple(cloned)):
        x.register_hook(lambda _: owner.state._register_root_post_backward_final_callback())
    return cloned


def check_copies(rows: bool, **head: Any) -> None:
    """Refuse what a user has gathered of FSDP2's parameters, `weight.full_tensor()`, where its
    gradient would not be what FSDP2 makes of it, and a shard, `weight.to_local()`, unless `rows`
    says that it is a part of the vocabulary. Unseen by a compiler."""
    if is_compiling() or not torch.is_grad_enabled():
        return
    for name, x in head.items():
        for node in _history(getattr(x, "grad_fn", None)):
            if type(node).__name__ != "_ToTorchTensorBackward":
                continue
            leaves = (getattr(leaf, "variable", None) for leaf in _history(node))
            owners = [find_owner(leaf) for leaf in leaves if leaf is not None]
            if not any(owners):
                _check_local(name, node)
            for owner in owners:
                if owner is not None and not _reduces(node, owner, rows):
                    divide, placed = owner.group.gradient_divide_factor, node.dtensor_spec
                    got = f"a copy with grad_placements={node.grad_placements}"
                    if any(p.is_shard() for p in placed.placements) and not rows:
                        got = f"a shard, {placed.placements} of {tuple(placed.shape)}"
                    raise ValueError(
                        f"`{name}` must be the parameter that `fully_shard` keeps, or a copy whose "
                        f"`grad_placements` reduce its gradient as FSDP2 does, to the "
                        f"{'mean' if divide is None else f'sum divided by {divide:g}'} over the "
                        f"ranks; got {got}. Pass the parameter itself, which is gathered once."
                    )


def _check_local(name: str, node: Any) -> None:
    """Refuse a local tensor of a DTensor that is sharded over one dimension of a mesh and whole
    over another, where tokens may differ, if nothing says what becomes of its gradient there."""
    spec = node.dtensor_spec
    cut = any(p.is_shard() for p in spec.placements)
    sizes = zip(spec.placements, spec.mesh.shape)
    copied = any(p.is_replicate() and ranks > 1 for p, ranks in sizes)
    said = node.grad_placements is not None or not (cut and copied)
    summed = summed_over_copies(spec.placements)
    PLACEMENTS.require("copied", said, name=name, placements=spec.placements, summed=summed)


def _history(node: Any) -> Iterator[Any]:
    """Nodes of an autograd graph, from one on; 1,000 at most, of a weight that a network makes."""
    nodes: list[Any] = [node]
    visited: set[Any] = set()
    while nodes and len(visited) < 1000:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            nodes += [before for before, _ in node.next_functions]


def _reduces(node: Any, owner: Owner, rows: bool) -> bool:
    """Whether the gradient of a DTensor's local tensor is reduced over the ranks of FSDP2, and to
    as much, where it had the whole of something. Of rows all tokens may be in it already."""
    mesh, group = node.dtensor_spec.mesh, owner.group
    names, over = group.mesh_info.mesh.mesh_dim_names, list(range(group.mesh_info.mesh.ndim))
    if names is not None:
        over = [k for k, name in enumerate(mesh.mesh_dim_names or ()) if name in names]
    over = [k for k in over if mesh.size(k) > 1]
    whole = [k for k in over if node.dtensor_spec.placements[k].is_replicate()]
    placements = node.grad_placements or node.dtensor_spec.placements
    how = [getattr(placements[k], "reduce_op", None) for k in whole]
    if not set(how) <= {"sum", "avg"}:
        return False
    scale = math.prod(mesh.size(k) for k, reduce in zip(whole, how, strict=True) if reduce == "avg")
    divide = group.gradient_divide_factor or group.mesh_info.mesh.size()
    return rows if len(whole) < len(over) else scale == divide


class FSDP2(NoWrapper):
    """FSDP2: `fully_shard`, of one dimension or with replicas."""

    reduced = False  # whether a micro-batch has come that reduces

    def __init__(self, model: Any, scaler: Any) -> None:
        super().__init__(model, scaler)
        modules = (m for m in model.modules() if is_a("torch.distributed.fsdp", "FSDPModule", m))
        # Several modules may share one.
        states = dict.fromkeys(module._get_fsdp_state() for module in modules)
        self.groups = groups = [group for state in states for group in groups_of(state)]
        # With `set_reshard_after_backward(False)` the model's parameters are whole by now.
        held = {
            id(x)
            for group in groups
            for p in group.fsdp_params
            for x in map(vars(p).get, (*SHARDED, "_unsharded_param"))
        }
        loose = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if loose:
            raise UnsupportedWrapperError(
                f"`model` must keep all its parameters in FSDP2; got {loose[0]!r} outside of it, "
                f"whose gradient is not reduced over the ranks. Call `fully_shard(model)` on the "
                f"root."
            )
        if any(group._all_reduce_hook is not None for group in groups):
            raise UnsupportedWrapperError(
                "`model` must reduce gradients in a way that can be read; got FSDP2 with an "
                "all-reduce hook, whose effect on the mean is unknown. Use a two-dimensional mesh "
                "for replicas."
            )
        meshes = {id(group.mesh_info.mesh): group.mesh_info.mesh for group in groups}
        sizes = {mesh.size() for mesh in meshes.values()}
        factors = {group.gradient_divide_factor for group in groups}
        if len(sizes) > 1 or len(factors) > 1:
            what = "meshes" if len(sizes) > 1 else "gradient divide factors"
            values = sorted(map(str, sizes if len(sizes) > 1 else factors))
            raise UnsupportedWrapperError(
                f"`model` must divide all gradients by the same number; got {what} that differ "
                f"between its modules: {', '.join(values)}. `set_gradient_divide_factor` is not "
                f"recursive: call it on every FSDP module, or on none."
            )
        (self.ranks,), (divide,) = sizes, factors
        mesh = next(iter(meshes.values()))
        if mesh.ndim == 1:
            self.group = mesh.get_group()
        elif mesh.size() == dist.get_world_size():
            self.group = dist.group.WORLD
        self.reduction = reduction_of("FSDP2", ranks=self.ranks, divide=divide)

    def parameters(self) -> list[Any]:
        # Not the model's: with `set_reshard_after_backward(False)` those are whole, without .grad.
        return [p.sharded_param for group in self.groups for p in group.fsdp_params]

    def leaves(self) -> list[Any]:
        return [whole for _, whole in self._whole() if whole.requires_grad]

    def _whole(self) -> list[tuple[Any, Any]]:
        """FSDP2's parameters that have been gathered once, with what was gathered."""
        held = [p for group in self.groups for p in group.fsdp_params]
        return [(p, p._unsharded_param) for p in held if hasattr(p, "_unsharded_param")]

    def slots(self) -> list[tuple[Any, str]]:
        # Those that have not been reduced yet, too: `zero_grad` does not see them.
        return [*super().slots(), *self._unreduced()]

    def _unreduced(self) -> list[tuple[Any, str]]:
        return [
            *((group, "_partial_reduce_output") for group in self.groups),
            *((p, PARTIAL) for group in self.groups for p in group.fsdp_params),
            # Up to torch 2.14: then it is the leaf's own, by a property of this name.
            *((p, ACCUMULATED) for p, _ in self._whole() if ACCUMULATED in vars(p)),
            *((whole, "grad") for _, whole in self._whole()),
        ]

    def micro_batch(self, *, last: bool) -> None:
        self.reduced = last
        self.model.set_requires_gradient_sync(last)

    def finish(self) -> None:
        super().finish()
        self.check_reduced()

    def check_reduced(self) -> None:
        """Refuse gradients that nobody has reduced, at the end of a window."""
        # What is gathered already can be used without the forward of its FSDP module, whose hooks
        # reduce: past it a gradient stays where it is. Which forwards have run does not tell, since
        # modules that are sharded one by one are right when they are called one by one.
        if self.reduced and any(getattr(*at, None) is not None for at in self._unreduced()):
            raise WindowStateError(
                "`window.backward` must come after a forward of each module that `fully_shard` was "
                "called on, which reduces its gradients; got gradients that are not reduced at the "
                "end of the window. Call the model that `TokenNormalizer` was given, not "
                "`.forward` or a module inside of it."
            )

    def restore(self) -> None:
        self.model.set_requires_gradient_sync(True)
