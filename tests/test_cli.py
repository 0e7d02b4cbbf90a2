"""The `xentlib` command: arguments, exit status, what it writes, what it says when it cannot."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import xentlib
from xentlib import cli, processes
from xentlib.parity import progress, ranks
from xentlib.parity.progress import Pace, PlainProgress, SilentProgress, progress_on
from xentlib.parity.result import Histogram, Measurement, Planned, Section, TrainingCurve
from xentlib.parity.shards import torch_rank

EVERYTHING = {"torch", "jax", "flax", "optax", "tokenizers"}


def measured(value=1.0, row="A5"):
    return Measurement(row, "torch", "N=33", "d hidden", "tau", value, 4.0, value <= 4.0, 2112)


@pytest.fixture
def stage(monkeypatch):
    """`main` with the sections of a run played, and the packages that are to be there.

    `stage.parts` is what each section finds, or raises; `stage.ran` the sections that were run;
    `stage.operators` and `stage.training` the arguments each part was called with, or None.
    """
    played = SimpleNamespace(
        installed=set(EVERYTHING),
        parts={
            "one": Section(
                "one", (measured(),), (Histogram("A5", "torch", "d hidden", (0.0, 1.0), (2112,)),)
            ),
            "two": Section("two", (measured(0.5, row="A7"),)),
            "training": Section(
                "training",
                (measured(row="A6"),),
                curves=(TrainingCurve("torch", (9.0, 8.0), (400, 401), 1.5),),
            ),
        },
        ran=[],
        slowness=[],
        operators=None,
        training=None,
        variables=None,
    )

    def planned(name):
        def run(progress, slowness):
            played.ran.append(name)
            played.slowness.append(slowness)
            progress.stage(name, 1)
            progress.advance("N=33")
            found = played.parts[name]
            found = found() if callable(found) else found
            if isinstance(found, BaseException):
                raise found
            return found

        return Planned(name, 1, run)

    def operator_sections(backends, suite, seed, device):
        played.operators = (backends, suite, seed)
        played.device = device
        played.variables = {k: os.environ.get(k) for k in ("XLA_FLAGS", "JAX_PLATFORMS")}
        return [planned(name) for name in played.parts if name != "training"]

    def training_section(backends, *, text, seed):
        played.training = (backends, text, seed)
        return planned("training")

    for name, function in (("suite", operator_sections), ("training", training_section)):
        module = ModuleType(f"xentlib.parity.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "find_spec", lambda name: name if name in played.installed else None)
    # Set first, so that what `main` sets is undone with it.
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")
        os.environ.pop(name)
    return played


def parity(tmp_path, *options):
    return cli.main(["parity", "--out", str(tmp_path / "out"), *options])


def written(tmp_path):
    return json.loads((tmp_path / "out" / "parity.json").read_text(encoding="utf-8"))


def complaint(capsys):
    """The one line on stderr; nothing on stdout."""
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("xentlib: ")
    return lines[0]


# --- what it does --------------------------------------------------------------------------------


def test_a_run_within_its_bounds(stage, tmp_path, capsys):
    assert parity(tmp_path) == 0
    assert stage.operators == (("torch", "jax"), "quick", 0)
    assert stage.training == (("torch", "jax"), None, 0)
    said = capsys.readouterr()
    data, page = tmp_path / "out" / "parity.json", tmp_path / "out" / "parity.html"
    assert said.out.splitlines()[-2:] == [str(data), str(page)]
    assert "PyTorch holds all 3 rows" in said.out
    assert said.out.split()[0] == "row"  # the table, not the JSON
    found = written(tmp_path)
    assert found["passed"] is True
    assert [m["row"] for m in found["measurements"]] == ["A5", "A7", "A6"]
    assert len(found["histograms"]) == len(found["training"]) == 1
    assert "holds all 3 rows" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["one", "training"])
@pytest.mark.parametrize("value", [4.5, float("nan")])
def test_a_row_that_falls_short_is_exit_status_1(stage, tmp_path, capsys, part, value):
    stage.parts[part] = Section(part, (measured(value, row="A6"),))
    assert parity(tmp_path) == 1
    assert "A6 falls short" in capsys.readouterr().out
    assert written(tmp_path)["passed"] is False


def test_nothing_measured_is_no_success(stage, tmp_path):
    stage.parts = {name: Section(name) for name in stage.parts}
    assert parity(tmp_path) == 1


def test_arguments_reach_both_parts(stage, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    options = ("--suite", "full", "--backend", "jax", "--seed", "7", "--text", str(text))
    assert parity(tmp_path, *options) == 0
    assert stage.operators == (("jax",), "full", 7)
    assert stage.training == (("jax",), text, 7)


def test_json_alone_on_stdout(stage, tmp_path, capsys):
    assert parity(tmp_path, "--json") == 0
    said = capsys.readouterr()
    assert said.out == (tmp_path / "out" / "parity.json").read_text(encoding="utf-8")
    assert json.loads(said.out)["schema"] == "xentlib.parity/1"


def test_environment_is_recorded(stage, tmp_path):
    parity(tmp_path, "--seed", "3")
    environment = written(tmp_path)["environment"]
    assert environment["seed"] == "3"
    assert environment["suite"] == "quick"
    assert environment["xentlib"] == xentlib.__version__
    assert environment["XLA_FLAGS"] == "--xla_allow_excess_precision=false"
    assert environment["backends"] == "torch, jax"
    assert {"python", "numpy", "system", "date"} <= environment.keys()
    assert not any(str(tmp_path) in value for value in environment.values())


# --- what is set before the frameworks load ------------------------------------------------------


def test_variables_are_set_before_a_part_runs(stage, tmp_path):
    parity(tmp_path)
    assert stage.variables == {
        "XLA_FLAGS": "--xla_allow_excess_precision=false",
        "JAX_PLATFORMS": "cpu",
    }


def test_the_users_variables_are_kept(stage, tmp_path):
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
    os.environ["JAX_PLATFORMS"] = "cuda"
    parity(tmp_path)
    assert stage.variables == {
        "XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_allow_excess_precision=false",
        "JAX_PLATFORMS": "cuda",
    }
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=true"
    parity(tmp_path)
    assert stage.variables["XLA_FLAGS"] == "--xla_allow_excess_precision=true"


def test_torch_alone_leaves_jax_variables_alone(stage, tmp_path):
    parity(tmp_path, "--backend", "torch")
    assert stage.variables == {"XLA_FLAGS": None, "JAX_PLATFORMS": None}


@pytest.mark.parametrize("arguments", [["--version"], ["parity", "--help"]])
def test_no_framework_is_loaded_to_read_the_arguments(arguments):
    code = (
        "import sys; from xentlib import cli\n"
        f"try: cli.main({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'jax', 'rich', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- which backends ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_one_framework_is_enough(stage, tmp_path, capsys, name):
    stage.installed -= {"torch", "jax"} - {name}
    assert parity(tmp_path) == 0
    assert stage.operators[0] == stage.training[0] == (name,)
    assert f"note: only {name} is installed" in capsys.readouterr().err


def test_no_framework(stage, tmp_path, capsys):
    stage.installed -= {"torch", "jax"}
    assert parity(tmp_path) == 2
    assert complaint(capsys) == (
        "xentlib: `xentlib parity` needs PyTorch or JAX and found neither; "
        "install with `pip install 'xentlib[torch,jax]'`."
    )
    assert stage.operators is None
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", ["jax", "both"])
def test_a_framework_that_was_asked_for_and_is_missing(stage, tmp_path, capsys, asked):
    stage.installed.remove("jax")
    assert parity(tmp_path, "--backend", asked) == 2
    assert complaint(capsys) == (
        f"xentlib: `--backend {asked}` needs jax, which is not installed; "
        "install with `pip install 'xentlib[jax]'` or pass `--backend torch`."
    )
    assert stage.operators is None


def test_training_without_its_packages_is_left_out_and_said(stage, tmp_path, capsys):
    stage.installed -= {"flax", "tokenizers"}
    assert parity(tmp_path) == 0
    assert stage.training is None
    assert "note: training is left out, as it needs tokenizers and flax" in capsys.readouterr().err
    environment = written(tmp_path)["environment"]
    assert environment["training"].startswith("left out, as it needs tokenizers and flax")
    assert "pip install &#x27;xentlib[cli,flax]&#x27;" in (
        tmp_path / "out" / "parity.html"
    ).read_text(encoding="utf-8")
    # PyTorch's part needs no flax.
    stage.installed.add("tokenizers")
    assert parity(tmp_path, "--backend", "torch") == 0
    assert stage.training is not None


def test_a_text_that_could_not_be_trained_on_is_refused(stage, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    stage.installed.remove("tokenizers")
    assert parity(tmp_path, "--text", str(text)) == 2
    assert "`--text` is for the training part, which needs tokenizers" in complaint(capsys)


# --- bad arguments, before any work --------------------------------------------------------------


def test_text_that_is_not_there(stage, tmp_path, capsys):
    assert parity(tmp_path, "--text", str(tmp_path / "missing.txt")) == 2
    assert "`text` must be a readable UTF-8 file" in complaint(capsys)
    assert stage.operators is None


def test_out_that_is_a_file(stage, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert parity(tmp_path) == 2
    assert "`--out` must be a folder that can be written" in complaint(capsys)
    assert stage.operators is None


@pytest.mark.parametrize("seed", ["-1", "x", "1.5", ""])
def test_seed(stage, tmp_path, capsys, seed):
    with pytest.raises(SystemExit) as exit_info:
        parity(tmp_path, f"--seed={seed}")
    assert exit_info.value.code == 2
    assert "must be a whole number, 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["sing"], ["parity", "--suite", "huge"]])
def test_unknown_words(arguments):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"xentlib {xentlib.__version__}\n"


# --- a run that does not come to its end ---------------------------------------------------------


def sections(tmp_path):
    return {section["name"]: section["state"] for section in written(tmp_path)["sections"]}


def but_for_times(tmp_path):
    found = written(tmp_path)
    for section in found["sections"]:
        del section["seconds"]
    del found["seconds"], found["environment"]["date"]
    return found


def test_results_are_written_section_by_section(stage, tmp_path):
    """What is there when the next section starts is a whole parity.json and a whole page."""
    seen = []
    for name, found in list(stage.parts.items())[1:]:

        def look(found=found):
            page = (tmp_path / "out" / "parity.html").read_text(encoding="utf-8")
            seen.append((sections(tmp_path), written(tmp_path)["passed"], page.count("</html>")))
            return found

        stage.parts[name] = look
    assert parity(tmp_path) == 0
    states = [list(found.values()) for found, _, _ in seen]
    assert states == [["done", "not run", "not run"], ["done", "done", "not run"]]
    assert [found[1:] for found in seen] == [(False, 1)] * 2
    assert set(sections(tmp_path).values()) == {"done"}


@pytest.mark.parametrize("name", ["one", "two", "training"])
def test_what_stops_a_section_is_an_error_of_it_alone(stage, tmp_path, capsys, name):
    """In the table, on the page, in the JSON and in the exit status."""
    stage.parts[name] = RuntimeError("2 of 4 ranks were not done\nand said <this>")
    assert parity(tmp_path) == 1
    assert stage.ran == ["one", "two", "training"]
    assert sections(tmp_path) == dict.fromkeys(stage.parts, "done") | {name: "failed"}
    found, (table, said) = written(tmp_path), capsys.readouterr()
    reason = f"{name} could not be run: RuntimeError: 2 of 4 ranks were not done\n"
    before, _, after = said.partition("] training")
    assert f"note: {reason}" in (after if name == "training" else before)  # at once
    assert found["passed"] is False
    assert found["verdict"] == f"{name} could not be run; what was measured holds"
    assert reason in table
    assert {m["section"] for m in found["measurements"]} == set(stage.parts) - {name}
    page = (tmp_path / "out" / "parity.html").read_text(encoding="utf-8")
    assert "✗ xentlib parity</title>" in page
    assert "and said &lt;this&gt;" in page
    assert not [text for text in (table, page) if " all 2 rows" in text]


@pytest.mark.parametrize("interrupted", ["two", "training"])
def test_an_interruption_keeps_what_is_there_and_says_how_to_go_on(
    stage, tmp_path, capsys, interrupted
):
    assert parity(tmp_path) == 0
    whole = but_for_times(tmp_path)
    found, stage.parts[interrupted] = stage.parts[interrupted], KeyboardInterrupt()
    assert parity(tmp_path, "--seed", "0") == 130
    kept = stage.ran.index(interrupted)
    out = tmp_path / "out"
    capsys_err = capsys.readouterr().err.splitlines()
    assert capsys_err[-2:] == [
        f"note: {kept} of 3 sections are kept in '{out / 'parity.json'}'",
        f"xentlib: interrupted; go on with `xentlib parity --out {out} --seed 0 --resume`",
    ]
    stage.parts[interrupted] = found
    stage.ran.clear()
    assert parity(tmp_path, "--resume") == 0
    assert stage.ran == list(stage.parts)[kept:]
    assert but_for_times(tmp_path) == whole


def test_an_interruption_before_anything_is_done(stage, tmp_path, capsys):
    stage.parts["one"] = KeyboardInterrupt()
    assert parity(tmp_path) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "xentlib: interrupted"
    assert not (tmp_path / "out" / "parity.json").exists()


def test_resume_runs_what_has_failed_and_puts_it_in_its_place(stage, tmp_path):
    assert parity(tmp_path) == 0
    whole = but_for_times(tmp_path)
    found, stage.parts["one"] = stage.parts["one"], RuntimeError("late")
    assert parity(tmp_path) == 1
    stage.parts["one"] = found
    stage.ran.clear()
    assert parity(tmp_path, "--resume") == 0
    assert stage.ran == ["one"]
    assert but_for_times(tmp_path) == whole


def test_resume_of_a_whole_run_runs_nothing(stage, tmp_path, capsys):
    assert parity(tmp_path) == 0
    capsys.readouterr()
    stage.ran.clear()
    assert parity(tmp_path, "--resume") == 0
    assert stage.ran == []
    assert "PyTorch holds all 3 rows" in capsys.readouterr().out


OTHER = {
    "seed": (["--seed", "1"], "seed '0' and not '1'"),
    "suite": (["--suite", "full"], "suite 'quick' and not 'full'"),
    "backends": (["--backend", "torch"], "backends 'torch, jax' and not 'torch'"),
    "text": (["--text", "{text}"], "text 'the Python standard library' and not 'text.txt, SHA-256"),
}


@pytest.mark.parametrize("name", OTHER)
def test_resume_of_another_run_is_refused(stage, tmp_path, capsys, name):
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    assert parity(tmp_path) == 0
    before = written(tmp_path)
    capsys.readouterr()
    stage.ran.clear()
    options, said = OTHER[name]
    options = [option.format(text=text) for option in options]
    assert parity(tmp_path, "--resume", *options) == 2
    assert said in complaint(capsys)
    assert stage.ran == []
    assert written(tmp_path) == before


@pytest.mark.parametrize("name", ["code", "torch", "XLA_FLAGS", "system", "training"])
def test_resume_of_other_code_or_versions_is_refused(stage, tmp_path, capsys, name):
    assert parity(tmp_path) == 0
    before = written(tmp_path)
    before["environment"][name] = "another"
    (tmp_path / "out" / "parity.json").write_text(json.dumps(before), encoding="utf-8")
    capsys.readouterr()
    assert parity(tmp_path, "--resume") == 2
    now = cli._environment(
        SimpleNamespace(suite="", seed=0, text=None, device="cpu"), ("torch", "jax"), ""
    )
    assert f"is of {name} 'another' and not '{now.get(name, 'none')}'; run" in complaint(capsys)


def test_the_text_of_a_resumed_run_is_the_same_text(stage, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    assert parity(tmp_path, "--text", str(text)) == 0
    text.write_text("other text\n")
    capsys.readouterr()
    assert parity(tmp_path, "--text", str(text), "--resume") == 2
    assert "text 'text.txt, SHA-256" in complaint(capsys)


def test_every_line_of_code_counts(tmp_path, monkeypatch):
    """The digest of a copy is the same, and another one with a character more in any column."""
    root = Path(xentlib.__file__).parents[1]
    for folder in ("xentlib", "torch_impl", "jax_impl"):
        shutil.copytree(root / folder, tmp_path / folder)
    place = {"xentlib": "xentlib", "xentlib.torch": "torch_impl", "xentlib.jax": "jax_impl"}
    monkeypatch.setattr(
        cli.util,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path / place[name])]),
    )
    digests = {cli._code()}
    for changed in (
        "xentlib/ulp.py",
        "xentlib/parity/cases.py",
        "torch_impl/nll.py",
        "jax_impl/nll.py",
    ):
        with (tmp_path / changed).open("a", encoding="utf-8") as file:
            file.write("#")
        digests.add(cli._code())
    assert len(digests) == 5


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": "xentlib.parity/1"}'])
def test_resume_needs_a_run_to_go_on_from(stage, tmp_path, capsys, text):
    (tmp_path / "out").mkdir()
    if text is not None:
        (tmp_path / "out" / "parity.json").write_text(text)
    assert parity(tmp_path, "--resume") == 2
    expected = "is not there" if text is None else "cannot be read as a parity run"
    assert f"parity.json', which {expected}; run without it." in complaint(capsys)
    assert stage.ran == []
    assert parity(tmp_path) == 0  # which does not mind


def test_an_unfinished_run_is_not_replaced_without_a_word(stage, tmp_path, capsys):
    stage.parts["two"], found = RuntimeError("late"), stage.parts["two"]
    assert parity(tmp_path) == 1
    assert "replaces" not in capsys.readouterr().err
    stage.parts["two"] = found
    assert parity(tmp_path) == 0
    said = "note: this run replaces the one in '{}', which has 2 of 3 sections; `--resume` would"
    assert said.format(tmp_path / "out" / "parity.json") in capsys.readouterr().err
    assert parity(tmp_path) == 0
    assert "replaces" not in capsys.readouterr().err


def test_time_limits_follow_the_sections_that_are_done(stage, tmp_path, monkeypatch):
    """Also those of the run that is gone on from: each section here is expected to take 2 s."""
    monkeypatch.setattr(progress, "STEP_SECONDS", 2.0)
    monkeypatch.setattr(progress, "SECONDS_OF_STEP", {})
    clock = iter([0.0, 6.0, 6.0, 20.0, 20.0, 34.0])
    monkeypatch.setattr(cli, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found, stage.parts = stage.parts, stage.parts | {"training": RuntimeError("late")}
    assert parity(tmp_path) == 1
    assert stage.slowness == [1.0, 6 / 2, 20 / 4]
    # What failed says nothing of the speed, and is expected to take as long as ever.
    stage.slowness.clear()
    clock = iter([0.0, 9.0, 9.0, 18.0, 18.0, 22.0])
    stage.parts = {"one": RuntimeError(), "two": RuntimeError(), "training": found["training"]}
    assert parity(tmp_path) == 1
    stage.parts = found
    stage.slowness.clear()
    clock = iter([0.0, 6.0, 6.0, 8.0])
    assert parity(tmp_path, "--resume") == 0
    assert stage.slowness == [4 / 2, 10 / 4]


def test_sections_have_names_of_their_own():
    """They are kept and gone on from by name."""
    from xentlib.parity.suite import operator_sections

    for suite in ("quick", "full"):
        both, *one = (
            [part.name for part in operator_sections(backends, suite, 0)]
            for backends in (("torch", "jax"), ("torch",), ("jax",))
        )
        assert len(set(both)) == len(both)
        assert one[0] == one[1]
        assert set(both) - set(one[0]) == {
            "audit mode, bit for bit",
            "per-token outputs in audit mode",
            "windows in audit mode",
        }


def test_on_a_device_what_needs_ranks_is_left_out():
    from xentlib.parity.suite import operator_sections

    here, there = (
        [part.name for part in operator_sections(("torch", "jax"), "quick", 0, device)]
        for device in ("cpu", "cuda")
    )
    assert [name for name in here if name not in there] == [
        "vocabularies over ranks",
        "collectives",
    ]


def test_a_device(stage, tmp_path, monkeypatch, capsys):
    """`--device cuda`: both frameworks compute there, what cannot is named; without one, a
    sentence."""
    assert parity(tmp_path, "--device", "cuda") == 2
    assert "a device that torch and jax can use" in complaint(capsys)
    names = {"torch": "a GPU", "jax": "the GPU"}
    monkeypatch.setattr("xentlib.parity.device.described", lambda _, backend: names[backend])
    assert parity(tmp_path, "--device", "cuda") == 0
    assert stage.device == "cuda"
    assert stage.variables["JAX_PLATFORMS"] == "cuda,cpu"
    said = written(tmp_path)["environment"]
    assert said["device"] == "a GPU in torch, the GPU in jax"
    assert all(said[part].startswith("left out") for part in ("ranks", "training"))
    capsys.readouterr()
    (tmp_path / "text").write_text("words")
    assert parity(tmp_path, "--device", "cuda", "--text", str(tmp_path / "text")) == 2
    assert "on the CPU alone" in complaint(capsys)


# Of the real sections, those that take seconds.
REAL = """
import sys
from xentlib import cli
from xentlib.parity import ranks, suite
real = suite.operator_sections
names = {names!r}
suite.operator_sections = lambda *a: [part for part in real(*a) if part.name in names]
cli._training_left_out = lambda *a: "left out here"
ranks.SECONDS = {seconds!r}
sys.exit(cli.main(["parity", "--out", *sys.argv[1:]]))
"""
SHORT = ("log-probabilities of given logits", "run to run")


def real_run(out, *options, names=SHORT, seconds=600, **how):
    program = REAL.format(names=names, seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", program, str(out), *options], text=True, **how)


@pytest.mark.slow
def test_a_run_that_was_killed_is_gone_on_from_to_the_same_bits(tmp_path):
    """Real sections of both backends, `kill -9` while the second one runs."""
    for name in ("torch", "jax"):
        pytest.importorskip(name)
    assert real_run(tmp_path / "whole", stdout=subprocess.DEVNULL).wait() == 0
    with real_run(tmp_path / "out", stderr=subprocess.PIPE) as killed:
        for line in killed.stderr:
            if SHORT[1] in line:
                break
        killed.kill()
    assert list(sections(tmp_path).values()) == ["done", "not run"]
    resumed = real_run(
        tmp_path / "out", "--resume", stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    said = resumed.communicate()[1]
    assert resumed.returncode == 0, said
    assert SHORT[0] not in said
    (tmp_path / "other").mkdir()
    (tmp_path / "whole").rename(tmp_path / "other" / "out")
    assert but_for_times(tmp_path) == but_for_times(tmp_path / "other")
    assert len(written(tmp_path)["measurements"]) > 50


@pytest.mark.slow
def test_late_ranks_are_an_error_of_their_section_alone(tmp_path):
    """Real ranks, which a millisecond is not enough for, however slow this machine is."""
    pytest.importorskip("torch")
    names = ("vocabularies over ranks", "per-token outputs of given logits")
    out = tmp_path / "out"
    late = real_run(out, "--backend", "torch", names=names, seconds=1e-3, stdout=subprocess.PIPE)
    table = late.communicate()[0]
    assert late.returncode == 1
    assert sections(tmp_path) == {names[0]: "failed", names[1]: "done"}
    reason = "RuntimeError: 4 of 4 torch ranks were not done in 0.0 s, which is the limit"
    assert f"{names[0]} could not be run: {reason}" in table
    assert f"{names[0]} could not be run; what was measured holds" in table
    assert reason in (out / "parity.html").read_text(encoding="utf-8")


# --- ranks ---------------------------------------------------------------------------------------


class Does:
    """Something that a rank is given: code that is run when it is read."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def test_ranks_have_longer_on_a_slower_machine(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(ranks, "SECONDS", 0.001)
    with pytest.raises(
        RuntimeError, match=r"^1 of 1 torch ranks were not done in 0\.0 s, which is"
    ):
        ranks.run_ranks("torch", torch_rank, [], 1, 0.001)
    assert ranks.run_ranks("torch", torch_rank, [], 1, 600_000.0) == [[]]


