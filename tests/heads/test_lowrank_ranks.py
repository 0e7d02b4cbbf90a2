"""A head with a low-rank part on gloo ranks: over vocabulary shards, under FSDP2, and frozen heads
on every route, which cost no sum of d weight.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.held import hold_in_norm
from helpers.lowrank import LowProblem, held_to, hold, low_problem, oracle, rejected
from helpers.ranks import launch
from helpers.vocab_shards import same_on_all_ranks
from xentlib.tools.harness.problems import Case, upstream_of
from xentlib.tools.harness.ranks import DEVICE

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

N, H, V, R = 61, 23, 157, 3
SCALE = 0.7
SIZES = (100, 57)
CHUNK = 16 * V * 4
SHARDED = {
    "plain": Case("low", N, H, V, confident=0.3),
    "kernel": Case("low kernel", N, H, V, layout="HV", options={"softcap": 8.0, "z_loss": 1e-3}),
    "bf16": Case("low bf16", N, H, V, dtype="bfloat16"),
}
FUNCTIONS = ("chunked_nll", "chunked_logprobs")
BIG = (16, 64, 40_000)  # tokens, width, classes
FROZEN = ("plain", "shards", "FSDP2, head", "FSDP2, hidden", "FSDP2, stream")


def on_shards(rank: int, function: str, p: LowProblem, sizes: Any = SIZES) -> dict[str, Any]:
    """Gradients of this rank's rows, through logits of several chunks."""
    from xentlib import PaddedVocab, VocabShard
    from xentlib.tools.harness.device import numpy_of, on_torch
    from xentlib.torch import LowRankHead, chunked_logprobs, chunked_nll

    group, axis = torch.distributed.group.WORLD, p.base.options.get("weight_layout") == "HV"
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    more = max(0, start + sizes[rank] - V)
    pads = [(0, more), (0, 0)]
    weight = p.base.weight[:, rows] if axis else p.base.weight[rows]
    arrays = {
        "hidden": p.base.hidden,
        "weight": np.pad(weight, pads[::-1] if axis else pads, constant_values=3.0),
        "a": p.a,
        "b": np.pad(p.b[rows], pads, constant_values=5.0),
    }
    leaves = {name: on_torch(x).requires_grad_(name != "weight") for name, x in arrays.items()}
    head = LowRankHead(leaves["weight"], leaves["a"], leaves["b"], p.scale)
    bias = on_torch(np.pad(p.base.bias[rows], (0, more)))
    over: Any = PaddedVocab(group, V)
    if len(set(sizes)) > 1:
        over = VocabShard.of_ranks(sizes[rank], group, V)
    given = {"bias": bias, "max_chunk_bytes": CHUNK, "vocab_parallel": over}
    labels = on_torch(p.base.labels)
    if function == "chunked_nll":
        loss = chunked_nll(leaves["hidden"], head, labels, **given, **p.base.options).loss
        loss.backward(torch.tensor(p.base.upstream))
    else:
        given |= {"entropy": True, **p.base.per_token_options}
        out = chunked_logprobs(leaves["hidden"], head, labels, **given)
        upstream = [on_torch(x) for x in upstream_of(p.base, 5)]
        torch.autograd.backward([out.logprobs, out.entropy, out.lse], upstream)
    found = {name: numpy_of(leaves[name].grad) for name in ("hidden", "a", "b")}
    assert not found["b"][len(found["b"]) - more :].any()
    found["b"] = found["b"][: len(found["b"]) - more]
    return found


