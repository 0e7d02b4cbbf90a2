"""Wrong steps of JAX, on one device and, where the options say `ranks`, on two."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from helpers.planted import Table
from helpers.planted.jax_common import IGNORE, joined, logits, nll, stacked

TABLE = Table()


def mean(each: Any, y: Any) -> Any:
    return each.sum() / (y != IGNORE).sum()


def graded(head: Any, micro_batches: Any, loss: Any) -> Any:
    """`loss(head, batch)` of all rows at once, and its gradient."""
    return jax.value_and_grad(loss)(head, joined(micro_batches))


@TABLE.wrong(
    "-100 is an empty one-hot row, and the mean is over all positions",
    "position|mask|ignored|padd",
)
def one_hot_mean(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z = logits(head, b["hidden"])
        return optax.softmax_cross_entropy(z, jax.nn.one_hot(b["targets"], z.shape[-1])).mean()

    return graded(head, micro_batches, loss)


@TABLE.wrong("-100 is clipped to class 0 and trained", "mask|ignored|-100")
def clipped_labels(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        logp = jax.nn.log_softmax(logits(head, b["hidden"]))
        y = jnp.clip(b["targets"], 0)
        return -jnp.take_along_axis(logp, y[..., None], -1).mean()

    return graded(head, micro_batches, loss)


@TABLE.wrong(
    "smoothed one-hot rows of -100 are uniform, so ignored tokens count in the smoothing",
    "smoothing",
    label_smoothing=0.1,
)
def smoothed_empty_rows(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z = logits(head, b["hidden"])
        q = optax.smooth_labels(jax.nn.one_hot(b["targets"], z.shape[-1]), 0.1)
        return optax.softmax_cross_entropy(z, q).sum() / b["loss_mask"].sum()

    return graded(head, micro_batches, loss)


@TABLE.wrong("the attention mask is the loss mask: prompts are trained", "prompt|mask|ignored")
def attention_mask_for_the_loss(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z, y = logits(head, b["hidden"])[:, :-1], b["input_ids"][:, 1:]
        inside = b["segment_ids"][:, :-1] == b["segment_ids"][:, 1:]
        mask = b["attention_mask"][:, 1:] & inside
        each = optax.softmax_cross_entropy_with_integer_labels(z, y)
        return jnp.sum(each * mask) / mask.sum()

    return graded(head, micro_batches, loss)


@TABLE.wrong(
    "divided by the tokens of all segments, prompts too",
    "prompt|mask|ignored|attention|padd|position",
    source="AI-Hypercomputer/maxtext#366",
)
def over_unpadded_tokens(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        return nll(logits(head, b["hidden"]), b["targets"]).sum() / b["attention_mask"].sum()

    return graded(head, micro_batches, loss)


@TABLE.wrong(
    "labels rolled: the row's first is the label of its last",
    "last|first|row|roll|wrap|shift",
    documents=False,
)
def rolled(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        y = jnp.roll(b["labels"], -1, axis=1)
        return mean(nll(logits(head, b["hidden"]), y), y)

    return graded(head, micro_batches, loss)


@TABLE.wrong("targets of the loader are shifted in the model again", "shift|next")
def shifted_again(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        y = b["targets"][:, 1:]
        return mean(nll(logits(head, b["hidden"])[:, :-1], y), y)

    return graded(head, micro_batches, loss)


@TABLE.wrong("the row means by vmap, and their mean", "row|sequence")
def mean_of_row_means(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        row = lambda x, y: mean(nll(logits(head, x), y), y)  # noqa: E731
        return jax.vmap(row)(b["hidden"], b["targets"]).mean()

    return graded(head, micro_batches, loss)


@TABLE.wrong("optax.MultiSteps over the means of micro-batches", "micro-batch")
def multi_steps(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        return mean(nll(logits(head, b["hidden"]), b["targets"]), b["targets"])

    optimizer = optax.MultiSteps(optax.identity(), len(micro_batches))
    state, total = optimizer.init(head), 0.0
    for b in micro_batches:
        value, grads = jax.value_and_grad(loss)(head, b)
        updates, state = optimizer.update(grads, state, head)
        total += value / len(micro_batches)
    return total, updates


@TABLE.wrong("a scan over all but the last micro-batch", "last|micro-batch|third")
def scan_stops_early(head: Any, micro_batches: Any) -> Any:
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)

    def body(carry: Any, b: Any) -> Any:
        loss = lambda h: nll(logits(h, b["hidden"]), b["targets"]).sum() / count  # noqa: E731
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(head)), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, head)
    return jax.lax.scan(body, start, stacked(micro_batches[:-1]))[0]


@TABLE.wrong("the scan returns its last gradient, not their sum", "micro-batch|last")
def last_of_the_scan(head: Any, micro_batches: Any) -> Any:
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)

    def body(total: Any, b: Any) -> Any:
        loss = lambda h: nll(logits(h, b["hidden"]), b["targets"]).sum() / count  # noqa: E731
        value, grads = jax.value_and_grad(loss)(head)
        return total + value, grads

    total, grads = jax.lax.scan(body, jnp.zeros(()), stacked(micro_batches))
    return total, jax.tree.map(lambda g: g[-1], grads)


@TABLE.wrong(
    "the carry of accumulated gradients is bf16, as the parameters are",
    "16|bf16|round|accumul",
    source="mlnomadpy/flaxchat#6",
)
def bf16_carry(head: Any, micro_batches: Any) -> Any:
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)
    total, added = 0.0, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), head)
    for b in micro_batches:
        loss = lambda h, b=b: nll(logits(h, b["hidden"]), b["targets"]).sum() / count  # noqa: E731
        value, grads = jax.value_and_grad(loss)(head)
        added = jax.tree.map(lambda a, g: a + g.astype(jnp.bfloat16), added, grads)
        total += value
    return total, jax.tree.map(lambda g: g.astype(jnp.float32), added)


@TABLE.wrong("bf16 operands, as on a TPU without a word about precision", "16|bf16|round")
def default_precision(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        operands = b["hidden"].astype(jnp.bfloat16), head.weight.astype(jnp.bfloat16)
        z = jnp.einsum("blh,vh->blv", *operands, preferred_element_type=jnp.float32)
        return mean(nll(z, b["targets"]), b["targets"])

    return graded(head, micro_batches, loss)


@TABLE.wrong("stop_gradient around the log-sum-exp", "gradient|softmax|wrong")
def stopped_denominator(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z, y = logits(head, b["hidden"]), b["targets"]
        lse = jax.lax.stop_gradient(jax.nn.logsumexp(z, axis=-1))
        z_y = jnp.take_along_axis(z, jnp.maximum(y, 0)[..., None], -1)[..., 0]
        return mean(jnp.where(y == IGNORE, 0.0, lse - z_y), y)

    return graded(head, micro_batches, loss)


@TABLE.wrong("z-loss of all positions over the count of tokens", "z-loss", z_loss=1e-2)
def z_loss_of_padding(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z = logits(head, b["hidden"])
        each = nll(z, b["targets"]) + 1e-2 * jax.nn.logsumexp(z, axis=-1) ** 2
        return each.sum() / (b["targets"] != IGNORE).sum()

    return graded(head, micro_batches, loss)


@TABLE.wrong("a softcap with a straight-through derivative", "softcap", softcap=8.0)
def softcap_straight_through(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z = logits(head, b["hidden"])
        z = z + jax.lax.stop_gradient(8.0 * jnp.tanh(z / 8.0) - z)
        return mean(nll(z, b["targets"]), b["targets"])

    return graded(head, micro_batches, loss)


@TABLE.wrong("log of a probability that is 0 behind where: the gradient is NaN", "nan")
def nan_behind_where(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z, y = logits(head, b["hidden"]), b["targets"]
        p = (jax.nn.softmax(z) * jax.nn.one_hot(y, z.shape[-1])).sum(-1)
        return mean(jnp.where(y == IGNORE, 0.0, -jnp.log(p)), y)

    return graded(head, micro_batches, loss)


@TABLE.wrong("softmax without its maximum: exp overflows", "inf|nan", logit_scale=20.0)
def no_maximum(head: Any, micro_batches: Any) -> Any:
    def loss(head: Any, b: Any) -> Any:
        z, y = 20.0 * logits(head, b["hidden"]), b["targets"]
        lse = jnp.log(jnp.exp(z).sum(-1))
        z_y = jnp.take_along_axis(z, jnp.maximum(y, 0)[..., None], -1)[..., 0]
        return mean(jnp.where(y == IGNORE, 0.0, lse - z_y), y)

    return graded(head, micro_batches, loss)


@TABLE.wrong("the bias is a constant of a closure, and its gradient is 0", "bias", bias=True)
def bias_in_a_closure(head: Any, micro_batches: Any) -> Any:
    def loss(weight: Any) -> Any:
        b = joined(micro_batches)
        return mean(nll(b["hidden"] @ weight.T + head.bias, b["targets"]), b["targets"])

    value, grad = jax.value_and_grad(loss)(head.weight)
    return value, {"kernel": grad, "bias": jnp.zeros_like(head.bias)}


@TABLE.wrong("optax clips each micro-batch's gradient before they add up", "clip|micro-batch")
def clipped_in_the_chain(head: Any, micro_batches: Any) -> Any:
    count = sum((b["targets"] != IGNORE).sum() for b in micro_batches)
    clip, total, added = optax.clip_by_global_norm(0.2), 0.0, None
    for b in micro_batches:
        loss = lambda h, b=b: nll(logits(h, b["hidden"]), b["targets"]).sum() / count  # noqa: E731
        value, grads = jax.value_and_grad(loss)(head)
        grads, _ = clip.update(grads, clip.init(head))
        added = grads if added is None else jax.tree.map(jnp.add, added, grads)
        total += value
    return total, added


# --- two devices ----------------------------------------------------------------------------------


def on_two(device: Any) -> Any:
    """`device(head, rows of this device)`, as pmap has it: what it returns is one device's."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(
        jax.shard_map(device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    )


