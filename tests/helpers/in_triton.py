"""Cases for Triton's interpreter, and which programs a test has launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conftest import DEVICE
from xentlib.tools.harness.problems import Case

__all__ = ["ONE_PASS", "few", "launches"]
ONE_PASS = {"base", "options", "confident", "class-weights", "saturated", "kernel-layout"}


def few(case: Case, tokens: int = 5) -> Case:
    """Without a bias, whose gradient takes the statistics apart from dz, where `ONE_PASS`. With all
    tokens on a device: there is no interpreter to wait for, and a mean of 5 losses is off by more
    than the contract's mean of 131 (4.4 ULP at logits of 100 on an H200, where A2 has 4)."""
    bias = case.bias and case.id not in ONE_PASS
    tokens = tokens if DEVICE == "cpu" else case.tokens
    return replace(case, tokens=min(case.tokens, tokens), vocab=min(case.vocab, 300), bias=bias)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of programs, in the order of their launches from now on."""
    from xentlib.torch.triton import launch, pairs

    names: list[str] = []

    def noted(launching: Any) -> Any:
        def launch(self: Any, program: Any, *args: Any, **given: Any) -> None:
            names.append(program.fn.__name__)
            launching(self, program, *args, **given)

        return launch

    for made in (launch.Triton, pairs.TritonPairs):
        monkeypatch.setattr(made, "launch", noted(made.launch))
    return names
