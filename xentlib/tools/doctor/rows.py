"""A few rows of the contract, on the user's device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from xentlib.contract import Measurement
from xentlib.tools.doctor.finding import Finding
from xentlib.tools.parity.progress import Progress


def device_of(backends: Sequence[str]) -> str:
    """Where all of them can compute: "cuda" if each sees one, else "cpu"."""
    from xentlib.tools.harness.device import missing_on

    return "cpu" if missing_on("cuda", backends) else "cuda"


def measure(backends: tuple[str, ...], device: str) -> tuple[list[Measurement], list[str], float]:
    """What was measured, what could not be and why, and the seconds that both took."""
    from xentlib.tools.parity.suite import few_sections

    begin = time.perf_counter()
    measured: list[Measurement] = []
    failed: list[str] = []
    with _where(backends, device):
        for part in few_sections(backends, device):
            section = part.section(Progress())
            measured += section.measurements
            if section.error:
                failed.append(f"{part.name} could not be run: {section.reason}")
    return measured, failed, time.perf_counter() - begin


@contextmanager
def _where(backends: Sequence[str], device: str) -> Iterator[None]:
    """JAX on the CPU too, where it would take its accelerator and PyTorch has none."""
    if device != "cpu" or "jax" not in backends:
        yield
        return
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield


def as_finding(
    measured: list[Measurement], failed: list[str], seconds: float, device: str
) -> Finding:
    """Which rows, how many measurements, and the worst of those that fall short."""
    rows = sorted({m.row for m in measured}, key=lambda row: int(row[1:]))
    about = f"{len(measured)} measurements of rows {', '.join(rows)} on {device} in {seconds:.0f} s"
    short = [m for m in measured if not m.passed]
    if failed or short or not measured:
        from xentlib.contract import failures

        words = "; ".join([*failures(short)[:3], *failed]) or "nothing could be measured"
        cure = "run `xentlib parity` for all rows, and report what it writes"
        return Finding("contract", "rows", "bad", f"{words} ({about})", cure)
    words = f"{about}, all within their bounds; `xentlib parity` measures the others"
    if device != "cpu":
        words += "; off the CPU the contract makes no claim yet"
    return Finding("contract", "rows", "ok", words)
