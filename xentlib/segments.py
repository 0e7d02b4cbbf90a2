"""Sums and means of per-token values by sequence: the definition that both backends carry out.

 1. a token counts if its id is not negative and `where` holds; the others are taken out
 2. of each segment the largest |value|, and the power of two at or below it, its unit
 3. each value in units, cut off at 2^-55 of one (float64: 2^-83), as words: integers of a few
    bits
 4. words are added by segment, as integers: exact in any order
 5. the number that a segment's words are of, for a mean divided by how many tokens count, rounded
    once; what is not finite is added as it is

The backward gives each token that counts the gradient of its segment's result, for a mean divided
by that number, and 0 to the others.
"""

from __future__ import annotations

from typing import Any

from xentlib.arguments import Array

__all__ = ["segment_mean", "segment_sum"]

# Bits of each word of step 3, by the element size of the result, and of the shorter words that JAX
# has without 64-bit types: 56 bits in all for float32, 84 for float64. Sums of words are integers
# in float64 (53 bits), int64 and int32: those of fewer than 2^24 values overflow in none, nor does
# a remainder below their number that is carried to the next word.
WORD_BITS = {4: (28, 28), 8: (28, 28, 28)}
SHORT_WORD_BITS = {4: (7,) * 8, 8: WORD_BITS[8]}
MOST_TOKENS = 2**24 - 1


def segment_sum(
    values: Array,
    segment_ids: Array,
    num_segments: int,
    *,
    where: Any = None,
) -> Any:
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
    raise NotImplementedError("call xentlib.torch.segment_sum or xentlib.jax.segment_sum")


def segment_mean(
    values: Array,
    segment_ids: Array,
    num_segments: int,
    *,
    where: Any = None,
) -> Any:
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
    raise NotImplementedError("call xentlib.torch.segment_mean or xentlib.jax.segment_mean")
