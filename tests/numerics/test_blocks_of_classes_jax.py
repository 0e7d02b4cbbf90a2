"""Heads that are read in blocks of classes, in JAX: log-probabilities, and calls without a
gradient. Blocks and groups of tokens are small here, and no size is a multiple of one."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.measured import by_id, hold
from xentlib.contract import check, failures
from xentlib.plan import plan_chunks
from xentlib.tools.harness.cases import CHUNK_CASES, low_precision
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.head import per_token

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import hold_shards, sharded  # noqa: E402
from xentlib.jax import LowRankHead, chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.jax.core import blocks as module  # noqa: E402

TOKENS, WIDTH, CLASSES = 203, 24, 331  # two blocks of 128 classes and a part of one
LARGE = tuple(case for case in CHUNK_CASES if case.vocab > 512)


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """At most 128 classes in a block, 64 tokens in a group; to be called for others."""

    def sizes(classes: int = 128) -> None:
        monkeypatch.setattr("xentlib.jax.binding.XLA_BLOCK_CLASSES", classes)

    sizes()
    monkeypatch.setattr("xentlib.jax.core.logits.GROUP_TOKENS", 64)
    monkeypatch.setattr("xentlib.jax.core.blocks.LABEL_GROUP", 8)
    return sizes


def arrays(**more: Any) -> dict[str, Any]:
    """A label in every block, one token in five ignored, logits that are far from 0."""
    seed = np.random.default_rng(5)
    labels = seed.integers(0, CLASSES, TOKENS)
    labels[:3] = 127, 128, CLASSES - 1
    labels[100:150] = 130  # more of one block than a group of labels has
    labels[3::5] = -100
    bias = seed.standard_normal(CLASSES) - 20.0
    bias[200] += 40.0
    of: dict[str, Any] = {
        "hidden": jnp.float32(seed.standard_normal((TOKENS, WIDTH))),
        "weight": jnp.float32(seed.standard_normal((CLASSES, WIDTH))),
        "labels": jnp.asarray(labels),
        "bias": jnp.float32(bias),
    }
    if "kept" in more:
        kept = seed.integers(0, CLASSES, (TOKENS, 17))
        kept[:, 0] = np.maximum(labels, 0)
        more["kept"] = kept
    if "ids" in more:
        more["ids"] = seed.integers(-1, CLASSES, (TOKENS, 5))
    if more.get("class_weights") is True:
        more["class_weights"] = jnp.float32(seed.random(CLASSES))
    if "temperature" in more:
        more["temperature"] = jnp.float32(0.5 + seed.random(TOKENS))
    return of | more


# Each is two programs of three seconds. Those without softcap, temperature and further classes
# are compared below, of a loss.
LOGPROBS: list[dict[str, Any]] = [
    {"ids": True, "softcap": 9.0, "weight_layout": "HV"},
    {"kept": True, "ids": True, "temperature": True},
]


def logprobs(**options: Any) -> tuple[Any, Any]:
    """Outputs, and gradients of hidden states, head and bias."""
    of = arrays(**options)
    if options.get("weight_layout") == "HV":
        of["weight"] = of["weight"].T
    hidden, weight, bias = (of.pop(name) for name in ("hidden", "weight", "bias"))

    def total(hidden: Any, weight: Any, bias: Any) -> Any:
        out = chunked_logprobs(hidden, weight, bias=bias, entropy=True, **of)
        sums = (out.logprobs * jnp.linspace(-1, 1, TOKENS)).sum() + 0.1 * out.entropy.sum()
        if out.ids_logprobs is not None:
            sums = sums + jnp.maximum(out.ids_logprobs, -50.0).sum()
        return sums, out

    gradients, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(hidden, weight, bias)
    return out, gradients


@pytest.mark.optimized
@pytest.mark.parametrize("options", LOGPROBS, ids=str)
def test_blocks_do_not_show(options: dict[str, Any], blocks: Any) -> None:
    """Bits of all outputs are those of whole rows; gradients have the terms in another order.
    Catches: a maximum of one block, a label's class in another block, a part of d hidden that takes
    the place of the one before, labels of a second group."""
    found, gradients = logprobs(**options)
    blocks(classes=0)
    want, whole = logprobs(**options)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.array_equal(x, y)
    for x, y in zip(gradients, whole, strict=True):
        reference = np.asarray(y, np.float64)
        assert not failures(check("A6", np.asarray(x), reference, metrics=("rho / u",)))


@pytest.mark.optimized
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weights": True},
        {"temperature": True, "softcap": 9.0, "max_chunk_bytes": 64 * 128 * 4},
    ],
    ids=str,
)
def test_an_evaluation_has_the_values_of_a_training_step(options: dict[str, Any]) -> None:
    """Without a gradient in blocks, with one not: the same bits, with label smoothing a sum over
    blocks beside them."""
    outputs = ("logprobs", "entropy", "lse", "correct", "predicted")
    of = arrays(**options)
    hidden = of.pop("hidden")

    def loss(hidden: Any) -> Any:
        out = chunked_nll(hidden, outputs=outputs, **of)
        return out.loss, out

    found = jax.jit(loss)(hidden)[1]
    want = jax.jit(jax.grad(loss, has_aux=True))(hidden)[1]
    smooth = "label_smoothing" in options
    for name, x, y in zip(found._fields, found, want):
        if name == "loss" and smooth:
            number = np.asarray(y, np.float64)
            assert not failures(check("A2", np.asarray(x), number, magnitude=abs(number)))
        elif y is not None:
            assert np.array_equal(x, y), name


@pytest.mark.parametrize("count", [0, TOKENS], ids=["no token", "none that counts"])
def test_of_no_token_gradients_are_0(count: int) -> None:
    of = arrays()
    labels = jnp.full((count,), -100)

    def total(hidden: Any, weight: Any, bias: Any) -> Any:
        return chunked_logprobs(hidden, weight, labels, bias=bias).logprobs.sum()

    three = of["hidden"][:count], of["weight"], of["bias"]
    for gradient in jax.jit(jax.grad(total, (0, 1, 2)))(*three):
        assert not np.asarray(gradient).any()


def seen_blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    for name in ("columns_of_blocks", "gradients_of_blocks"):
        function = getattr(module, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            seen.append(name)
            return function(*args)

        for where in ("core.stats", "losses.loss"):
            monkeypatch.setattr(f"xentlib.jax.{where}.{name}", counted, raising=False)
    return seen


def widths(function: Any, *args: Any) -> set[str]:
    """Of logits that products make."""
    text = str(jax.make_jaxpr(function)(*args))
    return set(re.findall(r"f32\[\d+,(\d{3,})\] = dot_general", text))


def test_which_calls_are_read_in_blocks() -> None:
    """Log-probabilities, and a loss without a gradient; no loss with one, no `top_k`, no adapter,
    and no arrays that the compiler places on a mesh."""
    of = arrays()
    hidden, weight, labels = of["hidden"], of["weight"], of["labels"]

    def loss(hidden: Any, weight: Any) -> Any:
        return chunked_nll(hidden, weight, labels % 330).loss

    def logprob(hidden: Any, weight: Any, **more: Any) -> Any:
        return chunked_logprobs(hidden, weight, labels % 330, **more).logprobs.sum()

    low = LowRankHead(weight, jnp.ones((2, WIDTH)), jnp.ones((CLASSES, 2)), 1.0)
    assert widths(loss, hidden, weight) == {"128"}
    assert widths(jax.grad(logprob), hidden, weight) == {"128"}
    assert widths(partial(logprob, ids=labels[:, None] % 330), hidden, weight) == {"128"}
    assert widths(jax.grad(loss), hidden, weight) == {"384"}
    assert widths(partial(logprob, top_k=3), hidden, weight) == {"384"}
    assert widths(lambda hidden: loss(hidden, low), hidden) == {"384"}
    with jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))):
        assert widths(logprob, hidden, weight) == {"384"}


@pytest.mark.parametrize("case", [*LARGE, *low_precision(LARGE[1:2], "float16")], ids=by_id)
def test_against_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A0, A5, A6, A7, A16. Catches: d hidden that is rounded after each block, d weight before its
    last token, a power of two that is left in a gradient."""
    seen = seen_blocks(monkeypatch)
    hold(per_token.against_oracle, ("jax",), build(case, 7))
    assert set(seen) == {"columns_of_blocks", "gradients_of_blocks"}


