"""The calls of bits.py in JAX, of every public function with each of its labels and teachers, on
one device, over four shards and along routes.

    python .ci/bits_jax.py jaxprs    what JAX is to compute: exact, and no program is compiled
    python .ci/bits_jax.py jax       what it computes, and its collectives

Names of functions are left out of a jaxpr's text, and so are those of what has no value: they may
be renamed. Where two jaxprs differ that compute the same, bits decide.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_allow_excess_precision=false",
        "--xla_force_host_platform_device_count=4",
        # LLVM's passes take half of the time, and both states go without.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib import jax as ours

N, V, H, K, WIDTH, RANK = 37, 131, 22, 5, 14, 3
PADDED = 132  # rows over four devices
ROWS = P("tp")
OPTIONS = {"softcap": 7.0, "logit_scale": 1.3, "temperature": 0.8}
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-3, **OPTIONS}
OUTPUTS = ("logprobs", "entropy", "lse", "correct", "predicted")
FEW = {"max_chunk_bytes": 8 * V * 4}
KINDS = ({"kind": "forward_kl"}, {"kind": "reverse_kl"}, {"kind": "jsd", "beta": 0.3})
# Of a jaxpr's text: names of functions, and addresses.
NAMES = re.compile(r"\bname=\S+|0x[0-9a-f]+|<function [^>]*>")
Call = Callable[[Any, Any, Any], Any]  # of hidden states, head, and further arrays


def hashed(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def traced(function: Callable[..., Any], *args: Any, wide: bool = False) -> dict[str, Any]:
    """What JAX is to compute."""
    with jax.enable_x64(wide):
        closed = jax.make_jaxpr(function)(*args)
    text = NAMES.sub("", str(closed.jaxpr))
    constants = [x for x in jax.tree.leaves(closed.consts) if hasattr(x, "dtype")]
    bits = {"jaxpr": hashed(text.encode()), "constants": hashed(*map(bits_of, constants))}
    return {"bits": bits, "collectives": {}}


def computed(function: Callable[..., Any], *args: Any, wide: bool = False) -> dict[str, Any]:
    """What it computes, and what it sends: of each kind how many, and their bytes."""
    with jax.enable_x64(wide), ours.count_collectives() as count:
        out = jax.block_until_ready(jax.jit(function)(*args))
    bits = {jax.tree_util.keystr(k): hashed(bits_of(x)) for k, x in jax.tree.leaves_with_path(out)}
    sent = {kind: [n, count.bytes(kind)] for kind, n in count.counts().items()}
    return {"bits": bits, "collectives": sent}


def bits_of(x: Any) -> bytes:
    x = np.asarray(jax.device_get(x))
    return f"{x.dtype}{x.shape}".encode() + x.tobytes()


# Of programs that differ in numbers alone one is compiled: each takes seconds.
HOW, DTYPES = traced, ("float32", "bfloat16")
if sys.argv[1:] == ["jax"]:
    HOW, DTYPES, KINDS = computed, DTYPES[:1], KINDS[2:]


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    ids = rng.integers(0, V, (N, K)).astype(np.int32)
    labels = rng.integers(0, V, N).astype(np.int32)
    labels[::7] = -100
    dense = np.abs(normal(N, PADDED))
    return {
        "hidden": normal(N, H),
        "weight": normal(PADDED, H),
        "logits": normal(N, PADDED),
        "labels": labels,
        "ids": ids,
        "kept": np.concatenate([np.maximum(labels, 0)[:, None], ids], 1),
        "few": dense[:, :K] / dense[:, :K].sum(1, keepdims=True),
        "dense": dense / dense.sum(1, keepdims=True),
        "teacher_hidden": normal(N, WIDTH),
        "teacher_weight": normal(PADDED, WIDTH),
        "teacher_logits": normal(N, PADDED),
        "stored": np.log(0.1 + 0.0 * normal(N, K)),
    }


def divergence(teacher: str, **options: Any) -> Call:
    def call(x: Any, w: Any, a: Any, **how: Any) -> Any:
        of = {
            "head": lambda: ours.TeacherHead(
                a["teacher_hidden"], a["teacher_weight"], None, 1.0, None
            ),
            "logits": lambda: ours.TeacherLogits(a["teacher_logits"]),
            "top k": lambda: ours.TeacherTopK(a["ids"], a["stored"], temperature=0.8),
        }
        more = options | how
        if teacher == "top k" and "temperature" not in more:
            more["temperature"] = 0.8
        return ours.chunked_divergence(x, w, of[teacher](), **more)

    return call


def nll(labels: str, *names: str, **options: Any) -> Call:
    def call(x: Any, w: Any, a: Any, **how: Any) -> Any:
        how = options | how | {name: a[name] for name in names}
        y = ours.SoftLabels(a["ids"], a["few"]) if labels == "few" else a[labels]
        return ours.chunked_nll(x, w, y, **how)

    return call


def logprobs(*names: str, top_k: int = 0) -> Call:
    def call(x: Any, w: Any, a: Any, **how: Any) -> Any:
        how |= {name: a[name] for name in names}
        return ours.chunked_logprobs(x, w, a["labels"], entropy=True, top_k=top_k, **how)

    return call


def low_rank(call: Call) -> Call:
    """Of a head that is frozen."""

    def with_head(x: Any, b: Any, a: Any, **how: Any) -> Any:
        return call(x, ours.LowRankHead(a["weight"], a["low_in"], b, 0.5), a, **how)

    return with_head


def given(labels: str, *names: str, top_k: int = 0) -> Call:
    def call(z: Any, _: Any, a: Any, **how: Any) -> Any:
        y = ours.SoftLabels(a["ids"], a["few"]) if labels == "few" else a[labels]
        how |= {name: a[name] for name in names} | ({"top_k": top_k} if top_k else {})
        return ours.vocab_parallel_logprobs(z, y, entropy=True, **how)

    return call


def given_divergence(**options: Any) -> Call:
    def call(z: Any, _: Any, a: Any, **how: Any) -> Any:
        teacher = ours.TeacherLogits(a["teacher_logits"])
        return ours.vocab_parallel_divergence(z, teacher, **options, **how)

    return call


OF_HEAD: dict[str, Call] = {
    **{f"nll of {labels}": nll(labels) for labels in ("labels", "dense", "few")},
    "logprobs": logprobs(),
    "ids and top_k": logprobs("ids", top_k=3),
    "kept": logprobs("kept"),
    **{
        f"{kind['kind']} of {teacher}": divergence(teacher, **kind)
        for kind, teacher in itertools.product(KINDS, ("head", "logits", "top k"))
    },
}
OF_LOGITS: dict[str, Call] = {
    **{f"logits, {labels}": given(labels) for labels in ("labels", "dense", "few")},
    "logits, ids and top_k": given("labels", "ids", top_k=3),
    "logits, kept": given("labels", "kept"),
    **{f"logits, {kind['kind']}": given_divergence(**kind) for kind in KINDS},
}
ALONE: dict[str, Call] = {
    "every option": nll("labels", "bias", outputs=OUTPUTS, **LOSS),
    "every option, class weights": nll("labels", class_weights=np.arange(V) / 64, **LOSS),
    "every option, [H, V]": lambda x, w, a, **how: nll("labels", weight_layout="HV", **LOSS)(
        x, w.T, a, **how
    ),
    "nll, LoRA": low_rank(nll("labels")),
    "logprobs, LoRA": low_rank(logprobs()),
}
# What has logits or probabilities of all classes, which stay with their tokens.
STAY = ("nll of dense", *(f"{kind['kind']} of logits" for kind in KINDS))


def total(out: Any) -> Any:
    if hasattr(out, "loss"):
        return out.loss.sum()
    values = (out.logprobs, out.entropy, out.ids_logprobs, out.top_logprobs)
    return sum(jnp.where(jnp.isfinite(x), x, 0).sum() for x in values if x is not None)


def sums(name: str) -> dict[str, Any]:
    of_loss = name.startswith("nll") or (" of " in name and not name.startswith("logits"))
    return {"reduction": "sum"} if of_loss else {}


def gradient(call: Call, how: dict[str, Any], over: str = "") -> Callable[..., Any]:
    """Value, results and gradients of one device, value and gradients of several."""

    def loss(x: Any, w: Any, a: Any) -> Any:
        out = call(x, w, a, **how)
        value = total(out)
        if over:
            return jax.lax.psum(value, over), None
        return value, None if "vocab_parallel" in how else out

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def alone() -> dict[str, Any]:
    """On one device, in each dtype."""
    a, found = arrays(), {}
    whole = {k: x[:, :V] if k in ("dense", "logits", "teacher_logits") else x for k, x in a.items()}
    whole |= {name: a[name][:V] for name in ("weight", "teacher_weight")}
    of_teacher = whole["teacher_weight"]  # has numbers for further arrays
    whole |= {"bias": of_teacher[:, 0], "low_in": whole["hidden"][:RANK]}
    whole["low_out"] = of_teacher[:, :RANK]
    for (name, call), dtype in itertools.product((OF_HEAD | ALONE | OF_LOGITS).items(), DTYPES):
        leaf = "logits" if name in OF_LOGITS else "hidden"
        cast = {k: x.astype(jnp.dtype(dtype)) for k, x in whole.items() if x.dtype == np.float32}
        cast["stored"] = whole["stored"]
        head = cast["low_out" if name.endswith("LoRA") else "weight"]
        args = (cast[leaf], head, whole | cast)
        options = {k: x for k, x in OPTIONS.items() if leaf == "hidden" or k == "temperature"}
        variants = {", options": options | FEW} | ({"": {}} if HOW is traced else {})
        for text, how in variants.items():
            key = f"{name}, {dtype}{text}"
            found[key] = HOW(gradient(call, how), *args)
    for name, call in OF_HEAD.items():
        args = (whole["hidden"], whole["weight"], whole)
        found[f"{name}, audit"] = HOW(
            gradient(call, {"compute_dtype": "float64"}), *args, wide=True
        )
    return found


def over_shards() -> dict[str, Any]:
    """In `shard_map`: rows over four devices, tokens whole or with them."""
    found, mesh = {}, jax.make_mesh((4,), ("tp",), (AxisType.Auto,))
    a = arrays()
    a = {k: np.concatenate([x, x[:3]]) if len(x) == N else x for k, x in a.items()}
    for name, call in (OF_HEAD | OF_LOGITS).items():
        for tokens in (False, True):
            if tokens and (name in STAY or name in OF_LOGITS):
                continue
            of_tokens = ROWS if tokens else P()
            specs = {k: P() if k.endswith("weight") else of_tokens for k in a}
            specs |= {"weight": ROWS, "teacher_weight": ROWS}
            specs |= dict.fromkeys(("logits", "dense", "teacher_logits"), P(None, "tp"))
            how = {"vocab_parallel": ours.PaddedVocab("tp", V), **sums(name)}
            how |= {"tokens_parallel": "tp"} if tokens else {}
            step = gradient(call, how, "tp" if tokens else "")
            leaf = "logits" if name in OF_LOGITS else "hidden"
            spread = jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(specs[leaf], ROWS, specs),
                out_specs=((P(), None), (specs[leaf], ROWS)),
            )
            key = f"{name}, shards{' and tokens' if tokens else ''}"
            found[key] = HOW(spread, a[leaf], a["weight"], a)
    return found


def on_a_mesh() -> dict[str, Any]:
    """Whole arrays on Explicit axes, whose hidden states travel or whose head does."""
    found, mesh = {}, jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
    spread = NamedSharding(mesh, P("data"))
    a = {k: np.concatenate([x, x[:3]]) if len(x) == N else x for k, x in arrays().items()}
    with jax.set_mesh(mesh):
        placed = {k: jax.device_put(x, spread) for k, x in a.items()}
        for name, call in OF_HEAD.items():
            for gather in ("head", "hidden"):
                if gather == "hidden" and (name in STAY or name.endswith("of head")):
                    continue
                step = gradient(call, {"gather": gather, **sums(name)})
                key = f"{name}, mesh, {gather}"
                found[key] = HOW(step, placed["hidden"], placed["weight"], placed)
    return found


def without_a_head() -> dict[str, Any]:
    """Labels, sums by sequence, and a window of two micro-batches."""
    a = arrays()
    values, segments = a["hidden"][:, 0], np.arange(N, dtype=np.int32) // 9

    def summed(function: Callable[..., Any], values: Any, segments: Any) -> Any:
        return jnp.vdot(function(values, segments, 5), jnp.arange(5.0))

    def labels(ids: Any, where: Any) -> Any:
        return ours.next_token_labels(ids, where=where)

    def counted(params: Any, batch: Any) -> Any:
        out = ours.chunked_nll(batch[0], params["weight"], batch[1], reduction="sum")
        return out.loss, out.num_tokens

    def window(params: Any, batches: Any) -> Any:
        return ours.accumulate_grads(counted, params, batches)

    batches = a["hidden"][:36].reshape(2, 18, H), a["labels"][:36].reshape(2, 18)
    calls = {"window": HOW(window, {"weight": a["weight"]}, batches)}
    calls |= {"next_token_labels": HOW(labels, a["ids"], a["ids"] > 9)}
    for function in (ours.segment_sum, ours.segment_mean):
        step = jax.value_and_grad(partial(summed, function))
        calls[function.__name__] = HOW(step, values, segments)
    return calls


if __name__ == "__main__":
    print(json.dumps(alone() | over_shards() | on_a_mesh() | without_a_head()))
