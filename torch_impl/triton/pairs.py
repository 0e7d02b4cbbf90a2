"""Divergences by Triton's programs: a chunk's rows in one launch, and nothing of the size of logits
beside those of student and teacher.

Shapes: B rows of a chunk, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from xentlib.checks.divergence import of_teacher
from xentlib.math.divergence import DzTerms
from xentlib.math.softmax import BLOCK_COLUMNS, TargetInfo, TokenStats, WantedStats
from xentlib.torch.core.kernels import DIVERGENCES_IN_TRITON, LogitsBlock
from xentlib.torch.core.precomputed import LogitsGradient
from xentlib.torch.losses.pairs import KernelPair, LogitsTeacher, PairedLogits, Unit, UnitValues
from xentlib.torch.triton import pair_programs
from xentlib.torch.triton.launch import DTYPES, Triton, device_of, options


class TritonPairs(PairedLogits):
    """A student's logits and a teacher's, which nothing is written to before dz."""

    # Of the tokens of a unit: lse of both and delta
    known: tuple[Tensor, Tensor, Tensor | None]

    def kernels(self) -> KernelPair:
        kernels: Any = (self.student.kernels(), self.teacher.kernels())
        pair_kernels: KernelPair = kernels
        return pair_kernels

    def stats_of(
        self, part: Any, rows: LogitsBlock, kernels: Any, wanted: WantedStats, *, learns: bool
    ) -> TokenStats:
        """Steps 2 to 5 of `xentlib.nll`, of one head's logits."""
        algebra = Triton.algebra
        z_y, rest = kernels.stats(rows, wanted, dz_follows=learns)
        owned = rows.owned_B
        owned = torch.ones_like(z_y, dtype=torch.bool) if owned is None else owned
        most = z_y.shape[0] if part.gathered else part.tokens.valid.shape[0]
        z_y, together = part.vocab.combine(algebra, z_y, owned, rest, 1.0, most)
        label = TargetInfo(rows.y_B1[:, 0], 1.0, 1.0)
        stats: TokenStats = algebra.token_stats(z_y, together, part.vocab.size, label)
        return stats

    def values(self, unit: Unit, kernels: KernelPair, *, tempered_nll: bool = False) -> UnitValues:
        """Steps 2 to 5."""
        ((rows, teacher),) = unit.pairs
        kind, wanted = self.kind, self.wanted
        labels = self.labels_of(rows, kernels[0]) if tempered_nll else None
        student = self.stats_of(self.student, rows, kernels[0], wanted[0], learns=True)
        self.check_classes()
        with of_teacher():
            other = self.stats_of(self.teacher, teacher, kernels[1], wanted[1], learns=False)
        delta = torch.zeros_like(student.lse)
        self.known = student.lse, other.lse, None
        if kind.twice:
            delta = kind.delta(*self.summed([self.sums_of(unit, kernels, first=True)]))
            self.known = student.lse, other.lse, delta
        totals = kind.named(self.summed([self.sums_of(unit, kernels)]))
        value, dz = kind.from_sums(totals)
        per_token = value, student.logprob, student.entropy, other.entropy
        labels = student if labels is None else labels
        known, none = (student.lse, other.lse, delta, labels.lse), torch.zeros_like(value)
        of_labels = labels.logprob, [labels.lse]
        return UnitValues(value, none, per_token, *of_labels, known, dz, totals.total)

    def recompute(
        self, unit: Unit, kernels: KernelPair, known_4N: Tensor, *, tempered_nll: bool = False
    ) -> list[Tensor]:
        """Nothing, but for what is known of the tokens."""
        lse, other, delta, of_labels = known_4N[:, unit.token_index]
        self.known = lse, other, delta if self.kind.twice else None
        return [of_labels]

    def labels_of(self, rows: LogitsBlock, kernels: Any) -> TokenStats:
        """Statistics of the student's logits before their temperature."""
        temperature_B, rows.temperature_B = rows.temperature_B, None
        stats = self.stats_of(self.student, rows, kernels, WantedStats(), learns=True)
        rows.temperature_B = temperature_B
        return stats

    def block_sums(
        self, unit: Unit, kernels: KernelPair, known: Sequence[Tensor], *, first: bool
    ) -> Any:
        """Step 4 from lse of both, and delta."""
        lse, other, *more = known
        self.known = lse, other, more[0] if more else None
        return self.sums_of(unit, kernels, first=first)

    def sums_of(self, unit: Unit, kernels: KernelPair, *, first: bool = False) -> Tensor:
        """[k, blocks, B] of the terms of step 4, of those that delta needs if `first`."""
        ((rows, _),) = unit.pairs
        count, columns = rows.z_BV.shape[0], self.student.local_size
        number = 2 if first else sum(self.kind.sums)
        blocks = max(1, triton.cdiv(columns, BLOCK_COLUMNS))
        make = rows.z_BV.new_empty if columns else rows.z_BV.new_zeros
        sums: Tensor = make(number, blocks, count, dtype=torch.float32)
        self.launch(
            pair_programs.pair_sums, unit.pairs[0], kernels, slice(None), sums_ptr=sums,
            blocks=blocks, T=count, FIRST=first,
        )  # fmt: skip
        return sums

    def write(
        self,
        part: Any,
        dz: DzTerms,
        target: Tensor | None,
        p: Tensor | None,
        kernels: KernelPair,
        sums: Any,
    ) -> None:
        """Steps 6 and 7: dz in place of the logits, the target's with it; `p` is the lse of the
        student's logits at temperature 1, for the NLL term."""
        rows, teacher, at = part
        if isinstance(sums, LogitsGradient):
            self.write_gradient(part, dz, kernels, sums.d_logits)
            return
        bias = sums.needs[2] and bool(self.student.local_size)
        out = sums.output(rows, column_sums=bias)
        into_BV = rows.z_BV[:, : self.student.local_size] if out.into_BV is None else out.into_BV
        more: dict[str, Any] = {"gain_ptr": dz.gain.contiguous(), "own_ptr": target}
        more["shift_ptr"] = dz.shift.contiguous()
        more["lse_y_ptr"] = None if p is None else p.contiguous()
        if bias:
            # Sums of what is not rounded: it goes through the teacher's logits, of a caller not.
            whole_BV = teacher.z_BV[:, : self.student.local_size]
            if isinstance(self.teacher, LogitsTeacher):
                whole_BV = torch.empty_like(whole_BV, dtype=torch.float32)
            self.put(part, kernels, at, whole_BV, torch.float32, **more)
            sums.bias.add_(whole_BV.sum(0))
            into_BV.copy_(whole_BV.to(out.round_to))
        else:
            self.put(part, kernels, at, into_BV, out.round_to, **more)
        sums.in_column(rows)

    def write_gradient(self, part: Any, dz: DzTerms, kernels: KernelPair, d_logits: Tensor) -> None:
        """Steps 6 and 7, into the gradient of precomputed logits."""
        token_index = part[0].token_index
        into_BV = whole_BV = d_logits[token_index, self.columns]
        if into_BV.stride(1) != 1:
            into_BV = torch.empty_like(into_BV, memory_format=torch.contiguous_format)
        more: dict[str, Any] = {"gain_ptr": dz.gain, "shift_ptr": dz.shift}
        more |= {"own_ptr": None, "lse_y_ptr": None}
        self.put(part, kernels, part[2], into_BV, d_logits.dtype, **more)
        if into_BV is not whole_BV or not isinstance(token_index, slice):
            d_logits[token_index, self.columns] = into_BV

    def put(
        self, part: Any, kernels: KernelPair, at: slice, into_BV: Tensor, dtype: Any, **more: Any
    ) -> None:
        more |= {"dz_ptr": into_BV, "ld_dz": into_BV.stride(0), "ROUND": DTYPES[dtype]}
        self.launch(pair_programs.pair_dz, part[:2], kernels, at, **more)

    def launch(
        self, program: Any, pair: Sequence[LogitsBlock], kernels: Any, at: slice, **more: Any
    ) -> None:
        """With the logits of both, and what is known of these tokens."""
        rows, columns = pair[0], self.student.local_size
        if not rows.z_BV.shape[0] or not columns:
            return
        lse, other, delta = (None if x is None else x[at].contiguous() for x in self.known)
        left_out = None if delta is None else torch.expm1(-delta)
        student, teacher = (
            kernel.of(x) | kernel.shape_of(x) for kernel, x in zip(kernels, pair, strict=True)
        )
        with device_of(rows.z_BV):
            program[(rows.z_BV.shape[0],)](
                s_ptr=student["z_ptr"], ld_s=student["ld"], y_ptr=student["y_ptr"],
                t_ptr=teacher["z_ptr"], ld_t=teacher["ld"],
                valid_ptr=student["valid_ptr"], V=columns,
                **prefixed("s", student), **prefixed("t", teacher),
                lse_s_ptr=lse, lse_t_ptr=other, delta_ptr=delta, left_out_ptr=left_out,
                beta=self.kind.beta, KIND=DIVERGENCES_IN_TRITON.index(self.kind.name),
                **more, **pair_options(columns, self.kind.name),
            )  # fmt: skip


def pair_options(columns: int, kind: str) -> dict[str, Any]:
    """Lanes of a program. Of a JSD half as many: with 16 entries a thread registers are spilled."""
    how = options(columns)
    if kind == "jsd":
        how["BLOCK"] = max(BLOCK_COLUMNS, how["BLOCK"] // 2)
    return how


def prefixed(whose: str, args: dict[str, Any]) -> dict[str, Any]:
    """What step 2 makes of the logits of one of the two."""
    return {
        f"{whose}_bias_ptr": args["bias_ptr"],
        f"{whose}_scale_ptr": args["scale_ptr"],
        f"{whose}_softcap": args["softcap"],
        f"{whose}_temperature_ptr": args["temperature_ptr"],
        f"ld_{whose}_temperature": args["ld_temperature"],
    }
