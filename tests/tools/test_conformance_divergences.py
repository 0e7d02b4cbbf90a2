"""Other divergences held to the contract: what is right passes, what is wrong is said by name."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest

from xentlib.tools.conformance import (
    DivergenceConformance,
    DivergenceLoss,
    conform_divergence,
)
from xentlib.tools.conformance.given import CASES, NAMES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional

BETA = 0.3
KINDS = ("forward_kl", "reverse_kl", "jsd")
OPTIONS = ("where", "temperature")


def phi(x: Any) -> Any:
    """exp(x) - 1 - x: terms of a divergence that are never negative."""
    return torch.expm1(x) - x


def right(
    student: Any, teacher: Any, where: Any = None, temperature: float = 1.0,
    kind: str = "forward_kl", beta: float = BETA, reduction: str = "none",
) -> Any:  # fmt: skip
    """In float64, which has digits enough; of classes at -inf p is 1e-304."""
    log_s, log_t = ((z.double() / temperature).log_softmax(-1) for z in (student, teacher))
    log_s, log_t = log_s.clamp(min=-700), log_t.clamp(min=-700)
    if kind == "forward_kl":
        terms = log_t.exp() * phi(log_s - log_t)
    elif kind == "reverse_kl":
        terms = log_s.exp() * phi(log_t - log_s)
    else:
        log_ratio = torch.log1p((1 - beta) * torch.expm1(log_s - log_t))  # of the mixture to p_T
        terms = beta * log_t.exp() * phi(log_ratio)
        terms = terms + (1 - beta) * log_s.exp() * phi(log_ratio - (log_s - log_t))
    each = terms.sum(-1).float()
    return reduced(each, where, reduction)


def reduced(each: Any, where: Any, reduction: str) -> Any:
    each = each if where is None else each.masked_fill(~where, 0)
    if reduction == "none":
        return each
    number = len(each) if where is None else where.sum().clamp(min=1)
    return each.sum() / number if reduction == "mean" else each.sum()


def rounded_lse(s: Any, t: Any) -> Any:
    """As it is usually written, in the dtype of the logits."""
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def tail_dropped(s: Any, t: Any) -> Any:
    """Of the teacher's 64 classes of most probability alone."""
    log_s, log_t = (z.double().log_softmax(-1) for z in (s, t))
    log_t, kept = log_t.topk(64)
    return (log_t.exp() * (log_t - log_s.gather(-1, kept))).sum(-1).float()


def found_of(function: Any, **about: Any) -> DivergenceConformance:
    about = {"reduction": "none", "dtypes": ("float32",), **about}
    return conform_divergence(DivergenceLoss("it", "torch", function, **about))


def misses(found: DivergenceConformance) -> set[str]:
    assert not found.result.failed, found.result.failed[0].error
    return {name for name, holds in found.checks.items() if not holds}


def cases_of(found: DivergenceConformance) -> set[str]:
    """In which something is missed."""
    return {m.case.partition(", ")[2] for m in found.result.measurements if not m.passed}


