"""What stands at once on a rank, by route: the moments of a call, each a sum of named parts.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share a head's rows, T tokens
of a rank in a chunk, K rows of every rank in a block.
"""

from __future__ import annotations

from collections.abc import Iterator

from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.options import ITEMSIZE
from xentlib.plan.memory import (
    D_HIDDEN,
    D_WEIGHT,
    LOGITS,
    OF_COLUMNS,
    ROWS,
    SCRATCH,
    WIDENED,
    torch_walk,
    walk_of_blocks,
)
from xentlib.plan.route_config import RouteConfig
from xentlib.plan.split import ChunkPlan

# By the name of the moment, what stands then.
Moments = dict[str, dict[str, int]]

GATHERED, BUFFER = "gathered head", "buffer of the gather"
GRADIENT, ROUNDED = "gradient of the head", "gradients in their own dtype"
INTO, OUT_OF = "into the reduce-scatter", "out of the reduce-scatter"
EARLIER = "gradient of earlier micro-batches"
EXCHANGED, PER_TOKEN = "hidden states and d hidden on their way", "numbers a token of all ranks"
CAST = "rows in the dtype of the products"
ADAPTERS = "adapters in float32"
# Of gloo, each of whose threads keeps what it has sent or gathered last until it sends again: on
# some ranks, in every call, a thread that nothing follows on has the rows of all nodes, or a block.
KEPT = "what a thread of gloo keeps"
# Bytes of labels, masks, factors, statistics and values of a token.
OF_A_TOKEN = 80
BLOCKS, OWN = "blocks of rows and d weight on their way", "d weight of this rank's rows"


def of_head(s: RouteConfig, plan: ChunkPlan) -> Moments:
    """FSDP2 gathers into a buffer and copies out of it; of a forward's last gather the buffer stays
    until that forward is done, which here is the walk."""
    gathered = _gathered(s)
    both = {GATHERED: gathered, BUFFER: gathered}
    sums = _sums(s, s.classes, ITEMSIZE[s.head_dtype])
    regathered = {GATHERED: gathered} if s.kept or s.module or s.recompute else {}
    blocks = s.plan_of_classes()
    if blocks is not None:
        forward, backward = _walks_of_blocks(s, plan, blocks)
        moments = {"forward": both | forward, "backward": regathered | backward}
        if ITEMSIZE[s.head_dtype] < s.size:  # rounded by then, but for that of one block
            sums[D_WEIGHT] = 0
    else:
        moments = {"forward": both | _walk(s, plan, gradient=not s.recompute)}
        if s.recompute:
            moments["backward"] = regathered | _walk(s, plan)
    if s.module and not s.kept and not s.recompute:
        moments["gather for the backward"] = both | {k: sums[k] for k in (D_WEIGHT, D_HIDDEN)}
    moments["gradients rounded"] = regathered | sums
    return _with_earlier(s, moments | _reduced(s))


def of_full_logits(s: RouteConfig) -> Moments:
    """`cross_entropy(head(hidden).float(), labels)`: log-probabilities are kept, of them the loss
    makes a gradient, and of that the softmax another one."""
    gathered = _gathered(s)
    both = {GATHERED: gathered, BUFFER: gathered}
    kept = {GATHERED: gathered} if s.kept else {}
    entries, narrow = s.tokens_per_rank * s.vocab_size, s.gemm_size
    low = {"logits": entries * narrow}
    wide = entries * s.size
    cast = low if narrow < s.size else {}
    d_logits = {"gradient of the logits": entries * narrow}
    results = s.trained(s.vocab_size) * ITEMSIZE[s.head_dtype]
    results += s.tokens_per_rank * s.hidden_size * ITEMSIZE[s.dtype]
    moments = {
        "product": both | low,
        "cast": kept | cast | {"float32 logits": wide},
        "softmax": kept | {"float32 logits": wide, "log-probabilities": wide},
        "backward of the loss": kept
        | {"log-probabilities": wide, "their gradient": wide, "float32 gradient": wide},
        "gather for the backward": (kept or both) | d_logits,
        "products of the backward": {GATHERED: gathered, "gradients": results} | d_logits,
    }
    return _with_earlier(s, moments | _reduced(s))