def total_loss(head: Any, b: Any) -> Any:
    return nll(logits(head, b["hidden"]), b["targets"]).sum()


def reduced(head: Any, micro_batches: Any, scale: Any, by: Any) -> Any:
    def device(head: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(total_loss)(head, b)
        value, grads = jax.tree.map(lambda x: x * scale(b["targets"] != IGNORE), (value, grads))
        return jax.lax.psum(value, "data") / 2, jax.tree.map(lambda g: by(g, "data"), grads)

    return on_two(device)(head, joined_rows(micro_batches))


def joined_rows(micro_batches: Any) -> Any:
    """Each device's rows stay its own: [rows of device 0, ..., rows of device 1]."""

    def join(*x: Any) -> Any:
        halves = [jnp.split(part, 2) for part in x]
        return jnp.concatenate([half[k] for k in (0, 1) for half in halves])

    return jax.tree.map(join, *micro_batches)


@TABLE.wrong(
    "pmean of each device's mean",
    "rank|device",
    source="huggingface/transformers#19494",
    ranks=2,
)
def pmean_of_means(head: Any, micro_batches: Any) -> Any:
    return reduced(head, micro_batches, lambda m: 1 / m.sum(), jax.lax.pmean)


@TABLE.wrong("psum of each device's mean", "rank|device|2", ranks=2)
def psum_of_means(head: Any, micro_batches: Any) -> Any:
    return reduced(head, micro_batches, lambda m: 1 / m.sum(), jax.lax.psum)


@TABLE.wrong("pmean of sums over the global count", "rank|device|2|0\\.5", ranks=2)
def pmean_of_sums(head: Any, micro_batches: Any) -> Any:
    return reduced(head, micro_batches, lambda m: 1 / jax.lax.psum(m.sum(), "data"), jax.lax.pmean)


@TABLE.wrong("no reduction: each device has its own gradient", "rank|device|reduc", ranks=2)
def not_reduced(head: Any, micro_batches: Any) -> Any:
    scale = lambda m: 2 / jax.lax.psum(m.sum(), "data")  # noqa: E731
    return reduced(head, micro_batches, scale, lambda g, axis: g)


@TABLE.wrong(
    "the gradient of a psum within shard_map, and a psum of it",
    "2|rank|device",
    source="jax-ml/jax#3970",
    ranks=2,
)
def gradient_of_a_psum(head: Any, micro_batches: Any) -> Any:
    def device(head: Any, b: Any) -> Any:
        count = jax.lax.psum((b["targets"] != IGNORE).sum(), "data")
        loss = lambda h: jax.lax.psum(total_loss(h, b), "data") / count  # noqa: E731
        value, grads = jax.value_and_grad(loss)(head)
        return value, jax.tree.map(partial(jax.lax.psum, axis_name="data"), grads)

    return on_two(device)(head, joined_rows(micro_batches))


@TABLE.wrong("device 0's count of tokens on both", "rank|device|count|token|factor", ranks=2)
def count_of_device_0(head: Any, micro_batches: Any) -> Any:
    first = lambda m: jax.lax.all_gather(m.sum(), "data")[0]  # noqa: E731
    return reduced(head, micro_batches, lambda m: 1 / first(m), jax.lax.pmean)
