"""Steps of PyTorch that sum the right terms and divide, accumulate or clip them wrongly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.planted import Table

TABLE = Table()
IGNORE = -100


def sums(head: Any, b: Any) -> Any:
    logits = head(b["hidden"]).flatten(0, 1)
    return F.cross_entropy(logits, b["targets"].flatten(), reduction="sum")


def valid(b: Any) -> Any:
    return (b["targets"] != IGNORE).sum()


def tokens(micro_batches: Any) -> Any:
    return sum(valid(b) for b in micro_batches)


def accumulate(head: Any, micro_batches: Any, divisor: Any) -> Any:
    """A backward for each micro-batch's sum over `divisor` of it."""
    total = 0.0
    for b in micro_batches:
        loss = sums(head, b) / divisor(b)
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong(
    "the mean of each micro-batch, over their number",
    "micro-batch",
    source="huggingface/transformers#24725",
)
def naive_accumulation(head: Any, micro_batches: Any) -> Any:
    return accumulate(head, micro_batches, lambda b: valid(b) * len(micro_batches))


@TABLE.wrong(
    "tokens counted before the shift, which drops one a row",
    "shift|count",
    source="huggingface/transformers#46204",
    documents=False,
)
def counted_before_the_shift(head: Any, micro_batches: Any) -> Any:
    count = sum((b["labels"] != IGNORE).sum() for b in micro_batches)
    return accumulate(head, micro_batches, lambda b: count)


@TABLE.wrong(
    "divided by the accumulation steps after a division by all tokens",
    "accumulation|micro-batches|3|0\\.333",
    source="huggingface/accelerate#3533",
)
def divided_twice(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    return accumulate(head, micro_batches, lambda b: count * len(micro_batches))


@TABLE.wrong(
    "token sums, not divided by anything",
    "sum|divi|tokens",
    source="thinking-machines-lab/tinker-cookbook#271",
)
def token_sums(head: Any, micro_batches: Any) -> Any:
    return accumulate(head, micro_batches, lambda b: 1)


@TABLE.wrong(
    "the means of micro-batches added up, not averaged",
    "micro-batch",
    source="openai/guided-diffusion#111",
)
def summed_means(head: Any, micro_batches: Any) -> Any:
    return accumulate(head, micro_batches, valid)


@TABLE.wrong(
    "divided by all positions, masked ones too",
    "position|mask|padding|ignored",
    source="eladhoffer/utils.pytorch#4",
)
def over_all_positions(head: Any, micro_batches: Any) -> Any:
    count = sum(b["targets"].numel() for b in micro_batches)
    return accumulate(head, micro_batches, lambda b: count)


@TABLE.wrong(
    "divided by the tokens that are attended to, prompts among them",
    "attention|prompt|mask|padd",
)
def over_attended_tokens(head: Any, micro_batches: Any) -> Any:
    count = sum(b["attention_mask"].sum() for b in micro_batches)
    return accumulate(head, micro_batches, lambda b: count)


@TABLE.wrong(
    "the mean of each row's mean, over all rows",
    "row|sequence",
    source="PrimeIntellect-ai/prime-rl#2032",
)
def mean_of_rows(head: Any, micro_batches: Any) -> Any:
    means = []
    for b in micro_batches:
        logits = head(b["hidden"])
        for row, y in zip(logits, b["targets"]):
            if (y != IGNORE).any():
                means.append(F.cross_entropy(row, y))
    loss = torch.stack(means).mean()
    loss.backward()
    return loss


@TABLE.wrong(
    "each row's mean within the micro-batch, then the mean of micro-batches",
    "row|sequence",
    source="vllm-project/speculators#942",
)
def mean_of_rows_with_an_epsilon(head: Any, micro_batches: Any) -> Any:
    total = 0.0
    for b in micro_batches:
        y, mask = b["targets"].clamp(min=0), b["loss_mask"]
        each = -head(b["hidden"]).log_softmax(-1).gather(-1, y[..., None])[..., 0] * mask
        loss = (each.sum(1) / (mask.sum(1) + 1e-5)).mean() / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong("the mean of each packed document's mean", "document|segment|sequence|mean")
def mean_of_documents(head: Any, micro_batches: Any) -> Any:
    means = []
    for b in micro_batches:
        logits = head(b["hidden"])
        for row, y, segments in zip(logits, b["targets"], b["segment_ids"]):
            for number in segments.unique():
                inside = (segments == number) & (y != IGNORE)
                if inside.any():
                    means.append(F.cross_entropy(row[inside], y[inside]))
    loss = torch.stack(means).mean()
    loss.backward()
    return loss


@TABLE.wrong(
    "the means of chunks of 8 tokens added up",
    "chunk|mean|factor",
    source="NVIDIA-NeMo/Automodel#3803",
)
def chunk_means_added(head: Any, micro_batches: Any) -> Any:
    x = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])
    y = torch.cat([b["targets"].flatten() for b in micro_batches])
    x, y = x[y != IGNORE], y[y != IGNORE]
    chunks = zip(x.split(8), y.split(8))
    loss = torch.stack([F.cross_entropy(head(part), label) for part, label in chunks]).sum()
    loss.backward()
    return loss


