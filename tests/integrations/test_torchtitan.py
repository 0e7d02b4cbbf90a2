"""torchtitan's way of training, from torch's own APIs: the loss of hidden states and the head."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers import titan  # noqa: E402
from helpers.held import hold_in_norm  # noqa: E402
from helpers.ranks import launch  # noqa: E402
from xentlib.torch.integrations.torchtitan import (  # noqa: E402
    HeadLoss,
    local_shards,
    loss_class,
    loss_config,
)

SETUPS = (
    "sequence parallel",
    "tensor parallel",
    "sequence parallel, FSDP2",
    "sequence parallel, FSDP2, resharded",
    "tensor parallel, FSDP2, head alone",
    "FSDP2",
    "FSDP2, tied, resharded",
    "FSDP2, hidden",
    "FSDP2, tied, stream",
    "FSDP2, tied, resharded, hidden",
    "pipeline",
    "sharded rows",
)
# Where each rank has a batch of its own
OF_RANKS = [name for name in SETUPS if name.startswith("FSDP2")]
# Two ranks of tensor parallelism by two of FSDP2
IN_TWO_DIMENSIONS = (
    "sequence parallel",
    "sequence parallel, hidden",
    "sequence parallel, stream",
    "sequence parallel, resharded, hidden",
    "tensor parallel, head alone, hidden",
    "tensor parallel, stream",
)


def one_process(tied=False):
    """Full logits of the model, and the mean over all tokens."""
    model = titan.Decoder(tied=tied)
    total = 0.0
    for ids, labels in titan.batches():
        logits = model(ids).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        (loss / titan.TOKENS).backward()
        total += (loss / titan.TOKENS).item()
    return total, titan.gradients(dict(model.named_parameters()))


def route_of(name):
    route = name.split(", ")[-1]
    return {"gather": route} if route in ("hidden", "stream") else {}


def on_grid(rank, world):
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tp"))
    own = mesh["fsdp"].get_local_rank()
    found = {}
    for name in IN_TWO_DIMENSIONS:
        model = titan.Decoder()
        titan.parallel(model, mesh["tp"], sequence="sequence" in name)
        alone, resharded = "alone" in name, "resharded" in name
        titan.shard(model, mesh["fsdp"], alone=alone, resharded=resharded)
        found[name] = titan.step(model, titan.batches()[own : own + 1], **route_of(name))
    return found


def on_rank(rank, world):
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("fsdp", "tp"))
    found = {}
    for name in SETUPS[:10]:
        model = titan.Decoder(tied="tied" in name)
        mine = titan.batches()
        if "parallel" in name:
            titan.parallel(model, mesh["tp"], sequence="sequence" in name)
            if "FSDP2" in name:
                alone = "alone" in name
                titan.shard(model, mesh["fsdp"], resharded="resharded" in name, alone=alone)
        else:
            titan.shard(
                model,
                init_device_mesh("cpu", (world,)),
                tied="tied" in name,
                resharded="resharded" in name,
            )
            mine = mine[rank : rank + 1]
        found[name] = titan.step(model, mine, **route_of(name))
    found["pipeline"] = titan.pipeline(rank)
    found["sharded rows"] = titan.sharded_rows(rank)

    said = []
    for divide in (None, 4.0):
        model = titan.Decoder()
        titan.shard(model, init_device_mesh("cpu", (world,)), divide=divide)
        with pytest.raises(ValueError, match="set_gradient_divide_factor") as error:
            titan.step(model, titan.batches()[:1])
        said.append(str(error.value))
    model = titan.Decoder()
    hidden = torch.randn(titan.B, titan.L, titan.H)
    hidden = DTensor.from_local(hidden, mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="spmd_backend"):
        titan.head_loss(model)(hidden, titan.batches()[0][1])
    return found, said


@pytest.fixture(scope="module")
def ranks():
    return launch(2, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_a_step_on_ranks_is_that_of_one_process(name, ranks) -> None:
    total, want = one_process(tied="tied" in name)
    losses = [found[name][0] for found, _ in ranks]
    seen = set()
    for found, _ in ranks:
        got = found[name][1]
        seen |= got.keys()
        hold_in_norm(got.values(), [want[key] for key in got], name)
    assert seen == want.keys() - ({"lm_head.weight"} if name == "sharded rows" else set())
    whole = sum(losses) if name in (*OF_RANKS, "pipeline") else losses[1]
    hold_in_norm([whole], [total], name)


@pytest.fixture(scope="module")
def grid():
    return launch(4, on_grid)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TWO_DIMENSIONS)
def test_a_step_in_two_dimensions_is_that_of_one_process(name, grid) -> None:
    """A sequence's loss is that of all its ranks on each of them; a route changes nothing."""
    total, want = one_process()
    for found in grid:
        _, got = found[name]
        assert got.keys() == want.keys()
        hold_in_norm(got.values(), [want[key] for key in got], name)
    losses = [found[name][0] for found in grid]
    assert losses[::2] == losses[1::2]  # on the ranks of tensor parallelism
    hold_in_norm([sum(losses[::2])], [total], name)


