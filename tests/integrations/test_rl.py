"""Log-probabilities under the signatures of verl, SkyRL, NeMo-RL and open-instruct, against what
their functions compute, in float64 and in the dtypes that they are given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.held import hold_in_norm  # noqa: E402
from helpers.ranks import launch  # noqa: E402
from xentlib.torch.integrations import rl  # noqa: E402

B, L, H, V, PAD = 3, 7, 16, 102, 2


def problem(dtype=torch.float32, length=L):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, length, H, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=generator) / 3).to(dtype).requires_grad_()
    ids = torch.randint(V, (B, L), generator=generator)
    return hidden, weight, ids


def formula(hidden, weight, ids, temperature=1.0):
    """What all of them compute, of one column for each label."""
    logits = (hidden @ weight.T) / temperature
    full = logits.double().log_softmax(-1)
    return full.gather(-1, ids[..., None]).squeeze(-1), -(full.exp() * full).sum(-1)


def gradients(outputs, *leaves):
    """Of a sum in which every output of every token has a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in outputs)
    return torch.autograd.grad(total, leaves, retain_graph=True)


def same(got, want, *leaves):
    hold_in_norm([x.detach() for x in got], [x.detach() for x in want])
    assert [x.shape for x in got] == [x.shape for x in want]
    assert {x.dtype for x in got} == {torch.float32}
    hold_in_norm(gradients(got, *leaves), gradients(want, *leaves))


@pytest.mark.parametrize("only", ["both", "log-probabilities"])
def test_verl_of_hidden_states(only) -> None:
    hidden, weight, ids = problem()
    rolled = ids.roll(-1, 1)
    call = {"hidden_states": hidden, "vocab_weights": weight, "input_ids": rolled}
    got = rl.FusedLinearForPPO(impl_backend="torch").forward(**call, temperature=0.7)
    want = formula(hidden, weight, rolled, 0.7)
    flat = rl.linear_cross_entropy(hidden, weight, rolled, 0.7, "none")
    if only != "both":
        got, want, flat = got[:1], want[:1], flat[:1]
    same(got, want, hidden, weight)
    same(flat, [x.flatten() for x in want], hidden, weight)


def test_verl_in_bf16() -> None:
    """The entropy too is float32, where verl rounds it to the dtype of the logits."""
    hidden, weight, ids = problem(torch.bfloat16)
    got = rl.FusedLinearForPPO()(hidden, weight, ids)
    want = formula(hidden.double(), weight.double(), ids)
    assert {x.dtype for x in got} == {torch.float32}
    hold_in_norm([x.detach() for x in got], [x.detach() for x in want])
    assert [g.dtype for g in gradients(got, hidden, weight)] == [torch.bfloat16] * 2


@pytest.mark.parametrize("function", [rl.logprobs_from_logits, rl.log_softmax_and_gather])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_logits(function, dtype) -> None:
    hidden, weight, ids = problem()
    logits = (hidden @ weight.T).detach().to(dtype).requires_grad_()
    before = logits.detach().clone()
    got = function(logits, ids)
    assert got.dtype == torch.float32
    want = logits.double().log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    hold_in_norm([got.detach()], [want.detach()])
    (d_logits,) = gradients([got], logits)
    if dtype == torch.float32:
        hold_in_norm([d_logits], gradients([want], logits))
    assert torch.equal(logits, before)  # "in-place backward" or not
    assert d_logits.dtype == dtype

    out = function(logits, ids.masked_fill(ids % 2 == 0, -100))
    assert torch.equal(out, torch.where(ids % 2 == 0, 0.0, got))
    (d_logits,) = gradients([out], logits)
    assert not d_logits[ids % 2 == 0].any()


@pytest.mark.parametrize("padding", [0, PAD])
@pytest.mark.parametrize("shift", [True, False])
def test_nemo_rl_on_one_rank(padding, shift) -> None:
    hidden, weight, ids = problem(length=L + padding)
    logits = hidden @ weight.T
    got = rl.from_parallel_logits_to_logprobs(logits, ids, 0, V, None, shift_targets=shift)
    used = hidden[:, : L - 1] if shift else hidden[:, :L]
    want, _ = formula(used, weight, ids[:, 1:] if shift else ids)
    same([got], [want], hidden, weight)


