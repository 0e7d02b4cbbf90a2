"""`patch`: a model of `transformers` whose loss makes no logits, and is otherwise what it was."""

from __future__ import annotations

import copy
import io
import threading
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralConfig,
    MixtralForCausalLM,
)

from helpers.patched import CHUNK, LENGTH, ROWS, Logits, V, batch, held, llama, step  # noqa: E402
from xentlib.torch import Evaluation, chunked_logprobs, chunked_nll, next_token_labels  # noqa: E402
from xentlib.torch.integrations.transformers import (  # noqa: E402
    LazyLogits,
    LazyLogitsError,
    patch,
    unpatch,
)


def patched(**options):
    return patch(llama(), **options)


def test_a_patched_model_makes_no_logits() -> None:
    """Catches: logits that are made and thrown away."""
    with Logits() as before:
        want = step(llama())
    with Logits() as after:
        got = step(patched(max_chunk_bytes=CHUNK))
    held(got, want)
    assert before.seen
    assert not after.seen


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": torch.tensor(50)},
        {"attention_mask": (batch()["input_ids"] % 7 != 0).long()},
        {"shift_labels": batch()["labels"].roll(3, 1)},
        {"logits_to_keep": LENGTH},
    ],
    ids=lambda more: next(iter(more)),
)
def test_arguments_of_the_model_mean_what_they_did(more) -> None:
    held(step(patched(), **more), step(llama(), **more))


def small_gemma():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma2ForCausalLM(
        Gemma2Config(vocab_size=V, final_logit_softcapping=0.3, **sizes, **heads)
    )


def small_mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=V, output_router_logits=True, **sizes, **heads)
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("make", [small_gemma, small_mixtral])
def test_caps_and_auxiliary_losses_stay(make) -> None:
    """Catches: a soft cap that is forgotten, a router's loss that is lost with the model's own."""
    held(step(patch(make())), step(make()))


