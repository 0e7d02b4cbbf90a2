"""Training as proof: a small language model in PyTorch and in JAX, from the same weights and text.

Each step is a window of four micro-batches of uneven token counts, one of which is empty once; the
last window is short. `TokenNormalizer` and `token_normalized` make each window one batch, AdamW
follows. What is measured:

* **Counts** (row A0): the valid tokens that a backend saw, against NumPy's own count.
* **Statistics of each window** (rows A0, A9): `TokenNormalizer`'s of the PyTorch run and those of
  `accumulate_grads` for the same hidden states, head and labels: tokens and loss.
* **Head gradients between backends** (row A9), at every step. From the second step on the two runs
  have different weights: fp32 rounding parts them and AdamW, which divides a gradient by its own
  size, amplifies that. Head gradients of two such runs would measure their drift, not the operator.
  So the hidden states, the head and the labels of the PyTorch run go through JAX's
  `accumulate_grads` as they are, and its gradient is held against the one that PyTorch stepped on.
* **Head gradients against the oracle** (row A6), at the first and the last step of each run. This
  is what there is where only one framework is installed.
* **Curves** (row "curve"). The two runs go their own ways from the same first weights; their losses
  may differ by 1e-3 relative, at every step. This is where labels off by one, a mean of means or
  another optimizer shows. Each must also learn: its last losses are below its first.

Importing this module loads neither framework; `train` loads the one it is asked for.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.contract import Bound, check
from xentlib.parity.model import ModelSizes, Weights, initial_weights
from xentlib.parity.progress import Progress, SilentProgress
from xentlib.parity.result import Measurement, Planned, Section, TrainingCurve
from xentlib.parity.text import (
    IGNORE_INDEX,
    Window,
    encode_documents,
    make_windows,
    read_documents,
    train_tokenizer,
)
from xentlib.reference import nll_reference

__all__ = [
    "AdamW",
    "HeadStep",
    "TrainingReport",
    "TrainingRun",
    "compare",
    "compare_curves",
    "head_window",
    "run_training",
    "train",
    "training_section",
]

Float32 = npt.NDArray[np.float32]

NAMES = {"torch": "PyTorch", "jax": "JAX"}
STEPS = 40
CURVES = Bound("relative", 1e-3)  # two fp32 runs of 40 steps part by 3e-7
LEARNT = Bound("ratio", 0.98)  # 0.71 after 40 steps; text without a pattern gains little


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
    loss: float  # of the window, a token
    gradient: Float32  # [V, H], what was stepped on


Observer = Callable[[HeadStep], None]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One backend's run. `curve.tokens` is what the backend counted."""

    curve: TrainingCurve
    head_gradient_norms: tuple[float, ...]  # Frobenius, of every step


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What the training part finds."""

    measurements: list[Measurement] = field(default_factory=list)
    curves: list[TrainingCurve] = field(default_factory=list)


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
        observe: called at every step; the time it takes is not counted.
        progress: told about every step.

    Raises:
        ValueError: an unknown backend.
        ModuleNotFoundError: its framework is not installed; JAX needs flax and optax as well.
    """
    progress = progress or SilentProgress()
    trainers = {"torch": _train_torch, "jax": _train_jax}
    if backend not in trainers:
        raise ValueError(f"`backend` must be 'torch' or 'jax'; got {backend!r}.")
    progress.stage(f"training, {NAMES[backend]}", len(windows))
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
        progress.advance(f"loss {loss:.3f}")
        watching += time.perf_counter() - before

    start = time.perf_counter()
    trainers[backend](windows, weights, sizes, optimizer, record)
    seconds = time.perf_counter() - start - watching
    curve = TrainingCurve(backend, tuple(losses), tuple(tokens), seconds)
    return TrainingRun(curve, tuple(norms))


