"""torchtitan: its loss without logits, wherever the head is kept.

Shapes: B rows, L tokens of a row, H hidden width, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentlib.arguments import SCALARS
from xentlib.checks.head import check_head_options
from xentlib.checks.validators import check_flag
from xentlib.options import ROUTE_OPTIONS
from xentlib.torch.array_spec import is_dtensor
from xentlib.torch.head.lazy_logits import LazyLogits
from xentlib.torch.head.modules import parameters_of
from xentlib.torch.placement.head import owner_of, sharded
from xentlib.torch.placement.rows import chunked, same_tokens, shards_of, unpadded
from xentlib.torch.wrappers.fsdp2 import Owner, divisors

__all__ = ["HeadLoss", "loss_config"]

OPTIONS = (
    *("compute_dtype", "max_chunk_bytes", "logit_scale", "ignore_index", "vocab_parallel"),
    *("reduce_hidden_grad", "recompute", *ROUTE_OPTIONS, *SCALARS["chunked_nll"]),
)
UNUSED = frozenset(["positions"])  # what torchtitan's own cross-entropy is given and ignores


class HeadLoss:
    """A loss of the hidden states and the head, with the signature of torchtitan's losses.

        loss_fn = HeadLoss()
        loss_fn.set_lm_head(model.lm_head)
        loss, _ = loss_fn(hidden, labels, global_valid_tokens)
        loss.backward()

        loss = sum over valid tokens of nll / global_valid_tokens

    The labels are those of the columns they stand in, shifted by torchtitan's data loader. A head
    that is sharded over the vocabulary, by `ColwiseParallel` or by torchtitan's own plans, is found
    out from its DTensor, under FSDP2 too, and its ranks are the `vocab_parallel` of `chunked_nll`.
    Of hidden states that are a DTensor, of sequences that are spread over these ranks, each has its
    own tokens: they are the `tokens_parallel`, and the loss that is returned is the sum of theirs.
    Ranks of data parallelism are not divided by: their gradients are to be summed, so call
    `set_gradient_divide_factor(1.0)` on each FSDP module, as torchtitan does. Several ranks on
    which nothing is known to sum them are refused.

    Args:
        summed: say that your own code sums the gradients over the ranks, or that nothing is to be
            summed, as all ranks have the same tokens.
        options: those of `chunked_nll`: `label_smoothing`, `z_loss`, `compute_dtype`,
            `max_chunk_bytes`, `recompute`, `softcap`, `logit_scale`, `ignore_index`; `gather` and
            `tokens_per_rank`, what travels of a head that FSDP2 shards, with a mesh of nodes as
            `tokens_parallel`; `vocab_parallel` and `reduce_hidden_grad` for shards that are plain
            tensors, or whose region before the head adds up gradients.

    Raises:
        TypeError: an option that it does not have, or a `summed` that is no bool.

    Numerics: those of `chunked_nll`, of float32 logits, where torchtitan's are rounded to the dtype
    of the model first.
    """

    def __init__(self, *, summed: bool = False, **options: Any) -> None:
        check_head_options(options, OPTIONS)
        check_flag("summed", summed)
        self.summed = summed
        self.options = options
        self.lm_head: nn.Module | None = None
        self.owner: Owner | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """The model's head, after it was parallelised; the last pipeline stage's."""
        weight, _ = weight_of(lm_head)  # or the reason why not
        self.lm_head = lm_head
        self.owner = owner_of(weight)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | float | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and no metrics.

        Args:
            pred: [B, L, H] hidden states after the last norm; a tensor, or a DTensor on the mesh of
                the head's shards.
            labels: [B, L] with -100 on tokens to leave out.
            global_valid_tokens: 0-d, of all ranks and micro-batches of the step; None for a sum.

        Raises:
            ValueError: no head, logits for hidden states, a DTensor on more than one mesh axis,
                FSDP2 that divides gradients, or several ranks without FSDP2, a pipeline or shards
                of the vocabulary that account for them.
            TypeError: another input of the loss, which would have no effect.
        """
        if self.lm_head is None:
            raise ValueError(
                "`HeadLoss` must know the head; got a call before `set_lm_head`. Call "
                "`loss_fn.set_lm_head(model.lm_head)` once the model is parallelised."
            )
        unknown = sorted(set(loss_inputs) - UNUSED)
        if unknown:
            raise TypeError(
                f"`HeadLoss` must be given nothing but hidden states, labels and the number of "
                f"tokens; got {unknown[0]!r}, which would have no effect. Leave it out, or keep "
                f"torchtitan's loss."
            )
        weight, bias = weight_of(self.lm_head)
        if pred.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"`pred` must be hidden states (..., {weight.shape[-1]}), before the head; got "
                f"{tuple(pred.shape)}. Set `model._skip_lm_head = True`, or let the model return "
                f"what its last norm returns."
            )
        # After the model's forward FSDP2 may have left the head whole, which has no owner.
        self.owner = owner_of(weight) or self.owner
        check_summed(self.owner)  # before anything is gathered
        options = {"vocab_parallel": vocab_ranks(weight), **self.options}
        spread, hidden = None, pred
        if is_dtensor(pred):
            spread, hidden, labels = own_tokens(pred, labels, options)
        if self.owner is None and not self.summed:
            check_alone(options["vocab_parallel"] or getattr(pred, "device_mesh", None))
        if global_valid_tokens is None:
            options["reduction"] = "sum"
        else:
            options["denominator"] = global_valid_tokens
        loss = LazyLogits(hidden, (weight, bias), options).nll(labels).loss
        return loss if spread is None else SumOverRanks.apply(loss, spread), {}  # type: ignore[no-untyped-call]


