"""A rank of `test_zero.py`, started by torchrun: real `deepspeed.initialize`, results as a file."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad

from helpers.torchrun import settle, start
from helpers.wrapped import RATE, Zero, batches, model_of, part_of, run
from xentlib.torch import count_collectives


def engine_of(setup: Zero):
    # Small parameters are never partitioned by default.
    zero = {"stage": setup.stage, "stage3_param_persistence_threshold": 0}
    if setup.offload:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    if setup.hpz:
        zero["zero_hpz_partition_size"] = setup.hpz
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setup.steps,
        "gradient_clipping": 0.0,  # the default of 1 hides errors of scale
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    model = model_of(setup)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, config=config, model_parameters=parameters)[0]


def measured(setup: Zero) -> tuple[dict, int]:
    """Gradients of one window, and how many gathers its last micro-batch took."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = engine_of(setup)
    steps, total = batches(setup)
    part = part_of(rank, world)
    # DeepSpeed divides by the ranks and by the micro-batches.
    denominator = total / (world * setup.steps)
    for window in range(setup.windows):
        if window:
            engine.step()
        for ids, labels in steps:
            with count_collectives() as count:
                loss = run(setup, engine, ids[part], labels[part], denominator)
                engine.backward(loss)
            if len(steps) > 1 and ids is not steps[-1][0]:
                engine.step()
    gradients = {
        name: safe_get_full_grad(p).numpy().copy()
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }
    if setup.hpz:
        assert any(p.ds_secondary_tensor is not None for p in engine.module.parameters())
    if setup.stage == 3:
        shapes = {tuple(p.shape) for p in engine.module.parameters()}
        assert shapes == {(0,)}, f"every parameter is sharded again; got {shapes}"
    with torch.no_grad():  # evaluation
        engine.eval()
        before, after = (run(setup, engine, *(x[part] for x in steps[0]), 1.0) for _ in range(2))
        assert torch.equal(before, after)
    engine.train()
    engine.step()
    return gradients, count["all_gather"]


def main(folder: str) -> None:
    start()
    setups = pickle.loads(Path(folder, "setups").read_bytes())
    found = {}
    for name, setup in setups.items():
        found[name] = measured(setup)
        settle()
    Path(folder, f"rank{torch.distributed.get_rank()}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
