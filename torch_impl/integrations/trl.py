"""TRL's trainers with `chunked_logprobs` in place of TRL's own fused head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xentlib.torch.public import chunked_logprobs

__all__ = ["use"]

# Of the numbers a token that TRL's head can be asked for; a mean of capped logits, and the sum of
# squared probabilities that WPO weighs with, stay TRL's.
OURS = frozenset(["log_probs", "entropy", "is_top1", "mean_logits"])
NAME = "_ChunkedLogProbFunction"


@contextmanager
def use() -> Iterator[None]:
    """Let TRL's trainers take their log-probabilities from `chunked_logprobs`, inside the block.

        with use():
            SFTTrainer(model, args=arguments, train_dataset=data).train()

    `SFTTrainer`, `DPOTrainer`, `GRPOTrainer`, `RLOOTrainer` and `KTOTrainer` give their model a
    head that returns the log-probability of each label, its entropy, whether it is the most likely
    class and the mean logit, from one function of hidden states and head; that function is
    replaced. Columns, masks, temperatures, soft caps, auxiliary losses and wrappers stay TRL's. Two
    calls are left to TRL: the mean logit under a soft cap, and what WPO weighs its tokens with.

    Raises:
        ImportError: no TRL, or one without that function (it came with TRL 1.16).

    Numerics: those of `chunked_logprobs`, of float32 logits; TRL's are rounded to the dtype of the
    hidden states.
    """
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
            capped = softcap is not None and "mean_logits" in outputs
            if capped or not OURS.issuperset(outputs):
                call = (hidden, weight, bias, targets, temperature, chunk_size, softcap)
                found: tuple[Any, ...] = theirs.apply(*call, logit_scale, outputs)
                return found
            out = chunked_logprobs(
                hidden,
                weight,
                targets,
                bias=bias,
                temperature=temperature,
                softcap=softcap,
                logit_scale=logit_scale,
                entropy="entropy" in outputs,
            )
            correct = out.correct if "is_top1" in outputs else None
            mean = None
            if "mean_logits" in outputs:
                # Of linear logits, those of the mean class; float32 under autocast too, as TRL's.
                with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
                    mean += 0.0 if bias is None else bias.mean(dtype=torch.float32)
                    mean *= logit_scale / temperature
            return out.logprobs, out.entropy, None, mean, correct

    setattr(place, NAME, Ours)
    try:
        yield
    finally:
        setattr(place, NAME, theirs)