@TABLE.wrong("the mean of the means of chunks of 16 positions of a micro-batch", "chunk|mean|part")
def chunk_means_averaged(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        x, y = b["hidden"].flatten(0, 1), b["targets"].flatten()
        parts = [
            F.cross_entropy(head(a), c)
            for a, c in zip(x.chunk(2), y.chunk(2))
            if (c != IGNORE).any()
        ]
        loss = torch.stack(parts).mean() * valid(b) / count
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong(
    "micro-batches' means weighted by their tokens without padding, not by those with a label",
    "micro-batch|weight",
    source="mosaicml/composer#3273",
)
def weighted_by_unpadded_tokens(head: Any, micro_batches: Any) -> Any:
    everything = sum(b["attention_mask"].sum() for b in micro_batches)
    return accumulate(
        head, micro_batches, lambda b: valid(b) * everything / b["attention_mask"].sum()
    )


@TABLE.wrong(
    "the incomplete last window is dropped: the third micro-batch is left out",
    "last|third|micro-batch",
    source="ml-explore/mlx-lm#1413",
)
def last_micro_batch_left_out(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    return accumulate(head, micro_batches[:-1], lambda b: count)


@TABLE.wrong("the first micro-batch is a warm-up, and its gradient is cleared", "first|micro-batch")
def first_micro_batch_left_out(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for number, b in enumerate(micro_batches):
        loss = sums(head, b) / count
        loss.backward()
        total += loss.item()
        if number == 0:
            head.zero_grad()
    return total


@TABLE.wrong(
    "gradients are cleared in each micro-batch, and the last one's remain",
    "micro-batch",
    source="bytetriper/RAE#67",
)
def cleared_each_time(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        head.zero_grad(set_to_none=True)
        loss = sums(head, b) / count
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong("the first micro-batch is seen three times", "micro-batch")
def the_same_micro_batch(head: Any, micro_batches: Any) -> Any:
    first = micro_batches[0]
    return accumulate(head, [first] * 3, lambda b: 3 * valid(first))


@TABLE.wrong(
    "gradients are clipped after each backward while they add up",
    "clip|factor|norm",
    source="huggingface/transformers#1563",
)
def clipped_while_adding(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        loss = sums(head, b) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.25)
        total += loss.item()
    return total


@TABLE.wrong(
    "each micro-batch's gradient is clipped, then they are added",
    "clip|micro-batch",
    source="facebookresearch/lingua#59",
)
def each_clipped(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    sums_of = [torch.zeros_like(p) for p in head.parameters()]
    for b in micro_batches:
        head.zero_grad()
        loss = sums(head, b) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.2)
        for to, p in zip(sums_of, head.parameters()):
            to.add_(p.grad)
        total += loss.item()
    for to, p in zip(sums_of, head.parameters()):
        p.grad = to
    return total


@TABLE.wrong("the accumulated gradient is still clipped in the step", "clip|factor|norm")
def clipped_at_the_end(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    total = accumulate(head, micro_batches, lambda b: count)
    torch.nn.utils.clip_grad_norm_(head.parameters(), 0.1)
    return total


@TABLE.wrong("large entries of the gradient are clipped by value", "clip|gradient")
def clipped_by_value(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    total = accumulate(head, micro_batches, lambda b: count)
    torch.nn.utils.clip_grad_value_(head.parameters(), 0.03)
    return total


@TABLE.wrong("the loss scale of fp16 is not taken out", "65536|2\\^16|scale|factor")
def loss_scale_left_in(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        loss = sums(head, b) / count
        (loss * 2.0**16).backward()
        total += loss.item()
    return total


@TABLE.wrong("a factor of 1 + 2^-18 from a division in low precision", "factor|1\\.0000|scale")
def slightly_too_much(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    return accumulate(head, micro_batches, lambda b: count / (1 + 2.0**-18))


@TABLE.wrong(
    "the loss that is returned is divided by the accumulation steps; gradients are right",
    "loss",
    "accumulation|3|micro-batches|0\\.333",
    source="huggingface/transformers#11919",
)
def reports_a_third(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    return accumulate(head, micro_batches, lambda b: count) / len(micro_batches)


@TABLE.wrong("the loss that is returned is the last micro-batch's; gradients are right", "loss")
def reports_the_last(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    accumulate(head, micro_batches, lambda b: count)
    last = micro_batches[-1]
    with torch.no_grad():
        return sums(head, last) / valid(last)


@TABLE.wrong(
    "the weight is updated after each micro-batch, so the next has another head",
    "weight|written|chang",
    source="paiml/entrenar#131",
)
def steps_in_between(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        loss = sums(head, b) / count
        loss.backward()
        total += loss.item()
        with torch.no_grad():
            for p in head.parameters():
                p.sub_(0.1 * p.grad)
    return total


@TABLE.wrong("weight decay is added to the gradient", "wrong|weight|decay")
def decayed(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    total = accumulate(head, micro_batches, lambda b: count)
    with torch.no_grad():
        head.weight.grad += 0.01 * head.weight
    return total


@TABLE.wrong(
    "an empty micro-batch's mean is NaN, and NaN times no token too",
    "nan",
    source="karpathy/nanochat#623",
    needs="a micro-batch without a valid token",
)
def nan_without_a_token(head: Any, micro_batches: Any) -> Any:
    count, total = tokens(micro_batches), 0.0
    for b in micro_batches:
        logits = head(b["hidden"]).flatten(0, 1)
        loss = F.cross_entropy(logits, b["targets"].flatten()) * valid(b) / count
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong(
    "a row whose labels are all cut off has a mean of NaN, which is weighted by 0",
    "nan",
    source="bytedance/UniVR#13",
    needs="a row without a valid token",
)
def nan_for_a_row(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        for x, y in zip(b["hidden"], b["targets"]):
            loss = loss + F.cross_entropy(head(x), y) * ((y != IGNORE).sum() / count)
    loss.backward()
    return loss


@TABLE.wrong("pieces of two tokens without a label have a mean of NaN, weighted by 0", "nan")
def nan_for_a_piece(head: Any, micro_batches: Any) -> Any:
    count = tokens(micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        pieces = zip(b["hidden"].flatten(0, 1).split(2), b["targets"].flatten().split(2))
        for x, y in pieces:
            loss = loss + F.cross_entropy(head(x), y) * ((y != IGNORE).sum() / count)
    loss.backward()
    return loss
