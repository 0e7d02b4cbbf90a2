"""Wrappers of the small net on ranks: what they are made of, how they are stepped, what they
refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from helpers.torchrun import start
from helpers.windows import batch_of, net, of_one_batch, one, spoilt
from xentlib.accumulate import UnsupportedWrapperError
from xentlib.torch import TokenNormalizer


def refused(model: Any, **options: Any) -> str:
    """What it says."""
    with pytest.raises(UnsupportedWrapperError) as caught:
        TokenNormalizer(model, **options)
    return str(caught.value)


def engine_of(model: Any = None, **changes: Any) -> Any:
    import deepspeed

    if not deepspeed.comm.is_initialized():
        start()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        **changes,
    }
    model = model or net()
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


WRAPPERS = ("DDP", "FSDP2", "FSDP2, whole", "FSDP2, bf16", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def wrapped(name: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if name.startswith("ZeRO"):
        zero = {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0}
        return engine_of(zero_optimization=zero, gradient_clipping=0.0)
    model = net()
    if name.startswith("DDP"):
        views = name.endswith("views")
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    low = torch.bfloat16 if name.endswith("bf16") else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
    for module in (model[1], model):
        fully_shard(module, mp_policy=policy)
    if name.endswith("whole"):
        model.set_reshard_after_backward(False)
    return model


def stepped(name: str, model: Any) -> list[Any]:
    """The gradient that is stepped on."""
    if not name.startswith("ZeRO"):
        groups = TokenNormalizer(model).wrapper.parameters()
        grads = [p.grad for p in groups]
        model.reshard() if name.endswith("whole") else None
        return [(g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() for g in grads]
    from deepspeed.utils import safe_get_full_fp32_param

    before = [safe_get_full_fp32_param(p).clone() for p in model.module.parameters()]
    model.step()
    after = [safe_get_full_fp32_param(p) for p in model.module.parameters()]
    return [(a - b).numpy() for a, b in zip(before, after, strict=True)]


def as_it_wants(model: Any) -> Any:
    return lambda x: model(x).float()


def interrupt(norm: Any, call: Any, batches: list[Any], held: list[Any]) -> None:
    declared = [y for _, y in batches] if norm.mode == "precount" else None
    with norm.window(labels=declared) as window:
        held.append(window.micro_batches(batches))
        for k, (x, y) in enumerate(held[0]):
            one(window, call, x, y)
            if k == 1:
                raise RuntimeError("in the middle")


def near(name: str, grads: list[Any], want: list[Any]) -> None:
    """What is left behind is 0.5 away; bf16 rounds, and a step is a difference."""
    for got, oracle in zip(grads, want, strict=True):
        apart = np.linalg.norm(got - oracle) / np.linalg.norm(oracle)
        assert apart < (2.0**-6 if "bf16" in name else 1e-5), name


def window_of(rank: int, bad: int | None = None) -> list[Any]:
    """Three micro-batches of a rank, of which one is spoilt on the first rank."""
    batches = [batch_of(10 * rank + k, 9 - 3 * k - rank) for k in range(3)]
    if bad is not None and rank == 0:
        batches[bad] = spoilt(batches[bad])
    return batches


def calling(call: Callable[[Any], Any]) -> Callable[..., None]:
    """A micro-batch that calls `call(model)`."""
    return lambda window, model, x, y: one(window, call(model), x, y)


INNER = calling(lambda model: model.module)
NONE_RAN = "must come after a forward of the {} itself, which prepares how gradients are reduced"


@contextmanager
def unchecked(cls: Any, name: str) -> Iterator[None]:
    """Without a check of this name."""
    kept = getattr(cls, name)
    setattr(cls, name, lambda self: None)
    try:
        yield
    finally:
        setattr(cls, name, kept)


def apart(grads: list[Any], want: list[Any]) -> float:
    """The largest distance of a parameter's gradient, relative."""
    pairs = zip(grads, want, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def numbers(model: Any) -> list[Any]:
    return [p.grad.clone().numpy() for p in model.parameters()]


def everything() -> list[Any]:
    """The gradient of one process that has two ranks' windows."""
    return of_one_batch([batch for rank in range(2) for batch in window_of(rank)])
