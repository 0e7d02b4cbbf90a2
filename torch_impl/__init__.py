"""The loss head in PyTorch: `import xentlib.torch`. The definition is in `xentlib`."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as missing:
    from xentlib.checks.installed import refuse_missing

    refuse_missing(missing, "torch", "PyTorch")

from xentlib.accumulate import (
    CountMismatchError,
    UnsupportedWrapperError,
    WindowStateError,
    WindowStats,
)
from xentlib.collectives import Collective, CollectiveCount
from xentlib.crosscheck import CrossCheckError
from xentlib.logprobs import LogprobOutput
from xentlib.lowrank import LowRankHead
from xentlib.nll import NLLOutput
from xentlib.torch.accumulate import TokenNormalizer
from xentlib.torch.collectives import count_collectives
from xentlib.torch.crosscheck import CrossCheck
from xentlib.torch.evaluation import Evaluation
from xentlib.torch.head import gather_head
from xentlib.torch.labels import next_token_labels
from xentlib.torch.module import NLLHead
from xentlib.torch.public import chunked_logprobs, chunked_nll, vocab_parallel_logprobs
from xentlib.torch.window import Window

__all__ = [
    "Collective",
    "CollectiveCount",
    "CountMismatchError",
    "CrossCheck",
    "CrossCheckError",
    "Evaluation",
    "LogprobOutput",
    "LowRankHead",
    "NLLHead",
    "NLLOutput",
    "TokenNormalizer",
    "UnsupportedWrapperError",
    "Window",
    "WindowStateError",
    "WindowStats",
    "chunked_logprobs",
    "chunked_nll",
    "count_collectives",
    "gather_head",
    "next_token_labels",
    "vocab_parallel_logprobs",
]
