"""What PyTorch does around the operator: compile, autocast, scaling, checkpointing, two backwards.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from xentlib.call import Arguments
from xentlib.contract import check, failures
from xentlib.parity.backends import run
from xentlib.parity.device import numpy_of, on_torch
from xentlib.parity.problem import Case, Problem, build
from xentlib.plan import CPU_BLOCK_BYTES, plan_chunks
from xentlib.ulp import bits_unequal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from xentlib.torch import chunked_nll  # noqa: E402
from xentlib.torch import nll as torch_nll  # noqa: E402
from xentlib.torch.call import bind  # noqa: E402
from xentlib.torch.core import gemm, walk  # noqa: E402
from xentlib.torch.core import gradients as sums  # noqa: E402

OUTPUTS = ("logprobs", "entropy", "lse", "correct")
COMPILERS = ["aot_eager", *(["inductor"] if shutil.which("c++") or shutil.which("g++") else [])]
CASE = Case("behaviour", 61, 24, 157, ignored=0.2, confident=0.3)
CHUNKED = {"max_chunk_bytes": 16 * 157 * 4}  # 16 rows a chunk: four chunks, the last one ragged
# torch's own, met on the way; the first is in pyproject.toml too, but `-W error` comes after that.
QUIET = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def tensors(case: Case = CASE, *, dtype=None, seed=3) -> tuple[dict, Problem]:
    """Leaves hidden, weight and bias, labels, and the problem they came from."""
    p = build(case, seed)
    named = {"hidden": p.hidden, "weight": p.weight, "bias": p.bias, "labels": p.labels}
    leaves = {k: on_torch(v) for k, v in named.items() if v is not None}
    for name, leaf in leaves.items():
        if name != "labels":
            leaves[name] = leaf.to(dtype or leaf.dtype).requires_grad_()
    return leaves, p


def bits(x) -> np.ndarray:
    x = x.detach().contiguous()
    return numpy_of(x.view(torch.int16) if x.dtype == torch.bfloat16 else x)


def same(a, b) -> bool:
    return a.dtype == b.dtype and bits_unequal(bits(a), bits(b)) == 0


def gradients(leaves: dict, upstream: float, function=chunked_nll, **options) -> list:
    """Loss and gradients of the leaves that want one."""
    wanted = [x for x in leaves.values() if x.requires_grad]
    out = function(**leaves, **CHUNKED, **options)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    return [loss, *torch.autograd.grad(loss, wanted, torch.tensor(upstream, dtype=loss.dtype))]


def held_to_contract(p: Problem, loss, named: dict) -> None:
    """A2, A5 and A6 for what came out of a wrapper."""
    o = p.reference()
    found = check("A2", numpy_of(loss), o.loss, magnitude=o.loss_magnitude)
    for name, row in (("hidden", "A5"), ("weight", "A6"), ("bias", "A6")):
        if name in named:
            oracle, bound = getattr(o, f"d_{name}"), getattr(o, f"bound_{name}")
            found += check(row, numpy_of(named[name]), oracle, bound, quantity=name)
    assert failures(found) == []


# ---------------------------------------------------------------------------------
# torch.compile


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def quiet(name: str):
    return pytest.param(name, marks=[*QUIET, *([pytest.mark.slow] if name == "inductor" else [])])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", [quiet(name) for name in COMPILERS])
def test_compiled_is_eager_to_the_bit(compiler):
    """A11, D6: fullgraph, forward and backward; the operator is opaque to the compiler."""
    leaves, p = tensors()

    def step(hidden, weight, bias, labels, **options):
        # Something to compile on both sides of the operator, exact in any order.
        out = chunked_nll(hidden * 2, weight, labels, bias=bias, outputs=("lse",), **options)
        return out.loss * 0.5

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    eager = gradients(leaves, p.upstream, step)
    for want, got in zip(eager, gradients(leaves, p.upstream, compiled)):
        assert same(want, got)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "dynamic",
    [
        None,  # the sizes that change become symbols
        True,  # options too: SymFloat
    ],
    ids=["automatic", "dynamic"],
)
def test_compiled_with_dynamic_shapes(dynamic):
    """D6, M17: two graphs for any number of tokens, same bits as eager."""
    graphs = []

    def counting(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def head(hidden, weight, labels, bias, **options):
        return chunked_nll(hidden, weight, labels, bias=bias, **options)

    compiled = torch.compile(head, fullgraph=True, dynamic=dynamic, backend=counting)
    for tokens in (61, 17, 100, 33):
        leaves, p = tensors(Case("dynamic", tokens, 24, 157))
        for want, got in zip(
            gradients(leaves, p.upstream), gradients(leaves, p.upstream, compiled)
        ):
            assert same(want, got)
    assert len(graphs) == 2


@pytest.mark.cpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_raises_for_a_label_out_of_range():
    """D3, M11: values can be read on CPU, under a compiler too."""
    leaves, _ = tensors()
    leaves["labels"][5] = 157
    compiled = torch.compile(chunked_nll, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"must lie in \[0, 157\).*got 157"):
        compiled(**leaves)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (False,) * 3], ids=str)
def test_opcheck(needs):
    """D6: schema, fake kernel and autograd registration of the custom operator."""
    leaves, _ = tensors(Case("opcheck", 9, 5, 13))
    for name, need in zip(("hidden", "weight", "bias"), needs):
        leaves[name] = leaves[name].detach().requires_grad_(need)
    _, _, call = bind("chunked_nll", Arguments(**leaves, max_chunk_bytes=512))
    loss = torch_nll.Loss(
        token_weights=None,
        class_weights=torch.rand(13),
        denominator=None,
        label_smoothing=0.1,
        z_loss=0.0,
        mean=True,
        entropy=True,
        predicted=True,
        output_dtype=torch.float32,
        needs=list(needs),
    )
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    result = torch.library.opcheck(torch_nll.nll_op.op, (*call, *loss), test_utils=names)
    assert set(result.values()) == {"SUCCESS"}


# ---------------------------------------------------------------------------------
# Autocast, loss scaling


def test_autocast_with_float32_master_weights():
    """M18, A7: bf16 operands, fp32 logits and accumulators, fp32 gradients."""
    leaves, p = tensors()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        out = chunked_nll(**leaves, **CHUNKED)
    assert out.loss.dtype == torch.float32
    wanted = [leaves[name] for name in ("hidden", "weight", "bias")]
    got = torch.autograd.grad(out.loss, wanted, torch.tensor(p.upstream))
    assert [g.dtype for g in got] == [torch.float32] * 3
    # What autocast means: the same operands, rounded to bf16 by hand. Their gradients differ from
    # these in the last rounding alone, from fp32 accumulators to bf16.
    low, _ = tensors(dtype=torch.bfloat16)
    low["bias"] = leaves["bias"]
    plain = gradients(low, p.upstream)
    assert same(out.loss, plain[0])
    for mine, theirs in zip(got, plain[1:]):
        assert same(mine.to(theirs.dtype), theirs)
    assert not same(out.loss, gradients(leaves, p.upstream)[0])  # autocast did something


@pytest.mark.parametrize("tokens", [40])
def test_grad_scaler_keeps_tiny_gradients(tokens):
    """M14, M18: 1 / N is subnormal in fp16 for N >= 65536; the gradients survive."""
    denominator = 131072.0
    case = Case("fp16", tokens, 16, 61, dtype="float16", options={"denominator": denominator})
    leaves, p = tensors(case)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**16)
    master = {k: v.detach().float().requires_grad_() for k, v in leaves.items() if k != "labels"}
    with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
        out = chunked_nll(**master, labels=leaves["labels"], **p.options)
    scaler.scale(out.loss).backward()
    optimizer = torch.optim.SGD(master.values(), lr=1.0)
    scaler.unscale_(optimizer)
    assert out.loss.item() > 0
    o = p.changed(upstream=1.0).reference(dz_dtype="float64")
    for name, leaf in master.items():
        want = getattr(o, f"d_{name}")
        scale = getattr(o, f"magnitude_{name}")
        # dz has 11 bits: half an ULP of each term is 2^-11 of the sum of absolute terms.
        assert np.all(np.abs(numpy_of(leaf.grad) - want) <= 2.0**-10 * scale), name
        # Zero where the token is not valid, nowhere else.
        zero = ~p.valid[:, None] if name == "hidden" else False
        assert np.array_equal(numpy_of(leaf.grad) == 0, np.broadcast_to(zero, leaf.shape))
    # By hand, the way that loses them: dz / N rounded to fp16 is 0 or has few bits left.
    lost = (o.d_bias / 64).astype(np.float16).astype(np.float64) * 64
    assert np.max(np.abs(lost - o.d_bias) / o.magnitude_bias) > 2.0**-10


# ---------------------------------------------------------------------------------
# Backward, more than once


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(reentrant):
    """A11: recomputing the forward gives the same bits."""
    leaves, p = tensors()

    def head(hidden, weight, bias):
        return chunked_nll(hidden, weight, leaves["labels"], bias=bias, **CHUNKED).loss

    wanted = [leaves[name] for name in ("hidden", "weight", "bias")]
    want = gradients(leaves, p.upstream)
    loss = checkpoint(head, *wanted, use_reentrant=reentrant)
    loss.backward(torch.tensor(p.upstream))
    assert same(loss, want[0])
    for leaf, gradient in zip(wanted, want[1:]):
        assert same(leaf.grad, gradient)


def test_second_backward_is_right_or_loud():
    """M10: with retain_graph the same bits three times; without it, an error."""
    leaves, p = tensors()
    wanted = [x for x in leaves.values() if x.requires_grad]
    upstream = torch.tensor(p.upstream)
    first = gradients(leaves, p.upstream)[1:]
    loss = chunked_nll(**leaves, **CHUNKED).loss
    for keep in (True, True, False):
        again = torch.autograd.grad(loss, wanted, upstream, retain_graph=keep)
        assert all(same(a, b) for a, b in zip(first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, wanted, upstream)


def test_second_backward_with_another_upstream():
    """M1: the accumulators are not what the first upstream gradient left of them."""
    leaves, p = tensors()
    wanted = [x for x in leaves.values() if x.requires_grad]
    loss = chunked_nll(**leaves, **CHUNKED).loss
    torch.autograd.grad(loss, wanted, torch.tensor(-1.7), retain_graph=True)
    got = torch.autograd.grad(loss, wanted, torch.tensor(p.upstream))
    assert all(same(a, b) for a, b in zip(gradients(leaves, p.upstream)[1:], got))


def test_double_backward_raises():
    """D12: create_graph is refused by name, before anything is scaled in place."""
    leaves, p = tensors()
    loss = chunked_nll(**leaves).loss
    with pytest.raises(RuntimeError, match="`chunked_nll` must be differentiated once"):
        torch.autograd.grad(loss, leaves["weight"], torch.tensor(p.upstream), create_graph=True)


def test_the_loss_may_be_scaled_in_place():
    """M10 (unsloth#3769): `loss *= k` on the output."""
    leaves, p = tensors()
    wanted = [x for x in leaves.values() if x.requires_grad]
    loss = chunked_nll(**leaves, **CHUNKED).loss
    loss *= p.upstream
    loss.backward()
    assert all(same(x.grad, g) for x, g in zip(wanted, gradients(leaves, p.upstream)[1:]))


def test_inputs_are_not_written_to():
    """M10 (SkyRL#1650): neither the values nor the version counters move."""
    leaves, p = tensors()
    extras = {
        "where": torch.rand(61) < 0.9,
        "token_weights": torch.rand(61),
        "temperature": torch.rand(61) + 0.5,
    }
    every = [*leaves.values(), *extras.values()]
    before = [(x.detach().clone(), x._version) for x in every]
    gradients(leaves, p.upstream, outputs=OUTPUTS, softcap=4.0, label_smoothing=0.1, **extras)
    for x, (copy, version) in zip(every, before):
        assert same(x, copy)
        assert x._version == version


@pytest.mark.parametrize("name", ["token_weights", "temperature", "logit_scale", "denominator"])
def test_constants_are_not_differentiated(name):
    """D12: a gradient that is not computed is refused, not dropped; without grad it is none."""
    leaves, _ = tensors()
    value = torch.ones(() if name in ("logit_scale", "denominator") else 61, requires_grad=True)
    with pytest.raises(ValueError, match=rf"`{name}` must be a constant.*`{name}.detach\(\)`"):
        chunked_nll(**leaves, **{name: value})
    with torch.no_grad():
        chunked_nll(**leaves, **{name: value})


def test_only_the_loss_has_a_gradient():
    """D6: per-token outputs and counts come without one, and say so."""
    leaves, _ = tensors()
    out = chunked_nll(**leaves, outputs=OUTPUTS)
    differentiable = [k for k, v in out._asdict().items() if v is not None and v.requires_grad]
    assert differentiable == ["loss"]


# ---------------------------------------------------------------------------------
# Which GEMMs run


class Gemms(TorchDispatchMode):
    """Counts matrix products by the kernel that runs, inside the custom operator too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.mkldnn._linear_pointwise,
        ):
            self.sizes.append(tuple(args[-1].shape))
        return function(*args, **(kwargs or {}))


NEEDS = {
    "loss only": ((), 1),
    "everything": (("hidden", "weight", "bias"), 3),
    "frozen head": (("hidden",), 2),
    "frozen trunk": (("weight", "bias"), 2),
    "bias only": (("bias",), 1),
    "no bias": (("hidden", "weight"), 3),
}


def count_gemms(leaves: dict, upstream: float) -> tuple[int, list]:
    """Number of GEMMs of one chunk, by the profiler: it sees what runs inside the operator."""
    from torch.profiler import ProfilerActivity, profile

    wanted = [x for x in leaves.values() if x.requires_grad]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = chunked_nll(**leaves).loss
        got = torch.autograd.grad(loss, wanted, torch.tensor(upstream)) if wanted else ()
    gemms = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::matmul")
    gemms += ("mkldnn::_linear_pointwise",)
    return sum(e.count for e in profiler.key_averages() if e.key in gemms), [loss, *got]


@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name):
    """M18, D5: three GEMMs, two with one side frozen, one for the loss; same bits."""
    wanted, expected = NEEDS[name]
    leaves, p = tensors()
    full = dict(zip(("loss", "hidden", "weight", "bias"), count_gemms(leaves, p.upstream)[1]))
    for leaf in ("hidden", "weight", "bias"):
        leaves[leaf].requires_grad_(leaf in wanted)
    count, got = count_gemms(leaves, p.upstream)
    assert count == expected
    for key, value in zip(("loss", *wanted), got):
        assert same(value, full[key])


def test_no_grad_costs_one_gemm():
    """D5: a call that needs no gradient runs one."""
    leaves, _ = tensors()
    with torch.no_grad(), Gemms() as seen:
        out = chunked_nll(**leaves)
    assert not out.loss.requires_grad
    assert len(seen.sizes) <= 1  # the mode may see the operator alone; the profiler sees inside
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    assert count_gemms(leaves, 1.5)[0] == 1


# ---------------------------------------------------------------------------------
# Layouts and dtypes


def transposed(x):
    return x.t().contiguous().t()


def strided(x):
    return torch.stack([x, x.new_full(x.shape, 7)], dim=-1)[..., 0]


def offset(x):
    return torch.cat([x.new_full((1, *x.shape[1:]), 7), x])[1:]


@pytest.mark.parametrize("view", [transposed, strided, offset], ids=lambda view: view.__name__)
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_any_strides(name, view):
    """M17: non-contiguous and transposed inputs; gradients held to A5 and A6."""
    leaves, p = tensors()
    leaves[name] = view(leaves[name].detach()).requires_grad_()
    assert view is offset or not leaves[name].is_contiguous()
    loss, *got = gradients(leaves, p.upstream)
    held_to_contract(p, loss, dict(zip(("hidden", "weight", "bias"), got)))


def test_expanded_inputs():
    """M17: one row of hidden, labels and temperature for every token, strides 0."""
    leaves, p = tensors(Case("expanded", 1, 24, 157, ignored=0.0))
    rows = p.changed(hidden=np.repeat(p.hidden, 19, 0), labels=np.repeat(p.labels, 19))
    leaves["hidden"] = leaves["hidden"].detach().expand(19, 24).requires_grad_()
    leaves["labels"] = leaves["labels"].expand(19)
    options = {"temperature": torch.tensor(0.7).expand(19), "where": torch.tensor(True).expand(19)}
    loss, *got = gradients(leaves, p.upstream, **options)
    rows = rows.changed(options={"temperature": np.float32(0.7)})
    held_to_contract(rows, loss, dict(zip(("hidden", "weight", "bias"), got)))


def test_gradient_through_an_expanded_parent():
    """M17: the gradient of one expanded row is the sum over the tokens."""
    leaves, p = tensors(Case("parent", 1, 24, 157, ignored=0.0))
    parent = leaves["hidden"].detach().requires_grad_()
    out = chunked_nll(parent.expand(8, 24), leaves["weight"], leaves["labels"].expand(8))
    single = chunked_nll(parent, leaves["weight"], leaves["labels"])
    (many,) = torch.autograd.grad(out.loss, parent, torch.tensor(p.upstream))
    (one,) = torch.autograd.grad(single.loss, parent, torch.tensor(p.upstream))
    o = p.changed(bias=None).reference()
    assert failures(check("A5", numpy_of(many), o.d_hidden, o.bound_hidden)) == []
    assert failures(check("A5", numpy_of(one), o.d_hidden, o.bound_hidden)) == []


def test_leading_dimensions_are_free():
    """D6: `[..., H]`; the same bits as the flat call, shapes of the caller's."""
    leaves, p = tensors(Case("leading", 60, 24, 157))
    want = gradients(leaves, p.upstream)
    deep = dict(leaves)
    deep["hidden"] = leaves["hidden"].detach().reshape(3, 4, 5, 24).requires_grad_()
    deep["labels"] = leaves["labels"].reshape(3, 4, 5)
    got = gradients(deep, p.upstream)
    assert got[1].shape == (3, 4, 5, 24)
    got[1] = got[1].reshape(60, 24)
    assert all(same(a, b) for a, b in zip(want, got))
    out = chunked_nll(**deep, outputs=OUTPUTS)
    assert {getattr(out, name).shape for name in OUTPUTS} == {(3, 4, 5)}


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_stays_float32(monkeypatch, precision):
    """Rounding point 1: operands exact, whatever the process has chosen for its own products."""
    leaves, p = tensors(Case("precise", 96, 128, 600))
    want = gradients(leaves, p.upstream)
    seen = []

    def mm(*args, **kwargs):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return torch_nll_mm(*args, **kwargs)

    torch_nll_mm = gemm.mm
    monkeypatch.setattr(walk, "mm", mm)
    monkeypatch.setattr(sums, "mm", mm)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = gradients(leaves, p.upstream)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    # Not every CPU rounds when it may: the setting is looked at as well as the bits.
    assert set(seen) == {"ieee"}
    assert all(same(a, b) for a, b in zip(want, got))


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_threads_do_not_leave_the_process_at_another_precision(monkeypatch, precision):
    """A11. Eight threads, products of float32 and, as where there is AMX, of bfloat16: each has its
    own bits, and the process its own setting. Catches: a switch that each thread gives back as it
    found it (31 of 150 rounds ended at "bf16")."""
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    both = [tensors(Case("threads", 64, 32, 300, dtype=d)) for d in ("float32", "bfloat16")]
    want = [gradients(leaves, p.upstream) for leaves, p in both]
    settings, rounds = torch.backends.mkldnn.matmul, 10
    before, interval = torch.get_float32_matmul_precision(), sys.getswitchinterval()
    torch.set_float32_matmul_precision(precision)
    sys.setswitchinterval(1e-6)
    try:
        found = settings.fp32_precision
        with ThreadPoolExecutor(8) as pool:

            def work(k):
                leaves, p = both[k % 2]
                return [gradients(leaves, p.upstream) for _ in range(rounds)]

            results = list(pool.map(work, range(8)))
        assert settings.fp32_precision == found
        assert torch.get_float32_matmul_precision() == precision
    finally:
        sys.setswitchinterval(interval)
        torch.set_float32_matmul_precision(before)
    for k, every in enumerate(results):
        for got in every:
            assert all(same(a, b) for a, b in zip(want[k % 2], got))


@pytest.mark.cpu
def test_precision_is_left_alone_where_it_does_not_matter(monkeypatch):
    """Nothing is switched where the process asks for float32 already, for float64, or for bfloat16
    without AMX."""
    written = []

    class Settings:
        fp32_precision = property(lambda self: "none", lambda self, value: written.append(value))

    monkeypatch.setattr(torch.backends.mkldnn, "matmul", Settings())
    monkeypatch.setattr(gemm, "ONEDNN", True)
    monkeypatch.setattr(gemm, "has_amx", lambda: False)
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with gemm.gemm_precision(dtype, cpu):
            pass
    assert not written
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    # Two threads: the first to come is the first to go.
    first, second = (gemm.gemm_precision(torch.bfloat16, cpu) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert written == ["bf16"]
    second.__exit__(None, None, None)
    assert written == ["bf16", "none"]


def test_hidden_float32_with_weight_bfloat16():
    """M18: the wider dtype computes; each gradient comes in its input's dtype."""
    leaves, p = tensors()
    leaves["weight"] = leaves["weight"].detach().bfloat16().requires_grad_()
    p = p.changed(weight=numpy_of(leaves["weight"].float()))
    loss, *got = gradients(leaves, p.upstream)
    assert [g.dtype for g in got] == [torch.float32, torch.bfloat16, torch.float32]
    held_to_contract(p, loss, {"hidden": got[0], "bias": got[2]})
    o = p.reference()
    found = check("A7", numpy_of(got[1].float()), o.d_weight, magnitude=o.magnitude_weight)
    assert failures(found) == []


# ---------------------------------------------------------------------------------
# Runs and threads, memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_and_runs_do_not_change_bits(dtype):
    """A11: one thread, two threads, and again."""
    case = Case("threads", 257, 64, 1031, dtype=dtype, token_weights=True, layout="VH")
    p = build(case, 5)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            seen.append(run("torch", p, chunk_tokens=64))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for name, want, got in zip(seen[0]._fields, seen[0], other):
            assert failures(check("A11", got, want, quantity=name)) == []


def allocations(function) -> tuple[int, int]:
    """Largest single allocation and peak of live bytes while `function` runs, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    live = peak = largest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak, largest = max(peak, live), max(largest, event.nbytes())
    del kept
    return largest, peak


@pytest.mark.cpu
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "outputs": OUTPUTS}], ids=str)
def test_memory_is_the_formula(options):
    """M16: no [N, V] buffer; peak within 5 % of the plan's terms."""
    tokens, width, vocab = 4096, 64, 2048
    leaves, p = tensors(Case("memory", tokens, width, vocab, ignored=0.0, bias=False))
    budget = 256 * vocab * 4
    plan = plan_chunks(tokens, vocab, width, max_chunk_bytes=budget)
    wanted = [leaves["hidden"], leaves["weight"]]

    def step():
        loss = chunked_nll(**leaves, max_chunk_bytes=budget, **options).loss
        return torch.autograd.grad(loss, wanted, torch.tensor(p.upstream))

    step()  # what is allocated once
    largest, peak = allocations(step)
    full = tokens * vocab * 4
    assert largest < full / 8
    block = plan.block_tokens(CPU_BLOCK_BYTES) * vocab * 4
    terms = {
        "chunk": plan.chunk_bytes,
        "block scratch": 2 * block + block,  # diff, onehot, one temporary of a block
        "d weight": vocab * width * 4,
        "d hidden": tokens * width * 4,
        "per token": tokens * 4 * 24,
        "rows of a chunk": 4 * plan.chunk_tokens * width * 4,
    }
    assert peak <= 1.05 * sum(terms.values())
    assert peak < full / 2
    # Eager holds the logits: what the bound above would not let pass.
    eager, _ = allocations(
        lambda: F.cross_entropy(wanted[0] @ wanted[1].T, leaves["labels"].long()).backward()
    )
    assert eager >= full
