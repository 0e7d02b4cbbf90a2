"""Each kind of divergence is in every table that has a row of each; a new one is in none."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.modules import ROOT
from xentlib.math.divergence import KINDS as ARITHMETIC
from xentlib.options import DIVERGENCES
from xentlib.plan.memory import TORCH_ARRAYS
from xentlib.plan.memory_jax import JAX_ARRAYS
from xentlib.tools.parity.rows.divergences import KINDS, ONCE


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_kind_is_in_every_table(kind):
    assert ARITHMETIC[kind].name == kind
    assert kind in TORCH_ARRAYS
    assert kind in JAX_ARRAYS
    assert kind in [how["kind"] for how in KINDS]
    assert [case.options["kind"] for case in ONCE].count(kind) == 1
    page = (ROOT / "docs" / "divergences.md").read_text("utf-8")
    assert f'"{kind}"' in page


def test_a_kind_that_triton_lacks_is_of_eager_operators(monkeypatch):
    """Whose programs would compute it as another one."""
    torch = pytest.importorskip("torch")
    from xentlib.torch.core.eager import Eager
    from xentlib.torch.core.kernels import DIVERGENCES_IN_TRITON
    from xentlib.torch.losses import teacher

    class Loss:
        kind = "renyi"

    class Call:
        hidden, compute_dtype, scalars = torch.ones(1, 1), torch.float32, None

    triton: Any = object()
    monkeypatch.setattr(teacher, "kernels_for", lambda *_: triton)
    assert teacher.kernels_of(Call, Loss) is Eager
    assert set(DIVERGENCES_IN_TRITON) <= {*DIVERGENCES}
    for kind in DIVERGENCES_IN_TRITON:
        Loss.kind = kind
        assert teacher.kernels_of(Call, Loss) is triton
