"""The calls of bits.py in PyTorch on one process: `python .ci/bits_torch.py torch|triton`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xentlib import torch as ours

N, V, H, RANK = 37, 131, 24, 3
OPTIONS = {"softcap": 7.0, "logit_scale": 1.3, "temperature": 0.8}
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-3, **OPTIONS}
OUTPUTS = ("logprobs", "entropy", "lse", "correct", "predicted")
FEW = {"max_chunk_bytes": 8 * V * 4}  # chunks of eight tokens in float32
AUDIT = {"compute_dtype": "float64"}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def labels_of(tokens: int = N, vocab: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::7] = -100
    return labels


def hashed(x: Any) -> str:
    """Of a tensor, a DTensor's own part, or a number."""
    x = torch.as_tensor(x).detach()
    x = (x.to_local() if hasattr(x, "to_local") else x).contiguous()
    raw = x.view(torch.uint8) if x.numel() and x.ndim else x.reshape(-1).view(torch.uint8)
    text = f"{x.dtype} {tuple(x.shape)}".encode() + raw.numpy().tobytes()
    return hashlib.sha256(text).hexdigest()[:16]


def measured(call: Callable[[], Any], leaves: dict[str, Any]) -> dict[str, Any]:
    """Of one call: bits of what it returns and of the leaves' gradients, and its collectives."""
    with ours.count_collectives() as forward:
        out = call()
    fields = out._asdict() if hasattr(out, "_asdict") else {"loss": out}
    bits = {name: hashed(x) for name, x in fields.items() if x is not None}
    upstream = scalar_of(out)
    with ours.count_collectives() as backward:
        if upstream.requires_grad:
            upstream.backward()
    bits |= {f"d {name}": hashed(x.grad) for name, x in leaves.items() if x.grad is not None}
    return {"bits": bits, "collectives": sent(forward, "forward ") | sent(backward, "backward ")}


def sent(count: ours.CollectiveCount, phase: str = "") -> dict[str, list[int]]:
    """Of each kind of collective: how many, and their bytes."""
    return {f"{phase}{kind}": [n, count.bytes(kind)] for kind, n in count.counts().items()}


def repeatable() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def scalar_of(out: Any) -> torch.Tensor:
    """A sum with a factor for each entry that has a gradient and is a number."""
    if isinstance(out, torch.Tensor):
        used = [out]
    elif hasattr(out, "loss"):
        used = [out.loss]
    else:
        used = [out.logprobs, out.entropy, out.ids_logprobs, out.top_logprobs]
    used = [x for x in used if x is not None]
    if len(used) == 1 and not used[0].ndim:
        return used[0] * 0.7
    finite = [torch.where(x.isfinite(), x, 0) for x in used]
    return sum((x * drawn(*x.shape, seed=9 + k)).sum() for k, x in enumerate(finite))


