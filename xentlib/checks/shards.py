"""Shards of a vocabulary: their sizes, their classes, what all ranks must agree on; and how tokens
and rows of a head are brought together that are spread over the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NoReturn

from xentlib.arguments import Arguments
from xentlib.checks.validators import check_choice, check_number
from xentlib.options import GATHERS


def check_shards(sizes: Sequence[int], vocab_size: int) -> None:
    """Refuse shards that cannot be those of the vocabulary they claim to be."""
    check_number(
        "vocab_size",
        vocab_size,
        "an integer >= 1, the classes of all shards",
        ok=isinstance(vocab_size, int) and vocab_size >= 1,
    )
    if sum(sizes) < vocab_size:
        raise ValueError(
            f"`vocab_parallel` must spread {vocab_size} classes over its ranks; got shards of "
            f"{tuple(sizes)}, {sum(sizes)} in all. Pass the number of classes that they hold."
        )


def refuse_whole_head(vocab_size: int, ranks: int) -> NoReturn:
    """Of as many classes, on each of several ranks."""
    raise ValueError(
        f"`vocab_parallel` must come with this rank's part of {vocab_size} classes; got all of "
        f"them on each of {ranks} ranks. Pass each rank's own columns, or `vocab_parallel=None`."
    )


def check_tiles(shards: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Refuse declared shards, (start, stop) of each rank, that do not give every class to one."""
    if len(shards) > 1 and all(shard == (0, vocab_size) for shard in shards):
        refuse_whole_head(vocab_size, len(shards))
    end = 0
    for start, stop in sorted(shard for shard in shards if shard[0] < shard[1]):
        if start != end:
            break
        end = stop
    else:
        if end == vocab_size:
            return
    raise ValueError(
        f"`shard` must give each of {vocab_size} classes to one rank of `vocab_parallel`; got "
        f"classes {', '.join(f'{start} to {stop}' for start, stop in shards)}. Pass "
        f"`VocabShard(start, stop, {vocab_size})` of this rank's own columns."
    )


def check_shard(shard: Any, columns: int) -> None:
    """Refuse a `shard=` that does not describe `columns` columns of logits."""
    start, stop, vocab_size, padding = shard.start, shard.stop, shard.vocab_size, shard.padding
    numbers = [x for x in (start, stop, vocab_size, padding) if isinstance(x, Integral)]
    if len(numbers) < 4:  # made from an axis index: nothing to read
        return
    if not (0 <= start <= stop <= vocab_size and padding >= 0):
        raise ValueError(
            f"`shard` must have 0 <= start <= stop <= vocab_size and padding >= 0; got {shard}. "
            f"Pass the classes of this rank's columns."
        )
    if stop - start + padding != columns:
        raise ValueError(
            f"`shard` must describe the {columns} columns of `logits`; got {stop - start} classes "
            f"and {padding} of padding ({shard}). Pass this rank's columns alone, and declare "
            f"padded ones as `VocabShard(..., padding=...)`."
        )


def check_ranks_known(shard: Any) -> None:
    """Refuse, for `vocab_parallel`, a shard that does not say which ranks have the others."""
    if shard.over is None:
        raise TypeError(
            f"`vocab_parallel` must say which ranks share the vocabulary; got {shard}. Pass "
            f"`VocabShard.of_ranks(rows, group)`, made once, or the group of these ranks."
        )


def check_rows(shard: Any, rows: int) -> None:
    """Refuse a head whose rows are not those that `VocabShard.of_ranks` was told of."""
    if shard.size + shard.padding != rows:
        raise ValueError(
            f"`vocab_parallel` must describe the {rows} rows of `weight`; got a shard of "
            f"{shard.size} classes and {shard.padding} rows of padding. Pass "
            f"`VocabShard.of_ranks(rows, group)` of this head."
        )


