"""Sums and means by sequence in JAX, as `xentlib.segments` defines them.

Shapes: N tokens, S segments; the segment S is of tokens that belong to none, and is dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.checks.call import known_names
from xentlib.checks.segments import SEGMENTS, check_segments
from xentlib.jax.array_spec import array, array_spec, concrete_on_cpu, only_arrays, refuse_array
from xentlib.jax.core.tokens import check_kept
from xentlib.segments import SHORT_WORD_BITS


@known_names
def segment_sum(
    values: jax.Array, segment_ids: jax.Array, num_segments: int, *, where: jax.Array | None = None
) -> jax.Array:
    """Sum of per-token values over each sequence: of log-probabilities for DPO or KTO, say.

        out[s] = sum of values[t] over the tokens t with segment_ids[t] = s and where[t]

    Sequences may be packed in rows, or spread over several; their tokens may stand in any order.
    The gradient of a value is that of its segment's sum. Tokens that belong to no segment are taken
    out before any arithmetic: NaN and inf in them have no effect, and their gradient is exactly 0.

    Args:
        values: [...] one number for each token; float16, bfloat16, float32 or float64.
        segment_ids: [...] integers of any dtype but uint64, the sequence of each token, from 0 to
            num_segments - 1. One numbering of the whole call: tokens of different rows with one id
            are one sequence. A token with a negative id, such as padding, belongs to none. Ids that
            begin anew at 1 in each row, where 0 is padding, are made so by
            `where(ids > 0, ids - 1 + most * arange(rows)[:, None], -1)`, `most` a row's number of
            sequences at most, and `num_segments` then `rows * most`.
        num_segments: the number of sequences, a Python integer: the size of the result.
        where: [...] bool or None; False takes a token out: `labels != ignore_index`, or a mask of
            the completions.

    Returns:
        [num_segments], float32 (float64 for float64 values); 0 for a segment without tokens. Where
        a sequence is spread over ranks each has the sum of its own tokens, and these add up.

    Raises:
        ValueError: shapes or devices that do not belong together; an id of a token that counts that
            is `num_segments` or more, where ids can be read without a device sync (elsewhere the
            results of all segments are NaN, and so are the gradients of all tokens that count).
        TypeError: a dtype that cannot be used; `num_segments` that is no Python integer.

    Numerics: a segment's values are added exactly, down to 2^-55 of the largest of them, m, and
    their sum is rounded once: |out - sum| <= u |sum| + n 2^-55 m for n values, where u is 2^-24 to
    its first digits (of float64 values 2^-53, and 2^-83 m). A float32 value above 2^-32 m is whole.
    The bits depend on the segment's own values alone: not on packing, the order of rows or tokens,
    other segments, or the order in which a GPU adds. Both backends round the same number, and
    differ only where it is as good as halfway between two others. The gradient is rounded once, to
    the dtype of `values`. Rows A0 and A11 of the contract.

    Sources: reproducible sums of binned values as in Demmel and Nguyen (ARITH 2013).
    """
    return summed(values, segment_ids, num_segments, where, mean=False)


@known_names
def segment_mean(
    values: jax.Array, segment_ids: jax.Array, num_segments: int, *, where: jax.Array | None = None
) -> jax.Array:
    """Mean of per-token values over each sequence: GSPO's log-ratio, or a length-normalised reward.

        out[s] = segment_sum(values, ...)[s] / number of tokens t that it is of

    The gradient of a value is that of its segment's mean, divided by that number.

    Args:
        values: [...] one number for each token, as for `segment_sum`.
        segment_ids: [...] integers, the sequence of each token; negative: of none.
        num_segments: the number of sequences, a Python integer: the size of the result.
        where: [...] bool or None; False takes a token out, of the number too.

    Returns:
        [num_segments], float32 (float64 for float64 values); 0 for a segment without tokens. Where
        a sequence is spread over ranks divide the sum of the ranks' sums by that of their numbers,
        `segment_sum` of ones.

    Raises:
        ValueError: as `segment_sum`.
        TypeError: as `segment_sum`.

    Numerics: the exact sum of `segment_sum`, divided by the number and rounded once (float64 values
    twice, in PyTorch): |out - mean| <= u |mean| + 2^-55 m. The mean of equal values is that value.
    The gradient is rounded after the division, and to the dtype of `values`. Rows A0 and A11 of the
    contract.
    """
    return summed(values, segment_ids, num_segments, where, mean=True)


def summed(
    values: Any, segment_ids: Any, num_segments: Any, where: Any, *, mean: bool
) -> jax.Array:
    values_N, index_N, poison, count = select_segments(values, segment_ids, num_segments, where)
    return segment_results(count, mean, values_N, index_N) * poison


def select_segments(
    values: Any, segment_ids: Any, num_segments: Any, where: Any
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Step 1: values, float32 or float64; the segment of each token, S where it belongs to none;
    what multiplies results, 1, or NaN where an id is too large and could not be read; S."""
    only_arrays(values=values, segment_ids=segment_ids, where=where)
    if segment_ids is None:
        refuse_array("segment_ids", segment_ids)
    args = (values, segment_ids, num_segments, where)
    count = check_segments(*map(array_spec, args))
    check_kept(segment_ids, 0, {"segment_ids": segment_ids})
    if concrete_on_cpu(segment_ids, where):
        ids = np.asarray(segment_ids).astype(np.int64)
        large = ids[(ids >= count) & (True if where is None else np.asarray(where))]
        SEGMENTS.require("ids", not large.size, count=count, offender=large[:1].sum())
    ids_N = array(segment_ids).ravel()
    # In a dtype that has no place for S every id is below it.
    wide = ids_N.dtype if ids_N.dtype.itemsize >= 4 else np.dtype(np.int32)
    ids_N = ids_N.astype(wide)
    counts_N = ids_N >= 0
    if where is not None:
        counts_N = counts_N & array(where).ravel()
    bad_N = counts_N & (ids_N >= np.asarray(count, wide))
    values_N = array(values).ravel()
    if values_N.dtype.itemsize < 4:
        values_N = values_N.astype(np.float32)
    one = np.ones((), values_N.dtype)
    poison = jnp.where(bad_N.any(), one * np.nan, one)
    index_N = jnp.where(counts_N & ~bad_N, ids_N, np.asarray(count, wide)).astype(np.int32)
    return values_N, index_N, poison, count


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def segment_results(count: int, mean: bool, values_N: jax.Array, index_N: jax.Array) -> jax.Array:
    return segment_forward(values_N, index_N, count, mean)


