"""A head that is given as a module, in PyTorch: what it computes, or a refusal by name."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
# PEFT asks transformers for what has another name now.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning")]

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from helpers.patched import CHUNK, batch, gpt2, held, llama, step  # noqa: E402
from xentlib.torch import LowRankHead, NLLHead, chunked_logprobs, chunked_nll  # noqa: E402

N, H, V = 20, 8, 31


def inputs():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, H, generator=g, requires_grad=True)
    return x, torch.randint(V, (N,), generator=g)


def gradients(function, module, *, bias=None, weight=None) -> dict[str, torch.Tensor]:
    x, y = inputs()
    out = function(x, module if weight is None else weight, y, bias=bias)
    value = out.loss if function is chunked_nll else out.logprobs.sum()
    value.backward()
    named = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return {"loss": value.detach(), "hidden": x.grad, **{k: g.clone() for k, g in named.items()}}


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def halved():
    head = nn.Linear(H, V, bias=False)
    parametrize.register_parametrization(head, "weight", Twice())
    return head


MODULES = {
    "Linear": lambda: nn.Linear(H, V, bias=False),
    "Linear, bias": lambda: nn.Linear(H, V),
    "Embedding": lambda: nn.Embedding(V, H),
    "NLLHead": lambda: NLLHead(H, V),
    "parametrised": halved,
}


@pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_its_weight_and_bias(name, function) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    bias = getattr(module, "bias", None)
    want = gradients(function, module, weight=module.weight, bias=bias)
    got = gradients(function, module)
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert torch.equal(got[key], x), key


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


def replaced():
    head = nn.Linear(H, V)
    head.forward = lambda x: 2 * nn.Linear.forward(head, x)
    return head


@pytest.mark.parametrize(
    "make",
    [lambda: Scaled(H, V), lambda: Called(H, V), replaced, lambda: nn.Sequential(nn.Linear(H, V))],
)
def test_more_than_a_head_is_refused(make) -> None:
    """Catches: a weight taken from a module that does something else with it."""
    x, y = inputs()
    with pytest.raises(
        TypeError, match="`weight` must be a head, or a module that multiplies with"
    ):
        chunked_nll(x, make(), y)


def user_hook(module, args):
    return (args[0] * 2,)


def test_hooks_that_would_not_run_are_refused() -> None:
    """Catches: a weight that `weight_norm` makes in a hook, and would be that of the last step."""
    from xentlib.torch.integrations.transformers import patch

    x, y = inputs()
    normed = nn.utils.weight_norm(nn.Linear(H, V))
    with pytest.raises(TypeError, match=r"with the forward hook torch\.nn\.utils\.weight_norm"):
        chunked_nll(x, normed, y)
    model = patch(llama())
    handle = model.lm_head.register_forward_pre_hook(user_hook)
    with pytest.raises(TypeError, match=r"with the forward hook test_heads_torch\.user_hook"):
        model(**batch())
    handle.remove()
    model.lm_head.register_forward_hook(partial(print, end=""))
    with pytest.raises(TypeError, match=r"with the forward hook builtins\.print"):
        model(**batch())
    table = nn.Embedding(V, H)
    table.register_forward_hook(lambda module, args, out: out.requires_grad_())
    assert chunked_nll(x, table, y).loss.isfinite()


def test_what_a_module_has_itself_is_refused() -> None:
    x, y = inputs()
    with pytest.raises(ValueError, match="`bias` must be None where `weight` is a module with one"):
        chunked_nll(x, nn.Linear(H, V), y, bias=torch.zeros(V))
    with pytest.raises(ValueError, match="`weight_layout` must be left out where `weight` is a"):
        chunked_nll(x, nn.Linear(H, V), y, weight_layout="HV")


def lora(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = llama()
    if options.get("lora_bias"):  # which PEFT wants a bias for
        model.lm_head = nn.Linear(32, model.config.vocab_size)
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["lm_head"], "lora_alpha": 32, "use_rslora": True},
        {"target_modules": ["lm_head"], "lora_bias": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "use_dora": True},
    ],
    ids=["head", "head, rslora", "head, bias", "head saved", "attention, DoRA"],
)
def test_adapters_of_peft(options) -> None:
    """Catches: an adapter whose base alone is computed: another loss, and no gradients of it."""
    from xentlib.torch.integrations.transformers import patch

    want = step(lora(**options))
    assert any("lora_" in name or "modules_to_save" in name for name in want)
    held(step(patch(lora(**options), max_chunk_bytes=CHUNK)), want)
    model = lora(**options)
    hidden = model.get_base_model().model(batch()["input_ids"]).last_hidden_state
    target = nn.functional.pad(batch()["labels"][:, 1:], (0, 1), value=-100)
    loss = chunked_nll(hidden, model.get_base_model().lm_head, target).loss
    held({"loss": loss.detach()}, {"loss": want["loss"]})


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head"]},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    ],
    ids=["LoRA", "saved"],
)
def test_adapters_that_are_switched_off(options) -> None:
    """A trainer's reference model: the head as it was before the adapters were trained."""
    model = lora(**options)
    head = model.get_base_model().lm_head
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + p.requires_grad)
    x, y = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)), torch.arange(5)
    with model.disable_adapter():
        want = nn.functional.cross_entropy(head(x), y)
        got = chunked_nll(x, head, y).loss
    held({"loss": got.detach()}, {"loss": want.detach()})
    with pytest.raises(AssertionError):
        held({"loss": chunked_nll(x, head, y).loss.detach()}, {"loss": want.detach()})


def gpt2_tied(**options):
    """LoRA on the lookup of an embedding that the head is tied to: the head has no adapter."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["wte"], init_lora_weights=False, **options)
    return peft.get_peft_model(gpt2(), config)


def test_a_weight_without_its_adapters_is_refused() -> None:
    """The loss was that of the base alone, and no adapter had a gradient: by the weight of a layer
    that PEFT has wrapped, and by an `NLLHead` that PEFT's layer calls (`NLLOutput` has no dtype).
    """
    peft = pytest.importorskip("peft")
    x, y = torch.randn(5, 32), torch.arange(5)
    model = llama().requires_grad_(False)
    weight = model.lm_head.weight
    before = chunked_nll(x, weight, y).loss  # remembers that nothing is around it
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    head = model.get_base_model().lm_head
    for call in (chunked_nll, chunked_logprobs):
        for passed in (head.weight, weight):
            with pytest.raises(TypeError, match="got the weight of a Linear inside a Linear of PE"):
                call(x, passed, y)
            with pytest.raises(TypeError, match="got the weight of a Linear inside a Linear of PE"):
                call(x, passed.T, y, weight_layout="HV")
    module = nn.Sequential(NLLHead(32, V, bias=False))
    layer = peft.get_peft_model(module, peft.LoraConfig(target_modules=["0"])).base_model.model[0]
    with pytest.raises(TypeError, match="cannot be called with labels"):
        layer(x, y)
    # What is right stays allowed: the base said to be alone, off, merged, taken away, or not in it.
    low = LowRankHead(weight, head.lora_A["default"].weight, head.lora_B["default"].weight)
    for right in (weight.detach(), low, head, nn.Parameter(weight.detach(), requires_grad=False)):
        assert chunked_nll(x, right, y).loss.isfinite()
    layer.enable_adapters(False)
    assert layer(x, y).loss.isfinite()
    with model.disable_adapter():
        assert torch.equal(chunked_nll(x, weight, y).loss, before)
    head.merge()
    assert chunked_nll(x, weight, y).loss.isfinite()
    head.unmerge()
    del head
    assert torch.equal(chunked_nll(x, model.unload().lm_head.weight, y).loss, before)
    tied = gpt2_tied().get_base_model()
    assert chunked_nll(torch.randn(5, 16), tied.lm_head.weight, y).loss.isfinite()


def adapted(dropout: float = 0.0, **more):
    """A frozen head of 4,096 classes with LoRA, in training."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 4096, bias=False))
    config = peft.LoraConfig(
        r=4, target_modules=["0"], init_lora_weights=False, lora_dropout=dropout, **more
    )
    model = peft.get_peft_model(model, config)
    return model, model.base_model.model[0].train()


