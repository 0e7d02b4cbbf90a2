"""The calls of bits.py in PyTorch, printed: `python .ci/bits_torch.py torch|triton|ranks|zero`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import xentlib
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
    collectives = {
        f"{phase} {kind}": [number, count.bytes(kind)]
        for phase, count in (("forward", forward), ("backward", backward))
        for kind, number in count.counts().items()
    }
    return {"bits": bits, "collectives": collectives}


def scalar_of(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    if hasattr(out, "loss"):
        return out.loss * 0.7
    used = [x for x in (out.logprobs, out.entropy) if x is not None]
    return sum((x * drawn(*x.shape, seed=9 + k)).sum() for k, x in enumerate(used))


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
    with torch.no_grad():
        calls["nll, no gradient"] = plain(nll, **FEW, **LOSS)
        calls["logprobs, no gradient"] = plain(logprobs, **entropy)
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


# --- ranks ---------------------------------------------------------------------------------------


def cut(x: torch.Tensor, rank: int, sizes: tuple[int, ...], dim: int = 0) -> torch.Tensor:
    return x.split(sizes, dim)[rank].clone()


def even(size: int, world: int) -> tuple[int, ...]:
    part = -(-size // world)
    return tuple(min(part, max(size - k * part, 0)) for k in range(world))


def over_shards(
    function: str,
    sizes: tuple[int, ...] = (),
    *,
    tokens: bool = False,
    vocab: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A vocabulary over ranks, and with `tokens` the tokens too; with `vocab` padding follows."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    over = group if vocab is None else xentlib.PaddedVocab(group, vocab)
    rows = sizes or even(V, world)
    own = even(N, world) if tokens else (N,) * world
    hidden, labels = drawn(N, H, seed=1), labels_of(vocab=vocab or V)
    if tokens:
        hidden, labels = cut(hidden, rank, own), cut(labels, rank, own)
        options["tokens_parallel"] = group
    hidden.requires_grad_()
    weight = cut(drawn(V, H, seed=2), rank, rows).requires_grad_()
    bias = cut(drawn(V, seed=3), rank, rows).requires_grad_()
    return measured(
        lambda: getattr(ours, function)(
            hidden, weight, labels, bias=bias, vocab_parallel=over, **options
        ),
        {"hidden": hidden, "weight": weight, "bias": bias},
    )


def logits_over_shards(**options: Any) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    logits = cut(3 * drawn(N, V, seed=4), rank, even(V, world), 1).requires_grad_()
    return measured(
        lambda: ours.vocab_parallel_logprobs(
            logits, labels_of(), vocab_parallel=dist.group.WORLD, **options
        ),
        {"logits": logits},
    )


def fully_sharded(
    function: str,
    *,
    shape: tuple[int, ...] = (),
    policy: bool = False,
    nodes: int = 0,
    wrapper: str = "",
    **options: Any,
) -> dict[str, Any]:
    """A head under `fully_shard`, each rank with its own tokens."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    names = ("replica", "shard")[-max(len(shape), 1) :]
    mesh = dist.init_device_mesh("cpu", shape or (world,), mesh_dim_names=names)
    head: Any = linear()
    if wrapper == "NLLHead":
        head = ours.NLLHead.from_linear(head)
    more: Any = {}
    if policy:
        more["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Model(head)
    fully_shard(head, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
    if nodes:
        options["tokens_parallel"] = dist.init_device_mesh("cpu", (nodes, world // nodes))
    own = even(N, world)
    dtype = torch.bfloat16 if policy else torch.float32
    hidden = cut(drawn(N, H, seed=1, dtype=dtype), rank, own).requires_grad_()
    labels = cut(labels_of(), rank, own)

    def call() -> Any:
        x = model(hidden)
        if wrapper == "NLLHead":
            return head(x, labels, **options)
        if wrapper == "gather_head":
            with ours.gather_head(head.weight) as (weight, _):
                return getattr(ours, function)(x, weight, labels, **options)
        return getattr(ours, function)(x, head.weight, labels, **options)

    result = measured(call, {"hidden": hidden})
    for name, x in (("d weight", head.weight), ("d trunk", model.trunk.weight)):
        result["bits"][name] = hashed(x.grad)
    return result


def replicated() -> dict[str, Any]:
    """Two micro-batches in a window, under DDP."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(Model(linear()))
    parts = even(N, 2 * world)
    pairs = [
        (cut(drawn(N, H, seed=1), k, parts), cut(labels_of(), k, parts))
        for k in (2 * rank, 2 * rank + 1)
    ]
    head, windows = model.module.head, ours.TokenNormalizer(model)
    with ours.count_collectives() as count, windows.window([y for _, y in pairs]) as window:
        for hidden, labels in window.micro_batches(pairs):
            out = ours.chunked_nll(model(hidden), head.weight, labels, reduction="sum")
            window.backward(out)
    collectives = {kind: [number, count.bytes(kind)] for kind, number in count.counts().items()}
    return {"bits": {"d weight": hashed(head.weight.grad)}, "collectives": collectives}


def on_ranks() -> Iterator[tuple[str, dict[str, Any]]]:
    """The same order on every rank."""
    world = dist.get_world_size()
    nll, logprobs, entropy = "chunked_nll", "chunked_logprobs", {"entropy": True}
    uneven = {2: (100, 31), 4: (50, 40, 41, 0)}[world]
    yield "shards, nll", over_shards(nll, outputs=OUTPUTS, **LOSS)
    yield "shards, nll, chunks", over_shards(nll, **FEW)
    yield "shards, nll, audit", over_shards(nll, **AUDIT, **LOSS)
    yield "shards, uneven", over_shards(nll, uneven)  # to be declared
    yield "shards, padded", over_shards(nll, vocab=V - 6)
    yield "shards, logprobs", over_shards(logprobs, **entropy, **OPTIONS)
    yield "shards, from logits", logits_over_shards(**entropy)
    yield "shards and tokens, nll", over_shards(nll, tokens=True, **LOSS)
    yield "shards and tokens, logprobs", over_shards(logprobs, tokens=True, **FEW, **entropy)
    for gather in ("head", "hidden", "stream"):
        yield f"FSDP2, {gather}, nll", fully_sharded(nll, gather=gather, **FEW)
        yield f"FSDP2, {gather}, logprobs", fully_sharded(logprobs, gather=gather, **entropy)
        yield f"FSDP2, {gather}, bf16", fully_sharded(nll, gather=gather, policy=True)
    yield "FSDP2, hidden, audit", fully_sharded(nll, gather="hidden", **AUDIT)
    yield "FSDP2, NLLHead", fully_sharded(nll, wrapper="NLLHead")
    yield "FSDP2, gather_head", fully_sharded(logprobs, wrapper="gather_head")
    yield "DDP, window", replicated()
    if world == 4:
        yield "replicas, nll", fully_sharded(nll, shape=(2, 2))
        yield "replicas, hidden", fully_sharded(nll, shape=(2, 2), gather="hidden")
        yield "nodes, nll", fully_sharded(nll, gather="hidden", nodes=2)
        yield "nodes, logprobs", fully_sharded(logprobs, gather="hidden", nodes=2)


def under_zero() -> Iterator[tuple[str, dict[str, Any]]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    world = dist.get_world_size()
    for function in ("chunked_nll", "chunked_logprobs"):
        for gather in ("head", "hidden", "stream"):
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            }
            engine = deepspeed.initialize(
                model=Step(function, gather), config=config, model_parameters=None
            )[0]
            own = even(N, world)
            hidden = cut(drawn(N, H, seed=1), dist.get_rank(), own).requires_grad_()
            with ours.count_collectives() as count:
                loss = engine(hidden, cut(labels_of(), dist.get_rank(), own))
                engine.backward(loss)
            gradient = safe_get_full_grad(engine.module.head.weight)
            bits = {"loss": loss, "d hidden": hidden.grad, "d weight": gradient}
            yield (
                f"ZeRO-3, {gather}, {function}",
                {
                    "bits": {name: hashed(x) for name, x in bits.items()},
                    "collectives": {
                        kind: [number, count.bytes(kind)] for kind, number in count.counts().items()
                    },
                },
            )


class Step(nn.Module):
    def __init__(self, function: str, gather: str) -> None:
        super().__init__()
        self.head, self.function, self.gather = linear(V + 1), function, gather

    def forward(self, hidden: Any, labels: Any) -> Any:
        head = self.head.weight if self.gather == "head" else self.head
        out = getattr(ours, self.function)(hidden, head, labels, gather=self.gather, **FEW)
        return out.loss if hasattr(out, "loss") else -out.logprobs.sum() / N


def rank_of(rank: int, world: int, part: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", f"file://{folder}/store{world}", rank=rank, world_size=world)
    found = dict(on_ranks() if part == "ranks" else under_zero())
    Path(folder, f"{world}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that is still there ends one of thirty ranks with SIGABRT


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """What libraries print is not what is written down."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)


def spread(part: str, worlds: tuple[int, ...]) -> dict[str, Any]:
    """Of each number of ranks; by rank."""
    calls: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            torch.multiprocessing.spawn(rank_of, (world, part, folder), world)
            for rank in range(world):
                text = Path(folder, f"{world}.{rank}").read_text(encoding="utf-8")
                for name, call in json.loads(text).items():
                    calls[f"{name}, rank {rank} of {world}"] = call
    return calls


def main(part: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    np.seterr(all="ignore")
    with stdout_is_stderr():
        if part in ("ranks", "zero"):
            calls = spread(part, (2, 4) if part == "ranks" else (2,))
        else:
            calls = on_one_process() if part == "torch" else interpreted()
    print(json.dumps(calls))


if __name__ == "__main__":
    main(sys.argv[1])
