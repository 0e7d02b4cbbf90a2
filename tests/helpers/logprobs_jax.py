"""`chunked_logprobs` in JAX: NumPy in and out, with another gradient for every token and output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from helpers.leaves_jax import BUDGET, NAMES
from xentlib.interop import to_jax
from xentlib.jax import LogprobOutput, chunked_logprobs
from xentlib.reference import LogprobReference, logprobs_reference
from xentlib.tools.harness.cases import OPTIONS
from xentlib.tools.harness.problems import Problem

OURS = {name: value for name, value in OPTIONS.items() if name in ("softcap", "logit_scale")}


def reference_of(p: Problem, upstream: tuple, **how) -> LogprobReference:
    given = zip(("d_logprobs", "d_entropy", "d_lse"), upstream)
    keywords = {name: g for name, g in given if g is not None}
    return logprobs_reference(
        p.hidden, p.weight, p.labels, bias=p.bias, where=p.where, **keywords, **how, **p.options
    )


def run_logprobs(
    p: Problem, upstream: tuple, *, chunk: int | None = None, audit: bool = False
) -> tuple:
    """Outputs and gradients by name; no entropy where it has no gradient."""
    options = dict(p.options)
    if chunk is not None:
        vocab = p.weight.shape[1 if options.get("weight_layout") == "HV" else 0]
        options["max_chunk_bytes"] = chunk * vocab * (8 if audit else 4)
    if audit:
        options["compute_dtype"] = "float64"
    with jax.enable_x64(audit):
        cross = {k: to_jax(x, copy=True) for k, x in options.items() if isinstance(x, np.ndarray)}
        labels = to_jax(p.labels, copy=True)
        where = None if p.where is None else to_jax(p.where, copy=True)
        leaves = [x if x is None else to_jax(x, copy=True) for x in (p.hidden, p.weight, p.bias)]

        def used(hidden, weight, bias):
            out = chunked_logprobs(
                hidden,
                weight,
                labels,
                bias=bias,
                where=where,
                entropy=upstream[1] is not None,
                **(options | cross),
            )
            return [x for x, g in zip(out, upstream) if g is not None], out

        values, pull, out = jax.vjp(used, *leaves, has_aux=True)
        grads = pull(
            [
                jnp.asarray(g, v.dtype)
                for v, g in zip(values, (g for g in upstream if g is not None))
            ]
        )
        found = {name: np.asarray(g) for name, g in zip(NAMES, grads) if g is not None}
        return jax.tree.map(np.asarray, out), found


def head(hidden, weight, bias, labels, **options) -> LogprobOutput:
    options = {"max_chunk_bytes": BUDGET, "entropy": True} | options
    return chunked_logprobs(hidden, weight, labels, bias=bias, **options)


def scaled_logprobs(upstream, *leaves, **options):
    """A loss whose gradients of the outputs are the upstream ones."""
    out = head(*leaves, **options)
    values = (out.logprobs, out.entropy, out.lse)
    return sum((g * x).sum() for g, x in zip(upstream, values) if g is not None)
