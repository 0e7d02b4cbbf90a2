"""Problems of the operator part: NumPy arrays made from data, and the call they stand for.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.labels import SoftLabels
from xentlib.logprobs import chunked_logprobs
from xentlib.reference import (
    DivergenceReference,
    LogprobReference,
    NLLReference,
    divergence_reference,
    logprobs_reference,
    nll_reference,
    soft_reference,
)
from xentlib.teacher import TeacherHead
from xentlib.ulp import dtype_named

Array = npt.NDArray[Any]
ARRAY_ARGUMENTS = ("bias", "where", "token_weights", "class_weights")
LOWEST = -1e30  # in place of -inf in the oracle
PER_TOKEN_OPTIONS = frozenset(inspect.signature(chunked_logprobs).parameters)


class Upstream(NamedTuple):
    """Gradients of what follows with respect to each token's outputs, float32 [N]; None: unused."""

    d_logprobs: Array | None
    d_entropy: Array | None
    d_lse: Array | None

    @property
    def by_output(self) -> dict[str, Array]:
        """The gradients that there are, by the output they are of."""
        named = {name.removeprefix("d_"): g for name, g in self._asdict().items()}
        return {name: g for name, g in named.items() if g is not None}

    def of_tokens(self, places: Any) -> Upstream:
        return Upstream(*(None if g is None else g[places] for g in self))


@dataclass(frozen=True, slots=True)
class Case:
    """What a problem is made of. `std` is the logits' standard deviation, never sqrt(H)."""

    id: str
    tokens: int
    hidden: int
    vocab: int
    std: float = 1.0
    ignored: float = 0.2
    confident: float = 0.0  # share of the labels that are their token's largest logit
    bias: bool = True
    where: bool = False
    token_weights: bool = False
    class_weights: bool = False
    token_temperature: bool = False
    kept: int = 0  # classes that a sampler kept; 0: all
    ids: int = 0  # further classes whose log-probabilities are wanted
    soft: str = ""  # class probabilities are the labels: "dense", or "few"
    teacher: int = 0  # the width of a teacher's hidden states; 0: there is none
    far: float | None = None  # the student's heads are the teacher's, hidden states so far apart
    offset: float = 0.0  # of every logit
    below: float = 0.0  # by how much the last class is, which every fourth token has for a label
    dead: bool = False  # the last class is at -inf, and no label
    given: bool = False  # hidden = I, so that the logits are given and every product is exact
    layout: str = "VH"
    dtype: str = "float32"
    unclaimed: tuple[str, ...] = ()  # metrics that no row claims of it
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        extras = [name for name in (*ARRAY_ARGUMENTS, "token_temperature") if getattr(self, name)]
        extras += [f"{getattr(self, x)} {x}" for x in ("kept", "ids") if getattr(self, x)]
        extras += [f"{self.soft} probabilities"] if self.soft else []
        extras += [f"teacher of width {self.teacher}"] if self.teacher else []
        extras += [f"{self.far:g} apart"] if self.far is not None else []
        extras += [f"{x}={getattr(self, x):g}" for x in ("offset", "below") if getattr(self, x)]
        extras += [x for x in ("dead", "given") if getattr(self, x)]
        extras += [f"{name}={value}" for name, value in self.options.items()]
        return (
            f"{self.id}: N={self.tokens} H={self.hidden} V={self.vocab} {self.dtype} "
            f"std={self.std:g} ignored={self.ignored:.0%} {self.layout} {' '.join(extras)}"
        ).strip()


