"""What a step sends between ranks, counted in PyTorch as the dispatcher sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._library.custom_ops import _maybe_get_opdef
from torch.utils._python_dispatch import TorchDispatchMode

from xentlib.collectives import Collective, CollectiveCount

# Beginnings of the names of operators, in c10d (`_allgather_base_`) and in functional collectives
# (`all_gather_into_tensor_coalesced`), without underscores.
KIND_OF = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "permute",
    "recv": "permute",
    "barrier": "other",
    "gather": "other",
    "monitoredbarrier": "other",
    "reduce": "other",
    "scatter": "other",
}
NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def kind_of(name: str) -> str | None:
    """Of an operator of `NAMESPACES`; None for waiting and the like."""
    plain = name.replace("_", "")
    return next((kind for start, kind in KIND_OF.items() if plain.startswith(start)), None)


def size_of(x: Any) -> int:
    """Bytes of a tensor or of nested lists of them."""
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(size_of, x)) if isinstance(x, (list, tuple)) else 0


class Counter(TorchDispatchMode):
    """Active in the backward too, whose threads take over the modes of the one that called it."""

    def __init__(self, count: CollectiveCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        definition = _maybe_get_opdef(func)
        if definition is not None:
            # An operator written in Python is opaque to the dispatcher, and may send.
            with self:
                return definition._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace in NAMESPACES:
            kind = kind_of(func.overloadpacket.__name__)
            if kind is not None:
                size = max(size_of(x) for x in (*args, *kwargs.values(), result))
                self.count.found.append(Collective(kind, size))
        return result


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count the collectives of a step: `with count_collectives() as c: step()`.

    A head should cost what contract row A15 says, however many chunks and valid tokens there are,
    on every rank: a count that differs between ranks is a step that hangs.

    In PyTorch every collective that this thread and its backward dispatch is counted, those of a
    wrapper's hooks included, each time. A collective that another library calls inside an operator
    of its own is not seen.

    In JAX the programs that are compiled and first run within the block are read: each program's
    collectives count once, however often it runs, and one in a loop says so. The block begins with
    `jax.clear_caches()`, so that programs compiled before are compiled again.

    Yields:
        A `CollectiveCount`. In PyTorch it grows as the block runs, in JAX it is filled at its end.

    Numerics: nothing is changed.
    """
    count = CollectiveCount()
    with Counter(count):
        yield count
