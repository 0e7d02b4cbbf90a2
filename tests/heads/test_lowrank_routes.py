"""Heads with a low-rank part whose rows stay on their ranks while tokens travel: `tokens_parallel`,
and `gather="hidden"` under FSDP2, on gloo ranks against the oracle of all tokens, and whole models
against one process.

Shapes: N tokens, V vocabulary, H hidden width, R rank of the low-rank part.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.held import hold_parameters
from helpers.lowrank import LowProblem, held_to, hold, low_problem, oracle, rejected
from helpers.pairs import every_pair, parameters
from helpers.ranks import launch
from helpers.refused import said_by
from helpers.vocab_shards import PLAIN, V
from xentlib.budgets import check_budget
from xentlib.contract import failures
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.cases import EXTRAS, OPTIONS
from xentlib.tools.harness.problems import Case, upstream_of

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.fully_sharded import Sharded, on_each_world  # noqa: E402
from helpers.routed import Routed, Routes, merged, on_ranks  # noqa: E402
from helpers.wrapped import gradients_of_one_process  # noqa: E402
from xentlib.tools.harness.ranks import DEVICE  # noqa: E402

N, R, H = 43, 3, 27  # a mask's last byte is not full
ROUTES = ("tokens_parallel", "hidden")
FUNCTIONS = ("chunked_nll", "chunked_logprobs")
# Tokens of each rank, of 43; rows of the head; a rank with none of either.
SPLITS = {2: ((24, 19), (79, 78)), 4: ((9, 0, 21, 13), (40, 77, 0, 40))}
SMALL = 5000  # bytes: chunks of 8 tokens of each rank
CASES = {
    "plain": (replace(PLAIN, tokens=N, hidden=H, bias=False), 0.0),
    "masked": (replace(PLAIN, tokens=N, hidden=H, bias=False), 0.4),
    "options": (Case("low", N, H, V, std=3.0, options=OPTIONS, **EXTRAS), 0.0),
    "kernel": (Case("low", N, H, V, layout="HV", options={"z_loss": 1e-3}), 0.4),
    "bf16": (Case("low", N, H, V, dtype="bfloat16"), 0.4),
    "fp16": (Case("low", N, H, V, dtype="float16"), 0.0),
    "no token": (Case("low", N, H, V, ignored=1.0), 0.0),
}
Key = tuple[Any, ...]
# Whole models: matrices of one's own, and PEFT's.
OWN, LORA = (Sharded(gather="hidden", road=road) for road in ("LowRankHead", "PEFT"))
REPLICAS = replace(OWN, mesh="replicas", world=4)
MODELS = {
    "bias": replace(OWN, model=("bias",)),
    "inside": replace(OWN, model=("inside", "bias")),
    "per token": replace(OWN, function="chunked_logprobs", chunk=8),
    "two calls": replace(OWN, calls=2),
    "checkpoint, per token": replace(OWN, checkpoint=True, function="chunked_logprobs"),
    "three micro-batches": replace(OWN, steps=3),
    "divided by 1": replace(OWN, divide=1.0),
    "offload": replace(OWN, policy="offload"),
    "root": replace(OWN, own=False, wrap=(("reshard_after_forward", True),)),
    "frozen trunk": replace(OWN, frozen=True),
    "PEFT": replace(LORA, model=("bias",)),
    "PEFT, inside, per token": replace(LORA, model=("inside",), function="chunked_logprobs"),
    "four ranks, rank without tokens": replace(OWN, world=4, idle=True),
    "replicas, three micro-batches": replace(REPLICAS, steps=3),
    "replicas, per token": replace(REPLICAS, function="chunked_logprobs", steps=2),
}


def problem_of(name: str) -> LowProblem:
    case, dropped = CASES[name]
    p = low_problem(case, R, dropped=dropped)
    options = {k: v for k, v in p.base.options.items() if k != "reduction"}
    return p._replace(base=p.base.changed(options=options))


def calls_of(name: str, function: str) -> dict[Key, Routed]:
    p, found = problem_of(name), {}
    divisor = float(run("torch", p.base, gradient=False).weight_sum) or 1.0
    upstream = None if function == "chunked_nll" else upstream_of(p.base, 5)
    for world, (tokens, rows) in SPLITS.items():
        for route in ROUTES:
            if route == "tokens_parallel" or p.base.options.get("weight_layout") != "HV":
                found[name, function, world, route] = Routed(
                    route, function, p.base, tokens, rows, divisor, upstream, SMALL, low=p
                )
    return found


CALLS = {k: call for name in CASES for f in FUNCTIONS for k, call in calls_of(name, f).items()}
CALLS |= {
    (*key, "on a device"): call._replace(on_device=True)
    for key, call in CALLS.items()
    if key[2] == 4
}


KEPT = every_pair(CALLS, together=3)


@pytest.fixture(scope="module")
def results(request: Any) -> dict[Key, list[Routes]]:
    """Every call: one start of four ranks."""
    keys = collected(request, CALLS)
    ranks = launch(4, on_ranks, [CALLS[key] for key in keys])
    return {
        key: [found for found in every if found is not None]
        for key, every in zip(keys, zip(*ranks, strict=True), strict=True)
    }


@pytest.mark.parametrize("key", parameters(CALLS, KEPT))
def test_routes_give_the_dense_answer(results: Any, key: Key) -> None:
    """A2, A3, A5 to A7, A13: tokens and rows in any shares. Catches: d A of one rank's rows, the
    mask of another rank's tokens, upstream gradients of none."""
    call, (name, function, *_) = CALLS[key], key
    p = problem_of(name)
    sixteen = name in ("bf16", "fp16")
    dtype = p.base.hidden.dtype.name
    reference = oracle(p, call.upstream, dtype if sixteen else "float64")
    found = merged(call, results[key])
    assert found["d_weight"] is None
    if function == "chunked_nll":
        held_to("A2", found["loss"], reference.loss, magnitude=max(reference.loss_magnitude, 1.0))
    scale = np.fmax(np.abs(reference.lse), 4.0)
    held_to("A3", found["lse"], np.where(p.base.valid, reference.lse, 0.0), magnitude=scale)
    got = {"hidden": found["d_hidden"], "a": found["a"], "b": found["b"]}
    hold(reference, got, {"bf16": "A7", "fp16": "A16"}.get(name))
    if name == "plain":
        for key_of, x in got.items():
            for wrong in (0 * x, -x, x * 1.001, np.roll(x, 1, 0)):
                assert rejected(reference, {key_of: wrong})
    if name == "masked":
        assert rejected(oracle(p._replace(keep=None), call.upstream), got)


