"""TRL's head by a route of its own on ranks under FSDP2, against one process with all logits."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="TRL is in the extra `trainers`")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from helpers.patched import batch, held, llama  # noqa: E402
from xentlib.torch.integrations.trl import use  # noqa: E402


def on_ranks(rank: int, world: int) -> dict[str, list[Any]]:
    """Gradients of a model under FSDP2 whose loss is that of TRL's head."""
    from torch.distributed.fsdp import fully_shard
    from trl.trainer.utils import add_fused_lm_head

    found = {}
    for way in ROUTED:
        gather, own = way.split(", ")
        model = llama(tie_word_embeddings=False)
        add_fused_lm_head(model, outputs=("log_probs", "mean_logits"))
        for layer in model.model.layers:
            fully_shard(layer)
        if own == "own":
            fully_shard(model.lm_head)
        fully_shard(model)
        full = batch()
        part = {k: x.chunk(world)[rank] for k, x in full.items()}
        number = (full["labels"][:, 1:] != -100).sum() / world  # of which FSDP2 takes the mean
        with use(gather=gather):
            out = model(**part, fused_lm_head=True, num_items_in_batch=number)
        out.loss.backward()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found[way] = [grads, out.mean_logits.detach().chunk(1)[0]]
    return found


ROUTED = ("head, own", "head, root", "hidden, own", "hidden, root", "stream, own")


@pytest.mark.slow
def test_routes_of_a_sharded_head() -> None:
    """`use(gather=...)` under TRL's own head. Catches: its `full_tensor()`, whose gradient nobody
    reduces, and a mean logit of one rank's rows."""
    model, full = llama(tie_word_embeddings=False), batch()
    out = model(**full, num_items_in_batch=(full["labels"][:, 1:] != -100).sum())
    out.loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    counted = full["labels"][:, 1:] != -100
    mean = torch.where(counted, out.logits[:, :-1].float().mean(-1), 0.0).detach()
    ranks = launch(2, on_ranks)
    for rank, found in enumerate(ranks):
        for grads, means in found.values():
            held(grads, want)
            held({"mean": means}, {"mean": mean.chunk(2)[rank]})


def test_options_that_there_are_not() -> None:
    with pytest.raises(TypeError, match="`softcap` is not an option of this call"):
        use(softcap=3.0)
