"""The teacher of a divergence, in JAX: its head or logits as a trace takes them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from xentlib.arguments import Arguments, DivergenceArguments, LogitsArguments
from xentlib.checks.divergence import (
    DIVERGING,
    check_teacher_logits,
    check_teacher_tokens,
    check_vocabulary,
)
from xentlib.jax.array_spec import array_spec, only_arrays
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.call import Arrays, Options
from xentlib.jax.head import unwrapped
from xentlib.teacher import TeacherHead, TeacherLogits

# What a teacher's head is called with as the student's is.
SHARED = (
    *("labels", "where", "ignore_index", "compute_dtype", "max_chunk_bytes"),
    *("vocab_parallel", "tokens_parallel", "gather", "tokens_per_rank"),
)
SOFT_LABELS = "soft_labels"  # in place of a kind of divergence


def labels_for(source: Any, labels: Any) -> Any:
    """Of a call without any, a class for each token."""
    return jnp.zeros(jnp.shape(source)[:-1], jnp.int32) if labels is None else labels


def bind_teacher(
    given: DivergenceArguments, options: Options, arrays: Arrays
) -> tuple[Options, Arrays]:
    """Of the teacher of a student that is bound."""
    teacher = given.teacher
    if isinstance(teacher, TeacherLogits):
        DIVERGING.require("logits_stay", not options.gathered, route=given.gather)
        return given_teacher(teacher, given, "hidden", options, classes_of(options, arrays))
    assert isinstance(teacher, TeacherHead)
    states = unwrapped(teacher.hidden)
    only_arrays(hidden=states)
    check_teacher_tokens("hidden", array_spec(states), "hidden", jnp.shape(given.hidden)[:-1])
    shared = {name: getattr(given, name) for name in SHARED}
    if options.compute_dtype == "float64":
        shared["compute_dtype"] = "float64"
    fields = teacher._asdict() | {"temperature": temperature_of(teacher, given.temperature)}
    own: Any
    of_head, own = bind(Arguments(**fields, **shared))
    compute = options.compute_dtype
    DIVERGING.require("wider", of_head.compute_dtype == compute, dtype=compute)
    check_vocabulary(classes_of(options, arrays), classes_of(of_head, own))
    same = of_head.axis == options.axis and of_head.gathered == options.gathered
    places = [
        None if x.place is None else (x.place.mesh, x.place.tokens) for x in (options, of_head)
    ]
    DIVERGING.require("placed", same and places[0] == places[1])
    return of_head, own


def classes_of(options: Options, arrays: Any) -> int:
    """As they are given: of this device, or of a mesh."""
    classes: int = arrays.weight.shape[options.transposed]
    return classes


def temperature_of(teacher: Any, students: Any) -> Any:
    return students if teacher.temperature is None else teacher.temperature


def given_teacher(
    teacher: TeacherLogits[Any], given: Any, name: str, options: Options, columns: int
) -> tuple[Options, Arrays]:
    """Of precomputed logits beside a student's head or logits."""
    logits, source = unwrapped(teacher.logits), array_spec(unwrapped(getattr(given, name)))
    only_arrays(logits=logits)
    spec = TeacherLogits(array_spec(logits), array_spec(teacher.temperature))
    check_teacher_logits(spec, name, source, columns, options.compute_dtype)
    of_logits = LogitsArguments(
        logits,
        labels_for(logits, given.labels),
        vocab_parallel=given.vocab_parallel,
        where=given.where,
        ignore_index=given.ignore_index,
        temperature=temperature_of(teacher, given.temperature),
        max_chunk_bytes=given.max_chunk_bytes,
        shard=getattr(given, "shard", None),
    )
    own, arrays = bind_logits(of_logits)
    axis = options.axis if options.place else own.axis
    compute = options.compute_dtype
    return own._replace(compute_dtype=compute, axis=axis, place=options.place), arrays
