"""Gradient accumulators and their products: steps 7 and 8 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.call import DIFFERENTIATED, Options, own_piece
from xentlib.jax.core.device import as_bits, device_info
from xentlib.jax.core.gemm import contract, round_to
from xentlib.jax.core.layout import to_rows, turned_around
from xentlib.jax.core.logits import Chunk, ChunkedLogits
from xentlib.jax.core.lora import backprop_lora, from_hidden, to_a, to_b
from xentlib.jax.core.vocab import as_primal
from xentlib.jax.derivatives import Needs
from xentlib.math.softmax import Coefficients

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11
# Rows of a chunk whose labels are compared with each other. All pairs of 8,192 rows cost 8.5 % of a
# chunk's FLOP at V = 32,000, in groups 1.1 %; at V = 128,256 it is 0.3 %.
LABEL_GROUP = 1024


class Gradients(NamedTuple):
    """Accumulators in the compute dtype, empty where not wanted.

    Never None: JAX keeps the residual tree of the last trace of a function beside a cached earlier
    one, and fails where their numbers of leaves differ.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: jax.Array
    low_in: jax.Array
    low_out: jax.Array
    # [M] dz of the target, for packed rows: in a block of classes its terms come after the products
    target: Any = ()

    @classmethod
    def zeros(cls, logits: ChunkedLogits, needs: Needs) -> Gradients:
        """Before the first chunk."""
        compute = logits.options.compute_dtype
        num_tokens, hidden_size = logits.arrays.hidden.shape
        columns = 0 if logits.operand is None else logits.operand.shape[logits.axes[0]]
        weight = (hidden_size, columns) if transposed(logits.options) else (columns, hidden_size)
        columns += -columns % device_info().column_multiple
        a, b = ((), ()) if logits.low is None else (logits.low.a_RH.shape, logits.low.b_VR.shape)
        return cls(
            jnp.zeros((num_tokens if needs.hidden else 0, hidden_size), compute),
            jnp.zeros(weight if needs.weight else (0, 0), compute),
            jnp.zeros((columns if needs.bias else 0,), compute),
            jnp.zeros(a if needs.low_in else (0, 0), compute),
            jnp.zeros(b if needs.low_out else (0, 0), compute),
        )

    def finished(self, logits: ChunkedLogits, exponent: jax.Array | None) -> Gradients:
        """Without the power of two that dz carried, and the zeros that filled the head up."""
        gradients = self
        if exponent is not None:
            unscale = jnp.ldexp(jnp.ones((), logits.options.compute_dtype), -exponent)
            gradients = jax.tree.map(lambda x: x * unscale, self)
        columns, weight = logits.columns, gradients.weight
        if logits.operand is None or columns % device_info().column_multiple == 0:
            return gradients
        axis = int(transposed(logits.options))
        return gradients._replace(
            weight=lax.slice_in_dim(weight, 0, columns, axis=axis) if weight.size else weight,
            bias=gradients.bias[:columns],
            low_out=gradients.low_out[:columns],
        )

    def rounded(
        self, options: Options, primals: Sequence[jax.Array | None]
    ) -> dict[str, jax.Array | None]:
        """Each by name, summed over the devices that share its primal, and rounded once to its
        dtype; None stands for a zero gradient. Of the primals, in that order, only the types are
        used."""
        gradients, weight, place = self, self.weight, options.place
        turned = options.transposed and not transposed(options)
        if place is not None:
            cut = place.weight_cut[::-1] if turned else place.weight_cut
            gradients = gradients._replace(
                weight=own_piece(weight, cut) if weight.size else weight,
                bias=own_piece(gradients.bias, place.bias_cut),
            )
        rounded = {
            name: round_to(as_primal(accumulator, primal), primal.dtype.name)
            if accumulator.size and primal is not None
            else None
            for name, accumulator, primal in zip(
                DIFFERENTIATED, gradients[:-1], primals, strict=True
            )
        }
        if turned and rounded["weight"] is not None:
            rounded["weight"] = turned_around(rounded["weight"])
        return rounded


