"""What a TPU's program does otherwise in JAX, computed on this device and held to the same rows:
classes lead in memory, the head is filled up to whole blocks, targets are taken out by a sum.

What XLA makes of it for a TPU is what `make tpu` prints.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fuzzing.pairs import SUBJECTS, Edge, draw
from fuzzing.pairs_held import held, run_jax
from fuzzing.pairs_mesh import meshed, run_mesh
from helpers.measured import SMALL, by_id, hold
from xentlib.contract import check, failures
from xentlib.tools.harness.cases import CHUNK_CASES, WITH_OPTIONS, low_precision, named
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import build
from xentlib.tools.parity.rows.head import nll, per_token

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.cpu]

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import xentlib.jax as ours  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.tpu_jax import as_on_a_tpu, equations  # noqa: E402, F401

CASES = named(SMALL, "base", "options", "class-weights", "kernel-layout", "one-class")


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize("case", [*CASES, *low_precision(named(CASES, "options"))], ids=by_id)
def test_against_the_oracle(case: Any) -> None:
    """A0, A2, A5 to A8. Catches: a target that is not taken out, columns of the filling, a block
    whose classes are another's."""
    hold(nll.against_oracle, ("jax",), build(case, 7))


@pytest.mark.usefixtures("as_on_a_tpu")
def test_per_token_against_the_oracle() -> None:
    """A0, A4, A5, A6 of `chunked_logprobs`."""
    hold(per_token.against_oracle, ("jax",), build(WITH_OPTIONS, 7))


@pytest.mark.usefixtures("as_on_a_tpu")
def test_chunks_do_not_show(monkeypatch: Any) -> None:
    """A10, of operands that are multiples of 1/4, whose logits are exact: our sums decide. Not of
    entropy, whose terms this device's compiler multiplies and adds in one, in some lanes; nor of
    d hidden, whose dz is not exact: this device multiplies what lies class by class in another
    order in longer chunks."""
    monkeypatch.setattr("xentlib.tools.harness.cases.CHUNKS", (8, 200))
    problem = build(CHUNK_CASES[0], 7)
    exact = {x: np.round(4 * getattr(problem, x)) / 4 for x in ("hidden", "weight", "bias")}
    findings = Findings(("jax",))
    nll.chunks(findings, replace(problem, **exact))
    held = [x for x in findings.measurements if x.quantity not in ("entropy", "d hidden")]
    assert {x.quantity for x in held} > {"logprobs", "lse"}
    assert not failures(held)


@pytest.mark.usefixtures("as_on_a_tpu")
def test_dz_does_not_show_chunks() -> None:
    """A10, of the gradient of precomputed logits, which is dz. Catches: rows of another chunk."""

    def of_logits(x: Any, chunk_bytes: int) -> Any:
        out = ours.vocab_parallel_logprobs(x, LABELS, max_chunk_bytes=chunk_bytes)
        return out.logprobs.sum()

    logits = HIDDEN @ WEIGHT.T
    several, one = (jax.grad(of_logits)(logits, rows * V * 4) for rows in (1, N))
    assert np.array_equal(several, one)


# --- the other functions, against this device's own program --------------------------------------

N, H, V = 150, 24, 301
RNG = np.random.default_rng(3)
HIDDEN, WEIGHT = (RNG.standard_normal(x).astype(np.float32) for x in ((N, H), (V, H)))
OTHER = (WEIGHT + 0.3 * RNG.standard_normal((V, H))).astype(np.float32)
LABELS = np.where(np.arange(N) % 7 == 3, -100, RNG.integers(0, V, N)).astype(np.int32)
IDS = np.argsort(RNG.random((N, V)), axis=1)[:, :4].astype(np.int32)
KEPT = np.concatenate([LABELS[:, None], np.where(LABELS[:, None] == IDS, -1, IDS)], axis=1)
LOW_RANK = [RNG.standard_normal(x).astype(np.float32) for x in ((3, H), (V, 3))]
PROBS = RNG.dirichlet(np.ones(V), N).astype(np.float32)
CAPPED: dict[str, Any] = {"softcap": 3.0, "max_chunk_bytes": 128 * V * 4}


def further(h: Any, w: Any) -> Any:
    out = ours.chunked_logprobs(h, w, LABELS, kept=KEPT, ids=KEPT[:, 1:3], entropy=True, **CAPPED)
    return out.ids_logprobs.sum() + out.entropy.sum()


