"""What PyTorch does around the operator: autocast, scaling, checkpointing, two backwards, views.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.tools.harness.device import numpy_of
from xentlib.tools.harness.findings import check_gradient
from xentlib.tools.harness.problems import Case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.checkpoint import checkpoint  # noqa: E402

from helpers.leaves_torch import CHUNKED, OUTPUTS, hold_leaves, loss_and_gradients, same, tensors  # noqa: E402
from xentlib import torch as X  # noqa: E402
from xentlib.torch import chunked_nll  # noqa: E402
from xentlib.torch.core.loop import HeadLoop  # noqa: E402


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
    plain = loss_and_gradients(low, p.upstream)
    assert same(out.loss, plain[0])
    for mine, theirs in zip(got, plain[1:]):
        assert same(mine.to(theirs.dtype), theirs)
    assert not same(out.loss, loss_and_gradients(leaves, p.upstream)[0])  # autocast did something


CALLS = {
    "nll": lambda x, w, y, z: X.chunked_nll(x, w, y).loss,
    "probabilities": lambda x, w, y, z: X.chunked_nll(x, w, z.detach().softmax(-1)).loss,
    "logprobs": lambda x, w, y, z: X.chunked_logprobs(x, w, y).logprobs.sum(),
    "kept": lambda x, w, y, z: X.chunked_logprobs(x, w, y, kept=y[:, None]).lse.sum(),
    "divergence": lambda x, w, y, z: X.chunked_divergence(x, w, X.TeacherLogits(-z.detach())).loss,
    "each": lambda x, w, y, z: X.chunked_divergence(
        x, w, X.TeacherLogits(-z.detach()), reduction="none"
    ).loss.sum(),
    "of logits": lambda x, w, y, z: X.vocab_parallel_logprobs(z, y).logprobs.sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_operator_runs_under_autocast(name, monkeypatch):
    """In either direction: its products have dtypes of their own."""
    device, under = torch.get_default_device().type, []
    start = HeadLoop.__init__

    def noted(self, *args, **kwargs):
        under.append(torch.is_autocast_enabled(device))
        start(self, *args, **kwargs)

    monkeypatch.setattr(HeadLoop, "__init__", noted)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((5, 3), (13, 3), (5, 13))]
    x, w, z = leaves
    for active in (True, False):
        with torch.autocast(device, torch.bfloat16, enabled=active):
            loss = CALLS[name](x, w, torch.arange(5), z)
            forward = len(under)
            torch.autograd.grad(loss, leaves, allow_unused=True)
            assert torch.is_autocast_enabled(device) == active
    assert len(under) > forward or name in ("nll", "probabilities", "divergence")
    assert not any(under)


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


def test_hidden_float32_with_weight_bfloat16():
    """M18: the wider dtype computes; each gradient comes in its input's dtype."""
    leaves, p = tensors()
    leaves["weight"] = leaves["weight"].detach().bfloat16().requires_grad_()
    p = p.changed(weight=numpy_of(leaves["weight"].float()))
    loss, *got = loss_and_gradients(leaves, p.upstream)
    assert [g.dtype for g in got] == [torch.float32, torch.bfloat16, torch.float32]
    hold_leaves(p, loss, {"hidden": got[0], "bias": got[2]})
    o = p.reference()
    found = check_gradient("A7", "d_weight", numpy_of(got[1].float()), o)
    assert failures(found) == []


# --- backward, more than once --------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(reentrant):
    """A11: recomputing the forward gives the same bits."""
    leaves, p = tensors()

    def head(hidden, weight, bias):
        return chunked_nll(hidden, weight, leaves["labels"], bias=bias, **CHUNKED).loss

    wanted = [leaves[name] for name in ("hidden", "weight", "bias")]
    want = loss_and_gradients(leaves, p.upstream)
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
    first = loss_and_gradients(leaves, p.upstream)[1:]
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
    assert all(same(a, b) for a, b in zip(loss_and_gradients(leaves, p.upstream)[1:], got))


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
    assert all(same(x.grad, g) for x, g in zip(wanted, loss_and_gradients(leaves, p.upstream)[1:]))


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
    loss_and_gradients(
        leaves, p.upstream, outputs=OUTPUTS, softcap=4.0, label_smoothing=0.1, **extras
    )
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


@pytest.mark.parametrize("name", ["temperature", "logit_scale"])
def test_a_factor_is_learned_as_the_message_says(name):
    """D12: the call that the refusal advises has the factor's gradient."""
    leaves, _ = tensors()
    hidden, weight, bias = (leaves[x].detach() for x in ("hidden", "weight", "bias"))
    value = torch.tensor(1.3, requires_grad=True)
    with pytest.raises(ValueError, match=r"; to learn it, (multiply|divide) `hidden` and `bias`"):
        chunked_nll(**leaves, **{name: value})
    factor = 1 / value if name == "temperature" else value
    chunked_nll(hidden * factor, weight, leaves["labels"], bias=bias * factor).loss.backward()
    exact = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    factor = 1 / exact if name == "temperature" else exact
    logits = factor * (hidden.double() @ weight.double().T + bias.double())
    torch.nn.functional.cross_entropy(logits, leaves["labels"].long()).backward()
    assert not failures(check("A9", value.grad.numpy(), exact.grad.numpy(), metrics=("rho / u",)))