def of_kind(kind: str) -> dict[str, Any]:
    return {"kind": kind, "beta": BETA if kind == "jsd" else None}


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_what_is_right_passes(kind: str, reduction: str) -> None:
    """In each reduction, with each option; as do float32 sums of ours."""
    from xentlib.torch import TeacherLogits, vocab_parallel_divergence

    how = of_kind(kind)

    def exact(s: Any, t: Any, **options: Any) -> Any:
        return right(s, t, **options, kind=kind, reduction=reduction)

    def ours(s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
        teacher = TeacherLogits(t)
        each = vocab_parallel_divergence(s, teacher, where=where, temperature=temperature, **how)
        return reduced(each.loss, where, reduction)

    dtypes = ("float32", "bfloat16", "float16")
    for function in (exact, ours) if reduction == "none" else (exact,):
        found = found_of(function, **how, reduction=reduction, options=OPTIONS, dtypes=dtypes)
        assert misses(found) == set()
        assert found.passed
        assert found.left_out == {}
        assert found.choices == []
        assert [*found.checks] == [*NAMES]
        assert set(found.rows) == {"A0", "A7", "A14", "A16", "A20", "A21", "A22", "A24"}
        assert len(found.result.sections) == len(CASES) + 1


def test_temperature_squared() -> None:
    def squared(s: Any, t: Any, temperature: float = 1.0) -> Any:
        return temperature**2 * right(s, t, temperature=temperature)

    about = {"options": ("temperature",), "temperature_squared": True}
    assert misses(found_of(squared, **about)) == set()


def test_zeros_of_equal_logits_are_no_question_of_bits() -> None:
    """A24 has gradients of exactly 0; 1e-20 does not hold it, and is said, and passes."""

    def plain(s: Any, t: Any) -> Any:
        return right(s, t) + 1e-20 * (s.double() - s.double().detach()).nan_to_num().sum(-1)

    found = found_of(plain)
    assert misses(found) == {"gradient of equal logits"}
    assert not found.rows["A24"]
    assert found.passed
    assert found.choices == ["Its gradients of equal logits are rounded, and not exactly 0."]
    worse = found_of(lambda s, t: plain(s, t) + 1e-6 * (s - s.detach()).sum(-1))
    assert not worse.passed
    assert worse.choices == []


@pytest.mark.jax
def test_a_divergence_in_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def forward(s: Any, t: Any, where: Any = None, temperature: float = 1.0) -> Any:
        # Logits first, as `chunked_divergence` does; what both lse are off by is taken out.
        s, t = s / temperature, t / temperature
        p = jax.nn.softmax(t)
        c = (p * (s - t)).sum(-1, keepdims=True)
        d = s - t - c
        d = d - jnp.log1p((p * jnp.expm1(d)).sum(-1, keepdims=True))
        series = d**2 * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
        each = (p * jnp.where(abs(d) < 0.3, series, jnp.expm1(d) - d)).sum(-1)
        if where is None:
            return each.mean()
        return jnp.where(where, each, 0).sum() / jnp.maximum(where.sum(), 1).astype(each.dtype)

    def hold(function: Any) -> set[str]:
        about: dict[str, Any] = {"options": OPTIONS, "infinite": False, "dtypes": ("float32",)}
        found = conform_divergence(DivergenceLoss("it", "jax", function, **about))
        assert [*found.left_out] == ["logits of -inf"]
        return misses(found)

    assert hold(forward) == set()
    wrong = hold(lambda s, t, where=None, temperature=1.0: forward(s, t, None, temperature))
    assert wrong == {"value", "gradient", "masked tokens", "no valid token"}


# --- what is wrong --------------------------------------------------------------------------------


def in_16_bits(s: Any, t: Any) -> Any:
    return right(s.bfloat16().log_softmax(-1), t.bfloat16().log_softmax(-1))


def nan_where_it_is_tiny(s: Any, t: Any) -> Any:
    each = right(s, t)
    return each.masked_fill((each > 0) & (each < 2e-10), torch.nan)


def gradient_of_no_class(s: Any, t: Any) -> Any:
    """At -inf, where a masked class can have none."""
    if s.requires_grad:
        s.register_hook(lambda g: g.masked_fill(torch.isneginf(s), 1e-3))
    return right(s, t, kind="reverse_kl")


BOTH = {"value", "gradient"}
OF_EQUAL = {"equal logits", "gradient of equal logits"}
# Function, what the adapter says of it, the names that it misses, and rows that are among them.
MUTANTS: dict[str, tuple[Any, dict[str, Any], set[str], set[str]]] = {
    "arguments swapped": (lambda s, t: right(t, s), {}, BOTH, {"A20", "A21", "A22"}),
    "beta turned round": (
        lambda s, t: right(s, t, kind="jsd", beta=1 - BETA),
        of_kind("jsd"),
        BOTH,
        {"A20", "A22"},
    ),
    "the other KL's name": (right, {"kind": "reverse_kl"}, BOTH, {"A20", "A22"}),
    "T^2 missing": (
        lambda s, t, temperature=1.0: right(s, t, temperature=temperature),
        {"options": ("temperature",), "temperature_squared": True},
        BOTH,
        {"A20", "A22"},
    ),
    "T^2 that nobody wants": (
        lambda s, t, temperature=1.0: temperature**2 * right(s, t, temperature=temperature),
        {"options": ("temperature",)},
        BOTH,
        {"A20", "A22"},
    ),
    "temperature of the student alone": (
        lambda s, t, temperature=1.0: right(s / temperature, t),
        {"options": ("temperature",)},
        BOTH,
        {"A20", "A22"},
    ),
    "difference of two rounded lse": (
        rounded_lse,
        {},
        {*BOTH, "never negative", "gradient of equal logits"},
        {"A20", "A21", "A22", "A24"},
    ),
    "the same, clamped at 0": (
        # `clamp` has no gradient at 0 from torch 2.15 on.
        lambda s, t: torch.where((x := rounded_lse(s, t)) < 0, 0.0, x),
        {},
        {*BOTH, "gradient of equal logits"},
        {"A20", "A21", "A22", "A24"},
    ),
    "missing logits at 0": (
        lambda s, t: right(s, t.nan_to_num(neginf=0.0)), {}, BOTH, {"A20", "A22"}
    ),
    "mean for sum": (
        lambda s, t: right(s, t, reduction="mean"), {"reduction": "sum"}, BOTH, {"A20", "A22"}
    ),
    "sum for mean": (
        lambda s, t: right(s, t, reduction="sum"), {"reduction": "mean"}, BOTH, {"A20", "A22"}
    ),
    "mean over classes too": (
        lambda s, t: right(s, t, reduction="mean") / s.shape[-1],
        {"reduction": "mean"},
        BOTH,
        {"A20", "A22"},
    ),
    "softmax in 16 bits": (
        in_16_bits, {}, BOTH, {"A20", "A21", "A22"}
    ),
    "softmax in 16 bits, of 16-bit logits": (
        in_16_bits, {"dtypes": ("bfloat16",)}, BOTH, {"A7", "A20"}
    ),
    "tail dropped": (
        tail_dropped, {}, {*BOTH, "never negative", "gradient of equal logits"}, {"A20", "A24"}
    ),
    "padding counted": (
        lambda s, t, where=None: right(s, t, reduction="mean"),
        {"reduction": "mean", "options": ("where",)},
        {*BOTH, "masked tokens", "no valid token"},
        {"A0", "A20", "A22"},
    ),
    "padding in the divisor": (
        lambda s, t, where=None: right(s, t, where, reduction="sum") / len(s),
        {"reduction": "mean", "options": ("where",)},
        BOTH,
        {"A20", "A22"},
    ),
    "NaN of no valid token": (
        lambda s, t, where=None: right(s, t, reduction="none")[
            slice(None) if where is None else where
        ].mean(),
        {"reduction": "mean", "options": ("where",)},
        {"no valid token"},
        {"A0"},
    ),
    "half of the gradient": (
        lambda s, t: right((s + s.detach()) / 2, t), {}, {"gradient"}, {"A22"}
    ),
    "a constant above": (lambda s, t: right(s, t) + 1e-3, {}, {"value", "equal logits"}, {"A24"}),
    "NaN below 2e-10 nats": (nan_where_it_is_tiny, {}, {"never negative"}, {"A24"}),
    "gradient of a class at -inf": (
        gradient_of_no_class, {"kind": "reverse_kl"}, {"gradient"}, {"A0"}
    ),
    "opposite sign": (lambda s, t: -right(s, t), {}, {*BOTH, "never negative"}, {"A20", "A24"}),
}  # fmt: skip


@cache
def of_mutant(name: str) -> DivergenceConformance:
    function, about, *_ = MUTANTS[name]
    return found_of(function, **about)


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrong_is_said_by_name(name: str) -> None:
    *_, missed, rows = MUTANTS[name]
    found = of_mutant(name)
    assert misses(found) == missed
    assert not found.passed
    assert rows <= {row for row, holds in found.rows.items() if not holds}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("T^2 missing", {"a temperature", "a temperature, near"}),
        ("missing logits at 0", {"logits of -inf"}),
        ("padding in the divisor", {"some tokens masked"}),
        ("NaN of no valid token", {"all tokens masked"}),
        ("NaN below 2e-10 nats", {"logits 1e-05 apart", "logits 1e-07 apart"}),
        ("gradient of a class at -inf", {"logits of -inf"}),
    ],
)
def test_only_the_case_that_it_is_about_is_missed(name: str, where: set[str]) -> None:
    found = of_mutant(name)
    assert cases_of(found) == where
    assert "; ".join(sorted(where)) in str(found)


