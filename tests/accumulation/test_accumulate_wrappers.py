"""`TokenNormalizer` under real wrappers on gloo ranks, against one process that has all tokens in
one batch.

Shapes: R data ranks, M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.accelerated import start_over
from helpers.collected import collected
from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.windows import H, M, N, V, net, token_losses  # noqa: E402


@dataclass(frozen=True)
class Cell:
    """A row of the table of wrappers (D8)."""

    wrapper: str
    world: int = 2
    mode: str = "precount"
    gas: int = M  # DeepSpeed's gradient_accumulation_steps
    scaled: bool = True  # its scale_wrt_gas
    sums: bool = False
    divide: float | None = None
    weights: bool = False
    normalized: bool = False  # the head divides
    windows: int = 2
    empty: str = ""  # "micro-batch", "rank", "window": the first one
    low: str = ""  # "bf16" parameters; "fp32 sums": of their gradients, with DeepSpeed


CELLS = {
    "plain": Cell("plain", world=1),
    "plain, post-scale": Cell("plain", world=1, mode="postscale"),
    "DDP": Cell("DDP"),
    "DDP, four ranks": Cell("DDP", world=4),
    "DDP, post-scale": Cell("DDP", mode="postscale"),
    "DDP, sums": Cell("DDP", sums=True),
    "DDP, weights": Cell("DDP", weights=True),
    "DDP, weights, post-scale": Cell("DDP", weights=True, mode="postscale"),
    "DDP, head divides": Cell("DDP", normalized=True),
    "DDP, empty micro-batch": Cell("DDP", empty="micro-batch"),
    "DDP, empty rank": Cell("DDP", empty="rank"),
    "DDP, empty window": Cell("DDP", empty="window"),
    "DDP, empty window, post-scale": Cell("DDP", empty="window", mode="postscale"),
    "FSDP2": Cell("FSDP2"),
    "FSDP2, four ranks": Cell("FSDP2", world=4),
    "FSDP2, post-scale": Cell("FSDP2", mode="postscale"),
    "FSDP2, divide factor": Cell("FSDP2", divide=0.5),
    "FSDP2, empty window": Cell("FSDP2", empty="window"),
    "Accelerate": Cell("Accelerate"),
    "Accelerate, post-scale": Cell("Accelerate", mode="postscale"),
    "HSDP": Cell("HSDP", world=4),
    "HSDP, post-scale": Cell("HSDP", world=4, mode="postscale"),
    **{f"ZeRO-{k}": Cell(f"ZeRO-{k}") for k in range(4)},
    **{f"ZeRO-{k}, four ranks": Cell(f"ZeRO-{k}", world=4) for k in (1, 3)},
    **{f"ZeRO-{k}, gas 1": Cell(f"ZeRO-{k}", gas=1) for k in range(4)},
    **{f"ZeRO-{k}, post-scale": Cell(f"ZeRO-{k}", mode="postscale") for k in range(4)},
    **{f"ZeRO-{k}, not by gas": Cell(f"ZeRO-{k}", scaled=False) for k in (1, 3)},
    **{f"ZeRO-{k}, sums": Cell(f"ZeRO-{k}", sums=True) for k in (0, 1, 2)},
    "DDP, bf16": Cell("DDP", low="bf16"),
    "DDP, bf16, post-scale": Cell("DDP", low="bf16", mode="postscale"),
    "FSDP2, bf16": Cell("FSDP2", low="bf16"),
    "FSDP2, bf16, post-scale": Cell("FSDP2", low="bf16", mode="postscale"),
    **{f"ZeRO-{k}, bf16": Cell(f"ZeRO-{k}", low="bf16") for k in range(4)},
    **{
        f"ZeRO-{k}, bf16, post-scale": Cell(f"ZeRO-{k}", low="bf16", mode="postscale")
        for k in range(4)
    },
    **{f"ZeRO-{k}, bf16, fp32 sums": Cell(f"ZeRO-{k}", low="fp32 sums") for k in (1, 2, 3)},
    "ZeRO-3, bf16, fp32 sums, post-scale": Cell("ZeRO-3", low="fp32 sums", mode="postscale"),
    "ZeRO-2, empty rank": Cell("ZeRO-2", empty="rank"),
    "ZeRO-3, empty window": Cell("ZeRO-3", empty="window"),
    "ZeRO-2, empty window, post-scale": Cell("ZeRO-2", empty="window", mode="postscale"),
    # Last: from here on Accelerate takes the CPU for an accelerator.
    "Accelerate, FSDP2": Cell("Accelerate, FSDP2"),
    "Accelerate, FSDP2, post-scale": Cell("Accelerate, FSDP2", mode="postscale"),
}


# Rows of the table in docs/accumulation.md, and what stands for each.
FACTORS = {
    "plain": "plain",
    "DDP": "DDP",
    "DDP with a hook that adds up (`sums=True`)": "DDP, sums",
    "DDP prepared by Accelerate, s steps": "Accelerate",
    "FSDP2": "FSDP2",
    "HSDP": "HSDP",
    "FSDP2, divide factor f on all modules": "FSDP2, divide factor",
    **{f"DeepSpeed, ZeRO-{k}": f"ZeRO-{k}" for k in range(4)},
    "DeepSpeed, `scale_wrt_gas=False`": "ZeRO-3, not by gas",
    "DeepSpeed, `gradient_allreduce_op=sum` (0 to 2)": "ZeRO-2, sums",
}


def data(cell: Cell, window: int) -> tuple[Any, Any, Any]:
    """[R, M, N, H], [R, M, N] labels and weights, of uneven numbers of valid tokens."""
    generator = torch.Generator().manual_seed(window)
    shape = (cell.world, M, N)
    x = torch.randn(*shape, H, generator=generator)
    y = torch.randint(V, shape, generator=generator)
    share = torch.linspace(0.1, 0.8, cell.world * M).reshape(cell.world, M, 1)
    y[torch.rand(shape, generator=generator) < share] = -100
    if window == 0 and cell.empty:
        which = {"micro-batch": (0, 1), "rank": (0,), "window": ()}[cell.empty]
        y[which] = -100
    return x, y, torch.rand(shape, generator=generator) + 0.5


def gradients_of_one_batch(cell: Cell, window: int, dtype: Any = None) -> tuple[list[Any], float]:
    """Sum over tokens / T, and the loss; in float64 unless told."""
    x, y, w = data(cell, window)
    dtype = dtype or torch.float64
    model = net().to(dtype)
    w = torch.where(y != -100, w.double() if cell.weights else 1.0, 0.0).flatten()
    total = float(w.sum())
    loss = (token_losses(model(x.to(dtype)).double(), y) * w).sum() / (total or 1.0)
    loss.backward()
    return [p.grad.double().numpy() for p in model.parameters()], loss.item()


@cache
def accelerator(wrapper: str) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    how: dict[str, Any] = {"cpu": True}
    if wrapper != "Accelerate":
        start_over(cpu_alone=False)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
        )
        how = {"fsdp_plugin": plugin}
    made = Accelerator(**how, gradient_accumulation_steps=M)
    # It starts a thread for each core, which wait for each other at every small product: 33 s of
    # this file's tests, 11 s with one.
    torch.set_num_threads(1)
    return made


def wrapped(cell: Cell) -> Any:
    from torch import distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net()
    if cell.low and cell.wrapper == "DDP":
        model.bfloat16()
    if cell.wrapper == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
        if cell.sums:

            def add_up(state, bucket):  # DDP reads annotations, which are text here
                work = dist.all_reduce(bucket.buffer(), async_op=True)
                return work.get_future().then(lambda done: done.value()[0])

            model.register_comm_hook(None, add_up)
        else:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif cell.wrapper.startswith("Accelerate"):
        made = accelerator(cell.wrapper)
        if cell.wrapper == "Accelerate":
            return made.prepare(model)
        # FSDP2 wants the optimizer too, whose parameters it replaces.
        model, _ = made.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert type(model).__name__.startswith("FSDP")
    elif cell.wrapper in ("FSDP2", "HSDP"):
        shape = (2, 2) if cell.wrapper == "HSDP" else (cell.world,)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        low = torch.bfloat16 if cell.low else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
        for module in (model[1], model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            if cell.divide:
                module.set_gradient_divide_factor(cell.divide)
                module.set_force_sum_reduction_for_comms(True)  # all that gloo can do
    elif cell.wrapper.startswith("ZeRO"):
        import deepspeed

        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed("gloo")
        stage = int(cell.wrapper[-1])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": cell.gas,
            "gradient_clipping": 0.0,  # the default of 1 hides errors of scale
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            **({"gradient_allreduce_op": "sum"} if cell.sums else {}),
            **({"bf16": {"enabled": True}} if cell.low else {}),
            **({"data_types": {"grad_accum_dtype": "fp32"}} if cell.low == "fp32 sums" else {}),
        }
        model = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )[0]
    return model


def stepped(cell: Cell, model: Any, skipped: bool) -> list[Any]:
    """The gradient that is stepped on: of DeepSpeed, what a step of SGD with rate 1 changes."""
    if not cell.wrapper.startswith("ZeRO"):
        found = [p.grad for p in model.parameters()]
        found = [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found]
        model.zero_grad()
        return found
    from deepspeed.utils import safe_get_full_fp32_param

    def values() -> list[Any]:
        if cell.wrapper != "ZeRO-0":
            return [safe_get_full_fp32_param(p).clone() for p in model.module.parameters()]
        if cell.low:
            (group,) = model.optimizer.fp32_groups
            return [p.detach().clone() for p in group]
        return [p.detach().clone() for p in model.module.parameters()]

    before = values()
    if not skipped:
        model.step()
    return [a - b for a, b in zip(before, values(), strict=True)]


def delivered(cell: Cell, rank: int) -> list[Any]:
    """What the wrapper makes of sums that nobody has multiplied by anything: one window."""
    model = wrapped(cell)
    wrapper = normalizer(cell, model).wrapper
    x, y, _ = (part[rank] for part in data(cell, 0))
    for m in range(M):
        wrapper.micro_batch(last=m == M - 1)
        wrapper.backward(token_losses(model(x[m]), y[m]).sum())
    wrapper.finish()
    return [g.numpy() for g in stepped(cell, model, skipped=False)]


def normalizer(cell: Cell, model: Any) -> Any:
    from xentlib.torch import TokenNormalizer

    return TokenNormalizer(
        model,
        mode=cell.mode,
        sums=True if cell.wrapper == "DDP" and cell.sums else None,
        scale_wrt_gas=cell.scaled,
        accelerator=accelerator(cell.wrapper) if "Accelerate" in cell.wrapper else None,
    )


def on_rank(rank: int, world: int, names: list[str]) -> list[Any]:
    from xentlib.torch import count_collectives

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # Accelerate looks, and uses none
    factors = [name for name in names if name in FACTORS.values()]
    found: list[Any] = [(name, "factor", delivered(CELLS[name], rank)) for name in factors]
    for name in names:
        cell = CELLS[name]
        model = wrapped(cell)
        norm = normalizer(cell, model)
        scale = getattr(getattr(model, "optimizer", None), "loss_scale", None)
        inputs = torch.bfloat16 if cell.low else torch.float32
        windows = 1 if cell.wrapper.startswith("ZeRO") else cell.windows
        for k in range(windows):
            x, y, w = (part[rank] for part in data(cell, k))
            pre = cell.mode == "precount"
            more = {"token_weights": list(w)} if cell.weights and pre else {}
            with (
                count_collectives() as count,
                norm.window(**({"labels": list(y), **more} if pre else {})) as window,
            ):
                for a, b, c in window.micro_batches(list(zip(x, y, w, strict=True))):
                    mask = torch.where(b != -100, c if cell.weights else 1.0, 0.0)
                    logits = model(a.to(inputs)).float()
                    loss = (token_losses(logits, b) * mask).sum()
                    if cell.normalized:
                        loss = loss / window.denominator
                    window.backward(loss, mask.sum(), normalized=cell.normalized)
            stats = window.stats
            grads = [g.float().numpy() for g in stepped(cell, model, bool(stats.skipped))]
            mean = float(window.mean_loss())
            assert getattr(getattr(model, "optimizer", None), "loss_scale", None) == scale
            found.append((name, k, grads, mean, bool(stats.skipped), count.counts()))
    return found


@pytest.fixture(scope="module")
def found(request: Any) -> dict[tuple[str, int], list[Any]]:
    results: dict[tuple[str, int], list[Any]] = {}
    rows = [FACTORS[row] for row in collected(request, FACTORS)]
    cells = {name: CELLS[name] for name in collected(request, CELLS, *rows)}
    for world in (1, 2, 4):
        names = [
            name
            for name, cell in cells.items()
            if cell.world == world and _has(NEEDS.get(cell.wrapper.partition("-")[0], "torch"))
        ]
        for rank in launch(world, on_rank, names) if names else ():
            for name, k, *rest in rank:
                results.setdefault((name, k), []).append(rest)
    return results


NEEDS = {"ZeRO": "deepspeed", "Accelerate": "accelerate", "Accelerate, FSDP2": "accelerate"}


def _has(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("name", CELLS)
def test_a_window_is_one_batch(found: Any, name: str) -> None:
    """A12, D8, M15: absolute gradients on every rank, and the logged loss is the one stepped on.
    Catches: means of means, local counts, a divisor or an engine's division that is overlooked."""
    cell = CELLS[name]
    if (name, 0) not in found:
        pytest.skip("its package is not installed")
    for (which, window), ranks in found.items():
        if which != name or window == "factor":
            continue
        want, loss = gradients_of_one_batch(cell, window)
        if cell.low:
            low, low_loss = gradients_of_one_batch(cell, window, torch.bfloat16)
            for grads, mean, *_ in ranks:
                # No further from the truth than one process in bf16, times four.
                for got, other, oracle in zip([*grads, mean], [*low, low_loss], [*want, loss]):
                    given = {"other": other, "metrics": ("error ratio",)}
                    assert not failures(check("A9", got, oracle, **given))
            continue
        for grads, mean, skipped, _ in ranks:
            empty = cell.empty == "window" and window == 0
            assert skipped == empty
            for got, oracle in zip(grads, want, strict=True):
                if empty:
                    assert not got.any()
                    continue
                assert np.abs(got).max() > 0
                # Of a whole network without an oracle of its own: the row's bound in norm.
                assert not failures(check("A9", got, oracle, metrics=("rho / u",)))
            assert not failures(check("A9", np.float64(mean), loss or mean, metrics=("rho / u",)))


