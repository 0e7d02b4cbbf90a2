"""A head in blocks of classes by Triton's programs, interpreted, as
`test_blocks_of_classes_torch.py` has it by eager operators."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import HAS_TORCH
from helpers.blocks_of_classes import WHOLE, torch_blocks
from helpers.held import hold_in_norm

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from xentlib.torch import (
    TeacherHead,
    TeacherLogits,
    chunked_divergence,
    chunked_logprobs,
    chunked_nll,
)
from xentlib.torch.core import device
from xentlib.torch.core.kernels import runnable

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cpu,
    pytest.mark.skipif("triton" not in runnable(), reason="Triton is not installed"),
]
TOKENS = 7  # a group and a part of one, for the interpreter's sake
WIDTH, CLASSES = 23, 301  # two blocks of 128 classes and a part of one
OF_A_GPU = device.KINDS["cpu"]._replace(
    host_readable=False, wide_products=True, cpu_libraries=False
)


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of 128 classes, for 4 tokens at a time; to be called for others."""
    monkeypatch.setenv("XENTLIB_KERNELS", "triton")

    def sizes(classes: int = 128, tokens: int = 4) -> None:
        torch_blocks(monkeypatch, classes, tokens)

    sizes()
    return sizes


def arrays(dtype: torch.dtype, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """A label in every block, one of them twice, a token masked, logits far from 0."""
    seed = torch.Generator().manual_seed(5)
    labels = [127, 128, 300, 7, -100, 7, 255, 256, 0, 128, -100, 129, 200, 299, 7, 1]
    most = len(labels)
    hidden, weight = (torch.randn(n, WIDTH, generator=seed) for n in (most, CLASSES))
    bias = torch.randn(CLASSES, generator=seed) - 20.0
    bias[200] += 40.0
    if "ids" in more:
        # More than a program takes at once, the last of which are also the first.
        ids = torch.randint(-1, CLASSES, (most, 37), generator=seed)
        more["ids"] = torch.cat([ids, ids[:, :3]], 1)
    if "temperature" in more:
        more["temperature"] = 0.5 + torch.rand(most, generator=seed)
    if "where" in more:
        more["where"] = torch.arange(most) % 5 != 1
    if "class_weights" in more:
        more["class_weights"] = 0.5 + torch.rand(CLASSES, generator=seed)
    of: dict[str, Any] = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
    if more.get("weight_layout") == "HV":
        of["weight"] = of["weight"].T.contiguous()
    if more.pop("bias", True):
        of["bias"] = bias.to(dtype)
    of["hidden"] = of["hidden"][:tokens].clone()
    for x in of.values():
        x.requires_grad_()
    for name in ("ids", "temperature", "where"):
        if name in more:
            more[name] = more[name][:tokens]
    return of | {"labels": torch.tensor(labels)[:tokens]} | more


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "bias": {},
    "shaped": {"temperature": True, "softcap": 9.0},
    "layout": {"weight_layout": "HV", "where": True, "logit_scale": 0.7},
    "ids": {"ids": True, "temperature": True},
    "ids, chunks": {"ids": True, "max_chunk_bytes": 8 * 128 * 4, "bias": False},
    "chunks": {"max_chunk_bytes": 8 * 128 * 4, "bias": False},
    "recompute": {"recompute": True, "class_weights": True, "label_smoothing": 0.1},
    "recompute, z_loss": {"recompute": True, "z_loss": 1e-3, "bias": False},
    "predicted": {"recompute": True, "outputs": ("logprobs", "predicted"), "where": True},
    "forward_kl": {"kind": "forward_kl", "nll_weight": 0.3, "temperature": True},
    # Where all but one probability are 0, float32 has 4 digits of a softcap's gradients.
    "reverse_kl": {"kind": "reverse_kl", "softcap": 9.0, "weight_layout": "HV", "bias": False},
    "jsd, chunks": {"kind": "jsd", "beta": 0.3, "max_chunk_bytes": 2 * 8 * 128 * 4, "bias": False},
    "of logits": {"kind": "jsd", "beta": 0.5, "nll_weight": 0.3, "of_logits": True},
}


Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def teacher_of(dtype: torch.dtype, tokens: int, of_logits: bool) -> TeacherHead | TeacherLogits:
    seed = torch.Generator().manual_seed(6)
    states, rows = (torch.randn(n, 29, generator=seed) / 2 for n in (tokens, CLASSES))
    bias = torch.randn(CLASSES, generator=seed) + 20.0
    states, rows, bias = (x.to(dtype) for x in (states, rows, bias))
    return (
        TeacherLogits(states @ rows.T + bias)
        if of_logits
        else TeacherHead(states, rows, bias, 1.0, None)
    )


