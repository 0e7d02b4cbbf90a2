"""Arrays between PyTorch, JAX and NumPy, without a copy where that is safe.

    to_torch(x)    to_jax(x)    to_numpy(x)

`x` is a torch tensor, a JAX array or a NumPy array of one of these dtypes: bool, int8 to int64,
uint8 to uint64, bfloat16 (`ml_dtypes.bfloat16` in NumPy), float16, float32, float64. Shape, device
and bits, NaN payloads included, are kept: nothing is rounded, narrowed or moved. A framework is
imported only by the function named after it; where `x` came from is looked up in `sys.modules`.

`copy` follows the array API standard. `None`: share the memory where that is safe, copy where the
table says so. `True`: always copy. `False`: share, or raise `ValueError` saying what is in the way.

**Sharing means one memory with two owners.** JAX believes that its arrays never change, and nothing
tells it otherwise. A write on the other side after the conversion

* shows in the JAX array;
* may reach a computation that was dispatched before it and still runs: one matrix product came back
  with some entries from before the write and some from after;
* does not reach a jitted function that closed over the array: it keeps the value it compiled.

So leave shared memory alone while the other side uses it, or cross with `copy=True`. JAX itself
never writes into it: a donated array whose memory is shared is not reused, and its memory lives on.

| what comes in | `to_torch` | `to_jax` | `to_numpy` |
|---|---|---|---|
| the function's own kind of array | itself | itself | itself |
| C-contiguous, aligned, writable | shared | shared | shared |
| JAX array on one device | shared, writable: see above | itself | shared, read-only |
| read-only NumPy (what `to_numpy` makes of JAX) | copied: torch knows none | shared | itself |
| does not start on a 64-byte boundary | shared | copied: XLA would | shared |
| strided view, transpose | shared | copied | shared |
| strides negative or between items | copied: torch aborts or refuses | copied | shared |
| items that overlap (expanded, windows) | copied: one write hits many | copied | copied |
| negative bit set (`z.conj().imag`) | itself | copied, resolved | copied, resolved |
| NumPy, byte-swapped or unaligned items | copied to native | copied to native | copied to native |
| JAX array in a layout that is not row-major | shared, strided | itself | copied |
| no items | nothing to share | nothing to share | nothing to share |
| 64-bit integers and floats | shared | `ValueError` unless x64 is on: JAX narrows | shared |
| on an accelerator (untested) | shared there | shared there | `ValueError`: never moved unasked |

Refused whatever the direction, by one sentence that names the way out:

| refused | because DLPack, or the framework, would |
|---|---|
| torch: `requires_grad`, forward-mode dual | lose the derivative |
| torch: `DTensor`, fake tensor, any subclass but `Parameter` | read memory that is not the tensor |
| torch: freed storage (resharded), meta, inside `torch.func` | read memory that is not there |
| torch: sparse, mkldnn, nested | have no strides to describe it |
| JAX: tracer, PRNG key, deleted or donated, several devices | have no one buffer to point to |
| NumPy: masked array | lose the mask |
| complex, float8, int4, structured, object, text, `longdouble` | lack the dtype on a side |

A boolean whose byte is neither 0 nor 1 (a reinterpreted uint8) crosses as it is; finding it would
mean reading every item.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import jax
    import torch

    AnyArray = torch.Tensor | jax.Array | npt.NDArray[Any]

__all__ = ["to_jax", "to_numpy", "to_torch"]

_NEEDS_X64 = frozenset({"int64", "uint64", "float64"})
_DTYPES = _NEEDS_X64 | {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"}
_DTYPES |= {"bfloat16", "float16", "float32"}
_XLA_ALIGNMENT = 64  # bytes; jax 0.10 copies a CPU buffer that starts anywhere else


def to_torch(x: AnyArray, *, copy: bool | None = None) -> torch.Tensor:
    """`x` as a torch tensor on the same device. See the module for what is shared.

    Raises:
        TypeError: not an array of the three frameworks, or a kind or dtype that cannot cross.
        ValueError: an array that has lost or never had its memory, would lose its derivative,
            or would need a copy under `copy=False`.
    """
    _check(x, copy)
    import torch

    if _is_torch(x):
        return x.clone() if copy else x
    if _is_jax(x):
        import jax

        with jax.ensure_compile_time_eval():  # inside jit too, the copy is a value
            x = x.copy() if copy else x
        return torch.utils.dlpack.from_dlpack(x)
    assert isinstance(x, np.ndarray)
    reason = _foreign(x) or _overlap(x.shape, x.strides, x.itemsize)
    if not x.flags.writeable:
        reason = reason or "it is read-only, which torch cannot express"
    if any(stride < 0 or stride % x.itemsize for stride in x.strides):
        reason = reason or f"torch cannot express its strides {x.strides} (bytes)"
    if x.size == 0 or _copies(copy, reason, "torch"):
        x = _fresh(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_jax(x: AnyArray, *, copy: bool | None = None) -> jax.Array:
    """`x` as a JAX array on the same device. See the module for what is shared.

    Raises:
        TypeError: not an array of the three frameworks, or a kind or dtype that cannot cross.
        ValueError: as `to_torch`, and for a 64-bit dtype while JAX has x64 off.
    """
    _check(x, copy)
    import jax

    name = _dtype_name(x)
    if name in _NEEDS_X64 and jax.dtypes.canonicalize_dtype(name).name != name:
        raise ValueError(
            f"`x` must have a dtype that JAX keeps; got {name}, which it would narrow to 32 bits. "
            f"Turn on `jax.enable_x64(True)`, or cast explicitly first."
        )
    with jax.ensure_compile_time_eval():  # inside jit too, what crosses is a value
        if _is_jax(x):
            return x.copy() if copy else x
        if _is_torch(x):
            import torch

            pointer = x.data_ptr()
            strided = "" if x.is_contiguous() else f"its strides are {x.stride()} (items)"
            negated = "its negative bit is set" if x.is_neg() else ""
            reason = strided or negated or (_misaligned(pointer) if x.is_cpu else "")
            if _copies(copy, reason, "JAX"):
                x = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
            result: jax.Array = jax.dlpack.from_dlpack(x)
        else:
            assert isinstance(x, np.ndarray)
            pointer = x.ctypes.data
            strided = "" if x.flags.c_contiguous else f"its strides are {x.strides} (bytes)"
            reason = _foreign(x) or strided or _misaligned(pointer)
            if x.size == 0 or _copies(copy, reason, "JAX"):
                x = _fresh(x)
            # NumPy's DLPack knows neither bfloat16 nor read-only; device_put shares both.
            result = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    if copy is False and result.size and result.unsafe_buffer_pointer() != pointer:
        _copies(copy, "JAX made one", "JAX")
    return result


def to_numpy(x: AnyArray, *, copy: bool | None = None) -> npt.NDArray[Any]:
    """`x` as a NumPy array; read-only where it shares the memory of a JAX array.

    Raises:
        TypeError: not an array of the three frameworks, or a kind or dtype that cannot cross.
        ValueError: as `to_torch`, and for an array that is not in host memory.
    """
    _check(x, copy)
    if _is_torch(x):
        import torch

        if x.device.type != "cpu":
            raise ValueError(f"`x` must be in host memory; got {x.device}. Pass `x.cpu()`.")
        negated = "its negative bit is set" if x.is_neg() else ""
        if _copies(copy, negated or _overlap(tuple(x.shape), x.stride()), "NumPy"):
            x = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
        if x.dtype == torch.bfloat16:
            return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    if _is_jax(x):
        device = next(iter(x.devices()))
        if device.platform != "cpu":
            raise ValueError(f"`x` must be in host memory; got {device}. Pass `jax.device_get(x)`.")
        host = np.asarray(x)
        shared = not host.size or host.ctypes.data == x.unsafe_buffer_pointer()
        copied = _copies(copy, "" if shared else "its layout is not row-major", "NumPy")
        return _fresh(host) if copied else host
    assert isinstance(x, np.ndarray)
    return _fresh(x) if _copies(copy, _foreign(x), "NumPy") else np.asarray(x)


def _is_torch(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_jax(x: object) -> TypeGuard[jax.Array]:
    return isinstance(x, getattr(sys.modules.get("jax"), "Array", ()))


def _check(x: Any, copy: object) -> None:
    """Raises on all that must not cross, whatever the direction."""
    if copy is not None and not isinstance(copy, bool):
        raise TypeError(f"`copy` must be None, True or False; got {copy!r}.")
    if _is_torch(x):
        _check_torch(x)
    elif _is_jax(x):
        _check_jax(x)
    elif not isinstance(x, np.ndarray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"`x` must be a torch tensor, a JAX array or a NumPy array; got {kind}. "
            f"Pass `numpy.asarray(x)`."
        )
    elif isinstance(x, np.ma.MaskedArray):
        raise TypeError("`x` must be a plain array; got a masked one. Pass `x.filled(...)`.")
    if _dtype_name(x) not in _DTYPES:
        raise TypeError(
            f"`x` must have a dtype that all three frameworks know (bool, 8 to 64-bit integers, "
            f"bfloat16, float16, float32, float64); got {_dtype_name(x)}. Cast or view it first."
        )


def _check_torch(x: torch.Tensor) -> None:
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"`x` must be a plain torch tensor; got {kind}, whose memory need not hold its values. "
            f"Pass the tensor inside (`x.full_tensor()` or `x.to_local()` of a DTensor)."
        )
    if x.requires_grad:
        raise ValueError(
            "`x` must not require grad, the derivative would be lost; got requires_grad=True. "
            "If that is meant, pass tensor.detach()."
        )
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"`x` must be dense; got {kind}. Pass `x.to_dense()` or its parts.")
    try:
        absent = x.data_ptr() == 0 and x.numel() > 0
    except RuntimeError:  # a torch.func wrapper
        absent = True
    if absent:
        raise ValueError(
            f"`x` must hold its values in memory; got {tuple(x.shape)} on {x.device} without any "
            f"(meta, a freed or resharded parameter, or inside torch.func). Gather it first, or "
            f"cross outside the transformation."
        )
    if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            "`x` must not carry a forward-mode tangent, it would be lost. Pass the primal of "
            "`torch.autograd.forward_ad.unpack_dual(x)`, detached."
        )


def _check_jax(x: jax.Array) -> None:
    import jax

    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"`x` must be a concrete array; got a traced {x.aval}. Cross outside jit, grad and "
            f"vmap, or inside `jax.pure_callback`."
        )
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"`x` must be numeric; got {x.dtype}. Pass `jax.random.key_data(x)`.")
    if x.is_deleted():
        raise ValueError(
            "`x` must still have its memory; got an array that was deleted or donated. Cross "
            "before the donating call, or donate a copy."
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


def _overlap(shape: tuple[int, ...], strides: tuple[int, ...], item: int = 1) -> str:
    """Whether two indices may name one item: each dimension must step over all smaller ones."""
    if 0 in shape:
        return ""
    reach = item
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
