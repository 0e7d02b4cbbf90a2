"""Both steps of a block with PyTorch's own operators: on any device, in any dtype.

Shapes: B rows of a block, V columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xentlib.math.softmax import BLOCK_COLUMNS, FLOOR, BlockStats, Coefficients, WantedStats
from xentlib.torch.core.device import device_info
from xentlib.torch.core.gemm import add_rows_
from xentlib.torch.core.kernels import DzOutput, Kernels, LogitsBlock, LogitTransform, TargetTerms
from xentlib.torch.core.largest import largest


class Eager(Kernels):
    """See `kernels.Kernels`. Scratch is one [B, V] buffer, and a second for exp on CPU."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, shape: LogitTransform
    ) -> None:
        self.size, self.dtype, self.device, self.shape = (rows, width), dtype, device, shape
        self.scratch_BV: Tensor | None = None
        # The CPU's float32 exp goes to MKL, 30 times slower where the result is subnormal (751
        # ms against 24 ms for 65 M entries). The backward of log_softmax, g - exp(z) * sum(g),
        # has a vectorised exp (0.98 ULP at worst) that is 3 times faster still, and multiplies.
        self.onehot_BV: Tensor | None = None
        if device_info(device).cpu_libraries and dtype == torch.float32:
            self.onehot_BV = torch.zeros(rows, width, dtype=dtype)

    def stats(
        self, rows: LogitsBlock, wanted: WantedStats, *, dz_follows: bool
    ) -> tuple[Tensor, BlockStats]:
        """Steps 2 to 4."""
        z_y = self.prepare(rows, derivative=dz_follows) if rows.fresh else self.take_target(rows)
        return z_y, self.rest_stats(rows.z_BV, rows.y_B1, wanted)

    def dz(
        self, rows: LogitsBlock, lse_B: Tensor, of: Coefficients, out: DzOutput
    ) -> tuple[Tensor, Tensor | None]:
        """Steps 6 and 7."""
        if rows.fresh:
            self.prepare(rows, derivative=True)
        self.dlogits_(rows.z_BV, rows.y_B1, lse_B, of)
        if rows.more is not None and of.more is not None:
            # Of classes elsewhere into the spare column.
            rows.z_BV.scatter_add_(1, rows.more.columns, of.more)
        return self.chained(rows, of.target, out)

    def chained(
        self, rows: LogitsBlock, dz_y_B: Tensor, out: DzOutput
    ) -> tuple[Tensor, Tensor | None]:
        """Step 7 of dz in place of the logits, and of the target's."""
        dz_BV = rows.z_BV[:, : self.shape.columns]
        column_B1 = rows.y_B1
        if rows.owned_B is not None:
            dz_y_B = torch.where(rows.owned_B, dz_y_B, 0.0)
            column_B1 = torch.where(rows.owned_B[:, None], column_B1, 0)
        if self.shape.scalars.softcap is not None and self.shape.columns:
            assert rows.derivative_BV is not None, "`stats` was told that no `dz` follows"
            dz_BV.mul_(rows.derivative_BV)
            dz_y_B = dz_y_B * rows.derivative_BV.gather(1, column_B1)[:, 0]
        if rows.valid_B is not None:
            dz_BV.masked_fill_(~rows.valid_B[:, None], 0.0)
            dz_y_B = torch.where(rows.valid_B, dz_y_B, 0.0)
        sums_V = dz_BV.sum(0) if out.column_sums else None
        if out.with_target:
            # The target's own, or into the spare column.
            rows.z_BV.scatter_(1, rows.y_B1, dz_y_B[:, None])
        rounded = out.round_to is not None and out.round_to != self.dtype
        if rounded or out.into_BV is not None:
            # Through new memory: `into_BV` may lie over other columns of the same rows.
            into_BV = dz_BV if out.into_BV is None else out.into_BV
            into_BV.copy_(dz_BV.to(out.round_to or into_BV.dtype))
        return dz_y_B, sums_V

    @staticmethod
    def add_to_hidden(dx_BH: Tensor, terms: TargetTerms, weight_VH: Tensor) -> None:
        """dx[i] += dz_y[i] weight[y[i]]; a row 0 is found for a `y` that is none, whose dz is 0."""
        y_B = torch.where(terms.y_B < weight_VH.shape[0], terms.y_B, 0)
        dx_BH.addcmul_(terms.dz_y_B[:, None], weight_VH[y_B].to(dx_BH.dtype))

    @staticmethod
    def add_to_weight(acc_VH: Tensor, terms: TargetTerms, x_BH: Tensor) -> None:
        """acc[y[i]] += dz_y[i] x[i]."""
        y_B = torch.where(terms.y_B < acc_VH.shape[0], terms.y_B, 0)
        add_rows_(acc_VH, y_B, terms.dz_y_B[:, None] * x_BH.to(acc_VH.dtype))

    @staticmethod
    def scale(x: Tensor, by: Tensor, out: Tensor) -> None:
        """out = x by."""
        torch.mul(x, by, out=out)

    def prepare(self, rows: LogitsBlock, *, derivative: bool) -> Tensor:
        """The product becomes logits, -inf in the target's column; returns the target's logit."""
        shape, z_BV = self.shape, rows.z_BV[:, : self.shape.columns]
        if shape.bias_V is not None:
            z_BV.add_(shape.bias_V)
        if shape.scale is not None:
            z_BV.mul_(shape.scale)
        if shape.scalars.softcap is not None:
            z_BV.div_(shape.scalars.softcap)
            if derivative:
                # sech^2. 1 - tanh^2 cancels where the cap saturates: at a cap of 0.7 and logits of
                # standard deviation 32 it has no digit left. From exp: where a tensor's end fills
                # no vector `torch.cosh` has other bits, so that chunks showed in d hidden (A10).
                e_BV = z_BV.abs().mul_(-2.0).exp_()
                square_BV = (1.0 + e_BV).square_()
                rows.derivative_BV = e_BV.mul_(4.0).div_(square_BV)
            z_BV.tanh_().mul_(shape.scalars.softcap)
        if rows.temperature_B is not None:
            z_BV.div_(rows.temperature_B[:, None])
        rows.fresh = False
        return self.take_target(rows)

    def take_target(self, rows: LogitsBlock) -> Tensor:
        """Its logit, in whose column -inf is left, as in those of further classes."""
        z_y, taken = rows.z_BV.gather(1, rows.y_B1), [rows.y_B1]
        if rows.more is not None:
            rows.z_more_BK = rows.z_BV.gather(1, rows.more.columns)
            taken.append(rows.more.columns)
        if self.shape.top_k:
            top_BK = largest(rows.z_BV[:, : self.shape.columns], self.shape.top_k)
            rows.top_BK, rows.z_top_BK = top_BK.to(self.dtype), rows.z_BV.gather(1, top_BK)
            taken.append(top_BK)
        for columns in taken:
            rows.z_BV.scatter_(1, columns, -torch.inf)
        return z_y[:, 0]

    def rest_stats(self, z_BV: Tensor, y_B1: Tensor, wanted: WantedStats) -> BlockStats:
        """Step 4. Sums are relative to a block's own maximum, so its largest terms are exact."""
        if not self.shape.columns:
            none = z_BV.new_zeros(1, z_BV.shape[0])
            sum_ed, top = (none if want else None for want in (wanted.entropy, wanted.predicted))
            sum_d = none[0] if wanted.smoothing else None
            return BlockStats(none, none, none, sum_ed, top, sum_d)
        d_BV, parts, top = self.scratch(z_BV), self.by_blocks(z_BV), None
        if wanted.predicted:
            m, top = by_block(*(x.max(2) for x in parts))
            first = torch.arange(0, self.shape.columns, BLOCK_COLUMNS, device=top.device)
            top = (top + first).to(z_BV.dtype)
        else:
            (m,) = by_block(*((x.amax(2),) for x in parts))
        m = torch.where(m == -torch.inf, 0.0, m)  # no other column, or none above -inf
        sum_d = None
        if wanted.smoothing:
            torch.sub(z_BV, m.amax(1, keepdim=True), out=d_BV)
            sum_d = self.sum_of_rest(d_BV, y_B1)
        d_BV[:, self.shape.columns :] = -torch.inf
        m_of_parts = m.split([x.shape[1] for x in parts], 1)
        for part, into, m_Bb in zip(parts, self.by_blocks(d_BV), m_of_parts, strict=True):
            torch.sub(part, m_Bb[..., None], out=into)
        e_BV = torch.empty_like(d_BV) if wanted.entropy else d_BV
        self.scaled_exp(d_BV, y_B1, 1.0, e_BV)
        sum_ed = None
        if wanted.entropy:
            sum_ed = self.sums(d_BV.clamp_(min=FLOOR).mul_(e_BV))
        everything, s = self.sums(e_BV), self.sums(e_BV.frac_())
        ones = (everything - s).round_()
        return BlockStats(m.T, ones, s, sum_ed, None if top is None else top.T, sum_d)

    def exp(self, x_BV: Tensor) -> Tensor:
        """Of every entry, by the same operations wherever it stands."""
        if self.onehot_BV is None or not x_BV.shape[1]:
            return torch.exp(x_BV)
        backward = torch.ops.aten._log_softmax_backward_data
        g_BV = self.onehot_BV[: x_BV.shape[0], : x_BV.shape[1]]
        g_BV[:, 0] = -1.0
        e_BV: Tensor = backward(g_BV, x_BV, 1, x_BV.dtype)
        g_BV[:, 0] = 0.0
        # g stands beside the exp of the first column, which is made once more.
        own_B2 = backward(
            g_BV.new_tensor([[0.0, -1.0]]).expand(x_BV.shape[0], 2).contiguous(),
            x_BV[:, :1].repeat(1, 2),
            1,
            x_BV.dtype,
        )
        e_BV[:, :1] = own_B2[:, :1]
        return e_BV

    def by_blocks(self, x_BV: Tensor) -> list[Tensor]:
        """Views [B, blocks, columns of each]: of whole blocks, and of what is left."""
        x_BV = x_BV[:, : self.shape.columns]
        whole = x_BV.shape[1] // BLOCK_COLUMNS * BLOCK_COLUMNS
        parts = x_BV[:, :whole].unflatten(1, (-1, BLOCK_COLUMNS)), x_BV[:, None, whole:]
        return [x for x in parts if x.shape[1] * x.shape[2]]

    def sums(self, x_BV: Tensor) -> Tensor:
        """Over the columns of each block: [blocks, B]."""
        (sums,) = by_block(*((x.sum(2),) for x in self.by_blocks(x_BV)))
        return sums.T

    def sum_of_rest(self, d_BV: Tensor, y_B1: Tensor) -> Tensor:
        """Over the classes other than the target, each times its weight."""
        rest_BV = d_BV.scatter(1, y_B1, 0.0)[:, : self.shape.columns]
        weights_V = self.shape.class_weights_V
        return (rest_BV if weights_V is None else rest_BV * weights_V).sum(1)

    def dlogits_(self, z_BV: Tensor, y_B1: Tensor, lse_B: Tensor, of: Coefficients) -> None:
        """Step 6: logits with -inf in the target column become dz, 0 in that column."""
        z_BV.sub_(lse_B[:, None])
        if of.beta is None:
            self.scaled_exp(z_BV, y_B1, of.alpha[:, None], z_BV)
        else:
            p_BV = self.scratch(z_BV)
            self.scaled_exp(z_BV, y_B1, 1.0, p_BV)
            # The floor: p = 0 times a log p of -inf must be 0.
            z_BV.clamp_(min=FLOOR).mul_(of.beta[:, None]).add_(of.alpha[:, None]).mul_(p_BV)
        if of.gamma is None:
            return
        if self.shape.class_weights_V is None:
            z_BV.sub_(of.gamma[:, None])
        else:
            z_BV[:, : self.shape.columns].addr_(of.gamma, self.shape.class_weights_V, alpha=-1.0)
        z_BV.scatter_(1, y_B1, 0.0)

    def scaled_exp(
        self, z_BV: Tensor, y_B1: Tensor, scale_B1: Tensor | float, out_BV: Tensor
    ) -> None:
        """out = scale * exp(z); 0 in the target column, whose logit must be -inf or 0."""
        if self.onehot_BV is None:
            torch.exp(z_BV, out=out_BV)
            out_BV.mul_(scale_B1)
        else:
            g_BV = self.onehot_BV[: z_BV.shape[0]]
            minus = (
                -scale_B1 if isinstance(scale_B1, Tensor) else z_BV.new_full(y_B1.shape, -scale_B1)
            )
            g_BV.scatter_(1, y_B1, minus)
            torch.ops.aten._log_softmax_backward_data.out(g_BV, z_BV, 1, z_BV.dtype, out=out_BV)
            g_BV.scatter_(1, y_B1, 0.0)
        out_BV.scatter_(1, y_B1, 0.0)

    def scratch(self, like_BV: Tensor) -> Tensor:
        """Rows of the one buffer that every block writes to, made when a block first needs it."""
        if self.scratch_BV is None:
            self.scratch_BV = torch.empty(*self.size, dtype=self.dtype, device=self.device)
        return self.scratch_BV[: like_BV.shape[0]]


def by_block(*parts: tuple[Tensor, ...]) -> list[Tensor]:
    """[B, blocks] of each number, of all parts."""
    return [x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*parts, strict=True)]
