"""Steps of JAX for the audit: one of full logits that takes a defect for each of its choices, and
right ones as different trainers write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib.jax import accumulate_grads, chunked_logprobs, chunked_nll, next_token_labels

IGNORE = -100
WORLD = 2  # devices of the steps that are spread


def targets(batch: Any) -> Any:
    return batch["targets"]


def raw(head: Any, hidden: Any) -> Any:
    z = hidden @ head.weight.T
    return z if head.bias is None else z + jnp.broadcast_to(head.bias, z.shape)


def shifted(labels: Any, segments: Any = None) -> Any:
    return next_token_labels(labels, segment_ids=segments)


def nll(z: Any, y: Any) -> Any:
    """[B, L], 0 where there is no label."""
    log_p = jax.nn.log_softmax(z.astype(jnp.float32))
    mine = jnp.take_along_axis(log_p, jnp.maximum(y, 0)[..., None], -1)[..., 0]
    return jnp.where(y != IGNORE, -mine, jnp.float32(0))


def valid(y: Any) -> Any:
    return jnp.sum(y != IGNORE).astype(jnp.float32)


def of_rank(y: Any, ranks: int) -> Any:
    """[ranks], tokens that count in each rank's rows."""
    return jnp.sum((y != IGNORE).reshape(ranks, -1), 1).astype(jnp.float32)


def step(
    labels: Any = targets,
    logits: Any = raw,
    divisor: str = "tokens",
    factor: float = 1.0,
    counted: Any = None,
    chunk: int = 0,
    only: int | None = None,
    ranks: int = 1,
) -> Any:
    """Full logits of each micro-batch, one gradient of the sum of their parts."""

    def loss(head: Any, micro_batches: Any) -> Any:
        took = [labels(b) for b in micro_batches]
        counts = [(counted or labels)(b) for b in micro_batches]
        each_rank = sum(of_rank(y, ranks) for y in counts)
        found = jnp.float32(0)
        for m, (b, y) in enumerate(zip(micro_batches, took)):
            if only is not None and m != only:
                continue
            each = nll(logits(head, b["hidden"]), y)
            if chunk:
                keep = np.arange(y.size).reshape(y.shape) < y.size // chunk * chunk
                each = jnp.where(keep, each, jnp.float32(0))
            rows = each.reshape(ranks, -1).sum(1)
            n = len(took)
            by = {
                "tokens": each_rank.sum(),
                "micro-batches": n * valid(counts[m]),
                "ranks": ranks * each_rank,
                "both": ranks * n * of_rank(counts[m], ranks),
                "nothing": 1,
                "positions": n * y.size,
            }
            found += (rows / by[divisor]).sum()
        return jnp.float32(factor) * found

    return jax.jit(jax.value_and_grad(loss))


def bf16(head: Any, hidden: Any) -> Any:
    return raw(head, hidden).astype(jnp.bfloat16)


def operands(head: Any, hidden: Any) -> Any:
    return hidden.astype(jnp.bfloat16) @ head.weight.astype(jnp.bfloat16).T


def options(softcap: Any = None, scale: float = 1.0, temperature: float = 1.0) -> Any:
    def logits(head: Any, hidden: Any) -> Any:
        z = scale * raw(head, hidden)
        z = z if softcap is None else softcap * jnp.tanh(z / softcap)
        return z / temperature

    return logits


def unbiased(head: Any, hidden: Any) -> Any:
    return hidden @ head.weight.T


def last_of_rows(batch: Any) -> Any:
    y = batch["targets"]
    rest = jnp.cumsum((y != IGNORE)[:, ::-1], 1)[:, ::-1]
    return jnp.where(rest > 1, y, IGNORE)


def multi_steps(head: Any, micro_batches: Any) -> Any:
    """optax's own accumulation, of micro-batches' mean losses."""
    optax = pytest.importorskip("optax")

    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=len(micro_batches))
    state, loss = optimizer.init(head), 0.0
    for b in micro_batches:
        value, grads = step()(head, [b])
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            updates, state = optimizer.update(grads, state, head)
        loss += value / len(micro_batches)
    return loss, jax.tree.map(jnp.negative, updates)


PLANTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("labels not shifted", step(labels=lambda b: b["labels"]), {}),
    ("labels shifted twice", step(labels=lambda b: shifted(b["targets"])), {}),
    ("labels across documents", step(labels=lambda b: shifted(b["labels"])), {}),
    (
        "masked tokens counted",
        step(labels=lambda b: shifted(b["input_ids"], b["segment_ids"])),
        {"bias": True},
    ),
    ("last token dropped", step(labels=last_of_rows), {}),
    ("last chunk dropped", step(chunk=8), {}),
    ("one micro-batch alone", step(only=0), {}),
    ("mean of the means of micro-batches", step(divisor="micro-batches"), {}),
    ("mean of the means of micro-batches", multi_steps, {"bias": True}),
    ("off by the accumulation steps", step(factor=1 / 3), {}),
    ("sum and not mean", step(divisor="nothing"), {}),
    ("divided by all positions", step(divisor="positions"), {}),
    ("tokens counted before the shift", step(counted=lambda b: b["labels"]), {}),
    ("softcap not applied", step(), {"softcap": 30.0}),
    ("logit scale not applied", step(), {"logit_scale": 0.25}),
    ("temperature not applied", step(), {"temperature": 0.7}),
    ("bias not applied", step(logits=unbiased), {"bias": True}),
    ("label smoothing not applied", step(), {"label_smoothing": 0.1}),
    ("z-loss not applied", step(), {"z_loss": 1e-3}),
    ("logits rounded to 16 bits", step(logits=bf16), {}),
    ("logits rounded to 16 bits", step(logits=operands), {}),
    (
        "labels across documents and mean of the means of micro-batches",
        step(labels=lambda b: shifted(b["labels"]), divisor="micro-batches"),
        {},
    ),
]


