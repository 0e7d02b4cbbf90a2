"""`xentlib bench` times what it says it times. Nothing here looks at how long anything took.

No contract rows: contestants are other people's code. What bounds their distance from float64 is
what the plain framework code loses there, in the same dtype (D11).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from xentlib.bench.cases import CASES, DTYPES, SUITES, HeadSizes, make_arrays
from xentlib.bench.contestant import (
    BARE,
    FLOOR,
    KINDS,
    OURS,
    PER_TOKEN,
    TRAINING,
    Contestant,
    Field,
    Peer,
    Wanted,
    not_installed,
)
from xentlib.bench.measure import SLOW, SLOW_ROUNDS, add_peaks, measure, order_of_round
from xentlib.bench.memory import resident_growth
from xentlib.bench.plot import draw
from xentlib.bench.result import ContestantResult, Report, Run
from xentlib.bench.worker import Request, WorkerError, ask
from xentlib.cli import bench as cli

TINY = CASES["tiny"]
# Half of its logits are where the cap bends them by more than a quarter.
CAPPED = HeadSizes("capped", 96, 64, 1000, "", softcap=1.5)
MIB = 1 << 20
# Linux adds up resident pages in batches, one a core: what /proc shows may be some behind.
COUNTER_SLACK = MIB
EAGER = {"torch": "eager, full logits", "jax": "optax, full logits"}
BACKENDS = [
    pytest.param(
        name,
        marks=[
            getattr(pytest.mark, name),
            pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
        ],
    )
    for name in EAGER
]
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
    module = import_module(f"xentlib.bench.contestants_{backend}")
    return arrays, module.build(arrays, "cpu", Wanted(only, kinds))


def to_float64(x):
    """Of a tensor or an array of any dtype, bfloat16 included."""
    x = x.double().numpy() if hasattr(x, "double") else x
    return np.asarray(x).astype(np.float64)


def oracle(arrays, kind=TRAINING):
    """What a contestant returns, in float64 from full logits."""
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


@pytest.mark.slow
@pytest.mark.parametrize("case", [TINY, CAPPED], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contestants_compute_the_same_loss_and_gradients(backend, dtype, case):
    if backend == "jax":
        pytest.importorskip("optax")
    arrays, field = build(backend, dtype, case=case)
    exact = {kind: oracle(arrays, kind) for kind in KINDS}
    there = [c for c in field.contestants if c.name not in BARE and c.excuse is None]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mutant", ["labels off by one", "one token left out", "0", "-g", "sum"])
def test_another_computation_is_noticed(backend, dtype, mutant):
    if backend == "jax":
        pytest.importorskip("optax")
    arrays, field = build(backend, dtype, only=(EAGER[backend],), kinds=(TRAINING,))
    (contestant,) = field.contestants
    result, exact = contestant.run(), oracle(arrays)
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
    new = {**{name: getattr(arrays, name) for name in arrays.__slots__}, **fields}
    new["labels_N"] = new["labels_N"] % TINY.vocab_size
    return type(arrays)(**new)


@pytest.mark.parametrize("floor", BARE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_floor_is_three_products(backend, dtype, floor):
    arrays, field = build(backend, dtype, only=(floor,))
    runs = {c.kind: c.run for c in field.contestants}
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
    import ml_dtypes

    for dtype in DTYPES:
        arrays = make_arrays(TINY, dtype)
        for x in (arrays.hidden_NH, arrays.weight_VH):
            low = x.astype(ml_dtypes.bfloat16).astype(np.float32)
            assert (low == x).all() == (dtype == "bfloat16")
    with pytest.raises(ValueError, match=r"`dtype` must be one of .* got 'int8'"):
        make_arrays(TINY, "int8")


# --- rounds -----------------------------------------------------------------------------------


def test_rounds_turn():
    rounds = [order_of_round("abc", index) for index in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert sorted(order[0] for order in rounds) == list("aabbcc")
    assert rounds[1] == rounds[0][::-1]


@pytest.mark.slow
def test_everyone_runs_once_a_round_and_the_hopeless_a_few_times(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("xentlib.bench.measure.time.perf_counter", lambda: now[0])

    def contestant(name, seconds):
        def run():
            if seconds is None:
                raise MemoryError("64 GiB\nand a stack")
            now[0] += seconds
            calls.append(name)
            return (np.float64(1),)

        excuse = "needs CUDA" if name == "absent" else None
        return Contestant(name, "loss", run, excuse=excuse)

    speeds = {FLOOR: 1.0, OURS: 1.5, "slow": 1.1 * SLOW, "too big": None, "absent": 1.0}
    contestants = tuple(contestant(*item) for item in speeds.items())
    field = Field(contestants, "cpu", lambda: None, lambda result: None, None)
    rounds = SLOW_ROUNDS + 4
    rows = {row.contestant: row for row in measure(field, rounds)}
    assert [len(rows[name].seconds) for name in speeds] == [rounds, rounds, SLOW_ROUNDS, 0, 0]
    assert rows["too big"].failed == "raised MemoryError: 64 GiB"
    assert rows["absent"].failed == "needs CUDA"
    assert "absent" not in calls
    assert rows[OURS].loss == 1.0
    run = Run("torch", TINY, "float32", "cpu", 2, rounds, list(rows.values()))
    run.pair_with_floor()
    assert rows[OURS].ratio.median == rows[OURS].time.median == 1.5
    assert rows[FLOOR].ratio.median == 1


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_counts_a_known_allocation():
    torch = pytest.importorskip("torch")
    from xentlib.bench.contestants_torch import cpu_peak_bytes

    def run():
        kept = torch.zeros(3 * MIB, dtype=torch.uint8)
        for _ in range(4):  # one at a time: three of them are not there together
            torch.ones(64 * MIB, dtype=torch.uint8)
        return kept

    run()
    assert cpu_peak_bytes(run) == 67 * MIB
    grown = resident_growth(run)
    if grown is None:
        pytest.skip("this kernel keeps no peak that can be reset")
    assert 67 * MIB - COUNTER_SLACK <= grown < 75 * MIB


def test_resident_growth_sees_what_no_framework_allocated():
    def run():
        return np.ones(48 * MIB, np.uint8)

    run()
    grown = resident_growth(run)
    if grown is None:
        pytest.skip("this kernel keeps no peak that can be reset")
    assert 48 * MIB - COUNTER_SLACK <= grown < 56 * MIB


@pytest.mark.jax
def test_jax_counts_a_known_allocation():
    jax = pytest.importorskip("jax")
    from xentlib.bench.contestants_jax import Program

    def outer(x, y):  # [1024, 1024] float32 to be multiplied, and as much again for the result
        return jax.numpy.sin(x[:, None] * y) @ jax.numpy.cos(x[:, None] * y)

    x = jax.numpy.ones(1024)
    program = Program(outer, (x, x))
    assert 4 * MIB <= program.bytes() <= 12 * MIB
    assert program.run().shape == (1024, 1024)
    assert Program(lambda x, y: x + y, (x, x)).bytes() == x.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_a_contestant(backend):
    _, field = build(backend, only=(OURS, FLOOR))
    rows = [ContestantResult(c.name, c.kind) for c in field.contestants]
    add_peaks(field, rows)
    peaks = {(row.contestant, row.kind): row.peak_bytes for row in rows}
    assert peaks[FLOOR, "loss"] is None
    assert peaks[OURS, TRAINING] > peaks[OURS, "loss"] > 0
    gradients = 4 * (TINY.num_tokens + TINY.vocab_size) * TINY.hidden_size
    assert min(peaks[OURS, TRAINING], peaks[OURS, PER_TOKEN]) >= gradients


# --- who is not there -------------------------------------------------------------------------


def test_excuses():
    peer = Peer("p", None, on="cuda", softcap=False, per_token=False)
    assert peer.excuse(TRAINING, "cpu", None) == "needs CUDA"
    assert peer.excuse(TRAINING, "cuda", None) is None
    assert peer.excuse(TRAINING, "cuda", 30.0) == "has no softcap"
    assert peer.excuse(PER_TOKEN, "cuda", None) == "has no loss per token"
    assert Peer("p", None).excuse(PER_TOKEN, "cpu", 30.0) is None
    assert Peer("p", None, "not installed").excuse(TRAINING, "cpu", None) == "not installed"
    assert not_installed("no-such-package") == "not installed: pip install no-such-package"
    assert not_installed("another-name", "numpy") is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_is_dropped(backend):
    names = {c.name for c in build(backend, case=CAPPED)[1].contestants}
    assert names == {c.name for c in build(backend)[1].contestants} >= {OURS, *BARE}
    expected = {
        "torch": {"Liger-Kernel", "Cut Cross-Entropy", "TRL, chunked", "QuACK"},
        "jax": {"tokamax, xla", "MaxText-style tiling", "optax, full logits"},
    }[backend]
    assert expected <= names


@pytest.mark.torch
def test_absent_kernels_say_so():
    pytest.importorskip("torch")
    excuses = {c.name: c.excuse for c in build("torch", kinds=(TRAINING,))[1].contestants}
    for name in ("Liger-Kernel", "Cut Cross-Entropy", "QuACK"):
        assert excuses[name] == "needs CUDA" or excuses[name].startswith("not installed: pip ")


# --- the command ------------------------------------------------------------------------------


def arguments(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, EAGER)), reason="needs both frameworks")
def test_the_command_writes_what_it_measured(tmp_path, capsys):
    args = arguments("--case", "tiny", "--dtype", "fp32", "--rounds", "2", "--out", str(tmp_path))
    assert cli.run(args) == 0
    assert OURS in capsys.readouterr().out
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [run["backend"] for run in written["runs"]] == list(EAGER)
    assert {"cpu", "cores", "python", "torch", "jax", "date"} <= set(written["environment"])
    for run in written["runs"]:
        rows = {(row["contestant"], row["kind"]): row for row in run["rows"]}
        assert all(len(row["seconds"]) == 2 for row in rows.values() if row["failed"] is None)
        assert all(row["ratio"]["median"] == 1 for key, row in rows.items() if key[0] == FLOOR)
        assert rows[OURS, "loss"]["loss"] == rows[OURS, TRAINING]["loss"]
        ours, floor = rows[OURS, TRAINING], rows[FLOOR, TRAINING]
        assert ours["floor_ms"] == floor["ms_median"] > 0
        assert ours["peak_bytes"] > 0 < ours["plan_bytes"]
    markdown = (tmp_path / "bench.md").read_text()
    assert markdown.count("**xentlib**") == 2 * len(KINDS)
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json", "bench.md", "bench.png", "bench.svg"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
def test_a_worker_of_its_own_for_resident_memory():
    kinds = (TRAINING, "loss")
    answer = ask(Request("resident", "torch", TINY, "float32", "cpu", only=(OURS,), kinds=kinds))
    assert [(row.contestant, row.kind) for row in answer["rows"]] == [(OURS, k) for k in kinds]
    assert [row.failed for row in answer["rows"]] == [None, None]


def test_a_worker_that_fails_says_why():
    with pytest.raises(WorkerError, match=r"ended with status 1:[\s\S]*int8"):
        ask(Request("time", "torch", TINY, "int8", "cpu"))


def test_a_contestant_without_numbers_is_shown_with_its_reason():
    rows = [ContestantResult(FLOOR, k, [1.0]) for k in KINDS] + [
        ContestantResult(OURS, k, [2.0], peak_bytes=MIB, plan_bytes=2 * MIB) for k in KINDS
    ]
    rows.append(ContestantResult("huge", TRAINING, failed="out of memory"))
    rows.append(ContestantResult("huge", PER_TOKEN, failed="has no loss per token"))
    rows.append(ContestantResult("huge", "loss", [3.0]))
    run = Run("torch", TINY, "float32", "cpu", 2, 1, rows)
    run.pair_with_floor()
    report = Report({"cpu": "c", "cores": "2", "python": "3", "date": "today"}, [run])
    text = cli.as_markdown(report)
    for line in (
        "| bare GEMMs | 1000 ms |  |",
        "| **xentlib** | **2.00 (2.00–2.00)<br>1.00 MiB of 2.00** |  |",
        "| huge | out of memory |  |",
        "| huge | has no loss per token |  |",
        "| huge | 3.00 (3.00–3.00) |  |",
    ):
        assert f"\n{line}\n" in text
    pytest.importorskip("matplotlib")
    (panel,) = draw(report).axes
    ((line,),) = ([line for line in panel.lines if line.get_label() == OURS],)
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (1, 2)


def test_arguments():
    args = arguments("--dtype", "bf16", "float32", "--case", "cpu", "tiny")
    assert (args.dtype, args.case) == (["bfloat16", "float32"], ["cpu", "tiny"])
    with pytest.raises(SystemExit):
        arguments("--rounds", "0")


def test_what_is_asked_for():
    (one, two) = cli.jobs(arguments())
    assert one == (CASES["cpu"], "float32", KINDS, 10)
    assert two == (CASES["cpu"], "bfloat16", KINDS, 10)
    found = cli.jobs(arguments("--suite", "cpu"))
    assert [job.case.name for job in found] == [*SUITES["cpu"].cases] * len(DTYPES)
    every = {job.case.name for job in found if job.kinds == KINDS}
    assert every == set(SUITES["cpu"].every_kind)
    assert {job.kinds for job in found} == {KINDS, (TRAINING,)}
    assert {job.rounds for job in found} == {SUITES["cpu"].rounds}
    given = ("--suite", "gpu", "--kind", "loss", "--rounds", "1", "--dtype", "fp32")
    found = cli.jobs(arguments(*given))
    assert {job[1:] for job in found} == {("float32", ("loss",), 1)}
    assert {job.case.softcap for job in found} == {None, 30.0}


def test_scaled_heads_have_the_shape_of_the_real_ones():
    for name in SUITES["cpu"].cases:
        small, real = CASES[name], CASES[name.removesuffix("/8")]
        assert (small.softcap, real.hidden_size, real.vocab_size) == (
            real.softcap,
            8 * small.hidden_size,
            8 * small.vocab_size,
        )


def test_the_command_loads_no_framework():
    probe_code = (
        "import sys, xentlib.cli.bench\n"
        "print(*({'torch', 'jax', 'matplotlib', 'optax', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", probe_code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []
