"""`vocab_parallel_logprobs` with the vocabulary spread over the axis of a JAX mesh: the dense
answer, the collectives it takes, and what is refused.

Shapes: N tokens, V classes, C columns of a device, padding included.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.given_logits import V, in_jax, make, oracle, same_bits
from helpers.given_shards import CASES, WHOLE, laid_out, of_dense, without_padding
from xentlib.contract import check, failures
from xentlib.plan import sum_rows
from xentlib.shards import PaddedVocab, VocabShard


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


def shard_inside(plain: Any, *arguments: Any) -> Any:
    return plain(*arguments, shard=axis_shard())


def padded_each(check_vma: bool, plain: Any) -> Any:
    return over(2, check_vma, partial(shard_inside, plain))


padded_inside = {check_vma: partial(padded_each, check_vma) for check_vma in (True, False)}


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
    jit = (case, devices, check_vma) != ("options", 2, True)  # one way without is enough
    got = in_jax(call, logits=logits, spread=partial(over, devices, check_vma), jit=jit,
                 vocab_parallel=padded, max_chunk_bytes=7000)  # fmt: skip
    of_dense(call, without_padding(got, classes), in_jax)


@pytest.mark.jax
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_made_from_the_axis_index(check_vma: bool) -> None:
    """A13, M9: padding on each device, not behind the last."""
    pytest.importorskip("jax")
    call = make(columns=10)
    logits, classes = laid_out(call.logits, ((5, 3), (5, 3)))
    spread = padded_inside[check_vma]

    got = in_jax(call, logits=logits, spread=spread, jit=True, vocab_parallel="tp")
    of_dense(call, without_padding(got, classes), in_jax)


@pytest.mark.jax
@pytest.mark.parametrize(("kind", "beta"), [("reverse_kl", None), ("jsd", 0.3)])
def test_divergences_over_a_shard_made_from_the_axis_index(kind: Any, beta: Any) -> None:
    """A13, M9. Catches: padding of the teacher's, or of the student's, as classes."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import TeacherLogits, vocab_parallel_divergence

    both = [make(columns=10, seed=seed).logits.astype(np.float32) for seed in (0, 1)]
    padded, classes = zip(*(laid_out(x, ((5, 3), (5, 3))) for x in both), strict=True)

    def step(student: Any, teacher: Any, shard: Any = None) -> Any:
        axis = None if shard is None else "tp"

        def loss(z: Any) -> Any:
            out = vocab_parallel_divergence(
                *(z, TeacherLogits(teacher)), kind=kind, beta=beta, vocab_parallel=axis, shard=shard
            )
            return out.loss.sum(), out.loss

        return jax.grad(loss, has_aux=True)(student)

    def spread(student: Any, teacher: Any) -> Any:
        columns, whole = jax.sharding.PartitionSpec(None, "tp"), jax.sharding.PartitionSpec()
        inside = jax.shard_map(
            lambda a, b: step(a, b, axis_shard()),
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",)),
            in_specs=columns,
            out_specs=(columns, whole),
        )
        return inside(student, teacher)

    (gradient, value), (right, of_whole) = jax.jit(spread)(*padded), step(*both)
    assert not failures(check("A9", value, of_whole, metrics=("rho / u",)))
    assert not failures(check("A9", gradient[:, classes[0]], right, metrics=("rho / u",)))
    assert not np.delete(gradient, classes[0], axis=1).any()


@pytest.mark.slow
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
            assert np.prod([int(n) for n in dims.split(",")]) <= 256 * sum_rows(4, entropy=True)


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

    text = r"`logits` must be spread over mesh axis 'tp'; got one that does no"
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
    spread = padded_inside[True]

    want = in_jax(call, logits=logits, spread=spread, jit=True, vocab_parallel="tp")
    bad = replace(call, labels=np.where(np.arange(61) == 7, label, call.labels).astype(np.int32))
    got = in_jax(bad, logits=logits, spread=spread, jit=True, vocab_parallel="tp")
    for name in ("logprobs", "entropy", "lse"):
        assert np.isnan(got[name][7]), name
    assert not got["correct"][7]
    assert np.isnan(got["d_logits"][7, classes]).any()
    others = np.arange(61) != 7
    same_bits({k: x[others] for k, x in got.items()}, {k: x[others] for k, x in want.items()}, "A0")
