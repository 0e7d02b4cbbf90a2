"""A head's loss on a mesh that a trainer's own configuration describes."""

from __future__ import annotations

from typing import Any

from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xentlib.arguments import Arguments
from xentlib.jax.nll import nll
from xentlib.jax.placement import axes_of, place
from xentlib.nll import NLLOutput

__all__ = ["placed_nll"]


def placed_nll(given: Arguments, mesh: Any, tokens: Any, weight: Any) -> NLLOutput[Any]:
    """`chunked_nll` where `tokens` and `weight` say which axes of the mesh spread the leading
    dimensions of the hidden states and the head.

    Axes that the mesh does not have, or that have one device, spread nothing. Explicit axes are
    read from the arrays' types, and inside `shard_map` arrays are this device's own.
    """
    types = [] if mesh is None or mesh.size == 1 else list(mesh.axis_types)
    if not types or any(kind is not AxisType.Auto for kind in types):
        return nll(given)

    def on_mesh(spec: Any) -> P:
        kept = ([one for one in axes_of(entry) if mesh.shape.get(one, 1) > 1] for entry in spec)
        return P(*(tuple(names) or None for names in kept))

    return nll(given, place(mesh, on_mesh(tokens), on_mesh(weight), P(), given))
