"""Another library's loss, held to the contract: cases, oracle, rows and mutants are those of the
parity run.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.checks.audit import described
from xentlib.lazy import refuse_missing
from xentlib.options import RULES
from xentlib.reference import nll_reference
from xentlib.tools.harness.backends import Call, Outcome, outcome_of
from xentlib.tools.harness.cases import BASE, GRID, low_precision
from xentlib.tools.harness.device import contract_settings
from xentlib.tools.harness.environment import BACKENDS
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import ARRAY_ARGUMENTS, Case, Problem, build
from xentlib.tools.parity.report.summary import print_table, row_statements
from xentlib.tools.parity.result import ParityResult, Section
from xentlib.tools.parity.rows.head import nll, same
from xentlib.tools.parity.rows.mutants import loss_and_gradients
from xentlib.ulp import round_to

__all__ = ["Conformance", "Loss", "conform"]

Array = npt.NDArray[Any]
Measure = Callable[[Findings, Problem], None]
ROWS = ("A0", "A2", "A5", "A6", "A7", "A8", "A11", "A14", "A16", "A19", "A26")
# Where both of our backends round: said of another library, and no part of the verdict.
REPORTED = ("A19",)
DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = (*ARRAY_ARGUMENTS, *RULES, "reduction", "weight_layout")


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of another library, in the contract's words: the adapter.

        Loss("mine", "torch", lambda hidden, weight, labels: mine(hidden @ weight.T, labels))

    Attributes:
        name: of the report.
        backend: "torch" or "jax", whose arrays it is given and whose autograd it is in.
        function: `function(hidden, weight, labels, **options)` of [N, H], [V, H] and [N]; it
            returns the mean over the tokens that count, [].
        options: which of `chunked_nll`'s it has, by their names there and with their meaning:
            bias, where, token_weights, class_weights, softcap, label_smoothing, z_loss,
            logit_scale, temperature, reduction, denominator, weight_layout. Cases that need another
            one are left out, and listed; a bias that is finite is taken out of the case.
        ignores: whether labels of -100 take a token out, of the divisor too. If not, no case has
            such labels.
        dtypes: of hidden states and head that it takes.
        version: of the library.
        note: for the report, what a reader of its rows should know.
    """

    name: str
    backend: str
    function: Callable[..., Any]
    options: tuple[str, ...] = ()
    ignores: bool = True
    dtypes: tuple[str, ...] = DTYPES
    version: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Conformance:
    """What was found of a loss.

    Attributes:
        loss: the adapter.
        result: measurements, as of a parity run.
        left_out: why, by the names of cases.
        loss_dtype: of the loss that it returns for bf16, or nothing.
        rounds_logits: by how much nearer its bf16 loss is to the loss of logits that are rounded to
            bf16 than to the loss of exact ones; above 4 it rounds them. None without bf16, or where
            the loss is a 16-bit number, which says too little.
    """

    loss: Loss
    result: ParityResult
    left_out: dict[str, str]
    loss_dtype: str
    rounds_logits: float | None

    @property
    def rows(self) -> dict[str, bool]:
        """Rows that were measured, and whether each holds."""
        return rows_of(self.result)

    @property
    def passed(self) -> bool:
        """Whether every row that was measured holds, and no case has raised. A19, which says where
        both backends of xentlib round, is measured and does not count."""
        held = (holds for row, holds in self.rows.items() if row not in REPORTED)
        return all(held) and not self.result.failed

    @property
    def choices(self) -> list[str]:
        """What it rounds in bf16 where the contract does not: a choice, no defect."""
        sentences = []
        if self.loss_dtype not in ("float32", "float64", ""):
            sentences.append(f"In bf16 its loss is a number in {self.loss_dtype}.")
        if self.rounds_logits is not None and self.rounds_logits > 4:
            sentences.append("In bf16 its loss is that of logits rounded to bf16.")
        return sentences

    def __str__(self) -> str:
        """The table of a parity run, and what was left out."""
        stream = io.StringIO()
        print(f"{self.loss.name} {self.loss.version}".strip(), file=stream)
        statements = {name: text for name, text in row_statements().items() if name in ROWS}
        print_table(self.result, stream, statements, REPORTED)
        for line in left_over(self.left_out, self.choices):
            print(line, file=stream)
        return stream.getvalue()


def rows_of(result: ParityResult) -> dict[str, bool]:
    """Rows that were measured, and whether each holds."""
    holds: dict[str, bool] = {}
    for m in result.measurements:
        holds[m.row] = holds.get(m.row, True) and m.passed
    return holds


def left_over(left_out: dict[str, str], choices: list[str]) -> list[str]:
    """Below a report's table."""
    return [*(f"left out: {name}, {why}" for name, why in left_out.items()), *choices]