def on_rank(rank, world):
    import torch.distributed as dist

    group = dist.group.WORLD
    start, stop = (0, V // 2) if rank == 0 else (V // 2, V)
    hidden, weight, ids = problem(length=L + PAD)
    rows = weight.detach()[start:stop].clone().requires_grad_()
    found = {}

    got = rl.from_parallel_logits_to_logprobs(hidden @ rows.T, ids, start, stop, group)
    found["logits"] = [got, *gradients([got], hidden, rows)]
    got = rl.from_parallel_hidden_to_logprobs(
        hidden, rows, ids, start, stop, group, temperature=0.7
    )
    found["hidden"] = [got, *gradients([got], hidden, rows)]
    whole = torch.nn.functional.pad(ids, (0, PAD))
    got = rl.linear_cross_entropy(hidden, rows, whole, 0.7, "none", group)
    found["verl"] = [torch.cat(got), *gradients([torch.cat(got)], hidden, rows)]
    summed = {"reduce_hidden_grad": True}
    got = rl.from_parallel_hidden_to_logprobs(
        hidden, rows, ids, start, stop, group, temperature=0.7, **summed
    )
    found["hidden, summed"] = [got, *gradients([got], hidden, rows)]
    got = rl.linear_cross_entropy(hidden, rows, whole, 0.7, "none", group, **summed)
    found["verl, summed"] = [torch.cat(got), *gradients([torch.cat(got)], hidden, rows)]
    return {name: [x.detach().numpy() for x in xs] for name, xs in found.items()}


@pytest.mark.slow
def test_a_vocabulary_over_ranks() -> None:
    """d hidden is each rank's part, as theirs is; the sum where no region before the head makes it,
    of which one part was 0.7 off."""
    ranks = launch(2, on_rank)
    hidden, weight, ids = problem(length=L + PAD)
    next_ones, whole = ids[:, 1:], torch.nn.functional.pad(ids, (0, PAD))
    shifted, _ = formula(hidden[:, : L - 1], weight, next_ones)
    cooler, _ = formula(hidden[:, : L - 1], weight, next_ones, 0.7)
    both = torch.cat([x.flatten() for x in formula(hidden, weight, whole, 0.7)])
    for name, want in (("logits", shifted), ("hidden", cooler), ("verl", both)):
        d_hidden, d_weight = gradients([want], hidden, weight)
        first, second = (found[name] for found in ranks)
        hold_in_norm([first[0], second[0]], [want.detach()] * 2, name)
        hold_in_norm([first[1] + second[1]], [d_hidden], name)
        hold_in_norm([first[2], second[2]], d_weight.split(V // 2), name)
        if name == "logits":  # whose product with the head sums nothing
            continue
        for found in ranks:
            value, whole_hidden, _ = found[f"{name}, summed"]
            hold_in_norm([value, whole_hidden], [want.detach(), d_hidden], name)


def test_what_they_do_and_we_do_not_is_refused() -> None:
    hidden, weight, ids = problem()
    logits = (hidden @ weight.T).detach()
    with pytest.raises(ValueError, match="`reduction` must be 'none' here; got 'mean'"):
        rl.linear_cross_entropy(hidden, weight, ids, 1.0, "mean")
    with pytest.raises(ValueError, match="`vocab_end_index` must be 102 here; got 204"):
        rl.from_parallel_logits_to_logprobs(logits, ids, 0, 2 * V, None)
    with pytest.raises(ValueError, match="`vocab_end_index` must be 112 here; got 102"):
        rl.from_parallel_hidden_to_logprobs(hidden, weight, ids, 10, V, None)
    for kept in ({"top_k": 5, "top_p": 1.0}, {"top_k": None, "top_p": 0.9}):
        with pytest.raises(
            ValueError, match=r"of `sampling_params` must be .* Keep the framework's"
        ):
            rl.from_parallel_logits_to_logprobs(
                logits, ids, 0, V, None, sampling_params=SimpleNamespace(**kept)
            )
    off = SimpleNamespace(top_k=None, top_p=1.0)
    rl.from_parallel_logits_to_logprobs(logits, ids, 0, V, None, sampling_params=off)
