"""Whether what a call allocates is what the plan says."""

CLOSE = 0.05  # the specification's own figure


def near_plan(measured: float, expected: float, block: int = 0) -> bool:
    """Within 5 %, both ways.

    The plan is that of a CPU whose float32 products are oneDNN's, in blocks that come back as new
    tensors. MKL, with PyTorch 2.11 or on a CPU without AVX-512, writes a product where it belongs:
    what stands at once is then up to a `block` of the softmax's scratch less (7.6 % of 60 MB with
    either).
    """
    import torch

    from xentlib.torch.core.gemm import ONEDNN

    spared = 0 if ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512" else block
    return (1 - CLOSE) * (expected - spared) <= measured <= (1 + CLOSE) * expected
