"""What a window of `TokenNormalizer` refuses: calls in another order, counts that cannot be,
wrappers that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from xentlib.accumulate import (
    MODES,
    CountMismatchError,
    UnsupportedWrapperError,
    WindowState,
    WindowStateError,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import N, attempt, batch_of, net, normalizer, one, run_window, token_losses  # noqa: E402
from xentlib.torch import NLLOutput, TokenNormalizer  # noqa: E402

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
    window = run_window(norm, model, [batch_of(0)])
    with pytest.raises(WindowStateError, match=r"`window.backward` needs a window that is open"):
        window.backward(torch.zeros((), requires_grad=True))


def test_a_window_is_entered_once() -> None:
    """Its counts are of one update."""
    model, norm = normalizer()
    window = run_window(norm, model, [batch_of(0)])
    with pytest.raises(WindowStateError, match=r"entered once.*Call `norm.window\(...\)` for each"):
        window.__enter__()
    assert norm.lifecycle.state is WindowState.IDLE


def test_as_many_batches_as_labels() -> None:
    """What is said is their number, whatever their tokens."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1)]
    labels = [y for _, y in batches]
    for handed in ([*batches, batch_of(2)], batches[:1]):
        with pytest.raises(CountMismatchError, match=r"as many as `labels`.*labels of 2"):
            run_window(norm, model, handed, labels=labels)


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


# --- counts --------------------------------------------------------------------------------------


def test_a_count_that_is_not_what_the_loss_saw() -> None:
    """Counting before the shift, or without the mask."""
    model, norm = normalizer()
    labels = [torch.zeros(N, dtype=torch.int64)]
    with pytest.raises(CountMismatchError, match="got 10 valid tokens declared and 7 in the loss"):
        run_window(norm, model, [batch_of(0, 7)], labels=labels)
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


def test_what_is_counted_has_the_shape_of_its_labels() -> None:
    """[N, 1] beside [N] would count N times N."""
    model, norm = normalizer()
    y = batch_of(0)[1]
    column = torch.ones(N, 1)
    for name in ("where", "token_weights"):
        with pytest.raises(
            ValueError, match=rf"`{name}` must have the shape of its labels, \(10,\)"
        ):
            run_window(norm, model, [batch_of(0)], **{name: [column]})
    with pytest.raises(TypeError, match="`labels` must be a tensor for each micro-batch; got list"):
        run_window(norm, model, [batch_of(0)], labels=[y.tolist()])