def fsdp_leaves(p: LowProblem, *, adapters: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    from xentlib.tools.harness.device import on_torch

    head = torch.nn.Linear(H, V, bias=False)
    head.weight = torch.nn.Parameter(on_torch(p.base.weight), requires_grad=False)
    if adapters:
        head.a, head.b = (torch.nn.Parameter(on_torch(x)) for x in (p.a, p.b))
    fully_shard(head, mesh=torch.distributed.init_device_mesh(DEVICE, (2,)))
    return head


def under_fsdp(function: str, p: LowProblem) -> dict[str, Any]:
    """Of a head whose A and B are in its group, with this rank's own tokens."""
    from xentlib.tools.harness.device import on_torch
    from xentlib.torch import LowRankHead, chunked_logprobs, chunked_nll, count_collectives

    head = fsdp_leaves(p, adapters=True)
    hidden = on_torch(p.base.hidden).requires_grad_()
    low, labels = LowRankHead(head.weight, head.a, head.b, p.scale), on_torch(p.base.labels)
    with count_collectives() as forward:
        if function == "chunked_nll":
            loss = chunked_nll(hidden, low, labels, max_chunk_bytes=CHUNK).loss
        else:
            loss = -chunked_logprobs(hidden, low, labels, max_chunk_bytes=CHUNK).logprobs.sum()
    loss.backward()
    assert forward.counts() == {"all_gather": 1}
    whole = {name: getattr(head, name).grad.full_tensor().cpu().numpy() for name in ("a", "b")}
    return {"hidden": hidden.grad.cpu().numpy(), **whole}


def under_peft(rank: int) -> list[Any]:
    """Gradients of PEFT's adapters, of this rank's own loss by full logits and, sharded, ours."""
    peft = pytest.importorskip("peft")
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import chunked_nll

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(H, V, bias=False))
    config = peft.LoraConfig(r=R, target_modules=["0"], init_lora_weights=False)
    layer = peft.get_peft_model(model, config).base_model.model[0]
    generator = torch.Generator(DEVICE).manual_seed(rank)
    hidden, labels = torch.randn(N, H, generator=generator), torch.arange(N) % V
    parameters = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    loss = torch.nn.functional.cross_entropy(layer(hidden), labels)
    want = torch.autograd.grad(loss, parameters)
    for x in want:
        torch.distributed.all_reduce(x)
    fully_shard(layer, mesh=torch.distributed.init_device_mesh(DEVICE, (2,)))
    chunked_nll(hidden, layer, labels, max_chunk_bytes=CHUNK).loss.backward()
    got = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    return [
        (x.grad.full_tensor().cpu().numpy(), y.cpu().numpy() / 2)
        for x, y in zip(got, want, strict=True)
    ]


def largest_of(function: str, way: str) -> int:
    """Largest allocation of a forward and a backward of a frozen head."""
    from torch.distributed.fsdp import fully_shard
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import chunked_logprobs, chunked_nll

    tokens, width, vocab = BIG
    head = torch.nn.Linear(width, vocab, bias=False).requires_grad_(False)
    hidden, labels = torch.randn(tokens, width, requires_grad=True), torch.arange(tokens)
    torch.distributed.broadcast(hidden.data, 0)
    given: dict[str, Any] = {"max_chunk_bytes": 4 * vocab * 4}
    if way == "shards":
        head.weight.data = head.weight.data.chunk(2)[torch.distributed.get_rank()].clone()
        given["vocab_parallel"] = torch.distributed.group.WORLD
    elif way != "plain":
        fully_shard(head, mesh=torch.distributed.init_device_mesh(DEVICE, (2,)))
        given["gather"] = way.removeprefix("FSDP2, ")

    def step() -> Any:
        if function == "chunked_nll":
            return chunked_nll(hidden, head.weight, labels, **given).loss.backward()
        return chunked_logprobs(hidden, head.weight, labels, **given).logprobs.sum().backward()

    step()  # what is allocated once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def differing(rank: int) -> list[str]:
    from xentlib.torch import LowRankHead, chunked_nll

    torch.manual_seed(0)
    group, hidden, labels = torch.distributed.group.WORLD, torch.randn(8, 4), torch.arange(8)
    weight, a, b = torch.randn(5, 4) + rank, torch.randn(2, 4), torch.randn(5, 2)
    said = []
    keep, trained = torch.ones(8, 4, dtype=torch.bool), a.clone().requires_grad_(rank == 1)
    spread: dict[str, Any] = {"tokens_parallel": group, "reduction": "sum"}
    for head, more in (
        (LowRankHead(weight, a + rank, b), {}),
        (LowRankHead(weight, a, b, 1.0 + rank), {}),
        (LowRankHead(weight, a, b) if rank else weight, {}),
        (LowRankHead(weight, trained, b), {}),
        (LowRankHead(weight, a + rank, b), spread),
        (LowRankHead(weight, a, b) if rank else weight, spread),
        (LowRankHead(weight, trained, b), spread),
        (LowRankHead(weight, a, b, keep=keep if rank else None), spread),
    ):
        try:
            chunked_nll(hidden, head, labels, vocab_parallel=group, **more)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def own_tokens(rank: int) -> LowProblem:
    """Other tokens than the other ranks', of the same head."""
    case = SHARDED["plain"]
    p, other = low_problem(case, R), low_problem(case, R, seed=20 + rank)
    base = p.base.changed(hidden=other.base.hidden, labels=other.base.labels, bias=None)
    return p._replace(base=base.changed(upstream=1.0))


