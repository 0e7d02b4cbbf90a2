"""The jaxprs of bits.py: `python .ci/bits_jaxprs.py jaxprs`. What JAX is to compute, of every
public function with each of its labels and teachers, on one device, over shards and along routes,
without a program that is compiled: a text is exact, and takes half a second.

Names of functions are left out of the text, and so are those of what has no value: they may be
renamed. Where two jaxprs differ that compute the same, compare bits with the part "jax".
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import bits_jax  # sets devices before JAX is there
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib import jax as ours

N, V, H, K, WIDTH = 37, 131, 22, 5, 14
PADDED = 132  # rows over four devices
ROWS = P("tp")
OPTIONS = {"softcap": 7.0, "logit_scale": 1.3, "temperature": 0.8}
FEW = {"max_chunk_bytes": 8 * V * 4}
KINDS = ({"kind": "forward_kl"}, {"kind": "reverse_kl"}, {"kind": "jsd", "beta": 0.3})
# Of a jaxpr's text: names of functions, and addresses.
NAMES = re.compile(r"\bname=\S+|0x[0-9a-f]+|<function [^>]*>")
Call = Callable[[Any, Any, Any], Any]  # of hidden states, head, and further arrays


def hashed(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def traced(function: Callable[..., Any], *args: Any, wide: bool = False) -> dict[str, Any]:
    with jax.enable_x64(wide):
        closed = jax.make_jaxpr(function)(*args)
    constants = [np.asarray(x) for x in jax.tree.leaves(closed.consts) if hasattr(x, "dtype")]
    of_constants = [f"{x.dtype}{x.shape}".encode() + x.tobytes() for x in constants]
    text = NAMES.sub("", str(closed.jaxpr))
    bits = {"jaxpr": hashed(text.encode()), "constants": hashed(*of_constants)}
    return {"bits": bits, "collectives": {}}


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
            "head": lambda: ours.TeacherHead(a["teacher_hidden"], a["teacher_weight"]),
            "logits": lambda: ours.TeacherLogits(a["teacher_logits"]),
            "top k": lambda: ours.TeacherTopK(a["ids"], a["stored"], temperature=0.8),
        }
        more = options | how
        if teacher == "top k" and "temperature" not in more:
            more["temperature"] = 0.8
        return ours.chunked_divergence(x, w, of[teacher](), **more)

    return call


def nll(labels: str) -> Call:
    def call(x: Any, w: Any, a: Any, **how: Any) -> Any:
        y = ours.SoftLabels(a["ids"], a["few"]) if labels == "few" else a[labels]
        return ours.chunked_nll(x, w, y, **how)

    return call


def logprobs(*names: str, top_k: int = 0) -> Call:
    def call(x: Any, w: Any, a: Any, **how: Any) -> Any:
        how |= {name: a[name] for name in names}
        return ours.chunked_logprobs(x, w, a["labels"], entropy=True, top_k=top_k, **how)

    return call


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
    def loss(x: Any, w: Any, a: Any) -> Any:
        value = total(call(x, w, a, **how))
        return jax.lax.psum(value, over) if over else value

    return jax.value_and_grad(loss, (0, 1))


def alone() -> dict[str, Any]:
    """On one device, in each dtype."""
    a, found = arrays(), {}
    whole = {k: x[:, :V] if k in ("dense", "logits", "teacher_logits") else x for k, x in a.items()}
    whole |= {name: a[name][:V] for name in ("weight", "teacher_weight")}
    for (name, call), dtype in itertools.product(
        (OF_HEAD | OF_LOGITS).items(), ("float32", "bfloat16")
    ):
        leaf = "logits" if name in OF_LOGITS else "hidden"
        cast = {k: x.astype(jnp.dtype(dtype)) for k, x in whole.items() if x.dtype == np.float32}
        cast["stored"] = whole["stored"]
        args = (cast[leaf], cast["weight"], whole | cast)
        options = {k: x for k, x in OPTIONS.items() if leaf == "hidden" or k == "temperature"}
        for text, how in {"": {}, ", options": options | FEW}.items():
            key = f"{name}, {dtype}{text}"
            found[key] = traced(gradient(call, how), *args)
    for name, call in OF_HEAD.items():
        args = (whole["hidden"], whole["weight"], whole)
        found[f"{name}, audit"] = traced(
            gradient(call, {"compute_dtype": "float64"}), *args, wide=True
        )
    return found


def over_shards() -> dict[str, Any]:
    """In `shard_map`: rows over four devices, tokens whole or with them."""
    found, mesh = {}, bits_jax.mesh_of(AxisType.Auto, tp=4)
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
                out_specs=(P(), (specs[leaf], ROWS)),
            )
            key = f"{name}, shards{' and tokens' if tokens else ''}"
            found[key] = traced(spread, a[leaf], a["weight"], a)
    return found


def on_a_mesh() -> dict[str, Any]:
    """Whole arrays on Explicit axes, whose hidden states travel or whose head does."""
    found, mesh = {}, bits_jax.mesh_of(AxisType.Explicit, data=4)
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
                found[key] = traced(step, placed["hidden"], placed["weight"], placed)
    return found


def without_a_head() -> dict[str, Any]:
    """Labels, and sums by sequence."""
    a = arrays()
    values, segments = a["hidden"][:, 0], np.arange(N, dtype=np.int32) // 9

    def summed(function: Callable[..., Any], values: Any, segments: Any) -> Any:
        return jnp.vdot(function(values, segments, 5), jnp.arange(5.0))

    def labels(ids: Any, where: Any) -> Any:
        return ours.next_token_labels(ids, where=where)

    calls = {"next_token_labels": traced(labels, a["ids"], a["ids"] > 9)}
    for function in (ours.segment_sum, ours.segment_mean):
        step = jax.value_and_grad(partial(summed, function))
        calls[function.__name__] = traced(step, values, segments)
    return calls


if __name__ == "__main__":
    print(json.dumps(alone() | over_shards() | on_a_mesh() | without_a_head()))
