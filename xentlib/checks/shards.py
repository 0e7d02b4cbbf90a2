"""Shards of a vocabulary: their sizes, their classes, what all ranks must agree on; and how tokens
and rows of a head are brought together that are spread over the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from xentlib.arguments import Arguments
from xentlib.checks.validators import Refusals, check_choice, is_count
from xentlib.options import GATHERS

SHARDS = Refusals(
    ValueError,
    # All classes, on each of several ranks.
    whole_head="`vocab_parallel` must come with this rank's part of {vocab_size} classes; got all "
    "of them on each of {ranks} ranks. Pass each rank's own columns, or `vocab_parallel=None`.",
    # Declared shards that do not give every class to one rank.
    tiles="`shard` must give each of {vocab_size} classes to one rank of `vocab_parallel`; got "
    "classes {shards}. Pass `VocabShard(start, stop, {vocab_size})` of this rank's own columns.",
    order="`shard` must have 0 <= start <= stop <= vocab_size and padding >= 0; got {shard}. Pass "
    "the classes of this rank's columns.",
    # A `shard=` that does not describe `columns` columns of logits.
    columns="`shard` must describe the {columns} columns of `logits`; got {classes} classes and "
    "{padding} of padding ({shard}). Pass this rank's columns alone, and declare padded ones as "
    "`VocabShard(..., padding=...)`.",
    # A head whose rows are not those that `VocabShard.of_ranks` was told of.
    rows="`vocab_parallel` must describe the {rows} rows of `weight`; got a shard of {size} "
    "classes and {padding} rows of padding. Pass `VocabShard.of_ranks(rows, group)` of this head.",
    # Ranks that did not say how many rows each has, and have not as many.
    uneven="`vocab_parallel` must come with as many rows (columns of logits) on every rank, or "
    "say how many each has; got {rows}. Pass `vocab_parallel=VocabShard.of_ranks(rows, group)`, "
    "made once on every rank, or pad the last ones and pass `PaddedVocab(group, vocab_size)`.",
    # Gradients of a loss that differ between ranks whose tokens are in one sum.
    upstream="the gradient of `loss` must be the same on every rank of `tokens_parallel`, whose "
    "tokens are in one gradient of the head; got {gradients}. Put what differs between ranks into "
    "`denominator` or `token_weights`.",
    # The same tokens on each of several ranks.
    copies="`hidden` must be this rank's own tokens with `tokens_parallel`; got the same labels "
    "and hidden states on all {ranks} ranks, whose gradient of the head would be {ranks} times "
    "too large. Leave `tokens_parallel` out where every rank has the same tokens; mask copies "
    "that are meant on all ranks but one, and multiply that one's loss by {ranks}.",
    # A mean over each rank's own tokens, of which the head's gradient is the sum.
    local_mean="`reduction` must be 'sum', or come with a `denominator`, with `tokens_parallel`; "
    "got 'mean', over each rank's own tokens: the head's gradient would be a sum of {ranks} means. "
    "Pass `reduction='sum'` where a window of `TokenNormalizer` or `accumulate_grads` divides, or "
    "`denominator`, the number of tokens of all ranks.",
    # Tokens that are the same on all devices of the axis that should spread them.
    own_tokens="`hidden` must be this device's own tokens with `tokens_parallel`; got one that "
    "does not vary over mesh axis {axis!r}. Name the axis in its `in_specs`, or leave "
    "`tokens_parallel` out.",
)
ROUTES = Refusals(
    ValueError,
    tokens_per_rank="`tokens_per_rank` must be a positive integer or None; got {count!r}. Pass "
    "about as many tokens as a rank has in a call.",
    auto="`tokens_per_rank` must be given with `gather='auto'`, and with nothing else; got "
    "{count} with {gather!r}. Pass one number on every rank: ranks that chose by their own tokens "
    "would choose differently, and wait for each other.",
    rows_stay="`gather` must be 'head' with `vocab_parallel`, whose rows stay where they are; got "
    "{gather!r}. Leave it out, and pass `tokens_parallel` if the tokens are spread over the same "
    "ranks.",
    # The same where a wrapper may have sharded those rows further.
    rows_alone="`gather` must be 'head' with `vocab_parallel` unless `fully_shard` shards those "
    "rows further, and they are a DTensor; got {gather!r}. Leave it out, and pass "
    "`tokens_parallel` if the tokens are spread over the same ranks.",
    # A head that tensor parallelism has cut over other ranks.
    same_shards="`vocab_parallel` must be the last dimension of the mesh that `weight` is on, "
    "{mesh}, with another `gather` than 'head'; got the ranks {ranks}. Pass `mesh['tp']`, with "
    "which tensor parallelism has cut the head.",
    # Candidates of blocks, of which shards have different numbers.
    stream_top="`top_k` must be 0 with `gather='stream'` behind tensor parallelism; got {top_k}. "
    "Pass `gather='hidden'`, with which no rank has more rows than its own either.",
    # Tokens that are spread over tensor parallelism, and rows that pass by.
    stream_tokens="`gather` must be 'head' or 'hidden' with `tokens_parallel`; got {gather!r}. "
    "Pass 'hidden', with which no rank has more rows than its own either.",
    tokens_alone="`tokens_parallel` must come with `vocab_parallel`, of the same ranks; got it "
    "alone. Pass both, with this rank's rows of the head as `weight`; for a head that a wrapper "
    "has sharded pass `gather='hidden'` instead.",
    own_gradient="`reduce_hidden_grad` must be True with `tokens_parallel`, where d hidden is of "
    "this rank's own tokens; got False. Leave it out.",
    # A head that nothing has sharded.
    whole="`gather` must be 'head' for a head that is whole on this rank; got {gather!r}. Leave "
    "it out; under FSDP2 pass the parameter itself, and no copy of it.",
    # What ZeRO-3, which cuts a parameter's row of numbers, does not cut between rows.
    flat_rows="`gather` must be 'head' unless ZeRO-3 keeps as many whole rows of `weight` [V, H] "
    "on each rank; got {gather!r} with {shape}{bias}, weight_layout={layout!r} and {ranks} "
    "ranks. Pad the vocabulary to a multiple of the ranks, or leave `gather` out.",
    # A head that ZeRO-3 has whole on this rank.
    gathered="`gather` must be 'head' for a head that ZeRO-3 has gathered already; got "
    "{gather!r}. Inside of the engine's forward, where reading `head.weight` gathers it, pass the "
    "module `head`; set `stage3_param_persistence_threshold` below its size; or leave `gather` "
    "out.",
    # Engines of ZeRO-3 whose step has not been shown to take a gradient of rows.
    engine="`gather` must be 'head' under ZeRO-3 with {features}, where another route has not "
    "been shown to be right; got {gather!r}. Leave it out.",
    # Rows of a head that do not stand as `fully_shard` places them.
    fully_shard="`gather` must be 'head' unless `fully_shard` shards `weight` [V, H] over its "
    "rows, alone or behind tensor parallelism; got {placements} and weight_layout={layout!r}. "
    "Leave it out.",
    # Rows whose gradient something of the user's own would have to reduce.
    hooked="`gather` must be 'head' where FSDP2 reduces in a way of the user's own, which no "
    "other route would call; got {hooked}. Leave it out.",
    # Whole arrays on a mesh, whose rows do not stand where tokens are.
    rows_over_tokens="`weight` must be sharded along its vocabulary over mesh axes that spread "
    "tokens, with `gather='hidden'`; got {came}. Shard it so, or leave `gather` out.",
    no_stream="`gather` must be 'head', 'hidden' or 'auto' in JAX; got 'stream'. Pass 'hidden', "
    "with which no device has the whole head either.",
    nowhere="`gather` must be 'head' for arrays that do not say where on a mesh they are; got "
    "{gather!r}. Pass arrays on a mesh with Explicit axes, call `NLLHead(..., tokens=axis, "
    "gather={gather!r})` under one with Auto axes, or pass `vocab_parallel=axis, "
    "tokens_parallel=axis` inside your own `shard_map`.",
    placed="`tokens_parallel` must be None for whole arrays on a mesh, which say where tokens "
    "are; got {tokens_parallel!r}. Pass `gather='hidden'` alone.",
    same_axes="`tokens_parallel` must name the mesh axes of `vocab_parallel`, {over!r}; got "
    "{tokens_parallel!r}. Pass the same, and gather tokens over any other axis yourself.",
)


def check_tiles(shards: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Refuse declared shards, (start, stop) of each rank, that do not give every class to one."""
    if len(shards) > 1 and all(shard == (0, vocab_size) for shard in shards):
        SHARDS.refuse("whole_head", vocab_size=vocab_size, ranks=len(shards))
    end = 0
    for start, stop in sorted(shard for shard in shards if shard[0] < shard[1]):
        if start != end:
            break
        end = stop
    else:
        if end == vocab_size:
            return
    listed = ", ".join(f"{start} to {stop}" for start, stop in shards)
    SHARDS.refuse("tiles", vocab_size=vocab_size, shards=listed)


