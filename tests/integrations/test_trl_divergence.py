"""TRL's trainers that distil, with their divergences replaced: real trainers, and their functions
with and without."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="TRL is in the extra `trainers`")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:`use... must be a block"),  # which has replaced nothing
]

from datasets import Dataset  # noqa: E402
from trl import DistillationConfig, DistillationTrainer  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402
from trl.experimental.gold.gold_trainer import GOLDTrainer  # noqa: E402
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer  # noqa: E402
from trl.trainer import distillation_trainer  # noqa: E402

from helpers.patched import V, held, llama  # noqa: E402
from helpers.trl_runs import CHAT, COMMON, tokenizer, trained, turns, words  # noqa: E402
from xentlib.contract import check, failures  # noqa: E402
from xentlib.torch.integrations import trl  # noqa: E402

LABELS = torch.arange(14).reshape(2, 7) % V
LABELS[0, :3] = -100
GIVEN = {
    "labels": {"labels": LABELS},
    "no labels": {},
    "sum": {"labels": LABELS, "reduction": "sum", "temperature": 0.7},
    "items": {"labels": LABELS, "num_items_in_batch": torch.tensor(40), "reduction": "none"},
    "no token": {"labels": torch.full_like(LABELS, -100)},
}
TRAINERS = [GKDTrainer, GOLDTrainer, IWOPDTrainer]


def close_to(teacher: torch.nn.Module, far: float) -> torch.nn.Module:
    """A student, or a model that is no longer the teacher."""
    torch.manual_seed(1)
    with torch.no_grad():
        for x in teacher.parameters():
            x.add_(torch.randn_like(x), alpha=far)
    return teacher


def gkd(folder, *, model=None, **options):
    data = [{"messages": turns(k)} for k in range(8)]
    known = tokenizer()
    known.chat_template = CHAT
    trainer = GKDTrainer(
        model := model or close_to(llama(), 0.05),
        teacher_model=llama(dtype=model.dtype),
        args=GKDConfig(str(folder), **{**COMMON, "lmbda": 0.0, "max_length": 32, **options}),
        train_dataset=Dataset.from_list(data),
        processing_class=known,
    )
    return trainer, model


def distillation(folder, *, model=None, **options):
    """Of completions that the student samples: the same ones, as no weight has moved before."""
    sizes = {"max_completion_length": 5, "temperature": 0.7}
    trainer = DistillationTrainer(
        model := model or close_to(llama(), 0.05),
        teacher_model=llama(),
        args=DistillationConfig(str(folder), **{**COMMON, **sizes, **options}),
        train_dataset=Dataset.from_list([{"prompt": words(k, 4)} for k in range(8)]),
        processing_class=tokenizer(),
    )
    return trainer, model


STEPS = {
    "GKD": (gkd, {"beta": 0.5}),
    "GKD, forward KL": (gkd, {"beta": 0.0}),
    "GKD, its own text": (gkd, {"beta": 0.3, "lmbda": 1.0, "max_new_tokens": 5}),
    "GKD, micro-batches": (gkd, {"beta": 1.0, "gradient_accumulation_steps": 2}),
    "Distillation": (distillation, {"beta": 0.3}),
    "Distillation, reverse KL": (distillation, {"beta": 1.0}),
    "Distillation, micro-batches": (distillation, {"beta": 0.0, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_trl(name, tmp_path) -> None:
    make, options = STEPS[name]
    want, logged = trained(make, tmp_path, **options)
    with trl.use():
        got, also = trained(make, tmp_path, **options)
    assert any(x.abs().max() > 0 for x in want.values())
    held(got, want)
    assert also.keys() == logged.keys()
    for key, x in logged.items():  # rounded for the log
        assert abs(also[key] - x) <= 2**-10 * abs(x), key


def test_weights_after_some_steps(tmp_path) -> None:
    """How far each has come, in float64, in which a short step has digits."""
    start = dict(close_to(llama(dtype=torch.float64), 0.05).named_parameters())
    found = []
    for block in (nullcontext(), trl.use()):
        student = close_to(llama(dtype=torch.float64), 0.05)
        trainer, model = gkd(tmp_path, model=student, max_steps=3, learning_rate=1.0)
        with block:
            trainer.train()
        found.append({name: (x - start[name]).detach() for name, x in model.named_parameters()})
    assert all(x.abs().max() > 0 for x in found[0].values())
    held(found[1], found[0])


def both(theirs, *args, leaves, **more):
    """Value and gradients of TRL's function, then of ours in a block."""
    for block in (nullcontext(), trl.use()):
        with block:
            out = theirs()(*args, **more)
        out = out if isinstance(out, tuple) else (out,)
        yield out, torch.autograd.grad(out[0], leaves)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("beta", [0, 0.3, 1.0])
