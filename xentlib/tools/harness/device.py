"""Where a parity run, and the tests, compute: the default device of each framework, and the way of
NumPy arrays there and back. Frameworks are loaded on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from xentlib.interop import to_jax, to_numpy, to_torch
from xentlib.labels import SoftLabels
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

# Of memory, of which Linux gives a process 65,530. Programs that JAX has compiled for a CPU have
# some each, and LLVM ends a process that is given no more, which has ended a parity run.
MOST_MAPPINGS = 32_000
# What a call has of arrays by their names.
CONTAINERS = (SoftLabels, TeacherHead, TeacherLogits, TeacherTopK)


def on_torch(x: Any) -> Any:
    """A NumPy array as a tensor of its own on PyTorch's default device, a teacher's too; anything
    else as it is."""
    import torch

    if isinstance(x, CONTAINERS):
        return type(x)(*map(on_torch, x))
    return to_torch(x, copy=True).to(torch.get_default_device()) if isinstance(x, np.ndarray) else x


def on_jax(x: Any) -> Any:
    """A NumPy array as an array of its own on JAX's default device, a teacher's too; anything else
    as it is."""
    import jax

    if isinstance(x, CONTAINERS):
        return type(x)(*map(on_jax, x))
    if not isinstance(x, np.ndarray):
        return x
    crossed, config = to_jax(x, copy=True), cast(Any, jax.config)
    chosen = config.jax_default_device
    return crossed if chosen is None else jax.device_put(crossed, chosen)


def numpy_of(x: Any) -> Any:
    """A result of either framework as a NumPy array of its own, from whatever device it is on; None
    as it is."""
    if x is None:
        return None
    device = getattr(x, "device", None)
    if getattr(device, "type", "cpu") != "cpu":  # a tensor's; a JAX array is fetched by NumPy
        x = x.cpu()
    elif getattr(device, "platform", "cpu") != "cpu":
        return np.array(x)
    return np.array(to_numpy(x.detach() if hasattr(x, "detach") else x))


@contextmanager
def contract_settings(backends: Sequence[str]) -> Iterator[None]:
    """Denormals to zero in PyTorch, as XLA has them on CPU, and one thread: small operators on two
    threads run ten times slower beside a busy process, and row A11 says the bits are the same."""
    if "torch" not in backends:
        yield
        return
    import torch

    with torch_threads(1):
        torch.set_flush_denormal(True)
        try:
            yield
        finally:
            torch.set_flush_denormal(False)


def forget_programs(backends: Sequence[str]) -> None:
    """Drop what JAX has compiled, where its memory is in too many pieces."""
    maps = Path("/proc/self/maps")
    if "jax" in backends and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """So many threads in PyTorch, for as long as that."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def nothing_read() -> Iterator[None]:
    """While it lasts PyTorch computes on a CPU as on an accelerator: no number is read on the host,
    and tokens that are masked are computed too."""
    from xentlib.torch.core.device import KINDS

    with patch.dict(KINDS, cpu=KINDS["cpu"]._replace(host_readable=False)):
        yield


@contextmanager
def on_device(device: str, backends: Sequence[str]) -> Iterator[None]:
    """`device` as the default of each framework; what it is anyway is left alone."""
    with ExitStack() as stack:
        if device != "cpu" and "torch" in backends:
            import torch

            stack.enter_context(torch.device(device))
        if device != "cpu" and "jax" in backends:
            import jax

            stack.enter_context(jax.default_device(jax.devices(device)[0]))
        yield


def missing_on(device: str, backends: Sequence[str]) -> list[str]:
    """The frameworks that see no such device."""
    return [name for name in backends if device != "cpu" and not described(device, name)]


def described(device: str, backend: str) -> str:
    """What a framework calls its first such device; nothing if it has none."""
    if backend == "torch":
        import torch

        return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    import jax

    try:
        return str(jax.devices(device)[0].device_kind)
    except RuntimeError:
        return ""
