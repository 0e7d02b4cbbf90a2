"""A call of a function of the head: its arrays and options, and the dtypes it runs in."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.validators import (
    ArraySpec,
    Refusals,
    check_choice,
    check_chunk_bytes,
    check_device,
    check_flag,
    check_floating,
    check_integers,
    check_per_token,
    check_rule,
    holds,
    quoted,
)
from xentlib.labels import SoftLabels
from xentlib.logprobs import chunked_logprobs
from xentlib.options import COMPUTE, LAYOUTS, OUTPUTS, REDUCTIONS, RULES

F = TypeVar("F", bound=Callable[..., Any])

GIVEN = "With precomputed logits write `-vocab_parallel_logprobs(logits, labels).logprobs`."
SHIFT = "Labels are taken as they are: pass shifted ones, such as `next_token_labels(tokens)`."
# By the name of an argument that people come with from other libraries: one of our arguments, or a
# sentence.
INSTEAD = {
    **dict.fromkeys(("target", "targets", "y"), "labels"),
    **dict.fromkeys(("input", "inputs", "x", "hidden_states", "e"), "hidden"),
    **dict.fromkeys(("lin_weight", "linear_weight", "lm_head", "head", "classifier"), "weight"),
    **dict.fromkeys(("mask", "loss_mask", "attention_mask", "label_mask"), "where"),
    **dict.fromkeys(("logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), "softcap"),
    **dict.fromkeys(("weights", "loss_weights"), "token_weights"),
    **dict.fromkeys(("ce_weight", "class_weight"), "class_weights"),
    **dict.fromkeys(("lse_square_scale", "z_loss_multiplier"), "z_loss"),
    **dict.fromkeys(("num_items_in_batch", "num_tokens", "total_tokens"), "denominator"),
    **dict.fromkeys(("shift_labels", "shift"), SHIFT),
    **dict.fromkeys(("logits", "student_logits"), GIVEN),
}

CALLS = Refusals(
    ValueError,
    bias="`bias` must have shape ({vocab_size},), one entry per row of the head; got {shape}. "
    "Pass the bias of this head, or None.",
    reduced="`reduce_hidden_grad` must be True without `vocab_parallel`; got False, which leaves "
    "the sum over vocabulary shards to the model. Leave it out.",
    shard_alone="`shard` must come with `vocab_parallel`; got {shard} without. Pass the group or "
    "the axis that the vocabulary is spread over.",
    columns="`logits` must have at least one column; got shape {shape}. Pass `vocab_parallel` if "
    "another rank holds the vocabulary.",
    # Logits in a dtype below the inputs'.
    compute_dtype="`compute_dtype` must be None or 'float64' for float64 inputs; got 'float32'. "
    "Cast the inputs to float32 instead.",
    # What JAX's types would not let a gradient be.
    reduced_in_jax="`reduce_hidden_grad` must be True in JAX, where the type of `hidden` says "
    "whether its gradient is summed over the axis; got False. Leave it out, or pass hidden states "
    "that vary over the axis (`jax.lax.pcast`).",
    outputs="`outputs` must be a tuple of names from {names}; got {outputs!r}. Pass for instance "
    "`outputs=('lse',)`.",
    output="`outputs` must hold names from {names}; got {output!r}. Leave it out.",
    reduction="`reduction` must be one of {names}; got {reduction!r}. {way}",
    weight="`weight` must have shape {expected} to match `hidden` {hidden}; got {shape}. {way}",
    class_weights="`class_weights` must have shape ({vocab_size},), one entry for each class of "
    "the whole vocabulary, on every rank; got {came}. Pass all of them.",
    rows="`weight` must have at least one vocabulary row; got shape {shape}. Gather a partitioned "
    "head before the call.",
    ignore_index="`ignore_index` must fit 64 bits; got {value}, which no label can be. Pass -100 "
    "by convention.",
    # A valid label that lies outside the vocabulary.
    labels="`labels` must lie in [0, {vocab_size}) or equal `ignore_index` ({ignore_index}); got "
    "{offender}. Mask that token with `where`, or set its label to `ignore_index`.",
    # Of `kept` or `ids`.
    ids="`kept` and `ids` must hold classes in [0, {vocab_size}), or -1 for none; got {offender}. "
    "Pass -1 where a position has fewer than the others.",
    top_k="`top_k` must be at most {vocab_size}, the number of classes; got {top_k}. Pass "
    "`min(k, vocab_size)`.",
    top_k_negative="`top_k` must be 0, for none, or a number of classes; got {top_k}. Leave it "
    "out, or pass one.",
    one_hot="`labels` must have shape {leading}, one class for each token of `{name}`; got "
    "{shape}. Pass class indices, of one-hot rows `labels.argmax(-1)`; `chunked_nll` takes class "
    "probabilities of a floating dtype.",
    # On every rank, for a label outside the vocabulary on some; they would wait for it.
    labels_elsewhere="`labels` must be classes or `ignore_index` on every rank that shares the "
    "head; got others on rank {ranks} of its group, which says which.",
    # The same of `kept` and `ids`.
    ids_elsewhere="`kept` and `ids` must hold classes, or -1 for none, on every rank that shares "
    "the head; got others on rank {ranks} of its group, which says which.",
    # Nothing, by which the losses of some tokens would be divided.
    denominator="`denominator` must be positive where a token is valid; got {value:g}. Pass the "
    "number of the window's valid tokens, counted with the mask that this call uses.",
    # On every rank, for a `denominator` of some that is refused there.
    denominator_elsewhere="`denominator` must be positive on every rank whose tokens count; got 0 "
    "or less on rank {ranks} of its group. Pass the number of the window's valid tokens, counted "
    "with the mask that this call uses.",
    # Integers of which JAX would drop the upper half without a word.
    narrowed="`{name}` must fit {dtype}, in which a JAX without 64-bit types keeps int64; got "
    "{value}. Wrap the call in `with jax.enable_x64(True):`.",
)


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


def refuse_name(function: str, name: str, known: Collection[str]) -> NoReturn:
    """Of a keyword that is none of a function's arguments."""
    way = INSTEAD.get(name, "")
    if way in known:
        way = f"Write `{way}=`."
    elif " " not in way:
        way = f"Its arguments are {', '.join(known)}."
    raise TypeError(f"`{name}` is not an argument of `{function}`. {way}")


