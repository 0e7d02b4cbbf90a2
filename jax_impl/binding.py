"""The one door from a public call to a trace: place, describe, check, make arrays."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import jax.numpy as jnp
from jax import lax

from xentlib.arguments import Arguments, LogitsArguments, Scalars
from xentlib.checks.call import CALLS, check_head, check_logits, check_reduction
from xentlib.checks.head import check_low_rank, check_low_rank_here
from xentlib.checks.shards import SHARDS, check_route, check_route_here
from xentlib.checks.validators import plain_args
from xentlib.jax.array_spec import (
    ARRAYS,
    array,
    array_spec,
    array_specs,
    as_array,
    is_array,
    need_x64,
    only_arrays,
)
from xentlib.jax.core.call import Arrays, Options, Placement
from xentlib.jax.core.device import chunk_bytes, target_of
from xentlib.jax.core.tokens import check_labels, check_values
from xentlib.jax.core.vocab import axis_for, axis_of, varies_over
from xentlib.jax.head import described, head_of, unwrapped_args
from xentlib.jax.placement import alone, axes_of, placed
from xentlib.options import ITEMSIZE
from xentlib.plan import XLA_BLOCK_CLASSES

# Arrays of a call that a trace takes as they are.
AS_GIVEN = ("hidden", "weight", "labels", "bias", "where", "token_weights", "class_weights")


def bind(
    args: Arguments,
    place: Placement | None = None,
    *,
    recompute: bool = False,
    caller: Any = None,
) -> tuple[Options, Arrays]:
    """A call of a head's function; of `NLLHead`, which knows where its arrays are. `recompute`: its
    backward reads the head's values again. `caller`: the arguments of a function whose numbers
    are more than those of `args`; they are read after the checks, whose messages say what is wrong
    with one."""
    check_reduction(args)
    args = unwrapped_args(plain_args(args))
    only_arrays(**args._asdict())
    args, low = head_of(args)
    hidden, weight = args.hidden, args.weight
    if low is not None:
        check_low_rank_here(args)
    CALLS.require("reduced_in_jax", args.reduce_hidden_grad is not False)
    if place is None:
        place = placed(args, low, recompute=recompute)
    axis = place.axis if place else axis_of(args, None if low is None else low.b)
    problem = check_head(
        array_specs(args),
        sharded=axis is not None and place is None,
        classes=None if axis is None else axis.vocab_size,
    )
    if low is not None:
        check_low_rank(described(low), array_spec(hidden), problem)
    vocab_size = problem.vocab_size if axis is None else axis.vocab_size
    gathered = place.gathered if place else axes_of(args.tokens_parallel)
    if (args.gather, args.tokens_parallel, args.tokens_per_rank) != ("head", None, None):
        check_route(args)
        check_route_here(
            args, placed=place is not None, alone=args.gather != "auto" or alone(hidden, weight)
        )
    if args.tokens_parallel is not None:
        varies = varies_over(hidden, args.tokens_parallel)
        SHARDS.require("own_tokens", varies, axis=args.tokens_parallel)
        mean = args.reduction == "mean" and args.denominator is None
        ranks = math.prod(map(lax.axis_size, gathered))
        SHARDS.require("local_mean", not mean or ranks == 1, ranks=ranks)
    check_values(args, vocab_size)
    compute = problem.compute_dtype
    need_x64(compute)
    # Over shards a second chunk may cost an exchange or a GEMM.
    row_bytes = 0 if axis is not None else problem.vocab_size * ITEMSIZE[compute]
    # A teacher's logits take half of the budget. Of a loss of each token, which sums no d weight
    # over chunks, it is that of a wide head all the same.
    target, width = target_of(hidden, weight), hidden.shape[-1]
    if caller is not None and not recompute:
        width = 0
    options = Options(
        ignore_index=args.ignore_index,
        scalars=scalars_of(args, caller),
        mean=args.reduction == "mean",
        entropy=args.entropy or "entropy" in args.outputs,
        predicted="predicted" in args.outputs,
        recompute=args.recompute,
        gemm_dtype=problem.gemm_dtype,
        compute_dtype=compute,
        output_dtype=problem.output_dtype,
        chunk_bytes=chunk_bytes(args.max_chunk_bytes, target, row_bytes, width),
        platform=target.platform,
        transposed=args.weight_layout == "HV",
        axis=axis,
        place=place,
        gathered=gathered,
    )
    if vocab_size > XLA_BLOCK_CLASSES and low is None and not gathered:
        # The compiler splits whole products over an Auto mesh, and a block has rows of one device
        # where each has some of them.
        rows = place is not None and (place.weight_cut[options.transposed] or place.bias_cut[0])
        if not rows and (place is not None or alone(hidden, weight)):
            options = options._replace(block_classes=XLA_BLOCK_CLASSES)
    adapters: dict[str, Any] = {}
    if low is not None:
        adapters = {"low_in": array(low.a), "low_out": array(low.b), "keep": array(low.keep)}
        adapters["scale"] = as_array(low.scale, None, compute)
    plain_arrays: dict[str, Any] = {name: array(getattr(args, name)) for name in AS_GIVEN}
    arrays = Arrays(
        **plain_arrays,
        **adapters,
        logit_scale=as_array(args.logit_scale, 1.0, compute),
        temperature=as_array(args.temperature, 1.0, compute),
        denominator=as_array(args.denominator, None, compute),
        scalars={x: array(y) for x in Scalars._fields if is_array(y := getattr(args, x, None))},
    )
    return options, arrays


def bind_logits(args: LogitsArguments, caller: Any = None) -> tuple[Options, Arrays]:
    """The same of a function of given logits."""
    args = unwrapped_args(plain_args(args))
    only_arrays(**args._asdict())
    logits, labels, shard = args.logits, args.labels, args.shard
    problem = check_logits(array_specs(args))
    axis = None
    if args.vocab_parallel is not None:
        axis = axis_for(args.vocab_parallel, problem.columns, shard=shard, logits=logits)
    vocab_size = axis.vocab_size if axis else problem.columns
    check_labels(labels, args.where, args.ignore_index, vocab_size)
    need_x64(problem.compute_dtype)
    ends = None if shard is None else [jnp.int32(shard.start), jnp.int32(shard.stop)]
    target = target_of(logits)
    options = Options(
        ignore_index=args.ignore_index,
        scalars=scalars_of(args, caller),
        entropy=args.entropy,
        gemm_dtype=str(logits.dtype),
        compute_dtype=problem.compute_dtype,
        output_dtype=problem.output_dtype,
        chunk_bytes=chunk_bytes(args.max_chunk_bytes, target),
        platform=target.platform,
        axis=axis,
    )
    arrays = Arrays(
        hidden=array(logits),
        labels=array(labels),
        where=array(args.where),
        temperature=as_array(args.temperature, 1.0, problem.compute_dtype),
        shard=None if ends is None else jnp.stack(ends),
    )
    return options, arrays


def scalars_of(args: Any, caller: Any = None) -> Scalars:
    """The numbers of a call, which a trace may depend on, those that `args` has not its caller's;
    an array, and what neither has, at its default."""
    values = {x: getattr(args, x, getattr(caller, x, None)) for x in Scalars._fields}
    numbers = {x: y for x, y in values.items() if not isinstance(y, (NoneType, *ARRAYS))}
    return Scalars(**{name: float(number) for name, number in numbers.items()})
