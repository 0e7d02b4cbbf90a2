"""A rank of `test_zero.py`, started by torchrun: real `deepspeed.initialize`, results as a file."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch.profiler import ProfilerActivity, profile

from wrapped import Setup, batches, model_of, part_of, run

GATHERS = ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_")


def engine_of(setup: Setup, stage: int):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setup.steps,
        "gradient_clipping": 0.0,  # the default of 1 hides errors of scale
        "zero_allow_untested_optimizer": True,
        # Small parameters are never partitioned by default.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = model_of(setup)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, config=config, model_parameters=parameters)[0]


def measured(setup: Setup, stage: int) -> tuple[dict, dict]:
    """Gradients of one window, and how many gathers its last micro-batch took."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = engine_of(setup, stage)
    steps, total = batches(setup)
    part = part_of(rank, world)
    # DeepSpeed divides by the ranks and by the micro-batches.
    denominator = total / (world * setup.steps)
    for ids, labels in steps:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss = run(setup, engine, ids[part], labels[part], denominator)
            engine.backward(loss)
        if len(steps) > 1 and ids is not steps[-1][0]:
            engine.step()
    counts = {event.key: event.count for event in profiler.key_averages()}
    gradients = {
        name: safe_get_full_grad(p).numpy().copy()
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }
    if stage == 3:
        shapes = {tuple(p.shape) for p in engine.module.parameters()}
        assert shapes == {(0,)}, f"every parameter is in pieces again; got {shapes}"
    with torch.no_grad():  # evaluation
        engine.eval()
        before, after = (run(setup, engine, *(x[part] for x in steps[0]), 1.0) for _ in range(2))
        assert torch.equal(before, after)
    engine.train()
    engine.step()
    return gradients, {name: counts.get(name, 0) for name in GATHERS}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    setups = pickle.loads(Path(folder, "setups").read_bytes())
    found = {name: measured(setup, stage) for name, (setup, stage) in setups.items()}
    Path(folder, f"rank{torch.distributed.get_rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
