"""What kinds of devices differ in, as far as the steps of `xentlib.nll` have to know."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from xentlib.plan import default_chunk_bytes


class DeviceInfo(NamedTuple):
    """Of a kind of device."""

    host_readable: bool  # the host may look at numbers without waiting for the device
    wide_products: bool  # its GEMM takes 16-bit operands and returns float32
    ordered_put: bool  # `index_put_` adds in the order of its rows, and `index_add_` is atomic
    cpu_libraries: bool  # MKL and oneDNN multiply, MKL takes exp
    aligned_rows: bool  # its GEMM is fast where rows begin at multiples of some bytes
    takes_copies: bool  # a copy from the host's pageable memory is staged, and need not be awaited


KINDS = {
    "cpu": DeviceInfo(True, False, False, True, False, False),
    "cuda": DeviceInfo(False, True, True, False, True, True),
}
ANOTHER = DeviceInfo(False, False, False, False, False, False)


def device_info(where: Tensor | torch.device) -> DeviceInfo:
    """Of a device, or of the one that a tensor is on."""
    device = where.device if isinstance(where, Tensor) else where
    return KINDS.get(device.type, ANOTHER)


def host_readable(x: Tensor) -> bool:
    """Whether the host may look at numbers without waiting for a device."""
    return device_info(x).host_readable


def chunk_bytes(asked: int, device: torch.device, row_bytes: int = 0, hidden_size: int = 0) -> int:
    """Of a chunk's logits: what was asked for, or what the device's memory allows, and the width of
    a head."""
    sizes = {"row_bytes": row_bytes, "hidden_size": hidden_size}
    return asked or default_chunk_bytes(device.type, memory=memory_of(device), **sizes)


@functools.cache  # a question to PyTorch takes the host 30 us
def memory_of(device: torch.device) -> int:
    """Bytes of an accelerator's; 0 where they are not asked for."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def onto(x: Tensor, device: torch.device) -> Tensor:
    """`x` on a device, without waiting for the device where `x` is on the host.

    The copy of a copy: pageable memory is read before the call returns, where a caller's pinned
    memory is read later, and may hold something else by then.
    """
    if x.device.type == "cpu" and device_info(device).takes_copies:
        return x.clone().to(device, non_blocking=True)
    return x.to(device)
