"""Row A17: a token's outputs and its row of d hidden have the same bits whatever the other tokens.
The measurements are the parity run's own (`parity/rows/invariant.py`)."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from helpers.invariance import problems
from helpers.measured import hold
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run_given
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build, upstream_of
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.defects import DEFECTS, moved, statistics
from xentlib.tools.parity.rows.head import nll, per_token

pytestmark = pytest.mark.optimized
# Two whole blocks of columns and a part of one. Of JAX, which has a program for each shape, the
# cases that differ in what a program is.
PROBLEMS = dict(problems(203, 24, 331))
ALL = "options, class weights"
PROBLEMS[ALL] = PROBLEMS["options"].changed(class_weights=PROBLEMS["class weights"].class_weights)
FUNCTIONS = {"chunked_nll": nll, "chunked_logprobs": per_token}
# `chunked_logprobs` has the same products, no class weights, and in JAX the same roundings.
EVERYWHERE = (
    ("chunked_nll", ALL),
    ("chunked_logprobs", "bf16, options"),
)
OF_FUNCTIONS = [
    pytest.param(*key, marks=[] if key in EVERYWHERE else pytest.mark.full(backend="jax"))
    for key in product(FUNCTIONS, PROBLEMS)
    if key[0] == "chunked_nll" or key[1] not in (ALL, "class weights")
]


@pytest.mark.cpu
@pytest.mark.parametrize(("function", "name"), OF_FUNCTIONS)
def test_other_tokens_do_not_show(backend: str, function: str, name: str) -> None:
    """A17: another order, masked neighbours that are NaN, micro-batches, three and one alone, all
    twice, other chunks, labels that are not read. Catches: a sum whose order follows the rows; a
    product with few rows."""
    findings = Findings((backend,))
    invariant.batch(FUNCTIONS[function], findings, backend, PROBLEMS[name])
    assert len(findings.measurements) > 20
    assert not failures(findings.measurements)


def test_a_narrow_vocabulary_of_given_logits(backend: str) -> None:
    """A17. Catches: exp that is fused into each of its sums where there are few logits."""
    problem = build(Case("narrow", 509, 13, 13, std=3.0, ignored=0.0), 3)
    problem, upstream = invariant.given_problem(problem), upstream_of(problem, 2)
    whole = run_given(backend, problem, upstream)
    some = slice(0, 100)
    # A problem of given logits has them in its weight.
    fewer = problem.changed(weight=problem.weight[:, some], labels=problem.labels[some])
    got = run_given(backend, fewer, upstream.of_tokens(some))
    for name in ("logprobs", "entropy", "lse", "d_logits"):
        assert not failures(check("A17", getattr(got, name), getattr(whole, name)[some]))


@pytest.mark.cpu
@pytest.mark.torch
def test_lora_does_not_show() -> None:
    """A17 of a head with a low-rank part, whose products have few columns."""
    torch = pytest.importorskip("torch")
    from helpers.lowrank import low_problem
    from xentlib.torch import LowRankHead, chunked_logprobs

    for rank in (3, 16):
        p = low_problem(Case("low", 149, 24, 331, std=3.0, ignored=0.0, bias=False), rank)
        results = []
        for places in (slice(None), slice(0, 40), slice(40, 149), slice(7, 8)):
            arrays = (p.base.weight, p.a, p.b)
            head = LowRankHead(*(torch.from_numpy(x) for x in arrays), p.scale)
            x = torch.from_numpy(p.base.hidden[places].copy()).requires_grad_()
            out = chunked_logprobs(x, head, torch.from_numpy(p.base.labels[places]), entropy=True)
            (out.logprobs.sum() - out.entropy.sum()).backward()
            values = (out.logprobs, out.entropy, out.lse, x.grad)
            results.append((places, [v.detach().numpy() for v in values]))
        (_, whole), *others = results
        for places, got in others:
            for g, w in zip(got, whole, strict=True):
                assert not failures(check("A17", g, w[places]))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_shows_in_bits_alone(defect: str) -> None:
    """A14: cut into parts the defect has other bits, in few units; right statistics have the same
    bits in any parts of whole blocks."""
    problem = PROBLEMS["bias"].of_tokens(PROBLEMS["bias"].valid)
    logits, labels = invariant.logits_of(problem), problem.labels
    whole = statistics(logits, labels, (len(problem.weight),))
    for sizes in ((128, 203), (256, 75), (128, 128, 75), (0, 256, 0, 75)):
        assert not failures(check("A18", statistics(logits, labels, sizes), whole))
        if len(sizes) > 2:  # a part of one block has no maximum of its own
            continue
        wrong = moved(whole, logits, labels, sizes, defect)
        assert failures(check("A18", wrong, whole))
        scale = np.maximum(np.abs(whole), 1.0)
        assert not failures(check("A3", wrong, whole, magnitude=scale))


@pytest.mark.cpu  # rows A10 and A17 are of CPUs
def test_the_section_rejects_its_mutants(backend: str) -> None:
    """A14, A17: what a parity run does, of few tokens."""
    if backend == "jax":
        pytest.skip("the same in NumPy")
    hold(lambda f, p: invariant.batches(nll, f, p), (backend,), PROBLEMS["bias"])


def test_companies_have_all_tokens() -> None:
    """Every token is in a micro-batch, and in each order."""
    pytest.importorskip("torch")
    places_of: dict[str, Any] = {}
    for company in invariant.companies(nll, "torch", PROBLEMS["bias"]):
        places_of.setdefault(company.how, []).extend(company.places)
    assert {len(set(places)) for how, places in places_of.items() if "order" in how} == {203}
    assert len(set(places_of["in a micro-batch of 51"])) == 203


# --- of a whole call -----------------------------------------------------------------------------

# Tokens of a chunk: multiples of the 512 that a CPU's product for d weight takes.
CHUNKS = (512, 1024, 1536, 4096)
WEIGHTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "HV": {"weight_layout": "HV"},
    "bias, smoothed": {"bias": True, "label_smoothing": 0.1, "softcap": 8.0},
    "bf16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "narrow": {"width": 8},
}


@pytest.mark.torch
@pytest.mark.cpu
@pytest.mark.parametrize("accumulated", [False, True], ids=["one call", "micro-batches"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_d_weight_does_not_depend_on_the_chunk(name: str, accumulated: bool) -> None:
    """Chunks of any multiple of 512 tokens that count, the last one ragged. Catches: a product of
    the whole chunk, targets added after it."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_nll

    given = {"dtype": "float32", "width": 48} | WEIGHTS[name]
    dtype, width = getattr(torch, given.pop("dtype")), given.pop("width")
    tokens, vocab = 2900, 301
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::9] = -100
    if given.pop("bias", False):
        given["bias"] = torch.randn(vocab, generator=generator).to(dtype)
    if "weight_layout" in given:
        weight = weight.T.contiguous()
    gradients = []
    for chunk in CHUNKS:
        leaf = weight.clone().requires_grad_()
        parts = (slice(0, 1300), slice(1300, None)) if accumulated else (slice(None),)
        for part in parts:
            call = {
                "labels": labels[part],
                "denominator": 97.0,
                "max_chunk_bytes": chunk * vocab * 4,
            }
            chunked_nll(hidden[part], leaf, **call, **given).loss.backward()
        gradients.append(leaf.grad.float().numpy())
    assert np.abs(gradients[0]).max() > 0
    for gradient in gradients[1:]:
        assert not failures(check("A17", gradient, gradients[0]))


