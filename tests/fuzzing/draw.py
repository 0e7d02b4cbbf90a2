"""Cases, each drawn from a seed and its number alone, and their arrays.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.ulp import dtype_named

PERIOD = 128
FUNCTIONS = ("chunked_nll", "chunked_logprobs", "vocab_parallel_logprobs")
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Drawn:
    """One case: what is called, with what, and by whom."""

    number: int
    seed: int
    function: str
    case: Case
    backends: tuple[str, ...] = ("torch", "jax")
    leading: int = 0  # a dimension put before the tokens, of which it is a divisor
    offset: float = 0.0  # of all logits, by the bias where there is a head
    ties: bool = False
    masked: float = 0.0  # share of the classes that are at `mask`
    mask: float = -np.inf
    poison: bool = False  # NaN in what is ignored
    chunk: int | None = None
    audit: bool = False
    used: tuple[bool, ...] = (True, True, True)  # outputs with a gradient
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        shown = [f"{self.function} on {'+'.join(self.backends)}, {self.case.text}"]
        names = ("leading", "offset", "ties", "poison", "chunk", "audit")
        shown += [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        if self.masked:
            shown.append(f"{self.masked:.0%} at {self.mask:g}")
        if self.function != "chunked_nll":
            shown.append(f"used={''.join('01'[u] for u in self.used)}")
        return " ".join(shown)


def number32(x: float) -> float:
    """A number that float32 has, so that both backends and the oracle compute with the same."""
    return float(np.float32(x))


def draw(seed: int, number: int) -> Drawn:
    """Case `number` of a seed."""
    shared = number % 2 == 0
    form = np.random.default_rng([seed, 0, number // PERIOD] if shared else [seed, 1, number])
    data = np.random.default_rng([seed, 2, number])

    def chance(rng: np.random.Generator, share: float) -> bool:
        return bool(rng.random() < share)

    # What a compiler must know.
    function = str(form.choice(list(FUNCTIONS), p=[0.5, 0.25, 0.25]))
    head, nll = function != "vocab_parallel_logprobs", function == "chunked_nll"
    tokens = int(form.integers(0 if head else 1, 72) if chance(form, 0.85) else 200)
    vocab = int(form.integers(1, 300) if chance(form, 0.9) else form.integers(1000, 5000))
    if chance(form, 0.1):
        vocab = int(form.integers(1, 5))
    leading = int(form.integers(1, 5)) if tokens and chance(form, 0.3) else 0
    tokens = tokens // leading * leading if tokens >= leading > 0 else tokens
    leading = leading if tokens >= leading else 0
    dtype = str(form.choice(DTYPES))
    audit = dtype != "float64" and chance(form, 0.25)
    options: dict[str, Any] = {}
    reduction = str(form.choice(["mean", "sum"]))
    denominator = nll and chance(form, 0.2)
    if nll:
        options["reduction"] = reduction
    if nll and chance(form, 0.25):
        options["z_loss"] = number32(10 ** form.uniform(-5, -1.5))
    if function != "chunked_logprobs" and chance(form, 0.3):
        options["label_smoothing"] = float(form.choice([0.1, 0.3, 1.0]))
    if head and chance(form, 0.25):
        options["softcap"] = number32(10 ** form.uniform(-0.3, 1.7))
    scaled, heated = head and chance(form, 0.3), chance(form, 0.2)
    used = tuple(chance(form, 0.6) for _ in range(3))
    case = Case(
        str(number),
        tokens,
        int(form.integers(1, 72)) if head else tokens,
        vocab,
        bias=head and chance(form, 0.5),
        where=chance(form, 0.3),
        token_weights=nll and chance(form, 0.3),
        class_weights=nll and chance(form, 0.25),
        token_temperature=chance(form, 0.25),
        layout="HV" if head and chance(form, 0.3) else "VH",
        dtype=dtype,
    )
    if chance(form, 0.15):
        options["ignore_index"] = int(form.choice([-1, 0]))
    # What it need not.
    if scaled:
        sign = -1 if chance(data, 0.2) else 1
        options["logit_scale"] = number32(sign * 10 ** data.uniform(-0.7, 0.5))
    if heated:
        options["temperature"] = number32(10 ** data.uniform(-0.5, 0.5))
    if denominator:
        options["denominator"] = number32(10 ** data.uniform(-1, 5))
    plain = chance(data, 0.4)  # within the contract's data
    std = 10 ** (data.uniform(-0.5, 0.75) if plain else data.uniform(-3, 1.78))
    drawn = Drawn(
        number,
        seed,
        function,
        replace(
            case,
            std=float(std),
            ignored=float(data.choice([0.0, 0.2, 0.2, 0.7] if plain else [0.0, 0.3, 0.9, 1.0])),
            confident=float(data.choice([0.0, 0.5] if plain else [0.0, 0.5, 1.0])),
            options=options,
        ),
        ("torch", "jax") if shared else ("torch",),
        leading,
        chunk=int(form.choice([8, 16, 40, 64])) if chance(form, 0.5) else None,
        audit=audit,
        used=used if any(used) else (True, False, False),
        poison=chance(data, 0.2),
    )
    if plain:
        return drawn
    can_offset, can_mask = case.bias or not head, "label_smoothing" not in options
    can_mask &= "softcap" not in options and options.get("logit_scale", 1.0) > 0
    lowest = -1e300 if dtype == "float64" else float(np.finfo(np.float32).min)
    lowest = -5e4 if dtype == "float16" else -3.3e38 if dtype == "bfloat16" else lowest
    return (
        replace(
            drawn,
            offset=float(data.choice([10.0, -300.0, 1e4, -1e4])) if chance(data, 0.2) else 0.0,
            ties=chance(data, 0.2),
            masked=float(data.uniform(0.05, 0.95)) if chance(data, 0.25) and can_mask else 0.0,
            mask=float(data.choice([-np.inf, lowest])),
        )
        if can_offset
        else replace(drawn, ties=chance(data, 0.2))
    )


def problem_of(d: Drawn) -> Problem:
    """The arrays of a case. Given logits are a head whose states are the unit matrix."""
    rng = np.random.default_rng([d.seed, 3, d.number])
    dtype = dtype_named(d.case.dtype)
    p = build(d.case, d.seed)
    vocab, tokens = d.case.vocab, d.case.tokens
    alive = np.ones(vocab, bool)
    if d.masked:
        alive = rng.random(vocab) >= d.masked
        alive[rng.integers(vocab)] = True
    kept = np.flatnonzero(alive)
    if d.function == "vocab_parallel_logprobs":
        logits = rng.standard_normal((tokens, vocab)) * d.case.std + d.offset
        if d.ties:
            logits = np.round(logits / d.case.std * 2) * d.case.std / 2
        logits = np.where(alive, logits, d.mask).astype(dtype)
        top = rng.random(tokens) < d.case.confident
        best = logits.astype(np.float64).argmax(axis=1)
        labels = np.where(top & (p.labels >= 0), best, p.labels)
        p = p.changed(weight=np.ascontiguousarray(logits.T), labels=labels, bias=None)
    elif d.ties:
        own = rng.integers(0, max(vocab // 2, 1), vocab)  # each class is one of half of them
        tied = p.weight[:, own] if d.case.layout == "HV" else p.weight[own]
        p = p.changed(
            weight=np.ascontiguousarray(tied), bias=p.bias if p.bias is None else p.bias[own]
        )
    if p.bias is not None:
        bias = np.where(alive, p.bias.astype(np.float64) + d.offset, d.mask)
        p = p.changed(bias=bias.astype(dtype))
    labels = np.where(p.labels >= 0, kept[p.labels % len(kept)], p.labels) if d.masked else p.labels
    labels = np.where(labels < 0, p.options.get("ignore_index", -100), labels)
    p = p.changed(labels=labels.astype(np.int32))
    if p.token_weights is not None:
        # Some tokens of weight 0. A sum that cancels has no digits to divide by.
        weights = np.where(rng.random(tokens) < 0.1, np.float32(0), p.token_weights)
        mean = p.options.get("reduction") == "mean" and "denominator" not in p.options
        p = p.changed(token_weights=np.abs(weights) if mean else weights)
    if d.poison and d.function != "vocab_parallel_logprobs":
        p = p.changed(hidden=np.where(p.valid[:, None], p.hidden, dtype.type(np.nan)))
    return p.changed(text=d.text)


def shaped(p: Problem, leading: int) -> Problem:
    """With a dimension before that of the tokens."""
    if not leading:
        return p

    def cut(x: Any) -> Any:
        per_token = isinstance(x, np.ndarray) and x.shape[:1] == p.labels.shape
        return x.reshape(leading, -1, *x.shape[1:]) if per_token else x

    options = p.options | {"temperature": cut(p.options.get("temperature", 1.0))}
    arrays = {name: cut(getattr(p, name)) for name in ("labels", "where", "token_weights")}
    return p.changed(hidden=cut(p.hidden), options=options, **arrays)
