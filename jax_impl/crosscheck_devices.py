"""A checked call of several devices, put together on the host: the shards that they have of a
vocabulary, and the tokens of which they have one gradient of the head.

Shapes: N tokens, V vocabulary, H hidden width, R a low-rank part's width.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.arguments import Arguments
from xentlib.head import LowRankHead
from xentlib.jax.core.vocab import axis_of, checks_types, varies_over, vary, varying
from xentlib.tools.crosscheck import CrossCheckError
from xentlib.tools.recompute.call import Ranks


class Leaves(NamedTuple):
    """What a call is differentiated by, and the gradients of it."""

    hidden: Any  # [..., H]
    weight: Any  # [V, H] or [H, V]
    bias: Any = None
    low_in: Any = None  # A [R, H] and B [V, R] of a `LowRankHead`
    low_out: Any = None


HEAD = Leaves._fields[1:]


class CallRecord(NamedTuple):
    """What a checked call hands to the host."""

    step: Any
    index: Any  # of the device: along the vocabulary's axis, and along those of the tokens
    leaves: Leaves
    labels: Any
    constants: dict[str, Any]
    output: Any
    upstream: Any
    gradients: Leaves  # None of what is frozen


class Waiting:
    """Records of a check that have come from some devices alone, by their index; with what they
    have the same."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[int, CallRecord]]] = []
        self.lock = Lock()

    def all_of(self, mark: Any, index: int, record: CallRecord, count: int) -> list[CallRecord]:
        """The records of one call, once this is the last of `count`."""
        waiting_calls = (x for x in self.calls if x[0] == mark and index not in x[1])
        call = next(waiting_calls, None)
        if call is None:
            call = mark, {}
            self.calls.append(call)
        records = call[1]
        records[index] = record
        if len(records) < count:
            return []
        self.calls.remove(call)
        return [records[k] for k in range(count)]

    def missing(self) -> None:
        """After a wait all have come, or are elsewhere."""
        if self.calls:
            raise CrossCheckError(
                f"a checked call must have all devices of its mesh axes in one process; got parts "
                f"of {len(self.calls)} calls, without those of other devices. Check a run of one "
                f"process."
            )


