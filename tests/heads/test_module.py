"""`xentlib.torch.NLLHead`: a linear layer in all but what its forward takes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from xentlib.torch import NLLHead, chunked_logprobs, chunked_nll, gather_head  # noqa: E402

H, V, N = 8, 23, 6


def arrays() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(2, N, H, requires_grad=True), torch.randint(V, (2, N))


def bits(results: Any) -> list[Any]:
    return [None if x is None else x.detach().clone() for x in results]


def same(got: Any, want: Any) -> bool:
    pairs = list(zip(bits(got), bits(want), strict=True))
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("bias", [True, False])
def test_with_labels_it_is_the_function(bias: bool) -> None:
    """A0: the results and gradients of the function, to the bit; without labels, of nn.Linear."""
    linear = nn.Linear(H, V, bias=bias)
    options = {"softcap": 3.0, "label_smoothing": 0.1, "outputs": ("lse",)}
    head = NLLHead.from_linear(linear, **options)
    hidden, labels = arrays()
    got = head(hidden, labels, z_loss=1e-3)
    want = chunked_nll(hidden, linear.weight, labels, bias=linear.bias, z_loss=1e-3, **options)
    assert same(got, want)
    (d_got,) = torch.autograd.grad(got.loss, hidden)
    (d_want,) = torch.autograd.grad(want.loss, hidden)
    assert torch.equal(d_got, d_want)
    assert torch.equal(head(hidden), linear(hidden))


def test_per_token() -> None:
    """The other function, and that a call's options win over the constructor's."""
    head = NLLHead(H, V, per_token=True, temperature=2.0, entropy=True)
    hidden, labels = arrays()
    want = chunked_logprobs(
        hidden, head.weight, labels, bias=head.bias, temperature=0.5, entropy=True
    )
    assert same(head(hidden, labels, temperature=0.5), want)
    assert not same(head(hidden, labels), want)


def test_parameters_are_shared_and_named_as_before() -> None:
    """Checkpoints of nn.Linear load, tied weights stay one parameter."""
    embedding, linear = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
    linear.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "lm_head": linear}).eval()
    before, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    model["lm_head"] = NLLHead.from_linear(model["lm_head"])
    assert model["lm_head"].weight is embedding.weight
    assert not model["lm_head"].training
    assert [name for name, _ in model.named_parameters()] == names
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert list(NLLHead(H, V).state_dict()) == list(nn.Linear(H, V).state_dict())


def test_gradients_of_a_tied_head_meet_in_one_parameter() -> None:
    """A9: embedding's and head's."""
    embedding = nn.Embedding(V, H)
    head = NLLHead(H, V, bias=False)
    head.weight = embedding.weight
    _, labels = arrays()
    head(embedding(labels), labels.roll(1)).loss.backward()
    got = embedding.weight.grad.clone()
    embedding.weight.grad = None
    logits = nn.functional.linear(embedding(labels), embedding.weight)
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.roll(1).flatten()).backward()
    want = embedding.weight.grad.numpy()
    assert not failures(check("A9", got.numpy(), want, metrics=("rho / u",)))


def test_meta_device() -> None:
    """Materialised later, as any layer."""
    head = NLLHead(H, V, device="meta", dtype=torch.bfloat16, softcap=2.0)
    assert head.weight.is_meta
    assert head.weight.dtype == torch.bfloat16
    head.to_empty(device="cpu").reset_parameters()
    hidden, labels = arrays()
    assert head(hidden.bfloat16(), labels).loss.isfinite()
    with torch.device("meta"):
        assert NLLHead.from_linear(nn.Linear(H, V)).bias.is_meta


def test_copies_and_pickles() -> None:
    """With their options."""
    head = NLLHead(H, V, softcap=2.0)
    hidden, labels = arrays()
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    for other in (copy.deepcopy(head), torch.load(file, weights_only=False)):
        assert same(other(hidden, labels), head(hidden, labels))
    assert repr(head) == f"NLLHead(in_features={H}, out_features={V}, bias=True, softcap=2.0)"


def test_compiled_and_under_autocast() -> None:
    """As the function is."""
    head = NLLHead(H, V)
    hidden, labels = arrays()
    compiled = torch.compile(head, fullgraph=True)
    assert torch.equal(compiled(hidden, labels).loss, head(hidden, labels).loss)
    with torch.autocast("cpu", torch.bfloat16):
        got = head(hidden, labels).loss
    want = chunked_nll(hidden.bfloat16(), head.weight.bfloat16(), labels, bias=head.bias).loss
    assert torch.equal(got, want)


class Adapter(nn.Module):
    """Like a LoRA layer: holds a linear layer, and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(H, V)


