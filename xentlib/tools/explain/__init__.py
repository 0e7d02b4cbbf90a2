"""Why a sampler's log-probabilities are not the trainer's: causes, in order of size.

The causes are data (`CAUSES`), each a reading of how log-probabilities were computed; the oracle's
computation in float64 says what each would give.
"""

from xentlib.tools.explain.causes import CAUSES, Cause
from xentlib.tools.explain.compare import explain
from xentlib.tools.explain.report import Effect, Ratios, Report, Side

__all__ = ["CAUSES", "Cause", "Effect", "Ratios", "Report", "Side", "explain"]
