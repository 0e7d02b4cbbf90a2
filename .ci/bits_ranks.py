"""The calls of bits.py on gloo ranks: `python .ci/bits_ranks.py ranks|zero`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bits_torch import (
    AUDIT,
    FEW,
    KINDS,
    LOSS,
    OPTIONS,
    OUTPUTS,
    WIDTH,
    H,
    K,
    Model,
    N,
    V,
    classes,
    drawn,
    hashed,
    labels_of,
    linear,
    measured,
    repeatable,
    sent,
)
from torch import nn

import xentlib
from xentlib import torch as ours


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
    third: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A vocabulary over ranks, and with `tokens` the tokens too; with `vocab` padding follows;
    `third` stands in place of labels."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    over = group if vocab is None else xentlib.PaddedVocab(group, vocab)
    rows = sizes or even(V, world)
    if len(set(rows)) > 1 and not tokens:
        over = declared(rows[rank], over, vocab)
    own = even(N, world) if tokens else (N,) * world
    hidden, labels = drawn(N, H, seed=1), labels_of(vocab=vocab or V)
    if tokens:
        hidden, labels = cut(hidden, rank, own), cut(labels, rank, own)
        options["tokens_parallel"] = group
    hidden.requires_grad_()
    weight = cut(drawn(V, H, seed=2), rank, rows).requires_grad_()
    bias = cut(drawn(V, seed=3), rank, rows).requires_grad_()
    third = labels if third is None else third
    return measured(
        lambda: getattr(ours, function)(
            hidden, weight, third, bias=bias, vocab_parallel=over, **options
        ),
        {"hidden": hidden, "weight": weight, "bias": bias},
    )


def of_several_classes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Class probabilities, sets of classes and divergences over shards, over tokens too, and along
    the routes of a sharded head."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, own = even(V, world), even(N, world)
    of, teacher = classes(), drawn(N, WIDTH, seed=21)
    few = ours.SoftLabels(of["ids"], drawn(N, K, seed=32).softmax(1))
    top_k = ours.TeacherTopK(of["ids"], drawn(N, K, seed=33).log_softmax(1) - 0.3)
    sums, entropy = {"reduction": "sum"}, {"entropy": True}
    logprobs = {"ids and top_k": {"ids": of["ids"], "top_k": 3}, "kept": {"kept": of["kept"]}}

    def local(x: Any) -> Any:
        return type(x)(*(local(y) for y in x)) if isinstance(x, tuple) else cut_of(x)

    def cut_of(x: Any) -> Any:
        return cut(x, rank, own) if isinstance(x, torch.Tensor) else x

    def columns(x: torch.Tensor, dim: int) -> torch.Tensor:
        return cut(x, rank, rows, dim)

    dense = columns(drawn(N, V, seed=31).softmax(1), 1)
    heads = ours.TeacherHead(teacher, columns(drawn(V, WIDTH, seed=22), 0), None, 1.0, None)
    logits = ours.TeacherLogits(columns(3 * drawn(N, V, seed=23), 1))
    yield "shards, probabilities", over_shards("chunked_nll", third=dense, **sums, **LOSS)
    yield "shards, probabilities of a few", over_shards("chunked_nll", third=few, **FEW, **sums)
    for name, how in logprobs.items():
        yield f"shards, {name}", over_shards("chunked_logprobs", **how, **entropy)
        mine = {key: cut_of(x) for key, x in how.items()}
        yield f"shards and tokens, {name}", over_shards("chunked_logprobs", tokens=True, **mine)
    of_teacher = {"head": heads, "logits": logits, "top k": top_k}
    for name, third in of_teacher.items():
        for kind in KINDS:
            key = f"shards, {kind['kind']} of {name}"
            yield key, over_shards("chunked_divergence", third=third, **kind, **sums)
    mine = local(few)
    yield "shards and tokens, few", over_shards("chunked_nll", tokens=True, third=mine, **sums)
    for gather in ("head", "hidden", "stream"):
        for name, how in logprobs.items():
            chosen = {key: cut_of(x) for key, x in how.items()}
            calls = fully_sharded("chunked_logprobs", gather=gather, **chosen)
            yield f"FSDP2, {gather}, {name}", calls
        if gather != "stream":
            yield f"FSDP2, {gather}, few", fully_sharded("chunked_nll", gather=gather, third=mine)
        teacher_k = local(top_k)
        calls = fully_sharded("chunked_divergence", gather=gather, third=teacher_k, **KINDS[0])
        yield f"FSDP2, {gather}, of top k", calls


def declared(rows: int, over: Any, vocab: int | None = None) -> Any:
    """Shards of any sizes; commits before `VocabShard.of_ranks` find them out themselves."""
    of_ranks = getattr(xentlib.VocabShard, "of_ranks", None)
    return over if of_ranks is None else of_ranks(rows, dist.group.WORLD, vocab)


def logits_over_shards(**options: Any) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    logits = cut(3 * drawn(N, V, seed=4), rank, even(V, world), 1).requires_grad_()
    over = declared(logits.shape[1], dist.group.WORLD)
    return measured(
        lambda: ours.vocab_parallel_logprobs(logits, labels_of(), vocab_parallel=over, **options),
        {"logits": logits},
    )


def fully_sharded(
    function: str,
    *,
    shape: tuple[int, ...] = (),
    policy: bool = False,
    nodes: int = 0,
    wrapper: str = "",
    third: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A head under `fully_shard`, each rank with its own tokens; `third` as of `over_shards`."""
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
    labels = cut(labels_of(), rank, own) if third is None else third

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
    return {"bits": {"d weight": hashed(head.weight.grad)}, "collectives": sent(count)}


