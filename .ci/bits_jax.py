"""The calls of bits.py in JAX, over four devices of the CPU: `python .ci/bits_jax.py jax`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_allow_excess_precision=false",
        "--xla_force_host_platform_device_count=4",
    ]
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib import jax as ours

N, V, H, RANK = 40, 132, 24, 3
OPTIONS = {"softcap": 7.0, "logit_scale": 1.3, "temperature": 0.8}
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-3, **OPTIONS}
OUTPUTS = ("logprobs", "entropy", "lse", "correct", "predicted")
FEW = {"max_chunk_bytes": 8 * V * 4}
AUDIT = {"compute_dtype": "float64"}
SHAPES = {"hidden": (N, H), "weight": (V, H), "bias": (V,), "a": (RANK, H), "b": (V, RANK)}

Leaves = dict[str, Any]


def drawn(*names: str, dtype: str = "float32") -> Leaves:
    arrays = {}
    for name in names:
        rng = np.random.default_rng([*SHAPES].index(name))
        arrays[name] = jnp.asarray(rng.standard_normal(SHAPES[name]), dtype)
    return arrays


def labels_of() -> Any:
    labels = np.random.default_rng(5).integers(V, size=N)
    labels[::7] = -100
    return jnp.asarray(labels, jnp.int32)


def hashed(x: Any) -> str:
    x = np.asarray(jax.device_get(x))
    return hashlib.sha256(f"{x.dtype} {x.shape}".encode() + x.tobytes()).hexdigest()[:16]


def scalar_of(out: Any) -> Any:
    if hasattr(out, "loss"):
        return 0.7 * out.loss
    used = [x for x in (out.logprobs, out.entropy) if x is not None]
    weights = [np.random.default_rng(9 + k).standard_normal(N) for k in range(len(used))]
    pairs = zip(used, weights, strict=True)
    return sum((x * jax.lax.slice(jnp.asarray(w, x.dtype), (0,), x.shape)).sum() for x, w in pairs)


def measured(
    call: Callable[..., Any], leaves: Leaves, *, jit: bool = True, wide: bool = False
) -> dict[str, Any]:
    """Of one call: bits of what it returns and of the leaves' gradients, and its collectives."""

    def step(leaves: Leaves) -> Any:
        out = call(**leaves)
        return scalar_of(out), out

    step = jax.value_and_grad(step, has_aux=True)
    with jax.enable_x64(wide), ours.count_collectives() as count:
        (_, out), gradients = (jax.jit(step) if jit else step)(leaves)
        jax.block_until_ready(gradients)
    bits = {name: hashed(x) for name, x in out._asdict().items() if x is not None}
    bits |= {f"d {name}": hashed(x) for name, x in gradients.items()}
    return {"bits": bits, "collectives": sent(count)}


def sent(count: ours.CollectiveCount) -> dict[str, list[int]]:
    """Of each kind of collective: how many, and their bytes."""
    return {kind: [n, count.bytes(kind)] for kind, n in count.counts().items()}


def plain(function: str, *names: str, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    leaves = drawn("hidden", "weight", *names, dtype=dtype)
    if options.get("weight_layout") == "HV":
        leaves["weight"] = leaves["weight"].T
    jit = options.pop("jit", True)

    def call(hidden: Any, weight: Any, **more: Any) -> Any:
        return getattr(ours, function)(hidden, weight, labels_of(), **more, **options)

    return measured(call, leaves, jit=jit, wide="compute_dtype" in options)


def given(dtype: str = "float32", **options: Any) -> dict[str, Any]:
    def call(logits: Any) -> Any:
        return ours.vocab_parallel_logprobs(logits, labels_of(), **options)

    logits = np.random.default_rng(4).standard_normal((N, V)) * 3
    return measured(call, {"logits": jnp.asarray(logits, dtype)})


def low_rank(function: str, **options: Any) -> dict[str, Any]:
    frozen = drawn("weight")["weight"]

    def call(hidden: Any, a: Any, b: Any) -> Any:
        head = ours.LowRankHead(frozen, a, b, 0.5)
        return getattr(ours, function)(hidden, head, labels_of(), **options)

    return measured(call, drawn("hidden", "a", "b"))


def mesh_of(kind: Any, **axes: int) -> Any:
    count = int(np.prod([*axes.values()]))
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices)