def conform(
    loss: Loss, *, seed: int = 0, cases: tuple[Case, ...] = GRID, base: Case = BASE
) -> Conformance:
    """Hold a loss to rows A0, A2, A5 to A8, A11, A16 and A26, and the checks to their mutants
    (A14). A19 is measured too, and is no part of the verdict.

    Args:
        loss: the adapter.
        seed: of every array.
        cases: of float32; those of 16 bits are made from them. By default the parity run's.
        base: the case of the mutants and of run to run: a mean, without options.

    Returns:
        What was found; print it.

    Raises:
        TypeError: no `Loss`, one whose function is none, or cases that are none.
        ValueError: a backend, an option or a dtype that the contract does not have; a base case
            that the loss cannot be given.
        ImportError: the backend is not installed.

    Numerics: settings are those of the contract, but for XLA's, which has to be there before JAX is
    imported, `XLA_FLAGS=--xla_allow_excess_precision=false`; functions of JAX are jitted. A case in
    which the function raises, or returns something else than a mean, is an error of its section. A
    gradient that the loss does not have is 0.
    """
    check(loss)
    check_cases(loss, cases, base)
    findings = Findings((loss.backend,), run=lambda backend, problem: run(loss, problem))
    left_out: dict[str, str] = {}
    sections = []
    with contract_settings((loss.backend,)):
        for dtype in loss.dtypes:
            grid = cases if dtype == "float32" else low_precision(cases, dtype)
            for case in grid:
                fitted = fit(case, loss)
                if isinstance(fitted, str):
                    left_out[case.id] = fitted
                    continue
                sections.append(section(findings, fitted.text, nll.against_oracle, fitted, seed))
            plain = fit(base if dtype == "float32" else low_precision((base,), dtype)[0], loss)
            assert isinstance(plain, Case)  # `check_cases`
            sections.append(section(findings, f"mutants, {dtype}", mutants, plain, seed))
            sections.append(section(findings, f"run to run, {dtype}", repeat, plain, seed))
    result = ParityResult(sections, [x.name for x in sections])
    return Conformance(loss, result, left_out, *rounding(loss, base, seed))


def check(loss: Loss) -> None:
    if not isinstance(loss, Loss):
        raise TypeError(
            f"`loss` must be a `Loss`; got {described(loss)}. Wrap the function: "
            f"Loss('mine', 'torch', function). A `DivergenceLoss` is for `conform_divergence`."
        )
    if not callable(loss.function):
        raise TypeError(
            f"`function` must be a function of hidden, weight and labels; got "
            f"{described(loss.function)}."
        )
    check_backend(loss.backend)
    check_names(loss, OPTIONS, DTYPES)


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"`backend` must be 'torch' or 'jax'; got {name!r}.")
    try:
        import_module(name)
    except ModuleNotFoundError as missing:
        refuse_missing(missing, name, {"torch": "PyTorch", "jax": "JAX"}[name])


