"""A window of `TokenNormalizer` in PyTorch: the micro-batches of one optimizer update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.accumulate import CountMismatchError, WindowState, WindowStateError, WindowStats
from xentlib.checks.window import WINDOWS, check_counted
from xentlib.labels import SoftLabels
from xentlib.nll import NLLOutput
from xentlib.results import is_loss_output
from xentlib.torch.array_spec import array_spec
from xentlib.torch.core.device import onto
from xentlib.torch.micro_batch import known, loss_and_count

if TYPE_CHECKING:
    from xentlib.torch.accumulate import TokenNormalizer


DIVIDES = (
    "Pass reduction='sum' to it, or `denominator=window.denominator` and then "
    "`window.backward(loss, normalized=True)`."
)


class Declared(NamedTuple):
    """What a pre-count window counts, of all micro-batches of this rank."""

    labels: Sequence[Tensor]
    where: Sequence[Tensor] | None
    token_weights: Sequence[Tensor] | None
    ignore_index: int


def of_tokens(labels: Any) -> Any:
    """Labels, one a token; zeros for class probabilities, of which `where` alone takes any out."""
    of_each = labels.ids if isinstance(labels, SoftLabels) else labels
    if of_each is labels and not (isinstance(labels, Tensor) and labels.is_floating_point()):
        return labels
    return torch.zeros(of_each.shape[:-1], dtype=torch.int64, device=of_each.device)


class Window:
    """What `TokenNormalizer.window` opens, and leaving its block finishes.

    Attributes:
        norm: the normalizer.
        backwards: number of backwards so far.
    """

    def __init__(
        self, norm: TokenNormalizer, declared: Declared | None, uneven: bool, filler: Any
    ) -> None:
        self.norm, self.wrapper, self.declared = norm, norm.wrapper, declared
        self.uneven, self.filler = uneven, filler
        self.filling = False
        self.rounds: int | None = None  # micro-batches of the rank that has most
        self.backwards = 0
        self.device = self.wrapper.device
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.token_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.local_weight: Tensor | None = None  # weight of this rank's declared tokens
        self.size: Tensor | None = None  # the same of absolute weights
        self.uncounted = 0.0  # a loss of no token: one rank must not raise before a reduction
        self.kept = torch.zeros_like(self.token_sum)  # of all ranks, without what was dropped
        self.dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.held: list[tuple[Any, str, Tensor]] = []  # gradients from before the window
        self.entered = False
        self.total: Tensor | None = None
        self._stats: WindowStats | None = None

    # The block

    def __enter__(self) -> Window:
        life = self.norm.lifecycle
        if self.entered:
            raise WindowStateError(
                "a window must be entered once; got one that was entered before. Call "
                "`norm.window(...)` for each update."
            )
        before = self.wrapper.gradients() if life.state is WindowState.IDLE else []
        if self.norm.scales_at_the_end and before:
            raise WindowStateError(
                "gradients must be None when a window opens that rescales `.grad` as it closes "
                "(mode='postscale' or nonfinite='drop'); found existing gradients. Call "
                "`zero_grad(set_to_none=True)`, or use mode='precount' and nonfinite='keep'."
            )
        if self.norm.mode == "precount":
            life.step("count", "norm.window(...)")
            try:
                self._count()
            except BaseException:
                life.step("abort")
                raise
        life.step("open", "norm.window(...)")
        self.held = [(x, name, g.clone()) for x, name, g in before]
        self.entered = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.abort()
            return
        if self.norm.lifecycle.state is WindowState.IDLE:  # aborted inside the block
            return
        try:
            self.norm.lifecycle.step("finish", "leaving the window")
            self._finish()
        except BaseException:
            self.abort()
            raise
        self.norm.lifecycle.step("close")
        self.held, self.norm.finished = [], self.total

    def abort(self) -> None:
        """Give the window up: its gradients are dropped, those from before it put back, the
        wrapper's flags restored. After the window has ended all gradients are dropped."""
        self.norm.lifecycle.step("abort")
        self.wrapper.restore()
        self.wrapper.zero_gradients()
        for x, name, gradient in self.held:
            setattr(x, name, gradient)
        self.held = []

    # Counting

    def _count(self) -> None:
        assert self.declared is not None
        labels, where, weights, ignore_index = self.declared
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = torch.zeros_like(total)
        for k, of_batch in enumerate(labels):
            y = of_tokens(of_batch)
            check_counted(
                array_spec(y),
                None if where is None else array_spec(where[k]),
                None if weights is None else array_spec(weights[k]),
            )
            valid = y.long() != ignore_index  # in 8 bits -100 is 156
            if where is not None:
                valid = valid & where[k].bool()
            one = valid.long()
            if weights is not None:
                one = torch.where(valid, weights[k].double(), 0.0)
            # Labels may still be on the host.
            total += onto(one.sum(), self.device)
            size += onto(one.abs().sum(), self.device)
        self.local_weight, self.size = total.clone(), size
        self._reduce(total, len(labels))

    def _reduce(self, total: Tensor, micro_batches: int) -> None:
        """T on every rank, and who has how many micro-batches: one collective."""
        group = self.norm.group
        if group is None:
            self.total = total
            return
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        packed = torch.zeros(ranks + 2, dtype=torch.float64, device=self.device)
        packed[0], packed[-1] = total, self.uncounted
        packed[1 + rank] = micro_batches
        dist.all_reduce(packed, group=group)
        self.total, packed, uncounted = packed[0] / self.norm.copies, packed[:-1], packed[-1]
        if known(uncounted):
            WINDOWS.refuse("some", name="num_tokens", loss=float(uncounted))
        if self.uneven:  # read by the host, who hands out micro-batches
            self.rounds = int(packed[1:].max())
        elif self.norm.nonfinite == "drop":  # each takes a collective
            rounds = packed[1:].int().tolist()
            least, most = min(rounds), max(rounds)
            WINDOWS.require("rounds", least == most, least=least, most=most)

    @property
    def factor(self) -> Tensor:
        """c of pre-count, or what finished gradients are multiplied by: D G / T; 0 where T is 0."""
        assert self.total is not None
        scale = float(self.wrapper.reduction.scale)
        return torch.where(self.total != 0, scale / self.total, 0.0)

    @property
    def denominator(self) -> Tensor:
        """T / (D G), for a loss that divides for itself, and `window.backward(loss,
        normalized=True)`."""
        if self.total is None:
            raise WindowStateError(
                "`window.denominator` must be read in a pre-count window; got one that counts at "
                "its end. Use mode='precount'."
            )
        scale = float(self.wrapper.reduction.scale)
        return torch.where(self.total != 0, self.total / scale, 1.0).float()

    # Micro-batches

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Hand out each with the wrapper's flags set for it; the last one reduces.

        Args:
            batches: as many as there were labels; of any kind.

        Raises:
            WindowStateError: no call of `backward`, or several, for one of them.
            CountMismatchError: not as many as there were labels.
        """
        life = self.norm.lifecycle
        done, declared = object(), None if self.declared is None else len(self.declared.labels)
        ends = declared if self.rounds is None else self.rounds  # None: one must look ahead
        waiting = iter(batches)
        current, following, k, handed_out = next(waiting, done), done, 0, 0
        previous = self.filler
        while current is not done or (ends is not None and self.uneven and k < ends):
            if declared is not None and current is not done and k == declared:
                raise self._mismatch(f"more than {declared}", declared)
            self.filling = current is done
            if self.filling and previous is None:
                raise ValueError(
                    "`filler` must be given on a rank without a micro-batch, which takes part in "
                    "what the others reduce; got None. Pass a batch to `norm.window(filler=...)`: "
                    "its loss counts nothing."
                )
            if ends is None:
                following = next(waiting, done)
            last = following is done if ends is None else k + 1 >= ends
            batch = previous if self.filling else current
            if life.state is not WindowState.OPEN:
                life.step("backward", "window.micro_batches")
            before = self.backwards
            self.wrapper.micro_batch(last=last)
            yield batch
            calls = self.backwards - before
            if calls != 1:
                raise WindowStateError(
                    f"`window.backward` must be called once for each micro-batch; got "
                    f"{calls} calls for micro-batch {k}. Call it in the loop's body."
                )
            handed_out += not self.filling
            # A loader may fill the same buffers again: no batch is asked for before its turn.
            previous = batch
            if ends is not None and not self.filling:
                following = next(waiting, done)
            current, k = following, k + 1
        if declared is not None and handed_out != declared:
            raise self._mismatch(str(handed_out), declared)
        life.step("seal", "window.micro_batches")

    def _mismatch(self, counted: str, declared: int) -> CountMismatchError:
        return CountMismatchError(
            f"`batches` must be as many as `labels`; got {counted} micro-batches and labels of "
            f"{declared}. Pass the labels of all micro-batches of this window."
        )

    def backward(
        self, loss: Tensor | NLLOutput[Tensor], num_tokens: Any = None, *, normalized: bool = False
    ) -> None:
        """The backward of one micro-batch, as the wrapper wants it.

        Args:
            loss: an `NLLOutput` of `reduction="sum"`, which has its count and says whether it
                was divided; or [] float32 or float64, the sum over this rank's valid tokens.
            num_tokens: weight of those tokens, a number, an integer or float32. An `NLLOutput` has
                its own; any other loss needs it.
            normalized: the loss was divided by `window.denominator`.

        Raises:
            WindowStateError: the window is not open; or the wrapper's own forward has not run.
            ValueError: a loss that `chunked_nll` has divided, by anything but `window.denominator`
                where that is said; a loss without its count; on a CPU a count that its loss cannot
                have. Whether another loss is a sum cannot be checked.
            TypeError: a loss or a count of fewer than 32 bits.
        """
        self.norm.lifecycle.step("backward", "window.backward")
        counted = loss_and_count(loss, num_tokens)
        total = counted.loss
        counted.check_sum(DIVIDES, normalized)
        weighted = self.declared is None or self.declared.token_weights is not None
        alone = self.norm.group is None
        counted.check_count(weighted=weighted, whole=alone and not (self.filling or normalized))
        if not (alone or self.filling or normalized or known(counted.weight) != 0):
            value = known(total)
            self.uncounted += abs(value) if value is not None and math.isfinite(value) else 0.0
        self.wrapper.check_forward()
        self.backwards += 1
        if normalized and is_loss_output(loss):
            total = total * self._as_declared(counted.denominator).to(total.dtype)
        local = total.detach().double()
        if self.filling:  # whatever it is, NaN too
            local = local.new_zeros(())
            counted = counted._replace(weight=local)
        fine: Tensor | None = None
        if self.norm.nonfinite == "drop":
            fine = self._agree(local, counted.weight)
            local = torch.where(fine, local, 0.0)
        if self.filling:
            fine = torch.zeros((), dtype=torch.bool, device=self.device)
        if normalized:
            self.loss_sum += local * self.denominator
        else:
            self.loss_sum += local
            if self.total is not None:
                total = total * self.factor.to(total.dtype)
        self.token_sum += onto(counted.weight, self.device)
        with nullcontext() if fine is None else self.wrapper.gradients_if(fine):
            self.wrapper.backward(total)

    def _agree(self, local: Tensor, weight: Tensor) -> Tensor:
        """Whether this micro-batch's loss is finite on all ranks. All take part and all drop it:
        its graph may reach over ranks, by attention or experts."""
        packed = torch.stack([(~local.isfinite()).double(), onto(weight, self.device).double()])
        if self.norm.group is not None:
            dist.all_reduce(packed, group=self.norm.group)
        fine = packed[0] == 0
        self.kept += torch.where(fine, packed[1], 0.0)
        self.dropped += ~fine
        return fine

    def _as_declared(self, denominator: Tensor | None) -> Tensor:
        """1 where a loss was divided by `window.denominator`; else the error, or NaN where reading
        costs something."""
        ours = self.denominator
        same = ours == (0.0 if denominator is None else denominator.to(ours.device))
        WINDOWS.require("denominator", known(same) is not False)
        return torch.where(same, 1.0, torch.nan)

    # The end

    def _finish(self) -> None:
        self.wrapper.finish()
        if self.norm.mode == "postscale":
            self._reduce(self.token_sum, self.backwards)
            self.wrapper.scale_gradients(self.factor)
        else:
            self._same_count()
        assert self.total is not None
        if self.norm.nonfinite == "drop":
            before = self.total
            # The same number, to the bit, where nothing was dropped.
            self.total = torch.where(self.dropped > 0, self.kept / self.norm.copies, before)
            left = torch.where(self.total != 0, before / self.total, 0.0)
            self.wrapper.scale_gradients(left)
        empty = self.total == 0
        if self.norm.empty == "raise" and bool(empty):
            raise ValueError(
                "a window must hold a valid token with `empty='raise'`; got none on any rank. Use "
                "empty='skip' to leave such windows out."
            )
        share = torch.where(empty, 0.0, self.loss_sum / torch.where(empty, 1.0, self.total))
        skipped = empty if self.norm.empty == "skip" else torch.zeros_like(empty)
        self._stats = WindowStats(
            share, self.total, self.factor, self.backwards, skipped, self.dropped
        )

    def _same_count(self) -> None:
        """What was declared against what the losses saw, on this rank, where reading costs nothing.

        Numbers of tokens are the same exactly; weights are added up in another order, in float32.
        """
        declared, summed, size = known(self.local_weight), known(self.token_sum), known(self.size)
        if declared is None:
            return
        assert self.declared is not None
        apart = 0.0 if self.declared.token_weights is None else 1e-6 * size
        if not abs(declared - summed) <= apart:
            raise CountMismatchError(
                f"`labels` must be those that the losses see; got {declared:.15g} valid tokens "
                f"declared and {summed:.15g} in the losses. Count after the shift, with the mask "
                f"that the loss uses."
            )

    @property
    def stats(self) -> WindowStats:
        if self._stats is None:
            self.norm.lifecycle.step("read", "window.stats")
        assert self._stats is not None
        return self._stats

    def mean_loss(self) -> Tensor:
        """The loss that is stepped on, of all ranks: one more collective, entered by all."""
        mean: Tensor = self.stats.loss.clone()
        if self.norm.group is not None:
            dist.all_reduce(mean, group=self.norm.group)
            mean /= self.norm.copies
        return mean
