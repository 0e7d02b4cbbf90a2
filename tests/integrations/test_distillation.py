"""Distillation from K classes under the signatures of verl and NeMo-RL, against what their
functions compute, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.held import hold_in_norm  # noqa: E402
from helpers.ranks import launch  # noqa: E402
from xentlib.contract import check, failures  # noqa: E402
from xentlib.torch.integrations import distillation  # noqa: E402

B, L, V, K = 2, 7, 102, 9
LENGTHS = [5, 9]


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(B, L, V, generator=generator).to(dtype).requires_grad_()
    teacher = torch.randn(B, L, V, generator=generator)
    return student, teacher.topk(K), teacher.log_softmax(-1).topk(K)


def gradient(out, logits):
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator)
    return torch.autograd.grad((out * upstream.to(out)).sum(), logits, retain_graph=True)


def nested(x):
    """As verl packs rows: [1, N, K] of rows of these lengths."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(x.reshape(-1, K), ends)


def configured(clamp=None):
    return SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamp", [None, -3.0])
def test_verl(dtype, clamp) -> None:
    """In bf16 float32 results of the logits as they are; theirs have its three digits."""
    student, _, teacher = problem(dtype)
    logits = student.reshape(1, B * L, V)
    packed = nested(teacher.values), nested(teacher.indices)
    out = distillation.compute_forward_kl_topk(logits, *packed, configured(clamp), "thd")

    ids, p = teacher.indices.reshape(1, B * L, K), teacher.values.reshape(1, B * L, K).double()
    q = logits.double().log_softmax(-1).gather(-1, ids)
    want = {"student_mass": q.exp().sum(-1), "teacher_mass": p.exp().sum(-1)}
    if clamp is not None:
        assert (q < clamp).any()
        assert (p < clamp).any()
        q, p = q.clamp_min(clamp), p.clamp_min(clamp)
    terms = p.exp() * (p - q)
    want["distillation_losses"] = terms.sum(-1)
    same = ids[..., None] == logits.topk(K).indices[..., None, :]
    want["overlap_count"] = same.any(-1).sum(-1)
    overlap = (terms * same.any(-1)).sum(-1) / want["overlap_count"].clamp_min(1)
    want["overlap_token_advantage"] = -overlap
    assert out.keys() == want.keys()
    assert torch.equal(out.pop("overlap_count"), want.pop("overlap_count"))
    hold_in_norm([out[x].detach() for x in want], [x.detach() for x in want.values()])
    assert {x.dtype for x in out.values()} == {torch.float32}
    if dtype == torch.float32:
        loss = "distillation_losses"
        hold_in_norm(gradient(out[loss], student), gradient(want[loss], student))


def nemo_rl(logits, top, zero_outside):
    full, ids = logits.double(), top.indices
    of = full.log_softmax(-1)
    student = of.gather(-1, ids) if zero_outside else full.gather(-1, ids).log_softmax(-1)
    teacher = top.values.double().log_softmax(-1)
    return student[:, :-1], teacher[:, :-1], (of.exp() * of).sum(-1)[:, :-1]


@pytest.mark.parametrize("zero_outside", [True, False])
def test_nemo_rl(zero_outside) -> None:
    logits, top, _ = problem()
    before = logits.detach().clone()
    call = distillation.get_distillation_topk_logprobs_from_logits
    got = call(logits, top.values, top.indices, zero_outside, True)
    want = nemo_rl(logits, top, zero_outside)
    assert [x.shape for x in got] == [x.shape for x in want]
    hold_in_norm([x.detach() for x in got], [x.detach() for x in want])
    for k in (0, 2):
        hold_in_norm(gradient(got[k], logits), gradient(want[k], logits))
    assert call(logits, top.values, top.indices, zero_outside, False)[2] is None
    assert torch.equal(logits, before)


KINDS = [("forward", False), ("forward", True), ("reverse", False), ("mixed", False)]


def summed(student, teacher, kl_type, share=0.3):
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    mixed = share * forward + (1 - share) * reverse
    return {"forward": forward, "reverse": reverse, "mixed": mixed}[kl_type]


@pytest.mark.parametrize(("kl_type", "zero_outside"), KINDS)
def test_nemo_rl_s_divergence(kl_type, zero_outside) -> None:
    logits, top, _ = problem()
    call = distillation.get_distillation_topk_logprobs_from_logits
    student, teacher, _ = call(logits, top.values, top.indices, zero_outside, False)
    how = {"kl_type": kl_type, "mixed_kl_weight": 0.3, "zero_outside_topk": zero_outside}
    got = distillation.topk_divergence(student, teacher, **how)
    want = summed(*nemo_rl(logits, top, zero_outside)[:2], kl_type)
    hold_in_norm([got.detach()], [want.detach()])
    hold_in_norm(gradient(got, logits), gradient(want, logits))


@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
def test_nemo_rl_s_divergence_near_the_end(kl_type) -> None:
    """A20 of log-probabilities that are given, where the sum of differences has no digits."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(500, K, generator=generator).log_softmax(-1)
    teacher = student + 1e-3 * torch.randn(500, K, generator=generator)
    how = {"kl_type": kl_type, "mixed_kl_weight": 0.3}
    got = distillation.topk_divergence(student, teacher, **how)
    exact = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    want = summed(*exact, kl_type)
    kept = want >= 1e-7
    assert kept.sum() > 400
    assert not failures(check("A20", got[kept], want[kept]))
    rounded = summed(student.log_softmax(-1), teacher.log_softmax(-1), kl_type)
    assert failures(check("A20", rounded[kept], want[kept]))
    assert (got >= 0).all()


def on_rank(rank, world):
    import torch.distributed as dist

    logits, top, _ = problem()
    own = logits.detach().chunk(world, -1)[rank].clone().requires_grad_()
    call = distillation.get_distillation_topk_logprobs_from_logits
    how = {"vocab_parallel_rank": rank, "vocab_parallel_group": dist.group.WORLD}
    found = call(own, top.values, top.indices, True, True, **how)
    (d_logits,) = gradient(found[0], own)
    return [x.detach().numpy() for x in (*found, d_logits)]


@pytest.mark.slow
def test_nemo_rl_s_vocabulary_over_ranks() -> None:
    logits, top, _ = problem()
    want = nemo_rl(logits, top, True)
    (d_logits,) = gradient(want[0], logits)
    for found, part in zip(launch(2, on_rank), d_logits.chunk(2, -1), strict=True):
        hold_in_norm(found, [*(x.detach() for x in want), part])


def test_what_they_do_and_we_do_not_is_refused() -> None:
    logits, top, teacher = problem()
    half = logits.reshape(1, B * L, V)[:, :7]
    packed = nested(teacher.values), nested(teacher.indices)
    with pytest.raises(ValueError, match=r"of `student_logits` must be \(1, 14\) here; got \(1, 7"):
        distillation.compute_forward_kl_topk(half, *packed, configured())
    call = distillation.get_distillation_topk_logprobs_from_logits
    with pytest.raises(ValueError, match="`cp_sharder` must be None here; got 'sharder'"):
        call(logits, top.values, top.indices, True, True, cp_sharder="sharder")
    student, given, _ = call(logits, top.values, top.indices, True, False)
    for kl_type in ("reverse", "mixed"):
        with pytest.raises(ValueError, match="`zero_outside_topk` of a reverse KL must be False"):
            distillation.topk_divergence(student, given, kl_type=kl_type, zero_outside_topk=True)
    with pytest.raises(ValueError, match="`kl_type` must be one of forward, reverse, mixed; got"):
        distillation.topk_divergence(student, given, kl_type="jsd")
