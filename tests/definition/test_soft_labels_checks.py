"""How a hurried user passes class probabilities wrongly: each in one sentence, in both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib.interop import to_jax, to_torch
from xentlib.labels import SoftLabels

N, V, H = 6, 11, 4
PROBS = np.full((N, V), 1 / V, np.float32)
IDS = np.arange(3 * N, dtype=np.int32).reshape(N, 3) % V
FEW = np.full((N, 3), 1 / 3, np.float32)
GOOD: dict[str, Any] = {
    "hidden": np.ones((N, H), np.float32),
    "weight": np.ones((V, H), np.float32),
    "labels": PROBS,
}
Bad = dict[str, tuple[dict[str, Any], type[Exception], str]]
BAD: Bad = {
    "logits": ({"labels": PROBS - 1}, ValueError, "`labels` must be probabilities, none of them"),
    "log-probabilities of few": (
        {"labels": SoftLabels(IDS, np.log(FEW))},
        ValueError,
        "`labels` must be probabilities, none of them",
    ),
    "NaN": ({"labels": PROBS * np.float32(np.nan)}, ValueError, "none of them negative or NaN"),
    "float classes": ({"labels": PROBS[:, 0]}, TypeError, "`labels` must be integers; got float32"),
    "one-hot integers": (
        {"labels": (PROBS > 1).astype(np.int32)},
        ValueError,
        "`labels` must have shape (6,), one class for each token of `hidden`; got (6, 11)",
    ),
    "another vocabulary": (
        {"labels": PROBS[:, 1:]},
        ValueError,
        "one for each of the 11 classes; got (6, 10)",
    ),
    "other tokens": ({"labels": PROBS[1:]}, ValueError, "got (5, 11)"),
    "an ignored index": (
        {"ignore_index": 0},
        ValueError,
        "`ignore_index` must be left out where `labels` are class probabilities; got 0",
    ),
    "accuracy": (
        {"outputs": ("predicted",)},
        ValueError,
        "`outputs` must not have 'predicted' where `labels` are class probabilities",
    ),
    "fields swapped": (
        {"labels": SoftLabels(FEW, IDS)},
        TypeError,
        "`ids` must be integers; got float32",
    ),
    "fewer probabilities": (
        {"labels": SoftLabels(IDS, FEW[:, :2])},
        ValueError,
        "`probs` must have shape (6, 3), as the `ids` of the same `SoftLabels`; got (6, 2)",
    ),
    "no class": (
        {"labels": SoftLabels(IDS + 1, FEW)},
        ValueError,
        "`kept` and `ids` must hold classes in [0, 11), or -1 for none; got 11",
    ),
    "a list": ({"labels": SoftLabels(IDS.tolist(), FEW)}, TypeError, "`ids` must be a "),
    "recompute": ({"recompute": True}, ValueError, "`recompute` must be False where `labels` are"),
    "the stream": ({"gather": "stream"}, ValueError, "`gather` must be 'head' or 'hidden' where"),
}
OF_TOKENS: Bad = {
    "per-token losses": ({}, TypeError, "`labels` must be integers; got float32"),
    "few": ({"labels": SoftLabels(IDS, FEW)}, TypeError, "`labels` must be a "),
}


def cross(backend: str, x: Any) -> Any:
    to = to_torch if backend == "torch" else to_jax
    if isinstance(x, SoftLabels):
        return SoftLabels(*(cross(backend, y) for y in x))
    return to(x, copy=True) if isinstance(x, np.ndarray) else x


def ours(backend: str) -> Any:
    if backend == "torch":
        from xentlib import torch as ours
    else:
        from xentlib import jax as ours
    return ours


@pytest.mark.parametrize("name", [*BAD, *OF_TOKENS])
def test_misuse_is_said(backend: str, name: str) -> None:
    changes, error, text = {**BAD, **OF_TOKENS}[name]
    given = {key: cross(backend, x) for key, x in {**GOOD, **changes}.items()}
    function = "chunked_nll" if name in BAD else "chunked_logprobs"
    with pytest.raises(error) as caught:
        getattr(ours(backend), function)(**given)
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


def test_given_logits(backend: str) -> None:
    """Neither beside a kept set, nor of other columns."""
    logits, probs, ids = (cross(backend, x) for x in (np.zeros((N, V), np.float32), PROBS, IDS))
    function = ours(backend).vocab_parallel_logprobs
    with pytest.raises(ValueError, match="`labels` must be classes with `kept`, `ids`"):
        function(logits, probs, ids=ids)
    with pytest.raises(ValueError, match=r"each of the 11 classes; got \(6, 10\)"):
        function(logits, probs[:, 1:])
    with pytest.raises(ValueError, match="none of them negative"):
        function(logits, -probs)


@pytest.mark.torch
def test_gradients_of_probabilities_are_refused() -> None:
    """They would be dropped without a word: a teacher that is not detached."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_nll, vocab_parallel_logprobs

    given = {name: cross("torch", x) for name, x in GOOD.items()}
    probs = given["labels"].requires_grad_()
    with pytest.raises(ValueError, match=r"`labels` must be a constant.*Pass `labels.detach\(\)`"):
        chunked_nll(**given)
    labels = SoftLabels(cross("torch", IDS), probs[:, :3])
    with pytest.raises(ValueError, match="`probs` must be a constant"):
        chunked_nll(**{**given, "labels": labels})
    with pytest.raises(ValueError, match="`labels` must be a constant"):
        vocab_parallel_logprobs(torch.zeros(N, V), probs)


@pytest.mark.torch
def test_what_is_not_read_is_nan() -> None:
    """A negative probability, and what is no class."""
    torch = pytest.importorskip("torch")
    from xentlib.tools.harness.device import nothing_read
    from xentlib.torch import chunked_nll

    given = {name: cross("torch", x) for name, x in GOOD.items()}
    probs, ids = given["labels"].clone(), cross("torch", IDS)
    probs[2, 3], ids[4, 1] = -0.1, V
    with nothing_read():
        out = chunked_nll(**{**given, "labels": probs}, outputs=("logprobs",))
        few = SoftLabels(ids, cross("torch", FEW))
        of_few = chunked_nll(**{**given, "labels": few}, outputs=("logprobs",))
    assert torch.equal(out.logprobs.isnan(), torch.arange(N) == 2)
    assert torch.equal(of_few.logprobs.isnan(), torch.arange(N) == 4)
    assert out.loss.isnan()


@pytest.mark.jax
def test_gradients_of_probabilities_in_jax() -> None:
    """None flows back to them, and a program reads none of them."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_nll

    given = {name: cross("jax", x) for name, x in GOOD.items()}

    def loss(probs: Any) -> Any:
        return chunked_nll(given["hidden"], given["weight"], probs).loss

    assert not jax.grad(loss)(given["labels"]).any()
    assert jax.numpy.isnan(jax.jit(loss)(-given["labels"]))
