"""How a hurried user calls a divergence wrongly: each in one sentence, in both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.interop import to_jax, to_torch
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

N, V, H, WIDTH = 6, 11, 4, 5


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


HEAD = TeacherHead(zeros(N, WIDTH), zeros(V, WIDTH))
LOGITS = TeacherLogits(zeros(N, V))
LABELS = np.arange(N, dtype=np.int32)
GOOD: dict[str, Any] = {"hidden": zeros(N, H), "weight": zeros(V, H), "teacher": HEAD}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"kind": "kl"}, ValueError, "`kind` must be one of 'forward_kl', 'reverse_kl', 'jsd'"),
    "jsd without beta": (
        {"kind": "jsd"},
        ValueError,
        "`beta` must be given with `kind='jsd'`, and with nothing else; got None with 'jsd'. Pass",
    ),
    "beta at an end": (
        {"kind": "jsd", "beta": 1.0},
        ValueError,
        "`beta` must be a number between 0 and 1, neither of them; got 1.0",
    ),
    "beta of a KL": ({"beta": 0.5}, ValueError, "got 0.5 with 'forward_kl'. Leave it out"),
    "an array as teacher": (
        {"teacher": zeros(N, V)},
        TypeError,
        "`teacher` must be a `TeacherHead`, `TeacherLogits` or `TeacherTopK`; got ",
    ),
    "denominator of 0": ({"denominator": 0.0}, ValueError, "`denominator` must be positive where"),
    "denominator of 0 beside logits": (
        {"denominator": 0.0, "teacher": LOGITS},
        ValueError,
        "`denominator` must be positive where a token is valid; got 0",
    ),
    "another vocabulary": (
        {"teacher": HEAD._replace(weight=zeros(V + 5, WIDTH))},
        ValueError,
        "a teacher must have the same 11 classes as the student; got 16",
    ),
    "logits of another vocabulary": (
        {"teacher": TeacherLogits(zeros(N, V - 1))},
        ValueError,
        "a teacher must have the same 11 classes as the student; got 10",
    ),
    "the classes of both": ({"vocab": "both"}, ValueError, "`vocab` must be one of"),
    "other tokens": (
        {"teacher": HEAD._replace(hidden=zeros(N - 1, WIDTH))},
        ValueError,
        "of `teacher`: `hidden` must be of the same tokens as the student's `hidden` (6,); got",
    ),
    "logits of other tokens": (
        {"teacher": TeacherLogits(zeros(N + 1, V))},
        ValueError,
        "of `teacher`: `logits` must be of the same tokens as the student's `hidden` (6,)",
    ),
    "a head turned round": (
        {"teacher": HEAD._replace(weight=zeros(WIDTH, V))},
        ValueError,
        "of `teacher`: `weight` must have shape (vocab, 5)",
    ),
    "probabilities as logits": (
        {"teacher": TeacherLogits(zeros(N, V) + np.float32(1 / V))},
        ValueError,
        "of `teacher`: `logits` of a `TeacherLogits` must be logits, or log-probabilities; got",
    ),
    "integers as logits": (
        {"teacher": TeacherLogits(zeros(N, V, dtype=np.int32))},
        TypeError,
        "of `teacher`: `logits` must be floating point",
    ),
    "a teacher in float64": (
        {"teacher": TeacherLogits(zeros(N, V, dtype=np.float64))},
        ValueError,
        "a teacher must not be float64 beside a student in float32",
    ),
    "nll without labels": (
        {"nll_weight": 0.5},
        ValueError,
        "`labels` must be given with `nll_weight`; got None with 0.5",
    ),
    "logprobs without labels": (
        {"outputs": ("logprobs",)},
        ValueError,
        "`labels` must be given where `outputs` has 'logprobs'",
    ),
    "a negative nll_weight": ({"labels": LABELS, "nll_weight": -1.0}, ValueError, "`nll_weight`"),
    "divided tokens": (
        {"reduction": "none", "denominator": 3.0},
        ValueError,
        "`denominator` must be None with `reduction='none'`",
    ),
    "reduction": ({"reduction": "batchmean"}, ValueError, "`reduction` must be one of 'mean'"),
    "outputs": ({"outputs": ("lse",)}, ValueError, "`outputs` must be a tuple of names from "),
    "one output": ({"outputs": "divergence"}, ValueError, "`outputs` must be a tuple of names"),
    "gather": ({"gather": "stream"}, ValueError, "`gather` must be "),
    "a softcap in words": (
        {"softcap": "a"},
        ValueError,
        "`softcap` must be None, a positive number",
    ),
    "softcaps": ({"softcap": [1.0]}, ValueError, "`softcap` must be None, a positive number"),
    "two softcaps": (
        {"softcap": zeros(2)},
        ValueError,
        "`softcap` must be None, a positive number",
    ),
    "of the student alone, a limit": (
        {"softcap": 30.0, "teacher": HEAD._replace(logit_scale=1.0)},
        ValueError,
        "of `teacher`: `softcap` must be passed to `TeacherHead` where the student has one; got 30",
    ),
    "of the student alone, a scale": (
        {"logit_scale": 0.5, "teacher": HEAD._replace(softcap=None)},
        ValueError,
        "one; got 0.5 for the student alone. Pass the teacher's, or `logit_scale=1.0` for a",
    ),
    "a misspelt name": ({"temprature": 2.0}, TypeError, "`temprature` is not an argument"),
}


def call(backend: str, function: str, arguments: dict[str, Any]) -> Any:
    def crossed(x: Any, cross: Any) -> Any:
        if isinstance(x, (TeacherHead, TeacherLogits, TeacherTopK)):
            return type(x)(*(crossed(y, cross) for y in x))
        return cross(x, copy=True) if isinstance(x, np.ndarray) else x

    if backend == "torch":
        from xentlib import torch as ours

        return getattr(ours, function)(**{k: crossed(x, to_torch) for k, x in arguments.items()})
    import jax

    from xentlib import jax as ours

    with jax.enable_x64(True):
        return getattr(ours, function)(**{k: crossed(x, to_jax) for k, x in arguments.items()})


@pytest.mark.parametrize("name", BAD)
def test_each_is_said_in_one_sentence(backend: str, name: str) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error) as caught:
        call(backend, "chunked_divergence", {**GOOD, **changes})
    assert caught.type is error
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [x for x in BAD if "softcap" in x])
def test_the_same_of_a_teachers_most_probable_classes(backend: str, name: str) -> None:
    changes, error, message = BAD[name]
    log_q = np.log(zeros(N, 2) + np.float32(0.4))
    teacher = TeacherTopK(np.tile(np.arange(2), (N, 1)), log_q)
    with pytest.raises(error) as caught:
        call(backend, "chunked_divergence", {**GOOD, **changes, "teacher": teacher})
    assert message in str(caught.value)


def test_given_logits_take_logits_alone(backend: str) -> None:
    with pytest.raises(TypeError, match="`teacher` must be `TeacherLogits`; got TeacherHead"):
        call(backend, "vocab_parallel_divergence", {"logits": zeros(N, V), "teacher": HEAD})
    teacher = TeacherLogits(zeros(N + 1, V))
    with pytest.raises(ValueError, match=r"of the same tokens as the student's `logits` \(6,\)"):
        call(backend, "vocab_parallel_divergence", {"logits": zeros(N, V), "teacher": teacher})


def test_given_logits_have_a_count_and_no_mean_of_their_own(backend: str) -> None:
    """`.mean()` would count tokens that do not: it was 0.979 for 1.236 beside a mask."""
    teacher, where = TeacherLogits(zeros(N, V)), np.arange(N) != 2
    arguments = {"logits": zeros(N, V), "teacher": teacher}
    for more, count in (({}, N), ({"where": where}, N - 1)):
        out = call(backend, "vocab_parallel_divergence", arguments | more)
        assert out.loss.shape == (N,)
        assert [int(out.num_tokens), float(out.weight_sum), float(out.nll)] == [count, count, 0]
        assert out.denominator is None
        with pytest.raises(AttributeError, match=r"Use its `\.loss`"):
            out.mean()


@pytest.mark.parametrize(
    ("name", "value", "absent"), [("softcap", 1.5, None), ("logit_scale", 0.3, 1.0)]
)
def test_what_the_student_has_is_asked_of_its_teacher(
    backend: str, name: str, value: float, absent: float | None
) -> None:
    """Gemma beside Gemma without the teacher's softcap was 1.17 for 0.86. The teacher's own, and
    that it has none, are answers; a student without asks nothing."""
    rng = np.random.default_rng(3)
    hidden, weight, states, rows = (
        rng.standard_normal(x).astype(np.float32) for x in ((N, H), (V, H), (N, WIDTH), (V, WIDTH))
    )
    plain = (states.astype(np.float64) @ rows.T).astype(np.float32)
    shaped = value * np.tanh(plain / value) if name == "softcap" else value * plain
    asked, silent = {"hidden": hidden, "weight": weight, name: value}, TeacherHead(states, rows)
    for arguments, logits, teacher in (
        (asked, shaped, silent._replace(**{name: value})),
        (asked, plain, silent._replace(**{name: absent})),
        ({**asked, name: absent}, plain, silent),
        ({**asked, name: absent}, shaped, silent._replace(**{name: value})),
    ):
        expected = call(
            backend, "chunked_divergence", {**arguments, "teacher": TeacherLogits(logits)}
        )
        found = call(backend, "chunked_divergence", {**arguments, "teacher": teacher})
        both = np.float32(found.loss)[None], np.float64(expected.loss)[None]
        assert both[0] > 0
        assert not failures(check("A9", *both, metrics=("rho / u",)))
    with pytest.raises(ValueError, match=f"`{name}` must be passed to `TeacherHead`"):
        call(backend, "chunked_divergence", {**asked, "teacher": silent})


@pytest.mark.torch
def test_a_teacher_is_a_constant_in_torch() -> None:
    """What a graph leads to is refused; a module's parameters are constants."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_divergence

    hidden = torch.randn(N, H, requires_grad=True)
    states, rows = torch.randn(N, WIDTH), torch.nn.Linear(WIDTH, V)
    weight = torch.randn(V, H)
    with pytest.raises(ValueError, match="of `teacher`: `hidden` must be a constant"):
        chunked_divergence(hidden, weight, TeacherHead(states.requires_grad_(), rows))
    with pytest.raises(ValueError, match="of `teacher`: `logits` must be a constant"):
        chunked_divergence(hidden, weight, TeacherLogits(rows(states)))
    out = chunked_divergence(
        hidden, weight, TeacherHead(states.detach(), rows), outputs=("entropy", "divergence")
    )
    out.loss.backward()
    assert rows.weight.grad is None
    with pytest.raises(RuntimeError, match="`entropy` of `chunked_divergence` must not be diff"):
        (out.loss + out.entropy.sum()).backward()
    with pytest.raises(TypeError, match=r"Use its `\.loss`"):
        out * 2


