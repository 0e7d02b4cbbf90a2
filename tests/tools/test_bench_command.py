"""What `xentlib bench` runs, in which order, and what it writes. No time is looked at."""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from xentlib.tools.bench.cases import CASES, DTYPES, SUITES
from xentlib.tools.bench.implementation import (
    BARE,
    FLOOR,
    KINDS,
    OURS,
    PER_TOKEN,
    TRAINING,
    Lineup,
    TimedCall,
)
from xentlib.tools.bench.plot import draw
from xentlib.tools.bench.report import Report, Result, Run, as_json, from_json
from xentlib.tools.bench.worker import (
    SLOW,
    SLOW_ROUNDS,
    Request,
    WorkerError,
    ask,
    measure,
    order_of_round,
)
from xentlib.tools.cli import bench as cli
from xentlib.tools.cli.command import add_arguments, main

TINY = CASES["tiny"]
MIB = 1 << 20
FRAMEWORKS = ("torch", "jax")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """In the processes that are started; see `test_bench.py`. How fast their programs run is
    nothing that is looked at."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


# --- rounds -----------------------------------------------------------------------------------


def test_rounds_turn():
    rounds = [order_of_round("abc", index) for index in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert sorted(order[0] for order in rounds) == list("aabbcc")
    assert rounds[1] == rounds[0][::-1]


class Played(Lineup):
    """Whose calls are given."""

    place = bare = call = None

    def __init__(self):
        pass

    def wait(self):
        pass

    def ready(self, result):
        pass


@pytest.mark.slow
def test_everyone_runs_once_a_round_and_the_hopeless_a_few_times(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("xentlib.tools.bench.worker.time.perf_counter", lambda: now[0])

    def timed(name, seconds):
        def run():
            if seconds is None:
                raise MemoryError("64 GiB\nand a stack")
            now[0] += seconds
            calls.append(name)
            return (np.float64(1),)

        excuse = "needs CUDA" if name == "absent" else None
        return TimedCall(name, "loss", run, excuse=excuse)

    speeds = {FLOOR: 1.0, OURS: 1.5, "slow": 1.1 * SLOW, "too big": None, "absent": 1.0}
    field = Played()
    field.calls = [timed(*item) for item in speeds.items()]
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


# --- the command ------------------------------------------------------------------------------


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser, cli)
    return parser.parse_args(words)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, FRAMEWORKS)), reason="needs both frameworks")
def test_the_command_writes_what_it_measured(tmp_path, capsys):
    words = ["--case", "tiny", "--dtype", "fp32", "--rounds", "2", "--out", str(tmp_path)]
    # Of others it is known that they can be measured: `test_bench.py` has each of them.
    args = arguments(*words, "--contestant", OURS)
    assert cli.run(args) == 0
    assert OURS in capsys.readouterr().out
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [run["backend"] for run in written["runs"]] == list(FRAMEWORKS)
    assert [run["threads"] is None for run in written["runs"]] == [x == "jax" for x in FRAMEWORKS]
    assert {"cpu", "cores", "python", "torch", "jax", "date"} <= set(written["environment"])
    for run in written["runs"]:
        rows = {(row["contestant"], row["kind"]): row for row in run["rows"]}
        assert all(len(row["seconds"]) in (1, 2) for row in rows.values() if row["failed"] is None)
        assert all(len(rows[FLOOR, kind]["seconds"]) == 2 for kind in KINDS)
        assert all(row["ratio"]["median"] == 1 for key, row in rows.items() if key[0] == FLOOR)
        assert rows[OURS, "loss"]["loss"] == rows[OURS, TRAINING]["loss"]
        ours, floor = rows[OURS, TRAINING], rows[FLOOR, TRAINING]
        assert ours["floor_ms"] == floor["ms_median"] > 0
        assert ours["peak_bytes"] > 0 < ours["plan_bytes"]
    markdown = (tmp_path / "bench.md").read_text()
    assert markdown.count("**xentlib**") == 2 * len(KINDS)
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json", "bench.md", "bench.pdf", "bench.png", "bench.svg"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
def test_a_worker_of_its_own_for_resident_memory():
    kinds = (TRAINING, "loss")
    answer = ask(
        Request("torch", TINY, "float32", kinds, device="cpu", only=(OURS,), task="resident")
    )
    assert [(row.contestant, row.kind) for row in answer["rows"]] == [(OURS, k) for k in kinds]
    assert [row.failed for row in answer["rows"]] == [None, None]


def test_a_worker_that_fails_says_why():
    with pytest.raises(WorkerError, match=r"ended with status 1:[\s\S]*int8"):
        ask(Request("torch", TINY, "int8", device="cpu"))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
def test_some_implementations(tmp_path, capsys):
    """Beside the bare products and ours; a name that the backend's table has not is refused."""
    words = ("--backend", "torch", "--case", "tiny", "--dtype", "fp32", "--rounds", "1")
    words += ("--kind", "loss", "--no-memory", "--out", str(tmp_path))
    assert cli.run(arguments(*words, "--contestant", "eager, full logits")) == 0
    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert {row["contestant"] for row in run["rows"]} == {*BARE, OURS, "eager, full logits"}
    assert cli.run(arguments(*words, "--contestant", OURS, "nobody")) == 1
    assert "no contestant nobody in torch's table" in capsys.readouterr().err