def test_chunks_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most 192 tokens 201 are two chunks of 128 rows, as the plan has it, since a loop
    computes whole chunks. Catches: one of 192 and one of 9 tokens, 384 rows."""
    for where in ("jax.core.logits", "plan.split"):
        monkeypatch.setattr(f"xentlib.{where}.GROUP_TOKENS", 192)
    of = arrays()

    def logprob(hidden: Any, weight: Any) -> Any:
        return chunked_logprobs(hidden, weight, of["labels"][:201]).logprobs.sum()

    # A number of tokens that no other test has traced in groups of another size.
    text = str(jax.make_jaxpr(logprob)(of["hidden"][:201], of["weight"]))
    assert set(re.findall(r"f32\[(\d+),128\] = dot_general", text)) == {"128"}
    plan = plan_chunks(201, CLASSES, WIDTH, max_chunk_bytes=1 << 26).in_blocks("jax")
    assert plan.even_tokens == 128
    with pytest.raises(ValueError, match="backend"):
        plan.in_blocks("JAX")  # type: ignore[arg-type]


def test_a_program_for_any_number_of_tokens() -> None:
    """With gradients. Catches: labels of a block that are searched for."""
    of = arrays()
    (tokens,) = export.symbolic_shape("n")

    def total(hidden: Any, weight: Any, labels: Any) -> Any:
        return chunked_logprobs(hidden, weight, labels).logprobs.sum()

    function = jax.jit(jax.grad(total, (0, 1)))
    shapes = [jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32), of["weight"]]
    exported = export.export(function)(*shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32))
    three = of["hidden"], of["weight"], of["labels"].astype(jnp.int32)
    for x, y in zip(exported.call(*three), function(*three), strict=True):
        reference = np.asarray(y, np.float64)
        assert not failures(check("A6", np.asarray(x), reference, metrics=("rho / u",)))


BLOCKS = Case("blocks", TOKENS, WIDTH, CLASSES)


@pytest.mark.optimized
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: rows of d hidden too. A group is as large as a chunk may be, or all had 64 rows."""
    monkeypatch.setattr("xentlib.jax.core.logits.GROUP_TOKENS", 256)
    hold(per_token.chunks, ("jax",), build(BLOCKS, 7))