@dataclass(frozen=True, slots=True)
class Problem:
    """Arguments of one `chunked_nll` call as NumPy arrays, and its upstream gradient."""

    hidden: Array
    weight: Array
    labels: Array
    bias: Array | None = None
    where: Array | None = None
    token_weights: Array | None = None
    class_weights: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    upstream: float = 1.0
    text: str = ""
    teacher: TeacherHead[Any] | None = None
    kept: Array | None = None
    ids: Array | None = None
    d_ids: Array | None = None  # gradient of their log-probabilities
    soft: Any = None  # class probabilities [N, V], or `SoftLabels`: the labels of the call
    given: bool = False  # its logits are, and every product is exact
    unclaimed: tuple[str, ...] = ()

    def changed(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    @property
    def leaves(self) -> dict[str, Array | None]:
        """What there are gradients of."""
        return {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}

    @property
    def vocab_axis(self) -> int:
        """The dimension of `weight` that classes are in."""
        return 1 if self.options.get("weight_layout") == "HV" else 0

    @property
    def of_the_oracle(self) -> dict[str, Any]:
        """What `nll_reference` is given."""
        names = ("labels", "where", "token_weights", "class_weights", "upstream")
        given = {name: getattr(self, name) for name in names}
        # As low as it takes: -inf would be multiplied by a probability of 0.
        bias = None if self.bias is None else np.maximum(self.bias.astype(np.float64), LOWEST)
        return {**self.leaves, "bias": bias, **given, **self.options}

    @property
    def given_labels(self) -> Any:
        """What the call has for labels."""
        return self.labels if self.soft is None else self.soft

    @property
    def probs(self) -> Array:
        """Of all classes, in float64, where they are few."""
        if not isinstance(self.soft, SoftLabels):
            return np.asarray(self.soft, np.float64)
        ids, probs = self.soft
        every = np.zeros((*ids.shape[:-1], self.weight.shape[self.vocab_axis]))
        rows, places = np.nonzero((ids >= 0) & self.valid[:, None])
        np.add.at(every, (rows, ids[rows, places]), probs[rows, places])
        return every

    def soft_reference(self, *, dz_dtype: str = "float64", **more: Any) -> NLLReference:
        """Of class probabilities."""
        given = {x: y for x, y in self.of_the_oracle.items() if x != "labels"}
        return soft_reference(**given, probs=self.probs, dz_dtype=dz_dtype, **more)

    def reference(self, **more: Any) -> NLLReference:
        """`more`: `dz_dtype` and `recompute` of `nll_reference`."""
        return nll_reference(**self.of_the_oracle, exact_logits=self.given, **more)

    @property
    def per_token_options(self) -> dict[str, Any]:
        """The options that `chunked_logprobs` has too."""
        return {name: value for name, value in self.options.items() if name in PER_TOKEN_OPTIONS}

    def per_token_reference(
        self, upstream: Upstream, *, dz_dtype: str = "float64"
    ) -> LogprobReference:
        arrays: dict[str, Any] = {**self.leaves, "labels": self.labels, "where": self.where}
        arrays |= {"kept": self.kept, "ids": self.ids, "d_ids_logprobs": self.d_ids}
        arrays |= {f"d_{name}": g for name, g in upstream.by_output.items()}
        return logprobs_reference(**arrays, dz_dtype=dz_dtype, **self.per_token_options)

    def divergence_reference(
        self, *, dz_dtype: str = "float64", exact_logits: bool = False
    ) -> DivergenceReference:
        assert self.teacher is not None
        hidden, weight, *others = self.teacher
        names = self.teacher._fields[2:]
        own = {x: y for x, y in zip(names, others, strict=True) if y is not None}
        arrays: dict[str, Any] = {**self.leaves, "labels": self.labels, "where": self.where}
        arrays |= {"token_weights": self.token_weights, "upstream": self.upstream}
        return divergence_reference(
            teacher_hidden=hidden,
            teacher_weight=weight,
            teacher=own,
            dz_dtype=dz_dtype,
            exact_logits=exact_logits,
            **arrays,
            **self.options,
        )

    def of_tokens(self, places: Any) -> Problem:
        """Of some of the tokens, in this order."""
        names = ("hidden", "labels", "where", "token_weights", "kept", "ids", "d_ids")
        there = {name: x for name in names if (x := getattr(self, name)) is not None}
        options = {
            name: x[places] if np.ndim(x) and not isinstance(x, str) else x
            for name, x in self.options.items()
        }
        teacher = self.teacher
        if teacher is not None:
            teacher = teacher._replace(hidden=teacher.hidden[places])
        changed: dict[str, Any] = {name: x[places] for name, x in there.items()}
        if isinstance(self.soft, SoftLabels):
            changed["soft"] = SoftLabels(*(x[places] for x in self.soft))
        elif self.soft is not None:
            changed["soft"] = self.soft[places]
        return self.changed(options=options, teacher=teacher, **changed)

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = self.labels != self.options.get("ignore_index", -100)
        return mask if self.where is None else mask & self.where


def build(case: Case, seed: int) -> Problem:
    """The arrays of a case. The upstream gradient is random, never 1: that hides bugs."""
    rng = np.random.default_rng([seed, *case.id.encode()])
    dtype = dtype_named(case.dtype)
    hidden = rng.standard_normal((case.tokens, case.hidden)).astype(dtype)
    weight = rng.standard_normal((case.vocab, case.hidden)) * (case.std / np.sqrt(case.hidden))
    if case.given:
        hidden, weight = np.eye(*hidden.shape, dtype=dtype), weight * np.sqrt(case.hidden)
        weight += case.offset
    elif case.offset or case.below:
        hidden[:, -1] = 1.0
        weight[:, -1] += case.offset
        weight[-1, -1] -= case.below
    weight = weight.astype(dtype)
    bias = (rng.standard_normal(case.vocab) * case.std / 2).astype(dtype)
    labels = rng.integers(0, case.vocab, case.tokens).astype(np.int32)
    if case.confident:
        logits = hidden.astype(np.float32) @ weight.astype(np.float32).T
        logits += bias.astype(np.float32) if case.bias else 0.0
        top = rng.random(case.tokens) < case.confident
        labels = np.where(top, logits.argmax(axis=1), labels).astype(np.int32)
    if case.below:
        labels[::4] = case.vocab - 1
    if case.dead:
        bias[-1] = -np.inf
        labels[labels == case.vocab - 1] = 0
    labels[rng.random(case.tokens) < case.ignored] = -100
    options: dict[str, Any] = dict(case.options)
    if case.token_temperature:
        options["temperature"] = rng.uniform(0.5, 2.0, case.tokens).astype(np.float32)
    if case.layout == "HV":
        weight = np.ascontiguousarray(weight.T)
        options["weight_layout"] = "HV"
    others: dict[str, Any] = {"bias": bias} if case.bias else {}
    if case.where:
        others["where"] = rng.random(case.tokens) < 0.8
    if case.token_weights:
        others["token_weights"] = rng.standard_normal(case.tokens).astype(np.float32) + 1.5
    # A float32, so that both backends and the oracle multiply by the same number.
    others["upstream"] = float(np.float32(rng.choice([-1, 1]) * rng.uniform(0.3, 3.0)))
    if case.class_weights:
        others["class_weights"] = rng.uniform(0.1, 2.0, case.vocab).astype(np.float32)
    if case.teacher:
        others["teacher"] = teacher_of(case, hidden, weight, rng)
        if case.far is not None:
            near = others["teacher"].hidden + case.far * rng.standard_normal(hidden.shape)
            hidden, others["bias"] = near.astype(dtype), others["teacher"].bias
    others |= {"given": case.given, "unclaimed": case.unclaimed}
    problem = Problem(hidden, weight, labels, options=options, text=case.text, **others)
    if case.soft:
        problem = with_probabilities(problem, case, rng)
    return with_classes(problem, case, rng) if case.kept or case.ids else problem


def with_classes(problem: Problem, case: Case, rng: Any) -> Problem:
    """With sets that a sampler kept: of the most probable classes for every second token, of any
    for the others, fewer than there is room for, of every seventh none; and with further classes,
    the most probable one, the label, one twice and none among them."""
    logits = problem.hidden.astype(np.float32) @ (
        problem.weight.astype(np.float32).T
        if problem.vocab_axis == 0
        else problem.weight.astype(np.float32)
    )
    count, vocab = logits.shape
    labels = np.where(problem.valid, problem.labels, 0)
    order, any_order = np.argsort(-logits, axis=1), np.argsort(rng.random(logits.shape), axis=1)
    kept = ids = None
    if case.kept:
        kept = np.where(np.arange(count)[:, None] % 2, order, any_order)[:, : case.kept]
        kept = np.where(rng.random(kept.shape) < 0.3, -1, kept)
        there = (kept == labels[:, None]).any(axis=1)
        kept[:, 0] = np.where(there, kept[:, 0], labels)
        if case.kept > 2:  # a class twice
            some, of_label = kept[5::11], labels[5::11]
            some[:, 1] = np.where(some[:, 1] == of_label, of_label, some[:, 2])
        kept[::7] = -1
        kept = kept.astype(np.int32)
    if case.ids:
        ids = any_order[:, : case.ids].copy()
        ids[:, 0] = order[:, 0]
        if case.ids > 3:
            ids[::2, 1], ids[1::2, 1], ids[:, 3] = labels[::2], ids[1::2, 2], -1
        if kept is not None:
            ids[1::3, -1] = kept[1::3, 0]
        ids = ids.astype(np.int32)
    for x in (kept, ids):
        if x is not None:
            x[~problem.valid] = rng.integers(-9, 2 * vocab, x[~problem.valid].shape)
    d_ids = None if ids is None else rng.standard_normal(ids.shape).astype(np.float32)
    return problem.changed(kept=kept, ids=ids, d_ids=d_ids)


def with_probabilities(problem: Problem, case: Case, rng: Any) -> Problem:
    """With class probabilities: near to those of the logits for every second token, nearly one
    class's for every fifth; of few classes one is there twice, and none of every seventh's last."""
    count, vocab = len(problem.labels), case.vocab
    # Only `where` says which tokens count.
    valid, labels = problem.valid, np.where(problem.valid, problem.labels, 0)
    if case.soft == "dense":
        logits = case.std * rng.standard_normal((count, vocab)) + rng.gumbel(size=(count, vocab))
        logits[np.arange(count), labels] += np.where(np.arange(count) % 5 == 0, 20.0, 2.0)
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        soft: Any = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
        soft[~valid] = np.nan
    else:
        ids = np.argsort(rng.random((count, vocab)), axis=1)[:, :6].astype(np.int32)
        ids[:, 0], ids[::3, 5] = labels, ids[::3, 1]
        probs = rng.dirichlet(np.ones(6), count).astype(np.float32)
        ids[::7, 4], probs[::7, 4] = -1, np.nan
        ids[~valid] = rng.integers(-9, 2 * vocab, ids[~valid].shape)
        soft = SoftLabels(ids, probs)
    return problem.changed(soft=soft, where=valid, labels=labels.astype(np.int32))


def teacher_of(case: Case, hidden: Array, weight: Array, rng: Any) -> TeacherHead[Array]:
    """Of another width; or of the student's head, and hidden states that it is beside."""
    if case.far is not None:
        own = rng.standard_normal(hidden.shape).astype(hidden.dtype)
        return TeacherHead(own, weight, logit_scale=1.0, softcap=None)
    states = rng.standard_normal((case.tokens, case.teacher)).astype(hidden.dtype)
    rows = rng.standard_normal((case.vocab, case.teacher)) * (case.std / np.sqrt(case.teacher))
    bias = (rng.standard_normal(case.vocab) * case.std / 2).astype(hidden.dtype)
    softcap = case.options.get("softcap")
    return TeacherHead(states, rows.astype(hidden.dtype), bias, 1.0, softcap)


def upstream_of(problem: Problem, seed: int) -> Upstream:
    """Another random gradient for every token and output: a constant one hides bugs."""
    rng = np.random.default_rng([seed, 11])
    shape = (3, *problem.labels.shape)
    return Upstream(*rng.standard_normal(shape).astype(np.float32))


def logits_problem(logits: Array, labels: Array, text: str) -> Problem:
    """A call whose logits are given: hidden = I and weight = logits^T, every product exact.

    With `reduction="sum"` and upstream 1, d weight is dz transposed.
    """
    eye, weight = np.eye(len(logits), dtype=logits.dtype), np.ascontiguousarray(logits.T)
    options = {"reduction": "sum"}
    return Problem(eye, weight, labels.astype(np.int32), options=options, text=text)
