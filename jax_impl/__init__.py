"""The loss head in JAX: `import xentlib.jax`. The definition is in `xentlib`."""

from xentlib.jax.collectives import CollectiveCount, count_collectives
from xentlib.jax.labels import next_token_labels
from xentlib.jax.logprobs import LogprobOutput, chunked_logprobs, vocab_parallel_logprobs
from xentlib.jax.nll import NLLOutput, chunked_nll

__all__ = [
    "CollectiveCount",
    "LogprobOutput",
    "NLLOutput",
    "chunked_logprobs",
    "chunked_nll",
    "count_collectives",
    "next_token_labels",
    "vocab_parallel_logprobs",
]
