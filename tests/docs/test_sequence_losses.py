"""DPO and GSPO as docs/recipes.md has them, on packed rows, beside full logits in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from helpers.pages import defined, losses
from xentlib.contract import RHO_64, rho
from xentlib.interop import to_jax, to_numpy, to_torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "recipes.md"
if not PAGE.is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

LINES = 40
NAMES = ("dpo_loss", "gspo_loss")
V, H = 83, 12
# Of two rows the number and the length of each sequence; padding is between and behind them.
ROWS = (((3, 9), (-1, 2), (0, 6), (-1, 3)), ((1, 7), (2, 12), (-1, 1)))
PROMPT = {0: 2, 1: 3, 2: 0, 3: 1}  # the first token of sequence 2 is not that of a prompt
BETA, LOW, HIGH = 0.7, 0.02, 0.05
ADVANTAGE = np.float32([0.9, -1.3, 0.4, -0.6])


@cache
def blocks():
    """Of each loss and backend its code on the page."""
    found = losses("docs/recipes.md", PAGE.read_text(encoding="utf-8"))
    return {key: code for key, code in found.items() if key[0] in NAMES}


def batch():
    rng = np.random.default_rng(1)
    sequence = np.array([[s for s, n in row for _ in range(n)] for row in ROWS], np.int32)
    place = np.array([[k for _, n in row for k in range(n)] for row in ROWS])
    prompt = place < np.vectorize(PROMPT.get)(sequence, 0)
    return {
        "hidden": rng.standard_normal((*sequence.shape, H)).astype(np.float32),
        "head": (rng.standard_normal((V, H)) / 3).astype(np.float32),
        "others": (-4 + 0.3 * rng.standard_normal(sequence.shape)).astype(np.float32),
        "tokens": rng.integers(0, V, sequence.shape).astype(np.int32),
        "sequence": sequence,
        "prompt": prompt,
    }


def log_ratios(hidden, head, given, mean, prompts=False):
    """Of each sequence by itself, from full logits."""
    import torch

    logprobs = torch.log_softmax(hidden @ head.T, -1)
    found = []
    for s in range(4):
        row, at = np.nonzero(given["sequence"] == s)
        first = 1 if prompts else max(1, PROMPT[s])  # nothing predicts the first
        terms = [
            logprobs[row[0], t - 1, int(given["tokens"][row[0], t])]
            - float(given["others"][row[0], t - 1])
            for t in at[first:].tolist()
        ]
        found.append(sum(terms) / (len(terms) if mean else 1))
    return torch.stack(found)


def full(name, *, mean=None, prompts=False, pairs=(0, 1)):
    """Loss and gradients in float64."""
    torch = pytest.importorskip("torch")
    given = batch()
    hidden, head = (torch.tensor(given[k]).double().requires_grad_() for k in ("hidden", "head"))
    mean = name == "gspo_loss" if mean is None else mean
    ratios = log_ratios(hidden, head, given, mean, prompts)
    if name == "dpo_loss":
        difference = ratios[pairs[0] :: 2] - ratios[pairs[1] :: 2]
        loss = -torch.nn.functional.logsigmoid(BETA * difference).mean()
    else:
        ratio, advantage = ratios.exp(), torch.tensor(ADVANTAGE).double()
        clipped = ratio.clamp(1 - LOW, 1 + HIGH)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    loss.backward()
    return [x.detach().numpy() for x in (loss, hidden.grad, head.grad)]


def on_the_page(name, backend):
    """The same from the page's function."""
    names = defined("docs/recipes.md", blocks()[name, backend])
    cross = to_torch if backend == "torch" else to_jax
    hidden, head, *rest = (cross(x, copy=True) for x in batch().values())
    last, options = (4, {"beta": BETA})
    if name == "gspo_loss":
        last, options = cross(ADVANTAGE, copy=True), {"low": LOW, "high": HIGH}

    def call(hidden, head):
        return names[name](hidden, head, *rest, last, **options)

    if backend == "jax":
        import jax

        loss, found = jax.jit(jax.value_and_grad(call, (0, 1)))(hidden, head)
        return [np.array(to_numpy(x)) for x in (loss, *found)]
    loss = call(hidden.requires_grad_(), head.requires_grad_())
    loss.backward()
    return [x.detach().numpy() for x in (loss, hidden.grad, head.grad)]


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_sequences_is_that_of_full_logits(backend, name):
    """Rows A5 and A6, of the loss too."""
    for got, want in zip(on_the_page(name, backend), full(name), strict=True):
        assert RHO_64.holds(rho(got, want)), rho(got, want)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("dpo_loss", {"mean": True}),
        ("dpo_loss", {"prompts": True}),
        ("dpo_loss", {"pairs": (1, 0)}),
        ("gspo_loss", {"mean": False}),
        ("gspo_loss", {"prompts": True}),
    ],
    ids=str,
)
def test_other_losses_are_told_from_it(name, wrong):
    for other, want in zip(full(name, **wrong), full(name), strict=True):
        assert not RHO_64.holds(rho(other, want))


def test_each_loss_is_there_in_both_backends_and_short():
    """Without blank lines and imports."""
    assert len(blocks()) == 4
    for code in blocks().values():
        lines = [x for x in code.splitlines() if x and not x.startswith(("import", "from"))]
        assert len(lines) <= LINES


@pytest.mark.torch
def test_the_batch_has_ratios_that_are_clipped_and_others():
    torch = pytest.importorskip("torch")
    given = batch()
    hidden, head = (torch.tensor(given[k]).double() for k in ("hidden", "head"))
    ratio, sign = log_ratios(hidden, head, given, True).exp(), torch.tensor(ADVANTAGE).sign()
    beyond = torch.where(sign > 0, ratio > 1 + HIGH, ratio < 1 - LOW)
    assert 0 < int(beyond.sum()) < 4
