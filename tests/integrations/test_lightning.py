"""`TokenMean` in Lightning's `Trainer`, automatic optimisation, on real ranks."""

from __future__ import annotations

import importlib.util
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
if importlib.util.find_spec("lightning") is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)

pytest.importorskip("transformers")

from helpers.patched import batch as patched_batch  # noqa: E402
from helpers.patched import llama  # noqa: E402
from helpers.windows import batch_of, mean_of, net, token_losses  # noqa: E402
from helpers.windows_ranks import near  # noqa: E402
from xentlib.accumulate import UnsupportedWrapperError, WindowStateError  # noqa: E402
from xentlib.torch.integrations.transformers import patch  # noqa: E402

# Ranks alone import it: it replaces `torch.compile`.
WORLD, BATCHES, ACCUMULATE, RATE, CLIP = 2, 5, 2, 0.5, 0.1


def mine(rank: int) -> list[Any]:
    """Micro-batches of a rank, of 9 tokens to none: windows of two, two and one."""
    return [batch_of(10 * rank + k, (9, 2, 0, 5, 3)[k] - rank * (k != 2)) for k in range(BATCHES)]


def wanted(left_out: int = 0) -> list[tuple[list[Any], float, int]]:
    """Of each step what one process has on one batch: gradients, loss and number of tokens."""
    model, found = net().double(), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for first in range(left_out * ACCUMULATE, BATCHES, ACCUMULATE):
        parts = [x for r in range(WORLD) for x in mine(r)[first : first + ACCUMULATE]]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        number = (y != -100).sum()
        loss = token_losses(model(x.double()), y).sum() / number
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad.clone().numpy() for p in model.parameters()]
        found.append((grads, loss.item(), int(number)))
        optimizer.step()
    return found


def trained(rank: int, how: str = "sum", strategy: Any = None, **options: Any) -> Any:
    """Each step's gradients, as they are stepped on, and what the callback says of it."""
    import lightning.pytorch as lightning
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch.integrations.lightning import TokenMean

    mean = TokenMean()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.found = patch(llama()) if how == "patched" else net(), []
            self.automatic_optimization = how != "manual"

        def configure_model(self) -> None:
            if how == "hidden":  # whose rows stay on their ranks
                for part in self.net:
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])
            elif strategy is not None and how != "nothing sharded":
                # The head has to be in the group of what is called.
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def validation_step(self, batch: Any, index: int) -> Any:
            self.training_step(batch)

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            if how == "left out" and index < ACCUMULATE:
                closure()
            else:
                super().optimizer_step(epoch, index, optimizer, closure)

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            if how == "nothing":
                return None
            if how == "patched":
                batch = patched_batch()
                number = (batch["labels"][:, 1:] != -100).sum()
                loss = self.net(**batch, num_items_in_batch=number).loss
                return {"loss": loss, "num_tokens": number}
            if how == "hooks past":
                self.net.unshard()
                x = self.net[1].forward(self.net[0].forward(x))
                return {"loss": token_losses(x, y).sum(), "num_tokens": (y != -100).sum()}
            if how == "hidden":
                return mean_of(self.net, x, y, reduction="sum", gather="hidden")
            if strategy is not None or how == "dict":
                losses = token_losses(self.net(x), y)
                return {"loss": losses.sum(), "num_tokens": (y != -100).sum(), "more": 1}
            out = mean_of(self.net, x, y, reduction="mean" if "mean" in how else "sum")
            told = {"loss": out.loss, "num_tokens": out.num_tokens}
            valid = (y != -100).sum()
            return {
                "loss alone": out.loss,
                "mean, told": told,
                "sum, told": {"loss": out.loss + 0.0, "num_tokens": valid},
                "mean, changed": {**told, "loss": out.loss + 0.0},
                "divided": {"loss": out.loss / valid, "num_tokens": valid},
                "numel": {**told, "num_tokens": y.numel()},
                "before the shift": {"loss": 1.0 * out.loss, "num_tokens": valid + 1},
            }.get(how, out)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            grads = [p.grad for p in self.parameters()]
            full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
            found = (float(mean.mean_loss), int(mean.num_tokens)) if mean.num_tokens else ()
            self.found.append(([g.clone().numpy() for g in full], *found))

    class Reads(lightning.Callback):
        def on_after_backward(self, *args: Any) -> None:
            pass

    module = Module()
    late = lightning.callbacks.LambdaCallback(on_before_optimizer_step=lambda *_: None)
    two = {"two": [mean, TokenMean()], "late": [late, mean], "reads": [mean, Reads()]}
    callbacks = {"none": [], **two}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy or lightning.strategies.DDPStrategy(),
        accumulate_grad_batches=1 if how == "manual" else ACCUMULATE,
        max_epochs=1,
        callbacks=callbacks.get(how, [mean]),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"val_check_interval": 1, "num_sanity_val_steps": 0} if how == "validates" else {}),
        **options,
    )
    batches = torch.utils.data.DataLoader(mine(rank), batch_size=None)
    trainer.fit(module, batches, batches if how == "validates" else None)
    assert "training_step" not in vars(module)
    return module.found


