"""As `advised_ranks`, of DTensors; and all of both on a rank.

Shapes: N tokens of all ranks, H width, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.advice import code_of, keywords_of
from helpers.advised_ranks import CASES, H, N, Ranks, V, Values, case, sharded_logits
from xentlib import torch as ours
from xentlib.torch import chunked_nll


def spread(x: Tensor, mesh: Any, *placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, mesh, placements).requires_grad_()


def with_placements(code: str, **names: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return eval(code, {"Partial": Partial, "Replicate": Replicate, "Shard": Shard, **names})


def whole(grad: Any) -> Any:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@case("PLACEMENTS.over_vocabulary")
def of_a_head_that_is_whole(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Replicate

    w, x = spread(r.w, r.mesh, Replicate()), r.x.clone().requires_grad_()

    def call(weight: Any) -> Values:
        chunked_nll(x, weight, r.y, reduction="sum", vocab_parallel=r.mesh).loss.backward()
        return [x.grad, whole(w.grad)]

    code = code_of(lambda: call(w), "PLACEMENTS.over_vocabulary")
    return call(with_placements(code, weight=w)), r.right()


@case("PLACEMENTS.replicated")
def of_tokens_that_are_spread(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Shard

    x, w = spread(r.x, r.mesh, Shard(0)), spread(r.w, r.mesh, Shard(0))

    def call(hidden: Any) -> Values:
        chunked_nll(hidden, w, r.y, reduction="sum", vocab_parallel=r.mesh).loss.backward()
        return [whole(x.grad), whole(w.grad)]

    code = code_of(lambda: call(x), "PLACEMENTS.replicated")
    return call(with_placements(code, hidden=x)), r.right()


@case("PLACEMENTS.dtensor")
def of_a_head_without_its_mesh(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Shard

    w, x = spread(r.w, r.mesh, Shard(0)), r.x.clone().requires_grad_()

    def call(**how: Any) -> Values:
        chunked_nll(x, w, r.y, reduction="sum", **how).loss.backward()
        return [x.grad, whole(w.grad)]

    code = code_of(call, "PLACEMENTS.dtensor", "vocab_parallel")
    return call(**keywords_of(code, mesh=r.mesh)), r.right()


@case("PLACEMENTS.dtensor")
def of_a_head_and_local_tokens(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Shard

    w, x = spread(r.w, r.mesh, Shard(0)), r.x[r.tokens].clone().requires_grad_()

    def call(weight: Any) -> Values:
        chunked_nll(x, weight, r.y[r.tokens], reduction="sum").loss.backward()
        return [x.grad, whole(w.grad)]

    code = code_of(lambda: call(w), "PLACEMENTS.dtensor", "weight")
    return call(with_placements(code, weight=w)), r.right(tokens=r.tokens)


@case("PLACEMENTS.columns")
def of_rows_of_logits(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Shard

    z = spread(r.z, r.mesh, Shard(0))

    def call(logits: Any, y: Any, **how: Any) -> Values:
        logprobs = ours.vocab_parallel_logprobs(logits, y, **how).logprobs
        logprobs.sum().backward()
        return [logprobs.detach(), z.grad.to_local()]

    code = code_of(lambda: call(z, r.y, vocab_parallel=r.mesh), "PLACEMENTS.columns", "logits")
    got = call(eval(code, {"logits": z}), r.y[r.tokens])
    return got, r.of_logits((r.tokens, slice(None)))


@case("PLACEMENTS.columns")
def of_columns_on_a_mesh_of_two(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Replicate, Shard

    z = spread(r.z, r.two, Replicate(), Shard(1))
    columns = slice(13 * (r.rank % 2), 13 * (r.rank % 2) + 13)

    def refused() -> Any:
        return ours.vocab_parallel_logprobs(z, r.y, vocab_parallel=r.two)

    code, how = (code_of(refused, "PLACEMENTS.columns", x) for x in ("logits", "vocab"))
    keywords = keywords_of(how.replace("name", "tp"), mesh=r.two)
    local = eval(code, {"logits": z})
    return sharded_logits(r, local, **keywords), r.of_logits((slice(None), columns))


@case("SEGMENT_TYPES.sharded")
def of_values_that_are_spread(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor import Shard

    values, ids = r.x[:, 0].contiguous(), torch.arange(N) % 5
    of_ranks = spread(values, r.mesh, Shard(0))
    code = code_of(lambda: ours.segment_sum(of_ranks, ids, 5), "SEGMENT_TYPES.sharded", "values")
    sums = ours.segment_sum(eval(code, {"values": of_ranks}), ids[r.tokens], 5).detach()
    dist.all_reduce(sums)
    return [sums], [ours.segment_sum(values, ids, 5)]


@case("MODULES.parallel_style")
def of_a_head_in_a_plan(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def parallel(head: Any) -> Any:
        with torch.no_grad():
            head.weight.copy_(r.w)
        return parallelize_module(head, r.mesh, ColwiseParallel())

    bias = {"bias": False}
    code = code_of(lambda: parallel(ours.NLLHead(H, V, **bias)), "MODULES.parallel_style")
    head, x = parallel(torch.nn.Linear(H, V, **bias)), r.x.clone().requires_grad_()
    names = {"hidden": x, "head": head, "labels": r.y, "mesh": r.mesh, "chunked_nll": chunked_nll}
    (eval(code, names).loss * N).backward()
    return [x.grad, whole(head.weight.grad)], r.right()


@case("ROUTES.stream_top")
def of_the_most_probable_that_stream(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    head = torch.nn.Linear(H, V, bias=False)
    rows = distribute_tensor(r.w, r.two["tp"], [Shard(0)])
    head.register_parameter("weight", torch.nn.Parameter(rows))
    fully_shard(head, mesh=r.two["dp"], reshard_after_forward=True)
    half = slice(6 * (r.rank // 2), 6 * (r.rank // 2) + 6)
    x = r.x[half].clone().requires_grad_()

    def call(**how: Any) -> Values:
        how |= {"top_k": 2, "vocab_parallel": r.two["tp"]}
        out = ours.chunked_logprobs(x, head.weight, r.y[half], **how)
        out.logprobs.sum().backward()
        return [out.top_logprobs.detach(), x.grad, head.weight.grad.full_tensor() * 2]

    code = code_of(lambda: call(gather="stream"), "ROUTES.stream_top")
    x_all, w = (leaf.clone().requires_grad_() for leaf in (r.x, r.w))
    out = ours.chunked_logprobs(x_all, w, r.y, top_k=2)
    out.logprobs.sum().backward()
    return call(**keywords_of(code)), [out.top_logprobs.detach()[half], x_all.grad[half], w.grad]


# --- all ---------------------------------------------------------------------------------------


def on_rank(rank: int, world: int) -> dict[str, tuple[Values, Values] | str]:
    """What each case gives, or what it raised."""
    ranks, found = Ranks(rank), {}
    # One of them leaves another group.
    for name in sorted(CASES, key=lambda name: name.startswith("STEPS.group")):
        try:
            got, want = CASES[name](ranks)
            found[name] = [x.detach().numpy() for x in got], [x.detach().numpy() for x in want]
        except BaseException as error:  # noqa: BLE001 - the other ranks go on
            found[name] = f"{type(error).__name__}: {error}"
    return found