@pytest.mark.optimized
def test_other_tokens_do_not_show() -> None:
    """A17: groups that are not the same, and one that is not full."""
    findings = Findings(("jax",))
    invariant.batch(per_token, findings, "jax", build(BLOCKS, 7), few=True)
    assert len(findings.measurements) >= 15
    assert not failures(findings.measurements)


@pytest.mark.parametrize(("devices", "rows"), [(2, 505), (4, 253), (4, 300)])
def test_vocabulary_shards(devices: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1009 classes, over 2 and 4 devices, the last one with 109 classes and 191 rows of padding
    in one of them."""
    seen, p = seen_blocks(monkeypatch), build(LARGE[0], 7)
    got = sharded(p, "logprobs", mesh_of(tp=devices), rows)
    hold_shards(p, "logprobs", got, world=devices)
    assert set(seen) == {"columns_of_blocks", "gradients_of_blocks"}


@pytest.mark.parametrize("spec", [P(), P(None, "d")], ids=["whole", "gathered by width"])
def test_tokens_that_a_mesh_spreads(spec: P) -> None:
    """Explicit axes spread tokens over two devices, whose float32 blocks of d weight are summed
    before they are rounded."""
    of = arrays()
    hidden, weight, labels = (
        of["hidden"][:202],
        of["weight"].astype(jnp.bfloat16),
        of["labels"][:202],
    )
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))

    def gradient(hidden: Any, labels: Any) -> Any:
        hidden = hidden.astype(jnp.bfloat16)
        return jax.jit(
            jax.grad(lambda weight: chunked_logprobs(hidden, weight, labels).logprobs.sum())
        )

    want = gradient(hidden, labels)(weight)
    with jax.set_mesh(mesh):
        spread = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in (hidden, labels)]
        found = gradient(*spread)(jax.device_put(weight, NamedSharding(mesh, spec)))
    x, y = (np.asarray(x).astype(np.float64) for x in (found, want))
    assert (x == y).mean() > 0.97
