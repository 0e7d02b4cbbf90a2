"""Every validation and its message, from shapes, dtype names and devices alone.

A backend describes its arrays as `Operand`s and calls one function here, so a user reads the same
words from both. Wrong dtypes raise `TypeError`, wrong shapes and values `ValueError`; each message
names the argument, what was expected, what came, and the way out where the expectation does not
tell it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

import numpy as np

from xentlib.accumulate import NONFINITE, CountOverflowError
from xentlib.call import Arguments, LogitsArguments

__all__ = [
    "LogitsProblem",
    "NLLProblem",
    "Operand",
    "check_agreement",
    "check_axis",
    "check_choice",
    "check_class_weights",
    "check_counted",
    "check_denominator_dtype",
    "check_denominator_of_window",
    "check_divisor",
    "check_group",
    "check_head",
    "check_head_options",
    "check_integer_count",
    "check_label_range",
    "check_linear",
    "check_logits",
    "check_logits_placement",
    "check_loss_sum",
    "check_narrowed",
    "check_next_token_labels",
    "check_nonfinite",
    "check_placement",
    "check_reduced",
    "check_replicated",
    "check_rounds",
    "check_same_ranks",
    "check_shard",
    "check_shards",
    "check_tiles",
    "check_token_count",
    "check_varying",
    "check_window_count",
    "check_windows",
    "holds",
    "plain",
    "refuse_dtensor",
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
# uint64 has ids that no signed index can hold.
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
OUTPUTS = ("logprobs", "entropy", "lse", "correct", "predicted")
REDUCTIONS = ("mean", "sum")
LAYOUTS = ("VH", "HV")
INT32 = 2**31 - 1


class Operand(NamedTuple):
    """What a check may know of an array: shape, dtype name, and device (None: not one device)."""

    shape: tuple[int, ...]
    dtype: str
    device: str | None = None


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


Scalar = float | int | Operand | None


def plain(value: Any) -> Any:
    """Python's number for one of NumPy's; anything else as it is."""
    alone = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if alone else value


def _names(items: Sequence[str]) -> str:
    return ", ".join(f"'{item}'" for item in items)


def _floating(name: str, operand: Operand) -> None:
    if operand.dtype not in FLOATS:
        raise TypeError(
            f"`{name}` must be floating point ({', '.join(FLOATS)}); got {operand.dtype}. "
            f"Cast it before the call."
        )


def _integers(name: str, operand: object, way_out: str) -> None:
    rule, came = "integers", getattr(operand, "dtype", None)
    if not isinstance(operand, Operand):
        rule, came = "an array of integers", type(operand).__name__
        way_out = "Make it an array of the backend first."
    elif came == "uint64":
        rule, way_out = "integers of any dtype but uint64", "Cast it to int64."
    if came not in INTEGERS:
        raise TypeError(f"`{name}` must be {rule}; got {came}. {way_out}")


def _ignore_index(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`ignore_index` must be an integer; got {value!r}. Pass the label that marks tokens "
            f"without a loss, -100 by convention."
        )
    if not holds("int64", value):
        raise ValueError(
            f"`ignore_index` must fit 64 bits; got {value}, which no label can be. Pass -100 by "
            f"convention."
        )


def holds(dtype: str, value: int) -> bool:
    """Whether an integer dtype has this value."""
    signed = dtype[0] != "u"
    top = 1 << int(dtype.lstrip("uint")) - signed
    return (-top if signed else 0) <= value < top


def _per_token(
    name: str, operand: Operand, leading: tuple[int, ...], source: str = "hidden"
) -> None:
    if operand.shape != leading:
        raise ValueError(
            f"`{name}` must have shape {leading}, one entry per token of `{source}`; "
            f"got {operand.shape}. Reshape it, or flatten `{source}` to match."
        )


def _device(name: str, operand: Operand, other: Operand, source: str = "hidden") -> None:
    if None not in (operand.device, other.device) and operand.device != other.device:
        raise ValueError(
            f"`{name}` must be on the device of `{source}` ({other.device}); got "
            f"{operand.device}. Move one of them before the call."
        )


def _choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {_names(choices)}; got {value!r}.")


def _number(name: str, value: object, rule: str, *, ok: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not ok:
        raise ValueError(f"`{name}` must be {rule}; got {value!r}.")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def check_plan_arguments(
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    dtype: str,
    compute_dtype: str | None,
    max_chunk_bytes: int | None,
) -> None:
    """Refuse sizes and budgets that no chunk can have."""
    for name, value, least in (
        ("num_tokens", num_tokens, 0),
        ("vocab_size", vocab_size, 1),
        ("hidden_size", hidden_size, 1),
    ):
        _number(name, value, f"an integer >= {least}", ok=isinstance(value, int) and value >= least)
    _choice("dtype", dtype, FLOATS)
    if compute_dtype is not None:
        _choice("compute_dtype", compute_dtype, ("float32", "float64"))
    check_budget(max_chunk_bytes)


def check_budget(max_chunk_bytes: object) -> None:
    if max_chunk_bytes is None:
        return
    if (
        isinstance(max_chunk_bytes, bool)
        or not isinstance(max_chunk_bytes, int)
        or max_chunk_bytes < 1
    ):
        raise ValueError(
            f"`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; "
            f"got {max_chunk_bytes!r}. Pass None for the default."
        )


def check_weight(weight: Operand, hidden: Operand, layout: str, *, sharded: bool = False) -> int:
    """Validate the head against `hidden`; return V."""
    _choice("weight_layout", layout, LAYOUTS)
    width = hidden.shape[-1]
    axis = 1 if layout == "VH" else 0
    expected = f"(vocab, {width})" if layout == "VH" else f"({width}, vocab)"
    if len(weight.shape) != 2 or weight.shape[axis] != width:
        other = "HV" if layout == "VH" else "VH"
        turned = len(weight.shape) == 2 and weight.shape[1 - axis] == width
        way_out = (
            f"Pass `weight_layout='{other}'` or `weight.T`."
            if turned
            else "Pass the head that belongs to these hidden states."
        )
        raise ValueError(
            f"`weight` must have shape {expected} to match `hidden` {hidden.shape}; "
            f"got {weight.shape}. {way_out}"
        )
    vocab_size = weight.shape[1 - axis]
    if vocab_size < 1 and not sharded:
        raise ValueError(
            f"`weight` must have at least one vocabulary row; got shape {weight.shape}. "
            f"Gather a partitioned head before the call."
        )
    return vocab_size


def _check_tokens(
    source: Operand,
    labels: Operand,
    where: Operand | None,
    ignore_index: object,
    name: str = "hidden",
) -> tuple[int, ...]:
    """Validate which tokens there are and which count; return the leading dimensions."""
    states = name == "hidden"
    if len(source.shape) < 1 or (states and source.shape[-1] < 1):
        shape = "(..., hidden_size) with hidden_size >= 1" if states else "(..., columns)"
        what = "the states that go into the head" if states else "one row of logits for each token"
        raise ValueError(f"`{name}` must have shape {shape}; got {source.shape}. Pass {what}.")
    _floating(name, source)
    leading = source.shape[:-1]
    _integers("labels", labels, "Pass class indices, not one-hot rows or masks.")
    _per_token("labels", labels, leading, name)
    _device("labels", labels, source, name)
    if where is not None:
        if where.dtype != "bool":
            raise TypeError(
                f"`where` must be boolean; got {where.dtype}. Compare it with 0, or pass weights "
                f"as `token_weights`."
            )
        _per_token("where", where, leading, name)
        _device("where", where, source, name)
    _ignore_index(ignore_index)
    return leading


def check_head(
    call: Arguments,
    *,
    autocast_dtype: str | None = None,
    sharded: bool = False,
    classes: int | None = None,
) -> NLLProblem:
    """Validate one call of `chunked_nll` or `chunked_logprobs`, its arrays given as `Operand`, and
    say in which dtypes it runs.

    `autocast_dtype` is the GEMM dtype that an autocast region asks for, if one is active;
    `sharded` says that the head is one rank's rows, of which there may be none, of `classes` in
    all where that is known.
    """
    hidden, weight = call.hidden, call.weight
    leading = _check_tokens(hidden, call.labels, call.where, call.ignore_index)
    _floating("weight", weight)
    vocab_size = check_weight(weight, hidden, call.weight_layout, sharded=sharded)
    _device("weight", weight, hidden)
    if call.bias is not None:
        _floating("bias", call.bias)
        if call.bias.shape != (vocab_size,):
            raise ValueError(
                f"`bias` must have shape ({vocab_size},), one entry per row of the head; "
                f"got {call.bias.shape}. Pass the bias of this head, or None."
            )
        _device("bias", call.bias, hidden)
    if call.token_weights is not None:
        _floating("token_weights", call.token_weights)
        _per_token("token_weights", call.token_weights, leading)
        _device("token_weights", call.token_weights, hidden)
    if call.class_weights is not None:
        _floating("class_weights", call.class_weights)
        total = classes if sharded else vocab_size
        shape = call.class_weights.shape
        check_class_weights(shape[0] if len(shape) == 1 else -1, total)
        _device("class_weights", call.class_weights, hidden)
    _flag("reduce_hidden_grad", call.reduce_hidden_grad)
    if not call.reduce_hidden_grad and not sharded:
        raise ValueError(
            "`reduce_hidden_grad` must be True without `vocab_parallel`; got False, which leaves "
            "the sum over vocabulary shards to the model. Leave it out."
        )
    _scalar("logit_scale", call.logit_scale, "a finite number or a 0-d array", (), positive=False)
    _scalar(
        "temperature",
        call.temperature,
        "a positive number or one entry per token",
        leading,
        positive=True,
    )
    if call.denominator is not None:
        _scalar("denominator", call.denominator, "a number >= 0 or a 0-d array", (), least=0)
    if call.softcap is not None:
        rule = "None, a positive number or a 0-d array"
        _scalar("softcap", call.softcap, rule, (), positive=True)
    _smoothing(call.label_smoothing)
    _scalar("z_loss", call.z_loss, "a number >= 0 or a 0-d array", (), least=0)
    _choice("reduction", call.reduction, REDUCTIONS)
    check_outputs(call.outputs)
    _flag("entropy", call.entropy)
    check_budget(call.max_chunk_bytes)
    gemm, compute, output = resolve_dtypes(hidden, weight, call.compute_dtype, autocast_dtype)
    return NLLProblem(
        leading, math.prod(leading), vocab_size, hidden.shape[-1], gemm, compute, output
    )


def check_reduced(reduce_hidden_grad: object) -> None:
    """Refuse what JAX's types would not let a gradient be."""
    if reduce_hidden_grad is False:
        raise ValueError(
            "`reduce_hidden_grad` must be True in JAX, where the type of `hidden` says whether its "
            "gradient is summed over the axis; got False. Leave it out, or pass hidden states that "
            "vary over the axis (`jax.lax.pcast`)."
        )


