"""What a window of `TokenNormalizer` computes, however its tokens are cut, weighted and scaled.

Shapes: N tokens of a micro-batch, V vocabulary, H hidden width.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.held import hold_in_norm
from xentlib.accumulate import MODES, CountMismatchError, WindowStateError
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from helpers.windows import (  # noqa: E402
    H,
    N,
    V,
    attempt,
    batch_of,
    gradients,
    mean_of,
    net,
    normalizer,
    one,
    raising,
    run_window,
    token_losses,
)
from xentlib.torch import NLLHead, TokenNormalizer, micro_batch  # noqa: E402
from xentlib.torch import window as window_module  # noqa: E402

# --- tokens and weights --------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6), mode=st.sampled_from(MODES))
def test_the_same_tokens_cut_differently(cuts: list[int], mode: str) -> None:
    """A12: any partition of 40 tokens into micro-batches, empty ones too."""
    parts = [batch_of(k, (7 * k + 3) % (N + 1)) for k in range(4)]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    edges = [0, *sorted(cuts), len(y)]
    pieces = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    model, norm = normalizer(mode=mode)
    window = run_window(norm, model, pieces)
    reference = net().double()
    (token_losses(reference(x.double()), y).sum() / (y != -100).sum()).backward()
    assert int(window.stats.num_tokens) == int((y != -100).sum())
    hold_in_norm(gradients(model), gradients(reference))


def test_weights_that_cancel() -> None:
    """Advantages: their sum may be below 0, and far below the sum of their sizes."""
    model, norm = normalizer()
    x, y = batch_of(0)
    w = torch.tensor([-4.0, *[0.25] * 9])

    def weighted(window: Any, model: Any, x: Any, y: Any) -> None:
        window.backward((token_losses(model(x), y) * w).sum(), w.sum())

    window = attempt(norm, model, [(x, y)], weighted, token_weights=[w])
    assert float(window.stats.num_tokens) == -1.75
    reference = net().double()
    ((token_losses(reference(x.double()), y) * w.double()).sum() / -1.75).backward()
    hold_in_norm(gradients(model), gradients(reference))


def test_class_weights_are_weights_of_tokens() -> None:
    """T is their sum over the labels, as in the mean of one batch, and not the labels' number."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    class_weights = torch.rand(V, generator=torch.Generator().manual_seed(5)) + 0.5

    def body(window: Any, model: Any, x: Any, y: Any) -> None:
        window.backward(mean_of(model, x, y, class_weights=class_weights, reduction="sum"))

    with pytest.raises(CountMismatchError):
        attempt(norm, model, batches, body)
    weights = [class_weights[y.clamp(min=0)] for _, y in batches]
    attempt(norm, model, batches, body, token_weights=weights)
    one_batch = net().double()
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    torch.nn.functional.cross_entropy(one_batch(x.double()), y, class_weights.double()).backward()
    hold_in_norm(gradients(model), gradients(one_batch))


def test_weights_that_cancel_are_the_same_weights() -> None:
    """The loss adds them up in float32: an error of 2^-24 of their sizes is none of their sum."""
    generator = torch.Generator().manual_seed(4)
    w = torch.randn(200_000, generator=generator) * 10
    w[-1] -= w.double().sum().float()
    model, norm = normalizer()

    def body(window: Any, model: Any, x: Any, y: Any) -> None:
        one_by_one = np.add.accumulate(w.numpy())[-1]  # in float32, rounded each time
        assert abs(float(one_by_one - w.double().sum())) > 1e-4
        window.backward(model(x).sum(), torch.tensor(one_by_one))

    y = torch.zeros(len(w), dtype=torch.long)
    attempt(norm, model, [(batch_of(0)[0], y)], body, token_weights=[w])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_masks_are_counted_exactly(dtype: Any) -> None:
    """M14: bf16 ones add up to 256 and no further."""
    model, norm = normalizer()
    many = 1000
    x, y = torch.randn(many, H), torch.randint(V, (many,))
    mask = torch.ones(many, dtype=dtype)
    mask[::10] = 0
    masked = y.where(mask.bool(), -100)
    with norm.window(labels=[y], where=[mask]) as window:
        for a, b in window.micro_batches([(x, masked)]):
            one(window, model, a, b)
    assert int(window.stats.num_tokens) == 900


@pytest.mark.parametrize("empty", ["skip", "zero", "raise"])
def test_a_window_without_tokens(empty: str) -> None:
    """No NaN; gradients of exactly 0."""
    model, norm = normalizer(empty=empty)
    batches = [batch_of(0, 0), batch_of(1, 0)]
    if empty == "raise":
        with pytest.raises(ValueError, match="must hold a valid token with `empty='raise'`"):
            run_window(norm, model, batches)
        return
    window = run_window(norm, model, batches)
    assert bool(window.stats.skipped) == (empty == "skip")
    assert window.stats.loss == 0
    assert all(not p.grad.any() for p in model.parameters())


