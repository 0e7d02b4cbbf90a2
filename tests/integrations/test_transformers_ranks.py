"""A patched model under the wrappers that people train with, on real ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.patched import CHUNK, ROWS, batch, held, llama  # noqa: E402
from xentlib.torch.integrations.transformers import patch  # noqa: E402

WORLD, RATE = 2, 0.1
TORCH = (
    *("DDP", "FSDP2, root", "FSDP2, head", "FSDP2, tied", "FSDP2, kept whole"),
    *("FSDP2, root, hidden", "FSDP2, head, stream", "FSDP2, tied, hidden"),
    "FSDP2, kept whole, hidden",
)


def one_process(tied: bool) -> dict[str, Any]:
    """The second step of the unpatched model on all rows, divided by all tokens: unequal numbers on
    the ranks."""
    model = llama(tie_word_embeddings=tied)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for full in batches():
        optimizer.step()  # of nothing at first
        optimizer.zero_grad()
        loss = model(**full, num_items_in_batch=number(full)).loss
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def batches() -> list[dict[str, Any]]:
    return [batch(), {name: x.roll(1, 1) for name, x in batch().items()}]


def number(full: dict[str, Any]) -> Any:
    return (full["labels"][:, 1:] != -100).sum()


def wrapped(model: Any, way: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "DDP":
        return DistributedDataParallel(model)
    if way == "ZeRO-3":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # the default of 1 would clip the first step
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        }
        return deepspeed.initialize(model=model, config=config)[0]
    kept = {"reshard_after_forward": False} if "kept whole" in way else {}
    for layer in model.model.layers:
        fully_shard(layer, **kept)
    if "head" in way:
        fully_shard(model.lm_head, **kept)
    return fully_shard(model, **kept)


def on_rank(rank: int, world: int, ways: tuple[str, ...]) -> dict[str, Any]:
    return {way: trained(rank, world, way) for way in ways}


def trained(rank: int, world: int, way: str) -> dict[str, Any]:
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    route = way.rsplit(", ", maxsplit=1)[-1]
    options = {"gather": route} if route in ("hidden", "stream") else {}
    model = patch(llama(tie_word_embeddings="tied" in way), max_chunk_bytes=CHUNK, **options)
    if way == "ZeRO-3":
        import deepspeed

        deepspeed.init_distributed("gloo")
    outer = wrapped(model, way)
    own = None if way == "ZeRO-3" else torch.optim.SGD(outer.parameters(), RATE)
    for index, full in enumerate(batches()):
        if index:
            (outer if own is None else own).step()
            model.zero_grad()
        part = {k: x[rows] for k, x in full.items()}
        loss = outer(**part, num_items_in_batch=number(full) / world).loss
        outer.backward(loss) if own is None else loss.backward()
    if own is None:
        from deepspeed.utils import safe_get_full_grad

        grads = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    else:
        grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items()}
    loss = loss.detach().clone()
    torch.distributed.all_reduce(loss)
    return {"loss": loss / world, **{k: g.detach().float().clone() for k, g in whole.items()}}


@pytest.mark.parametrize("ways", [TORCH, ("ZeRO-3",)], ids=["torch", "ZeRO-3"])
def test_every_parameter_on_two_ranks(ways: tuple[str, ...]) -> None:
    """The second step, of ranks with unequal numbers of tokens. Catches: a head that is gathered
    twice, or reduced twice, as its own hooks and `chunked_nll` would together."""
    if ways != TORCH:
        pytest.importorskip("deepspeed")
    for found in launch(WORLD, on_rank, ways):
        for way in ways:
            held(found[way], one_process("tied" in way))
