"""Where the head of a call is, in PyTorch: whole on this rank, gathered by the wrapper that has
sharded it, or as this rank's rows.

Shapes: V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from xentlib.arguments import Arguments
from xentlib.checks.call import check_reduction
from xentlib.checks.head import check_low_rank_route
from xentlib.checks.placement import PLACEMENTS
from xentlib.checks.shards import ROUTES, check_route
from xentlib.checks.validators import check_floating
from xentlib.head import LowRankHead
from xentlib.options import Gather
from xentlib.torch.array_spec import array_spec, dtype_name, is_dtensor, only_tensors
from xentlib.torch.head.modules import replaced, resolve_head, split_lora
from xentlib.torch.placement.rows import (
    by_rows,
    fsdp2_rows,
    ranks_of,
    shards_of,
    unpadded,
    zero3_rows,
)
from xentlib.torch.wrappers import is_loaded, kept_by_zero, split_by_auto_tp

if TYPE_CHECKING:
    from xentlib.torch.wrappers.fsdp2 import Owner

R = TypeVar("R")
# Routes that leave each rank's rows in place, even while FSDP has the head unsharded.
STAY = ("hidden", "stream")
AUTO_TP = "deepspeed.module_inject.layers"


class Placement(Protocol):
    """Calls a function of a call's `Arguments`, and of the `RowLayout` of its rows where these stay
    on their ranks, with the head as the function can multiply with it."""

    def run(self, function: Callable[..., R], call: Arguments) -> R: ...


class GatheredByFSDP2(NamedTuple):
    """Gathered by the hooks of its `fully_shard` for the length of a call."""

    owner: Owner
    recompute: bool

    def run(self, function: Callable[..., R], call: Arguments) -> R:
        from xentlib.torch.wrappers import fsdp2

        plain, lora = split_lora(call)

        def gathered(hidden: Tensor, whole: Tensor, bias: Tensor | None) -> R:
            weight: Any = whole
            if lora is not None:
                a: Any = self.owner.whole(lora.a)
                b: Any = self.owner.whole(lora.b)
                weight = replaced(lora, weight=whole, a=a, b=b)
            return function(replaced(call, hidden=hidden, weight=weight, bias=bias))

        arrays = (call.hidden, plain.weight, call.bias)
        return fsdp2.call_with_head(self.owner, *arrays, gathered, recompute=self.recompute)


class GatheredByZero3(NamedTuple):
    """Gathered by DeepSpeed for the length of a call."""

    parameters: list[Any]
    recompute: bool

    def run(self, function: Callable[..., R], call: Arguments) -> R:
        from xentlib.torch.wrappers import deepspeed

        return deepspeed.call_with_head(
            self.parameters, call.hidden, lambda: function(call), recompute=self.recompute
        )


def with_head(*, recompute: bool) -> Callable[[Callable[..., R]], Callable[[Arguments], R]]:
    """Have a function of `Arguments` called as the placement of its head asks for.

    `recompute`: its backward reads the head's values again, as that of a call with the option does.
    """

    def wrap(function: Callable[..., R]) -> Callable[[Arguments], R]:
        @wraps(function)
        def run(call: Arguments) -> R:
            call, placement = place_head(call, recompute or call.recompute)
            return function(call) if placement is None else placement.run(function, call)

        return run

    return wrap


def place_head(call: Arguments, recompute: bool) -> tuple[Arguments, Placement | None]:
    """The call with parameters in place of modules, and where its head is; None if no wrapper has
    sharded it: a vocabulary shard is whole to its rank."""
    check_reduction(call)
    plain, lora = split_lora(call)
    arrays = plain._asdict()
    if isinstance(plain.weight, (nn.Module, LowRankHead)):
        del arrays["weight"]
    only_tensors(**arrays)
    call = resolve_head(call)
    call = with_parameters(call, with_rows if call.gather in STAY else sharded)
    plain, lora = split_lora(call)
    if split_by_auto_tp(plain.weight):
        from xentlib.torch.wrappers import deepspeed

        parallel = call.vocab_parallel
        group = None if parallel is None else unpadded(parallel)[0]
        shard = deepspeed.auto_tp_shard(plain.weight, group)
        call = replaced(call, vocab_parallel=shard if parallel is None else parallel)
        plain, lora = split_lora(call)
    elif computed(plain.weight) and call.vocab_parallel is None and is_loaded(AUTO_TP):
        from xentlib.torch.wrappers import deepspeed

        deepspeed.refuse_copies(plain.weight)
    if (call.gather, call.tokens_parallel, call.tokens_per_rank) != ("head", None, None):
        check_route(call)
    adapters = {} if lora is None else {"a": lora.a, "b": lora.b}
    rows = call.vocab_parallel is not None
    check_copies(rows, weight=plain.weight, bias=plain.bias, **adapters)
    zero3 = kept_by_zero(plain.weight, plain.bias, *adapters.values())
    owner = owner_of(plain.weight)
    if call.gather == "auto":
        gather = choose(plain, lora, owner, recompute)
        call = replaced(call, gather=gather, tokens_per_rank=None)
    if lora is not None:
        check_low_rank_route(call, bool(zero3))
    if call.gather != "head":
        ROUTES.require("rows_alone", owner is not None or not rows, gather=call.gather)
        if zero3:
            return call, zero3_rows(call)
        if owner is None:
            ROUTES.refuse("whole", gather=call.gather)
        return call, fsdp2_rows(call, owner)
    if zero3:
        return call, GatheredByZero3(zero3, recompute)
    return call, None if owner is None else GatheredByFSDP2(owner, recompute)


def with_parameters(call: Arguments, of: Callable[[Any], Any]) -> Arguments:
    """With the parameters that `fully_shard` reduces gradients to, of what its modules have."""
    plain, lora = split_lora(call)
    weight, bias = of(plain.weight), of(plain.bias)
    if lora is not None:
        weight = replaced(lora, weight=weight, a=of(lora.a), b=of(lora.b))
    return replaced(call, weight=weight, bias=bias)


def sharded(parameter: Any) -> Any:
    if not is_dtensor(parameter):
        return parameter
    from xentlib.torch.wrappers import fsdp2

    return fsdp2.locate(parameter)[1]


def with_rows(parameter: Any) -> Any:
    """The same where its group may have it whole."""
    if not isinstance(parameter, nn.Parameter):
        return parameter
    from xentlib.torch.wrappers import fsdp2

    return fsdp2.with_rows(parameter)


def owner_of(weight: Any) -> Owner | None:
    """The `fully_shard` that shards a head, if one does."""
    if not is_dtensor(weight):
        return None
    from xentlib.torch.wrappers import fsdp2

    return fsdp2.find_owner(weight)


def computed(x: Any) -> bool:
    return getattr(x, "grad_fn", None) is not None


def behind_shards(weight: Any) -> bool:
    """Whether tensor parallelism has cut a head, or a module's, and FSDP2 its shards."""
    weight = sharded(getattr(weight, "weight", weight))
    owner = owner_of(weight)
    return owner is not None and shards_of(owner, weight) is not None