@pytest.mark.cpu
@pytest.mark.torch
def test_tokens_are_added_up_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of many tokens' blocks, in slices: the same sums. Catches: tokens left out, a
    slice against the maximum of another."""
    torch = pytest.importorskip("torch")
    from xentlib.math.softmax import BlockStats
    from xentlib.torch.core import algebra

    generator = torch.Generator().manual_seed(5)
    blocks, tokens = 7, 203
    m = torch.randn(blocks, tokens, generator=generator) * 9
    ones = torch.randint(0, 4, (blocks, tokens), generator=generator).float()
    s, sum_ed = (torch.rand(blocks, tokens, generator=generator) * x for x in (40, -40))
    top = torch.arange(blocks)[:, None] * 128.0 + torch.zeros(tokens)
    stats = BlockStats(m, ones, s, sum_ed, top)
    whole = algebra.ALGEBRA.together(stats)
    monkeypatch.setattr(algebra, "SUMMING", algebra.block_bytes("cpu") // (blocks * 30))
    sliced = algebra.ALGEBRA.together(stats)
    for x, y in zip(whole[:-1], sliced[:-1], strict=True):
        assert not failures(check("A17", y.numpy(), x.numpy()))


@pytest.mark.cpu
@pytest.mark.torch
def test_words_of_float64_travel_in_float32() -> None:
    """A18: up to 2^53, over as many ranks as there are words' sums for. Catches: a word that
    float32 rounds."""
    torch = pytest.importorskip("torch")
    from xentlib.torch.core.algebra import as_float32, as_float64

    generator = torch.Generator().manual_seed(2)
    words = torch.randint(2**50, (8, 2, 1000), generator=generator).double()
    words[:, :, 0], words[:, :, 1], words[:, :, 2] = 0, 1, 2.0**50 - 1
    of_ranks = torch.stack([as_float32(x) for x in words])
    assert of_ranks.dtype == torch.float32
    for order in (range(8), reversed(range(8))):
        total = torch.zeros_like(of_ranks[0])
        for rank in order:
            total += of_ranks[rank]
        assert torch.equal(as_float64(total), words.sum(0))
