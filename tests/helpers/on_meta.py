"""The way that a call takes on a GPU, walked on PyTorch's meta device, which has sizes and no
numbers: a run that comes to its end has read none, and so has waited for no device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch._library.custom_ops import _maybe_get_opdef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from xentlib.torch.core import device  # noqa: E402
from xentlib.torch.losses import loss  # noqa: E402

# What launches nothing beside views: memory that is not written to.
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# torch 2.11 takes the meta kernel of `addmm` for it, and its dtype for `beta`.
UNSHAPED = {torch.ops.aten.addmm.dtype_out} if torch.__version__ < "2.12" else set()
READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Waits(AssertionError):
    """The host would wait for the device."""


class Buffer(NamedTuple):
    """What a launch reads or writes."""

    shape: tuple[int, ...]
    entries: int
    bytes: int
    dense: bool  # without gaps


class Launch(NamedTuple):
    name: str
    read: list[Buffer]
    written: list[Buffer]


class OnDevice(TorchDispatchMode):
    """Refuses whatever waits; keeps the launches, and the most bytes of its own alive at once.
    Looks into the package's own operators, and stays active in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.copies = 0  # from the host, which does not wait for them
        self.live = self.peak = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        own = _maybe_get_opdef(func)
        if own is not None:
            with self:
                return own._init_fn(*args, **kwargs)
        with self:  # within an operator, those made of several others come whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        given, name = tensors((args, kwargs)), func.overloadpacket.__name__
        there = [x for x in given if x.is_meta]
        if there and READING & set(func.tags) and not picks_by_number(name, args):
            raise Waits(f"{func} reads numbers of the device")
        for x in given:
            self.keep(x, own=False)
        result = kwargs["out"] if func in UNSHAPED else func(*args, **kwargs)
        made = tensors(result)
        there += [x for x in made if x.is_meta]
        if not there:
            return result
        copies = name in ("_to_copy", "copy_", "where")
        if not all(x.is_meta for x in (*given, *made) if x.ndim or copies):
            if not made[0].is_meta or name not in ("_to_copy", "copy_"):
                raise Waits(f"{func} takes tensors of the host and of the device")
            if not kwargs.get("non_blocking", args[2:3] == (True,)):
                raise Waits(f"{func} copies from the host, and waits")
            self.copies += 1
        for x in made:
            self.keep(x, own=True)
        aliases = [x.alias_info for x in func._schema.returns]
        if name not in EMPTY and not any(x is not None and not x.is_write for x in aliases):
            over = name in ("copy_", "fill_", "zero_")
            kept = args[1:] if over else args
            read = [x for key, x in kwargs.items() if key != "out"]
            self.launches.append(Launch(name, *(sizes(tensors(x)) for x in ((kept, read), made))))
        return result

    def touching(self, entries: int) -> list[Launch]:
        """Those with a buffer of at least so many entries."""
        found = self.launches
        return [x for x in found if any(b.entries >= entries for b in (*x.read, *x.written))]

    def keep(self, x: Any, *, own: bool) -> None:
        """Count memory once, and not that of the caller."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes() * own
        if x.is_meta and key not in self.storages:
            self.storages.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, key, size)

    def release(self, key: int, size: int) -> None:
        self.storages.remove(key)
        self.live -= size


def tensors(tree: Any) -> list[Any]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def sizes(of: list[Any]) -> list[Buffer]:
    return [
        Buffer(tuple(x.shape), x.numel(), x.numel() * x.element_size(), x.is_contiguous())
        for x in of
    ]


def picks_by_number(name: str, args: Any) -> bool:
    """Indexing by integers, whose result has the size of the index."""
    return name == "index" and not any(x.dtype == torch.bool for x in tensors(args[1]))


def waiting(make: Any) -> Any:
    """`torch.tensor` or the like, which copies a number of the host to a device and waits."""

    @functools.wraps(make)
    def refuse(data: Any, *args: Any, **options: Any) -> Any:
        if torch.device(options.get("device") or "cpu").type != "cpu":
            raise Waits(f"{make.__name__}({data!r}) copies a number to the device, and waits")
        return make(data, *args, **options)

    return refuse


@contextmanager
def as_on_a_gpu() -> Iterator[OnDevice]:
    """Tensors on meta take the way of those on CUDA, and what would wait there raises `Waits`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.KINDS, "meta", device.KINDS["cuda"])
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # refuses meta
        for name in ("tensor", "as_tensor"):  # which dispatch nothing on meta
            patch.setattr(torch, name, waiting(getattr(torch, name)))
        # With a mode in place the backward would take it for a tracer's.
        patch.setattr(loss, "in_eager", lambda x: True)
        with OnDevice() as seen:
            yield seen