def check_names(loss: Any, options: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
    """Of an adapter."""
    for name, known in (("options", options), ("dtypes", dtypes)):
        names = getattr(loss, name)
        if (
            any(x not in known for x in names)
            or isinstance(names, str)
            or (name == "dtypes" and not names)
        ):
            raise ValueError(
                f"`{name}` must be a tuple of names among {', '.join(known)}; got {names!r}."
            )


def check_cases(loss: Loss, cases: Any, base: Any) -> None:
    if not isinstance(cases, (tuple, list)) or not all(isinstance(x, Case) for x in cases):
        raise TypeError(
            f"`cases` must be a tuple of `Case`s; got {described(cases)}. Leave it out for all of "
            f"the parity run's, or write `(case,)`."
        )
    fitted = fit(base, loss)
    if isinstance(fitted, str):
        raise ValueError(
            f"`base` must be a case that the loss can be given; got {base.id!r}, and the loss has "
            f"{fitted}. Leave `base` out."
        )


def fit(case: Case, loss: Loss) -> Case | str:
    """A case as the loss can be given it, or why it cannot."""
    needed = {name for name in ARRAY_ARGUMENTS if name != "bias" and getattr(case, name)}
    needed |= set(case.options) | ({"temperature"} if case.token_temperature else set())
    needed |= {"weight_layout"} if case.layout == "HV" else set()
    needed |= {"bias"} if case.dead else set()
    missing = sorted(needed - set(loss.options))
    if missing:
        return f"no {', '.join(missing)}"
    if case.ignored == 1.0 and not loss.ignores:
        return "no ignored labels"
    return replace(
        case,
        bias=case.bias and "bias" in loss.options,
        ignored=case.ignored if loss.ignores else 0.0,
    )


def section(findings: Findings, name: str, measure: Measure, case: Case, seed: int) -> Section:
    """What one case has found."""
    found = timed(findings, name, lambda: measure(findings, made(case, seed)))
    if case.ignored == 1.0:  # that the loss of nothing is 0 is row A0
        found = replace(found, measurements=tuple(m for m in found.measurements if m.row == "A0"))
    return found


def timed(findings: Findings, name: str, measure: Callable[[], None]) -> Section:
    """What is measured, by which name; what the function raises is kept."""
    start, before, error = time.perf_counter(), len(findings.measurements), ""
    try:
        measure()
    except Exception as raised:  # noqa: BLE001 - another library's, and it is reported
        error = f"{type(raised).__name__}: {raised}"
    measured = tuple(findings.measurements[before:])
    return Section(name, measured, seconds=time.perf_counter() - start, error=error)


def made(case: Case, seed: int) -> Problem:
    """A case's arrays, with an upstream gradient that a loss in 16 bits can be given as it is.
    Rounded to its dtype it would put all gradients off by up to 2^-9: not the loss's doing."""
    problem = build(case, seed)
    return problem.changed(upstream=float(round_to(np.asarray(problem.upstream), "bfloat16")))


def mutants(findings: Findings, problem: Problem) -> None:
    """A14, of one case in its dtype."""
    (backend,) = findings.backends
    loss_and_gradients(findings, problem, backend)


def repeat(findings: Findings, problem: Problem) -> None:
    """A11: run to run."""
    (backend,) = findings.backends
    first, again = (findings.run(backend, problem) for _ in range(2))
    details: dict[str, Any] = {"backend": backend, "case": problem.text}
    same(findings, "A11", again, first, str, **details)


def rounding(loss: Loss, base: Case, seed: int) -> tuple[str, float | None]:
    """`Conformance.loss_dtype` and `rounds_logits`."""
    fitted = fit(low_precision((base,))[0], loss)
    if "bfloat16" not in loss.dtypes or isinstance(fitted, str):
        return "", None
    problem = made(replace(fitted, bias=False), seed)
    wide = np.asarray(problem.hidden, np.float64) @ np.asarray(problem.weight, np.float64).T
    # The same loss of given logits: hidden = I, weight = logits^T.
    eye = np.eye(len(problem.labels))
    exact = problem.reference().loss
    rounded = nll_reference(eye, round_to(wide, "bfloat16").T, problem.labels).loss
    try:
        with contract_settings((loss.backend,)):
            given = run(loss, problem).loss
    except Exception:  # noqa: BLE001 - its sections say what it raises
        return "", None
    if given.dtype.itemsize < 4:
        return given.dtype.name, None
    to_exact, to_rounded = (abs(float(given) - float(x)) for x in (exact, rounded))
    return given.dtype.name, to_exact / max(to_rounded, 1e-300)


# --- one call -------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """What an adapter's function returns."""

    loss: Any


class AdapterCall(Call):
    """A call of an adapter's function, whose name stands for it."""

    def of(self, ours: Any, leaves: Any, labels: Any, keywords: dict[str, Any]) -> Mean:
        function: Any = self.function

        def of_leaves(hidden: Any, weight: Any, bias: Any) -> Any:
            named = keywords if bias is None else {"bias": bias, **keywords}
            return function(hidden, weight, labels, **named)

        if ours.__name__ == "xentlib.jax":
            import jax

            out = jax.jit(of_leaves)(*leaves.values())
            check_mean(out, jax.Array)
        else:
            import torch

            labels = labels.long()
            out = of_leaves(**leaves)
            check_mean(out, torch.Tensor, getattr(out, "requires_grad", False))
        return Mean(out)


def run(loss: Loss, problem: Problem) -> Outcome:
    """The loss and its gradients, NumPy in and NumPy out; 0 for one that it does not have."""
    arrays = {name: getattr(problem, name) for name in ARRAY_ARGUMENTS if name != "bias"}
    options = {k: x for k, x in {**arrays, **problem.options}.items() if x is not None}
    leaves = problem.leaves
    call: Any = AdapterCall(loss.function, leaves, problem.labels, options)  # type: ignore[arg-type]
    outcome = outcome_of(loss.backend, call, {"loss": problem.upstream})
    zeros = {f"d_{name}": np.zeros_like(x) for name, x in leaves.items() if x is not None}
    return outcome._replace(**(zeros | outcome.gradients()))


def check_mean(out: Any, array: type, graph: bool = True) -> None:
    """Of a call of the adapter's function."""
    shape = getattr(out, "shape", None)
    if not isinstance(out, array) or shape != () or not graph:
        came = described(out) + ("" if graph or not isinstance(out, array) else " without a graph")
        raise ValueError(
            f"`function` must return the mean, an array of shape () that can be differentiated; "
            f"got {came}. Of a tuple or an output return the loss alone."
        )
