"""What a step of JAX returns, as numbers that `tools.audit` holds against the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xentlib.checks.audit import check_ranks
from xentlib.tools.audit import step_adapters as adapters
from xentlib.tools.audit.diagnose import judge, oracle_of
from xentlib.tools.audit.hypotheses import Numbers
from xentlib.tools.audit.oracle import Oracle
from xentlib.tools.audit.problem import Array, Options, Problem
from xentlib.tools.audit.report import Report
from xentlib.tools.audit.step_adapters import Step

__all__ = ["Head", "audit"]


class Head(NamedTuple):
    """[V, H] and [V], or None: a pytree, whose gradient is a `Head` too."""

    weight: Any
    bias: Any


def audit(step: Step, *, kind: str | None = None, ranks: int = 1, **options: Any) -> Report:
    """Hold a step against the float64 oracle, and name what is wrong with it.

        def step(head, micro_batches):              # Head(weight, bias); a list of dicts of arrays
            ...
            return loss, d_head                     # as from jax.value_and_grad

        report = audit(step)
        assert report.passed, report

    The gradient of the head is a `Head`, a dict with "weight" (or "kernel") and "bias", or the
    weight's alone, [V, H] or [H, V]; those of the micro-batches' hidden states may follow.

    Args:
        step: the function. Each micro-batch has "hidden" [B, L, H], "input_ids", "labels" (not
            shifted, -100 where masked), "targets" (shifted), "loss_mask", "attention_mask",
            "segment_ids" and "position_ids", [B, L] each; with `divergence` "teacher_logits",
            [B, L, V]. Use those that your trainer has.
        kind: "step"; "loss", a function of (hidden [N, H], weight [V, H], labels [N]) that returns
            a mean; "logprobs", one that returns a log-probability for each label, or (logprobs,
            entropy). None: "step" for two arguments, "loss" for three.
        ranks: devices over which the step spreads the rows of a micro-batch, in their order: B is
            then a multiple of it.
        options: what the step applies, fields of `xentlib.tools.audit.Options`: bias, softcap,
            logit_scale, temperature, label_smoothing, z_loss, documents; of a step that distils
            divergence, beta, temperature_squared.

    Raises:
        TypeError: no function, or one of other arguments.
        ValueError: an unknown kind or option, or a result that cannot be compared.

    Numerics: float32 inputs; right is what holds rho / u of row A6 against the oracle.
    """
    declared = Options.of(options)
    kind = adapters.kind_of(step, kind, declared)
    check_ranks(ranks, jax.device_count(), kind)
    if kind != "step":
        oracle, got = _of_function(step, kind, declared)
        return judge("jax", oracle, got, rerun=lambda: _of_function(step, kind, declared)[1])
    oracle = oracle_of(kind, declared, ranks)
    run = partial(_of_step, step)
    problem = oracle.problem
    return judge("jax", oracle, run(problem), rerun=lambda: run(problem), run=run)


def _of_step(step: Step, problem: Problem) -> Numbers:
    bias = None if problem.bias is None else _array(problem.bias)
    batches = [
        {name: _array(x) for name, x in problem.micro_batch(slice(None), m).items()}
        for m in range(problem.micro_batches)
    ]
    result = adapters.returned(step(Head(_array(problem.weight), bias), batches), problem)
    readers = [partial(_of_rank, rank=rank, ranks=problem.ranks) for rank in range(problem.ranks)]
    got = adapters.stacked(
        [adapters.numbers(problem, result, reader, problem.weight) for reader in readers]
    )
    if got.d_hidden is not None:  # every rank has read the rows of all
        ranks, m, *rest = problem.hidden.shape
        return got._replace(d_hidden=got.d_hidden[0].reshape(m, ranks, *rest).swapaxes(0, 1))
    return got


def _of_rank(x: Any, rank: int, ranks: int) -> Array:
    """What a device holds of an array that all hold whole: where nothing has reduced it these are
    different numbers, which JAX cannot tell."""
    if ranks > 1 and isinstance(x, jax.Array) and x.is_fully_replicated:
        shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
        if len(shards) == ranks:
            return np.asarray(shards[rank].data)
    return np.asarray(x)


def _of_function(function: Step, kind: str, declared: Options) -> tuple[Oracle, Numbers]:
    problem = oracle_of(kind, declared).problem
    labels = _array(problem.targets.reshape(-1))
    hidden = _array(problem.hidden.reshape(labels.size, -1))
    bias = None if problem.bias is None else _array(problem.bias)

    def values_of(hidden: Any, weight: Any, bias: Any) -> Any:
        leaves = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
        result = adapters.call(function, leaves, declared)
        return adapters.of_function(kind, result, labels.size, jax.Array)

    values, pull = jax.vjp(values_of, hidden, _array(problem.weight), bias)
    oracle, upstream = adapters.upstream_of(kind, declared, values)
    pairs = zip(values, upstream)
    gradients = pull(tuple(jnp.asarray(g, x.dtype).reshape(x.shape) for x, g in pairs))
    return oracle, adapters.numbers_of_function(oracle.problem, values, *gradients)


def _array(x: Array) -> jax.Array:
    """Integers in 32 bits, as JAX has them without being told otherwise."""
    return jnp.asarray(x.astype(np.int32) if x.dtype == np.int64 else x)
