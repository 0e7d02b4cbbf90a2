"""The teacher of a divergence, in JAX: its head or logits as a trace takes them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from xentlib.arguments import Arguments, DivergenceArguments, LogitsArguments
from xentlib.checks.divergence import (
    DIVERGING,
    check_common,
    check_no_probabilities,
    check_teacher_logits,
    check_teacher_tokens,
    check_vocabulary,
    check_whole,
    stated,
)
from xentlib.jax.array_spec import array_spec, concrete_on_cpu, only_arrays
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.call import Arrays, Options
from xentlib.jax.core.tokens import on_host
from xentlib.jax.head import unwrapped
from xentlib.teacher import TeacherHead, TeacherLogits

# What a teacher's head is called with as the student's is.
SHARED = (
    *("labels", "where", "ignore_index", "compute_dtype", "max_chunk_bytes"),
    *("vocab_parallel", "tokens_parallel", "gather", "tokens_per_rank"),
)


def labels_for(source: Any, labels: Any) -> Any:
    """Of a call without any, a class for each token."""
    return jnp.zeros(jnp.shape(source)[:-1], jnp.int32) if labels is None else labels


def bind_teacher(
    args: DivergenceArguments, options: Options, arrays: Arrays
) -> tuple[Options, Arrays]:
    """Of the teacher of a student that is bound."""
    teacher = args.teacher
    if args.vocab == "intersect" and args.nll_weight:  # before a label that it lacks is refused
        unlabelled = args._replace(labels=labels_for(args.hidden, None), nll_weight=0.0)
        others = others_of(*bind_teacher(unlabelled, options, arrays))
        check_common(classes_of(options, arrays), others, args.nll_weight)
    if isinstance(teacher, TeacherLogits):
        DIVERGING.require("logits_stay", not options.gathered, route=args.gather)
        columns = None if args.vocab != "same" else classes_of(options, arrays)
        return logits_teacher(teacher, args, "hidden", options, columns)
    assert isinstance(teacher, TeacherHead)
    teacher = stated(args, teacher)
    states = unwrapped(teacher.hidden)
    only_arrays(hidden=states)
    check_teacher_tokens("hidden", array_spec(states), "hidden", jnp.shape(args.hidden)[:-1])
    shared = {name: getattr(args, name) for name in SHARED}
    if options.compute_dtype == "float64":
        shared["compute_dtype"] = "float64"
    shared["reduction"] = "sum"  # it has no loss
    fields = teacher._asdict() | {"temperature": temperature_of(teacher, args.temperature)}
    head_arrays: Any
    teacher_options, head_arrays = bind(Arguments(**fields, **shared))
    compute = options.compute_dtype
    DIVERGING.require("wider", teacher_options.compute_dtype == compute, dtype=compute)
    if args.vocab == "same":
        sizes = classes_of(options, arrays), classes_of(teacher_options, head_arrays)
        check_vocabulary(*sizes, sharded=options.axis is not None and options.place is None)
    same = teacher_options.axis == options.axis and teacher_options.gathered == options.gathered
    on_meshes = [
        None if x.place is None else (x.place.mesh, x.place.tokens)
        for x in (options, teacher_options)
    ]
    DIVERGING.require("placed", same and on_meshes[0] == on_meshes[1])
    return teacher_options, head_arrays


def of_both(
    options: Options, arrays: Arrays, teacher_options: Options, teacher: Arrays
) -> tuple[Arrays, Options, Arrays]:
    """With the classes that both have."""
    check_whole(options.axis is None and options.place is None)
    count = min(classes_of(options, arrays), others_of(teacher_options, teacher))
    if teacher.weight is None:
        return (
            first_rows(options, arrays, count),
            teacher_options,
            teacher._replace(hidden=teacher.hidden[..., :count]),
        )
    head = first_rows(teacher_options, teacher, count)
    return first_rows(options, arrays, count), teacher_options, head


def others_of(options: Options, teacher: Arrays) -> int:
    """Classes of a teacher, of a head or of logits."""
    logits = teacher.weight is None
    return teacher.hidden.shape[-1] if logits else classes_of(options, teacher)


def first_rows(options: Options, arrays: Arrays, count: int) -> Arrays:
    """Of a head."""
    weight = arrays.weight
    assert weight is not None
    return arrays._replace(
        weight=weight[:, :count] if options.transposed else weight[:count],
        bias=None if arrays.bias is None else arrays.bias[:count],
        low_out=None if arrays.low_out is None else arrays.low_out[:count],
    )


def classes_of(options: Options, arrays: Any) -> int:
    """As they are given: of this device, or of a mesh."""
    classes: int = arrays.weight.shape[options.transposed]
    return classes


def temperature_of(teacher: Any, students: Any) -> Any:
    return students if teacher.temperature is None else teacher.temperature


def logits_teacher(
    teacher: TeacherLogits[Any], args: Any, name: str, options: Options, columns: int | None
) -> tuple[Options, Arrays]:
    """Of precomputed logits beside a student's head or logits."""
    logits, source = unwrapped(teacher.logits), array_spec(unwrapped(getattr(args, name)))
    only_arrays(logits=logits)
    spec = TeacherLogits(array_spec(logits), array_spec(teacher.temperature))
    sharded = options.axis is not None and options.place is None
    check_teacher_logits(spec, name, source, columns, options.compute_dtype, sharded=sharded)
    if args.vocab_parallel is None and concrete_on_cpu(logits, args.labels, args.where):
        _, valid = on_host(labels_for(logits, args.labels), args.where, args.ignore_index)
        rows = np.asarray(logits).reshape(-1, logits.shape[-1])
        check_no_probabilities(rows[np.flatnonzero(valid)[:8]].astype(np.float32))
    logits_args = LogitsArguments(
        logits,
        labels_for(logits, args.labels),
        vocab_parallel=args.vocab_parallel,
        where=args.where,
        ignore_index=args.ignore_index,
        temperature=temperature_of(teacher, args.temperature),
        max_chunk_bytes=args.max_chunk_bytes,
        shard=getattr(args, "shard", None),
    )
    bound, arrays = bind_logits(logits_args)
    axis = options.axis if options.place else bound.axis
    compute = options.compute_dtype
    return bound._replace(compute_dtype=compute, axis=axis, place=options.place), arrays
