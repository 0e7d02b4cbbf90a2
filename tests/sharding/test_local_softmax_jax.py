"""In JAX a softmax that each device takes of its own columns makes NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xentlib import PaddedVocab
from xentlib.jax import (
    TeacherLogits,
    chunked_divergence,
    chunked_nll,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)

pytestmark = [pytest.mark.cpu, pytest.mark.jax]
N, H, V, R = 21, 6, 50, 4
CALLS = ("divergence of logits", "divergence of a head", "logprobs", "of probabilities", "nll")


def value(name: str, hidden: Any, weight: Any, z: Any, q: Any, p: Any, where: Any) -> Any:
    how: dict[str, Any] = {"vocab_parallel": PaddedVocab("v", V), "where": where}
    if name == "divergence of logits":
        return vocab_parallel_divergence(z, TeacherLogits(q), **how).loss.sum()
    if name == "divergence of a head":
        return chunked_divergence(hidden, weight, TeacherLogits(q), **how).loss
    if name == "logprobs":
        labels = jax.numpy.arange(N, dtype=jax.numpy.int32)
        return vocab_parallel_logprobs(z, labels, **how).logprobs.sum()
    if name == "of probabilities":
        return vocab_parallel_logprobs(z, p, **how).logprobs.sum()
    return chunked_nll(hidden, weight, p, **how).loss


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_softmax_of_a_shard_is_nan(name: str, checked: bool) -> None:
    """A10: of a teacher, of labels that are probabilities, of given logits. One of all classes is
    right, whatever is in columns that are padding and in tokens that do not count."""
    rng = np.random.default_rng(0)
    mesh, rows = Mesh(np.array(jax.devices()[:R]), ("v",)), -(-V // R)
    where = (np.arange(N) % 8 == 1) & (np.arange(N) > 8)
    arrays = [rng.standard_normal(x).astype("f4") for x in ((N, H), (V, H), (N, V))]
    hidden, weight, other = map(jax.numpy.asarray, arrays)
    z, soft = hidden @ weight.T, jax.nn.log_softmax

    def of_shards(x: Any) -> Any:
        """Each of its own columns, of which the last has fewer."""
        return jax.numpy.concatenate([soft(x[:, k : k + rows]) for k in range(0, V, rows)], 1)

    def run(z: Any, q: Any) -> float:
        def padded(x: Any, axis: int) -> Any:
            wide = [(0, 0)] * x.ndim
            wide[axis] = (0, rows * R - V)
            return jax.numpy.pad(x, wide, constant_values=3.0)

        z, q, p = (
            jax.numpy.where(where[:, None], padded(x, 1), 9.0) for x in (z, q, jax.numpy.exp(q))
        )
        columns = P(None, "v")
        step = jax.shard_map(
            lambda *arrays: value(name, *arrays),
            mesh=mesh,
            in_specs=(P(), P("v"), columns, columns, columns, P()),
            out_specs=P(),
            check_vma=checked,
        )
        return float(jax.jit(step)(hidden, padded(weight, 0), z, q, p, where))

    assert np.isfinite(run(z, soft(other)))
    assert np.isfinite(run(soft(z), soft(other)))
    if name != "logprobs":
        assert np.isnan(run(z, of_shards(other)))
    if name not in ("divergence of a head", "nll"):
        assert np.isnan(run(of_shards(z), soft(other)))