def test_an_auxiliary_loss_that_is_a_mean_over_tokens() -> None:
    """Times the tokens of its micro-batch it is a sum, and any partition gives the same."""
    parts = [batch_of(k, (7 * k + 3) % (N + 1)) for k in range(4)]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))

    def both(window: Any, model: Any, x: Any, y: Any) -> None:
        logits, valid = model(x), (y != -100)
        count = valid.sum()
        balance = logits[valid].square().mean() if count else logits.sum() * 0.0
        window.backward(token_losses(logits, y).sum() + 0.1 * balance * count, count)

    reference = net().double()
    logits, valid = reference(x.double()), y != -100
    mean = logits[valid].square().mean()
    (token_losses(logits, y).sum() / valid.sum() + 0.1 * mean).backward()
    for pieces in (parts, [(x, y)], [(x[:3], y[:3]), (x[3:], y[3:])]):
        model, norm = normalizer()
        attempt(norm, model, pieces, both)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert not failures(check("A9", p.grad.numpy(), q.grad.numpy(), metrics=("rho / u",)))


# --- gradients and their scale -------------------------------------------------------------------


def test_an_exception_leaves_nothing_behind() -> None:
    """Gradients dropped, the next window clean and to the bit what it would have been."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    with pytest.raises(RuntimeError, match="in the middle"):
        attempt(norm, model, batches, raising)
    assert all(p.grad is None for p in model.parameters())
    window = norm.window(labels=[])
    with pytest.raises(WindowStateError, match=r"`window.stats` needs a window that is ready"):
        window.stats  # noqa: B018
    run_window(norm, model, batches)
    again, fresh = normalizer()
    run_window(fresh, again, batches)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_an_exception_takes_out_the_window_s_gradients_alone() -> None:
    """Those from before are what they were, to the bit; a parameter without any has none again."""
    model, norm = normalizer()
    model[0].weight.grad = torch.randn(H, H)
    before = model[0].weight.grad.clone()
    batches = [batch_of(0), batch_of(1)]
    with pytest.raises(RuntimeError, match="in the middle"):
        attempt(norm, model, batches, raising)
    assert torch.equal(model[0].weight.grad, before)
    assert [p.grad is None for p in model.parameters()] == [False, True, True, True]
    with pytest.raises(CountMismatchError):  # at the end, after all backwards
        run_window(norm, model, batches, labels=[batches[0][1], batches[0][1][:3]])
    assert torch.equal(model[0].weight.grad, before)
    run_window(norm, model, batches)
    window = model[0].weight.grad - before
    model.zero_grad()
    run_window(norm, model, batches)
    error = (window - model[0].weight.grad).abs() / before.abs().clamp(min=1.0)
    assert error.max() < 2.0**-23  # a difference, of its rounding


def test_gradients_that_are_there_are_not_scaled_again() -> None:
    """Post-scale would divide them by its own count; pre-count adds to them."""
    model, norm = normalizer(mode="postscale")
    run_window(norm, model, [batch_of(0)])
    with pytest.raises(WindowStateError, match=r"gradients must be None.*`zero_grad\(set_to_none"):
        run_window(norm, model, [batch_of(1)])
    first = gradients(model)
    model.zero_grad()
    run_window(norm, model, [batch_of(1)])
    second = gradients(model)
    model.zero_grad()
    both = TokenNormalizer(model)
    for seed in (0, 1):
        run_window(both, model, [batch_of(seed)])
    hold_in_norm(gradients(model), [a + b for a, b in zip(first, second, strict=True)])


def test_a_loss_scale_and_many_tokens() -> None:
    """M14: fp16 with GradScaler at 1e5 tokens, and counts above 2^24, which float32 would round."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    norm = TokenNormalizer(model, scaler=scaler)
    x, y = batch_of(0)
    many = torch.zeros(2**24 + 1, dtype=torch.int8)
    with norm.window(labels=[y, many]) as window:
        for a, b in window.micro_batches([(x, y), (x, many)]):
            loss = token_losses(model(a), y).sum()
            window.backward(loss * (1.0 if b is y else 0.0), (b != -100).sum())
    assert int(window.stats.num_tokens) == 2**24 + 11
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.unscale_(optimizer)
    reference = net().double()
    (token_losses(reference(x.double()), y).sum() / (2**24 + 11)).backward()
    hold_in_norm(gradients(model), gradients(reference))


