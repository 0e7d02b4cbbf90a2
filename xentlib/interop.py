"""Crossing over between PyTorch, JAX and NumPy, without a copy where that is safe.

    to_torch(x)    to_jax(x)    to_numpy(x)

`x` is a torch tensor, a JAX array or a NumPy array of one of these dtypes: bool, int8 to int64, uint8
to uint64, bfloat16 (`ml_dtypes.bfloat16` in NumPy), float16, float32, float64. Bits, NaN payloads
included, shape and device are kept: nothing is rounded, narrowed or moved. A framework is imported
only by the function that is named after it; which one `x` came from is looked up in `sys.modules`.

`copy` follows the array API standard. `None`: share the memory where that is safe, copy where the
table says so. `True`: always copy. `False`: share, or raise `ValueError` saying what is in the way.

**Sharing means one memory with two owners.** JAX believes that its arrays never change, and nothing
tells it otherwise. A write on the other side after the crossing

* shows in the JAX array (and in every array that JAX took for the same value);
* may or may not reach a computation that has been dispatched and is still running: a matrix product
  was seen to return half of its entries from before the write, half from after;
* does not reach a jitted function that closed over the array: that one keeps the value it compiled.

So leave shared memory alone while the other side uses it, or cross with `copy=True`. JAX itself never
writes into it: a donated array whose memory is shared is not reused, and its memory lives on.

| what comes in | `to_torch` | `to_jax` | `to_numpy` |
|---|---|---|---|
| the function's own kind of array | itself | itself | itself |
| C-contiguous, aligned, writable | shared | shared | shared |
| JAX array on one device | shared, writable: see above | itself | shared, read-only |
| read-only NumPy (so `to_numpy` of a JAX array) | copied: torch has no read-only | shared | itself |
| does not start on a 64-byte boundary | shared | copied: XLA would, later | shared |
| strided view, transpose | shared | copied | shared |
| negative strides, or not a multiple of the item | copied: torch aborts or refuses | copied | shared |
| items that overlap (broadcast, expanded) | copied: one write would hit many | copied | copied |
| negative bit set (`z.conj().imag`) | itself | copied, resolved | copied, resolved |
| byte-swapped NumPy | copied to native order | copied, same | copied, same |
| JAX array in a layout that is not row-major | shared, strided | itself | copied |
| no items | nothing to share | nothing to share | nothing to share |
| 64-bit integers and floats | shared | `ValueError` unless x64 is on: JAX narrows | shared |
| on an accelerator | shared there | shared there | `ValueError`: never moved unasked |

Refused whatever the direction, by one sentence that names the way out:

| refused | because DLPack, or the framework, would |
|---|---|
| torch: `requires_grad`, forward-mode dual | lose the derivative |
| torch: `DTensor`, fake tensor, any subclass but `Parameter` | read memory that is not the tensor |
| torch: freed storage (resharded parameter), meta, inside `torch.func` | read memory that is not there |
| torch: sparse, mkldnn, nested | have no strides to describe it |
| JAX: tracer, PRNG keys, deleted or donated array, more than one device | have no one buffer to point to |
| NumPy: masked array | lose the mask |
| complex, float8, int4, structured, object, string, `longdouble` | know the dtype on one side only |

A boolean whose byte is neither 0 nor 1 (a reinterpreted uint8) crosses as it is; finding it would
mean reading every item.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import jax
    import torch

    AnyArray = torch.Tensor | jax.Array | npt.NDArray[Any]

__all__ = ["to_jax", "to_numpy", "to_torch"]

_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64".split()
)
_NEEDS_X64 = frozenset({"int64", "uint64", "float64"})
_XLA_ALIGNMENT = 64  # bytes; jax 0.10 copies a CPU buffer that starts anywhere else


def to_torch(x: AnyArray, *, copy: bool | None = None) -> torch.Tensor:
    """`x` as a torch tensor on the same device. See the module for what is shared.

    Raises:
        TypeError: not an array of the three frameworks, or a kind or dtype that cannot cross.
        ValueError: an array that has lost or never had its memory, would lose its derivative,
            or would need a copy under `copy=False`.
    """
    origin, source = _inspect(x, copy)
    if origin == "torch":
        return source.clone() if copy else source  # type: ignore[no-any-return]
    torch = _load("torch")
    if origin == "jax":
        with sys.modules["jax"].ensure_compile_time_eval():
            source = source.copy() if copy else source
        # from_dlpack waits too on CPU; this keeps the promise from resting on it.
        return torch.from_dlpack(source.block_until_ready())  # type: ignore[no-any-return]
    reason = _foreign(source) or _overlap(source.shape, source.strides)
    if not source.flags.writeable:
        reason = reason or "it is read-only, which torch cannot express"
    if min(source.strides, default=0) < 0 or any(s % source.itemsize for s in source.strides):
        reason = reason or f"torch cannot express its strides {source.strides} (bytes)"
    if source.size == 0 or _copies(copy, reason, "torch"):
        source = _fresh(source)
    if source.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(source.view(np.uint16)).view(torch.bfloat16)  # type: ignore[no-any-return]
    return torch.from_numpy(source)  # type: ignore[no-any-return]


def to_jax(x: AnyArray, *, copy: bool | None = None) -> jax.Array:
    """`x` as a JAX array on the same device. See the module for what is shared.

    Raises:
        TypeError: not an array of the three frameworks, or a kind or dtype that cannot cross.
        ValueError: as `to_torch`, and for a 64-bit dtype while JAX has x64 off.
    """
    origin, source = _inspect(x, copy)
    jax = _load("jax")
    name = _dtype_name(source)
    if name in _NEEDS_X64 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"`x` must have a dtype that JAX keeps; got {name}, which it would silently narrow to 32 "
            f"bits. Turn on `jax.enable_x64(True)`, or cast explicitly first."
        )
    with jax.ensure_compile_time_eval():  # inside jit a crossing is a constant, not a traced value
        if origin == "jax":
            return source.copy() if copy else source  # type: ignore[no-any-return]
        if origin == "torch":
            torch = sys.modules["torch"]
            pointer, on_host = source.data_ptr(), source.device.type == "cpu"
            reason = "" if source.is_contiguous() else f"its strides are {source.stride()} (items)"
            reason = reason or ("its negative bit is set" if source.is_neg() else "")
            reason = reason or (_misaligned(pointer) if on_host else "")
            if source.numel() == 0 or _copies(copy, reason, "JAX"):
                source = torch.empty(source.shape, dtype=source.dtype, device=source.device).copy_(
                    source
                )
            result = jax.dlpack.from_dlpack(source)
        else:
            pointer = source.ctypes.data
            reason = _foreign(source) or _misaligned(pointer)
            if not source.flags.c_contiguous:
                reason = reason or f"its strides are {source.strides} (bytes)"
            if source.size == 0 or _copies(copy, reason, "JAX"):
                source = _fresh(source)
            # NumPy's DLPack knows neither bfloat16 nor read-only; device_put shares both.
            result = jax.device_put(source, jax.local_devices(backend="cpu")[0])
    if copy is False and result.size and result.unsafe_buffer_pointer() != pointer:
        _copies(copy, "JAX made one", "JAX")
    return result  # type: ignore[no-any-return]


def to_numpy(x: AnyArray, *, copy: bool | None = None) -> npt.NDArray[Any]:
    """`x` as a NumPy array; read-only where it shares the memory of a JAX array.

    Raises:
        TypeError: not an array of the three frameworks, or a kind or dtype that cannot cross.
        ValueError: as `to_torch`, and for an array that is not in host memory.
    """
    origin, source = _inspect(x, copy)
    if origin == "torch":
        if source.device.type != "cpu":
            raise ValueError(f"`x` must be in host memory; got {source.device}. Pass `x.cpu()`.")
        reason = _overlap(source.shape, source.stride())
        reason = reason or ("its negative bit is set" if source.is_neg() else "")
        if _copies(copy, reason, "NumPy"):
            source = sys.modules["torch"].empty(source.shape, dtype=source.dtype).copy_(source)
        if _dtype_name(source) == "bfloat16":
            torch = sys.modules["torch"]
            return source.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
        return source.numpy()  # type: ignore[no-any-return]
    if origin == "jax":
        device = next(iter(source.devices()))
        if device.platform != "cpu":
            raise ValueError(f"`x` must be in host memory; got {device}. Pass `jax.device_get(x)`.")
        host: npt.NDArray[Any] = np.asarray(source)
        shared = not host.size or host.ctypes.data == source.unsafe_buffer_pointer()
        copied = _copies(copy, "" if shared else "its layout is not row-major", "NumPy")
        return _fresh(host) if copied else host
    return _fresh(source) if _copies(copy, _foreign(source), "NumPy") else np.asarray(source)


def _inspect(x: Any, copy: bool | None) -> tuple[str, Any]:
    """The framework that `x` belongs to, and `x`; raises on all that must not cross."""
    if copy is not None and not isinstance(copy, bool):
        raise TypeError(f"`copy` must be None, True or False; got {copy!r}.")
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(x, getattr(torch, "Tensor", ())):
        origin = "torch"
        _check_torch(x, torch)
    elif isinstance(x, getattr(jax, "Array", ())):
        origin = "jax"
        _check_jax(x, jax)
    elif isinstance(x, np.ndarray):
        origin = "numpy"
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("`x` must be a plain array; got a masked one. Pass `x.filled(...)`.")
    else:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"`x` must be a torch tensor, a JAX array or a NumPy array; got {kind}. "
            f"Pass `numpy.asarray(x)`."
        )
    if _dtype_name(x) not in _DTYPES:
        raise TypeError(
            f"`x` must have a dtype that all three frameworks know (bool, 8 to 64-bit integers, "
            f"bfloat16, float16, float32, float64); got {_dtype_name(x)}. Cast or reinterpret it first."
        )
    return origin, x


def _check_torch(x: Any, torch: Any) -> None:
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"`x` must be a plain torch tensor; got {kind}, whose values need not be in its memory. "
            f"Pass the tensor inside (`x.full_tensor()` or `x.to_local()` of a DTensor)."
        )
    if x.requires_grad:
        raise ValueError(
            "`x` must not require grad, the derivative would be lost; got requires_grad=True. "
            "If that is meant, pass tensor.detach()."
        )
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise TypeError(f"`x` must be a dense tensor; got {kind}. Pass `x.to_dense()` or its parts.")
    try:
        absent = x.data_ptr() == 0 and x.numel() > 0
    except RuntimeError:  # a torch.func wrapper
        absent = True
    if absent:
        raise ValueError(
            f"`x` must hold its values in memory; got {tuple(x.shape)} on {x.device} with no memory of "
            f"its own (meta, a freed or resharded parameter, or inside torch.func). Gather it first, "
            f"or cross outside the transformation."
        )
    if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            "`x` must not carry a forward-mode tangent, it would be lost. Pass the primal of "
            "`torch.autograd.forward_ad.unpack_dual(x)`, detached."
        )


def _check_jax(x: Any, jax: Any) -> None:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"`x` must be a concrete array; got a traced {x.aval}. Cross outside jit, grad and vmap, "
            f"or inside `jax.pure_callback`."
        )
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"`x` must be numeric; got {x.dtype}. Pass `jax.random.key_data(x)`.")
    if x.is_deleted():
        raise ValueError(
            "`x` must still have its memory; got an array that was deleted or donated. Cross before "
            "the donating call, or donate a copy."
        )
    if len(x.sharding.device_set) != 1 or not x.is_fully_addressable:
        raise ValueError(
            f"`x` must be on one device of this process; got {x.sharding}. Pass one shard, "
            f"`x.addressable_data(0)`, or gather it with `jax.device_get(x)`."
        )


def _dtype_name(x: Any) -> str:
    return str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")


def _foreign(x: npt.NDArray[Any]) -> str:
    """Why no other framework could read the items of `x` where they are; empty if it could."""
    if not x.dtype.isnative:
        return f"its byte order is not this machine's ({x.dtype.str})"
    return "" if x.flags.aligned else "its items are not aligned to their size"


def _misaligned(pointer: int) -> str:
    off = pointer % _XLA_ALIGNMENT
    return f"it starts {off} bytes past a {_XLA_ALIGNMENT}-byte boundary" if off else ""


def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Whether two indices may name the same item: each dimension must step over all smaller ones."""
    reach = 1
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return f"its items overlap (shape {tuple(shape)}, strides {tuple(strides)})"
        reach = stride * length
    return ""


def _copies(copy: bool | None, reason: str, to: str) -> bool:
    """Whether to copy; `reason` says why sharing is not possible, empty if it is."""
    if copy is False and reason:
        raise ValueError(
            f"`x` must be shareable with {to} under copy=False; got an array that needs a copy: "
            f"{reason}. Pass copy=None to let it be copied."
        )
    return bool(copy or reason)


def _fresh(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that any framework can share: own memory, C order, native bytes, XLA's alignment."""
    raw = np.empty(x.nbytes + _XLA_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _XLA_ALIGNMENT
    result = raw[start : start + x.nbytes].view(x.dtype.newbyteorder("=")).reshape(x.shape)
    result[...] = x
    return result


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"`to_{name}` needs {name}, which is not installed. pip install 'xentlib[{name}]'.",
            name=name,
        ) from error