@pytest.mark.parametrize("given", GIVEN)
def test_given_logits(trainer, beta, given) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 7, V, requires_grad=True), torch.randn(2, 7, V)
    call = {"beta": beta, "leaves": [student], **GIVEN[given]}
    want, got = both(lambda: trainer.generalized_jsd_loss, student, teacher, **call)
    held(named(got), named(want))
    assert given == "no token" or got[1][0].abs().max() > 0


def named(found):
    return {str(k): x.detach() for k, x in enumerate((*found[0], *found[1]))}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("over", [None, 17, torch.tensor(40.0), torch.tensor([40])])
@pytest.mark.parametrize("models", ["plain", "scaled and capped"])
def test_hidden_states(beta, over, models) -> None:
    """Of two widths; with biases, scales and caps of their own."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 7, 16), torch.randn(V, 16) / 2
    bias, mask = torch.randn(V), (LABELS != -100).int()
    leaves = [x.requires_grad_() for x in (hidden, head, bias)]
    other = torch.randn(2, 7, 24), torch.randn(V, 24) / 2
    more = {"student_lm_head_bias": bias, "teacher_lm_head_bias": torch.randn(V)}
    if models != "plain":
        more |= {"student_logit_scale": 0.5, "student_final_logit_softcapping": 3.0}
        more |= {"teacher_logit_scale": 1.5, "teacher_final_logit_softcapping": 4.0}
        more |= {"temperature": 0.7}
    args = hidden, other[0], head, other[1], mask, beta, over
    loss = lambda: distillation_trainer._chunked_divergence_loss  # noqa: E731
    want, got = both(loss, *args, leaves=leaves, **more)
    assert int(got[0][2]) == int(want[0][2]) == 11
    held(named(got), {k: x.reshape(()) if k == "0" else x for k, x in named(want).items()})


def near_the_end(dtype=torch.float32):
    """Logits, and those of a teacher at a divergence of 1e-7 or a little more."""
    torch.manual_seed(0)
    student = torch.randn(2, 7, 4000, dtype=dtype) * 2
    return student, student + 6e-4 * torch.randn_like(student)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_near_the_end_of_a_distillation(trainer, beta) -> None:
    """A20, against TRL's own definition in float64; TRL's in float32 misses it by far."""
    student, teacher = near_the_end()
    how = {"labels": LABELS, "beta": beta}
    want = trainer.generalized_jsd_loss(student.double(), teacher.double(), **how)
    with trl.use():
        got = trainer.generalized_jsd_loss(student, teacher, **how)
    assert not failures(check("A20", got, want))
    theirs = trainer.generalized_jsd_loss(student, teacher, **how)
    assert failures(check("A20", theirs, want))


def test_what_only_trl_has_stays_trls() -> None:
    student, teacher = torch.randn(2, 7, V), torch.randn(2, 7, V)
    calls = [
        (GKDTrainer, {"reduction": "mean"}),
        (GKDTrainer, {"reduction": "none"}),
        (GOLDTrainer, {"logits_are_probs": True}),
        (IWOPDTrainer, {"top_k": 5}),
    ]
    for trainer, how in calls:
        given = student.softmax(-1), teacher.softmax(-1)
        want = trainer.generalized_jsd_loss(*given, **how)
        with trl.use():
            assert torch.equal(trainer.generalized_jsd_loss(*given, **how), want)


def test_the_block_leaves_nothing_behind(monkeypatch) -> None:
    before = [vars(x)["generalized_jsd_loss"] for x in TRAINERS]
    loss = distillation_trainer._chunked_divergence_loss
    with pytest.warns(UserWarning, match="without a call of TRL's head or divergence"), trl.use():
        assert distillation_trainer._chunked_divergence_loss is not loss
    assert distillation_trainer._chunked_divergence_loss is loss
    assert [vars(x)["generalized_jsd_loss"] for x in TRAINERS] == before
    monkeypatch.delattr(distillation_trainer, "_chunked_divergence_loss")
    with pytest.raises(ImportError, match="must find the divergence `_chunked_divergence_loss`"):
        trl.use().__enter__()
