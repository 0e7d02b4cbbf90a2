"""Windows of `TokenNormalizer` on real ranks: what is uneven between them, and what is refused."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from xentlib.accumulate import UnsupportedWrapperError, WindowStateError
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from test_accumulate import H, N, V, net, token_losses  # noqa: E402
from test_windows import attempt, batch_of, one, raising, run, spoilt  # noqa: E402
from xentlib.torch import NLLHead, TokenNormalizer, next_token_labels  # noqa: E402


def of_one_batch(batches: list[Any]) -> list[Any]:
    """Gradients in float64 of one process that has all tokens."""
    model = net().double()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (token_losses(model(x.double()), y).sum() / (y != -100).sum()).backward()
    return [p.grad.numpy() for p in model.parameters()]


def hold(got: list[Any], want: list[Any], said: str = "") -> None:
    """A12; without an oracle of a whole network, in norm."""
    for g, o in zip(got, want, strict=True):
        assert not failures(check("A9", g, o, metrics=("rho / u",))), said


def refused(model: Any, **options: Any) -> str:
    """What it says."""
    with pytest.raises(UnsupportedWrapperError) as caught:
        TokenNormalizer(model, **options)
    return str(caught.value)


def uneven(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    model = torch.nn.parallel.DistributedDataParallel(net())
    norm = TokenNormalizer(model)
    mine = [batch_of(k, 10 - k) for k in range(4)][: 1 + 3 * rank]
    window = run(norm, model, mine, uneven=True)
    found["uneven"] = [p.grad.clone().numpy() for p in model.parameters()]
    model.zero_grad()
    # A rank without any, whose filler is what memory held.
    run(norm, model, mine if rank else [], uneven=True, filler=spoilt(batch_of(9)))
    found["none"] = [p.grad.clone().numpy() for p in model.parameters()]
    found["micro-batches"] = window.stats.micro_batches
    model.zero_grad()
    # Both ranks hold the same tokens, as tensor-parallel ones do.
    alone = dist.new_group([0]), dist.new_group([1])
    twice = torch.nn.parallel.DistributedDataParallel(net(), process_group=alone[rank])
    window = run(TokenNormalizer(twice, count_group=dist.group.WORLD), twice, [batch_of(0)])
    found["copies"] = [p.grad.clone().numpy() for p in twice.parameters()]
    assert window.stats.num_tokens == N
    # Replicas stay the same for 50 steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for k in range(50):
        batches = [batch_of(100 * k + 10 * rank + j, (3 * k + 5 * rank + j) % N) for j in range(2)]
        run(norm, model, batches)
        optimizer.step()
        optimizer.zero_grad()
    found["replicas"] = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()

    hooked = torch.nn.parallel.DistributedDataParallel(net())

    def own(state, bucket):  # DDP reads annotations, which are text here
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    hooked.register_comm_hook(None, own)
    cut = net()
    mesh = dist.init_device_mesh("cpu", (world,))
    for module in (cut[1], cut):
        fully_shard(module, mesh=mesh)
    cut.set_gradient_divide_factor(3.0)
    partly = net()
    fully_shard(partly[1], mesh=mesh)
    found["refused"] = {
        "hook": refused(hooked),
        "factors": refused(cut),
        "sums": refused(model, sums=True),
        "inside": refused(torch.nn.Sequential(model)),
        "partly": refused(partly),
    }
    return found


def test_what_is_uneven_between_ranks() -> None:
    """D8: numbers of micro-batches, a rank with none, copies of tokens, replicas to the bit."""
    ranks = launch(2, uneven, seconds=120)

    four = [batch_of(k, 10 - k) for k in range(4)]
    cases = {
        "uneven": of_one_batch([four[0], *four]),
        "none": of_one_batch(four),
        "copies": of_one_batch([batch_of(0)]),
    }
    for rank in ranks:
        for name, oracle in cases.items():
            hold(rank[name], oracle, name)
        said = rank["refused"]
        assert "communication hook 'own'" in said["hook"]
        assert (
            "gradient divide factors that differ between its modules: 3.0, None" in said["factors"]
        )
        assert "got True for a DistributedDataParallel, whose reduction is read" in said["sums"]
        assert "with a wrapper inside, at '0'" in said["inside"]
        assert "with a wrapper inside, at '1'" in said["partly"]
    assert np.array_equal(ranks[0]["replicas"], ranks[1]["replicas"])
    assert [rank["micro-batches"] for rank in ranks] == [4, 4]


def evaluated(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist

    from xentlib.torch import Evaluation, count_collectives

    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mesh = dist.init_device_mesh("cpu", (world,))
    model, found = net(), {}
    for name, number in (("uneven", 3 * rank + 1), ("none", 2 * rank), ("nobody", 0)):
        evaluation = Evaluation()
        with torch.no_grad(), count_collectives() as count:
            for k in range(number):
                x, y = batch_of(10 * rank + k, 9 - k - rank)
                evaluation.add(token_losses(model(x), y).sum(), (y != -100).sum())
            found[name] = evaluation.mean_loss().item()
        assert count.counts() == {"all_reduce": 1}
    both = Evaluation().add(float(rank), rank + 1)
    found["group"] = both.mean_loss(pairs[rank // 2]).item()
    found["mesh"] = both.mean_loss(data_parallel=mesh).item()
    with pytest.raises(TypeError, match="`data_parallel` must be a ProcessGroup or a one-dim"):
        both.mean_loss(data_parallel="data")
    return found


def test_an_evaluation_over_ranks() -> None:
    """M26 (torchtitan#4167): uneven numbers of batches and tokens, and a rank that has none and
    takes part all the same; one collective, and one number on all."""
    model = net().double()

    def want(numbers: list[int]) -> float:
        batches = [batch_of(10 * r + k, 9 - k - r) for r, n in enumerate(numbers) for k in range(n)]
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        return torch.nn.functional.cross_entropy(model(x.double()), y).item()

    ranks = launch(3, evaluated)
    for name, oracle in (("uneven", want([1, 4, 7])), ("none", want([0, 2, 4]))):
        for rank in ranks:
            measured = check("A9", np.float64(rank[name]), oracle, metrics=("rho / u",))
            assert not failures(measured), name
        assert len({rank[name] for rank in ranks}) == 1
    assert all(np.isnan(rank["nobody"]) for rank in ranks)
    assert [rank["group"] for rank in ranks] == [1 / 3, 1 / 3, 2 / 3]
    assert [rank["mesh"] for rank in ranks] == [0.5] * 3


def accelerated(rank: int, world: int) -> list[Any]:
    import accelerate

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norm = TokenNormalizer(model, accelerator=accelerator)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="in the middle"):
        attempt(norm, model, [batch_of(0), batch_of(1)], raising)
    assert all((p.grad == 1).all() for p in model.parameters())
    optimizer.zero_grad()
    run(norm, model, [batch_of(10 * rank + k, 9 - 4 * rank - k) for k in range(4)])
    optimizer.step()
    steps = [(a - b.detach()).numpy() for a, b in zip(before, model.parameters(), strict=True)]
    # FSDP2, whose gradients are not where the model's parameters are.
    sharded = wrapped("FSDP2")
    with pytest.raises(RuntimeError, match="in the middle"):
        attempt(TokenNormalizer(sharded, accelerator=accelerator), sharded, window_of(1), raising)
    norm = TokenNormalizer(sharded, accelerator=accelerator, nonfinite="drop")
    run(norm, sharded, window_of(rank, 1))
    return [steps, stepped("FSDP2", sharded)]


def test_accelerate() -> None:
    """D8: its backward divides by its accumulation steps, its optimizer waits for its flag.
    Gradients from before an interrupted window are what they were."""
    pytest.importorskip("accelerate")
    batches = [batch_of(10 * rank + k, 9 - 4 * rank - k) for rank in range(2) for k in range(4)]
    rest = [b for rank in range(2) for k, b in enumerate(window_of(rank)) if k != 1]
    for steps, sharded in launch(2, accelerated):
        hold(steps, of_one_batch(batches))
        hold(sharded, of_one_batch(rest))


def engine_of(model: Any = None, **changes: Any) -> Any:
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        **changes,
    }
    model = model or net()
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def unstepped(rank: int, world: int) -> dict[str, Any]:
    """DeepSpeed's loss scale at the start, after a window, and in the next window's micro-batch;
    and what is refused: the next window before a step too."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    engine = engine_of(zero_optimization={"stage": 2})
    norm = TokenNormalizer(engine, mode="postscale")
    scales = [float(engine.optimizer.loss_scale)]
    run(norm, engine, [batch_of(0, 0)])  # no token: nobody steps
    window = run(norm, engine, [batch_of(0)])
    scales.append(float(engine.optimizer.loss_scale))
    with pytest.raises(WindowStateError, match=r"`engine.step\(\)` must come before the next"):
        run(norm, engine, [batch_of(1)])
    assert float(engine.optimizer.loss_scale) == N  # for the step that comes after all
    window.abort()

    def see(window: Any, model: Any, x: Any, y: Any) -> None:
        scales.append(float(engine.optimizer.loss_scale))
        one(window, model, x, y)

    attempt(norm, engine, [batch_of(1)], see)
    engine.step()
    scales.append(float(engine.optimizer.loss_scale))
    low = engine_of(
        zero_optimization={"stage": 1},
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
    )
    TokenNormalizer(low)
    said = {
        "bf16": refused(low, mode="postscale"),
        "drop": refused(low, nonfinite="drop"),
        "scaler": refused(engine, scaler=object()),
    }
    if importlib.util.find_spec("accelerate"):
        from accelerate import Accelerator, DeepSpeedPlugin

        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", LOCAL_WORLD_SIZE=str(world))
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        both = accelerator.prepare(model, optimizer)[0]
        said["both"] = refused(both, accelerator=accelerator)
    return {"scales": scales, "refused": said}


def test_deepspeed() -> None:
    """A loss scale that nobody has stepped on would multiply the next window's losses. D8:
    refusals, with the way out."""
    pytest.importorskip("deepspeed")
    (found,) = launch(1, unstepped)
    assert found["scales"] == [1.0, N, 1.0, 1.0]
    said = found["refused"]
    assert "ZeRO-1 in bf16 steps on a copy of the gradients" in said["bf16"]
    assert said["bf16"].endswith("Use mode='precount'.")
    assert "`nonfinite` must be 'keep' here" in said["drop"]
    assert "which scaling does not reach. Use nonfinite='keep'." in said["drop"]
    assert "`scaler` must be None with DeepSpeed" in said["scaler"]
    if "both" in said:
        assert "steps inside its backward" in said["both"]
        assert "Pass the engine of `deepspeed.initialize`" in said["both"]


def in_half_precision(rank: int, world: int) -> list[Any]:
    """Of each ZeRO stage: the loss scales of its windows until one is stepped on, the gradient of
    that step, and what post-scale says."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    # DeepSpeed does not offer fp16 on CPUs; PyTorch computes in it there.
    device = get_accelerator()
    device.is_fp16_supported = lambda: True
    device.supported_dtypes = lambda: [torch.float, torch.half]

    def half(window: Any, model: Any, x: Any, y: Any) -> None:
        one(window, lambda x: model(x.half()).float(), x, y)

    found = []
    for stage in (1, 2, 3):
        engine = engine_of(
            zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
            fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1},
            gradient_clipping=0.0,
        )

        def values(engine: Any = engine) -> list[Any]:
            return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]

        norm, before, scales = TokenNormalizer(engine), values(), []
        while len(scales) < 20 and all(map(torch.equal, before, values())):
            attempt(norm, engine, [batch_of(0), batch_of(1, 3)], half)
            scales.append(float(engine.optimizer.loss_scale))
            engine.step()
        steps = [(a - b).numpy() for a, b in zip(before, values(), strict=True)]
        found.append((scales, steps, refused(engine, mode="postscale")))
    return found


def test_half_precision_under_deepspeed() -> None:
    """D8: windows whose gradient overflows are not stepped on, the scale is halved, and the
    step that comes is right; a loss scale that moves cannot be borrowed for post-scale."""
    pytest.importorskip("deepspeed")
    want = of_one_batch([batch_of(0), batch_of(1, 3)])
    reference = net().half()
    x, y = (torch.cat(parts) for parts in zip(batch_of(0), batch_of(1, 3), strict=True))
    (token_losses(reference(x.half()).float(), y).sum() / 13).backward()
    alone = [p.grad.double().numpy() for p in reference.parameters()]
    for scales, steps, said in launch(1, in_half_precision)[0]:
        assert len(scales) > 2
        assert scales == [2.0 ** (22 - k) for k in range(len(scales))]
        for got, other, oracle in zip(steps, alone, want, strict=True):
            # No further from the truth than one process in fp16, times four.
            assert not failures(check("A9", got, oracle, other=other, metrics=("error ratio",)))
        assert "in fp16 the loss scale is DeepSpeed's own, and moves" in said


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


def interrupted(rank: int, world: int) -> dict[str, list[Any]]:
    """A window that ends in its second micro-batch of three, before or after the backward, while
    somebody holds its iterator; then one that does not."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    found = {}
    bad = [batch_of(50 + 10 * rank + k) for k in range(3)]
    good = [batch_of(10 * rank + k, 9 - 3 * k - rank) for k in range(3)]
    for name in WRAPPERS:
        for mode in ("precount", "postscale"):
            model = wrapped(name)
            norm = TokenNormalizer(model, mode=mode)
            call, held = as_it_wants(model), []
            with pytest.raises(RuntimeError, match="in the middle"):
                interrupt(norm, call, bad, held)
            assert getattr(model, "require_backward_grad_sync", True)
            run(norm, call, good)
            found[f"{name}, {mode}"] = stepped(name, model)
            held.clear()
    return found


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


def test_an_interrupted_window_leaves_nothing_behind() -> None:
    """Gradients that a wrapper has not reduced yet are kept beside the parameters, in FSDP2 and
    ZeRO-2; a flag that says not to reduce must not stay."""
    pytest.importorskip("deepspeed")
    good = [batch_of(10 * rank + k, 9 - 3 * k - rank) for rank in range(2) for k in range(3)]
    want = of_one_batch(good)
    for rank in launch(2, interrupted):
        for name, grads in rank.items():
            near(name, grads, want)


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


def with_nan(rank: int, world: int) -> dict[str, Any]:
    """Of each wrapper: gradients, tokens, loss and number dropped, where a micro-batch is NaN on
    one rank; one of those that are not reduced yet, or the last. Then windows where all are."""
    from xentlib.torch import count_collectives

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    found: dict[str, Any] = {}
    for name in WRAPPERS:
        for bad in (1, 2):
            model = wrapped(name)
            norm = TokenNormalizer(model, nonfinite="drop")
            with count_collectives() as count:
                window = run(norm, as_it_wants(model), window_of(rank, bad))
            numbers = [float(x) for x in (*window.stats[:2], window.stats.dropped)]
            grads = stepped(name, model)
            found[f"{name}, {bad}"] = grads, numbers, float(window.mean_loss()), count.counts()
        model = wrapped(name)
        norm = TokenNormalizer(model, nonfinite="drop")
        nothing = [spoilt(batch) if rank else batch for batch in window_of(rank)]
        window = run(norm, as_it_wants(model), nothing)
        assert bool(window.stats.skipped)
        assert (int(window.stats.dropped), int(window.stats.num_tokens)) == (3, 0)
        if not name.startswith("ZeRO"):
            assert not any(g.any() for g in stepped(name, model))
            norm.wrapper.zero_gradients()  # as an optimizer does, which holds all parameters
        run(norm, as_it_wants(model), window_of(rank))
        found[f"{name}, after"] = stepped(name, model), None, None, None
    return found


def test_ranks_drop_together() -> None:
    """A micro-batch that is NaN on one rank counts on none: gradients, T and the loss are those of
    the others, and every rank sends the same. Catches: 0 * NaN, a T with the dropped tokens."""
    pytest.importorskip("deepspeed")
    ranks = launch(2, with_nan, seconds=400)
    for name in ranks[0]:
        bad = {"1": 1, "2": 2}.get(name[-1])
        rest = [b for r in range(2) for k, b in enumerate(window_of(r)) if k != bad]
        tokens, want = sum(int((y != -100).sum()) for _, y in rest), of_one_batch(rest)
        for rank in ranks:
            grads, numbers, mean, counts = rank[name]
            near(name, grads, want)
            if numbers is None:
                continue
            x, y = (torch.cat(parts) for parts in zip(*rest, strict=True))
            loss = token_losses(net().double()(x.double()), y).sum().item() / tokens
            assert numbers[1:] == [tokens, 1.0]
            apart = abs(mean - loss)
            assert apart < (2.0**-6 if "bf16" in name else 1e-5) * loss, name
            assert counts == ranks[0][name][3]
        if name.startswith("DDP") and counts:
            assert counts["all_reduce"] == 5  # the count, three decisions, DDP's one bucket


def uneven_with_nan(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist

    model = torch.nn.parallel.DistributedDataParallel(net())
    norm = TokenNormalizer(model, nonfinite="drop")
    mine = [batch_of(k, 10 - k) for k in range(4)][: 2 + 2 * rank]
    with pytest.raises(ValueError, match=r"`uneven` must be True with nonfinite.*got 2 to 4"):
        run(norm, model, mine)
    # The last of two is NaN, and is repeated until the other rank has done: that decides nothing.
    if rank == 0:
        mine[1] = spoilt(mine[1])
    window = run(norm, model, mine, uneven=True)
    found = {"uneven": [p.grad.clone().numpy() for p in model.parameters()]}
    assert (int(window.stats.dropped), int(window.stats.num_tokens)) == (1, 10 + 10 + 8 + 7)
    # Both ranks hold the same tokens.
    alone = dist.new_group([0]), dist.new_group([1])
    twice = torch.nn.parallel.DistributedDataParallel(net(), process_group=alone[rank])
    norm = TokenNormalizer(twice, count_group=dist.group.WORLD, nonfinite="drop")
    batches = [batch_of(0), batch_of(1, 4)]
    window = run(norm, twice, [batches[0], spoilt(batches[1]) if rank else batches[1]])
    found["copies"] = [p.grad.clone().numpy() for p in twice.parameters()]
    assert window.stats.num_tokens == N
    return found


def test_ranks_drop_together_where_they_are_uneven() -> None:
    """Each decision is a collective; repeated micro-batches and copies of tokens count as ever."""
    four = [batch_of(k, 10 - k) for k in range(4)]
    cases = {
        "uneven": of_one_batch([four[0], four[0], four[2], four[3]]),
        "copies": of_one_batch([four[0]]),
    }
    for rank in launch(2, uneven_with_nan):
        for name, oracle in cases.items():
            hold(rank[name], oracle, name)


KEPT = ("DDP", "DDP, views", "FSDP2", "FSDP2, whole", "FSDP2, bf16", "FSDP2, not reduced")


def with_gradients(rank: int, world: int) -> dict[str, Any]:
    """Gradients from before a window that is interrupted, after it, and after one that is not."""
    found: dict[str, Any] = {}
    for name in KEPT:
        model = wrapped(name)
        norm = TokenNormalizer(model)
        wrapper, call = norm.wrapper, as_it_wants(model)
        late = name.endswith("not reduced")
        wrapper.micro_batch(last=not late)
        x, y = batch_of(90 + rank)
        (token_losses(call(x), y).sum() / N).backward()
        wrapper.restore()
        before = [(id(x), place, g.clone()) for x, place, g in wrapper.gradients()]
        with pytest.raises(RuntimeError, match="in the middle"):
            interrupt(norm, call, window_of(rank), [])
        after = [(id(x), place, g) for x, place, g in wrapper.gradients()]
        assert [x[:2] for x in before] == [x[:2] for x in after], name
        assert all(torch.equal(x[2], y[2]) for x, y in zip(before, after, strict=True)), name
        run(norm, call, window_of(rank))
        found[name] = stepped(name, model)
        if late:
            wrapper.micro_batch(last=False)
            call(x).sum().backward()
            model.zero_grad()
            with pytest.raises(WindowStateError, match="gradients must be None when a window"):
                TokenNormalizer(model, mode="postscale").window().__enter__()
    return found


def test_gradients_from_before_an_interrupted_window_are_kept() -> None:
    """To the bit, those that FSDP2 has not reduced yet too; and a window adds to them."""
    rest = of_one_batch([b for r in range(2) for b in window_of(r)])
    first = of_one_batch([batch_of(90 + r) for r in range(2)])
    want = [a + b for a, b in zip(first, rest, strict=True)]
    for rank in launch(2, with_gradients):
        for name, grads in rank.items():
            near(name, grads, want)


def reread(rank: int, world: int) -> dict[str, Any]:
    """Wrappers that change after the normalizer is made; and such as cannot be read."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    found: dict[str, Any] = {}
    mine = [batch_of(10 * rank + k, 9 - 3 * k - rank) for k in range(3)]
    sharded = wrapped("FSDP2")
    norm = TokenNormalizer(sharded)
    for module in (sharded[1], sharded):
        module.set_gradient_divide_factor(4.0)
        module.set_force_sum_reduction_for_comms(True)  # all that gloo can do
    run(norm, sharded, mine)
    found["FSDP2"] = stepped("FSDP2", sharded)
    engine = wrapped("ZeRO-1")
    norm = TokenNormalizer(engine)
    engine.set_train_batch_size(8)
    run(norm, engine, mine)
    found["ZeRO-1"] = stepped("ZeRO-1", engine)
    # The engine is as it was: three micro-batches by its own count, of which none steps here.
    found["engine"] = engine._is_gradient_accumulation_boundary, "step" in vars(engine)
    hooked = net()
    fully_shard(hooked)
    hooked.set_all_reduce_hook(lambda x: None)
    found["refused"] = {
        "replicate": refused(replicate(net())),
        "hook": refused(hooked),
    }
    return found


def crossed(rank: int, world: int) -> list[str]:
    """Gradients over ranks 0 and 1, tokens counted over 0 and 2."""
    from torch import distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    others = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = torch.nn.parallel.DistributedDataParallel(net(), process_group=pairs[rank // 2])
    TokenNormalizer(model, count_group=dist.group.WORLD)
    return [refused(model, count_group=others[rank % 2])]


def test_tokens_are_counted_over_the_ranks_that_hold_them() -> None:
    """As many ranks, but others."""
    (said,) = launch(4, crossed)[0]
    assert "`count_group` must hold every data rank" in said
    assert "got ranks [0, 2] for the data ranks [0, 1]" in said


def test_a_wrapper_is_read_for_each_window() -> None:
    """Divide factors and accumulation steps may change between."""
    pytest.importorskip("deepspeed")
    good = [batch_of(10 * rank + k, 9 - 3 * k - rank) for rank in range(2) for k in range(3)]
    want = of_one_batch(good)
    for rank in launch(2, reread):
        hold(rank["FSDP2"], want)
        for got, oracle in zip(rank["ZeRO-1"], want, strict=True):
            assert np.linalg.norm(got - oracle) < 1e-5 * np.linalg.norm(oracle)
        assert rank["engine"] == (None, False)
        said = rank["refused"]
        assert "got `replicate`" in said["replicate"]
        assert "FSDP2 with an all-reduce hook" in said["hook"]


def means(rank: int, world: int) -> dict[str, Any]:
    """What a window says to the mean and to the sum that a wrapped model's own forward returns."""
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    x, y = batch_of(rank)
    found = {}
    for name in ("DDP", "FSDP2", "ZeRO-3"):
        head = NLLHead(H, V)
        if name == "DDP":
            model = torch.nn.parallel.DistributedDataParallel(head, static_graph=True)
        elif name == "FSDP2":
            model = fully_shard(head)
        else:
            model = engine_of(head, zero_optimization={"stage": 3})
        norm = TokenNormalizer(model)

        def body(window: Any, model: Any, x: Any, y: Any, how: str = "sum") -> None:
            window.backward(model(x, y, reduction=how))

        with pytest.raises(ValueError, match="got one that `chunked_nll` has divided"):
            attempt(norm, model, [(x, y)], partial(body, how="mean"))
        found[name] = int(attempt(norm, model, [(x, y)], body).stats.num_tokens)
    return found


def test_an_output_that_a_wrapper_hands_on_says_what_it_is() -> None:
    """DDP, FSDP2 and DeepSpeed take outputs apart and put them together again."""
    pytest.importorskip("deepspeed")
    for rank in launch(2, means):
        assert rank == dict.fromkeys(("DDP", "FSDP2", "ZeRO-3"), 2 * N)


ROWS, LENGTH = 3, 12


def row_batch() -> tuple[Any, Any]:
    """[ROWS, LENGTH, H] inputs and token ids, some of them ignored."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(V, (ROWS, LENGTH), generator=generator)
    ids[0, 2:5] = -100
    ids[2, 7:] = -100
    return torch.randn(ROWS, LENGTH, H, generator=generator), ids


def sliced(rank: int, world: int) -> list[Any]:
    """A rank's slice of every row, as context parallelism has it; a row is a micro-batch."""
    group = torch.distributed.group.WORLD
    x, ids = row_batch()
    here = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    model = torch.nn.parallel.DistributedDataParallel(net())
    labels = [next_token_labels(row[None, here], sequence_parallel=group)[0] for row in ids]
    run(TokenNormalizer(model), model, list(zip(x[:, here], labels, strict=True)))
    return [p.grad.numpy() for p in model.parameters()]


def test_slices_of_context_parallel_ranks() -> None:
    """D8: different tokens, so each counts once; labels are shifted before they are cut. The
    last position of a slice predicts the first of the next rank's."""
    x, ids = row_batch()
    labels = next_token_labels(ids)
    want = of_one_batch([(x.flatten(0, 1), labels.flatten())])
    for rank in launch(2, sliced):
        hold(rank, want)
