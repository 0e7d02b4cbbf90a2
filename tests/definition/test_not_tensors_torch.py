"""What is passed to `xentlib.torch` and is no tensor: named, with the call that makes it one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from xentlib.torch import (  # noqa: E402
    chunked_logprobs,
    chunked_nll,
    next_token_labels,
    vocab_parallel_logprobs,
)

N, H, V = 4, 3, 7
GOOD = {
    "hidden": torch.ones(N, H),
    "weight": torch.ones(V, H),
    "labels": torch.arange(N),
    "bias": torch.ones(V),
    "where": torch.ones(N, dtype=torch.bool),
    "token_weights": torch.ones(N),
    "class_weights": torch.ones(V),
    "temperature": torch.ones(N),
    "logit_scale": torch.tensor(2.0),
}
OPTIONAL = ("bias", "where", "token_weights", "class_weights")


def said(function: Any, **arguments: Any) -> str:
    with pytest.raises(TypeError) as caught:
        function(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_an_array_of_numpy(name: str) -> None:
    array = GOOD[name].numpy()
    if array.ndim == 0:  # as good as the number
        assert torch.equal(chunked_nll(**GOOD | {name: array}).loss, chunked_nll(**GOOD).loss)
        return
    assert said(chunked_nll, **GOOD | {name: array}) == (
        f"`{name}` must be a torch.Tensor; got numpy.ndarray. Pass `torch.from_numpy({name})`."
    )


@pytest.mark.jax
@pytest.mark.parametrize("name", GOOD)
def test_an_array_of_jax(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    assert said(chunked_nll, **GOOD | {name: jnp.asarray(GOOD[name].numpy())}) == (
        f"`{name}` must be a torch.Tensor; got jax.Array. Pass `xentlib.interop.to_torch({name})`."
    )


@pytest.mark.parametrize("name", ["hidden", "weight", "labels", *OPTIONAL])
def test_a_list(name: str) -> None:
    numbers, tensors = GOOD[name].tolist(), tuple(GOOD[name])
    assert said(chunked_nll, **GOOD | {name: numbers}) == (
        f"`{name}` must be a torch.Tensor; got list. Pass `torch.tensor({name})`."
    )
    last = "`hidden[-1]` of all hidden states of a model, or " if name == "hidden" else ""
    assert said(chunked_nll, **GOOD | {name: tensors}) == (
        f"`{name}` must be a torch.Tensor; got a tuple of tensors. "
        f"Pass one tensor: {last}`torch.stack({name})`."
    )


def test_what_a_model_returns_and_nothing() -> None:
    output = SimpleNamespace(last_hidden_state=GOOD["hidden"], logits=torch.ones(N, V))
    for name, field, function in (
        ("hidden", "last_hidden_state", chunked_logprobs),
        ("logits", "logits", vocab_parallel_logprobs),
    ):
        rest = {k: GOOD[k] for k in ("weight", "labels")[name == "logits" :]}
        assert said(function, **rest, **{name: output}) == (
            f"`{name}` must be a torch.Tensor; got SimpleNamespace. Pass `{name}.{field}`."
        )
        assert said(function, **rest, **{name: None}).startswith(
            f"`{name}` must be a torch.Tensor; got NoneType. Pass "
        )
    for name in OPTIONAL:
        assert chunked_nll(**GOOD | {name: None}).loss.isfinite()
        assert said(chunked_nll, **GOOD | {name: "no"}) == (
            f"`{name}` must be a torch.Tensor; got str. Pass a tensor, or leave it out."
        )


@pytest.mark.parametrize("name", ["labels", "segment_ids", "position_ids", "cu_seqlens"])
def test_labels_before_their_shift(name: str) -> None:
    given: dict[str, Any] = {"labels": GOOD["labels"]} | {name: np.arange(N)}
    assert said(next_token_labels, **given) == (
        f"`{name}` must be a torch.Tensor; got numpy.ndarray. Pass `torch.from_numpy({name})`."
    )
    given[name] = [0, 1, 2, 3]
    assert said(next_token_labels, **given).endswith(f"Pass `torch.tensor({name})`.")
