"""`vocab_parallel_logprobs` with the vocabulary spread over real gloo ranks, and over the axis of a
JAX mesh: the dense answer, the collectives it takes, and what is refused.

Shapes: N tokens, V classes, C columns of a rank, padding included.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from test_given_logits import (
    FLOAT32_MIN,
    RUN,
    VALUES,
    Call,
    V,
    hold,
    in_jax,
    in_torch,
    make,
    oracle,
    same,
)
from xentlib.contract import check, failures
from xentlib.plan import PaddedVocab, VocabShard

# In padded columns, in turn: one that takes part in anything shows.
PADDING = (np.nan, np.inf, 1e3)
Layout = tuple[tuple[int, int], ...]  # classes and padding of each rank
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"shape": (3, 4, 5), "temperature": True, "where": True},
    "bf16": {"dtype": "bfloat16", "temperature": True},
    "float64": {"dtype": "float64", "temperature": True},
    "nothing valid": {"ignored": 1.0, "shape": (9,)},
    "classes at -inf": {"dead": 70, "ignored": 0.0},
    "smoothed": {"smoothing": 0.2, "temperature": True},
    "all classes but two masked": {"dead": V - 2, "mask": FLOAT32_MIN, "ignored": 0.0},
}


def laid_out(logits: Any, layout: Layout) -> tuple[Any, Any]:
    """Columns of all ranks side by side, with padding, and which of them are classes."""
    bounds = pairwise(accumulate((size for size, _ in layout), initial=0))
    parts, classes = [], []
    for (start, stop), (size, padding) in zip(bounds, layout):
        columns = np.resize(np.array(PADDING, logits.dtype), padding)
        fill = np.broadcast_to(columns, (*logits.shape[:-1], padding))
        parts += [logits[..., start:stop], fill]
        classes += [np.ones(size, bool), np.zeros(padding, bool)]
    return np.concatenate(parts, axis=-1), np.concatenate(classes)


def without_padding(found: dict[str, Any], classes: Any) -> dict[str, Any]:
    """Gradients of the classes; those of padding are 0."""
    assert not found["d_logits"][..., ~classes].any()
    return found | {"d_logits": found["d_logits"][..., classes]}


def of_dense(call: Call, got: dict[str, Any], dense: dict[str, Any]) -> None:
    """A13: within the contract of the oracle; from float64, the dense answer's float32 bits."""
    hold(call, got)
    if call.logits.dtype == np.float64:
        same(*({k: x.astype(np.float32) for k, x in y.items()} for y in (got, dense)), "A13")


# --- PyTorch, on ranks of their own --------------------------------------------------------------

LAYOUTS: list[Layout] = [
    ((157, 0),),
    ((79, 0), (78, 0)),
    ((157, 0), (0, 0)),
    ((80, 0), (77, 3)),
    ((100, 0), (7, 0), (50, 0)),
    ((100, 0), (57, 43), (0, 100)),  # the last rank holds padding alone
    ((60, 4), (40, 0), (57, 7)),  # padding that PaddedVocab cannot declare
    ((40, 0), (39, 0), (39, 0), (39, 0)),
    ((53, 0), (53, 0), (51, 0), (0, 0)),
]


def on_ranks(rank: int, world: int) -> list[list[dict[str, Any]]]:
    """Every layout that has this rank."""
    import torch

    groups = [torch.distributed.new_group(list(range(size))) for size in range(1, world + 1)]
    return [on_rank(rank, groups[len(x) - 1], x) if rank < len(x) else [] for x in LAYOUTS]


def on_rank(rank: int, group: Any, layout: Layout) -> list[dict[str, Any]]:
    """Every case, the shards exchanged where that can be, and declared."""
    ends = list(accumulate(size for size, _ in layout))
    widths = [size + padding for size, padding in layout]
    start, stop = list(pairwise(accumulate(widths, initial=0)))[rank]
    shard = VocabShard(ends[rank] - layout[rank][0], ends[rank], V, layout[rank][1])
    spread = [{"vocab_parallel": group, "shard": shard}]
    if sum(widths) == V:
        spread.append({"vocab_parallel": group})
    elif laid_out(np.zeros((1, V)), layout)[1][:V].all():
        spread.append({"vocab_parallel": PaddedVocab(group, V)})
    found = []
    for case in CASES.values():
        call = make(**case)
        local = np.ascontiguousarray(laid_out(call.logits, layout)[0][..., start:stop])
        found += [in_torch(call, logits=local, max_chunk_bytes=7000, **how) for how in spread]
    return found


