"""Programs compiled for an H200 without one, from the wheels of JAX's CUDA plugin.

XLA's autotuning needs the device, so it is off, and each product is one of cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 20 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@contextmanager
def a_gpu_is_there() -> Iterator[None]:
    """What asks for the default backend is told "gpu", as it is where one is. Its programs are not
    kept on disk: only the device itself could read them."""
    patch = pytest.MonkeyPatch()
    known = xla_bridge.canonicalize_platform

    def canonical(platform: str) -> str:
        return "cuda" if platform in ("gpu", "cuda") else known(platform)

    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    patch.setattr(xla_bridge, "canonicalize_platform", canonical)
    patch.setattr(jax, "default_backend", lambda: "gpu")
    try:
        yield
    finally:
        patch.undo()
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
        jax.clear_caches()


def compiled_for_h200(function: Callable[..., Any], *arguments: tuple[tuple[int, ...], Any]) -> Any:
    """A function of arrays of these shapes and dtypes."""
    with a_gpu_is_there():
        device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
        here = NamedSharding(topologies.make_mesh(device, (1,), ("d",)), PartitionSpec())
        shapes = [jax.ShapeDtypeStruct(s, dtype, sharding=here) for s, dtype in arguments]
        return jax.jit(function).lower(*shapes).compile(compiler_options=OPTIONS)
