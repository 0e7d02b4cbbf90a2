"""TRL's trainers with `chunked_logprobs` in place of TRL's own fused head, and `chunked_divergence`
in place of its divergences."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xentlib.checks.head import check_head_options
from xentlib.options import ROUTE_OPTIONS
from xentlib.torch.api import chunked_logprobs
from xentlib.torch.array_spec import is_dtensor
from xentlib.torch.integrations.trl_divergence import divergences
from xentlib.torch.wrappers import with_attribute

__all__ = ["use"]

# Of the numbers a token that TRL's head can be asked for; a mean of capped logits, and the sum of
# squared probabilities that WPO weighs with, stay TRL's.
OURS = frozenset(["log_probs", "entropy", "is_top1", "mean_logits"])
NAME = "_ChunkedLogProbFunction"


class Block(AbstractContextManager[None]):
    """A block of `use()`, which warns where it has replaced nothing."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.block, self.options = replaced(options), options
        self.entered = False

    def __enter__(self) -> None:
        self.entered = True
        self.calls = self.block.__enter__()

    def __call__(self, function: Any) -> Any:
        """As a decorator: each call of the function is a block."""
        self.entered = True

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with use(**self.options):
                return function(*args, **kwargs)

        return inside

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)
        if error[0] is None and not self.calls:
            self.warn("a block that ended without a call of TRL's head or divergence", 3)

    def __del__(self) -> None:
        if not self.entered:
            self.warn("one without `with`, which replaces nothing", 2)

    def warn(self, came: str, stacklevel: int) -> None:
        warnings.warn(
            f"`use()` must be a block around `trainer.train()`; got {came}. Write `with use(): "
            f"trainer.train()`: a block around the trainer's constructor alone does nothing. "
            f"Import a trainer that distils before the block.",
            stacklevel=stacklevel,
        )


def use(**options: Any) -> Block:
    """Let TRL's trainers take their log-probabilities from `chunked_logprobs`, and divergences from
    `chunked_divergence`, inside the block.

        with use():
            SFTTrainer(model, args=arguments, train_dataset=data).train()

    `SFTTrainer`, `DPOTrainer`, `GRPOTrainer`, `RLOOTrainer` and `KTOTrainer` give their model a
    head that returns the log-probability of each label, its entropy, whether it is the most likely
    class and the mean logit, from one function of hidden states and head; that function is
    replaced. Columns, masks, temperatures, soft caps, auxiliary losses and wrappers stay TRL's. Two
    calls are left to TRL: the mean logit under a soft cap, and what WPO weighs its tokens with.

    `DistillationTrainer` hands the hidden states and heads of student and teacher to one function,
    `GKDTrainer`, `GOLDTrainer` and `IWOPDTrainer` the logits of both to another; both are replaced,
    of the trainers that are imported before the block. `beta`, temperature, masks and what the sum
    is divided by keep TRL's meaning. The logits of these three are still made. What has no such
    function stays TRL's: top-k and sampled losses, and the trainers with a teacher on a server.

    The block is around `train()`: TRL looks its functions up when its model is called. A block in
    which nothing called them warns when it ends, and so does a `use()` without `with`.

    A head that FSDP2 shards by a `fully_shard` of its own is handed over as it is, where TRL alone
    would gather it by `full_tensor()`, whose gradient nobody reduces.

    Args:
        options: `gather`, `tokens_per_rank` or `tokens_parallel` of `chunked_logprobs` and
            `chunked_divergence`, what travels of a sharded head.

    Raises:
        TypeError: another option.
        ImportError: no TRL, or one without these functions (they came with TRL 1.16).

    Numerics: those of `chunked_logprobs`, of float32 logits; TRL's are rounded to the dtype of the
    hidden states. Those of `chunked_divergence` and `vocab_parallel_divergence`, never below 0.
    """
    check_head_options(options, ROUTE_OPTIONS)
    return Block(options)


@contextmanager
def replaced(options: dict[str, Any]) -> Iterator[list[None]]:
    """TRL's functions are ours inside; a list of the calls of them."""
    calls: list[None] = []
    try:
        place = import_module("trl.trainer.utils")
        theirs = getattr(place, NAME)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "`use` must find the fused head of TRL 1.16 or newer; got none. Run: pip install "
            "'trl>=1.16'"
        ) from error

    class Ours:
        """What TRL calls: the signature of its autograd function."""

        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            softcap: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = ("log_probs",),
        ) -> tuple[Any, ...]:
            calls.append(None)
            capped = softcap is not None and "mean_logits" in outputs
            if capped or not OURS.issuperset(outputs):
                call = (hidden, weight, bias, targets, temperature, chunk_size, softcap)
                results: tuple[Any, ...] = theirs.apply(*call, logit_scale, outputs)
                return results
            out = chunked_logprobs(
                hidden,
                weight,
                targets,
                bias=bias,
                temperature=temperature,
                softcap=softcap,
                logit_scale=logit_scale,
                entropy="entropy" in outputs,
                **options,
            )
            correct = out.correct if "is_top1" in outputs else None
            mean = None
            if "mean_logits" in outputs:
                # Of linear logits, those of the mean class; float32 under autocast too, as TRL's.
                with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                    mean = hidden.float() @ mean_of(weight)
                    mean += 0.0 if bias is None else mean_of(bias)
                    mean *= logit_scale / temperature
            return out.logprobs, out.entropy, None, mean, correct

    # Of nothing it says that it is one, and gathers none.
    sharded = with_attribute(place, "DTensor", ())
    with with_attribute(place, NAME, Ours), sharded, divergences(calls, options):
        yield calls


def mean_of(parameter: Any) -> Tensor:
    """Over its rows, of all ranks that have some."""
    total: Any = parameter.sum(0, dtype=torch.float32)
    mean: Tensor = (total.full_tensor() if is_dtensor(total) else total) / parameter.shape[0]
    return mean
