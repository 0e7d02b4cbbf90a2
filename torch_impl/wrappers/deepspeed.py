"""DeepSpeed: how ZeRO-3 gathers a head, how AutoTP splits one, and how an engine of ZeRO 0 to 3
reduces gradients.

Outside a gather, a ZeRO-3 parameter has no elements. This file relies on attributes of DeepSpeed
0.19.7 and 0.19.8 that are not public.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.accumulate import UnsupportedWrapperError, reduction_of
from xentlib.checks.shards import ROUTES, check_flat_rows
from xentlib.checks.validators import Refusals
from xentlib.shards import VocabShard, shard_of
from xentlib.torch.wrappers import differentiable, split_by_auto_tp, with_attribute
from xentlib.torch.wrappers.plain import NoWrapper, refuse_scaler

T = TypeVar("T")
AUTO_TP = Refusals(
    ValueError,
    width="`weight` must be whole, or split over its vocabulary; got {shape} of DeepSpeed AutoTP's "
    "{kind}. Set `vocab_parallel_lm_head`, or give the head a 'column' in `partition_config`.",
    ranks="`vocab_parallel` must be the ranks {ranks}, over which DeepSpeed AutoTP has split the "
    "head; got {came}. Leave it out: the head says so itself.",
    copy="`weight` must be the parameter that DeepSpeed AutoTP has split, which says over which "
    "ranks; got what was computed from it. Pass the layer, or name the ranks as `vocab_parallel`.",
    gather="`gather_head` must be given a head that is whole, or sharded by FSDP2 or ZeRO-3; got "
    "one that DeepSpeed AutoTP has split over {ranks} ranks. Pass it to `chunked_nll`, which "
    "computes with this rank's rows.",
)


def keeps_alone(module: torch.nn.Module, hooks: tuple[str, ...]) -> bool:
    """Whether no hook but ZeRO-3's is in the module's dictionaries `hooks`."""
    hooks_there = [hook for name in hooks for hook in getattr(module, name).values()]
    origins = [getattr(getattr(hook, "func", hook), "__module__", "") for hook in hooks_there]
    return all(x.startswith("deepspeed.") for x in origins)


def auto_tp_shard(weight: Any, group: dist.ProcessGroup | None) -> VocabShard:
    """This rank's rows of a head that AutoTP has split over its vocabulary; `group`: the ranks that
    the call names, if it does."""
    layer = weight.gather_params.__self__
    kind = type(layer).__name__
    # Other layers are split over their width, or have parts of several matrices.
    by_rows = kind in ("LinearLayer", "VocabParallelLinear")
    shape = list(getattr(weight, "ds_shape", weight.shape))
    AUTO_TP.require("width", by_rows, kind=kind, shape=shape)
    ranks = dist.get_process_group_ranks(layer.mp_group)
    of_group = ranks if group is None else dist.get_process_group_ranks(group)
    AUTO_TP.require("ranks", ranks == of_group, ranks=ranks, came=of_group)
    sizes = tuple(layer._partition_sizes)
    shard = shard_of(sizes, layer.tp_index)
    return replace(shard, over=layer.mp_group, largest=max(sizes))


def refuse_copies(weight: Any) -> None:
    """Of a part of a head, cast or transposed: nothing on it says that it is one."""
    node = None if torch.compiler.is_compiling() else weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = next((before for before, _ in node.next_functions if before is not None), None)
    AUTO_TP.require("copy", node is None or not split_by_auto_tp(node.variable))


def refuse_part(weight: Any) -> None:
    """In place of a copy for code of one's own."""
    ranks = weight.gather_params.__self__.tp_world_size
    AUTO_TP.refuse("gather", ranks=ranks)


def without_elements(parameters: list[Any]) -> list[Any]:
    return [p for p in parameters if p.ds_status.name != "AVAILABLE"]


