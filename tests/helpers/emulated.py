"""A plugin of pytest: PyTorch's "cuda:0" over the CPU's memory, for tests that mistake one for the
other.

    XENTLIB_DEVICE=cuda python -m pytest -p helpers.emulated tests/numerics/test_nll.py

Every tensor is on the device unless its memory is known to be the host's. What CUDA refuses raises
as it does there: operands on two devices, `.numpy()` of a tensor on the device, a generator of the
other side, and a wait where `torch.cuda.set_sync_debug_mode("error")` forbids one. Triton's
programs run in the interpreter. Nothing here shows that a number is right on a GPU, nor that memory
is written before it is read. JAX is taken for not installed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200 (emulated)",
    total_memory=150_754_820_096,
    major=9,
    minor=0,
    multi_processor_count=132,
)
# Memory of the host, by address; kept, so that no other memory gets the address.
ON_HOST: dict[int, torch.UntypedStorage] = {}

DEVICE_OF = {getattr(Tensor, name).__get__: name for name in ("device", "is_cuda", "is_cpu")}
ARRAYS = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
WAITS = {
    *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__),
    *(Tensor.__index__, Tensor.nonzero, torch.nonzero, torch.equal, Tensor.equal),
    *(Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique),
}
# What takes operands of both sides, or looks at none of their numbers.
MIXED = {
    *(Tensor.copy_, Tensor.set_, Tensor.backward, Tensor.requires_grad_, Tensor.retain_grad),
    *(torch.autograd.grad, torch.autograd.backward, torch.as_tensor, torch.tensor),
    *(Tensor.new_tensor, Tensor.type_as, Tensor.__repr__, Tensor.__format__),
    Tensor.register_hook,
}
INDEXING = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put, Tensor.index_put_}
FROM_HOST = ("from_numpy", "from_dlpack", "frombuffer")


class Emulated(TorchFunctionMode):
    """All that PyTorch is asked goes through here."""

    sync_debug_mode = "default"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        hosts = [on_host(x) for x in tensors]
        if func in DEVICE_OF and hosts[0] is not None:
            answers = {"device": CPU if hosts[0] else CUDA, "is_cuda": not hosts[0]}
            return answers.get(DEVICE_OF[func], hosts[0])
        if func in ARRAYS and hosts[0] is False:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        if func in WAITS and False in hosts:
            self.wait(func)
        if func in MOVES and hosts[0] is not None:
            return self.move(func, args, kwargs, hosts)
        if {True, False} <= set(hosts) and func not in MIXED:
            one_device(func, tensors, hosts)
        target = kwargs.get("device")
        given = None if target is None else torch.device(target).type
        if "generator" in kwargs and kwargs["generator"] is not None:
            side = given or ("cuda" if False in hosts else "cpu")
            if kwargs["generator"].device.type != side:
                raise RuntimeError(f"Expected a '{side}' device type for generator")
        kwargs.pop("pin_memory", None)
        args, kwargs = tree_map(on_cpu, (args, kwargs))
        if kwargs.get("out_dtype") is not None:  # the CPU's products have none
            return product(func, args, **kwargs)
        result = func(*args, **kwargs)
        from_host = getattr(func, "__name__", "") in FROM_HOST
        if from_host or given == "cpu" or (given is None and False not in hosts):
            for x in tree_leaves(result):
                to_host(x)
        elif given == "cuda" and isinstance(result, Tensor) and on_host(result):
            return result.clone()  # as_tensor of a tensor of the host
        return result

    def wait(self, func: Any) -> None:
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {func.__name__}")

    def move(self, func: Any, args: Any, kwargs: dict[str, Any], hosts: list[Any]) -> Tensor:
        """`to`, `cpu` and `cuda`."""
        tensor, *words = args
        to = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func)
        for word in (*words, kwargs.get("device")):
            if isinstance(word, (str, torch.device)):
                to = torch.device(word).type
            elif isinstance(word, Tensor):
                to = "cpu" if hosts[1] else "cuda"
        was, to = "cpu" if hosts[0] else "cuda", to or ("cpu" if hosts[0] else "cuda")
        if (was, to) == ("cuda", "cpu") and not kwargs.get("non_blocking"):
            self.wait(func)
        words, kwargs = tree_map(on_cpu, (words, kwargs))
        result = tensor.to(*words, **kwargs) if func is Tensor.to else tensor
        if was != to and result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            result = result.clone()
        if to == "cpu":
            to_host(result)
        return result


def on_host(x: Tensor) -> bool | None:
    """None: it has no memory at all."""
    return x.untyped_storage()._cdata in ON_HOST if x.device.type == "cpu" else None


def to_host(x: Any) -> None:
    if isinstance(x, Tensor) and x.device.type == "cpu":
        storage = x.untyped_storage()
        ON_HOST[storage._cdata] = storage


def on_cpu(x: Any) -> Any:
    """An argument, as the CPU takes it."""
    if isinstance(x, torch.device):
        return CPU if x.type == "cuda" else x
    return "cpu" if isinstance(x, str) and x.partition(":")[0] == "cuda" else x


def one_device(func: Any, tensors: list[Tensor], hosts: list[bool | None]) -> None:
    """Numbers without dimensions may lie elsewhere, and so may indices into the device's memory."""
    strangers = [x for x, host in zip(tensors, hosts) if host and x.dim() > 0]
    if func in INDEXING and not hosts[0]:
        strangers = [x for x in strangers if x.is_floating_point()]
    if strangers:
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"Expected all tensors on one device, got cuda:0 and cpu, in {name}")


