"""Options that a call refuses, as data: one sentence each, the same from both backends."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from helpers.refusals import Bad, H, N, V, call, check_both, check_refusal, zeros
from xentlib import logprobs, nll
from xentlib.checks.call import INSTEAD
from xentlib.contract import check, failures
from xentlib.interop import to_jax, to_torch

OUTPUTS = "'logprobs', 'entropy', 'lse', 'correct', 'predicted'"

BAD = [
    Bad(
        "negative budget",
        ValueError,
        {"max_chunk_bytes": -1},
        "`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; got -1. "
        "Pass None for the default.",
    ),
    Bad(
        "fractional budget",
        ValueError,
        {"max_chunk_bytes": 1e6},
        "`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; "
        "got 1000000.0. Pass None for the default.",
    ),
    Bad(
        "unknown output",
        ValueError,
        {"outputs": ("lse", "perplexity")},
        f"`outputs` must hold names from {OUTPUTS}; got 'perplexity'. Leave it out.",
    ),
    Bad(
        "one output as text",
        ValueError,
        {"outputs": "lse"},
        f"`outputs` must be a tuple of names from {OUTPUTS}; got 'lse'. "
        f"Pass for instance `outputs=('lse',)`.",
    ),
    Bad(
        "unknown reduction",
        ValueError,
        {"reduction": "none"},
        "`reduction` must be one of 'mean', 'sum'; got 'none'. For a loss of each token write "
        "`-chunked_logprobs(hidden, weight, labels).logprobs`.",
    ),
    Bad(
        "a loss of each token with options",
        ValueError,
        {
            "reduction": "none",
            "bias": zeros(V),
            "temperature": zeros(N) + 2,
            "softcap": 30.0,
            "label_smoothing": 0.1,
            "token_weights": zeros(N),
            "logit_scale": 1,
        },
        "`reduction` must be one of 'mean', 'sum'; got 'none'. For a loss of each token write "
        "`-chunked_logprobs(hidden, weight, labels, bias=bias, softcap=softcap, "
        "temperature=temperature).logprobs`, which leaves out `token_weights`, `label_smoothing`.",
    ),
    Bad(
        "mean over a batch",
        ValueError,
        {"reduction": "batchmean"},
        "`reduction` must be one of 'mean', 'sum'; got 'batchmean'. To divide the sum by another "
        "number, such as the batch size, pass `denominator`.",
    ),
    Bad(
        "one-hot labels",
        ValueError,
        {"labels": zeros(N, V, dtype=np.int32)},
        f"`labels` must have shape ({N},), one class for each token of `hidden`; got ({N}, {V}). "
        f"Pass class indices, of one-hot rows `labels.argmax(-1)`; `chunked_nll` takes class "
        f"probabilities of a floating dtype.",
    ),
    Bad(
        "no ignore_index",
        TypeError,
        {"ignore_index": None},
        "`ignore_index` must be an integer; got None. Pass the label that marks tokens without a "
        "loss, -100 by convention.",
    ),
    Bad(
        "unknown layout",
        ValueError,
        {"weight_layout": "VD"},
        "`weight_layout` must be one of 'VH', 'HV'; got 'VD'.",
    ),
    Bad(
        "unknown compute dtype",
        ValueError,
        {"compute_dtype": "bfloat16"},
        "`compute_dtype` must be one of 'float32', 'float64'; got 'bfloat16'.",
    ),
    Bad(
        "a dtype for its name",
        ValueError,
        {"compute_dtype": np.float64},
        "`compute_dtype` must be one of 'float32', 'float64'; got <class 'numpy.float64'>. Pass "
        "its name, 'float64'.",
    ),
    Bad(
        "float64 computed in float32",
        ValueError,
        {"hidden": zeros(N, H, dtype=np.float64), "compute_dtype": "float32"},
        "`compute_dtype` must be None or 'float64' for float64 inputs; got 'float32'. "
        "Cast the inputs to float32 instead.",
    ),
    Bad(
        "softcap 0",
        ValueError,
        {"softcap": 0},
        "`softcap` must be None, a positive number or a 0-d array; got 0.",
    ),
    Bad(
        "softcap nan",
        ValueError,
        {"softcap": float("nan")},
        "`softcap` must be None, a positive number or a 0-d array; got nan.",
    ),
    Bad(
        "smoothing 1.5",
        ValueError,
        {"label_smoothing": 1.5},
        "`label_smoothing` must be a number in [0, 1]; got 1.5.",
    ),
    Bad(
        "smoothing an array",
        ValueError,
        {"label_smoothing": zeros(1)},
        "`label_smoothing` must be a number in [0, 1]; got an array of float32 and shape (1,).",
    ),
    Bad(
        "negative z-loss",
        ValueError,
        {"z_loss": -0.1},
        "`z_loss` must be a number >= 0 or a 0-d array; got -0.1.",
    ),
    Bad("temperature 0", ValueError, {"temperature": 0}, "`temperature` must be "),
    Bad("temperature inf", ValueError, {"temperature": float("inf")}, "`temperature` must be "),
    Bad("temperature shape", ValueError, {"temperature": zeros(5)}, "`temperature` must be "),
    Bad(
        "temperature of booleans",
        TypeError,
        {"temperature": zeros(N, dtype=np.bool_)},
        "`temperature` must be ",
    ),
    Bad("scale of a vector", ValueError, {"logit_scale": zeros(V)}, "`logit_scale` must be "),
    Bad("scale nan", ValueError, {"logit_scale": float("nan")}, "`logit_scale` must be "),
    Bad("denominator text", ValueError, {"denominator": "mean"}, "`denominator` must be "),
    Bad("denominator of a vector", ValueError, {"denominator": zeros(V)}, "`denominator` must be "),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_bad_options_are_refused(backend, bad):
    """D12, M11: argument, expectation, what came, way out; nothing is guessed."""
    check_refusal(backend, bad)


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_both_backends_say_the_same(bad):
    """D2, M27: validation that is pasted per backend drifts; this one is asked once."""
    check_both(bad)


def test_the_line_for_a_loss_of_each_token_is_right(backend):
    """What `F.cross_entropy(reduction="none")` returns, by the line of the message: 0 for a token
    that is not valid, whatever its hidden states are."""
    package = pytest.importorskip(f"xentlib.{backend}")
    cross = to_torch if backend == "torch" else to_jax
    random = np.random.default_rng(0)
    hidden, weight = (random.normal(size=(n, H)).astype(np.float32) for n in (N, V))
    bias, labels = random.normal(size=V).astype(np.float32), np.arange(N, dtype=np.int32)
    hidden[1], labels[1] = np.nan, -100
    given = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    given = {name: cross(x, copy=True) for name, x in given.items()}
    with pytest.raises(ValueError, match="For a loss of each token") as caught:
        package.chunked_nll(**given, reduction="none")
    (line,) = re.findall(r"`(-chunked_logprobs.*?)`", str(caught.value))
    names = {**given, "chunked_logprobs": package.chunked_logprobs}
    losses = np.asarray(eval(line, names))  # a line of the package's own
    logits = hidden.astype(np.float64) @ weight.T + bias
    rows = np.arange(N) != 1
    lse = np.log(np.exp(logits[rows]).sum(-1))
    magnitude = np.maximum(np.abs(logits[rows]).max(-1), lse)
    expected = lse - logits[rows, labels[rows]]
    assert not failures(check("A2", losses[rows], expected, magnitude=magnitude))
    assert failures(check("A2", -losses[rows], expected, magnitude=magnitude))
    assert losses[1] == 0


# Names that people bring from other losses, and what to write.
NAMES = {
    "target": "Write `labels=`.",
    "input": "Write `hidden=`.",
    "hidden_states": "Write `hidden=`.",
    "lin_weight": "Write `weight=`.",
    "final_logit_softcapping": "Write `softcap=`.",
    "shift_labels": "Labels are taken as they are: pass shifted ones, such as "
    "`next_token_labels(tokens)`.",
    "logits": "With precomputed logits write `-vocab_parallel_logprobs(logits, labels).logprobs`.",
    "entropy": "Its arguments are hidden, weight, labels, bias, ",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_another_library_says_ours(backend, name):
    """Before what is missing, as of a call with `logits` and `target` alone."""
    package = pytest.importorskip(f"xentlib.{backend}")
    message = f"`{name}` is not an argument of `chunked_nll`. {NAMES[name]}"
    with pytest.raises(TypeError) as caught:
        package.chunked_nll(**{name: 1})
    assert str(caught.value).startswith(message)


def test_names_of_other_libraries_are_none_of_ours():
    functions = (nll.chunked_nll, logprobs.chunked_logprobs, logprobs.vocab_parallel_logprobs)
    for function in functions:
        known = inspect.signature(function).parameters
        ways = {name: way for name, way in INSTEAD.items() if name not in known}
        assert set(INSTEAD) - set(ways) <= {"logits"}
    every = {x for function in functions for x in inspect.signature(function).parameters}
    assert [way for way in INSTEAD.values() if " " not in way and way not in every] == []


@pytest.mark.jax
def test_jax_asks_for_a_mesh_axis():
    """PyTorch's refusals are in test_vocab_parallel.py."""
    pytest.importorskip("jax")
    with pytest.raises(
        ValueError, match=r"`vocab_parallel` must be the name of a mesh axis inside"
    ):
        call("jax", {"vocab_parallel": "tp"})
