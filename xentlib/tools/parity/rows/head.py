"""The rows of the two functions of a head: `nll` of `chunked_nll`, `recomputed` of the same with
`recompute`, `per_token` of `chunked_logprobs`, with a random gradient for every token and output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.tools.harness.backends import LARGEST, Outcome, run, run_logprobs
from xentlib.tools.harness.cases import chunks_of
from xentlib.tools.harness.device import torch_threads
from xentlib.tools.harness.findings import BOTH, Findings, label
from xentlib.tools.harness.problems import Problem, Upstream, logits_problem, upstream_of

Array = npt.NDArray[Any]
SEED = 5
CHUNK = 128  # rows, so that there are several
# What chunks do not show in: sums over tokens do.
OF_TOKENS = (
    *("logprobs", "entropy", "lse", *LARGEST, "d_hidden"),
    *("divergence", "teacher_entropy", "ids_logprobs"),
)
# Quantities that a row holds: their name, what came, what is right.
Pairs = Iterator[tuple[str, Any, Any]]


class HeadRows(NamedTuple):
    """The rows of one function, each method a section of a parity run and called with one of its
    problems."""

    run: Callable[..., Outcome]
    reference: Callable[..., Any]  # the oracle of a problem
    upstream: Callable[[Problem], tuple[Upstream, ...]]  # what both take after the problem
    exact_pairs: Callable[[Problem, Outcome, Any], Pairs]  # of A0
    of: str = ""  # what its quantities are said to be of
    is_nll: bool = True

    def label(self, name: str) -> str:
        return label(name) + self.of

    def oracle(self, problem: Problem) -> Any:
        """With the gradients of logits rounded as 16-bit products take them."""
        dtype = problem.hidden.dtype.name
        rounded = dtype if dtype in ROW_OF else "float64"
        return self.reference(problem, *self.upstream(problem), dz_dtype=rounded)

    def call(self, backend: str, problem: Problem, **how: Any) -> Outcome:
        return self.run(backend, problem, *self.upstream(problem), **how)

    def against_oracle(self, findings: Findings, problem: Problem) -> None:
        """The loss and gradients of one problem: A0, A2, A5, A6 of float32, A8, A19, A7 or A16 of
        16 bits; A9 where both backends run, and A26 of given logits."""
        reference, low = self.oracle(problem), problem.hidden.dtype.name in ROW_OF
        call = findings.run if self.run is run else self.call  # which may be another library's
        outcomes = {backend: call(backend, problem) for backend in findings.backends}
        for backend, outcome in outcomes.items():
            details: dict[str, Any] = {"backend": backend, "case": problem.text}
            if not low:
                self.exact(findings, problem, outcome, reference, **details)
            if outcome.loss is not None:
                details["magnitude"], row = reference.loss_magnitude, "A8" if low else "A2"
                findings.check(row, outcome.loss, reference.loss, **details)
            if problem.given and self.is_nll and not low:
                arrays, details["magnitude"] = beside(problem, outcome.d_weight, reference), None
                findings.check("A26", *arrays, **details)
        findings.gradients(outcomes, reference, problem, self.label, count=self.is_nll)

    def exact(
        self, findings: Findings, problem: Problem, outcome: Outcome, reference: Any, **details: Any
    ) -> None:
        """A0: counts, masks, dtypes, invalid rows, the loss of no valid token."""
        for quantity, got, expected in self.exact_pairs(problem, outcome, reference):
            findings.check("A0", got, expected, quantity=f"{quantity}{self.of}", **details)

    def audit(self, findings: Findings, problem: Problem) -> None:
        """A1: everything that the two backends return in audit mode, bit for bit; of `chunked_nll`
        which logit is the largest where float64 can tell."""
        sure: Any = slice(None)
        if self.is_nll and problem.soft is None:
            sure = ~(problem.reference().margin < 2.0**-40)
        outcomes = []
        for backend in ("torch", "jax"):
            outcome = self.call(backend, problem, audit=True)
            of_largest = {n: x[sure] for n, x in outcome.by_name().items() if n in LARGEST}
            outcomes.append(outcome._replace(**of_largest))
        ours, theirs = outcomes
        same(findings, "A1", ours, theirs, self.label, backend=BOTH, case=problem.text)

    def logits(self, findings: Findings, item: tuple[str, Array, Array]) -> None:
        """A3 and A4: lse, log-probability and target gradient of logits that are given; entropy is
        not asked for with per-token outputs."""
        text, logits, labels = item
        problem, rows = logits_problem(logits, labels, text), np.arange(len(labels))
        ones = Upstream(np.ones(len(labels), np.float32), None, None)
        upstream = () if self.is_nll else (ones,)
        reference = self.reference(problem, *upstream)
        peak = logits.max(axis=1).astype(np.float64)
        scale = np.maximum(np.abs(peak), reference.lse - peak)
        for backend in findings.backends:
            outcome = self.run(backend, problem, *upstream)
            details = {"backend": backend, "case": text}
            findings.check("A3", outcome.lse, reference.lse, magnitude=scale, **details)
            pairs = {
                "log-probability": (outcome.logprobs, reference.logprobs),
                "target gradient": [x.d_weight[labels, rows] for x in (outcome, reference)],
            }
            for name, (got, oracle) in pairs.items():
                findings.check("A4", got, oracle, quantity=self.label(name), **details)
            if self.is_nll:
                findings.count_ulps("A3", backend, "lse", outcome.lse, reference.lse)
                findings.count_ulps("A4", backend, "log-probability", *pairs["log-probability"])

    def chunks(self, findings: Findings, problem: Problem, *, few: bool = False) -> None:
        """A10: per-token outputs and d hidden under chunks of 8 rows and more have the bits that
        they have in one chunk."""
        for backend in findings.backends:
            whole = self.call(backend, problem)
            chunks = chunks_of(backend, few=few or not self.is_nll)
            for chunk in chunks[:1] if few and backend == "jax" else chunks:  # each a program
                outcome = self.call(backend, problem, chunk_tokens=chunk)
                details = {"backend": backend, "case": f"{problem.text}, chunks of {chunk}"}
                same(findings, "A10", outcome, whole, self.label, OF_TOKENS, **details)

    def repeat(self, findings: Findings, problem: Problem) -> None:
        """A11: run to run, and of `chunked_nll` PyTorch on two threads against one."""
        for backend in findings.backends:
            first = self.call(backend, problem, chunk_tokens=CHUNK)
            again = {"run to run": self.call(backend, problem, chunk_tokens=CHUNK)}
            if self.is_nll and backend == "torch":
                with torch_threads(2):
                    again["two threads"] = self.call(backend, problem, chunk_tokens=CHUNK)
            for how, outcome in again.items():
                details = {"backend": backend, "case": f"{problem.text}, {how}"}
                same(findings, "A11", outcome, first, self.label, **details)


def beside(problem: Problem, d_weight: Any, reference: Any) -> tuple[Any, ...]:
    """Gradients of given logits other than the label's, what is right and the bound: d weight is
    theirs, transposed."""
    others = (np.arange(len(d_weight))[:, None] != problem.labels) & problem.valid
    arrays = d_weight, reference.d_weight, reference.bound_weight
    return tuple(x[:, : len(problem.labels)][others] for x in arrays)


def same(
    findings: Findings,
    row: str,
    ours: Outcome,
    theirs: Outcome,
    named: Callable[[str], str] = label,
    names: Collection[str] = Outcome._fields,
    **details: Any,
) -> None:
    """Two outcomes bit for bit: all that there is, or what has one of these names."""
    for name, got in ours.by_name().items():
        if name in names:
            pair = (got, getattr(theirs, name))
            if name == "num_tokens":  # int32 in JAX
                pair = (got.astype(np.int64), pair[1].astype(np.int64))
            findings.check(row, *pair, quantity=named(name), **details)


def nothing(x: Any) -> tuple[Any, Any]:
    """What must be zero, and that."""
    return x, np.zeros_like(x)


def exact_of_nll(problem: Problem, outcome: Outcome, reference: Any) -> Pairs:
    if outcome.num_tokens is not None:  # another library's loss alone has no other outputs
        count = np.asarray(reference.num_tokens, np.int64)
        yield "token count", outcome.num_tokens.astype(np.int64), count
        yield "correct", outcome.correct, reference.correct
        # Closer logits are equal in float32, or the other way.
        sure = ~(reference.margin < 2.0**-16)
        ours, exact = (np.where(sure, x.predicted, 0) for x in (outcome, reference))
        yield "predicted", ours, exact
        values = [outcome.logprobs, outcome.entropy, outcome.lse]
        yield "outputs of invalid rows", *nothing(np.stack(values)[:, ~problem.valid])
        wrong = sum(x.dtype != np.float32 for x in values)
        yield "dtypes of outputs", *nothing(np.int64(wrong))
    gradients = outcome.gradients()
    yield "d hidden of invalid rows", *nothing(gradients["d_hidden"][~problem.valid])
    wrong = int(outcome.loss.dtype != np.float32)
    wrong += sum(
        x.dtype != getattr(problem, name.removeprefix("d_")).dtype for name, x in gradients.items()
    )
    yield "dtypes", *nothing(np.int64(wrong))
    if not problem.valid.any():
        values = [np.ravel(x).astype(np.float64) for x in (outcome.loss, *gradients.values())]
        yield "loss and gradients of nothing", *nothing(np.concatenate(values))


def exact_of_tokens(problem: Problem, outcome: Outcome, reference: Any) -> Pairs:
    values = np.stack([outcome.logprobs, outcome.entropy, outcome.lse])
    yield "correct", outcome.correct, reference.correct
    yield "invalid rows", *nothing(values[:, ~problem.valid])
    yield "d hidden of invalid rows", *nothing(outcome.d_hidden[~problem.valid])
    yield "log-probabilities above 0", *nothing(np.int64((outcome.logprobs > 0).sum()))


def random_upstream(problem: Problem) -> tuple[Upstream, ...]:
    return (upstream_of(problem, SEED),)


nll = HeadRows(run, Problem.reference, lambda problem: (), exact_of_nll)
recomputed = nll._replace(
    run=partial(run, recompute=True),
    reference=partial(Problem.reference, recompute=True),
    of=", recomputed",
)
per_token = HeadRows(
    run_logprobs,
    Problem.per_token_reference,
    random_upstream,
    exact_of_tokens,
    of=" of per-token outputs",
    is_nll=False,
)
