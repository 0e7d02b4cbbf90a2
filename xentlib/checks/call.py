"""A call of a function of the head: its arrays and options, and the dtypes it runs in."""

from __future__ import annotations

import math
from typing import NamedTuple

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.array_spec import ArraySpec
from xentlib.checks.head import check_class_weights, check_weight
from xentlib.checks.plan import check_chunk_bytes
from xentlib.checks.route import check_route
from xentlib.checks.tokens import check_tokens
from xentlib.checks.validators import (
    check_choice,
    check_device,
    check_flag,
    check_floating,
    check_per_token,
    check_rule,
    quoted,
)
from xentlib.dtypes import resolve_dtypes
from xentlib.options import COMPUTE, OUTPUTS, REDUCTIONS, RULES


class NLLProblem(NamedTuple):
    """A validated call: its sizes and the dtypes it runs in."""

    leading: tuple[int, ...]
    num_tokens: int
    vocab_size: int
    hidden_size: int
    gemm_dtype: str  # operands of the three GEMMs
    compute_dtype: str  # logits, softmax, accumulators
    output_dtype: str  # loss and per-token outputs


class LogitsProblem(NamedTuple):
    """A validated call with logits that are given."""

    leading: tuple[int, ...]
    num_tokens: int
    columns: int
    compute_dtype: str
    output_dtype: str


def check_head(
    call: Arguments,
    *,
    autocast_dtype: str | None = None,
    sharded: bool = False,
    classes: int | None = None,
    labels_on_host: bool = False,
) -> NLLProblem:
    """Validate one call of `chunked_nll` or `chunked_logprobs`, its arrays given as `ArraySpec`,
    and say in which dtypes it runs.

    `autocast_dtype` is the GEMM dtype that an autocast region asks for, if one is active;
    `sharded` says that the head is one rank's rows, of which there may be none, of `classes` in
    all where that is known; `labels_on_host` that labels and mask may be on the CPU.
    """
    hidden, weight = call.hidden, call.weight
    leading = check_tokens(
        hidden, call.labels, call.where, call.ignore_index, on_host=labels_on_host
    )
    check_floating("weight", weight)
    vocab_size = check_weight(weight, hidden, call.weight_layout, sharded=sharded)
    check_device("weight", weight, hidden)
    if call.bias is not None:
        check_floating("bias", call.bias)
        if call.bias.shape != (vocab_size,):
            raise ValueError(
                f"`bias` must have shape ({vocab_size},), one entry per row of the head; "
                f"got {call.bias.shape}. Pass the bias of this head, or None."
            )
        check_device("bias", call.bias, hidden)
    if call.token_weights is not None:
        check_floating("token_weights", call.token_weights)
        check_per_token("token_weights", call.token_weights, leading)
        check_device("token_weights", call.token_weights, hidden)
    if call.class_weights is not None:
        check_floating("class_weights", call.class_weights)
        total = classes if sharded else vocab_size
        shape = call.class_weights.shape
        check_class_weights(shape[0] if len(shape) == 1 else -1, total)
        check_device("class_weights", call.class_weights, hidden)
    check_flag("reduce_hidden_grad", call.reduce_hidden_grad)
    check_route(call)
    if not call.reduce_hidden_grad and not sharded:
        raise ValueError(
            "`reduce_hidden_grad` must be True without `vocab_parallel`; got False, which leaves "
            "the sum over vocabulary shards to the model. Leave it out."
        )
    check_numbers(call, leading)
    check_choice("reduction", call.reduction, REDUCTIONS)
    check_outputs(call.outputs)
    check_flag("entropy", call.entropy)
    check_chunk_bytes(call.max_chunk_bytes)
    check_compute_dtype(call.compute_dtype, hidden, weight)
    gemm, compute, output = resolve_dtypes(
        hidden.dtype, weight.dtype, call.compute_dtype, autocast_dtype
    )
    return NLLProblem(
        leading, math.prod(leading), vocab_size, hidden.shape[-1], gemm, compute, output
    )


def check_logits(call: LogitsArguments, *, labels_on_host: bool = False) -> LogitsProblem:
    """Validate one call of `vocab_parallel_logprobs` and say in which dtypes it runs."""
    logits = call.logits
    leading = check_tokens(
        logits, call.labels, call.where, call.ignore_index, "logits", on_host=labels_on_host
    )
    check_numbers(call, leading)
    check_flag("entropy", call.entropy)
    check_chunk_bytes(call.max_chunk_bytes)
    columns = logits.shape[-1]
    if call.vocab_parallel is None and call.shard is not None:
        raise ValueError(
            f"`shard` must come with `vocab_parallel`; got {call.shard} without. Pass the group or "
            f"the axis that the vocabulary is spread over."
        )
    if columns < 1 and call.vocab_parallel is None:
        raise ValueError(
            f"`logits` must have at least one column; got shape {logits.shape}. Pass "
            f"`vocab_parallel` if another rank holds the vocabulary."
        )
    dtype = "float64" if logits.dtype == "float64" else "float32"
    return LogitsProblem(leading, math.prod(leading), columns, dtype, dtype)


def check_numbers(call: Arguments | LogitsArguments, leading: tuple[int, ...]) -> None:
    for name, rule in RULES.items():
        value = getattr(call, name, None)
        if value is None and call._field_defaults.get(name) is None:
            continue
        check_rule(name, value, rule, leading if name == "temperature" else ())


def check_compute_dtype(compute_dtype: object, hidden: ArraySpec, weight: ArraySpec) -> None:
    """Refuse logits in a dtype below the inputs'."""
    if compute_dtype is None:
        return
    check_choice("compute_dtype", compute_dtype, COMPUTE)
    if compute_dtype == "float32" and "float64" in (hidden.dtype, weight.dtype):
        raise ValueError(
            "`compute_dtype` must be None or 'float64' for float64 inputs; got 'float32'. "
            "Cast the inputs to float32 instead."
        )


def check_outputs(outputs: object) -> None:
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list, set, frozenset)):
        raise ValueError(
            f"`outputs` must be a tuple of names from {quoted(OUTPUTS)}; got {outputs!r}. "
            f"Pass for instance `outputs=('lse',)`."
        )
    for name in outputs:
        if name not in OUTPUTS:
            raise ValueError(
                f"`outputs` must hold names from {quoted(OUTPUTS)}; got {name!r}. Leave it out."
            )


def check_reduced(reduce_hidden_grad: object) -> None:
    """Refuse what JAX's types would not let a gradient be."""
    if reduce_hidden_grad is False:
        raise ValueError(
            "`reduce_hidden_grad` must be True in JAX, where the type of `hidden` says whether its "
            "gradient is summed over the axis; got False. Leave it out, or pass hidden states that "
            "vary over the axis (`jax.lax.pcast`)."
        )
