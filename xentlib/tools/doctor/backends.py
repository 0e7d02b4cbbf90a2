"""The two backends: whether they can be imported, their devices, whose kernels compute, and a few
rows of the contract."""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from xentlib.contract import Measurement, failures
from xentlib.options import KERNELS, KERNELS_ENV
from xentlib.tools.doctor.imports import PLUGIN_FAILED, PLUGINS, error_line
from xentlib.tools.doctor.packages import Finding, Status, there
from xentlib.tools.harness.environment import version_of

DRIVER = Path("/proc/driver/nvidia/version")
GIB = 2**30


def driver() -> bool:
    """Whether the machine has NVIDIA's driver, whatever the frameworks make of it."""
    return DRIVER.exists()


def imported(backend: str) -> Finding | None:
    """What stops `import xentlib.torch` or `import xentlib.jax`; None where nothing does."""
    try:
        import_module(f"xentlib.{backend}")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        text = f"cannot be imported: {error_line(error)}"
        cure = f"pip install --force-reinstall 'xentlib[{backend}]' in a fresh environment"
        return Finding("backends", backend, "bad", text, cure)
    return None


# --- PyTorch --------------------------------------------------------------------------------------


def torch_findings() -> list[Finding]:
    """Devices, kernels and what ranks can use; PyTorch can be imported."""
    import torch

    return [*torch_devices(torch), _kernels(torch), _wrappers(torch)]


def torch_devices(torch: Any) -> list[Finding]:
    if torch.cuda.is_available():
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        texts = [
            f"{x.name}, {x.total_memory / GIB:.0f} GiB, compute capability {x.major}.{x.minor}"
            for x in cards
        ]
        return [Finding("devices", f"torch cuda:{k}", "ok", text) for k, text in enumerate(texts)]
    text = f"the CPU, {torch.get_num_threads()} threads"
    build = torch.version.cuda or torch.version.hip
    if not driver():
        return [Finding("devices", "torch", "ok", text)]
    why = "this build has no CUDA" if build is None else f"this build, for CUDA {build}, sees none"
    text += f"; the machine has NVIDIA's driver, but {why}"
    cure = "install PyTorch's CUDA build (pip install torch, without an index of CPU builds)"
    if build is not None:
        cure = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for the build"
    return [Finding("devices", "torch", "note", text, cure)]


def _kernels(torch: Any) -> Finding:
    """Who computes on the default device, and why Triton's programs do not where they do not."""
    from xentlib.torch.core.kernels import chosen, kernels_for, why_no_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        choice = chosen()
        name = kernels_for(device, torch.float32).__name__
    except (RuntimeError, ValueError) as error:
        cure = f"unset {KERNELS_ENV}, or set it to one of {', '.join(KERNELS)}"
        return Finding("kernels", "PyTorch", "bad", str(error), cure)
    if name == "Triton":
        return Finding("kernels", "PyTorch", "ok", f"Triton's programs compute on {device}")
    text = f"eager operators compute on {device}"
    if choice == "eager":
        return Finding("kernels", "PyTorch", "note", f"{text}, as {KERNELS_ENV}=eager says")
    why = why_no_triton(device)
    text += f": {why}" if why else ": Triton's programs could not be run"
    missing = device.type == "cuda" and not there("triton")
    status: Status = "ok" if device.type == "cpu" else "note"
    return Finding("kernels", "PyTorch", status, text, "pip install triton" if missing else "")