def refuse_uneven(rows: Sequence[int]) -> NoReturn:
    """Of ranks that did not say how many rows each has, and have not as many."""
    raise ValueError(
        f"`vocab_parallel` must come with as many rows (columns of logits) on every rank, or say "
        f"how many each has; got {', '.join(map(str, rows))}. Pass "
        f"`vocab_parallel=VocabShard.of_ranks(rows, group)`, made once on every rank, or pad the "
        f"last ones and pass `PaddedVocab(group, vocab_size)`."
    )


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
        "function": "the function must be the same on every rank of the head",
        "shard": "sizes of shards (`shard=`, `VocabShard.of_ranks`, a DTensor) must be declared on "
        "every rank of `vocab_parallel`, or on none",
    }.get(name, f"`{name}` must be the same on every rank of `vocab_parallel`")
    way = "Pass the same to all."
    if name in ("labels", "hidden", "temperature", "token_weights"):
        way = "Pass `tokens_parallel` too where each rank has tokens of its own."
    raise ValueError(f"{what}; got ranks that differ. {way}")


def check_upstream(upstream: Sequence[float]) -> NoReturn:
    """Refuse gradients of a loss that differ between ranks whose tokens are in one sum."""
    raise ValueError(
        f"the gradient of `loss` must be the same on every rank of `tokens_parallel`, whose tokens "
        f"are in one gradient of the head; got {', '.join(f'{x:g}' for x in upstream)}. Put what "
        f"differs between ranks into `denominator` or `token_weights`."
    )


def check_route(call: Arguments) -> None:
    """Refuse options of a route that say nothing, or not the same."""
    check_choice("gather", call.gather, GATHERS)
    count = call.tokens_per_rank
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(
            f"`tokens_per_rank` must be a positive integer or None; got {count!r}. Pass about as "
            f"many tokens as a rank has in a call."
        )
    if (call.gather == "auto") != (count is not None):
        raise ValueError(
            f"`tokens_per_rank` must be given with `gather='auto'`, and with nothing else; got "
            f"{count} with {call.gather!r}. Pass one number on every rank: ranks that chose by "
            f"their own tokens would choose differently, and wait for each other."
        )
    if call.gather != "head" and call.vocab_parallel is not None:
        raise ValueError(
            f"`gather` must be 'head' with `vocab_parallel`, whose rows stay where they are; got "
            f"{call.gather!r}. Leave it out, and pass `tokens_parallel` if the tokens are spread "
            f"over the same ranks."
        )
    if call.tokens_parallel is None:
        return
    if call.vocab_parallel is None and call.gather != "hidden":
        raise ValueError(
            "`tokens_parallel` must come with `vocab_parallel`, of the same ranks; got it alone. "
            "Pass both, with this rank's rows of the head as `weight`; for a head that a wrapper "
            "has sharded pass `gather='hidden'` instead."
        )
    if not call.reduce_hidden_grad:
        raise ValueError(
            "`reduce_hidden_grad` must be True with `tokens_parallel`, where d hidden is of this "
            "rank's own tokens; got False. Leave it out."
        )


def refuse_routed(gather: str) -> NoReturn:
    """A head that nothing has sharded."""
    raise ValueError(
        f"`gather` must be 'head' for a head that is whole on this rank; got {gather!r}. Leave it "
        f"out; under FSDP2 call `fully_shard` on the head alone, as what the root keeps is whole "
        f"from its forward on."
    )


def check_flat_rows(
    gather: str, shape: Sequence[int], bias: Sequence[int] | None, layout: str, ranks: int
) -> None:
    """Refuse what ZeRO-3, which cuts a parameter's row of numbers, does not cut between rows."""
    rows = shape[0]
    if (
        layout == "VH"
        and len(shape) == 2
        and rows % ranks == 0
        and (bias is None or tuple(bias) == (rows,))
    ):
        return
    beside = "" if bias is None else f", a bias {list(bias)}"
    raise ValueError(
        f"`gather` must be 'head' unless ZeRO-3 keeps as many whole rows of `weight` [V, H] on "
        f"each rank; got {gather!r} with {list(shape)}{beside}, weight_layout={layout!r} and "
        f"{ranks} ranks. Pad the vocabulary to a multiple of the ranks, or leave `gather` out."
    )


def refuse_gathered(gather: str) -> NoReturn:
    """A head that ZeRO-3 has whole on this rank."""
    raise ValueError(
        f"`gather` must be 'head' for a head that ZeRO-3 has gathered already; got {gather!r}. "
        f"Inside of the engine's forward, where reading `head.weight` gathers it, pass the module "
        f"`head`; set `stage3_param_persistence_threshold` below its size; or leave `gather` out."
    )


