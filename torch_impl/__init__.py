"""The loss head in PyTorch: `import xentlib.torch`. The definition is in `xentlib`."""

from xentlib.torch.accumulate import TokenNormalizer
from xentlib.torch.collectives import count_collectives
from xentlib.torch.evaluation import Evaluation
from xentlib.torch.head import gather_head
from xentlib.torch.labels import next_token_labels
from xentlib.torch.logprobs import LogprobOutput, chunked_logprobs, vocab_parallel_logprobs
from xentlib.torch.module import NLLHead
from xentlib.torch.nll import NLLOutput, chunked_nll

__all__ = [
    "Evaluation",
    "LogprobOutput",
    "NLLHead",
    "NLLOutput",
    "TokenNormalizer",
    "chunked_logprobs",
    "chunked_nll",
    "count_collectives",
    "gather_head",
    "next_token_labels",
    "vocab_parallel_logprobs",
]