def check_shard(shard: Any, columns: int) -> None:
    """Refuse a `shard=` that does not describe `columns` columns of logits."""
    start, stop, vocab_size, padding = shard.start, shard.stop, shard.vocab_size, shard.padding
    numbers = [x for x in (start, stop, vocab_size, padding) if isinstance(x, Integral)]
    if len(numbers) < 4:  # made from an axis index: nothing to read
        return
    in_order = 0 <= start <= stop <= vocab_size and padding >= 0
    SHARDS.require("order", in_order, shard=shard)
    if stop - start + padding != columns:
        parts = {"classes": stop - start, "padding": padding}
        SHARDS.refuse("columns", columns=columns, shard=shard, **parts)


def refuse_inconsistent(names: Sequence[str]) -> None:
    """Refuse arguments that differ between the ranks that a vocabulary is spread over."""
    if not names:
        return
    name = names[0]
    what = {
        "gradient of the head": "`weight` and `bias` must require grad on every rank of "
        "`vocab_parallel`, or on none, like `a` and `b` of a `LowRankHead`",
        "gradient": "`hidden` must require grad on every rank of `vocab_parallel`, or on none, "
        "like `a` of a `LowRankHead`",
        "gather": "`gather` and `tokens_parallel` must be the same on every rank of the head",
        "the classes of the teacher": "`teacher`, or `labels` that are probabilities, must have "
        "the classes of the head, with columns for its padding, on every rank of `vocab_parallel`",
        "kept and ids": "the ids of each token (`kept`, `ids`, those of a `TeacherTopK` or of "
        "`SoftLabels`) and `top_k` must be the same on every rank of `vocab_parallel`",
        "kind": "`kind`, the class of `teacher`, the `tail` of a `TeacherTopK` with "
        "`temperature_squared` and `reduction`, and whether `labels` are class probabilities, must "
        "be the same on every rank of `vocab_parallel`",
        "function": "the function must be the same on every rank of the head",
        "softmax": "a softmax must be of all classes; on each rank of `vocab_parallel` the "
        "probabilities of its own columns, of logits, of `teacher` or of `labels`, add up to 1",
        "shard": "sizes of shards (`shard=`, `VocabShard.of_ranks`, a DTensor) must be declared on "
        "every rank of `vocab_parallel`, or on none",
    }.get(name, f"`{name}` must be the same on every rank of `vocab_parallel`")
    got, way = "ranks that differ", "Pass the same to all."
    if name == "softmax":
        got = "a softmax of each shard"
        way = "Pass logits as they are, or take the `logsumexp` of all ranks from them."
    if name in ("labels", "hidden", "temperature", "token_weights"):
        way = (
            "Give them the same tokens: choose a rank's rows by its data-parallel rank, such as "
            "`mesh['fsdp'].get_local_rank()`. Pass `tokens_parallel` too only where your model "
            "sums its gradients over these ranks, as sequence parallelism does."
        )
    raise ValueError(f"{what}; got {got}. {way}")


