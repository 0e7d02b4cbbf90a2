"""The calls that messages print of heads and tokens that ranks share, made where they were refused:
of each what it gives on this rank, and what is right there.

Shapes: N tokens of all ranks, H width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from helpers.advice import code_of, keywords_of
from xentlib import PaddedVocab
from xentlib import torch as ours
from xentlib.shards import VocabShard
from xentlib.torch import chunked_nll

WORLD, N, H, V = 4, 12, 3, 26
Values = list[Any]
CASES: dict[str, Callable[[Ranks], tuple[Values, Values]]] = {}


class Ranks:
    """This rank's part of a head, and of its tokens; each rank has the whole of both to compare."""

    def __init__(self, rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, generator = rank, torch.Generator().manual_seed(0)
        self.x = torch.randn(N, H, generator=generator)
        self.w, self.z = (torch.randn(*of, generator=generator) for of in ((V, H), (N, V)))
        self.y = torch.randint(V, (N,), generator=generator)
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        self.two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.tokens = slice(3 * rank, 3 * rank + 3)
        ends = [0, 7, 14, 21, V]  # as `fully_shard` and DTensors cut them
        self.rows = slice(*ends[rank : rank + 2])
        self.group = dist.group.WORLD

    def shard(self) -> VocabShard:
        return VocabShard.of_ranks(self.rows.stop - self.rows.start, self.group)

    def right(self, *, rows: slice | None = None, tokens: slice | None = None) -> Values:
        """Gradients of the sum by hidden states and head, of all tokens, or parts of them."""
        x, w = (leaf.clone().requires_grad_() for leaf in (self.x, self.w))
        chunked_nll(x, w, self.y, reduction="sum").loss.backward()
        return [x.grad[tokens or slice(None)], w.grad[rows or slice(None)]]

    def of_shards(self, x: Any, w: Any, how: dict[str, Any], y: Any = None) -> Values:
        """Gradients by whole hidden states and by rows of the head."""
        x, w = (leaf.detach().requires_grad_() for leaf in (x, w))
        labels = self.y if y is None else y
        chunked_nll(x, w, labels, reduction="sum", **how).loss.backward()
        return [x.grad, w.grad]

    def of_logits(self, parts: tuple[slice, slice]) -> Values:
        """Log-probabilities of tokens, and the gradient by their logits, of columns."""
        z = self.z.clone().requires_grad_()
        logprobs = ours.vocab_parallel_logprobs(z, self.y).logprobs
        logprobs.sum().backward()
        return [logprobs.detach()[parts[0]], z.grad[parts]]

    def fsdp(self) -> Any:
        from torch.distributed.fsdp import fully_shard

        head = torch.nn.Linear(H, V, bias=False)
        with torch.no_grad():
            head.weight.copy_(self.w)
        fully_shard(head, mesh=self.mesh, reshard_after_forward=True)
        return head

    def of_route(self, function: Any, *args: Any, **how: Any) -> Values:
        """A step of a head that `fully_shard` keeps: of this rank's tokens and of all rows."""
        head, x = self.fsdp(), self.x[self.tokens].clone().requires_grad_()
        function(x, head, *args, reduction="sum", **how).loss.backward()
        return [x.grad, head.weight.grad.full_tensor() * WORLD]


Case = Callable[[Ranks], tuple[Values, Values]]


def case(name: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES[f"{name}, {function.__name__}"] = function
        return function

    return keep


@case("SHARDS.whole_head")
def of_the_whole_head(r: Ranks) -> tuple[Values, Values]:
    def call(**how: Any) -> Values:
        return r.of_shards(r.x, r.w, how)

    whole = VocabShard.of_ranks(V, r.group)
    code = code_of(lambda: call(vocab_parallel=whole), "SHARDS.whole_head")
    return call(**keywords_of(code)), r.right()


@case("SHARDS.uneven")
def of_a_group(r: Ranks) -> tuple[Values, Values]:
    def call(**how: Any) -> Values:
        return r.of_shards(r.x, r.w[r.rows], how)

    code = code_of(lambda: call(vocab_parallel=r.group), "SHARDS.uneven", "vocab")
    names = {"VocabShard": VocabShard, "group": r.group, "rows": r.rows.stop - r.rows.start}
    return call(**keywords_of(code, **names)), r.right(rows=r.rows)


@case("SHARDS.uneven")
def of_a_group_that_is_padded(r: Ranks) -> tuple[Values, Values]:
    code = code_of(
        lambda: r.of_shards(r.x, r.w[r.rows], {"vocab_parallel": r.group}), "SHARDS.uneven", "Pad"
    )
    names = {"PaddedVocab": PaddedVocab, "group": r.group, "vocab_size": V}
    rows = torch.cat([r.w, torch.full((2, H), torch.nan)])[7 * r.rank : 7 * r.rank + 7]
    d_x, d_w = r.of_shards(r.x, rows, {"vocab_parallel": eval(code, names)})
    return [d_x, d_w[: r.rows.stop - r.rows.start]], r.right(rows=r.rows)


@case("SHARDS.rows")
def of_another_head_s_shard(r: Ranks) -> tuple[Values, Values]:
    def call(shard: Any) -> Values:
        return r.of_shards(r.x, r.w[r.rows], {"vocab_parallel": shard})

    other = VocabShard.of_ranks(9, r.group)
    code = code_of(lambda: call(other), "SHARDS.rows")
    rows = r.rows.stop - r.rows.start
    right = eval(code, {"VocabShard": VocabShard, "group": r.group, "rows": rows})
    return call(right), r.right(rows=r.rows)


def sharded_logits(r: Ranks, z: Any, **how: Any) -> Values:
    z = z.detach().requires_grad_()
    logprobs = ours.vocab_parallel_logprobs(z, r.y, **how).logprobs
    logprobs.sum().backward()
    return [logprobs.detach(), z.grad]


@case("SHARDS.tiles")
def of_columns_that_overlap(r: Ranks) -> tuple[Values, Values]:
    def call(shard: Any) -> Values:
        return sharded_logits(r, r.z[:, r.rows], vocab_parallel=r.group, shard=shard)

    size = r.rows.stop - r.rows.start
    code = code_of(lambda: call(VocabShard(0, size, V)), "SHARDS.tiles")
    names = {"VocabShard": VocabShard, "start": r.rows.start, "stop": r.rows.stop}
    return call(eval(code, names)), r.of_logits((slice(None), r.rows))


@case("SHARDS.columns")
def of_padded_columns(r: Ranks) -> tuple[Values, Values]:
    size, place = r.rows.stop - r.rows.start, (r.rows.start, r.rows.stop, V)
    padded = torch.cat([r.z[:, r.rows], torch.full((N, 2), torch.nan)], 1)

    def call(shard: Any) -> Values:
        return sharded_logits(r, padded, vocab_parallel=r.group, shard=shard)

    code = code_of(lambda: call(VocabShard(*place)), "SHARDS.columns")
    code = code.replace("..., padding=...", "*place, padding=2")
    logprobs, grad = call(eval(code, {"VocabShard": VocabShard, "place": place}))
    return [logprobs, grad[:, :size]], r.of_logits((slice(None), r.rows))


@case("SHARDS.local_mean")
def of_a_mean_of_local_tokens(r: Ranks) -> tuple[Values, Values]:
    how = {"vocab_parallel": r.shard(), "tokens_parallel": r.group}

    def call(**more: Any) -> Values:
        x, w = r.x[r.tokens].clone().requires_grad_(), r.w[r.rows].clone().requires_grad_()
        chunked_nll(x, w, r.y[r.tokens], **how, **more).loss.backward()
        return [x.grad, w.grad]

    code = code_of(call, "SHARDS.local_mean")
    return call(**keywords_of(code)), r.right(rows=r.rows, tokens=r.tokens)


@case("ROUTES.tokens_alone")
def of_tokens_without_shards(r: Ranks) -> tuple[Values, Values]:
    def call(**how: Any) -> Values:
        return r.of_route(chunked_nll, r.y[r.tokens], **how)

    code = code_of(lambda: call(tokens_parallel=r.group), "ROUTES.tokens_alone")
    return call(**keywords_of(code)), r.right(tokens=r.tokens)


@case("SOFT.stay")
def of_all_probabilities(r: Ranks) -> tuple[Values, Values]:
    dense = torch.nn.functional.one_hot(r.y, V).float()[r.tokens]
    hidden = {"gather": "hidden"}
    code = code_of(lambda: r.of_route(chunked_nll, dense, **hidden), "SOFT.stay", "gather")
    got = r.of_route(chunked_nll, dense, **keywords_of(code))
    few = code_of(lambda: r.of_route(chunked_nll, dense, **hidden), "SOFT.stay", "Soft")
    ids = r.y[r.tokens, None]
    names = {"SoftLabels": ours.SoftLabels, "ids": ids, "probs": torch.ones(ids.shape)}
    got += r.of_route(chunked_nll, eval(few, names), **hidden)
    return got, r.right(tokens=r.tokens) * 2


@case("DIVERGING.logits_stay")
def of_a_teacher_s_logits(r: Ranks) -> tuple[Values, Values]:
    teacher = ours.TeacherLogits(r.z[r.tokens])

    def call(**how: Any) -> Values:
        return r.of_route(ours.chunked_divergence, teacher, **how)

    code = code_of(lambda: call(gather="hidden"), "DIVERGING.logits_stay")
    x, w = (leaf.clone().requires_grad_() for leaf in (r.x, r.w))
    of_all = ours.TeacherLogits(r.z)
    ours.chunked_divergence(x, w, of_all, reduction="sum").loss.backward()
    return call(**keywords_of(code)), [x.grad[r.tokens], w.grad]


@case("PLACEMENTS.nodes")
def of_a_group_for_nodes(r: Ranks) -> tuple[Values, Values]:
    from torch.distributed.device_mesh import init_device_mesh

    def call(tokens: Any) -> Values:
        more = {"gather": "hidden", "tokens_parallel": tokens}
        return r.of_route(chunked_nll, r.y[r.tokens], **more)

    code = code_of(lambda: call(r.group), "PLACEMENTS.nodes")
    names = {"init_device_mesh": init_device_mesh, "device": "cpu", "nodes": 2, "ranks": 2}
    return call(eval(code, names)), r.right(tokens=r.tokens)


# --- a step, and windows --------------------------------------------------------------------------


@case("WINDOWS.rounds")
def of_micro_batches_of_uneven_ranks(r: Ranks) -> tuple[Values, Values]:
    from torch.nn.parallel import DistributedDataParallel

    head = torch.nn.Linear(H, V, bias=False)
    with torch.no_grad():
        head.weight.copy_(r.w)
    model = DistributedDataParallel(head)
    norm = ours.TokenNormalizer(model, nonfinite="drop")
    # One micro-batch on the first rank, three on the others.
    parts = (
        [r.tokens] if r.rank == 0 else [slice(k, k + 1) for k in range(3 * r.rank, 3 * r.rank + 3)]
    )

    def run(window: Any) -> Values:
        head.zero_grad()
        with window as opened:
            for part in opened.micro_batches(parts):
                loss = torch.nn.functional.cross_entropy(
                    model(r.x[part]), r.y[part], reduction="sum"
                )
                opened.backward(loss, part.stop - part.start)
        return [head.weight.grad]

    labels = [r.y[part] for part in parts]
    code = code_of(lambda: run(norm.window(labels=labels)), "WINDOWS.rounds")
    window = eval(code.replace("...", "labels=labels"), {"norm": norm, "labels": labels})
    return run(window), [r.right()[1] / N]


@case("STEPS.group")
def of_torchrun_without_a_group(r: Ranks) -> tuple[Values, Values]:
    """The last one: the group that it leaves is another."""
    import os

    from xentlib.torch.audit import audit

    store = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)] * (r.rank == 0)
    port = [store[0].port if store else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {"RANK": str(r.rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def step(head: Any, micro_batches: Any) -> None:
        every = sum(int((m["targets"] != -100).sum()) for m in micro_batches)
        count = torch.tensor(every)
        dist.all_reduce(count)
        for m in micro_batches:
            out = chunked_nll(
                m["hidden"], head.weight, m["targets"], denominator=count, reduction="sum"
            )
            out.loss.backward()
        for p in head.parameters():
            dist.all_reduce(p.grad)

    code = code_of(lambda: audit(step), "STEPS.group", "torch")
    eval(code, {"torch": torch})
    return [torch.tensor(float(audit(step).passed))], [torch.tensor(1.0)]