def results_and_kept(
    count: int, mean: bool, values_N: jax.Array, index_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # The function again, not its steps: a second derivative is of it too, and theirs is 0.
    return segment_results(count, mean, values_N, index_N), index_N


def gradients(
    count: int, mean: bool, index_N: jax.Array, d_out_S: jax.Array
) -> tuple[jax.Array, None]:
    return segment_backward(d_out_S, index_N, mean), None


segment_results.defvjp(results_and_kept, gradients)


def segment_forward(values_N: jax.Array, index_N: jax.Array, count: int, mean: bool) -> jax.Array:
    """Steps 2 to 5. Powers of two are made of their bits: not every GPU divides by one exactly."""
    info: Any = jnp.finfo(values_N.dtype)  # type: ignore[no-untyped-call]
    integer = np.dtype(f"int{info.bits}")
    bias = np.asarray(info.maxexp - 1, integer)

    def power(exponent: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type((exponent + bias) << info.nmant, info.dtype)

    finite_N = jnp.isfinite(values_N)
    special_S = added(jnp.where(finite_N, 0.0, values_N), index_N, count)
    values_N = jnp.where(finite_N, values_N, 0.0)
    widths = SHORT_WORD_BITS[integer.itemsize]
    largest_S = jnp.zeros(count, info.dtype).at[index_N].max(jnp.abs(values_N), mode="drop")
    exponent_S = (lax.bitcast_convert_type(largest_S, integer) >> info.nmant) - bias
    exponent_S = jnp.maximum(exponent_S, widths[0] - 1 - bias)  # or the first power is beyond all
    to_first_N = power(widths[0] - 1 - of_tokens(exponent_S, index_N))
    left_N, words = values_N * to_first_N, []
    for k, bits in enumerate(widths):
        left_N = left_N * 2.0 ** (bits if k else 0)
        word_N = jnp.trunc(left_N)
        left_N = left_N - word_N
        words.append(word_N.astype(integer))
    words_SW = added(jnp.stack(words, -1), index_N, count)
    tokens_S = tokens_of(index_N, count).astype(integer) if mean else None
    total_S = value_of(list(words_SW.T), widths, info.dtype, tokens_S)
    return (2.0 * total_S) * power(exponent_S) + special_S


def value_of(
    words: list[jax.Array], widths: tuple[int, ...], dtype: Any, divisor: jax.Array | None
) -> jax.Array:
    """The number that sums of words are of, divided and rounded once: as a sum of floats whose
    errors are kept, of digits, the largest first. What is below a digit is less than 1 of it, so
    that what was once rounded does not cancel."""
    words = carried(words, widths)
    if divisor is not None:  # whose digits go on below those of the sum
        words, widths = [*words, *[jnp.zeros_like(divisor)] * 4], (*widths, *widths[:1] * 4)
        words = divided(words, widths, divisor)
    half = words[0].dtype.itemsize * 4  # a float holds half of the first word's bits
    top = words[0] >> half
    scales = [2.0 ** (half - widths[0]), *(2.0 ** -sum(widths[: k + 1]) for k in range(len(words)))]
    high = low = jnp.zeros_like(top, dtype)
    for digit, scale in zip([top, words[0] - (top << half), *words[1:]], scales, strict=True):
        term = digit.astype(dtype) * scale
        total = high + term
        low = low + (term - (total - high))
        high = total
    return high + low


def carried(words: list[jax.Array], widths: tuple[int, ...]) -> list[jax.Array]:
    """The same number with words of which all but the first are digits, from 0 to 2^bits - 1."""
    words = [*words]
    for k in range(len(words) - 1, 0, -1):
        over = words[k] >> widths[k]
        words[k] = words[k] - (over << widths[k])
        words[k - 1] = words[k - 1] + over
    return words


def divided(words: list[jax.Array], widths: tuple[int, ...], divisor: jax.Array) -> list[jax.Array]:
    """Digits of the quotient, by long division. XLA makes a product with a reciprocal of a division
    of floats where the divisor is a constant or has fewer dimensions, and so other bits."""
    quotient, over = [], jnp.zeros_like(divisor)
    for word, bits in zip(words, widths, strict=True):
        left = (over << bits) + word
        quotient.append(left // divisor)
        over = left - quotient[-1] * divisor
    return quotient


def segment_backward(d_out_S: jax.Array, index_N: jax.Array, mean: bool) -> jax.Array:
    """What each token gets; 0 where it belongs to no segment."""
    if mean:
        d_out_S = d_out_S / tokens_of(index_N, len(d_out_S)).astype(d_out_S.dtype)
    return of_tokens(d_out_S, index_N)


def tokens_of(index_N: jax.Array, count: int) -> jax.Array:
    """How many tokens each segment has, 1 in place of none."""
    return jnp.maximum(added(jnp.ones_like(index_N), index_N, count), 1)


def of_tokens(x_S: jax.Array, index_N: jax.Array) -> jax.Array:
    return x_S.at[index_N].get(mode="fill", fill_value=0)


def added(x: jax.Array, index_N: jax.Array, count: int) -> jax.Array:
    """Sums of rows by segment."""
    return jnp.zeros((count, *x.shape[1:]), x.dtype).at[index_N].add(x, mode="drop")
