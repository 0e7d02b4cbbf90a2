"""Losses and divergences of other libraries, held to the contract.

The cases, the oracle in float64, the rows and the mutants are those of the parity run: `losses` has
those of a head's loss, `divergences` those of a student's divergence from a teacher.
"""

from xentlib.tools.conformance.divergence_loss import DivergenceLoss
from xentlib.tools.conformance.divergences import (
    Distance,
    DivergenceConformance,
    conform_divergence,
)
from xentlib.tools.conformance.losses import Conformance, Loss, conform

__all__ = [
    "Conformance",
    "Distance",
    "DivergenceConformance",
    "DivergenceLoss",
    "Loss",
    "conform",
    "conform_divergence",
]
