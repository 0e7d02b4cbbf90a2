"""`CrossCheck` of heads with a low-rank part, as `LowRankHead` and as a layer of PEFT."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from helpers.corrupt_rows import PLANTED, plant

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from xentlib.tools.crosscheck import CrossCheckWarning  # noqa: E402
from xentlib.torch import CrossCheck, LowRankHead, chunked_nll  # noqa: E402

H, V, N, R = 24, 157, 21, 3
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"keep": True},
    "options": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.3},
    "frozen": {"frozen": True, "keep": True},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16, "frozen": True},
}


def step(check: CrossCheck, seed: int, **options: Any) -> None:
    dtype = options.pop("dtype", torch.float32)
    given = torch.Generator().manual_seed(seed)
    shapes = (N, H), (V, H), (R, H), (V, R)
    arrays = [torch.randn(shape, generator=given).to(dtype).requires_grad_() for shape in shapes]
    x, w, a, b = arrays
    w.requires_grad_(not options.pop("frozen", False))
    keep = torch.rand(N, H, generator=given) < 0.8 if options.pop("keep", False) else None
    y = torch.randint(V, (N,), generator=given)
    y[:3] = -100
    with check.step():
        loss = chunked_nll(x, LowRankHead(w, a, b, 0.7, keep), y, **options).loss
        (1.7 * loss).backward()


@pytest.mark.parametrize("tokens", [None, 9])
@pytest.mark.parametrize("case", CASES)
def test_a_right_step_passes(case: str, tokens: int | None) -> None:
    check = CrossCheck(every=1, tokens=tokens, rows=tokens, exceeded="raise")
    for seed in range(3):
        step(check, seed, **CASES[case])
    named = {m.quantity for m in check.results[0].measurements}
    assert {"d hidden", "d b", "d b of all rows", "d a of all rows"} < named
    assert ("d weight of all rows" in named) == ("frozen" not in CASES[case])


@pytest.mark.parametrize(("slot", "name"), [(1, "weight"), (3, "a"), (4, "b")])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_error_is_caught(kind: str, slot: int, name: str, monkeypatch: Any) -> None:
    plant(monkeypatch, kind, 31, slot)
    for seed in range(5):
        check = CrossCheck(every=1, seed=seed)
        with pytest.warns(CrossCheckWarning, match=f"torch d {name} of all rows"):
            step(check, seed)


def test_a_layer_of_peft() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Linear(H, V, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(body, peft.LoraConfig(r=R, target_modules=["1"]))
    check = CrossCheck(every=1, exceeded="raise")
    head = model.base_model.model[1]
    with torch.no_grad():
        head.lora_B["default"].weight.normal_()
    with check.step():
        x = model.base_model.model[0](torch.randn(N, H))
        chunked_nll(x, head, torch.randint(V, (N,))).loss.backward()
    named = {m.quantity for m in check.results[0].measurements}
    assert {"d a of all rows", "d b of all rows"} < named
