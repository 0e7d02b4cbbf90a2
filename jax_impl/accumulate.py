"""Token-normalised accumulation in JAX: a window in one jitted scan, or over a host loop as an
optax transformation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from xentlib.accumulate import WindowStats
from xentlib.checks.validators import check_choice
from xentlib.checks.window import (
    WINDOW_TYPES,
    WINDOWS,
    check_integer_count,
    check_token_count,
    check_window_count,
)
from xentlib.jax.array_spec import array_spec
from xentlib.jax.core.vocab import as_primal, checks_types, vary, varying
from xentlib.jax.micro_batch import check_traced, known, loss_and_count, token_count_of
from xentlib.options import NONFINITE, NonFinite
from xentlib.results import is_loss_output


def accumulate_grads(
    sum_and_count_fn: Callable[[Any, Any], Any],
    params: Any,
    micro_batches: Any,
    axis_name: Any = None,
    *,
    empty: Literal["skip", "zero"] = "skip",
    nonfinite: NonFinite = "keep",
) -> tuple[WindowStats, Any]:
    """The gradient of a window, in a scan over its micro-batches. JAX, inside `jit`.

        def loss_sum(params, batch):
            hidden = model(params, batch)
            return chunked_nll(hidden, params["head"], batch["labels"], reduction="sum")

        stats, grads = accumulate_grads(loss_sum, params, micro_batches)

    grads = sum over micro-batches and devices of d loss_sum / T.

    Args:
        sum_and_count_fn: (params, micro_batch) to an `NLLOutput` of `reduction="sum"`, which has
            its count and says whether it was divided; or to a pair: [] float32 or float64, the sum
            of a loss over the valid tokens, and their number or their weight.
        params: a pytree of arrays.
        micro_batches: a pytree whose arrays have a leading dimension of micro-batches; one without
            a valid token counts nothing.
        axis_name: mesh axes that tokens are spread over inside `shard_map`; None on global arrays.
            Gradients, count and loss are summed over it once, after the scan.
        empty: with no valid token anywhere gradients are +0, and `stats.skipped` is true for
            "skip", false for "zero".
        nonfinite: a micro-batch whose loss or gradient holds NaN or inf is "keep"t, and shows, or
            "drop"ped with its tokens (`stats.dropped`). All devices of the `shard_map` around
            decide together, with one number in each micro-batch.

    Returns:
        (WindowStats, gradients of the dtypes of `params`).

    Raises:
        ValueError: a loss that `chunked_nll` has divided, or that was divided by its count since,
            as the program shows it, or that is not one number; one without its count. Whether
            another loss is a sum cannot be checked.
        TypeError: a loss or a count of fewer than 32 bits.

    Numerics: sums in float32 at least, multiplied by 1 / T once at the end. T of an `NLLOutput`, or
    of weights, is added up in float32 with what each addition has lost beside it; T of integers is
    int32, NaN where that does not hold it. Row A12.
    """
    check_choice("empty", empty, ("skip", "zero"))
    check_choice("nonfinite", nonfinite, NONFINITE)
    types = axis_name is not None and checks_types(axis_name)
    axes_here = varying(lax.axis_index(axis_name)) if types else frozenset()
    # Gradients of parameters that vary are this device's own: summed once, after the loop.
    here = vary(params, axes_here)
    grad_fn = jax.value_and_grad(partial(called_with, sum_and_count_fn), has_aux=True)
    number = jax.tree.leaves(micro_batches)[0].shape[0]

    def one(carry: Any, batch: Any) -> tuple[Any, None]:
        (loss, count), grads = grad_fn(here, batch)
        loss_sum, total, lost, sums, dropped = carry
        if nonfinite == "drop":
            fine = all_finite(loss, grads)
            loss, count, grads = kept((loss, count, grads), fine)
            dropped = dropped + (~fine).astype(jnp.int32)
        sums = jax.tree.map(add, sums, grads)
        if jnp.issubdtype(total.dtype, jnp.integer):
            total = counted(total, count)
        else:  # of weights, or the float32 of a number: beyond 2^24 each addition is rounded
            total, more = two_sum(total, vary(as_count(count), varying(total)))
            lost = lost + more
        return (add(loss_sum, loss), total, lost, sums, dropped), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    traced = jax.jit(grad_fn).trace(here, first)  # what `jax.eval_shape` does
    (loss_type, count_type), grads_type = traced.out_info
    check_traced(loss_type, traced.jaxpr.jaxpr)
    count_dtype = as_count(jnp.zeros((), count_type.dtype)).dtype
    start = (
        vary(zeros_of(loss_type, wide(loss_type.dtype)), axes_here),
        vary(zeros_of(count_type, count_dtype), axes_here),
        vary(zeros_of(count_type, jnp.float32), axes_here),
        jax.tree.map(lambda g: zeros_of(g, wide(g.dtype)), grads_type),
        jnp.zeros((), jnp.int32),
    )
    (loss_sum, total, lost, sums, dropped), _ = lax.scan(one, start, micro_batches)
    total = total + lost.astype(total.dtype)
    if types:
        # Over these axes alone: on others each device may hold its part of a parameter.
        loss_sum, total = lax.psum((loss_sum, total), axis_name)
        sums = jax.tree.map(as_primal, sums, params)
    elif axis_name is not None:
        loss_sum, total, sums = lax.psum((loss_sum, total, sums), axis_name)
    none = total == 0
    skipped = none if empty == "skip" else jnp.zeros_like(none)
    grads = over(sums, total, params)
    loss = jnp.where(none, 0.0, loss_sum / jnp.where(none, 1, total).astype(loss_sum.dtype))
    scale = over(jnp.ones((), jnp.float32), total, jnp.float32(0))
    loss = jnp.where(jnp.isnan(scale), jnp.nan, loss)
    return WindowStats(loss, total, scale, number, skipped, dropped), grads


def called_with(function: Callable[[Any, Any], Any], params: Any, batch: Any) -> tuple[Any, Any]:
    """What a user's function returns, as `jax.value_and_grad` takes it: a sum and its count."""
    result = function(params, batch)
    pair = isinstance(result, (tuple, list)) and not is_loss_output(result) and len(result) == 2
    return loss_and_count(*result) if pair else loss_and_count(result)


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a + b, and exactly what that has rounded away (Knuth)."""
    total = a + b
    more = total - a
    return total, (a - (total - more)) + (b - more)


def add(a: jax.Array, x: jax.Array) -> jax.Array:
    total: jax.Array = a + vary(x.astype(a.dtype), varying(a))
    return total


def zeros_of(like: Any, dtype: Any) -> Any:
    """Of the shape that was inferred, varying and spread as that says."""
    kind = getattr(like, "manual_axis_type", None)
    sharding = getattr(like, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and any(
        axis is AxisType.Explicit for axis in sharding.mesh.axis_types
    )
    zeros = jnp.zeros(like.shape, dtype, device=sharding if explicit else None)
    return vary(zeros, kind.varying if kind else frozenset())


def over(sums: Any, total: jax.Array, like: Any) -> Any:
    """sums / T, rounded to the dtypes of `like`; 0 where T is 0, NaN where it is no count."""
    whole = jnp.issubdtype(total.dtype, jnp.integer)

    def one(s: jax.Array, x: Any) -> jax.Array:
        # 1 / T is rounded first, as in PyTorch. XLA does so on a CPU of its own accord.
        share = jnp.ones((), s.dtype) / jnp.where(total == 0, 1, total).astype(s.dtype)
        if whole:
            share = jnp.where(total < 0, jnp.nan, share)
        return jnp.where(total == 0, 0.0, s * share).astype(x.dtype)

    return jax.tree.map(one, sums, like)


def wide(dtype: Any) -> Any:
    """Of an accumulator: never below float32."""
    bits = jnp.finfo(dtype).bits  # type: ignore[no-untyped-call]
    return jnp.float32 if bits < 32 else dtype


def as_count(count: Any) -> jax.Array:
    """int32, or float32 where tokens have weights."""
    count = jnp.asarray(count)
    whole = jnp.issubdtype(count.dtype, jnp.integer) or count.dtype == jnp.bool_
    number: jax.Array = count.astype(jnp.int32 if whole else jnp.float32)
    return number


def counted(total: jax.Array, count: Any) -> jax.Array:
    """The window's count with one more; of integers -1 for good where it is below 0 or too large:
    a traced number cannot be refused, and `over` makes NaN of it."""
    count = jnp.asarray(count)
    added = as_count(count).astype(total.dtype)
    after: jax.Array = total + added
    if not jnp.issubdtype(total.dtype, jnp.integer):
        return after
    lost = added.astype(count.dtype) != count
    return jnp.where((total < 0) | (added < 0) | (after < 0) | lost, -1, after)


def all_finite(*trees: Any) -> jax.Array:
    """Whether there is neither NaN nor inf, on any device of the `shard_map` around: where one
    drops a micro-batch, all do."""
    leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(trees)]
    fine = jnp.stack(leaves).all() if leaves else jnp.bool_(True)
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if axes and checks_types(axes):
        axes = tuple(sorted(varying(fine), key=str))
    return lax.pmin(fine.astype(jnp.int32), axes) == 1 if axes else fine


def kept(tree: Any, fine: jax.Array) -> Any:
    """Zeros where it is not `fine`."""
    return jax.tree.map(lambda x: jnp.where(fine, x, jnp.zeros_like(x)), tree)


class TokenNormalizedState(NamedTuple):
    """Of `token_normalized`; a pytree whose types never change, so that it can be a carry and be
    saved.

    Attributes:
        sums: gradients of the window so far, float32.
        num_tokens: [] of the window so far, int32, or float32 for weights.
        micro_batches: [] int32.
        windows: [] int32, those that have been stepped on.
        inner: state of the optimizer.
    """

    sums: Any
    num_tokens: jax.Array
    micro_batches: jax.Array
    windows: jax.Array
    inner: Any


def token_normalized(
    inner: Any,
    empty: Literal["skip", "zero"] = "skip",
    *,
    nonfinite: NonFinite = "keep",
    weighted: bool = False,
) -> Any:
    """An optimizer that steps once in a window, on its token-normalised gradient. JAX, optax.

        tx = token_normalized(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr)))
        updates, state = tx.update(grads_of_the_sum, state, params, token_count=out, is_last=flag)

    `token_count` is the `NLLOutput` whose loss was differentiated, which has its count and says
    whether it was divided; or a count.

    `update` adds up gradients of loss sums and returns updates of zero, until `is_last`: then the
    inner optimizer sees sums / T, once. It does not run in between, so that its step count,
    schedule and moments are those of windows. Clipping inside of it clips the window's gradient.
    An update with gradients of zero, `token_count=0` and `is_last=True` ends a window early.

    Args:
        inner: an optax transformation.
        empty: a window without valid tokens is "skip"ped, the inner state untouched, or stepped on
            with gradients that are "zero".
        nonfinite: a micro-batch whose gradient holds NaN or inf is "keep"t, and shows in the step,
            or "drop"ped with its tokens. Inside `shard_map` all devices decide together, with one
            number in each `update`.
        weighted: the weights of tokens are counted, float32.

    Raises:
        TypeError: a count that is no integer; an `NLLOutput` with weights, where they are not
            counted and can be read; an `optax.MultiSteps` or `optax.apply_every` inside of `inner`.
        ValueError: a loss that `chunked_nll` has divided, or its count; a count that is not one
            number, or below 0, where it can be read; inside `shard_map` with types the count of one
            device.
        CountOverflowError: more than 2^31 - 1 tokens, where the count can be read. A count that
            cannot be read, below 0, too large or of weights, makes the window's gradient NaN.

    Numerics: sums in float32 at least, reset to zeros and never by multiplying. The inner optimizer
    sees their means in that dtype, whatever that of the gradients, and updates leave in the dtypes
    that it gives them. Row A12.
    """
    import optax  # type: ignore[import-untyped]

    check_choice("empty", empty, ("skip", "zero"))
    check_choice("nonfinite", nonfinite, NONFINITE)
    inner = optax.with_extra_args_support(inner)
    count_type = jnp.float32 if weighted else jnp.int32

    def fresh(like: Any, windows: jax.Array, inner_state: Any) -> TokenNormalizedState:
        """A window that begins. Zeros, not sums times zero: a NaN of one window must not reach the
        next. No two leaves are one array: a state is donated."""
        micro_batches = jnp.zeros((), jnp.int32)
        # As the parameters are spread: a sum that one device keeps would be gathered there.
        sums = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=wide(x.dtype)), like)
        tokens = jnp.zeros((), count_type)
        return TokenNormalizedState(sums, tokens, micro_batches, windows, inner_state)

    def init(params: Any) -> TokenNormalizedState:
        state = inner.init(params)
        wrappers = (TokenNormalizedState, optax.MultiStepsState, optax.ApplyEvery)
        kinds = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, wrappers))
        for kind, message in zip(wrappers, ("outermost", "multi_steps", "apply_every")):
            WINDOW_TYPES.require(message, not any(isinstance(x, kind) for x in kinds))
        return fresh(params, jnp.zeros((), jnp.int32), state)

    def update(
        updates: Any,
        state: TokenNormalizedState,
        params: Any = None,
        *,
        token_count: Any,
        is_last: Any,
        **extra: Any,
    ) -> tuple[Any, TokenNormalizedState]:
        count_of = token_count_of(token_count, weighted)
        count_of = count_of if isinstance(count_of, jax.Array) else np.asarray(count_of)
        if not weighted:
            check_integer_count(array_spec(count_of))
        check_token_count("token_count", array_spec(count_of), known(count_of), weighted)
        if not weighted:
            check_window_count(known(state.num_tokens), known(count_of))
        count = jnp.asarray(count_of)
        more_axes = varying(count) - varying(state.num_tokens)
        axes = tuple(sorted(map(str, more_axes)))
        WINDOWS.require("count_of_all", not axes, over=axes[0] if len(axes) == 1 else axes)
        if nonfinite == "drop":
            fine = all_finite(updates)
            updates, count = kept((updates, count), fine)
        sums = jax.tree.map(add, state.sums, updates)
        total = counted(state.num_tokens, count)
        number = state.micro_batches + 1

        def stepped(sums: Any) -> tuple[Any, Any]:
            # Means in the sums' own dtypes: in bf16 they would lose what the window has added up.
            means = over(sums, total, sums)
            result: tuple[Any, Any] = inner.update(means, state.inner, params, **extra)
            return result

        # As the step returns them: parameters' dtypes for one optimizer, float32 for another.
        types, _ = jax.eval_shape(stepped, sums)

        def still() -> Any:
            return jax.tree.map(lambda x: zeros_of(x, x.dtype), types)

        def step(_: Any) -> tuple[Any, TokenNormalizedState]:
            new, after = stepped(sums)
            after = jax.tree.map(lambda a, b: jnp.asarray(a).astype(b.dtype), after, state.inner)
            return new, fresh(state.sums, state.windows + 1, after)

        def wait(_: Any) -> tuple[Any, TokenNormalizedState]:
            return still(), TokenNormalizedState(sums, total, number, state.windows, state.inner)

        def skip(_: Any) -> tuple[Any, TokenNormalizedState]:
            return still(), fresh(state.sums, state.windows, state.inner)

        last = jnp.asarray(is_last, bool)
        stepping = jnp.logical_or(total != 0, empty == "zero")
        which = jnp.where(last, jnp.where(stepping, 2, 1), 0)
        result: tuple[Any, TokenNormalizedState] = lax.switch(which, (wait, skip, step), None)
        return result

    update.is_token_normalized = True  # type: ignore[attr-defined]
    return optax.GradientTransformationExtraArgs(init, update)


def is_token_normalized(tx: Any) -> bool:
    """Whether `token_normalized` has made it. optax's own take no notice of a `token_count`."""
    return getattr(tx.update, "is_token_normalized", False)
