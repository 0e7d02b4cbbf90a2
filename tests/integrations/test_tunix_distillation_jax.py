"""tunix's loss of a distillation from logits, against full logits in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402

from helpers.held import hold_in_norm  # noqa: E402
from xentlib.contract import check, failures  # noqa: E402
from xentlib.jax.integrations.tunix import logit_loss  # noqa: E402

B, L, V = 4, 12, 64
MASK = np.arange(L) < np.array([12, 7, 1, 4])[:, None]  # uneven


def problem(far: float = 1.0, spread: float = 1.0) -> tuple[Any, Any, Any]:
    """Logits of student and teacher, and one-hot labels."""
    rng = np.random.default_rng(0)
    student = spread * rng.standard_normal((B, L, V)).astype(np.float32)
    teacher = student + np.float32(far) * rng.standard_normal((B, L, V)).astype(np.float32)
    labels = np.eye(V, dtype=np.float32)[rng.integers(0, V, (B, L))]
    return student, teacher, labels


def log_softmax(z: Any) -> Any:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def reference(
    student: Any, teacher: Any, labels: Any, temperature: float, alpha: float, k: int, where: Any
) -> tuple[Any, dict[str, Any], Any]:
    """As tunix's `LogitStrategy` says, of tokens that count; and the gradient."""
    student, teacher, labels = (np.asarray(x, np.float64) for x in (student, teacher, labels))
    count = where.sum()
    mean = lambda x: (x * where).sum() / count  # noqa: E731
    least = np.sort(teacher, -1)[..., -k, None] if k else -np.inf
    of = lambda z: log_softmax(np.where(teacher >= least, z / temperature, -np.inf))  # noqa: E731
    log_s, log_t = of(student), of(teacher)
    with np.errstate(invalid="ignore"):
        kl = np.where(teacher >= least, np.exp(log_t) * (log_t - log_s), 0.0).sum(-1)
    nll = [-(labels * log_softmax(z)).sum(-1) for z in (student, teacher)]
    soft, hard = temperature**2 * mean(kl), mean(nll[0])
    metrics = {
        "soft_loss": soft,
        "hard_loss": hard,
        "kl_div": mean(kl),
        "teacher_loss": mean(nll[1]),
    }
    apart = alpha * temperature * (np.exp(log_s) - np.exp(log_t))
    apart = apart + (1 - alpha) * (np.exp(log_softmax(student)) - labels)
    found = {f"distill/{name}": x for name, x in metrics.items()}
    return alpha * soft + (1 - alpha) * hard, found, apart * where[..., None] / count


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_tunix_s_loss(k: int, masked: bool) -> None:
    student, teacher, labels = problem()
    where = MASK if masked else np.ones((B, L), bool)
    if masked:  # what padding has plays no part
        teacher = np.where(MASK[..., None], teacher, np.float32(np.nan))
        labels = labels * MASK[..., None]
    how = {"temperature": 2.0, "alpha": 0.3, "distill_top_k": k}

    @jax.jit
    def step(s: Any, t: Any, y: Any) -> Any:
        given = {"where": y.any(-1)} if masked else {}
        return jax.value_and_grad(logit_loss, has_aux=True)(s, t, y, **how, **given)

    (loss, metrics), gradient = step(student, teacher, labels)
    want, named, slope = reference(
        student, np.where(MASK[..., None], teacher, 0.0) if masked else teacher, labels,
        2.0, 0.3, k, where,
    )  # fmt: skip
    assert metrics.keys() == named.keys()
    hold_in_norm([loss, gradient], [want, slope])
    hold_in_norm([metrics[x] for x in named], named.values())


def test_tunix_s_loss_near_the_end() -> None:
    """A20 of its KL, which a sum of differences misses."""
    student, teacher, labels = problem(1e-3, 3.0)
    _, metrics = logit_loss(student, teacher, labels, temperature=2.0, alpha=1.0)
    _, want, _ = reference(student, teacher, labels, 2.0, 1.0, 0, np.ones((B, L), bool))
    kl = "distill/kl_div"
    assert want[kl] >= 1e-7
    assert not failures(check("A20", metrics[kl], want[kl]))
    log_s, log_t = (jax.nn.log_softmax(jnp.asarray(x) / 2.0) for x in (student, teacher))
    plain = (jnp.exp(log_t) * (log_t - log_s)).sum(-1).mean()
    assert failures(check("A20", plain, want[kl]))


def test_tunix_s_loss_without_a_token_is_0() -> None:
    student, teacher, labels = problem()
    call = lambda s: logit_loss(s, teacher, labels, where=jnp.zeros((B, L), bool))  # noqa: E731
    (loss, metrics), gradient = jax.value_and_grad(call, has_aux=True)(student)
    assert float(loss) == 0.0
    assert not any(np.asarray(x).any() for x in (gradient, *metrics.values()))