@pytest.mark.slow
def test_fsdp_that_divides_is_refused(ranks) -> None:
    """The loss is divided by the tokens of all ranks already."""
    for _, said in ranks:
        assert "divides by the number of ranks" in said[0]
        assert "divides by 4" in said[1]


def without_fsdp(rank, world):
    """What is said under DDP and without a wrapper, and the steps of who sums by his own code."""
    ids, labels = titan.batches()[rank]
    refused, found = [], {}
    for name in ("DDP", "no wrapper"):
        for summed in (False, True):
            model = titan.Decoder()
            loss_fn = titan.head_loss(model, summed=summed)
            outer = torch.nn.parallel.DistributedDataParallel(model) if name == "DDP" else model
            with torch.no_grad():  # there is nothing to sum
                loss_fn(outer(ids), labels)
            if not summed:
                with pytest.raises(ValueError, match="no `fully_shard` keeps, on 2 ranks") as error:
                    loss_fn(outer(ids), labels, titan.TOKENS)
                refused.append(str(error.value))
                continue
            loss = loss_fn(outer(ids), labels, titan.TOKENS)[0]
            (loss * world if name == "DDP" else loss).backward()
            for p in () if name == "DDP" else model.parameters():
                torch.distributed.all_reduce(p.grad)
            found[name] = titan.gradients(dict(model.named_parameters()))
    # A pipeline accounts for its own ranks alone.
    groups = [torch.distributed.new_group([k]) for k in range(world)]
    with pytest.raises(Exception, match="no `fully_shard` keeps"):
        titan.alone_in_a_pipeline(groups[rank])
    return refused, found


@pytest.mark.slow
def test_ranks_that_nothing_sums_over_are_refused() -> None:
    """DDP halves every gradient of two ranks; without a wrapper they were 0.55 to 0.79 off."""
    _, want = one_process()
    for refused, found in launch(2, without_fsdp):
        assert all("DDP takes the mean" in said and "summed=True" in said for said in refused)
        for name, got in found.items():
            hold_in_norm(got.values(), [want[key] for key in got], name)


def test_one_device_without_logits() -> None:
    model = titan.Decoder()
    ids, labels = (torch.cat(x) for x in zip(*titan.batches(), strict=True))
    loss_fn = titan.head_loss(model)
    with titan.Logits() as logits:
        loss_fn(model(ids), labels, titan.TOKENS)[0].backward()
    assert logits.seen == 0
    with titan.Logits() as logits:
        model.lm_head(model(ids))
    assert logits.seen
    _, want = one_process()
    got = titan.gradients(dict(model.named_parameters()))
    hold_in_norm(got.values(), [want[key] for key in got])


def test_without_a_number_of_tokens_it_is_a_sum() -> None:
    model = titan.Decoder()
    loss_fn = titan.head_loss(model)
    ids, labels = titan.batches()[0]
    with torch.no_grad():
        total, mean = (loss_fn(model(ids), labels, n)[0] for n in (None, (labels != -100).sum()))
    hold_in_norm([total / (labels != -100).sum()], [mean])