def of_hidden(s: RouteConfig, plan: ChunkPlan, rows: int, ranks: int, *, gathered: bool) -> Moments:
    """Tokens of `ranks` meet `rows` that stay; `gathered` from the same place of other nodes."""
    chunk = plan.chunk_tokens * s.hidden_size
    coming = plan.num_chunks > 1  # one is computed, one is on its way, of whose part the source
    walk = _walk(s, plan, regathers=s.on_cpu)
    walk[D_WEIGHT] = _low_in(s) + s.trained(rows) * s.size
    walk[D_HIDDEN] = s.tokens_per_rank * s.hidden_size * s.size
    walk[WIDENED] = _operand(s, rows)
    walk[ROWS] = chunk * s.size if s.on_cpu and s.gemm_size < s.size else 0
    part = chunk // ranks
    walk[EXCHANGED] = (1 + coming) * chunk * s.gemm_size + coming * part * s.gemm_size
    # d hidden leaves, and a part of it comes; gloo makes a copy of what leaves.
    walk[EXCHANGED] += (chunk * (2 if s.on_cpu else 1) + part) * s.size
    walk[PER_TOKEN] = plan.num_tokens * OF_A_TOKEN
    local_entries = s.trained(s.rows)
    moments = {"walk": walk}
    if gathered:
        # A CPU's copy takes the place of what was gathered, which a thread of gloo keeps.
        came, wide = rows * s.hidden_size * s.gemm_size, rows * s.hidden_size * s.size
        widened = s.on_cpu and s.gemm_size < s.size
        walk[GATHERED], walk[WIDENED] = (0, wide) if widened else (came, 0)
        walk[KEPT] = came if widened else 0
        # The rows are gone by then; gloo makes a copy of what leaves.
        stays = {name: walk[name] for name in (LOGITS, ROWS, D_HIDDEN, PER_TOKEN)}
        moments["rows' reduction"] = stays | {
            INTO: wide * (2 if s.on_cpu else 1),
            OUT_OF: local_entries * s.size,
            KEPT: came if s.on_cpu else 0,
        }
    moments["gradients rounded"] = _sums(s, s.rows, ITEMSIZE[s.param_dtype])
    return _with_earlier(s, moments, local_entries * ITEMSIZE[s.param_dtype])


