"""`xentlib audit`: what it prints, its exit status, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from xentlib.tools.cli import main

TORCH = """
import torch
import torch.nn.functional as F

def right(head, micro_batches):
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    z = torch.cat([head(b["hidden"]) for b in micro_batches]).flatten(0, 1)
    loss = F.cross_entropy(z, y)
    loss.backward()
    return loss

def capped(head, micro_batches):
    return right(lambda x: 20 * torch.tanh(head(x) / 20), micro_batches)

def mean(head, micro_batches):
    return sum(right(head, [b]).item() for b in micro_batches) / len(micro_batches)

def ddp(head, micro_batches):
    return right(torch.nn.parallel.DistributedDataParallel(head), micro_batches)

def last_loss(head, micro_batches):
    right(head, micro_batches)
    return right(head.requires_grad_(False), micro_batches[-1:])

def stepped(head, micro_batches):
    loss = right(head, micro_batches)
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    head.zero_grad()
    return loss

def no_gradient(head, micro_batches):
    return 1.0

def breaks(head, micro_batches):
    raise RuntimeError("on purpose")

def three_losses(head, micro_batches):
    right(head, micro_batches)
    return torch.ones(3)

def sharded(head, micro_batches):
    right(head, micro_batches)
    return None, head.weight.grad[:5]

def four(a, b, c, d): ...

def leaves(head, micro_batches):
    raise SystemExit(3)

def two_of_a_name(head, micro_batches): ...

from torch.utils.data import DataLoader as another_modules_own

def distils(head, micro_batches):  # without the temperature squared
    total = 0.0
    for b in micro_batches:
        s, t = (z.div(2).log_softmax(-1) for z in (head(b["hidden"]), b["teacher_logits"]))
        mask = b["loss_mask"]
        total = total + F.kl_div(s[mask], t[mask], reduction="sum", log_target=True)
    total = total / sum(b["loss_mask"].sum() for b in micro_batches)
    total.backward()
    return total

def loss(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.T, labels)

def each(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.T, labels, reduction="none")

number = 3
"""
JAX = """
import jax
from xentlib.jax import chunked_nll

def step(head, micro_batches):
    def loss(head):
        return sum(chunked_nll(b["hidden"], head.weight, b["targets"]).loss for b in micro_batches)
    return jax.value_and_grad(loss)(head)

def loss(hidden, weight, labels):
    return chunked_nll(hidden, weight, labels).loss