def test_copies_pickles_and_checkpoints(tmp_path) -> None:
    """Catches: a copy whose forward is the first model's."""
    want, model = step(llama()), patched()
    other = copy.deepcopy(model)
    held(step(other), want)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    held(step(model), want)
    assert step(other)["loss"] != want["loss"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    held(step(torch.load(file, weights_only=False)), want)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["LlamaForCausalLM"]
    held(step(AutoModelForCausalLM.from_pretrained(tmp_path)), want)


def test_calls_without_labels_are_unchanged() -> None:
    ids, model, plain = batch()["input_ids"], patched().eval(), llama().eval()
    assert torch.equal(model(ids).logits, plain(ids).logits)
    generated = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (model, plain)]
    assert torch.equal(*generated)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_training_without_labels_warns_once() -> None:
    """What `Trainer` does with a label smoother: all logits, without a word."""
    model = patched().train()
    with pytest.warns(UserWarning, match="was called without labels while it is trained"):
        model(batch()["input_ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch()["input_ids"])


def test_labels_that_are_shifted_twice_warn_once() -> None:
    """The model shifts: of `next_token_labels` it would learn the token after the next."""
    ids, model = batch()["input_ids"], patched()
    twice = next_token_labels(batch()["labels"])
    with pytest.warns(UserWarning, match="shifts the labels itself, and each label is the next"):
        model(input_ids=ids, labels=twice)
    again = patched()
    with pytest.warns(UserWarning, match="shifts the labels itself"):
        again(ids, labels=twice)
    few = torch.where(torch.arange(LENGTH) < 2, ids[:1].roll(-1), -100)
    same = torch.full_like(ids, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids, labels=twice)
        right = patched()
        right(**batch())
        right(input_ids=ids[:1], labels=few)
        right(input_ids=same, labels=same)
        right(input_ids=ids, labels=twice, shift_labels=twice)
        right(inputs_embeds=torch.randn(ROWS, LENGTH, 32), labels=twice)


def test_checkpointing() -> None:
    model = patched().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name changes with transformers 6
        model.gradient_checkpointing_enable()
    held(step(model), step(llama()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiling(backend: str) -> None:
    model = patched()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    held(step(compiled, of=model), step(llama()))


def test_bf16() -> None:
    want, low = step(llama()), step(patch(llama(dtype=torch.bfloat16)))
    assert low["loss"].dtype == torch.float32
    assert abs(low["loss"] - want["loss"]) < 2**-8 * want["loss"]


def test_in_place_of_logits() -> None:
    """In evaluation; tokens that are masked too."""
    model = patched(in_place_of_logits=lambda logits: logits.topk(3).indices)
    logits = llama().eval()(batch()["input_ids"]).logits
    out = model.eval()(**batch())
    assert torch.equal(out.logits, logits.topk(3).indices)
    assert isinstance(model.train()(**batch()).logits, LazyLogits)
    assert torch.equal(model(**batch()).logits.materialize(), logits.float())
    loss, found = model.eval()(**batch(), return_dict=False)[:2]
    assert torch.equal(found, out.logits)
    assert loss == out.loss


def test_lazy_logits_have_the_loss_and_the_log_probabilities() -> None:
    """The bits of the functions on the same hidden states and head, scaled and cut as they are."""
    lazy = patched()(**batch()).logits
    labels = torch.where(batch()["labels"] < 0, -100, batch()["labels"] % (V - 3))
    cut = lazy[:, :-1, : V - 3] / 2
    hidden, weight = lazy.hidden[:, :-1], lazy.head.weight[: V - 3]
    options = {"logit_scale": 0.5, "z_loss": 1e-3}
    want = chunked_nll(hidden, weight, labels[:, 1:], **options)
    assert torch.equal(cut.nll(labels[:, 1:], z_loss=1e-3).loss, want.loss)
    logprobs = chunked_logprobs(hidden, weight, labels[:, 1:], logit_scale=0.5).logprobs
    assert torch.equal(cut.logprobs(labels[:, 1:]).logprobs, logprobs)
    assert cut.materialize().shape == (*hidden.shape[:-1], V - 3)
    twice = patched(z_loss=1e-4)(**batch()).logits
    with pytest.raises(LazyLogitsError, match="`z_loss` from the loss and from `patch`"):
        twice.nll(labels, z_loss=1e-3)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_loss_knows_what_the_model_has_divided_it_by(around) -> None:
    """A mean that an evaluation took for a sum: 0.197 for 7.734."""
    model, n = patch(llama()), (batch()["labels"][:, 1:] != -100).sum()
    with around():
        total = model(**batch(), num_items_in_batch=1).loss
        mean = Evaluation().add(total, n).mean_loss()
        named = Evaluation().add(loss_sum=total.item(), num_tokens=n)
        assert mean.item() == named.mean_loss().item()
        for items in ({}, {"num_items_in_batch": int(n)}, {"num_items_in_batch": 2 * n}):
            loss = model(**batch(), **items).loss
            for given in ({"loss": loss}, {"loss_sum": loss}):
                with pytest.raises(ValueError, match="got one that `chunked_nll` has divided"):
                    Evaluation().add(**given, num_tokens=n)
        with pytest.raises(ValueError, match="has counted for this loss, 29; got 32"):
            Evaluation().add(total, (batch()["labels"] != -100).sum())


def test_options_of_the_loss() -> None:
    model, plain = patched(label_smoothing=0.1, z_loss=1e-3, recompute=True), llama()
    labels = torch.nn.functional.pad(batch()["labels"][:, 1:], (0, 1), value=-100)
    hidden = plain.model(batch()["input_ids"]).last_hidden_state
    want = chunked_nll(hidden, plain.lm_head, labels, label_smoothing=0.1, z_loss=1e-3).loss
    assert ((loss := model(**batch()).loss) == want, loss.grad_fn.recompute) == (True, True)
    with pytest.raises(TypeError, match="`patch` must have options among"):
        patched(softcap=30.0)


def test_a_vocabulary_that_the_model_cuts() -> None:
    """Rows of padding are no classes."""
    logits = patched()(**batch()).logits
    plain = llama()(batch()["input_ids"]).logits
    target = batch()["labels"].clamp(max=79)
    got = torch.nn.functional.cross_entropy(logits[..., :80].transpose(1, 2), target)
    want = torch.nn.functional.cross_entropy(plain[..., :80].transpose(1, 2), target)
    held({"loss": got.detach()}, {"loss": want.detach()})


@pytest.mark.parametrize(
    "misuse",
    [
        lambda z: z + 1,
        lambda z: -z,
        lambda z: z > 0,
        lambda z: torch.cat([z, z]),
        lambda z: z * torch.ones(()),
        lambda z: z.softmax(-1),
        lambda z: torch.softmax(z, -1),
        lambda z: z[..., 3],
        lambda z: z[..., 3:],
        lambda z: z.view(-1),
        lambda z: z.flatten(),
        lambda z: z.tanh().tanh(),
        lambda z: torch.nn.functional.cross_entropy(z, torch.zeros(ROWS, LENGTH, V)),
        lambda z: torch.nn.functional.kl_div(torch.zeros(3), z),
    ],
)
def test_what_logits_alone_can_do_raises(misuse) -> None:
    logits = patched()(**batch()).logits
    assert logits.shape == (ROWS, LENGTH, V)
    assert len(logits) == ROWS
    with pytest.raises(LazyLogitsError, match="logits that are not made must only be"):
        misuse(logits)


def test_patched_twice_unpatched_and_refused() -> None:
    model, kind = llama(), type(llama())
    patch(model)
    assert type(model) is not kind
    assert type(model).__name__ == kind.__name__
    with pytest.raises(ValueError, match="`model` must be patched once"):
        patch(model)
    step(model)
    assert type(unpatch(model)) is kind
    assert type(model.lm_head) is torch.nn.Linear
    assert vars(model).keys() == vars(llama()).keys()
    assert vars(model.lm_head).keys() == vars(llama().lm_head).keys()
    held(step(model), step(llama()))
    with pytest.raises(ValueError, match="`model` must be patched; got a LlamaForCausalLM"):
        unpatch(model)
    patch(model)
    model.__class__ = type("FSDPLlamaForCausalLM", (type(model),), {})  # as `fully_shard` does it
    with pytest.raises(ValueError, match="`model` must have the class that `patch` gave it"):
        unpatch(model)
    model = llama()
    for other in (torch.nn.Linear(2, 2), GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2))):
        with pytest.raises(TypeError, match="`model` must be a model of `transformers` with a"):
            patch(other)
    for kind in (type(model), model.config, "folder"):
        with pytest.raises(TypeError, match=r"got a \w+\. Pass an instance, such as"):
            patch(kind)
    model.forward = model.forward
    with pytest.raises(TypeError, match="whose forward was replaced"):
        patch(model)


def test_trainer_counts_after_the_shift_whatever_the_class_is_called() -> None:
    """`Trainer` asks the class's name for its loss: of a GPT2LMHeadModel it counts the first column
    of labels too."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=V))
    assert model.loss_type is None
    assert patch(model).loss_type == "ForCausalLM"
    assert unpatch(model).loss_type is None


def test_a_forward_without_its_head_is_refused() -> None:
    """As when PEFT has put an adapter around a head that was patched before."""
    model = patched()
    model.lm_head = torch.nn.Linear(32, V)
    with pytest.raises(RuntimeError, match="a patched model must compute its loss from the head"):
        model(**batch())


def test_several_devices_in_one_process_are_refused() -> None:
    """Of `nn.DataParallel`, whose replicas have no parameters and whose outputs are gathered."""
    replica = patched()._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"in a process for each device; got nn\.DataParallel"):
        replica(**batch())


def test_what_stands_in_place_of_logits_has_to_be_a_tensor() -> None:
    for given in (True, lambda logits, labels: logits):  # Trainer's hook takes two
        with pytest.raises(TypeError, match="`in_place_of_logits` must be a function of one arg"):
            patched(in_place_of_logits=given)
    model = patched(in_place_of_logits=lambda z: z.topk(5)).eval()
    with pytest.raises(TypeError, match=r"must make a tensor .* got topk"), torch.no_grad():
        model(**batch())


class Twice(GPT2LMHeadModel):
    """Two losses of one head, as in the prediction of several tokens at once."""

    def forward(self, input_ids, labels):
        out = super().forward(input_ids=input_ids, labels=labels)
        more = super().forward(input_ids=input_ids.flip(1), labels=labels)
        out.loss = out.loss + more.loss
        return out


def test_a_head_with_two_losses() -> None:
    def twice():
        torch.manual_seed(0)
        return Twice(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=V))

    with Logits() as logits:
        got = step(patch(twice().eval(), max_chunk_bytes=CHUNK))
    held(got, step(twice().eval()))
    assert not logits.seen


def test_a_package_that_puts_a_forward_of_its_own_is_warned_of() -> None:
    """What Liger's loss does, whose package is not needed for it; a forward that calls the patched
    one, as Accelerate's under mixed precision, is none of them."""
    model = patched()
    here = type(model).forward
    theirs = types.FunctionType((lambda self: None).__code__, {"__name__": "liger_kernel.llama"})
    with pytest.warns(UserWarning, match="is patched, and liger_kernel has put a forward"):
        model.forward = types.MethodType(theirs, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.forward = types.MethodType(here, model)
    held(step(model), step(llama()))


def test_two_threads_call_one_model() -> None:
    """One with labels, one without, in turns inside of the forward: the one had the logits of the
    other. Nor does it find its own flag taken down by the other's."""
    model, at_head, turns = patched().eval(), threading.Barrier(2), []
    want = llama().eval()(batch()["input_ids"]).logits
    loss = step(llama().eval())["loss"]

    def meet(*_) -> None:
        at_head.wait(900)

    def called(**inputs) -> None:
        turns.extend(model(**inputs) for _ in range(2))

    model.model.norm.register_forward_pre_hook(meet)  # both are inside, before the head
    model.model.norm.register_forward_hook(meet)
    names = ("input_ids", "attention_mask")
    inputs = [batch(), {k: x for k, x in batch().items() if k in names}]
    threads = [threading.Thread(target=called, kwargs=more) for more in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    losses = [out.loss.detach() for out in turns if isinstance(out.logits, LazyLogits)]
    logits = [out.logits for out in turns if isinstance(out.logits, torch.Tensor)]
    assert len(losses) == len(logits) == 2
    for got in losses:
        held({"loss": got}, {"loss": loss})
    assert all(torch.equal(got, want) for got in logits)


def test_spread_over_devices() -> None:
    """Accelerate puts a forward of its own on every module of a `device_map`."""
    from accelerate import dispatch_model

    places = {"model": "cpu", "lm_head": "cpu"}
    model = patch(dispatch_model(llama(), places, force_hooks=True))
    held(step(model), step(llama()))
    assert isinstance(model(**batch()).logits, LazyLogits)
