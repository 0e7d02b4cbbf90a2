"""Divergences of each token, whose backward reads the heads of student and teacher in blocks of
classes, small ones here: by the rows of the contract, in both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conftest import INSTALLED
from helpers.blocks_of_classes import WHOLE, seen_blocks, small_blocks, torch_blocks
from helpers.measured import by_id
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run_divergence
from xentlib.tools.harness.cases import low_precision, named
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.tools.parity.rows import divergences as rows

CASES = named(rows.GRID, "divergence-forward_kl", "tempered-reverse_kl", "mixed-jsd")
LOW = [
    low_precision((case,), dtype)[0]
    for case, dtype in zip(CASES[1:], ("bfloat16", "float16"), strict=True)
]
EACH: dict[str, Any] = {"reduction": "none"}


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ways that backwards took."""
    small_blocks(monkeypatch)
    return seen_ways(monkeypatch)


def seen_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen = seen_blocks(monkeypatch) if "jax" in INSTALLED else []
    if "torch" in INSTALLED:
        from xentlib.torch.core.blocks import BlockSums

        finish = BlockSums.finish

        def called(*args: Any) -> Any:
            seen.append("finish")
            return finish(*args)

        monkeypatch.setattr(BlockSums, "finish", called)
    return seen


def each(case: Case, **options: Any) -> Problem:
    """With an upstream gradient of each token."""
    problem = build(case, 7)
    upstream = np.random.default_rng(3).standard_normal(problem.labels.shape).astype(np.float32)
    return problem.changed(options=problem.options | EACH | options, upstream=upstream)


@pytest.mark.parametrize("case", [*CASES, *LOW], ids=by_id)
def test_against_the_oracle(backend: str, case: Case, blocks: list[str]) -> None:
    """A5, A6, A7, A16. Catches: a teacher's logits of other classes, d hidden that is rounded after
    each block, a target in another block, a power of two that is left in a gradient."""
    problem, findings = each(case), Findings((backend,))
    outcome = run_divergence(backend, problem)
    findings.gradients({backend: outcome}, rows.divergences.oracle(problem), problem)
    assert findings.measurements
    assert not failures(findings.measurements)
    assert blocks


