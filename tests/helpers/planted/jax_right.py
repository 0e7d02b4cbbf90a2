"""Right steps of JAX that are written in unusual ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.planted import Table
from helpers.planted.jax_common import IGNORE, joined, logits, nll, stacked

TABLE = Table()


def count(micro_batches: Any) -> Any:
    return sum((b["targets"] != IGNORE).sum() for b in micro_batches)


@TABLE.right("a scan whose carry is sums and counts, divided afterwards", bias=True)
def scanned_sums(head: Any, micro_batches: Any) -> Any:
    def body(carry: Any, b: Any) -> Any:
        loss = lambda h: nll(logits(h, b["hidden"]), b["targets"]).sum()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(head)
        return jax.tree.map(jnp.add, carry, (value, grads, (b["targets"] != IGNORE).sum())), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, head), jnp.zeros((), jnp.int32)
    (value, grads, n), _ = jax.lax.scan(body, start, stacked(micro_batches))
    return value / n, jax.tree.map(lambda g: g / n, grads)


@TABLE.right("a loss that scans within one gradient, with its body rematerialized")
def gradient_of_a_scan(head: Any, micro_batches: Any) -> Any:
    @jax.jit
    def loss(head: Any, batches: Any) -> Any:
        @jax.checkpoint
        def part(b: Any) -> Any:
            return nll(logits(head, b["hidden"]), b["targets"]).sum()

        total, _ = jax.lax.scan(lambda t, b: (t + part(b), None), jnp.zeros(()), batches)
        return total / (batches["targets"] != IGNORE).sum()

    return jax.value_and_grad(loss)(head, stacked(micro_batches))


@TABLE.right("a whole tree of Linen's parameters and gradients", bias=True)
def linen_tree(head: Any, micro_batches: Any) -> Any:
    model = nn.Dense(head.weight.shape[0], name="lm_head")
    params = {"params": {"kernel": head.weight.T, "bias": head.bias}}

    def loss(params: Any, b: Any) -> Any:
        each = nll(model.apply(params, b["hidden"]), b["targets"])
        return each.sum() / (b["targets"] != IGNORE).sum()

    value, grads = jax.value_and_grad(loss)(params, joined(micro_batches))
    return value, grads["params"]


@TABLE.right("the whole tree of a model, the head under its name", bias=True)
def linen_model_tree(head: Any, micro_batches: Any) -> Any:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, hidden: Any) -> Any:
            return nn.Dense(head.weight.shape[0], name="lm_head")(hidden)

    params = {"params": {"lm_head": {"kernel": head.weight.T, "bias": head.bias}}}

    def loss(params: Any, b: Any) -> Any:
        each = nll(Model().apply(params, b["hidden"]), b["targets"])
        return each.sum() / (b["targets"] != IGNORE).sum()

    return jax.value_and_grad(loss)(params, joined(micro_batches))


@TABLE.right("an NNX module, split and merged")
def nnx_split(head: Any, micro_batches: Any) -> Any:
    vocab, width = head.weight.shape
    model = nnx.Linear(width, vocab, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(head.weight.T)
    graph, state = nnx.split(model)

    def loss(state: Any, b: Any) -> Any:
        each = nll(nnx.merge(graph, state)(b["hidden"]), b["targets"])
        return each.sum() / (b["targets"] != IGNORE).sum()

    value, grads = jax.value_and_grad(loss)(state, joined(micro_batches))
    return value, np.asarray(grads["kernel"][...])


@TABLE.right("what is logged beside the loss, by has_aux")
def with_auxiliary(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        mask = b["targets"] != IGNORE
        value = nll(logits(head, b["hidden"]), b["targets"]).sum() / mask.sum()
        return value, {"tokens": mask.sum(), "perplexity": jnp.exp(value)}

    return jax.value_and_grad(loss, has_aux=True)(head, joined(micro_batches))


@TABLE.right("gradients of single tokens by vmap, added up", bias=True)
def per_token_gradients(head: Any, micro_batches: Any) -> Any:
    b = joined(micro_batches)
    x, y = b["hidden"].reshape(-1, b["hidden"].shape[-1]), b["targets"].reshape(-1)
    each = jax.vmap(jax.value_and_grad(lambda h, x, y: nll(logits(h, x), y)), (None, 0, 0))
    values, grads = each(head, x, y)
    n = (y != IGNORE).sum()
    return values.sum() / n, jax.tree.map(lambda g: g.sum(0) / n, grads)


@TABLE.right("one-hot rows that are empty where there is no label")
def one_hot_sum(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z = logits(head, b["hidden"])
        each = optax.softmax_cross_entropy(z, jax.nn.one_hot(b["targets"], z.shape[-1]))
        return each.sum() / b["loss_mask"].sum()

    return jax.value_and_grad(loss)(head, joined(micro_batches))


@TABLE.right("optax.MultiSteps over sums that are scaled by their number and the global count")
def multi_steps_of_shares(head: Any, micro_batches: Any) -> Any:
    n, k = count(micro_batches), len(micro_batches)
    optimizer = optax.MultiSteps(optax.identity(), k)
    state, total = optimizer.init(head), 0.0
    for b in micro_batches:
        loss = lambda h, b=b: nll(logits(h, b["hidden"]), b["targets"]).sum() * k / n  # noqa: E731
        value, grads = jax.value_and_grad(loss)(head)
        updates, state = optimizer.update(grads, state, head)
        total += value / k
    return total, updates


@jax.custom_vjp
def fused(x: Any, w: Any, y: Any) -> Any:
    return nll(x @ w.T, y).sum()


def fused_forward(x: Any, w: Any, y: Any) -> Any:
    z = x @ w.T
    valid = (y != IGNORE)[:, None]
    dz = jnp.where(valid, jax.nn.softmax(z) - jax.nn.one_hot(y, z.shape[-1]), 0.0)
    return nll(z, y).sum(), (dz @ w, dz.T @ x)


fused.defvjp(fused_forward, lambda saved, g: (g * saved[0], g * saved[1], None))


@TABLE.right("a fused loss by custom_vjp, hidden states' gradients returned")
def by_custom_vjp(head: Any, micro_batches: Any) -> Any:
    b = joined(micro_batches)
    y = b["targets"].reshape(-1)

    def loss(head: Any, hidden: Any) -> Any:
        x = hidden.reshape(-1, hidden.shape[-1])
        return fused(x, head.weight, y) / (y != IGNORE).sum()

    value, (d_head, d_hidden) = jax.value_and_grad(loss, (0, 1))(head, b["hidden"])
    return value, d_head, jnp.split(d_hidden, len(micro_batches))


@TABLE.right("z-loss and smoothing by optax", z_loss=1e-3, label_smoothing=0.1)
def smoothed_by_optax(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z = logits(head, b["hidden"])
        q = optax.smooth_labels(jax.nn.one_hot(jnp.maximum(b["targets"], 0), z.shape[-1]), 0.1)
        each = optax.softmax_cross_entropy(z, q) + 1e-3 * jax.nn.logsumexp(z, axis=-1) ** 2
        return jnp.mean(each, where=b["targets"] != IGNORE)

    return jax.value_and_grad(loss)(head, joined(micro_batches))


@TABLE.right("logits far above 100", logit_scale=20.0)
def large_logits(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        return nll(20.0 * logits(head, b["hidden"]), b["targets"]).sum() / b["loss_mask"].sum()

    return jax.value_and_grad(loss)(head, joined(micro_batches))


# --- two devices ----------------------------------------------------------------------------------


def mesh() -> Any:
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def total_loss(head: Any, b: Any) -> Any:
    return nll(logits(head, b["hidden"]), b["targets"]).sum()


def halves(micro_batches: Any) -> Any:
    """[2, rows, ...] of each device, of all micro-batches."""
    split = lambda x: x.reshape(2, -1, *x.shape[1:])  # noqa: E731
    return jax.tree.map(lambda *x: jnp.concatenate([split(part) for part in x], 1), *micro_batches)


@TABLE.right("pmap, with sums and counts by psum", ranks=2)
def mapped(head: Any, micro_batches: Any) -> Any:
    @partial(jax.pmap, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:2])
    def device(head: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(total_loss)(head, b)
        n = (b["targets"] != IGNORE).sum()
        value, grads, n = jax.lax.psum((value, grads, n), "data")
        return value / n, jax.tree.map(lambda g: g / n, grads)

    return jax.tree.map(lambda x: x[0], device(head, halves(micro_batches)))


@TABLE.right("shard_map, with pmean of shares times the devices", ranks=2)
def shares_by_pmean(head: Any, micro_batches: Any) -> Any:
    def device(head: Any, b: Any) -> Any:
        b = jax.tree.map(lambda x: x[0], b)
        n = jax.lax.psum((b["targets"] != IGNORE).sum(), "data")
        loss = lambda h: total_loss(h, b) * 2 / n  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.pmean(x, "data"), jax.value_and_grad(loss)(head))

    return jax.jit(
        jax.shard_map(
            device, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
    )(head, halves(micro_batches))


@TABLE.right("jit over arrays that are placed, with a head over classes", ranks=2)
def placed_by_classes(head: Any, micro_batches: Any) -> Any:
    b = jax.device_put(joined(micro_batches), NamedSharding(mesh(), P("data")))
    loss = lambda h, b: total_loss(h, b) / (b["targets"] != IGNORE).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss), out_shardings=NamedSharding(mesh(), P()))(
        jax.device_put(head, NamedSharding(mesh(), P())), b
    )
