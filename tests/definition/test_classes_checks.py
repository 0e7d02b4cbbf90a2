"""How a hurried user calls `kept` and `ids` wrongly: each in one sentence, in both backends."""

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
    with pytest.raises(ValueError, match="`label_smoothing` must be 0 with `kept` or `ids`"):
        ours(backend).vocab_parallel_logprobs(logits, labels, ids=ids, label_smoothing=0.1)


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
        out = chunked_logprobs(**given, kept=cross("torch", kept), ids=cross("torch", ids))
    bad = torch.tensor([False, False, True, True, False, False])
    for x in (out.logprobs, out.lse):
        assert torch.equal(x.isnan(), bad)
    assert torch.equal(out.ids_logprobs.isnan().all(1), torch.arange(N) == 3)
