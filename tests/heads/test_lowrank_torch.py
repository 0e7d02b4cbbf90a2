"""A head with a low-rank part in PyTorch: values and gradients of A, B and the hidden states
against float64, without anything of the weight's size, and what is refused.

Shapes: N tokens, V vocabulary, H hidden width, R rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from helpers.lowrank import (  # noqa: E402
    CASES,
    V,
    dense,
    given_to,
    held_to,
    hold,
    low_problem,
    oracle,
    rejected,
)
from helpers.on_meta import as_on_a_gpu  # noqa: E402
from xentlib.tools.harness.device import numpy_of, on_torch  # noqa: E402
from xentlib.tools.harness.problems import Case, upstream_of  # noqa: E402
from xentlib.torch import LowRankHead, chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.torch.core.lora import LowRank, LowSums, parts_of  # noqa: E402

CHUNK = 16 * V * 4  # of 16 tokens: several chunks


def leaves_of(p: Any, *, frozen: bool = True) -> dict[str, Any]:
    named = {"hidden": p.base.hidden, "weight": p.base.weight, "a": p.a, "b": p.b}
    leaves = {name: on_torch(x).requires_grad_() for name, x in named.items()}
    leaves["weight"].requires_grad_(not frozen)
    return leaves


def head_of(p: Any, leaves: dict[str, Any]) -> Any:
    keep = None if p.keep is None else torch.from_numpy(p.keep)
    return LowRankHead(leaves["weight"], leaves["a"], leaves["b"], p.scale, keep)


def called(p: Any, leaves: dict[str, Any], function: Any = chunked_nll, **more: Any) -> Any:
    if function is chunked_nll:
        more.setdefault("outputs", ("lse", "logprobs"))
    given = {name: on_torch(x) for name, x in given_to(p, function.__name__).items()}
    more = {"max_chunk_bytes": CHUNK, **more}
    return function(leaves["hidden"], head_of(p, leaves), on_torch(p.base.labels), **given, **more)


def gradients(p: Any, leaves: dict[str, Any], function: Any = chunked_nll, **more: Any) -> Any:
    out = called(p, leaves, function, **more)
    if function is chunked_nll:
        out.loss.backward(torch.tensor(p.base.upstream, dtype=out.loss.dtype))
    else:
        given = [on_torch(x) for x in upstream_of(p.base, 5)]
        torch.autograd.backward([out.logprobs, out.entropy, out.lse], given)
    named = {name: x.grad for name, x in leaves.items()}
    assert (named["weight"] is None) != leaves["weight"].requires_grad
    return out, {name: numpy_of(x) for name, x in named.items() if x is not None}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    """A2, A3, A5, A6: values are those of the dense head in float64."""
    p = low_problem(CASES[name])
    out, got = gradients(p, leaves_of(p))
    whole, reference = dense(p).reference(), oracle(p)
    held_to("A2", numpy_of(out.loss), whole.loss, magnitude=whole.loss_magnitude)
    held_to("A3", numpy_of(out.lse), whole.lse, magnitude=np.fmax(np.abs(whole.lse), 4.0))
    assert set(got) == {"hidden", "a", "b"}
    hold(reference, got)
    if name != "no token":
        for key, x in got.items():
            for wrong in (0 * x, -x, x * 1.001, np.roll(x, 1, 0)):
                assert rejected(reference, {key: wrong}), key


def test_gradients_of_log_probabilities() -> None:
    """A5, A6: upstream gradients of all three outputs, and of a weight that trains too."""
    p = low_problem(CASES["bias, confident"])
    for frozen in (True, False):
        leaves = leaves_of(p, frozen=frozen)
        _, got = gradients(p, leaves, chunked_logprobs, entropy=True)
        assert ("weight" in got) != frozen
        hold(oracle(p, upstream_of(p.base, 5)), got)


def test_a_dropout_s_mask() -> None:
    """A5, A6: what the low-rank part does not see has no gradient through it."""
    p = low_problem(CASES["bias, confident"], dropped=0.4)
    _, got = gradients(p, leaves_of(p))
    reference = oracle(p)
    hold(reference, got)
    assert rejected(oracle(p._replace(keep=None)), got)


@pytest.mark.parametrize("adapter", ["bfloat16", "float32"])
def test_sixteen_bits(adapter: str) -> None:
    """A7, A8: of a bfloat16 head, adapters in either dtype; those in float32 are not rounded."""
    p = low_problem(Case("low bf16", 61, 96, V, dtype="bfloat16"), 16, adapter=adapter)
    out, got = gradients(p, leaves_of(p))
    whole, reference = dense(p).reference(), oracle(p, dz_dtype="bfloat16")
    held_to("A8", numpy_of(out.loss), whole.loss, magnitude=whole.loss_magnitude)
    for name, x in got.items():
        metrics = None
        if adapter == "float32" and name != "hidden":  # not rounded at the end, as dz is before
            metrics = ("bf16 ULP unless cancelled",)
        hold(reference, {name: x}, "A7", metrics)


def test_chunks_do_not_show() -> None:
    """A10: per-token outputs and d hidden."""
    p, found = low_problem(CASES["bias, confident"]), []
    for chunk in (CHUNK, 32 * V * 4, None):
        out, got = gradients(p, leaves_of(p), max_chunk_bytes=chunk)
        found.append((numpy_of(out.lse), numpy_of(out.logprobs), got["hidden"]))
    for other in found[1:]:
        for one, x in zip(found[0], other, strict=True):
            held_to("A10", x, one)


def test_audit_mode_is_the_dense_head_s() -> None:
    """A1: in float64, rounded once, merged or not; also under autocast, which is not asked."""
    p = low_problem(CASES["bias, confident"])
    whole = dense(p).reference()
    with torch.autocast("cpu", torch.bfloat16):
        out = called(p, leaves_of(p), compute_dtype="float64")
    held_to("A1", numpy_of(out.loss), whole.loss.astype(np.float32))


def largest(function: Any) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    del kept
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])
def test_nothing_is_as_large_as_the_head(function: Any) -> None:
    """Forward and backward, by the allocator's count; a merged weight is what it would find."""
    tokens, width, vocab, rank = 64, 512, 8192, 4
    p = low_problem(Case("low memory", tokens, width, vocab, bias=False), rank)
    leaves, budget = leaves_of(p), 16 * vocab * 4

    def step() -> Any:
        return gradients(p, leaves, function, max_chunk_bytes=budget, **more)[1]

    more = {} if function is chunked_nll else {"entropy": True}
    step()  # what is allocated once
    head = vocab * width * 4
    assert largest(step) < head
    merged = lambda: leaves["weight"] + p.scale * leaves["b"] @ leaves["a"]  # noqa: E731
    assert largest(merged) >= head


