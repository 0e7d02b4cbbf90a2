"""What can be run here: said, or refused in one sentence, before the minutes of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from xentlib.options import KERNELS_ENV
from xentlib.tools.errors import UsageError, note, writing
from xentlib.tools.harness.environment import BACKENDS

TRAINING_NEEDS = {"torch": ("tokenizers",), "jax": ("tokenizers", "flax", "optax")}
EXTRA_OF = {"tokenizers": "cli", "flax": "flax", "optax": "flax"}


def backends_for(asked: str | None) -> tuple[str, ...]:
    """The backends to run: those asked for, which must be installed, or those that are."""
    installed = tuple(name for name in BACKENDS if find_spec(name) is not None)
    wanted = BACKENDS if asked == "both" else (asked,) if asked else installed
    missing = [name for name in wanted if name not in installed]
    if missing:
        raise UsageError(
            f"`--backend {asked}` needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed; install with "
            f"`pip install 'xentlib[{','.join(missing)}]'`"
            + (f" or pass `--backend {installed[0]}`." if installed else ".")
        )
    if not wanted:
        raise UsageError(
            "`xentlib parity` needs PyTorch or JAX and found neither; install with "
            "`pip install 'xentlib[torch,jax]'`."
        )
    if asked is None and len(wanted) == 1:
        note(
            f"only {wanted[0]} is installed: it is held against the float64 oracle alone; "
            f"`pip install 'xentlib[torch,jax]'` to compare the two"
        )
    return wanted


def check_device(device: str, backends: Sequence[str]) -> None:
    from xentlib.tools.harness.device import missing_on

    missing = missing_on(device, backends)
    if missing:
        raise UsageError(
            f"`--device {device}` needs a device that {' and '.join(missing)} can use, and there "
            f"is none; install a build for it, name the other backend with `--backend`, or run "
            f"without `--device`."
        )


def check_kernels(kernels: str, device: str, backends: Sequence[str]) -> None:
    """Chosen for the process and what it starts, before PyTorch is loaded."""
    if kernels == "auto":
        return
    if "torch" not in backends:
        raise UsageError(
            f"`--kernels {kernels}` is of PyTorch; leave it out with `--backend {backends[0]}`."
        )
    if kernels == "triton" and find_spec("triton") is None:
        raise UsageError(
            "`--kernels triton` needs Triton, which is not installed; install it with "
            "`pip install triton`."
        )
    os.environ[KERNELS_ENV] = kernels
    if kernels == "triton" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def training_left_out(
    backends: Sequence[str], text: Path | None, device: str, kernels: str = "auto"
) -> str:
    """Why the training part cannot be run, or nothing."""
    needed = dict.fromkeys(name for backend in backends for name in TRAINING_NEEDS[backend])
    missing = [name for name in needed if find_spec(name) is None]
    if kernels == "triton" and device == "cpu":
        reason = "left out, as interpreted programs would take hours"
        of_text = "`--text` is for the training part; leave out `--kernels triton`."
    elif device != "cpu":
        reason = "left out, as it is run on the CPU alone"
        of_text = "`--text` is for the training part, which is run on the CPU alone."
    elif missing:
        extras = ",".join(dict.fromkeys(EXTRA_OF[name] for name in missing))
        names, way_out = " and ".join(missing), f"`pip install 'xentlib[{extras}]'`"
        reason = f"left out, as it needs {names}: {way_out}"
        of_text = f"`--text` is for the training part, which needs {names}; install with {way_out}."
    else:
        return ""
    if text is not None:
        raise UsageError(of_text)
    if device == "cpu" and kernels != "triton":
        note(f"training is {reason}")
    return reason


def check_paths(text: Path | None, out: Path) -> None:
    """Before the minutes of the run, not after them."""
    if text is not None:
        from xentlib.tools.parity.training.text import read_documents

        try:
            read_documents(text)
        except ValueError as error:
            raise UsageError(str(error)) from error
    with writing("--out", out, "folder"):
        out.mkdir(parents=True, exist_ok=True)


def prepare(backends: Sequence[str], device: str) -> None:
    """What must be in the environment before JAX is loaded."""
    if "jax" not in backends:
        return
    # XLA may otherwise keep a bf16 value in fp32 between two operations: other bits than written.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_allow_excess_precision" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_allow_excess_precision=false".strip()
    if device == "cpu":  # a GPU build would take the GPU
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return
    if device != "auto":  # which is what JAX finds
        os.environ.setdefault("JAX_PLATFORMS", f"{device},cpu")
    # JAX would take three quarters of the memory at its start, and PyTorch is in the same process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