# --- right ones -----------------------------------------------------------------------------------


def stacked(micro_batches: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *micro_batches)


@jax.jit
def scanned(head: Any, micro_batches: Any) -> Any:
    """Sums and counts in the carry of a scan, divided at the end."""

    def part(head: Any, batch: Any) -> Any:
        return nll(raw(head, batch["hidden"]), batch["targets"]).sum()

    def body(carry: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(part)(head, batch)
        return jax.tree.map(jnp.add, carry, (loss, grads, valid(batch["targets"]))), None

    start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, head), jnp.float32(0))
    (loss, grads, count), _ = jax.lax.scan(body, start, stacked(micro_batches))
    return loss / count, jax.tree.map(lambda g: g / count, grads)


def chunked(head: Any, micro_batches: Any, **how: Any) -> Any:
    def loss(head: Any, hidden: Any) -> Any:
        y = jnp.concatenate([b["targets"] for b in micro_batches])
        return chunked_nll(hidden, head.weight, y, bias=head.bias, **how).loss

    hidden = jnp.concatenate([b["hidden"] for b in micro_batches])
    value, (d_head, d_hidden) = jax.value_and_grad(loss, argnums=(0, 1))(head, hidden)
    return value, d_head, jnp.split(d_hidden, len(micro_batches))


@jax.jit
def accumulated(head: Any, micro_batches: Any) -> Any:
    def sums(head: Any, batch: Any) -> Any:
        return chunked_nll(
            batch["hidden"], head.weight, batch["targets"], bias=head.bias, reduction="sum"
        )

    stats, grads = accumulate_grads(sums, head, stacked(micro_batches))
    return stats.loss, grads


def by_optax(head: Any, micro_batches: Any) -> Any:
    """Labels that are all classes, and the mask."""
    optax = pytest.importorskip("optax")

    def loss(head: Any) -> Any:
        found = jnp.float32(0)
        for b in micro_batches:
            y, mask = jnp.maximum(b["targets"], 0), b["loss_mask"]
            each = optax.softmax_cross_entropy_with_integer_labels(raw(head, b["hidden"]), y)
            found += (each * mask.astype(jnp.float32)).sum()
        return found / sum(valid(b["targets"]) for b in micro_batches)

    return jax.value_and_grad(loss)(head)


def by_nnx(head: Any, micro_batches: Any) -> Any:
    """A Flax module: its kernel is [H, V]."""
    nnx = pytest.importorskip("flax.nnx")

    vocab, width = head.weight.shape
    model = nnx.Linear(width, vocab, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(head.weight.T)
    model.bias = nnx.Param(head.bias)

    def loss(model: Any) -> Any:
        parts = [nll(model(b["hidden"]), b["targets"]).sum() for b in micro_batches]
        return sum(parts) / sum(valid(b["targets"]) for b in micro_batches)

    value, grads = nnx.value_and_grad(loss)(model)
    return value, {"kernel": grads.kernel[...], "bias": grads.bias[...]}


def weight_alone(head: Any, micro_batches: Any) -> Any:
    loss, grads = step()(head, micro_batches)
    return loss, np.asarray(grads.weight)


def whole_tree(head: Any, micro_batches: Any) -> Any:
    """As Linen has it: all parameters, the head's somewhere in them."""
    loss, grads = step()(head, micro_batches)
    own = {"kernel": grads.weight.T, "bias": grads.bias}
    other = {"kernel": jnp.ones((3, 5)), "bias": jnp.ones(5)}
    return loss, {"params": {"Dense_0": other, "norm": {"scale": jnp.ones(3)}, "lm_head": own}}


RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "one gradient": (step(), {"bias": True}),
    "shifted over documents": (step(labels=lambda b: shifted(b["labels"], b["segment_ids"])), {}),
    "one document a row": (step(labels=lambda b: shifted(b["labels"])), {"documents": False}),
    "a scan": (scanned, {"bias": True}),
    "chunked_nll": (chunked, {"bias": True}),
    "label smoothing and z-loss": (
        partial(chunked, label_smoothing=0.1, z_loss=1e-3),
        {"label_smoothing": 0.1, "z_loss": 1e-3},
    ),
    "accumulate_grads": (accumulated, {}),
    "optax": (by_optax, {}),
    "nnx": (by_nnx, {"bias": True}),
    "the weight's gradient alone": (weight_alone, {}),
    "Linen's tree": (whole_tree, {"bias": True}),
    "a softcap": (step(logits=options(softcap=30.0)), {"softcap": 30.0}),
    "a scale and a temperature": (
        step(logits=options(scale=0.25, temperature=0.7)),
        {"logit_scale": 0.25, "temperature": 0.7},
    ),
}