"""


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    """The command in a folder with the two modules, once; the modules are forgotten again."""
    (tmp_path / "steps_torch.py").write_text(TORCH)
    (tmp_path / "steps_jax.py").write_text(JAX)
    (tmp_path / "broken.py").write_text("import no_such_module_here")
    (tmp_path / "failing.py").write_text("1 / 0")
    # A script that needs an option, which the command line of no test process has.
    wants = 'parser.add_argument("--data", required=True)\nparser.parse_args()'
    (tmp_path / "script.py").write_text(
        f"import argparse\nparser = argparse.ArgumentParser()\n{wants}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])
    names = ("steps_torch", "steps_jax", "broken", "failing", "script")

    def run(*arguments):
        status = main(["audit", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    yield run
    for name in names:
        sys.modules.pop(name, None)


def on_torch(name, *more):
    return f"steps_torch:{name}", "--backend", "torch", *more


@pytest.mark.torch
def test_what_is_wrong_is_printed_and_written(audit, tmp_path):
    pytest.importorskip("torch")
    status, out, _ = audit(*on_torch("mean", "--out", "report.json"))
    assert status == 1
    # Means that are added up, and not divided by their number.
    assert "gradients of the head: mean of the means of micro-batches and off by the acc" in out
    assert "cure: docs/accumulation.md" in out
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["schema"] == "xentlib.audit/1"
    assert found["passed"] is False
    names = ["mean of the means of micro-batches", "off by the accumulation steps"]
    assert found["findings"][0]["defects"] == [names]


@pytest.mark.torch
def test_a_report_is_kept_until_there_is_another(audit, tmp_path):
    pytest.importorskip("torch")
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("an older report")
    for path in (kept, new):
        assert audit(*on_torch("breaks", "--out", str(path)))[0] == 2
    assert kept.read_text() == "an older report"
    assert not new.exists()
    assert audit(*on_torch("mean", "--out", str(kept)))[0] == 1
    assert json.loads(kept.read_text())["passed"] is False


@pytest.mark.torch
def test_the_verdict_is_first_and_lists_are_asked_for(audit):
    pytest.importorskip("torch")
    for asked, there in (((), False), (("-v",), True)):
        out = audit(*on_torch("mean", *asked))[1]
        assert out.startswith("gradients of the head: mean of the means of micro-batches and off")
        assert ("looked for: labels not shifted," in out) is there


@pytest.mark.torch
def test_options_say_what_the_step_applies(audit):
    pytest.importorskip("torch")
    assert audit(*on_torch("right"))[0] == 0
    assert "nothing found" in audit(*on_torch("capped", "--softcap", "20"))[1]
    assert "softcap not applied" in audit(*on_torch("right", "--softcap", "20"))[1]
    assert audit(*on_torch("loss"))[0] == 0
    # One that moves nothing is not said to have been looked for.
    status, out, _ = audit(*on_torch("right", "--softcap", "1e6", "-v"))
    assert status == 0
    assert "not looked for (too small to show with these options): softcap not applied" in out


@pytest.mark.torch
def test_a_step_that_distils(audit):
    pytest.importorskip("torch")
    asked = ("--divergence", "forward_kl", "--temperature", "2")
    assert audit(*on_torch("distils", *asked))[0] == 0
    status, out, _ = audit(*on_torch("distils", *asked, "--temperature-squared"))
    assert status == 1
    assert "gradients of the head: temperature squared missing" in out
    status, _, error = audit(*on_torch("distils", "--divergence", "jsd"))
    assert status == 2
    assert "`beta` must be given with `divergence='jsd'`" in error
    assert audit(*on_torch("right", "--divergence", "jsd", "--beta", "0.3"))[0] == 1


@pytest.mark.torch
def test_a_loss_that_is_wrong_alone(audit):
    pytest.importorskip("torch")
    status, out, _ = audit(*on_torch("last_loss"))
    assert status == 1
    assert "loss: one micro-batch alone" in out


@pytest.mark.jax
def test_a_step_of_jax(audit):
    pytest.importorskip("jax")
    status, out, _ = audit("steps_jax:step", "--backend", "jax")
    assert status == 1
    assert "mean of the means of micro-batches and off by the accumulation steps" in out
    assert "cure: docs/accumulation-jax.md" in out


REFUSED = {
    ("steps_torch.py:right",): "Write 'steps_torch:right'",
    ("steps_torch",): "Write 'steps_torch:step'",
    ("/some/folder/steps_torch.py:right",): "Write 'steps_torch:right', in the folder '/some/fo",
    ("../steps_torch.py:right",): "Write 'steps_torch:right', in the folder '..'",
    ("steps_torch:right()",): "Write 'steps_torch:right'",
    ("script:step",): "'script' could not be imported: it ends the process (SystemExit: 2). Put",
    on_torch("leaves"): "the step 'steps_torch:leaves' raised SystemExit: 3",
    ("nowhere:step",): "'nowhere' must be a module that can be imported from",
    ("broken:step",): "'broken' could not be imported: No module named 'no_such_module_here'",
    ("failing:step",): "'failing' could not be imported: ZeroDivisionError",
    on_torch(
        "wrong"
    ): "'steps_torch' must have 'wrong'; it has breaks, capped, ddp, distils, each, ",
    on_torch("checkpoint"): "two_of_a_name, in ",
    on_torch("number"): "`step` must be a function; got int",
    on_torch("four"): "`step` must take the arguments of step(head, micro_batches) or of l",
    on_torch("loss", "--kind", "step"): "`step` must take the arguments of step(head, micro_",
    on_torch("right", "--kind", "loss"): "got (head, micro_batches)",
    on_torch("no_gradient"): "`step` must return (loss, gradients of the head), or in PyTorch",
    on_torch("stepped"): "`step` must return before the optimizer's step",
    on_torch("breaks"): "the step 'steps_torch:breaks' raised RuntimeError: on purpose",
    on_torch("three_losses"): "alone or first in a tuple; got an array of shape (3,)",
    on_torch(
        "each"
    ): "`step` must return a loss that is one number, alone or first in a tuple; got",
    on_torch("sharded"): "a gradient of `weight` of shape (47, 34); got (5, 34)",
    on_torch(
        "loss", "--kind", "logprobs"
    ): "entropies if it has them, of 53 tokens; got one number",
    on_torch("right", "--softcap", "0"): "`softcap` must be a positive number",
    on_torch("each", "--kind", "logprobs", "--z-loss", "0.1"): "`z_loss` must be 0 with kind=",
    on_torch("right", "--ranks", "2"): "`--ranks` is of JAX",
    on_torch("right", "--out", "no/such/folder"): "`--out` must be a file that can be written",
    ("steps_jax:loss", "--backend", "jax", "--ranks", "2"): "`ranks` must be 1 with kind='loss'",
    ("steps_jax:step", "--backend", "jax", "--ranks", "64"): "`ranks` must be a number of devices",
}


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_audited_is_one_sentence(audit, arguments):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    status, out, err = audit(*arguments)
    assert status == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("xentlib: ")
    assert REFUSED[arguments] in last


def test_an_option_that_is_none_is_named():
    audit = pytest.importorskip("xentlib.torch.audit").audit
    with pytest.raises(ValueError, match=r"`options` must be one of 'bias', .*got 'soft_cap'"):
        audit(lambda head, micro_batches: None, soft_cap=3.0)


@pytest.mark.torch
@pytest.mark.slow
def test_under_torchrun(audit, tmp_path):
    """Local means under DDP; rank 0 alone speaks."""
    pytest.importorskip("torch")
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *run, "-m", "xentlib", "audit", "steps_torch:ddp", "--out", "r.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("gradients of the head: mean of the means of ranks") == 1
    found = json.loads((tmp_path / "r.json").read_text())
    assert "2 ranks" in found["problem"]
