"""What `explain` is given: hidden states, head, sampled ids and their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xentlib.checks.validators import (
    ArraySpec,
    Refusals,
    check_floating,
    check_integers,
    check_number,
    is_count,
)

Array = NDArray[Any]
# A log-probability of float32 may be above 0 by so much.
ABOVE = 1e-5
EXPLAINED_TYPES = Refusals(
    TypeError,
    array="`{name}` must be an array; got {kind}. Pass its numbers, of a module `head.weight`.",
    ids="`{name}` must be integers, token ids; got {dtype}. Pass `{name}` as int64.",
)
EXPLAINED = Refusals(
    ValueError,
    hidden="`hidden` must have shape [N, H] or [B, L, H], one hidden state for each token; got "
    "{shape}. Pass what the head is given, before its product.",
    no_tokens="`hidden` must have at least one token; got shape {shape}. Pass some that were "
    "sampled.",
    head="`{name}` must have shape [V, {width}] to match `hidden` {hidden}; got {shape}. {way}",
    tokens="`{name}` must have shape {leading}, one entry for each token of `hidden`; got {shape}. "
    "{way}",
    head_bias="`bias` must have shape ({vocab_size},), an entry for each row of `weight`; got "
    "{shape}. Pass the bias of this head, or leave it out.",
    old="`old_weight` must have the shape of `weight`, {expected}; got {shape}. Pass the same "
    "head at another step.",
    kept_shape="`kept_ids` must have shape {leading} and one dimension more, the ids that are kept "
    "for each token, -1 where there are fewer; got {shape}. Pad its rows with -1.",
    id_range="`ids` must lie in [0, {vocab_size}); got {offender} at token {token}. Leave out "
    "padding and prompts: pass sampled tokens alone.",
    kept_range="`kept_ids` must lie in [0, {vocab_size}), or be -1 where a row has fewer; got "
    "{offender} at token {token}. Pad its rows with -1.",
    not_kept="`kept_ids` must have each sampled id; got a row without {offender} at token {token}. "
    "Pass the ids that were kept where this token was sampled, or -1 alone for all.",
    no_number="`{name}` must be finite; got {offender} in row {token}. Look for what made it.",
    finite="`{name}` must be finite; got {offender} at token {token}. Leave out tokens that were "
    "not sampled; none that was has a probability of 0.",
    probabilities="`{name}` must be log-probabilities, 0 or less; got {offender} at token {token}, "
    "and nothing below 0: these are probabilities. Pass their logarithms.",
    positive="`{name}` must be log-probabilities, 0 or less; got {offender} at token {token}. Pass "
    "log-probabilities as they are: not negated, and no logits.",
    greedy="`temperature` must be a positive number; got 0, greedy sampling. Pass the temperature "
    "that the log-probabilities were computed with, 1 if none was.",
    kind="'{path}' must end with .npz or .safetensors. Save the arrays with `numpy.savez` or "
    "`safetensors`.",
    damaged="'{path}' must be a {kind} file; it could not be read: {error}. Save it again.",
    missing="'{path}' must have the arrays {names}; it lacks {missing}, and has {there}. Save them "
    "under these names.",
    unknown="'{path}' must have no arrays but {names}; it has {unknown} too. Leave them out, or "
    "rename them.",
)


def _spec(x: Array) -> ArraySpec:
    return ArraySpec(x.shape, x.dtype.name)


def check_array(name: str, x: object, dtype: str) -> None:
    """Of anything, and the dtype that NumPy gives it."""
    EXPLAINED_TYPES.require("array", dtype != "object", name=name, kind=type(x).__name__)


def check_explained(arrays: Mapping[str, Array], numbers: Mapping[str, Any]) -> None:
    """Of a call of `explain`: the arrays that it was given, and its options, None by default."""
    hidden, weight = arrays["hidden"], arrays["weight"]
    leading, vocab_size = hidden.shape[:-1], weight.shape[0] if weight.ndim else 0
    for name in arrays.keys() - {"ids", "kept_ids"}:
        check_floating(name, _spec(arrays[name]))
    EXPLAINED.require("hidden", hidden.ndim >= 2 and hidden.shape[-1], shape=hidden.shape)
    EXPLAINED.require("no_tokens", hidden.size, shape=hidden.shape)
    _check_head(weight, hidden)
    for name in ("ids", "sampler_logprobs", "trainer_logprobs"):
        if name in arrays:
            _check_tokens(name, arrays[name].shape, leading)
    if "bias" in arrays:
        shape = arrays["bias"].shape
        EXPLAINED.require("head_bias", shape == (vocab_size,), vocab_size=vocab_size, shape=shape)
    if "old_weight" in arrays:
        shape = arrays["old_weight"].shape
        EXPLAINED.require("old", shape == weight.shape, expected=weight.shape, shape=shape)
    for name, value in numbers.items():
        _check_option(name, value, vocab_size)
    _check_ids(arrays, numbers.get("vocab_size") or vocab_size)
    for name in arrays.keys() - {"ids", "kept_ids", "sampler_logprobs", "trainer_logprobs"}:
        x = arrays[name]
        _check_all("no_number", name, x, np.isfinite(x), x.shape[-1] if x.ndim > 1 else 1)
    for name in arrays.keys() & {"sampler_logprobs", "trainer_logprobs"}:
        x = arrays[name]
        _check_all("finite", name, x, np.isfinite(x))
        kind = "probabilities" if (x >= 0).all() and (x <= 1).all() else "positive"
        _check_all(kind, name, x, x <= ABOVE)


def _check_head(weight: Array, hidden: Array) -> None:
    width = hidden.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != width or not weight.size:
        turned = weight.ndim == 2 and weight.shape[0] == width
        way = (
            "Pass `weight.T`, or hidden states where `hidden` has logits."
            if turned
            else "Pass the head of the model that made them."
        )
        shapes = {"width": width, "hidden": hidden.shape, "shape": weight.shape}
        EXPLAINED.refuse("head", name="weight", way=way, **shapes)


def _check_tokens(name: str, shape: tuple[int, ...], leading: tuple[int, ...]) -> None:
    way = "Pass the same tokens in each."
    if shape and shape[:-1] == leading[:-1] and abs(shape[-1] - leading[-1]) == 1:
        way = "A hidden state goes with the id after it: `hidden[:-1]` with `ids[1:]`."
    EXPLAINED.require("tokens", shape == leading, name=name, leading=leading, shape=shape, way=way)


def _check_ids(arrays: Mapping[str, Array], vocab_size: int) -> None:
    ids = arrays["ids"]
    for name in ("ids", "kept_ids"):
        if name in arrays:
            dtype = arrays[name].dtype.name
            EXPLAINED_TYPES.require("ids", "float" not in dtype, name=name, dtype=dtype)
            check_integers(name, _spec(arrays[name]), "Cast it to int64.")
    _check_all("id_range", "ids", ids, (ids >= 0) & (ids < vocab_size), vocab_size=vocab_size)
    if "kept_ids" in arrays:
        kept = arrays["kept_ids"]
        right = kept.ndim == ids.ndim + 1 and kept.shape[:-1] == ids.shape
        EXPLAINED.require("kept_shape", right, leading=ids.shape, shape=kept.shape)
        inside = (kept >= -1) & (kept < vocab_size)
        _check_all("kept_range", "kept_ids", kept, inside, kept.shape[-1], vocab_size=vocab_size)
        inside = (kept == ids[..., None]).any(axis=-1) | (kept < 0).all(axis=-1)
        _check_all("not_kept", "kept_ids", ids, inside)


def _check_all(
    message: str, name: str, x: Array, right: Array, width: int = 1, **more: object
) -> None:
    """Refuse by the first entry that is not right, `width` of them to a token or row."""
    wrong = np.flatnonzero(~right)
    if len(wrong):
        offender = x.reshape(-1)[wrong[0]].item()
        token = int(wrong[0]) // width
        EXPLAINED.refuse(message, name=name, offender=offender, token=token, **more)


def _check_option(name: str, value: Any, vocab_size: int) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "temperature":
        EXPLAINED.require("greedy", not number or value != 0)
    if name in ("top_k", "vocab_size", "max_tokens"):
        most = vocab_size if name == "vocab_size" else np.inf
        rule = f"an integer, 1 to {most}" if name == "vocab_size" else "an integer, 1 or more"
        check_number(name, value, rule, ok=is_count(value) and value <= most)
    elif name == "top_p":
        check_number(name, value, "a number in (0, 1]", ok=number and 0 < value <= 1)
    else:
        check_number(name, value, "a positive number", ok=number and 0 < value < np.inf)
