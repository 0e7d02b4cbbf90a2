"""The head of a call, in PyTorch: a tensor, or the arrays that a module multiplies with; one that a
wrapper has sharded is gathered, for a call or for a block of code.

Shapes: V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from xentlib.arguments import Arguments
from xentlib.checks.lora import check_base, check_low_rank_route
from xentlib.checks.module import check_beside_module, refuse_module
from xentlib.checks.placement import refuse_dtensor, refuse_nodes
from xentlib.checks.shards import check_route, refuse_routed
from xentlib.checks.validators import check_floating
from xentlib.lora import LowRankHead
from xentlib.options import Gather
from xentlib.torch.array_spec import array_spec, dtype_name, is_dtensor, only_tensors
from xentlib.torch.shards import LocalHead, resident
from xentlib.torch.wrappers import is_a, is_loaded, keeps_forward, kept_by_zero

if TYPE_CHECKING:
    from xentlib.torch.wrappers.fsdp2 import Owner


R = TypeVar("R")


def with_head(*, recompute: bool) -> Callable[[Callable[..., R]], Callable[[Arguments], R]]:
    """For a function of a call and of where its rows belong: a head that a wrapper has sharded is
    gathered, or by another route the function has this rank's rows of it.

    `recompute`: its backward reads the head's values again.
    """

    def wrap(function: Callable[..., R]) -> Callable[[Arguments], R]:
        @wraps(function)
        def call(given: Arguments) -> R:
            named = given._asdict()
            low = low_rank_of(given.weight)
            if low is not None:
                named["weight"] = low.weight
            if isinstance(named["weight"], (nn.Module, LowRankHead)):
                del named["weight"]
            only_tensors(**named)
            given = at_home(head_of(given))
            if (given.gather, given.tokens_parallel, given.tokens_per_rank) != ("head", None, None):
                check_route(given)
            plain, low = unpacked(given)
            weight = plain.weight
            more = {} if low is None else {"a": low.a, "b": low.b}
            rows = given.vocab_parallel is not None
            check_copies(rows, weight=weight, bias=plain.bias, **more)
            heads = kept_by_zero(weight, given.bias, *more.values())
            if given.gather == "auto":
                given = given._replace(gather=chosen(plain, low, recompute), tokens_per_rank=None)
            if low is not None:
                check_low_rank_route(given, bool(heads))
            if given.gather != "head":
                return by_route(given, rows_of(given, heads), function)
            if heads:
                from xentlib.torch.wrappers import deepspeed

                return deepspeed.call_with_head(
                    heads, given.hidden, lambda: function(given), recompute=recompute
                )
            owner = owner_of(weight)
            if owner is None:
                return function(given)
            from xentlib.torch.wrappers import fsdp2

            def gathered(hidden: Tensor, whole: Tensor, bias: Tensor | None) -> R:
                head = with_weight(given.weight, whole, owner.whole)
                return function(given._replace(hidden=hidden, weight=head, bias=bias))

            return fsdp2.call_with_head(
                owner, given.hidden, weight, given.bias, gathered, recompute=recompute
            )

        return call

    return wrap


def at_home(given: Arguments) -> Arguments:
    """With the parameters that `fully_shard` reduces gradients to, of what its modules have."""
    plain, low = unpacked(given)
    weight, bias = sharded(plain.weight), sharded(plain.bias)
    if low is not None:
        weight = low._replace(weight=weight, a=sharded(low.a), b=sharded(low.b))
    return given._replace(weight=weight, bias=bias)


def sharded(parameter: Any) -> Any:
    if not is_dtensor(parameter):
        return parameter
    from xentlib.torch.wrappers import fsdp2

    return fsdp2.sharded(parameter)


def check_copies(rows: bool, **head: Any) -> None:
    """Of FSDP2's parameters; only what was computed can be one."""
    if all(getattr(x, "grad_fn", None) is None for x in head.values()):
        return
    from xentlib.torch.wrappers import fsdp2

    fsdp2.check_copies(rows, **head)


