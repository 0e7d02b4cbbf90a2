"""A new option of the loss in a copy of the package: what its author writes, and what users see.

python new_option.py PART ...         says which are done, and of the others what was raised

oracle           both backends, held to the oracle
handed           what each `CrossCheck` hands to its reference
elsewhere        with class probabilities, precomputed logits and a teacher
differs          two ranks, and two devices, with values of their own
unmarked         with class probabilities, which its rule does not name
"""

from __future__ import annotations

import shutil
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "lse_slope"
# All that is written by hand. Of each file, what is put after a line that is there.
EDITS = {
    "xentlib/nll.py": {
        "    z_loss: float | Array = 0.0,\n": f"    {NAME}: float | Array = 0.0,\n",
        "        softcap: positive number, 0-d array (in PyTorch read by the host), or None.\n": (
            f"        {NAME}: coefficient of lse.\n"
        ),
    },
    "xentlib/options.py": {
        "RULES: dict[str, Rule] = {\n": (
            f'    "{NAME}": Rule("a number or a 0-d array", probabilities=True),\n'
        ),
    },
    "xentlib/math/softmax.py": {
        "        loss, z_term = nll, self.xp.zeros_like(nll)\n": (
            f"        loss = loss + options.{NAME} * lse\n"
        ),
        "            slope = self.rounded(2.0 * options.z_loss * lse)\n": (
            "        slope = self.xp.zeros_like(lse) if slope is None else slope\n"
            f"        slope = slope + options.{NAME}\n"
        ),
    },
    "xentlib/reference/nll.py": {
        "    z_loss: float = 0.0,\n": f"    {NAME}: float = 0.0,\n",
        "    z_term = z_loss * s.lse * s.lse\n": f"    nll = nll + {NAME} * s.lse\n",
        "    slope = (1 - label_smoothing) * c_y + uniform * total + 2 * z_loss * s.lse\n": (
            f"    slope = slope + {NAME}\n"
        ),
        "    dz[rows, y_N] = 2 * z_loss * s.lse + uniform * (total - c_y) - slope * s.p_rest\n": (
            f"    dz[rows, y_N] += {NAME}\n"
        ),
    },
    "xentlib/tools/recompute/call.py": {
        "        z_loss: float = 0.0,\n": f"        {NAME}: float = 0.0,\n",
    },
    "xentlib/tools/harness/cases.py": {'    "z_loss": 1e-3,\n': f'    "{NAME}": 0.3,\n'},
}


def edited(folder: Path, *left_out: str) -> None:
    """A copy of the sources with the option, but for the files that are `left_out`."""
    for package in ("torch_impl", "jax_impl"):
        shutil.copytree(ROOT / package, folder / package)
    shutil.copytree(ROOT / "xentlib", folder / "xentlib", symlinks=True)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "public.py", folder / ".ci")
    for name in EDITS.keys() - {*left_out}:
        path = folder / name
        text = path.read_text("utf-8")
        for after, line in EDITS[name].items():
            assert text.count(after) == 1, f"{name} must have this line once: {after}"
            text = text.replace(after, after + line)
        path.write_text(text, "utf-8")


def oracle() -> None:
    """The case that has the option, in both backends; with class probabilities of 0 and 1 too,
    whose loss is the same."""
    import numpy as np

    from xentlib.contract import check
    from xentlib.tools.harness.backends import run
    from xentlib.tools.harness.cases import WITH_OPTIONS
    from xentlib.tools.harness.problems import build

    problem = build(replace(WITH_OPTIONS, tokens=37, hidden=16, vocab=131), 1)
    assert NAME in problem.options
    reference = problem.reference()
    labels = np.where(problem.valid, problem.labels, 0)
    probs = np.eye(131, dtype=np.float32)[labels]
    with_probs = problem.changed(labels=labels, soft=probs, where=problem.valid)
    calls = [(backend, call) for backend in ("torch", "jax") for call in (problem, with_probs)]
    for backend, call in calls:
        outcome = run(backend, call)
        found = check("A2", outcome.loss, reference.loss, magnitude=reference.loss_magnitude)
        found += check("A5", outcome.d_hidden, reference.d_hidden, reference.bound_hidden)
        failed = [x for x in found if not x.passed]
        of = backend if call.soft is None else f"{backend} with class probabilities"
        assert not failed, f"{of} is not the oracle's: {failed}"