def call_with_head(
    heads: list[Any], hidden: Tensor, function: Callable[[], T], *, recompute: bool
) -> T:
    """`function()` with the parameters gathered, once, where they are sharded.

    Their gradients are reduced by DeepSpeed's own hooks, which want a parameter of full shape.
    Unless the backward is a `recompute` it has no use for values: one number, expanded, stands for
    them.
    """
    gathered = without_elements(heads)
    # Activation checkpointing calls this again in the backward: what stands in must stay.
    standing = [p for p in gathered if p.shape == p.ds_shape]
    _gather(gathered)
    try:
        result = function()
    finally:
        _partition(gathered)
        _stand_in(standing)
    # Gradients of parameters have been accumulated by the time that hidden's own is there.
    until = hidden if hidden.requires_grad else None
    _lend(heads, differentiable(result), until, recompute=recompute)
    return result


def _lend(
    heads: list[Any], outputs: list[Tensor], until: Tensor | None, *, recompute: bool
) -> None:
    """Parameters for the backward of the outputs: until the gradient of `until` is there, or to its
    end. Of their values if it is a `recompute`, else of their shape."""
    before, after = (_gather, _partition) if recompute else (_stand_in, _empty)
    borrowed: list[Any] = []  # what is sharded when the backward comes: DeepSpeed may gather too

    def prepare(_: Tensor) -> None:
        missing = without_elements(heads)
        before(missing)
        borrowed.extend(missing)
        if until is None:
            torch.autograd.Variable._execution_engine.queue_callback(give_back)

    def give_back() -> None:
        after(borrowed)
        borrowed.clear()

    for x in outputs:
        x.register_hook(prepare)
    if outputs and until is not None:
        until.register_hook(lambda _: give_back())


def copies(heads: list[Any], *parameters: Any) -> list[Any]:
    """Whole copies, whose gradients are reduced by DeepSpeed's own hooks."""
    gathered = without_elements(heads)
    _gather(gathered)
    try:
        cloned = [None if p is None else p.clone() for p in parameters]
    finally:
        _partition(gathered)

    _lend(heads, differentiable(tuple(cloned)), None, recompute=False)
    return cloned


def _gather(parameters: list[Any]) -> None:
    missing = without_elements(parameters)
    if missing:
        missing[0].all_gather_coalesced(missing).wait()  # one for weight and bias


def _partition(parameters: list[Any]) -> None:
    here = [p for p in parameters if p.ds_status.name == "AVAILABLE"]
    if here:
        here[0].partition(param_list=here, has_been_updated=False)


def _stand_in(parameters: list[Any]) -> None:
    for p in without_elements(parameters):
        p.data = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.ds_shape)


def _empty(parameters: list[Any]) -> None:
    for p in without_elements(parameters):
        p.data = torch.empty(0, dtype=p.dtype, device=p.device)


def rows_of(
    weight: Any, bias: Any, layout: str, gather: str
) -> tuple[Tensor, Tensor | None, dist.ProcessGroup]:
    """This rank's rows, whose gradients the engine's step finds where it looks for its own, and the
    ranks that have the others.

    A parameter is cut in the order of its memory, so that a rank has whole rows if their number is
    a multiple of the ranks.
    """
    parameters = [weight] if bias is None else [weight, bias]
    unproven = _unproven(parameters)
    ROUTES.require("engine", not unproven, features=", ".join(unproven), gather=gather)
    group, shape = weight.ds_process_group, tuple(weight.ds_shape)
    ranks = dist.get_world_size(group)
    check_flat_rows(gather, shape, None if bias is None else tuple(bias.ds_shape), layout, ranks)
    # What persists is whole from the first step on.
    whole = weight.ds_persist or weight.ds_status.name == "AVAILABLE"
    if whole and not _tied(weight):
        ROUTES.refuse("gathered", gather=gather)
    rows = [_rows(p, dist.get_rank(group)) for p in parameters]
    return rows[0], rows[1] if len(rows) > 1 else None, group