def chosen(given: Arguments, low: LowRankHead[Any] | None, recompute: bool) -> Gather:
    """What `gather="auto"` stands for; the head of what no `fully_shard` shards."""
    from xentlib.plan.routes import choose_gather
    from xentlib.torch.wrappers import fsdp2_rows

    owner = owner_of(given.weight)
    parts = (given.weight,) if low is None else (given.weight, low.a, low.b)
    if owner is None or given.weight.ndim != 2 or not fsdp2_rows.by_rows(owner, *parts):
        return "head"
    for name in ("hidden", "weight"):
        check_floating(name, array_spec(getattr(given, name)))
    policy, hidden = owner.group.mp_policy, given.hidden
    gathered = policy.param_dtype or given.weight.dtype
    reduced = policy.reduce_dtype or gathered
    assert given.tokens_per_rank is not None
    vocab_size, hidden_size = given.weight.shape
    return choose_gather(
        given.tokens_per_rank,
        vocab_size,
        hidden_size,
        fsdp2_rows.ranks_of(owner),
        dtype=dtype_name(hidden.dtype),
        head_dtype=dtype_name(gathered),
        reduce_dtype=dtype_name(reduced),
        param_dtype=dtype_name(given.weight.dtype),
        recompute=recompute,
        max_chunk_bytes=given.max_chunk_bytes,
        platform="cpu" if hidden.device.type == "cpu" else "gpu",
    )


def rows_of(given: Arguments, heads: list[Any]) -> LocalHead:
    """This rank's, of a head that a wrapper has sharded."""
    given, low = unpacked(given)
    if heads:
        from xentlib.torch.wrappers import deepspeed

        if given.tokens_parallel is not None:
            refuse_nodes("ZeRO-3")
        return deepspeed.rows_of(given.weight, given.bias, given.weight_layout, given.gather)
    owner = owner_of(given.weight)
    if owner is None:
        refuse_routed(given.gather)
    from xentlib.torch.wrappers import fsdp2_rows

    more = {"low": low, "mesh": given.tokens_parallel}
    return fsdp2_rows.rows_of(owner, given.weight, given.bias, given.weight_layout, **more)


def by_route(given: Arguments, rows: LocalHead, function: Callable[..., R]) -> R:
    """`function` of this rank's rows, and of where they belong: to tokens or rows that travel."""
    local = resident(rows, given.gather)
    given = given._replace(weight=rows.weight, bias=rows.bias)
    if rows.gemm_dtype is None:
        return function(given, local)
    # The policy's dtype is that of the products; the rows' gradient stays as wide as the rows.
    with torch.autocast(given.hidden.device.type, rows.gemm_dtype):
        return function(given, local)


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
        refuse_dtensor("weight", tuple(weight.placements))
    yield weight, bias


def owner_of(weight: Any) -> Owner | None:
    """The `fully_shard` that shards a head, if one does."""
    if not is_dtensor(weight):
        return None
    from xentlib.torch.wrappers import fsdp2

    return fsdp2.find_owner(weight)


# Whose hooks on a head are not missed: what they gather and reduce, the call gathers and reduces.
KNOWN_HOOKS = ("torch.distributed", "deepspeed", "accelerate")


def head_of(given: Arguments, *, alone: bool = True) -> Arguments:
    """The call with a module's arrays in place of the module; `alone`: without a low-rank part."""
    low, module = low_rank_of(given.weight), given.weight
    if low is not None:
        given = head_of(given._replace(weight=low.weight), alone=False)
        check_base(type(low.weight).__name__, low_rank_of(given.weight) is None)
        return given._replace(weight=low._replace(weight=given.weight))
    if not isinstance(module, nn.Module):
        refuse_quantised("a weight", module)
        if alone and not torch.compiler.is_compiling() and is_loaded("peft"):
            from xentlib.torch.wrappers import peft

            peft.refuse_base(module)
        return given
    weight, bias, lora = parameters_of(module, given.gather)
    both = bias is not None and given.bias is not None
    check_beside_module(type(module).__name__, both, given.weight_layout)
    given = given._replace(weight=weight, bias=given.bias if bias is None else bias)
    if lora is None:
        return given
    from xentlib.torch.wrappers import peft

    refuse_hooks(*peft.adapters_of(lora))
    return peft.with_adapters(given, lora)


