"""What is timed: a named way to the loss, or to something and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Protocol

Kind = Literal["loss", "loss + gradient", "log-probs + gradient"]
TRAINING: Kind = "loss + gradient"
PER_TOKEN: Kind = "log-probs + gradient"
KINDS: tuple[Kind, ...] = (TRAINING, PER_TOKEN, "loss")

FLOOR = "bare GEMMs"
# The same products into memory that is there already, which no call that returns new gradients has.
REUSED = "bare GEMMs, old buffers"
BARE = (FLOOR, REUSED)
OURS = "xentlib"


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to the loss, as a row of data.

    `run(hidden, weight, labels, softcap, reduction)` returns the mean negative log-likelihood of
    the tokens, or all N of them: `reduction` is "mean" or "none".
    """

    name: str
    run: Callable[..., Any]
    absent: str | None = None  # why it cannot be run here
    on: str | None = None  # the kind of device that it has kernels for; None is any
    softcap: bool = True
    per_token: bool = True

    def excuse(self, kind: Kind, device: str, softcap: float | None) -> str | None:
        """Why this peer is not timed, None where it is."""
        if self.absent is not None:
            return self.absent
        if self.on not in (None, device):
            return f"needs {str(self.on).upper()}"
        if softcap is not None and not self.softcap:
            return "has no softcap"
        if kind == PER_TOKEN and not self.per_token:
            return "has no loss per token"
        return None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a field is to be built; None is all."""

    names: tuple[str, ...] | None = None
    kinds: tuple[Kind, ...] = KINDS


ALL = Wanted()


def not_installed(package: str, module: str | None = None) -> str | None:
    """The excuse of a peer whose package is not here."""
    if find_spec(module or package.replace("-", "_")) is not None:
        return None
    return f"not installed: pip install {package}"


def not_there() -> tuple[Any, ...]:
    raise RuntimeError("this contestant cannot be run here; its excuse says why")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table.

    `run` returns (loss,), (loss, d hidden, d weight) or, per token, (negative log-probabilities,
    d hidden, d weight), perhaps still being computed; bare GEMMs return their products in that
    order.
    """

    name: str
    kind: Kind
    run: Callable[[], tuple[Any, ...]] = not_there
    # Bytes that the compiler set aside for temporaries and results, where there is a compiler.
    compiled_bytes: Callable[[], int] | None = None
    excuse: str | None = None  # why it is not run


@dataclass(frozen=True, slots=True)
class Lineup:
    """All contestants of one framework on one case, one dtype and one device."""

    contestants: tuple[Contestant, ...]
    device: str
    wait: Callable[[], None]  # for what is queued on the device
    ready: Callable[[Any], None]  # for one result
    peak_bytes: Callable[[Callable[[], Any]], int] | None  # of one call, by the allocator


class Products(Protocol):
    """The bare GEMMs of a framework."""

    def loss(self) -> tuple[Any, ...]: ...
    def loss_and_gradient(self) -> tuple[Any, ...]: ...


def floors(wanted: Wanted, make: Callable[[str], Products]) -> Iterator[Contestant]:
    """The bare GEMMs: one for the loss, three for anything with gradients."""
    for name in BARE:
        if wanted.names is None or name in wanted.names:
            products = make(name)
            for kind in wanted.kinds:
                run = products.loss if kind == "loss" else products.loss_and_gradient
                yield Contestant(name, kind, run)


def contestants_of(
    peers: Iterable[Peer],
    wanted: Wanted,
    device: str,
    softcap: float | None,
    make: Callable[[Peer, Kind], Contestant],
) -> Iterator[Contestant]:
    """Each peer with each kind that is wanted: made, or with its excuse."""
    for peer in peers:
        for kind in wanted.kinds:
            if wanted.names is None or peer.name in wanted.names:
                excuse = peer.excuse(kind, device, softcap)
                yield (
                    make(peer, kind)
                    if excuse is None
                    else Contestant(peer.name, kind, excuse=excuse)
                )
