"""A block of logits for both steps of a kernel, in either framework, and what they make of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Rows, columns: a few more than what Triton adds up at once, and than its interpreter's block.
B, V = 18, 257


class Block(NamedTuple):
    """What is drawn; see `kernels.Shape` and `kernels.Rows`."""

    product: np.ndarray  # [B, V]
    labels: np.ndarray  # [B]
    valid: np.ndarray
    upstream: np.ndarray  # [3, B] of log-probability, entropy and lse
    bias: np.ndarray | None = None
    scale: float | None = None
    softcap: float | None = None
    temperature: np.ndarray | None = None
    smoothing: float = 0.0
    entropy: bool = True

    @property
    def as_given(self) -> bool:
        """Whether the product is the logits, and log-probabilities are not smoothed."""
        shaped = (self.bias, self.scale, self.softcap, self.temperature)
        return not self.smoothing and all(x is None for x in shaped)

    def options(self) -> dict[str, Any]:
        """As the oracle takes them."""
        found = {"bias": self.bias, "softcap": self.softcap}
        found["logit_scale"] = 1.0 if self.scale is None else self.scale
        found["temperature"] = 1.0 if self.temperature is None else self.temperature
        return found


class Made(NamedTuple):
    """What a kernel has made of a block."""

    z_y: np.ndarray
    lse: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray
    predicted: np.ndarray
    correct: np.ndarray
    dz: np.ndarray  # of the rest
    dz_y: np.ndarray
    sums: np.ndarray | None


def draw(seed: int, dtype: str = "float32", **options: Any) -> Block:
    rng = np.random.default_rng(seed)
    product = (4 * rng.standard_normal((B, V))).astype(dtype)
    # A block's extremes: certain tokens, a class that is masked, several largest.
    product[0, 7], product[1, :] = 60.0, product[1, 0]
    product[2, 1::2] = np.finfo(dtype).min
    labels = rng.integers(0, V, B)
    labels[:3] = 7, 5, 4
    drawn = {
        "bias": rng.standard_normal(V).astype(dtype),
        "temperature": (0.5 + rng.random(B)).astype(dtype),
    }
    named = {name: drawn.get(name, x) if x is True else x for name, x in options.items()}
    upstream = rng.standard_normal((3, B)).astype(dtype)
    return Block(product, labels, rng.random(B) > 0.2, upstream, **named)


def in_torch(
    implementation: Any, block: Block, *, again: bool = False, round_to: str | None = None
) -> Made:
    """`again`: `dz` of rows that `stats` has not seen."""
    import torch

    from xentlib.arguments import Scalars
    from xentlib.math.softmax import TargetInfo, WantedStats
    from xentlib.torch.core.kernels import DzOutput, LogitsBlock, LogitTransform
    from xentlib.torch.losses.logprobs import Residuals, coefficients

    def tensor(x: Any) -> Any:
        return None if x is None else torch.tensor(x)

    def rows() -> Any:
        z_BV, y_B1 = tensor(block.product), tensor(block.labels)[:, None]
        temperature, valid = tensor(block.temperature), tensor(block.valid)
        every = slice(0, B)
        return LogitsBlock(every, every, z_BV, y_B1, temperature, valid, None)

    dtype = tensor(block.product).dtype
    shape = LogitTransform(V, tensor(block.bias), tensor(block.scale), Scalars(block.softcap))
    kernels = implementation(B, V, dtype, torch.get_default_device(), shape)
    wanted = WantedStats(entropy=block.entropy, smoothing=block.smoothing > 0, predicted=True)
    seen = rows()
    z_y, blocks = kernels.stats(seen, wanted, dz_follows=True)
    algebra = kernels.algebra
    stats = algebra.token_stats(
        z_y, algebra.together(blocks), V, TargetInfo(tensor(block.labels), 1.0, float(V))
    )
    g_3B = tensor(block.upstream)
    g_3B = g_3B if block.scale is None else g_3B * tensor(block.scale).to(dtype)
    g_3B = g_3B if block.temperature is None else g_3B / tensor(block.temperature)
    kept = Residuals(stats.lse, stats.p_rest, stats.logprob, stats.entropy)
    of = coefficients(g_3B, kept, entropy=block.entropy, smoothing=block.smoothing, vocab_size=V)
    if again:
        seen = rows()
    given = None if round_to is None else getattr(torch, round_to)
    dz_y, sums = kernels.dz(seen, stats.lse, of, DzOutput(round_to=given, column_sums=True))
    found = (z_y, stats.lse, stats.logprob, stats.entropy, stats.predicted, stats.correct)
    found = (*found, seen.z_BV, dz_y, sums)
    return Made(*(None if x is None else x.cpu().numpy() for x in found))


def in_jax(
    implementation: Any, block: Block, *, again: bool = False, round_to: str | None = None
) -> Made:
    """The same, as one program."""
    import jax
    import jax.numpy as jnp

    from xentlib.arguments import Scalars
    from xentlib.jax.core.algebra import ALGEBRA
    from xentlib.jax.core.kernels import LogitsBlock, LogitTransform
    from xentlib.jax.losses.logprobs import Residuals, Upstream, coefficients, terms_of
    from xentlib.math.softmax import TargetInfo, WantedStats

    def array(x: Any) -> Any:
        return None if x is None else jnp.asarray(x)

    @jax.jit
    def both(product: Any, labels: Any, valid: Any, upstream: Any, temperature: Any) -> Any:
        dtype = product.dtype
        scale = None if block.scale is None else jnp.asarray(block.scale, dtype)
        kernels = implementation(LogitTransform(array(block.bias), scale, Scalars(block.softcap)))
        wanted = WantedStats(entropy=block.entropy, smoothing=block.smoothing > 0, predicted=True)
        rows = LogitsBlock(product, labels[:, None], temperature, valid, None)
        z_y, blocks, left = kernels.stats(rows, wanted)
        stats = ALGEBRA.token_stats(
            z_y, ALGEBRA.together(blocks), V, TargetInfo(labels, 1.0, float(V))
        )
        g_3B = upstream if scale is None else upstream * scale
        g_3B = g_3B if temperature is None else g_3B / temperature[None]
        kept = Residuals(stats.lse, stats.p_rest, stats.logprob, stats.entropy)
        given = Upstream(g_3B[0], g_3B[1] if block.entropy else None, g_3B[2])
        of = coefficients(terms_of(kept, given, block.smoothing, V))
        dz, dz_y, sums = kernels.dz(
            rows, stats.lse, of, left=None if again else left, round_to=round_to, column_sums=True
        )
        found = (z_y, stats.lse, stats.logprob, stats.entropy, stats.predicted, stats.correct)
        return (*found, dz, dz_y, sums)

    arguments = (block.product, block.labels.astype(np.int32), block.valid, block.upstream)
    made = both(*map(jnp.asarray, arguments), array(block.temperature))
    return Made(*map(np.asarray, made))


MAKE = {"torch": in_torch, "jax": in_jax}