def _unproven(parameters: list[Any]) -> list[str]:
    """What of an engine's set-up keeps rows, or their gradient, elsewhere or in another scale."""
    if not all(hasattr(p, "ds_status") for p in parameters):
        return ["a weight or a bias that it does not keep"]
    optimizer = getattr(parameters[0], "_z3_optimizer", None)
    if optimizer is None:
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        return ["no optimizer"] if trained else []
    offload = optimizer.parameter_offload

    def has(*names: str) -> bool:
        return any(getattr(optimizer, name, None) for name in names)

    groups = (optimizer.dp_process_group, *(p.ds_process_group for p in parameters))
    ranks = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    dtypes = [p.ds_tensor.dtype for p in parameters]
    gathered = [getattr(p, "comm_dtype", p.ds_tensor.dtype) for p in parameters]
    scales = has("dynamic_loss_scale", "custom_loss_scaler", "torch_autocast_gradscaler")
    features = {
        "fp16, or a loss scale that moves": scales or dtypes[0] == torch.float16,
        "parameters or optimizer states that are offloaded": has(
            "offload_optimizer", "offload_param", "offloaded_states", "params_in_nvme_and_cpu"
        ),
        "ZeRO++ (hpZ, quantised weights or gradients)": has("all2all_process_group")
        or optimizer.zero_hpz_partition_size > 1
        or any(p.ds_secondary_tensor is not None for p in parameters)
        or offload.zero_quantized_weights
        or offload.zero_quantized_nontrainable_weights,
        "`torch_autocast`, which gathers in another dtype": gathered != dtypes,
        "sequences over ranks": optimizer.sequence_parallel_size > 1,
        "a model over ranks": optimizer.model_parallel_group is not None,
        "experts over ranks": len(ranks) > 1,
        "`gradient_predivide_factor`": optimizer.gradient_predivide_factor != 1.0,
        "`coalesce_grad_reduction`": has("_coalesce_grad_reduction"),
        "a DeepSpeed of another version": not hasattr(optimizer, "_offload_boundary_param_ids"),
        "DeepCompile": not optimizer.ipg_buckets,
        "a leaf module": any(hasattr(p, "ds_z3_leaf_module") for p in parameters),
        "Muon": has("use_muon"),
        "ZenFlow": has("zenflow"),
        f"a {type(optimizer).__name__}": type(optimizer).__name__
        != "DeepSpeedZeroOptimizer_Stage3",
    }
    return [name for name, here in features.items() if here]


def _tied(parameter: Any) -> bool:
    """Whether several modules have it: one that has run may have left it whole."""
    optimizer = getattr(parameter, "_z3_optimizer", None)
    modules = [] if optimizer is None else optimizer.module.modules()
    return sum(p is parameter for m in modules for p in m._parameters.values()) > 1