def in_shard_map(function: str, *, tokens: bool = False, **options: Any) -> dict[str, Any]:
    """A vocabulary over four devices, and with `tokens` the tokens too."""
    mesh = mesh_of(AxisType.Auto, tp=4)
    leaves = drawn("hidden", "weight", "bias")
    rows = P("tp") if tokens else P()
    if tokens:
        options["tokens_parallel"] = "tp"
    if tokens and function == "chunked_nll":
        options["denominator"] = float((labels_of() != -100).sum())
    specs = {"hidden": rows, "weight": P("tp"), "bias": P("tp")}

    def loss(leaves: Leaves, labels: Any) -> Any:
        out = getattr(ours, function)(
            leaves["hidden"],
            leaves["weight"],
            labels,
            bias=leaves["bias"],
            vocab_parallel="tp",
            **options,
        )
        value = out.loss if hasattr(out, "loss") else out.logprobs.sum()
        if tokens and not hasattr(out, "loss"):
            value = jax.lax.psum(value, "tp")
        return value, out.logprobs if hasattr(out, "logprobs") and out.logprobs is not None else 0.0

    per_token = function == "chunked_logprobs"

    def on_device(leaves: Leaves, labels: Any) -> Any:
        (value, logprobs), gradients = jax.value_and_grad(loss, has_aux=True)(leaves, labels)
        if tokens and not per_token:
            value = jax.lax.psum(value, "tp")
        return value, logprobs, gradients

    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, rows),
        out_specs=(P(), rows if per_token else P(), specs),
    )
    with ours.count_collectives() as count:
        value, logprobs, gradients = jax.jit(step)(leaves, labels_of())
        jax.block_until_ready(gradients)
    bits = {"loss": hashed(value), "logprobs": hashed(logprobs)}
    bits |= {f"d {name}": hashed(x) for name, x in gradients.items()}
    return {"bits": bits, "collectives": sent(count)}


def on_a_mesh(function: str, kind: Any = AxisType.Explicit, **options: Any) -> dict[str, Any]:
    """Whole arrays whose types say where they are: tokens and rows over the same axis."""
    mesh = mesh_of(kind, data=4)
    spread = partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    leaves = {name: spread(x) for name, x in drawn("hidden", "weight").items()}
    labels = spread(labels_of())
    with jax.set_mesh(mesh):

        def step(leaves: Leaves) -> Any:
            out = getattr(ours, function)(leaves["hidden"], leaves["weight"], labels, **options)
            return out.loss if hasattr(out, "loss") else out.logprobs.sum(), out

        with ours.count_collectives() as count:
            (value, out), gradients = jax.jit(jax.value_and_grad(step, has_aux=True))(leaves)
            jax.block_until_ready(gradients)
    bits = {"value": hashed(value)}
    bits |= {name: hashed(x) for name, x in out._asdict().items() if x is not None}
    bits |= {f"d {name}": hashed(x) for name, x in gradients.items()}
    return {"bits": bits, "collectives": sent(count)}


def accumulated() -> dict[str, Any]:
    """Two micro-batches in one scan."""

    def loss_and_count(leaves: Leaves, batch: Any) -> Any:
        out = ours.chunked_nll(batch[0], leaves["weight"], batch[1], reduction="sum")
        return out.loss, out.num_tokens

    batches = (
        drawn("hidden")["hidden"].reshape(2, N // 2, H),
        labels_of().reshape(2, N // 2),
    )
    window = jax.jit(
        lambda leaves, batches: ours.accumulate_grads(loss_and_count, leaves, batches)
    )(drawn("weight"), batches)
    leaves = jax.tree.leaves_with_path(window)
    return {"bits": {jax.tree_util.keystr(k): hashed(x) for k, x in leaves}, "collectives": {}}


def calls() -> dict[str, Any]:
    nll, logprobs, entropy = "chunked_nll", "chunked_logprobs", {"entropy": True}
    return {
        "nll": plain(nll, outputs=OUTPUTS),
        "nll, not in jit": plain(nll, jit=False, **LOSS),
        "nll, options": plain(nll, "bias", outputs=OUTPUTS, **LOSS),
        "nll, chunks": plain(nll, "bias", **FEW, **LOSS),
        "nll, bf16": plain(nll, dtype="bfloat16", outputs=OUTPUTS, **FEW),
        "nll, fp16, [H, V]": plain(nll, "bias", dtype="float16", weight_layout="HV", **LOSS),
        "nll, class weights": plain(nll, class_weights=jnp.arange(V, dtype="float32") / V, **LOSS),
        "nll, audit": plain(nll, "bias", **AUDIT, **FEW, **LOSS),
        "nll, LoRA": low_rank(nll, **LOSS),
        "logprobs": plain(logprobs, "bias", **entropy, **OPTIONS),
        "logprobs, chunks, bf16": plain(logprobs, dtype="bfloat16", **entropy, **FEW),
        "logprobs, audit": plain(logprobs, **entropy, **AUDIT, **FEW, **OPTIONS),
        "logprobs, LoRA": low_rank(logprobs, **entropy, **OPTIONS),
        "from logits": given(**entropy, temperature=0.8),
        "from logits, bf16": given("bfloat16"),
        "shards, nll": in_shard_map(nll, **LOSS),
        "shards, nll, chunks": in_shard_map(nll, **FEW),
        "shards, logprobs": in_shard_map(logprobs, **OPTIONS),
        "shards and tokens, nll": in_shard_map(nll, tokens=True, **FEW),
        "shards and tokens, logprobs": in_shard_map(logprobs, tokens=True),
        "mesh, nll": on_a_mesh(nll, **LOSS),
        "mesh, logprobs": on_a_mesh(logprobs, **entropy),
        "mesh, hidden, nll": on_a_mesh(nll, gather="hidden", **FEW),
        "mesh, hidden, logprobs": on_a_mesh(logprobs, gather="hidden"),
        "window": accumulated(),
    }


if __name__ == "__main__":
    print(json.dumps(calls()))
