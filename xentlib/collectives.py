"""What a step sends between ranks, counted: the definition that both backends carry out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["KINDS", "Collective", "CollectiveCount", "count_collectives"]

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "permute",  # from one rank to one other: send and recv, ppermute
    "other",  # barrier, gather, scatter, reduce to one rank
)


class Collective(NamedTuple):
    """One collective of this rank.

    Attributes:
        kind: one of `KINDS`.
        bytes: of its tensors on this rank, where they are whole: the result of an all-gather, what
            goes into a reduce-scatter.
        looped: inside a loop of a compiled program, which carries it out in each iteration. JAX
            only: PyTorch counts every time.
    """

    kind: str
    bytes: int
    looped: bool = False


class CollectiveCount:
    """What `count_collectives` has found, in order of appearance.

    `count["all_gather"]` is how many there were of a kind, `len(count)` of all kinds.
    """

    def __init__(self, found: Sequence[Collective] = ()) -> None:
        self.found: list[Collective] = list(found)

    def __getitem__(self, kind: str) -> int:
        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {kind!r}.")
        return sum(x.kind == kind for x in self.found)

    def __len__(self) -> int:
        return len(self.found)

    def counts(self) -> dict[str, int]:
        """Number of each kind that appears."""
        return {kind: self[kind] for kind in KINDS if self[kind]}

    def bytes(self, kind: str | None = None) -> int:
        """Bytes of one kind, or of all; a looped one counts once."""
        return sum(x.bytes for x in self.found if kind in (None, x.kind))

    def looped(self) -> list[Collective]:
        """Those inside a loop of a compiled program."""
        return [x for x in self.found if x.looped]

    def __str__(self) -> str:
        parts = [f"{n} {kind} ({self.bytes(kind):,} bytes)" for kind, n in self.counts().items()]
        return ", ".join(parts) or "none"

    def __repr__(self) -> str:
        return f"CollectiveCount({self})"


def count_collectives() -> Any:
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
    raise NotImplementedError(
        "call xentlib.torch.count_collectives or xentlib.jax.count_collectives"
    )