Record = Callable[[float, int, HeadStep], None]


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """One thread, for a run whose time does not hang on its neighbours.

    On two idle cores a second thread gains nothing at these sizes (10.5 s against 11.2 s). Beside
    another busy process OpenMP's threads wait for each other: 91 s to 148 s. The losses have the
    same bits either way.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train_torch(
    windows: Sequence[Window], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    import torch

    from xentlib import torch as xt
    from xentlib.parity.model_torch import build

    model = build(sizes, weights)
    norm = xt.TokenNormalizer(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adamw.lr,
        betas=adamw.betas,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )

    def step_of(step: int, text: Window) -> None:
        batches = []
        for arrays in zip(text.tokens, text.segments, text.labels, strict=True):
            tokens, segments, labels = map(torch.from_numpy, arrays)
            batches.append((tokens, segments, xt.next_token_labels(labels, segment_ids=segments)))
        optimizer.zero_grad()
        seen = []
        with norm.window(labels=[labels for *_, labels in batches]) as window:
            for tokens, segments, labels in window.micro_batches(batches):
                hidden = model(tokens, segments)
                window.backward(xt.chunked_nll(hidden, model.head, labels, reduction="sum"))
                seen.append((hidden.detach().numpy(), labels.numpy()))
        loss, count = window.stats.loss.item(), int(window.stats.num_tokens)
        assert model.head.grad is not None
        record(loss, count, _head_step(step, seen, model.head.detach(), loss, model.head.grad))
        optimizer.step()

    with _one_torch_thread():
        for step, text in enumerate(windows):
            step_of(step, text)


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
    adam = optax.adamw(adamw.lr, *adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay)
    inner = optax.chain(optax.GradientTransformation(lambda p: p, _keep), adam)
    optimizer = nnx.Optimizer(model, xj.token_normalized(inner), wrt=nnx.Param)

    @nnx.jit
    def micro_batch(model: LanguageModel, optimizer: Any, arrays: Any, is_last: Any) -> Any:
        tokens, segments, labels = arrays
        labels = xj.next_token_labels(labels, segment_ids=segments)

        def loss_sum_of(model: LanguageModel) -> Any:
            hidden = model(tokens, segments)
            output = xj.chunked_nll(hidden, model.head[...], labels, reduction="sum")
            return output.loss, (output.num_tokens, hidden)

        gradient_of = nnx.value_and_grad(loss_sum_of, has_aux=True)
        (loss_sum, (count, hidden)), gradients = gradient_of(model)
        optimizer.update(model, gradients, token_count=count, is_last=is_last)
        return loss_sum, count, (hidden, labels)

    with jax.default_matmul_precision("highest"):
        for step, text in enumerate(windows):
            head = np.asarray(model.head[...])
            loss_sum, count, seen = 0.0, 0, []
            micro_batches = list(zip(text.tokens, text.segments, text.labels, strict=True))
            for m, arrays in enumerate(micro_batches):
                last = m == len(micro_batches) - 1
                found = micro_batch(model, optimizer, arrays, jnp.bool_(last))
                loss_sum, count = loss_sum + float(found[0]), count + int(found[1])
                seen.append(found[2])
            loss = loss_sum / count
            gradient = nnx.to_pure_dict(optimizer.opt_state.inner[0])["head"]
            record(loss, count, _head_step(step, seen, head, loss, gradient))


def _keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """An optax transformation whose state is the gradient that it has seen last."""
    return updates, updates


def _head_step(
    step: int, seen: Sequence[tuple[Any, Any]], head: Any, loss: float, gradient: Any
) -> HeadStep:
    hidden, labels = zip(*seen, strict=True)
    return HeadStep(
        step,
        np.stack(hidden),
        np.asarray(head),
        np.stack(labels),
        loss,
        np.asarray(gradient),
    )


class HeadWindow(NamedTuple):
    """A window of the head alone, by one backend."""

    loss: float
    num_tokens: int
    gradient: Float32  # [V, H]


def head_window(backend: str, at: HeadStep) -> HeadWindow:
    """The window of `at` through `backend`'s `chunked_nll` and its accumulation."""
    if backend == "torch":
        import torch

        from xentlib import torch as xt

        head = torch.nn.Parameter(torch.tensor(at.head))
        module = torch.nn.ParameterList([head])
        batches = [
            (torch.tensor(hidden), torch.tensor(labels))
            for hidden, labels in zip(at.hidden, at.labels, strict=True)
        ]
        with xt.TokenNormalizer(module).window(labels=[y for _, y in batches]) as window:
            for x, y in window.micro_batches(batches):
                window.backward(xt.chunked_nll(x, head, y, reduction="sum"))
        assert head.grad is not None
        stats, gradient = window.stats, head.grad.numpy()
    elif backend == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            stats, gradient = _head_scan()(at.head, (at.hidden, at.labels))
    else:
        raise ValueError(f"`backend` must be 'torch' or 'jax'; got {backend!r}.")
    return HeadWindow(float(stats.loss), int(stats.num_tokens), np.asarray(gradient))