def check_copies(rows: bool, **head: Any) -> None:
    """Of FSDP2's parameters; only what was computed can be one."""
    if not any(map(computed, head.values())):
        return
    from xentlib.torch.wrappers import fsdp2

    fsdp2.check_copies(rows, **head)


def choose(
    call: Arguments, lora: LowRankHead[Any] | None, owner: Owner | None, recompute: bool
) -> Gather:
    """What `gather="auto"` stands for; the head of what no `fully_shard` shards."""
    from xentlib.plan.routes import choose_gather

    parts = (call.weight,) if lora is None else (call.weight, lora.a, lora.b)
    if owner is None or call.weight.ndim != 2 or not by_rows(owner, *parts):
        return "head"
    for name in ("hidden", "weight"):
        check_floating(name, array_spec(getattr(call, name)))
    (gathered, reduced), hidden = owner.dtypes(call.weight), call.hidden
    assert call.tokens_per_rank is not None
    (vocab_size, hidden_size), num_tokens = call.weight.shape, call.tokens_per_rank
    shards = shards_of(owner, call.weight)
    parallel = 1 if shards is None else dist.get_world_size(shards)
    if call.tokens_parallel is not None:  # a shard as a head with the tokens of all of its ranks
        vocab_size, num_tokens = -(-vocab_size // parallel), num_tokens * parallel
        parallel = 1
    return choose_gather(
        num_tokens,
        vocab_size,
        hidden_size,
        ranks_of(owner),
        dtype=dtype_name(hidden.dtype),
        head_dtype=dtype_name(gathered),
        reduce_dtype=dtype_name(reduced),
        param_dtype=dtype_name(call.weight.dtype),
        recompute=recompute,
        tensor_parallel=parallel,
        max_chunk_bytes=call.max_chunk_bytes,
        platform="cpu" if hidden.device.type == "cpu" else "gpu",
    )


@contextmanager
def gather_head(
    weight: Tensor, bias: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Gather a head that a wrapper has sharded, for the length of a block. PyTorch only.

        with gather_head(model.head.weight, model.head.bias) as (weight, bias):
            logits = F.linear(hidden, weight, bias)

    For code of one's own: `chunked_nll` and `chunked_logprobs` do as much themselves, without the
    copy. The block is given whole copies of sharded parameters, which are sharded again before it
    begins; a copy lives for as long as there is a reference to it, a backward after the block
    included. The gradient of a copy is reduced by the wrapper, as that of the parameter would be.
    Every rank must enter. One gather is all that is sent, apart from the wrapper's own reduction.

    Args:
        weight: [V, H] or [H, V], a parameter: plain, under DDP, sharded by FSDP2's `fully_shard` or
            by DeepSpeed ZeRO-3; a vocabulary shard that FSDP2 shards further is gathered to that
            vocabulary shard.
        bias: [V] or None; the parameter beside the weight.

    Yields:
        (weight, bias), whole, in the dtype that the wrapper computes in; unchanged if no wrapper
        has sharded them.

    Raises:
        ValueError: a DTensor that `fully_shard` has not made.

    Numerics: values are gathered as they are, or cast once where the wrapper has a policy that
    says so. Row A15 of the contract; D7 of the design.
    """
    weight, bias = sharded(weight), sharded(bias)
    if split_by_auto_tp(weight):
        from xentlib.torch.wrappers import deepspeed

        deepspeed.refuse_part(weight)
    heads, owner = kept_by_zero(weight, bias), owner_of(weight)
    if heads:
        from xentlib.torch.wrappers import deepspeed

        weight, bias = deepspeed.copies(heads, weight, bias)
    elif owner is not None:
        from xentlib.torch.wrappers import fsdp2

        whole, bias = fsdp2.copies(owner, weight, bias)
        assert whole is not None
        weight = whole
    elif is_dtensor(weight):
        PLACEMENTS.refuse("dtensor", name="weight", placements=tuple(weight.placements))
    yield weight, bias