def of_stream(s: RouteConfig, plan: ChunkPlan, rows: int) -> Moments:
    """Blocks of R K rows: one is computed, one is on its way, and so is d weight of the last."""
    block = s.ranks * rows * s.hidden_size
    at_a_time = 2 if rows < s.rows else 1
    walk = _walk(s, plan)
    walk[D_WEIGHT] = 0
    walk[WIDENED] = block * s.size if s.on_cpu and s.gemm_size < s.size else 0
    walk[BLOCKS] = at_a_time * block * (s.gemm_size + s.size) + rows * s.hidden_size * s.size
    walk[BLOCKS] += block * s.size if s.on_cpu else 0  # of gloo, of what leaves
    walk[KEPT] = block * s.gemm_size if s.on_cpu and at_a_time > 1 else 0
    walk[OWN] = s.rows * s.hidden_size * s.size
    if s.param_dtype != s.gemm_dtype:
        walk[CAST] = s.rows * s.hidden_size * s.gemm_size
    # Beside the tokens' numbers three of each class: where it passes, and in which order.
    walk[PER_TOKEN] = s.tokens_per_rank * OF_A_TOKEN + 3 * 8 * s.vocab_size
    itemsize = ITEMSIZE[s.param_dtype]
    # Of all tokens, before there is a gradient.
    stays = (LOGITS, SCRATCH, ROWS, WIDENED, PER_TOKEN, CAST)
    first = {name: walk[name] for name in stays if name in walk}
    first[BLOCKS] = at_a_time * block * s.gemm_size
    numbers = 3 + len({"entropy", "predicted"} & s.options)
    first[OF_COLUMNS] = s.tokens_per_rank * -(-s.vocab_size // BLOCK_COLUMNS) * numbers * s.size
    moments = {"statistics": first, "walk": walk, "gradients rounded": _sums(s, s.rows, itemsize)}
    return _with_earlier(s, moments, s.rows * s.hidden_size * itemsize)


def _gathered(s: RouteConfig) -> int:
    whole = (s.held(s.ranks * s.rows) + s.ranks * s.low_entries) * ITEMSIZE[s.head_dtype]
    return whole if s.ranks > 1 else 0  # it is there


def _walk(
    s: RouteConfig, plan: ChunkPlan, *, gradient: bool = True, regathers: bool = False
) -> dict[str, int]:
    """`again`: statistics are there before gradients, which then need no scratch of theirs."""
    recompute = s.recompute or regathers
    walk = torch_walk(plan, s.gemm_dtype, gradient, recompute, s.platform, s.kernels)
    if s.head_dtype != s.gemm_dtype:
        walk[WIDENED] = plan.vocab_size * s.hidden_size * s.gemm_size
    if s.low_rank:
        walk[D_WEIGHT] = (_low_in(s) + s.trained(plan.vocab_size) * s.size) * gradient
        of_chunk = plan.chunk_tokens * s.hidden_size * s.size * (s.gemm_size < s.size)
        walk[ADAPTERS] = _low_in(s) + s.trained(plan.vocab_size) * s.size + of_chunk
    return walk


def _walks_of_blocks(
    s: RouteConfig, plan: ChunkPlan, blocks: ChunkPlan
) -> Iterator[dict[str, int]]:
    """The forward, and the backward."""
    how = s.gemm_dtype, True, True, s.platform, s.kernels, ITEMSIZE[s.head_dtype]
    for walk in walk_of_blocks(plan, blocks, *how, sharded=s.tensor_parallel > 1):
        if s.head_dtype != s.gemm_dtype:
            walk[WIDENED] = blocks.vocab_size * s.hidden_size * s.gemm_size
        yield walk


def _low_in(s: RouteConfig) -> int:
    """Bytes of an adapter's A, or of its gradient, which each rank has whole."""
    return s.low_rank * s.hidden_size * s.size


def _operand(s: RouteConfig, rows: int) -> int:
    """A copy of rows in the dtype that products take, where the parameter has another."""
    if s.on_cpu and s.gemm_size < s.size:
        return rows * s.hidden_size * s.size
    return rows * s.hidden_size * s.gemm_size if s.param_dtype != s.gemm_dtype else 0


def _sums(s: RouteConfig, rows: int, weight_size: int) -> dict[str, int]:
    """Float32 sums beside the gradients that are made of them; of its own dtype a sum is one."""
    d_weight = s.trained(rows) + s.low_rank * s.hidden_size
    d_hidden = s.tokens_per_rank * s.hidden_size
    rounded = d_weight * weight_size if weight_size < s.size else 0
    rounded += d_hidden * ITEMSIZE[s.dtype] if ITEMSIZE[s.dtype] < s.size else 0
    return {D_WEIGHT: d_weight * s.size, D_HIDDEN: d_hidden * s.size, ROUNDED: rounded}


def _reduced(s: RouteConfig) -> Moments:
    """Of the wrapper's reduction, while the gradient is still there. Gloo makes a copy of what goes
    into it."""
    if s.ranks == 1:
        return {}
    local_entries = s.trained(s.rows) + s.low_entries
    into = s.ranks * local_entries * ITEMSIZE[s.reduce_dtype]
    cast = ITEMSIZE[s.param_dtype] if s.param_dtype != s.reduce_dtype else 0
    return {
        "reduction": {
            GRADIENT: (s.trained(s.classes) + s.low_entries) * ITEMSIZE[s.head_dtype],
            INTO: into * (2 if s.on_cpu else 1),
            OUT_OF: local_entries * (ITEMSIZE[s.reduce_dtype] + cast),
            "d hidden": s.tokens_per_rank * s.hidden_size * ITEMSIZE[s.dtype],
        }
    }


def _with_earlier(s: RouteConfig, moments: Moments, size: int | None = None) -> Moments:
    """FSDP2 keeps d weight whole, in the dtype of the reduction, until the micro-batch that
    reduces; of rows that stay a rank has `size` bytes of its own."""
    if s.micro_batches == 1:
        return moments
    if size is None:
        size = s.trained(s.classes) * ITEMSIZE[s.reduce_dtype]
    earlier = {EARLIER: size}
    return {name: parts | earlier for name, parts in moments.items()}


def of_state(s: RouteConfig) -> dict[str, int]:
    """Between calls: what a rank holds of the head, its gradient, and both moments of Adam, in the
    dtype of the parameter; ZeRO-3 has these, and a copy of what it trains, in float32."""
    low, trained = s.low_entries, s.trained(s.rows) + s.low_entries
    size = ITEMSIZE[s.param_dtype]
    wide = max(size, 4) if s.zero3 else size
    return {
        "parameter": (s.held(s.rows) + low) * size + trained * (wide if wide > size else 0),
        "gradient": trained * size,
        "moments of Adam": 2 * trained * wide,
    }
