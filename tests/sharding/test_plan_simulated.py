"""What a call sends on 8, 64 and 1,024 ranks, of which one is simulated, is the plan's, by how many
ranks take part, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from xentlib.plan import head_routes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.simulated import Sent, Simulated, sent_by  # noqa: E402

CALLS = ("chunked_nll", "chunked_logprobs")
FLAT = [
    Simulated((ranks,), gather, function)
    for ranks in (8, 64, 1024)
    for gather in ("head", "hidden", "stream")
    for function in CALLS
]
NODES = [
    Simulated((ranks,), "hidden", function, nodes=ranks // 8)
    for ranks in (64, 1024)
    for function in CALLS
]
SHARDED = [
    Simulated((ranks // 8, 8), gather, function)
    for ranks in (64, 1024)
    for gather in ("head", "hidden", "stream")
    for function in CALLS
]
SEQUENCES = [
    Simulated((ranks // 8, 8), "hidden", function, sequence=True)
    for ranks in (64, 1024)
    for function in CALLS
]


def planned(setup: Simulated) -> Sent:
    dtypes: Any = dict.fromkeys(("dtype", "head_dtype", "reduce_dtype"), "float32")
    ranks = setup.ranks if setup.sequence else setup.shape[0]
    shards = not setup.sequence and len(setup.shape) > 1
    # The SUM over shards alone, which has one size on a device, has tokens that are all in a chunk.
    over_shards = shards and setup.gather != "hidden"
    routes = head_routes(
        setup.tokens,
        setup.vocab,
        setup.hidden,
        ranks,
        nodes=setup.nodes,
        tensor_parallel=setup.shape[1] if shards else 1,
        recompute=setup.function == "chunked_logprobs",
        platform="gpu" if over_shards else "cpu",
        kernels=False,
        **dtypes,
    )
    sent: Sent = {}
    for x in routes["hybrid" if setup.nodes > 1 else setup.gather].exchanges:
        count, size = sent.get((x.kind, x.ranks), (0, 0))
        sent[x.kind, x.ranks] = count + x.count, size + x.bytes
    return sent


@pytest.mark.parametrize("setup", [*FLAT, *NODES, *SHARDED, *SEQUENCES], ids=repr)
def test_a_call_sends_what_is_planned(setup: Simulated) -> None:
    """A15. Catches a collective of the wrong dimension of a mesh, and a term that does not grow
    with the ranks as the plan says."""
    assert sent_by(setup) == planned(setup)
