"""The loss head in JAX: `import xentlib.jax`. The definition is in `xentlib`."""

from typing import TYPE_CHECKING, Any

try:
    import jax  # noqa: F401
except ModuleNotFoundError as missing:
    from xentlib.checks.installed import refuse_missing

    refuse_missing(missing, "jax", "JAX")

from xentlib.accumulate import CountOverflowError, WindowStats
from xentlib.collectives import Collective, CollectiveCount
from xentlib.crosscheck import CrossCheckError
from xentlib.jax.accumulate import TokenNormalizedState, accumulate_grads, token_normalized
from xentlib.jax.collectives import count_collectives
from xentlib.jax.crosscheck import CrossCheck
from xentlib.jax.evaluation import Evaluation
from xentlib.jax.labels import next_token_labels
from xentlib.jax.public import chunked_logprobs, chunked_nll, vocab_parallel_logprobs
from xentlib.logprobs import LogprobOutput
from xentlib.lowrank import LowRankHead
from xentlib.nll import NLLOutput

if TYPE_CHECKING:
    from xentlib.jax.module import LinenNLLHead, NLLHead

__all__ = [
    "Collective",
    "CollectiveCount",
    "CountOverflowError",
    "CrossCheck",
    "CrossCheckError",
    "Evaluation",
    "LinenNLLHead",
    "LogprobOutput",
    "LowRankHead",
    "NLLHead",
    "NLLOutput",
    "TokenNormalizedState",
    "WindowStats",
    "accumulate_grads",
    "chunked_logprobs",
    "chunked_nll",
    "count_collectives",
    "next_token_labels",
    "token_normalized",
    "vocab_parallel_logprobs",
]


def __getattr__(name: str) -> Any:
    """The modules, which alone need Flax."""
    if name not in ("LinenNLLHead", "NLLHead"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from xentlib.jax import module
    except ModuleNotFoundError as missing:
        raise ImportError(f"`{name}` needs Flax. Run: pip install 'xentlib[flax]'") from missing
    return getattr(module, name)
