"""Calls of the functions that have more than one label a token: class probabilities, kept sets,
further classes, divergences from each teacher; each drawn from a seed and its number alone, with
sizes that are no multiple of anything.

Shapes: N tokens, V vocabulary, H hidden width, K classes of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fuzzing.draw import PERIOD, number32
from xentlib.labels import SoftLabels
from xentlib.options import DIVERGENCE_OUTPUTS
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK
from xentlib.tools.harness.backends import Call
from xentlib.ulp import dtype_named

SUBJECTS = {
    "chunked_nll": ("few", "dense"),
    "chunked_logprobs": ("classes",),
    "vocab_parallel_logprobs": ("classes", "few", "dense"),
    "chunked_divergence": ("head", "logits", "top_k", "top_k"),
    "vocab_parallel_divergence": ("logits",),
}
OF_LOGITS = ("vocab_parallel_logprobs", "vocab_parallel_divergence")
PER_TOKEN = ("logprobs", "entropy", "lse")
TAILS = ("class", "renormalize", "drop")


class Pair(NamedTuple):
    """A call in NumPy arrays, with the gradient of each of its outputs."""

    text: str
    call: Call
    upstream: dict[str, Any]
    jax: bool  # of a form that others share, which JAX compiles once


class Edge(NamedTuple):
    """What a call is of, and sizes in place of those that are drawn."""

    function: str
    subject: str  # "index" too, of `chunked_nll`: labels that are classes
    leading: tuple[int, ...]
    vocab: int
    few: int  # classes of a token


class Drawing:
    """The numbers that one call is made of."""

    def __init__(self, seed: int, number: int, edge: Edge | None = None) -> None:
        shared = number % 2 == 0
        form = [seed, 4, number // PERIOD] if shared else [seed, 5, number]
        self.form, self.rng = (np.random.default_rng(x) for x in (form, [seed, 6, number]))
        self.function = str(self.form.choice(list(SUBJECTS), p=[0.25, 0.2, 0.2, 0.25, 0.1]))
        self.subject = str(self.form.choice(SUBJECTS[self.function]))
        self.head = self.function not in OF_LOGITS
        tokens = int(self.form.integers(0, 40))
        self.leading: tuple[int, ...] = (tokens,)
        if self.chance(0.3):
            self.leading = [(), (3, tokens), (tokens, 2), (0,), (2, 0, 3)][self.form.integers(5)]
        vocab = int(self.form.integers(1, 300) if self.chance(0.8) else self.form.integers(1, 9))
        self.vocab, self.width = vocab, int(self.form.integers(1, 40))
        self.dtype = str(self.form.choice(["float32"] * 4 + ["bfloat16", "float64"]))
        self.few = int(self.form.integers(1, 12))
        self.edge = edge
        if edge is not None:
            self.function, self.subject, self.leading, self.vocab, self.few = edge
            self.head = self.function not in OF_LOGITS

    def chance(self, share: float) -> bool:
        """Of what a compiler must know."""
        return bool(self.form.random() < share)

    def number(self, low: float, high: float) -> float:
        """As evenly in the logarithm."""
        return number32(10 ** self.form.uniform(low, high))

    def normal(self, *shape: int, dtype: str | None = None) -> Any:
        return np.asarray(self.rng.standard_normal(shape)).astype(dtype_named(dtype or self.dtype))

    def scaled(self, x: Any, by: float) -> Any:
        return (x.astype(np.float64) * by).astype(x.dtype)

    def classes(self, count: int | None = None, most: int | None = None) -> Any:
        """Of each token, so many that differ, and -1 where there are none left."""
        count = self.few if count is None else count
        order = self.rng.random((*self.leading, most or self.vocab)).argsort(-1)[..., :count]
        room = [(0, 0)] * len(self.leading) + [(0, max(0, count - order.shape[-1]))]
        return np.pad(order, room, constant_values=-1).astype(np.int32)

    def fewer(self, ids: Any, share: float = 0.3) -> Any:
        """With some at -1, never the first."""
        gone = self.rng.random(ids.shape) < share
        gone[..., 0] = False
        return np.where(gone, -1, ids).astype(np.int32)


def draw(seed: int, number: int, edge: Edge | None = None) -> Pair:
    """Call `number` of a seed, or of an edge with its options."""
    d = Drawing(seed, number, edge)
    keywords: dict[str, Any] = {}
    where = d.rng.random(d.leading) < 0.8
    if d.chance(0.4):
        keywords["where"] = np.asarray(where)
    if d.chance(0.4):
        keywords["temperature"] = d.number(-0.4, 0.5)
        if d.chance(0.4):
            of_token = 10 ** d.rng.uniform(-0.4, 0.5, d.leading)
            keywords["temperature"] = np.asarray(of_token).astype(np.float32)
    if d.head:
        options = ("logit_scale", -0.5, 0.3), ("softcap", 0.3, 1.5)
        keywords |= {name: d.number(*of) for name, *of in options if d.chance(0.25)}
        keywords["weight_layout"] = "HV" if d.chance(0.3) else "VH"
        if d.dtype != "float64" and d.chance(0.2):
            keywords["compute_dtype"] = "float64"
    if d.chance(0.5):
        rows = int(d.form.choice([1, 3, 8, 16]))
        keywords["max_chunk_bytes"] = rows * d.vocab * 4
    leaves = leaves_of(d, keywords)
    labels = np.asarray(d.rng.integers(0, d.vocab, d.leading)).astype(np.int32)
    ignored = d.rng.random(d.leading) < d.rng.choice([0.0, 0.2, 1.0], p=[0.5, 0.45, 0.05])
    labels, upstream = OF[d.function](d, keywords, leaves, np.where(ignored, -100, labels))
    call = Call(d.function, leaves, labels, keywords)
    shown = [f"{d.function} of {d.subject}, {d.leading} x {d.width} x {d.vocab} {d.dtype}"]
    shown += [f"{n}={x}" if np.ndim(x) == 0 else n for n, x in keywords.items() if n != "teacher"]
    return Pair(" ".join([*shown, *upstream]), call, upstream, number % 2 == 0)


def leaves_of(d: Drawing, keywords: dict[str, Any]) -> dict[str, Any]:
    """Logits of some spread, and of an offset, which changes no softmax."""
    std = 10 ** d.rng.uniform(-1.5, 0.75)
    offset = float(d.rng.choice([0.0, 20.0, -20.0, -300.0], p=[0.5, 0.2, 0.2, 0.1]))
    if not d.head:
        return {
            "logits": (d.normal(*d.leading, d.vocab) * std + offset).astype(dtype_named(d.dtype))
        }
    hidden = d.normal(*d.leading, d.width)
    if "where" in keywords and d.rng.random() < 0.5:  # what is taken out is not looked at
        hidden = np.where(keywords["where"][..., None], hidden, np.array(np.nan, hidden.dtype))
    weight = d.scaled(d.normal(d.vocab, d.width), std / d.width**0.5)
    if keywords["weight_layout"] == "HV":
        weight = np.ascontiguousarray(weight.T)
    leaves = {"hidden": hidden, "weight": weight}
    if d.chance(0.5):
        leaves["bias"] = (d.normal(d.vocab) + offset).astype(weight.dtype)
    return leaves


def probabilities(d: Drawing) -> Any:
    """Of all classes or of a few, whatever the head's dtype."""
    dtype = dtype_named(str(d.form.choice(["float32", "bfloat16", "float16"])))
    count = d.few if d.subject == "few" else d.vocab
    drawn = d.rng.dirichlet(np.full(count, 0.5), d.leading)
    if d.subject == "dense":
        return drawn.astype(dtype)
    ids = d.fewer(d.classes())
    if count > 1 and d.chance(0.3):  # a class that is there twice has both
        ids[..., 1] = ids[..., 0]
    return SoftLabels(ids, np.where(ids < 0, np.nan, drawn).astype(dtype))


