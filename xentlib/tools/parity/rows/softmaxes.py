"""Softmaxes with a defect that only some logits show: what A14 has of rows A2, A5, A6 and A26.

Each is a mean loss and its gradients in float32 NumPy, right but for one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.cases import GRID, named
from xentlib.tools.harness.findings import GRADIENT_ROWS, Findings, label, part_of
from xentlib.tools.harness.problems import Problem, build
from xentlib.tools.parity.rows.head import beside

Array = npt.NDArray[Any]
NO_MAXIMUM, LOG_OF_SOFTMAX = "no maximum", "log of softmax"
FEW_BITS = "exponential of 18 bits"
# The case that shows it, and what of a step it has in another way.
CASES = {NO_MAXIMUM: "logits-100", LOG_OF_SOFTMAX: "far-label", FEW_BITS: "given-logits"}


def mutants(findings: Findings) -> None:
    """Each by every row that must reject it, whatever the backend."""
    for defect, name in CASES.items():
        (case,) = named(GRID, name)
        problem = build(case, 0)
        reference, wrong = problem.reference(), of_defect(problem, defect)
        for backend in findings.backends:
            of: dict[str, Any] = {"backend": backend}
            if defect == FEW_BITS:
                got, *exact = beside(problem, wrong.d_weight, reference)
                findings.reject("A26", {defect: got}, *exact, quantity="d logits", **of)
                continue
            scale = reference.loss_magnitude
            details = {"magnitude": scale, "quantity": f"loss, {defect}", **of}
            findings.reject("A2", {defect: wrong.loss}, reference.loss, **details)
            for gradient in ("d_hidden", "d_weight") if defect == NO_MAXIMUM else ():
                arrays = (part_of(reference, gradient, part) for part in ("d", "bound"))
                row, got = GRADIENT_ROWS[gradient], {defect: getattr(wrong, gradient)}
                details = {"quantity": f"{label(gradient)}, {defect}", **of}
                findings.reject(row, got, *arrays, **details)


def of_defect(problem: Problem, defect: str = "", bits: float = 18) -> Outcome:
    """Of a problem of a mean, without a bias; right without a defect."""
    x_NH, w_VH = problem.hidden.astype(np.float32), problem.weight.astype(np.float32)
    valid, rows = problem.valid, np.arange(len(x_NH))
    y = np.where(valid, problem.labels, 0)
    z = x_NH @ w_VH.T
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        m = np.float32(0) if defect == NO_MAXIMUM else z.max(axis=1, keepdims=True)
        e = np.exp(z - m)
        if defect == FEW_BITS:
            e *= np.where(e.view(np.int32) % 2, 1 + 2.0**-bits, 1 - 2.0**-bits).astype(np.float32)
        s = e.sum(axis=1, keepdims=True)
        p = e / s
        logprob = np.log(p[rows, y]) if defect == LOG_OF_SOFTMAX else (z - m - np.log(s))[rows, y]
        p[rows, y] -= 1
        dz = p * (valid / valid.sum() * problem.upstream).astype(np.float32)[:, None]
        loss = -logprob[valid].mean()
        return Outcome(loss=np.asarray(loss), d_hidden=dz @ w_VH, d_weight=dz.T @ x_NH)