@pytest.mark.parametrize("row", FACTORS)
def test_the_documented_factor_is_the_measured_one(found: Any, row: str) -> None:
    """D8: what a wrapper delivers of sums that are left as they are, against their sum in one
    process; 1 over that is the factor, times 1 / T. docs/accumulation.md has it as a number."""
    name = FACTORS[row]
    if (name, "factor") not in found:
        pytest.skip("its package is not installed")
    cell = CELLS[name]
    x, y, _ = data(cell, 0)
    model = net().double()
    token_losses(model(x.double()), y).sum().backward()
    want = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    page = Path(__file__).parents[2] / "docs/accumulation.md"
    (line,) = [x for x in page.read_text("utf-8").splitlines() if x.startswith(f"| {row} |")]
    documented = float(line.split("|")[3])
    for (grads,) in found[name, "factor"]:
        got = np.concatenate([g.ravel() for g in grads])
        measured = float(want @ want) / float(got @ want)
        assert not failures(check("A9", got * documented, want, metrics=("rho / u",)))
        assert f"{measured:.4g}" == f"{documented:.4g}"


@pytest.mark.parametrize("name", [x for x in CELLS if CELLS[x].wrapper in ("DDP", "FSDP2")])
def test_one_collective_a_window(found: Any, name: str) -> None:
    """D8: the count; gradients are reduced once, in the last micro-batch."""
    cell = CELLS[name]
    for (which, window), ranks in found.items():
        for *_, counts in ranks if which == name and window != "factor" else []:
            if cell.wrapper == "DDP":
                assert counts["all_reduce"] == 2  # the count, and DDP's one bucket
            else:
                assert counts["all_reduce"] == 1
                assert counts["reduce_scatter"] == 2  # two groups, once each
