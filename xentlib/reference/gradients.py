"""From dz to the gradients of hidden states, head and bias, in float64, with their bounds."""

from __future__ import annotations

import numpy as np

from xentlib.reference.softmax import Float64, Softmax
from xentlib.ulp import round_to

# float16 dz carries a power of two: the largest factor of a token is put into [2^10, 2^11).
FP16_EXPONENT = 11


def gradients_of(
    s: Softmax,
    dz: Float64,
    bz: Float64,
    dz_dtype: str,
    upstream: float,
    factor: Float64,
) -> dict[str, Float64]:
    """Back through softcap, scale and temperature, and through the two GEMMs: the fields of a
    reference whose names begin with `d_`, and with `bound_` and `magnitude_` of the same arrays.

    `factor` [N] is what multiplies each token, the upstream gradient included. `upstream` is that
    of a loss whose gradients it multiplies after the GEMMs, else 1.
    """
    bz = np.abs(s.outer) * (bz * s.jacobian + np.abs(dz) * s.jacobian_error)
    dz = np.where(s.valid[:, None], dz * s.jacobian * s.outer, 0.0)
    bz = np.where(s.valid[:, None], bz, 0.0)
    dz_gemm = dz
    if dz_dtype != "float64":
        # What multiplies after the GEMMs is no part of what is rounded.
        power = 1.0
        if dz_dtype == "float16":
            largest = np.abs(np.where(s.valid, factor / upstream, 0.0)).max(initial=0.0)
            power = float(np.ldexp(1.0, FP16_EXPONENT - int(np.frexp(largest)[1])))
        dz_gemm = round_to(dz / upstream * power, dz_dtype) / power * upstream
    total_bz = bz + np.abs(dz)

    def products(
        kind: str, dz_gemm: Float64, dz: Float64, x_NH: Float64, w_VH: Float64
    ) -> dict[str, Float64]:
        weight = dz_gemm.T @ x_NH
        return {
            f"{kind}_hidden": (dz_gemm @ w_VH).reshape(s.hidden.shape),
            f"{kind}_weight": weight.T if s.turned else weight,
            f"{kind}_bias": dz.sum(axis=0),
        }

    sizes = np.abs(s.x_NH), np.abs(s.w_VH)
    gradients = products("d", dz_gemm, dz, s.x_NH, s.w_VH)
    gradients |= products("bound", total_bz, total_bz, *sizes)
    return gradients | products("magnitude", np.abs(dz_gemm), np.abs(dz), *sizes)
