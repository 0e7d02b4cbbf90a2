"""Options that a call refuses, as data: one sentence each, the same from both backends."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.refusals import Bad, H, N, V, call, check_both, check_refusal, zeros

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
        "`reduction` must be one of 'mean', 'sum'; got 'none'.",
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


@pytest.mark.jax
def test_jax_asks_for_a_mesh_axis():
    """PyTorch's refusals are in test_vocab_parallel.py."""
    pytest.importorskip("jax")
    with pytest.raises(
        ValueError, match=r"`vocab_parallel` must be the name of a mesh axis inside"
    ):
        call("jax", {"vocab_parallel": "tp"})