def weight_of(head: Any) -> tuple[Tensor, Tensor | None]:
    """Of a linear layer; torchtitan gives one a forward that places its inputs and outputs."""
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"`lm_head` must be the head as a module; got a {type(head).__name__}. Pass "
            f"`model.lm_head`, on which wrappers keep the parameters."
        )
    placed = getattr(vars(head).get("forward"), "__module__", "").startswith("torchtitan.")
    if placed and isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head.weight, head.bias
    weight, bias, lora = parameters_of(head)
    if lora is not None:
        raise TypeError(
            f"`lm_head` must be a weight and a bias; got a {type(head).__name__} with adapters. "
            f"Leave the head out of the adapter's `target_modules`."
        )
    return weight, bias


def vocab_ranks(weight: Any) -> Any:
    """The mesh or the group that a head's rows are spread over, FSDP2's own left out; or None."""
    owner = owner_of(weight)
    if owner is not None:
        return shards_of(owner, sharded(weight))
    return weight.device_mesh if is_dtensor(weight) else None


def check_summed(owner: Owner | None) -> None:
    factors = set() if owner is None else divisors(owner) - {1.0}
    if factors and torch.is_grad_enabled():
        by = "the number of ranks" if None in factors else f"{factors.pop():g}"
        raise ValueError(
            f"`HeadLoss` must have its gradients summed over the ranks, as it divides by the "
            f"tokens of all of them; got FSDP2 that divides by {by}. Call "
            f"`set_gradient_divide_factor(1.0)` on every FSDP module, as it is not recursive."
        )


def check_alone(parallel: Any) -> None:
    """Refuse ranks whose gradients nothing is known to sum."""
    if not (torch.is_grad_enabled() and dist.is_available() and dist.is_initialized()):
        return
    # Ranks that share the vocabulary have the same tokens; of a pipeline's one has the loss.
    together = 1 if parallel is None else getattr(parallel, "over", parallel).size()
    ranks = dist.get_world_size()
    if ranks > together * pipeline_ranks():
        raise ValueError(
            f"`HeadLoss` must have its gradients summed over the ranks, as it divides by the "
            f"tokens of all of them; got a head that no `fully_shard` keeps, on {ranks} ranks: "
            f"DDP takes the mean, and without a wrapper nothing is reduced. Use `fully_shard`, or "
            f"pass `summed=True` and sum them yourself, under DDP by multiplying the loss by its "
            f"ranks."
        )


def pipeline_ranks() -> int:
    """Of the pipeline whose schedule is calling, 1 without; a head does not know its stage."""
    name = "torch.distributed.pipelining.schedules"
    frame: Any = sys._getframe() if name in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == name and "self" in frame.f_locals:
            schedule = frame.f_locals["self"]
            stages = getattr(schedule, "_stages", None) or [schedule._stage]
            ranks: int = stages[0].group_size
            return ranks
        frame = frame.f_back
    return 1


