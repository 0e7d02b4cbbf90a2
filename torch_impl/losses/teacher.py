"""The teacher of a divergence, in PyTorch: its head or logits as an operator takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.arguments import Arguments, DivergenceArguments, Scalars
from xentlib.checks.call import NLLProblem
from xentlib.checks.divergence import (
    DIVERGING,
    check_common,
    check_no_probabilities,
    check_teacher_logits,
    check_teacher_tokens,
    check_vocabulary,
    check_whole,
    stated,
)
from xentlib.math.soft_labels import SOFT_LABELS, CrossEntropy
from xentlib.options import DIVERGENCES
from xentlib.teacher import TeacherHead, TeacherLogits
from xentlib.torch.array_spec import array_spec, as_tensor, is_dtensor, only_tensors
from xentlib.torch.binding import bind, tokens
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.device import device_info
from xentlib.torch.core.kernels import DIVERGENCES_IN_TRITON, Kernels, eager_kernels, kernels_for
from xentlib.torch.core.logits import ChunkedLogits
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.tokens import counted
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.head.modules import replaced, split_lora
from xentlib.torch.losses.pairs import IN_PLACE, HeadTeacher, LogitsTeacher, PairedLogits
from xentlib.torch.micro_batch import readable
from xentlib.torch.operators import HeadCall, not_differentiable
from xentlib.torch.placement.head import behind_shards, gather_head, place_head
from xentlib.torch.placement.logits import local_logits
from xentlib.torch.placement.rows import LocalHead, local_part

TEACHER = "the teacher of chunked_divergence"
KINDS = (*DIVERGENCES, SOFT_LABELS)
NO_SOFT_LABELS = "they have no labels that are class probabilities"
# What a teacher's head is called with as the student's is.
SHARED = ("labels", "where", "ignore_index", "compute_dtype", "max_chunk_bytes")


class TeacherHeadCall(NamedTuple):
    """Of a `HeadCall`, what its logits are computed from; per token flat. Not all of its numbers:
    PyTorch's operators take 64 arguments, and that of a divergence has 62."""

    hidden: Tensor  # [N, Ht]; or logits [N, C], without a weight
    weight: Tensor | None = None
    bias: Tensor | None = None
    logit_scale: Tensor | None = None
    temperature: Tensor | None = None
    softcap: float | None = None
    gemm_dtype: torch.dtype = torch.float32
    transposed: bool = False
    low_in: Tensor | None = None
    low_out: Tensor | None = None
    low_keep: Tensor | None = None
    low_scale: float = 1.0

    @classmethod
    def of(cls, call: HeadCall) -> TeacherHeadCall:
        fields = call._asdict() | {"softcap": call.scalars.softcap}
        return cls(**{name: fields[name] for name in cls._fields})


