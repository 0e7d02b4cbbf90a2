"""`chunked_nll` of both backends against the oracle, row by row of the contract.

The cases are those of the parity run (`tools.harness.cases`); each row's mutants are rejected in
`test_every_check_rejects_its_mutants`. Below, one test for each bug that a rounding point or a rule
of the definition keeps away; its docstring names the line whose removal it catches.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.measured import CAPPED, SMALL, by_id, few_programs, hold, shared
from xentlib.contract import Measurement, check, failures, rho
from xentlib.tools.harness.backends import Outcome, run
from xentlib.tools.harness.cases import (
    AUDIT,
    BASE,
    CHUNK_CASES,
    NARROW,
    OPTIONS,
    WITH_OPTIONS,
    logit_sets,
    low_precision,
    named,
)
from xentlib.tools.harness.findings import GRADIENT_ROWS, Findings, check_gradient
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.tools.parity.rows.head import HeadRows, nll, per_token
from xentlib.tools.parity.rows.mutants import nll_mutants
from xentlib.ulp import dtype_named

CASES = [shared(case) for case in SMALL]
AUDITED = (
    "audit-3",
    "audit-9",
    "audit-fp16",
    "audit-0",
    "audit-fp16-options",
    "audit-class-weights",
    "audit-saturated",
)


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_fp32_against_the_oracle(backend: str, case: Case) -> None:
    """A0, A2, A5, A6."""
    hold(nll.against_oracle, (backend,), build(case, 7))


@pytest.mark.parametrize("case", few_programs(low_precision(tuple(CASES))))
def test_bf16_against_the_oracle(backend: str, case: Case) -> None:
    """A7, A8."""
    hold(nll.against_oracle, (backend,), build(case, 7))


@pytest.mark.slow
@pytest.mark.parametrize("case", few_programs(low_precision(tuple(CASES), "float16")))
def test_fp16_against_the_oracle(backend: str, case: Case) -> None:
    """A8, A16. Catches: a rounding to float16 that takes subnormals to 0."""
    hold(nll.against_oracle, (backend,), build(case, 7))


@pytest.mark.slow
def test_many_tokens_of_a_narrow_head(backend: str) -> None:
    """A6 at H = 1 and 32,771 tokens. Catches: products that add one token after the other."""
    hold(nll.against_oracle, (backend,), build(NARROW, 7))


@pytest.mark.slow
def test_many_short_chunks_of_a_narrow_head(backend: str) -> None:
    """A6 in 118 chunks. Catches: a product that begins with what the accumulator holds, where MKL
    adds one token after the other to it: rho of d weight 128."""
    case = dataclasses.replace(NARROW, tokens=60_000, vocab=100, hidden=8, std=5.0)
    problem = build(case, 7).changed(bias=None)
    assert not failures(gradients(problem, backend, chunk_tokens=512))


@pytest.mark.parametrize("item", logit_sets(7), ids=lambda item: item[0])
def test_given_logits(backend: str, item: Any) -> None:
    """A3, A4, M3: also probabilities of 1 - 1e-30, and logits that share an offset of 1e6."""
    hold(nll.logits, (backend,), item)


@pytest.mark.cpu
@pytest.mark.optimized
@pytest.mark.parametrize(
    "case",
    # A softcap's derivative is JAX's own `tanh`, whatever the tail.
    few_programs(
        [*CHUNK_CASES, CAPPED], ("chunks", "chunks-small", "chunks-kernel", "chunks-softcap")
    ),
)
@pytest.mark.parametrize("chunks", [(8, 16, 24, 40, 64), (128,), (200,), (512,)], ids=str)
def test_chunks_do_not_show(
    backend: str, case: Case, chunks: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A10. Catches: a softcap's derivative from `torch.cosh`, whose bits follow the tail."""
    full = request.config.getoption("--full")
    if backend == "jax" and chunks == (128,):
        pytest.skip("whole chunks of 64, and 200 with a part of one, are the other programs")
    if (backend, case.id) == ("jax", "chunks-bf16") and chunks[0] != 8 and not full:
        pytest.skip("each is a program: chunks of 200 are in test_batch_invariance.py")
    monkeypatch.setattr("xentlib.tools.harness.cases.CHUNKS", chunks)
    hold(nll.chunks, (backend,), build(case, 7))


@pytest.mark.parametrize("name", ["logprobs", "entropy", "lse"])
def test_an_output_of_an_invalid_row_is_named(backend: str, name: str) -> None:
    """Of the parity run itself."""

    def wrong(backend: str, problem: Problem) -> Outcome:
        outcome = run(backend, problem)
        changed = getattr(outcome, name).copy()
        changed[np.flatnonzero(~problem.valid)[0]] = 1
        return outcome._replace(**{name: changed})

    findings = Findings((backend,), run=wrong)
    nll.against_oracle(findings, build(BASE, 7))
    (said,) = failures(findings.measurements)
    assert "outputs of invalid rows" in said


def test_run_to_run(backend: str) -> None:
    """A11."""
    hold(nll.repeat, (backend,), build(WITH_OPTIONS, 7))