def results(name: str, dtype: torch.dtype, tokens: int = 0) -> Results:
    """Outputs, and gradients of hidden states, weight and bias; of tokens that fill no row, and of
    two chunks where there are any."""
    options = dict(OPTIONS[name])
    tokens = tokens or TOKENS + 4 * ("max_chunk_bytes" in options)
    of = arrays(dtype, tokens, **options)
    if "kind" in options:
        of_logits = bool(of.pop("of_logits", False))
        teacher = teacher_of(dtype, tokens, of_logits)
        how = {"teacher": teacher, "reduction": "none", "outputs": ("divergence", "logprobs")}
        out = chunked_divergence(**of, **how)
        total = (out.loss * torch.linspace(-1, 1, tokens)).sum()
    elif "recompute" in options:
        outputs = ("logprobs", "lse", "entropy", "correct")
        out: Any = chunked_nll(**{"outputs": outputs} | of)
        total = out.loss
    else:
        out = chunked_logprobs(**of, entropy=True)
        total = (out.logprobs * torch.linspace(-1, 1, tokens)).sum() + 0.1 * out.entropy.sum()
        if out.ids_logprobs is not None:
            total = total + out.ids_logprobs.clamp(min=-50.0).sum()
    total.backward()
    values = [x.detach() for x in out if isinstance(x, torch.Tensor)]
    return values, [of[x].grad for x in ("hidden", "weight", "bias") if x in of]


# In 16 bits of one chunk alone: several sums of d weight are rounded in another order. Of each
# function and each layout both dtypes.
BITS = [(name, torch.float32) for name in OPTIONS]
LOW = (torch.bfloat16, torch.float16)
BFLOAT16 = {"plain", "shaped", "ids", "recompute, z_loss", "reverse_kl", "of logits"}
BITS += [(name, LOW[name not in BFLOAT16]) for name in OPTIONS if "chunks" not in name]


@pytest.mark.parametrize(("name", "dtype"), BITS, ids=str)
def test_blocks_do_not_show(name: str, dtype: torch.dtype, blocks: Any) -> None:
    """A10, A17: outputs have the bits of one block, gradients the same numbers. Catches: statistics
    of one block over those of another, a label in another block, d hidden of one block alone."""
    values, gradients = results(name, dtype)
    blocks(classes=WHOLE, tokens=WHOLE)
    whole, whole_gradients = results(name, dtype)
    if "smoothing" not in str(OPTIONS[name]):  # a sum over blocks
        for x, y in zip(values, whole, strict=True):
            assert torch.equal(x, y)
    first = int(dtype in LOW)  # d hidden is summed in another order, and rounded then
    hold(gradients[first:], whole_gradients[first:])


# Whole rows of a GEMM, whose product may add to a sum, and none; of each function both.
WHOLE_ROWS = {"plain": 8, "chunks": 16, "recompute": 8, "forward_kl": 8}
ROWS = [(name, 0) for name in OPTIONS] + [*WHOLE_ROWS.items()]


@pytest.mark.parametrize(("name", "tokens"), ROWS)
def test_as_on_a_device(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, where nothing is read, so that masked tokens are computed too, and products
    add to a sum: as by a CPU's eager operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.KINDS, "cpu", OF_A_GPU)
        values, gradients = results(name, torch.float32, tokens)
    monkeypatch.setenv("XENTLIB_KERNELS", "eager")
    right, right_gradients = results(name, torch.float32, tokens)
    hold(values, right)
    hold(gradients, right_gradients)


@pytest.mark.parametrize("count", [0, TOKENS])
def test_of_no_token_that_counts_gradients_are_0(count: int) -> None:
    of = arrays(torch.float32)
    hidden = of["hidden"].detach()[:count].requires_grad_()
    labels, logits = torch.full((count,), -100), (of["weight"], of["bias"])
    for recompute in (False, True):
        if recompute:
            options = {"label_smoothing": 0.1, "recompute": True}
            total = chunked_nll(hidden, logits[0], labels, bias=logits[1], **options).loss
        else:
            total = chunked_logprobs(hidden, logits[0], labels, bias=logits[1]).logprobs.sum()
        for x in torch.autograd.grad(total, (hidden, *logits)):
            assert not x.any()


def test_a_masked_token_has_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, where it is computed. Catches: one program that adds all masked tokens up."""
    from xentlib.torch.triton.launch import Triton

    seen: list[torch.Tensor] = []
    add = Triton.add_to_weight

    def added(acc_VH: torch.Tensor, terms: Any, x_BH: torch.Tensor) -> None:
        seen.append((terms.y_B >= 0) & (terms.y_B < len(acc_VH)))
        add(acc_VH, terms, x_BH)

    monkeypatch.setattr(Triton, "add_to_weight", staticmethod(added))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.KINDS, "cpu", OF_A_GPU)
        results("plain", torch.float32)
    counts = arrays(torch.float32)["labels"] != -100
    assert torch.equal(torch.stack(seen).sum(0), counts.long())


def test_dz_of_a_target_is_rounded_as_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding point of dz, in bfloat16. Catches: a number that the products could not have."""
    from xentlib.torch.triton.launch import Triton

    seen: list[torch.Tensor] = []
    add = Triton.add_to_hidden

    def added(dx_BH: torch.Tensor, terms: Any, weight_VH: torch.Tensor) -> None:
        seen.append(terms.dz_y_B.clone())
        add(dx_BH, terms, weight_VH)

    monkeypatch.setattr(Triton, "add_to_hidden", staticmethod(added))
    results("plain", torch.bfloat16)
    assert any(x.any() for x in seen)
    assert all(torch.equal(x, x.bfloat16().float()) for x in seen)


def hold(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Within the bound of a norm, and not finite in the same entries."""
    for x, y in zip(found, right, strict=True):
        there = y.isfinite()
        assert torch.equal(x[~there].float(), y[~there].float())
        hold_in_norm([x[there].float().numpy()], [y[there].float().numpy()])
