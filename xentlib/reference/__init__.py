"""The float64 oracle: every value and gradient of the loss head in closed form, and how far a
correct float32 implementation may stray from it.

Shapes: N tokens, V vocabulary, H hidden width. Everything is held at once, so keep N * V small.

The running error bound, in units of u = 2^-24, is

    A    = |X||W|^T + |bias|, carried through scale, softcap and temperature
    Bz   = f * [p (A + E_p[A] + |z - lse| + |lse| + 2) + 2 |p - y|]
    B_dX = (Bz + |dz|) |W|     B_dW = (Bz + |dz|)^T |X|     B_db = sum over tokens of Bz + |dz|

f the token's factor. It follows each rounding once; it grows with the data, not with luck.
"""

from xentlib.reference.divergence import DivergenceReference, divergence_reference
from xentlib.reference.logprobs import LogprobReference, logprobs_reference
from xentlib.reference.nll import NLLReference, nll_reference
from xentlib.reference.soft_labels import soft_reference

__all__ = [
    "DivergenceReference",
    "LogprobReference",
    "NLLReference",
    "divergence_reference",
    "logprobs_reference",
    "nll_reference",
    "soft_reference",
]