def upstream_of(d: Drawing, names: tuple[str, ...], shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """Of some of the outputs, one at least."""
    used = [name for name in names if d.chance(0.6)] or list(names[:1])
    return {name: d.normal(*d.leading, *shape, dtype="float32") for name in used}


def reduced(d: Drawing, keywords: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """How a loss is, and its gradient."""
    if d.chance(0.4):
        keywords["token_weights"] = np.asarray(d.rng.uniform(0.2, 2.0, d.leading)).astype("f4")
    keywords["reduction"] = str(d.form.choice(names))
    if keywords["reduction"] == "none":
        return {"loss": d.normal(*d.leading, dtype="float32")}
    if d.chance(0.3):
        keywords["denominator"] = d.number(-0.5, 2.0)
    return {"loss": d.normal(dtype="float32")}


def of_nll(d: Drawing, keywords: dict[str, Any], _: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
    upstream = reduced(d, keywords, ("mean", "sum"))
    if d.subject != "index" and d.chance(0.4):  # whose weights would be the tokens'
        keywords["class_weights"] = d.rng.uniform(0.2, 2.0, d.vocab).astype(np.float32)
    if d.chance(0.3):
        keywords["label_smoothing"] = d.number(-2, -0.1)
    if d.chance(0.3):
        keywords["z_loss"] = d.number(-4, -1)
    keywords["outputs"] = PER_TOKEN
    return labels if d.subject == "index" else probabilities(d), upstream


def of_logprobs(
    d: Drawing, keywords: dict[str, Any], _: Any, labels: Any
) -> tuple[Any, dict[str, Any]]:
    keywords["entropy"] = True
    upstream = upstream_of(d, PER_TOKEN)
    if d.subject != "classes":
        if d.chance(0.3):
            keywords["label_smoothing"] = d.number(-2, -0.1)
        return probabilities(d), upstream
    if d.chance(0.5):
        # Those that a sampler kept have the label. A row of none is the whole vocabulary.
        count = d.few if d.edge is not None else int(d.form.integers(1, 40))
        kept = d.classes(count) if d.edge is not None else d.fewer(d.classes(count))
        there = (kept == labels[..., None]).any(-1) | (labels < 0)
        kept[..., 0] = np.where(there, kept[..., 0], labels)
        kept[np.asarray(d.rng.random(d.leading) < 0.2)] = -1
        keywords["kept"] = kept
    if d.chance(0.5):
        keywords["ids"] = np.where(d.rng.random((*d.leading, d.few)) < 0.2, -1, d.classes())
        keywords["ids"] = keywords["ids"].astype(np.int32)
        upstream |= upstream_of(d, ("ids_logprobs",), (d.few,))
    if d.chance(0.5):
        top_k = d.few if d.edge is not None else int(d.form.integers(1, min(d.vocab, 12) + 1))
        keywords["top_k"] = top_k
        upstream |= upstream_of(d, ("top_logprobs",), (top_k,))
    return labels, upstream


def of_divergence(
    d: Drawing, keywords: dict[str, Any], leaves: dict[str, Any], labels: Any
) -> tuple[Any, dict[str, Any]]:
    with_kind(d, keywords)
    upstream, vocab = reduced(d, keywords, ("mean", "sum", "none")), d.vocab
    if d.subject != "top_k" and d.chance(0.25):  # the first classes, which both have
        keywords["vocab"], vocab = "intersect", int(d.form.integers(1, 300))
        labels = np.where(labels < 0, labels, labels % min(vocab, d.vocab)).astype(np.int32)
    names = list(DIVERGENCE_OUTPUTS)
    labelled = d.chance(0.6)
    if not labelled:
        names.remove("logprobs")
    tempered = "temperature" in keywords
    apart = (tempered and d.subject == "top_k") or vocab < d.vocab  # the NLL would be of others
    if labelled and d.chance(0.5) and not apart:
        keywords["nll_weight"] = d.number(-1, 0.3)
    if tempered and d.chance(0.5):
        keywords["temperature_squared"] = True
    if d.subject == "top_k":
        names.remove("teacher_entropy")
        keywords["teacher"] = top_k_of(d, keywords, leaves)
    else:
        keywords["teacher"] = teacher_of(d, keywords, vocab)
    keywords["outputs"] = tuple(names)
    return labels if labelled else None, upstream


def of_given_divergence(
    d: Drawing, keywords: dict[str, Any], *_: Any
) -> tuple[Any, dict[str, Any]]:
    with_kind(d, keywords)
    keywords["teacher"] = teacher_of(d, keywords, d.vocab)
    return None, {"divergence": d.normal(*d.leading, dtype="float32")}


OF: dict[str, Callable[..., Any]] = {
    "chunked_nll": of_nll,
    "chunked_logprobs": of_logprobs,
    "vocab_parallel_logprobs": of_logprobs,
    "chunked_divergence": of_divergence,
    "vocab_parallel_divergence": of_given_divergence,
}


def with_kind(d: Drawing, keywords: dict[str, Any]) -> None:
    keywords["kind"] = str(d.form.choice(["forward_kl", "reverse_kl", "jsd"]))
    if keywords["kind"] == "jsd":
        keywords["beta"] = float(d.form.choice([0.1, 0.5, 0.75]))


def teacher_of(d: Drawing, keywords: dict[str, Any], vocab: int) -> Any:
    """As logits or as a head, with a temperature of its own or the student's."""
    std, own = 10 ** d.rng.uniform(-1, 0.5), d.number(-0.3, 0.3) if d.chance(0.3) else None
    if d.subject == "logits":
        logits = d.scaled(d.normal(*d.leading, vocab), std)
        if keywords["kind"] != "reverse_kl" and d.rng.random() < 0.3:  # no probability
            gone = d.rng.random(logits.shape) < 0.3
            gone[..., 0] = False
            logits = np.where(gone, np.array(-np.inf, logits.dtype), logits)
        return TeacherLogits(logits, own)
    width = int(d.form.integers(1, 20))
    layout: Any = "HV" if d.chance(0.3) else "VH"
    weight = d.scaled(d.normal(vocab, width), std / width**0.5)
    return TeacherHead(
        d.normal(*d.leading, width),
        np.ascontiguousarray(weight.T) if layout == "HV" else weight,
        d.normal(vocab) if d.chance(0.4) else None,
        d.number(-0.3, 0.3) if d.chance(0.3) else 1.0,
        d.number(0.3, 1.2) if d.chance(0.3) else None,
        own,
        layout,
    )


def top_k_of(d: Drawing, keywords: dict[str, Any], leaves: dict[str, Any]) -> Any:
    """Of classes that may be any. What they leave out is nothing, or has digits to keep."""
    tails = TAILS[:2] if keywords["kind"] == "jsd" else TAILS
    ids = d.fewer(d.classes())
    log_q = np.log(d.rng.dirichlet(np.ones(d.few + 1), d.leading)[..., : d.few])
    log_q = np.maximum(log_q, -30.0)
    rest = 1 - np.where(ids < 0, 0.0, np.exp(log_q)).sum(-1, keepdims=True)
    log_q = np.where(rest < 1e-3, log_q - 0.01, log_q)
    if d.few > 1 and d.chance(0.2):  # counts once
        ids[..., 1], log_q[..., 1] = ids[..., 0], log_q[..., 0]
    log_q = np.where(ids < 0, np.nan, log_q).astype(np.float32)
    return TeacherTopK(ids, log_q, str(d.form.choice(tails)), keywords.get("temperature"))  # type: ignore[arg-type]
