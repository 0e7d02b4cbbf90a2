"""Heads and hidden states that are DTensors on a mesh of data and tensor parallelism, as in a model
of DTensors throughout: refused with the call that is right, which is made here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.cpu, pytest.mark.torch]

from xentlib.shards import VocabShard  # noqa: E402
from xentlib.torch import chunked_nll  # noqa: E402

V, H, N = 37, 7, 12


def problem() -> tuple[Any, ...]:
    torch.manual_seed(3)
    return torch.randn(N, H), torch.randn(V, H), torch.randint(V, (N,))


def on_mesh(rank: int, world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w, y = problem()
    hidden = distribute_tensor(x, mesh, [Shard(0), Replicate()]).requires_grad_()
    weight = distribute_tensor(w, mesh, [Replicate(), Shard(0)]).requires_grad_()
    labels = y.tensor_split(2)[mesh["dp"].get_local_rank()]
    how: dict[str, Any] = {"vocab_parallel": mesh["tp"], "denominator": N}

    def said(hidden: Any, weight: Any) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is returned
            chunked_nll(hidden, weight, labels, **how)
        return str(caught.value)

    texts = [said(hidden.to_local(), weight), said(hidden.to_local(), weight.to_local())]
    (placements,) = {
        found for text in texts for found in re.findall(r"grad_placements=(\[[^]]*\])", text)
    }
    known = {"Partial": Partial, "Shard": Shard}
    local = weight.to_local(grad_placements=eval(placements, known))
    texts.append(said(hidden, local))
    how["vocab_parallel"] = VocabShard.of_ranks(len(local), mesh["tp"].get_group())
    chunked_nll(hidden.to_local(), local, labels, **how).loss.backward()
    gradients = [x.grad.full_tensor().numpy() for x in (hidden, weight)]
    # Ranks that have the same tokens say so.
    same = weight.to_local(grad_placements=[Replicate(), Shard(0)])
    chunked_nll(x, same, y, **how)
    with torch.no_grad():
        chunked_nll(hidden.to_local(), weight.to_local(), labels, **how)
    return texts, gradients


def test_the_call_that_a_message_advises_is_right() -> None:
    """A12. Catches: advice that raises, a local tensor whose gradient is of one rank's tokens."""
    x, w, y = (leaf.requires_grad_(leaf.is_floating_point()) for leaf in problem())
    chunked_nll(x, w, y, denominator=N).loss.backward()
    for texts, gradients in launch(4, on_mesh):
        first, second, third = texts
        assert "`weight` must be sharded over its vocabulary" in first
        assert "`weight` must say how its gradient is reduced over ranks" in second
        assert "Pass `hidden.to_local()`, this rank's tokens" in third
        hold_in_norm(gradients, (x.grad.numpy(), w.grad.numpy()))
