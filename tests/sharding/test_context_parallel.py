"""Log-probabilities of sequences that are spread over ranks, by docs/context-parallel.md's own
functions, beside one process in float64."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.held import hold_in_norm
from helpers.labels import zigzag
from helpers.pages import losses
from helpers.ranks import launch
from xentlib import PaddedVocab

PAGE = Path(__file__).resolve().parents[2] / "docs" / "context-parallel.md"
if not PAGE.is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

V, H, LENGTH = 83, 12, 24
LAYOUTS = ("contiguous", "zigzag")
# Of two rows the sequence and the length of each: one of a single token, and padding.
ROWS = (((3, 9), (-1, 2), (0, 12), (4, 1)), ((1, 5), (2, 16), (-1, 3)))
ADVANTAGE = np.float32([0.9, -0.3, 0.4, 1.6, 0.7])


def functions(backend: str) -> dict[str, Any]:
    """Those of the page; its imports and no more of what it does."""
    code = losses("docs/context-parallel.md", PAGE.read_text(encoding="utf-8"))
    body = ast.parse(code["sequence_loss", backend]).body
    kept = [x for x in body if isinstance(x, ast.FunctionDef | ast.Import | ast.ImportFrom)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(kept, []), "docs/context-parallel.md", "exec"), names)
    return names


def batch() -> dict[str, Any]:
    """In the order of the arguments."""
    rng = np.random.default_rng(2)
    sequence = np.array([[s for s, n in row for _ in range(n)] for row in ROWS], np.int32)
    return {
        "hidden": rng.standard_normal((2, LENGTH, H)).astype(np.float32),
        "head": (rng.standard_normal((V, H)) / 3).astype(np.float32),
        "old": (-4 + 0.3 * rng.standard_normal(sequence.shape)).astype(np.float32),
        "tokens": rng.integers(0, V, sequence.shape).astype(np.int32),
        "sequence": sequence,
    }


def alone() -> list[Any]:
    """Loss and gradients of full logits in float64, a sequence at a time."""
    import torch

    given = batch()
    hidden, head = (torch.tensor(given[k]).double().requires_grad_() for k in ("hidden", "head"))
    logprobs = (hidden @ head.T).log_softmax(-1)
    loss = torch.zeros((), dtype=torch.float64)
    for s, advantage in enumerate(ADVANTAGE.tolist()):
        rows, at = np.nonzero(given["sequence"] == s)
        terms = [
            logprobs[rows[0], t - 1, int(given["tokens"][rows[0], t])]
            - float(given["old"][rows[0], t - 1])
            for t in at[1:].tolist()
        ]
        mean = sum(terms) / max(len(terms), 1)
        loss = loss - advantage * torch.as_tensor(mean, dtype=torch.float64).exp()
    (loss / len(ADVANTAGE)).backward()
    return [loss.detach().numpy() / len(ADVANTAGE), hidden.grad.numpy(), head.grad.numpy()]


def cut(x: Any, layout: str, rank: int, world: int) -> Any:
    """A rank's part of the second dimension."""
    if layout == "contiguous":
        return x[:, rank * LENGTH // world : (rank + 1) * LENGTH // world]
    return x[:, zigzag(np.arange(LENGTH), rank, world)]


def joined(parts: list[Any], layout: str) -> Any:
    """Rows again, of all ranks' parts."""
    whole = np.empty((2, LENGTH, *parts[0].shape[2:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[:, cut(np.arange(LENGTH)[None], layout, rank, len(parts))[0]] = part
    return whole


def spread(rank: int, world: int) -> dict[Any, Any]:
    """Loss, d hidden of this rank's tokens, and d head: the sum over ranks, or of this rank's
    rows."""
    import torch
    import torch.distributed as dist

    from xentlib.torch import chunked_nll, next_token_labels

    page = functions("torch")
    page["cp"] = dist.group.WORLD
    found = {}
    for layout in LAYOUTS:
        given = {k: torch.tensor(v) for k, v in batch().items()}
        head = given.pop("head")
        hidden, *rest = (cut(x, layout, rank, world).clone() for x in given.values())
        for sharded in (False, True):
            x = hidden.clone().requires_grad_()
            rows = head.tensor_split(world)[rank].clone() if sharded else head.clone()
            over = {"vocab_parallel": page["cp"], "tokens_parallel": page["cp"]} if sharded else {}
            last = (torch.tensor(ADVANTAGE), layout)
            loss = page["sequence_loss"](x, rows.requires_grad_(), *rest, *last, **over)
            loss.backward()
            if not sharded:
                dist.all_reduce(rows.grad)
            found[layout, sharded] = [y.detach().numpy() for y in (loss, x.grad, rows.grad)]
        labels = next_token_labels(rest[1], sequence_parallel=page["cp"], layout=layout)
        count = (labels != -100).sum()
        dist.all_reduce(count)
        rows = head.clone().requires_grad_()
        loss = chunked_nll(hidden, rows, labels, denominator=count).loss
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        dist.all_reduce(rows.grad)
        found[layout, "nll"] = [int(count), loss.numpy(), rows.grad.numpy()]
    return found


def mean_over_tokens() -> list[Any]:
    import torch

    given = batch()
    hidden, head = (torch.tensor(given[k]).double() for k in ("hidden", "head"))
    logits = hidden[:, :-1].flatten(0, 1) @ head.requires_grad_().T
    labels = torch.tensor(given["tokens"])[:, 1:].flatten().long()
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    return [loss.detach().numpy(), head.grad.numpy()]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("world", [2, 4])
def test_sequences_over_ranks_are_those_of_one_process(world: int) -> None:
    """A5, A6: with a whole head, and with its rows on the same ranks; D8: each token counts
    once."""
    pytest.importorskip("torch")
    ranks = launch(world, spread)
    want, of_tokens = alone(), mean_over_tokens()
    for key in ranks[0]:
        layout, kind = key
        if kind == "nll":
            for rank in ranks:
                assert rank[key][0] == 2 * (LENGTH - 1)
                hold_in_norm(rank[key][1:], of_tokens, str(key))
            continue
        parts = [rank[key][1] for rank in ranks]
        heads = [rank[key][2] for rank in ranks]
        for rank, d_rows in enumerate([np.concatenate(heads)] if kind else heads):
            loss = ranks[rank][key][0]
            assert loss == ranks[0][key][0]
            hold_in_norm([loss, d_rows], want[::2], str(key))
        hold_in_norm([joined(parts, layout)], want[1:2], str(key))


@pytest.mark.jax
@pytest.mark.torch
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_over_devices_are_those_of_one_process(layout: str, sharded: bool) -> None:
    """A5, A6, as above; the gradient of the head is summed by `shard_map`."""
    pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    from helpers.mesh_jax import mesh_of

    page, world, over = functions("jax"), 4, {}
    row = jax.P(None, "cp")
    given = batch()
    if sharded:
        given["head"] = np.pad(given["head"], ((0, -V % world), (0, 0)))
        over = {"vocab_parallel": PaddedVocab("cp", V), "tokens_parallel": "cp"}
    spec = jax.P("cp") if sharded else jax.P()
    mapped = jax.shard_map(
        lambda *x: page["sequence_loss"](*x, ADVANTAGE, layout, **over),
        mesh=mesh_of(jax.sharding.AxisType.Auto, cp=world),
        in_specs=(row, spec, row, row, row),
        out_specs=jax.P(),
    )

    def laid(x: Any) -> Any:
        return np.concatenate([cut(x, layout, rank, world) for rank in range(world)], 1)

    arguments = [x if name == "head" else laid(x) for name, x in given.items()]
    loss, (d_hidden, d_head) = jax.jit(jax.value_and_grad(mapped, (0, 1)))(*arguments)
    parts = np.split(np.array(d_hidden), world, 1)
    hold_in_norm([loss, joined(parts, layout), np.array(d_head)[:V]], alone())


@pytest.mark.torch
def test_other_gradients_are_not_those_of_one_process() -> None:
    """A14: the mean over ranks in place of the sum, a token too far, pieces in another order."""
    pytest.importorskip("torch")
    loss, d_hidden, d_head = alone()
    parts = [cut(d_hidden, "zigzag", rank, 2) for rank in range(2)]
    wrong = [(d_head / 2, d_head), (np.roll(d_hidden, 1, 1), d_hidden)]
    wrong += [(loss / 2, loss), (joined(parts, "contiguous"), d_hidden)]
    for got, want in wrong:
        with pytest.raises(AssertionError):
            hold_in_norm([got], [want])
    hold_in_norm([joined(parts, "zigzag")], [d_hidden])