def transposed(options: Options) -> bool:
    """Whether d weight is summed as [H, V]. Where classes lead it is [V, H] of either head, or XLA
    turns it before and after each addition of targets: 4 copies of Llama-3's, and 7.1 GiB, not
    5.2."""
    return options.transposed and not device_info().classes_lead


def power_of_two(options: Options, factor_N: jax.Array) -> jax.Array | None:
    """Exponent that brings float16 dz of these factors to where float16 has digits; one for all
    tokens that the same rows multiply."""
    # Without a token there is nothing to scale, and XLA refuses a `shard_map` outside of `jit` in
    # which a function of constants alone is called.
    if options.gemm_dtype != "float16" or not factor_N.size:
        return None
    largest = jnp.abs(factor_N).max(initial=0.0)
    if options.gathered:
        largest = lax.pmax(largest, options.gathered)
    exponent: jax.Array = FP16_EXPONENT - jnp.frexp(largest)[1]
    return exponent


def add_gradients(
    logits: ChunkedLogits,
    chunk: Chunk,
    needs: Needs,
    gradients: Gradients,
    lse_T: jax.Array,
    of: Coefficients,
    left: Any = None,
) -> Gradients:
    """Steps 6 to 8: dz of the rest and of the target, and both into the sums. `left` is what
    `stats` has left of the chunk's block, if it was called."""
    dz_TV, dz_y_T, part_V = logits.kernels.dz(
        chunk.block,
        lse_T,
        of,
        left=left,
        round_to=logits.options.gemm_dtype,
        column_sums=needs.bias,
    )
    return add_products(logits, chunk, needs, gradients, dz_TV, part_V, dz_y_T)


def add_products(
    logits: ChunkedLogits,
    chunk: Chunk,
    needs: Needs,
    gradients: Gradients,
    dz_TV: jax.Array,
    part_V: jax.Array | None,
    dz_y_T: jax.Array | None = None,
) -> Gradients:
    """Step 8, of a rounded dz and its sums over the rows; and of dz of the target, where that is
    not in its column."""
    options, compute = logits.options, logits.options.compute_dtype
    axis_v, _ = logits.axes
    x_TH, y_T = chunk.x_TH, chunk.block.y_T1[:, 0]
    low, activations, dz_TV = logits.low, chunk.low, to_rows(dz_TV)
    assert logits.operand is not None
    columns = logits.operand.shape[axis_v]  # without those of the last block that are none
    of_head_TV = dz_TV if columns == dz_TV.shape[1] else dz_TV[:, :columns]
    in_block, apart = logits.first is not None, dz_y_T is not None
    if in_block and dz_y_T is not None:
        there_T = lax.dynamic_slice_in_dim(gradients.target, chunk.start, logits.chunk_rows)
        target_M = lax.dynamic_update_slice_in_dim(
            gradients.target, there_T + dz_y_T, chunk.start, 0
        )
        gradients, apart = gradients._replace(target=target_M), False
    dz_y_T = jnp.zeros(y_T.shape, compute) if dz_y_T is None else dz_y_T
    if part_V is not None:
        # A chunk's sums first: one after the other, 6,250 terms of one label err by 30 u.
        part_V = add_targets(part_V, y_T, dz_y_T) if apart else part_V
        gradients = gradients._replace(bias=gradients.bias + part_V)
    dz_y_T1 = round_to(dz_y_T, options.gemm_dtype).astype(compute)[:, None]
    # 8. Gradient GEMMs of the rest, then the target's terms: they are most of both gradients, and
    # every small term that a GEMM adds after one is rounded at its size (tau of d hidden 4.8
    # against 1.5, of d weight on real text 9.6 against 1.5).
    if low is not None and activations is not None and (needs.hidden or needs.low_in):
        du_TR = backprop_lora(low, dz_TV, dz_y_T1, y_T)
    if needs.hidden:
        dx_TH = contract(of_head_TV, logits.operand, 1, axis_v, compute)
        if low is not None and activations is not None:
            dx_TH = dx_TH + from_hidden(low, du_TR, activations)
        if apart:
            w_y_TH = jnp.take(logits.operand, y_T, axis=axis_v, mode="clip")
            w_y_TH = (w_y_TH.T if options.transposed else w_y_TH).astype(compute)
            dx_TH = dx_TH + dz_y_T1 * w_y_TH
        if options.gathered:
            # Float32 parts, rounded once after the last sum: of bf16 parts 60 % of the entries
            # would be right over four devices, where row A7 wants 99.5 %.
            dx_TH = lax.psum_scatter(dx_TH, options.gathered, tiled=True)
        at = gradients.hidden.at[chunk.own_T]
        hidden = at.add(dx_TH, mode="drop") if in_block else at.set(dx_TH, mode="drop")
        gradients = gradients._replace(hidden=hidden)
    if needs.weight:
        left, right = (of_head_TV, x_TH)[:: -1 if transposed(options) else 1]
        total = gradients.weight + contract(left, right, 0, 0, compute)
        if apart:
            total = add_targets(total, y_T, dz_y_T1[:, 0], x_TH, int(transposed(logits.options)))
        gradients = gradients._replace(weight=total)
    if low is not None and activations is not None:
        if needs.low_in:
            gradients = gradients._replace(low_in=gradients.low_in + to_a(du_TR, activations))
        if needs.low_out:
            total = gradients.low_out + to_b(low, dz_TV, activations)
            if apart:
                total = add_targets(total, y_T, dz_y_T1[:, 0], activations.u_TR)
            gradients = gradients._replace(low_out=total)
    return gradients