@pytest.mark.jax
def test_a_teacher_is_a_constant_in_jax() -> None:
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_divergence

    def loss(teacher: Any) -> Any:
        return chunked_divergence(zeros(N, H), zeros(V, H), teacher).loss

    for teacher in (HEAD, LOGITS):
        name = teacher._fields[0]
        with pytest.raises(ValueError, match=f"`teacher.{name}` must be a constant"):
            jax.grad(lambda x, t=teacher: loss(t._replace(**{t._fields[0]: x})))(teacher[0])


def test_classes_that_both_have_are_of_whole_heads(backend: str) -> None:
    """Not of a teacher's few classes, whose ids say which they are."""
    given = {**GOOD, "vocab": "intersect"}
    few = TeacherTopK(np.zeros((N, 2), np.int32), zeros(N, 2) - 1)
    with pytest.raises(ValueError, match="`vocab` must be 'same' for a `TeacherTopK`"):
        call(backend, "chunked_divergence", {**given, "teacher": few})
    logits = TeacherLogits(zeros(N, V + 4))
    assert call(backend, "chunked_divergence", {**given, "teacher": logits}).loss >= 0


def test_the_nll_of_a_student_with_added_tokens(backend: str) -> None:
    """Would be over the classes that both have; the two calls that are advised are right."""
    rng = np.random.default_rng(0)
    hidden, weight, theirs = (
        rng.standard_normal(x).astype(np.float32) for x in ((N, H), (V + 3, H), (V, H))
    )
    labels = np.arange(V + 3 - N, V + 3, dtype=np.int32)
    given = {"hidden": hidden, "weight": weight, "labels": labels, "vocab": "intersect"}
    for teacher in (TeacherHead(hidden, theirs), TeacherLogits(hidden @ theirs.T)):
        with pytest.raises(ValueError, match=r"`nll_weight` must be 0 .* \(\d+ and \d+\); got 0.5"):
            call(backend, "chunked_divergence", {**given, "teacher": teacher, "nll_weight": 0.5})
        where = labels < V
        found = call(
            backend,
            "chunked_divergence",
            {**given, "teacher": teacher, "where": where, "labels": None, "reduction": "sum"},
        )
        nll = call(backend, "chunked_nll", {"hidden": hidden, "weight": weight, "labels": labels})
        z, t = hidden.astype(np.float64) @ weight.T, hidden.astype(np.float64) @ theirs.T
        log_all, log_p, log_t = (x - np.logaddexp.reduce(x, 1)[:, None] for x in (z, z[:, :V], t))
        right = ((np.exp(log_t) * (log_t - log_p)).sum(1) * where).sum()
        right = right / N - 0.5 * log_all[np.arange(N), labels].mean()
        got = np.float64(found.loss) / N + 0.5 * np.float64(nll.loss)
        measured = check("A9", np.float32(got)[None], np.array([right]), metrics=("rho / u",))
        assert not failures(measured)


def test_probabilities_are_looked_for_in_tokens_that_count(backend: str) -> None:
    """A10. Catches: a refusal because of what masked tokens hold, which may be anything; a prompt
    of zeros before probabilities."""
    if backend == "torch":
        pytest.importorskip("torch")
        import xentlib.torch as x

        to: Any = to_torch
    else:
        pytest.importorskip("jax")
        import xentlib.jax as x

        to = to_jax
    rng = np.random.default_rng(0)
    hidden, weight, z = (
        rng.standard_normal(k).astype(np.float32) for k in ((24, H), (V, H), (24, V))
    )
    p = (np.exp(z) / np.exp(z).sum(1, keepdims=True)).astype(np.float32)
    counts = np.arange(24)[:, None] > 12

    def call(logits: Any) -> Any:
        teacher = x.TeacherLogits(to(logits.astype(np.float32)))
        return x.chunked_divergence(to(hidden), to(weight), teacher, where=to(counts[:, 0])).loss

    assert np.isfinite(float(call(np.where(counts, z, p))))
    with pytest.raises(ValueError, match="must be logits, or log-probabilities"):
        call(np.where(counts, p, 0.0))