def plain(
    function: str,
    tokens: int = N,
    dtype: torch.dtype = torch.float32,
    layout: str = "VH",
    bias: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A head that is whole, on one process."""
    hidden = drawn(tokens, H, seed=1, dtype=dtype).requires_grad_()
    shape = (V, H) if layout == "VH" else (H, V)
    weight = drawn(*shape, seed=2, dtype=dtype).requires_grad_()
    leaves = {"hidden": hidden, "weight": weight}
    if layout == "HV":
        options["weight_layout"] = "HV"
    if bias:
        leaves["bias"] = options["bias"] = drawn(V, seed=3, dtype=dtype).requires_grad_()
    return measured(
        lambda: getattr(ours, function)(hidden, weight, labels_of(tokens), **options), leaves
    )


def given(tokens: int = N, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    logits = (3 * drawn(tokens, V, seed=4, dtype=dtype)).requires_grad_()
    return measured(
        lambda: ours.vocab_parallel_logprobs(logits, labels_of(tokens), **options),
        {"logits": logits},
    )


def low_rank(function: str, **options: Any) -> dict[str, Any]:
    hidden = drawn(N, H, seed=1).requires_grad_()
    a, b = drawn(RANK, H, seed=6).requires_grad_(), drawn(V, RANK, seed=7).requires_grad_()
    head = ours.LowRankHead(drawn(V, H, seed=2), a, b, 0.5)
    return measured(
        lambda: getattr(ours, function)(hidden, head, labels_of(), **options),
        {"hidden": hidden, "a": a, "b": b},
    )


def module(**options: Any) -> dict[str, Any]:
    head = ours.NLLHead.from_linear(linear())
    hidden = drawn(N, H, seed=1).requires_grad_()
    return measured(
        lambda: head(hidden, labels_of(), **options), {"hidden": hidden, "weight": head.weight}
    )


def linear(rows: int = V) -> nn.Linear:
    head = nn.Linear(H, rows, bias=False)
    head.weight.data = drawn(rows, H, seed=2)
    return head


class Model(nn.Module):
    """A trunk, whose forward a wrapper waits for, and a head."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(H, H, bias=False), head
        self.trunk.weight.data = drawn(H, H, seed=8) / 5

    def forward(self, x: Any) -> Any:
        return self.trunk(x)


def each_token() -> dict[str, Any]:
    return {
        "where": torch.arange(N) % 5 != 0,
        "token_weights": drawn(N, seed=10).abs(),
        "class_weights": drawn(V, seed=11).abs(),
    }


def without_a_head() -> dict[str, Any]:
    """Labels, and sums by sequence."""
    segments = torch.arange(N) // 9
    ids = torch.arange(N).reshape(1, N) % 7
    labels = ours.next_token_labels(ids, where=ids > 1)
    calls = {"labels": {"bits": {"labels": hashed(labels)}, "collectives": {}}}
    for function in (ours.segment_sum, ours.segment_mean):
        values = drawn(N, seed=1).requires_grad_()
        sums = function(values, segments, 5)
        sums.backward(drawn(5, seed=2))
        bits = {"value": hashed(sums), "d values": hashed(values.grad)}
        calls[function.__name__] = {"bits": bits, "collectives": {}}
    return calls


def on_one_process() -> dict[str, Any]:
    nll, logprobs, low = "chunked_nll", "chunked_logprobs", torch.bfloat16
    entropy = {"entropy": True}
    calls = {
        "nll": plain(nll, outputs=OUTPUTS),
        "nll, options": plain(nll, bias=True, outputs=OUTPUTS, **LOSS),
        "nll, chunks": plain(nll, bias=True, **FEW, **LOSS),
        "nll, bf16": plain(nll, dtype=low, outputs=OUTPUTS, **FEW),
        "nll, fp16, [H, V]": plain(nll, dtype=torch.float16, layout="HV", bias=True, **LOSS),
        "nll, each token": plain(nll, **each_token(), **LOSS),
        "nll, sum": plain(nll, reduction="sum"),
        "nll, denominator": plain(nll, denominator=11.0),
        "nll, audit": plain(nll, bias=True, **AUDIT, **FEW, **LOSS),
        "nll, audit, bf16": plain(nll, dtype=low, **AUDIT),
        "nll, module": module(outputs=("lse",)),
        "nll, LoRA": low_rank(nll, **LOSS),
        "nll, LoRA, chunks, audit": low_rank(nll, **FEW, **AUDIT),
        "logprobs": plain(logprobs),
        "logprobs, options": plain(logprobs, bias=True, **entropy, **OPTIONS),
        "logprobs, chunks, bf16": plain(logprobs, dtype=low, **entropy, **FEW),
        "logprobs, [H, V]": plain(logprobs, layout="HV", where=torch.arange(N) % 5 != 0),
        "logprobs, audit": plain(logprobs, **entropy, **AUDIT, **FEW, **OPTIONS),
        "logprobs, LoRA": low_rank(logprobs, **entropy, **OPTIONS),
        "from logits": given(),
        "from logits, options": given(**entropy, temperature=0.8),
        "from logits, bf16": given(dtype=low, **entropy),
        "from logits, float64": given(dtype=torch.float64, **entropy),
    }
    for dtype in (torch.float32, low, torch.float16, torch.float64):
        of_dtype = of_several_classes(dtype)
        calls |= {f"{name}, {str(dtype)[6:]}": call for name, call in of_dtype.items()}
    with torch.no_grad():
        calls["nll, no gradient"] = plain(nll, **FEW, **LOSS)
        calls["logprobs, no gradient"] = plain(logprobs, **entropy)
    return calls | without_a_head()


KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "forward_kl"},
    {"kind": "reverse_kl"},
    {"kind": "jsd", "beta": 0.3},
)
K, WIDTH = 5, 16  # classes told apart of a token, and the width of a teacher