def on_ranks() -> Iterator[tuple[str, dict[str, Any]]]:
    """The same order on every rank."""
    world = dist.get_world_size()
    nll, logprobs, entropy = "chunked_nll", "chunked_logprobs", {"entropy": True}
    uneven = {2: (100, 31), 4: (50, 40, 41, 0)}[world]
    yield "shards, nll", over_shards(nll, outputs=OUTPUTS, **LOSS)
    yield "shards, nll, chunks", over_shards(nll, **FEW)
    yield "shards, nll, audit", over_shards(nll, **AUDIT, **LOSS)
    yield "shards, uneven", over_shards(nll, uneven)
    yield "shards, padded", over_shards(nll, vocab=V - 6)
    yield "shards, logprobs", over_shards(logprobs, **entropy, **OPTIONS)
    yield "shards, from logits", logits_over_shards(**entropy)
    yield "shards and tokens, nll", over_shards(nll, tokens=True, reduction="sum", **LOSS)
    yield "shards and tokens, logprobs", over_shards(logprobs, tokens=True, **FEW, **entropy)
    for gather in ("head", "hidden", "stream"):
        yield f"FSDP2, {gather}, nll", fully_sharded(nll, gather=gather, **FEW)
        yield f"FSDP2, {gather}, logprobs", fully_sharded(logprobs, gather=gather, **entropy)
        yield f"FSDP2, {gather}, bf16", fully_sharded(nll, gather=gather, policy=True)
    yield "FSDP2, hidden, audit", fully_sharded(nll, gather="hidden", **AUDIT)
    yield "FSDP2, NLLHead", fully_sharded(nll, wrapper="NLLHead")
    yield "FSDP2, gather_head", fully_sharded(logprobs, wrapper="gather_head")
    yield "DDP, window", replicated()
    yield from of_several_classes()
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
            hashes = {name: hashed(x) for name, x in bits.items()}
            yield f"ZeRO-3, {gather}, {function}", {"bits": hashes, "collectives": sent(count)}


class Step(nn.Module):
    def __init__(self, function: str, gather: str) -> None:
        super().__init__()
        self.head, self.function, self.gather = linear(V + 1), function, gather

    def forward(self, hidden: Any, labels: Any) -> Any:
        head = self.head.weight if self.gather == "head" else self.head
        out = getattr(ours, self.function)(hidden, head, labels, gather=self.gather, **FEW)
        return out.loss if hasattr(out, "loss") else -out.logprobs.sum() / N


def rank_of(rank: int, world: int, part: str, folder: str) -> None:
    repeatable()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", f"file://{folder}/store{world}", rank=rank, world_size=world)
    calls = dict(on_ranks() if part == "ranks" else under_zero())
    Path(folder, f"{world}.{rank}").write_text(json.dumps(calls), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that is still there ends one of thirty ranks with SIGABRT


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


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """What libraries print is not what is written down."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)


if __name__ == "__main__":
    with stdout_is_stderr():
        calls = spread(sys.argv[1], (2, 4) if sys.argv[1] == "ranks" else (2,))
    print(json.dumps(calls))
