"""`xentlib bench` times what it says it times. Nothing here looks at how long anything took.

No contract rows: implementations are other people's code. What bounds their distance from float64
is what the plain framework code loses there, in the same dtype (D11).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from helpers.pairs import every_pair
from xentlib.tools.bench.cases import CASES, DTYPES, HeadSizes, make_arrays
from xentlib.tools.bench.implementation import (
    BARE,
    FLOOR,
    KINDS,
    OURS,
    PER_TOKEN,
    TRAINING,
    Implementation,
    not_installed,
)
from xentlib.tools.bench.report import Result
from xentlib.tools.bench.worker import add_peaks, resident_growth

TINY = CASES["tiny"]
# Half of its logits are where the cap bends them by more than a quarter.
CAPPED = HeadSizes("capped", 96, 64, 1000, "", softcap=1.5)
MIB = 1 << 20
# Linux adds up resident pages in batches, one a core: what /proc shows may be some behind.
COUNTER_SLACK = MIB
EAGER = {"torch": "eager, full logits", "jax": "optax, full logits"}
MARKS = {
    name: [
        getattr(pytest.mark, name),
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
    ]
    for name in EAGER
}
BACKENDS = [pytest.param(name, marks=marks) for name, marks in MARKS.items()]
# Twice eager's error is common among different orders of the same sums; other sums are far off.
MARGIN = 4
DIGITS = {"bfloat16": 8, "float32": 24}
# Half units in the last place that plain code may lose: 1.4 in bfloat16 here, 7.3 in float32.
PLAIN = 16


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that wait for each other cost seconds at this size where cores are taken."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        sys, "argv", sys.argv[:1]
    )  # tokamax takes the program's options for its own
    if find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(backend, dtype="float32", only=None, kinds=KINDS, case=TINY):
    arrays = make_arrays(case, dtype)
    module = import_module(f"xentlib.tools.bench.implementations_{backend}")
    return arrays, module.Field(arrays, "cpu", only, kinds)


def to_float64(x):
    """Of a tensor or an array of any dtype, bfloat16 included."""
    x = x.double().numpy() if hasattr(x, "double") else x
    return np.asarray(x).astype(np.float64)


def oracle(arrays, kind=TRAINING):
    """What an implementation returns, in float64 from full logits."""
    x, w, y = (
        a.astype(d) for a, d in zip((arrays.hidden_NH, arrays.weight_VH, arrays.labels_N), "ffi")
    )
    x, w = x.astype(np.float64), w.astype(np.float64)
    z = x @ w.T
    bent = 1
    if arrays.softcap is not None:
        z = arrays.softcap * np.tanh(z / arrays.softcap)
        bent = 1 - (z / arrays.softcap) ** 2
    rows = np.arange(len(y))
    logp = z - z.max(1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(1, keepdims=True))
    dz = np.exp(logp)
    dz[rows, y] -= 1
    nll = -logp[rows, y]
    if kind == PER_TOKEN:
        dz *= arrays.upstream_N[:, None].astype(np.float64)
    else:
        dz, nll = dz / len(y), nll.mean()
    dz *= bent
    return (nll,) if kind == "loss" else (nll, dz @ w, dz.T @ x)


def errors(result, exact):
    """Relative, in the Frobenius norm."""
    return [
        np.linalg.norm(to_float64(got) - want) / np.linalg.norm(want)
        for got, want in zip(result, exact)
    ]


def half_ulp(result):
    """What rounding the loss to its dtype may lose on its own."""
    return 2.0 ** -DIGITS[str(result[0].dtype).removeprefix("torch.")]


def allowed(eager, result):
    loss, *gradients = eager
    return [MARGIN * max(loss, half_ulp(result)), *(MARGIN * error for error in gradients)]


# Logits in the inputs' dtype; in tokamax the softmax as well.
ROUNDED = ("tokamax, xla", "MaxText-style tiling")


def in_their_dtype(arrays, kind):
    """Errors of the plain computation with every step in bfloat16, none of them compiled away."""
    import jax
    import jax.numpy as jnp

    x, w, y = (jnp.asarray(a) for a in (arrays.hidden_NH, arrays.weight_VH, arrays.labels_N))
    x, w = x.astype(arrays.dtype), w.astype(arrays.dtype)

    def loss(x, w):
        z = x @ w.T
        if arrays.softcap is not None:
            z = arrays.softcap * jnp.tanh(z / arrays.softcap)
        return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()

    with jax.disable_jit():
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, w)
    exact = oracle(arrays, kind)
    return errors((value, *gradients)[: len(exact)], exact)


# --- the same computation ---------------------------------------------------------------------


FIELDS = [*product(EAGER, DTYPES, (TINY, CAPPED))]
WRONG = ("labels off by one", "one token left out", "0", "-g", "sum")


def of_pairs(keys):
    """Every pair of choices, of which the first is a backend; the others under --full."""
    kept = every_pair(keys)
    full = [[] if key in kept else [pytest.mark.full] for key in keys]
    return [
        pytest.param(*key, marks=[*MARKS[key[0]], *more])
        for key, more in zip(keys, full, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype", "case"), of_pairs(FIELDS))
def test_implementations_compute_the_same_loss_and_gradients(backend, dtype, case):
    if backend == "jax":
        pytest.importorskip("optax")
    arrays, field = build(backend, dtype, case=case)
    exact = {kind: oracle(arrays, kind) for kind in KINDS}
    there = [c for c in field.calls if c.name not in BARE and c.excuse is None]
    results = {(c.name, c.kind): c.run() for c in there}
    found = {key: errors(result, exact[key[1]]) for key, result in results.items()}
    assert {(OURS, kind) for kind in KINDS} <= set(found)
    for kind in KINDS:  # what is measured with has to be right itself
        assert max(found[EAGER[backend], kind]) <= PLAIN * 2.0 ** -DIGITS[dtype]
    for (name, kind), error in found.items():
        plain = found[EAGER[backend], kind]
        if name in ROUNDED and dtype == "bfloat16":
            plain = in_their_dtype(arrays, kind)
        bounds = allowed(plain, results[name, kind])
        assert len(error) == len(exact[kind])
        for quantity, got, bound in zip(("loss", "d hidden", "d weight"), error, bounds):
            assert got <= bound, f"{name}, {kind}: {quantity}"


@pytest.mark.parametrize(("backend", "dtype", "mutant"), of_pairs([*product(EAGER, DTYPES, WRONG)]))
def test_another_computation_is_noticed(backend, dtype, mutant):
    if backend == "jax":
        pytest.importorskip("optax")
    arrays, field = build(backend, dtype, only=(EAGER[backend],), kinds=(TRAINING,))
    (call,) = field.calls
    result, exact = call.run(), oracle(arrays)
    eager = errors(result, exact)
    wrong = {
        "labels off by one": lambda: oracle(changed(arrays, labels_N=arrays.labels_N + 1)),
        "one token left out": lambda: oracle(
            changed(arrays, labels_N=arrays.labels_N[1:], hidden_NH=arrays.hidden_NH[1:])
        ),
        "0": lambda: [0 * x for x in exact],
        "-g": lambda: [-x for x in exact],
        "sum": lambda: [TINY.num_tokens * x for x in exact],
    }[mutant]()
    wrong = [wrong[0], np.resize(wrong[1], exact[1].shape), wrong[2]]
    distances = zip(errors(wrong, exact), allowed(eager, result))
    assert all(error > bound for error, bound in list(distances)[1:])


def changed(arrays, **fields):
    new = arrays._replace(**fields)
    return new._replace(labels_N=new.labels_N % TINY.vocab_size)


@pytest.mark.parametrize("floor", BARE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_floor_is_three_products(backend, dtype, floor):
    arrays, field = build(backend, dtype, only=(floor,))
    runs = {c.kind: c.run for c in field.calls}
    one, three = runs["loss"], runs[TRAINING]
    assert runs[PER_TOKEN] == three
    n, h, v = TINY.num_tokens, TINY.hidden_size, TINY.vocab_size
    z, dx, dw = three()
    shapes = [tuple(x.shape) for x in (z, dx, dw)]
    assert shapes == [(n, v), (n, h), (v, h)]
    assert all(str(x.dtype).endswith("float32") for x in (z, dx, dw))
    x, w = arrays.hidden_NH.astype(np.float64), arrays.weight_VH.astype(np.float64)
    got_z, got_dx, got_dw = (to_float64(x) for x in (z, dx, dw))
    pairs = [(got_z, x, w.T)]
    if dtype == "float32":  # dz is the logits, so that these can be checked as well
        pairs += [(got_dx, got_z, w), (got_dw, got_z.T, x)]
    for got, a, b in pairs:
        # A sum of k float32 products in any order is within k u of its terms' magnitudes.
        assert (abs(got - a @ b) <= a.shape[1] * 2.0**-24 * (abs(a) @ abs(b))).all()
    before = got_z
    (z,) = one()
    assert (to_float64(z) == before).all()


def test_every_head_has_arrays_of_its_dtype():
    for dtype in DTYPES:
        arrays = make_arrays(TINY, dtype)
        for x in (arrays.hidden_NH, arrays.weight_VH):
            low = x.astype(ml_dtypes.bfloat16).astype(np.float32)
            assert (low == x).all() == (dtype == "bfloat16")
    with pytest.raises(ValueError, match=r"`dtype` must be one of .* got 'int8'"):
        make_arrays(TINY, "int8")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_drawn_on_a_device_are_as_those_of_the_host(backend, dtype):
    """Catches: a rounding left out, labels that name no token, one stream for all arrays."""
    module = import_module(f"xentlib.tools.bench.implementations_{backend}")

    def drawn(seed):
        arrays = make_arrays(TINY, dtype, module.OnDevice(module.place("cpu"), seed))
        named = (arrays.hidden_NH, arrays.weight_VH, arrays.labels_N, arrays.upstream_N)
        return [np.asarray(x) for x in named]

    host = make_arrays(TINY, dtype)
    ours = drawn(3)
    for got, want in zip(ours, (host.hidden_NH, host.weight_VH, host.labels_N, host.upstream_N)):
        assert got.shape == want.shape
        assert got.dtype.kind == want.dtype.kind
        assert 0.8 < got.std() / want.std() < 1.2
    hidden, weight, labels, upstream = ours
    for x in (hidden, weight):
        low = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert x.dtype == np.float32
        assert (low == x).all() == (dtype == "bfloat16")
    assert 0 <= labels.min() < labels.max() < TINY.vocab_size
    assert len(np.unique(np.concatenate([hidden[0, :8], weight[0, :8], upstream[:8]]))) == 24
    assert all((a == b).all() for a, b in zip(ours, drawn(3)))
    assert not any((a == b).all() for a, b in zip(ours, drawn(4)))


# --- memory -----------------------------------------------------------------------------------


def least_growth(run):
    """Of three runs: a kernel that takes pages back late has those of earlier arrays in one of them
    (195 MiB once, of the 67 that were allocated)."""
    grown = [resident_growth(run) for _ in range(3)]
    if None in grown:
        pytest.skip("this kernel keeps no peak that can be reset")
    return min(grown)


@pytest.mark.torch
def test_torch_counts_a_known_allocation():
    torch = pytest.importorskip("torch")
    from xentlib.tools.bench.implementations_torch import cpu_peak_bytes

    def run():
        kept = torch.zeros(3 * MIB, dtype=torch.uint8)
        for _ in range(4):  # one at a time: three of them are not there together
            torch.ones(64 * MIB, dtype=torch.uint8)
        return kept

    run()
    assert cpu_peak_bytes(run) == 67 * MIB
    assert 67 * MIB - COUNTER_SLACK <= least_growth(run) < 75 * MIB


def test_resident_growth_sees_what_no_framework_allocated():
    def run():
        return np.ones(48 * MIB, np.uint8)

    run()
    assert 48 * MIB - COUNTER_SLACK <= least_growth(run) < 56 * MIB


@pytest.mark.jax
def test_jax_counts_a_known_allocation():
    jax = pytest.importorskip("jax")
    from xentlib.tools.bench.implementations_jax import Program

    def outer(x, y):  # [1024, 1024] float32 to be multiplied, and as much again for the result
        return jax.numpy.sin(x[:, None] * y) @ jax.numpy.cos(x[:, None] * y)

    x = jax.numpy.ones(1024)
    program = Program(outer, (x, x))
    assert 4 * MIB <= program.bytes() <= 12 * MIB
    assert program.run().shape == (1024, 1024)
    assert Program(lambda x, y: x + y, (x, x)).bytes() == x.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_an_implementation(backend):
    _, field = build(backend, only=(OURS, FLOOR))
    rows = [Result(c.name, c.kind) for c in field.calls]
    add_peaks(field, rows)
    peaks = {(row.contestant, row.kind): row.peak_bytes for row in rows}
    assert peaks[FLOOR, "loss"] is None
    assert peaks[OURS, TRAINING] > peaks[OURS, "loss"] > 0
    gradients = 4 * (TINY.num_tokens + TINY.vocab_size) * TINY.hidden_size
    assert min(peaks[OURS, TRAINING], peaks[OURS, PER_TOKEN]) >= gradients


# --- who is not there -------------------------------------------------------------------------


def test_excuses():
    row = Implementation("p", None, on="cuda", softcap=False, per_token=False)
    assert row.excuse(TRAINING, "cpu", None) == "needs CUDA"
    assert row.excuse(TRAINING, "cuda", None) is None
    assert row.excuse(TRAINING, "cuda", 30.0) == "has no softcap"
    assert row.excuse(PER_TOKEN, "cuda", None) == "has no loss per token"
    assert Implementation("p", None).excuse(PER_TOKEN, "cpu", 30.0) is None
    absent = Implementation("p", None, "not installed")
    assert absent.excuse(TRAINING, "cpu", None) == "not installed"
    assert not_installed("no-such-package") == "not installed: pip install no-such-package"
    assert not_installed("another-name", "numpy") is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_is_dropped(backend):
    names = {c.name for c in build(backend, case=CAPPED)[1].calls}
    assert names == {c.name for c in build(backend)[1].calls} >= {OURS, *BARE}
    expected = {
        "torch": {"Liger-Kernel, SM90", "Cut Cross-Entropy", "TRL, chunked", "QuACK"},
        "jax": {"tokamax, xla", "MaxText-style tiling", "optax, full logits"},
    }[backend]
    assert expected <= names


@pytest.mark.torch
def test_absent_kernels_say_so():
    pytest.importorskip("torch")
    excuses = {c.name: c.excuse for c in build("torch", kinds=(TRAINING,))[1].calls}
    liger = "Triton", "SM90", "SM90, per token"
    names = "Cut Cross-Entropy", "QuACK", *(f"Liger-Kernel, {route}" for route in liger)
    for name in names:
        known = "needs CUDA", "knows bfloat16 alone"
        assert excuses[name] in known or excuses[name].startswith("not installed: pip ")
