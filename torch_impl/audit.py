"""What a step of PyTorch returns, as numbers that `tools.audit` holds against the oracle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentlib.checks.audit import check_backward, check_group
from xentlib.tools.audit.diagnose import judge, oracle_of
from xentlib.tools.audit.hypotheses import Numbers, Oracle
from xentlib.tools.audit.problem import Array, Options, Problem
from xentlib.tools.audit.report import Report
from xentlib.tools.audit.step_adapters import (
    Step,
    arguments,
    kind_of,
    numbers,
    of_function,
    returned,
    stacked,
)

__all__ = ["audit"]


def audit(step: Step, *, kind: str | None = None, **options: Any) -> Report:
    """Hold a step against the float64 oracle, and name what is wrong with it.

        def step(head, micro_batches):              # nn.Linear; a list of dicts of tensors
            ...                                     # backward, no optimizer step
            return loss                             # of all micro-batches and ranks, or None

        report = audit(step)
        assert report.passed, report

    The gradients are read from `head.weight.grad`, or returned: `(loss, d_weight)`, `(loss,
    {"weight": ..., "bias": ...})`. The head may be wrapped inside (DDP, `fully_shard`). Where
    `torch.distributed` is initialised every rank calls this, has micro-batches of its own, and gets
    the same report.

    Args:
        step: the function. Each micro-batch has "hidden" [B, L, H], "input_ids", "labels" (not
            shifted, -100 where masked), "targets" (shifted), "loss_mask", "attention_mask",
            "segment_ids" and "position_ids", [B, L] each. Use those that your trainer has.
        kind: "step"; "loss", a function of (hidden [N, H], weight [V, H], labels [N]) that returns
            a mean; "logprobs", one that returns a log-probability for each label, or (logprobs,
            entropy). None: "step" for two arguments, "loss" for three.
        options: what the step applies, fields of `xentlib.tools.audit.Options`: bias, softcap,
            logit_scale, temperature, label_smoothing, z_loss, documents.

    Raises:
        TypeError: no function, or one of other arguments.
        ValueError: an unknown kind or option, or a result that cannot be compared.

    Numerics: float32 inputs; right is what holds rho / u of row A9 against the oracle.
    """
    declared = Options.of(options)
    kind = kind_of(step, kind, declared)
    if kind != "step":
        oracle, numbers_of_it, changed = _of_function(step, kind, declared)
        again = lambda: _of_function(step, kind, declared)[1]  # noqa: E731
        return judge("torch", oracle, numbers_of_it, changed, again)
    there = _ranks()
    check_group(os.environ.get("WORLD_SIZE"), there)
    world = max(there, 1)
    oracle = oracle_of(kind, declared, world)
    rank = dist.get_rank() if world > 1 else 0
    mine, changed = _of_step(step, oracle.problem, rank)
    check_group(None, _ranks(), there)
    if world == 1:
        alone = lambda: stacked([_of_step(step, oracle.problem, rank)[0]])  # noqa: E731
        return judge("torch", oracle, stacked([mine]), changed, alone)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    return judge("torch", oracle, stacked(every))


def _ranks() -> int:
    """Of the group that there is; 0 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _of_step(step: Step, problem: Problem, rank: int) -> tuple[Numbers, list[str]]:
    """What came, and the names of what was given and is not the same any more."""
    vocab, width = problem.weight.shape
    head = nn.Linear(width, vocab, bias=problem.bias is not None)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(problem.weight))
        if problem.bias is not None:
            head.bias.copy_(torch.tensor(problem.bias))
    batches = []
    for m in range(problem.micro_batches):
        batch = {name: torch.tensor(x) for name, x in problem.micro_batch(rank, m).items()}
        batch["hidden"].requires_grad_()
        batches.append(batch)
    hiddens, given = [batch["hidden"] for batch in batches], [{**batch} for batch in batches]
    result = returned(step(head, batches))
    if result.d_weight is None:
        bias = None if problem.bias is None else head.bias
        d_bias = None if bias is None else torch.zeros(vocab) if bias.grad is None else bias.grad
        result = result._replace(
            d_weight=head.weight.grad, d_bias=d_bias, d_hiddens=[x.grad for x in hiddens]
        )
    after = _numpy(head.weight)
    changed = [] if np.array_equal(after, problem.weight) else ["the head's weight"]
    for m, batch in enumerate(given):
        before = problem.micro_batch(rank, m)
        changed += [x for x in before if not np.array_equal(_numpy(batch[x]), before[x])]
    return numbers(problem, result, _numpy, after), [*dict.fromkeys(changed)]


def _of_function(function: Step, kind: str, declared: Options) -> tuple[Oracle, Numbers, list[str]]:
    problem = oracle_of(kind, declared).problem
    width = problem.weight.shape[1]
    hidden = torch.tensor(problem.hidden.reshape(-1, width), requires_grad=True)
    weight = torch.tensor(problem.weight, requires_grad=True)
    bias = None
    if problem.bias is not None:
        bias = torch.tensor(problem.bias, requires_grad=True)
    labels = torch.tensor(problem.targets.reshape(-1))
    leaves = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    positional, named = arguments(function, leaves, declared)
    result = function(*positional, **named)
    called = any(x.grad is not None for x in (hidden, weight))
    check_backward(kind, result, True, called)
    returned_values = of_function(kind, result, declared, labels.numel(), Tensor)
    check_backward(kind, returned_values.values[0], returned_values.values[0].requires_grad)
    oracle = oracle_of(kind, returned_values.options)
    problem = oracle.problem
    given: tuple[Any, ...] = (np.float32(problem.upstream),)
    if kind == "logprobs":
        given = (problem.d_logprobs, problem.d_entropy)
    there = [(x, g) for x, g in zip(returned_values.values, given) if x.requires_grad]
    torch.autograd.backward(
        [x for x, _ in there],
        [torch.tensor(g, dtype=x.dtype).reshape(x.shape) for x, g in there],
    )
    scale = 1.0 if kind == "logprobs" else problem.upstream

    def gradient(x: Tensor) -> Array:
        return np.zeros(x.shape) if x.grad is None else _numpy(x.grad) / scale

    values = np.stack([_numpy(x).reshape(-1) for x in returned_values.values])
    got = Numbers(
        values[None] if kind == "logprobs" else values[0],
        gradient(weight)[None],
        None if bias is None else gradient(bias)[None],
        gradient(hidden).reshape(problem.hidden.shape),
    )
    held: list[tuple[str, Tensor, Array]] = [("hidden", hidden, problem.hidden)]
    held += [("weight", weight, problem.weight), ("labels", labels, problem.targets)]
    changed = [x for x, now, then in held if not np.array_equal(_numpy(now).ravel(), then.ravel())]
    return oracle, got, changed


def _numpy(x: Any) -> Array:
    if not isinstance(x, Tensor):
        return np.asarray(x)
    x = x.detach()
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
    array: Array = x.to("cpu", torch.float64, copy=True).numpy()
    return array
