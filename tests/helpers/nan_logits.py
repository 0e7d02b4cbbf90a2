"""Every function of the head as numbers per token of the same arrays, of which one logit is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

N, H, V = 3, 6, 36
LABEL, IDS = 5, (5, 30, 17)
# The first, the label's, another of the ids, none of them, the last.
COLUMNS = (0, LABEL, 30, 20, V - 1)


def arrays(column: int) -> dict[str, Any]:
    """With a bias that makes the logit NaN in every row, and given logits where it is in one."""
    rng = np.random.default_rng(2)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    bias, logits = np.zeros(V, np.float32), normal(N, V)
    bias[column] = logits[1, column] = np.nan
    dense = np.abs(normal(N, V))
    return {
        "hidden": normal(N, H),
        "weight": normal(V, H),
        "bias": bias,
        "logits": logits,
        "labels": np.full(N, LABEL, np.int32),
        "ids": np.tile(np.array(IDS, np.int32), (N, 1)),
        "none": np.full((N, 3), -1, np.int32),
        "probs": np.tile(np.array([0.5, 0.2, 0.3], np.float32), (N, 1)),
        "dense": dense / dense.sum(1, keepdims=True),
        "teacher_hidden": normal(N, 4),
        "teacher_weight": normal(V, 4),
    }


PER_TOKEN = ("logprobs", "entropy", "lse")
Call = Callable[..., list[Any]]


def nll(labels: str) -> Call:
    def call(X: Any, a: Any, **how: Any) -> list[Any]:
        y = X.SoftLabels(a["ids"], a["probs"]) if labels == "few" else a[labels]
        out = X.chunked_nll(a["hidden"], a["weight"], y, bias=a["bias"], outputs=PER_TOKEN, **how)
        return [out.loss, out.logprobs, out.entropy, out.lse]

    return call


def logprobs(*names: str, top_k: int = 0) -> Call:
    def call(X: Any, a: Any, **how: Any) -> list[Any]:
        how |= {name: a["none" if name == "kept" else name] for name in names}
        of_head = a["hidden"], a["weight"], a["labels"]
        return of(X.chunked_logprobs(*of_head, bias=a["bias"], top_k=top_k, entropy=True, **how))

    return call


def of(out: Any) -> list[Any]:
    fields = (*PER_TOKEN, "ids_logprobs", "top_logprobs")
    return [x for name in fields if (x := getattr(out, name)) is not None]


def divergence(teacher: str, kind: str) -> Call:
    def call(X: Any, a: Any, **how: Any) -> list[Any]:
        teachers = {
            "head": lambda: X.TeacherHead(a["teacher_hidden"], a["teacher_weight"]),
            "logits": lambda: X.TeacherLogits(2.0 * a["dense"]),
            "top": lambda: X.TeacherTopK(a["ids"], -1.0 - a["probs"]),
        }
        args = a["hidden"], a["weight"], teachers[teacher]()
        if kind == "jsd":
            how["beta"] = 0.3
        names = ("divergence", "logprobs", "entropy")
        out = X.chunked_divergence(
            *args, bias=a["bias"], kind=kind, labels=a["labels"], outputs=names, **how
        )
        return [out.loss, out.divergence, out.logprobs, out.entropy]

    return call


def given(labels: str, *names: str, top_k: int = 0) -> Call:
    def call(X: Any, a: Any, **how: Any) -> list[Any]:
        y = X.SoftLabels(a["ids"], a["probs"]) if labels == "few" else a[labels]
        how |= {name: a["none" if name == "kept" else name] for name in names}
        if top_k:
            how["top_k"] = top_k
        return of(X.vocab_parallel_logprobs(a["logits"], y, entropy=True, **how))

    return call


def given_divergence(X: Any, a: Any, **how: Any) -> list[Any]:
    return [X.vocab_parallel_divergence(a["logits"], X.TeacherLogits(2.0 * a["dense"]), **how).loss]


KINDS = ("forward_kl", "reverse_kl", "jsd")
OF_HEAD: dict[str, Call] = {
    **{f"nll of {labels}": nll(labels) for labels in ("labels", "dense", "few")},
    "logprobs": logprobs(),
    "ids": logprobs("ids"),
    "no kept set": logprobs("kept"),
    "top_k": logprobs(top_k=2),
    "top_k, no kept set": logprobs("kept", top_k=2),
    "top_k, ids, no kept set": logprobs("kept", "ids", top_k=2),
    **{f"{k} from {t}": divergence(t, k) for k in KINDS for t in ("head", "logits", "top")},
}
OF_LOGITS: dict[str, Call] = {
    **{f"logits, {labels}": given(labels) for labels in ("labels", "dense", "few")},
    "logits, ids": given("labels", "ids"),
    "logits, top_k, no kept set": given("labels", "kept", top_k=2),
    "logits, divergence": given_divergence,
}
ALL = OF_HEAD | OF_LOGITS
LOSSES = [name for name in OF_HEAD if name.startswith(("nll", *KINDS))]


def on_shards(rank: int, world: int) -> dict[tuple[str, int], list[int]]:
    """What has a number where NaN is due, over uneven shards of PyTorch's ranks."""
    import torch

    import xentlib.torch as X
    from xentlib.shards import VocabShard

    ends = [0, 19, V]  # the label's and the first columns on one rank, the last on the other
    rows, found = slice(ends[rank], ends[rank + 1]), {}
    over = VocabShard.of_ranks(rows.stop - rows.start, torch.distributed.group.WORLD)
    for column in COLUMNS:
        a = {k: torch.from_numpy(v) for k, v in arrays(column).items()}
        a |= {k: a[k][:, rows] for k in ("logits", "dense")}
        a |= {k: a[k][rows] for k in ("weight", "teacher_weight", "bias")}
        for name in ALL:
            values = ALL[name](X, a, vocab_parallel=over)
            found[name, column] = hidden_in(name, [x.numpy() for x in values])
    return found


def hidden_in(name: str, values: list[Any]) -> list[int]:
    """Which results have a number where NaN is due; and of given logits, NaN of other tokens."""
    wrong = []
    for k, x in enumerate(values):
        rows = np.asarray(x)
        one = rows[1] if name in OF_LOGITS else rows
        others = rows[[0, 2]] if name in OF_LOGITS else np.zeros(1)
        if not np.isnan(one).all() or np.isnan(others).any():
            wrong.append(k)
    return wrong
