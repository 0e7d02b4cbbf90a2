"""The training part of the parity run: what it finds, and what it must not let pass."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from helpers.small_training import (
    FAST,
    SIZES,
    STEPS,
    VOCAB,
    small_run,
    small_windows,
)
from xentlib.contract import check, failures
from xentlib.tools.parity.result import TrainingCurve
from xentlib.tools.parity.training.comparison import (
    against_jax,
    against_oracle,
    compare,
    compare_curves,
    counts,
)
from xentlib.tools.parity.training.loop import HeadStep
from xentlib.tools.parity.training.model import initial_weights
from xentlib.tools.parity.training.text import IGNORE_INDEX, TextWindow

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def windows() -> list[TextWindow]:
    return small_windows()


@pytest.fixture(scope="module")
def jax_run(windows: list[TextWindow]) -> TrainingCurve:
    pytest.importorskip("flax")
    return small_run("jax", windows)


# --- the run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_two_backends_agree(windows):
    pytest.importorskip("torch")
    pytest.importorskip("flax")
    weights = initial_weights(SIZES, seed=3)
    report = compare(("torch", "jax"), windows, weights, sizes=SIZES, optimizer=FAST)
    assert not failures(report.measurements)
    rows = [m.row for m in report.measurements]
    assert {row: rows.count(row) for row in set(rows)} == {
        "A0": 2 + STEPS,
        "A6": 8,  # tau and rho, two backends, two steps
        "A9": 2 * STEPS,
        "curve": 3,
    }
    assert [m.entries for m in report.measurements if m.row == "A9"] == [1, VOCAB * 32] * STEPS
    assert [c.backend for c in report.curves] == ["torch", "jax"]
    assert all(c.tokens == tuple(w.total for w in windows) for c in report.curves)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "other"), [("torch", "jax"), ("jax", "torch")])
def test_one_backend_alone(backend, other):
    """In a fresh process: neither framework by the import, one by the run."""
    pytest.importorskip({"torch": "torch", "jax": "flax"}[backend])
    code = f"""
import sys
from xentlib.tools.parity.training.comparison import compare
from xentlib.tools.parity.training.model import ModelSizes, initial_weights
from xentlib.tools.parity.training.text import make_windows
import numpy as np
assert not {{"torch", "jax", "jaxlib", "flax", "optax"}} & set(sys.modules)
sizes = ModelSizes(vocab=40, length=16, hidden=8, heads=2, layers=1, mlp=8)
text = np.arange(200, dtype=np.int32) % 40
windows = make_windows([text], steps=2, batch=2, length=16)
report = compare(["{backend}"], windows, initial_weights(sizes), sizes=sizes)
assert [c.backend for c in report.curves] == ["{backend}"]
assert sorted({{m.row for m in report.measurements}}) == ["A0", "A6", "curve"]
assert "{other}" not in sys.modules
"""
    fast = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to be compiled
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=fast)


def test_a_run_repeats_bit_for_bit(windows):
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    first, second = (np.array(small_run("torch", windows).losses) for _ in range(2))
    assert not failures(check("A11", second, first))
    assert torch.get_num_threads() == threads


def test_unknown_backend(windows):
    with pytest.raises(ValueError, match="`backend` must be 'torch' or 'jax'; got 'tpu'"):
        small_run("tpu", windows)


# --- what must not pass (row A14) ----------------------------------------------------------------


def predict_itself(xt):
    """Labels off by one: every token predicts itself, as many tokens as before."""
    right = xt.next_token_labels

    def wrong(labels, **options):
        kept = right(labels, **options)
        return labels.where(kept != IGNORE_INDEX, kept)

    return "next_token_labels", wrong


def across_documents(xt):
    """The last token of a document predicts the first one of the next."""
    right = xt.next_token_labels

    def wrong(labels, *, segment_ids):
        return right(labels)

    return "next_token_labels", wrong


def with_window(xt, change):
    """`TokenNormalizer` whose windows are changed."""

    class Wrong(xt.TokenNormalizer):
        def window(self, **given):
            window = super().window(**given)
            change(window)
            return window

    return "TokenNormalizer", Wrong


def mean_of_means(xt):
    """Each micro-batch divided by its own tokens, then by their number."""

    def change(window):
        right = window.backward

        def wrong(out):
            own = out.loss * window.total / out.num_tokens.clamp(min=1) / 4
            right(own.float(), out.num_tokens)

        window.backward = wrong

    return with_window(xt, change)


def forget_ignored(xt):
    """N_total for N_valid: the count of all tokens, padding too."""

    def change(window):
        right, labels = window.backward, window.declared.labels
        window.declared = window.declared._replace(labels=[y.clamp(min=0) for y in labels])
        # The same in each loss, so that the counts agree.
        import torch

        # A factor with a graph of its own: the loss would know its count.
        one = torch.ones((), requires_grad=True)
        window.backward = lambda out: right(out.loss * one, labels[window.backwards].numel())

    return with_window(xt, change)


def gradient_times(factor):
    def mutant(xt):
        right = xt.chunked_nll

        def wrong(hidden, weight, labels, **options):
            output = right(hidden, weight, labels, **options)
            # The value of the loss stays, its gradient is multiplied.
            loss = output.loss * factor - (output.loss * (factor - 1)).detach()
            return output._replace(loss=loss)

        return "chunked_nll", wrong

    mutant.__name__ = f"gradient_times_{factor}"
    return mutant


def drop_a_row(xt):
    """The last token's gradient is lost, its loss is not."""
    right = xt.chunked_nll

    def wrong(hidden, weight, labels, **options):
        full = right(hidden, weight, labels, **options)
        if not full.num_tokens:
            return full
        labels = labels.clone()
        last = (labels != IGNORE_INDEX).nonzero()[-1]
        labels[tuple(last)] = IGNORE_INDEX
        part = right(hidden, weight, labels, **options).loss
        return full._replace(loss=part + (full.loss - part).detach())

    return "chunked_nll", wrong


