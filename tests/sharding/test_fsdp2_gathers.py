"""Gathers that FSDP2 need not make: real `fully_shard` on two gloo ranks, two steps each, with the
bits of the gradients that the longer way gives.

Shapes: B rows of a batch, L tokens of a row, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.ranks import launch
from xentlib.budgets import check_budget
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from torch import nn  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from xentlib.torch import (  # noqa: E402
    NLLHead,
    chunked_logprobs,
    chunked_nll,
    count_collectives,
    gather_head,
    next_token_labels,
)

V, H, B, L, STEPS = 101, 15, 4, 12, 2


class Model(nn.Module):
    """Hidden states of a trunk of two parts that are sharded one by one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H)
        self.block = nn.Sequential(nn.Linear(H, H), nn.Tanh())
        self.norm = nn.LayerNorm(H)
        self.head = NLLHead(H, V, **options)

    def forward(self, ids: Any) -> Any:
        return self.norm(self.block(self.embedding(ids)))


Call = Callable[..., Any]  # of the head, as it is or as FSDP2's hooks alone would have it


def loss(call: Call, model: Any, hidden: Any, labels: Any) -> Any:
    return call(hidden, labels).loss


def by_keywords(call: Call, model: Any, hidden: Any, labels: Any) -> Any:
    return call(hidden=hidden, labels=labels, softcap=30.0, max_chunk_bytes=8 * V * 4).loss


def logits(call: Call, model: Any, hidden: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(call(hidden).flatten(0, 1), labels.flatten())


def per_token(call: Call, model: Any, hidden: Any, labels: Any) -> Any:
    return -call(hidden, labels).logprobs.mean()


def both(first: Any, second: Any, *given: Any) -> Any:
    return first(*given) + 0.3 * second(*given)


def checkpointed(reentrant: bool, call: Call, model: Any, hidden: Any, labels: Any) -> Any:
    def part(hidden: Any) -> Any:
        return loss(call, model, hidden, labels)

    return checkpoint(part, hidden, use_reentrant=reentrant)


def after_metrics(call: Call, model: Any, hidden: Any, labels: Any) -> Any:
    with torch.no_grad():
        logits(call, model, hidden, labels)
        loss(call, model, hidden, labels)
    return loss(call, model, hidden, labels)


@dataclass(frozen=True)
class Case:
    use: Any = loss
    # Of the group that holds the head, in a step: in the forward, after it, and after it with
    # FSDP2's hooks alone.
    gathers: tuple[int, int, int] = (1, 0, 1)
    options: tuple[tuple[str, Any], ...] = ()
    group: tuple[str, ...] = ("head",)  # of one `fully_shard`
    tied: bool = False
    bf16: bool = False
    frozen: bool = False  # the head
    whole: bool = False  # not resharded after the forward
    hooked: bool = False
    micro: int = 1  # batches a step
    unshard: bool | None = None  # what the user has set


# A group of which the head has not run is let go where the model's forward ends. PyTorch 2.11 has
# it stay as it was gathered for the others, and the head finds it whole.
AGAIN = int(hasattr(FSDPState, "_force_complete_incomplete_states"))
CASES = {
    "loss": Case(),
    "bias": Case(options=(("bias", True),)),
    "by keywords, many chunks": Case(by_keywords),
    "two losses": Case(partial(both, loss, loss), (2, 0, 2)),
    "micro-batches": Case(micro=2, gathers=(2, 0, 2)),
    "bf16": Case(bf16=True),
    "frozen head": Case(frozen=True),
    "metrics before": Case(after_metrics, (3, 0, 1)),
    "set by the user": Case(unshard=False, gathers=(1, 0, 0)),
    # Gathered for the forward that is run again; where that is a backward of its own, FSDP2 gathers
    # the root's group once more.
    "checkpoint": Case(partial(checkpointed, False), (1, 1, 1)),
    "checkpoint, reentrant": Case(partial(checkpointed, True), (1, 2, 2)),
    # The backward reads the head, the group holds more, or somebody looks on.
    "logits": Case(logits, (1, 1, 1)),
    "loss, then logits": Case(partial(both, loss, logits), (2, 1, 2)),
    "logits, then loss": Case(partial(both, logits, loss), (2, 1, 2)),
    "per token": Case(per_token, (1, 1, 1), options=(("per_token", True),)),
    "a hook of the user's": Case(hooked=True, gathers=(1, 1, 1)),
    "kept whole": Case(whole=True, gathers=(1, 0, 0)),
    "norm in the group": Case(group=("norm", "head"), gathers=(AGAIN, 1, 1)),
    "tied, one group": Case(group=("embedding", "head"), tied=True, gathers=(AGAIN, 1, 1)),
    "root": Case(group=(), gathers=(0, 0, 0)),  # kept whole
}


def sharded(case: Case) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Model(**{"bias": False, **dict(case.options)})
    if case.tied:
        model.head.weight = model.embedding.weight
    model.head.requires_grad_(not case.frozen)
    how: dict[str, Any] = {}
    if case.bf16:
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model.block, **how)
    parts = [getattr(model, name) for name in case.group]
    if parts:
        one = parts if len(parts) > 1 else parts[0]
        fully_shard(one, reshard_after_forward=not case.whole, **how)
    fully_shard(model, **how)
    if case.unshard is not None:
        model.head.set_unshard_in_backward(case.unshard)
    return model


