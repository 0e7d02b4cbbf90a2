"""Accelerate in one process more than once, and with what it has on accelerators alone."""

from __future__ import annotations

import os


def start_over(cpu_alone: bool) -> None:
    """Accelerate keeps what it has found of a process; from here on it is a user's new process."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    for name in [x for x in os.environ if x.startswith(("ACCELERATE_USE", "FSDP_"))]:
        del os.environ[name]
    if not cpu_alone:
        # Accelerate 1.15 has FSDP2 and DeepSpeed on accelerators alone: let it take the CPU for
        # one. Everything else of it is as on a GPU.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        found = "gloo", DistributedType.MULTI_GPU
        PartialState._prepare_backend = lambda *args, **kwargs: found
