"""What a step of PyTorch returns, as numbers that `tools.audit` holds against the oracle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentlib.checks.audit import STEPS, check_graph
from xentlib.tools.audit import step_adapters as adapters
from xentlib.tools.audit.diagnose import judge, oracle_of
from xentlib.tools.audit.hypotheses import Numbers
from xentlib.tools.audit.oracle import Oracle
from xentlib.tools.audit.problem import Array, Options, Problem
from xentlib.tools.audit.report import Report
from xentlib.tools.audit.step_adapters import Step

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
            "segment_ids" and "position_ids", [B, L] each; with `divergence` "teacher_logits",
            [B, L, V]. Use those that your trainer has.
        kind: "step"; "loss", a function of (hidden [N, H], weight [V, H], labels [N]) that returns
            a mean; "logprobs", one that returns a log-probability for each label, or (logprobs,
            entropy). None: "step" for two arguments, "loss" for three.
        options: what the step applies, fields of `xentlib.tools.audit.Options`: bias, softcap,
            logit_scale, temperature, label_smoothing, z_loss, documents; of a step that distils
            divergence, beta, temperature_squared.

    Raises:
        TypeError: no function, or one of other arguments.
        ValueError: an unknown kind or option, or a result that cannot be compared.

    Numerics: float32 inputs; right is what holds rho / u of row A6 against the oracle.
    """
    declared = Options.of(options)
    kind = adapters.kind_of(step, kind, declared)
    if kind != "step":
        oracle, numbers, changed = _of_function(step, kind, declared)
        return judge(
            "torch", oracle, numbers, changed, lambda: _of_function(step, kind, declared)[1]
        )
    ranks = _ranks()
    processes = os.environ.get("WORLD_SIZE")
    STEPS.require("group", ranks or int(processes or 1) <= 1, world=processes)
    world = max(ranks, 1)
    oracle = oracle_of(kind, declared, world)
    rank = dist.get_rank() if world > 1 else 0
    numbers, changed = _of_step(step, oracle.problem, rank)
    after = _ranks()
    STEPS.require("same_group", max(after, 1) == world, ranks=after, before=ranks)

    def run(problem: Problem) -> Numbers:
        return _stacked(_of_step(step, problem, rank)[0], world)

    rerun = (lambda: run(oracle.problem)) if world == 1 else None
    changed = changed if world == 1 else []
    return judge("torch", oracle, _stacked(numbers, world), changed, rerun, run)


def _stacked(numbers: Numbers, world: int) -> Numbers:
    """Of all ranks."""
    of_ranks: list[Any] = [numbers] * world
    if world > 1:
        dist.all_gather_object(of_ranks, numbers)
    return adapters.stacked(of_ranks)


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
    arrays = [problem.micro_batch(rank, m) for m in range(problem.micro_batches)]
    batches = [{name: torch.tensor(x) for name, x in batch.items()} for batch in arrays]
    hiddens = [batch["hidden"].requires_grad_() for batch in batches]
    # The step may put other tensors into its own dicts.
    result = adapters.returned(step(head, [{**batch} for batch in batches]), problem)
    if result.d_weight is None:
        d_bias = None
        if problem.bias is not None:
            d_bias = torch.zeros(vocab) if head.bias.grad is None else head.bias.grad
        d_hiddens = [x.grad for x in hiddens]
        result = result._replace(d_weight=head.weight.grad, d_bias=d_bias, d_hiddens=d_hiddens)
    weight = _numpy(head.weight)
    name = "the head's weight"
    changed = _changed([{name: weight}, *batches], [{name: problem.weight}, *arrays])
    return adapters.numbers(problem, result, _numpy, weight), changed


def _of_function(function: Step, kind: str, declared: Options) -> tuple[Oracle, Numbers, list[str]]:
    problem = oracle_of(kind, declared).problem
    hidden = problem.hidden.reshape(-1, problem.weight.shape[1])
    arrays = {"hidden": hidden, "weight": problem.weight, "labels": problem.targets.reshape(-1)}
    leaves: dict[str, Any] = {name: torch.tensor(x) for name, x in arrays.items()}
    leaves["bias"] = None if problem.bias is None else torch.tensor(problem.bias)
    differentiated = [leaves[name] for name in ("hidden", "weight", "bias")]
    for leaf in differentiated:
        if leaf is not None:
            leaf.requires_grad_()
    result = adapters.call(function, leaves, declared)
    STEPS.require("backward", all(x.grad is None for x in differentiated[:2]), kind=kind)
    values = adapters.of_function(kind, result, problem.targets.size, Tensor)
    check_graph(kind, values[0], values[0].requires_grad)
    oracle, upstream = adapters.upstream_of(kind, declared, values)
    pairs = [(x, g) for x, g in zip(values, upstream) if x.requires_grad]
    torch.autograd.backward(
        [x for x, _ in pairs],
        [torch.tensor(g, dtype=x.dtype).reshape(x.shape) for x, g in pairs],
    )
    gradients = (
        None if x is None else np.zeros(x.shape) if x.grad is None else _numpy(x.grad)
        for x in differentiated
    )
    numbers = adapters.numbers_of_function(oracle.problem, [_numpy(x) for x in values], *gradients)
    return oracle, numbers, _changed([leaves], [arrays])


def _changed(now: list[dict[str, Any]], before: list[dict[str, Array]]) -> list[str]:
    """Names of what a step was given and has written to."""
    pairs = [(name, one[name], x) for one, then in zip(now, before) for name, x in then.items()]
    return [*dict.fromkeys(name for name, x, then in pairs if not np.array_equal(_numpy(x), then))]


def _numpy(x: Any) -> Array:
    if not isinstance(x, Tensor):
        return np.asarray(x)
    x = x.detach()
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
    array: Array = x.to("cpu", torch.float64, copy=True).numpy()
    return array