class TeacherCall(NamedTuple):
    """What an operator takes of a teacher."""

    head: TeacherHeadCall
    sparse: bool = False  # probabilities [N, K] of a few classes, in place of logits

    def per_token(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Numbers [K, N] that travel with the tokens."""
        return (self.head.hidden.T.to(dtype),) if self.sparse else ()

    def of_chunks(self, numbers: Sequence[Tensor]) -> TeacherCall:
        """With those of the tokens of the chunks."""
        return probabilities(numbers[0].T, sparse=True) if self.sparse else self

    @property
    def form(self) -> float:
        """A number for what it is: probabilities of a few classes, logits of all, or a head."""
        return 2.0 if self.head.weight is not None else 0.0 if self.sparse else 1.0

    def check_consistent(self, loop: HeadLoop, kind: str) -> None:
        """Over shards: the same probabilities, or temperature of its logits, on every rank; and
        columns that are no distribution of their own."""
        vocab, valid = loop.vocab, loop.tokens.valid
        if loop.gathered or not isinstance(vocab, ShardedVocab) or vocab.verified:
            return
        if self.sparse:
            vocab.consistency.probs(self.head.hidden, valid)
        elif self.head.weight is None:
            name, temperature = "temperature of `teacher`", self.head.temperature
            vocab.consistency.per_token(name, temperature, valid.shape[0])
            columns = self.head.hidden[:, : vocab.local_size]
            vocab.consistency.local_softmax(columns, valid, logits=kind != SOFT_LABELS)

    def as_head_call(self, student: HeadCall) -> HeadCall:
        """With the student's tokens."""
        fields = self.head._asdict()
        scalars = Scalars(softcap=fields.pop("softcap"))
        return student._replace(scalars=scalars, **fields)

    def first(self, classes: int) -> TeacherCall:
        """Its first classes."""
        head = self.head
        if head.weight is None:
            return TeacherCall(head._replace(hidden=head.hidden[:, :classes]))
        return TeacherCall(first_classes(head, classes))

    @property
    def classes(self) -> int:
        """On this rank."""
        weight = self.head.weight
        return self.head.hidden.shape[1] if weight is None else weight.shape[self.head.transposed]


def probabilities(probs: Tensor, *, sparse: bool = False) -> TeacherCall:
    """Labels [N, C] that are class probabilities; of a few classes [N, K]."""
    return TeacherCall(TeacherHeadCall(probs), sparse)


def first_rows(x: Any, count: int, transposed: bool = False) -> Any:
    return None if x is None else x[:, :count] if transposed else x[:count]


def first_classes(head: Any, count: int) -> Any:
    """Of a head: a `HeadCall`, or a teacher's part of one."""
    return head._replace(
        weight=first_rows(head.weight, count, head.transposed),
        bias=first_rows(head.bias, count),
        low_out=first_rows(head.low_out, count),
    )


def of_both(call: HeadCall, teacher: TeacherCall) -> tuple[HeadCall, TeacherCall]:
    """With the classes that both have."""
    check_whole(not call.rows.group)
    classes = call.columns, teacher.classes
    check_common(*classes, call.scalars.nll_weight)
    return first_classes(call, min(classes)), teacher.first(min(classes))


def paired_logits(
    loop: HeadLoop, teacher: TeacherCall, loss: Any
) -> Callable[[ChunkedLogits], PairedLogits]:
    """Of the student's logits those with the teacher's of the same tokens and classes beside them;
    of one block of classes after the other, where the head is read in blocks."""
    head, first = teacher.head, 0
    blocks: Iterator[ChunkedLogits] | None = None

    def paired(student: ChunkedLogits) -> PairedLogits:
        nonlocal blocks, first
        pairs = pairs_for(student.kernel_cls)
        on_cpu = device_info(loop.call.hidden).cpu_libraries
        if not student.kernel_cls.whole_chunks and (on_cpu or loss.kind != SOFT_LABELS):
            # On a CPU as many arrays of each are in the cache. On a GPU a divergence has up to 34
            # of a block; class probabilities have few, and a quarter would cost them 4 times the
            # launches: 269 ms for 109 of 8,192 tokens on an H200.
            student.block_rows = -(-student.block_rows // 4)
        if loss.kind == SOFT_LABELS:
            return soft_logits(loop, student, teacher, entropy=loss.entropy)
        kind = IN_PLACE[loss.kind](torch, torch.exp, loop.call.scalars.beta or 0.0)
        if head.weight is None:
            logits = head.hidden[:, first:] if first else head.hidden
            first += student.local_size
            return pairs(
                student, LogitsTeacher(logits, head.temperature, student), kind, loss.wanted
            )
        if blocks is None:
            blocks = teacher_blocks(loop, teacher, student)
        rows = next(blocks)
        rows.block_rows = student.block_rows
        return pairs(student, HeadTeacher(rows), kind, loss.wanted)

    return paired


def teacher_blocks(
    loop: HeadLoop, teacher: TeacherCall, student: ChunkedLogits
) -> Iterator[ChunkedLogits]:
    """Of a teacher's head, as those of the student."""
    teacher_loop = HeadLoop(
        teacher.as_head_call(loop.call),
        Terms(TEACHER),
        kernel_cls=student.kernel_cls,
        paired_with=student,
        in_blocks=student.shared is not None,  # of an adapter it is whole
    )
    teacher_loop.chunks_of.exchange()
    teacher_loop.check_consistent()
    return teacher_loop.blocks()


def pairs_for(kernel_cls: type[Kernels]) -> type[PairedLogits]:
    """Who computes on the blocks of these kernels."""
    if not kernel_cls.whole_chunks:
        return PairedLogits
    from xentlib.torch.triton.pairs import TritonPairs

    return TritonPairs


def kernels_of(call: HeadCall, loss: Any) -> type[Kernels]:
    """Triton's programs, where the device has them and they have this kind."""
    if loss.kind not in DIVERGENCES_IN_TRITON:
        return eager_kernels(call.hidden.device, NO_SOFT_LABELS)
    return kernels_for(call.hidden.device, call.compute_dtype, call.scalars)


def is_tempered(call: HeadCall) -> bool:
    """Whether a loss of the labels is of other logits than the divergence: of none tempered."""
    return bool(call.scalars.nll_weight) and call.temperature is not None


def soft_logits(
    loop: HeadLoop, logits: ChunkedLogits, labels: TeacherCall, *, entropy: bool
) -> PairedLogits:
    """Logits with the class probabilities of their tokens beside them."""
    from xentlib.torch.losses.soft_logits import FewClasses, SoftLogits

    kind = CrossEntropy(torch, torch.exp, ALGEBRA, loop.call.scalars, loop.vocab.size)
    rows = (FewClasses if labels.sparse else LogitsTeacher)(labels.head.hidden, None, logits)
    return SoftLogits(logits, rows, kind, entropy=entropy)


def teacher_call(
    args: DivergenceArguments,
    student: Arguments,
    call: HeadCall,
    problem: NLLProblem,
    opened: ExitStack,
) -> TeacherCall:
    """What an operator takes of the teacher of a student, whose head is gathered until `opened` is
    closed where a wrapper has sharded it."""
    teacher, compute = args.teacher, problem.compute_dtype
    columns = None if call.rows.group or args.vocab != "same" else problem.vocab_size
    if isinstance(teacher, TeacherLogits):
        DIVERGING.require("logits_stay", not call.rows.route, route=student.gather)
        return logits_teacher(teacher, args, call, problem, columns)
    assert isinstance(teacher, TeacherHead)
    teacher = stated(args, teacher)
    only_tensors(hidden=teacher.hidden)
    not_differentiable(hidden=teacher.hidden)
    leading = tuple(args.hidden.shape[:-1])
    check_teacher_tokens("hidden", array_spec(teacher.hidden), "hidden", leading)
    shared = dict(zip(SHARED, attrgetter(*SHARED)(args), strict=True))
    if compute == "float64":
        shared["compute_dtype"] = compute
    fields = teacher._asdict() | {"temperature": temperature_of(teacher, args.temperature)}
    if not call.rows.group or call.rows.route in ("hidden", "nodes"):  # not the caller's own rows
        shared |= {name: getattr(student, name) for name in ("tokens_parallel", "gather")}
        shared["vocab_parallel"] = args.vocab_parallel
        if args.vocab_parallel is not None and call.rows.route:
            DIVERGING.require("cut_alike", behind_shards(teacher.weight))
    with torch.no_grad():
        head, placement = place_head(Arguments(**fields, **shared), recompute=False)
        split = head.vocab_parallel is not shared.get("vocab_parallel")  # AutoTP says so itself
        DIVERGING.require("split", not split or student.vocab_parallel is not None)
        if isinstance(placement, LocalHead):
            head = replaced(head, weight=placement.weight, bias=placement.bias)
        elif placement is not None:
            plain, lora = split_lora(head)
            whole, bias = opened.enter_context(gather_head(plain.weight, plain.bias))
            weight: Any = whole if lora is None else replaced(lora, weight=whole)
            head = replaced(head, weight=weight, bias=bias)
        if student.vocab_parallel is not None:
            head = replaced(head, **local_shards(head))
        head = replaced(head, vocab_parallel=None, tokens_parallel=None, gather="head")
        _, problem, teacher_call = bind(TEACHER, head, call.rows if call.rows.group else None)
    DIVERGING.require("wider", problem.compute_dtype == compute, dtype=compute)
    if columns is not None:
        check_vocabulary(columns, problem.vocab_size)
    return TeacherCall(TeacherHeadCall.of(teacher_call))


def local_shards(head: Arguments) -> dict[str, Any]:
    """This rank's rows of a head that shards of a vocabulary are handed in for: of a DTensor its
    part. How many these are, ranks compare with each other."""
    axis = int(head.weight_layout == "HV")
    named = {"weight": (head.weight, axis), "bias": (head.bias, 0)}
    return {
        name: local_part(name, x, axis) if is_dtensor(x) else x for name, (x, axis) in named.items()
    }


def temperature_of(teacher: Any, students: Any) -> Any:
    return students if teacher.temperature is None else teacher.temperature


def logits_teacher(
    teacher: TeacherLogits[Tensor], args: Any, call: Any, problem: Any, columns: int | None
) -> TeacherCall:
    """Of precomputed logits beside a student's head or logits."""
    name = "hidden" if hasattr(args, "hidden") else "logits"
    only_tensors(logits=teacher.logits)
    not_differentiable(**teacher._asdict())
    logits, *_ = local_logits(teacher.logits, args.vocab_parallel, None)
    spec = TeacherLogits(array_spec(logits), array_spec(teacher.temperature))
    source = array_spec(getattr(args, name))
    check_teacher_logits(spec, name, source, columns, problem.compute_dtype)
    temperature = temperature_of(teacher, args.temperature)
    tempered = tokens(as_tensor(temperature, 1.0, logits, call.compute_dtype))
    flat = logits.reshape(problem.num_tokens, logits.shape[-1])
    if args.vocab_parallel is None and readable(flat) and readable(call.labels):
        valid = counted(call.labels, call.where, call.ignore_index)[0]
        check_no_probabilities(flat[valid.nonzero()[:8, 0]].detach().float())
    return TeacherCall(TeacherHeadCall(flat, temperature=tempered))


def labels_for(hidden: Tensor, labels: Tensor | None, where: Tensor | None) -> Tensor:
    """Of a call without any, a class for each token."""
    if labels is not None:
        return labels
    device = where.device if isinstance(where, Tensor) else hidden.device
    return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=device)