def elsewhere() -> None:
    """Computed with labels of either kind, and refused by the other functions, which have no such
    argument: nowhere without an effect."""
    import jax.numpy as jnp
    import numpy as np
    import torch

    import xentlib.jax
    import xentlib.torch

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 3), np.float32), rng.standard_normal((7, 3), np.float32)
    dense = rng.dirichlet(np.ones(7), 5).astype(np.float32)
    ids = np.tile(np.arange(2, dtype=np.int32), (5, 1))
    for X, array in ((xentlib.torch, torch.from_numpy), (xentlib.jax, jnp.asarray)):
        hidden, weight, probs, logits = map(array, (x, w, dense, x @ w.T))
        of_few = X.SoftLabels(array(ids), probs[:, :2])
        teacher = X.TeacherLogits(logits)
        calls = {
            "class probabilities": (X.chunked_nll, hidden, weight, probs),
            "of a few classes": (X.chunked_nll, hidden, weight, of_few),
            "log-probabilities": (X.chunked_logprobs, hidden, weight, array(ids[:, 0])),
            "precomputed logits": (X.vocab_parallel_logprobs, logits, array(ids[:, 0])),
            "their class probabilities": (X.vocab_parallel_logprobs, logits, probs),
            "a teacher": (X.chunked_divergence, hidden, weight, teacher),
            "a teacher of precomputed logits": (X.vocab_parallel_divergence, logits, teacher),
        }
        for name, (function, *args) in calls.items():
            without = function(*args)
            try:
                out = function(*args, **{NAME: 0.3})
            except (ValueError, TypeError) as error:
                named = NAME in str(error) and function is not X.chunked_nll
            else:
                named = float(out.loss) != float(without.loss)
            assert named, f"{name} ignores {NAME}"


def unmarked() -> None:
    """For all parts after it too: with the rule that its author would have written."""
    import jax.numpy as jnp
    import numpy as np
    import pytest
    import torch

    import xentlib.jax
    import xentlib.torch
    from xentlib.options import RULES, Rule

    assert RULES[NAME].probabilities
    RULES[NAME] = Rule("a number or a 0-d array")
    x, probs = np.ones((5, 3), np.float32), np.full((5, 7), 1 / 7, np.float32)
    for X, array in ((xentlib.torch, torch.from_numpy), (xentlib.jax, jnp.asarray)):
        few = X.SoftLabels(array(np.zeros((5, 1), np.int32)), array(probs[:, :1]))
        for labels in (array(probs), few):
            X.chunked_nll(array(x), array(np.ones((7, 3), np.float32)), labels)
            with pytest.raises(ValueError, match=NAME):
                X.chunked_nll(array(x), array(np.ones((7, 3), np.float32)), labels, **{NAME: 0.3})


def handed() -> None:
    import jax
    import jax.numpy as jnp
    import torch

    from helpers.handed import options_missed
    from xentlib.jax import CrossCheck as OfJAX
    from xentlib.torch import CrossCheck, chunked_nll

    check = CrossCheck(every=1)

    def call(**arguments: Any) -> None:
        with check.step(0):
            arguments["hidden"].requires_grad_()
            chunked_nll(**arguments).loss.backward()

    assert options_missed(check, call, torch.from_numpy, "float64") == []
    other = OfJAX(every=1)

    def traced(**arguments: Any) -> None:
        other.nll(0, **arguments)
        jax.effects_barrier()

    assert options_missed(other, traced, jnp.asarray, "float32") == []


def one_rank(rank: int, world: int) -> None:
    import pytest
    import torch
    import torch.distributed as dist

    from xentlib.torch import chunked_nll

    x, w, y = torch.ones(3, 4), torch.full((5, 4), rank + 1.0), torch.arange(3)
    with pytest.raises(ValueError, match=NAME):
        chunked_nll(x, w, y, vocab_parallel=dist.group.WORLD, **{NAME: 0.1 * rank})


def differs() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from helpers import new_option as importable
    from helpers.ranks import launch
    from xentlib.jax import chunked_nll

    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    specs: Any = {"mesh": mesh, "in_specs": (P(), P("tp"), P(), P("tp")), "out_specs": P("tp")}

    def loss(x: Any, w: Any, y: Any, value: Any) -> Any:
        out = chunked_nll(x, w, y, vocab_parallel="tp", **{NAME: value[0]})
        return out.loss[None]

    x, w, y = jnp.ones((3, 4)), jnp.arange(40.0).reshape(10, 4) / 40, jnp.arange(3)
    call = partial(jax.jit(jax.shard_map(loss, **specs, check_vma=False)), x, w, y)
    assert jnp.isfinite(call(jnp.array([0.1, 0.1]))).all()
    assert jnp.isnan(call(jnp.array([0.0, 0.1]))).all()
    launch(2, importable.one_rank)


PARTS = {
    "oracle": oracle,
    "handed": handed,
    "elsewhere": elsewhere,
    "differs": differs,
    "unmarked": unmarked,
}


def main(*parts: str) -> None:
    import pytest

    from helpers.compiling import Compiling

    Compiling().set(True)
    done = []
    for part in parts:
        try:
            PARTS[part]()
            done.append(part)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test shows it
            traceback.print_exc()
    print("done:", *done)
    sys.exit(len(done) < len(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
