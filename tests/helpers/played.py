"""`xentlib parity` with the sections of a run played, and what it has written and said."""

import json
import os
import sys
from types import ModuleType, SimpleNamespace

from xentlib.tools import cli
from xentlib.tools.cli import requirements
from xentlib.tools.parity.progress import Planned
from xentlib.tools.parity.result import Histogram, Measurement, Section, TrainingCurve

EVERYTHING = {"torch", "jax", "flax", "optax", "tokenizers"}


def measured(value=1.0, row="A5"):
    return Measurement(row, "torch", "N=33", "d hidden", "tau", value, 4.0, value <= 4.0, 2112)


def staged(monkeypatch):
    """`main` with the sections of a run played, and the packages that are to be there.

    `stage.parts` is what each section finds, or raises; `stage.rows` what it says that it measures;
    `stage.ran` the sections that were run;
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
        rows={"one": ("A5", "A0"), "two": ("A7",), "training": ("A6", "A0", "curve")},
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

        return Planned(name, 1, run, step_seconds=2.0, rows=played.rows[name])

    def operator_sections(backends, suite, seed, device):
        played.operators = (backends, suite, seed)
        played.device = device
        played.variables = {k: os.environ.get(k) for k in ("XLA_FLAGS", "JAX_PLATFORMS")}
        return [planned(name) for name in played.parts if name != "training"]

    def training_sections(backends, *, text, seed, few):
        played.training = (backends, text, seed)
        return [planned("training")]

    for name, function in (
        ("suite", operator_sections),
        ("training.comparison", training_sections),
    ):
        module = ModuleType(f"xentlib.tools.parity.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        requirements, "find_spec", lambda name: name if name in played.installed else None
    )
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


def sections(tmp_path):
    return {section["name"]: section["state"] for section in written(tmp_path)["sections"]}


def but_for_times(tmp_path):
    found = written(tmp_path)
    for section in found["sections"]:
        del section["seconds"]
    del found["seconds"], found["environment"]["date"]
    return found
