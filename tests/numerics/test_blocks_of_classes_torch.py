"""Heads that are read in blocks of classes, in PyTorch: log-probabilities, and calls without a
gradient. Blocks and groups are small here, and no size is a multiple of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.blocks_of_classes import WHOLE, torch_blocks
from helpers.measured import CAPPED, SMALL, by_id, hold
from xentlib.contract import ROW_OF, check, failures
from xentlib.tools.harness.cases import CHUNK_CASES, low_precision
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.head import per_token

torch = pytest.importorskip("torch")

from xentlib.torch import chunked_logprobs, chunked_nll  # noqa: E402

TOKENS, WIDTH, CLASSES = 203, 24, 331  # two blocks of 128 classes and a part of one


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """128 classes in a block, 64 tokens in a group; to be called for others."""

    def sizes(classes: int = 128, tokens: int = 64) -> None:
        torch_blocks(monkeypatch, classes, tokens)

    sizes()
    return sizes


def arrays(*, grad: bool = True, **more: Any) -> dict[str, Any]:
    """A label in every block, one token in five ignored, logits that are far from 0."""
    seed = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=seed)
    weight = torch.randn(CLASSES, WIDTH, generator=seed)
    labels = torch.randint(0, CLASSES, (TOKENS,), generator=seed)
    labels[:3] = torch.tensor([127, 128, CLASSES - 1])
    labels[3::5] = -100
    bias = torch.randn(CLASSES, generator=seed) - 20.0
    bias[200] += 40.0
    of: dict[str, Any] = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    if "kept" in more:
        kept = torch.randint(0, CLASSES, (TOKENS, 17), generator=seed)
        kept[:, 0] = labels.clamp(min=0)
        more["kept"] = kept
    if "ids" in more:
        more["ids"] = torch.randint(-1, CLASSES, (TOKENS, 5), generator=seed)
    if more.get("class_weights") is True:
        more["class_weights"] = torch.rand(CLASSES, generator=seed)
    if "temperature" in more:
        more["temperature"] = 0.5 + torch.rand(TOKENS, generator=seed)
    for name in ("hidden", "weight", "bias") if grad else ():
        of[name].requires_grad_()
    return of | more


LOGPROBS: list[dict[str, Any]] = [
    {},
    {"temperature": True, "softcap": 9.0},
    {"ids": True},
    {"kept": True, "ids": True, "temperature": True},
    {"max_chunk_bytes": 24 * 128 * 4},
]


def logprobs(**options: Any) -> list[Any]:
    """Outputs, d weight and d bias."""
    of = arrays(**options)
    out = chunked_logprobs(**of, entropy=True)
    total = (out.logprobs * torch.linspace(-1, 1, TOKENS)).sum() + 0.1 * out.entropy.sum()
    if out.ids_logprobs is not None:
        total = total + out.ids_logprobs.clamp(min=-50.0).sum()
    total.backward()
    values = [x.detach() for x in out if x is not None]
    return [*values, of["weight"].grad, of["bias"].grad]


@pytest.mark.cpu
@pytest.mark.parametrize("options", LOGPROBS, ids=str)
def test_blocks_do_not_show(
    options: dict[str, Any], blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of all outputs and of d weight are those of one block, of which d bias is a sum over
    chunks. Catches: a maximum of one block, a label's class in another block, a chunk's d weight
    that takes the place of the one before."""
    monkeypatch.setattr("xentlib.torch.core.gradients.WEIGHT_TOKENS", 24)
    found = logprobs(**options)
    blocks(classes=WHOLE, tokens=WHOLE)
    whole = {name: x for name, x in options.items() if name != "max_chunk_bytes"}
    for x, y in zip(found[:-1], logprobs(**whole)[:-1], strict=True):
        assert torch.equal(x, y)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"class_weights": True},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weights": True},
        {"temperature": True, "softcap": 9.0, "max_chunk_bytes": 24 * 128 * 4},
    ],
    ids=str,
)
def test_an_evaluation_has_the_values_of_a_training_step(options: dict[str, Any]) -> None:
    """Without a gradient in blocks, with one not: the same bits, with label smoothing a sum over
    blocks beside them."""
    outputs = ("logprobs", "entropy", "lse", "correct", "predicted")
    found = chunked_nll(**arrays(grad=False, **options), outputs=outputs)
    want = chunked_nll(**arrays(**options), outputs=outputs)
    smooth = "label_smoothing" in options
    for name, x, y in zip(found._fields, found, want):
        if name == "loss" and smooth:
            number = np.asarray(y.detach(), np.float64)
            assert not failures(check("A2", x.numpy(), number, magnitude=abs(number)))
        else:
            assert torch.equal(x, y.detach()), name


