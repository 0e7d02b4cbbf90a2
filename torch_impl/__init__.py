"""The loss head in PyTorch: `import xentlib.torch`. The definition is in `xentlib`."""

from xentlib.torch.labels import next_token_labels
from xentlib.torch.nll import NLLOutput, chunked_nll

__all__ = ["NLLOutput", "chunked_nll", "next_token_labels"]
