"""Training by DeepSpeed ZeRO-3 for a few steps by a route of `gather=`, and by one process that has
the whole batch; as a program, a rank of `test_zero_routes.py`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from helpers.torchrun import settle, start
from helpers.wrapped import H, Zero, batch, model_of, part_of, run
from xentlib.torch import TokenNormalizer, chunked_nll, count_collectives


@dataclass(frozen=True)
class Trained(Zero):
    """Windows of `steps` micro-batches, each followed by a step of SGD."""

    windows: int = 2  # the second meets what the first has left behind
    vocab: int = 102
    gather: str = "hidden"
    clip: float = 0.0
    rate: float = 2.0  # a change far above the rounding of what is changed
    low: bool = False  # bfloat16 parameters
    sums: str | None = None  # dtype in which the engine accumulates
    frozen_head: bool = False
    normalized: bool = False  # by `TokenNormalizer`
    also: bool = False  # a call that gathers the head, in the same backward
    unmanaged: bool = False  # DeepSpeed's `managed_gradient_accumulation` off
    # "given up": a backward is followed by `zero_grad`; "logged": a second call, for its value,
    # comes after the backward; "late": the first micro-batch does not call the head.
    odd: str = ""
    persist: int = 0  # elements up to which the engine keeps a parameter whole
    mutant: str = ""
    counted: bool = True  # collectives


def window_of(setup: Trained, window: int) -> tuple[list[Any], float]:
    steps = [batch(setup, 10 * window + step) for step in range(setup.steps)]
    return steps, float(sum((labels != -100).sum() for _, labels in steps))


def net(setup: Trained) -> Any:
    model = model_of(setup)
    if setup.frozen_head:
        model.head.requires_grad_(False)
    return model.bfloat16() if setup.low else model


def loss_of(setup: Trained, model: Any, *batch: Any, first: bool = False) -> Any:
    if first and setup.odd == "late":
        return model(batch[0]).square().mean()
    loss = run(setup, model, *batch)
    if setup.also:
        loss = loss + run(replace(setup, gather="head"), model, *batch)
    return loss


def changes_of_one_process(setup: Trained) -> dict[str, Any]:
    """Of every trained parameter, in float32."""
    setup = replace(setup, gather="head")
    model = net(setup).float()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=setup.rate)
    for window in range(setup.windows):
        steps, total = window_of(setup, window)
        optimizer.zero_grad()
        for k, (ids, labels) in enumerate(steps):
            first = setup.odd == "late" and k == 0
            share = loss_of(setup, model, ids, labels, total, first=first)
            (share / setup.steps if first else share).backward()
        if setup.clip:
            torch.nn.utils.clip_grad_norm_(trained, setup.clip)
        optimizer.step()
    return {
        name: (p.detach() - before[name]).numpy()
        for name, p in model.named_parameters()
        if name in before
    }


def engine_of(setup: Trained, model: Any = None, **changes: Any) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setup.steps,
        "gradient_clipping": setup.clip,
        "bf16": {"enabled": setup.low},
        "managed_gradient_accumulation": not setup.unmanaged,
        "optimizer": {"type": "SGD", "params": {"lr": setup.rate}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": setup.persist},
    }
    if setup.sums:
        config["data_types"] = {"grad_accum_dtype": setup.sums}
    for name, value in changes.items():
        config[name] = (
            {**config[name], **value} if isinstance(value, dict) and name in config else value
        )
    model = net(setup) if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]


def trained(setup: Trained) -> dict[str, Any]:
    """What every trained parameter has changed by; of the first window the head's gradient, what
    the rank's own loss was, the hidden states and, if `counted`, what was sent from the first loss
    on, and in the last micro-batch; under audit the first hidden states."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine, part = engine_of(setup), part_of(rank, world)
    learning = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    before = {name: safe_get_full_fp32_param(p).clone() for name, p in learning.items()}
    found: dict[str, Any] = {}
    norm = TokenNormalizer(engine) if setup.normalized else None

    def keep(module: Any, args: Any, hidden: Any) -> None:
        found.setdefault("hidden", hidden.detach().clone())

    if setup.audit:
        engine.module.layer.register_forward_hook(keep)
    for window in range(setup.windows):
        steps, total = window_of(setup, window)
        mine = [(ids[part], labels[part]) for ids, labels in steps]
        if norm is not None:
            with norm.window(labels=[labels for _, labels in mine]) as opened:
                for ids, labels in opened.micro_batches(mine):
                    loss = loss_of(setup, engine, ids, labels, opened.denominator)
                    opened.backward(loss, (labels != -100).sum(), normalized=True)
            engine.step()
            continue
        # DeepSpeed divides by the ranks and by the micro-batches.
        denominator = total / (world * (1 if setup.unmanaged else setup.steps))
        for step, (ids, labels) in enumerate(mine):
            if setup.odd == "given up" and step == 0:
                engine.backward(loss_of(setup, engine, ids.flip(0), labels, denominator))
                engine.optimizer.zero_grad()
            with count_collectives() if setup.counted else nullcontext() as count:
                loss = loss_of(setup, engine, ids, labels, denominator, first=step == 0)
                engine.backward(loss, scale_wrt_gas=not setup.unmanaged)
            if setup.odd == "logged":
                hidden = torch.randn(3, H)
                chunked_nll(hidden, engine.module.head.weight, labels[0, :3], gather=setup.gather)
            found.setdefault("loss", loss.item())
            if count is not None:
                found["last sent"] = [(x.kind, x.bytes) for x in count.found]
                found.setdefault("sent", found["last sent"])
            if step == len(mine) - 1:
                grads = {name: safe_get_full_grad(p) for name, p in learning.items()}
                found.setdefault("gradients", {n: g.float().numpy() for n, g in grads.items()})
            if step == len(mine) - 1 or not setup.unmanaged:
                engine.step()
    after = {name: safe_get_full_fp32_param(p) for name, p in learning.items()}
    found["changes"] = {name: (after[name] - before[name]).numpy() for name in learning}
    with torch.no_grad():  # evaluation
        engine.eval()
        ids, labels = (x[part] for x in window_of(setup, 0)[0][0])
        once, again = (run(setup, engine, ids, labels, 1.0) for _ in range(2))
        assert torch.equal(once, again)
    return found


