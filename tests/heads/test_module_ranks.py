"""`xentlib.torch.NLLHead` and tensor parallelism's styles on two gloo ranks: a style that would
drop the labels is refused where it is applied, and what its message names is right."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

H, V, N = 7, 23, 6


def styled(rank: int, world: int) -> tuple[list[str], list[Any]]:
    from torch import nn
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    from xentlib.torch import NLLHead, chunked_nll

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    linear = nn.Linear(H, V)
    hidden, labels = torch.randn(N, H, requires_grad=True), torch.randint(V, (N,))
    whole = chunked_nll(hidden, linear.weight, labels, bias=linear.bias).loss
    leaves = (hidden, linear.weight, linear.bias)
    want = [whole, *torch.autograd.grad(whole, leaves)]
    said = []
    for style in (ColwiseParallel(), ColwiseParallel(use_local_output=False), RowwiseParallel()):
        try:
            parallelize_module(NLLHead(H, V), mesh, style)
        except TypeError as error:
            said.append(str(error))
    # A style that hands on what it is told of: the hidden states, and the labels as they are.
    inputs = PrepareModuleInput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Shard(0), None),
        use_local_output=True,
    )
    head = parallelize_module(NLLHead.from_linear(linear), mesh, inputs)
    said.append(str(torch.equal(head(hidden.detach(), labels).loss, whole)))

    parallelize_module(linear, mesh, ColwiseParallel())
    weight, bias = linear.weight, linear.bias
    module = NLLHead(H, V)  # of parameters that are sharded, that no wrapper keeps
    module.weight, module.bias = weight, bias
    pairs = []
    for call in (
        chunked_nll,
        lambda hidden, _, labels, bias, **more: module(hidden, labels, **more),
    ):
        loss = call(hidden, weight, labels, bias=bias, vocab_parallel=mesh).loss
        loss.backward()
        got = [loss, hidden.grad, weight.grad.full_tensor(), bias.grad.full_tensor()]
        pairs += [[x.detach().numpy() for x in both] for both in zip(got, want, strict=True)]
        hidden.grad = weight.grad = bias.grad = None
    return said, pairs


def test_a_style_that_drops_the_labels_is_refused() -> None:
    for said, pairs in launch(2, styled):
        for message in said[:3]:
            assert re.match(r"`NLLHead` must be called with its labels; got a parallel", message)
            assert "chunked_nll(hidden, head.weight, labels, bias=head.bias, vocab_p" in message
        assert said[3:] == ["True"]
        for got, want in pairs:
            assert not failures(check("A9", got, want, metrics=("rho / u",)))
