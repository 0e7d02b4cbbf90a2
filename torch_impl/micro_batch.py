"""Token counts of micro-batches, and the tag that marks a loss of `chunked_nll` as mean or sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.validators import plain
from xentlib.checks.window import (
    WINDOWS,
    check_loss_sum,
    check_own_count,
    check_returned_sum,
    check_token_count,
)
from xentlib.results import is_loss_output
from xentlib.torch.array_spec import array_spec
from xentlib.torch.core.device import device_info

# On the loss and on its node. A plain tuple: `torch.load(weights_only=True)` takes a saved loss.
LABEL = "_xentlib_origin"
STEPS = 16  # of a loss's history
TERMS = 256  # nodes of a loss that was added up
# Nodes of one input through which a sum stays that sum, and a mean a mean.
SAME = {"AddBackward0", "AliasBackward0", "CloneBackward0", "DivBackward0", "MeanBackward0"}
SAME |= {"ReshapeAliasBackward0", "SelectBackward0", "SqueezeBackward0", "SqueezeBackward1"}
SAME |= {"StackBackward0", "SubBackward0", "SumBackward0", "ToCopyBackward0", "UnsqueezeBackward0"}
SAME |= {"ViewBackward0", "_DDPSinkBackward"}


class Origin(NamedTuple):
    """Of a loss that `chunked_nll` has made, or of what was made of one such loss alone."""

    num_tokens: Tensor
    weight_sum: Tensor
    denominator: Any  # None of a sum
    divisors: tuple[Any, ...] = ()  # by which it was divided since
    scaled: bool = False  # or multiplied, and whether it is a sum now is not known

    @property
    def exact(self) -> bool:
        """Whether nothing was done to it."""
        return not self.scaled and not self.divisors

    def divided_since(self, weight: Any) -> bool:
        """By its count, which tells a divisor from other constants."""
        counts = (self.num_tokens, self.weight_sum, weight)
        equal = (same_count(x, count) for x in self.divisors for count in counts)
        return self.denominator is None and not self.scaled and any(equal)


class LossAndCount(NamedTuple):
    """A micro-batch's loss, as it was given."""

    loss: Any
    weight: Any  # of its valid tokens
    denominator: Tensor | None = None  # of an `NLLOutput`
    origin: Origin | None = None

    def check_sum(self, instead: str, normalized: bool = False) -> None:
        """Refuse a loss that is known not to be a sum, unless it is said that it is none."""
        of = self.origin
        divided = of is not None and of.denominator is not None and not of.scaled
        divided = divided or self.denominator is not None or mean_and_more(self.loss)
        check_loss_sum(array_spec(self.loss), divided and not normalized, instead)
        if of is not None and not normalized:
            WINDOWS.require("undivided", not of.divided_since(self.weight))

    def check_count(self, *, weighted: bool = True, whole: bool = True) -> None:
        """Refuse a count that the loss cannot have; `whole`: the loss counts."""
        value = known(self.loss) if whole else None
        count = array_spec(self.weight)
        check_token_count("num_tokens", count, known(self.weight), weighted, value)

    def check_mean(self) -> None:
        """Refuse a loss that is known not to be the mean over its tokens."""
        of = self.origin
        if of is None or of.scaled:
            return
        total = known(of.weight_sum)
        check_own_count(known(self.weight), total, total)
        by = of.divisors if of.denominator is None else (of.denominator,)
        WINDOWS.require("mean", any(x is of.weight_sum or known(x) in (None, total) for x in by))


def loss_and_count(loss: Any, num_tokens: Any) -> LossAndCount:
    num_tokens = plain(num_tokens)
    if isinstance(num_tokens, (int, float)):  # exactly
        kind = torch.float64 if isinstance(num_tokens, float) else torch.int64
        num_tokens = torch.tensor(num_tokens, dtype=kind)
    elif num_tokens is not None:
        num_tokens = torch.as_tensor(num_tokens)
    origin = origin_of(loss.loss if is_loss_output(loss) else loss)
    WINDOWS.require("as_made", not (is_loss_output(loss) and written_to(loss.loss)))
    if is_loss_output(loss) and origin is None:
        origin = Origin(loss.num_tokens, loss.weight_sum, loss.denominator)
    if origin is not None and num_tokens is not None:
        check_own_count(known(num_tokens), known(origin.num_tokens), known(origin.weight_sum))
    if not is_loss_output(loss):
        return LossAndCount(loss, num_tokens, origin=origin)
    returned = getattr(loss.num_tokens, LABEL, None)  # the sum beside this count
    check_returned_sum(known(loss.loss), returned, known(loss.num_tokens), known(loss.weight_sum))
    if num_tokens is None:
        # The number itself where tokens have no weights: their sum is rounded beyond 2^24.
        number, weight = loss.num_tokens, loss.weight_sum
        whole = weight == number.to(weight.dtype)
        num_tokens = torch.where(whole, number.double(), weight.double())
    return LossAndCount(loss.loss, num_tokens, loss.denominator, origin)


