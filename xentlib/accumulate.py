"""Token-normalised accumulation: what a window's gradient is multiplied by, and when.

A window is the micro-batches of one optimizer update. Its gradient equals that of one batch with
all its tokens: sum over tokens / T, T the weight of the valid tokens of all micro-batches and data
ranks, counted once. What wraps the model delivers

    sum over ranks and micro-batches of (c * d loss_sum) / (D * G)

D its divisor of the sum over ranks, G the engine's division in each backward. So

    pre-count     c = D G / T, on the sum of each micro-batch
    post-scale    D G / (T c0) on the final gradients, c0 what the sums were multiplied by before

T = counted / m, m the copies of a token among the ranks that count: tensor-parallel ranks hold the
same tokens. The number of micro-batches never appears.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from xentlib.options import EMPTY, MODES, NONFINITE, Empty, Mode, NonFinite

__all__ = [
    "EMPTY",
    "MODES",
    "NONFINITE",
    "CountMismatchError",
    "CountOverflowError",
    "Lifecycle",
    "Reduction",
    "TokenNormalizer",
    "UnsupportedWrapperError",
    "WindowState",
    "WindowStateError",
    "WindowStats",
    "accumulate_grads",
    "reduction_of",
    "token_normalized",
]


class UnsupportedWrapperError(TypeError):
    """A wrapper whose reduction cannot be read, or cannot be normalised in the mode asked for."""


class WindowStateError(RuntimeError):
    """A window's methods were called in the wrong order."""


class CountMismatchError(ValueError):
    """The tokens that were declared are not those that the losses saw."""


class CountOverflowError(OverflowError):
    """More tokens than the counter's integers hold."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a wrapper does to gradients.

    Attributes:
        wrapper: its name.
        divisor: D, of the sum over ranks.
        engine: G, the division that its own backward makes.
        refusal: why a finished window cannot be scaled, with the way out; empty where it can.
    """

    wrapper: str
    divisor: Fraction = Fraction(1)
    engine: Fraction = Fraction(1)
    refusal: str = ""

    @property
    def scale(self) -> Fraction:
        """D G: c is this over T."""
        return self.divisor * self.engine


def reduction_of(
    wrapper: str,
    *,
    ranks: int = 1,
    steps: int = 1,
    sums: bool = False,
    divide: float | None = None,
    refusal: str = "",
) -> Reduction:
    """The table of wrappers.

    Args:
        wrapper: "plain", "DDP", "FSDP2" or "DeepSpeed".
        ranks: R, data ranks that gradients are reduced over.
        steps: the number that the engine's backward divides by: gradient accumulation steps of
            Accelerate, or of DeepSpeed unless `scale_wrt_gas=False`.
        sums: the reduction over ranks is a sum: DDP with such a hook, DeepSpeed with
            `gradient_allreduce_op=sum`.
        divide: FSDP2's divide factor where one is set.
        refusal: see `Reduction`.
    """
    if wrapper not in ("plain", "DDP", "FSDP2", "DeepSpeed"):
        raise ValueError(f"`wrapper` must be plain, DDP, FSDP2 or DeepSpeed; got {wrapper!r}.")
    divisor = Fraction(1 if sums or wrapper == "plain" else ranks)
    if divide is not None:
        divisor = Fraction(divide)
    return Reduction(wrapper, divisor, Fraction(steps), refusal)


class WindowStats(NamedTuple):
    """What a finished window was. Arrays of the backend, on its device, until they are read.

    Attributes:
        loss: sum of the losses / T, 0 where T is 0. In JAX of all devices, the loss that is stepped
            on; in PyTorch this rank's share of it (`Window.mean_loss()` adds them up).
        num_tokens: T, or the weight of the tokens where they have weights.
        scale: c, or what the final gradients were multiplied by.
        micro_batches: number of this rank's.
        skipped: whether T is 0 and `empty="skip"`: do not step.
        dropped: number of micro-batches that `nonfinite="drop"` has left out.
    """

    loss: Any
    num_tokens: Any
    scale: Any
    micro_batches: int
    skipped: Any
    dropped: Any = 0


class WindowState(Enum):
    """Of a window, in order."""

    IDLE = "idle"
    COUNTING = "counting"
    OPEN = "open"
    SEALED = "sealed"
    READY = "ready"


# What may be done, in which state, and the state after it.
STEPS: dict[str, dict[WindowState, WindowState]] = {
    "count": {WindowState.IDLE: WindowState.COUNTING},
    "open": dict.fromkeys((WindowState.IDLE, WindowState.COUNTING), WindowState.OPEN),
    "backward": {WindowState.OPEN: WindowState.OPEN},
    "seal": {WindowState.OPEN: WindowState.SEALED},
    "finish": {WindowState.SEALED: WindowState.READY},
    "read": {WindowState.READY: WindowState.READY},
    "close": {WindowState.READY: WindowState.IDLE},
    "abort": dict.fromkeys(WindowState, WindowState.IDLE),
}
WAYS = {
    "count": "Leave the window that is running first, or `abort()` it.",
    "open": "Leave the window that is running first, or `abort()` it.",
    "backward": "Call it inside `with norm.window(...)`, once for each micro-batch that "
    "`window.micro_batches` hands out.",
    "seal": "Take all that `window.micro_batches` hands out inside `with norm.window(...)`.",
    "finish": "Take all that `window.micro_batches` hands out before the block ends.",
    "read": "Read it after the `with` block has ended without an exception.",
    "close": "Leave the block first.",
}


class Lifecycle:
    """The state of a window: IDLE, COUNTING, OPEN, SEALED, READY."""

    def __init__(self) -> None:
        self.state = WindowState.IDLE

    def step(self, action: str, name: str = "") -> None:
        """Do `action`, or raise in the caller's words.

        Raises:
            WindowStateError: not in this state.
        """
        after = STEPS[action].get(self.state)
        if after is None:
            allowed = " or ".join(state.value for state in STEPS[action])
            raise WindowStateError(
                f"`{name or action}` needs a window that is {allowed}; got one that is "
                f"{self.state.value}. {WAYS[action]}"
            )
        self.state = after


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
        raise NotImplementedError("use xentlib.torch.TokenNormalizer")


def accumulate_grads(
    sum_and_count_fn: Any,
    params: Any,
    micro_batches: Any,
    axis_name: Any = None,
    *,
    empty: Literal["skip", "zero"] = "skip",
    nonfinite: NonFinite = "keep",
) -> tuple[WindowStats, Any]:
    """The gradient of a window, in a scan over its micro-batches. JAX, inside `jit`.

        def loss_sum(params, batch):
            hidden = model(params, batch)
            return chunked_nll(hidden, params["head"], batch["labels"], reduction="sum")

        stats, grads = accumulate_grads(loss_sum, params, micro_batches)

    grads = sum over micro-batches and devices of d loss_sum / T.

    Args:
        sum_and_count_fn: (params, micro_batch) to an `NLLOutput` of `reduction="sum"`, which has
            its count and says whether it was divided; or to a pair: [] float32 or float64, the sum
            of a loss over the valid tokens, and their number or their weight.
        params: a pytree of arrays.
        micro_batches: a pytree whose arrays have a leading dimension of micro-batches; one without
            a valid token counts nothing.
        axis_name: mesh axes that tokens are spread over inside `shard_map`; None on global arrays.
            Gradients, count and loss are summed over it once, after the scan.
        empty: with no valid token anywhere gradients are +0, and `stats.skipped` is true for
            "skip", false for "zero".
        nonfinite: a micro-batch whose loss or gradient holds NaN or inf is "keep"t, and shows, or
            "drop"ped with its tokens (`stats.dropped`). All devices of the `shard_map` around
            decide together, with one number in each micro-batch.

    Returns:
        (WindowStats, gradients of the dtypes of `params`).

    Raises:
        ValueError: a loss that `chunked_nll` has divided, or that was divided by its count since,
            as the program shows it, or that is not one number; one without its count. Whether
            another loss is a sum cannot be checked.
        TypeError: a loss or a count of fewer than 32 bits.

    Numerics: sums in float32 at least, multiplied by 1 / T once at the end. T of an `NLLOutput`, or
    of weights, is added up in float32 with what each addition has lost beside it; T of integers is
    int32, NaN where that does not hold it. Row A12.
    """
    raise NotImplementedError("call xentlib.jax.accumulate_grads")


def token_normalized(
    inner: Any,
    empty: Literal["skip", "zero"] = "skip",
    *,
    nonfinite: NonFinite = "keep",
    weighted: bool = False,
) -> Any:
    """An optimizer that steps once in a window, on its token-normalised gradient. JAX, optax.

        tx = token_normalized(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr)))
        updates, state = tx.update(grads_of_the_sum, state, params, token_count=out, is_last=flag)

    `token_count` is the `NLLOutput` whose loss was differentiated, which has its count and says
    whether it was divided; or a count.

    `update` adds up gradients of loss sums and returns updates of zero, until `is_last`: then the
    inner optimizer sees sums / T, once. It does not run in between, so that its step count,
    schedule and moments are those of windows. Clipping inside of it clips the window's gradient.
    An update with gradients of zero, `token_count=0` and `is_last=True` ends a window early.

    Args:
        inner: an optax transformation.
        empty: a window without valid tokens is "skip"ped, the inner state untouched, or stepped on
            with gradients that are "zero".
        nonfinite: a micro-batch whose gradient holds NaN or inf is "keep"t, and shows in the step,
            or "drop"ped with its tokens. Inside `shard_map` all devices decide together, with one
            number in each `update`.
        weighted: the weights of tokens are counted, float32.

    Raises:
        TypeError: a count that is no integer; an `NLLOutput` with weights, where they are not
            counted and can be read; an `optax.MultiSteps` or `optax.apply_every` inside of `inner`.
        ValueError: a loss that `chunked_nll` has divided, or its count; a count that is not one
            number, or below 0, where it can be read; inside `shard_map` with types the count of one
            device.
        CountOverflowError: more than 2^31 - 1 tokens, where the count can be read. A count that
            cannot be read, below 0, too large or of weights, makes the window's gradient NaN.

    Numerics: sums in float32 at least, reset to zeros and never by multiplying. The inner optimizer
    sees their means in that dtype, whatever that of the gradients, and updates leave in the dtypes
    that it gives them. Row A12.
    """
    raise NotImplementedError("call xentlib.jax.token_normalized")