def test_the_factor_of_a_low_precision_gradient_is_not_rounded() -> None:
    """Post-scale of bf16 gradients: each rounded once, not its factor too."""
    model = net().bfloat16()
    norm = TokenNormalizer(model, mode="postscale")
    x, y = batch_of(0, 7)
    reference = net().bfloat16()
    token_losses(reference(x.bfloat16()).float(), y).sum().backward()
    with norm.window() as window:
        for a, b in window.micro_batches([(x, y)]):
            window.backward(token_losses(model(a.bfloat16()).float(), b).sum(), 7)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, (q.grad.double() / 7).bfloat16())


def test_clipping_sees_the_normalised_gradient() -> None:
    """A threshold between its norm and that of the raw sum: nothing is clipped."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    alone = net()
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    (token_losses(alone(x), y).sum() / 13).backward()
    threshold = 2 * float(torch.nn.utils.get_total_norm(gradients(alone)))  # the sum's is 13 times
    run_window(norm, model, batches)
    before = gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def test_an_overflow_of_half_precision_is_not_stepped_on() -> None:
    """GradScaler sees inf in the window's gradient, leaves the step out and lowers its scale; the
    window after it is right."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    norm = TokenNormalizer(model, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    steps = 0
    while all(map(torch.equal, before, model.parameters())):
        run_window(norm, model, [(20 * batch_of(0)[0], batch_of(0)[1]), batch_of(1, 3)])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps += 1
    assert 1 < steps < 20
    alone, fresh = normalizer()
    run_window(fresh, alone, [(20 * batch_of(0)[0], batch_of(0)[1]), batch_of(1, 3)])
    # Scales are powers of two: no bit is lost.
    for p, old, g in zip(model.parameters(), before, gradients(alone), strict=True):
        assert torch.equal(p, old - g)


# --- what a training run does around it ----------------------------------------------------------


def test_a_loader_may_fill_one_buffer() -> None:
    """No batch is asked for before its turn, where the labels say which one is the last."""
    model, norm = normalizer()
    batches = [batch_of(k, 10 - 3 * k) for k in range(3)]
    x, y = batch_of(9)

    def loader() -> Any:
        for a, b in batches:
            x.copy_(a)
            y.copy_(b)
            yield x, y

    with norm.window(labels=[b for _, b in batches]) as window:
        for a, b in window.micro_batches(loader()):
            one(window, model, a, b)
    alone, fresh = normalizer()
    run_window(fresh, alone, batches)
    assert all(map(torch.equal, gradients(model), gradients(alone)))


def test_two_windows_at_once() -> None:
    """Two models, each with its own; micro-batches in turns."""
    pairs = [normalizer() for _ in range(2)]
    batches = [[batch_of(0), batch_of(1, 3)], [batch_of(2, 7), batch_of(3, 2)]]
    first, second = (
        norm.window(labels=[y for _, y in some])
        for (_, norm), some in zip(pairs, batches, strict=True)
    )
    with first, second:
        turns = zip(first.micro_batches(batches[0]), second.micro_batches(batches[1]), strict=True)
        for a, b in turns:
            one(first, pairs[0][0], *a)
            one(second, pairs[1][0], *b)
    for (model, _), some in zip(pairs, batches, strict=True):
        alone, norm = normalizer()
        run_window(norm, alone, some)
        assert all(map(torch.equal, gradients(model), gradients(alone)))


class Reads(TorchDispatchMode):
    """How often the host has read a number from the device."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "nonfinite"), [*((m, "keep") for m in MODES), (MODES[0], "drop")])
def test_the_host_reads_nothing(mode: str, nonfinite: str, monkeypatch: Any) -> None:
    """Statistics stay on the device until somebody asks: but for what is `known` on a CPU, and
    checked there."""
    for module in (window_module, micro_batch):
        monkeypatch.setattr(module, "known", lambda x: None)
    model, norm = normalizer(mode=mode, nonfinite=nonfinite)
    head = NLLHead.from_linear(model[1])
    x, y = batch_of(2, 7)
    with Reads() as reads:
        window = run_window(norm, model, [batch_of(0), batch_of(1, 3)])
        before = reads.number
        assert float(window.stats.num_tokens) == 13
    assert (before, reads.number) == (0, 1)
    if mode == "precount" and nonfinite == "keep":
        with norm.window(labels=[y]) as window:
            for _ in window.micro_batches([None]):
                out = head(model[0](x), y, denominator=window.denominator)
                with Reads() as reads:  # not those of `chunked_nll` and its backward
                    window.backward(
                        out._replace(loss=out.loss.detach().requires_grad_()), None, normalized=True
                    )
        assert reads.number == 0