def most_probable(h: Any, w: Any) -> Any:
    return ours.chunked_logprobs(h, w, LABELS, top_k=3, **CAPPED).top_logprobs.sum()


def divergence(kind: str) -> Any:
    def loss(h: Any, w: Any) -> Any:
        return ours.chunked_divergence(
            h,
            w,
            ours.TeacherHead(HIDDEN, OTHER, softcap=None),
            kind=kind,
            labels=LABELS,
            nll_weight=0.5,
            **CAPPED,
        ).loss

    return loss


def probabilities(h: Any, w: Any) -> Any:
    return ours.chunked_nll(h, w, PROBS, **CAPPED).loss


def low_rank(h: Any, w: Any) -> Any:
    return ours.chunked_nll(h, ours.LowRankHead(w, *LOW_RANK, 0.3), LABELS, **CAPPED).loss


def smoothed(h: Any, w: Any) -> Any:
    outputs = ("predicted", "entropy", "correct")
    out = ours.chunked_nll(h, w, LABELS, label_smoothing=0.1, outputs=outputs, **CAPPED)
    return out.loss, (out.predicted, out.correct, out.entropy)


FUNCTIONS = {
    "further classes": further,
    "top_k": most_probable,
    "reverse_kl": divergence("reverse_kl"),
    "forward_kl": divergence("forward_kl"),
    "class probabilities": probabilities,
    "low rank": low_rank,
    "smoothed": smoothed,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_other_functions(name: str, request: Any) -> None:
    step = jax.value_and_grad(FUNCTIONS[name], (0, 1), has_aux=name == "smoothed")
    here = jax.jit(step)(HIDDEN, WEIGHT)
    request.getfixturevalue("as_on_a_tpu")
    there = jax.jit(step)(HIDDEN, WEIGHT)
    for got, right in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        assert not failures(check("A9", got, right, metrics=("rho / u",)))


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize("how", [{}, {"softcap": 3.0}], ids=["stored", "softcap"])
def test_the_program_is_the_tpus(how: dict[str, Any]) -> None:
    """Catches: this device's traits, a gather of targets from logits that are stored for it, a head
    that each chunk fills up."""
    step = jax.value_and_grad(lambda h, w: ours.chunked_nll(h, w, LABELS, **how).loss, (0, 1))
    text = jax.jit(step).lower(HIDDEN, WEIGHT).as_text()
    columns = V + -V % 128
    products = re.findall(r"stablehlo.dot_general.*-> tensor<(\d+)x(\d+)xf32>", text)
    assert [a for a, b in products if int(a) == columns and int(b) != H]
    assert not [a for a, b in products if int(b) == columns]
    gathers = re.findall(r'stablehlo.gather".*: \(tensor<([\dx]+)xf32>', text)
    logits = [x for x in gathers if x.startswith(f"{columns // 128}x128x")]
    assert len(logits) == (0 if how else 1)


# --- every function over sizes that fill no block, alone and over shards -------------------------

OF = [
    ("chunked_nll", "index"),
    *((f, s) for f, names in SUBJECTS.items() for s in sorted({*names})),
]
# Tokens, classes, those of a token: of three blocks, one of them filled up; without a token.
SIZES = {"301 classes": ((11,), 301, 5), "no token": ((0,), 29, 3)}
# Of each function its first subject, and of heads what is as wide as the vocabulary: that is read
# in the order of the tokens.
WITHOUT = {next(of for of in OF if of[0] == function) for function, _ in OF}
WITHOUT |= {("chunked_nll", "dense"), ("chunked_divergence", "logits")}


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize("of", OF, ids=" of ".join)
def test_alone(of: tuple[str, str]) -> None:
    """Catches: columns of the filling among the classes; rows of precomputed logits that are not
    cut to theirs."""
    for number, sizes in enumerate([*SIZES.values()][: 1 + (of in WITHOUT)]):
        pair = draw(7, number, Edge(*of, *sizes))
        assert held("jax", pair, run_jax(pair)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize("of", OF, ids=" of ".join)
def test_over_shards(of: tuple[str, str]) -> None:
    """Catches: a shard's padding and its filling, one taken for the other."""
    cases = (meshed(7, number, Edge(*of, *SIZES["301 classes"])) for number in itertools.count())
    # Heads of two vocabularies are whole ones.
    case = next(case for case in cases if "vocab" not in case.pair.call.keywords)
    assert held("jax", case.pair, run_mesh(case)) == [], case.way


@pytest.mark.usefixtures("as_on_a_tpu")
def test_vmap() -> None:
    """Catches: a constraint on the layout that has no rule for it."""

    def step(h: Any, w: Any) -> Any:
        return jax.value_and_grad(lambda *x: ours.chunked_nll(*x, LABELS).loss, (0, 1))(h, w)

    h, w = (np.stack([x, 2 * x]) for x in (HIDDEN, WEIGHT))
    together = jax.vmap(step)(h, w)
    for k in range(2):
        for got, right in zip(jax.tree.leaves(together), jax.tree.leaves(step(h[k], w[k]))):
            assert not failures(check("A9", got[k], right, metrics=("rho / u",)))


# --- the program is that of the platform that it is for, not of the one that traces it ------------

TPU = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu")
AUTO = (jax.sharding.AxisType.Auto,)
ANY, ON_A_TPU = (
    jax.sharding.AbstractMesh((1,), ("x",), AUTO, abstract_device=x) for x in (None, TPU)
)


def of_logits(h: Any, w: Any) -> Any:
    """Also of class probabilities, whose functions are others."""
    x = h @ w.T
    out = ours.vocab_parallel_logprobs(x, LABELS, entropy=True)
    soft = ours.vocab_parallel_logprobs(x, ours.SoftLabels(KEPT[:, 1:3], PROBS[:, :2]))
    teacher = ours.TeacherTopK(KEPT[:, 1:3], np.log(PROBS[:, :2]))
    few = ours.chunked_divergence(h, w, teacher, **CAPPED).loss
    return out.logprobs.sum() + out.entropy.sum() + soft.logprobs.sum() + few


@pytest.mark.parametrize("name", [*FUNCTIONS, "of logits"])
def test_a_program_for_a_tpu_is_traced_anywhere(name: str, monkeypatch: Any) -> None:
    """Catches: a forward or a backward that asks which device this process has."""
    step = jax.value_and_grad(
        {**FUNCTIONS, "of logits": of_logits}[name], (0, 1), name == "smoothed"
    )

    def program(mesh: Any) -> list[Any]:
        jax.clear_caches()
        with jax.sharding.use_abstract_mesh(mesh):
            return list(equations(jax.make_jaxpr(step)(HIDDEN, WEIGHT).jaxpr))

    if name == "further classes":  # a program of a CPU is known by these
        assert [x for x in program(ANY) if "window" in x[0]]
    ahead = program(ON_A_TPU)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    there = program(ANY)
    assert ahead == there
    assert not [x for x in ahead if "window" in x[0]]


def test_a_chunk_of_logits_is_a_tpu_s() -> None:
    """All 4,096 rows of precomputed logits. Catches: this process's default of 512."""

    def loss(x: Any) -> Any:
        return ours.vocab_parallel_logprobs(x, jnp.zeros(4096, jnp.int32)).logprobs.sum()

    with jax.sharding.use_abstract_mesh(ON_A_TPU):
        jaxpr = jax.make_jaxpr(loss)(jax.ShapeDtypeStruct((4096, 32_000), jnp.float32))
    assert "250,128,4096" in str(jaxpr)


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize("spread", [("data", None), (None, "data")], ids=["H", "V"])
def test_a_kernel_on_a_mesh(spread: Any) -> None:
    """A head [H, V] whose gradient is summed as [V, H] and scattered to where its pieces are.
    Catches: the pieces of the other dimension."""
    columns = V + 3  # which four devices divide
    kernel = RNG.standard_normal((H, columns)).astype(np.float32)
    hidden, labels = HIDDEN[:148], LABELS[:148]

    @jax.jit
    def step(h: Any, w: Any, y: Any) -> Any:
        return jax.value_and_grad(
            lambda *x: ours.chunked_nll(*x, y, weight_layout="HV").loss, (0, 1)
        )(h, w)

    right = step(hidden, kernel, labels)
    mesh, specs = mesh_of(data=4), (("data", None), spread, ("data",))
    places = [NamedSharding(mesh, P(*spec)) for spec in specs]
    with jax.set_mesh(mesh):
        there = step(*map(jax.device_put, (hidden, kernel, labels), places))
    assert there[1][1].sharding.spec == P(*spread)
    for got, one in zip(jax.tree.leaves(there), jax.tree.leaves(right), strict=True):
        assert not failures(check("A9", got, one, metrics=("rho / u",)))
