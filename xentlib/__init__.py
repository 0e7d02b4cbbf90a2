"""xentlib: one definition of the language-model loss head, two implementations held to it.

`import xentlib.torch` or `import xentlib.jax` for the functions; this package is the definition
they share: arguments, plans, float64 oracle and accuracy contract. It loads neither framework, and
NumPy with the first of its names: `xentlib doctor` says what is wrong with that.
"""

from typing import TYPE_CHECKING

from xentlib.lazy import loading

if TYPE_CHECKING:
    from xentlib.nll import NLLOutput
    from xentlib.plan import ChunkPlan, plan_chunks
    from xentlib.shards import PaddedVocab, VocabShard

__all__ = ["ChunkPlan", "NLLOutput", "PaddedVocab", "VocabShard", "__version__", "plan_chunks"]

__version__ = "0.1.0"
__getattr__ = loading(
    __name__,
    {
        "xentlib.nll": "NLLOutput",
        "xentlib.plan": "ChunkPlan plan_chunks",
        "xentlib.shards": "PaddedVocab VocabShard",
    },
)
