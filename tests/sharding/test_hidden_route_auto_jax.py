"""`gather="auto"` in JAX: which program a call becomes, by sizes that all devices have alike.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from xentlib.plan import crossover_tokens

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.heads_jax import ONE, TWO  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import KINDS  # noqa: E402
from xentlib import PaddedVocab  # noqa: E402
from xentlib.jax import LinenNLLHead, NLLHead, chunked_logprobs, chunked_nll  # noqa: E402

N, V, H = 64, 1 << 16, 512  # where the routes take as long
# Chunks of this size, in which neither route takes longer for the sum of d weight than for bytes.
BUDGET = {"max_chunk_bytes": 1 << 30}
FUNCTIONS = {"nll": chunked_nll, "logprobs": chunked_logprobs}


def up_to(kind: str, classes: int, ranks: int, head: str = "float32", **more: Any) -> int:
    """Tokens of a device for which the hidden states are predicted to travel."""
    kept = {"recompute": True, "kept": True} if kind == "logprobs" else {}
    dtypes = {"head_dtype": head, "param_dtype": head, "dtype": "float32"}
    given = {"platform": "cpu", "overlapped": False, **BUDGET, **dtypes, **more, **kept}
    found = crossover_tokens(classes, H, ranks, **given)
    assert 0 < found < 1 << 24
    return found


def program(
    kind: str,
    axes: dict[str, int],
    tokens: Any,
    weight: P,
    *,
    dtype: str = "float32",
    **options: Any,
) -> str:
    """Gradients of a call on whole arrays, as they are traced."""
    mesh, options = mesh_of(**axes), BUDGET | options
    vocab_first = options.get("weight_layout", "VH") == "VH"

    def abstract(spec: P, *shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(*arrays: Any) -> Any:
        return FUNCTIONS[kind](*arrays, **options)[0].sum()

    arrays = (
        abstract(P(tokens), N, H),
        abstract(weight, *((V, H) if vocab_first else (H, V)), dtype=options.pop("head", dtype)),
        abstract(P(tokens), N, dtype="int32"),
    )
    return jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).as_text()


def holds(call: Any, tokens: int) -> None:
    """That up to so many tokens of a device the hidden states travel, then the head."""
    hidden, head = call(gather="hidden"), call(gather="head")
    assert hidden != head
    assert call(gather="auto", tokens_per_rank=tokens) == hidden
    assert call(gather="auto", tokens_per_rank=tokens + 1) == head


# Axes, tokens, the weight's pieces; classes of a gathered head, and devices that share them.
PLACES = {
    "rows": (ONE, "data", P("data", None), {}, V, 4),
    "kernel": (ONE, "data", P(None, "data"), {"weight_layout": "HV"}, V, 4),
    "replicas": (TWO, ("data", "tp"), P("tp", None), {}, V, 2),
    "two axes of tokens": (TWO, ("data", "tp"), P(("tp", "data"), None), {}, V, 4),
    "width elsewhere": (TWO, "data", P("data", "tp"), {}, V, 2),
}


@pytest.mark.parametrize("name", PLACES)
@KINDS
def test_sizes_decide(kind: str, name: str) -> None:
    """A15, D7: `tokens_per_rank`, not the tokens of the call, of which there are 16 on a device.
    Catches: devices that share nothing counted in, a function taken for the other."""
    axes, tokens, weight, options, classes, ranks = PLACES[name]
    holds(partial(program, kind, axes, tokens, weight, **options), up_to(kind, classes, ranks))


def test_only_what_would_be_gathered_counts() -> None:
    """D7: of a vocabulary over tp and data a device has V / 2 classes where the head is gathered.
    Catches: V classes of four devices."""
    assert up_to("nll", V // 2, 2) != up_to("nll", V, 4)
    place = (TWO, "data", P(("tp", "data"), None))
    holds(partial(program, "nll", *place), up_to("nll", V // 2, 2))


def test_dtypes_and_budget_count() -> None:
    """D7: a head that is gathered in 16 bits is half as large; smaller chunks are more
    collectives."""
    place = (ONE, "data", P("data", None))
    low = {"head": "bfloat16", "dtype": "bfloat16"}
    limits = {
        up_to("nll", V, 4),
        up_to("nll", V, 4, **low),
        up_to("nll", V, 4, dtype="bfloat16"),
        up_to("nll", V, 4, max_chunk_bytes=1 << 24),
    }
    assert len(limits) > 2
    holds(partial(program, "nll", *place, **low), up_to("nll", V, 4, **low))
    mixed = {"head": "float32", "dtype": "bfloat16"}
    holds(partial(program, "nll", *place, **mixed), up_to("nll", V, 4, dtype="bfloat16"))
    budget = {"max_chunk_bytes": 1 << 24}
    holds(partial(program, "nll", *place, **budget), up_to("nll", V, 4, **budget))


# Where nothing can be chosen: what is gathered, or whole, is gathered, or whole.
ALONE = {
    "a whole head": (ONE, "data", P()),
    "its width": (ONE, "data", P(None, "data")),
    "its width too": (TWO, ("data", "tp"), P("tp", "data")),
    "a head over other axes": (TWO, "data", P("tp")),
    "whole tokens": (ONE, None, P("data")),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_head_where_its_rows_cannot_stay(name: str) -> None:
    """D7: as PyTorch has it of a head that no wrapper shards."""
    call = partial(program, "nll", *ALONE[name])
    assert call(gather="auto", tokens_per_rank=1) == call(gather="head")


def test_one_device_and_a_shard_map_of_one_s_own() -> None:
    """D7: a device that has the whole head chooses nothing."""
    arrays = jnp.ones((8, 4)), jnp.ones((16, 4)), jnp.arange(8)
    auto = {"gather": "auto", "tokens_per_rank": 1}

    def text(function: Any) -> str:
        return jax.jit(function).lower(*arrays).as_text()

    texts = [text(lambda *x, given=given: chunked_nll(*x, **given)) for given in (auto, {})]
    assert texts[0] == texts[1]
    texts = [
        text(
            jax.shard_map(
                lambda *x, given=given: chunked_nll(*x, **given).loss[None],
                mesh=mesh_of(AxisType.Auto, **ONE),
                in_specs=(P("data"), P(), P("data")),
                out_specs=P("data"),
            )
        )
        for given in (auto, {})
    ]
    assert texts[0] == texts[1]


# axes, the kernel's annotation, vocab_parallel, classes of a gathered head, devices
MODULES = {
    "rows": (ONE, (None, "data"), None, V, 4),
    "padded": (ONE, (None, "data"), PaddedVocab("data", V - 3), V, 4),
    "vocabulary parallel": (TWO, (None, ("tp", "data")), "tp", V // 2, 2),
}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("api", ["nnx", "linen"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_under_auto_axes(name: str, api: str, per_token: bool) -> None:
    """D7: by the annotation, and by the function that the module is. Catches: a module that goes by
    `chunked_nll`'s gathers where it is `chunked_logprobs`."""
    axes, kernel, parallel, classes, ranks = MODULES[name]
    kind, mesh = "logprobs" if per_token else "nll", mesh_of(AxisType.Auto, **axes)
    init = nnx.initializers.zeros_init()

    def text(**options: Any) -> str:
        told: dict[str, Any] = {"tokens": "data", "vocab_parallel": parallel}
        told |= {"per_token": per_token, "use_bias": False}
        options = BUDGET | options
        if api == "nnx":
            init_nnx = nnx.with_partitioning(init, kernel)
            with jax.set_mesh(mesh):
                head: Any = nnx.eval_shape(
                    lambda: NLLHead(H, V, rngs=nnx.Rngs(0), kernel_init=init_nnx, **told, **options)
                )
            graph, state = nnx.split(head)

            def call(weight: Any, *x: Any) -> Any:
                return nnx.merge(graph, jax.tree.map(lambda _: weight, state))(*x)
        else:
            init_linen = nn.with_partitioning(init, kernel)
            head = LinenNLLHead(V, kernel_init=init_linen, **told, options=options)

            def call(weight: Any, *x: Any) -> Any:
                return head.apply({"params": {"kernel": weight}}, *x)

        def abstract(spec: P, *shape: int, dtype: str = "float32") -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        arrays = (
            abstract(P(*kernel), H, V),
            abstract(P("data"), N, H),
            abstract(P("data"), N, dtype="int32"),
        )
        step = jax.grad(lambda *x: call(*x)[0].sum(), (0, 1))
        with jax.set_mesh(mesh):
            return jax.jit(step).lower(*arrays).as_text()

    holds(text, up_to(kind, classes, ranks))
