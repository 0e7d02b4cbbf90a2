"""Token-normalised accumulation in PyTorch: `TokenNormalizer` reads the wrapper that it is given
and opens windows, which count once and hand out micro-batches with the wrapper's flags set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from xentlib.accumulate import Lifecycle, UnsupportedWrapperError, WindowState, WindowStateError
from xentlib.checks.validators import check_choice
from xentlib.checks.window import WINDOWS, check_windows
from xentlib.options import EMPTY, MODES, NONFINITE, Empty, Mode, NonFinite
from xentlib.torch.window import Declared, Window


class TokenNormalizer:
    """Make the gradient of a window that of one batch with all its tokens. PyTorch.

        norm = TokenNormalizer(model_or_engine)
        with norm.window(labels=[b["labels"] for b in batches]) as window:
            for batch in window.micro_batches(batches):
                window.backward(chunked_nll(model(batch), head, batch["labels"], reduction="sum"))
        if not window.stats.skipped:
            optimizer.step()                                        # DeepSpeed: engine.step()
        optimizer.zero_grad()

    The data ranks, what the wrapper divides by and whether its own backward divides are read from
    it; a wrapper that cannot be read is refused. `window.micro_batches` sets the flags by which a
    wrapper reduces in the last micro-batch only, and `window.backward` calls the backward that the
    wrapper needs.

    Gradients from before the window stay: pre-count adds to them (and holds a copy until the window
    ends), and an exception in the block takes out only the window's. `mode="postscale"` and
    `nonfinite="drop"` rescale `.grad` as the window closes, so it must be None when one opens.
    DeepSpeed's gradients cannot be put back: call `engine.step()` before the next window.

    Args:
        model_or_engine: the model as it is called: plain, DDP, FSDP2, a DeepSpeed engine, or what
            Accelerate has prepared or Lightning Fabric set up.
        count_group: ranks over which tokens are counted; None for those that gradients are reduced
            over. A larger group holds each data rank's tokens several times, and is divided by
            that number.
        mode: "precount" counts labels before the first micro-batch and scales each loss;
            "postscale" counts what `window.backward` is told and scales the final gradients.
        empty: a window without valid tokens is "skip"ped (`window.stats.skipped`), stepped on with
            gradients that are "zero", or "raise"s.
        accelerator: the `Accelerator` that has prepared the model.
        scaler: a `GradScaler`, whose scale is put on each loss.
        sums: whether DDP's own communication hook adds up instead of averaging.
        scale_wrt_gas: as in DeepSpeed's `engine.backward`.
        nonfinite: a micro-batch whose loss is NaN or inf on any rank is "keep"t, and shows in the
            gradient, or "drop"ped by all ranks with its tokens (`window.stats.dropped`). Dropping
            is for pre-count and takes what post-scale takes: finished gradients are scaled to the
            tokens that are left. One more collective of two numbers in each micro-batch, a pass
            over its gradients, and on several ranks one reading of how many micro-batches each
            has. A gradient that is NaN of a finite loss stays.
        alone: on several ranks, that nobody reduces the gradients of a plain model, and its T is
            that of this rank's tokens. Without it, or a `count_group`, one is refused there.

    Raises:
        UnsupportedWrapperError: a wrapper that cannot be read, or not be scaled in this mode; a
            plain model on several ranks.
        WindowStateError: methods of a window in the wrong order; the module inside of a wrapper
            called in place of the wrapper.
        CountMismatchError: not as many micro-batches as labels; on a CPU, where reading costs
            nothing, labels that are not those that the losses saw: numbers of tokens exactly, sums
            of weights to 1e-6 of the sum of their sizes.

    Numerics: counts are exact up to 2^53; the factor is rounded once, to the loss's dtype. Row A12.
    """

    def __init__(
        self,
        model_or_engine: Any,
        count_group: Any = None,
        mode: Mode = "precount",
        empty: Empty = "skip",
        *,
        accelerator: Any = None,
        scaler: Any = None,
        sums: bool | None = None,
        scale_wrt_gas: bool = True,
        nonfinite: NonFinite = "keep",
        alone: bool = False,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("empty", empty, EMPTY)
        check_choice("nonfinite", nonfinite, NONFINITE)
        WINDOWS.require("precount", nonfinite != "drop" or mode == "precount", mode=mode)
        self.mode, self.empty, self.nonfinite = mode, empty, nonfinite
        self.lifecycle = Lifecycle()
        self.finished: Tensor | None = None  # T of the last window
        self.parts = model_or_engine, accelerator, scaler, sums, scale_wrt_gas
        self.count_group, self.alone = count_group, alone
        self._read()

    def _read(self) -> None:
        """The wrapper as it is now: hooks, factors and accumulation steps may change."""
        from xentlib.torch.wrappers.models import detect_wrapper

        self.wrapper = detect_wrapper(*self.parts)
        self._check_alone()
        self.group = self.wrapper.group if self.count_group is None else self.count_group
        groups = (self.group, self.wrapper.group)
        ranks, data = ([] if x is None else dist.get_process_group_ranks(x) for x in groups)
        if len(ranks or [0]) % self.wrapper.ranks or not set(data) <= set(ranks):
            raise UnsupportedWrapperError(
                f"`count_group` must hold every data rank as often as any other; got ranks "
                f"{ranks} for the data ranks {data or self.wrapper.ranks}. Pass the group that "
                f"gradients are reduced over, or one with all its tensor-parallel copies."
            )
        self.copies = len(ranks or [0]) // self.wrapper.ranks
        refusal = self.wrapper.refusal() if self.scales_at_the_end else ""
        if refusal and self.mode == "postscale":
            raise UnsupportedWrapperError(
                f"`mode` must be 'precount' here; got 'postscale', and {refusal}. "
                f"Use mode='precount'."
            )
        if refusal:
            raise UnsupportedWrapperError(
                f"`nonfinite` must be 'keep' here; got 'drop', which scales finished gradients to "
                f"the tokens that are left, and {refusal}. Use nonfinite='keep'."
            )

    def _check_alone(self) -> None:
        """Refuse a model that seems to be alone on several ranks, and one that only is said to."""
        plain = self.wrapper.reduction.wrapper == "plain"
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        name = type(self.parts[0]).__name__
        if self.alone and not plain:
            raise UnsupportedWrapperError(
                f"`alone` must be False for a {name}, which reduces gradients over ranks; got "
                f"True. Leave it out."
            )
        if self.alone and self.count_group is not None:
            raise UnsupportedWrapperError(
                "`alone` must be False with `count_group`, over whose ranks gradients are reduced; "
                "got True. Leave one of them out."
            )
        if plain and ranks > 1 and not self.alone and self.count_group is None:
            raise UnsupportedWrapperError(
                f"`model` must be the object that reduces gradients over the {ranks} ranks; got a "
                f"{name} that nothing wraps. Pass the DDP, FSDP2 or DeepSpeed object that is "
                f"called, `count_group` if you reduce its gradients yourself, or `alone=True` if "
                f"nobody does."
            )

    @property
    def scales_at_the_end(self) -> bool:
        return self.mode == "postscale" or self.nonfinite == "drop"

    def window(
        self,
        labels: Sequence[Tensor] | None = None,
        *,
        where: Sequence[Tensor] | None = None,
        token_weights: Sequence[Tensor] | None = None,
        ignore_index: int = -100,
        uneven: bool = False,
        filler: Any = None,
    ) -> Window:
        """The window of one optimizer update, for a `with` block.

        Args:
            labels: of all of this rank's micro-batches, after the shift, any shape each, or class
                probabilities as `chunked_nll` takes them; needed in pre-count, refused in
                post-scale, which is told by `window.backward`.
            where: masks of the same shapes; what is 0 is not counted.
            token_weights: of the same shapes; T is the sum over the valid tokens.
            ignore_index: the label that is not counted.
            uneven: ranks may hold different numbers of micro-batches: those that are done go on
                with micro-batches that count nothing. The host reads the count once.
            filler: a micro-batch for a rank that has none; without it the last one is repeated.

        Raises:
            ValueError: labels, masks or weights that the mode does not take, or not as many.
            WindowStateError: another window of this normalizer is open; or DeepSpeed has not
                stepped on the last one.
        """
        check_windows(self.mode, labels, where, token_weights, uneven)
        if self.lifecycle.state is WindowState.IDLE:
            # A window without tokens has gradients of 0, and no step follows it.
            if self.wrapper.unstepped and self.finished is not None and bool(self.finished != 0):
                raise WindowStateError(
                    "`engine.step()` must come before the next window, whose gradients DeepSpeed "
                    "would add to those that are there, and drop with them if it fails; got none. "
                    "Call it, or `abort()` of the last window to drop its gradients."
                )
            self.wrapper.settle()
            self._read()
        declared = None if labels is None else Declared(labels, where, token_weights, ignore_index)
        return Window(self, declared, uneven, filler)
