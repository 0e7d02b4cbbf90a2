"""Sums and means by sequence in PyTorch, as `xentlib.segments` defines them.

Shapes: N tokens, S segments; Z is S + 1, of which the last is of tokens that belong to none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from xentlib.checks.call import known_names
from xentlib.checks.segments import SEGMENT_TYPES, SEGMENTS, check_segments
from xentlib.segments import WORD_BITS
from xentlib.torch.array_spec import array_spec, is_dtensor, only_tensors, refuse_array
from xentlib.torch.micro_batch import readable


@known_names
def segment_sum(
    values: Tensor, segment_ids: Tensor, num_segments: int, *, where: Tensor | None = None
) -> Tensor:
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
    values: Tensor, segment_ids: Tensor, num_segments: int, *, where: Tensor | None = None
) -> Tensor:
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


def summed(values: Any, segment_ids: Any, num_segments: Any, where: Any, *, mean: bool) -> Tensor:
    index_N, poison, count = select_segments(values, segment_ids, num_segments, where)
    sums_S: Tensor = SegmentSum.apply(values.flatten(), index_N, count, mean)  # type: ignore[no-untyped-call]
    return sums_S * poison


def select_segments(
    values: Any, segment_ids: Any, num_segments: Any, where: Any
) -> tuple[Tensor, Tensor, int]:
    """Step 1: the segment of each token, S where it belongs to none; what multiplies results, 1, or
    NaN where an id is too large and could not be read; S."""
    named = {"values": values, "segment_ids": segment_ids, "where": where}
    only_tensors(**named)
    for name, x in named.items():
        SEGMENT_TYPES.require("sharded", not is_dtensor(x), name=name)
    if segment_ids is None:
        refuse_array("segment_ids", segment_ids)
    args = (values, segment_ids, num_segments, where)
    count = check_segments(*map(array_spec, args))
    ids_N = segment_ids.flatten().long()  # PyTorch has few operators for uint16 and uint32
    counts_N = ids_N >= 0
    if where is not None:
        counts_N = counts_N & where.flatten()
    bad_N = counts_N & (ids_N >= count)
    if readable(segment_ids) and (where is None or readable(where)) and bool(bad_N.any()):
        SEGMENTS.refuse("ids", count=count, offender=int(ids_N[bad_N][0]))
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    poison = torch.where(bad_N.any(), torch.nan, torch.ones((), dtype=kind, device=ids_N.device))
    return torch.where(counts_N & ~bad_N, ids_N, count), poison, count


class SegmentSum(torch.autograd.Function):
    """[N] values, [N] segments, their number, and whether it is a mean, to [S] results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values_N: Tensor, index_N: Tensor, count: int, mean: bool) -> Tensor:
        return segment_forward(values_N, index_N, count, mean)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        values_N, index_N, _, ctx.mean = inputs
        ctx.save_for_backward(index_N)
        ctx.dtype = values_N.dtype

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        (index_N,) = ctx.saved_tensors
        d_values = segment_backward(d_out, index_N, ctx.mean)
        return d_values.to(ctx.dtype), None, None, None


def segment_forward(values_N: Tensor, index_N: Tensor, count: int, mean: bool) -> Tensor:
    """Steps 2 to 5."""
    wide_N = values_N.double()
    finite_N = wide_N.isfinite()
    none_Z = wide_N.new_zeros(count + 1)
    special_S = none_Z.index_add(0, index_N, torch.where(finite_N, 0.0, wide_N))[:count]
    wide_N = torch.where(finite_N, wide_N, 0.0)
    largest_Z = none_Z.scatter_reduce(0, index_N, wide_N.abs(), "amax")
    mantissa_Z = largest_Z.frexp().mantissa
    unit_Z = torch.where(largest_Z > 0, largest_Z / (2.0 * mantissa_Z), 1.0)
    left_N, words, below = 0.5 * (wide_N / unit_Z[index_N]), [], 0
    double = values_N.dtype == torch.float64
    for bits in WORD_BITS[8 if double else 4]:
        left_N = left_N * 2.0**bits
        word_N = left_N.trunc()
        left_N = left_N - word_N
        below += bits
        words.append(none_Z.index_add(0, index_N, word_N)[:count] * 2.0**-below)
    total_S = 2.0 * sum(reversed(words))
    if mean:
        total_S = total_S / tokens_of(index_N, count)
    total_S = total_S * unit_Z[:count] + special_S
    return total_S if double else total_S.float()


def segment_backward(d_out_S: Tensor, index_N: Tensor, mean: bool) -> Tensor:
    """What each token gets; 0 where it belongs to no segment."""
    if mean:
        d_out_S = d_out_S / tokens_of(index_N, d_out_S.shape[0])
    return pad(d_out_S, (0, 1))[index_N]


def tokens_of(index_N: Tensor, count: int) -> Tensor:
    """How many tokens each segment has, 1 in place of none."""
    tokens_Z = index_N.new_zeros(count + 1).index_add(0, index_N, torch.ones_like(index_N))
    return tokens_Z[:count].clamp(min=1)
