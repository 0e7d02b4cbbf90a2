"""What a window of `TokenNormalizer` is told of a loss: a sum and its count, or a mean, which it
refuses unless it was divided by the window's own denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from helpers.held import hold_in_norm
from xentlib.accumulate import MODES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import (  # noqa: E402
    N,
    attempt,
    batch_of,
    changed,
    gradients,
    mean_of,
    normalizer,
    run_window,
)
from xentlib.torch import NLLHead, chunked_nll  # noqa: E402
from xentlib.torch import window as window_module  # noqa: E402


def compiled(model: Any, x: Any, y: Any) -> Any:
    return torch.compile(mean_of, backend="aot_eager")(model, x, y)


def checkpointed(model: Any, x: Any, y: Any) -> Any:
    def loss(hidden: Any) -> Any:
        return chunked_nll(hidden, model[1].weight, y, bias=model[1].bias).loss

    return torch.utils.checkpoint.checkpoint(loss, model[0](x), use_reentrant=True)


def router(model: Any, x: Any, y: Any) -> Any:
    return model[0](x).square().mean()


MEANS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "the output": lambda *given: (mean_of(*given),),
    "another denominator": lambda *given: (mean_of(*given, denominator=5.0, reduction="sum"),),
    "changed": lambda *given: (changed(mean_of(*given)),),
    "compiled": lambda *given: (compiled(*given),),
    "compiled, changed": lambda *given: (changed(compiled(*given)),),
    "its loss": lambda *given: (mean_of(*given).loss, N),
    "its loss alone": lambda *given: (mean_of(*given).loss,),
    "its loss, changed": lambda *given: (mean_of(*given).loss + 0.0,),
    "and a router's": lambda *given: (mean_of(*given).loss + 0.01 * router(*given), N),
    "less another's": lambda *given: (mean_of(*given).loss - 0.1 * router(*given), N),
    "of two heads": lambda *given: (mean_of(*given).loss + 0.3 * mean_of(*given).loss, N),
    "compiled, its loss": lambda *given: (compiled(*given).loss,),
    "checkpointed": lambda *given: (checkpointed(*given),),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_refused(name: str, mode: str) -> None:
    """`chunked_nll`'s default; a mean of means that nothing else would show. An `NLLOutput` says
    so, whatever its loss has gone through; a bare loss of which nobody knows has to say what it is
    the sum of."""
    model, norm = normalizer(mode=mode)

    def body(window: Any, *given: Any) -> None:
        window.backward(*MEANS[name](*given))

    said = r"must be a sum over tokens.*Pass reduction='sum'|`num_tokens` must be given with a loss"
    with pytest.raises(ValueError, match=said):
        attempt(norm, model, [batch_of(0)], body)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_said_to_be_divided() -> None:
    """By `window.denominator`, and nothing else: the output says by what."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]

    def divided(
        window: Any, model: Any, x: Any, y: Any, by: float | None = 1.0, **how: Any
    ) -> None:
        if by is not None:
            how["denominator"] = window.denominator * by
        window.backward(mean_of(model, x, y, **how), normalized=True)

    attempt(norm, model, batches, divided)
    got = gradients(model)
    model.zero_grad()
    run_window(norm, model, batches)
    hold_in_norm(got, gradients(model))
    for wrong in (
        partial(divided, by=2.0),
        partial(divided, by=None),
        partial(divided, by=None, reduction="sum"),
    ):
        with pytest.raises(
            ValueError, match=r"must have been divided by `window.denominator` with"
        ):
            attempt(norm, model, batches, wrong)


def test_a_denominator_that_nobody_reads_shows(monkeypatch: Any) -> None:
    """NaN, where reading it would be a wait."""
    monkeypatch.setattr(window_module, "known", lambda x: None)
    model, norm = normalizer()

    def wrong(window: Any, model: Any, x: Any, y: Any) -> None:
        window.backward(mean_of(model, x, y), normalized=True)

    window = attempt(norm, model, [batch_of(0), batch_of(1, 3)], wrong)
    assert torch.isnan(window.stats.loss)
    assert all(torch.isnan(g).all() for g in gradients(model))


def test_a_bare_loss_that_is_a_sum() -> None:
    """With its count, compiled or not."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    run_window(norm, model, batches)
    want = gradients(model)
    for through in (mean_of, torch.compile(mean_of, backend="aot_eager")):
        for bare in (True, False):
            model.zero_grad()

            def body(window: Any, *given: Any, through: Any = through, bare: bool = bare) -> None:
                out = through(*given, reduction="sum")
                assert out.denominator is None
                window.backward(*((out.loss, out.num_tokens) if bare else (out,)))

            attempt(norm, model, batches, body)
            hold_in_norm(gradients(model), want)


def test_a_sum_may_have_further_terms() -> None:
    """Times the number of tokens, or divided so that the window's count weighs them."""
    model, norm = normalizer()
    batches = [batch_of(0), batch_of(1, 3)]
    found = []
    for way in range(3):
        model.zero_grad()

        def body(window: Any, model: Any, x: Any, y: Any, way: int = way) -> None:
            out, mean = mean_of(model, x, y, reduction="sum"), mean_of(model, x, y)
            n = out.num_tokens
            further = 0.3 * n * mean.loss
            if way == 1:
                further = mean_of(model, x, y, denominator=1 / 0.3).loss
            elif way == 2:
                out = mean._replace(loss=n * mean.loss)
            window.backward(out.loss + further, n)

        attempt(norm, model, batches, body)
        found.append(gradients(model))
    hold_in_norm(found[1], found[0])
    hold_in_norm(found[2], found[0])


def test_an_nll_output_brings_its_count() -> None:
    """Post-scale, from the sum that `chunked_nll` returns."""
    model, norm = normalizer(mode="postscale")
    head = NLLHead.from_linear(model[1], reduction="sum")
    batches = [batch_of(0), batch_of(1, 3)]
    with norm.window() as window:
        for x, y in window.micro_batches(batches):
            window.backward(head(model[0](x), y))
    assert window.stats.num_tokens == 13
    got = [p.grad for p in model.parameters()]
    again, fresh = normalizer()
    run_window(fresh, again, batches)
    hold_in_norm(got, gradients(again))