def on_rank(rank: int, world: int) -> dict[str, Any]:
    # As torchrun has it; the process group is there already, and no port is opened.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0", TORCHELASTIC_RUN_ID="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    warnings.simplefilter("ignore")
    import lightning.pytorch as lightning

    def sharding() -> Any:
        return lightning.strategies.ModelParallelStrategy(world, 1)

    def said(kind: Any, *args: Any) -> str:
        with pytest.raises(kind) as caught:
            trained(rank, *args)
        return str(caught.value)

    def stand_in(**strategy: Any) -> str:
        """Of strategies that Lightning has on GPUs alone, or on more ranks."""
        from xentlib.torch.integrations.lightning import strategy_of

        options = {"handles_gradient_accumulation": False, "model": None, **strategy}
        trainer = SimpleNamespace(strategy=SimpleNamespace(**options), world_size=world)
        with pytest.raises(UnsupportedWrapperError) as caught:
            strategy_of(trainer, net())
        return str(caught.value)

    low = lightning.plugins.MixedPrecision("16-mixed", "cpu")
    refused = UnsupportedWrapperError
    return {
        "sum": trained(rank),
        "dict": trained(rank, "dict"),
        "sum, told": trained(rank, "sum, told"),
        "validates": trained(rank, "validates"),
        "left out": trained(rank, "left out"),
        "FSDP2": trained(rank, strategy=sharding()),
        "FSDP2, hidden": trained(rank, "hidden", sharding()),
        "clipped": trained(rank, gradient_clip_val=CLIP),
        "fp16": trained(rank, plugins=low),
        "said": {
            "got one that `chunked_nll` has divided": said(ValueError, "mean"),
            "`chunked_nll` has divided. Pass": said(ValueError, "mean, told"),
            "`chunked_nll` has divided. Pass reduction='sum'": said(ValueError, "mean, changed"),
            "got one that was divided by its number of tokens since": said(ValueError, "divided"),
            "`chunked_nll` has counted for this loss": said(ValueError, "numel"),
            "has counted for this loss": said(ValueError, "before the shift"),
            "must be a sum over tokens; got one that": said(ValueError, "patched"),
            "got a loss alone, perhaps a mean": said(ValueError, "loss alone"),
            "got a Module that steps by hand": said(refused, "manual"),
            "got two": said(refused, "two"),
            "got LambdaCallback with `on_before_optimizer_step` before it": said(refused, "late"),
            "got Reads with `on_after_backward`, which runs before": said(refused, "reads"),
            "in every micro-batch of a window; got None": said(ValueError, "nothing"),
            "a module that nothing wraps": said(refused, "nothing sharded", sharding()),
            "got gradients that are not reduced": said(WindowStateError, "hooks past", sharding()),
            "which steps by itself": stand_in(handles_gradient_accumulation=True),
            "`tensor_parallel_size` must be 1 with `TokenMean`; got 2": stand_in(
                device_mesh={"tensor_parallel": SimpleNamespace(size=lambda: 2)}
            ),
            "must return a Tensor, a dict": said(Exception, "none"),  # Lightning's own
        },
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(WORLD, on_rank)


@pytest.mark.parametrize(
    "name", ["sum", "dict", "sum, told", "FSDP2", "FSDP2, hidden", "fp16", "validates", "left out"]
)
def test_each_step_is_that_of_one_batch(found: list[dict[str, Any]], name: str) -> None:
    """Three steps, of 26, 8 and 5 tokens, the last one of half as many micro-batches. Catches: the
    mean of means, a division by two micro-batches where there was one."""
    for rank in found:
        steps = wanted(left_out=int(name == "left out"))
        for (got, loss, number), (want, mean, tokens) in zip(rank[name], steps, strict=True):
            assert number == tokens
            if name == "fp16":
                near("bf16", got, want)
            else:
                hold_in_norm(got, want, name)
                hold_in_norm([loss], [mean], name)


def test_clipping_comes_after_scaling(found: list[dict[str, Any]]) -> None:
    """Of the first step; the next ones are from other parameters."""
    want, _, _ = wanted()[0]
    norm = sum(float((g**2).sum()) for g in want) ** 0.5
    assert norm > 2 * CLIP
    for rank in found:
        hold_in_norm(rank["clipped"][0][0], [g * (CLIP / (norm + 1e-6)) for g in want])


def test_what_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for words, said in rank["said"].items():
            assert words in said, said
