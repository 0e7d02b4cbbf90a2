"""Logits that are not computed: the hidden states and the head in their place, up to a loss.

Shapes: V vocabulary, H hidden width, T tokens of a chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from xentlib.arguments import SCALARS
from xentlib.logprobs import LogprobOutput
from xentlib.nll import NLLOutput
from xentlib.plan import block_tokens
from xentlib.torch.api import chunked_logprobs, chunked_nll
from xentlib.torch.core.device import chunk_bytes
from xentlib.torch.head.modules import parameters_of
from xentlib.torch.wrappers import whole_shape

__all__ = ["LazyLogits", "LazyLogitsError"]

Number = float  # in the class that name is the cast


class LazyLogitsError(AttributeError, TypeError):
    """An operation that needs the logits themselves was called on lazy logits."""


class Factor(NamedTuple):
    """A product and a quotient, so that a cap that divides and multiplies leaves exactly 1."""

    times: float = 1.0
    over: float = 1.0


ONE = Factor()


class LazyClass(type):
    """The class's name as Accelerate's TypeError quotes it, where `Trainer` gathers logits."""

    def __repr__(cls) -> str:
        return (
            f"{super().__repr__()}, logits that are not made: for `compute_metrics` pass "
            f"`in_place_of_logits` to `patch`, or pass `prediction_loss_only=True` to Trainer"
        )


@dataclass(frozen=True, eq=False, repr=False)
class LazyLogits(metaclass=LazyClass):
    """Logits [..., V], as the hidden states [..., H] and the head that they would come from.

        inner * x, or with a soft cap outer * tanh(inner * x);  x = head(hidden)

    They can be sliced, flattened, scaled, capped and cast, which models and losses do to logits
    on the way to a loss, and handed to `torch.nn.functional.cross_entropy`, which is then
    `chunked_nll`: float32 whatever dtype they are said to have. `nll` and `logprobs` are the same
    with our own options, and `materialize()` computes the logits.

    Args:
        hidden: [..., H].
        head: the module that multiplies with them, or its weight [V, H] and its bias or None.
        options: of `chunked_nll` or `chunked_logprobs`, for every loss of these logits.

    Raises:
        LazyLogitsError: anything else is asked of them.
    """

    hidden: Tensor
    head: nn.Module | tuple[Tensor, Tensor | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    num_classes: int = -1  # all rows of the head
    dtype: Any = None  # that of a product with the head
    inner: Factor = ONE
    outer: Factor | None = None
    classes_second: bool = False  # [B, V, L], as a loss may want them

    def __post_init__(self) -> None:
        if self.dtype is None:
            weight = self.parameters()[0]
            dtype = torch.promote_types(self.hidden.dtype, weight.dtype)
            object.__setattr__(self, "dtype", dtype)
            object.__setattr__(self, "num_classes", whole_shape(weight)[0])

    def parameters(self) -> tuple[Tensor, Tensor | None, Any]:
        """Weight, bias, and PEFT's layer around a module."""
        if isinstance(self.head, tuple):
            return (*self.head, None)
        return parameters_of(self.head, self.options.get("gather", "head"))

    # What a tensor says of itself

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.hidden.shape[:-1])
        sizes.insert(1 if self.classes_second else len(sizes), self.num_classes)
        return torch.Size(sizes)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    # What is done to them on the way to a loss

    def float(self) -> LazyLogits:
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def to(self, *to: Any, **options: Any) -> LazyLogits:
        """A dtype they are said to have, or a device for their hidden states."""
        moved = self
        for x in (*to, *options.values()):
            if isinstance(x, torch.dtype):
                moved = replace(moved, dtype=x)
            elif not isinstance(x, bool):
                where = x.device if isinstance(x, (Tensor, LazyLogits)) else x
                moved = replace(moved, hidden=moved.hidden.to(where))
        return moved

    def contiguous(self) -> LazyLogits:
        return self

    clone = contiguous  # nothing is ever written to them

    def reshape(self, *shape: Any) -> LazyLogits:
        sizes = list(shape if isinstance(shape[0], int) else shape[0])
        rest = 1
        for n in sizes:
            rest *= 1 if n == -1 else n
        sizes = [self.shape.numel() // max(rest, 1) if n == -1 else n for n in sizes]
        if sizes[-1] != self.num_classes or self.classes_second:
            refuse(f"the shape {tuple(sizes)} for {tuple(self.shape)}")
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> LazyLogits:
        if self.classes_second or end_dim in (-1, self.ndim - 1):
            refuse("classes flattened with tokens")
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def transpose(self, first: int, second: int) -> LazyLogits:
        if self.ndim != 3 or {first % 3, second % 3} != {1, 2}:
            refuse(f"transpose({first}, {second})")
        return replace(self, classes_second=not self.classes_second)

    def permute(self, *axes: Any) -> LazyLogits:
        if (tuple(axes) if isinstance(axes[0], int) else tuple(axes[0])) != (0, 2, 1):
            refuse(f"permute{axes}")
        return self.transpose(1, 2)

    def __getitem__(self, index: Any) -> LazyLogits:
        """Of tokens; of classes, the first n of them."""
        indices = index if isinstance(index, tuple) else (index,)
        dots = any(x is ... for x in indices)
        taken = sum(x.ndim if is_mask(x) else x is not None for x in indices if x is not ...)
        num_classes = self.num_classes
        if self.classes_second:
            refuse("an index where classes come second")
        if indices[-1] is not ... and (dots or taken == self.ndim):
            last = indices[-1]
            if not isinstance(last, slice) or last.start not in (None, 0) or last.step is not None:
                refuse("an index over classes")
            num_classes = len(range(num_classes)[last])
            index = (*indices[:-1], slice(None))
        return replace(self, hidden=self.hidden[index], num_classes=num_classes)

    def mul(self, by: Any) -> LazyLogits:
        return self.scaled("a product", by, times=by)

    def div(self, by: Any) -> LazyLogits:
        return self.scaled("a quotient", by, over=by)

    def scaled(self, what: str, by: Any, times: Any = 1.0, over: Any = 1.0) -> LazyLogits:
        if isinstance(by, bool) or not isinstance(by, (int, float)):
            refuse(f"{what} with a {type(by).__name__}")
        factor = self.inner if self.outer is None else self.outer
        factor = Factor(factor.times * times, factor.over * over)
        return replace(self, inner=factor) if self.outer is None else replace(self, outer=factor)

    __mul__ = __rmul__ = mul
    __truediv__ = true_divide = div

    def tanh(self) -> LazyLogits:
        if self.outer is not None:
            refuse("a second tanh")
        return replace(self, outer=ONE)

    # The loss, and the logits after all

    def nll(self, labels: Tensor, **options: Any) -> NLLOutput[Tensor]:
        """`chunked_nll` of their hidden states and head."""
        with unpatched_call(self.head):
            return chunked_nll(**self.arguments(labels, options))

    def logprobs(self, labels: Tensor, **options: Any) -> LogprobOutput[Tensor]:
        """`chunked_logprobs` of their hidden states and head."""
        with unpatched_call(self.head):
            return chunked_logprobs(**self.arguments(labels, options))

    def arguments(self, labels: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a function of the head, with softcap * tanh(logit_scale * x / softcap)."""
        scale, over = self.inner
        factors: dict[str, Any] = {}
        if self.outer is not None:
            factors["softcap"] = self.outer.times / self.outer.over
            scale, over = scale * self.outer.times, over * self.outer.over
        if scale != over:
            factors["logit_scale"] = scale / over
        twice = sorted((set(options) | set(factors)) & set(self.options))
        if twice:
            refuse(f"`{twice[0]}` from the loss and from `patch`")
        weight, bias, layer = self.parameters()
        hidden = self.hidden
        head: dict[str, Any] = {"weight": weight, "bias": bias}
        if not isinstance(self.head, tuple):  # which may be on another device than its loss
            hidden, labels = hidden.to(weight.device), labels.to(weight.device)
            head = {"weight": self.head}
        if self.num_classes != whole_shape(weight)[0]:
            # Rows that pad the vocabulary: the model has cut their logits off.
            if layer is not None:
                refuse("fewer classes than the head of an adapter has")
            head["weight"] = weight[: self.num_classes]
            head["bias"] = None if bias is None else bias[: self.num_classes]
        return {"hidden": hidden, "labels": labels, **head, **factors, **self.options, **options}

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: Number = 0.0,
    ) -> Tensor:
        """`torch.nn.functional.cross_entropy` of them; 0, not NaN, where no target is valid."""
        if size_average is not None or reduce is not None:
            refuse("`size_average` or `reduce`, which torch has given up")
        if target.is_floating_point() or target.shape != self.hidden.shape[:-1]:
            refuse(f"a target of {target.dtype} and shape {tuple(target.shape)}")
        options: dict[str, Any] = {"ignore_index": ignore_index}
        if label_smoothing:
            options["label_smoothing"] = label_smoothing
        if reduction == "none":
            if weight is not None or LOSS_SCALARS & {*options, *self.options}:
                refuse("losses of single tokens with class weights, smoothing or z-loss")
            return -self.logprobs(target, **options).logprobs.to(self.device)
        out = self.nll(target, class_weights=weight, reduction=reduction, **options)
        call = lazy_calls(self.head).get(thread())
        if call is not None:  # of a patched model
            call["outputs"].append(out)
        return out.loss.to(self.device)

    def materialize(self) -> Tensor:
        """The logits [..., V], all of them, with a gradient, in the dtype they are said to have."""
        logits = self.materialize_of(self.hidden)
        return logits.transpose(1, 2) if self.classes_second else logits

    def materialize_of(self, hidden: Tensor) -> Tensor:
        with unpatched_call(self.head):
            head = self.head
            z = nn.functional.linear(hidden, *head) if isinstance(head, tuple) else head(hidden)
        z = z[..., : self.num_classes].to(self.dtype)
        z = z * (self.inner.times / self.inner.over)
        return z if self.outer is None else torch.tanh(z) * (self.outer.times / self.outer.over)

    @torch.no_grad()
    def map_chunks(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function of [T, V] logits makes of them, chunk by chunk, without a gradient.

        Args:
            function: [T, V] to [T, ...], of any T: `lambda logits: logits.argmax(-1)`.

        Returns:
            [..., ...], the dimensions of the tokens and those of the function.
        """
        budget = chunk_bytes(0, self.device, self.num_classes * 4)
        rows = self.hidden.reshape(-1, self.hidden.shape[-1])
        parts = rows.split(block_tokens(budget, self.num_classes, 4))
        results = [function(self.materialize_of(part)) for part in parts]
        for x, part in zip(results, parts, strict=True):
            if not isinstance(x, Tensor) or x.shape[:1] != part.shape[:1]:
                got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(
                    f"`in_place_of_logits` must make a tensor [T, ...] of logits [T, V]; got "
                    f"{got} for T = {len(part)}. Return `logits.argmax(-1)` for instance, or "
                    f"`logits.topk(5).indices`."
                )
        joined = torch.cat(results)
        return joined.reshape(*self.hidden.shape[:-1], *joined.shape[1:])

    # Everything else

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, options = getattr(function, "__name__", str(function)), dict(kwargs or {})
        first, *rest = args or (options.pop("input", None),)
        if isinstance(first, cls) and name in FUNCTIONS:
            return getattr(first, name)(*rest, **options)
        return refuse(f"`torch`'s {name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        refuse(f"`{name}`")

    def other(self, x: Any) -> NoReturn:
        refuse(f"arithmetic or a comparison with a {type(x).__name__}")

    __add__ = __radd__ = __sub__ = __rsub__ = __pow__ = __matmul__ = other
    __lt__ = __le__ = __gt__ = __ge__ = other

    def __neg__(self) -> NoReturn:
        refuse("a minus sign")


def refuse(what: str) -> NoReturn:
    raise LazyLogitsError(
        f"logits that are not made must only be sliced, flattened, scaled, capped and handed "
        f"to `cross_entropy`; got {what}. Call `.materialize()` for all logits, pass "
        f"`in_place_of_logits` to `patch`, or `unpatch` the model."
    )


# What a loss is made of beside log-probabilities: options of `chunked_nll` alone
LOSS_SCALARS = {*SCALARS["chunked_nll"]} - {*SCALARS["chunked_logprobs"]}
# Functions of `torch` that are methods here
ARITHMETIC = ("cross_entropy", "tanh", "mul", "div", "true_divide")
FUNCTIONS = (*ARITHMETIC, "flatten", "permute", "reshape", "transpose")


def lazy_calls(head: Any) -> dict[int, dict[str, Any]]:
    """Of a patched head: by thread, the call of its model that is to have lazy logits of it."""
    calls: dict[int, dict[str, Any]] = getattr(head, "__dict__", {}).get("_lazy_calls", {})
    return calls


@contextmanager
def unpatched_call(head: Any) -> Iterator[None]:
    """The head as it is without a patch: wrappers' hooks run in a call of it."""
    calls, here = lazy_calls(head), thread()
    call = calls.pop(here, None)
    try:
        yield
    finally:
        if call is not None:
            calls[here] = call


def thread() -> int:
    """Which thread this is: one may call a model with labels while another calls it without. A
    compiler traces in one, and does not know its number."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool
