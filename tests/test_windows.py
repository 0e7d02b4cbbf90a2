"""Windows of `TokenNormalizer` where something is wrong, missing or uneven.

Shapes: N tokens of a micro-batch, V vocabulary, H hidden width.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xentlib.accumulate import (
    MODES,
    CountMismatchError,
    UnsupportedWrapperError,
    WindowState,
    WindowStateError,
)
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from test_accumulate import H, N, V, net, token_losses  # noqa: E402
from xentlib.torch import (  # noqa: E402
    Evaluation,
    NLLHead,
    NLLOutput,
    TokenNormalizer,
    accumulate,
    chunked_nll,
)


def normalizer(**options: Any) -> tuple[Any, Any]:
    model = net()
    return model, TokenNormalizer(model, **options)


def batch_of(seed: int, valid: int = N) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(V, (N,), generator=generator)
    y[valid:] = -100
    return torch.randn(N, H, generator=generator), y


def run(norm: Any, model: Any, batches: list[Any], **options: Any) -> Any:
    return attempt(norm, model, batches, one, **options)


def attempt(
    norm: Any, model: Any, batches: list[Any], body: Callable[..., Any], **options: Any
) -> Any:
    """A window with `body` for each micro-batch, until it returns something."""
    declared = {"labels": [y for _, y in batches]} if norm.mode == "precount" else {}
    with norm.window(**(declared | options)) as window:
        for x, y in window.micro_batches(batches):
            if body(window, model, x, y):
                break
    return window


def one(window: Any, model: Any, x: Any, y: Any) -> None:
    window.backward(token_losses(model(x), y).sum(), (y != -100).sum())


def raising(window: Any, model: Any, x: Any, y: Any) -> None:
    one(window, model, x, y)
    raise RuntimeError("in the middle")


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
    run(norm, model, batches)
    again, fresh = normalizer()
    run(fresh, again, batches)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


MISUSE: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "no backward": (
        lambda *_: None,
        WindowStateError,
        r"`window.backward` must be called once for each micro-batch; got 0 calls",
    ),
    "two backwards": (
        lambda *given: one(*given) or one(*given),
        WindowStateError,
        r"must be called once for each micro-batch; got 2 calls",
    ),
    "left early": (
        lambda *given: one(*given) or True,
        WindowStateError,
        r"`leaving the window` needs a window that is sealed; got one that is open. Take all that",
    ),
    "a window in a window": (
        lambda window, *_: window.norm.window(labels=[]).__enter__(),
        WindowStateError,
        r"`norm.window\(...\)` needs a window that is idle; got one that is open. Leave the",
    ),
    "losses, not their sum": (
        lambda window, model, x, y: window.backward(token_losses(model(x), y)),
        ValueError,
        r"`loss` must be one number.*got shape \(10,\). Pass `loss.sum\(\)`",
    ),
    "bf16": (
        lambda window, model, x, y: window.backward(token_losses(model(x), y).sum().bfloat16()),
        TypeError,
        r"`loss` must be float32 or float64; got bfloat16.*Add up the losses in float32",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_says_what_to_do(name: str) -> None:
    """D8: and leaves the normalizer as new."""
    body, error, said = MISUSE[name]
    model, norm = normalizer()
    with pytest.raises(error, match=said):
        attempt(norm, model, [batch_of(0), batch_of(1)], body)
    assert norm.lifecycle.state is WindowState.IDLE
    assert all(p.grad is None for p in model.parameters())


def test_arguments_of_a_window() -> None:
    """Before anything is counted; and a backward after the end."""
    model, norm = normalizer()
    with pytest.raises(ValueError, match="`labels` must be the labels of all micro-batches"):
        norm.window()
    with pytest.raises(ValueError, match="`token_weights` must have one entry for each of the 1"):
        norm.window(labels=[batch_of(0)[1]], token_weights=[])
    with pytest.raises(ValueError, match="`mode` must be"):
        normalizer(mode="during")
    _, late = normalizer(mode="postscale")
    with pytest.raises(ValueError, match="`labels` cannot be passed with mode='postscale'"):
        late.window(labels=[])
    for some in (late, norm):
        with pytest.raises(ValueError, match=r"`num_tokens` must be given with a loss that is no"):
            attempt(some, model, [batch_of(0)], lambda w, m, x, y: w.backward(m(x).sum()))
    window = run(norm, model, [batch_of(0)])
    with pytest.raises(WindowStateError, match=r"`window.backward` needs a window that is open"):
        window.backward(torch.zeros((), requires_grad=True))


def test_a_count_that_is_not_what_the_loss_saw() -> None:
    """Counting before the shift, or without the mask."""
    model, norm = normalizer()
    labels = [torch.zeros(N, dtype=torch.int64)]
    with pytest.raises(CountMismatchError, match="got 10 valid tokens declared and 7 in the loss"):
        run(norm, model, [batch_of(0, 7)], labels=labels)
    assert all(p.grad is None for p in model.parameters())


def saying(loss: float, count: Any) -> Callable[..., None]:
    """A backward of a loss of that value, with that count."""

    def body(window: Any, model: Any, x: Any, y: Any) -> None:
        window.backward(model(x).sum() * 0.0 + loss, count)

    return body


def test_tokens_are_compared_exactly() -> None:
    """One of three million, and beyond what float32 holds; weights as their sums are rounded."""
    model, norm = normalizer()
    many = torch.zeros(3_000_000, dtype=torch.int8)
    x, _ = batch_of(0)
    with pytest.raises(CountMismatchError, match=r"got 3000000 valid.*declared and 2999999 in the"):
        attempt(norm, model, [(x, many)], saying(1.0, 2_999_999))
    attempt(norm, model, [(x, many)], saying(1.0, 3_000_000))
    most = torch.zeros(2**24 + 1, dtype=torch.int8)

    def counted(window: Any, model: Any, x: Any, y: Any, number: int = 2**24 + 1) -> None:
        sums = torch.tensor(number), torch.tensor(float(number)), torch.zeros(())
        window.backward(NLLOutput(model(x).sum(), *sums))

    attempt(norm, model, [(x, most)], counted)
    with pytest.raises(CountMismatchError, match="16777217 valid tokens declared and 16777216 in"):
        attempt(norm, model, [(x, most)], partial(counted, number=2**24))
    tiny = {"token_weights": [torch.full((10,), 1e-9)]}
    y = torch.zeros(10, dtype=torch.int64)
    attempt(norm, model, [(x, y)], saying(1.0, 1e-8), **tiny)
    with pytest.raises(CountMismatchError):
        attempt(norm, model, [(x, y)], saying(1.0, 0.9e-8), **tiny)


@pytest.mark.parametrize(("dtype", "label", "ignored"), [("uint8", 156, -100), ("int8", -100, 156)])
def test_labels_of_8_bits_are_compared_as_numbers(dtype: str, label: int, ignored: int) -> None:
    """156 and -100 are the same 8 bits."""
    model, norm = normalizer()
    y = torch.tensor([label, 3, 5], dtype=getattr(torch, dtype))
    window = attempt(norm, model, [(batch_of(0)[0], y)], saying(1.0, 3), ignore_index=ignored)
    assert int(window.stats.num_tokens) == 3


IMPOSSIBLE: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (
        saying(2.5, 0),
        ValueError,
        r"number of tokens that the loss is the sum.*got 0 and.*2.5",
    ),
    "negative": (saying(2.5, -3), ValueError, "`num_tokens` must be the number.*0 or more; got -3"),
    "a row": (
        saying(2.5, torch.ones(4)),
        ValueError,
        r"`num_tokens` must be one number.*got shape \(4,\). Add it up",
    ),
    "NaN": (saying(2.5, float("nan")), ValueError, "`num_tokens` must be finite; got nan"),
    "16 bits": (
        saying(2.5, torch.tensor(257, dtype=torch.bfloat16)),
        TypeError,
        "`num_tokens` must be a number, an integer or float32; got bfloat16",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_counts_that_a_loss_cannot_have(name: str, mode: str) -> None:
    """Whatever reading a number costs nothing, as on a CPU, or its type says."""
    body, error, said = IMPOSSIBLE[name]
    model, norm = normalizer(mode=mode)
    with pytest.raises(error, match=said):
        attempt(norm, model, [batch_of(0)], body)
    with pytest.raises(
        TypeError, match=r"`labels` must be integers; got bool. Pass the labels, not"
    ):
        TokenNormalizer(model).window(labels=[batch_of(0)[1] > 3]).__enter__()


def mean_of(model: Any, x: Any, y: Any, **how: Any) -> Any:
    return chunked_nll(model[0](x), model[1].weight, y, bias=model[1].bias, **how)


def compiled(model: Any, x: Any, y: Any) -> Any:
    return torch.compile(mean_of, backend="aot_eager")(model, x, y)


def checkpointed(model: Any, x: Any, y: Any) -> Any:
    def loss(hidden: Any) -> Any:
        return chunked_nll(hidden, model[1].weight, y, bias=model[1].bias).loss

    return torch.utils.checkpoint.checkpoint(loss, model[0](x), use_reentrant=True)


MEANS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "the output": lambda *given: (mean_of(*given),),
    "another denominator": lambda *given: (mean_of(*given, denominator=5.0, reduction="sum"),),
    "changed": lambda *given: (changed(mean_of(*given)),),
    "compiled": lambda *given: (compiled(*given),),
    "compiled, changed": lambda *given: (changed(compiled(*given)),),
    "its loss": lambda *given: (mean_of(*given).loss, N),
    "its loss alone": lambda *given: (mean_of(*given).loss,),
    "its loss, changed": lambda *given: (mean_of(*given).loss + 0.0,),
    "compiled, its loss": lambda *given: (compiled(*given).loss,),
    "checkpointed": lambda *given: (checkpointed(*given),),
}


def changed(out: Any) -> Any:
    return out._replace(loss=out.loss + 0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_refused(name: str, mode: str) -> None:
    """`chunked_nll`'s default; a mean of means that nothing else would show. An `NLLOutput` says
    so, whatever its loss has gone through; a bare loss of which nobody knows has to say what it is
    the sum of."""
    model, norm = normalizer(mode=mode)

    def body(window: Any, *given: Any) -> None:
        window.backward(*MEANS[name](*given))

    said = r"must be a sum over tokens.*Pass reduction='sum'|`num_tokens` must be given with a loss"
    with pytest.raises(ValueError, match=said):
        attempt(norm, model, [batch_of(0)], body)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_said_to_be_divided() -> None:
    """By `window.denominator`, and nothing else: the output says by what."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]

    def divided(
        window: Any, model: Any, x: Any, y: Any, by: float | None = 1.0, **how: Any
    ) -> None:
        if by is not None:
            how["denominator"] = window.denominator * by
        window.backward(mean_of(model, x, y, **how), normalized=True)

    attempt(norm, model, batches, divided)
    got = gradients(model)
    model.zero_grad()
    run(norm, model, batches)
    for g, p in zip(got, model.parameters(), strict=True):
        assert not failures(check("A9", g.numpy(), p.grad.numpy(), metrics=("rho / u",)))
    for wrong in (
        partial(divided, by=2.0),
        partial(divided, by=None),
        partial(divided, by=None, reduction="sum"),
    ):
        with pytest.raises(
            ValueError, match=r"must have been divided by `window.denominator` with"
        ):
            attempt(norm, model, batches, wrong)


def test_a_denominator_that_nobody_reads_shows(monkeypatch: Any) -> None:
    """NaN, where reading it would be a wait."""
    monkeypatch.setattr(accumulate, "known", lambda x: None)
    model, norm = normalizer()

    def wrong(window: Any, model: Any, x: Any, y: Any) -> None:
        window.backward(mean_of(model, x, y), normalized=True)

    window = attempt(norm, model, [batch_of(0), batch_of(1, 3)], wrong)
    assert torch.isnan(window.stats.loss)
    assert all(torch.isnan(g).all() for g in gradients(model))


def test_a_bare_loss_that_is_a_sum() -> None:
    """With its count, compiled or not."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    run(norm, model, batches)
    want = gradients(model)
    for through in (mean_of, torch.compile(mean_of, backend="aot_eager")):
        for bare in (True, False):
            model.zero_grad()

            def body(window: Any, *given: Any, through: Any = through, bare: bool = bare) -> None:
                out = through(*given, reduction="sum")
                assert out.denominator is None
                window.backward(*((out.loss, out.num_tokens) if bare else (out,)))

            attempt(norm, model, batches, body)
            for g, w in zip(gradients(model), want, strict=True):
                assert not failures(check("A9", g.numpy(), w.numpy(), metrics=("rho / u",)))


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
        run(norm, model, batches, labels=[batches[0][1], batches[0][1][:3]])
    assert torch.equal(model[0].weight.grad, before)
    run(norm, model, batches)
    window = model[0].weight.grad - before
    model.zero_grad()
    run(norm, model, batches)
    error = (window - model[0].weight.grad).abs() / before.abs().clamp(min=1.0)
    assert error.max() < 2.0**-23  # a difference, of its rounding


def test_gradients_that_are_there_are_not_scaled_again() -> None:
    """Post-scale would divide them by its own count; pre-count adds to them."""
    model, norm = normalizer(mode="postscale")
    run(norm, model, [batch_of(0)])
    with pytest.raises(WindowStateError, match=r"gradients must be None.*`zero_grad\(set_to_none"):
        run(norm, model, [batch_of(1)])
    first = gradients(model)
    model.zero_grad()
    run(norm, model, [batch_of(1)])
    second = gradients(model)
    model.zero_grad()
    both = TokenNormalizer(model)
    for seed in (0, 1):
        run(both, model, [batch_of(seed)])
    for p, a, b in zip(model.parameters(), first, second, strict=True):
        assert not failures(check("A9", p.grad.numpy(), (a + b).numpy(), metrics=("rho / u",)))


def test_a_window_is_entered_once() -> None:
    """Its counts are of one update."""
    model, norm = normalizer()
    window = run(norm, model, [batch_of(0)])
    with pytest.raises(WindowStateError, match=r"entered once.*Call `norm.window\(...\)` for each"):
        window.__enter__()
    assert norm.lifecycle.state is WindowState.IDLE


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
    run(fresh, alone, batches)
    assert all(map(torch.equal, gradients(model), gradients(alone)))


def test_what_is_counted_has_the_shape_of_its_labels() -> None:
    """[N, 1] beside [N] would count N times N."""
    model, norm = normalizer()
    y = batch_of(0)[1]
    column = torch.ones(N, 1)
    for name in ("where", "token_weights"):
        with pytest.raises(
            ValueError, match=rf"`{name}` must have the shape of its labels, \(10,\)"
        ):
            run(norm, model, [batch_of(0)], **{name: [column]})
    with pytest.raises(TypeError, match="`labels` must be a tensor for each micro-batch; got list"):
        run(norm, model, [batch_of(0)], labels=[y.tolist()])


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
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert not failures(check("A9", p.grad.numpy(), q.grad.numpy(), metrics=("rho / u",)))


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
    for p, q in zip(model.parameters(), one_batch.parameters(), strict=True):
        assert not failures(check("A9", p.grad.numpy(), q.grad.numpy(), metrics=("rho / u",)))


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


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6), mode=st.sampled_from(MODES))
def test_the_same_tokens_cut_differently(cuts: list[int], mode: str) -> None:
    """A12: any partition of 40 tokens into micro-batches, empty ones too."""
    parts = [batch_of(k, (7 * k + 3) % (N + 1)) for k in range(4)]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    edges = [0, *sorted(cuts), len(y)]
    pieces = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    model, norm = normalizer(mode=mode)
    window = run(norm, model, pieces)
    reference = net().double()
    (token_losses(reference(x.double()), y).sum() / (y != -100).sum()).backward()
    assert int(window.stats.num_tokens) == int((y != -100).sum())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert not failures(check("A9", p.grad.numpy(), q.grad.numpy(), metrics=("rho / u",)))


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
    monkeypatch.setattr(accumulate, "known", lambda x: None)
    model, norm = normalizer(mode=mode, nonfinite=nonfinite)
    head = NLLHead.from_linear(model[1])
    x, y = batch_of(2, 7)
    with Reads() as reads:
        window = run(norm, model, [batch_of(0), batch_of(1, 3)])
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


def test_an_nll_output_brings_its_count() -> None:
    """Post-scale, from the sum that `chunked_nll` returns."""
    model, norm = normalizer(mode="postscale")
    head = NLLHead.from_linear(model[1], reduction="sum")
    batches = [batch_of(0), batch_of(1, 3)]
    with norm.window() as window:
        for x, y in window.micro_batches(batches):
            window.backward(head(model[0](x), y))
    assert window.stats.num_tokens == 13
    got = [p.grad for p in model.parameters()]
    again, fresh = normalizer()
    run(fresh, again, batches)
    for g, p in zip(got, again.parameters(), strict=True):
        assert not failures(check("A9", g.numpy(), p.grad.numpy(), metrics=("rho / u",)))


@pytest.mark.parametrize("empty", ["skip", "zero", "raise"])
def test_a_window_without_tokens(empty: str) -> None:
    """No NaN; gradients of exactly 0."""
    model, norm = normalizer(empty=empty)
    batches = [batch_of(0, 0), batch_of(1, 0)]
    if empty == "raise":
        with pytest.raises(ValueError, match="must hold a valid token with `empty='raise'`"):
            run(norm, model, batches)
        return
    window = run(norm, model, batches)
    assert bool(window.stats.skipped) == (empty == "skip")
    assert window.stats.loss == 0
    assert all(not p.grad.any() for p in model.parameters())


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
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert not failures(check("A9", p.grad.numpy(), q.grad.numpy(), metrics=("rho / u",)))


def test_as_many_batches_as_labels() -> None:
    """What is said is their number, whatever their tokens."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1)]
    labels = [y for _, y in batches]
    for handed in ([*batches, batch_of(2)], batches[:1]):
        with pytest.raises(CountMismatchError, match=r"as many as `labels`.*labels of 2"):
            run(norm, model, handed, labels=labels)


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


def test_wrappers_that_cannot_be_read_are_refused() -> None:
    """D12: what cannot be read is never guessed."""
    model = net()
    with pytest.raises(UnsupportedWrapperError, match=r"got DataParallel.*Use `fully_shard`"):
        TokenNormalizer(torch.nn.DataParallel(model))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    TokenNormalizer(model)
    with pytest.raises(UnsupportedWrapperError, match=r"'0.weight' has a hook.*mode='precount'"):
        TokenNormalizer(model, mode="postscale")
    with pytest.raises(UnsupportedWrapperError, match="`sums` must be None but for DDP with a"):
        TokenNormalizer(net(), sums=True)
    prepared = net()
    prepared._is_accelerate_prepared = True
    with pytest.raises(UnsupportedWrapperError, match="Pass `accelerator=accelerator`"):
        TokenNormalizer(prepared)


# --- what a training run meets -------------------------------------------------------------------


def gradients(model: Any) -> list[Any]:
    return [p.grad.clone() for p in model.parameters()]


def test_an_evaluation_is_one_batch() -> None:
    """M26 (torchtitan#4167): batches of uneven counts, one without a token, under whatever keeps
    no graph; in float64, where a hundred million float32 tokens would lose the last batches."""
    model, _ = normalizer()
    head = NLLHead.from_linear(model[1], reduction="sum")
    batches = [batch_of(0), batch_of(1, 3), batch_of(2, 0)]
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    want = torch.nn.functional.cross_entropy(net().double()(x.double()), y).item()
    for around in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        evaluation = Evaluation()
        for k, (x, y) in enumerate(batches):
            with around() if k < 2 else torch.no_grad():
                evaluation = evaluation.add(head(model[0](x), y))
        loss = evaluation.mean_loss()
        assert not failures(check("A9", loss.numpy(), want, metrics=("rho / u",)))
        assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float64, (), False)
        assert float(evaluation.mean_loss()) == float(loss)
    many = Evaluation().add(3.0e9, 2**30)
    for _ in range(3):
        many.add(torch.tensor(1.0), torch.tensor(1))
    assert float(many.mean_loss()) == (3e9 + 3) / (2**30 + 3)
    assert torch.isnan(Evaluation().mean_loss())
    assert torch.isnan(Evaluation().add(head(model[0](x), y)).mean_loss())  # without a token
    assert torch.isinf(Evaluation().add(np.float32(np.inf), np.int32(3)).mean_loss())