def on_rank(
    rank: int, world: int, calls: list[tuple[str, str]], frozen: list[tuple[str, str]]
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for function, name in calls:
        p = low_problem(SHARDED["plain" if name == "padded" else name], R)
        found[function, name] = on_shards(rank, function, p, *[(80, 80)] * (name == "padded"))
    for function in FUNCTIONS:
        found[function, "FSDP2"] = under_fsdp(function, own_tokens(rank))
    for function, way in frozen:
        found[function, way, "bytes"] = largest_of(function, way)
    found["PEFT"] = under_peft(rank)
    found["differing"] = differing(rank)
    return found


@pytest.fixture(scope="module")
def found(request: Any) -> list[dict[Any, Any]]:
    calls = collected(request, product(FUNCTIONS, [*SHARDED, "padded"]))
    return launch(2, on_rank, calls, collected(request, product(FUNCTIONS, FROZEN)))


@pytest.mark.parametrize("name", [*SHARDED, "padded"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_shards_give_the_dense_answer(found: Any, function: str, name: str) -> None:
    """A13 by A5, A6, A7: d A and d hidden are summed over the shards once, the same bits on every
    rank. Catches: a rank's part of d A, which is another one on each."""
    p = low_problem(SHARDED["plain" if name == "padded" else name], R)
    low = name == "bf16"
    upstream = None if function == "chunked_nll" else upstream_of(p.base, 5)
    reference = oracle(p, upstream, "bfloat16" if low else "float64")
    ranks = [rank[function, name] for rank in found]
    got = {key: same_on_all_ranks([rank[key] for rank in ranks]) for key in ("hidden", "a")}
    got["b"] = np.concatenate([rank["b"] for rank in ranks])
    hold(reference, got, "A7" if low else None)
    if not low:
        assert rejected(reference, {"a": got["a"] / 2})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fsdp2_gathers_and_reduces_the_adapters(found: Any, function: str) -> None:
    """D7: the mean over ranks of what each rank's own tokens give."""
    references = []
    for rank in range(2):
        p = own_tokens(rank)
        if function == "chunked_nll":
            references.append(oracle(p))
            continue
        ones = np.where(p.base.valid, -1.0, 0.0).astype(np.float32)
        references.append(oracle(p, upstream_of(p.base, 5)._replace(
            d_logprobs=ones, d_entropy=None, d_lse=None)))  # fmt: skip
    for rank, reference in zip(found, references, strict=True):
        got = rank[function, "FSDP2"]
        hold(reference, {"hidden": got["hidden"]})
        want = [sum(getattr(x, f"d_{name}") for x in references) / 2 for name in ("a", "b")]
        hold_in_norm([got["a"], got["b"]], want)


def test_peft_s_adapters_under_fsdp2(found: Any) -> None:
    for rank in found:
        for got, want in rank["PEFT"]:
            held_to("A9", got, want, metrics=("rho / u",))


@pytest.mark.parametrize("way", FROZEN)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_frozen_head_costs_no_sum(found: Any, function: str, way: str) -> None:
    """Of what a rank has of it: a shard's rows, all of a head that is gathered to be multiplied
    with."""
    rows = BIG[2] // (2 if way in ("shards", "FSDP2, hidden") else 1)
    for rank in found:
        # FSDP2's own gather of the head is as large as the head.
        limit = rows * BIG[1] * 4 + (1 if way == "FSDP2, head" else 0)
        assert rank[function, way, "bytes"] < limit


SAID = (
    "`a` must be the same on every rank of `vocab_parallel`",
    "`scale` must be the same on every rank of `vocab_parallel`",
    "`the rank of the head` must be the same on every rank of `vocab_parallel`",
    "`hidden` must require grad on every rank of `vocab_parallel`, or on none, like `a` of a",
    "`a` must be the same on every rank of `vocab_parallel`",
    "`the rank of the head` must be the same on every rank of `vocab_parallel`",
    "`weight` and `bias` must require grad on every rank of `vocab_parallel`, or on none, like `a`",
    "`keep` must be the same on every rank of `vocab_parallel`",
)


@pytest.mark.parametrize("k", range(len(SAID)))
def test_ranks_that_differ_say_so(found: Any, k: int) -> None:
    for rank in found:
        assert rank["differing"][k].startswith(SAID[k]), rank["differing"][k]