@pytest.mark.parametrize("count", [0, TOKENS], ids=["no token", "none that counts"])
def test_of_no_token_gradients_are_0(count: int) -> None:
    """New memory holds NaN here. Catches: a block that nothing has written."""
    of = arrays()
    hidden = of["hidden"].detach()[:count].requires_grad_()
    labels = torch.full((count,), -100)
    torch.use_deterministic_algorithms(True)
    try:
        out = chunked_logprobs(hidden, of["weight"], labels, bias=of["bias"])
        out.logprobs.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for x in (hidden, of["weight"], of["bias"]):
        assert not x.grad.any()


@pytest.mark.parametrize("more", [{}, {"ids": True}, {"temperature": True}], ids=str)
def test_groups_on_a_device_of_labels_on_the_host(more: dict[str, Any]) -> None:
    """Only tokens that count are computed, and where these are is known on the device alone.
    Catches: labels of the host that are indexed by what is on the device."""
    from helpers.on_meta import as_on_a_gpu

    of = arrays(grad=False, **more)
    of = {name: x if name == "labels" else x.to("meta") for name, x in of.items()}
    for name in ("hidden", "weight", "bias"):
        of[name].requires_grad_()
    with as_on_a_gpu():
        chunked_logprobs(**of).logprobs.sum().backward()
    with as_on_a_gpu(), torch.no_grad():
        found = chunked_nll(of["hidden"], of["weight"], of["labels"])
    assert found.loss.device.type == "meta"


def test_class_weights_are_as_many_as_classes() -> None:
    """Without a gradient too. Catches: weights of a block out of fewer, or none."""
    with pytest.raises(ValueError, match="class_weights"):
        chunked_nll(**arrays(grad=False, class_weights=torch.ones(CLASSES - 1)))


def test_which_calls_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, and a loss without a gradient; no loss with one, and no `top_k`."""
    from xentlib.torch.core import blocks as module

    seen: list[str] = []
    init = module.LocalBlocks.__init__
    monkeypatch.setattr(
        module.LocalBlocks, "__init__", lambda *args: (seen.append("blocks"), init(*args))[1]
    )
    chunked_nll(**arrays()).loss.backward()
    assert not seen
    chunked_nll(**arrays(grad=False))
    assert len(seen) == 1
    chunked_logprobs(**arrays()).logprobs.sum().backward()
    assert len(seen) == 3
    chunked_logprobs(**arrays(grad=False), top_k=3)
    assert len(seen) == 3


@pytest.mark.parametrize("case", [*SMALL[:4], CAPPED], ids=by_id)
def test_against_the_oracle(case: Case, blocks: Any) -> None:
    """A0, A5, A6, of blocks of 16 classes."""
    blocks(classes=16)
    hold(per_token.against_oracle, ("torch",), build(case, 7))


@pytest.mark.parametrize(
    "case", [low_precision(tuple(SMALL), dtype)[0] for dtype in ROW_OF], ids=by_id
)
def test_16_bits_against_the_oracle(case: Case, blocks: Any) -> None:
    """A7, A16. Catches: d hidden that is rounded after each block."""
    blocks(classes=16)
    hold(per_token.against_oracle, ("torch",), build(case, 7))


@pytest.mark.cpu
@pytest.mark.parametrize("case", [*CHUNK_CASES[:2], CAPPED], ids=by_id)
def test_chunks_do_not_show(case: Case, blocks: Any) -> None:
    """A10: rows of d hidden too."""
    blocks(classes=16)
    hold(per_token.chunks, ("torch",), build(case, 7))


@pytest.mark.cpu
def test_other_tokens_do_not_show() -> None:
    """A17: groups that are not the same."""
    findings = Findings(("torch",))
    problem = build(Case("blocks", TOKENS, WIDTH, CLASSES), 7)
    invariant.batch(per_token, findings, "torch", problem)
    assert len(findings.measurements) > 20
    assert not failures(findings.measurements)
