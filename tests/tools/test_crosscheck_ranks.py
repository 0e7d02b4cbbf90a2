"""`CrossCheckCallback` in Lightning under DDP, and `CrossCheck` under FSDP2, on two ranks."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any

import pytest

from helpers.corrupted import WRONG_AT, wrong_torch
from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
if importlib.util.find_spec("lightning") is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)

from helpers.windows import batch_of, net  # noqa: E402
from xentlib.torch import CrossCheck, chunked_nll  # noqa: E402

WORLD = 2


def lightning_run(rank: int) -> tuple[Any, list[str]]:
    import lightning.pytorch as lightning

    from xentlib.torch.integrations.lightning import CrossCheckCallback

    checked, patches, logged = CrossCheckCallback(10), pytest.MonkeyPatch(), []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Any, y: Any) -> Any:
            if self.global_step == WRONG_AT:
                wrong_torch(patches)
            return chunked_nll(self.net[0](x), self.net[1], y).loss

        def training_step(self, batch: Any, index: int) -> Any:
            return self(*batch)

        def on_train_batch_end(self, *args: Any) -> None:
            logged.extend(k for k in self.trainer.logged_metrics if k not in logged)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=lightning.strategies.DDPStrategy(),
        max_steps=WRONG_AT + 1,
        accumulate_grad_batches=2,
        callbacks=[checked],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = [batch_of(100 * rank + k) for k in range(2 * WRONG_AT + 2)]
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))
    patches.undo()
    return [(x.step, x.passed) for x in checked.check.results], logged


def sharded_run() -> list[bool]:
    from torch.distributed.fsdp import fully_shard

    model, check = net(), CrossCheck(every=1, exceeded="raise")
    fully_shard(model[1])
    fully_shard(model[0])
    for k in range(2):
        x, y = batch_of(k)
        with check.step():
            chunked_nll(model[0](x), model[1].weight, y, bias=model[1].bias).loss.backward()
    return [x.passed and len(x.worst) >= 6 for x in check.results]


def on_rank(rank: int, world: int) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0", TORCHELASTIC_RUN_ID="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    warnings.simplefilter("ignore")
    return sharded_run(), *lightning_run(rank)


def test_each_rank_checks_its_own_calls() -> None:
    for sharded, results, logged in launch(WORLD, on_rank):
        assert sharded == [True, True]
        # Two micro-batches a step.
        right = [(step, True) for step in (0, 10, 20) for _ in range(2)]
        assert results == [*right, (WRONG_AT, False), (WRONG_AT, False)]
        assert "crosscheck/d weight tau" in logged
