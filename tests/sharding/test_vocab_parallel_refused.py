"""Vocabularies spread over gloo ranks: what `vocab_parallel=` refuses, and what ranks must have
alike.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.ranks import launch
from helpers.vocab_shards import PLAIN
from xentlib.tools.harness.problems import build

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def refusals(rank: int, world: int) -> list[str]:
    from xentlib.torch import chunked_nll

    group = torch.distributed.group.WORLD
    mesh = torch.distributed.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    weight = torch.randn(10, 4)
    torch.manual_seed(0)
    hidden, labels = torch.randn(8, 4), torch.full((8,), 20)
    said = []
    for parallel in (group, mesh, "tp"):
        try:
            chunked_nll(hidden, weight, labels, vocab_parallel=parallel)
        except (ValueError, TypeError) as error:
            said.append(str(error))
    labels = torch.arange(8)
    dense = chunked_nll(hidden, weight, labels, vocab_parallel=mesh["tp"]).loss
    again = chunked_nll(hidden, weight, labels, vocab_parallel=group).loss
    return [*said, str(bool(dense == again))]


def test_bad_calls_say_so() -> None:
    """A label outside the whole vocabulary (not the shard) raises on every rank; a mesh must be
    one-dimensional; a submesh is as good as its group."""
    for label, mesh, name, same in launch(2, refusals):
        assert "`labels` must lie in [0, 20)" in label
        assert "`vocab_parallel` must be a one-dimensional DeviceMesh; got 2" in mesh
        assert "`vocab_parallel` must be a ProcessGroup" in name
        assert same == "True"


# What ranks must have alike, by the argument that differs on rank 1, and what every rank says.
SAME = "must be the same on every rank of `vocab_parallel`; got ranks that differ"
DIFFERENT = {
    "labels": ("labels", f"`labels` {SAME}. Give them the same tokens"),
    "which labels count": ("where", f"`labels` {SAME}"),
    "slices of the sequence": ("hidden", f"`labels` {SAME}. Give them the same tokens"),
    "hidden": ("hidden", f"`hidden` {SAME}. Give them the same tokens"),
    "temperature": ("temperature", f"`temperature` {SAME}"),
    "temperatures": ("temperature", f"`temperature` {SAME}"),
    "token_weights": ("token_weights", f"`token_weights` {SAME}"),
    "class weights of equal sums": ("class_weights", f"`class_weights` {SAME}"),
    "two class weights swapped": ("class_weights", f"`class_weights` {SAME}"),
    "class weights on one rank": ("class_weights", f"`class_weights` {SAME}"),
    "z_loss": ("z_loss", f"`z_loss` {SAME}"),
    "label_smoothing": ("label_smoothing", f"`label_smoothing` {SAME}"),
    "softcap": ("softcap", f"`softcap` {SAME}"),
    "logit_scale": ("logit_scale", f"`logit_scale` {SAME}"),
    "denominator": ("denominator", f"`denominator` {SAME}"),
    "gradient": ("gradient", "`hidden` must require grad on every rank of `vocab_parallel`, or on"),
    "whole head": ("weight", "must come with this rank's part of 157 classes; got all of them on"),
    "whole head, declared": ("weight", "must come with this rank's part of 157 classes; got all"),
    "whole head, tokens": ("weight", "must come with this rank's part of 157 classes; got all of"),
    "whole kernel": ("weight", "must come with this rank's part of 157 classes; got all of them"),
    "label": ("labels", r"`labels` must lie in [0, 157) or equal `ignore_index` (-100); got 157"),
}


def differing(rank: int, world: int, reading: bool) -> list[tuple[str, list[Any]]]:
    """Each of DIFFERENT, through the functions that take it; and what may differ."""
    from xentlib import VocabShard
    from xentlib.torch import chunked_logprobs, chunked_nll
    from xentlib.torch.core import vocab

    group, problem = torch.distributed.group.WORLD, build(PLAIN, 7)
    shard = VocabShard.of_ranks(79 - rank, group)
    every = {"vocab_parallel": shard, "max_chunk_bytes": 16 * 80 * 4}
    hidden, whole = torch.tensor(problem.hidden), torch.tensor(problem.weight)
    labels = torch.tensor(problem.labels)
    mine = whole[:79] if rank == 0 else whole[79:]
    if not reading:
        vocab.host_readable = lambda x: False
    tokens = torch.linspace(0.5, 2.0, len(labels))
    places = torch.arange(157)
    places[[1, 3]] = places[[3, 1]] if rank else places[[1, 3]]
    differ: dict[str, dict[str, Any]] = {
        "labels": {"labels": labels.roll(rank)},
        "which labels count": {"where": torch.arange(len(labels)) != 3 + 4 * rank},
        "slices of the sequence": {
            "hidden": hidden[30 * rank : 30 * rank + 30],
            "labels": labels[30 * rank : 30 * rank + 30],
        },
        "hidden": {"hidden": hidden.roll(rank, 0)},
        "temperature": {"temperature": 0.7 + 0.1 * rank},
        "temperatures": {"temperature": tokens.roll(20 * rank)},
        "token_weights": {"token_weights": tokens.roll(20 * rank)},
        # A sum takes no weight from the denominator, which would differ too.
        "class weights of equal sums": {
            "class_weights": torch.linspace(0.5, 1.5, 157).roll(rank),
            "reduction": "sum",
        },
        "two class weights swapped": {
            "class_weights": torch.linspace(0.5, 1.5, 157)[places],
            "reduction": "sum",
        },
        "class weights on one rank": {
            "class_weights": torch.ones(157) if rank else None,
            "reduction": "sum",
        },
        "z_loss": {"z_loss": 1e-4 * (1 + rank)},
        "label_smoothing": {"label_smoothing": 0.1 + 0.1 * rank},
        "softcap": {"softcap": 5.0 + rank},
        "logit_scale": {"logit_scale": torch.tensor(1.0 + rank / 16)},
        "denominator": {"denominator": 40 + rank},
        "gradient": {"hidden": hidden.clone().requires_grad_(rank == 0)},
        "whole head": {"weight": whole, "vocab_parallel": group},
        "whole head, declared": {
            "weight": whole,
            "vocab_parallel": VocabShard.of_ranks(len(whole), group),
        },
        "whole head, tokens": {
            "weight": whole,
            "vocab_parallel": VocabShard.of_ranks(len(whole), group),
            "tokens_parallel": group,
            "hidden": hidden + rank,
        },
        "whole kernel": {
            "weight": whole.T.contiguous(),
            "weight_layout": "HV",
            "vocab_parallel": group,
        },
        "label": {"labels": torch.where(torch.arange(len(labels)) == 5, 157, labels)},
    }
    said = []
    assert differ.keys() == DIFFERENT.keys()
    nll_alone = ("token_weights", "z_loss", "label_smoothing", "denominator", "gradient")
    nll_alone += tuple(name for name in differ if name.startswith(("class w", "two class")))
    if not reading:
        del differ["gradient"]  # one rank would wait for the other's sum of d hidden
    for name, options in differ.items():
        arguments = {"hidden": hidden, "weight": mine, "labels": labels} | every | options
        found: list[Any] = []
        for function in (chunked_nll, chunked_logprobs)[: 1 if name in nll_alone else 2]:
            try:
                alone = function is chunked_nll and "tokens_parallel" in options
                out = function(**arguments, **({"reduction": "sum"} if alone else {}))
                found.append(bool(out[0].isnan().any()))
            except ValueError as error:
                found.append(str(error))
        said.append((name, found))
    return said


@pytest.mark.parametrize("reading", [True, False], ids=["read", "not read"])
def test_what_differs_between_ranks_is_refused(reading: bool) -> None:
    """Where the numbers may be read every rank raises the same, else every rank has NaN. Catches: a
    gather forgotten under sequence parallelism, labels of another batch, the whole head on every
    rank (its loss + log P), options of another run."""
    for said in launch(2, differing, reading):
        for name, found in said:
            for one in found:
                if reading or name == "label":  # which is on a CPU
                    assert DIFFERENT[name][1] in one, (name, one)
                else:
                    assert one is True, (name, one)


def not_differing(rank: int, world: int) -> list[float]:
    """What may differ: roundings, what is in rows that do not count, objects that were built anew
    on one rank alone, heads of one size here and of other sizes there."""
    from xentlib import VocabShard
    from xentlib.torch import chunked_nll

    group, problem = torch.distributed.group.WORLD, build(PLAIN, 7)
    hidden, whole = torch.tensor(problem.hidden), torch.tensor(problem.weight)
    labels, rows = torch.tensor(problem.labels), torch.tensor(problem.labels)[:, None]
    want = chunked_nll(hidden, whole, labels).loss

    def off(
        size: int,
        *,
        fresh: bool = False,
        hidden: Any = hidden,
        whole: Any = whole,
        want: Any = want,
    ) -> float:
        mine = whole[:size] if rank == 0 else whole[size:]
        weight = torch.nn.Parameter(mine.clone()) if fresh else mine
        shard = VocabShard.of_ranks(len(mine), group)
        loss = chunked_nll(hidden, weight, labels, vocab_parallel=shard).loss
        return float((loss - want).abs())

    junk = torch.where(rows == -100, torch.full_like(hidden, 1e3 * rank), hidden)
    low = hidden.bfloat16().float() if rank else hidden
    found = [off(79), off(79, fresh=rank == 0), off(79, hidden=junk), off(100), off(79), off(157)]
    longer = torch.cat([whole, whole[:3] / 2])  # rank 0 has as many rows of it
    found += [off(79, whole=longer, want=chunked_nll(hidden, longer, labels).loss), off(79)]
    return [*found, off(79, hidden=low) > 0]


def test_what_may_differ_between_ranks() -> None:
    """A13. Catches: an exchange of sizes that one rank makes alone, because its parameter is new;
    numbers of tokens that do not count."""
    for *same, rounded in launch(2, not_differing):
        assert max(same) < 2.0**-20
        assert rounded
