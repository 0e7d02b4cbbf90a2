"""Log-probabilities under the signatures of verl, SkyRL, NeMo-RL and open-instruct.

Each function stands in for theirs of the same name, and returns float32, 0 where the label is -100.
None of them writes to the logits that it is given.

Shapes: B rows, L tokens of a row, H hidden width, V vocabulary, C columns or rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from xentlib.torch.api import chunked_logprobs, vocab_parallel_logprobs
from xentlib.torch.labels import next_token_labels

__all__ = [
    "FusedLinearForPPO",
    "from_parallel_hidden_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "linear_cross_entropy",
    "log_softmax_and_gather",
    "logprobs_from_logits",
]


class FusedLinearForPPO(nn.Module):
    """verl's (`verl.utils.experimental.torch_functional`): of hidden states and the head."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        """`chunk_size` and `impl_backend` choose what is chosen here by itself."""
        super().__init__()

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [...] of hidden states [..., H] and ids [...]; verl has
        rolled the ids already. The entropy, which verl rounds to the dtype of the logits, is
        float32, and its gradient flows."""
        out = chunked_logprobs(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True
        )
        return out.logprobs, out.entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    *,
    reduce_hidden_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """verl's of one rank, or of Megatron ranks whose gather of the sequence adds d hidden up.

    `verl.utils.kernel.linear_cross_entropy`: log-probabilities and entropies [N]. With a group
    `weight` [C, H] is this rank's rows, and d hidden this rank's part. Without such a gather in
    front (no sequence parallelism) pass `reduce_hidden_grad=True`, which adds the parts up here.
    Of any width, and on any device.
    """
    check("`reduction`", reduction, "none", "Reduce the result.")
    out = chunked_logprobs(
        hidden.flatten(0, -2),
        weight,
        labels.flatten(),
        temperature=temperature,
        entropy=True,
        vocab_parallel=dist_process_group,
        reduce_hidden_grad=reduce_hidden_grad or dist_process_group is None,
    )
    return out.logprobs, out.entropy


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """verl's and SkyRL's: [...] of logits [..., V], which are kept until the backward.

    `inplace_backward` has no effect: the gradient is a tensor of its own.
    """
    return vocab_parallel_logprobs(logits, labels).logprobs


def log_softmax_and_gather(logits: Tensor, index: Tensor) -> Tensor:
    """open-instruct's (`open_instruct.model_utils`): [...] of logits [..., V]."""
    return logprobs_from_logits(logits, index)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
    *,
    shift_targets: bool = True,
) -> Tensor:
    """NeMo-RL's and SkyRL's: [B, L - 1] of logits [B, L or more, C] and targets [B, L], unshifted.

    `chunk_size` and `inference_only` have no effect. `shift_targets=False`, NeMo-RL's for diffusion
    models, gives [B, L].
    """
    check("`vocab_end_index`", vocab_end_index, vocab_start_index + vocab_parallel_logits.shape[-1])
    check("the size of `cp_group`", 1 if cp_group is None else dist.get_world_size(cp_group), 1)
    if sampling_params is not None:  # NeMo-RL's own, which has both
        kept = (sampling_params.top_k or -1, sampling_params.top_p or 1.0)
        check("top-k and top-p of `sampling_params`", kept, (-1, 1.0))
    labels, end = labelled(target, vocab_parallel_logits, shift_targets)
    out = vocab_parallel_logprobs(vocab_parallel_logits, labels, vocab_parallel=tp_group)
    return out.logprobs[:, :end]


def from_parallel_hidden_to_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
    *,
    reduce_hidden_grad: bool = False,
) -> Tensor:
    """SkyRL's of one rank, or of Megatron ranks whose gather of the sequence adds d hidden up.

    [B, L - 1] of hidden states [B, L or more, H], this rank's rows [C, H] and targets. With a group
    d hidden is this rank's part. Without such a gather in front (no sequence parallelism) pass
    `reduce_hidden_grad=True`, which adds the parts up here.
    `chunk_size`, `inference_only` and `fused_backend` have no effect.
    """
    check("`vocab_end_index`", vocab_end_index, vocab_start_index + lm_head_weight.shape[0])
    check("the size of `cp_group`", 1 if cp_group is None else dist.get_world_size(cp_group), 1)
    labels, end = labelled(target, hidden, True)
    out = chunked_logprobs(
        hidden,
        lm_head_weight,
        labels,
        temperature=temperature,
        vocab_parallel=tp_group,
        reduce_hidden_grad=reduce_hidden_grad or tp_group is None,
    )
    return out.logprobs[:, :end]


def labelled(target: Tensor, of: Tensor, shift: bool) -> tuple[Tensor, int]:
    """The label of each column, -100 on the last one and on padding, and the columns to keep."""
    labels = next_token_labels(target) if shift else target
    return pad(labels, (0, of.shape[1] - target.shape[1]), value=-100), target.shape[1] - shift


def check(name: str, came: Any, expected: Any, way: str = "Keep the framework's function.") -> None:
    if came != expected:
        raise ValueError(f"{name} must be {expected!r} here; got {came!r}. {way}")
