"""GRPO over kept sets and distillation as docs/recipes.md has them, beside full logits in
float64."""

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
NAMES = ("grpo_loss", "stored_loss", "gkd_loss")
B, P, C, V, H, HT, K = 3, 4, 9, 83, 12, 7, 6
LENGTHS = np.array([[9], [4], [7]])
LOW, HIGH, TEMPERATURE, NLL_WEIGHT, BETA = 0.1, 0.15, 0.8, 0.3, 0.3
CASES = ("grpo_loss", "stored_loss", "gkd_loss reverse_kl", "gkd_loss jsd")


@cache
def blocks():
    """Of each loss and backend its code on the page."""
    found = losses("docs/recipes.md", PAGE.read_text(encoding="utf-8"))
    return {key: code for key, code in found.items() if key[0] in NAMES}


def drawn(rng, lead):
    """K classes of each token."""
    return rng.random((*lead, V)).argsort(-1)[..., :K].astype(np.int32)


def arrays(name):
    """Hidden states, the head and what a loss is given beside them, in its order."""
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((B, P + C, H)).astype(np.float32)
    head = (rng.standard_normal((V, H)) / 3).astype(np.float32)
    mask = np.arange(C) < LENGTHS
    if name == "grpo_loss":
        tokens, kept = rng.integers(0, V, (B, C)).astype(np.int32), drawn(rng, (B, C))
        kept[:, ::2, -2:] = -1
        kept[..., 1] = np.where(mask, tokens, (tokens + 1) % V)  # a token of padding was not kept
        kept[1, 2] = -1  # all of the vocabulary
        given = {"hidden": hidden, "head": head, "tokens": tokens, "mask": mask, "kept": kept}
        old = log_probabilities(given, kept) + 0.2 * rng.standard_normal((B, C))
        advantage = np.float32([0.9, -1.3, 0.6])
        return given | {"old": old.astype(np.float32), "advantage": advantage}
    if name == "stored_loss":
        ids = drawn(rng, (B, P + C))
        ids[:, ::3, -2:] = -1
        ids[..., 2] = ids[..., 0]  # which counts once
        total = rng.uniform(0.2, 0.5, (B, P + C, 1))
        values = np.log(total * rng.dirichlet(np.ones(K), (B, P + C)))
        values[..., 2] = values[..., 0]
        tokens = rng.integers(0, V, (B, P + C)).astype(np.int32)
        mask = np.arange(P + C) < P + LENGTHS
        given = {"hidden": hidden, "head": head, "tokens": tokens, "mask": mask, "ids": ids}
        return given | {"values": values.astype(np.float32)}
    of_teacher = rng.standard_normal((B, P + C, HT)), rng.standard_normal((V, HT)) / 3
    states, other = (x.astype(np.float32) for x in of_teacher)
    return {"hidden": hidden, "head": head, "mask": mask, "states": states, "other": other}


def log_probabilities(given, kept, temperature=TEMPERATURE):
    """Of the tokens, as a sampler has them."""
    states = given["hidden"][:, P - 1 : -1].astype(np.float64)
    z = states @ given["head"].T.astype(np.float64) / temperature
    z = np.where(among(kept), z, -np.inf)
    z = z - np.log(np.exp(z).sum(-1, keepdims=True))
    label = np.take_along_axis(z, given["tokens"][..., None].astype(int), -1)[..., 0]
    return np.where(given["mask"], label, -4.0)


def among(ids):
    """[..., V] which classes are there; all where none is."""
    found = (ids[..., None] == np.arange(V)).any(-2)
    return found | ~(ids >= 0).any(-1, keepdims=True)


def full(name, **wrong):
    """Loss and gradients in float64."""
    torch = pytest.importorskip("torch")
    name, _, kind = name.partition(" ")
    given = arrays(name)
    hidden, head = (torch.tensor(given[k]).double().requires_grad_() for k in ("hidden", "head"))
    logits = hidden @ head.T
    if name == "grpo_loss":
        loss = grpo(torch, given, logits, **wrong)
    elif name == "stored_loss":
        loss = stored(torch, given, logits, **wrong)
    else:
        loss = gkd(torch, given, logits, **{"kind": kind, **wrong})
    loss.backward()
    return [x.detach().numpy() for x in (loss, hidden.grad, head.grad)]


def grpo(torch, given, logits, *, kept=True, column=0, temperature=TEMPERATURE, clip=True,
         everything=False):  # fmt: skip
    tokens, mask = (torch.tensor(given[k]) for k in ("tokens", "mask"))
    z = logits[:, P - 1 + column : P - 1 + column + C] / temperature
    if kept:
        counts = torch.tensor(among(given["kept"]))
        counts |= torch.nn.functional.one_hot(tokens.long(), V).bool()  # of padding
        z = z.masked_fill(~counts, -torch.inf)
    logprobs = z.log_softmax(-1).gather(-1, tokens[..., None].long())[..., 0]
    ratio = (logprobs - torch.tensor(given["old"]).double()).exp()
    advantage = torch.tensor(given["advantage"]).double()[:, None]
    clipped = ratio.clamp(1 - LOW, 1 + HIGH) if clip else ratio
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -(gain * mask).sum() / (mask.numel() if everything else mask.sum())


