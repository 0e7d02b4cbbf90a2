"""Another library's divergence of a student from a teacher, held to the rows of given logits.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xentlib.checks.validators import is_count
from xentlib.contract import Measurement
from xentlib.tools.conformance import given
from xentlib.tools.conformance.divergence_loss import (
    ADAPTERS,
    DivergenceLoss,
    ReturnedError,
    check_divergence_loss,
    check_returned,
)
from xentlib.tools.conformance.given import Arrays, Called, Given
from xentlib.tools.conformance.losses import Array, left_over, rows_of, timed
from xentlib.tools.harness.backends import Call, Outcome, outcome_of
from xentlib.tools.harness.device import contract_settings
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.table import aligned
from xentlib.tools.parity.report.summary import (
    allowance_used,
    bound_text,
    number,
    print_table,
    row_statements,
    value_text,
)
from xentlib.tools.parity.result import ParityResult
from xentlib.tools.parity.rows.divergences import reject

ROWS_OF_GIVEN = ("A0", "A7", "A14", "A16", "A20", "A21", "A22", "A24")


class Distance(NamedTuple):
    """How far off a divergence is where student and teacher are so far apart.

    Attributes:
        far: standard deviation of the difference of their logits.
        divergence: the largest of a token, in nats.
        value: largest relative error of a token's value.
        gradient: error of d logits over its norm.
        negative: tokens whose value is below 0, or NaN.
    """

    far: float
    divergence: float
    value: float
    gradient: float
    negative: int


@dataclass(frozen=True, slots=True)
class DivergenceConformance:
    """What was found of a divergence.

    Attributes:
        loss: the adapter.
        result: measurements, as of a parity run.
        left_out: why, by the names of cases.
        distances: how far off it is, from 0.1 to 1e-7; no row claims a value below 1e-9 nats.
        loss_dtype: of what it returns for logits in bf16, or nothing.
    """

    loss: DivergenceLoss
    result: ParityResult
    left_out: dict[str, str]
    distances: tuple[Distance, ...]
    loss_dtype: str

    @property
    def rows(self) -> dict[str, bool]:
        """Rows that were measured, and whether each holds."""
        return rows_of(self.result)

    @property
    def checks(self) -> dict[str, bool]:
        """The same by what was measured: "value", "gradient", "never negative", "equal logits",
        "gradient of equal logits", "masked tokens", "no valid token"."""
        found = {name: self.of(name) for name in given.NAMES}
        return {name: all(m.passed for m in of) for name, of in found.items() if of}

    @property
    def passed(self) -> bool:
        """Whether every row that was measured holds, and no case has raised. Gradients of equal
        logits need not be 0 in every bit, as A24 has them, but as near as A22 allows."""
        return not self.result.failed and all(
            m.passed or (m.row, m.quantity) == ("A24", given.EQUAL_GRADIENT)
            for m in self.result.measurements
        )

    @property
    def choices(self) -> list[str]:
        """What it rounds where the contract does not: a choice, no defect."""
        sentences = []
        if self.loss_dtype not in ("float32", "float64", ""):
            sentences.append(f"In bf16 its loss is a number in {self.loss_dtype}.")
        near = {m.row: m.passed for m in self.of(given.EQUAL_GRADIENT)}
        if near.get("A22") and not near["A24"]:
            sentences.append("Its gradients of equal logits are rounded, and not exactly 0.")
        return sentences

    def of(self, name: str) -> list[Measurement]:
        """What was measured by that name of `checks`, the worst first."""
        found = (m for m in self.result.measurements if m.quantity == name)
        return sorted(found, key=lambda m: (m.passed, -allowance_used(m), -np.nan_to_num(m.value)))

    def __str__(self) -> str:
        """The table of a parity run, the distances, and what was left out."""
        loss, stream = self.loss, io.StringIO()
        print(", ".join(f"{x}" for x in (loss.name, loss.version, loss.how) if x), file=stream)
        statements = {x: text for x, text in row_statements().items() if x in ROWS_OF_GIVEN}
        print_table(self.result, stream, statements)
        lines = [self.line(name, holds) for name, holds in self.checks.items()]
        head: tuple[str, ...] = ("measured", "result", "worst", "misses")
        print("\n" + "\n".join(aligned([head, *lines])), file=stream)
        head = ("logits apart", "largest D", "value off", "gradient off", "negative tokens")
        lines = [[number(x) for x in distance] for distance in self.distances]
        print("\n" + "\n".join(aligned([head, *lines])), file=stream)
        for line in left_over(self.left_out, self.choices):
            print(line, file=stream)
        return stream.getvalue()

    def line(self, name: str, holds: bool) -> list[str]:
        """Of the report: the worst that was measured, its bound, and the cases that miss it."""
        found = self.of(name)
        cases = dict.fromkeys(m.case.partition(", ")[2] for m in found if not m.passed)
        worst = f"{found[0].metric} {value_text(found[0])} ({bound_text(found[0])})"
        return [name, "pass" if holds else "FAIL", worst, "; ".join(cases)]


def conform_divergence(divergence: DivergenceLoss, *, seed: int = 0) -> DivergenceConformance:
    """Hold a divergence of given logits to rows A0, A20 to A22 and A24, in 16 bits A7, A16 and A20,
    and the checks to their mutants (A14).

    Its logits are 0.1 to 1e-7 apart, equal, near 1000, -inf for some classes (of the teacher; with
    "reverse_kl" of both, as it is infinite otherwise), with a temperature, and masked.

    Args:
        divergence: the adapter.
        seed: of every array.

    Returns:
        What was found; print it.

    Raises:
        TypeError: no `DivergenceLoss`, or one whose function is none.
        ValueError: a kind, `beta`, reduction, option, dtype or seed that cannot be used; a function
            that takes other arguments, or returns something else than its reduction.
        ImportError: the backend is not installed.

    Numerics: values are of each token: those of a mean or a sum are taken of one token at a time,
    and once of all. The oracle has the same logits in float64. Bounds are those of the contract; no
    bits are compared but zeros, of which -0 is one. Settings as in `conform`. A case in which the
    function raises is an error of its section.
    """
    check_divergence_loss(divergence)
    ADAPTERS.require("seed", is_count(seed, 0), seed=seed)
    runner = Runner(divergence)
    findings = Findings((divergence.backend,))
    left_out: dict[str, str] = {}
    sections, distances = [], list[Distance]()
    with contract_settings((divergence.backend,)):
        runner.probe()
        for case in given.CASES:
            if case.dtype not in divergence.dtypes:
                continue
            why = excuse(divergence, case)
            if why:
                left_out[case.name] = why
                continue
            one = partial(of_case, findings, runner, case, seed, distances)
            sections.append(timed(findings, case.name, one))
        if "float32" in divergence.dtypes:
            one = partial(mutants, findings, runner, seed)
            sections.append(timed(findings, "mutants", one))
    result = ParityResult(sections, [x.name for x in sections])
    found = tuple(distances)
    return DivergenceConformance(divergence, result, left_out, found, runner.loss_dtype)


def excuse(loss: DivergenceLoss, case: Given) -> str:
    """Why a divergence is not given a case; nothing if it is."""
    missing = sorted(case.needs - set(loss.options))
    if missing:
        return f"no {', '.join(missing)}"
    return "no logits of -inf" if case.dead and not loss.infinite else ""


def of_case(
    findings: Findings, runner: Runner, case: Given, seed: int, distances: list[Distance]
) -> None:
    loss = runner.loss
    arrays = given.build(case, loss.kind, loss.reduction, seed)
    exact = given.exact_of(case, arrays, loss.reduction, loss.temperature_squared, loss.how)
    got = runner.called(case, arrays)
    of = {"backend": loss.backend, "case": f"{loss.kind}, {case.name}"}
    given.measure(findings, case, arrays, got, exact, **of)
    if case in given.DISTANCES:
        distances.append(Distance(case.far, *given.off_by(got, exact)))


def mutants(findings: Findings, runner: Runner, seed: int) -> None:
    """A14 of A20 and A22."""
    loss, case = runner.loss, given.MUTANTS
    arrays = given.build(case, loss.kind, loss.reduction, seed)
    got = {loss.backend: given.outcome(runner.called(case, arrays))}
    upstream = given.per_token(arrays, loss.reduction)
    reject(findings, loss.how, arrays.student, arrays.teacher, upstream, got)


# --- one call -------------------------------------------------------------------------------------


class Runner:
    """Calls of an adapter's function, NumPy in and NumPy out; in JAX one program a shape."""

    def __init__(self, loss: DivergenceLoss) -> None:
        self.loss = loss
        self.loss_dtype = ""
        self.programs: dict[float, Any] = {}

    def called(self, case: Given, arrays: Arrays) -> Called:
        """Values of each token and the gradient, of a case."""
        whole = self.run(case, arrays.student, arrays.teacher, arrays.where, arrays.upstream)
        if case.dtype == "bfloat16":
            self.loss_dtype = whole.loss.dtype.name
        values = whole.loss
        if self.loss.reduction != "none":
            rows = range(len(arrays.student))
            pairs = ((arrays.student[k : k + 1], arrays.teacher[k : k + 1]) for k in rows)
            values = np.stack([self.run(case, *pair).loss for pair in pairs])
        return Called(values, whole.loss, whole.d_logits)

    def run(
        self,
        case: Given,
        student: Array,
        teacher: Array,
        where: Array | None = None,
        upstream: Array | None = None,
    ) -> Outcome:
        options: dict[str, Any] = {} if where is None else {"where": where}
        if case.temperature != 1.0:
            options["temperature"] = case.temperature
        call: Any = DivergenceCall(self, {"logits": student}, np.zeros(0, np.int32), options)  # type: ignore[arg-type]
        call.keywords["teacher"] = teacher
        return outcome_of(self.loss.backend, call, {} if upstream is None else {"loss": upstream})

    def probe(self) -> None:
        """One call of two tokens, whose result is refused if it has not the declared shape. What
        the function itself raises is said by its cases."""
        student = np.asarray([[0.0, 1.0, 2.0], [1.0, 1.0, 0.0]], np.float32)
        upstream = np.ones((2,) * (self.loss.reduction == "none"), np.float32)
        try:
            self.run(Given("probe", 1.0), student, np.ones_like(student), upstream=upstream)
        except ReturnedError:
            raise
        except Exception:  # noqa: BLE001 - another library's, and its cases report it
            return


class DivergenceCall(Call):
    """A call of an adapter's function: `function` is its `Runner`."""

    def of(self, ours: Any, leaves: Any, labels: Any, keywords: dict[str, Any]) -> Outcome:
        runner: Any = self.function
        options, logits = dict(keywords), leaves["logits"]
        teacher = options.pop("teacher")
        if ours.__name__ == "xentlib.jax":
            import jax

            temperature = options.pop("temperature", None)
            named = {} if temperature is None else {"temperature": temperature}
            if temperature not in runner.programs:  # a number, as a user writes it: no tracer
                function = runner.loss.function
                runner.programs[temperature] = jax.jit(lambda s, t, o: function(s, t, **o, **named))
            out = runner.programs[temperature](logits, teacher, options)
            kind: Any = jax.Array
            graph = True
        else:
            import torch

            out = runner.loss.function(logits, teacher, **options)
            kind = torch.Tensor
            graph = bool(getattr(out, "requires_grad", False)) or not logits.requires_grad
        check_returned(runner.loss.reduction, out, kind, graph, len(logits))
        return Outcome(loss=out)
