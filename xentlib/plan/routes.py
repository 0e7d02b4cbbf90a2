"""Routes to a sharded head: what each sends, computes and holds, from sizes alone.

A head's rows are spread over ranks, and so are tokens. Either the rows travel, or the hidden
states. The definition of the four is `gather` of `xentlib.chunked_nll`; this is the arithmetic.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share the rows, v rows of a
rank, T tokens of a rank in a chunk, C chunks, K rows of every rank in a block, B blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypedDict, Unpack

from xentlib.checks.validators import check_number, check_routes, is_count
from xentlib.plan.route import Route, routes_of
from xentlib.plan.route_config import Rates, RouteConfig

# Of a call, those that send something more.
OPTIONS = ("softcap", "temperature", "entropy", "lse", "label_smoothing", "predicted")
Chosen = Literal["head", "hidden", "stream"]
CHOICES: tuple[Chosen, ...] = ("head", "hidden", "stream")
ALL_TOKENS = 1 << 24  # no rank has more in a call


def head_routes(
    tokens_per_rank: int,
    vocab_size: int,
    hidden_size: int,
    ranks: int,
    *,
    nodes: int = 1,
    replicas: int = 1,
    dtype: str = "bfloat16",
    head_dtype: str = "bfloat16",
    reduce_dtype: str = "float32",
    param_dtype: str = "float32",
    micro_batches: int = 1,
    recompute: bool = False,
    module: bool = False,
    kept: bool = False,
    options: Collection[str] = (),
    max_chunk_bytes: int | None = None,
    chunk_tokens: int | None = None,
    block_rows: int | None = None,
    platform: Literal["gpu", "cpu"] = "gpu",
    kernels: bool = True,
    rates: Rates | None = None,
) -> dict[str, Route]:
    """What each route to a sharded head sends, computes and holds, in PyTorch under FSDP2.

    With v = ceil(V / R) rows of a rank, b bytes of a dtype, and 4 of float32, a call sends

        head     all-gather R v H b_head (two with `recompute` or `module`, unless `kept`),
                 reduce-scatter R v H b_reduce once in `micro_batches`
        hidden   C all-gathers of R T H b, C reduce-scatters of R T H 4, and a few numbers a token
        stream   2 B all-gathers of R K H b, B reduce-scatters of R K H 4
        hybrid   hidden within a node, R / nodes ranks; over nodes one all-gather (two with
                 `recompute`) of nodes v H b and one reduce-scatter of nodes v H 4; it is "hidden"
                 with a mesh [nodes, ranks of a node] as `tokens_parallel`

    where sizes are those of whole tensors; a rank receives (R - 1) / R of them, twice that in an
    all-reduce. With replicas there is one more all-reduce of v H over them, once in
    `micro_batches`. Products are 6 N V H FLOP, 8 N V H with `recompute`, in `stream`, and in
    `hidden` with a softcap and several chunks. "full logits" is `F.cross_entropy` of the logits in
    float32, behind the head's own forward.

    Nothing is known of numbers, so labels that differ and masked tokens change nothing: on a GPU
    all are computed. Where ranks have different numbers of tokens all compute the largest.

    Args:
        tokens_per_rank: N >= 1, of a call; the largest of all ranks.
        vocab_size: V.
        hidden_size: H.
        ranks: R, that share the rows: the size of FSDP's mesh, or of its sharding dimension.
        nodes: that those ranks are spread over, evenly; "hybrid" is there from two on, without
            replicas.
        replicas: of the head (HSDP), each on nodes of its own.
        dtype: of the hidden states.
        head_dtype: that the head is gathered in, `param_dtype` of FSDP2's policy.
        reduce_dtype: of the head's gradient in FSDP2's reduction.
        param_dtype: that the parameter is held in.
        micro_batches: for each reduction of gradients.
        recompute: `chunked_logprobs`, whose backward computes the logits again.
        module: `NLLHead` called through FSDP2's hooks, which gather the head again for the
            backward: it has hooks of its own, or shares one `fully_shard` with other modules.
        kept: FSDP2 leaves the head whole between forward and backward.
        options: of the call, any of "softcap", "temperature" (one per token), "entropy", "lse",
            "label_smoothing", "predicted".
        max_chunk_bytes: of the logits of a chunk; None for the default.
        chunk_tokens: T, in place of the budget.
        block_rows: K of "stream"; None for 8192 rows of all ranks together.
        platform: "gpu" or "cpu".
        kernels: on a GPU Triton's programs, and not eager.
        rates: of the machine; None for an H100 or H200 in a node of eight.

    Returns:
        Routes by name, "full logits" first.

    Raises:
        ValueError: a size, a dtype or an option that there is not.

    Numerics: bytes and FLOP are counted, but for the few hundred bytes that travel with the first
    MAX; memory is a sum of the largest tensors. Seconds are a prediction from rates, with nothing
    overlapped.
    """
    arguments: dict[str, Any] = dict(locals())
    arguments |= {"options": check_routes(arguments, OPTIONS), "rates": rates or Rates()}
    return routes_of(RouteConfig(**arguments))


class RouteOptions(TypedDict, total=False):
    """Arguments of `head_routes` that have a default."""

    nodes: int
    replicas: int
    dtype: str
    head_dtype: str
    reduce_dtype: str
    param_dtype: str
    micro_batches: int
    recompute: bool
    module: bool
    kept: bool
    options: Collection[str]
    max_chunk_bytes: int | None
    chunk_tokens: int | None
    block_rows: int | None
    platform: Literal["gpu", "cpu"]
    kernels: bool
    rates: Rates | None


def choose_gather(
    tokens_per_rank: int,
    vocab_size: int,
    hidden_size: int,
    ranks: int,
    *,
    memory: int | None = None,
    **more: Unpack[RouteOptions],
) -> Chosen:
    """Which of "head", "hidden" and "stream" `head_routes` predicts to be the fastest.

    A pure function of numbers that all ranks have alike: pass the same `tokens_per_rank` on each,
    not its own count. Of equals the first one named. "stream" sends and computes more than "head",
    so it is chosen for `memory` alone.

    Args:
        tokens_per_rank: about as many as a rank has in a call.
        vocab_size: V.
        hidden_size: H.
        ranks: R.
        memory: bytes that a call may need at its peak, beside its inputs: of the routes that fit,
            the fastest, and where none fits, the smallest. None: no limit.
        more: as in `head_routes`.

    Raises:
        ValueError: those of `head_routes`.
    """
    if memory is not None:
        check_number("memory", memory, "None or an integer >= 1, bytes", ok=is_count(memory))
    routes = head_routes(tokens_per_rank, vocab_size, hidden_size, ranks, **more)
    fit = [x for x in CHOICES if memory is None or routes[x].peak_bytes <= memory]
    if not fit:
        return min(CHOICES, key=lambda name: routes[name].peak_bytes)
    return min(fit, key=lambda name: routes[name].seconds)


def crossover_tokens(
    vocab_size: int, hidden_size: int, ranks: int, **more: Unpack[RouteOptions]
) -> int:
    """Up to how many tokens a rank and call "hidden" is predicted to be faster than "head".

    About V / R (k b_head + b_reduce / M) / (b + 4), of k gathers and M micro-batches, less what the
    latency of more collectives costs; 0 where it never is.

    Args:
        vocab_size: V.
        hidden_size: H.
        ranks: R.
        more: as in `head_routes`.

    Raises:
        ValueError: those of `head_routes`.
    """

    def faster(tokens: int) -> bool:
        routes = head_routes(tokens, vocab_size, hidden_size, ranks, **more)
        return routes["hidden"].seconds < routes["head"].seconds

    low, high = 0, ALL_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low