def known(x: Any) -> Any:
    """A number, where reading it costs nothing, or None."""
    if isinstance(x, (int, float)):
        return x
    there = type(x) is Tensor and device_info(x).host_readable and x.numel() == 1
    return x.detach().item() if there and not traced() else None


def readable(x: Tensor) -> bool:
    """Whether the host may read a tensor's numbers: nothing traces or wraps it, and it waits for
    no device."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return type(x) is Tensor and device_info(x).host_readable and not traced()


def traced() -> bool:
    """Whether `make_fx` records each operation of real tensors, of which it lets none be read."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def label_loss(loss: Tensor, num_tokens: Any, weight_sum: Any, denominator: Any) -> None:
    """Let a loss say what it was divided by, where there is no graph too. Not under a compiler,
    whose graph has no attributes, and not in `torch.func`, whose tensors end with the
    transformation."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(loss):
        return
    setattr(loss, LABEL, (num_tokens, weight_sum, denominator, version(loss)))
    if denominator is None:
        setattr(num_tokens, LABEL, known(loss))
    node: Any = loss.grad_fn
    if node is not None:
        node.metadata[LABEL] = (num_tokens, weight_sum, denominator)


def version(loss: Tensor) -> Any:
    """What changes if a loss is written to, as in `total += other`: the number itself, if reading
    it is free, as collectives count no version."""
    value = known(loss)
    return loss._version if value is None and not loss.is_inference() else value


def written_to(loss: Any) -> bool:
    """Whether a loss of ours was changed in place, which no graph knows of: `dist.all_reduce`."""
    *label, then = getattr(loss, LABEL, (None,))
    node: Any = loss.grad_fn
    same_graph = node is None or LABEL in node.metadata
    return bool(label) and same_graph and then != version(loss) and then == then


def origin_of(loss: Any) -> Origin | None:
    """Of a loss as `chunked_nll` has returned it, or of what one was made to by itself."""
    if not isinstance(loss, Tensor):
        return None
    *label, then = getattr(loss, LABEL, (None,))
    if label and (then == version(loss) or then != then):  # NaN under `inference_mode`
        return Origin(*label)
    node: Any = loss.grad_fn
    divisors: list[Any] = []
    scaled = False
    for _ in range(STEPS):
        if node is None:
            return None
        if LABEL in node.metadata:
            origin = Origin(*node.metadata[LABEL])
            return origin._replace(divisors=tuple(divisors), scaled=scaled)
        inputs = [x for x, _ in node.next_functions if x is not None]
        name = node.name()
        if name == "DivBackward0":
            divisors.append(divisor_of(node))
            if node.next_functions[0][0] is None:  # it is the divisor itself
                return None
        if len(inputs) != 1:
            return None
        scaled = scaled or name not in SAME
        (node,) = inputs
    return None


def mean_and_more(loss: Any) -> bool:
    """Whether a loss is one that was divided, and something else, such as a router's loss.

    Not beside a sum: what it is divided by may then be the weight of a further loss.
    """
    nodes: list[tuple[Any, bool]] = [(getattr(loss, "grad_fn", None), False)]
    divided = False
    for node, scaled in nodes:  # which grow
        if node is None or len(nodes) > TERMS:
            continue
        if LABEL in node.metadata:
            denominator = node.metadata[LABEL][2]
            if denominator is None:
                return False
            divided = divided or not scaled
            continue
        name, inputs = node.name(), [x for x, _ in node.next_functions if x is not None]
        if len(inputs) == 1 or name in ("AddBackward0", "SubBackward0"):
            nodes += [(x, scaled or name not in SAME) for x in inputs]
    return divided


def divisor_of(node: Any) -> Any:
    try:
        return node._saved_other
    except RuntimeError:  # after the backward
        return None


def same_count(divisor: Any, count: Any) -> bool:
    """Whether they are one number: one tensor, or where reading is free alike, and more than what
    one divides by for other reasons."""
    value = known(divisor)
    return divisor is not None and (divisor is count or (value == known(count) and value > 4))