@pytest.fixture(scope="module")
def on_each_rank() -> list[list[list[dict[str, Any]]]]:
    """One start of four ranks for all layouts."""
    pytest.importorskip("torch")
    return launch(4, on_ranks)


@pytest.mark.torch
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_give_the_dense_answer(on_each_rank: Any, layout: Layout) -> None:
    """A13, M8, M9: every rank has the values' bits, and the gradient of its own columns.
    Catches: equal offsets, padding in the softmax, a shard that does not own losing gradient."""
    ranks = [found[LAYOUTS.index(layout)] for found in on_each_rank[: len(layout)]]
    ways = len(ranks[0]) // len(CASES)
    for index, results in enumerate(zip(*ranks, strict=True)):
        call = make(**list(CASES.values())[index // ways])
        d_logits = np.concatenate([x.pop("d_logits") for x in results], axis=-1)
        for other in results:
            same(other, results[0], "A13")
        got = without_padding(results[0] | {"d_logits": d_logits}, laid_out(call.logits, layout)[1])
        of_dense(call, got, in_torch(call))


def counted(rank: int, world: int) -> list[tuple[int, ...]]:
    """Collectives of forward and backward, with a shard and without, by chunks and valid tokens."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import vocab_parallel_logprobs

    found = []
    for shard in (None, VocabShard(70 * rank, 70 * rank + 70, 140)):
        for budget, valid in ((None, 300), (1, 300), (1, 0)):
            x = torch.randn(300, 70, requires_grad=True)
            y = torch.where(torch.arange(300) < valid, torch.arange(300) % 140, -100)
            counts = []
            with profile(activities=[ProfilerActivity.CPU]) as part:
                out = vocab_parallel_logprobs(
                    x, y, entropy=True, max_chunk_bytes=budget, shard=shard,
                    vocab_parallel=torch.distributed.group.WORLD,
                )  # fmt: skip
            counts.append(part)
            with profile(activities=[ProfilerActivity.CPU]) as part:
                (out.logprobs.sum() + out.entropy.sum() + out.lse.sum()).backward()
            counts.append(part)
            found.append(
                tuple(
                    sum(e.count for e in c.key_averages() if e.key.startswith("c10d::"))
                    for c in counts
                )
            )
    return found


@pytest.mark.torch
def test_collectives_on_ranks() -> None:
    """One MAX and one packed SUM, with a declared shard or without; none in the backward; the same
    whatever is valid. Catches: one a chunk (SkyRL, NeMo-RL), an exchange of sizes beside them."""
    pytest.importorskip("torch")
    for found in launch(2, counted):
        assert found == [(2, 0)] * 6


def refused(rank: int, world: int) -> list[str]:
    import torch

    from xentlib.torch import vocab_parallel_logprobs

    group = torch.distributed.group.WORLD
    torch.manual_seed(0)  # the same logits on both ranks
    x, y = torch.randn(6, 10), torch.arange(6)
    own = x + rank
    half = VocabShard(5 * rank, 5 * rank + 5, 10)
    said = []
    for logits, labels, parallel, shard in (
        (x, y, group, None),
        (x, y, group, half),
        (own, y, PaddedVocab(group, 10), None),
        (own, y, PaddedVocab(group, 21), None),
        (own, y, group, VocabShard(5, 4, 10, 11)),
        (own, y + 15, group, None),
        (own, y + 8, group, VocabShard(5 * rank, 5 * rank + 5, 10, 5)),
        (own, y + 12, PaddedVocab(group, 17), None),
        (own, y, "tp", None),
    ):
        try:
            vocab_parallel_logprobs(logits, labels, vocab_parallel=parallel, shard=shard)
            said.append("nothing")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


WHOLE = (
    r"`vocab_parallel` must come with this rank's part of 10 classes; got all of them on each of 2"
)
SAID = (
    WHOLE,
    r"`shard` must describe the 10 columns of `logits`; got 5 classes and 0 of padding",
    WHOLE,
    r"`vocab_parallel` must spread 21 classes over its ranks; got shards of \(10, 10\), 20 in all",
    r"`shard` must have 0 <= start <= stop <= vocab_size and padding >= 0",
    r"`labels` must lie in \[0, 20\) or equal `ignore_index` \(-100\); got 20",
    r"`labels` must lie in \[0, 10\) or equal `ignore_index` \(-100\); got 10",
    r"`labels` must lie in \[0, 17\) or equal `ignore_index` \(-100\); got 17",
    r"`vocab_parallel` must be a ProcessGroup or a one-dimensional DeviceMesh; got str",
)


@pytest.mark.torch
def test_what_ranks_refuse() -> None:
    """M9, M11: full logits as a shard give + log P elsewhere; a label of V would match a
    padded column. Every rank refuses, so none waits for another."""
    pytest.importorskip("torch")
    for said in launch(2, refused):
        for text, pattern in zip(said, SAID, strict=True):
            assert re.search(pattern, text), text


@pytest.mark.parametrize("logits", [(4, 10), (4, 0)])
def test_what_needs_no_ranks_to_be_refused(backend: str, logits: tuple[int, int]) -> None:
    """D12, M9, M11: a shard without its group; no columns; a label outside the vocabulary."""
    call = Call(np.zeros(logits, np.float32), np.full(4, 10, np.int32), np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"`shard` must come with `vocab_parallel`; got VocabSh"):
        RUN[backend](call, shard=VocabShard(0, 10, 20))
    text = r"must lie in \[0, 10\).*got 10" if logits[1] else r"`logits` must have at least one"
    with pytest.raises(ValueError, match=text):
        RUN[backend](call)


# --- JAX, inside shard_map -----------------------------------------------------------------------


def over(devices: int, check_vma: bool, plain: Any, columns: Any = None) -> Any:
    """`plain(logits, labels, options)` under shard_map, its logits' columns spread."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))

    def function(x: Any, labels: Any, options: Any) -> Any:
        spread = PartitionSpec(*[None] * (x.ndim - 1), "tp") if columns is None else columns
        specs = (spread, PartitionSpec(), PartitionSpec())
        return jax.shard_map(
            plain, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
        )(x, labels, options)

    return function


def axis_shard() -> VocabShard:
    """10 classes, 5 in the 8 columns of each device: equal offsets would be 0 and 8."""
    import jax

    start = 5 * jax.lax.axis_index("tp")
    return VocabShard(start, start + 5, 10, 3)


# Every case, with types or without in turn; one of them every way.
WAYS = ((2, False), (4, True), (1, True), (2, True), (4, False))
SPREAD = [(case, *WAYS[index % 2]) for index, case in enumerate(CASES) if case != "options"]
SPREAD += [("options", *way) for way in WAYS]


@pytest.mark.jax
@pytest.mark.parametrize(("case", "devices", "check_vma"), SPREAD)
def test_devices_give_the_dense_answer(case: str, devices: int, check_vma: bool) -> None:
    """A13, M19: the gradient from outside `shard_map`, with padding where V does not
    divide. Catches: an upstream gradient that counts once a device, or a part of one."""
    pytest.importorskip("jax")
    call = make(**CASES[case])
    columns = -(-V // devices)
    sizes = [min(columns, V - k * columns) for k in range(devices)]
    layout = tuple((size, columns - size) for size in sizes)
    logits, classes = laid_out(call.logits, layout)
    padded = PaddedVocab("tp", V) if sum(map(sum, layout)) > V else "tp"
    got = in_jax(call, logits=logits, spread=partial(over, devices, check_vma),
                 vocab_parallel=padded, max_chunk_bytes=7000)  # fmt: skip
    of_dense(call, without_padding(got, classes), in_jax(call))


@pytest.mark.jax
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_made_from_the_axis_index(check_vma: bool) -> None:
    """A13, M9: padding on each device, not behind the last."""
    pytest.importorskip("jax")
    call = make(columns=10)
    logits, classes = laid_out(call.logits, ((5, 3), (5, 3)))

    def spread(plain: Any) -> Any:
        return over(2, check_vma, partial(shard_inside, plain))

    got = in_jax(call, logits=logits, spread=spread, vocab_parallel="tp")
    of_dense(call, without_padding(got, classes), in_jax(call))


@pytest.mark.jax
def test_two_readings_of_the_same_logits() -> None:
    """A5, M5: labels over a second axis, whose devices share the logits. Catches: a
    gradient of one reading alone."""
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import vocab_parallel_logprobs

    calls = [make(), replace(make(seed=2), logits=make().logits)]

    def loss(x: Any, y: Any, g: Any) -> Any:
        out = vocab_parallel_logprobs(x, y[0], vocab_parallel=PaddedVocab("tp", V), entropy=True)
        return jax.lax.psum((g[0] * jax.numpy.stack(out[:3])).sum(), "data")

    mesh = jax.make_mesh((2, 2), ("data", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    specs = (P(None, "tp"), P("data"), P("data"))
    logits, classes = laid_out(calls[0].logits, ((79, 0), (78, 1)))
    given = (np.stack([getattr(call, name) for call in calls]) for name in ("labels", "upstream"))
    step = jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P()))
    got = np.asarray(step(logits, *given))[:, classes]
    oracles = [oracle(call) for call in calls]
    exact, bound = (
        sum(getattr(o, f"{part}_weight").T[: len(got)] for o in oracles) for part in ("d", "bound")
    )
    assert not failures(check("A5", got, exact, bound))


def shard_inside(plain: Any, *arguments: Any) -> Any:
    return plain(*arguments, shard=axis_shard())


COLLECTIVE = r"= (\S+|\(.*?\)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"


@pytest.mark.jax
@pytest.mark.parametrize("chunks", [1, 4])
def test_collectives_over_an_axis(chunks: int) -> None:
    """D7, M6, M19: value and gradient take two all-reduces of per-token numbers,
    whatever the number of chunks. Catches: an all-gather of logits, a sum in the backward."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import vocab_parallel_logprobs

    def plain(x: Any, y: Any, _: Any) -> Any:
        return vocab_parallel_logprobs(
            x, y, vocab_parallel="tp", entropy=True, max_chunk_bytes=256 // chunks * 512 * 4
        )

    def loss(x: Any, y: Any, g: Any) -> Any:
        out = over(4, True, plain)(x, y, {})
        return (g * jax.numpy.stack(out[:3])).sum()

    shape = jax.ShapeDtypeStruct
    inputs = shape((256, 4 * 512), "float32"), shape((256,), "int32"), shape((3, 256), "float32")
    text = jax.jit(jax.value_and_grad(loss)).lower(*inputs).compile().as_text()
    found = re.findall(COLLECTIVE, text)
    assert [kind for _, kind in found] == ["all-reduce"] * 2
    for shapes, _ in found:
        for dims in re.findall(r"\[([\d,]+)\]", shapes):
            assert np.prod([int(n) for n in dims.split(",")]) <= 5 * 256


@pytest.mark.jax
@pytest.mark.parametrize("padded", [False, True])
def test_what_an_axis_refuses(padded: bool) -> None:
    """M9 (Megatron#7452): the whole vocabulary on each device; an axis that is none."""
    pytest.importorskip("jax")
    from jax.sharding import PartitionSpec

    call = make(columns=10)
    with pytest.raises(
        ValueError, match=r"`vocab_parallel` must be the name of a mesh axis inside"
    ):
        in_jax(call, vocab_parallel="tp")

    def replicated(plain: Any) -> Any:
        return over(2, True, plain, columns=PartitionSpec())

    text = WHOLE if padded else r"`logits` must be spread over mesh axis 'tp'; got one that does no"
    with pytest.raises(ValueError, match=text):
        in_jax(call, spread=replicated, vocab_parallel=PaddedVocab("tp", 10) if padded else "tp")
    wide = np.concatenate([call.logits, call.logits], axis=1)
    with pytest.raises(ValueError, match=WHOLE):  # 10 columns each, where 10 are all there are
        in_jax(call, logits=wide, spread=partial(over, 2, False),
               vocab_parallel=PaddedVocab("tp", 10))  # fmt: skip
    with pytest.raises(
        ValueError, match=r"`shard` must describe the 5 columns of `logits`; got 10"
    ):
        in_jax(call, spread=partial(over, 2, True), vocab_parallel="tp",
               shard=VocabShard(0, 10, 20))  # fmt: skip


@pytest.mark.jax
@pytest.mark.parametrize("label", [-1, 10, 15])
def test_a_label_in_padding_never_looks_plausible(label: int) -> None:
    """M9 (ml-cross-entropy#59), M11: where values cannot be read a label that is no class
    makes its token NaN, and no other; also one that would hit a padded column."""
    pytest.importorskip("jax")
    call = make(columns=10, ignored=0.0)
    logits, classes = laid_out(call.logits, ((5, 3), (5, 3)))

    def spread(plain: Any) -> Any:
        return over(2, True, partial(shard_inside, plain))

    want = in_jax(call, logits=logits, spread=spread, vocab_parallel="tp")
    bad = replace(call, labels=np.where(np.arange(61) == 7, label, call.labels).astype(np.int32))
    got = in_jax(bad, logits=logits, spread=spread, vocab_parallel="tp")
    for name in ("logprobs", "entropy", "lse"):
        assert np.isnan(got[name][7]), name
    assert not got["correct"][7]
    assert np.isnan(got["d_logits"][7, classes]).any()
    others = np.arange(61) != 7
    same({k: x[others] for k, x in got.items()}, {k: x[others] for k, x in want.items()}, "A0")


# --- DTensors ------------------------------------------------------------------------------------


def dtensors(rank: int, world: int) -> list[Any]:
    """Gradient and values of DTensor logits, by how they are placed and what is said of them; the
    sentence where they are refused."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from xentlib.torch import vocab_parallel_logprobs

    flat = torch.distributed.init_device_mesh("cpu", (world,))
    grid = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = torch.distributed.new_group([0, 1])
    call = make(shape=(3, 7))
    labels, given = torch.tensor(call.labels), torch.tensor(call.upstream)
    found: dict[str, Any] = {}

    def run(name: str, mesh: Any, placements: Any, labels: Any = labels, **how: Any) -> None:
        whole = torch.tensor(call.logits)
        logits = distribute_tensor(whole, mesh, placements).requires_grad_()
        try:
            out = vocab_parallel_logprobs(logits, labels, entropy=True, **how)
            torch.autograd.backward(list(out[:3]), list(given))
        except ValueError as error:
            found[name] = str(error)
            return
        found[name] = dict(zip(VALUES, (x.detach().numpy() for x in out)))
        found[name]["d_logits"] = logits.grad.full_tensor().numpy()

    run("alone", flat, [Shard(2)])
    run("from the end", flat, [Shard(-1)])
    run("with the mesh", flat, [Shard(-1)], vocab_parallel=flat)
    run("with the group", flat, [Shard(-1)], vocab_parallel=torch.distributed.group.WORLD)
    run("replicated", flat, [Replicate()])
    run("replicated labels", flat, [Shard(-1)], distribute_tensor(labels, flat, [Replicate()]))
    run("of a grid", grid["tp"], [Shard(-1)])
    run("replicated over the group", flat, [Replicate()], vocab_parallel=flat)
    run("tokens", flat, [Shard(0)])
    run("tokens over the group", flat, [Shard(0)], vocab_parallel=flat)
    run("a grid", grid, [Replicate(), Shard(-1)])
    run("other ranks", flat, [Shard(-1)], vocab_parallel=pair if rank < 2 else grid["tp"])
    run("sliced labels", flat, [Shard(-1)], distribute_tensor(labels, flat, [Shard(0)]))

    def compiled(x: Any) -> Any:
        return vocab_parallel_logprobs(x, labels).logprobs.sum()

    logits = distribute_tensor(torch.tensor(call.logits), flat, [Shard(-1)]).requires_grad_()
    fast = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(logits), logits)[0].to_local() for f in (fast, compiled))
    assert torch.equal(got, want)
    return [found]


@pytest.mark.torch
def test_dtensors() -> None:
    """A13: sharded over its classes a DTensor needs no other argument, as torchtitan passes one;
    V no multiple of the ranks. Otherwise the sentence says what to pass."""
    pytest.importorskip("torch")
    call = make(shape=(3, 7))
    said = {
        "replicated over the group": "must be a DTensor sharded over its classes, the last dimens",
        "tokens": "of whole rows, where each rank has tokens of its own",
        "tokens over the group": "`logits.to_local()`",
        "a grid": r"with `vocab_parallel=mesh['name']`",
        "other ranks": "must hold the ranks of the mesh that `logits` is on, [0, 1, 2, 3]; got [",
        "sliced labels": "`labels` must be whole on every rank",
    }
    for (found,) in launch(4, dtensors):
        for name, value in found.items():
            if name in said:
                assert said[name] in value, (name, value)
            else:
                assert isinstance(value, dict), (name, value)
                hold(call, value)
