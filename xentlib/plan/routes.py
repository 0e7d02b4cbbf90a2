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
from xentlib.plan.route import routes_of
from xentlib.plan.route_config import Rates, RouteConfig
from xentlib.plan.route_result import Route

# Of a call, those that send something more.
OPTIONS = ("softcap", "temperature", "entropy", "lse", "label_smoothing", "predicted")
Chosen = Literal["head", "hidden", "stream"]
CHOICES: tuple[Chosen, ...] = ("head", "hidden", "stream")
ALL_TOKENS = 1 << 24  # no rank has more in a call
GPUS = 8  # of a node, where it is not said how many nodes there are


def head_routes(
    tokens_per_rank: int,
    vocab_size: int,
    hidden_size: int,
    ranks: int,
    *,
    nodes: int | None = None,
    replicas: int = 1,
    tensor_parallel: int = 1,
    zero3: bool = False,
    bias: bool = False,
    low_rank: int = 0,
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

    and where there is a bias, that with the head, or once beside rows that pass; with adapters A
    once and its gradient. Sizes are those of whole tensors; a rank receives (R - 1) / R of them,
    twice that in an all-reduce. With replicas there is one more all-reduce of v H over them, once
    in `micro_batches`. Products are 6 N V H FLOP, 8 N V H with `recompute`, in `stream`, and in
    `hidden` with a softcap and several chunks; 2 N V H less of a frozen head. "full logits" is
    `F.cross_entropy` of the logits in float32, behind the head's own forward.

    Nothing is known of numbers, so labels that differ and masked tokens change nothing: on a GPU
    all are computed. Where ranks have different numbers of tokens all compute the largest.

    Args:
        tokens_per_rank: N >= 1, of a call; the largest of all ranks.
        vocab_size: V.
        hidden_size: H.
        ranks: R, that share the rows: the size of FSDP's mesh, or of its sharding dimension.
        nodes: that those ranks are spread over, evenly; "hybrid" is there from two on, without
            replicas. None: nodes of eight GPUs, or of fewer where eight do not divide the ranks.
        replicas: of the head (HSDP), each on nodes of its own.
        tensor_parallel: T, ranks with the same tokens that the vocabulary is cut over first, with
            `vocab_parallel`; the R ranks share V / T rows. d hidden, and of "head" and "stream" MAX
            and SUM, go over the T ranks of a node, MAX and SUM of "hidden" over all R T. Of a
            sequence that is spread over the T ranks plan `ranks` R T without it.
        zero3: DeepSpeed's ZeRO-3 in place of FSDP2: "hidden" and "stream" only where R divides V,
            d weight reduced in every micro-batch. Memory is planned as that of FSDP2.
        bias: the head has one.
        low_rank: r, of adapters (LoRA) on a head that is frozen; 0 for none. "head" and "hidden".
        dtype: of the hidden states.
        head_dtype: that the head is gathered in, `param_dtype` of FSDP2's policy.
        reduce_dtype: of the head's gradient in FSDP2's reduction.
        param_dtype: that the parameter is held in.
        micro_batches: for each reduction of gradients.
        recompute: `chunked_logprobs`, or `chunked_nll` with `recompute`, whose backward computes
            the logits again.
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
    MAX; memory is a sum of the largest tensors. Seconds are a prediction from rates: of what is
    computed by `gpu_time`, with Triton's programs; of what is sent by the steps and the bytes of
    each collective, once with nothing overlapped, once with all that the loops of PyTorch overlap.
    What the ranks of a node do to each other's memory and multiprocessors is not in it. JAX sends
    what "head" and "hidden" do here but for the handshake and the upstream gradients; which of it
    overlaps is its compiler's choice, and is not planned; nor is a mask of dropout on an adapter.
    """
    arguments: dict[str, Any] = dict(locals())
    arguments |= {"options": check_routes(arguments, OPTIONS), "rates": rates or Rates()}
    arguments["nodes"] = nodes or ranks // in_node(ranks, tensor_parallel)
    return routes_of(RouteConfig(**arguments))


def in_node(ranks: int, tensor_parallel: int = 1) -> int:
    """Of these ranks in a node of eight GPUs: as many as divide them."""
    most = min(ranks, max(1, GPUS // tensor_parallel))
    return next(x for x in range(most, 0, -1) if ranks % x == 0)


class RouteOptions(TypedDict, total=False):
    """Arguments of `head_routes` that have a default."""

    nodes: int | None
    replicas: int
    tensor_parallel: int
    zero3: bool
    bias: bool
    low_rank: int
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
    overlapped: bool = True,
    **more: Unpack[RouteOptions],
) -> Chosen:
    """Which of "head", "hidden" and "stream" `head_routes` predicts to be the fastest.

    A pure function of numbers that all ranks have alike: pass the same `tokens_per_rank` on each,
    not its own count. Of equals the first one named. "stream" sends more than "head" and has a
    product more, so it is chosen for `memory` alone.

    Args:
        tokens_per_rank: about as many as a rank has in a call.
        vocab_size: V.
        hidden_size: H.
        ranks: R.
        memory: bytes that a call may need at its peak, beside its inputs: of the routes that fit,
            the fastest, and where none fits, the smallest. None: no limit.
        overlapped: by the seconds with what the loops overlap, as they do in PyTorch; False, by
            those with nothing overlapped, as JAX chooses.
        more: as in `head_routes`.

    Raises:
        ValueError: those of `head_routes`.
    """
    if memory is not None:
        check_number("memory", memory, "None or an integer >= 1, bytes", ok=is_count(memory))
    routes = head_routes(tokens_per_rank, vocab_size, hidden_size, ranks, **more)
    asked = CHOICES[: 1 if ranks == 1 else 2 if memory is None else 3]
    there = [x for x in asked if x in routes]
    fit = [x for x in there if memory is None or routes[x].peak_bytes <= memory]
    if not fit:
        return min(there, key=lambda name: routes[name].peak_bytes)
    return min(fit, key=lambda name: seconds_of(routes[name], overlapped))


def seconds_of(route: Route, overlapped: bool) -> float:
    return route.overlapped_seconds if overlapped else route.seconds


def crossover_tokens(
    vocab_size: int,
    hidden_size: int,
    ranks: int,
    *,
    overlapped: bool = True,
    **more: Unpack[RouteOptions],
) -> int:
    """Up to how many tokens a rank and call "hidden" is predicted to be faster than "head".

    As many bytes are sent at V / R (k b_head + b_reduce / M) / (b + 4) tokens, of k gathers and M
    micro-batches. What products hide moves it up, the latency of more collectives down: it is a
    statement about `rates` as much as about sizes. 0 where "hidden" never is faster, 2^24 where it
    always is.

    Args:
        vocab_size: V.
        hidden_size: H.
        ranks: R.
        overlapped: as in `choose_gather`.
        more: as in `head_routes`.

    Raises:
        ValueError: those of `head_routes`.
    """

    def faster(tokens: int) -> bool:
        routes = head_routes(tokens, vocab_size, hidden_size, ranks, **more)
        head, hidden = routes["head"], routes.get("hidden", routes["head"])
        return seconds_of(hidden, overlapped) < seconds_of(head, overlapped)

    low, high = 0, ALL_TOKENS if ranks > 1 else 1
    if ranks > 1 and faster(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low
