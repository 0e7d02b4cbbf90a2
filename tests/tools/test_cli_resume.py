"""A parity run that does not come to its end: what is kept, and how it is gone on from."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import xentlib
from helpers.played import but_for_times, complaint, parity, sections, staged, written
from xentlib.tools.harness import environment
from xentlib.tools.parity import progress as eta


@pytest.fixture
def stage(monkeypatch):
    return staged(monkeypatch)


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
    now = environment.environment_of(
        SimpleNamespace(suite="", seed=0, text=None, device="cpu", kernels="auto", only=[]),
        ("torch", "jax"),
        "",
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
        environment.util,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path / place[name])]),
    )
    digests = {environment.code_digest()}
    for changed in (
        "xentlib/ulp.py",
        "xentlib/tools/harness/cases.py",
        "torch_impl/losses/index.py",
        "jax_impl/nll.py",
    ):
        with (tmp_path / changed).open("a", encoding="utf-8") as file:
            file.write("#")
        digests.add(environment.code_digest())
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
    clock = iter([0.0, 6.0, 6.0, 20.0, 20.0, 34.0])
    clocks = SimpleNamespace(perf_counter=lambda: next(clock), monotonic=time.monotonic)
    monkeypatch.setattr(eta, "time", clocks)
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
    from xentlib.tools.parity.suite import operator_sections

    for suite in ("quick", "standard", "full"):
        both, *one = (
            [part.name for part in operator_sections(backends, suite, 0)]
            for backends in (("torch", "jax"), ("torch",), ("jax",))
        )
        assert len(set(both)) == len(both)
        assert one[0] == one[1]
        assert set(both) - set(one[0]) == {
            "audit mode, bit for bit",
            "classes of a token in audit mode",
            "class probabilities in audit mode",
            "divergences in audit mode",
            "per-token outputs in audit mode",
            "recomputed loss in audit mode",
            "windows in audit mode",
        }


def test_on_a_device_what_is_of_ranks_or_cpus_is_left_out():
    from xentlib.tools.parity.suite import operator_sections

    here, there = (
        [part.name for part in operator_sections(("torch", "jax"), "quick", 0, device)]
        for device in ("cpu", "cuda")
    )
    left_out = {name for name in here if name not in there}
    of_cpus = {name for name in here if name.endswith(("chunk sizes", "batch invariance"))}
    assert left_out == of_cpus | {"vocabularies over ranks", "shard invariance", "collectives"}
    assert len(of_cpus) == 10
    assert "run to run" in there


def test_a_device(stage, tmp_path, monkeypatch, capsys):
    """`--device cuda`: both frameworks compute there, what cannot is named; without one, a
    sentence."""
    assert parity(tmp_path, "--device", "cuda") == 2
    assert "a device that torch and jax can use" in complaint(capsys)
    names = {"torch": "a GPU", "jax": "the GPU"}
    monkeypatch.setattr("xentlib.tools.harness.device.described", lambda _, backend: names[backend])
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
from xentlib.tools import cli
from xentlib.tools.cli import requirements
from xentlib.tools.harness import ranks
from xentlib.tools.parity import suite
real = suite.operator_sections
names = {names!r}
suite.operator_sections = lambda *a: [part for part in real(*a) if part.name in names]
requirements.training_left_out = lambda *a: "left out here"
ranks.SECONDS = {seconds!r}
sys.exit(cli.main(["parity", "--out", *sys.argv[1:]]))
"""
SHORT = ("run to run", "windows of micro-batches")


def real_run(out, *options, names=SHORT, seconds=600, **how):
    program = REAL.format(names=names, seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", program, str(out), *options], text=True, **how)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["torch", pytest.param("both", marks=pytest.mark.full)])
def test_a_run_that_was_killed_is_gone_on_from_to_the_same_bits(tmp_path, of):
    """Real sections, `kill -9` while the second one runs."""
    for name in ("torch", "jax") if of == "both" else [of]:
        pytest.importorskip(name)
    of = "--backend", of
    assert real_run(tmp_path / "whole", *of, stdout=subprocess.DEVNULL).wait() == 0
    with real_run(tmp_path / "out", *of, stderr=subprocess.PIPE) as killed:
        for line in killed.stderr:
            if SHORT[1] in line:
                break
        killed.kill()
    assert list(sections(tmp_path).values()) == ["done", "not run"]
    resumed = real_run(
        tmp_path / "out", *of, "--resume", stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    said = resumed.communicate()[1]
    assert resumed.returncode == 0, said
    assert SHORT[0] not in said
    (tmp_path / "other").mkdir()
    (tmp_path / "whole").rename(tmp_path / "other" / "out")
    assert but_for_times(tmp_path) == but_for_times(tmp_path / "other")
    assert len(written(tmp_path)["measurements"]) > 20


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
    reason = "RuntimeError: 4 of 4 torch ranks "  # made no progress, or used what they may
    assert f"{names[0]} could not be run: {reason}" in table
    assert f"{names[0]} could not be run; what was measured holds" in table
    assert reason in (out / "parity.html").read_text(encoding="utf-8")
