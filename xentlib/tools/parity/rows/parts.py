"""A18 without ranks, on any device: the statistics of a vocabulary's columns, in one process, of
each part as a shard makes them and of all parts added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.math.softmax import BlockStats, TargetInfo, WantedStats
from xentlib.tools.harness.cases import logit_sets
from xentlib.tools.harness.device import numpy_of, on_jax, on_torch
from xentlib.tools.harness.findings import Findings
from xentlib.tools.parity.rows.invariant import blocks, even

Array = npt.NDArray[Any]
WANTED = WantedStats(entropy=True, predicted=True)
NAMES = ("lse", "logprob", "entropy", "correct", "predicted")


def parts(findings: Findings, seed: int) -> None:
    """A18 of given logits, of which every part but the last is whole blocks."""
    for text, logits, labels in logit_sets(seed, "gaps-1000", "sharp"):
        vocab = logits.shape[1]
        # In JAX each is a program.
        cuts = (even(vocab, 3), even(vocab, 8), blocks(vocab, (1, 0, 3)))
        for backend in findings.backends:
            stats = of_torch if backend == "torch" else of_jax
            whole = stats(logits, labels, (vocab,))
            for sizes in cuts:
                details = {"backend": backend, "case": f"{text}, parts of {sizes}, one process"}
                for name, got in stats(logits, labels, sizes).items():
                    findings.check("A18", got, whole[name], quantity=name, **details)


def columns_of(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each part that has columns begins, and its size."""
    start = 0
    for size in sizes:
        if size:
            yield start, size
        start += size


def joined(xp: Any, of_parts: list[tuple[Any, BlockStats]]) -> tuple[Any, BlockStats]:
    z_y = sum(z for z, _ in of_parts)
    fields = zip(*(rest[:-1] for _, rest in of_parts), strict=True)
    return z_y, BlockStats(*(xp.concatenate(x) for x in fields))


def of_torch(logits: Array, labels: Array, sizes: Sequence[int]) -> dict[str, Array]:
    import torch

    from xentlib.torch.core.kernels import LogitsBlock, LogitTransform, kernels_for

    z_NV, target = on_torch(logits), on_torch(labels).long()
    count, of_parts = len(target), []
    made = kernels_for(z_NV.device, z_NV.dtype)
    every = slice(0, count)
    for start, size in columns_of(sizes):
        width = size + made.spare_column
        z_NC = z_NV.new_full((count, width), -torch.inf)
        z_NC[:, :size] = z_NV[:, start : start + size]
        owned = (target >= start) & (target < start + size)
        y_N1 = torch.where(owned, target - start, size)[:, None]
        rows = LogitsBlock(every, every, z_NC, y_N1, None, None, owned)
        kernels = made(count, width, z_NC.dtype, z_NC.device, LogitTransform(size))
        z_y, rest = kernels.stats(rows, WANTED, dz_follows=False)
        assert rest.top is not None
        of_parts.append((torch.where(owned, z_y, 0.0), rest._replace(top=rest.top + start)))
    z_y, rest = joined(torch, of_parts)
    label = TargetInfo(target, 1.0, float(z_NV.shape[1]))
    stats = made.algebra.token_stats(z_y, made.algebra.together(rest), z_NV.shape[1], label)
    return {name: numpy_of(getattr(stats, name)) for name in NAMES}


def of_jax(logits: Array, labels: Array, sizes: Sequence[int]) -> dict[str, Array]:
    import jax
    import jax.numpy as jnp

    from xentlib.jax.core.algebra import ALGEBRA
    from xentlib.jax.core.kernels import XLA, LogitsBlock, LogitTransform

    @jax.jit
    def stats_of(z_NV: jax.Array, target: jax.Array) -> dict[str, Any]:
        of_parts = []
        for start, size in columns_of(sizes):
            owned = (target >= start) & (target < start + size)
            y_N1 = jnp.where(owned, target - start, size)[:, None]
            z_NC = z_NV[:, start : start + size]
            rows = LogitsBlock(z_NC, y_N1, None, jnp.ones_like(owned), owned)
            z_y, rest, _ = XLA(LogitTransform()).stats(rows, WANTED)
            assert rest.top is not None
            of_parts.append((jnp.where(owned, z_y, 0.0), rest._replace(top=rest.top + start)))
        z_y, rest = joined(jnp, of_parts)
        label = TargetInfo(target, 1.0, float(z_NV.shape[1]))
        stats = ALGEBRA.token_stats(z_y, ALGEBRA.together(rest), z_NV.shape[1], label)
        return {name: getattr(stats, name) for name in NAMES}

    stats = stats_of(on_jax(logits), on_jax(labels.astype(np.int32)))
    return {name: numpy_of(x) for name, x in stats.items()}