def product(func: Any, args: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`mm` and `addmm`."""
    result = func(*(x.to(out_dtype) for x in args))
    return result if out is None else out.copy_(result)


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.side = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.side


class OnDevice(np.errstate):
    """`torch.cuda.device`; the interpreter computes with infinities as a device does."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(all="ignore")


MODE = Emulated()


def inside(function: Callable[..., Any] | None) -> Any:
    """In an operator's body, and in an engine's thread, modes are off."""
    if function is None:
        return None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        on = any(mode is MODE for mode in _get_current_function_mode_stack())
        with nullcontext() if on else MODE:
            return function(*args, **kwargs)

    return run


def install() -> None:
    sys.modules["jax"] = None  # type: ignore[assignment]  # `find_spec` says None
    os.environ["TRITON_INTERPRET"] = "1"
    define, derive = CustomOpDef.register_kernel, CustomOpDef.register_autograd

    def register_kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        if fn is not None:
            return define(self, device_types, inside(fn))
        return lambda fn: define(self, device_types, inside(fn))

    def register_autograd(self: Any, backward: Any, /, *, setup_context: Any = None) -> None:
        derive(self, inside(backward), setup_context=inside(setup_context))

    CustomOpDef.register_kernel = register_kernel  # type: ignore[method-assign]
    CustomOpDef.register_autograd = register_autograd  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    # `DeviceContext` puts itself below other modes, where it is too late.
    torch.set_default_device = lambda device: TorchFunctionMode.__enter__(DeviceContext(device))
    torch.get_default_device = lambda: CUDA
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": OnDevice,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "get_device_name": lambda device=None: H200.name,
        "get_device_properties": lambda device=None: H200,
        "mem_get_info": lambda device=None: (1 << 30, H200.total_memory),
        "set_sync_debug_mode": lambda mode: setattr(MODE, "sync_debug_mode", mode),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    TorchFunctionMode.__enter__(MODE)


PROGRAMS: set[str] = set()


def launched(grid: Any, args: Any, kwargs: dict[str, Any], warps: int) -> None:
    """What Triton would compile for a launch, as a line of JSON in the file `XENTLIB_PROGRAMS` for
    `.ci/ptx.py --programs`: of each argument its type, and its value if that is compiled."""
    if (file := os.environ.get("XENTLIB_PROGRAMS")) is None:
        return
    given = dict(zip(grid.arg_names, args)) | kwargs
    types = {}
    with torch._C.DisableTorchFunction():
        for name in grid.arg_names:
            x = given.get(name)
            if isinstance(x, Tensor):
                types[name] = [f"*{str(x.dtype).removeprefix('torch.')}", x.data_ptr() % 16 == 0]
            elif name in grid.constexprs or x is None:
                types[name] = ["constexpr", getattr(x, "name", x)]
            elif isinstance(x, float):
                types[name] = ["fp32", False]
            else:
                types[name] = ["one", True] if x == 1 else ["i32", x % 16 == 0]
    line = json.dumps([grid.fn.__module__, grid.fn.__name__, warps, types])
    if line not in PROGRAMS:
        PROGRAMS.add(line)
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(line + "\n")


def pytest_configure() -> None:
    """After tests/conftest.py, which is read first."""
    import triton.runtime.interpreter as interpreter

    from xentlib.torch.core import kernels

    kernels.why_no_triton = lambda device: "" if device.type == "cuda" else "not on the device"
    # The interpreter would take minutes for heads that a device has in a millisecond.
    kernels.chosen = lambda: os.environ.get("XENTLIB_KERNELS", "eager")
    launch = interpreter.GridExecutor.__call__

    def on_cpu_s_memory(self: Any, *args: Any, num_warps: int = 4, **kwargs: Any) -> Any:
        kwargs.pop("enable_fp_fusion", None)
        launched(self, args, kwargs, num_warps)
        with torch._C.DisableTorchFunction():
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = on_cpu_s_memory


install()
