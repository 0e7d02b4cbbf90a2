"""JAX's programs on a CPU, compiled as fast as XLA can: most of what a test costs is LLVM's time on
a program that runs for a millisecond."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import compiler

# test_nll.py with a cold cache, alone: 127 s of the processor without, 50 s with them. XLA's own
# passes are left as they are.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # of 32 modules, a start of LLVM's passes for each
}
if jax.__version_info__ < (0, 11):  # jax 0.11 knows the option no longer
    OPTIONS["xla_cpu_use_fusion_emitters"] = False  # a pipeline of MLIR's passes for each fusion


# Of a program that is planned and not run: where its arrays lie is settled before LLVM, so the
# bytes are a user's (in 10 programs of losses), in two thirds of the time.
PLANNED = {
    name: OPTIONS[name]
    for name in ("xla_backend_optimization_level", "xla_llvm_disable_expensive_passes")
}

# What a user's program is made of, in one module too: the same instructions, a fifth sooner.
USERS = {"xla_cpu_parallel_codegen_split_count": 1}


class Compiling:
    """Which options JAX's programs are compiled with: `fast`, or as a user has them.

    JAX takes options for one `jit` or for a whole process. A suite that holds the user's own
    programs in some tests adds them where JAX makes the options of each compilation.
    """

    def __init__(self) -> None:
        self.fast = False
        make = compiler.get_compile_options

        def get_compile_options(*args: Any, **kwargs: Any) -> Any:
            own = kwargs.get("env_options_overrides") or {}
            kwargs["env_options_overrides"] = {**(OPTIONS if self.fast else USERS), **own}
            return make(*args, **kwargs)

        compiler.get_compile_options = get_compile_options

    def set(self, fast: bool) -> None:
        if self.fast != fast:
            self.fast = fast
            jax.clear_caches()  # of what was compiled the other way