def test_an_evaluation_takes_sums() -> None:
    """A mean that `chunked_nll` has taken is refused, and what else is seen to be no sum."""
    model, _ = normalizer()
    x, y = batch_of(0)
    out = mean_of(model, x, y)
    wrong: dict[str, tuple[Any, ...]] = {
        "must be a sum over tokens; got one that `chunked_nll` has divided. Pass reduction='sum'": (
            (out,),
            (changed(out),),
            (mean_of(model, x, y, denominator=7.0),),
            (out.loss, N),
        ),
        "`num_tokens` must be given with a loss that is no `NLLOutput`": ((out.loss.detach(),),),
        "must be the number of tokens that the loss is the sum of; got 0": ((2.0, 0),),
        "must be one number, the sum over this rank's valid": (
            (torch.ones(3), 3),
            ([2.0], 3),
            ({"loss": 2.0}, 3),
        ),
    }
    for said, calls in wrong.items():
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(said)):
                Evaluation().add(*call)


def test_clipping_sees_the_normalised_gradient() -> None:
    """A threshold between its norm and that of the raw sum: nothing is clipped."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    alone = net()
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    (token_losses(alone(x), y).sum() / 13).backward()
    threshold = 2 * float(torch.nn.utils.get_total_norm(gradients(alone)))  # the sum's is 13 times
    run(norm, model, batches)
    before = gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


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
        run(norm, alone, some)
        assert all(map(torch.equal, gradients(model), gradients(alone)))


def test_a_nan_stays_in_its_window() -> None:
    """It shows in the loss and in the gradient; the next window has the bits of one before which
    nothing was."""
    model, norm = normalizer()
    x, y = batch_of(0)
    window = run(norm, model, [(x * torch.nan, y), batch_of(1)])
    assert torch.isnan(window.stats.loss)
    assert not window.stats.skipped
    assert all(torch.isnan(g).any() for g in gradients(model))
    model.zero_grad()
    run(norm, model, [batch_of(2), batch_of(3, 4)])
    alone, fresh = normalizer()
    run(fresh, alone, [batch_of(2), batch_of(3, 4)])
    assert all(map(torch.equal, gradients(model), gradients(alone)))


def spoilt(batch: Any) -> Any:
    """NaN and inf in its inputs: 0 times its graph would be NaN."""
    x, y = batch[0].clone(), batch[1]
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    return x, y


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
    other = run(fresh, kept, [batches[0], batches[2]])
    assert [int(x) for x in (window.stats.num_tokens, window.stats.dropped)] == [13, 1]
    assert (window.stats.micro_batches, int(other.stats.dropped)) == (3, 0)
    assert float(window.stats.scale) == 1 / 13
    pairs = zip([*gradients(model), window.stats.loss], [*gradients(kept), other.stats.loss])
    for got, want in pairs:
        assert not failures(check("A9", got.numpy(), want.numpy(), metrics=("rho / u",)))
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
        which = w[window.seen]
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
        run(norm, model, [batch_of(0)])
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
        run(norm, model, [(20 * batch_of(0)[0], batch_of(0)[1]), batch_of(1, 3)])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps += 1
    assert 1 < steps < 20
    alone, fresh = normalizer()
    run(fresh, alone, [(20 * batch_of(0)[0], batch_of(0)[1]), batch_of(1, 3)])
    # Scales are powers of two: no bit is lost.
    for p, old, g in zip(model.parameters(), before, gradients(alone), strict=True):
        assert torch.equal(p, old - g)


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
