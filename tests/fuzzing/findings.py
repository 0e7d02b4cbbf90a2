"""What is found, and what was left out where the contract claims nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fuzzing.draw import Drawn
from xentlib.contract import Measurement
from xentlib.tools.harness import findings

UNCLAIMED = {
    "data": "rho, the share correctly rounded and the loss by its terms are claimed for logits of "
    "standard deviation 0.3 to 6, some tens of tokens and classes, nothing masked or offset, no "
    "softcap that saturates, no weights that cancel, no smoothing that does (docs/contract.md)",
    "entries": "rho, the share correctly rounded and the error ratio of a handful of entries are "
    "one rounding's luck",
    "even entropy": "the gradient of the entropy of nearly even classes, p (log p + entropy), "
    "cancels, so that more of it lies beside a tie",
    "near tie": "logits closer than their float32 error are equal, or the other way round",
    "float16 range": "dz has room to grow 32-fold, results end at 65504 (docs/numerics.md)",
    "A1, next to a boundary": "two float64 results on either side of a rounding boundary of the "
    "output's dtype (docs/numerics.md, Audit mode)",
    "A3": "its 2 ULP were measured on the logits of `logit_sets`. Others leave them in both "
    "backends: 2.6 with 31 classes and a standard deviation of 1, up to 4.25 with 2 to 8 classes. "
    "Their lse is held to the 4 ULP of A2, of |m| + log S",
    "A4, divided": "A4 is of logits that are given: a temperature or smoothing rounds them again",
    "A4, float64": "the oracle, float64 itself, does not put the rounding of z - m back",
    "others, softcap": "1 - tanh^2, which autograd takes, has no digits where the cap saturates",
    "others, class weights": "optax has none",
}


class Findings(findings.Findings):
    """With the checks that were left out, by name."""

    def __init__(self, left_out: Counter[str]) -> None:
        super().__init__(("torch", "jax"))
        self.left_out = left_out

    def claims(self, name: str, holds: bool) -> bool:
        """Whether to go on; False is counted under the name."""
        assert name in UNCLAIMED
        self.left_out[name] += not holds
        return holds

    def other(self, whose: str, quantity: str, metric: str, value: float, bound: float, case: str):
        """The oracle against a loss that is not ours; its bounds are those of test_reference."""
        passed = bool(value <= bound)
        self.measurements.append(
            Measurement("oracle", whose, case, quantity, metric, value, bound, passed, 1)
        )


def gradients_of(d: Drawn, outcome: Any) -> dict[str, Any]:
    """Gradients by name, flat."""
    if d.function == "vocab_parallel_logprobs":
        return {"d_logits": outcome.d_logits.reshape(d.case.tokens, d.case.vocab)}
    found = outcome.gradients()
    return found | {"d_hidden": found["d_hidden"].reshape(d.case.tokens, d.case.hidden)}