# --- functions ------------------------------------------------------------------------------------


def cross_entropy(hidden: Any, weight: Any, labels: Any) -> Any:
    return nll(hidden @ weight.T, labels).sum() / valid(labels)


@jax.custom_vjp
def no_upstream(hidden: Any, weight: Any, labels: Any) -> Any:
    return cross_entropy(hidden, weight, labels)


def _forward(hidden: Any, weight: Any, labels: Any) -> Any:
    loss, grads = jax.value_and_grad(cross_entropy, (0, 1))(hidden, weight, labels)
    return loss, grads


def _backward(grads: Any, upstream: Any) -> Any:
    return (*grads, None)


no_upstream.defvjp(_forward, _backward)


def by_softmax(entropy: Any = "whole", temperature: float = 1.0) -> Any:
    def logprobs(hidden: Any, weight: Any, labels: Any) -> Any:
        log_p = jax.nn.log_softmax(hidden @ weight.T / temperature)
        mine = jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]
        if not entropy:
            return mine
        found = -(jnp.exp(log_p) * log_p).sum(-1)
        return mine, found if entropy == "whole" else jax.lax.stop_gradient(found)

    return logprobs


FUNCTIONS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("", cross_entropy, "loss", {}),
    (
        "",
        lambda hidden, weight, labels, bias: chunked_nll(hidden, weight, labels, bias=bias),
        "loss",
        {"bias": True},
    ),
    ("", by_softmax(), "logprobs", {}),
    ("", by_softmax(entropy=None), "logprobs", {}),
    ("", lambda h, w, y: chunked_logprobs(h, w, y, entropy=True), "logprobs", {}),
    ("upstream gradient ignored", no_upstream, "loss", {}),
    ("sum and not mean", lambda h, w, y: nll(h @ w.T, y).sum(), "loss", {}),
    ("labels shifted twice", lambda h, w, y: cross_entropy(h[:-1], w, y[1:]), "loss", {}),
    (
        "logits rounded to 16 bits",
        lambda h, w, y: cross_entropy(h.astype(jnp.bfloat16), w.astype(jnp.bfloat16), y),
        "loss",
        {},
    ),
    ("temperature not applied", by_softmax(), "logprobs", {"temperature": 0.6}),
    ("entropy without its gradient", by_softmax(entropy="stopped"), "logprobs", {}),
]


# --- over devices ---------------------------------------------------------------------------------


def mesh() -> Any:
    return jax.make_mesh((WORLD,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def spread(reduce: str = "sum", own: bool = False, factor: float = 1.0) -> Any:
    """Rows over devices in `shard_map`, gradients reduced by hand."""

    def run(head: Any, micro_batches: Any) -> Any:
        def device(head: Any, batches: Any) -> Any:
            def loss(head: Any) -> Any:
                return sum(nll(raw(head, b["hidden"]), b["targets"]).sum() for b in batches)

            count = sum(valid(b["targets"]) for b in batches)
            count = count if own else jax.lax.psum(count, "data")
            value, grads = jax.tree.map(
                lambda x: jnp.float32(factor) * x / count, jax.value_and_grad(loss)(head)
            )
            by = {"sum": jax.lax.psum, "mean": jax.lax.pmean}.get(reduce)
            if by is not None:
                grads = jax.tree.map(lambda g: by(g, "data"), grads)
            return jax.lax.psum(value, "data"), grads

        return jax.jit(
            jax.shard_map(
                device, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
            )
        )(head, micro_batches)

    return run


def placed(head: Any, micro_batches: Any) -> Any:
    """Global arrays, as `jit` splits them."""
    sharding = NamedSharding(mesh(), P("data"))
    head = jax.device_put(head, NamedSharding(mesh(), P()))
    return step(ranks=WORLD)(head, jax.device_put(micro_batches, sharding))


ON_RANKS: list[tuple[str, Any, dict[str, Any]]] = [
    ("", spread(), {"bias": True}),
    ("", placed, {}),
    ("", accumulated, {}),
    ("mean of the means of ranks", spread(own=True, reduce="mean"), {}),
    ("mean of the means of micro-batches and ranks", step(divisor="both", ranks=WORLD), {}),
    ("mean of the means of micro-batches", step(divisor="micro-batches"), {}),
    ("not reduced over ranks", spread(reduce=""), {}),
    ("not reduced over ranks", spread(reduce="", own=True), {"bias": True}),
    ("off by the number of ranks", spread(reduce="mean"), {}),
    ("reduced twice over ranks", spread(factor=2.0), {}),
    ("off by ranks and accumulation steps", spread(reduce="mean", factor=1 / 3), {}),
]