MUTANTS = {
    "B's gradient dropped": (LowSums, "add_to_b", lambda *a: None, {"b"}),
    "A's gradient dropped": (LowSums, "add_to_a", lambda *a: None, {"a"}),
    "d hidden without it": (LowSums, "add_to_hidden", lambda *a: None, {"hidden"}),
    "logits without it": (LowRank, "add_logits", lambda *a: None, {"hidden", "a", "b"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(monkeypatch: Any, name: str) -> None:
    """A14: and no other gradient than those that are wrong."""
    where, method, wrong, expected = MUTANTS[name]
    p = low_problem(CASES["bias, confident"])
    monkeypatch.setattr(where, method, wrong)
    _, got = gradients(p, leaves_of(p))
    assert {key for key, x in got.items() if rejected(oracle(p), {key: x})} == expected


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_scale_that_is_forgotten_is_rejected(monkeypatch: Any, way: str) -> None:
    """A14."""
    p = low_problem(CASES["bias, confident"])
    method, of = ("activations", LowRank) if way == "forward" else ("backprop_lora", LowSums)
    right = getattr(of, method)

    def forgotten(self: Any, *given: Any) -> Any:
        low = self if way == "forward" else self.low
        before, low.scale = low.scale, 1.0
        try:
            return right(self, *given)
        finally:
            low.scale = before

    monkeypatch.setattr(of, method, forgotten)
    _, got = gradients(p, leaves_of(p))
    wrong = {key for key, x in got.items() if rejected(oracle(p), {key: x})}
    assert wrong == ({"hidden", "a", "b"} if way == "forward" else {"hidden", "a"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_an_operand_are_the_operand(dtype: Any) -> None:
    """What a GPU multiplies with dz in 16 bits: float32 values, small ones of LoRA's B too, to the
    bit. Catches: one part, which has 8 or 11 of the 24 bits."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 1e-4
    parts = parts_of(x, torch.float32, dtype)
    assert parts.tensor.dtype == dtype
    whole = parts.whole(parts.tensor.double(), 3)
    held_to("A1", whole.float().numpy(), x.numpy())
    alone = parts.whole(parts.tensor[:, :3].double(), 3)
    assert not torch.equal(alone.float(), x)


@pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])
@pytest.mark.parametrize("adapter", ["float32", "float16"])
def test_a_gpu_is_not_waited_for(function: Any, adapter: str) -> None:
    """D4: its way on meta, with the parts of 16-bit products; nothing of the head's size."""
    shapes = {"hidden": (61, 64), "weight": (4096, 64), "a": (4, 64), "b": (4096, 4)}
    half = torch.float16
    kinds = {"hidden": half, "weight": half, "a": getattr(torch, adapter)}
    kinds["b"] = kinds["a"]
    leaves = {
        name: torch.empty(shape, dtype=kinds[name], device="meta", requires_grad=name != "weight")
        for name, shape in shapes.items()
    }
    keep = torch.empty(61, 64, dtype=torch.bool, device="meta")
    head = LowRankHead(leaves["weight"], leaves["a"], leaves["b"], 0.7, keep)
    labels = torch.empty(61, dtype=torch.int64, device="meta")
    with as_on_a_gpu() as seen:
        out = function(leaves["hidden"], head, labels, max_chunk_bytes=8 * 4096 * 4)
        value = out.loss if function is chunked_nll else out.logprobs.sum()
        wanted = [leaves[name] for name in ("hidden", "a", "b")]
        found = torch.autograd.grad(value, wanted, torch.empty_like(value))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]
    made = [b for x in seen.launches for b in x.written if b.shape in ((4096, 64), (64, 4096))]
    assert not made


WRONG = {
    "a": (lambda h: h._replace(a=h.a.T), ValueError, r"`a` must have shape \(rank, 24\)"),
    "b": (lambda h: h._replace(b=h.b[:-1]), ValueError, r"`b` must have shape \(157, 3\)"),
    "scale": (lambda h: h._replace(scale=torch.ones(())), ValueError, "`scale` must be a finite"),
    "double": (lambda h: h._replace(b=h.b.double()), TypeError, "`b` must be float32 or below"),
    "integers": (lambda h: h._replace(a=h.a.long()), TypeError, "`a` must be floating point"),
    "no array": (lambda h: h._replace(b=None), TypeError, "`b` of `LowRankHead` must be an array"),
    "mask": (lambda h: h._replace(keep=h.a), TypeError, "`keep` must be bool or None"),
    "mask's shape": (
        lambda h: h._replace(keep=torch.ones(3, dtype=torch.bool)), ValueError,
        "`keep` must have the shape of `hidden`",
    ),
    "twice": (
        lambda h: LowRankHead(h, h.a, h.b), TypeError,
        "`weight` of `LowRankHead` must have no low-rank part of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_head_is_refused(name: str) -> None:
    change, error, said = WRONG[name]
    p = low_problem(CASES["plain"])
    leaves = leaves_of(p)
    with pytest.raises(error, match=said):
        chunked_nll(leaves["hidden"], change(head_of(p, leaves)), on_torch(p.base.labels))


def test_routes_are_refused() -> None:
    p = low_problem(CASES["plain"])
    leaves = leaves_of(p)
    with pytest.raises(ValueError, match="`weight` must be one array here; got a `LowRankHead`"):
        called(p, leaves, gather="stream")
    with pytest.raises(ValueError, match="`gather` must be 'head' for a head that is whole"):
        called(p, leaves, gather="hidden")


def test_a_module_with_a_low_rank_part() -> None:
    """Its bias is taken; what has LoRA already is refused."""
    p = low_problem(CASES["bias, confident"])
    leaves = leaves_of(p)
    module = nn.Linear(24, V)
    with torch.no_grad():
        module.weight.copy_(leaves["weight"])
        module.bias.copy_(on_torch(p.base.bias))
    head = head_of(p, leaves)._replace(weight=module)
    got = chunked_nll(leaves["hidden"], head, on_torch(p.base.labels)).loss
    want = called(p, leaves).loss
    held_to("A10", numpy_of(got), numpy_of(want))
