"""The seam of `core.kernels` answered by Triton programs: a chunk's rows in one launch.

Shapes: B rows (of a chunk, all of them), V columns, H hidden width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from xentlib.math.softmax import (
    BLOCK_COLUMNS,
    Algebra,
    BlockStats,
    BlockSums,
    Coefficients,
    NonTargetStats,
    TargetInfo,
    TokenStats,
    WantedStats,
    weighted,
)
from xentlib.torch.core.algebra import ALGEBRA, InSlices
from xentlib.torch.core.gemm import add_rows_
from xentlib.torch.core.kernels import (
    DzOutput,
    LogitsBlock,
    LogitTransform,
    LossTerms,
    TargetTerms,
    stats_in,
)
from xentlib.torch.triton import class_programs, programs
from xentlib.torch.triton.elementary import INTERPRETED, scale

# 16 entries a thread are four loads of 128 bits, and of 256 threads three or four programs fit
# into a multiprocessor. A warp has four blocks of columns in any row: one order of sums.
WARPS, THREADS_A_WARP, ENTRIES = 8, 32, 16
# A loss with its gradient and without options, whose programs take 54 to 64 registers: of one
# program a multiprocessor more of the row is still in L2 when it is read again, and an H100 needs
# 1.68 ms for 4,096 x 128,256 logits where 8 warps take 1.85. Options would spill registers.
WIDE = 32
INTERPRETED_TILE = 256  # so that short rows have several tiles too
# Of column sums: 16 rows of 128 columns are a tile of 8 KiB, read in lines of 512 bytes.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 16, 128, 8
HIDDEN_BLOCK = 1024
FURTHER = 32  # further classes of a token at a time, each with each
SCALE_BLOCK, SCALE_WARPS = 4096, 8
# Blocks' statistics are added for 32 tokens, neighbours in memory, in a tile of 16 blocks.
BLOCKS_AT_ONCE, TOKENS_AT_ONCE, ADDING_WARPS = 16, 32, 4
NOTHING_ELSE = WantedStats()
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def options(columns: int, warps: int = WARPS) -> dict[str, Any]:
    """Lanes of a program that reads a row of so many columns, and how it is compiled."""
    of_warp = BLOCK_COLUMNS if INTERPRETED else THREADS_A_WARP * ENTRIES
    largest = INTERPRETED_TILE * warps // WARPS if INTERPRETED else warps * of_warp
    block = min(largest, max(of_warp, triton.next_power_of_2(columns)))
    return {"BLOCK": block, **compiled(block // of_warp)}


def compiled(warps: int) -> dict[str, Any]:
    """Contraction to fused multiply-adds would undo error-free transformations."""
    return {} if INTERPRETED else {"num_warps": warps, "enable_fp_fusion": False}


class Programs(InSlices):
    """Step 5 of tokens, as `loss_rows` has it."""

    __slots__ = ()

    def part_sums(self, m: Tensor, blocks: BlockStats) -> tuple[BlockSums, Tensor | None]:
        """`InSlices.part_sums`."""
        count, tokens = blocks.m.shape
        words = m.new_empty(4 if blocks.sum_ed is not None else 2, tokens, dtype=torch.float64)
        out, sums, top = m.new_empty(2, tokens), tuple[Any, ...](blocks[:4]), blocks.top
        if len({x.stride() for x in sums if x is not None}) > 1:
            sums = dense(*sums)
        strides = (*sums[0].stride(), *((0, 0) if top is None else top.stride()))
        if tokens:
            with device_of(m):
                programs.add_blocks[(triton.cdiv(tokens, TOKENS_AT_ONCE),)](
                    *sums, top, *strides, count, m.contiguous(), out, words, tokens,
                    K=BLOCKS_AT_ONCE, TOKENS=TOKENS_AT_ONCE, **compiled(ADDING_WARPS),
                )  # fmt: skip
        sum_ed = None if blocks.sum_ed is None else words[2:]
        return BlockSums(out[0], words[:2], sum_ed), None if blocks.top is None else out[1]

    def token_stats(
        self, z_y: Tensor, rest: NonTargetStats, vocab_size: int, label: TargetInfo
    ) -> TokenStats:
        """`Algebra.token_stats`."""
        tokens, out = len(z_y), z_y.new_empty(8, len(z_y))
        weight, total = (label.weight, label.total) if weighted(label) else (None, None)
        if tokens:
            with device_of(z_y):
                programs.stats_of_tokens[(triton.cdiv(tokens, TOKENS_AT_ONCE),)](
                    *dense(z_y, *rest, label.target, weight), total, out, tokens, vocab_size,
                    TOKENS=TOKENS_AT_ONCE, **compiled(1),
                )  # fmt: skip
        lse, logprob, p_y, p_rest, entropy, correct, mean_logp, predicted = out
        return TokenStats(
            lse, logprob, p_y, p_rest, entropy,
            None if rest.sum_d is None else mean_logp, correct,
            None if rest.top is None else predicted,
        )  # fmt: skip


def dense(*tensors: Any) -> tuple[Any, ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)


class Triton:
    """See `kernels.FusedLoss`. No scratch but for statistics of blocks, and the logits are read
    only: dz may be written anywhere that `write_dz` allows."""

    whole_chunks: ClassVar[bool] = True
    spare_column: ClassVar[bool] = False
    sorted_targets: ClassVar[bool] = True
    fused_loss: ClassVar[bool] = True
    algebra: ClassVar[Algebra] = Programs(*ALGEBRA)

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, shape: LogitTransform
    ) -> None:
        bias_V, weights_V = shape.bias_V, shape.class_weights_V
        self.device = device
        self.shape = shape._replace(
            bias_V=None if bias_V is None else bias_V.contiguous(),
            class_weights_V=None if weights_V is None else weights_V.contiguous(),
        )

    def stats(
        self, rows: LogitsBlock, wanted: WantedStats, *, dz_follows: bool
    ) -> tuple[Tensor, BlockStats]:
        """Steps 2 to 4."""
        if rows.more is not None:
            self.take_out(rows, keep=True)
        four, top = rows.stats_Bb4, None
        if four is None:
            blocks_BFb = self.blocks_of(rows, wanted)
            four = blocks_BFb[:, :4].flatten(1).unflatten(1, (-1, 4))
            top = blocks_BFb[:, 4].T if wanted.predicted else None
        tokens = four.new_empty(1 + wanted.smoothing, len(four))
        self.launch(
            programs.stats_rows, rows, **self.shape_of(rows), tokens_ptr=tokens,
            ld_tokens=tokens.stride(0), blocks_ptr=four, ld_blocks=four.stride(0),
            blocks=four.shape[1],
            ENTROPY=wanted.entropy, SMOOTHING=wanted.smoothing, PREDICTED=wanted.predicted,
            **options(self.shape.columns),
        )  # fmt: skip
        return tokens[0], stats_in(four, wanted, top, tokens[1] if wanted.smoothing else None)

    def dz(
        self, rows: LogitsBlock, lse_B: Tensor, of: Coefficients, out: DzOutput
    ) -> tuple[Tensor, Tensor | None]:
        """Steps 6 and 7."""
        if rows.more is not None:
            self.take_out(rows, keep=False)
        sums_V = self.column_sums(rows, lse_B, of) if out.column_sums else None
        dz_y_B = torch.empty_like(lse_B) if out.dz_y_B is None else out.dz_y_B
        self.launch(
            programs.dz_rows, rows, **self.shape_of(rows), **self.written(rows, out),
            lse_ptr=lse_B, alpha_ptr=of.alpha, beta_ptr=of.beta, gamma_ptr=of.gamma,
            own_ptr=of.target, dz_y_ptr=dz_y_B, TARGET=out.with_target,
            ROUND_TARGET=out.dz_y_B is not None,
            **options(self.shape.columns),
        )  # fmt: skip
        if of.more is not None and self.shape.columns:
            self.put_further(rows, of.more, out, sums_V)
        return dz_y_B, sums_V

    def loss(self, rows: LogitsBlock, wanted: WantedStats, terms: LossTerms, out: DzOutput) -> None:
        """Steps 2 to 7."""
        into: dict[str, Any] = {"dz_ptr": None, "ld_dz": 0, "ROUND": tl.float32, "IN_PLACE": False}
        if terms.dz_y_B is not None:
            into = self.written(rows, out)
        wide = terms.dz_y_B is not None and self.plain(rows, wanted)
        blocks_BFb = self.blocks_of(rows, wanted)
        how = options(self.shape.columns, WIDE if wide else WARPS)
        self.launch(
            programs.loss_rows, rows, **self.shape_of(rows), **into, factor_ptr=terms.factor_B,
            weights_sum_ptr=terms.weights_sum, blocks_ptr=blocks_BFb, blocks=blocks_BFb.shape[2],
            values_ptr=terms.values_7B,
            ld_values=terms.values_7B.stride(0), dz_y_ptr=terms.dz_y_B,
            label_smoothing=terms.scalars.label_smoothing,
            z_loss=terms.scalars.z_loss or None,
            ENTROPY=wanted.entropy,
            SMOOTHING=wanted.smoothing, PREDICTED=wanted.predicted,
            GRADIENT=terms.dz_y_B is not None, **how,
        )  # fmt: skip

    def column_sums(self, rows: LogitsBlock, lse_B: Tensor, of: Coefficients) -> Tensor:
        """Before `dz` overwrites the logits: 4 bytes a logit more, for a gradient of the bias."""
        count, columns = rows.z_BV.shape[0], self.shape.columns
        sums_V = rows.z_BV.new_empty(columns, dtype=torch.float32)
        of_block = self.of(rows) | self.shape_of(rows)
        with device_of(self.device):
            programs.column_sums[(triton.cdiv(columns, SUM_COLUMNS),)](
                **of_block, lse_ptr=lse_B, alpha_ptr=of.alpha, beta_ptr=of.beta, gamma_ptr=of.gamma,
                out_ptr=sums_V, T=count, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS,
                **compiled(SUM_WARPS),
            )  # fmt: skip
        return sums_V

    @staticmethod
    def add_to_hidden(dx_BH: Tensor, terms: TargetTerms, weight_VH: Tensor) -> None:
        """dx[i] += dz_y[i] weight[y[i]]."""
        rows, width = terms.dz_y_B.shape[0], dx_BH.shape[1]
        with device_of(dx_BH):
            programs.add_to_hidden[(rows, triton.cdiv(width, HIDDEN_BLOCK))](
                dx_BH, dx_BH.stride(0), terms.dz_y_B, terms.y_B, weight_VH, *weight_VH.stride(),
                weight_VH.shape[0], width, BLOCK=HIDDEN_BLOCK, **compiled(4),
            )  # fmt: skip

    @staticmethod
    def add_to_weight(acc_VH: Tensor, terms: TargetTerms, x_BH: Tensor) -> None:
        """acc[y[i]] += dz_y[i] x[i], a label's tokens in ascending order."""
        rows, width = terms.dz_y_B.shape[0], x_BH.shape[1]
        with device_of(acc_VH):
            programs.add_to_weight[(rows, triton.cdiv(width, HIDDEN_BLOCK))](
                acc_VH, *acc_VH.stride(), terms.dz_y_B, terms.y_B, terms.order_B, terms.first, x_BH,
                x_BH.stride(0), rows, acc_VH.shape[0], width, BLOCK=HIDDEN_BLOCK, **compiled(4),
            )  # fmt: skip

    @staticmethod
    def scale(x: Tensor, by: Tensor, out: Tensor) -> None:
        """out = x by. PyTorch's own product rounds to 16 bits at half the rate of memory: d weight
        of Llama-3 8B took an H100 2.3 ms, where 6 bytes an entry are 1.1."""
        if out.dtype not in DTYPES or not (x.is_contiguous() and out.is_contiguous()):
            torch.mul(x, by, out=out)
        elif x.numel():
            same = x.data_ptr() == out.data_ptr()
            with device_of(x):
                scale[(triton.cdiv(x.numel(), SCALE_BLOCK),)](
                    x, by, out, x.numel(), ROUND=DTYPES[out.dtype], IN_PLACE=same,
                    BLOCK=SCALE_BLOCK, **compiled(SCALE_WARPS),
                )  # fmt: skip

    # Further classes: their columns are left at -inf, which programs take for no class, where no
    # softcap or scale of either sign makes something else of it

    def take_out(self, rows: LogitsBlock, *, keep: bool) -> None:
        """-inf into their columns; `keep`: their logits beforehand, 0 of those elsewhere."""
        columns_BK = self.further(rows)
        z_more_BK = torch.empty_like(columns_BK, dtype=torch.float32) if keep else None
        if columns_BK.numel():
            shape = self.shape_of(rows)
            self.launch(
                class_programs.take_out_rows, rows, bias_ptr=shape["bias_ptr"],
                temperature_ptr=shape["temperature_ptr"], ld_temperature=shape["ld_temperature"],
                columns_ptr=columns_BK, K=columns_BK.shape[1], z_more_ptr=z_more_BK,
                TILE=FURTHER, **compiled(1),
            )  # fmt: skip
        rows.z_more_BK = z_more_BK

    def put_further(
        self, rows: LogitsBlock, dz_BK: Tensor, out: DzOutput, sums_V: Tensor | None
    ) -> None:
        """dz of further classes into their columns. One that is named twice has its sum, rounded
        once."""
        columns_BK, dz_BK = self.further(rows), dz_BK.contiguous()
        if columns_BK.numel():
            self.launch(
                class_programs.put_rows, rows, **self.written(rows, out), columns_ptr=columns_BK,
                K=columns_BK.shape[1], dz_more_ptr=dz_BK, TILE=FURTHER, **compiled(1),
            )  # fmt: skip
        if sums_V is not None:
            here_BK = (columns_BK >= 0) & (columns_BK < len(sums_V)) & (columns_BK != rows.y_B1)
            at_BK, dz_BK = (torch.where(here_BK, x, 0) for x in (columns_BK, dz_BK))
            add_rows_(sums_V, at_BK.flatten(), dz_BK.flatten())

    @staticmethod
    def further(rows: LogitsBlock) -> Tensor:
        assert rows.more is not None
        return rows.more.columns.contiguous()

    # Arguments of the programs

    def launch(self, program: Any, rows: LogitsBlock, **more: Any) -> None:
        if rows.z_BV.shape[0]:
            with device_of(self.device):
                program[(rows.z_BV.shape[0],)](**self.of(rows), **more)

    def blocks_of(self, rows: LogitsBlock, wanted: WantedStats) -> Tensor:
        """[B, fields, blocks] of `BlockStats`, as `scan_row` writes them."""
        columns, fields = self.shape.columns, 4 + wanted.predicted
        size = (rows.z_BV.shape[0], fields, max(1, triton.cdiv(columns, BLOCK_COLUMNS)))
        make = rows.z_BV.new_empty if columns else rows.z_BV.new_zeros
        return make(size, dtype=torch.float32)

    def of(self, rows: LogitsBlock) -> dict[str, Any]:
        assert rows.z_BV.stride(1) == 1 or self.shape.columns <= 1, "programs read dense rows"
        valid_B = None if rows.valid_B is None else rows.valid_B.view(torch.uint8)
        return {
            "z_ptr": rows.z_BV,
            "ld": rows.z_BV.stride(0),
            "y_ptr": rows.y_B1,
            "valid_ptr": valid_B,
            "V": self.shape.columns,
        }

    def shape_of(self, rows: LogitsBlock) -> dict[str, Any]:
        shape, temperature_B = self.shape, rows.temperature_B
        return {
            "bias_ptr": shape.bias_V,
            "scale_ptr": shape.scale,
            "softcap": shape.scalars.softcap,
            "weights_ptr": shape.class_weights_V,
            "temperature_ptr": temperature_B,
            "ld_temperature": 0 if temperature_B is None else temperature_B.stride(0),
        }

    def plain(self, rows: LogitsBlock, wanted: WantedStats) -> bool:
        """Whether a row's program has no option that takes registers."""
        shaped = (*self.shape[1:3], self.shape.class_weights_V, rows.temperature_B)
        return (
            wanted == NOTHING_ELSE
            and self.shape.scalars.softcap is None
            and all(x is None for x in shaped)
        )

    def written(self, rows: LogitsBlock, out: DzOutput) -> dict[str, Any]:
        into_BV = rows.z_BV if out.into_BV is None else out.into_BV
        same = into_BV.untyped_storage().data_ptr() == rows.z_BV.untyped_storage().data_ptr()
        return {
            "dz_ptr": into_BV,
            "ld_dz": into_BV.stride(0),
            "ROUND": DTYPES[out.round_to or into_BV.dtype],
            "IN_PLACE": same,
        }


def device_of(where: Tensor | torch.device) -> Any:
    """A launch goes to the current device, wherever its tensors are. NumPy, which interprets, warns
    of infinities that a device computes without a word."""
    device = where.device if isinstance(where, Tensor) else where
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")
