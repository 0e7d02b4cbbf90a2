"""`xentlib.interop` in processes of its own: which framework it loads, arrays over several
devices.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import xentlib.interop
from helpers.crossing import frameworks


def python(code, **environment):
    root = str(pathlib.Path(xentlib.interop.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


LOADS = {
    "the import": ([], "xentlib.interop", ["torch", "jax"]),
    "numpy to numpy": ([], "to_numpy(np.ones(3))", ["torch", "jax"]),
    "torch to numpy": (["torch"], "import torch; to_numpy(torch.ones(3))", ["jax"]),
    "jax to numpy": (["jax"], "import jax; to_numpy(jax.numpy.ones(3))", ["torch"]),
    "numpy to torch": (["torch"], "to_torch(np.ones(3))", ["jax"]),
    "numpy to jax": (["jax"], "to_jax(np.ones(3, np.float32))", ["torch"]),
    "torch to torch": (["torch"], "import torch; to_torch(torch.ones(3))", ["jax"]),
    "jax to jax": (["jax"], "import jax; to_jax(jax.numpy.ones(3))", ["torch"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("needs", "statement", "unloaded"), LOADS.values(), ids=list(LOADS))
def test_a_framework_is_loaded_only_when_its_array_is_there(needs, statement, unloaded):
    frameworks(*needs)
    done = python(f"""
        import sys
        import numpy as np
        import xentlib.interop
        from xentlib.interop import to_jax, to_numpy, to_torch
        {statement}
        loaded = [name for name in {unloaded} if name in sys.modules]
        assert not loaded, loaded
        sys.modules.update(dict.fromkeys({unloaded}))  # as if it were not installed
        {statement}
    """)
    assert done.returncode == 0, done.stderr


def test_arrays_over_several_devices_are_refused_and_one_shard_is_shared():
    frameworks("jax")
    done = python(
        """
        import importlib.util
        import jax
        from jax.sharding import NamedSharding, PartitionSpec
        from xentlib.interop import to_jax, to_numpy, to_torch
        crossings = [to_jax, to_numpy]
        if importlib.util.find_spec("torch"):
            crossings.append(to_torch)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        for spec in (PartitionSpec("x"), PartitionSpec()):
            x = jax.device_put(jax.numpy.arange(64.0), NamedSharding(mesh, spec))
            for cross in crossings:
                for copy in (None, True, False):
                    try:
                        cross(x, copy=copy)
                    except ValueError as error:
                        assert "addressable_data(0)" in str(error), error
                    else:
                        raise AssertionError(f"{cross} took {x.sharding}")
            shard = x.addressable_data(1)
            y = to_numpy(shard, copy=False)
            assert y.__array_interface__["data"][0] == shard.unsafe_buffer_pointer()
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stderr