def resolve_dtypes(
    hidden: str, weight: str, compute: str | None = None, autocast: str | None = None
) -> tuple[str, str, str]:
    """GEMM, compute and output dtypes of a call.

    The GEMMs take the operands' common dtype (float32 where they differ), or autocast's. Logits are
    never below float32. The audit mode computes everything in float64 and keeps the output dtype.
    """
    double = "float64" in (hidden, weight)
    output = "float64" if double else "float32"
    if compute == "float64" or double:
        return "float64", "float64", output
    if autocast is not None:
        return autocast, "float32", output
    return (hidden if hidden == weight else "float32"), "float32", output


def known_names(function: F) -> F:
    """The function, which for a keyword that is none of its arguments says what to write."""
    known = tuple(signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                refuse_name(function.__name__, name, known)
        return function(*args, **named)

    return cast(F, call)


def is_soft(labels: Any, source: Any) -> bool:
    """Whether a call with these hidden states or logits has such labels."""
    if isinstance(labels, SoftLabels):
        return True
    floating = "float" in str(getattr(labels, "dtype", ""))
    return floating and getattr(labels, "ndim", None) == getattr(source, "ndim", 0)


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
    leading = check_tokens(call, "hidden", labels_on_host)
    check_floating("weight", weight)
    vocab_size = check_weight(weight, hidden, call.weight_layout, sharded)
    check_device("weight", weight, hidden)
    if call.bias is not None:
        check_floating("bias", call.bias)
        shape = call.bias.shape
        CALLS.require("bias", shape == (vocab_size,), vocab_size=vocab_size, shape=shape)
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
    if call.recompute is not False:
        check_flag("recompute", call.recompute)
    check_flag("reduce_hidden_grad", call.reduce_hidden_grad)
    CALLS.require("reduced", call.reduce_hidden_grad or sharded)
    check_numbers(call, leading)
    check_outputs(call.outputs)
    check_flag("entropy", call.entropy)
    check_top_k(call.top_k)
    check_chunk_bytes(call.max_chunk_bytes)
    if call.compute_dtype is not None:
        check_choice("compute_dtype", call.compute_dtype, COMPUTE)
        below = call.compute_dtype == "float32" and "float64" in (hidden.dtype, weight.dtype)
        CALLS.require("compute_dtype", not below)
    sizes = leading, math.prod(leading), vocab_size, hidden.shape[-1]
    dtypes = hidden.dtype, weight.dtype, call.compute_dtype, autocast_dtype
    return NLLProblem(*sizes, *resolve_dtypes(*dtypes))


def check_logits(call: LogitsArguments, *, labels_on_host: bool = False) -> LogitsProblem:
    """Validate one call of `vocab_parallel_logprobs` and say in which dtypes it runs."""
    logits = call.logits
    leading = check_tokens(call, "logits", labels_on_host)
    check_numbers(call, leading)
    check_flag("entropy", call.entropy)
    check_top_k(call.top_k)
    check_chunk_bytes(call.max_chunk_bytes)
    columns = logits.shape[-1]
    if call.vocab_parallel is None:
        CALLS.require("shard_alone", call.shard is None, shard=call.shard)
        CALLS.require("columns", columns >= 1, shape=logits.shape)
    dtype = "float64" if logits.dtype == "float64" else "float32"
    return LogitsProblem(leading, math.prod(leading), columns, dtype, dtype)


def check_numbers(call: Arguments | LogitsArguments, leading: tuple[int, ...]) -> None:
    for name, rule in RULES.items():
        value = getattr(call, name, None)
        if value is None and call._field_defaults.get(name) is None:
            continue
        check_rule(name, value, rule, leading if name == "temperature" else ())


def check_reduction(call: Arguments) -> None:
    """Of a call as the user wrote it: for a loss of each token the message has the line."""
    reduction: object = call.reduction
    if reduction in REDUCTIONS:
        return
    way = "To divide the sum by another number, such as the batch size, pass `denominator`."
    if reduction in ("none", None):
        plain = call._replace(reduction="mean", outputs=())
        changed = [
            name
            for name, default in plain._field_defaults.items()
            if (value := getattr(plain, name)) is not default
            and not (isinstance(value, (int, float, str)) and value == default)
        ]
        shared = signature(chunked_logprobs).parameters
        args = ["hidden", "weight", "labels", *(f"{x}={x}" for x in changed if x in shared)]
        left_out = [f"`{x}`" for x in changed if x not in shared]
        way = f"For a loss of each token write `-chunked_logprobs({', '.join(args)}).logprobs`"
        way += f", which leaves out {', '.join(left_out)}." if left_out else "."
    CALLS.refuse("reduction", names=quoted(REDUCTIONS), reduction=reduction, way=way)


def check_outputs(outputs: object) -> None:
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list, set, frozenset)):
        CALLS.refuse("outputs", names=quoted(OUTPUTS), outputs=outputs)
    for name in outputs:
        if name not in OUTPUTS:
            CALLS.refuse("output", names=quoted(OUTPUTS), output=name)


