"""The audit of steps that strangers wrote, `helpers/planted/`: it finds that the wrong ones are
wrong and that the right ones are right. The ordinary suite has some of each kind, `--full` all.
`python -m helpers.planted.verdicts` prints what is said of each."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

import pytest

from helpers.planted import verdicts
from helpers.ranks import launch

# One of each kind, of what is cheap.
ORDINARY = {
    "torch_labels": ["shifted_in_the_model_and_in_the_loss", "mask_not_shifted", "padding_trained"],
    "torch_divisors": [
        "chunk_means_averaged",
        "each_clipped",
        "slightly_too_much",
        "nan_for_a_row",
    ],
    "torch_logits": ["softcap_straight_through", "smoothed_over_ignored_tokens", "z_loss_detached"],
    "torch_numerics": ["tf32", "bf16_accumulator", "nan_behind_where"],
    "torch_loops": ["upstream_of_the_first_token", "bias_of_ignored_tokens", "dropout"],
    "functions": ["chunk_means", "entropy_before_the_temperature", "selective"],
    "torch_right": [
        "running_mean",
        "chunk_by_chunk",
        "blocks_of_classes",
        "folded",
        "large_logits",
    ],
    "ranks_wrong": ["synced_at_the_first", "sums_under_a_mean", "bias_not_reduced"],
    "ranks_right": ["a_vocabulary_over_ranks", "logs_its_own_mean", "division_undone"],
    "jax_wrong": ["smoothed_empty_rows", "last_of_the_scan", "bias_in_a_closure", "not_reduced"],
    "jax_right": ["linen_model_tree", "with_auxiliary", "by_custom_vjp", "mapped"],
}


def cases(framework, modules):
    if find_spec(framework) is None:
        return []
    return [
        pytest.param(
            module,
            name,
            id=f"{module}-{name}",
            marks=[] if name in ORDINARY[module] else pytest.mark.full,
        )
        for module in modules
        for name in verdicts.table(module)
    ]


def judged(backend, module, name):
    audit = importlib.import_module(f"xentlib.{backend}.audit").audit
    return verdicts.judged(verdicts.table(module)[name], audit)


def fits(verdict):
    assert verdict.of in verdicts.WELL, f"{verdict.of}: {verdict.title}\n{verdict.text}"


@pytest.mark.torch
@pytest.mark.parametrize(("module", "name"), cases("torch", verdicts.TORCH))
def test_in_torch(module, name):
    fits(judged("torch", module, name))


@pytest.mark.jax
@pytest.mark.parametrize(("module", "name"), cases("jax", verdicts.JAX))
def test_in_jax(module, name):
    fits(judged("jax", module, name))


@cache
def on_two(full):
    names = None if full else [*ORDINARY["ranks_wrong"], *ORDINARY["ranks_right"]]
    return launch(2, verdicts.on_rank, verdicts.RANKS, names)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), cases("torch", verdicts.RANKS))
def test_on_two_ranks(module, name, request):
    """Every rank says the same."""
    first, second = (found[name] for found in on_two(request.config.getoption("--full")))
    fits(first)
    assert first == second
