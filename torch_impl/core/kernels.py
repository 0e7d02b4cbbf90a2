"""The seam for kernels: what happens to a block of logits between the product that makes them and
the products that take dz, in two calls, or in one where nothing stands between them.

Shapes: B rows of a block, V columns of this rank, one more where a vocabulary is sharded.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from xentlib.arguments import Scalars
from xentlib.math.softmax import Algebra, BlockStats, Coefficients, WantedStats
from xentlib.options import KERNELS, KERNELS_ENV
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.tokens import FurtherClasses


class LogitTransform(NamedTuple):
    """Bias, scale, softcap and class weights of the call."""

    columns: int  # that are classes; the others are at -inf
    bias_V: Tensor | None = None
    scale: Tensor | None = None
    scalars: Scalars = Scalars()
    class_weights_V: Tensor | None = None  # of the columns that are classes
    top_k: int = 0  # of each row's largest columns are further classes too


@dataclass(slots=True)
class LogitsBlock:
    """A block of a chunk, small enough to stay in a CPU's cache."""

    span: slice  # within the chunk
    token_index: slice | Tensor  # within the N tokens
    z_BV: Tensor  # overwritten by every call
    y_B1: Tensor  # the target's column
    temperature_B: Tensor | None
    valid_B: Tensor | None  # False: the row does not count; None: all do
    owned_B: Tensor | None  # the target is a class of this rank; None: all are
    more: FurtherClasses | None = None  # of the rows
    fresh: bool = True  # `z_BV` is as the product has left it
    derivative_BV: Tensor | None = None  # of the softcap, where a first call leaves it for a second
    z_more_BK: Tensor | None = None  # logits of the further classes, once the target's is known
    top_BK: Tensor | None = None  # columns of the largest, as numbers of the dtype, if wanted
    z_top_BK: Tensor | None = None  # and their logits
    stats_Bb4: Tensor | None = None  # where programs write statistics, as `stats_in` reads them


class DzOutput(NamedTuple):
    """Where dz of a block goes, and what comes with it."""

    into_BV: Tensor | None = None  # in place of the logits, if None
    round_to: torch.dtype | None = None
    dz_y_B: Tensor | None = None  # where programs may write the target's, rounded
    with_target: bool = False  # the target's, rounded, is put into its column as well
    column_sums: bool = False


class TargetTerms(NamedTuple):
    """dz of the targets of some tokens, for what they add to gradients."""

    dz_y_B: Tensor
    y_B: Tensor  # the target's row of the head; nothing is added where it has none
    order_B: Tensor | None  # the tokens sorted by `y_B`, from `first` on, where `sorted_targets`
    first: int


class LossTerms(NamedTuple):
    """Of `chunked_nll`, for the call that makes it whole: what it is made of, and where it goes."""

    factor_B: Tensor  # of dz: weight of the token / divisor
    scalars: Scalars
    weights_sum: Tensor | None  # of all classes
    values_7B: Tensor  # written: loss, z-loss part, logprob, entropy, lse, correct, predicted
    dz_y_B: Tensor | None  # written: dz of the target, rounded as the rest is; None: no gradient


def stats_in(
    four_Bb4: Tensor, wanted: WantedStats, top: Tensor | None = None, sum_d: Tensor | None = None
) -> BlockStats:
    """Statistics of blocks of 128 columns, m, s, ones and sum_ed, as programs write them."""
    m, s, ones, sum_ed = four_Bb4.permute(2, 1, 0)
    return BlockStats(m, ones, s, sum_ed if wanted.entropy else None, top, sum_d)


class Kernels(Protocol):
    """All calls, with the scratch that they share. Made for a chunk; given up before its GEMMs."""

    # Takes a chunk's rows at once, and has no scratch of their size
    whole_chunks: ClassVar[bool] = False
    # A target of another rank needs a column of this one, at -inf
    spare_column: ClassVar[bool] = True
    sorted_targets: ClassVar[bool] = False  # `add_to_weight` wants `order_B`
    fused_loss: ClassVar[bool] = False  # has `loss`
    algebra: ClassVar[Algebra] = ALGEBRA  # steps 4 and 5 of tokens

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, shape: LogitTransform
    ) -> None:
        """For blocks of so many rows and columns."""

    def stats(
        self, rows: LogitsBlock, wanted: WantedStats, *, dz_follows: bool
    ) -> tuple[Tensor, BlockStats]:
        """Steps 2 to 4, of fresh rows: bias, scale, softcap and temperature, the target's logit,
        the statistics of the rest. Leaves `rows` as `dz` of the same kernels wants them, with the
        softcap's derivative if `dz_follows` at once."""

    def dz(
        self, rows: LogitsBlock, lse_B: Tensor, of: Coefficients, out: DzOutput
    ) -> tuple[Tensor, Tensor | None]:
        """Steps 6 and 7, of fresh rows or of what `stats` has left: dz of the rest through the
        softcap, 0 in the target's column and where a row does not count, rounded to `round_to`; in
        place of the logits or in `into_BV`, which may be the upper half of the same rows, in 16
        bits. Returns dz of the target [B], 0 where that is not of this rank or the row does not
        count, and if wanted the sums [V] over the rows of the rest's dz; neither is rounded."""

    @staticmethod
    def add_to_hidden(dx_BH: Tensor, terms: TargetTerms, weight_VH: Tensor) -> None:
        """dx[i] += dz_y[i] weight[y[i]]."""

    @staticmethod
    def add_to_weight(acc_VH: Tensor, terms: TargetTerms, x_BH: Tensor) -> None:
        """acc[y[i]] += dz_y[i] x[i], in ascending order of i."""

    @staticmethod
    def scale(x: Tensor, by: Tensor, out: Tensor) -> None:
        """out = x by, multiplied in the dtype of `x` and rounded once; `out` may be `x`."""


