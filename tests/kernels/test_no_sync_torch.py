"""No call waits for a GPU: each takes the way of CUDA on meta tensors, which have no numbers to
read, and copies nothing there that the host would have to wait for.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from helpers.on_meta import Waits, as_on_a_gpu  # noqa: E402
from xentlib.nll import OUTPUTS  # noqa: E402
from xentlib.plan import split  # noqa: E402
from xentlib.shards import VocabShard  # noqa: E402
from xentlib.torch import (  # noqa: E402
    Evaluation,
    SoftLabels,
    TeacherHead,
    TeacherTopK,
    TokenNormalizer,
    chunked_divergence,
    chunked_logprobs,
    chunked_nll,
    next_token_labels,
    vocab_parallel_logprobs,
)
from xentlib.torch.core.eager import Eager  # noqa: E402

N, H, V = 19, 16, 131
CHUNKS = {"max_chunk_bytes": 8 * V * 4}
DTYPES = ("bfloat16", "float16", "float32")
PLACED = (("bfloat16", "VH"), ("bfloat16", "HV"), ("float16", "VH"), ("float32", "HV"))


def placed(names: Any) -> Any:
    """None and all of the options in four dtypes and layouts, each alone in one of the two that
    have neither in common."""
    every = ("nothing", "everything")
    return [
        pytest.param(*of, name, marks=() if name in every or k == 3 * (n % 2) else pytest.mark.full)
        for n, name in enumerate((*names, "everything"))
        for k, of in enumerate(PLACED)
    ]


FLOAT, BOOL, INT = torch.float32, torch.bool, torch.int64


def there(*shape: int, dtype: torch.dtype = FLOAT, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# A tensor is made anew for each call.
TOKENS: dict[str, Any] = {
    "nothing": dict,
    "where": lambda: {"where": there(N, dtype=BOOL)},
    "temperature": lambda: {"temperature": 0.7},
    "temperature on the device": lambda: {"temperature": there()},
    "temperature on the host": lambda: {"temperature": torch.tensor(0.7)},
    "temperature a token": lambda: {"temperature": there(N)},
}
HEAD = TOKENS | {
    "bias": lambda: {"bias": there(V, grad=True)},
    "scale": lambda: {"logit_scale": 0.7},
    "scale on the device": lambda: {"logit_scale": there()},
    "softcap": lambda: {"softcap": 30.0},
    "audit mode": lambda: {"compute_dtype": "float64"},
}
LOSS = HEAD | {
    "sum": lambda: {"reduction": "sum"},
    "token weights": lambda: {"token_weights": there(N)},
    "class weights": lambda: {"class_weights": there(V), "label_smoothing": 0.1},
    "smoothing": lambda: {"label_smoothing": 0.1},
    "z-loss": lambda: {"z_loss": 1e-4},
    "denominator": lambda: {"denominator": 19.0},
    "denominator on the device": lambda: {"denominator": there()},
    "outputs": lambda: {"outputs": OUTPUTS},
}
CLASSES = {
    "kept": lambda: {"kept": there(N, 4, dtype=INT), "ids": there(N, 3, dtype=INT)},
    "top_k": lambda: {"top_k": 5},
}
PER_TOKEN = HEAD | CLASSES | {"entropy": lambda: {"entropy": True}}
LOGITS = TOKENS | {
    "entropy": lambda: {"entropy": True},
    "smoothing": lambda: {"label_smoothing": 0.1},
}


def options(of: dict[str, Any], name: str) -> dict[str, Any]:
    if name != "everything":
        return of[name]()  # type: ignore[no-any-return]
    merged: dict[str, Any] = {}
    for make in of.values():
        merged |= make()
    return merged


def head(dtype: str, layout: str = "VH") -> dict[str, Any]:
    kind, shape = getattr(torch, dtype), (V, H) if layout == "VH" else (H, V)
    weight, labels = there(*shape, dtype=kind, grad=True), there(N, dtype=INT)
    hidden = there(N, H, dtype=kind, grad=True)
    return {"hidden": hidden, "weight": weight, "labels": labels, "weight_layout": layout}


def backward(of: list[Tensor], leaves: dict[str, Any]) -> None:
    """Upstream gradients for all of them, and a gradient for each leaf that wants one."""
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]
    found = torch.autograd.grad(of, wanted, [torch.empty_like(x) for x in of])
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]


@pytest.mark.parametrize(("dtype", "layout", "name"), placed(LOSS))
def test_a_loss(dtype: str, layout: str, name: str) -> None:
    """D4. Catches: `torch.tensor(temperature, device=...)`, which copies and waits."""
    call = head(dtype, layout) | options(LOSS, name)
    with as_on_a_gpu() as seen:
        out = chunked_nll(**call, **CHUNKS)
        backward([out.loss], call)
    assert len(seen.touching(4 * V)) > 5  # it went through the chunks


@pytest.mark.parametrize("zero", [0, torch.tensor(0.0)], ids=["number", "array"])
def test_a_denominator_that_the_host_knows_to_be_0(zero: Any) -> None:
    """Refused where the host knows that tokens count; the loss would be x / 0 without a word."""
    of_host, nothing = torch.arange(N), torch.full((N,), -100)
    weights = {"token_weights": there(N)}
    with as_on_a_gpu():
        with pytest.raises(ValueError, match="`denominator` must be positive where a token"):
            chunked_nll(**head("bfloat16") | {"labels": of_host}, denominator=zero)
        for call in ({"labels": nothing}, {}, {"labels": of_host, **weights}):
            chunked_nll(**head("bfloat16") | call, denominator=zero)


@pytest.mark.parametrize(("dtype", "layout", "name"), placed(PER_TOKEN))
def test_log_probabilities(dtype: str, layout: str, name: str) -> None:
    call = head(dtype, layout) | options(PER_TOKEN, name)
    with as_on_a_gpu() as seen:
        out = chunked_logprobs(**call, **CHUNKS)
        backward([x for x in out if isinstance(x, Tensor) and x.is_floating_point()], call)
    assert len(seen.touching(4 * V)) > 10


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(
            *(dtype, name),
            marks=() if name in ("nothing", "everything") or k == n % 3 else pytest.mark.full,
        )
        for n, name in enumerate((*LOGITS, "everything"))
        for k, dtype in enumerate(DTYPES)
    ],
)
def test_log_probabilities_of_given_logits(dtype: str, name: str) -> None:
    call = {"logits": there(N, V, dtype=getattr(torch, dtype), grad=True)}
    call |= {"labels": there(N, dtype=INT)} | options(LOGITS, name)
    with as_on_a_gpu() as seen:
        out = vocab_parallel_logprobs(**call, **CHUNKS)
        backward([x for x in out if isinstance(x, Tensor) and x.is_floating_point()], call)
    assert len(seen.touching(4 * V)) > 5


def test_classes_of_given_logits() -> None:
    """Kept sets and `ids`, which a smoothed log-likelihood has not."""
    call = {
        "logits": there(N, V, grad=True),
        "labels": there(N, dtype=INT),
        **options(CLASSES, "everything"),
    }
    with as_on_a_gpu():
        out = vocab_parallel_logprobs(**call, entropy=True, **CHUNKS)
        backward([out.logprobs, out.entropy, out.ids_logprobs, out.top_logprobs], call)


@pytest.mark.parametrize("tail", ["class", "renormalize", "drop"])
def test_a_teacher_of_few_classes(tail: Any) -> None:
    call = head("bfloat16")
    teacher = TeacherTopK(there(N, 5, dtype=INT), there(N, 5), tail)
    with as_on_a_gpu():
        out = chunked_divergence(**call, teacher=teacher, nll_weight=0.5, **CHUNKS)
        backward([out.loss], call)


@pytest.mark.parametrize("vocab", ["same", "intersect"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_teacher_of_heads(kind: Any, vocab: Any) -> None:
    """Of as many classes, or of more."""
    call, rows = head("bfloat16"), V + 5 * (vocab == "intersect")
    more = {"beta": 0.5} if kind == "jsd" else {}
    teacher = TeacherHead(there(N, H, dtype=torch.bfloat16), there(rows, H, dtype=torch.bfloat16))
    with as_on_a_gpu() as seen:
        out = chunked_divergence(
            **call, teacher=teacher, kind=kind, vocab=vocab, nll_weight=0.5, **more, **CHUNKS
        )
        backward([out.loss], call)
    assert len(seen.touching(4 * V)) > 10


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", ["nothing", "where", "token weights", "smoothing", "z-loss"])
def test_class_probabilities(name: str, few: bool) -> None:
    """Of all classes, or of a few: neither is read to be refused."""
    call = head("bfloat16") | options(LOSS, name)
    probs = there(N, 5 if few else V)
    call["labels"] = SoftLabels(there(N, 5, dtype=INT), probs) if few else probs
    with as_on_a_gpu() as seen:
        out = chunked_nll(**call, **CHUNKS)
        backward([out.loss], call)
    assert len(seen.touching(4 * V)) > 5
    logits = {"logits": there(N, V, grad=True), "labels": call["labels"]}
    with as_on_a_gpu():
        given = vocab_parallel_logprobs(**logits, entropy=True, **CHUNKS)
        backward([given.logprobs, given.entropy], logits)


# --- over vocabulary shards ----------------------------------------------------------------------


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One of two ranks; what it sends goes nowhere, and is counted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Done:
        def wait(self) -> None: ...

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sent: list[Tensor] = []

    def all_reduce(x: Tensor, *_: Any, async_op: bool = False, **__: Any) -> Done | None:
        assert x.is_meta
        sent.append(x)
        return Done() if async_op else None

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    try:
        yield dist.group.WORLD, sent
    finally:
        dist.destroy_process_group()


# The whole vocabulary is that of two ranks, this one's first.
WHOLE = 2 * V
SHARDED = [x for x in LOSS if x != "class weights"]


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("chunks", [{}, CHUNKS], ids=["one chunk", "many"])
def test_a_loss_over_shards(group: Any, monkeypatch: Any, chunks: Any, name: str) -> None:
    """D7. Catches: numbers that must be alike on all ranks, each copied to the device by itself."""
    parallel, sent = group
    call = head("bfloat16") | options(LOSS, name)
    with as_on_a_gpu():
        out = chunked_nll(**call, **chunks, vocab_parallel=parallel)
        backward([out.loss], call)
    assert len(sent) == 3  # a MAX, a SUM, and that of d hidden


def test_a_loss_over_shards_that_exchanges_in_every_chunk(group: Any, monkeypatch: Any) -> None:
    parallel, sent = group
    monkeypatch.setattr(split, "exchanges_per_chunk", lambda *_: True)
    call = head("bfloat16") | {"class_weights": there(WHOLE), "label_smoothing": 0.1}
    with as_on_a_gpu():
        out = chunked_nll(**call, **CHUNKS, vocab_parallel=parallel)
        backward([out.loss], call)
    assert len(sent) == 2 * 3 + 1  # chunks of 8, 8 and 3 tokens


@pytest.mark.parametrize("name", PER_TOKEN)
def test_log_probabilities_over_shards(group: Any, name: str) -> None:
    parallel, sent = group
    call = head("bfloat16") | options(PER_TOKEN, name)
    with as_on_a_gpu():
        out = chunked_logprobs(**call, **CHUNKS, vocab_parallel=parallel)
        backward([out.logprobs], call)
    assert len(sent) == 3 + (name in CLASSES)


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("declared", [False, True])
def test_given_logits_over_shards(group: Any, declared: bool, name: str) -> None:
    """A15, with `shard=` and without."""
    parallel, sent = group
    call = {"logits": there(N, V, grad=True), "labels": there(N, dtype=INT)} | options(LOGITS, name)
    shard = VocabShard(0, V, WHOLE) if declared else None
    with as_on_a_gpu():
        out = vocab_parallel_logprobs(**call, vocab_parallel=parallel, shard=shard)
        backward([out.logprobs], call)
    assert len(sent) == 2


# --- windows and evaluations ---------------------------------------------------------------------


WINDOWS = (("precount", "keep"), ("precount", "drop"), ("postscale", "keep"))


@pytest.mark.parametrize(("mode", "nonfinite"), WINDOWS)
@pytest.mark.parametrize("labels_on", ["meta", "cpu"])
def test_a_window(mode: str, nonfinite: str, labels_on: str) -> None:
    """D8: statistics stay on the device until they are read; labels may be counted on the host."""
    model = nn.Linear(H, V, device="meta")
    norm = TokenNormalizer(model, mode=mode, nonfinite=nonfinite)
    batches = [(there(N, H), there(N, dtype=INT)) for _ in range(2)]
    labels = [torch.zeros(N, dtype=INT, device=labels_on) for _ in batches]
    labels = labels if mode == "precount" else None
    with as_on_a_gpu(), norm.window(labels) as window:
        for x, y in window.micro_batches(batches):
            out = chunked_nll(x, model.weight, y, bias=model.bias, reduction="sum")
            window.backward(out if nonfinite == "keep" else out.loss, float(N))
    assert window.stats.loss.is_meta


def test_an_evaluation() -> None:
    with as_on_a_gpu():
        evaluation = Evaluation()
        for _ in range(2):
            out = chunked_nll(there(N, H), there(V, H), there(N, dtype=INT), reduction="sum")
            evaluation = evaluation.add(out).add(out.loss, 37).add(loss_sum=1.5, num_tokens=37)
        assert evaluation.mean_loss().is_meta


def test_next_token_labels() -> None:
    with as_on_a_gpu():
        for packing in (
            {},
            {"segment_ids": there(2, N, dtype=INT)},
            {"position_ids": there(2, N, dtype=INT)},
        ):
            next_token_labels(there(2, N, dtype=INT), shift=2, **packing)
        offsets = torch.tensor([0, 5, N])
        for cu_seqlens in (offsets, offsets.to("meta", non_blocking=True)):
            assert next_token_labels(there(1, N, dtype=INT), cu_seqlens=cu_seqlens).is_meta


# --- what is refused here ------------------------------------------------------------------------

WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "tensor": lambda x: torch.tensor(1.0, device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1.0], device=x.device),
    "to the device": lambda x: torch.zeros(3).to(x.device),
    "into the device": lambda x: x.copy_(torch.zeros(3)),
    "to the host": lambda x: torch.zeros(3).copy_(x, non_blocking=True),
    "index of the host": lambda x: x[torch.tensor([0, 1])],
    "where of the host": lambda x: torch.where(x > 0, x, torch.tensor(1.0)),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_seen(name: str) -> None:
    x = torch.empty(3, device="meta")
    with pytest.raises((Waits, RuntimeError, NotImplementedError)), as_on_a_gpu():
        WAITING[name](x)


def test_what_does_not_wait_is_let_through() -> None:
    x, index = torch.empty(3, device="meta"), there(2, dtype=INT)
    with as_on_a_gpu() as seen:
        torch.zeros(3).to(x.device, non_blocking=True)
        x.copy_(torch.zeros(3), non_blocking=True)
        x[index].add_(torch.tensor(1.0))
        torch.full((), 1.0, device=x.device)
    assert seen.copies == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_wait_within_an_operator_is_seen(monkeypatch: Any, where: str) -> None:
    name = {"forward": "stats", "backward": "dz"}[where]
    function = getattr(Eager, name)

    def waiting(self: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        rows.z_BV.amax().item()
        return function(self, rows, *args, **kwargs)

    monkeypatch.setattr(Eager, name, waiting)
    call = head("bfloat16")
    with as_on_a_gpu():
        if where == "backward":
            logprobs = chunked_logprobs(**call).logprobs
            with pytest.raises(Waits, match="_local_scalar_dense"):
                backward([logprobs], call)
        else:
            with pytest.raises(Waits, match="_local_scalar_dense"):
                chunked_logprobs(**call)
