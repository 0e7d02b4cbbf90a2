"""The rows that a function keeps whatever it computes: A10, under any chunks, and A11, run to run.

`call(backend, chunk_tokens=...)` is one problem through the function; `label` names its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xentlib.tools.harness.findings import Findings

Label = Callable[[str], str]
CHUNK = 128  # rows, so that there are several


def chunks(
    findings: Findings,
    text: str,
    call: Callable[..., Any],
    chunks_of: Callable[[str], Sequence[int]],
    names: Sequence[str],
    label: Label,
) -> None:
    """A10: the outputs of these names have the bits that they have in one chunk."""
    for backend in findings.backends:
        whole = call(backend)
        for chunk in chunks_of(backend):
            outcome = call(backend, chunk_tokens=chunk)
            for name in names:
                findings.check(
                    "A10",
                    getattr(outcome, name),
                    getattr(whole, name),
                    backend=backend,
                    case=f"{text}, chunks of {chunk}",
                    quantity=label(name),
                )


def repeat(
    findings: Findings,
    text: str,
    call: Callable[..., Any],
    label: Label,
    *,
    two_threads: bool = False,
) -> None:
    """A11: run to run; with `two_threads` PyTorch on two against one as well."""
    for backend in findings.backends:
        first = call(backend, chunk_tokens=CHUNK)
        again = {"run to run": call(backend, chunk_tokens=CHUNK)}
        if two_threads and backend == "torch":
            import torch

            torch.set_num_threads(2)
            try:
                again["two threads"] = call(backend, chunk_tokens=CHUNK)
            finally:
                torch.set_num_threads(1)
        for how, outcome in again.items():
            for name in first._fields:
                findings.check(
                    "A11",
                    getattr(outcome, name),
                    getattr(first, name),
                    backend=backend,
                    case=f"{text}, {how}",
                    quantity=label(name),
                )
