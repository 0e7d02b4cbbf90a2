"""The audit on two ranks: gloo processes of PyTorch in one launch, two devices of JAX."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from helpers.collected import collected
from helpers.orphans import remove_locks
from helpers.ranks import launch
from xentlib import processes
from xentlib.tools.harness.ranks import PRELOADED


def on_rank(rank, world, numbers):
    from helpers import audited_ranks as steps
    from xentlib.torch.audit import audit

    found = {}
    for k in numbers:
        _, step, options = steps.ON_RANKS[k]
        report = audit(step, kind="step", **options)
        found[k] = (", ".join(x.title for x in report.findings), str(report))
    return found


@pytest.fixture(scope="module")
def on_two(request):
    from helpers.audited_ranks import ON_RANKS

    every = range(len(ON_RANKS))
    return launch(2, on_rank, collected(request, every, *every[-2:], test="test_on_gloo_ranks"))


def names(framework, module):
    if find_spec(framework) is None:
        return []
    steps = import_module(module)
    return [
        pytest.param(k, case[0], id=f"{case[0] or 'right'}-{k}")
        for k, case in enumerate(steps.ON_RANKS)
    ]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("k", "name"), names("torch", "helpers.audited_ranks"))
def test_on_gloo_ranks(on_two, k, name):
    """Every rank has the same report."""
    first, second = (found[k] for found in on_two)
    assert first[0] == name, first[1]
    assert first == second


@pytest.mark.torch
@pytest.mark.slow
def test_on_gloo_ranks_beside_the_name(on_two):
    """A loss of each rank's own is a note; a rank without a token breaks what divides by its own
    number of them."""
    pytest.importorskip("torch")
    (_, local), (_, own) = [on_two[0][k] for k in sorted(on_two[0])[-2:]]
    assert local.startswith("nothing found")
    assert "note: the loss is each rank's own" in local
    assert "right with: an empty micro-batch, an empty rank" in local
    assert own.startswith("right on plain numbers, and wrong with an empty rank")
    assert "\nwrong with:\n  an empty rank: gradients of the head: inf or NaN\n" in own


def starting(rank, world, folder):
    """A step that starts the group itself."""
    from helpers.audited_torch import one_batch
    from xentlib.tools.harness.ranks import start_gloo
    from xentlib.torch.audit import audit

    def step(head, micro_batches):
        start_gloo(rank, world, folder)
        return one_batch(head, micro_batches)

    with pytest.raises(ValueError, match="the group of processes") as said:
        audit(step)
    return str(said.value)


@pytest.mark.torch
@pytest.mark.slow
def test_a_step_that_starts_the_group_is_refused():
    remove_locks()
    said = processes.launch(starting, 2, seconds=240, preload=PRELOADED)
    assert all("as it is; got one of 2 ranks after it and of 0 before" in x for x in said), said


@pytest.mark.jax
@pytest.mark.parametrize(("k", "name"), names("jax", "helpers.audited_jax"))
def test_on_devices(k, name):
    from helpers import audited_jax as steps
    from xentlib.jax.audit import audit

    _, step, options = steps.ON_RANKS[k]
    report = audit(step, kind="step", ranks=2, **options)
    assert ", ".join(x.title for x in report.findings) == name, report