def check_weight(weight: ArraySpec, hidden: ArraySpec, layout: str, sharded: bool) -> int:
    """Validate the head against `hidden`; return V."""
    check_choice("weight_layout", layout, LAYOUTS)
    width = hidden.shape[-1]
    axis = 1 if layout == "VH" else 0
    expected = f"(vocab, {width})" if layout == "VH" else f"({width}, vocab)"
    if len(weight.shape) != 2 or weight.shape[axis] != width:
        other = "HV" if layout == "VH" else "VH"
        turned = len(weight.shape) == 2 and weight.shape[1 - axis] == width
        way = "Pass the head that belongs to these hidden states."
        if turned:
            way = f"Pass `weight_layout='{other}'` or `weight.T`; transpose a module's."
        if turned and weight.shape[axis] < width:
            way = f"Are `hidden` logits? Pass the states before the head. Otherwise: {way}"
        shapes = {"expected": expected, "hidden": hidden.shape, "shape": weight.shape}
        CALLS.refuse("weight", way=way, **shapes)
    vocab_size = weight.shape[1 - axis]
    CALLS.require("rows", vocab_size >= 1 or sharded, shape=weight.shape)
    return vocab_size


def check_class_weights(length: int, vocab_size: int | None) -> None:
    """Refuse class weights, of one dimension or -1, that are not those of the whole vocabulary."""
    if length < 0 or vocab_size not in (None, length):
        came = "another number of dimensions" if length < 0 else f"({length},)"
        CALLS.refuse("class_weights", vocab_size=vocab_size or "vocab", came=came)