def batch(step: int, rank: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(V, (B, L), generator=generator)
    return ids, next_token_labels(ids)


def gradients(model: Any) -> dict[str, Any]:
    """Whole, by name."""
    named = model.named_parameters()
    return {k: p.grad.full_tensor().numpy().copy() for k, p in named if p.grad is not None}


def steps_of(case: Case, rank: int, theirs: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Gathers and gradients of each step, and what a user's hook saw. `theirs`: the head's call as
    FSDP2's hooks alone have it."""
    model, seen = sharded(case), []
    if case.hooked:
        model.head.register_forward_hook(
            lambda _, given, out: seen.append((len(given), type(out).__name__))
        )
    call = partial(nn.Module.__call__, model.head) if theirs else model.head
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, found = [], []
    for step in range(STEPS):
        gathers = np.zeros(2, int)
        for micro in range(case.micro):
            model.set_requires_gradient_sync(micro == case.micro - 1)
            ids, labels = batch(2 * step + micro, rank)
            hidden = model(ids)
            with count_collectives() as forward:
                value = case.use(call, model, hidden, labels)
            with count_collectives() as backward:
                value.backward()
            # The block's own is in the backward.
            gathers += forward["all_gather"], backward["all_gather"] - 1
        counts.append(gathers.tolist())
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return counts, found, seen


def same_bits(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            assert np.abs(gradient).max() > 0
            assert not failures(check("A11", gradient, theirs[name], quantity=name))


def gathered(model: Any, hidden: Any, labels: Any) -> Any:
    with gather_head(model.head.weight) as (weight, _):
        return nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())


ROADS: dict[str, Call] = {
    "chunked_nll": lambda model, h, y: chunked_nll(h, model.head.weight, y).loss,
    "chunked_logprobs": lambda model, h, y: chunked_logprobs(h, model.head.weight, y)[0].mean(),
    "NLLHead": lambda model, h, y: model.head(h, y).loss,
    "gather_head": gathered,
}


def prefetched(road: str, rank: int, early: bool) -> tuple[list[Any], list[Any]]:
    """Gathers of the trunk's forward, of the loss and of the backward, and gradients."""
    model = sharded(Case())
    if early:
        model.block.set_modules_to_forward_prefetch([model.head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, found = [], []
    for step in range(STEPS):
        ids, labels = batch(step, rank)
        with count_collectives() as trunk:
            hidden = model(ids)
        with count_collectives() as forward:
            value = ROADS[road](model, hidden, labels)
        with count_collectives() as backward:
            value.backward()
        counts.append([count["all_gather"] for count in (trunk, forward, backward)])
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return counts, found


def without_loss(rank: int, taken: bool) -> list[float]:
    """Losses after new values are loaded, where the trunk has run without a loss before; the same
    where it has not. `taken`: what is gathered is given back before."""
    found = []
    for alone in (True, False):
        model, (ids, labels) = sharded(Case()), batch(0, rank)
        model.block.set_modules_to_forward_prefetch([model.head])
        if alone:
            with torch.no_grad():
                model(ids)
            if taken:
                model.head.unshard()
                model.head.reshard()
        model.load_state_dict({name: 2 * x for name, x in model.state_dict().items()})
        found.append(model.head(model(ids), labels).loss.item())
    return found


def budgeted(theirs: bool) -> tuple[dict[str, int], dict[str, int]]:
    """A module under `fully_shard` and nothing else."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    head = fully_shard(NLLHead(H, V, bias=False), reshard_after_forward=True)
    call = partial(nn.Module.__call__, head) if theirs else head
    with count_collectives() as forward:
        value = call(torch.randn(B, H, requires_grad=True), torch.arange(B)).loss
    with count_collectives() as backward:
        value.backward()
    return forward.counts(), backward.counts()


def counted_tokens() -> list[float]:
    """Losses of a bfloat16 head whose denominator is an array of float32, and a number."""
    model, (ids, labels) = sharded(Case(bf16=True)), batch(0, 0)
    counts = (torch.tensor(4099.0), 4099)
    return [model.head(model(ids), labels, denominator=n).loss.item() for n in counts]


def bias_apart(world: int) -> list[Any]:
    """Gradients where the bias has a mesh, and with it a group, of its own: of the head's call, and
    as FSDP2's hooks alone have it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common
    from torch.distributed.tensor import Shard

    if not hasattr(common, "ShardPlacementResult"):
        return []
    group = torch.distributed.new_group(list(range(world)))
    other = common.FSDPMeshInfo(mesh=DeviceMesh.from_group(group, "cpu"), shard_mesh_dim=0)
    torch.manual_seed(0)
    head = fully_shard(
        NLLHead(H, V),
        shard_placement_fn=lambda p: (
            common.ShardPlacementResult(Shard(0), other) if p.ndim == 1 else None
        ),
    )
    hidden, found = torch.randn(B, H, requires_grad=True), []
    for call in (head, partial(nn.Module.__call__, head)):
        call(hidden, torch.arange(B)).loss.backward()
        found.append(gradients(head))
        head.zero_grad()
    return found


def on_rank(rank: int, world: int, names: list[str], roads: list[str]) -> dict[str, Any]:
    return {
        **{k: [steps_of(CASES[k], rank, theirs) for theirs in (False, True)] for k in names},
        **{k: [prefetched(k, rank, early) for early in (True, False)] for k in roads},
        "without a loss": [without_loss(rank, taken) for taken in (True, False)],
        "bias apart": bias_apart(world),
        "counted tokens": counted_tokens(),
        "budget": [budgeted(theirs) for theirs in (False, True)],
    }


@pytest.fixture(scope="module")
def found(request: Any) -> list[dict[str, Any]]:
    return launch(2, on_rank, collected(request, CASES), collected(request, ROADS))


@pytest.mark.parametrize("name", CASES)
def test_the_backward_of_a_loss_gathers_no_head(found: Any, name: str) -> None:
    """A15, A11, D7: `NLLHead`, against FSDP2's hooks alone, whose gradients have the same bits.
    Catches: a head that a backward finds freed, a hook that is not run."""
    first, after, hooked = CASES[name].gathers
    for rank in found:
        (ours, got, seen), (theirs, want, _) = rank[name]
        assert ours == [[first, after]] * STEPS
        assert theirs == [[first, hooked]] * STEPS
        same_bits(got, want)
        assert seen == [(2, "NLLOutput")] * STEPS * CASES[name].hooked


def test_the_module_has_a_budget(found: Any) -> None:
    """A15, A14: FSDP2's hooks alone are off it."""
    ours, theirs = ([rank["budget"][k] for rank in found] for k in (0, 1))
    for ranks, off in ((ours, False), (theirs, True)):
        measured = check_budget("FSDP2, NLLHead", *([r[k] for r in ranks] for k in (0, 1)))
        assert bool(failures(measured)) == off


def test_arguments_beside_the_hidden_states_are_not_cast(found: Any) -> None:
    """FSDP2's hooks cast what a module is given to `param_dtype`: 4,099 tokens become 4,096."""
    for rank in found:
        array, number = rank["counted tokens"]
        assert array == number


def test_a_bias_of_another_group_is_gathered(found: Any) -> None:
    """A11: the parameter by itself would be half a head."""
    if not found[0]["bias apart"]:
        pytest.skip("this torch has one group a module")
    for rank in found:
        got, want = rank["bias apart"]
        assert len(got) == 2
        same_bits([got], [want])


@pytest.mark.parametrize("road", ROADS)
def test_the_last_block_can_gather_the_head(found: Any, road: str) -> None:
    """A15, A11: as many gathers, the head's in the forward of the trunk, where it overlaps."""
    for rank in found:
        (early, got), (late, want) = rank[road]
        for counts, (trunk, loss, backward) in zip(early, late, strict=True):
            assert loss == 1
            assert counts == [trunk + 1, 0, backward]
        same_bits(got, want)


def test_a_trunk_without_a_loss_keeps_the_head_that_it_gathered(found: Any) -> None:
    """FSDP2's own: what was gathered early is what the next loss takes, however old, unless it is
    given back as docs/fsdp2.md says."""
    for rank in found:
        (given_back, fresh), (kept, _) = rank["without a loss"]
        assert given_back == fresh
        assert kept != fresh
