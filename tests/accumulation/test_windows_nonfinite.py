"""Windows of `TokenNormalizer` with NaN in a micro-batch: kept in their own window, or dropped on
all ranks together.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch
from xentlib.accumulate import UnsupportedWrapperError, WindowStateError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import (  # noqa: E402
    H,
    N,
    V,
    attempt,
    batch_of,
    gradients,
    net,
    normalizer,
    of_one_batch,
    one,
    run_window,
    spoilt,
    token_losses,
)
from helpers.windows_ranks import WRAPPERS, as_it_wants, near, stepped, window_of, wrapped  # noqa: E402
from xentlib.torch import NLLHead, TokenNormalizer  # noqa: E402


def test_a_nan_stays_in_its_window() -> None:
    """It shows in the loss and in the gradient; the next window has the bits of one before which
    nothing was."""
    model, norm = normalizer()
    x, y = batch_of(0)
    window = run_window(norm, model, [(x * torch.nan, y), batch_of(1)])
    assert torch.isnan(window.stats.loss)
    assert not window.stats.skipped
    assert all(torch.isnan(g).any() for g in gradients(model))
    model.zero_grad()
    run_window(norm, model, [batch_of(2), batch_of(3, 4)])
    alone, fresh = normalizer()
    run_window(fresh, alone, [batch_of(2), batch_of(3, 4)])
    assert all(map(torch.equal, gradients(model), gradients(alone)))


@pytest.mark.parametrize("through", ["full logits", "NLLHead"])
def test_a_micro_batch_that_is_nan_is_dropped(through: str) -> None:
    """With its tokens: gradients, T and loss are those of the others, and with nothing to drop the
    bits are those of a window that keeps."""
    batches = [batch_of(0), batch_of(1, 7), batch_of(2, 3)]
    model, norm = normalizer(nonfinite="drop")
    head = NLLHead.from_linear(model[1], reduction="sum")

    def body(window: Any, model: Any, x: Any, y: Any) -> None:
        if through == "NLLHead":
            window.backward(head(model[0](x), y))
        else:
            one(window, model, x, y)

    window = attempt(norm, model, [batches[0], spoilt(batches[1]), batches[2]], body)
    kept, fresh = normalizer()
    other = run_window(fresh, kept, [batches[0], batches[2]])
    assert [int(x) for x in (window.stats.num_tokens, window.stats.dropped)] == [13, 1]
    assert (window.stats.micro_batches, int(other.stats.dropped)) == (3, 0)
    assert float(window.stats.scale) == 1 / 13
    hold_in_norm([*gradients(model), window.stats.loss], [*gradients(kept), other.stats.loss])
    w = torch.rand(N, generator=torch.Generator().manual_seed(1))

    def weighted(window: Any, model: Any, x: Any, y: Any) -> None:
        mask = torch.where(y != -100, w, 0.0)
        window.backward((token_losses(model(x), y) * mask).sum(), mask.sum())

    for weights, each in (({}, one), ({"token_weights": [w] * 3}, weighted)):
        for n, m in ((norm, model), (fresh, kept)):
            m.zero_grad()
            attempt(n, m, batches, each, **weights)
        assert all(map(torch.equal, gradients(model), gradients(kept)))


def test_a_window_of_nothing_but_nan_is_skipped() -> None:
    """T is 0 then; weights that cancel do not leave a rounding error of it."""
    model, norm = normalizer(nonfinite="drop")
    w = [torch.tensor([0.1, 0.2, -0.3, *[0.7] * 7]), torch.tensor([0.3, *[-1e-3] * 9])]
    batches = [spoilt(batch_of(0)), spoilt(batch_of(1))]

    def weighted(window: Any, model: Any, x: Any, y: Any) -> None:
        which = w[window.backwards]
        window.backward((token_losses(model(x), y) * which).sum(), which.sum())

    window = attempt(norm, model, batches, weighted, token_weights=w)
    assert bool(window.stats.skipped)
    assert (float(window.stats.num_tokens), float(window.stats.loss)) == (0.0, 0.0)
    assert not any(g.any() for g in gradients(model))
    model.zero_grad()
    _, raises = normalizer(nonfinite="drop", empty="raise")
    with pytest.raises(ValueError, match="must hold a valid token"):
        attempt(raises, model, batches, weighted, token_weights=w)


def test_what_cannot_drop_says_so() -> None:
    """By name, before anything is counted."""
    model = net()
    with pytest.raises(ValueError, match="`nonfinite` must be one of 'keep', 'drop'; got 'skip'"):
        TokenNormalizer(model, nonfinite="skip")
    with pytest.raises(
        ValueError, match=r"`mode` must be 'precount' with nonfinite='drop'.*postsca"
    ):
        TokenNormalizer(model, nonfinite="drop", mode="postscale")
    norm = TokenNormalizer(model, nonfinite="drop")
    model[0].weight.grad = torch.ones(H, H)
    with pytest.raises(WindowStateError, match="gradients must be None when a window opens that"):
        run_window(norm, model, [batch_of(0)])
    model.zero_grad()
    model[1].weight.main_grad = torch.zeros(V, H)
    with pytest.raises(
        UnsupportedWrapperError, match=r"'1.weight' are added up in its `main_grad`"
    ):
        TokenNormalizer(model, nonfinite="drop")
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedWrapperError, match=r"hook.*Use nonfinite='keep'"):
        TokenNormalizer(model, nonfinite="drop")
    TokenNormalizer(model)


# torch 2.11 warns wherever a sparse tensor is made.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_embedding_with_sparse_gradients_drops_too() -> None:
    """Its gradient is no array."""
    embedding = torch.nn.Embedding(V, H, sparse=True)
    ids = torch.arange(4)
    norm = TokenNormalizer(embedding, nonfinite="drop")
    with norm.window(labels=[ids, ids]) as window:
        for k in window.micro_batches([1.0, torch.nan]):
            window.backward((embedding(ids) * k).sum(), 4)
    want = torch.zeros(V, H)
    want[:4] = 0.25
    assert torch.equal(embedding.weight.grad.to_dense(), want)


# --- on ranks ------------------------------------------------------------------------------------


def with_nan(rank: int, world: int) -> dict[str, Any]:
    """Of each wrapper: gradients, tokens, loss and number dropped, where a micro-batch is NaN on
    one rank; one of those that are not reduced yet, or the last. Then windows where all are."""
    from xentlib.torch import count_collectives

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    found: dict[str, Any] = {}
    for name in WRAPPERS:
        for bad in (1, 2):
            model = wrapped(name)
            norm = TokenNormalizer(model, nonfinite="drop")
            with count_collectives() as count:
                window = run_window(norm, as_it_wants(model), window_of(rank, bad))
            numbers = [float(x) for x in (*window.stats[:2], window.stats.dropped)]
            grads = stepped(name, model)
            found[f"{name}, {bad}"] = grads, numbers, float(window.mean_loss()), count.counts()
        model = wrapped(name)
        norm = TokenNormalizer(model, nonfinite="drop")
        nothing = [spoilt(batch) if rank else batch for batch in window_of(rank)]
        window = run_window(norm, as_it_wants(model), nothing)
        assert bool(window.stats.skipped)
        assert (int(window.stats.dropped), int(window.stats.num_tokens)) == (3, 0)
        if not name.startswith("ZeRO"):
            assert not any(g.any() for g in stepped(name, model))
            norm.wrapper.zero_gradients()  # as an optimizer does, which holds all parameters
        run_window(norm, as_it_wants(model), window_of(rank))
        found[f"{name}, after"] = stepped(name, model), None, None, None
    return found


@pytest.mark.slow
def test_ranks_drop_together() -> None:
    """A micro-batch that is NaN on one rank counts on none: gradients, T and the loss are those of
    the others, and every rank sends the same. Catches: 0 * NaN, a T with the dropped tokens."""
    pytest.importorskip("deepspeed")
    ranks = launch(2, with_nan, seconds=400)
    for name in ranks[0]:
        bad = {"1": 1, "2": 2}.get(name[-1])
        rest = [b for r in range(2) for k, b in enumerate(window_of(r)) if k != bad]
        tokens, want = sum(int((y != -100).sum()) for _, y in rest), of_one_batch(rest)
        for rank in ranks:
            grads, numbers, mean, counts = rank[name]
            near(name, grads, want)
            if numbers is None:
                continue
            x, y = (torch.cat(parts) for parts in zip(*rest, strict=True))
            loss = token_losses(net().double()(x.double()), y).sum().item() / tokens
            assert numbers[1:] == [tokens, 1.0]
            apart = abs(mean - loss)
            assert apart < (2.0**-6 if "bf16" in name else 1e-5) * loss, name
            assert counts == ranks[0][name][3]
        if name.startswith("DDP") and counts:
            assert counts["all_reduce"] == 5  # the count, three decisions, DDP's one bucket


def uneven_with_nan(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist

    model = torch.nn.parallel.DistributedDataParallel(net())
    norm = TokenNormalizer(model, nonfinite="drop")
    mine = [batch_of(k, 10 - k) for k in range(4)][: 2 + 2 * rank]
    with pytest.raises(ValueError, match=r"`uneven` must be True with nonfinite.*got 2 to 4"):
        run_window(norm, model, mine)
    # The last of two is NaN, and is repeated until the other rank has done: that decides nothing.
    if rank == 0:
        mine[1] = spoilt(mine[1])
    window = run_window(norm, model, mine, uneven=True)
    found = {"uneven": [p.grad.clone().numpy() for p in model.parameters()]}
    assert (int(window.stats.dropped), int(window.stats.num_tokens)) == (1, 10 + 10 + 8 + 7)
    # Both ranks hold the same tokens.
    alone = dist.new_group([0]), dist.new_group([1])
    twice = torch.nn.parallel.DistributedDataParallel(net(), process_group=alone[rank])
    norm = TokenNormalizer(twice, count_group=dist.group.WORLD, nonfinite="drop")
    batches = [batch_of(0), batch_of(1, 4)]
    window = run_window(norm, twice, [batches[0], spoilt(batches[1]) if rank else batches[1]])
    found["copies"] = [p.grad.clone().numpy() for p in twice.parameters()]
    assert window.stats.num_tokens == N
    return found


def test_ranks_drop_together_where_they_are_uneven() -> None:
    """Each decision is a collective; repeated micro-batches and copies of tokens count as ever."""
    four = [batch_of(k, 10 - k) for k in range(4)]
    cases = {
        "uneven": of_one_batch([four[0], four[0], four[2], four[3]]),
        "copies": of_one_batch([four[0]]),
    }
    for rank in launch(2, uneven_with_nan):
        for name, oracle in cases.items():
            hold_in_norm(rank[name], oracle, name)