def check_class_weights(length: int, vocab_size: int | None) -> None:
    """Refuse class weights, of one dimension or -1, that are not those of the whole vocabulary."""
    if length < 0 or vocab_size not in (None, length):
        came = "another number of dimensions" if length < 0 else f"({length},)"
        raise ValueError(
            f"`class_weights` must have shape ({vocab_size or 'vocab'},), one entry for each class "
            f"of the whole vocabulary, on every rank; got {came}. Pass all of them."
        )


def check_logits(call: LogitsArguments) -> LogitsProblem:
    """Validate one call of `vocab_parallel_logprobs` and say in which dtypes it runs."""
    logits = call.logits
    leading = _check_tokens(logits, call.labels, call.where, call.ignore_index, "logits")
    _scalar(
        "temperature",
        call.temperature,
        "a positive number or one entry per token",
        leading,
        positive=True,
    )
    _smoothing(call.label_smoothing)
    _flag("entropy", call.entropy)
    check_budget(call.max_chunk_bytes)
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


def check_shards(sizes: Sequence[int], vocab_size: int) -> None:
    """Refuse shards that cannot be those of the vocabulary they claim to be."""
    _number(
        "vocab_size",
        vocab_size,
        "an integer >= 1, the classes of all shards",
        ok=isinstance(vocab_size, int) and vocab_size >= 1,
    )
    if sum(sizes) < vocab_size:
        raise ValueError(
            f"`vocab_parallel` must spread {vocab_size} classes over its ranks; got shards of "
            f"{tuple(sizes)}, {sum(sizes)} in all. Pass the number of classes that they hold."
        )
    if len(sizes) > 1 and all(size == vocab_size for size in sizes):
        raise ValueError(
            f"`vocab_parallel` must come with this rank's part of {vocab_size} classes; got all of "
            f"them on each of {len(sizes)} ranks. Pass each rank's own columns, or "
            f"`vocab_parallel=None`."
        )