def test_what_a_hurried_user_does() -> None:
    model = titan.Decoder()
    ids, labels = titan.batches()[0]
    with pytest.raises(ValueError, match=r"before `set_lm_head`. Call"):
        HeadLoss()(model(ids), labels)
    loss_fn = HeadLoss()
    loss_fn.set_lm_head(model.lm_head)
    with pytest.raises(ValueError, match=r"hidden states \(..., 15\), before the head; got"):
        loss_fn(model(ids), labels)
    hidden = model.norm(model.embedding(ids))
    with pytest.raises(TypeError, match="got 'advantages', which would have no effect"):
        loss_fn(hidden, labels, advantages=labels)
    with pytest.raises(ValueError, match="one entry per token of `hidden`"):
        loss_fn(hidden[:, :6], labels)  # this rank's part of a sequence
    with pytest.raises(TypeError, match="whose forward is its own"):
        loss_fn.set_lm_head(model)
    with pytest.raises(TypeError, match="`lm_head` must be the head as a module; got a Parameter"):
        loss_fn.set_lm_head(model.lm_head.weight)
    with pytest.raises(TypeError, match="z_los"):
        HeadLoss(z_los=1.0)
    with pytest.raises(TypeError, match="`summed` must be True or False; got 2"):
        HeadLoss(summed=2)


class Types:
    """Of `spmd_types`."""

    is_type_checking = staticmethod(lambda: False)
    no_typecheck = staticmethod(nullcontext)


@pytest.fixture
def torchtitan(monkeypatch):
    """What `loss_config` asks of torchtitan 0.3."""
    sizes, groups = {"tp": 1}, {"tp": "the group"}

    class CrossEntropyLoss:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    class ChunkedLossWrapper:
        @dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8
            loss_fn: object = field(default_factory=CrossEntropyLoss.Config)

    here = sys.modules
    places = {
        "torchtitan.components.loss": SimpleNamespace(
            ChunkedLossWrapper=ChunkedLossWrapper, CrossEntropyLoss=CrossEntropyLoss
        ),
        "torchtitan.distributed.spmd_types": SimpleNamespace(
            sizes=sizes,
            spmd_mesh_size=sizes.get,
            current_spmd_mesh=lambda: SimpleNamespace(get_group=groups.get),
        ),
        "spmd_types": Types,
        "torchtitan": ModuleType("torchtitan"),
        "torchtitan.components": ModuleType("torchtitan.components"),
    }
    for name, place in places.items():
        monkeypatch.setitem(here, name, place)
    loss_class.cache_clear()
    yield places["torchtitan.components.loss"]
    loss_class.cache_clear()


def test_as_a_component_of_torchtitan(torchtitan) -> None:
    config = loss_config(z_loss=1e-2, recompute=True)
    assert isinstance(config, torchtitan.ChunkedLossWrapper.Config)
    loss_fn = config._owner(config, compile_config=None)
    assert isinstance(loss_fn, torchtitan.ChunkedLossWrapper)
    model = titan.Decoder()
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    ids, labels = titan.batches()[0]
    got = loss_fn(model(ids), labels, titan.TOKENS)
    want = titan.head_loss(model, z_loss=1e-2)(model(ids), labels, titan.TOKENS)
    assert got[1] == {}
    hold_in_norm([got[0].detach()], [want[0].detach()])
    assert [x.grad_fn.recompute for x in (got[0], want[0])] == [True, False]

    sys.modules["torchtitan.distributed.spmd_types"].sizes["tp"] = 2
    assert local_shards() == {"vocab_parallel": "the group", "reduce_hidden_grad": False}

    config.num_chunks = 16
    with pytest.raises(ValueError, match="got num_chunks=16 and"):
        config._owner(config)


def test_without_torchtitan(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ImportError, match=r"torchtitan 0.3 or newer; got none"):
        loss_config()
