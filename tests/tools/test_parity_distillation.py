"""The distillation of the parity run: what it finds, and what it must not let pass."""

from __future__ import annotations

import pytest

from helpers.small_training import (
    FAST,
    SIZES,
    STEPS,
    VOCAB,
    small_run,
    small_teacher,
    small_windows,
)
from xentlib.contract import check, failures
from xentlib.tools.parity.result import TrainingCurve
from xentlib.tools.parity.training import comparison
from xentlib.tools.parity.training.comparison import (
    against_jax,
    against_oracle,
    compare,
    compare_curves,
    run_distillation,
    training_sections,
)
from xentlib.tools.parity.training.loop import HeadStep, Teacher
from xentlib.tools.parity.training.model import initial_weights
from xentlib.tools.parity.training.text import TextWindow

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def windows() -> list[TextWindow]:
    return small_windows()


@pytest.fixture(scope="module")
def teacher(windows: list[TextWindow]) -> Teacher:
    pytest.importorskip("torch")
    return small_teacher(windows)


@pytest.fixture(scope="module")
def jax_student(windows: list[TextWindow], teacher: Teacher) -> TrainingCurve:
    pytest.importorskip("flax")
    return small_run("jax", windows, teacher=teacher)


@pytest.mark.slow
def test_the_two_backends_agree(windows, teacher):
    pytest.importorskip("flax")
    weights, how = initial_weights(SIZES, seed=3), {"sizes": SIZES, "optimizer": FAST}
    report = compare(("torch", "jax"), windows, weights, teacher=teacher, **how)
    assert report.name == "distillation"
    assert not failures(report.measurements)
    rows = [m.row for m in report.measurements]
    assert {row: rows.count(row) for row in set(rows)} == {
        "A0": 2 + STEPS,
        "A6": 8,  # tau and rho, two backends, two steps
        "A9": 2 * STEPS,
        "curve": 3,
    }
    assert [m.entries for m in report.measurements if m.row == "A9"] == [1, VOCAB * 32] * STEPS


# --- what must not pass (row A14) ----------------------------------------------------------------


def another_kind(options):
    options["kind"] = "reverse_kl"


def not_squared(options):
    options["temperature_squared"] = False


def without_labels(options):
    options["nll_weight"] = 0.0


def taught_by_the_next_token(options):
    hidden, *rest = options["teacher"]
    options["teacher"] = type(options["teacher"])(hidden.roll(1, dims=-2), *rest)


def a_little_warmer(options):
    options["temperature"] *= 1.001


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [another_kind, not_squared, without_labels, taught_by_the_next_token, a_little_warmer],
    ids=lambda change: change.__name__,
)
def test_a_student_of_another_loss_fails(change, windows, teacher, jax_student, monkeypatch):
    xt = pytest.importorskip("xentlib.torch")
    right = xt.chunked_divergence

    def wrong(hidden, weight, teacher, **options):
        options["teacher"] = teacher
        change(options)
        return right(hidden, weight, **options)

    monkeypatch.setattr(xt, "chunked_divergence", wrong)
    found = []

    def observe(at: HeadStep) -> None:
        if at.step == 0:
            found.extend(against_jax(at, "step 1"))
            found.extend(against_oracle(at, "torch", "step 1"))

    run = small_run("torch", windows, teacher=teacher, observe=observe)
    found.append(compare_curves([run, jax_student], "small"))
    rows = {"A6", "A9"} if change is a_little_warmer else {"A6", "A9", "curve"}
    assert rows <= {m.row for m in found if not m.passed}


def test_the_teacher_is_trained_first(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    taught_by = []

    def watched(*args, teacher, **how):
        taught_by.append(teacher)
        return compare(*args, teacher=teacher, **how)

    monkeypatch.setattr(comparison, "compare", watched)
    (tmp_path / "text").write_text("to be or not to be, that is the question\n" * 50, "utf-8")
    section = run_distillation(("torch",), text=tmp_path / "text", steps=3)
    planned = training_sections(("torch",), text=None, seed=0)
    assert [part.name for part in planned] == ["training", section.name]
    assert {m.row for m in section.measurements} == {"A0", "A6", "curve"}
    assert not failures(m for m in section.measurements if m.row != "curve")
    assert all("H=64 from 128" in m.case for m in section.measurements)
    (teacher,) = taught_by
    first = initial_weights(teacher.sizes)
    assert all(failures(check("A11", teacher.weights[name], first[name])) for name in first)