@pytest.mark.full(backend="jax")  # the checks are the same, and each mutant a program
def test_every_check_rejects_its_mutants(backend: str) -> None:
    """A14 (M23: a check that cannot fail)."""
    hold(nll_mutants, (backend,), build(BASE, 0))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.full] * (case.id in AUDITED[:3])
            # Of a user's programs too, with and without options; float64 shows no other.
            + [pytest.mark.optimized] * (case.id in AUDITED[3:5]),
        )
        for case in named(AUDIT, *AUDITED)
    ],
    ids=by_id,
)
def test_audit_mode_bit_for_bit(case: Case) -> None:
    """A1 at a tenth of the parity run's size."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    case = dataclasses.replace(case, vocab=997, hidden=64)
    hold(nll.audit, ("torch", "jax"), build(case, 0))


@pytest.mark.parametrize("rows", [nll, per_token])
def test_backends_have_the_same_numbers(rows: HeadRows) -> None:
    """A9, of log-probabilities too."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    hold(rows.against_oracle, ("torch", "jax"), build(dataclasses.replace(BASE, hidden=48), 7))


def gradients(problem: Problem, backend: str, **how: Any) -> list[Measurement]:
    """A5 and A6 of a problem, or A7 and A19 where it is bf16."""
    low = problem.hidden.dtype.name == "bfloat16"
    reference = problem.reference(dz_dtype="bfloat16" if low else "float64")
    measurements = []
    for name, got in run(backend, problem, **how).gradients().items():
        row = "A7" if low else GRADIENT_ROWS[name]
        of = {"case": problem.text, "quantity": name}
        measurements += check_gradient(row, name, got, reference, **of)
    return measurements


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_d_weight_does_not_know_the_number_of_chunks(backend: str, chunks: int) -> None:
    """A6, A7, M2. Catches: an accumulator of d weight in bf16."""
    for dtype in ("float32", "bfloat16"):
        case = dataclasses.replace(BASE, id=f"many-{dtype}", tokens=512, dtype=dtype, std=3.0)
        assert not failures(gradients(build(case, 5), backend, chunk_tokens=512 // chunks))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("denominator", [2.0**24 + 1, 1e5])
def test_the_factor_comes_before_the_gemms(backend: str, dtype: str, denominator: float) -> None:
    """M14: 1 / N is subnormal in fp16. Catches: dz rounded without its factor and power of
    two, or the factor multiplied in the 16-bit dtype after the GEMMs."""
    case = dataclasses.replace(
        BASE,
        id=f"factor-{dtype}",
        tokens=128,
        dtype=dtype,
        token_weights=True,
        options={"denominator": denominator},
    )
    # A GradScaler's upstream gradient brings fp16 results back into its range.
    problem = build(case, 11).changed(upstream=float(2.0**24))
    if dtype != "float16":
        assert not failures(gradients(problem, backend, chunk_tokens=64))
        return
    reference = problem.reference()
    for name, got in run(backend, problem).gradients().items():
        # dz and the result are rounded to fp16 once each: 2^-11 apiece, in units of u.
        assert rho(got, getattr(reference, name)) <= 2 * 2.0**-11 / 2.0**-24


@pytest.mark.parametrize(
    "tokens",
    [
        *(1, 9, 65, 191),
        *(pytest.param(n, marks=pytest.mark.full(backend="jax")) for n in (7, 8, 63, 127, 129)),
    ],
)
def test_the_last_chunk_counts(backend: str, tokens: int) -> None:
    """M17. Catches: the ragged last chunk dropped, or its filling counted."""
    case = dataclasses.replace(BASE, id="ragged", tokens=tokens, vocab=257, ignored=0.0)
    problem = build(case, 2)
    outcome, reference = run(backend, problem, chunk_tokens=64), problem.reference()
    assert not failures(gradients(problem, backend, chunk_tokens=64))
    assert not failures(
        check("A2", outcome.loss, reference.loss, magnitude=reference.loss_magnitude)
    )


@pytest.mark.slow
@pytest.mark.parametrize("traced", [True, False])
def test_an_output_says_what_it_was_divided_by(backend: str, traced: bool) -> None:
    """Nothing for a sum, and through a compiler too: `TokenNormalizer` refuses the others by it."""
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal((n, 8), np.float32) for n in (5, 7))
    labels, weights = np.array([3, -100, 6, 0, 2]), np.float32([0.5, 8, 1, 2, 0.25])
    ours = __import__(f"xentlib.{backend}", fromlist=["_"])
    array, trace = np.asarray, lambda call: call
    if backend == "torch":
        import torch

        array = torch.tensor
        trace = partial(torch.compile, backend="aot_eager") if traced else trace
    elif traced:
        import jax

        trace = jax.jit
    arrays = [array(x) for x in (hidden, weight, labels)]

    wanted: list[tuple[dict[str, Any], float | None]] = [
        ({}, 4),
        ({"token_weights": array(weights)}, 3.75),
        ({"reduction": "sum"}, None),
    ]
    for reduction, numbers in (("sum", 9), ("mean", array(2.5)), ("sum", array(2.5)), ("mean", 9)):
        wanted.append(({"denominator": numbers, "reduction": reduction}, float(numbers)))
    if traced:  # each kind of denominator and each reduction: their product is untraced
        del wanted[-2:]

    def calls(*given: Any) -> list[Any]:  # in one graph, as each is compiled for 3 s
        return [ours.chunked_nll(*given, **how) for how, _ in wanted]

    divided = [out.denominator for out in trace(calls)(*arrays)]
    assert [x if x is None else float(x) for x in divided] == [want for _, want in wanted]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, int]:
    """Any shape, dtype, option, mask and labels; sizes from a few, so that JAX compiles few."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options = {key: OPTIONS[key] for key in draw(st.sets(st.sampled_from(sorted(OPTIONS))))}
    case = Case(
        "hypothesis",
        draw(st.sampled_from([1, 13, 40])),
        draw(st.sampled_from([1, 24])),
        draw(st.sampled_from([1, 2, 67])),
        std=draw(st.sampled_from([0.3, 1.0, 6.0])),
        ignored=draw(st.sampled_from([0.0, 0.3, 1.0])),
        confident=draw(st.sampled_from([0.0, 0.5])),
        bias=draw(st.booleans()),
        where=draw(st.booleans()),
        token_weights=draw(st.booleans()),
        token_temperature=draw(st.booleans()),
        layout=draw(st.sampled_from(["VH", "HV"])),
        options=options,
    )
    return build(case, draw(st.integers(0, 2**16))), draw(st.sampled_from([8, 16, 64]))


@pytest.mark.slow
def test_any_problem(backend: str, request: pytest.FixtureRequest) -> None:
    """A0, A2, A5, A6 whatever is asked for."""
    # JAX compiles most of them, in a second or more.
    count = 100 if request.config.getoption("--full") else {"torch": 60, "jax": 6}[backend]

    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(problems())
    def drawn(problem: tuple[Problem, int]) -> None:
        held_whatever_is_asked_for(backend, *problem)

    drawn()


def held_whatever_is_asked_for(backend: str, problem: Problem, chunk: int) -> None:
    if problem.token_weights is not None and problem.valid.any():
        total = abs(problem.token_weights[problem.valid].sum())
        if total < np.abs(problem.token_weights[problem.valid]).sum() / 8:
            return  # a cancelled weight sum has no digits to divide by
    reference, outcome = problem.reference(), run(backend, problem, chunk_tokens=chunk)
    findings = Findings((backend,))
    nll.exact(findings, problem, outcome, reference, backend=backend, case=problem.text)
    findings.check("A2", outcome.loss, reference.loss, magnitude=reference.loss_magnitude)
    assert not failures(findings.measurements)
    # rho of a handful of entries is one rounding's luck; tau is not.
    taus = [m for m in gradients(problem, backend, chunk_tokens=chunk) if m.metric == "tau"]
    assert not failures(taus)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize(
    "name", ["logprobs", "entropy", "lse", "loss", "d_hidden", "d_weight", "d_bias"]
)
def test_an_output_of_another_dtype_is_seen(backend: str, name: str, dtype: str) -> None:
    """A0 holds dtypes, of which its other measurements see nothing."""
    problem = build(Case("dtypes", 24, 8, 31), 3)
    reference, right = problem.reference(), run(backend, problem)

    def missed(outcome: Outcome) -> set[str]:
        findings = Findings((backend,))
        nll.exact(findings, problem, outcome, reference)
        return {m.quantity for m in findings.measurements if not m.passed}

    assert missed(right) == set()
    wrong = right._replace(**{name: getattr(right, name).astype(dtype_named(dtype))})
    assert missed(wrong) == {
        "dtypes" if name[:2] == "d_" or name == "loss" else "dtypes of outputs"
    }


NUMBERS = {
    "denominator": np.int64(37),
    "temperature": np.float32(0.7),
    "z_loss": np.float64(1e-3),
    "softcap": np.float32(5),
    "label_smoothing": np.float16(0.125),
    "logit_scale": np.float32(2),
    "ignore_index": np.int64(-100),
}


def test_a_number_of_numpy_is_a_number(backend: str) -> None:
    """A0: the same bits, also of an array without dimensions. Catches: types taken for numbers by
    their name."""
    problem = build(Case("numbers", 24, 8, 31), 3)
    want = run(backend, problem.changed(options={k: x.item() for k, x in NUMBERS.items()}))
    arrays: dict[str, Any] = dict(NUMBERS)
    for name, dtype in (
        ("denominator", "int32"),
        ("temperature", "float32"),
        ("softcap", "float32"),
    ):
        arrays[name] = np.asarray(NUMBERS[name], dtype)
    for numbers in (NUMBERS, arrays) if backend == "torch" else (NUMBERS,):  # arrays are JAX's own
        got = run(backend, problem.changed(options=numbers))
        for name, value in want.by_name().items():
            assert not failures(check("A0", getattr(got, name), value, quantity=name)), name
