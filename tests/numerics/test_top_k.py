"""Divergences from a teacher's most probable classes, in both backends, against autograd through
full logits in float64.

Shapes: N tokens, V vocabulary, H hidden width, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from xentlib.contract import check, failures  # noqa: E402
from xentlib.teacher import TeacherTopK  # noqa: E402
from xentlib.tools.harness.device import numpy_of, on_jax, on_torch  # noqa: E402

N, H, V, K = 48, 16, 301, 8
LABELS = np.random.default_rng(1).integers(0, V, N)
PLAIN: dict[str, Any] = {"kind": "forward_kl"}
JSD: dict[str, Any] = {"kind": "jsd", "beta": 0.3}
# Every kind with each tail that it has, and each option in pairs with some.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "forward, class": ("class", {"temperature": 2.0, "temperature_squared": True, **PLAIN}),
    "reverse, class": ("class", {"kind": "reverse_kl", "reduction": "none"}),
    "jsd, class": ("class", {"nll_weight": 0.5, "reduction": "sum", **JSD}),
    "forward, renormalize": ("renormalize", {"reduction": "none", "nll_weight": 0.25, **PLAIN}),
    "reverse, renormalize": ("renormalize", {"kind": "reverse_kl", "softcap": 4.0}),
    "jsd, renormalize": ("renormalize", {"denominator": 700.0, **JSD}),
    "forward, drop": ("drop", {"softcap": 9.0, **PLAIN}),
    "reverse, drop": ("drop", {"kind": "reverse_kl", "nll_weight": 1.5, "reduction": "none"}),
}
FEW = ("forward, renormalize", "reverse, class", "jsd, renormalize", "forward, drop")


def problem(far: float = 0.3) -> dict[str, np.ndarray]:
    """A teacher's classes: some tokens have fewer, one has a class twice, and some are masked,
    with numbers that are none in what they have."""
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((N, H)).astype(np.float32)
    weight = rng.standard_normal((V, H)).astype(np.float32)
    z = (hidden + far * rng.standard_normal((N, H))) @ weight.T.astype(np.float64)
    log_q = z - z.max(1, keepdims=True)
    log_q -= np.log(np.exp(log_q).sum(1, keepdims=True))
    ids = np.argsort(-log_q, axis=1)[:, :K].astype(np.int32)
    logprobs = np.take_along_axis(log_q, ids, 1).astype(np.float32)
    ids[3, 5:], logprobs[3, 5:] = -1, np.nan
    ids[4, 1], logprobs[4, 1] = ids[4, 0], logprobs[4, 0]
    labels = np.where(np.arange(N) % 2, LABELS, ids[:, 0]).astype(np.int32)
    labels[6], ids[6], logprobs[6] = -100, V + 5, 7.0
    labels[9], ids[9] = -100, -1
    weights = rng.uniform(0.5, 1.5, N).astype(np.float32)
    upstream = rng.standard_normal(N).astype(np.float32)
    return {
        "hidden": hidden, "weight": weight, "ids": ids, "logprobs": logprobs, "labels": labels,
        "token_weights": weights, "upstream": upstream,
    }  # fmt: skip


def reduced(loss: Any, upstream: Any, how: dict[str, Any]) -> Any:
    return (loss * upstream).sum() if how.get("reduction") == "none" else loss


def right(x: dict[str, np.ndarray], tail: str, how: dict[str, Any]) -> list[np.ndarray]:
    """Loss, divergences and gradients from full logits."""
    hidden, weight = (torch.tensor(x[n]).double().requires_grad_() for n in ("hidden", "weight"))
    z = hidden @ weight.T
    if "softcap" in how:
        z = how["softcap"] * torch.tanh(z / how["softcap"])
    temperature = how.get("temperature", 1.0)
    log_p, labels = (z / temperature).log_softmax(1), torch.tensor(x["labels"]).long()
    valid, ids = labels != -100, torch.tensor(x["ids"]).long()
    ids = torch.where(valid[:, None], ids, -1)
    counts = ids >= 0
    counts[4, 1] = False
    few = torch.where(counts, log_p.gather(1, ids.clamp(min=0)), -torch.inf)
    teacher = torch.where(counts, torch.tensor(x["logprobs"]).double(), -torch.inf)
    p, q = few.exp(), teacher.exp()
    if tail == "class":
        others = torch.ones(N, V, dtype=torch.bool)
        rows, places = counts.nonzero(as_tuple=True)
        others[rows, ids[rows, places]] = False
        p = torch.cat((p, (log_p.exp() * others).sum(1, keepdim=True)), 1)
        q = torch.cat((q, (1 - q.sum(1, keepdim=True)).clamp(min=0)), 1)
    if tail == "renormalize":
        there = counts.any(1, keepdim=True)
        p, q = (torch.where(there, y / torch.where(there, y.sum(1, keepdim=True), 1.0), 0.0)
                for y in (p, q))  # fmt: skip

    def kl(a: Any, b: Any) -> Any:
        there = a > 0
        safe = [torch.where(there, y, 1.0) for y in (a, b)]
        return torch.where(there, a * (safe[0].log() - safe[1].log()), 0.0).sum(1)

    if how["kind"] == "jsd":
        m = how["beta"] * q + (1 - how["beta"]) * p
        value = how["beta"] * kl(q, m) + (1 - how["beta"]) * kl(p, m)
    else:
        value = kl(q, p) if how["kind"] == "forward_kl" else kl(p, q)
    value = torch.where(valid, value, 0.0)
    nll = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    squared = temperature**2 if how.get("temperature_squared") else 1.0
    loss = torch.where(valid, value * squared + how.get("nll_weight", 0.0) * nll, 0.0)
    weights = torch.tensor(x["token_weights"]).double() * valid
    loss = loss * weights
    if how.get("reduction") != "none":
        divisor = how.get("denominator", 1.0 if "reduction" in how else weights.sum())
        loss = loss.sum() / divisor
    total = reduced(loss, torch.tensor(x["upstream"]).double(), how)
    gradients = torch.autograd.grad(total, (hidden, weight))
    return [y.detach().cpu().numpy() for y in (loss, value, *gradients)]


def stored_at(how: dict[str, Any]) -> Any:
    return how.pop("stored", how.get("temperature"))


def ours(
    backend: str, x: dict[str, np.ndarray], tail: Any, how: dict[str, Any]
) -> list[np.ndarray]:
    how = {**how}
    stored, names = stored_at(how), ("hidden", "weight")
    given = {"outputs": ("divergence",), **how}
    if backend == "torch":
        from xentlib.torch import chunked_divergence

        y = {name: on_torch(v) for name, v in x.items()}
        leaves = [y[name].requires_grad_() for name in names]
        teacher: Any = TeacherTopK(y["ids"], y["logprobs"], tail, stored)
        each = {name: y[name] for name in ("labels", "token_weights")}
        out = chunked_divergence(*leaves, teacher, **each, **given, max_chunk_bytes=V * 64)
        gradients: Any = torch.autograd.grad(reduced(out.loss, y["upstream"], how), leaves)
        values = (out.loss, out.divergence, *gradients)
        return [numpy_of(v.detach()) for v in values]
    import jax

    from xentlib.jax import chunked_divergence as in_jax

    y = {name: on_jax(v) for name, v in x.items()}

    def loss(hidden: Any, weight: Any) -> Any:
        teacher: Any = TeacherTopK(y["ids"], y["logprobs"], tail, stored)
        each = {name: y[name] for name in ("labels", "token_weights")}
        out = in_jax(hidden, weight, teacher, **each, **given, max_chunk_bytes=V * 256)
        return reduced(out.loss, y["upstream"], how), (out.loss, out.divergence)

    gradients, values = jax.grad(loss, (0, 1), has_aux=True)(*(y[name] for name in names))
    return [numpy_of(v) for v in (*values, *gradients)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.full(backend="jax")] if x in FEW else []) for x in CALLS],
)
def test_against_full_logits(backend: str, name: str) -> None:
    """Values, and gradients of all that the student has. Catches: the tail left out of the
    student's, of the teacher's or of a gradient; a class that counts twice; -1 as the last class;
    logits renormalised over other classes."""
    if backend == "jax":
        pytest.importorskip("jax")
    tail, how = CALLS[name]
    x = problem()
    for got, exact in zip(ours(backend, x, tail, how), right(x, tail, how), strict=True):
        assert np.isfinite(got).all()
        assert np.linalg.norm(got - exact) <= 3e-6 * np.linalg.norm(exact)


def test_a_teacher_that_is_the_student(backend: str) -> None:
    """The divergence is 0 but for the rounding of the teacher's log-probabilities, and never below;
    with the tail dropped it is not, which is why that is no divergence."""
    if backend == "jax":
        pytest.importorskip("jax")
    x = problem(far=0.0)
    for tail in ("class", "renormalize") if backend == "torch" else ("class",):
        _, value, *gradients = ours(backend, x, tail, PLAIN)
        assert value.min() >= 0
        assert value.max() < 1e-11
        assert max(np.abs(g).max() for g in gradients) < 1e-5
    if backend == "jax":
        return
    _, value, d_hidden, _ = ours(backend, x, "drop", PLAIN)
    assert np.abs(value).max() < 1e-5
    assert np.abs(d_hidden).max() > 1e-3


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_tail_that_rounds_to_nothing(backend: str, kind: str) -> None:
    """A confident teacher's probabilities may add up to 1, or in 16 bits to more: what is finite in
    exact arithmetic stays so, and where the classes are all there are no tail is made up."""
    if backend == "jax":
        pytest.importorskip("jax")
    x = problem()
    x["ids"][6], x["logprobs"][:, 0], x["logprobs"][:, 1:] = 0, -0.0, -20.0
    for values in ours(backend, x, "class", {"kind": kind}):
        assert np.isfinite(values).all()
    few = {**x, "weight": x["weight"][:K], "labels": x["labels"] % K}
    few["ids"] = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    logits = few["hidden"] @ few["weight"].T
    few["logprobs"] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    _, value, *_ = ours(backend, few, "class", {"kind": kind})
    assert value.max() < 1e-10


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "logits": ({"logprobs": lambda p: 30 + p}, {}, "class", "`logprobs` must be log-probabilities"),
    "other shape": ({"logprobs": lambda p: p[:, :-1]}, {}, "class", "`logprobs` must have shape"),
    "no such class": ({"ids": lambda i: i * 0 + V}, {}, "class", "must hold classes in [0, 301)"),
    "no such tail": ({}, {}, "keep", "`tail` must be one of 'class', 'renormalize', 'drop'"),
    "a JSD without": ({}, JSD, "drop", "`tail` must be 'class' or 'renormalize' with kind='jsd'"),
    "teacher's entropy": ({}, {"outputs": ("teacher_entropy",)}, "class", "not have 'teacher_ent"),
    "another temperature": ({}, {"temperature": 2.0, "stored": 1.0}, "class", "`temperature` must"),
    "tempered labels": (
        *({}, {"nll_weight": 0.5, "temperature": 2.0}, "class"),
        "`temperature` must be 1 with `nll_weight` for a `TeacherTopK`",
    ),
    "denominator of 0": ({}, {"denominator": 0.0}, "class", "`denominator` must be positive where"),
    "floats": ({"ids": lambda i: i.astype(np.float32)}, {}, "class", "`ids` must be integers"),
    "integers": ({"logprobs": lambda p: (p * 0).astype(np.int32)}, {}, "class", "floating point"),
}


def test_weights_of_0(backend: str) -> None:
    """Nothing to divide, and nothing to divide by: 0, with gradients of 0."""
    if backend == "jax":
        pytest.importorskip("jax")
    x = problem()
    x["token_weights"] *= 0
    loss, _, *gradients = ours(backend, x, "class", PLAIN)
    assert not any(y.any() for y in (loss, *gradients))


# Numbers that are not read on a GPU
READ = ("logits", "no such class", "denominator of 0")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.cpu] * (x in READ)) for x in BAD]
)
def test_misuse_is_said(backend: str, name: str) -> None:
    if backend == "jax":
        pytest.importorskip("jax")
    changes, how, tail, text = BAD[name]
    x = problem()
    x["ids"][6], x["logprobs"][3:7] = 0, -9.0
    x |= {key: change(x[key]) for key, change in changes.items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        ours(backend, x, tail, {**PLAIN, **how})
    assert text in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_beside_what_else_pytorch_has() -> None:
    """One graph of a compiler to the bit, `no_grad`, autocast, LoRA, a window's counts."""
    from helpers.leaves_torch import same
    from xentlib.torch import LowRankHead, TokenNormalizer, chunked_divergence

    y = {name: on_torch(v) for name, v in problem().items()}
    hidden, weight = (y[name].requires_grad_() for name in ("hidden", "weight"))
    teacher: Any = TeacherTopK(y["ids"], y["logprobs"])

    def loss(hidden: Any, weight: Any) -> Any:
        out = chunked_divergence(hidden, weight, teacher, labels=y["labels"], reduction="sum")
        return out.loss

    def gradients(function: Any, *leaves: Any) -> list[Any]:
        value = function(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    want = gradients(loss, hidden, weight)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(want, gradients(compiled, hidden, weight), strict=True):
        assert same(one, other)
    with torch.no_grad():
        assert same(want[0], loss(hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        low = gradients(loss, hidden, weight)
    assert (low[1] - want[1]).norm() < 0.02 * want[1].norm()
    b = torch.zeros(V, 2, requires_grad=True)
    head: Any = LowRankHead(weight.detach(), torch.ones(2, H), b, 1.0)
    (d_b,) = torch.autograd.grad(loss(hidden.detach(), head), b)
    exact = want[2].double().sum(1, keepdim=True).expand(-1, 2)
    assert not failures(check("A9", d_b.cpu().numpy(), exact.cpu().numpy(), metrics=("rho / u",)))
    module = torch.nn.Linear(H, V, bias=False)
    with torch.no_grad():
        module.weight.copy_(weight)
    with TokenNormalizer(module).window(labels=[y["labels"]]) as window:
        for labels in window.micro_batches([y["labels"]]):
            window.backward(
                chunked_divergence(hidden, module, teacher, labels=labels, reduction="sum")
            )
    assert module.weight.grad is not None
    valid = int((y["labels"] != -100).sum())
    pair = (module.weight.grad * valid).cpu().numpy(), want[2].double().cpu().numpy()
    assert not failures(check("A9", *pair, metrics=("rho / u",)))