def check_engine(gather: str, without: Sequence[str]) -> None:
    """Refuse engines of ZeRO-3 whose step has not been shown to take a gradient of rows."""
    if without:
        raise ValueError(
            f"`gather` must be 'head' under ZeRO-3 with {', '.join(without)}, where another route "
            f"has not been shown to be right; got {gather!r}. Leave it out."
        )


def refuse_inner_backward() -> NoReturn:
    """The gradient of rows from a forward that ran inside of a backward."""
    raise RuntimeError(
        "`gather` must be 'head' inside of `torch.utils.checkpoint` with `use_reentrant=True` "
        "under ZeRO-3, which would overwrite the rows' gradient; got another route. Pass "
        "`use_reentrant=False`."
    )


def refuse_whole() -> NoReturn:
    """A head that its FSDP group has gathered."""
    raise ValueError(
        "`gather` must be 'head' for a head whose FSDP group is whole already; got another route. "
        "Call `fully_shard` on the head alone, and reshard it after its forward."
    )


def check_sharded_rows(axis_ok: bool, placements: object, layout: str, hooked: str) -> None:
    """Refuse rows of a head that do not stand as `fully_shard` places them, or whose gradient
    something of the user's own would have to reduce."""
    if not axis_ok or layout != "VH":
        raise ValueError(
            f"`gather` must be 'head' unless `fully_shard` alone shards `weight` [V, H] over its "
            f"rows; got {placements} and weight_layout={layout!r}. Leave it out."
        )
    if hooked:
        raise ValueError(
            f"`gather` must be 'head' where FSDP2 reduces in a way of the user's own, which no "
            f"other route would call; got {hooked}. Leave it out."
        )


def check_route_here(call: Arguments, *, placed: bool, alone: bool) -> None:
    """Refuse in JAX what it does not have, and a route for arrays that are somewhere else; `placed`
    says that they are whole ones on a mesh, of which it is known where their parts are, `alone`
    that a device has all of them."""
    if call.gather == "stream":
        raise ValueError(
            "`gather` must be 'head', 'hidden' or 'auto' in JAX; got 'stream'. Pass 'hidden', with "
            "which no device has the whole head either."
        )
    if not placed and (call.gather == "hidden" or (call.gather == "auto" and not alone)):
        raise ValueError(
            f"`gather` must be 'head' for arrays that do not say where on a mesh they are; got "
            f"{call.gather!r}. Pass arrays on a mesh with Explicit axes, call "
            f"`NLLHead(..., tokens=axis, gather={call.gather!r})` under one with Auto axes, or "
            f"pass `vocab_parallel=axis, tokens_parallel=axis` inside your own `shard_map`."
        )
    if call.tokens_parallel is None:
        return
    if placed:
        raise ValueError(
            f"`tokens_parallel` must be None for whole arrays on a mesh, which say where tokens "
            f"are; got {call.tokens_parallel!r}. Pass `gather='hidden'` alone."
        )
    over = getattr(call.vocab_parallel, "over", call.vocab_parallel)
    if call.tokens_parallel != over:
        raise ValueError(
            f"`tokens_parallel` must name the mesh axes of `vocab_parallel`, {over!r}; got "
            f"{call.tokens_parallel!r}. Pass the same, and gather tokens over any other axis "
            f"yourself."
        )


def check_own_tokens(varies: bool, axis: object) -> None:
    """Refuse tokens that are the same on all devices of the axis that should spread them."""
    if not varies:
        raise ValueError(
            f"`hidden` must be this device's own tokens with `tokens_parallel`; got one that does "
            f"not vary over mesh axis {axis!r}. Name the axis in its `in_specs`, or leave "
            f"`tokens_parallel` out."
        )


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
    raise ValueError(
        f"`weight` must be sharded along its vocabulary over mesh axes that spread tokens, with "
        f"`gather='hidden'`; got {came}. Shard it so, or leave `gather` out."
    )


def refuse_copies(ranks: int) -> NoReturn:
    """Of the same tokens, on each of several ranks."""
    raise ValueError(
        f"`hidden` must be this rank's own tokens with `tokens_parallel`; got the same labels and "
        f"hidden states on all {ranks} ranks, whose gradient of the head would be {ranks} times "
        f"too large. Leave `tokens_parallel` out where every rank has the same tokens; mask copies "
        f"that are meant on all ranks but one, and multiply that one's loss by {ranks}."
    )
