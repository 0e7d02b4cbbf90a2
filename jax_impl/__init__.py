"""The loss head in JAX: `import xentlib.jax`. The definition is in `xentlib`."""

from xentlib.jax.labels import next_token_labels
from xentlib.jax.nll import NLLOutput, chunked_nll

__all__ = ["NLLOutput", "chunked_nll", "next_token_labels"]