class Devices:
    """What devices have of a call inside `shard_map`, by their types; outside of it one has all.

    Records come from each device by itself. Those of one call have the same tokens on all shards of
    the vocabulary, and then the same gradient of the head wherever tokens were summed.

    `apart`: each device's tokens have a gradient of the head, which is rounded before it is summed.
    """

    def __init__(
        self,
        call: Arguments,
        low: LowRankHead[Any] | None,
        *others: Any,
        waiting: Waiting,
        apart: bool,
    ) -> None:
        self.column, self.waiting = int(call.weight_layout == "HV"), waiting
        self.axis = axis_of(call, None if low is None else low.b)
        if self.axis is not None and call.tokens_parallel is not None:
            raise CrossCheckError(
                "a checked call must have its rows or its tokens spread by hand; got "
                "`vocab_parallel` with `tokens_parallel`. Check a run without the latter."
            )
        of_low = (None, None) if low is None else (low.a, low.b)
        leaves = Leaves(call.hidden, call.weight, call.bias, *of_low)
        over: Any = varying() if self.axis is None else varying(lax.axis_index(self.axis.name))
        every = varying(leaves, *others) - over
        self.widened = every if apart else frozenset()
        leaves = self.typed(leaves)
        self.tokens = tuple(sorted(every - varying(leaves.weight), key=str))
        # Leaves whose gradients are each device's part of a sum over the vocabulary's axis, and
        # those that are summed over other axes than the weight's.
        self.parts: list[str] = []
        self.left_out: list[str] = []
        for name, x in leaves._asdict().items():
            if x is None:
                continue
            summed = () if name == "hidden" else self.tokens
            if tuple(sorted(every - varying(x), key=str)) != summed:
                self.left_out.append(name)
            if self.axis is not None and name in ("hidden", "low_in"):
                self.parts += [name] if varies_over(x, self.axis.name) else []
        self.shards = 1 if self.axis is None else lax.axis_size(self.axis.name)
        # Without types every device has a loss of its own.
        self.own_losses = self.axis is not None and not checks_types(self.axis.name)
        self.replicas = lax.axis_size(self.tokens) if self.tokens else 1

    def typed(self, leaves: Leaves) -> Leaves:
        return vary(leaves, self.widened)

    @property
    def index(self) -> jax.Array:
        none = jnp.zeros((), jnp.int32)
        shard = none if self.axis is None else lax.axis_index(self.axis.name)
        return jnp.stack([shard, lax.axis_index(self.tokens) if self.tokens else none])

    def complete(self, record: CallRecord) -> list[CallRecord]:
        """The records with all rows, one for the tokens of each device, once this is the last."""
        waiting, step = self.waiting, int(record.step)
        shard, replica = (int(x) for x in record.index)
        with waiting.lock:
            if self.shards > 1:
                tokens = record.labels.tobytes(), record.leaves.hidden.tobytes()
                parts = waiting.all_of((id(self), step, tokens), shard, record, self.shards)
                if not parts:
                    return []
                record = self.whole(parts)
            dropped: dict[str, Any] = dict.fromkeys(self.left_out)
            gradients = record.gradients._replace(**dropped)
            record = record._replace(gradients=gradients)
            of_head = [x for name in HEAD if (x := getattr(gradients, name)) is not None]
            if self.replicas == 1 or not of_head:
                return [record]
            mark = id(self), step, of_head[0].tobytes()
            return waiting.all_of(mark, replica, record, self.replicas)

    def whole(self, records: list[CallRecord]) -> CallRecord:
        """With the rows of all shards, less padded ones."""
        first, rows = records[0], {"weight": self.column, "bias": 0, "low_out": 0}
        assert self.axis is not None
        classes = np.arange(self.axis.vocab_size)

        def of(parts: list[Leaves]) -> Leaves:
            joined_by = {}
            for name, axis in rows.items():
                some = [getattr(x, name) for x in parts]
                joined = None if some[0] is None else np.concatenate(some, axis)
                joined_by[name] = None if joined is None else np.take(joined, classes, axis)
            return parts[0]._replace(**joined_by)

        gradients = [x.gradients for x in records]
        reduced = of(gradients)
        for name in self.parts:
            some = [getattr(x, name) for x in gradients]
            if some[0] is not None:
                # Parts that were rounded to 16 bits are no gradient of one rounding.
                total = np.sum(some, 0) if some[0].dtype.itemsize > 2 else None
                reduced = reduced._replace(**{name: total})
        upstream = first.upstream
        if self.own_losses:
            upstream = np.sum([x.upstream for x in records])
        leaves = of([x.leaves for x in records])
        return first._replace(leaves=leaves, gradients=reduced, upstream=upstream)


class Replica(Ranks):
    """One device's tokens, in a thread of its own; what all make of the head is added up."""

    others = True

    def __init__(self, rank: int, barrier: Barrier, parts: list[Any]) -> None:
        self.rank, self.barrier, self.parts = rank, barrier, parts

    def every(self, x: Any) -> Any:
        self.parts[self.rank] = x
        self.barrier.wait()
        every = np.stack(self.parts)
        self.barrier.wait()
        return every

    def together(self, x: Any) -> Any:
        return self.every(x).sum(0)

    def agreed(self, x: Any) -> Any:
        return self.every(x).max(0)


def side_by_side(count: int, work: Callable[[int, Replica], Any]) -> list[Any]:
    """The work of each device, which wait for each other in `Replica`."""
    barrier, parts = Barrier(count), [None] * count

    def one(rank: int) -> Any:
        try:
            return work(rank, Replica(rank, barrier, parts))
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