def test_how_far_off_it_is() -> None:
    """From 0.1 to 1e-7, whatever the rows claim."""
    exact, plain = found_of(right).distances, found_of(rounded_lse).distances
    assert [x.far for x in exact] == [1e-1, 1e-3, 1e-4, 1e-5, 1e-7]
    assert [x.divergence for x in exact] == [x.divergence for x in plain]
    assert 1e-3 < exact[0].divergence < 1e-1
    assert exact[-1].divergence < 1e-13
    assert all(x.value < 1e-6 and x.gradient < 1e-6 and x.negative == 0 for x in exact[:4])
    assert plain[0].value < 1e-2
    assert plain[2].value > 1
    assert plain[2].gradient > 1e-4
    assert plain[2].negative > 2
    found = found_of(rounded_lse)
    assert "1.00e-4" in str(found)
    negative = [m.value for m in found.of("never negative")]
    assert negative[0] == max(negative) > 2


# --- what cannot be run ---------------------------------------------------------------------------


def test_what_it_does_not_have_is_left_out() -> None:
    def few(s: Any, t: Any) -> Any:
        if torch.isinf(t).any():
            raise RuntimeError("a logit of -inf")
        return right(s, t)

    found = found_of(few, infinite=False, version="1.2.3")
    assert found.passed
    assert found.left_out == {
        "logits of -inf": "no logits of -inf",
        "a temperature": "no temperature",
        "a temperature, near": "no temperature",
        "some tokens masked": "no where",
        "all tokens masked": "no where",
    }
    text = str(found)
    assert text.startswith("it, 1.2.3, {'kind': 'forward_kl'}\n")
    assert "\nleft out: all tokens masked, no where\n" in text
    found = found_of(few)
    assert [x.reason for x in found.result.failed] == ["RuntimeError: a logit of -inf"]
    assert not found.passed
    assert all(found.checks.values())


def test_a_16_bit_loss_says_so() -> None:
    found = found_of(rounded_lse, dtypes=("bfloat16",))
    assert found.choices[0] == "In bf16 its loss is a number in bfloat16."
    assert not found.rows["A20"]
    assert found.distances == ()


def test_arguments_of_a_function_that_nobody_can_tell() -> None:
    """They are what its cases say."""

    class Opaque:
        __signature__ = "none"

        def __call__(self, s: Any, t: Any) -> Any:
            return right(s, t)

    with pytest.raises((TypeError, ValueError)):  # the second from Python 3.13 on
        inspect.signature(Opaque())
    assert found_of(Opaque()).passed