def stored(torch, given, logits, *, tail="class", nll_weight=NLL_WEIGHT, late=1):
    ids, values = (torch.tensor(given[k])[:, late : late + P + C - 1] for k in ("ids", "values"))
    tokens, mask = (torch.tensor(given[k])[:, 1:] for k in ("tokens", "mask"))
    log_p = logits[:, :-1].log_softmax(-1)
    ids, log_p = ids[:, : log_p.shape[1]], log_p[:, : ids.shape[1]]
    tokens, mask = tokens[:, : ids.shape[1]], mask[:, : ids.shape[1]]
    q = torch.zeros_like(log_p)
    for k in range(K):  # the last that is written is the same as the first
        there = ids[..., k, None] == torch.arange(V)
        q = torch.where(there, values[..., k, None].double().exp(), q)
    few = q > 0
    terms = (torch.special.xlogy(q, q) - q * log_p).sum(-1)
    p = (log_p.exp() * few).sum(-1)
    if tail == "class":
        rest = 1 - q.sum(-1)
        terms = terms + rest * (rest.log() - (log_p.exp() * ~few).sum(-1).log())
    elif tail == "renormalize":
        mass = q.sum(-1)
        terms = terms / mass - mass.log() + p.log()
    nll = -log_p.gather(-1, tokens[..., None].long())[..., 0]
    return ((terms + nll_weight * nll) * mask).sum() / mask.sum()


def gkd(torch, given, logits, *, kind, beta=BETA, column=0):
    states, other, mask = (torch.tensor(given[k]) for k in ("states", "other", "mask"))
    at = slice(P - 1 + column, P - 1 + column + C)
    log_t = (states.double() @ other.double().T)[:, P - 1 : -1].log_softmax(-1)
    log_s = logits[:, at].log_softmax(-1)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if kind == "jsd":
        m = (beta * log_t.exp() + (1 - beta) * log_s.exp()).log()
        terms = beta * kl(log_t, m) + (1 - beta) * kl(log_s, m)
    else:
        terms = kl(log_s, log_t) if kind == "reverse_kl" else kl(log_t, log_s)
    return (terms * mask).sum() / mask.sum()


def on_the_page(name, backend):
    """The same from the page's function."""
    name, _, kind = name.partition(" ")
    names = defined("docs/recipes.md", blocks()[name, backend])
    cross = to_torch if backend == "torch" else to_jax
    hidden, head, *rest = (cross(x, copy=True) for x in arrays(name).values())
    options = {
        "grpo_loss": {"temperature": TEMPERATURE, "low": LOW, "high": HIGH},
        "stored_loss": {"nll_weight": NLL_WEIGHT},
        "gkd_loss": {"kind": kind, "beta": BETA},
    }

    def call(hidden, head):
        return names[name](hidden, head, *rest, **options[name])

    if backend == "jax":
        import jax

        loss, found = jax.jit(jax.value_and_grad(call, (0, 1)))(hidden, head)
        return [np.array(to_numpy(x)) for x in (loss, *found)]
    loss = call(hidden.requires_grad_(), head.requires_grad_())
    loss.backward()
    return [x.detach().numpy() for x in (loss, hidden.grad, head.grad)]


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_a_loss_of_tokens_is_that_of_full_logits(backend, name):
    """Rows A5 and A6, of the loss too."""
    for got, want in zip(on_the_page(name, backend), full(name), strict=True):
        assert RHO_64.holds(rho(got, want)), rho(got, want)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grpo_loss", {"kept": False}),
        ("grpo_loss", {"column": 1}),
        ("grpo_loss", {"temperature": 1.0}),
        ("grpo_loss", {"clip": False}),
        ("grpo_loss", {"everything": True}),
        ("stored_loss", {"tail": "drop"}),
        ("stored_loss", {"tail": "renormalize"}),
        ("stored_loss", {"nll_weight": 0.0}),
        ("stored_loss", {"late": 0}),
        ("gkd_loss jsd", {"beta": 1 - BETA}),
        ("gkd_loss jsd", {"kind": "forward_kl"}),
        ("gkd_loss reverse_kl", {"kind": "forward_kl"}),
        ("gkd_loss reverse_kl", {"column": 1}),
    ],
    ids=str,
)
def test_other_losses_are_told_from_it(name, wrong):
    for other, want in zip(full(name, **wrong), full(name), strict=True):
        assert not RHO_64.holds(rho(other, want))


def test_each_loss_is_there_in_both_backends_and_short():
    """Without blank lines and imports."""
    assert {(name, backend) for name in NAMES for backend in ("torch", "jax")} == {*blocks()}
    for code in blocks().values():
        lines = [x for x in code.splitlines() if x and not x.startswith(("import", "from"))]
        assert len(lines) <= LINES


@pytest.mark.torch
def test_the_batch_has_ratios_that_are_clipped_and_others():
    given = arrays("grpo_loss")
    ratio = np.exp(log_probabilities(given, given["kept"]) - given["old"])[given["mask"]]
    advantage = np.broadcast_to(given["advantage"][:, None], (B, C))[given["mask"]]
    beyond = np.where(advantage > 0, ratio > 1 + HIGH, ratio < 1 - LOW)
    assert 2 < beyond.sum() < beyond.size - 2