def full(layer, x, y):
    return nn.functional.cross_entropy(layer(x), y)


def ours(layer, x, y):
    return chunked_nll(x, layer, y, max_chunk_bytes=8 * 4096 * 4).loss


def adapter_step(layer, make, seed=4):
    """Loss and gradients, of the numbers that a dropout draws after this seed."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 64, generator=g, requires_grad=True), torch.arange(N) * 7
    torch.manual_seed(seed)
    loss = make(layer, x, y)
    loss.backward()
    named = {k: p.grad.clone() for k, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    return {"loss": loss.detach(), "hidden": x.grad, **named}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_dropout_of_the_adapter_is_drawn_as_peft_draws_it(dropout) -> None:
    """The same random numbers; catches a dropout that is left out, or is of the base too."""
    _, layer = adapted(dropout)
    want = adapter_step(layer, full)
    got = adapter_step(layer, ours)
    held(got, want)
    assert len(got) == 4
    if dropout:
        with pytest.raises(AssertionError):
            held(adapter_step(layer, ours, seed=5), want)
    layer.eval()
    held(adapter_step(layer, ours), adapter_step(layer, full))


def test_several_adapters_are_one() -> None:
    """Their sum; with a dropout of each, in training, they are refused."""
    for dropout in (0.0, 0.5):
        model, layer = adapted(dropout)
        model.add_adapter("second", model.peft_config["default"])
        layer.set_adapter(["default", "second"])
        if not dropout:
            want = adapter_step(layer, full)
            assert len(want) == 6
            held(adapter_step(layer, ours), want)
            continue
        with pytest.raises(TypeError, match="with several active adapters in training"):
            adapter_step(layer, ours)


def test_an_adapter_costs_no_copy_of_the_head() -> None:
    """Nor a gradient of its size, by the allocator's count; PEFT's own merge is found by it."""
    from torch.profiler import ProfilerActivity, profile

    _, layer = adapted()
    head = 4096 * 64 * 4

    def largest(make):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            make()
        events = profiler.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == "[memory]")

    adapter_step(layer, ours)  # what is allocated once
    assert largest(lambda: adapter_step(layer, ours)) < head
    assert largest(lambda: layer.get_delta_weight("default")) >= head


def test_a_hook_on_an_adapter_is_refused() -> None:
    """It would not run: A and B are read, not called."""
    _, layer = adapted()
    layer.lora_A["default"].register_forward_pre_hook(user_hook)
    with pytest.raises(TypeError, match=r"a Linear with the forward hook test_heads_torch\.user"):
        adapter_step(layer, ours)


@pytest.mark.parametrize(
    ("options", "came"),
    [
        ({"target_modules": ["lm_head"], "use_dora": True}, "DoraLinearVariant"),
        ({"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]}, "ParamWrapper"),
    ],
    ids=["DoRA", "parameter"],
)
def test_other_adapters_are_refused_by_name(options, came) -> None:
    from xentlib.torch.integrations.transformers import patch

    with pytest.raises(TypeError, match=f"got .*{came}"):
        patch(lora(**options))


def test_merged_and_disabled_adapters() -> None:
    model = lora(target_modules=["lm_head"]).eval()
    head = model.get_base_model().lm_head
    x = torch.randn(N, 32)
    y = inputs()[1]

    def loss():
        return chunked_nll(x, head, y).loss.detach()

    def full():
        return nn.functional.cross_entropy(head(x), y).detach()

    with model.disable_adapter():
        held({"loss": loss()}, {"loss": full()})
    before = loss()
    head.merge()
    held({"loss": loss()}, {"loss": full()})
    held({"loss": loss()}, {"loss": before})
