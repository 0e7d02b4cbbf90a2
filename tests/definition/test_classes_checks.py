"""How a hurried user calls `kept`, `ids` and `top_k` wrongly: each in one sentence, in both
backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib.interop import to_jax, to_torch

N, V, H = 6, 11, 4
LABELS = np.arange(N, dtype=np.int32)
KEPT = np.stack([LABELS, LABELS + 1, np.full(N, -1, np.int32)], 1)
GOOD: dict[str, Any] = {
    "hidden": np.ones((N, H), np.float32),
    "weight": np.ones((V, H), np.float32),
    "labels": LABELS,
}
SHAPE = "must have shape (6,) + (K,), K classes of each token of `hidden`; got "
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a mask": (
        {"kept": np.ones((N, V), bool)},
        TypeError,
        "`kept` must be integers; got bool. Pass class ids, -1 for none; of a mask its `nonzero`",
    ),
    "floats": ({"ids": KEPT.astype(np.float32)}, TypeError, "`ids` must be integers; got float32"),
    "one class a token": ({"ids": LABELS}, ValueError, f"`ids` {SHAPE}(6,)"),
    "no room": ({"kept": KEPT[:, :0]}, ValueError, f"`kept` {SHAPE}(6, 0)"),
    "of other tokens": ({"kept": KEPT[1:]}, ValueError, f"`kept` {SHAPE}(5, 3)"),
    "the vocabulary first": ({"ids": KEPT.T.copy()}, ValueError, f"`ids` {SHAPE}(3, 6)"),
    "a class too many": (
        {"ids": np.full((N, 2), V, np.int32)},
        ValueError,
        "`kept` and `ids` must hold classes in [0, 11), or -1 for none; got 11",
    ),
    "padded with -100": (
        {"kept": np.where(KEPT < 0, -100, KEPT)},
        ValueError,
        "`kept` and `ids` must hold classes in [0, 11), or -1 for none; got -100",
    ),
    "what another position kept": (
        {"kept": np.roll(KEPT, 2, axis=0)},
        ValueError,
        "`labels` must be among the `kept` classes of their token; got 0, which is not",
    ),
    "a list": ({"kept": KEPT.tolist()}, TypeError, "`kept` must be a "),
    "more than there are": (
        {"top_k": V + 1},
        ValueError,
        "`top_k` must be at most 11, the number of classes; got 12. Pass `min(k, vocab_size)`",
    ),
    "fewer than none": ({"top_k": -1}, ValueError, "`top_k` must be 0, for none, or a number of"),
    "half of them": ({"top_k": 2.0}, TypeError, "`top_k` must be an integer"),
    "switched off": ({"top_k": False}, TypeError, "`top_k` must be an integer"),
    "switched on": ({"top_k": True}, TypeError, "wanted; got True. Pass an int, 0 for none"),
    "a number each": ({"top_k": LABELS}, TypeError, "`top_k` must be an integer"),
    "none at all": ({"top_k": None}, TypeError, "`top_k` must be an integer"),
    "of the loss": ({"top_k": 2, "reduction": "mean"}, TypeError, "`reduction`"),
    "to a loss": ({"kept": KEPT, "reduction": "mean"}, TypeError, "`reduction`"),
}


def cross(backend: str, x: Any) -> Any:
    to = to_torch if backend == "torch" else to_jax
    return to(x, copy=True) if isinstance(x, np.ndarray) else x


def ours(backend: str) -> Any:
    if backend == "torch":
        from xentlib import torch as ours
    else:
        from xentlib import jax as ours
    return ours


@pytest.mark.parametrize("name", BAD)
def test_misuse_is_said(backend: str, name: str) -> None:
    changes, error, text = BAD[name]
    given = {key: cross(backend, x) for key, x in {**GOOD, **changes}.items()}
    with pytest.raises(error) as caught:
        ours(backend).chunked_logprobs(**given)
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


def test_smoothing_is_refused(backend: str) -> None:
    """It is over the whole vocabulary."""
    logits = cross(backend, np.zeros((N, V), np.float32))
    labels, ids = (cross(backend, x) for x in (LABELS, KEPT))
    for given in ({"ids": ids}, {"top_k": 2}):
        with pytest.raises(ValueError, match="`label_smoothing` must be 0 with `kept`, `ids` or"):
            ours(backend).vocab_parallel_logprobs(logits, labels, **given, label_smoothing=0.1)


def test_more_than_the_given_logits_have(backend: str) -> None:
    logits, labels = (cross(backend, x) for x in (np.zeros((N, V), np.float32), LABELS))
    with pytest.raises(ValueError, match="`top_k` must be at most 11"):
        ours(backend).vocab_parallel_logprobs(logits, labels, top_k=V + 1)
    with pytest.raises(TypeError, match="`top_k` must be an integer"):
        ours(backend).vocab_parallel_logprobs(logits, labels, top_k=False)


@pytest.mark.torch
def test_what_is_not_read_is_nan() -> None:
    """As a label is whose number nobody may look at."""
    torch = pytest.importorskip("torch")
    from xentlib.tools.harness.device import nothing_read
    from xentlib.torch import chunked_logprobs

    given = {name: cross("torch", x) for name, x in GOOD.items()}
    kept = np.where(np.arange(N)[:, None] == 2, (KEPT + 2) % V, KEPT)
    ids = np.where(np.arange(N)[:, None] == 3, V, KEPT)
    with nothing_read():
        classes = {"kept": cross("torch", kept), "ids": cross("torch", ids), "top_k": 2}
        out = chunked_logprobs(**given, **classes)
    bad = torch.tensor([False, False, True, True, False, False])
    for x in (out.logprobs, out.lse):
        assert torch.equal(x.isnan(), bad)
    for x in (out.ids_logprobs, out.top_logprobs):
        assert torch.equal(x.isnan().all(1), torch.arange(N) == 3)
