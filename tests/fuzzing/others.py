"""The oracle against the losses of torch and of optax in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fuzzing.draw import Drawn
from fuzzing.findings import Findings
from fuzzing.truth import GRADIENTS, Truth, oracle_of
from helpers.oracle import VALUE_ULP, tau_bound, torch_full_logits, units
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.ulp import ulp_distance


def others_agree(findings: Findings, d: Drawn, truth: Truth, upstream: Upstream | None) -> None:
    p = truth.p
    if not p.labels.size or not p.valid.any():
        return
    cap = p.options.get("softcap")
    reach = d.case.std * abs(p.options.get("logit_scale", 1.0)) * 4 + abs(d.offset)
    if not findings.claims("others, softcap", cap is None or reach <= 2 * cap):
        return
    values = [("torch", partial(torch_per_token, upstream) if upstream else torch_full_logits)]
    if "jax" in d.backends and findings.claims("others, class weights", p.class_weights is None):
        values.append(("optax", partial(optax_full_logits, upstream)))
    o, names = oracle_of(p, upstream), GRADIENTS if p.bias is not None else GRADIENTS[:2]
    for whose, others in values:
        loss, gradients = others(p)
        if upstream is None:
            scale = max(truth.loss_terms, 2.0**-900)
            distance = float(ulp_distance(o.loss, np.asarray(loss), "float64", scale))
            findings.other(whose, "loss", "ULP", distance, 2 * VALUE_ULP, d.text)
        for name, got in zip(names, gradients):
            bound, magnitude = (getattr(o, name.replace("d_", x)) for x in ("bound_", "magnitude_"))
            # The length of the sums, which the bound leaves out: equal terms are rounded alike.
            length = d.case.vocab if name == "d_hidden" else d.case.tokens
            bound = bound + length * magnitude + 2.0**-960
            value = units(np.asarray(got), getattr(o, name), bound)
            most = 2 * tau_bound("A5" if name == "d_hidden" else "A6")
            findings.other(whose, name, "tau", value, most, d.text)


def torch_per_token(upstream: Upstream, p: Problem) -> tuple[float, list[Any]]:
    """Per-token outputs from full logits, by `F.cross_entropy`, `logsumexp` and `softmax`."""
    import torch

    o = p.options
    leaves = [
        torch.tensor(x, requires_grad=True) for x in (p.hidden, p.weight, p.bias) if x is not None
    ]
    z = leaves[0] @ (leaves[1] if o.get("weight_layout") == "HV" else leaves[1].T)
    z = o.get("logit_scale", 1.0) * (z + leaves[2] if len(leaves) == 3 else z)
    if o.get("softcap") is not None:
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    z = (z / torch.as_tensor(o.get("temperature", 1.0)).double().reshape(-1, 1))[p.valid]
    labels = torch.tensor(p.labels[p.valid]).long()
    logprobs = -torch.nn.functional.cross_entropy(
        z, labels, reduction="none", label_smoothing=o.get("label_smoothing", 0.0)
    )
    entropy = -(z.softmax(1) * z.log_softmax(1)).sum(1)
    outputs = (logprobs, entropy, z.logsumexp(1))
    total = sum(
        (torch.tensor(g[p.valid]).double() * x).sum()
        for g, x in zip(upstream, outputs)
        if g is not None
    )
    return 0.0, [g.numpy() for g in torch.autograd.grad(total, leaves)]


def optax_full_logits(upstream: Upstream | None, p: Problem) -> tuple[float, list[Any]]:
    """Loss or per-token outputs from full logits, by optax."""
    import jax
    import jax.numpy as jnp

    o = p.options
    with jax.enable_x64(True):
        divisor = None
        if upstream is None:
            divisor = o.get("denominator", 1.0 if o["reduction"] == "sum" else None)
        leaves = [jnp.asarray(x) for x in (p.hidden, p.weight, p.bias) if x is not None]
        weights = np.ones(p.labels.size) if p.token_weights is None else p.token_weights
        weights = np.where(p.valid, weights.astype(np.float64), 0.0)
        given = () if upstream is None else tuple(
            np.where(p.valid, g.astype(np.float64), 0.0) if g is not None else None
            for g in upstream
        )  # fmt: skip
        temperature = np.asarray(o.get("temperature", 1.0), np.float64).reshape(-1, 1)
        loss, gradients = _optax_gradients()(
            leaves,
            np.where(p.valid, p.labels, 0),
            weights,
            given,
            temperature,
            o.get("logit_scale", 1.0),
            weights.sum() or 1.0 if divisor is None else divisor,
            p.upstream,
            softcap=o.get("softcap"),
            smoothing=o.get("label_smoothing", 0.0),
            z_loss=o.get("z_loss", 0.0),
            turned=o.get("weight_layout") == "HV",
        )
        return float(loss), [np.asarray(g) for g in gradients]


_COMPILED: list[Any] = []


def _optax_gradients() -> Any:
    """Compiled for each form; JAX is loaded by the first call."""
    if _COMPILED:
        return _COMPILED[0]
    import jax
    import optax

    def loss(
        leaves: Any, labels: Any, weights: Any, given: Any, temperature: Any, scale: Any,
        divisor: Any, *, softcap: Any, smoothing: float, z_loss: float, turned: bool,
    ) -> Any:  # fmt: skip
        z = leaves[0] @ (leaves[1] if turned else leaves[1].T)
        z = scale * (z + leaves[2][None, :] if len(leaves) == 3 else z)
        z = z if softcap is None else softcap * jax.numpy.tanh(z / softcap)
        z = z / temperature
        lse = jax.nn.logsumexp(z, axis=1)
        if smoothing:
            wanted = optax.smooth_labels(jax.nn.one_hot(labels, z.shape[1]), smoothing)
            nll = optax.softmax_cross_entropy(z, wanted)
        else:
            nll = optax.softmax_cross_entropy_with_integer_labels(z, labels)
        if not given:
            return (weights * (nll + z_loss * lse**2)).sum() / divisor
        entropy = -(jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(axis=1)
        return sum((g * x).sum() for g, x in zip(given, (-nll, entropy, lse)) if g is not None)

    def both(leaves: Any, *rest: Any, **options: Any) -> Any:
        *rest, upstream = rest
        value, gradients = jax.value_and_grad(loss)(leaves, *rest, **options)
        return value, [g if rest[2] else upstream * g for g in gradients]

    static = ("softcap", "smoothing", "z_loss", "turned")
    _COMPILED.append(jax.jit(both, static_argnames=static))
    return _COMPILED[0]
