"""Sharded heads in JAX: problems whose sizes the devices divide, their arrays on a mesh, and what a
step sends.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.vocab_shards import CASES
from helpers.vocab_shards_jax import whole
from xentlib.jax import count_collectives
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.cases import named
from xentlib.tools.harness.problems import Problem, upstream_of

N, H, V = 220, 24, 156
OPTIONS, KERNEL, LOW = (
    replace(case, tokens=N, vocab=V) for case in named(CASES, "options", "kernel", "bf16")
)

ONE, TWO = {"data": 4}, {"data": 2, "tp": 2}


def on(mesh: Any, spec: Any, x: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, spec))


def inputs_of(p: Problem, kind: str, mesh: Any, tokens: Any, weight: P, bias: Any = None) -> tuple:
    """(hidden, weight, bias) and the rest by name, tokens over `tokens`; options without arrays."""
    leaves = (
        on(mesh, P(tokens), p.hidden), on(mesh, weight, p.weight), on(mesh, bias or P(), p.bias)
    )  # fmt: skip
    options = dict(p.options if kind == "nll" else p.per_token_options)
    rest = {
        "labels": p.labels,
        "where": p.where,
        "temperature": options.pop("temperature", None),
        "token_weights": p.token_weights if kind == "nll" else None,
        "upstream": np.float32(p.upstream) if kind == "nll" else np.stack(upstream_of(p, 5)),
    }
    rest = {
        name: on(mesh, P(*(None,) * (np.ndim(x) - 1), tokens) if np.ndim(x) else P(), x)
        for name, x in rest.items()
        if x is not None
    }
    return (leaves, rest), options


def budget(tokens: int, chunks: int) -> int:
    """Bytes for so many chunks, of at least 64 rows."""
    return 4 * V * max(64, -(-tokens // chunks))


def run_step(step: Any, inputs: tuple) -> tuple[dict[str, Any], Any]:
    """Outputs and gradients by name, and what the step sends."""
    with count_collectives() as count:
        (_, out), gradients = jax.jit(step)(*inputs)
    for given, g in zip(inputs[0], gradients):
        assert g.sharding.is_equivalent_to(given.sharding, g.ndim)
    named = out | dict(zip(GRADIENTS, gradients))
    return {name: whole(x) for name, x in named.items() if x is not None}, count


def spent(count: Any, *kinds: str) -> list[int]:
    assert not count.looped()
    return [count[kind] for kind in kinds]