@cache
def _head_scan() -> Any:
    """Compiled once for each number of micro-batches."""
    import jax

    from xentlib import jax as xj

    def sum_and_count(head: Any, batch: Any) -> Any:
        output = xj.chunked_nll(batch[0], head, batch[1], reduction="sum")
        return output.loss, output.num_tokens

    return jax.jit(lambda head, batches: xj.accumulate_grads(sum_and_count, head, batches))


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

    With one backend there are its curve, its counts, its head gradients against the oracle and
    whether it learns; nothing of the other framework is loaded.
    """
    report = TrainingReport()
    micro_batches, batch, length = windows[0].tokens.shape
    case = (
        f"training, fp32, {micro_batches} x [{batch}, {length}] a window, "
        f"H={sizes.hidden}, V={sizes.vocab}"
    )
    both = {"torch", "jax"} <= set(backends)
    for backend in backends:

        def observe(at: HeadStep, backend: str = backend) -> None:
            step = f"{case}, step {at.step + 1}"
            if both and backend == "torch":
                report.measurements.extend(_against_jax(at, step))
            if at.step in {0, len(windows) - 1}:
                report.measurements.extend(_against_oracle(at, backend, step))

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
        report.measurements.extend(_counts(run.curve, windows, case))
        report.measurements.append(_learnt(run.curve, case))
    if both:
        report.measurements.append(compare_curves(report.curves, case))
    return report


def _against_jax(at: HeadStep, case: str) -> list[Measurement]:
    theirs = head_window("jax", at)
    details: dict[str, Any] = {"backend": "torch/jax", "case": case}
    norm: dict[str, Any] = {"metrics": ("rho / u",), **details}
    valid, gradient = int((at.labels != IGNORE_INDEX).sum()), theirs.gradient
    return [
        *check("A0", theirs.num_tokens, valid, quantity="tokens of a window", **details),
        *check("A9", at.loss, theirs.loss, other=theirs.loss, quantity="loss", **norm),
        *check("A9", at.gradient, gradient, other=gradient, quantity="d weight", **norm),
    ]


def _against_oracle(at: HeadStep, backend: str, case: str) -> list[Measurement]:
    gradient, bound = np.zeros(at.head.shape), np.zeros(at.head.shape)
    total = (at.labels != IGNORE_INDEX).sum()
    for hidden, labels in zip(at.hidden, at.labels, strict=True):
        valid = labels != IGNORE_INDEX
        part = nll_reference(hidden[valid], at.head, labels[valid], denominator=float(total))
        gradient += part.d_weight
        bound += part.bound_weight
    return check(
        "A6",
        at.gradient,
        gradient,
        bound,
        backend=backend,
        case=case,
        quantity="d weight",
    )


def _counts(curve: TrainingCurve, windows: Sequence[Window], case: str) -> list[Measurement]:
    expected = np.array([window.total for window in windows])
    return check(
        "A0",
        np.array(curve.tokens),
        expected,
        backend=curve.backend,
        case=case,
        quantity="tokens of each window",
    )


def _learnt(curve: TrainingCurve, case: str) -> Measurement:
    last = curve.losses[-max(1, len(curve.losses) // 8) :]
    value = float(np.mean(last)) / curve.losses[0]
    return _curve_row(
        curve.backend, case, "last losses over the first", LEARNT, value, len(curve.losses)
    )


def compare_curves(curves: Sequence[TrainingCurve], case: str) -> Measurement:
    """The largest relative distance of the two losses over the steps, |torch - jax| / |jax|."""
    losses = {curve.backend: np.array(curve.losses) for curve in curves}
    apart = np.abs(losses["torch"] - losses["jax"]) / np.abs(losses["jax"])
    worst = f"{case}, most at step {int(np.argmax(apart)) + 1}"
    return _curve_row("torch/jax", worst, "loss", CURVES, float(apart.max()), apart.size)


def _curve_row(
    backend: str, case: str, quantity: str, bound: Bound, value: float, entries: int
) -> Measurement:
    return Measurement(
        "curve",
        backend,
        case,
        quantity,
        bound.metric,
        value,
        bound.value,
        bound.holds(value),
        entries,
    )


def run_training(
    backends: Sequence[str] = ("torch", "jax"),
    *,
    text: Path | None = None,
    seed: int = 0,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> TrainingReport:
    """The whole training part: text, vocabulary of 8192, windows, weights, both runs, the report.

    Args:
        backends: what is installed and wanted: ("torch", "jax"), or one of them.
        text: the user's file; None for the standard library's sources.
        seed: of the windows and of the weights.
        steps: optimizer steps.
        progress: told about the vocabulary and about every step.

    Raises:
        ValueError: a text that cannot be used.
        ModuleNotFoundError: `tokenizers`, or a framework that was asked for, is missing.
    """
    progress = progress or SilentProgress()
    progress.stage("training, vocabulary", 3)
    documents = read_documents(text)
    progress.advance(f"{sum(map(len, documents)):,} characters")
    tokenizer = train_tokenizer(documents)
    sizes = ModelSizes(vocab=tokenizer.get_vocab_size())
    progress.advance(f"{sizes.vocab:,} tokens")
    encoded = encode_documents(tokenizer, documents)
    windows = make_windows(encoded, steps=steps, length=sizes.length, seed=seed)
    progress.advance()
    weights = initial_weights(sizes, seed)
    return compare(backends, windows, weights, sizes=sizes, progress=progress)


def training_section(backends: Sequence[str], *, text: Path | None, seed: int) -> Planned:
    """The training part as a section of a parity run."""

    def run(progress: Progress, slowness: float) -> Section:
        found = run_training(backends, text=text, seed=seed, progress=progress)
        return Section("training", tuple(found.measurements), curves=tuple(found.curves))

    return Planned("training", STEPS, run)