@pytest.mark.parametrize("key", parameters(CALLS, KEPT))
def test_what_travels_is_the_same_on_all_ranks(results: Any, key: Key) -> None:
    """A15: one SUM of d A, and with a mask one more gather of each chunk."""
    name, function, _, route, *_ = key
    call, found = CALLS[key], results[key]
    valid = np.split(call.problem.valid | call.on_device, np.cumsum(call.tokens)[:-1])
    rounds = -(-max(int(x.sum()) for x in valid) // 8)
    twice = "softcap" in call.problem.options and rounds > 1
    if twice or not rounds:
        for of_rank in found[1:]:
            assert (of_rank.forward, of_rank.backward) == (found[0].forward, found[0].backward)
        return
    budget = "tokens over the ranks, low rank"
    budget += ", mask" * (CASES[name][1] > 0)
    budget += ", recompute" * (function == "chunked_logprobs")
    once = int(route == "hidden")  # A, of which FSDP2 keeps rows
    first = [x.forward | {"all_gather": x.forward["all_gather"] - once} for x in found]
    counts = first, [x.backward for x in found]
    assert not failures(check_budget(budget, *counts, rounds=rounds))


@pytest.fixture(scope="module")
def models(request: Any) -> dict[str, list[Any]]:
    """Every model, on two ranks or four: one start of each."""
    pytest.importorskip("peft")
    return on_each_world({name: MODELS[name] for name in collected(request, MODELS)})


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(models: Any, name: str) -> None:
    """A12, D7: of full logits, on every rank, the wrapper's mean over ranks and replicas included.
    Catches: adapters that are bypassed, d A that is divided by the ranks twice or not."""
    expected = gradients_of_one_process(replace(MODELS[name], gather="head"))
    assert len([x for x in expected if x.startswith("head.")]) == 2
    for grads, _ in models[name]:
        hold_parameters(grads, expected)


POLICY = Case("low policy", 62, H, V, dtype="bfloat16", bias=False)
BIG = (32_002, 331)  # of which few tokens travel themselves
OUTSIDE = "`a` and `b` must be sharded over their rows by the `fully_shard` of `weight`, with"
SAID = {
    "stream": "`weight` must be one array here; got a `LowRankHead` with gather='stream'. Leave",
    "outside": OUTSIDE,
    "a bare head": OUTSIDE,
    "rows of B": f"`b` must have shape ({V}, {R}), a row for each row of the head; got (1, {R}).",
}


def on_two(rank: int, world: int) -> dict[str, Any]:
    """What calls say, or how many collectives they make; gradients under a policy of bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from xentlib.tools.harness.device import numpy_of, on_torch
    from xentlib.torch import LowRankHead, chunked_nll, count_collectives

    p = low_problem(POLICY, R, adapter="float32")
    hidden, labels = (on_torch(x[rank::world]) for x in (p.base.hidden, p.base.labels))
    hidden.requires_grad_()

    modules = []  # a parameter does not keep the module that FSDP2 has sharded

    def head_of(rows: int = V, **policy: Any) -> LowRankHead[Any]:
        head = torch.nn.Linear(H, V, bias=False).requires_grad_(False)
        with torch.no_grad():
            head.weight.copy_(on_torch(p.base.weight))
        head.a, head.b = (torch.nn.Parameter(on_torch(x)) for x in (p.a, p.b[:rows]))
        fully_shard(head, mesh=torch.distributed.init_device_mesh(DEVICE, (world,)), **policy)
        head.set_gradient_divide_factor(1.0)
        head.set_force_sum_reduction_for_comms(True)  # all that gloo can do
        modules.append(head)
        return LowRankHead(head.weight, head.a, head.b, p.scale)

    bare = (torch.zeros(x.shape, requires_grad=True) for x in (p.a, p.b))
    low, outside = head_of(), LowRankHead(head_of().weight, *bare)
    called = partial(chunked_nll, hidden.float(), labels=labels)
    calls = {
        "stream": partial(called, weight=low, gather="stream"),
        "outside": partial(called, weight=low._replace(a=head_of().a), gather="hidden"),
        "a bare head": partial(called, weight=outside, gather="hidden"),
        "rows of B": partial(called, weight=head_of(1), gather="hidden"),
    }
    found: dict[str, Any] = dict(said_by(calls))
    for name in ("inside", "outside"):
        head = torch.nn.Linear(*BIG[::-1], bias=False)
        a, b = (torch.nn.Parameter(torch.randn(shape)) for shape in ((R, BIG[1]), (BIG[0], R)))
        if name == "inside":
            head.a, head.b = a, b
        fully_shard(head, mesh=torch.distributed.init_device_mesh(DEVICE, (world,)))
        if name == "inside":
            a, b = head.a, head.b
        few = torch.randn(4, BIG[1])
        with torch.no_grad(), count_collectives() as count:
            low = LowRankHead(head.weight, a, b)
            chunked_nll(few, low, torch.arange(4), gather="auto", tokens_per_rank=4)
        found["auto", name] = count.bytes("all_gather")
    low = head_of(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    total = float(p.base.valid.sum())
    loss = chunked_nll(hidden, low, labels, denominator=total, gather="hidden").loss
    loss.backward(torch.tensor(p.base.upstream))
    whole = {name: getattr(low, name).grad.full_tensor() for name in ("a", "b")}
    grads = {"hidden": hidden.grad} | whole
    found["policy"] = {name: numpy_of(x) for name, x in grads.items()}
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch(2, on_two)


@pytest.mark.parametrize("name", SAID)
def test_what_is_refused(two: Any, name: str) -> None:
    for rank in two:
        assert rank[name].startswith(SAID[name]), rank[name]


def test_auto_takes_a_route_that_there_is(two: Any) -> None:
    """A15: few tokens travel themselves; the head does, where A and B are not sharded with it."""
    whole = BIG[0] * BIG[1] * 4
    for rank in two:
        assert rank["auto", "inside"] < whole / 100
        assert rank["auto", "outside"] == whole


def test_a_policy_of_sixteen_bits_leaves_the_matrices_as_wide_as_they_are(two: Any) -> None:
    """A7: products with the head's rows are in bfloat16, A and B and their gradients in float32."""
    p = low_problem(POLICY, R, adapter="float32")
    reference = oracle(p, dz_dtype="bfloat16")
    for rank, found in enumerate(two):
        got = found["policy"]
        assert got["a"].dtype == got["b"].dtype == np.float32
        hidden = np.zeros_like(p.base.hidden)
        hidden[rank::2] = got["hidden"]
        rest = two[1 - rank]["policy"]["hidden"]
        hidden[1 - rank :: 2] = rest
        hold(reference, {"hidden": hidden}, "A7")
        for name in ("a", "b"):  # not rounded at the end, as dz is before
            hold(reference, {name: got[name]}, "A7", ("bf16 ULP unless cancelled",))