def classes() -> dict[str, torch.Tensor]:
    """Of each token some, of which one is missing here and there; those of a set with the label."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(V, (N, K), generator=generator)
    kept = torch.cat((labels_of().clamp(min=0)[:, None], ids.roll(1, 0)), 1)
    ids[::3, 2] = -1
    return {"ids": ids, "kept": kept}


def called(function: str, *args: Any, leaf: str, dtype: torch.dtype, **options: Any) -> Any:
    """Of a head, or of precomputed logits as `leaf` says; `args` come after them."""
    if leaf == "logits":
        logits = (3 * drawn(N, V, seed=4, dtype=dtype)).requires_grad_()
        leaves = {"logits": logits}
    else:
        hidden = drawn(N, H, seed=1, dtype=dtype).requires_grad_()
        leaves = {"hidden": hidden, "weight": drawn(V, H, seed=2, dtype=dtype).requires_grad_()}
    return measured(lambda: getattr(ours, function)(*leaves.values(), *args, **options), leaves)


def of_several_classes(dtype: torch.dtype) -> dict[str, Any]:
    """Class probabilities, sets of classes and divergences, with options and without."""
    of, calls = classes(), {}
    dense = drawn(N, V, seed=31).softmax(1)
    few = ours.SoftLabels(of["ids"], drawn(N, K, seed=32).softmax(1))
    where = torch.arange(N) % 5 != 0
    temperature = drawn(N, seed=12).abs() + 0.5
    teachers = {
        "head": ours.TeacherHead(
            drawn(N, WIDTH, seed=21, dtype=dtype),
            drawn(V, WIDTH, seed=22),
            logit_scale=1.0,
            softcap=None,
        ),
        "logits": ours.TeacherLogits(3 * drawn(N, V, seed=23, dtype=dtype)),
        "top k": ours.TeacherTopK(of["ids"], drawn(N, K, seed=33).log_softmax(1) - 0.3),
    }
    teachers["head"] = teachers["head"]._replace(weight=teachers["head"].weight.to(dtype))
    for text, more in {"": {}, ", options": {"where": where, "temperature": temperature}}.items():
        for leaf in ("head", "logits"):
            how = {"leaf": leaf, "dtype": dtype, **more, **(FEW if more else {})}
            logprobs = "chunked_logprobs" if leaf == "head" else "vocab_parallel_logprobs"
            for name, chosen in {
                "ids": {"ids": of["ids"], "top_k": 3},
                "kept": {"kept": of["kept"]},
            }.items():
                key = f"logprobs of {leaf}, {name}{text}"
                calls[key] = called(logprobs, labels_of(), entropy=True, **chosen, **how)
            soft = "chunked_nll" if leaf == "head" else logprobs
            for name, labels in {"probabilities": dense, "of a few": few}.items():
                weighed = each_token() | LOSS | how if more and leaf == "head" else how
                calls[f"{name}, {leaf}{text}"] = called(soft, labels, **weighed)
        stored = teachers["top k"]._replace(temperature=temperature if more else None)
        for name, teacher in (teachers | {"top k": stored}).items():
            for kind in KINDS:
                how = {"leaf": "head", "dtype": dtype, "labels": labels_of(), **kind, **more}
                if more:
                    how |= {**FEW, "token_weights": drawn(N, seed=10).abs(), "softcap": 7.0}
                calls[f"{kind['kind']} of {name}{text}"] = called(
                    "chunked_divergence", teacher, reduction="none" if more else "mean", **how
                )
        for kind in KINDS:
            calls[f"{kind['kind']} of logits of both{text}"] = called(
                *("vocab_parallel_divergence", teachers["logits"]),
                leaf="logits",
                dtype=dtype,
                **kind,
                **more,
            )
    return calls


def interpreted() -> dict[str, Any]:
    """Triton's programs, in NumPy; a row takes 10 ms."""
    low = torch.bfloat16
    return {
        "nll": plain("chunked_nll", 9, outputs=OUTPUTS),
        "nll, options": plain("chunked_nll", 9, bias=True, **LOSS),
        "nll, chunks, bf16": plain("chunked_nll", 9, dtype=low, max_chunk_bytes=5 * V * 4),
        "logprobs": plain("chunked_logprobs", 9, entropy=True, **OPTIONS),
        "from logits": given(9, entropy=True),
        "from logits, bf16": given(9, dtype=low, temperature=0.8),
    }


if __name__ == "__main__":
    repeatable()
    print(json.dumps(on_one_process() if sys.argv[1] == "torch" else interpreted()))
