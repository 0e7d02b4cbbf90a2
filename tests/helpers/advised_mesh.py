"""The calls that messages print of arrays on a mesh of JAX, made where they were refused: of each
the gradients by hidden states and head that it gives, and those that are right.

Shapes: N tokens, H width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.advice import code_of, keywords_of

N, H, V = 12, 3, 26
Case = Callable[["Mesh"], tuple[list[Any], list[Any]]]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES[f"{name}, {function.__name__}"] = function
        return function

    return keep


class Mesh:
    """Two devices, and the whole problem."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import PartitionSpec as P

        rng = np.random.default_rng(2)
        self.jax, self.P = jax, P
        self.x, self.w = (rng.standard_normal(of).astype(np.float32) for of in ((N, H), (V, H)))
        self.y = rng.integers(0, V, N).astype(np.int32)

    def of(self, explicit: bool) -> Any:
        kind = self.jax.sharding.AxisType
        types = (kind.Explicit if explicit else kind.Auto,)
        return self.jax.make_mesh((2,), ("tp",), types, devices=self.jax.devices()[:2])

    def right(self) -> list[Any]:
        from xentlib.jax import chunked_nll

        def loss(x: Any, w: Any) -> Any:
            return chunked_nll(x, w, self.y, reduction="sum").loss

        return list(self.jax.grad(loss, (0, 1))(self.x, self.w))

    def inside(self, specs: tuple[Any, ...], own: bool = False, **how: Any) -> list[Any]:
        """In `shard_map`; `own` says that each device has a part of the tokens."""
        from xentlib.jax import chunked_nll

        lax = self.jax.lax

        def local(x: Any, w: Any, y: Any) -> Any:
            loss = chunked_nll(x, w, y, reduction="sum", **how).loss
            return lax.psum(loss, "tp") if own else loss

        place = {"mesh": self.of(False), "in_specs": specs, "out_specs": self.P()}
        spread = self.jax.shard_map(local, **place)
        return list(self.jax.jit(self.jax.grad(spread, (0, 1)))(self.x, self.w, self.y))


@case("PLACEMENTS.varying")
def of_a_whole_head_in_shard_map(m: Mesh) -> tuple[list[Any], list[Any]]:
    def call(**how: Any) -> list[Any]:
        return m.inside((m.P(),) * 3, **how)

    code = code_of(lambda: call(vocab_parallel="tp"), "PLACEMENTS.varying")
    return call(**keywords_of(code)), m.right()


@case("ROUTES.nowhere")
def of_hidden_states_in_shard_map(m: Mesh) -> tuple[list[Any], list[Any]]:
    def call(**how: Any) -> list[Any]:
        return m.inside((m.P("tp"),) * 3, own=True, **how)

    code = code_of(lambda: call(gather="hidden"), "ROUTES.nowhere", "vocab")
    return call(**keywords_of(code, axis="tp")), m.right()


@case("ROUTES.nowhere")
def of_hidden_states_under_auto_axes(m: Mesh) -> tuple[list[Any], list[Any]]:
    from flax import nnx

    from xentlib.jax import NLLHead, chunked_nll

    jax = m.jax
    with jax.set_mesh(m.of(False)):

        def refused() -> Any:
            arrays = [jax.device_put(x, m.P("tp")) for x in (m.x, m.w, m.y)]
            return jax.jit(lambda *x: chunked_nll(*x, gather="hidden").loss)(*arrays)

        code = code_of(refused, "ROUTES.nowhere", "NLLHead").replace("...", "H, V, **how")
        kernel = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "tp"))
        how = {"rngs": nnx.Rngs(0), "use_bias": False, "kernel_init": kernel}
        head = eval(code, {"NLLHead": NLLHead, "axis": "tp", "H": H, "V": V, "how": how})
        head.kernel[...] = jax.device_put(m.w.T, m.P(None, "tp"))
        graph, state = nnx.split(head)

        def loss(x: Any, state: Any) -> Any:
            return nnx.merge(graph, state)(x, m.y, reduction="sum").loss

        d_x, d_state = jax.jit(jax.grad(loss, (0, 1)))(jax.device_put(m.x, m.P("tp")), state)
    return [d_x, d_state["kernel"][...].T], m.right()


@case("ROUTES.placed")
def of_whole_arrays_and_an_axis(m: Mesh) -> tuple[list[Any], list[Any]]:
    from jax.sharding import NamedSharding

    from xentlib.jax import chunked_nll

    mesh = m.of(True)

    def put(x: Any) -> Any:
        return m.jax.device_put(x, NamedSharding(mesh, m.P("tp")))

    def call(**how: Any) -> list[Any]:
        def loss(x: Any, w: Any) -> Any:
            return chunked_nll(x, w, put(m.y), reduction="sum", **how).loss

        with m.jax.set_mesh(mesh):
            return list(m.jax.jit(m.jax.grad(loss, (0, 1)))(put(m.x), put(m.w)))

    refused = {"vocab_parallel": "tp", "tokens_parallel": "tp"}
    code = code_of(lambda: call(**refused), "ROUTES.placed")
    return call(**keywords_of(code)), m.right()
