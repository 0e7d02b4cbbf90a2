"""Pipelines whose head is spread over their ranks, as docs/pipeline.md shows it: a step of one on
ranks and on one process, and how long the ranks of one wait.

Shapes: B rows of a micro-batch, L tokens of a row, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.schedules import (
    _ComputationType as Kind,
)

from helpers.pages import groups
from helpers.titan import Block
from xentlib.torch import count_collectives

V, H, B, L = 101, 15, 2, 12
CHUNK = 8 * V * 4  # bytes of 8 tokens' logits of the whole head
PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


@cache
def shown() -> SimpleNamespace:
    """`insert_losses` and `HeadOverStages` of the page."""
    blocks = [x for group in groups(PAGE.name, PAGE.read_text("utf-8")) for x in group.blocks]
    (block,) = (x for x in blocks if "def insert_losses(" in x.code)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile("\n" * (block.line - 1) + block.code, PAGE.name, "exec"), names)
    return SimpleNamespace(**names)


class Setup(NamedTuple):
    """A pipeline and the losses of it."""

    schedule: str = "Interleaved1F1B"
    stages: int = 2  # of a rank
    micro_batches: int = 4
    ahead: bool = False  # a further loss, of the token after the next


SCHEDULES = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "LoopedBFS": ScheduleLoopedBFS,
}


def one_f_one_b(stages: int, micro_batches: int) -> dict[int, list[Any]]:
    """The order of `Schedule1F1B`, a stage a rank; its own `pipeline_order` has a last rank that
    begins with micro-batch 1 (PyTorch 2.13)."""
    order = {}
    for stage in range(stages):
        first = stages - stage
        forwards = [_Action(stage, Kind.FORWARD, k) for k in range(micro_batches)]
        order[stage] = forwards[:first]
        for k in range(micro_batches):
            order[stage].append(_Action(stage, Kind.FULL_BACKWARD, k))
            order[stage] += forwards[first + k : first + k + 1]
    return order


def make_schedule(setup: Setup, stages: list[Any], loss_fn: Any, **options: Any) -> Any:
    options = {"loss_fn": loss_fn, "scale_grads": False, **options}
    if setup.schedule != "1F1B":
        return SCHEDULES[setup.schedule](stages, setup.micro_batches, **options)
    schedule = _PipelineScheduleRuntime(stages, setup.micro_batches, **options)
    order = one_f_one_b(stages[0].num_stages, setup.micro_batches)
    schedule._prepare_schedule_with_comms(order)
    return schedule


class Further(nn.Module):
    """What a module of multi-token prediction adds: [B, 2, L, H], the model's hidden states, which
    come from the stage before, and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        return torch.stack([x, self.block(x)], 1)


def whole_model(stages: int, *, ahead: bool = False) -> tuple[list[Any], Any]:
    """Parts of a model, one for each stage, and its head."""
    torch.manual_seed(0)
    parts: list[Any] = [Block() for _ in range(stages)]
    parts[0] = nn.Sequential(nn.Embedding(V, H), parts[0])
    norm = nn.RMSNorm(H)
    if ahead:
        parts[-2], parts[-1] = nn.Sequential(parts[-2], norm), Further()
    else:
        parts[-1] = nn.Sequential(parts[-1], norm)
    return parts, nn.Parameter(torch.randn(V, H) / 4)


