"""The loss head in PyTorch: `import xentlib.torch`. The definition is in `xentlib`."""

from typing import TYPE_CHECKING

try:
    import torch  # noqa: F401
except ModuleNotFoundError as missing:
    from xentlib.lazy import refuse_missing

    refuse_missing(missing, "torch", "PyTorch")

from xentlib.head import LowRankHead
from xentlib.labels import SoftLabels
from xentlib.lazy import loading
from xentlib.logprobs import LogprobOutput
from xentlib.nll import NLLOutput
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK
from xentlib.torch.api import (
    chunked_divergence,
    chunked_logprobs,
    chunked_nll,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)
from xentlib.torch.head.module import NLLHead
from xentlib.torch.placement.head import gather_head

if TYPE_CHECKING:
    from xentlib.accumulate import (
        CountMismatchError,
        UnsupportedWrapperError,
        WindowStateError,
        WindowStats,
    )
    from xentlib.collectives import Collective, CollectiveCount
    from xentlib.divergence import DivergenceOutput
    from xentlib.shards import PaddedVocab, VocabShard
    from xentlib.tools.crosscheck import CrossCheckError
    from xentlib.torch.accumulate import TokenNormalizer
    from xentlib.torch.collectives import count_collectives
    from xentlib.torch.crosscheck import CrossCheck
    from xentlib.torch.evaluation import Evaluation
    from xentlib.torch.labels import next_token_labels
    from xentlib.torch.segments import segment_mean, segment_sum
    from xentlib.torch.window import Window

__all__ = [
    "Collective",
    "CollectiveCount",
    "CountMismatchError",
    "CrossCheck",
    "CrossCheckError",
    "DivergenceOutput",
    "Evaluation",
    "LogprobOutput",
    "LowRankHead",
    "NLLHead",
    "NLLOutput",
    "PaddedVocab",
    "SoftLabels",
    "TeacherHead",
    "TeacherLogits",
    "TeacherTopK",
    "TokenNormalizer",
    "UnsupportedWrapperError",
    "VocabShard",
    "Window",
    "WindowStateError",
    "WindowStats",
    "chunked_divergence",
    "chunked_logprobs",
    "chunked_nll",
    "count_collectives",
    "gather_head",
    "next_token_labels",
    "segment_mean",
    "segment_sum",
    "vocab_parallel_divergence",
    "vocab_parallel_logprobs",
]

# What a call of the loss does not need. A type checker does not run this: it has the names above.
if not TYPE_CHECKING:
    __getattr__ = loading(
        __name__,
        {
            "xentlib.accumulate": "CountMismatchError UnsupportedWrapperError WindowStateError "
            "WindowStats",
            "xentlib.collectives": "Collective CollectiveCount",
            "xentlib.divergence": "DivergenceOutput",
            "xentlib.shards": "PaddedVocab VocabShard",
            "xentlib.tools.crosscheck": "CrossCheckError",
            "xentlib.torch.accumulate": "TokenNormalizer",
            "xentlib.torch.collectives": "count_collectives",
            "xentlib.torch.crosscheck": "CrossCheck",
            "xentlib.torch.evaluation": "Evaluation",
            "xentlib.torch.labels": "next_token_labels",
            "xentlib.torch.segments": "segment_mean segment_sum",
            "xentlib.torch.window": "Window",
        },
    )