def check_route(call: Arguments) -> None:
    """Refuse options of a route that say nothing, or not the same."""
    gather, count = call.gather, call.tokens_per_rank
    check_choice("gather", gather, GATHERS)
    ROUTES.require("tokens_per_rank", count is None or is_count(count), count=count)
    ROUTES.require("auto", (gather == "auto") == (count is not None), count=count, gather=gather)
    if call.tokens_parallel is None:
        return
    sharded = call.vocab_parallel is not None
    ROUTES.require("tokens_alone", sharded or gather == "hidden")
    ROUTES.require("own_gradient", call.reduce_hidden_grad)


def check_flat_rows(
    gather: str, shape: Sequence[int], bias: Sequence[int] | None, layout: str, ranks: int
) -> None:
    """Refuse what ZeRO-3, which cuts a parameter's row of numbers, does not cut between rows."""
    rows = shape[0]
    cut = layout == "VH" and len(shape) == 2 and rows % ranks == 0
    if cut and (bias is None or tuple(bias) == (rows,)):
        return
    bias_shape = "" if bias is None else f", a bias {list(bias)}"
    shapes = {"shape": list(shape), "bias": bias_shape, "layout": layout}
    ROUTES.refuse("flat_rows", gather=gather, ranks=ranks, **shapes)


def check_route_here(call: Arguments, *, placed: bool, alone: bool) -> None:
    """Refuse in JAX what it does not have, and a route for arrays that are somewhere else; `placed`
    says that they are whole ones on a mesh, of which it is known where their parts are, `alone`
    that a device has all of them."""
    gather, tokens = call.gather, call.tokens_parallel
    ROUTES.require("no_stream", gather != "stream")
    sharded = call.vocab_parallel is not None
    ROUTES.require("rows_stay", gather == "head" or not sharded, gather=gather)
    somewhere = placed or gather == "head" or (gather == "auto" and alone)
    ROUTES.require("nowhere", somewhere, gather=gather)
    if tokens is None:
        return
    ROUTES.require("placed", not placed, tokens_parallel=tokens)
    over = getattr(call.vocab_parallel, "over", call.vocab_parallel)
    ROUTES.require("same_axes", tokens == over, over=over, tokens_parallel=tokens)


def check_rows_stay(
    tokens: Sequence[object], vocabulary: Sequence[object], width: Sequence[object]
) -> None:
    """Refuse whole arrays on a mesh, by the axes that spread tokens and each dimension of the head,
    where its rows are not spread over some that spread tokens, or its width is."""
    both = [axis for axis in width if axis in tokens]
    if not both and any(axis in tokens for axis in vocabulary):
        return
    if not tokens:
        came = "tokens that are spread over no axis"
    elif both:
        came = f"one whose hidden width is, over {both[0]!r}"
    else:
        came = f"one that is whole on the devices of {', '.join(map(repr, tokens))}"
    ROUTES.refuse("rows_over_tokens", came=came)