def _rows(parameter: Any, rank: int) -> Tensor:
    """A leaf, whose gradient is added to what the step takes once the backward is through.

    The engine never clears a parameter's piece of the gradient: the first micro-batch of a window
    overwrites it with what is reduced, at the end of the backward at the latest, the others add to
    it. So what is not reduced yet is reduced first. Then rows are added to a piece that the window
    has written, and overwrite one that it has not.
    """
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    piece = parameter.ds_tensor.detach()
    if parameter.ds_status.name == "AVAILABLE":  # the user may have changed it in a gather
        count = piece.numel()
        piece = parameter.detach().reshape(-1)[rank * count : (rank + 1) * count].clone()
    rows: Tensor = piece.view(-1, *parameter.ds_shape[1:])
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return rows
    optimizer = parameter._z3_optimizer
    recomputed = torch._C._current_graph_task_id() != -1  # inside of a backward
    begins = optimizer.micro_step_id == 0 and not optimizer._epilogue_ran_this_backward
    if begins and not recomputed:  # after `zero_grad`, which leaves the record as it is
        _written(optimizer).discard(parameter.ds_id)

    def arrive(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if recomputed:  # an outer backward may still reduce the parameter's own gradient
            raise RuntimeError(
                "`gather` must be 'head' inside of `torch.utils.checkpoint` with "
                "`use_reentrant=True` under ZeRO-3, which would overwrite the rows' gradient; got "
                "another route. Pass `use_reentrant=False`."
            )

        def add() -> None:
            _reduce(optimizer)
            written, added = _written(optimizer), gradient.view(-1)
            if parameter.ds_id in written:
                added = safe_get_local_grad(parameter) + added
            safe_set_local_grad(parameter, added)
            written.add(parameter.ds_id)

        torch.autograd.Variable._execution_engine.queue_callback(add)

    rows.requires_grad_().register_post_accumulate_grad_hook(arrive)
    return rows


def _reduce(optimizer: Any) -> None:
    """What it has in its buckets, as it does itself when a backward is through."""
    optimizer.independent_gradient_partition_epilogue()


def _written(optimizer: Any) -> Any:
    """Numbers of the parameters whose piece of the gradient has been written since the last step:
    a record of DeepSpeed's, which it reads itself under offload alone."""
    return optimizer._offload_boundary_param_ids


class DeepSpeed(NoWrapper):
    """DeepSpeed, ZeRO 0 to 3."""

    def __init__(self, engine: Any, scaler: Any, scale_wrt_gas: bool) -> None:
        super().__init__(engine, scaler)
        refuse_scaler(scaler, "DeepSpeed, which")
        self.scale_wrt_gas = scale_wrt_gas
        self.lent: ExitStack | None = None  # gives the engine back what it had before a window
        if engine.sequence_parallel_size > 1:
            raise UnsupportedWrapperError(
                f"`model` must have whole sequences on each rank; got DeepSpeed with sequences "
                f"over {engine.sequence_parallel_size} ranks, which its stages divide differently. "
                f"Count and divide yourself: `chunked_nll(..., denominator=)`."
            )
        self.ranks, self.group = engine.dp_world_size, engine.data_parallel_group
        refusal = ""
        if type(engine.optimizer).__name__ == "BF16_Optimizer":
            refusal = (
                "ZeRO-1 in bf16 steps on a copy of the gradients, which scaling does not reach"
            )
        elif engine.fp16_enabled():
            refusal = "in fp16 the loss scale is DeepSpeed's own, and moves"
        self.reduction = reduction_of(
            "DeepSpeed",
            ranks=self.ranks,
            steps=engine.gradient_accumulation_steps() if scale_wrt_gas else 1,
            sums=not engine.gradient_average,
            refusal=refusal,
        )

    def micro_batch(self, *, last: bool) -> None:
        if self.lent is None:
            self.lent = ExitStack()
            boundary = "_is_gradient_accumulation_boundary"
            self.lent.callback(setattr, self.model, boundary, getattr(self.model, boundary))
        self.model.set_gradient_accumulation_boundary(last)
        # Of ZeRO-3 the engine's forward begins each backward's bookkeeping; called without it, the
        # gradient was 0.93 off. ZeRO 0 to 2 are right without.
        if self.model.zero_optimization_partition_weights():
            self.await_forward()

    def gradients(self) -> list[tuple[Any, str, Tensor]]:
        # ZeRO keeps them in its own buffers, and scales them by its loss scale alone.
        return [] if hasattr(self.model.optimizer, "loss_scale") else super().gradients()

    def refusal(self) -> str:
        return self.reduction.refusal

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=self.scale_wrt_gas)

    def scale_gradients(self, factor: Tensor) -> None:
        optimizer = self.model.optimizer
        if not hasattr(optimizer, "loss_scale"):
            super().scale_gradients(factor)
            return
        number = float(factor)
        if number and self.lent is not None:  # else no token, and gradients of 0
            # The optimizer divides by its loss scale in `step`.
            self.lent.callback(setattr, optimizer, "loss_scale", optimizer.loss_scale)
            optimizer.loss_scale /= number

    def finish(self) -> None:
        """`engine.step()` comes next and is the window's; after it all is as it was."""
        engine = self.model
        if self.lent is None:  # no micro-batch
            return
        engine.set_gradient_accumulation_boundary(True)
        step = engine.step

        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self.settle()

        self.lent.enter_context(with_attribute(engine, "step", once))
        self.unstepped = True

    def settle(self) -> None:
        self.forget_forward()
        lent, self.lent, self.unstepped = self.lent, None, False
        if lent is not None:
            lent.close()

    restore = settle

    def zero_gradients(self) -> None:
        optimizer = self.model.optimizer
        optimizer.zero_grad()
        partitioned = getattr(optimizer, "partition_gradients", False)
        if partitioned and hasattr(optimizer, "all_grad_tensors"):
            # ZeRO-2 keeps what it has not reduced yet beside the parameters.
            optimizer.all_grad_tensors.clear()
            optimizer.averaged_gradients.clear()
            optimizer.micro_step_id = -1