def test_a_rank_that_fails_is_not_waited_for_by_the_others(monkeypatch):
    """It says why; the other one would have said that it lost a connection."""
    monkeypatch.setattr(processes, "AFTER_FAILURE", 0.1)
    code = """
import multiprocessing, time
if multiprocessing.current_process().name == "rank 0": raise ValueError("here")
time.sleep(3600)"""
    with pytest.raises(RuntimeError, match=r"^1 torch ranks failed:\n(.|\n)*ValueError: here"):
        ranks.run_ranks("torch", torch_rank, [Does(code)], 2)


def test_what_a_late_rank_has_said_is_in_the_error(monkeypatch):
    """However much that is."""

    def wait(started, seconds):
        while started[0].said.stat().st_size < 10**6 + 4:
            assert started[0].process.exitcode is None
            time.sleep(0.05)
        return ["late"]

    monkeypatch.setattr(processes, "_wait", wait)
    code = "import sys, time\nsys.stderr.write('x' * 10**6 + 'here')\nsys.stderr.flush()"
    with pytest.raises(RuntimeError, match=r"were not done in 10 min(.|\n)*xxxhere"):
        ranks.run_ranks("torch", torch_rank, [Does(f"{code}\ntime.sleep(3600)")], 1)


# --- bench ---------------------------------------------------------------------------------------