def compilers() -> list[Finding]:
    """What DeepSpeed compiles at its first start on CPUs, and with some optimizers elsewhere: where
    what compiles it is not there."""
    import torch

    compiler = os.environ.get("CXX", "c++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if not missing:
        return []
    named = os.environ.get("DS_ACCELERATOR")
    on_cpu = named == "cpu" or (named is None and not torch.cuda.is_available())
    when = "at its first start on CPUs" if on_cpu else "for optimizers such as DeepSpeedCPUAdam"
    words = f"DeepSpeed compiles an operator {when}, and cannot find {' and '.join(missing)}"
    cures = {compiler: "install a C++ compiler (g++), or name one in CXX", "ninja": "install ninja"}
    cure = ", ".join(cures[name] for name in missing)
    return [Finding("trainers", "compiler", "bad" if on_cpu else "note", words, cure)]


def _wrappers(torch: Any) -> Finding:
    name = "DDP, FSDP2, tensor parallel"
    if not torch.distributed.is_available():
        text = "this build of PyTorch has no torch.distributed"
        return Finding("trainers", name, "note", text, "install another build for several ranks")
    dist = torch.distributed
    groups = [kind for kind in ("gloo", "nccl") if getattr(dist, f"is_{kind}_available")()]
    return Finding("trainers", name, "ok", f"of PyTorch; process groups: {', '.join(groups)}")


# --- JAX ------------------------------------------------------------------------------------------


def jax_findings() -> list[Finding]:
    """Devices; JAX can be imported. Its compiler is the only implementation of the kernels."""
    import jax

    logging.getLogger(PLUGINS).addFilter(lambda record: PLUGIN_FAILED not in str(record.msg))
    try:
        devices = jax.devices()
    except Exception as error:  # noqa: BLE001 - a RuntimeError or, of a plugin, whatever it raises
        text = f"JAX finds no device: {error_line(error)}"
        cure = "look at JAX_PLATFORMS, and at the plugin of JAX for your accelerator"
        return [Finding("devices", "jax", "bad", text, cure)]
    kinds = ", ".join(dict.fromkeys(device.device_kind for device in devices))
    text = f"{len(devices)} x {devices[0].platform} ({kinds}), jaxlib {version_of('jaxlib')}"
    kernels = Finding("kernels", "JAX", "ok", "XLA compiles them")
    if devices[0].platform == "cpu" and driver() and "JAX_PLATFORMS" not in os.environ:
        text += "; the machine has NVIDIA's driver, but no plugin of JAX for it is installed"
        cure = "pip install 'jax[cuda13]' or 'jax[cuda12]', as your driver allows"
        return [Finding("devices", "jax", "note", text, cure), kernels]
    return [Finding("devices", "jax", "ok", text), kernels]


# --- rows of the contract -------------------------------------------------------------------------


def measured_rows(backends: tuple[str, ...], device: str) -> tuple[list[Measurement], Finding]:
    """What was measured; and which rows, how many measurements, and the worst of those that fall
    short."""
    from xentlib.tools.parity.progress import Progress
    from xentlib.tools.parity.suite import few_sections

    begin = time.perf_counter()
    measured: list[Measurement] = []
    failed: list[str] = []
    on_device: AbstractContextManager[Any] = nullcontext()
    if device == "cpu" and "jax" in backends:  # which would take its accelerator
        import jax

        on_device = jax.default_device(jax.devices("cpu")[0])
    with on_device:
        for part in few_sections(backends, device):
            section = part.section(Progress())
            measured += section.measurements
            if section.error:
                failed.append(f"{part.name} could not be run: {section.reason}")
    seconds = time.perf_counter() - begin
    rows = sorted({m.row for m in measured}, key=lambda row: int(row[1:]))
    about = f"{len(measured)} measurements of rows {', '.join(rows)} on {device} in {seconds:.0f} s"
    short = [m for m in measured if not m.passed]
    if failed or short or not measured:
        words = "; ".join([*failures(short)[:3], *failed]) or "nothing could be measured"
        cure = "run `xentlib parity` for all rows, and report what it writes"
        return measured, Finding("contract", "rows", "bad", f"{words} ({about})", cure)
    words = f"{about}, all within their bounds; `xentlib parity` measures the others"
    if device != "cpu":
        words += "; off the CPU the contract makes no claim yet"
    return measured, Finding("contract", "rows", "ok", words)
