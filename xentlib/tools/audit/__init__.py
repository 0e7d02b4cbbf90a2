"""Steps of other people's trainers, held against the oracle, and their defects named.

This package has what needs no framework: the problem that a step is given, the defects as data,
what each would return, and the report. `xentlib.torch.audit` and `xentlib.jax.audit` call a step.
"""

from xentlib.tools.audit.defects import DEFECTS, Defect
from xentlib.tools.audit.problem import KINDS, Options
from xentlib.tools.audit.report import Finding, Report

__all__ = ["DEFECTS", "KINDS", "Defect", "Finding", "Options", "Report"]
