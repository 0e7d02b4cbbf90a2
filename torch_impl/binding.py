"""The one door from a public call to an operator: this rank's rows, checked and flat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.arguments import Arguments, LogitsArguments, Scalars
from xentlib.checks.call import LogitsProblem, NLLProblem, check_head, check_logits
from xentlib.checks.head import check_low_rank
from xentlib.checks.validators import plain_args
from xentlib.torch.array_spec import (
    array_spec,
    array_specs,
    as_tensor,
    autocast_dtype,
    is_dtensor,
    only_tensors,
    same_tokens,
)
from xentlib.torch.core.device import host_readable
from xentlib.torch.head.modules import replaced, split_lora
from xentlib.torch.operators import (
    HeadCall,
    RowLayout,
    not_differentiable,
    not_forward_mode,
    not_transformed,
)
from xentlib.torch.placement.logits import local_columns, local_logits
from xentlib.torch.placement.rows import local_head, replicated

# What a gradient is computed for; every other tensor is a constant.
LEAVES = ("hidden", "weight", "bias", "logits")


def bind(
    function: str,
    args: Arguments,
    local: RowLayout | None = None,
    caller: Any = None,
) -> tuple[Arguments, NLLProblem, HeadCall]:
    """A call of a head's function as this rank has it, its sizes, and what an operator takes.
    `local`: where the rows belong, if a wrapper has sharded the head and they stay there.
    `caller`: the arguments of a function whose numbers are more than those of `args`; they are
    read after the checks, whose messages say what is wrong with one."""
    args, low = split_lora(plain_args(args))
    if local is not None:  # it says who has the other rows
        args = replaced(args, vocab_parallel=None)
    of_mesh = (args.hidden, args.labels, args.weight, args.bias, *(low or ()))
    if args.vocab_parallel is not None or any(map(is_dtensor, of_mesh)):
        args, low, placed = local_head(args, low)
        local = local or placed
    local = local or RowLayout()
    hidden, weight, labels, bias = args.hidden, args.weight, args.labels, args.bias
    same_tokens(hidden, labels, args.where, args.token_weights, args.temperature)
    problem = check_head(
        array_specs(args),
        autocast_dtype=autocast_dtype(hidden),
        sharded=bool(local.group),
        # Shards meet once a chunk, and there must be as many on all ranks whatever their labels.
        labels_on_host=not local.group,
    )
    check_derivatives(function, args)
    if low is not None:
        not_forward_mode(function, low.a, low.b)
        not_transformed(function, low.a, low.b)
        spec: Any = array_specs(low)
        check_low_rank(spec, array_spec(hidden), problem)
    compute = getattr(torch, problem.compute_dtype)
    flat = hidden.reshape(-1, problem.hidden_size)
    call = HeadCall(
        hidden=flat,
        weight=weight,
        labels=labels.reshape(-1),
        bias=bias,
        where=tokens(args.where),
        logit_scale=as_tensor(args.logit_scale, 1.0, hidden, compute),
        temperature=tokens(as_tensor(args.temperature, 1.0, hidden, compute)),
        ignore_index=args.ignore_index,
        scalars=scalars_of(args, caller),
        gemm_dtype=getattr(torch, problem.gemm_dtype),
        compute_dtype=compute,
        chunk_bytes=args.max_chunk_bytes or 0,
        transposed=args.weight_layout == "HV",
        reduce_hidden=args.reduce_hidden_grad,
        rows=local,
        low_in=None if low is None else low.a,
        low_out=None if low is None else low.b,
        low_keep=None if low is None or low.keep is None else low.keep.reshape(flat.shape),
        low_scale=1.0 if low is None else float(low.scale),
        denominator_is_0=known_0(args.denominator, hidden),
    )
    return args, problem, call


def bind_logits(
    function: str, args: LogitsArguments, caller: Any = None
) -> tuple[LogitsArguments, LogitsProblem, HeadCall]:
    """The same of a function of given logits."""
    only_tensors(**args._asdict())
    args = plain_args(args)
    logits, parallel, shard = local_logits(args.logits, args.vocab_parallel, args.shard)
    labels = replicated("labels", args.labels)
    args = args._replace(logits=logits, labels=labels, vocab_parallel=parallel, shard=shard)
    same_tokens(logits, labels, args.where, args.temperature)
    whole = args.vocab_parallel is None
    problem = check_logits(array_specs(args), labels_on_host=whole)
    check_derivatives(function, args)
    compute = getattr(torch, problem.compute_dtype)
    columns = logits.reshape(problem.num_tokens, problem.columns)
    call = HeadCall(
        hidden=columns,
        weight=None,
        labels=labels.reshape(-1),
        bias=None,
        where=tokens(args.where),
        logit_scale=None,
        temperature=tokens(as_tensor(args.temperature, 1.0, logits, compute)),
        ignore_index=args.ignore_index,
        scalars=scalars_of(args, caller),
        gemm_dtype=compute,  # of no product
        compute_dtype=compute,
        chunk_bytes=args.max_chunk_bytes or 0,
        transposed=False,
        reduce_hidden=False,
        rows=local_columns(columns, parallel, shard),
    )
    return args, problem, call


def scalars_of(args: Any, caller: Any = None) -> Scalars:
    """The numbers of a call, those that `args` has not its caller's; what neither has is at its
    default."""
    numbers: dict[str, Any] = {}
    for name in Scalars._fields:
        value = getattr(args, name, getattr(caller, name, Scalars._field_defaults[name]))
        numbers[name] = None if value is None else float(value)
    return Scalars(**numbers)


def check_derivatives(function: str, args: Arguments | LogitsArguments) -> None:
    """Raise for derivatives that autograd would silently drop: tangents, and gradients of
    constants."""
    named: dict[str, Any] = args._asdict()
    not_forward_mode(function, *named.values())
    not_transformed(function, *named.values())
    not_differentiable(**{name: x for name, x in named.items() if name not in LEAVES})


def known_0(denominator: Any, hidden: Tensor) -> bool:
    """Whether the host knows a number to be 0, its own or in its memory, that goes to a device with
    `hidden`. What stays with it the operator reads, and a tracer's tensor has no number."""
    if host_readable(hidden) or denominator is None or torch.compiler.is_compiling():
        return False
    if isinstance(denominator, Tensor):
        return type(denominator) is Tensor and host_readable(denominator) and not denominator
    return bool(denominator == 0)


def tokens(x: Tensor | None) -> Tensor | None:
    """One number for each token, or one for all, in a row."""
    return None if x is None else x.reshape(-1)