MUTANTS = {
    predict_itself: {"curve"},
    across_documents: {"A0", "curve"},
    mean_of_means: {"A6", "A9", "curve"},
    forget_ignored: {"A0", "A6", "A9", "curve"},
    gradient_times(0.0): {"A6", "A9", "curve"},
    gradient_times(-1.0): {"A6", "A9", "curve"},
    gradient_times(1.001): {"A6", "A9"},
    drop_a_row: {"A6", "A9"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_operator_fails(mutant, windows, jax_run, monkeypatch):
    """The mutant lives in the PyTorch run; JAX's run and its head gradients are right."""
    xt = pytest.importorskip("xentlib.torch")

    name, wrong = mutant(xt)
    monkeypatch.setattr(xt, name, wrong)
    found = []

    def observe(at: HeadStep) -> None:
        if at.step == 0:
            found.extend(against_jax(at, "step 1"))
            found.extend(against_oracle(at, "torch", "step 1"))

    run = small_run("torch", windows, observe=observe)
    found.append(compare_curves([run, jax_run], "small"))
    found.extend(counts(run, windows, "small"))
    assert MUTANTS[mutant] <= {m.row for m in found if not m.passed}


@pytest.mark.parametrize(
    "wrong",
    [FAST._replace(weight_decay=0.0), FAST._replace(betas=(0.8, 0.95)), FAST._replace(eps=1e-4)],
    ids=["weight_decay", "betas", "eps"],
)
def test_another_optimizer_parts_the_curves(wrong, windows, jax_run):
    pytest.importorskip("torch")
    run = small_run("torch", windows, optimizer=wrong)
    assert not compare_curves([run, jax_run], "small").passed


def test_both_optimizers_are_the_formula():
    """The conventions of `torch.optim.AdamW` and `optax.adamw`: eps outside the root, decay of the
    same parameter, both times the learning rate."""
    torch = pytest.importorskip("torch")
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(0)
    start = rng.normal(size=50).astype(np.float32)
    # Gradients down to the size of eps, so that its place shows.
    gradients = (rng.normal(size=(5, 50)) * 10.0 ** rng.uniform(-9, 0, 50)).astype(np.float32)
    b1, b2 = FAST.betas
    p, m, v = start.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients.astype(np.float64), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + FAST.eps)
        p = p - FAST.lr * (update + FAST.weight_decay * p)
    common = {"eps": FAST.eps, "weight_decay": FAST.weight_decay}

    ours = torch.nn.Parameter(torch.tensor(start))
    adamw = torch.optim.AdamW([ours], lr=FAST.lr, betas=FAST.betas, **common)
    transformation = optax.adamw(FAST.lr, b1, b2, **common)
    theirs = start
    state = transformation.init(theirs)
    for g in gradients:
        ours.grad = torch.tensor(g)
        adamw.step()
        updates, state = transformation.update(g, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    for got in (ours.detach().numpy(), np.asarray(theirs)):
        assert not failures(check("A6", got, p, metrics=("rho / u",)))


def test_adam_for_adamw_parts_the_curves(windows, jax_run, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.Adam)  # decay goes through the moments
    run = small_run("torch", windows)
    assert not compare_curves([run, jax_run], "small").passed


@pytest.mark.slow
def test_a_mutant_in_jax_fails_too(windows, monkeypatch):
    xj = pytest.importorskip("xentlib.jax")
    pytest.importorskip("torch")
    pytest.importorskip("flax")
    from xentlib.tools.parity.training import in_jax as head

    right = xj.chunked_nll

    def wrong(*arrays, reduction):
        output = right(*arrays)
        # A mean, as if 100 tokens were there, whose count is not known to be a mean's.
        return output._replace(loss=output.loss / 4 * 100, num_tokens=output.num_tokens + 0)

    monkeypatch.setattr(xj, "chunked_nll", wrong)
    monkeypatch.setattr(head, "_head_scan", head._head_scan.__wrapped__)
    weights = initial_weights(SIZES, seed=3)
    report = compare(("torch", "jax"), windows[:3], weights, sizes=SIZES, optimizer=FAST)
    failed = {(m.row, m.backend) for m in report.measurements if not m.passed}
    assert {("A9", "torch/jax"), ("A6", "jax"), ("curve", "torch/jax")} <= failed
    assert ("A6", "torch") not in failed


def test_a_run_that_learns_nothing_fails(windows):
    pytest.importorskip("torch")
    weights = initial_weights(SIZES, seed=3)
    report = compare(("torch",), windows, weights, sizes=SIZES, optimizer=FAST._replace(lr=0.0))
    assert {m.quantity for m in report.measurements if not m.passed} == {
        "last losses over the first"
    }


def test_nan_fails(windows):
    pytest.importorskip("torch")
    run = small_run("torch", windows, optimizer=FAST._replace(lr=float("inf")))
    assert np.isnan(run.losses[-1])
    other = replace(run, backend="jax")
    assert not compare_curves([run, other], "small").passed


def test_the_head_s_window_is_the_runs_own(windows):
    """What the check feeds to JAX is what PyTorch had: its own operator gives the same bits."""
    pytest.importorskip("torch")
    from xentlib.tools.parity.training.in_torch import head_window

    def observe(at: HeadStep) -> None:
        assert not failures(check("A11", head_window(at).gradient, at.gradient))

    small_run("torch", windows[:2], observe=observe)
