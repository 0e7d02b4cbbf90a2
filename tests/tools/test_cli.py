"""The `xentlib` command: arguments, exit status, what it writes, what it says when it cannot."""

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

import xentlib
from helpers.played import complaint, measured, parity, staged, written
from xentlib.tools import cli
from xentlib.tools.parity.result import Section


@pytest.fixture
def stage(monkeypatch):
    return staged(monkeypatch)


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
        "import sys; from xentlib.tools import cli\n"
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


@pytest.mark.parametrize("command", ["parity", "bench"])
@pytest.mark.parametrize("seed", ["-1", "x", "1.5", "", "4294967296", "9" * 5000, "²"])
def test_seed(stage, capsys, monkeypatch, command, seed):
    monkeypatch.setattr("xentlib.tools.cli.bench.run", lambda args: 0)
    assert cli.main([command, f"--seed={seed}"]) == 2
    said = f"argument --seed: must be a whole number from 0 to 4294967295; got '{seed}'"
    assert said in complaint(capsys)
    assert stage.operators is None


def test_the_largest_seed(stage, tmp_path):
    assert parity(tmp_path, "--seed", "4294967295") == 0
    assert stage.operators == (("torch", "jax"), "quick", 4294967295)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [],
            "the following arguments are required: COMMAND; `xentlib --help` lists what it takes.",
        ),
        (["sing"], "invalid choice: 'sing' (choose from"),
        (["parity", "--suite", "huge"], "argument --suite: invalid choice: 'huge'"),
        (["parity", "--siute", "full"], "unrecognized arguments: --siute full; did you mean `--su"),
        (
            ["bench", "--device", "tpu"],
            "argument --device: invalid choice: 'tpu' (choose from 'aut",
        ),
        (["bench", "--rounds", "0"], "argument --rounds: must be a whole number, 1 or more; got"),
        (["doctor", "now"], "unrecognized arguments: now; `xentlib --help` lists what it takes."),
    ],
)
def test_unknown_words(capsys, arguments, said):
    """In a sentence, without all options before it."""
    assert cli.main(arguments) == 2
    assert said in complaint(capsys)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"xentlib {xentlib.__version__}\n"


def test_python_runs_the_package_as_the_command():
    """`python -m xentlib`, where the command is not on the path."""
    for arguments, status, said in (
        (["--version"], 0, f"xentlib {xentlib.__version__}\n"),
        (["parity", "--out", os.devnull + "/x"], 2, "xentlib: `--out` must be a folder"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "xentlib", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert (done.stdout + done.stderr).startswith(said)


# --- bench ---------------------------------------------------------------------------------------


def test_bench_is_handed_its_own_arguments(monkeypatch):
    seen = []
    module = ModuleType("xentlib.tools.cli.bench")
    module.ARGUMENTS = (("--repeats", int, None, "N", "of all"),)
    module.run = lambda args: seen.append(args.repeats) or 3
    monkeypatch.setitem(sys.modules, "xentlib.tools.cli.bench", module)
    monkeypatch.setattr("xentlib.tools.cli.bench", module, raising=False)
    assert cli.main(["bench", "--repeats", "5"]) == 3
    assert seen == [5]


def test_bench_without_its_packages(monkeypatch, capsys):
    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "xentlib.tools.cli.bench":
                raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.delitem(sys.modules, "xentlib.tools.cli.bench", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    assert cli.main(["bench"]) == 2
    assert complaint(capsys) == (
        "xentlib: `xentlib bench` needs rich, which is not installed; "
        "install it with `pip install 'xentlib[plot]'`."
    )


def test_kernels_are_chosen_for_the_whole_process(stage, tmp_path, monkeypatch, capsys):
    for name in ("XENTLIB_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever the command sets
    assert parity(tmp_path, "--kernels", "eager") == 0
    assert os.environ["XENTLIB_KERNELS"] == "eager"
    assert written(tmp_path)["environment"]["kernels"] == "eager"
    capsys.readouterr()
    assert parity(tmp_path, "--kernels", "eager", "--backend", "jax") == 2
    assert "`--kernels eager` is of PyTorch" in complaint(capsys)
    monkeypatch.setattr(
        "xentlib.tools.cli.requirements.find_spec", lambda name: name != "triton" or None
    )
    assert parity(tmp_path, "--kernels", "triton") == 2
    assert "needs Triton, which is not installed" in complaint(capsys)
    monkeypatch.undo()
