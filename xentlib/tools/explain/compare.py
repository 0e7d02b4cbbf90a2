"""`explain`: from arrays to the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from xentlib.checks.explain import check_array, check_explained
from xentlib.checks.validators import plain
from xentlib.interop import to_numpy
from xentlib.tools.explain.readings import Array, Problem, Reading, Values, runs
from xentlib.tools.explain.report import Effect, Ratios, Report, Side
from xentlib.tools.explain.search import Chosen, Search, without

# Arguments, the first four required; a file has them by these names.
ARRAYS = (
    *("hidden", "weight", "ids", "sampler_logprobs"),
    *("bias", "kept_ids", "old_weight", "trainer_logprobs"),
)
NUMBERS = ("temperature", "logit_scale", "softcap", "top_p", "top_k", "vocab_size")
# Logits that the difference is computed from, and tokens at the least.
LOGITS, LEAST = 1 << 25, 256


def explain(
    hidden: Any,
    weight: Any,
    ids: Any,
    sampler_logprobs: Any,
    *,
    bias: Any = None,
    temperature: float | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    kept_ids: Any = None,
    old_weight: Any = None,
    trainer_logprobs: Any = None,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
) -> Report:
    """Which causes explain that a sampler's log-probabilities are not what a trainer computes.

    The right log-probability of token t, in float64, over the classes v < vocab_size that are kept:

        z_tv  = softcap tanh(logit_scale (x_t w_v + b_v) / softcap) / temperature
        log p = z_t,ids[t] - logsumexp_v z_tv

    The sampler's, and the trainer's if they are given, are compared with it and, where they differ
    by more than float32 rounding, with what each cause and each pair of causes would give. Arrays
    are NumPy's, torch tensors on any device or JAX arrays; nothing is written to. With [B, L] in
    place of [N] rows are sequences, over whose ends no shift goes.

    Args:
        hidden: [N, H], float32, bfloat16, float16 or float64; the input of the head that predicts
            `ids[t]`, in the dtype that it was given in.
        weight: [V, H], the head, of any of these dtypes.
        ids: [N] integers, the sampled tokens.
        sampler_logprobs: [N], natural logarithms, in the dtype that the sampler returned.
        bias: [V], of the head.
        temperature: number that divides the logits, 1 if None.
        logit_scale: number that multiplies them, 1 if None.
        softcap: bound of the logits, none if None.
        top_p: nucleus that the softmax is restricted to, after `top_k`: the fewest classes that
            have this probability.
        top_k: number of classes that the softmax is restricted to.
        kept_ids: [N, K] integers, the classes of the softmax, -1 where a row has fewer; a row of -1
            alone is the whole vocabulary. Prefer it to `top_p`, whose last class is a matter of
            rounding.
        old_weight: [V, H], a head that the sampler may have used instead.
        trainer_logprobs: [N], of the same tokens; the ratios are then theirs to the sampler's.
        vocab_size: classes of the tokenizer, where the head has rows of padding beyond them.
        max_tokens: how many tokens to use, in runs that are spread evenly; None for as many as make
            2^25 logits, 256 at least.

    Returns:
        A `Report`. `str` of it is the text; `passed` says that nothing differs.

    Raises:
        TypeError: ids that are no integers, or arrays that are not floating point.
        ValueError: shapes that do not match, ids outside of the vocabulary, log-probabilities that
            are not finite or positive, a temperature of 0.
    """
    given = dict(locals())
    arrays = {name: _on_host(name, given[name]) for name in ARRAYS if given[name] is not None}
    numbers = {name: plain(given[name]) for name in (*NUMBERS, "max_tokens")}
    check_explained(arrays, numbers)
    problem = _problem(arrays, numbers)
    most = numbers["max_tokens"] or max(LEAST, LOGITS // len(arrays["weight"]))
    search = Search(problem, runs(len(problem.ids), most))
    right = search.all.of(())
    names = [name for name in ("sampler", "trainer") if f"{name}_logprobs" in arrays]
    of = {x: arrays[f"{x}_logprobs"].reshape(-1)[search.all.at].astype(np.float64) for x in names}
    sides, removals = [], []
    for name, sampled in of.items():
        side, removed = _side(name, sampled, right, search)
        sides.append(side)
        removals += removed
    sampler, trainer = of["sampler"], of.get("trainer", right.logprobs)
    ratios = [_ratios("nothing", trainer - sampler)]
    for _, whose, title, effect in sorted(removals, key=lambda x: -x[0]):
        if whose == "sampler":
            sampler = sampler - effect
        else:
            trainer = trainer - effect
        title += ", of the trainer" * (whose == "trainer")  # noqa: PLW2901
        ratios.append(_ratios(title, trainer - sampler))
    vocab, width = arrays["weight"].shape
    return Report(
        len(search.all.at), len(problem.ids), vocab, width, tuple(sides), tuple(ratios),
        tuple(search.looked_for), search.not_looked_for,
    )  # fmt: skip


def _on_host(name: str, x: Any) -> Array:
    array = to_numpy(x.detach().cpu()) if hasattr(x, "detach") else np.asarray(x)
    check_array(name, x, array.dtype.name)
    return array


def _problem(arrays: dict[str, Array], numbers: dict[str, Any]) -> Problem:
    hidden, weight, ids = (arrays[name] for name in ("hidden", "weight", "ids"))
    right = Reading(
        logit_scale=float(numbers["logit_scale"] or 1.0),
        softcap=numbers["softcap"],
        temperature=float(numbers["temperature"] or 1.0),
        classes=(numbers["vocab_size"] or len(weight), 0),
    )
    kept = arrays.get("kept_ids")
    return Problem(
        hidden.reshape(-1, hidden.shape[-1]),
        {name: arrays[name] for name in ("weight", "old_weight") if name in arrays},
        ids.reshape(-1).astype(np.int64),
        right,
        ids.shape[-1],
        arrays.get("bias"),
        None if kept is None else kept.reshape(-1, kept.shape[-1]).astype(np.int64),
        numbers["top_k"],
        numbers["top_p"],
    )


def _side(
    name: str, sampled: Array, right: Values, search: Search
) -> tuple[Side, list[tuple[float, str, str, Array]]]:
    """What explains these log-probabilities; and each cause of it with its size, whose it is, its
    title and its effect on every token."""
    gap = np.abs(sampled - right.logprobs)
    units = float((gap / right.tolerance).max())
    sets, whole = ([], True) if units <= 1.0 else search.explaining(sampled)
    described, removals, left = [], [], gap
    for k, chosen in enumerate(sets):
        effects = _effects(chosen, search)
        described.append(tuple(effect for effect, _ in effects))
        if k == 0:
            removals = [(effect.mean, name, effect.title, moved) for effect, moved in effects]
            left = np.abs(sampled - search.all.of(chosen).logprobs)
    size, most, rest = float(gap.mean()), float(gap.max()), float(np.nanmean(left))
    noise = None if whole else search.one_rounding()
    return Side(name, size, most, units, tuple(described), whole, rest, noise), removals


def _effects(chosen: Chosen, search: Search) -> list[tuple[Effect, Array]]:
    """Of each cause, the largest first: the first beside the others, the last one alone, so that
    they add up."""
    sizes = {}
    for form in chosen:
        size = np.abs(_between(search, without(chosen, form), chosen))
        size = size[~np.isnan(size)]
        sizes[form] = (float(size.mean()), float(size.max())) if len(size) else (0.0, 0.0)
    order = sorted(chosen, key=lambda form: -sizes[form][0])
    effects = []
    for k, form in enumerate(order):
        cause, moved = form.cause, _between(search, tuple(order[k + 1 :]), tuple(order[k:]))
        effect = Effect(cause.name, form.words, cause.sentence, cause.page, *sizes[form])
        effects.append((effect, moved))
    return effects


def _between(search: Search, one: Chosen, other: Chosen) -> Array:
    """How far each token is moved; NaN where one of both has no class for it."""
    with np.errstate(invalid="ignore"):
        moved = search.all.of(other).logprobs - search.all.of(one).logprobs
    return np.where(np.isfinite(moved), moved, np.nan)


def _ratios(removed: str, difference: Array) -> Ratios:
    ratio = np.exp(difference[~np.isnan(difference)])  # a shift leaves some out
    outside = (ratio < 0.9) | (ratio > 1.1)
    return Ratios(removed, float(outside.mean()), float(np.abs(ratio - 1).max()))
