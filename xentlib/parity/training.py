"""Training as proof: a small language model in PyTorch and in JAX, from the same weights and text.

Each step is a window of four micro-batches; the loss of each is its sum over the window's token
count (`denominator=`), gradients are added up, AdamW follows. Three things are measured:

* **Counts** (row A0): the valid tokens that a backend saw, against NumPy's own count.
* **Head gradients** (row A9). From the second step on the two runs have different weights: fp32
  rounding parts them and AdamW, which divides a gradient by its own size, amplifies that. Head
  gradients of two such runs would measure their drift, not the operator. So at every step the
  hidden states, the head and the labels of the PyTorch run go through JAX's `chunked_nll` as they
  are, micro-batch by micro-batch, and the two sums are compared:
  rho = ||g_torch - g_jax||_F / ||g_jax||_F in units of u = 2^-24, at most 64.
* **Curves** (row "curve"). The two runs go their own ways from the same first weights; their losses
  may differ by 1e-3 relative, at every step. This is where labels off by one, a mean of means or
  another optimizer shows. Both must also learn: the last losses are below the first.

Importing this module loads neither framework; `train` loads the one it is asked for.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.parity.model import ModelSizes, Weights, initial_weights
from xentlib.parity.result import Measurement, TrainingCurve
from xentlib.parity.text import (
    Window,
    encode_documents,
    make_windows,
    read_documents,
    train_tokenizer,
)

__all__ = [
    "AdamW",
    "HeadStep",
    "TrainingReport",
    "TrainingRun",
    "compare",
    "head_gradient",
    "run_training",
    "train",
]

Float32 = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]  # (what, done, of)

U = 2.0**-24
A9_BOUND = 64.0  # in u, contract row A9
CURVE_BOUND = 1e-3  # relative; two fp32 runs of 40 steps part by 3e-7
LEARNT_BOUND = 0.9  # mean of the last losses over the first one


@dataclass(frozen=True, slots=True)
class AdamW:
    """What `torch.optim.AdamW` and `optax.adamw` both understand by these numbers.

    p <- p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p), on every
    parameter; torch decays first, from the same p.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What went into the head at one step, and the gradient of the head that came out.

    The arrays are the run's own: valid during the call that hands them over, not to be written to.
    """

    step: int
    hidden: Float32  # [M, B, L, H]
    head: Float32  # [V, H]
    labels: npt.NDArray[np.int32]  # [M, B, L], shifted
    denominator: float
    gradient: Float32  # [V, H], of the window


Observer = Callable[[HeadStep], None]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One backend's run. `curve.tokens` is what the backend counted."""

    curve: TrainingCurve
    head_gradient_norms: tuple[float, ...]  # Frobenius, of every step


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What the training part finds; `head_rho` is row A9 step by step, in u."""

    measurements: list[Measurement] = field(default_factory=list)
    curves: list[TrainingCurve] = field(default_factory=list)
    head_rho: list[float] = field(default_factory=list)


def train(
    backend: str,
    windows: Sequence[Window],
    weights: Weights,
    *,
    sizes: ModelSizes,
    optimizer: AdamW = AdamW(),
    observe: Observer | None = None,
    progress: Progress | None = None,
) -> TrainingRun:
    """One optimizer step a window, in "torch" or "jax", fp32.

    Args:
        backend: "torch" or "jax".
        windows: what each step reads.
        weights: first values of the parameters; copied.
        sizes: of the model; `sizes.length` is the windows' L.
        optimizer: the same numbers for both frameworks.
        observe: called before every update; the time it takes is not counted.
        progress: called after every step with (backend, steps done, steps).
    """
    trainers = {"torch": _train_torch, "jax": _train_jax}
    if backend not in trainers:
        raise ValueError(f"`backend` must be 'torch' or 'jax'; got {backend!r}.")
    losses: list[float] = []
    tokens: list[int] = []
    norms: list[float] = []
    watching = 0.0

    def record(loss: float, count: int, head_step: HeadStep) -> None:
        nonlocal watching
        losses.append(loss)
        tokens.append(count)
        norms.append(float(np.linalg.norm(head_step.gradient)))
        before = time.perf_counter()
        if observe is not None:
            observe(head_step)
        if progress is not None:
            progress(backend, len(losses), len(windows))
        watching += time.perf_counter() - before

    start = time.perf_counter()
    trainers[backend](windows, weights, sizes, optimizer, record)
    seconds = time.perf_counter() - start - watching
    curve = TrainingCurve(backend, tuple(losses), tuple(tokens), seconds)
    return TrainingRun(curve, tuple(norms))


Record = Callable[[float, int, HeadStep], None]


def _train_torch(
    windows: Sequence[Window], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    import torch

    from xentlib import torch as xt
    from xentlib.parity.model_torch import build

    model = build(sizes, weights)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adamw.lr,
        betas=adamw.betas,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )
    for step, window in enumerate(windows):
        optimizer.zero_grad()
        loss, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        seen = []
        for arrays in zip(window.tokens, window.segments, window.labels, strict=True):
            tokens, segments, labels = map(torch.from_numpy, arrays)
            labels = xt.next_token_labels(labels, segment_ids=segments)
            hidden = model(tokens, segments)
            output = xt.chunked_nll(hidden, model.head, labels, denominator=window.total)
            output.loss.backward()
            loss += output.loss.detach()
            count += output.num_tokens
            seen.append((hidden.detach().numpy(), labels.numpy()))
        assert model.head.grad is not None
        head_step = _head_step(step, seen, model.head.detach(), window, model.head.grad)
        record(loss.item(), int(count), head_step)
        optimizer.step()


def _train_jax(
    windows: Sequence[Window], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    import jax
    import jax.numpy as jnp
    import optax  # type: ignore[import-untyped]
    from flax import nnx

    from xentlib import jax as xj
    from xentlib.parity.model_jax import LanguageModel, build

    model = build(sizes, weights)
    transformation = optax.adamw(
        adamw.lr, *adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay
    )
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def accumulate(model: LanguageModel, window_sums: Any, arrays: Any, denominator: Any) -> Any:
        tokens, segments, labels = arrays
        labels = xj.next_token_labels(labels, segment_ids=segments)

        def loss_of(model: LanguageModel) -> Any:
            hidden = model(tokens, segments)
            output = xj.chunked_nll(hidden, model.head[...], labels, denominator=denominator)
            return output.loss, (output.num_tokens, hidden)

        (loss, (count, hidden)), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        return jax.tree.map(jnp.add, window_sums, (loss, count, grads)), (hidden, labels)

    @nnx.jit
    def update(model: LanguageModel, optimizer: Any, grads: Any) -> None:
        optimizer.update(model, grads)

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    with jax.default_matmul_precision("highest"):
        for step, window in enumerate(windows):
            window_sums: Any = (jnp.zeros(()), jnp.zeros((), jnp.int32), zeros)
            seen = []
            for arrays in zip(window.tokens, window.segments, window.labels, strict=True):
                window_sums, of_batch = accumulate(
                    model, window_sums, arrays, np.float32(window.total)
                )
                seen.append(of_batch)
            loss, count, grads = window_sums
            head_step = _head_step(step, seen, model.head[...], window, grads["head"][...])
            record(float(loss), int(count), head_step)
            update(model, optimizer, grads)


def _head_step(
    step: int, seen: Sequence[tuple[Any, Any]], head: Any, window: Window, gradient: Any
) -> HeadStep:
    hidden, labels = zip(*seen, strict=True)
    return HeadStep(
        step,
        np.stack(hidden),
        np.asarray(head),
        np.stack(labels),
        window.total,
        np.asarray(gradient),
    )


def head_gradient(backend: str, at: HeadStep) -> Float32:
    """The window's head gradient by `backend`'s `chunked_nll`, from the arrays of `at`."""
    batches = list(zip(at.hidden, at.labels, strict=True))
    if backend == "torch":
        import torch

        from xentlib import torch as xt

        head = torch.tensor(at.head, requires_grad=True)
        for hidden, labels in batches:
            output = xt.chunked_nll(
                torch.tensor(hidden), head, torch.tensor(labels), denominator=at.denominator
            )
            output.loss.backward()
        assert head.grad is not None
        return head.grad.numpy()
    if backend == "jax":
        import jax
        import jax.numpy as jnp

        from xentlib import jax as xj

        def loss_of(head: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
            loss: jax.Array = xj.chunked_nll(hidden, head, labels, denominator=at.denominator).loss
            return loss

        gradient_of = jax.grad(loss_of)
        head_of = jnp.array(at.head)
        total = jnp.zeros_like(head_of)
        with jax.default_matmul_precision("highest"):
            for hidden, labels in batches:
                total = total + gradient_of(head_of, jnp.array(hidden), jnp.array(labels))
        return np.asarray(total)
    raise ValueError(f"`backend` must be 'torch' or 'jax'; got {backend!r}.")


def relative_distance(got: Float32, want: Float32) -> float:
    """rho: ||got - want||_F / ||want||_F in units of u, in float64."""
    difference = got.astype(np.float64) - want
    scale = np.linalg.norm(want.astype(np.float64))
    distance = np.linalg.norm(difference)
    return 0.0 if distance == 0.0 else float(distance / scale / U)


def compare(
    backends: Sequence[str],
    windows: Sequence[Window],
    weights: Weights,
    *,
    sizes: ModelSizes,
    optimizer: AdamW = AdamW(),
    progress: Progress | None = None,
) -> TrainingReport:
    """Train in each of `backends` and hold the runs against each other, as the module says.

    With one backend there is its curve, its counts and whether it learns; nothing of the other
    framework is loaded.
    """
    report = TrainingReport()
    case = _case(windows, sizes)
    both = {"torch", "jax"} <= set(backends)

    def head_against_jax(at: HeadStep) -> None:
        report.head_rho.append(relative_distance(at.gradient, head_gradient("jax", at)))

    for backend in backends:
        observe = head_against_jax if both and backend == "torch" else None
        run = train(
            backend,
            windows,
            weights,
            sizes=sizes,
            optimizer=optimizer,
            observe=observe,
            progress=progress,
        )
        report.curves.append(run.curve)
        report.measurements.extend((_counts(run.curve, windows, case), _learnt(run.curve, case)))
    if both:
        entries = len(report.head_rho) * sizes.vocab * sizes.hidden
        worst = int(np.argmax(report.head_rho))
        where = f"{case}; largest at step {worst + 1}"
        report.measurements.append(
            _at_most(
                "A9", "torch/jax", where, "d weight", "rho", max(report.head_rho), A9_BOUND, entries
            )
        )
        report.measurements.append(_curves(report.curves, case))
    return report


def _case(windows: Sequence[Window], sizes: ModelSizes) -> str:
    micro_batches, batch, length = windows[0].tokens.shape
    return (
        f"training, fp32, {len(windows)} steps of {micro_batches} x [{batch}, {length}], "
        f"H={sizes.hidden}, V={sizes.vocab}"
    )


def _at_most(
    row: str,
    backend: str,
    case: str,
    quantity: str,
    metric: str,
    value: float,
    bound: float,
    entries: int,
) -> Measurement:
    # NaN passes nothing.
    return Measurement(row, backend, case, quantity, metric, value, bound, value <= bound, entries)


def _counts(curve: TrainingCurve, windows: Sequence[Window], case: str) -> Measurement:
    unequal = sum(n != window.total for n, window in zip(curve.tokens, windows, strict=True))
    return _at_most(
        "A0",
        curve.backend,
        case,
        "window tokens",
        "unequal entries",
        float(unequal),
        0.0,
        len(windows),
    )


def _learnt(curve: TrainingCurve, case: str) -> Measurement:
    last = curve.losses[-max(1, len(curve.losses) // 8) :]
    value = float(np.mean(last)) / curve.losses[0]
    quantity = "last losses / first"
    return _at_most(
        "curve", curve.backend, case, quantity, "ratio", value, LEARNT_BOUND, len(curve.losses)
    )


def _curves(curves: Sequence[TrainingCurve], case: str) -> Measurement:
    losses = {curve.backend: np.array(curve.losses) for curve in curves}
    apart = np.abs(losses["torch"] - losses["jax"]) / np.abs(losses["jax"])
    where = f"{case}; largest at step {int(np.argmax(apart)) + 1}"
    return _at_most(
        "curve", "torch/jax", where, "loss", "relative", float(apart.max()), CURVE_BOUND, apart.size
    )


def run_training(
    backends: Sequence[str] = ("torch", "jax"),
    *,
    text: Path | None = None,
    seed: int = 0,
    steps: int = 40,
    progress: Progress | None = None,
) -> TrainingReport:
    """The whole training part: text, vocabulary of 8192, windows, weights, both runs, the report.

    Args:
        backends: what is installed and wanted: ("torch", "jax"), or one of them.
        text: the user's file; None for the standard library's sources.
        seed: of the windows and of the weights.
        steps: optimizer steps.
        progress: called with ("text", 0 or 1, 1), then (backend, steps done, steps).

    Raises:
        ValueError: a text that cannot be used.
        ModuleNotFoundError: `tokenizers`, or a framework that was asked for, is missing.
    """
    if progress is not None:
        progress("text", 0, 1)
    documents = read_documents(text)
    tokenizer = train_tokenizer(documents)
    sizes = ModelSizes(vocab=tokenizer.get_vocab_size())
    encoded = encode_documents(tokenizer, documents)
    windows = make_windows(encoded, steps=steps, length=sizes.length, seed=seed)
    if progress is not None:
        progress("text", 1, 1)
    weights = initial_weights(sizes, seed)
    return compare(backends, windows, weights, sizes=sizes, progress=progress)
