"""What is timed: implementations of the loss, each a row of a table, beside the bare GEMMs; and the
frame in which both frameworks run them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from xentlib.tools.bench.cases import Arrays

Kind = Literal["loss", "loss + gradient", "log-probs + gradient"]
TRAINING: Kind = "loss + gradient"
PER_TOKEN: Kind = "log-probs + gradient"
KINDS: tuple[Kind, ...] = (TRAINING, PER_TOKEN, "loss")

FLOOR = "bare GEMMs"
# The same products into memory that is there already, which no call that returns new gradients has.
REUSED = "bare GEMMs, old buffers"
BARE = (FLOOR, REUSED)
OURS = "xentlib"


class Implementation(NamedTuple):
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
        """Why this implementation is not timed, None where it is."""
        if self.absent is not None:
            return self.absent
        if self.on not in (None, device):
            return f"needs {str(self.on).upper()}"
        if softcap is not None and not self.softcap:
            return "has no softcap"
        if kind == PER_TOKEN and not self.per_token:
            return "has no loss per token"
        return None


def ours(functions: Any) -> Implementation:
    """Of `xentlib.torch` or `xentlib.jax`."""

    def run(hidden: Any, weight: Any, labels: Any, softcap: float | None, reduction: str) -> Any:
        if reduction == "none":
            return -functions.chunked_logprobs(hidden, weight, labels, softcap=softcap).logprobs
        return functions.chunked_nll(hidden, weight, labels, softcap=softcap).loss

    return Implementation(OURS, run)


def of_package(
    name: str, package: str, path: str, *, softcap: bool = True, per_token: bool = True, **more: Any
) -> Implementation:
    """A package's own function of hidden, weight and labels, for CUDA alone; it is looked up when
    it is called, with `more`."""
    module, _, function = path.rpartition(".")

    def run(hidden: Any, weight: Any, labels: Any, cap: float | None, reduction: str) -> Any:
        capped = {"softcap": cap} if softcap else {}
        loss = getattr(import_module(module), function)
        return loss(hidden, weight, labels, reduction=reduction, **capped, **more)

    absent = not_installed(package, module.partition(".")[0])
    return Implementation(name, run, absent, "cuda", softcap, per_token)


def not_installed(package: str, module: str | None = None) -> str | None:
    """The excuse of an implementation whose package is not here."""
    if find_spec(module or package) is not None:
        return None
    return f"not installed: pip install {package}"


def not_there() -> tuple[Any, ...]:
    raise RuntimeError("this implementation cannot be run here; its excuse says why")


class TimedCall(NamedTuple):
    """One row of the report: an implementation, or the bare GEMMs, with one kind.

    `run` returns (loss,), (loss, d hidden, d weight) or, per token, (negative log-probabilities,
    d hidden, d weight), perhaps still being computed; bare GEMMs return their products in that
    order.
    """

    name: str
    kind: Kind
    run: Callable[[], tuple[Any, ...]] = not_there
    # Extra bytes at the peak of one call, by the framework. Of none of the bare GEMMs: they hold
    # all logits at once, which is not what is compared.
    peak_bytes: Callable[[], int] | None = None
    excuse: str | None = None  # why it is not run


class BareProducts(NamedTuple):
    """The three products that every loss needs: float32 results, dz in the inputs' dtype.

    `product(slot, a, b, axis_a, axis_b)` sums over one axis of each, in the buffer of `slot` if
    there is one. Where dz is float32 the logits stand in for their own gradient, as in a head that
    works in place.
    """

    product: Callable[[int, Any, Any, int, int], Any]
    hidden_NH: Any
    weight_VH: Any
    dz_NV: Any = None  # where it is not float32

    def loss(self) -> tuple[Any, ...]:
        return (self.product(0, self.hidden_NH, self.weight_VH, 1, 1),)

    def loss_and_gradient(self) -> tuple[Any, ...]:
        (z_NV,) = self.loss()
        dz_NV = z_NV if self.dz_NV is None else self.dz_NV
        dx_NH = self.product(1, dz_NV, self.weight_VH, 1, 0)
        return z_NV, dx_NH, self.product(2, dz_NV, self.hidden_NH, 0, 0)


class Lineup(ABC):
    """All that is timed of one framework on one case, one dtype and one device.

    `only` has the names that are wanted; None is all.
    """

    device: str  # as the report names it
    threads: int | None = None  # XLA does not say how many it has

    def __init__(
        self,
        arrays: Arrays,
        device: str = "auto",
        only: Sequence[str] | None = None,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self.softcap = arrays.softcap
        self.calls: list[TimedCall] = []
        rows, kind_of_device = self.place(arrays, device)
        for name in BARE:
            if only is None or name in only:
                bare = self.bare(reuse=name == REUSED)
                for kind in kinds:
                    run = bare.loss if kind == "loss" else bare.loss_and_gradient
                    self.calls.append(TimedCall(name, kind, run))
        for row in rows:
            for kind in kinds if only is None or row.name in only else ():
                excuse = row.excuse(kind, kind_of_device, self.softcap)
                call = TimedCall(row.name, kind, excuse=excuse)
                self.calls.append(call if excuse else call._replace(**self.call(row, kind)))

    def result(self, call: TimedCall) -> tuple[Any, ...]:
        """Of a call that is done."""
        result = call.run()
        self.ready(result)
        return result

    @abstractmethod
    def place(self, arrays: Arrays, device: str) -> tuple[list[Implementation], str]:
        """Put the inputs on the device; the rows of the table, and the device's kind."""

    @abstractmethod
    def bare(self, *, reuse: bool) -> BareProducts:
        """Of the inputs, into buffers that are already there if `reuse`."""

    @abstractmethod
    def call(self, row: Implementation, kind: Kind) -> dict[str, Any]:
        """`run` and `peak_bytes` of a row."""

    @abstractmethod
    def wait(self) -> None:
        """For what is queued on the device."""

    @abstractmethod
    def ready(self, result: Any) -> None:
        """Wait for one result."""
