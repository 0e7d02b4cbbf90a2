"""What a finding is; and packages: which are there, whether xentlib admits their versions, and with
which it was tested.

The ranges are read from pyproject.toml in a checkout, else from what the installation recorded.
"""

from __future__ import annotations

import os
import platform
import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Literal, NamedTuple

import xentlib
from xentlib.options import KERNELS_ENV
from xentlib.tools.doctor.imports import Tried
from xentlib.tools.harness.environment import version_of

# usable; usable, but look at it; not there, and nothing needs it; cannot be used as it is.
Status = Literal["ok", "note", "absent", "bad"]


class Finding(NamedTuple):
    """One thing that was looked at, in one part of the report."""

    part: str  # "backends", "kernels", ...
    name: str  # "torch"
    status: Status
    said: str  # what was found
    cure: str = ""  # what to do, where there is something to do


class Package(NamedTuple):
    """A package that xentlib works with."""

    name: str  # of the distribution
    module: str
    part: str  # of the report
    extra: str  # of xentlib that installs it; none of them does where it is empty
    use: str
    tested: tuple[str, ...]  # versions that the suite has been run with, in ascending order
    steps: tuple[str, ...] = ()  # of importing what is used of it, the module alone where empty

    @property
    def chain(self) -> str:
        """What it loads, and is imported in one process with: a framework, or neither."""
        frameworks = {"jax": "jax", "flax": "jax"}
        return self.part if self.part == "commands" else frameworks.get(self.extra, "torch")

    @property
    def install(self) -> str:
        return f"pip install 'xentlib[{self.extra}]'" if self.extra else f"pip install {self.name}"


PACKAGES = (
    Package("numpy", "numpy", "backends", "", "the definition", ("2.0.0", "2.4.6", "2.5.5")),
    Package("ml_dtypes", "ml_dtypes", "backends", "", "16-bit dtypes", ("0.5.0", "0.6.0")),
    Package(
        *("torch", "torch", "backends", "torch", "xentlib.torch", ("2.11.0", "2.13.0", "2.15.0")),
        steps=("torch", "torch.cuda:is_available", "xentlib.torch"),
    ),
    Package(
        *("jax", "jax", "backends", "jax", "xentlib.jax", ("0.10.2", "0.12.0.1")),
        steps=("jax", "xentlib.jax", "jax:devices"),
    ),
    Package("triton", "triton", "kernels", "", "programs for NVIDIA GPUs", ("3.9.0",)),
    Package("flax", "flax", "trainers", "flax", "NNX, Linen", ("0.12.4", "0.12.8", "0.12.12")),
    Package("optax", "optax", "trainers", "flax", "token_normalized", ("0.2.6", "0.2.8")),
    Package("deepspeed", "deepspeed", "trainers", "deepspeed", "ZeRO", ("0.19.7", "0.19.8")),
    Package(
        *("transformers", "transformers", "trainers", "hf", "patch, Trainer", ("5.0.0", "5.23.0")),
        steps=("transformers.modeling_utils",),  # the package itself loads next to nothing
    ),
    Package("accelerate", "accelerate", "trainers", "hf", "Accelerator", ("1.10.0", "1.15.0")),
    Package("peft", "peft", "trainers", "hf", "adapters on the head", ("0.21.0", "0.21.2")),
    Package(
        *("trl", "trl", "trainers", "trainers", "TRL's trainers", ("1.16.0",)),
        steps=("trl.trainer.utils",),
    ),
    Package("lightning", "lightning", "trainers", "trainers", "Trainer, Fabric", ("2.6.6",)),
    Package("torchtitan", "torchtitan", "trainers", "", "loss_config", ("0.3.0",)),
    Package("rich", "rich", "commands", "cli", "the table of parity", ("13.0.0", "15.0.0")),
    Package("tokenizers", "tokenizers", "commands", "cli", "parity trains", ("0.22.2", "0.23.3")),
    Package("matplotlib", "matplotlib", "commands", "plot", "plots of bench", ("3.11.2",)),
)

# What changes who computes, where, or which bits come out.
VARIABLES = (
    KERNELS_ENV,
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "DS_ACCELERATOR",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)

REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)")
CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([\w.]+)")
COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]]
COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}


def system() -> list[Finding]:
    """Python, and the variables that are set."""
    version = platform.python_version()
    about = f"{version} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    findings = [Finding("backends", "Python", "ok", about)]
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if variables:
        findings.append(Finding("backends", "environment", "note", ", ".join(variables)))
    return findings


def requirements() -> list[str]:
    """What xentlib asks for, with every extra; those of the sources where there are sources."""
    project = Path(xentlib.__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        tables = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if tables.get("name") == "xentlib":
            extras = tables.get("optional-dependencies", {}).values()
            return [*tables["dependencies"], *(x for extra in extras for x in extra)]
    try:
        return metadata.requires("xentlib") or []
    except metadata.PackageNotFoundError:
        return []


def ranges() -> dict[str, str]:
    """The range of each package by its name, such as ">=0.10.2,<0.12"."""
    clauses_of: dict[str, str] = {}
    for text in requirements():
        parts = REQUIREMENT.match(text)
        if parts and parts[2].strip():
            clauses_of.setdefault(parts[1], parts[2].strip().strip("()"))
    return clauses_of


def release(version: str) -> tuple[int, ...]:
    """Its numbers, without zeros at the end: that of a pre-release is the release it is of."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(x) for x in numbers[0].split(".")] if numbers else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def within(version: str, admitted: str) -> bool:
    """Whether a version is in a range."""
    have = release(version)
    return all(COMPARE[sign](have, release(limit)) for sign, limit in CLAUSE.findall(admitted))


def there(module: str) -> bool:
    """Whether a module can be found; none is imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def inspect(package: Package, admits: dict[str, str], tried: Tried | None = None) -> Finding:
    """A package: there or not, imported or not, in range or not, tested or not; `tried` is what
    came of its import, where one was tried."""
    name, part, use, tested = package.name, package.part, package.use, package.tested
    if not there(package.module):
        return Finding(part, name, "absent", f"not installed ({use})", package.install)
    version = version_of(name)
    if tried and tried.wrong:
        words = f"{version or 'its version is not recorded'} ({use}): {tried.wrong}"
        cure = package.install.replace("install", "install --force-reinstall", 1)
        return Finding(part, name, "bad", words, f"{cure}, or a fresh environment")
    if version is None:
        return Finding(part, name, "note", f"installed ({use}); its version is not recorded")
    if not within(version, admits.get(name, "")):
        clauses = admits[name]
        admitted = clauses.replace(",", ", ")
        words = f"{version} is outside of what xentlib admits ({use}): {admitted}"
        return Finding(part, name, "bad", words, f"pip install '{name}{clauses}'")
    least, most = tested[0], tested[-1]
    with_them = f"tested with {least}" + (f" to {most}" if most != least else "")
    newer, older = release(version) > release(most), release(version) < release(least)
    if newer or older:
        words = f"{version}, {'newer' if newer else 'older'} than what was {with_them} ({use})"
        return Finding(part, name, "note", words)
    return Finding(part, name, "ok", f"{version} ({use}), {with_them}")
