"""Every function where a size is 0 or 1, or a token has all classes: alone and over ranks, against
full logits in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # the other side of each

from fuzzing import pairs_spread
from fuzzing.pairs import SUBJECTS, Edge, draw
from fuzzing.pairs_held import held, run_jax, run_torch
from fuzzing.pairs_mesh import meshed, run_mesh
from xentlib.tools.harness.ranks import run_ranks

SEED, WORLD = 5, 3
# Tokens, classes, and those of a token.
SIZES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "no token": ((0,), 29, 3),
    "no token of two rows": ((2, 0), 29, 1),
    "one token": ((1,), 29, 3),
    "one token, one class": ((), 1, 1),
    "one class": ((5,), 1, 1),
    "K = V": ((5,), 7, 7),
    "K = 1": ((5,), 29, 1),
}
# Each is a program. Without a token, and of one: test_no_tokens.py.
IN_JAX = ("one class", "K = V")
OF_K = ("few", "classes", "top_k")  # what has some classes of a token, which may be all
OF = [
    ("chunked_nll", "index"),
    *((f, s) for f, names in SUBJECTS.items() for s in sorted({*names})),
]
EDGES = {
    f"{name}, {function} of {subject}": Edge(function, subject, *sizes)
    for name, sizes in SIZES.items()
    for function, subject in OF
}
NUMBERS = {name: number for number, name in enumerate(EDGES)}  # other options for each


@pytest.mark.cpu
@pytest.mark.torch
@pytest.mark.parametrize("name", SIZES)
def test_in_torch(name: str) -> None:
    """Catches: a size that is inferred from the others, which nothing of no element tells."""
    for case, edge in EDGES.items():
        if case.startswith(f"{name}, {edge.function}"):
            pair = draw(SEED, NUMBERS[case], edge)
            assert held("torch", pair, run_torch(pair)) == [], case


@pytest.mark.cpu
@pytest.mark.jax
@pytest.mark.parametrize("of", OF, ids=" of ".join)
def test_in_jax(of: tuple[str, str]) -> None:
    """Catches: XLA, which takes a window over a column that is broadcast for the column."""
    pytest.importorskip("jax")
    for name in IN_JAX[: 1 + (of[1] in OF_K)]:
        case = f"{name}, {of[0]} of {of[1]}"
        pair = draw(SEED, NUMBERS[case], EDGES[case])
        assert held("jax", pair, run_jax(pair)) == [], case


@pytest.mark.cpu
@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("of", OF, ids=" of ".join)
def test_on_a_mesh(of: tuple[str, str]) -> None:
    """Over up to four devices, most of whose shards have no class. Catches: a candidate out of a
    shard's filling, where a token has all classes."""
    pytest.importorskip("jax")
    for name in IN_JAX[: 1 + (of[1] in OF_K)]:
        edge = f"{name}, {of[0]} of {of[1]}"
        cases = (meshed(SEED, n, EDGES[edge]) for n in itertools.count(NUMBERS[edge], len(EDGES)))
        # Heads of two vocabularies are whole ones.
        case = next(case for case in cases if "vocab" not in case.pair.call.keywords)
        assert held("jax", case.pair, run_mesh(case)) == [], case.way


@pytest.mark.cpu
@pytest.mark.torch
@pytest.mark.slow
def test_over_ranks() -> None:
    """Shards, tokens, FSDP2's routes and windows, most of whose ranks have nothing."""
    items = [(SEED, NUMBERS[case], edge) for case, edge in EDGES.items()]
    of_ranks = zip(*run_ranks("torch", pairs_spread.of_rank, items, WORLD), strict=True)
    ways = set()
    for (seed, number, edge), parts in zip(items, of_ranks, strict=True):
        case = pairs_spread.spread(seed, number, WORLD, edge)
        assert pairs_spread.held_together(case, list(parts)) == [], edge
        ways.add(case.way)
    assert ways == {*pairs_spread.WAYS}


def calls_of_few(X: Any, array: Any, ids: Any) -> dict[str, Any]:
    """What takes some classes of each token."""
    tokens = len(ids)
    x, w = np.ones((tokens, 3), np.float32), np.ones((5, 3), np.float32)
    hidden, weight, logits, rows = map(array, (x, w, x @ w.T, ids))
    labels = array(np.zeros(tokens, np.int32))
    of_few = X.SoftLabels(rows, array(np.zeros(ids.shape, np.float32)))
    return {
        "class probabilities": lambda: X.chunked_nll(hidden, weight, of_few),
        "ids": lambda: X.chunked_logprobs(hidden, weight, labels, ids=rows),
        "kept": lambda: X.chunked_logprobs(hidden, weight, labels, kept=rows),
        "of logits": lambda: X.vocab_parallel_logprobs(logits, of_few),
        "ids of logits": lambda: X.vocab_parallel_logprobs(logits, labels, ids=rows),
        "kept of logits": lambda: X.vocab_parallel_logprobs(logits, labels, kept=rows),
        "a teacher's": lambda: X.chunked_divergence(
            hidden, weight, X.TeacherTopK(rows, of_few.probs)
        ),
    }


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_class_at_all_is_refused(backend: str, tokens: int) -> None:
    """K = 0. Catches: a reshape that fails in the framework's words."""
    if backend == "torch":
        import torch

        import xentlib.torch as X

        array: Any = torch.from_numpy
    else:
        import jax.numpy as jnp

        import xentlib.jax as X

        array = jnp.asarray
    ids = np.zeros((tokens, 0), np.int32)
    for name, call in calls_of_few(X, array, ids).items():
        with pytest.raises(ValueError, match=r"`(ids|kept)` must have shape") as raised:
            call()
        assert str(raised.value).startswith("of `teacher`") == (name == "a teacher's")
