"""The loss head in JAX: `import xentlib.jax`. The definition is in `xentlib`."""

from typing import TYPE_CHECKING, Any

try:
    import jax  # noqa: F401
except ModuleNotFoundError as missing:
    from xentlib.lazy import refuse_missing

    refuse_missing(missing, "jax", "JAX")

from xentlib.head import LowRankHead
from xentlib.jax.api import (
    chunked_divergence,
    chunked_logprobs,
    chunked_nll,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)
from xentlib.labels import SoftLabels
from xentlib.lazy import loading
from xentlib.logprobs import LogprobOutput
from xentlib.nll import NLLOutput
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

if TYPE_CHECKING:
    from xentlib.accumulate import CountOverflowError, WindowStats
    from xentlib.collectives import Collective, CollectiveCount
    from xentlib.divergence import DivergenceOutput
    from xentlib.jax.accumulate import TokenNormalizedState, accumulate_grads, token_normalized
    from xentlib.jax.collectives import count_collectives
    from xentlib.jax.crosscheck import CrossCheck
    from xentlib.jax.evaluation import Evaluation
    from xentlib.jax.labels import next_token_labels
    from xentlib.jax.module import LinenNLLHead, NLLHead
    from xentlib.jax.segments import segment_mean, segment_sum
    from xentlib.shards import PaddedVocab, VocabShard
    from xentlib.tools.crosscheck import CrossCheckError

__all__ = [
    "Collective",
    "CollectiveCount",
    "CountOverflowError",
    "CrossCheck",
    "CrossCheckError",
    "DivergenceOutput",
    "Evaluation",
    "LinenNLLHead",
    "LogprobOutput",
    "LowRankHead",
    "NLLHead",
    "NLLOutput",
    "PaddedVocab",
    "SoftLabels",
    "TeacherHead",
    "TeacherLogits",
    "TeacherTopK",
    "TokenNormalizedState",
    "VocabShard",
    "WindowStats",
    "accumulate_grads",
    "chunked_divergence",
    "chunked_logprobs",
    "chunked_nll",
    "count_collectives",
    "next_token_labels",
    "segment_mean",
    "segment_sum",
    "token_normalized",
    "vocab_parallel_divergence",
    "vocab_parallel_logprobs",
]


# What a call of the loss does not need. A type checker does not run this: it has the names above.
if not TYPE_CHECKING:
    load = loading(
        __name__,
        {
            "xentlib.accumulate": "CountOverflowError WindowStats",
            "xentlib.collectives": "Collective CollectiveCount",
            "xentlib.divergence": "DivergenceOutput",
            "xentlib.jax.accumulate": "TokenNormalizedState accumulate_grads token_normalized",
            "xentlib.jax.collectives": "count_collectives",
            "xentlib.jax.crosscheck": "CrossCheck",
            "xentlib.jax.evaluation": "Evaluation",
            "xentlib.jax.labels": "next_token_labels",
            "xentlib.jax.module": "LinenNLLHead NLLHead",
            "xentlib.jax.segments": "segment_mean segment_sum",
            "xentlib.shards": "PaddedVocab VocabShard",
            "xentlib.tools.crosscheck": "CrossCheckError",
        },
    )

    def __getattr__(name: str) -> Any:
        """The modules of Flax alone need it."""
        try:
            return load(name)
        except ModuleNotFoundError as missing:
            if missing.name != "flax":
                raise
            raise ImportError(f"`{name}` needs Flax. Run: pip install 'xentlib[flax]'") from missing