def test_an_implementation_without_numbers_is_shown_with_its_reason():
    rows = [Result(FLOOR, k, [1.0]) for k in KINDS] + [
        Result(OURS, k, [2.0], peak_bytes=MIB, plan_bytes=2 * MIB) for k in KINDS
    ]
    rows.append(Result("huge", TRAINING, failed="out of memory"))
    rows.append(Result("huge", PER_TOKEN, failed="has no loss per token"))
    rows.append(Result("huge", "loss", [3.0]))
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
    read = from_json(json.loads(json.dumps(as_json(report))))
    assert as_json(read) == as_json(report)
    pytest.importorskip("matplotlib")
    figure = draw(read)
    assert figure.get_size_inches()[0] == 3.4  # a column
    assert figure.get_suptitle() == ""
    (panel,) = figure.axes
    ((line,),) = ([line for line in panel.lines if line.get_label() == OURS],)
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (1, 2)


def test_arguments():
    args = arguments("--dtype", "bf16", "float32", "--case", "cpu", "tiny")
    assert (args.dtype, args.case) == (["bfloat16", "float32"], ["cpu", "tiny"])
    with pytest.raises(SystemExit):
        arguments("--rounds", "0")


def test_what_is_asked_for():
    asked = cli.requests(arguments(), FRAMEWORKS)
    assert asked == [
        Request(backend, CASES["cpu"], dtype, KINDS, 10)
        for dtype in ("float32", "bfloat16")
        for backend in FRAMEWORKS
    ]
    found = cli.requests(arguments("--suite", "cpu"), ("jax",))
    assert {job.backend for job in found} == {"jax"}
    assert [job.case.name for job in found] == [*SUITES["cpu"].cases] * len(DTYPES)
    every = {job.case.name for job in found if job.kinds == KINDS}
    assert every == set(SUITES["cpu"].every_kind)
    assert {job.kinds for job in found} == {KINDS, (TRAINING,)}
    assert {job.rounds for job in found} == {SUITES["cpu"].rounds}
    given = ("--suite", "gpu", "--kind", "loss", "--rounds", "1", "--dtype", "fp32")
    found = cli.requests(arguments(*given), ("torch",))
    assert {(job.dtype, job.kinds, job.rounds) for job in found} == {("float32", ("loss",), 1)}
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
        "import sys, xentlib.tools.cli.bench\n"
        "print(*({'torch', 'jax', 'matplotlib', 'optax', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", probe_code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []


def played_bench(monkeypatch, tmp_path, *words):
    """The command with its processes played: each takes a minute for a floor and ours."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in ("xentlib.tools.cli.bench", "xentlib.tools.parity.progress"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(cli, "find_spec", lambda name: name in FRAMEWORKS or None)

    def run_one(request, resident, pace):
        now[0] += 60.0
        rows = [Result(name, TRAINING, [1.0]) for name in (FLOOR, OURS)]
        run = Run(request.backend, request.case, request.dtype, "cpu", 2, 1, rows)
        run.pair_with_floor()
        return run

    monkeypatch.setattr(cli, "run_one", run_one)
    return main(["bench", "--case", "tiny", "--out", str(tmp_path / "out"), *words])


def test_progress_and_time_left(monkeypatch, tmp_path, capsys):
    """A line for each process; what is left is told by those that are done."""
    assert played_bench(monkeypatch, tmp_path) == 0
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("[")]
    assert lines == [
        "[   0.0 s] tiny float32 torch, time left not known yet",
        "[  60.0 s] tiny float32 jax, about 3 min left",
        "[ 120.0 s] tiny bfloat16 torch, about 2 min left",
        "[ 180.0 s] tiny bfloat16 jax, about 1 min left",
    ]


def test_larger_cases_are_expected_to_take_longer():
    of = {name: Request("torch", CASES[name], "float32", KINDS, 3) for name in ("tiny", "cpu")}
    assert cli.expected(of["cpu"]) > cli.expected(of["tiny"]) > 0
    assert cli.expected(of["cpu"]) == 2 * cli.expected(replace(of["cpu"], rounds=1))


def test_a_full_disk_is_a_sentence_after_the_tables(monkeypatch, tmp_path, capsys):
    out, write, calls = tmp_path / "out", cli.write_json, []

    def fails(report, path):
        calls.append(len(report.runs))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(report, path)

    monkeypatch.setattr(cli, "write_json", fails)
    assert played_bench(monkeypatch, tmp_path, "--dtype", "fp32") == 2
    said = capsys.readouterr()
    assert said.out.count("tiny (N=96") == 2
    note, *_, sentence = [x for x in said.err.splitlines() if not x.startswith("[")]
    assert (
        note == f"note: '{out}' cannot be written: No space left on device; the benchmark goes on"
    )
    refused = f"`--out` must be a folder that can be written; got '{out}': No space left on device."
    assert sentence == f"xentlib: {refused}"
    assert len(json.loads((out / "bench.json").read_text())["runs"]) == 1


def test_an_out_that_is_a_file_is_refused_at_once(monkeypatch, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert played_bench(monkeypatch, tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("xentlib: `--out` must be a folder that can be written; got")
