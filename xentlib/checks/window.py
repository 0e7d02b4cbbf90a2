"""Windows of accumulation, and evaluations: what is counted, and what is added up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xentlib.accumulate import CountOverflowError
from xentlib.checks.validators import ArraySpec, check_choice
from xentlib.dtypes import INT32, INTEGERS
from xentlib.options import NONFINITE


def check_windows(
    mode: str, labels: object, where: object, token_weights: object, uneven: object
) -> None:
    """Validate what a window of `TokenNormalizer` counts."""
    if mode == "precount" and labels is None:
        raise ValueError(
            "`labels` must be the labels of all micro-batches, after the shift; got None. Pass "
            "`norm.window(labels=[...])`, or use mode='postscale'."
        )
    if mode == "postscale":
        given = {"labels": labels, "where": where, "token_weights": token_weights}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` cannot be passed with mode='postscale', which counts tokens in "
                    f"`window.backward`. Pass `num_tokens` there, or use mode='precount'."
                )
        if uneven:
            raise ValueError(
                "`uneven` must be False with mode='postscale'; got True. Use "
                "mode='precount', whose collective says how many micro-batches each rank has."
            )
        return
    number = len(labels)  # type: ignore[arg-type]
    for name, value in (("where", where), ("token_weights", token_weights)):
        if value is not None and len(value) != number:  # type: ignore[arg-type]
            raise ValueError(
                f"`{name}` must have one entry for each of the {number} micro-batches; got "
                f"{len(value)}. Pass a list like `labels`."  # type: ignore[arg-type]
            )


def check_nonfinite(nonfinite: object, mode: str) -> None:
    """Validate what a window does with a micro-batch that is NaN or inf."""
    check_choice("nonfinite", nonfinite, NONFINITE)
    if nonfinite == "drop" and mode != "precount":
        raise ValueError(
            f"`mode` must be 'precount' with nonfinite='drop', whose collective says that all "
            f"ranks have as many micro-batches to decide on; got {mode!r}. Use mode='precount'."
        )


def check_rounds(numbers: Sequence[int]) -> None:
    """Refuse ranks that would wait for each other."""
    if min(numbers) != max(numbers):
        raise ValueError(
            f"`uneven` must be True with nonfinite='drop', which all ranks decide together in each "
            f"micro-batch, where they have different numbers; got {min(numbers)} to "
            f"{max(numbers)}. Pass `norm.window(..., uneven=True)`."
        )


def check_counted(labels: ArraySpec, where: ArraySpec | None, weights: ArraySpec | None) -> None:
    """Validate what is counted of one micro-batch: nothing is broadcast."""
    if isinstance(labels, ArraySpec) and labels.dtype not in INTEGERS:
        raise TypeError(
            f"`labels` must be integers; got {labels.dtype}. Pass the labels, not a mask of them."
        )
    for name, given in (("labels", labels), ("where", where), ("token_weights", weights)):
        if given is not None and not isinstance(given, ArraySpec):
            raise TypeError(
                f"`{name}` must be a tensor for each micro-batch; got {type(given).__name__}. Pass "
                f"`[torch.as_tensor(x) for x in {name}]`."
            )
        if given is not None and given.shape != labels.shape:
            raise ValueError(
                f"`{name}` must have the shape of its labels, {labels.shape}; got {given.shape}. "
                f"Pass `{name}.expand_as(labels)`, if that is what you mean."
            )


def check_loss_sum(loss: object, divided: bool, instead: str) -> None:
    """Validate a loss that a window adds up; `instead` is the way out for one that is no sum."""
    if not isinstance(loss, ArraySpec) or loss.shape != ():
        came = f"shape {loss.shape}" if isinstance(loss, ArraySpec) else type(loss).__name__
        raise ValueError(
            f"`loss` must be one number, the sum over this rank's valid tokens; got {came}. Pass "
            f"`loss.sum()`, or an NLLOutput of reduction='sum'."
        )
    if loss.dtype not in ("float32", "float64"):
        raise TypeError(
            f"`loss` must be float32 or float64; got {loss.dtype}, in which a sum is rounded, and "
            f"its factor too. Add up the losses in float32."
        )
    if divided:
        raise ValueError(
            f"`loss` must be a sum over tokens; got one that `chunked_nll` has divided. {instead}"
        )


def check_undivided(divided: bool) -> None:
    """Refuse a sum of `chunked_nll` that its caller has divided."""
    if divided:
        raise ValueError(
            "`loss` must be the sum as `chunked_nll` returns it; got one that was divided by its "
            "number of tokens since. Pass the `NLLOutput`, or its loss as it is."
        )


def check_as_made(written: bool) -> None:
    """Refuse an output whose loss is no longer that of its tokens."""
    if written:
        raise ValueError(
            "`loss` must be an `NLLOutput` as `chunked_nll` returns it; got one whose loss was "
            "written to since, as `torch.distributed.all_reduce` does. Log a copy, "
            "`out.loss.detach().clone()`."
        )


def check_denominator_of_window(same: bool) -> None:
    """Refuse a loss that was divided by something else than it is said to be."""
    if not same:
        raise ValueError(
            "`loss` must have been divided by `window.denominator` with normalized=True; got one "
            "that was not. Pass `denominator=window.denominator` to `chunked_nll`, or its sum "
            "without `normalized`."
        )


def check_token_count(
    name: str, count: object, value: object, weighted: bool, loss: object = None
) -> None:
    """Validate the tokens of one micro-batch, integers unless they may be `weighted`.

    `value` and `loss` are None where reading them costs something.
    """
    if count is None:
        raise ValueError(
            f"`{name}` must be given with a loss that is no `NLLOutput`; got None. Pass the "
            f"`NLLOutput` itself, which has its count and says whether it is a sum, or the "
            f"weight of the valid tokens."
        )
    if not isinstance(count, ArraySpec) or count.shape != ():
        came = f"shape {count.shape}" if isinstance(count, ArraySpec) else type(count).__name__
        raise ValueError(
            f"`{name}` must be one number, the weight of the valid tokens; got {came}. Add it up."
        )
    integer = count.dtype in (*INTEGERS, "uint64")
    if not integer and count.dtype not in ("float32", "float64"):
        raise TypeError(
            f"`{name}` must be a number, an integer or float32; got {count.dtype}. Add up the mask "
            f"as integers, or weights in float32."
        )
    if not isinstance(value, (int, float)):
        return
    if not -math.inf < value < math.inf:
        raise ValueError(
            f"`{name}` must be finite; got {value}. Look for NaN in what it is the sum of."
        )
    if weighted and not integer:
        return
    if value < 0:
        raise ValueError(
            f"`{name}` must be the number of valid tokens, 0 or more; got {value}. Count the "
            f"labels that the loss sees."
        )
    if value == 0 and isinstance(loss, float) and loss != 0 and math.isfinite(loss):
        raise ValueError(
            f"`{name}` must be the number of tokens that the loss is the sum of; got 0 and a loss "
            f"of {loss:g}. Count the labels that the loss sees."
        )


def check_own_count(value: object, number: object, weight: object) -> None:
    """Refuse a count that is not that of the loss it is given with; None where it is not read.

    Tokens with weights may be divided by anything, and 0 leaves a batch out.
    """
    if not isinstance(value, (int, float)) or not isinstance(number, (int, float)):
        return
    if number == weight and value not in (0, number):
        raise ValueError(
            f"`num_tokens` must be the number of tokens that `chunked_nll` has counted for this "
            f"loss, {number:.15g}; got {value:.15g}. Pass the `NLLOutput` alone, which has its "
            f"count, or count the labels after the shift that are not ignored."
        )


def check_one_loss(given: Sequence[str]) -> str:
    """By what name a batch of an evaluation has its loss: one, no more."""
    if len(given) != 1:
        came = " and ".join(f"`{name}`" for name in given) or "none"
        raise TypeError(
            f"`Evaluation.add` must have one of `loss`, `loss_sum` and `loss_mean`; got {came}. "
            f"Pass the `NLLOutput` alone."
        )
    return given[0]


def check_named_loss(named: bool) -> None:
    """Refuse one number of which nobody knows whether it is a sum."""
    if not named:
        raise ValueError(
            "`loss` must be an `NLLOutput`, which says whether it is a sum; got one number, which "
            "may be a mean. Pass the output itself, or `loss_sum=` or `loss_mean=` with "
            "`num_tokens`."
        )


def check_loss_mean(is_mean: bool) -> None:
    """Refuse a loss as a mean that `chunked_nll` has not divided by its own count."""
    if not is_mean:
        raise ValueError(
            "`loss_mean` must be a mean over its tokens; got a loss that `chunked_nll` has not "
            "divided by their number. Pass `loss_sum=` for a sum, and reduction='sum' to "
            "`chunked_nll` in place of a `denominator`."
        )


def check_integer_count(name: str, count: ArraySpec) -> None:
    """Refuse a sum of weights where tokens are counted in int32."""
    if count.dtype not in (*INTEGERS, "uint64"):
        raise TypeError(
            f"`{name}` must be an integer; got {count.dtype}. Pass the number of valid tokens, or "
            f"token_normalized(..., weighted=True) for a sum of weights."
        )


def check_window_count(so_far: object, more: object) -> None:
    """Refuse a count that int32 does not hold, where it can be read."""
    before = so_far if isinstance(so_far, int) else 0
    if isinstance(more, int) and before + more > INT32:
        raise CountOverflowError(
            f"`token_count` must leave the window's count below 2^31; got {before} and {more} "
            f"more. End the window earlier, or count weights in float32."
        )


def check_count_of_all(axes: Sequence[str]) -> None:
    """Refuse the count of one device of a `shard_map`, by the mesh axes over which it varies."""
    if axes:
        over = axes[0] if len(axes) == 1 else tuple(axes)
        raise ValueError(
            f"`token_count` must be the count of all devices; got one that varies over {over!r}, "
            f"each device's own. Pass `jax.lax.psum(out.num_tokens, {over!r})` of the sum's output."
        )


def check_count_of_sum(of_sum: bool) -> None:
    """Refuse the count of a loss that `chunked_nll` has divided, beside gradients of it."""
    if not of_sum:
        raise ValueError(
            "`token_count` must be the count of a sum, whose gradients come with it; got the count "
            "of a loss that `chunked_nll` has divided. Pass reduction='sum' to it, and "
            "`token_count=out`."
        )


def check_single_accumulation(multi_steps: bool, apply_every: bool) -> None:
    """Refuse an optimizer that accumulates by itself inside of one that does."""
    if multi_steps:
        raise TypeError(
            "`token_normalized` must be in place of `optax.MultiSteps`; got an optimizer with one "
            "inside of it, which would hold back the step and take the mean of windows' means. "
            "Pass the optimizer that `optax.MultiSteps` wraps, and `is_last` where a window ends."
        )
    if apply_every:
        raise TypeError(
            "`token_normalized` must be in place of `optax.apply_every`; got an optimizer with one "
            "inside of it, which would hold back the step and add up windows' means. Leave it out "
            "of the chain, and pass `is_last` where a window ends."
        )


def check_outermost(nested: bool) -> None:
    """Refuse an optimizer that has `token_normalized` inside of it: it would be told no count."""
    if nested:
        raise TypeError(
            "`token_normalized` must be around the whole optimizer; got one inside of another "
            "transformation, which hands on no `token_count`. Pass `token_normalized(optax.chain("
            "...))`, with options of `token_normalized` there."
        )


def check_token_normalized(made: bool) -> None:
    """Refuse an optimizer that would take no notice of a count."""
    if not made:
        raise TypeError(
            "`tx` must be token-normalised; got another optimizer, which takes no notice of a "
            "`token_count` and would step on the sum. Make the state with `TrainState.create`, or "
            "pass `tx=token_normalized(tx)`."
        )