def put_dz(logits: ChunkedLogits, chunk: Chunk, d_logits: jax.Array, dz_TV: jax.Array) -> jax.Array:
    """A rounded dz among the rows of precomputed logits' gradient."""
    dz_TV = as_bits(to_rows(dz_TV)[:, : logits.columns])
    if logits.in_order:  # 0 in rows that do not count, as their logits and factors are
        return lax.dynamic_update_slice_in_dim(d_logits, dz_TV, chunk.start, 0)
    return d_logits.at[chunk.own_T].set(dz_TV, mode="drop")


def add_targets(
    total: jax.Array,
    y_T: jax.Array,
    dz_T: jax.Array,
    x_TH: jax.Array | None = None,
    axis_v: int = 0,
) -> jax.Array:
    """The target's terms added to d weight, or to d bias where there are no hidden states.

    Where a scatter adds in any order (row A11), each label occurs once in it: its first token's row
    has what the tokens of a group add up to, from a product with their dz. dz has been rounded to
    the dtype of the hidden states, so that product's terms are the same as the others'.
    """
    compute = total.dtype
    if device_info().adds_in_order:
        if x_TH is None:
            return total.at[y_T].add(dz_T)
        own_TH = dz_T[:, None] * x_TH.astype(compute)
        return total.at[:, y_T].add(own_TH.T) if axis_v else total.at[y_T].add(own_TH)
    for start in range(0, y_T.shape[0], LABEL_GROUP):
        group = slice(start, start + LABEL_GROUP)
        counts_TT, to_T = each_once(y_T[group], total.shape[axis_v])
        picked_TT = jnp.where(counts_TT, dz_T[None, group], 0.0)
        at = total.at[:, to_T] if axis_v else total.at[to_T]
        if x_TH is None:
            terms = picked_TT.sum(axis=1)
        elif axis_v:
            terms = contract(x_TH[group], picked_TT.astype(x_TH.dtype), 0, 1, compute.name)
        else:
            terms = contract(picked_TT.astype(x_TH.dtype), x_TH[group], 1, 0, compute.name)
        total = at.add(terms, mode="drop", unique_indices=True)
    return total


def each_once(y_T: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Which tokens [T, T] each row adds up: in the row of a label's first token all of its tokens,
    in the others none; and the column of each row, for those others one beyond the last, where
    nothing is added. No two are the same."""
    rows_T = jnp.arange(y_T.shape[0], dtype=y_T.dtype)
    same_TT = y_T[:, None] == y_T[None, :]
    first_T = jnp.where(same_TT, rows_T[None, :], rows_T.size).min(axis=1) == rows_T
    return same_TT & first_T[:, None], jnp.where(first_T, y_T, columns + 1 + rows_T)