class FusedLoss(Kernels, Protocol):
    """With both calls, and what `chunked_nll` makes between them, as one: where `fused_loss`."""

    def loss(self, rows: LogitsBlock, wanted: WantedStats, terms: LossTerms, out: DzOutput) -> None:
        """Steps 2 to 7 of fresh rows of a whole vocabulary; dz as `dz` has it."""


NO_SCALARS = Scalars()
# Divergences and options that its programs have
DIVERGENCES_IN_TRITON = ("forward_kl", "reverse_kl", "jsd")
IN_TRITON = ("softcap", "label_smoothing", "z_loss", "beta", "nll_weight")
OF_TRITON: dict[str, Any] = {name: getattr(NO_SCALARS, name) for name in IN_TRITON}
# Compute capability: bfloat16, and products of 16-bit operands with float32 results.
LEAST_CAPABILITY = (8, 0)
WIDEST = 1 << 14  # columns that a program of 1,024 threads reads at once


def runnable() -> dict[str, type[Kernels]]:
    """By name, all that can run on this machine."""
    from xentlib.torch.core.eager import Eager

    by_name: dict[str, type[Kernels]] = {"eager": Eager}
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    if not all(why_no_triton(device) for device in devices):
        by_name["triton"] = triton_kernels()
    return by_name


def kernels_for(
    device: torch.device, dtype: torch.dtype, scalars: Scalars = NO_SCALARS
) -> type[Kernels]:
    """Who computes all steps on a device in this dtype, with these options. `XENTLIB_KERNELS` may
    say eager, or triton: then what cannot be had is an error. float64 is always eager."""
    choice = chosen()
    if choice == "eager" or device.type == "meta" or (choice == "auto" and device.type != "cuda"):
        from xentlib.torch.core.eager import Eager

        return Eager
    if dtype != torch.float32:
        return eager_kernels(device, "they compute in float32, and this call is in float64")
    why = why_no_triton(device)
    others = scalars._replace(**OF_TRITON) if scalars != NO_SCALARS else scalars
    if others != NO_SCALARS:
        why = why or f"its programs know no options but {', '.join(IN_TRITON)}"
    if not why and device.type == "cuda":
        why = trial(device)
    if not why:
        return triton_kernels()
    if choice == "auto":
        return eager_kernels(device, why)
    raise RuntimeError(
        f"`XENTLIB_KERNELS=triton` must find kernels for the device of the call; got {device}: "
        f"{why}. Set XENTLIB_KERNELS=auto, or unset it."
    )


def eager_kernels(device: torch.device, why: str) -> type[Kernels]:
    """PyTorch's own operators, of a call that Triton's programs do not compute. Nobody who has not
    asked for them on a GPU is to find out by the time that they take."""
    from xentlib.torch.core.eager import Eager

    if device.type == "cuda" and chosen() == "auto":
        warn_of_eager(device, why)
    return Eager


@functools.cache  # once for each reason
def warn_of_eager(device: torch.device, why: str) -> None:
    warnings.warn(
        f"Triton's programs do not compute this call on {device}, and eager operators take 2 to 6 "
        f"times as long: {why}. XENTLIB_KERNELS=eager chooses them without this warning.",
        stacklevel=3,
    )


def chosen() -> str:
    """What the environment says, "auto" if nothing."""
    choice = os.environ.get(KERNELS_ENV, "auto")
    if choice not in KERNELS:
        raise ValueError(
            f"`{KERNELS_ENV}` must be one of {', '.join(KERNELS)}; got {choice!r}. Unset it for "
            f"the fastest that the device can run."
        )
    return choice


def why_no_triton(device: torch.device) -> str:
    """Nothing, where Triton's programs run on a device."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "" if device.type == "cpu" else "Triton's interpreter runs on the CPU"
    if device.type != "cuda":
        return "Triton's programs run on CUDA devices, or with TRITON_INTERPRET=1 on the CPU"
    if torch.version.hip is not None:
        # A program of theirs has up to 2,048 threads of a block, where the limit is 1,024.
        return "they have not been run on AMD's devices yet"
    return too_old(device)


@functools.cache  # a question to PyTorch takes the host 50 us
def too_old(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"compute capability 8.0 is needed, and this is {capability[0]}.{capability[1]}"
    return ""


@functools.cache
def trial(device: torch.device) -> str:
    """Nothing, where the program of a loss runs, as wide as any and as a head in bfloat16 launches
    it: it needs a C compiler and a folder for what is compiled, which images without either lack,
    and as many threads as a block has."""
    try:
        z_BV, one = torch.zeros(1, WIDEST, device=device), slice(0, 1)
        target, valid = z_BV[:, one].long(), z_BV[0, one] == 0
        rows = LogitsBlock(one, one, z_BV, target, None, valid, None)
        values = LossTerms(z_BV[0, one], NO_SCALARS, None, z_BV.new_empty(7, 1), z_BV.new_empty(1))
        kernels: Any = triton_kernels()(1, WIDEST, z_BV.dtype, device, LogitTransform(WIDEST))
        into = z_BV.view(torch.bfloat16)[:, WIDEST:]
        kernels.loss(rows, WantedStats(), values, DzOutput(into, torch.bfloat16))
    except Exception as error:  # noqa: BLE001 - of a driver, a compiler, a file system
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def triton_kernels() -> type[Kernels]:
    from xentlib.torch.triton.launch import Triton

    return Triton