class Everything(set[Any]):
    def __contains__(self, number: object) -> bool:
        return True


class Kept:
    """A record of which nothing is taken off."""

    def __init__(self, record: set[Any]) -> None:
        self.add, self.has = record.add, record.__contains__

    def __contains__(self, number: object) -> bool:
        return self.has(number)

    def discard(self, number: object) -> None:
        pass


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The package with one line of it wrong."""
    from deepspeed import utils

    from xentlib.torch.placement import rows
    from xentlib.torch.wrappers import deepspeed as ours

    get, put = utils.safe_get_local_grad, utils.safe_set_local_grad
    local_head, shard_of, written = rows.LocalHead, rows.shard_of, ours._written
    wrong: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "sum over ranks": (rows, "LocalHead", lambda *a: local_head(*a)._replace(scale=1.0)),
        "overwritten": (utils, "safe_get_local_grad", lambda p: torch.zeros_like(get(p))),
        "of the last window": (ours, "_written", lambda optimizer: Everything()),
        "given up": (ours, "_written", lambda optimizer: Kept(written(optimizer))),
        "a row down": (
            utils,
            "safe_set_local_grad",
            lambda p, x: put(p, x.view(-1, *p.ds_shape[1:]).roll(1, 0).view(-1)),
        ),
        "the other's rows": (
            rows,
            "shard_of",
            lambda sizes, rank: shard_of(sizes, (rank + 1) % len(sizes)),
        ),
        "not reduced before": (ours, "_reduce", lambda optimizer: None),
    }
    if not name:
        yield
        return
    where, attribute, line = wrong[name]
    kept = getattr(where, attribute)
    setattr(where, attribute, line)
    try:
        yield
    finally:
        setattr(where, attribute, kept)


def main(folder: str) -> None:
    from helpers.zero_refused import said

    start()
    found: dict[str, Any] = {}
    setups, refused = pickle.loads(Path(folder, "setups").read_bytes())
    for name, setup in setups.items():
        with mutated(setup.mutant):
            found[name] = trained(setup)
        settle()
    found["refused"] = said(refused)
    Path(folder, f"rank{torch.distributed.get_rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