def parameters_of(module: nn.Module, gather: str = "head") -> tuple[Tensor, Tensor | None, Any]:
    """The weight and the bias of a head, and the layer of PEFT that adds adapters to them."""
    inner, lora = module, None
    if is_loaded("peft"):
        from xentlib.torch.wrappers import peft

        inner = peft.saved_of(module)
        lora = peft.lora_of(inner)
    base: Any = inner if lora is None else lora.base_layer
    if not (is_linear(base) or isinstance(base, nn.Embedding)):
        refuse(module if lora is None else base)
    if isinstance(base, nn.Linear):  # the hooks of an embedding are of the lookup
        refuse_hooks(module, inner, base)
    weight, bias = (kept(base, name, gather) for name in ("weight", "bias"))
    refuse_quantised(f"the weight of a {type(base).__name__}", weight)
    return weight, bias, lora


def kept(module: nn.Module, name: str, gather: str) -> Any:
    """A parameter; by another route than the gathered head's as the module keeps it, since in its
    engine's forward DeepSpeed gathers what is read by its name."""
    parameter = None if gather == "head" else module._parameters.get(name)
    return getattr(module, name, None) if parameter is None else parameter


def is_linear(module: nn.Module) -> bool:
    """Whether its weight and bias are all that it computes with: `nn.Linear`, and what of ours has
    a forward of its own and says so."""
    if not isinstance(module, nn.Linear):
        return False
    replaced = "forward" in vars(module) and not keeps_forward(module)
    kind = type(module)
    own = kind.forward is not nn.Linear.forward or kind.__call__ is not nn.Module.__call__
    plain = not (own or replaced)
    return plain or getattr(type(module), "multiplies", False)


def refuse_hooks(*modules: nn.Module) -> None:
    """Refuse hooks that would not run: `torch.nn.utils.weight_norm` makes the weight in one."""
    if torch.compiler.is_compiling():  # which does not trace the names of modules
        return
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            whose = getattr(hook, "func", hook)  # of a `functools.partial`
            origin = getattr(whose, "__module__", None) or type(whose).__module__
            if not origin.startswith(KNOWN_HOOKS):
                name = getattr(whose, "__qualname__", type(whose).__qualname__)
                refuse_module(
                    f"a {type(module).__name__} with the forward hook {origin}.{name}, which "
                    f"would not run",
                    "Remove the hook, or pass the weight [V, H] that it leads to.",
                )


def refuse_quantised(name: str, weight: object) -> None:
    """torchao's tensors say that they are of the dtype that they stand for."""
    if torch.compiler.is_compiling():
        return
    kind = type(weight)
    if isinstance(weight, Tensor) and kind.__module__.partition(".")[0] == "torchao":
        raise TypeError(
            f"`weight` must be a head in floating point; got {name} as a {kind.__name__} of "
            f"torchao, which is quantised. Leave the head out of the quantisation, or pass "
            f"`weight.dequantize()`."
        )


def refuse(module: nn.Module) -> NoReturn:
    kind = f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"
    if is_a("peft.tuners.tuners_utils", "BaseTunerLayer", module):
        refuse_module(
            f"{kind}, an adapter that is not LoRA on a linear layer",
            "Leave the head out of its `target_modules`, or merge the adapter.",
        )
    refuse_module(
        f"{kind}, whose forward is its own",
        "Pass an `nn.Linear`, an `nn.Embedding`, or the weight [V, H] that it multiplies with; of "
        "a quantised layer the weight that its own method dequantises.",
    )


def low_rank_of(head: Any) -> LowRankHead[Tensor] | None:
    return head if isinstance(head, LowRankHead) else None


def unpacked(given: Arguments) -> tuple[Arguments, LowRankHead[Tensor] | None]:
    """The call with the weight alone, and the head that it is of, if it has a low-rank part."""
    low = low_rank_of(given.weight)
    return (given, None) if low is None else (given._replace(weight=low.weight), low)


def with_weight(head: Any, weight: Tensor, whole: Callable[[Any], Any]) -> Any:
    """The head with another weight in place of its own; A and B as `whole` has them."""
    low = low_rank_of(head)
    if low is None:
        return weight
    return low._replace(weight=weight, a=whole(low.a), b=whole(low.b))
