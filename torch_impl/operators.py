"""Operators that a compiler does not look into, made from functions of named arguments; which of
their derivatives are wanted, and those that are refused because they would be dropped.

A function takes NamedTuples of tensors and options; its operator takes their fields one after the
other. The schema is read from the annotations, and gradients are returned by name: no argument is
counted by hand anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from xentlib.arguments import Scalars
from xentlib.checks.call import refuse_derivative
from xentlib.checks.validators import to_learn

# Of a head's operators, in the order of their gradients
DIFFERENTIATED = ("hidden", "weight", "bias", "low_in", "low_out")


class RowLayout(NamedTuple):
    """Which rows of a head a rank has, and who has the others; of a whole head as it begins."""

    group: str = ""  # of the ranks that share the head
    shard: Tensor | None = None  # [4] of `numbers_of`; on the CPU
    head_scale: float = 1.0  # of d weight and d bias, where a wrapper would average over its ranks
    # Where the group's ranks have tokens of their own: what of a wrapper's head travels, or
    # "tokens" for rows that the caller has cut.
    route: str = ""
    nodes: Tensor | None = None  # [nodes, ranks] on the CPU: the part of the head of each
    peers: str = ""  # group of the ranks at this rank's place, of all nodes
    every: str = ""  # group of the ranks of all nodes, or of all shards of a stream
    # Where tensor parallelism has cut the rows before a wrapper did: the ranks with these tokens,
    # over whose shards d hidden is summed, and those whose tokens are in a chunk.
    shards: str = ""
    over: str = ""
    # [any, ranks] on the CPU: of the group, those that would count the same tokens several times
    alike: Tensor | None = None


class HeadCall(NamedTuple):
    """What every operator takes: a head and its tokens or, as a head without a weight, precomputed
    logits. Per token flat, but for `hidden`."""

    hidden: Tensor  # [N, H]; without a weight the logits [N, C]
    weight: Tensor | None
    labels: Tensor
    bias: Tensor | None
    where: Tensor | None
    logit_scale: Tensor | None
    temperature: Tensor | None
    ignore_index: int
    scalars: Scalars
    gemm_dtype: torch.dtype
    compute_dtype: torch.dtype
    chunk_bytes: int  # 0: what the device's memory allows
    transposed: bool
    reduce_hidden: bool  # d hidden is summed over the shards
    rows: RowLayout
    low_in: Tensor | None = None  # A, B, mask and factor of a `LowRankHead`
    low_out: Tensor | None = None
    low_keep: Tensor | None = None
    low_scale: float = 1.0
    ids: Tensor | None = None  # [N, K] classes whose logits are taken out, as the target's is
    top_k: int = 0  # and of as many of the largest, which the call finds
    denominator_is_0: bool = False  # as the host knows where hidden states are on a device

    @property
    def columns(self) -> int:
        """Classes of this rank, padding included."""
        if self.weight is None:
            return self.hidden.shape[1]
        return self.weight.shape[self.transposed]

    @property
    def rows_VH(self) -> Tensor:
        """The head's rows."""
        assert self.weight is not None
        return self.weight.T if self.transposed else self.weight

    @property
    def leaves(self) -> list[Tensor | None]:
        """What gradients are of, as `DIFFERENTIATED` names them."""
        return [getattr(self, name) for name in DIFFERENTIATED]


TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    list[bool]: "bool[]",
}
Named = dict[str, Tensor | None]


class Layout(NamedTuple):
    """The fields of a part in turn: a part again, or None and how many that are none follow each
    other. A slice of 20 fields costs the host what two of them cost one by one."""

    part: Any
    segments: tuple[tuple[Layout | None, int], ...]
    names: tuple[tuple[str, Any], ...]  # of all fields that are no parts, with their types

    @property
    def size(self) -> int:
        return len(self.names)


@functools.cache  # `get_type_hints` evaluates the annotations anew, for 0.1 ms a class
def layout_of(part: Any) -> Layout:
    segments: list[tuple[Layout | None, int]] = []
    names: list[tuple[str, Any]] = []
    for name, kind in get_type_hints(part).items():
        if hasattr(kind, "_fields"):
            inner: Layout = layout_of(kind)
            segments.append((inner, inner.size))
            names += [(f"{name}_{field}", x) for field, x in inner.names]
            continue
        names.append((name, kind))
        if segments and segments[-1][0] is None:
            segments[-1] = (None, segments[-1][1] + 1)
        else:
            segments.append((None, 1))
    return Layout(part, tuple(segments), tuple(names))


