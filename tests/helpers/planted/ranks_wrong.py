"""Wrong steps of PyTorch on two ranks, each with micro-batches of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F

from helpers.planted import Table
from helpers.planted.ranks_common import (
    IGNORE,
    accumulate,
    ddp,
    everywhere,
    fsdp,
    last,
    over_ranks,
    own,
    reduce_by_hand,
    sums,
    valid,
    vocabulary_parallel,
    world,
)

TABLE = Table()


@TABLE.wrong(
    "tokens counted on each rank alone, under DDP's mean",
    "rank",
    source="huggingface/transformers#34242",
)
def each_ranks_mean(head: Any, micro_batches: Any) -> Any:
    count = own(micro_batches)
    loss = accumulate(ddp(head), micro_batches, lambda b: count)
    return over_ranks(loss) / world()


@TABLE.wrong(
    "each micro-batch's mean on each rank", "rank", "micro-batch", source="verl-project/verl#5625"
)
def every_mean_alone(head: Any, micro_batches: Any) -> Any:
    n = len(micro_batches)
    loss = accumulate(ddp(head), micro_batches, lambda b: n * valid(b), last(micro_batches))
    return over_ranks(loss) / world()


@TABLE.wrong(
    "the global count, and DDP divides by the ranks as well",
    "rank|2|0\\.5|world",
    source="lightly-ai/lightly#1977",
)
def mean_of_the_wrapper_forgotten(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches)
    return over_ranks(accumulate(ddp(head), micro_batches, lambda b: count))


@TABLE.wrong(
    "token sums under FSDP2's mean: nothing divides by the tokens",
    "sum|tokens|divi",
    source="radixark/miles#3231",
)
def sums_under_a_mean(head: Any, micro_batches: Any) -> Any:
    model = fsdp(head)
    loss = accumulate(model, micro_batches, lambda b: 1)
    return over_ranks(loss) / everywhere(micro_batches)


@TABLE.wrong(
    "the first micro-batch is reduced, and the others are not",
    "rank|reduc|sync|micro-batch",
    source="modelscope/FunASR#3472",
)
def synced_at_the_first(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches) / world()
    loss = accumulate(ddp(head), micro_batches, lambda b: count, lambda number: number == 0)
    return over_ranks(loss) / world()


@TABLE.wrong("never reduced", "rank|reduc|sync", source="speechbrain/speechbrain#2010")
def never_synced(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches) / world()
    loss = accumulate(ddp(head), micro_batches, lambda b: count, lambda number: False)
    return over_ranks(loss) / world()


@TABLE.wrong("DDP's mean, and a sum over ranks by hand after it", "twice|2|rank|reduc")
def reduced_again(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches) / world()
    loss = accumulate(ddp(head), micro_batches, lambda b: count, last(micro_batches))
    reduce_by_hand(head)
    return over_ranks(loss) / world()


@TABLE.wrong("multiplied by the number of ranks in the trainer and in the loss", "2|rank|world")
def times_the_ranks_twice(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches) / world() ** 2
    loss = accumulate(ddp(head), micro_batches, lambda b: count)
    return over_ranks(loss) / world() ** 2


@TABLE.wrong(
    "an all_reduce of the loss whose backward sums, and gradients summed by hand",
    "2|rank|twice|reduc",
    source="NVIDIA/apex#664",
)
def loss_reduced_with_its_graph(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches)
    loss = sum(sums(head, b) for b in micro_batches) / count
    loss = torch.distributed.nn.all_reduce(loss)
    loss.backward()
    reduce_by_hand(head)
    return loss.detach()


@TABLE.wrong("rank 0's count of tokens is used everywhere", "rank|count|factor|token")
def count_of_rank_0(head: Any, micro_batches: Any) -> Any:
    count = own(micro_batches)
    dist.broadcast(count, 0)
    loss = accumulate(ddp(head), micro_batches, lambda b: count)
    return over_ranks(loss) / world()


@TABLE.wrong(
    "the largest count of all ranks, as if all were padded to it", "rank|count|factor|token"
)
def largest_count(head: Any, micro_batches: Any) -> Any:
    count = over_ranks(own(micro_batches), dist.ReduceOp.MAX)
    loss = accumulate(ddp(head), micro_batches, lambda b: count)
    return over_ranks(loss) / world()


@TABLE.wrong("rank 1 has run out of data one micro-batch early", "micro-batch|rank|last")
def rank_1_is_short(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches)
    given = micro_batches[:-1] if dist.get_rank() == 1 else micro_batches
    loss = accumulate(head, given, lambda b: count)
    reduce_by_hand(head)
    return over_ranks(loss)


@TABLE.wrong("all ranks train on rank 0's share of the tokens alone", "rank")
def rank_0_alone(head: Any, micro_batches: Any) -> Any:
    count = own(micro_batches)
    loss = accumulate(head, micro_batches, lambda b: count)
    for p in head.parameters():
        dist.broadcast(p.grad, 0)
    dist.broadcast(loss, 0)
    return loss


@TABLE.wrong("the bias is left out of the reduction", "bias", bias=True)
def bias_not_reduced(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches)
    loss = accumulate(head, micro_batches, lambda b: count)
    dist.all_reduce(head.weight.grad)
    return over_ranks(loss)


@TABLE.wrong("gradients travel in fp16", "16|round")
def compressed(head: Any, micro_batches: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp(head)
    model.register_comm_hook(None, fp16_compress_hook)
    count = everywhere(micro_batches) / world()
    loss = accumulate(model, micro_batches, lambda b: count, last(micro_batches))
    return over_ranks(loss) / world()


@TABLE.wrong("each row's mean under DDP", "row|sequence", source="vllm-project/speculators#942")
def rows_under_ddp(head: Any, micro_batches: Any) -> Any:
    model, rows = ddp(head), []
    for b in micro_batches:
        logits = model(b["hidden"])
        rows += [F.cross_entropy(z, y) for z, y in zip(logits, b["targets"]) if (y >= 0).any()]
    loss = torch.stack(rows).mean()
    loss.backward()
    return over_ranks(loss) / world()


@TABLE.wrong(
    "micro-batch k is divided by the tokens of all ranks' k-th, then by the number of them",
    "micro-batch",
)
def step_by_step_counts(head: Any, micro_batches: Any) -> Any:
    n = len(micro_batches)
    loss = accumulate(ddp(head), micro_batches, lambda b: over_ranks(valid(b)) * n / world())
    return over_ranks(loss) / world()


@TABLE.wrong(
    "a rank whose labels are all ignored divides by 0",
    "nan",
    source="allenai/OLMo-core#657",
    needs="a rank without a valid token",
)
def nan_on_an_empty_rank(head: Any, micro_batches: Any) -> Any:
    share = own(micro_batches) * world() / everywhere(micro_batches)
    model, count, total = ddp(head), own(micro_batches), torch.zeros(())
    for b in micro_batches:
        loss = sums(model, b) / count * share
        loss.backward()
        total += loss.detach()
    return over_ranks(total) / world()


@TABLE.wrong(
    "across documents on both ranks, and a mean of each rank's", "document|segment", "rank"
)
def documents_and_ranks(head: Any, micro_batches: Any) -> Any:
    model, loss = ddp(head), torch.zeros(())
    count = sum((b["labels"][:, 1:] != IGNORE).sum() for b in micro_batches)
    for b in micro_batches:
        logits = model(b["hidden"])[:, :-1].flatten(0, 1)
        loss = loss + F.cross_entropy(logits, b["labels"][:, 1:].flatten(), reduction="sum") / count
    loss.backward()
    return over_ranks(loss) / world()


@TABLE.wrong(
    "a vocabulary over ranks, smoothed by each shard's mean log-probability",
    "smoothing",
    source="NVIDIA/Megatron-LM#737",
    label_smoothing=0.1,
)
def smoothed_by_the_shard(head: Any, micro_batches: Any) -> Any:
    return vocabulary_parallel(head, micro_batches, 0.1, local=True)