def test_bench_is_handed_its_own_arguments(monkeypatch):
    seen = []
    module = ModuleType("xentlib.bench.cli")
    module.add_arguments = lambda parser: parser.add_argument("--repeats", type=int)
    module.run = lambda args: seen.append(args.repeats) or 3
    monkeypatch.setitem(sys.modules, "xentlib.bench.cli", module)
    monkeypatch.setattr("xentlib.bench.cli", module, raising=False)
    assert cli.main(["bench", "--repeats", "5"]) == 3
    assert seen == [5]


def test_bench_without_its_packages(monkeypatch, capsys):
    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "xentlib.bench.cli":
                raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    monkeypatch.delitem(sys.modules, "xentlib.bench.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    assert cli.main(["bench"]) == 2
    assert complaint(capsys) == (
        "xentlib: `xentlib bench` needs psutil, which is not installed; "
        "install it with `pip install 'xentlib[bench]'`."
    )


# --- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def a_stage(progress):
    progress.stage("operators [a5]", 2)
    progress.advance("N=33 [/bold]")
    progress.advance()
    progress.stage("training", 0)
    progress.advance()


def test_progress_off_a_terminal_is_one_line_a_stage():
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert isinstance(progress, PlainProgress)
        a_stage(progress)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("s] operators [a5] (2 steps)")
    assert second.endswith("s] training")


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with progress_on(stream) as progress:
        assert not isinstance(progress, PlainProgress)
        a_stage(progress)
    shown = stream.getvalue()
    assert "operators [a5]" in shown  # brackets are text
    assert "2/2" in shown
    assert "1/1" in shown  # a stage of unknown length ends full


def a_plan(**steps):
    return [Planned(name, count, lambda *_: Section("")) for name, count in steps.items()]


def test_time_left_follows_what_this_machine_has_taken(monkeypatch):
    """Of sections that are expected to take 60, 120 and 600 s."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "SECONDS_OF_STEP", {"one": 60.0, "two": 60.0})
    monkeypatch.setattr(progress, "STEP_SECONDS", 100.0)
    pace = Pace(a_plan(one=1, two=2, three=6))
    assert (pace.slowness, pace.left(), pace.text()) == (1.0, 780.0, "about 13 min left")
    pace.begin("one")
    now[0] += 30
    assert pace.left() == 750.0
    now[0] += 150  # longer than expected: nothing of it is left
    assert pace.left() == 720.0
    pace.done("one", 180.0)
    assert (pace.slowness, pace.left()) == (3.0, 2160.0)
    pace.done("two", None)  # failed, and says nothing of the speed
    assert (pace.slowness, pace.left()) == (3.0, 1800.0)
    pace.begin("three")
    now[0] += 1780
    assert pace.text() == "under 1 min left"
    pace.done("three", 1780.0)
    assert pace.left() == 0.0


def test_time_left_is_in_the_plain_lines_and_beside_the_bar(monkeypatch):
    stream, pace = io.StringIO(), Pace(a_plan(one=2))
    monkeypatch.setattr(Pace, "left", lambda self: 500.0)
    with progress_on(stream, pace) as told:
        a_stage(told)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("] operators [a5] (2 steps), about 8 min left")
    assert lines[1].endswith("] training, about 8 min left")
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with progress_on(stream, pace) as told:
        told.stage("operators", 2)
        told.advance("N=33")
    assert "about 8 min left" in stream.getvalue()


def test_silent_progress():
    a_stage(SilentProgress())
