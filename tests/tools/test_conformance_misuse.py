"""Adapters of divergences that are none: what a user in a hurry writes, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from xentlib.tools.conformance import DivergenceLoss, Loss, conform, conform_divergence

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional


def each(s: Any, t: Any) -> Any:
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def kl(s: Any, t: Any) -> Any:
    return each(s, t).mean()


def given(function: Any = kl, **about: Any) -> DivergenceLoss:
    return DivergenceLoss("it", about.pop("backend", "torch"), function, **about)


# What a user in a hurry writes, and what it must be told.
REFUSED: dict[str, tuple[Any, str]] = {
    "the function itself": (kl, "`divergence` must be a `DivergenceLoss`; got function. Wrap"),
    "an adapter of the other kind": (
        Loss("it", "torch", kl),
        "`divergence` must be a `DivergenceLoss`; got Loss. `conform` takes a `Loss`",
    ),
    "what the function returns": (
        given(torch.zeros(())),
        "`function` must be a function of the student's and the teacher's logits; got one number",
    ),
    "a KL of no direction": (
        given(kind="kl"),
        "`kind` must be one of 'forward_kl', 'reverse_kl', 'jsd'; got 'kl'",
    ),
    "no beta": (given(kind="jsd"), r"`beta` must be given with `kind='jsd'`.* Pass `beta=0.5`"),
    "a beta of a KL": (given(beta=0.5), r"`beta` must be given with .*'forward_kl'. Leave it out"),
    "TRL's beta of forward KL": (
        given(kind="jsd", beta=0.0),
        "`beta` must be a number between 0 and 1, neither of them; got 0.0",
    ),
    "torch's reduction": (
        given(reduction="batchmean"),
        r"`reduction` must be 'mean', 'sum' or 'none'.*; got 'batchmean'. Call that of torch",
    ),
    "a string of one option": (given(options="where"), "`options` must be a tuple of names among"),
    "another name of the mask": (
        given(lambda s, t, mask=None: kl(s, t), options=("mask",)),
        r"`options` must be a tuple of names among where, temperature; got \('mask',\)",
    ),
    "an option that it does not take": (
        given(options=("where",)),
        r"`function` must take \(student, teacher\) and what .*; got one of \(s, t\) with where",
    ),
    "a third argument": (
        given(lambda s, t, labels: kl(s, t)),
        r"`function` must take .*; got one of \(s, t, labels\) with no options. Wrap it",
    ),
    "a square of no temperature": (
        given(temperature_squared=True),
        "`temperature_squared` must be False without 'temperature' in `options`; got True",
    ),
    "a square as a number": (
        given(temperature_squared=4.0), "`temperature_squared` must be True or False; got 4.0"
    ),
    "a dtype's short name": (given(dtypes=("bf16",)), "`dtypes` must be a tuple of names among"),
    "another backend": (given(backend="numpy"), "`backend` must be 'torch' or 'jax'; got 'numpy'"),
    "one number a token": (
        given(each),
        r"must return the mean, an array of shape \(\) that .* got an array of shape \(2,\). Of a",
    ),
    "one number": (
        given(reduction="none"),
        r"return one number for each token, an array of shape \(2,\) .*'none'; got one number",
    ),
    "one number a class": (
        given(lambda s, t: s - t, reduction="none"), r"got an array of shape \(2, 3\)"
    ),
    "a tuple": (given(lambda s, t: (kl(s, t), s)), r"got \(one number, an array of shape \(2, 3\)"),
    "a Python number": (given(lambda s, t: kl(s, t).item()), r"must return the mean.*; got \d"),
    "detached": (given(lambda s, t: kl(s, t).detach()), "got one number without a graph"),
    "the teacher's gradient": (
        given(lambda s, t: kl(s.detach(), t)), "got one number without a graph"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_of_a_hurried_user(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        conform_divergence(loss)


@pytest.mark.parametrize("seed", [-1, "0", True, None])
def test_a_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match="`seed` must be an integer >= 0; got"):
        conform_divergence(given(), seed=seed)


def test_a_divergence_is_no_loss() -> None:
    with pytest.raises(TypeError, match=r"got DivergenceLoss. .*`conform_divergence`"):
        conform(given())  # type: ignore[arg-type]
