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

WORLD = 2
TORCH = ("DDP", "FSDP2, root", "FSDP2, head", "FSDP2, tied", "FSDP2, kept whole")


def one_process(tied: bool) -> dict[str, Any]:
    """The unpatched model on all rows, divided by all tokens: unequal numbers on the ranks."""
    model = llama(tie_word_embeddings=tied)
    labels = batch()["labels"]
    loss = model(**batch(), num_items_in_batch=(labels[:, 1:] != -100).sum()).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


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
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        return deepspeed.initialize(model=model, config=config)[0]
    kept = {"reshard_after_forward": False} if way == "FSDP2, kept whole" else {}
    for layer in model.model.layers:
        fully_shard(layer, **kept)
    if way == "FSDP2, head":
        fully_shard(model.lm_head, **kept)
    return fully_shard(model, **kept)


def on_rank(rank: int, world: int, ways: tuple[str, ...]) -> dict[str, Any]:
    return {way: trained(rank, world, way) for way in ways}


def trained(rank: int, world: int, way: str) -> dict[str, Any]:
    rows, full = slice(rank * ROWS // world, (rank + 1) * ROWS // world), batch()
    total = (full["labels"][:, 1:] != -100).sum()
    model = patch(llama(tie_word_embeddings=way == "FSDP2, tied"), max_chunk_bytes=CHUNK)
    if way == "ZeRO-3":
        import deepspeed

        deepspeed.init_distributed("gloo")
    outer = wrapped(model, way)
    part = {k: x[rows] for k, x in full.items()}
    loss = outer(**part, num_items_in_batch=total / world).loss
    if way == "ZeRO-3":
        from deepspeed.utils import safe_get_full_grad

        outer.backward(loss)
        grads = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    else:
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items()}
    loss = loss.detach().clone()
    torch.distributed.all_reduce(loss)
    return {"loss": loss / world, **{k: g.detach().float().clone() for k, g in whole.items()}}


@pytest.mark.parametrize("ways", [TORCH, ("ZeRO-3",)], ids=["torch", "ZeRO-3"])
def test_every_parameter_on_two_ranks(ways: tuple[str, ...]) -> None:
    """Rows of a rank have 13 and 22 tokens. Catches: a head that is gathered twice, or reduced
    twice, as its own hooks and `chunked_nll` would together."""
    if ways != TORCH:
        pytest.importorskip("deepspeed")
    for found in launch(WORLD, on_rank, ways):
        for way in ways:
            held(found[way], one_process(way == "FSDP2, tied"))