def check_tiles(shards: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Refuse declared shards, (start, stop) of each rank, that do not give every class to one."""
    if len(shards) > 1 and all(shard == (0, vocab_size) for shard in shards):
        check_shards([vocab_size] * len(shards), vocab_size)
    end = 0
    for start, stop in sorted(shard for shard in shards if shard[0] < shard[1]):
        if start != end:
            break
        end = stop
    else:
        if end == vocab_size:
            return
    raise ValueError(
        f"`shard` must give each of {vocab_size} classes to one rank of `vocab_parallel`; got "
        f"classes {', '.join(f'{start} to {stop}' for start, stop in shards)}. Pass "
        f"`VocabShard(start, stop, {vocab_size})` of this rank's own columns."
    )


def check_agreement(names: Sequence[str]) -> None:
    """Refuse arguments that differ between the ranks that a vocabulary is spread over."""
    if not names:
        return
    name = names[0]
    what = {
        "gradient": "`hidden` must require grad on every rank of `vocab_parallel`, or on none",
        "shard": "`shard` must be passed on every rank of `vocab_parallel`, or on none",
    }.get(name, f"`{name}` must be the same on every rank of `vocab_parallel`")
    way = "Pass the same to all."
    if name in ("labels", "hidden", "temperature", "token_weights"):
        way = (
            "Gather the tokens before the call where each rank has a part of them (sequence "
            "parallelism)."
        )
    raise ValueError(f"{what}; got ranks that differ. {way}")


def check_shard(shard: Any, columns: int) -> None:
    """Refuse a `shard=` that does not describe `columns` columns of logits."""
    start, stop, vocab_size, padding = shard.start, shard.stop, shard.vocab_size, shard.padding
    numbers = [x for x in (start, stop, vocab_size, padding) if isinstance(x, Integral)]
    if len(numbers) < 4:  # made from an axis index: nothing to read
        return
    if not (0 <= start <= stop <= vocab_size and padding >= 0):
        raise ValueError(
            f"`shard` must have 0 <= start <= stop <= vocab_size and padding >= 0; got {shard}. "
            f"Pass the classes of this rank's columns."
        )
    if stop - start + padding != columns:
        raise ValueError(
            f"`shard` must describe the {columns} columns of `logits`; got {stop - start} classes "
            f"and {padding} of padding ({shard}). Pass this rank's columns alone, and declare "
            f"padded ones as `VocabShard(..., padding=...)`."
        )


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False; got {value!r}.")


def _scalar(
    name: str,
    value: Scalar,
    rule: str,
    leading: tuple[int, ...],
    *,
    positive: bool = False,
    least: float = -math.inf,
) -> None:
    if isinstance(value, Operand):
        if value.shape not in ((), leading):
            raise ValueError(
                f"`{name}` must be {rule}; got shape {value.shape}. Reduce or reshape it to "
                f"{leading or '()'}."
            )
        if value.dtype not in FLOATS + INTEGERS:
            raise TypeError(
                f"`{name}` must be {rule}; got dtype {value.dtype}. Cast it to float32."
            )
        return
    # No math.isfinite: the compiler traces numbers that it keeps symbolic through this.
    finite = isinstance(value, (int, float)) and least <= value < math.inf and value > -math.inf
    _number(name, value, rule, ok=finite and (_positive(value) or not positive))


def _smoothing(value: object) -> None:
    ok = isinstance(value, (int, float)) and 0 <= value <= 1
    _number("label_smoothing", value, "a number in [0, 1]", ok=ok)


def check_outputs(outputs: object) -> None:
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list, set, frozenset)):
        raise ValueError(
            f"`outputs` must be a tuple of names from {_names(OUTPUTS)}; got {outputs!r}. "
            f"Pass for instance `outputs=('lse',)`."
        )
    for name in outputs:
        if name not in OUTPUTS:
            raise ValueError(
                f"`outputs` must hold names from {_names(OUTPUTS)}; got {name!r}. Leave it out."
            )


def resolve_dtypes(
    hidden: Operand, weight: Operand, compute_dtype: object, autocast_dtype: str | None
) -> tuple[str, str, str]:
    """GEMM, compute and output dtypes of a call.

    The GEMMs take the operands' common dtype (float32 where they differ), or autocast's. Logits are
    never below float32. The audit mode computes everything in float64 and keeps the output dtype.
    """
    double = "float64" in (hidden.dtype, weight.dtype)
    output = "float64" if double else "float32"
    if compute_dtype is not None:
        _choice("compute_dtype", compute_dtype, ("float32", "float64"))
        if compute_dtype == "float32" and double:
            raise ValueError(
                "`compute_dtype` must be None or 'float64' for float64 inputs; got 'float32'. "
                "Cast the inputs to float32 instead."
            )
    if compute_dtype == "float64" or double:
        return "float64", "float64", output
    if autocast_dtype is not None:
        return autocast_dtype, "float32", output
    return (hidden.dtype if hidden.dtype == weight.dtype else "float32"), "float32", output


def check_group(found: object, name: str = "vocab_parallel") -> NoReturn:
    """Refuse what is neither a process group nor a mesh of one dimension."""
    dimensions = getattr(found, "ndim", None)
    if isinstance(dimensions, int):
        raise ValueError(
            f"`{name}` must be a one-dimensional DeviceMesh; got {dimensions} dimensions. Pass "
            f"`mesh['name']`, the dimension of these ranks."
        )
    raise TypeError(
        f"`{name}` must be a ProcessGroup or a one-dimensional DeviceMesh; got "
        f"{type(found).__name__}. Pass the group of these ranks, or None."
    )


def check_axis(name: object, argument: str = "vocab_parallel") -> NoReturn:
    """Refuse what is no mesh axis of the `shard_map` that the call is in."""
    raise ValueError(
        f"`{argument}` must be the name of a mesh axis inside `shard_map`; got {name!r}, which is "
        f"not bound here. Call inside `jax.shard_map` over that axis, or pass None."
    )


def check_varying(name: str, varies: bool, axis: object) -> None:
    """Refuse a head that is the same on all devices of the axis that it should be spread over."""
    if not varies:
        raise ValueError(
            f"`{name}` must be spread over mesh axis {axis!r}; got one that does not vary over it. "
            f"Name the axis in the vocabulary's dimension of its `in_specs`, or pass "
            f"`vocab_parallel=None`."
        )


def check_placement(name: str, cut: bool, axis: int, placements: object) -> None:
    """Refuse a DTensor head that is not sharded over its vocabulary."""
    if not cut:
        raise ValueError(
            f"`{name}` must be sharded over its vocabulary, dimension {axis}, on a "
            f"one-dimensional mesh; got {placements}. Pass "
            f"`{name}.redistribute(placements=[Shard({axis})])`."
        )


def check_logits_placement(cut: bool, placements: object) -> None:
    """Refuse DTensor logits that are neither whole nor in columns."""
    if not cut:
        raise ValueError(
            f"`logits` must be a DTensor sharded over its classes, the last dimension, on a "
            f"one-dimensional mesh, or a plain tensor; got placements {placements}. Pass "
            f"`logits.to_local()`: of whole rows, where each rank has tokens of its own or all "
            f"have the same, with this rank's labels and without `vocab_parallel`; of columns on a "
            f"mesh of several dimensions, with `vocab_parallel=mesh['name']`."
        )


def check_same_ranks(group: Sequence[int], mesh: Sequence[int]) -> None:
    """Refuse a DTensor on a mesh of other ranks than the group that is named."""
    if list(group) != list(mesh):
        raise ValueError(
            f"`vocab_parallel` must hold the ranks of the mesh that `logits` is on, {list(mesh)}; "
            f"got {list(group)}. Leave it out: the DTensor says over which ranks it is sharded."
        )


def check_replicated(name: str, whole: bool, placements: object) -> None:
    """Refuse tokens that this rank has only a part of."""
    if not whole:
        raise ValueError(
            f"`{name}` must be whole on every rank, a plain tensor or a DTensor with Replicate(); "
            f"got {placements}. Pass `{name}.redistribute(placements=[Replicate()])`, whose "
            f"backward takes this rank's slice."
        )


def refuse_dtensor(name: str, placements: object) -> NoReturn:
    """Refuse a sharded head of which no wrapper is known that reduces its gradient."""
    raise ValueError(
        f"`{name}` must be a plain tensor, a parameter that `fully_shard` keeps, or come with "
        f"`vocab_parallel`; got a DTensor with {placements}, whose gradient reduction is "
        f"unknown. Pass the parameter itself, or `{name}.full_tensor(grad_placements=...)`."
    )


def check_head_options(options: Collection[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that an `NLLHead` does not hand on."""
    for name in options:
        if name in known:
            continue
        if name in ("bias", "weight", "weight_layout"):
            way = "The module has them: leave it out."
        elif not known:
            way = "Without labels no option applies: pass `labels`, or leave it out."
        else:
            way = f"Pass any of {', '.join(known)}."
        raise TypeError(f"`{name}` is not an option of this call. {way}")


def check_kept_option(name: str, value: object) -> None:
    """Refuse what a Flax module cannot keep beside its parameters."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a number, a string or a tuple to be kept by the head; got "
            f"{type(value).__name__}. Pass it with each call."
        ) from None


def check_mesh_axes(named: Sequence[object], axes: Sequence[object], spread: int, of: int) -> None:
    """Refuse names that are not of the mesh, or a spec of more dimensions than tokens have."""
    unknown = [name for name in named if name not in axes]
    if unknown:
        raise ValueError(
            f"`tokens` and `vocab_parallel` must name axes of the mesh that the arrays are on, "
            f"{tuple(axes)}; got {unknown[0]!r}. Place the parameters on that mesh, or enter it "
            f"with `jax.set_mesh`."
        )
    if spread > of:
        raise ValueError(
            f"`tokens` must spread at most the {of} leading dimensions of `hidden`; got a spec of "
            f"{spread}. Leave the others out."
        )


def check_linear(kind: str, plain: bool, hooked: bool) -> None:
    """Refuse a head that is more than its weight and bias."""
    if hooked:
        raise TypeError(
            f"`linear` must have no hooks, which would be lost; got a {kind} with some. Convert "
            f"it to `NLLHead` first, then register hooks and apply wrappers such as `fully_shard`."
        )
    if not plain:
        raise TypeError(
            f"`linear` must be a plain linear layer; got a {kind}, whose weight alone is not what "
            f"it computes. Merge an adapter into its layer first, or call `chunked_nll` with the "
            f"weight that it stands for: base + scale * B @ A for LoRA."
        )


def check_denominator_dtype(denominator: Scalar) -> None:
    """Refuse a count that a wrapper has rounded on its way into a module."""
    if isinstance(denominator, Operand) and denominator.dtype in ("bfloat16", "float16"):
        raise TypeError(
            f"`denominator` must be a number, an integer or float32; got {denominator.dtype}, "
            f"in which counts are rounded. FSDP2 casts floating tensors that a module is given "
            f"(`cast_forward_inputs`): pass a Python number or an integer tensor."
        )


def check_windows(
    mode: str, labels: object, where: object, token_weights: object, uneven: object
) -> None:
    """Validate what a window of `TokenNormalizer` counts."""
    if mode == "precount" and labels is None:
        raise ValueError(
            "`labels` must be the labels of all micro-batches, after the shift; got None. Pass "
            "`norm.window(labels=[...])`, or use mode='postscale'."
        )
    if mode == "postscale":
        given = {"labels": labels, "where": where, "token_weights": token_weights}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` cannot be passed with mode='postscale', which counts tokens in "
                    f"`window.backward`. Pass `num_tokens` there, or use mode='precount'."
                )
        if uneven:
            raise ValueError(
                "`uneven` must be False with mode='postscale'; got True. Use "
                "mode='precount', whose collective says how many micro-batches each rank has."
            )
        return
    number = len(labels)  # type: ignore[arg-type]
    for name, value in (("where", where), ("token_weights", token_weights)):
        if value is not None and len(value) != number:  # type: ignore[arg-type]
            raise ValueError(
                f"`{name}` must have one entry for each of the {number} micro-batches; got "
                f"{len(value)}. Pass a list like `labels`."  # type: ignore[arg-type]
            )


def check_counted(labels: Operand, where: Operand | None, weights: Operand | None) -> None:
    """Validate what is counted of one micro-batch: nothing is broadcast."""
    if isinstance(labels, Operand) and labels.dtype not in INTEGERS:
        raise TypeError(
            f"`labels` must be integers; got {labels.dtype}. Pass the labels, not a mask of them."
        )
    for name, given in (("labels", labels), ("where", where), ("token_weights", weights)):
        if given is not None and not isinstance(given, Operand):
            raise TypeError(
                f"`{name}` must be a tensor for each micro-batch; got {type(given).__name__}. Pass "
                f"`[torch.as_tensor(x) for x in {name}]`."
            )
        if given is not None and given.shape != labels.shape:
            raise ValueError(
                f"`{name}` must have the shape of its labels, {labels.shape}; got {given.shape}. "
                f"Pass `{name}.expand_as(labels)`, if that is what you mean."
            )


def check_loss_sum(loss: object, divided: bool, instead: str) -> None:
    """Validate a loss that a window adds up; `instead` is the way out for one that is no sum."""
    if not isinstance(loss, Operand) or loss.shape != ():
        came = f"shape {loss.shape}" if isinstance(loss, Operand) else type(loss).__name__
        raise ValueError(
            f"`loss` must be one number, the sum over this rank's valid tokens; got {came}. Pass "
            f"`loss.sum()`, or an NLLOutput of reduction='sum'."
        )
    if loss.dtype not in ("float32", "float64"):
        raise TypeError(
            f"`loss` must be float32 or float64; got {loss.dtype}, in which a sum is rounded, and "
            f"its factor too. Add up the losses in float32."
        )
    if divided:
        raise ValueError(
            f"`loss` must be a sum over tokens; got one that `chunked_nll` has divided. {instead}"
        )


def check_denominator_of_window(same: bool) -> None:
    """Refuse a loss that was divided by something else than it is said to be."""
    if not same:
        raise ValueError(
            "`loss` must have been divided by `window.denominator` with normalized=True; got one "
            "that was not. Pass `denominator=window.denominator` to `chunked_nll`, or its sum "
            "without `normalized`."
        )


def check_token_count(
    name: str, count: object, value: object, weighted: bool, loss: object = None
) -> None:
    """Validate the tokens of one micro-batch, integers unless they may be `weighted`.

    `value` and `loss` are None where reading them costs something.
    """
    if count is None:
        raise ValueError(
            f"`{name}` must be given with a loss that is no `NLLOutput`; got None. Pass the "
            f"`NLLOutput` itself, which has its count and says whether it is a sum, or the "
            f"weight of the valid tokens."
        )
    if not isinstance(count, Operand) or count.shape != ():
        came = f"shape {count.shape}" if isinstance(count, Operand) else type(count).__name__
        raise ValueError(
            f"`{name}` must be one number, the weight of the valid tokens; got {came}. Add it up."
        )
    integer = count.dtype in (*INTEGERS, "uint64")
    if not integer and count.dtype not in ("float32", "float64"):
        raise TypeError(
            f"`{name}` must be a number, an integer or float32; got {count.dtype}. Add up the mask "
            f"as integers, or weights in float32."
        )
    if not isinstance(value, (int, float)):
        return
    if not -math.inf < value < math.inf:
        raise ValueError(
            f"`{name}` must be finite; got {value}. Look for NaN in what it is the sum of."
        )
    if weighted and not integer:
        return
    if value < 0:
        raise ValueError(
            f"`{name}` must be the number of valid tokens, 0 or more; got {value}. Count the "
            f"labels that the loss sees."
        )
    if value == 0 and isinstance(loss, float) and loss != 0 and math.isfinite(loss):
        raise ValueError(
            f"`{name}` must be the number of tokens that the loss is the sum of; got 0 and a loss "
            f"of {loss:g}. Count the labels that the loss sees."
        )


def check_integer_count(name: str, count: Operand) -> None:
    """Refuse a sum of weights where tokens are counted in int32."""
    if count.dtype not in (*INTEGERS, "uint64"):
        raise TypeError(
            f"`{name}` must be an integer; got {count.dtype}. Pass the number of valid tokens, or "
            f"token_normalized(..., weighted=True) for a sum of weights."
        )


def check_nonfinite(nonfinite: object, mode: str) -> None:
    """Validate what a window does with a micro-batch that is NaN or inf."""
    _choice("nonfinite", nonfinite, NONFINITE)
    if nonfinite == "drop" and mode != "precount":
        raise ValueError(
            f"`mode` must be 'precount' with nonfinite='drop', whose collective says that all "
            f"ranks have as many micro-batches to decide on; got {mode!r}. Use mode='precount'."
        )


def check_rounds(numbers: Sequence[int]) -> None:
    """Refuse ranks that would wait for each other."""
    if min(numbers) != max(numbers):
        raise ValueError(
            f"`uneven` must be True with nonfinite='drop', which all ranks decide together in each "
            f"micro-batch, where they have different numbers; got {min(numbers)} to "
            f"{max(numbers)}. Pass `norm.window(..., uneven=True)`."
        )


def check_window_count(so_far: object, more: object) -> None:
    """Refuse a count that int32 does not hold, where it can be read."""
    seen = so_far if isinstance(so_far, int) else 0
    if isinstance(more, int) and seen + more > INT32:
        raise CountOverflowError(
            f"`token_count` must leave the window's count below 2^31; got {seen} and {more} more. "
            f"End the window earlier, or count weights in float32."
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of some words."""
    _choice(name, value, choices)


def check_divisor(value: float) -> NoReturn:
    """Refuse to divide the losses of some tokens by nothing."""
    raise ValueError(
        f"`denominator` must be positive where a token is valid; got {value:g}. Pass the number of "
        f"the window's valid tokens, counted with the mask that this call uses."
    )


def check_label_range(offender: int, vocab_size: int, ignore_index: int) -> None:
    """Raise for one valid label that lies outside the vocabulary."""
    raise ValueError(
        f"`labels` must lie in [0, {vocab_size}) or equal `ignore_index` ({ignore_index}); "
        f"got {offender}. Mask that token with `where`, or set its label to `ignore_index`."
    )


def check_narrowed(name: str, value: int, dtype: str) -> NoReturn:
    """Refuse integers of which JAX would drop the upper half without a word."""
    raise ValueError(
        f"`{name}` must fit {dtype}, in which a JAX without 64-bit types keeps int64; got {value}. "
        f"Wrap the call in `with jax.enable_x64(True):`."
    )


def check_next_token_labels(
    labels: Operand,
    segment_ids: Operand | None,
    cu_seqlens: Operand | None,
    position_ids: Operand | None,
    shift: Any,
    ignore_index: int,
) -> int:
    """Validate one call of `next_token_labels`; return its shift as Python's integer."""
    _integers("labels", labels, "Pass token ids.")
    _ignore_index(ignore_index)
    if not holds(labels.dtype, ignore_index):
        wide = "int32 or int64" if holds("int32", ignore_index) else "int64"
        raise TypeError(
            f"`labels` must have a dtype that can hold `ignore_index` ({ignore_index}); "
            f"got {labels.dtype}. Cast it to {wide}."
        )
    if len(labels.shape) < 1:
        raise ValueError(
            "`labels` must have shape (..., tokens); got (). Pass at least one dimension of tokens."
        )
    if isinstance(shift, bool) or not isinstance(shift, Integral):
        raise TypeError(
            f"`shift` must be an integer; got {shift!r}. Pass how many tokens ahead the target is."
        )
    if shift < 1:
        raise ValueError(
            f"`shift` must be at least 1; got {shift}. Labels that are aligned already, with the "
            f"tokens that predict them, need no call: pass them to the loss as they are."
        )
    packing = {
        "segment_ids": (segment_ids, "Number the packed documents."),
        "cu_seqlens": (cu_seqlens, "Pass token offsets."),
        "position_ids": (position_ids, "Pass each token's place in its document."),
    }
    given = [name for name, (operand, _) in packing.items() if operand is not None]
    if len(given) > 1:
        raise ValueError(
            f"`segment_ids`, `cu_seqlens` and `position_ids` say the same thing; got "
            f"{' and '.join(f'`{name}`' for name in given)}. Pass one of them."
        )
    for name in given:
        _integers(name, *packing[name])
    for name, operand in (("segment_ids", segment_ids), ("position_ids", position_ids)):
        if operand is not None and operand.shape != labels.shape:
            axes = " Where tokens have places on several axes, pass `segment_ids` instead."
            raise ValueError(
                f"`{name}` must have the shape of `labels` {labels.shape}; got {operand.shape}. "
                f"Broadcast it first.{axes if name == 'position_ids' else ''}"
            )
    if cu_seqlens is not None:
        if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"`cu_seqlens` must have shape (documents + 1,); got {cu_seqlens.shape}. Pass the "
                f"offsets 0, len_0, len_0 + len_1, ..."
            )
        if math.prod(labels.shape[:-1]) != 1:
            raise ValueError(
                f"`labels` must be one packed row, (tokens,) or (1, tokens), with `cu_seqlens`; "
                f"got {labels.shape}. Pass `segment_ids` or `position_ids` for a batch of rows."
            )
    return int(shift)
