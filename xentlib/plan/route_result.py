"""What is planned of one route: what it sends, computes and holds, and the seconds that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xentlib.plan.route_config import GRADIENTS, STATISTICS, TRUNK, Exchange, Rates
from xentlib.plan.route_memory import Moments


@dataclass(frozen=True, slots=True)
class Route:
    """One way for tokens and rows to meet.

    Attributes:
        name: "full logits", which is no route of ours, "head", "hidden", "stream" or "hybrid".
        exchanges: what is sent in a call, in order.
        flops: of the products of a rank.
        products: as many as the head has of each token.
        compute_seconds: of these and of what is between them, as `gpu_time` has it.
        moments: what stands on a rank at once, in bytes by name, by moment.
        state: of the head's own on a rank, whatever the route, in bytes by name.
        chunk_tokens: T, of this rank.
        num_chunks: C.
        block_rows: K, 0 if rows are not gathered in blocks.
        micro_batches: of a window; what is sent once in a window counts as a part of a call.
        rates: for the seconds.
    """

    name: str
    exchanges: tuple[Exchange, ...]
    flops: int
    products: int
    compute_seconds: float
    moments: Moments
    state: Mapping[str, int]
    chunk_tokens: int
    num_chunks: int
    block_rows: int
    micro_batches: int
    rates: Rates

    @property
    def peak(self) -> Mapping[str, int]:
        """What stands at the moment that needs most, in bytes by name."""
        most = max(self.moments.values(), key=lambda parts: sum(parts.values()))
        return {name: size for name, size in most.items() if size}

    @property
    def peak_bytes(self) -> int:
        """Of one call beside its inputs, results included."""
        return sum(self.peak.values())

    @property
    def state_bytes(self) -> int:
        return sum(self.state.values())

    def counts(self, *, backward: bool | None = None) -> dict[str, int]:
        """Number of each kind of collective in a call that reduces gradients."""
        counts: dict[str, int] = {}
        for x in self._of(backward):
            counts[x.kind] = counts.get(x.kind, 0) + x.count
        return counts

    def bytes(self, kind: str | None = None, *, backward: bool | None = None) -> int:
        """Of one kind, or of all, as `count_collectives` counts, in such a call."""
        return sum(x.bytes for x in self._of(backward) if kind in (None, x.kind))

    def _of(self, backward: bool | None) -> list[Exchange]:
        return [x for x in self.exchanges if backward in (None, x.backward)]

    @property
    def received(self) -> float:
        """Bytes that a rank receives in a call."""
        return sum(x.received / self._calls(x) for x in self.exchanges)

    @property
    def link_seconds(self) -> float:
        """Of all that is sent, one after the other."""
        return self._links(self.exchanges)

    @property
    def seconds(self) -> float:
        """With nothing overlapped: what is computed, and what is sent while nothing is."""
        return self.compute_seconds + self.link_seconds

    @property
    def overlapped_seconds(self) -> float:
        """At best: whatever runs beside products is hidden by them as far as they last, but for
        that of the first, or the last, of the chunks or blocks. MAX and SUM wait for what was sent
        before them, so it is d weight of one chunk and the logits of the next that hide both
        chunks' hidden states; a wrapper's own reduction is hidden by the trunk's backward."""
        hidden = 0.0
        for under in (STATISTICS, GRADIENTS):
            sent = [x for x in self.exchanges if x.under == under]
            if sent:
                part = 1 / self.products if under == STATISTICS else 1 - 1 / self.products
                hidden_links = min(self._links(sent), part * self.compute_seconds)
                hidden += hidden_links * (1 - 1 / sent[0].count)
        # In this order: what was added to 1e-11 s and taken away again leaves 1e-21 s of rounding.
        sent_alone = self._links(x for x in self.exchanges if x.under != TRUNK)
        return self.compute_seconds + (sent_alone - hidden)

    def _links(self, exchanges: Iterable[Exchange]) -> float:
        return sum(x.seconds(self.rates) / self._calls(x) for x in exchanges)

    def _calls(self, x: Exchange) -> int:
        return self.micro_batches if x.per_sync else 1