def batch(setup: Setup) -> tuple[Any, Any]:
    """Ids and labels: as many valid tokens in no two micro-batches, none in the second."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (setup.micro_batches * B, L), generator=generator)
    shifts = (1, 2) if setup.ahead else (1,)
    labels = torch.stack([ids.roll(-k, 1) for k in shifts], 1)
    for k in shifts:
        labels[:, k - 1, -k:] = -100
    for k in range(setup.micro_batches):
        labels[k * B, :, 2 + k :] = -100
    labels[B : 2 * B] = -100
    return ids, labels if setup.ahead else labels[:, 0]


def loss_options(setup: Setup, labels: Any) -> dict[str, Any]:
    """Of the whole step."""
    if not setup.ahead:
        return {"denominator": (labels != -100).sum()}
    factors = torch.tensor([1.0, 0.3]) / (labels != -100).sum((0, 2))
    return {"reduction": "sum", "token_weights": factors[:, None].expand(B, 2, L)}


def sizes_of(world: int) -> list[int]:
    """Rows of each rank, no two alike."""
    sizes = [V // (2 * world) + 5 * k for k in range(world - 1)]
    return [*sizes, V - sum(sizes)]


class Step(NamedTuple):
    loss: float  # NaN but on the rank of the last stage
    gradients: dict[str, Any]
    counts: list[dict[str, int]]  # collectives of each loss
    evaluated: float


def named(parts: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    for k, part in parts.items():
        yield from ((f"{k}.{name}", p) for name, p in part.named_parameters())


def run(
    rank: int, world: int, setup: Setup, make: Callable[..., Any] | None = None, **changed: Any
) -> Step:
    """Two steps, of which the second counts: schedules learn shapes in the first. `make` a class
    in place of `HeadOverStages`; `changed` keywords of `schedule.step`."""
    number = world * setup.stages
    parts, head = whole_model(number, ahead=setup.ahead)
    here = {k: parts[k] for k in range(rank, number, world)}
    rows = nn.Parameter(head.detach().split(sizes_of(world))[rank].clone())
    over = (make or shown().HeadOverStages)(rows, dist.group.WORLD, V)
    stages = [PipelineStage(x, k, number, torch.device("cpu")) for k, x in here.items()]
    schedule = make_schedule(setup, stages, over.loss_fn)
    counts: list[dict[str, int]] = []

    def counted(action: Any, context: Any) -> None:
        with count_collectives() as count:
            over(action, context)
        counts.append(count.counts())

    shown().insert_losses(schedule, counted)
    ids, labels = batch(setup)
    over.options = {**loss_options(setup, labels), "max_chunk_bytes": CHUNK}
    inputs = (ids,) if rank == 0 else ()
    keywords = {"target": labels, **changed}
    for _ in range(2):
        counts.clear()
        losses: list[Any] = []
        for p in (rows, *(p for _, p in named(here))):
            p.grad = None
        schedule.step(*inputs, losses=losses, **keywords)
    gradients = {name: p.grad.numpy() for name, p in named(here)}
    gradients["head"] = rows.grad.numpy().copy()
    evaluated: list[Any] = []
    schedule.eval(*inputs, losses=evaluated, **keywords)
    assert (rows.grad.numpy() == gradients["head"]).all()
    loss, mean = (sum(x).item() if x else float("nan") for x in (losses, evaluated))
    return Step(loss, gradients, counts, mean)


def one_process(world: int, setup: Setup) -> tuple[float, dict[str, Any]]:
    """Full logits in float64, of the whole batch."""
    parts, head = whole_model(world * setup.stages, ahead=setup.ahead)
    model, head = nn.Sequential(*parts).double(), nn.Parameter(head.detach().double())
    ids, labels = batch(setup)
    logits = model(ids) @ head.T
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none"
    ).view(labels.shape)
    valid = labels != -100
    if setup.ahead:
        main, further = (losses[:, k].sum() / valid[:, k].sum() for k in (0, 1))
        loss = main + 0.3 * further
    else:
        loss = losses.sum() / valid.sum()
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in named(dict(enumerate(parts)))}
    return loss.item(), gradients | {"head": head.grad.numpy()}


# --- how long ranks wait --------------------------------------------------------------------------


def of_ranks(setup: Setup, ranks: int, *, losses: bool) -> dict[int, list[Any]]:
    """What each rank computes, in its order."""
    number = ranks * setup.stages
    if setup.schedule == "1F1B":
        order = one_f_one_b(number, setup.micro_batches)
    else:
        made = object.__new__(ScheduleInterleaved1F1B)
        made.n_local_stages, made.pp_group_size = setup.stages, ranks
        made._n_microbatches = setup.micro_batches
        rounds = max(1, setup.micro_batches // ranks)
        made.microbatches_per_round = setup.micro_batches // rounds
        actions = {k: made._calculate_single_rank_operations(k) for k in range(ranks)}
        order = {k: [x for x in found if x is not None] for k, found in actions.items()}
    if not losses:
        return order
    schedule = SimpleNamespace(
        pipeline_order_with_comms=_add_send_recv(order, lambda k: k % ranks, number),
        scale_grads=False,
        _num_stages=number,
        register_custom_function=lambda kind, function: None,
    )
    shown().insert_losses(schedule, None)
    found = schedule.pipeline_order_with_comms
    return {k: [x for x in found[k] if x.is_compute_op] for k in found}


def duration(order: dict[int, list[Any]], seconds: dict[Any, int]) -> int:
    """Of a step in which a message takes no time, and all ranks enter a loss together."""
    last = max(x.stage_index for found in order.values() for x in found)
    clock: Counter[int] = Counter()
    ends: dict[Any, int] = {}
    left = {rank: list(found) for rank, found in order.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, found in left.items():
            while found and found[0].computation_type != shown().LOSS:
                stage, kind, k, _ = found[0]
                to = stage - 1 if kind == Kind.FORWARD else stage + 1
                needed = _Action(to, kind, k)
                if 0 <= to <= last and needed not in ends:
                    break
                clock[rank] = max(clock[rank], ends.get(needed, 0)) + seconds[kind]
                ends[found.pop(0)] = clock[rank]
        if all(left.values()) and len({found[0] for found in left.values()}) == 1:
            at = max(clock.values()) + seconds[shown().LOSS]
            for rank, found in left.items():
                clock[rank] = at
                found.pop(0)
        assert sum(map(len, left.values())) < before, "ranks wait for each other"
    return max(clock.values())
