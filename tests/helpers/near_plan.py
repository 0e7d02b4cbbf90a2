"""Whether what a call allocates is what the plan says."""

from importlib.metadata import version

from xentlib.tools.doctor.packages import release

CLOSE = 0.05  # the specification's own figure


def near_plan(measured: float, expected: float, block: int = 0, copied: int = 0) -> bool:
    """Within 5 %, both ways.

    The plan is that of a CPU whose float32 products are oneDNN's, in blocks that come back as new
    tensors. MKL, with PyTorch 2.11 or on a CPU without AVX-512, writes a product where it belongs:
    what stands at once is then up to a `block` of the softmax's scratch less (7.6 % of 60 MB with
    either). XLA of jax 0.12 has no float32 copy of arrays of 16 bits, those of `copied` entries.
    """
    import torch

    from xentlib.torch.core.gemm import ONEDNN

    spared = 0 if ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512" else block
    spared += 4 * copied if copied and newer_jax() else 0
    return (1 - CLOSE) * (expected - spared) <= measured <= (1 + CLOSE) * expected


def newer_jax() -> bool:
    return release(version("jax")) >= release("0.12")