REFUSED = ("entropy", "logprobs", "lse", "z_loss")


@pytest.mark.parametrize("name", REFUSED)
def test_only_the_loss_has_a_gradient(name):
    """D6: that of another result is refused, whatever is differentiated."""
    leaves, _ = tensors()
    out = chunked_nll(**leaves, outputs=OUTPUTS, z_loss=0.1)
    with_gradient = [k for k, v in out._asdict().items() if v is not None and v.requires_grad]
    assert sorted(with_gradient) == sorted(("loss", *REFUSED))
    loss = out.loss - 0.01 * getattr(out, name).mean()
    refused = f"^`{name}` of `chunked_nll` must not be differentiated.*`chunked_logprobs`"
    for leaf in ("hidden", "weight", "bias"):
        with pytest.raises(RuntimeError, match=refused):
            torch.autograd.grad(loss, leaves[leaf], retain_graph=True)
    with pytest.raises(RuntimeError, match=refused):
        loss.backward()


def test_results_without_a_gradient_are_free_to_log():
    """D6: nothing is refused of what no loss depends on, and no number of a step changes."""
    leaves, p = tensors()
    want = loss_and_gradients(leaves, p.upstream)
    out = chunked_nll(**leaves, **CHUNKED, outputs=OUTPUTS)
    assert not out.z_loss.requires_grad  # 0 whatever the leaves are
    assert out.entropy.mean().item() == out.entropy.detach().mean().item()
    out.entropy.mul_(2.0)[out.correct] = 0.0
    loss = out.loss + 0.0 * out.lse.detach().mean() / out.weight_sum
    of = [leaves[name] for name in ("hidden", "weight", "bias")]
    got = torch.autograd.grad(loss, of, torch.tensor(p.upstream))
    assert all(same(a, b) for a, b in zip(want[1:], got))
    with torch.no_grad():
        assert not chunked_nll(**leaves, outputs=OUTPUTS).entropy.requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_bonus_is_refused_in_a_checkpoint(reentrant):
    """D6: a reentrant one fills in zeros for results that were not used, which are no gradient."""
    leaves, p = tensors()

    def call(hidden):
        out = chunked_nll(**{**leaves, "hidden": hidden}, outputs=OUTPUTS)
        return out.loss, out.entropy

    loss, _ = checkpoint(call, leaves["hidden"], use_reentrant=reentrant)
    loss.backward(torch.tensor(p.upstream))
    assert same(leaves["hidden"].grad, loss_and_gradients(leaves, p.upstream)[1])
    loss, entropy = checkpoint(call, leaves["hidden"], use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"^`entropy` of `chunked_nll`"):
        (loss - 0.01 * entropy.mean()).backward()


# --- layouts -------------------------------------------------------------------------------------


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
    loss, *got = loss_and_gradients(leaves, p.upstream)
    hold_leaves(p, loss, dict(zip(("hidden", "weight", "bias"), got)))


def test_expanded_inputs():
    """M17: one row of hidden, labels and temperature for every token, strides 0."""
    leaves, p = tensors(Case("expanded", 1, 24, 157, ignored=0.0))
    rows = p.changed(hidden=np.repeat(p.hidden, 19, 0), labels=np.repeat(p.labels, 19))
    leaves["hidden"] = leaves["hidden"].detach().expand(19, 24).requires_grad_()
    leaves["labels"] = leaves["labels"].expand(19)
    options = {"temperature": torch.tensor(0.7).expand(19), "where": torch.tensor(True).expand(19)}
    loss, *got = loss_and_gradients(leaves, p.upstream, **options)
    rows = rows.changed(options={"temperature": np.float32(0.7)})
    hold_leaves(rows, loss, dict(zip(("hidden", "weight", "bias"), got)))


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
    want = loss_and_gradients(leaves, p.upstream)
    deep = dict(leaves)
    deep["hidden"] = leaves["hidden"].detach().reshape(3, 4, 5, 24).requires_grad_()
    deep["labels"] = leaves["labels"].reshape(3, 4, 5)
    got = loss_and_gradients(deep, p.upstream)
    assert got[1].shape == (3, 4, 5, 24)
    got[1] = got[1].reshape(60, 24)
    assert all(same(a, b) for a, b in zip(want, got))
    out = chunked_nll(**deep, outputs=OUTPUTS)
    assert {getattr(out, name).shape for name in OUTPUTS} == {(3, 4, 5)}


def test_class_weights_of_absent_classes_may_be_infinite() -> None:
    """1 / count: gradients were NaN, as 0 times the sum of the weights entered each of them."""
    import torch

    hidden = torch.randn(6, 4, requires_grad=True)
    weight, labels = torch.randn(5, 4), torch.tensor([0, 1, 3, 1, 0, 3])
    by = 1.0 / torch.bincount(labels, minlength=5)
    want = chunked_nll(hidden, weight, labels, class_weights=by.clamp(max=1.0))
    (before,) = torch.autograd.grad(want.loss, hidden)
    (got,) = torch.autograd.grad(chunked_nll(hidden, weight, labels, class_weights=by).loss, hidden)
    assert torch.equal(got, before)