def check_tokens(call: Arguments | LogitsArguments, name: str, on_host: bool) -> tuple[int, ...]:
    """Validate which tokens there are and which count; return the leading dimensions.

    `name`: of the argument that has the tokens. `on_host`: labels and mask may be on the CPU,
    together, wherever that is.
    """
    labels: Any = call.labels
    source, where = getattr(call, name), call.where
    states = name == "hidden"
    if len(source.shape) < 1 or (states and source.shape[-1] < 1):
        shape = "(..., hidden_size) with hidden_size >= 1" if states else "(..., columns)"
        what = "the states that go into the head" if states else "one row of logits for each token"
        raise ValueError(f"`{name}` must have shape {shape}; got {source.shape}. Pass {what}.")
    check_floating(name, source)
    leading: tuple[int, ...] = source.shape[:-1]
    check_integers("labels", labels, "Pass class indices, not one-hot rows or masks.")
    one_hot = labels.shape[:-1] == leading and labels.shape[-1:] > (1,)
    CALLS.require("one_hot", not one_hot, leading=leading, name=name, shape=labels.shape)
    check_per_token("labels", labels, leading, name)
    apart = on_host and labels.device == "cpu" != source.device
    if not apart:
        check_device("labels", labels, source, name)
    if where is not None:
        if where.dtype != "bool":
            raise TypeError(
                f"`where` must be boolean; got {where.dtype}. Compare it with 0, or pass weights "
                f"as `token_weights`."
            )
        check_per_token("where", where, leading, name)
        reference_spec, beside_name = (labels, "labels") if apart else (source, name)
        check_device("where", where, reference_spec, beside_name)
    check_ignore_index(call.ignore_index)
    return leading


def check_top_k(top_k: object, vocab_size: int | None = None) -> None:
    """Validate how many of the most probable classes are wanted, of a vocabulary if it is known:
    over shards it is once all ranks have told each other theirs."""
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        shown = f"shape {top_k.shape}" if isinstance(top_k, ArraySpec) else repr(top_k)
        raise TypeError(
            f"`top_k` must be an integer, how many of the most probable classes are wanted; got "
            f"{shown}. Pass an int, 0 for none, which a traced function takes as a static argument."
        )
    CALLS.require("top_k_negative", top_k >= 0, top_k=top_k)
    if vocab_size is not None:
        CALLS.require("top_k", top_k <= vocab_size, top_k=top_k, vocab_size=vocab_size)


def check_ignore_index(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`ignore_index` must be an integer; got {value!r}. Pass the label that marks tokens "
            f"without a loss, -100 by convention."
        )
    CALLS.require("ignore_index", holds("int64", value), value=value)


def refuse_derivative(name: str, constant: str, function: str = "chunked_nll") -> NoReturn:
    """Of a result that a loss depends on; `constant` is the backend's `name` cut off from its
    history."""
    instead = {"z_loss": "`chunked_logprobs` and squares of its `lse`"}
    instead |= {"divergence": "`reduction='none'` and its `loss`", "nll": "its `loss`"}
    instead |= {"teacher_entropy": "the teacher's `chunked_logprobs`"}
    use = instead.get(name, f"`chunked_logprobs` and its `{name}`")
    raise RuntimeError(
        f"`{name}` of `{function}` must not be differentiated; got a loss that depends on it, "
        f"whose gradient would be 0. Use {use}, or pass `{constant}`."
    )
