"""Calls of a route under DeepSpeed ZeRO-3 that are refused, on real engines: what they say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from helpers.refused import said_by
from helpers.wrapped import loss_of, run
from helpers.zero_routes import Trained, engine_of, net, window_of
from xentlib.torch import chunked_nll

PLAIN = Trained()


def called(setup: Trained = PLAIN, engine: Any = None, **more: Any) -> Any:
    """Of one batch; every rank has all of it."""
    engine = engine_of(setup) if engine is None else engine
    (((ids, labels), *_), total) = window_of(setup, 0)
    return engine, run(setup, engine, ids, labels, total, **more)


def under(**zero: Any) -> Any:
    return called(PLAIN, engine_of(PLAIN, zero_optimization=zero))


def with_config(**config: Any) -> Any:
    return called(PLAIN, engine_of(PLAIN, **config))


def with_bias() -> Any:
    (((ids, labels), *_), _) = window_of(PLAIN, 0)
    engine = engine_of(PLAIN)
    weight, bias = engine.module.head.weight, torch.zeros(PLAIN.vocab)
    return chunked_nll(engine(ids), weight, labels, bias=bias, gather="hidden")


def rescaled() -> Any:
    engine = engine_of(PLAIN)
    engine.optimizer.override_loss_scale(8.0)  # in fp16 it moves by itself, which no CPU has
    return called(PLAIN, engine)


def coalesced() -> Any:
    engine = engine_of(PLAIN)
    with engine.coalesce_grad_reduction():
        return called(PLAIN, engine)


def in_a_leaf() -> Any:
    from deepspeed.utils import set_z3_leaf_modules

    model = net(PLAIN)
    model.head = nn.Sequential(model.head)
    set_z3_leaf_modules(model, [nn.Sequential])
    engine = engine_of(PLAIN, model=model)
    engine.module.head = engine.module.head[0]
    return called(PLAIN, engine)


def evaluated(training: bool) -> Any:
    """Without an optimizer: right without gradients, and no more."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = deepspeed.initialize(model=net(PLAIN), config=config)[0]
    with nullcontext() if training else torch.no_grad():
        return called(PLAIN, engine)


def hooked() -> Any:
    setup = Trained(road="NLLHead", model=("inside",))
    model = net(setup)
    model.head.register_forward_hook(lambda module, args, output: None)
    return called(setup, engine_of(setup, model=model))


def checkpointed() -> None:
    (((ids, labels), *_), total) = window_of(PLAIN, 0)
    engine = engine_of(PLAIN)

    def loss(hidden: Any) -> Any:
        return loss_of(PLAIN, labels, total, hidden, engine.module.head)

    hidden = engine(ids)
    engine.backward(torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=True))


def modified() -> Any:
    """Whole for the length of a block, in which the user may change it."""
    from deepspeed.runtime.zero import GatheredParameters

    engine = engine_of(PLAIN)
    with GatheredParameters([engine.module.head.weight], modifier_rank=0):
        return called(PLAIN, engine)


CALLS: dict[str, Callable[[], Any]] = {
    "a vocabulary that the ranks do not divide": lambda: called(Trained(vocab=101)),
    "nodes": lambda: called(tokens_parallel=torch.distributed.init_device_mesh("cpu", (2, 1))),
    "layout": lambda: called(weight_layout="HV"),
    "a bias of one's own": with_bias,
    "offloaded optimizer": lambda: under(offload_optimizer={"device": "cpu"}),
    "offloaded parameters": lambda: under(
        offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}
    ),
    "persistent": lambda: under(stage3_param_persistence_threshold=100_000),
    "stage 2": lambda: under(stage=2),
    "a loss scale of one's own": rescaled,
    "predivided": lambda: with_config(
        gradient_predivide_factor=4.0, zero_optimization={"reduce_scatter": False}
    ),
    "read inside": lambda: called(Trained(model=("inside",))),
    "a hook": hooked,
    "gathered": modified,
    "coalesced": coalesced,
    "leaf module": in_a_leaf,
    "no optimizer": lambda: evaluated(training=True),
    "evaluation": lambda: evaluated(training=False),
    "reentrant": checkpointed,
    # Last: what they set is of the process.
    "autocast": lambda: with_config(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    "hpZ": lambda: under(zero_hpz_partition_size=2),
}


def said(names: Collection[str]) -> dict[str, str]:
    """What each says; "nothing" where a call is not refused."""
    return said_by({name: call for name, call in CALLS.items() if name in names})