def own_tokens(pred: Any, labels: Any, options: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
    """Hidden states that are a DTensor as the loss takes them, and their labels: with the ranks
    that a sequence is spread over, where the head's rows are, this rank's own, which `options` are
    made to say; else those of all, whose gradient is the rank's slice of the whole one."""
    from torch.distributed.tensor import Replicate

    if pred.device_mesh.ndim != 1:
        raise ValueError(
            f"`pred` must be a plain tensor, or a DTensor on the mesh of the head's shards alone; "
            f"got one with placements {pred.placements}. Use torchtitan's `spmd_backend` "
            f"'spmd_types' or 'partial_dtensor'."
        )
    placed, group = pred.placements[0], pred.device_mesh.get_group()
    # Rows that pass by meet the tokens of one rank.
    together = options["vocab_parallel"] is not None and options.get("gather") != "stream"
    if not (placed.is_shard() and together) or placed.dim % pred.ndim == pred.ndim - 1:
        return None, pred.redistribute(placements=[Replicate()]).to_local(), labels
    same_tokens(unpadded(options["vocab_parallel"])[0], group)
    options.pop("reduce_hidden_grad", None)  # of this rank's own tokens
    options["tokens_parallel"] = group
    sizes, rank = chunked(pred.shape[placed.dim], group.size()), group.rank()
    labels = labels.narrow(placed.dim, sum(sizes[:rank]), sizes[rank])
    return group, pred.to_local(), labels


class SumOverRanks(torch.autograd.Function):
    """The same number on every rank of a group, of whose ranks each has a part, with a gradient of
    its own part: the gradient of a sum that all of them differentiate."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def loss_config(
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    compute_dtype: str | None = None,
    max_chunk_bytes: int | None = None,
    recompute: bool = False,
    gather: str = "head",
    tokens_per_rank: int | None = None,
) -> Any:
    """What builds `HeadLoss` in torchtitan: its trainer's `loss`.

        config = llama3_debugmodel()
        config.loss = loss_config()

    torchtitan's trainer then skips the head in the model's forward and hands it to the loss, as for
    its own chunked loss: on the last pipeline stage, in validation, on any mesh. The fields can be
    set on its command line, `--loss.z_loss 1e-4`.

    Args:
        label_smoothing: as in `chunked_nll`, like the others.
        z_loss: factor of the mean of lse^2.
        compute_dtype: "float64" for the audit mode.
        max_chunk_bytes: budget of the logits of one chunk.
        recompute: whether the backward computes the logits again, for less memory.
        gather: what travels of a head that FSDP2 shards.
        tokens_per_rank: with `gather="auto"`.

    Returns:
        A `BaseLoss.Config` of torchtitan.

    Raises:
        ImportError: no torchtitan, or one without `ChunkedLossWrapper` (it came with 0.3).
    """
    return loss_class().Config(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        compute_dtype=compute_dtype,
        max_chunk_bytes=max_chunk_bytes,
        recompute=recompute,
        gather=gather,
        tokens_per_rank=tokens_per_rank,
    )


@cache
def loss_class() -> Any:
    """`HeadLoss` as a component of torchtitan."""
    try:
        theirs: Any = import_module("torchtitan.components.loss")
        base = theirs.ChunkedLossWrapper
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "`loss_config` must find `ChunkedLossWrapper` of torchtitan 0.3 or newer; got none. "
            "Run: pip install 'torchtitan>=0.3'"
        ) from error
    spmd: Any = import_module("spmd_types")

    @dataclass(kw_only=True, slots=True)
    class Config(base.Config):  # type: ignore[misc, name-defined]
        num_chunks: int = 1  # `max_chunk_bytes` decides
        label_smoothing: float = 0.0
        z_loss: float = 0.0
        compute_dtype: str | None = None
        max_chunk_bytes: int | None = None
        recompute: bool = False
        gather: str = "head"
        tokens_per_rank: int | None = None

    class ChunkedNLL(HeadLoss, base):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            # Nothing to compile: the operator's own kernels are what runs.
            if config.num_chunks != 1 or type(config.loss_fn) is not theirs.CrossEntropyLoss.Config:
                raise ValueError(
                    f"`loss` must be cross-entropy whose chunks `max_chunk_bytes` sizes; got "
                    f"num_chunks={config.num_chunks} and {type(config.loss_fn).__qualname__}. "
                    f"Leave both out, or keep torchtitan's `ChunkedLossWrapper`."
                )
            # torchtitan divides nowhere: its trainer switches that off for all that it wraps.
            options = {name: getattr(config, name) for name in signature(loss_config).parameters}
            HeadLoss.__init__(self, summed=True, **options)

        def __call__(self, *arrays: Any, **loss_inputs: Any) -> Any:
            checking = spmd.is_type_checking()
            self.options = {**local_shards(), **self.options}
            with spmd.no_typecheck():
                loss, metrics = super().__call__(*arrays, **loss_inputs)
                if checking:
                    spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
            return loss, metrics

    ChunkedNLL.Config = Config
    Config._owner = ChunkedNLL
    return ChunkedNLL


def local_shards() -> dict[str, Any]:
    """Under torchtitan's `spmd_types`, where rows of the head are plain tensors: their ranks, and
    that its region before the head adds up the gradients of the hidden states."""
    place: Any = sys.modules["torchtitan.distributed.spmd_types"]
    if place.spmd_mesh_size("tp") == 1:
        return {}
    group = place.current_spmd_mesh().get_group("tp")
    return {"vocab_parallel": group, "reduce_hidden_grad": False}