def flatten(parts: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
    """The fields of parts, and of those that are parts again theirs."""
    values: list[Any] = []
    for part, layout in zip(parts, layouts):
        place = 0
        for inner, count in layout.segments:
            if inner is None:
                values += part[place : place + count]
                place += count
            else:
                values += flatten((part[place],), (inner,))
                place += 1
    return values


def unflatten(values: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
    """Parts of the values, one after the other."""
    parts, start = [], 0
    for layout in layouts:
        fields: list[Any] = []
        for inner, count in layout.segments:
            part_values = values[start : start + count]
            fields += part_values if inner is None else unflatten(part_values, (inner,))
            start += count
        parts.append(layout.part._make(fields))
    return parts


class Operator:
    """An operator whose arguments are the fields of `parts`, NamedTuple classes, in their order; of
    a field that is one again, its fields, named after both.

    It is called with its parts; `op`, with the fields, is what `torch.library.custom_op` makes.
    Eager calls bypass the dispatcher: 40 arguments through it would cost the host 0.7 ms, a third
    of a short call (custom operators of PyTorch 2.11 to 2.13 look up each of their schema's
    arguments in a new list of all).
    """

    direct: Any = None  # the same as an autograd function; None without a gradient

    def __init__(self, name: str, parts: Sequence[Any], returns: str, forward: Any) -> None:
        self.layouts = [layout_of(part) for part in parts]
        kinds = [kind for layout in self.layouts for kind in layout.names]
        self.fields = [name for name, _ in kinds]
        if len(set(self.fields)) != len(self.fields):
            raise TypeError(f"fields of {name} must have names of their own; got {self.fields}")
        arguments = [f"{TYPES[kind]} {field}" for field, kind in kinds]

        def run(*values: Any) -> Any:
            return forward(*self.split(values))

        self.forward, self.name = forward, name
        make = torch.library.custom_op(
            f"xentlib::{name}", mutates_args=(), schema=f"({', '.join(arguments)}) -> {returns}"
        )
        self.op: Any = make(run)

    def split(self, values: Sequence[Any]) -> list[Any]:
        """The operator's arguments as its parts."""
        return unflatten(values, self.layouts)

    def __call__(self, *parts: Any) -> Any:
        values = flatten(parts, self.layouts)
        tensors = [x for x in values if isinstance(x, Tensor)]
        if not in_eager(*tensors) or [x for x in tensors if x.is_meta]:
            return self.op(*values)
        if not (torch.is_grad_enabled() and [x for x in tensors if x.requires_grad]):
            return self.forward(*parts)
        return self.op(*values) if self.direct is None else self.direct(*values)

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(*parts)` gives the results' shapes and dtypes to a compiler."""
        self.op.register_fake(lambda *values: function(*self.split(values)))
        return function

    def gradient(self, setup: Callable[..., None], backward: Callable[..., Named | None]) -> None:
        """`setup(ctx, output, *parts)`, and `backward(ctx, *gradients)`: gradients of arguments by
        name, None for no gradient at all."""

        def context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup(ctx, output, *self.split(inputs))

        def by_position(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            named = backward(ctx, *gradients) or {}
            unknown = [name for name in named if name not in self.fields]
            if unknown:  # it would be dropped without a word
                raise KeyError(f"gradients must be of {self.fields}; got {unknown}")
            return tuple(named.get(name) for name in self.fields)

        self.op.register_autograd(by_position, setup_context=context)

        def forward(ctx: Any, *values: Any) -> Any:
            parts = self.split(values)
            output = self.forward(*parts)
            setup(ctx, output, *parts)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(by_position)}
        self.direct = type(self.name, (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]

    def needed(self, ctx: Any, *names: str) -> list[bool]:
        """In a backward: which gradients of these arguments are wanted."""
        return [ctx.needs_input_grad[self.fields.index(name)] for name in names]


def operator(name: str, *parts: Any, returns: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an `Operator` of `forward(*parts)`; `returns` is the schema's right side."""
    return lambda forward: Operator(name, parts, returns, forward)


def keep_call(ctx: Any, kept: Tensor, constants: Sequence[Tensor], *parts: Any) -> None:
    """What a backward needs that reads its inputs again: the operator's parts, and `kept`."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*constants)
    kinds: list[Any] = [type(part) for part in parts]
    ctx.layouts = [layout_of(kind) for kind in kinds]
    fields = flatten(parts, ctx.layouts)
    ctx.tensor_index = [k for k, x in enumerate(fields) if isinstance(x, Tensor)]
    ctx.save_for_backward(kept, *(fields[k] for k in ctx.tensor_index))
    for k in ctx.tensor_index:
        fields[k] = None
    ctx.fields = fields


def kept_call(ctx: Any) -> tuple[Tensor, list[Any]]:
    """Both again."""
    (kept, *tensors), fields = ctx.saved_tensors, list(ctx.fields)
    for k, x in zip(ctx.tensor_index, tensors, strict=True):
        fields[k] = x
    return kept, unflatten(fields, ctx.layouts)


def not_forward_mode(function: str, *inputs: Any) -> None:
    """Refuse tangents, which an operator without a rule for them drops without a word. A compiler
    does not see all of them, and takes a refusal for a reason to ask again in eager."""
    if forward_ad._current_level < 0:
        return
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(
            f"`{function}` must be differentiated in reverse mode; got an input with a tangent "
            f"(`torch.func.jvp`, `jacfwd`, dual tensors), whose derivative it does not compute. "
            f"Use `backward` or `torch.autograd.grad`, or full logits."
        )


def not_transformed(function: str, *inputs: Any) -> None:
    """Refuse inputs that `torch.func.grad`, `vjp` or `jacrev` differentiates, for which PyTorch's
    custom operators have no rule: its own message asks for a `setup_context` instead. A compiler,
    which cannot ask this, ends in PyTorch's message."""
    if torch.compiler.is_compiling() or functorch.maybe_current_level() is None:
        return
    if torch.is_grad_enabled() and any(
        functorch.is_gradtrackingtensor(x) and x.requires_grad for x in layers(*inputs)
    ):
        raise RuntimeError(
            f"`{function}` must be differentiated by `backward` or `torch.autograd.grad`; got an "
            f"input that `torch.func.grad`, `vjp` or `jacrev` differentiates. Call "
            f"`requires_grad_()` on the input and `torch.autograd.grad` instead."
        )


def layers(*inputs: Any) -> Iterator[Tensor]:
    """The tensors of a call, and what the transforms of `torch.func` have wrapped in them."""
    for value in inputs:
        x = value
        while isinstance(x, Tensor):
            yield x
            if torch.compiler.is_compiling() or not functorch.is_functorch_wrapped_tensor(x):
                break
            x = functorch.get_unwrapped(x)


def requires_grad(x: Tensor) -> bool:
    """An entry of `torch.func.vmap` says no although the batch that it is of requires grad. A
    compiler does not see the batch: inside a transform any may be differentiated."""
    inside = torch.compiler.is_compiling() and functorch.maybe_current_level() is not None
    return x.requires_grad or inside or any(layer.requires_grad for layer in layers(x))


def not_differentiable(**constants: Any) -> None:
    """Refuse gradients that would be dropped without a word."""
    if not torch.is_grad_enabled():
        return
    for name, value in constants.items():
        if isinstance(value, Tensor) and any(x.requires_grad for x in layers(value)):
            raise ValueError(
                f"`{name}` must be a constant; got a tensor that requires grad, whose gradient is "
                f"not computed. Pass `{name}.detach()`{to_learn(name)}."
            )


def differentiated_once(function: str, instead: str) -> None:
    """Refuse a backward whose own gradient is wanted."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"`{function}` must be differentiated once; got a backward with create_graph=True, "
            f"whose second derivatives it does not compute. Use full logits and {instead} for "
            f"those."
        )


def wanted(*leaves: Tensor | None) -> list[bool]:
    """Which gradients are: what is frozen costs no GEMM."""
    on = torch.is_grad_enabled()
    return [on and x is not None and requires_grad(x) for x in leaves]


def without_gradient(
    name: str, value: Tensor, leaves: Sequence[Tensor | None], function: str = "chunked_nll"
) -> Tensor:
    """A result of a function that depends on `leaves`, whose derivative is refused in a
    backward: an entropy bonus would add 0 to every gradient without a word. The values are the
    same, and none are saved. A compiler has to trace backwards that never run, and is left out."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return value
    active = [x for x in leaves if x is not None and x.requires_grad]
    # Entries of a batch have no graph of their own, and PyTorch no transform for this function.
    if not active or any(functorch.is_functorch_wrapped_tensor(x) for x in (value, *active)):
        return value
    refused: Tensor = _Refused.apply((name, function), [value], *active)  # type: ignore[no-untyped-call]
    return refused


class _Refused(torch.autograd.Function):
    """Of all leaves: `torch.autograd.grad` runs no node that does not lead to its inputs."""

    @staticmethod
    def forward(ctx: Any, of: tuple[str, str], value: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.name, ctx.function = of
        ctx.set_materialize_grads(False)
        return value[0].data  # from a list: a view of an input could not be written to

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        # A reentrant checkpoint fills in zeros for what was not used.
        if gradient is not None and bool(gradient.any()):
            refuse_derivative(ctx.name, f"{ctx.name}.detach()", ctx.function)
        return (None,) * len(ctx.needs_input_grad)


PLAIN = (Tensor, torch.nn.Parameter)


def in_eager(*tensors: Tensor) -> bool:
    """Whether these hold numbers: no compiler, tracer, fake tensor or batch stands in for them."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    # `is_grads_batched` has the second kind.
    kinds = (functorch.is_functorch_wrapped_tensor, functorch.is_legacy_batchedtensor)
    return not [x for x in tensors if type(x) not in PLAIN or kinds[0](x) or kinds[1](x)]


def keeps_graph() -> bool:
    """Whether the running backward retains its graph; a private question, so doubt means yes."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