class Scaled(nn.Linear):
    def forward(self, hidden: Any) -> Any:
        return 2 * super().forward(hidden)


def hooked() -> Any:
    linear = nn.Linear(H, V)
    linear.register_forward_hook(lambda *_: None)
    return linear


def of_package(module: str, name: str, base: Any = nn.Module) -> Any:
    """A layer as a package that is not installed here has it."""
    said = {"__module__": module, "forward": lambda self, hidden: hidden}
    return type(name, (base,), said)(*[H, V][: 2 * (base is nn.Linear)])


@pytest.mark.parametrize(
    ("linear", "said"),
    [
        (Adapter(), "got a Adapter, whose weight alone.*Merge an adapter.*base . scale . B . A"),
        (Scaled(H, V), "got a Scaled, whose weight alone"),
        (parametrizations.weight_norm(nn.Linear(H, V)), "whose weight alone"),
        (hooked(), "`linear` must have no hooks, which would be lost; got a Linear with some"),
        (None, "got a NoneType"),
        (
            of_package("peft.tuners.lora", "Linear"),
            "of peft, whose adapters .* its `weight`",
        ),
        (of_package("peft.utils", "ModulesToSaveWrapper"), "of peft, which .* before PEFT wraps"),
        (
            of_package("bitsandbytes.nn", "Linear4bit", nn.Linear),
            "of bitsandbytes, whose .* own",
        ),
    ],
)
def test_what_is_more_than_a_weight_is_refused(linear: Any, said: str) -> None:
    """Its forward would be dropped without a word."""
    with pytest.raises(TypeError, match=said):
        NLLHead.from_linear(linear)


def test_options_are_checked_when_they_are_given() -> None:
    """Not when a batch arrives."""
    with pytest.raises(
        TypeError, match=r"`entropy` is not an option of this call.*Pass any of where, token_w"
    ):
        NLLHead(H, V, entropy=True)
    with pytest.raises(
        TypeError, match=r"`weight_layout` is not an option of this call.*leave it out"
    ):
        NLLHead(H, V, weight_layout="HV")
    head = NLLHead(H, V)
    hidden, labels = arrays()
    with pytest.raises(TypeError, match="Without labels no option applies"):
        head(hidden, softcap=2.0)
    with pytest.raises(TypeError, match="softcup"):
        head(hidden, labels, softcup=2.0)


def test_a_count_that_a_wrapper_has_rounded_is_refused() -> None:
    """FSDP2 casts what a module is given: 4,099 tokens would become 4,096."""
    head = NLLHead(H, V)
    hidden, labels = arrays()
    with pytest.raises(TypeError, match=r"`denominator`.*bfloat16, in which counts are"):
        head(hidden, labels, denominator=torch.tensor(4099.0).bfloat16())
    assert head(hidden, labels, denominator=torch.tensor(4099)).loss.isfinite()


def test_nothing_is_gathered_of_a_plain_head() -> None:
    """`gather_head` of what is whole."""
    linear = nn.Linear(H, V)
    with gather_head(linear.weight, linear.bias) as (weight, bias):
        assert weight is linear.weight
        assert bias is linear.bias
    with gather_head(linear.weight) as (weight, bias):
        assert bias is None