@pytest.mark.optimized
@pytest.mark.cpu
def test_chunks_do_not_show(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: rows of d hidden. In JAX each is a program of three seconds, chunks of 16 and 40 tokens
    the same one, and a group is as large as a chunk may be, or all had 64 rows."""
    if backend == "jax":
        monkeypatch.setattr("xentlib.jax.core.logits.GROUP_TOKENS", 256)
    cases, sizes = (CASES[1:2], (256, 16)) if backend == "jax" else (CASES[:2], (256, 16, 40))
    for problem in map(each, cases):
        one, *others = (run_divergence(backend, problem, chunk_tokens=n) for n in sizes)
        for other in others:
            assert not failures(check("A10", other.d_hidden, one.d_hidden))


@pytest.mark.optimized
@pytest.mark.cpu
def test_other_tokens_do_not_show(backend: str) -> None:
    """A17: rows of d hidden, of groups that are not the same."""
    problem = each(Case("blocks", 203, 24, 331, teacher=40, options={"nll_weight": 0.3}))
    some = np.arange(1, 203, 3)
    part = problem.of_tokens(some).changed(upstream=np.asarray(problem.upstream)[some])
    whole, found = (run_divergence(backend, x) for x in (problem, part))
    assert not failures(check("A17", found.d_hidden, whole.d_hidden[some]))


@pytest.mark.parametrize("tokens", [37, 0])
def test_of_no_token_that_counts_gradients_are_0(backend: str, tokens: int) -> None:
    """Whatever the upstream gradient. Catches: a block that nothing has written, 0 times inf."""
    problem = build(Case("nothing", tokens, 24, 331, ignored=1.0, teacher=40, options=EACH), 7)
    inf = np.full(problem.labels.shape, np.inf, np.float32)
    found = run_divergence(backend, problem.changed(upstream=inf))
    for name, x in found.gradients().items():
        assert not x.any(), name


# Two tests have its programs in JAX, where they are compiled once.
TARGETS = Case("targets", 29, 24, 331, teacher=40, options={"nll_weight": 0.3})


def test_which_calls_are_read_in_blocks(backend: str, blocks: list[str]) -> None:
    """A loss of each token from a teacher's head; in PyTorch also from logits, which in JAX are as
    large as what blocks would spare. No loss that is reduced, which has its gradients at once."""
    problem = each(TARGETS)
    run_divergence(backend, problem)
    assert len(blocks) == 1
    run_divergence(backend, problem.changed(options={"reduction": "sum"}, upstream=1.0))
    assert len(blocks) == 1


@pytest.mark.jax
def test_no_target_is_added_and_the_budget_is_that_of_a_wide_head(
    monkeypatch: pytest.MonkeyPatch, blocks: list[str]
) -> None:
    """dz of a target is in its column. Catches: passes over its rows, with zeros. A budget that is
    of the head's width where no d weight is summed over chunks."""
    pytest.importorskip("jax")
    widths: list[int] = []

    def budget(asked: Any, target: Any, row_bytes: int = 0, hidden_size: int = 0) -> int:
        widths.append(hidden_size)
        return 1 << 20

    def refused(*args: Any) -> Any:
        raise AssertionError

    for name in ("add_targets_of_block", "add_labels_rows"):
        monkeypatch.setattr(f"xentlib.jax.core.blocks.{name}", refused)
    monkeypatch.setattr("xentlib.jax.binding.chunk_bytes", budget)
    problem = each(TARGETS)
    run_divergence("jax", problem)
    assert blocks
    run_divergence("jax", problem.changed(options={"reduction": "sum"}, upstream=1.0))
    assert widths == [24, 40, 0, 40]


@pytest.mark.torch
def test_an_adapter_of_a_teacher_has_all_classes_at_once(blocks: list[str]) -> None:
    """Catches: a student in blocks beside a teacher that is not; sums of an adapter's student with
    targets that nothing has written."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import LowRankHead, TeacherHead, chunked_divergence

    seed = torch.Generator().manual_seed(3)
    shapes = ((23, 24), (23, 40), (331, 24), (331, 40), (2, 40), (331, 2), (2, 24))
    hidden, states, weight, other, a, b, c = (torch.randn(x, generator=seed) for x in shapes)
    hidden.requires_grad_()

    def gradients(student: Any, teacher: Any, *leaves: Any) -> list[Any]:
        out = chunked_divergence(hidden, student, TeacherHead(states, teacher), **EACH)
        return [x.double().numpy() for x in torch.autograd.grad(out.loss.sum(), (hidden, *leaves))]

    found = gradients(weight, LowRankHead(other, a, b, scale=0.5))
    assert not blocks
    (pair,) = zip(found, gradients(weight, other + 0.5 * b @ a), strict=True)
    assert len(blocks) == 1
    assert not failures(check("A9", *pair, metrics=("rho / u",)))
    c.requires_grad_()
    of_student = gradients(LowRankHead(weight, c, b, scale=0.5), other, c)
    assert len(blocks) == 1
    for pair in zip(of_student, gradients(weight + 0.5 * b @ c, other, c), strict=True):
        assert not failures(check("A9", *pair, metrics=("rho / u",)))


@pytest.mark.jax
def test_an_adapter_has_all_classes_at_once(blocks: list[str]) -> None:
    """Of either head. Catches: a student in blocks beside a teacher that is not."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import LowRankHead, TeacherHead, chunked_divergence

    rng = np.random.default_rng(3)
    hidden, states, weight, other, a, b = (
        rng.standard_normal(x).astype(np.float32)
        for x in ((23, 24), (23, 40), (331, 24), (331, 40), (2, 40), (331, 2))
    )

    def loss(hidden: Any, weight: Any, adapter: bool) -> Any:
        head = LowRankHead(other, a, b, scale=0.5) if adapter else other + 0.5 * b @ a
        return chunked_divergence(hidden, weight, TeacherHead(states, head), **EACH).loss.sum()

    merged, found = (jax.grad(loss, (0, 1))(hidden, weight, x) for x in (False, True))
    assert len(blocks) == 1
    for x, y in zip(found, merged, strict=True):
        pair = np.asarray(x), np.asarray(y, np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",), backend="jax"))


TEACHERS: list[dict[str, Any]] = [
    {"kind": "forward_kl", "nll_weight": 0.3},
    {"kind": "reverse_kl", "nll_weight": 0.3, "temperature": True},
    {"kind": "jsd", "beta": 0.3, "softcap": 9.0},
    {"kind": "jsd", "beta": 0.5, "of_logits": True, "temperature": True},
    {"kind": "forward_kl", "of_logits": True, "weight_layout": "HV", "nll_weight": 0.3},
]


def of_torch(options: dict[str, Any], needs: tuple[bool, ...] = (True, True, True)) -> list[Any]:
    """Loss, and gradients of hidden states, weight and bias, of 203 tokens and two blocks of 128
    classes and a part of one."""
    import torch

    from xentlib.torch import TeacherHead, TeacherLogits, chunked_divergence

    seed, options = torch.Generator().manual_seed(5), dict(options)
    shapes = ((203, 24), (331, 24), (331,), (203, 40), (331, 40), (331,))
    hidden, weight, bias, states, other, of_other = (torch.randn(x, generator=seed) for x in shapes)
    bias, of_other = bias - 20.0, of_other + 20.0
    labels = torch.randint(0, 331, (203,), generator=seed)
    labels[:3], labels[3::5] = torch.tensor([127, 128, 330]), -100
    if "temperature" in options:
        options["temperature"] = 0.5 + torch.rand(203, generator=seed)
    if options.get("weight_layout") == "HV":
        weight = weight.T.contiguous()
    teacher: Any = TeacherHead(states, other, bias=of_other, softcap=None)
    if options.pop("of_logits", False):
        teacher = TeacherLogits(states @ other.T + of_other)
    leaves = [x.requires_grad_(need) for x, need in zip((hidden, weight, bias), needs, strict=True)]
    out = chunked_divergence(hidden, weight, teacher, labels=labels, bias=bias, **EACH, **options)
    (out.loss * torch.linspace(-1, 1, 203)).sum().backward()
    return [out.loss.detach(), *(x.grad for x in leaves)]


@pytest.mark.torch
@pytest.mark.cpu
@pytest.mark.parametrize("options", TEACHERS, ids=str)
def test_blocks_do_not_show(
    options: dict[str, Any], blocks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of the loss, of d weight and d bias are those of whole rows. Catches: logits of a
    teacher that begin with another class."""
    pytest.importorskip("torch")
    loss, hidden, *found = of_torch(options)
    assert blocks
    torch_blocks(monkeypatch, WHOLE)
    of_whole, whole_hidden, *whole = of_torch(options)
    assert (loss == of_whole).all()
    for x, y in zip(found, whole, strict=True):
        assert (x == y).all()
    reference = whole_hidden.double().numpy()
    assert not failures(check("A6", hidden.numpy(), reference, metrics=("rho / u",)))


@pytest.mark.torch
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, True, True)])
def test_of_parts_that_are_frozen(needs: tuple[bool, ...]) -> None:
    """The others' gradients have the same bits."""
    pytest.importorskip("torch")
    options = {"kind": "forward_kl", "nll_weight": 0.3}
    for need, x, y in zip(needs, of_torch(options, needs)[1:], of_torch(options)[1:], strict=True):
        assert (x == y).all() if need else x is None


@pytest.mark.torch
@pytest.mark.slow
def test_in_a_graph_and_computed_again(blocks: list[str]) -> None:
    """Compiled without a break, and checkpointed: the same bits."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from xentlib.torch import TeacherHead, chunked_divergence

    seed = torch.Generator().manual_seed(3)
    shapes = ((23, 24), (331, 24), (23, 40), (331, 40))
    hidden, weight, states, other = (torch.randn(x, generator=seed) for x in shapes)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def loss(hidden: Any, weight: Any) -> Any:
        teacher = TeacherHead(states, other)
        return chunked_divergence(hidden, weight, teacher, **EACH).loss.square().sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for total in (compiled(*leaves), checkpoint(loss, *leaves, use_reentrant=False)):
        for x, y in zip(torch.autograd.grad(total, leaves), eager, strict=True):
            assert x.abs().max() > 0
            assert torch.equal(x, y)
    assert len(blocks) == 3
