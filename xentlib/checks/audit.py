"""What `audit` is given: a step of the right arguments that returns what can be compared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from xentlib.checks.validators import Refusals, check_choice, check_flag, check_rule
from xentlib.math.divergence import KINDS
from xentlib.options import DIVERGENCES, RULES

PROTOCOL = {
    "step": "step(head, micro_batches)",
    "loss": "loss(hidden, weight, labels), then the bias if there is one,",
    "logprobs": "logprobs(hidden, weight, labels), then the bias if there is one,",
}
MOST = 4  # of a tuple, in a message
TWO = ("step(head, micro_batches)", "loss(hidden, weight, labels[, bias])")
STEP_TYPES = Refusals(
    TypeError,
    of_class="`step` must be a function; got the class {name}. Pass a function that makes an "
    "instance, or an instance's method.",
    function="`step` must be a function; got {kind}. Pass the function itself, not what it "
    "returns.",
    of_instance="`step` must be a function or the method of an instance; got ({required}), a "
    "method of the class. Make an instance, and name its method.",
    arguments="`step` must take the arguments of {asked}; got ({required}). Wrap it in a function "
    "that does{way}.",
)
STEPS = Refusals(
    ValueError,
    one_rank="`ranks` must be 1 with kind='{kind}', a function of one batch; got {ranks!r}. Leave "
    "it out, or write a step.",
    ranks="`ranks` must be a number of devices, 1 to {devices} here; got {ranks!r}. On a CPU "
    "XLA_FLAGS=--xla_force_host_platform_device_count=N makes N, before JAX is imported.",
    # In PyTorch, under torchrun.
    group="`torch.distributed` must be initialised before `audit` under torchrun; got {world} "
    "processes and no group. Call `torch.distributed.init_process_group('gloo')` first, or use "
    "`xentlib audit`, which does.",
    same_group="`step` must leave the group of processes as it is; got one of {ranks} ranks after "
    "it and of {before} before. Start the group before the audit.",
    unchanged="`step` must return before the optimizer's step; got a head whose weight has "
    "changed, and no gradient. Leave out `optimizer.step()` and `zero_grad()`.",
    gradients="`step` must return (loss, gradients of the head), or in PyTorch leave them in "
    "`head.weight.grad`; got {came} and no such gradient. In PyTorch call backward on the head "
    "that is passed, and no `zero_grad` after it; in JAX return what `jax.value_and_grad` does.",
    gradient="`step` must return a gradient of `{name}` of shape {expected}; got {shape}. Gather "
    "it where a wrapper shards it, leave out the dimension of the devices, and return nothing "
    "else in its place: the loss is first, the head's gradients are second.",
    hiddens="`step` must return as its third result the gradients of the hidden states, one for "
    "each of {micro_batches} micro-batches; got {came}. Leave anything else out, such as metrics.",
    loss="`step` must return a loss that is one number, alone or first in a tuple; got {came}. "
    "Reduce it to the mean over the tokens that count; kind='logprobs' is for one number a token.",
    # Of a function, whose value is to have a graph, and which calls no backward.
    backward="`step` must leave the backward to the audit with kind='{kind}'; got a function that "
    "calls it. Leave out `backward()`.",
    graph="`step` must return an array that can be differentiated with kind='{kind}'; got {came}, "
    "which cannot. Return it without `detach()`, `item()` and `no_grad()`.",
    per_token="`step` must return log-probabilities, and entropies if it has them, of {tokens} "
    "tokens; got {came}. Return one number for each label, or (logprobs, entropy), by their order "
    "or by these names.",
)
DISTILLED = Refusals(
    ValueError,
    alone="`{name}` must be given with `divergence`, or left out; got {value!r} alone. Name the "
    "divergence that the step computes.",
    step="`divergence` must be that of a step, which gets `teacher_logits` in its micro-batches; "
    "got kind={kind!r}. Write a step(head, micro_batches).",
    beta="`beta` must be given with `divergence='jsd'`, and with nothing else; got {beta} with "
    "{divergence!r}. {way}",
    labels="`{name}` must be 0 with `divergence`, whose loss has no labels but for its mask; got "
    "{value!r}. Leave it out, and the labels' loss out of the step.",
)


def described(x: object) -> str:
    """What a step has returned, in a message."""
    if isinstance(x, Mapping):
        return f"a dict with {', '.join(repr(k) for k in x) or 'nothing in it'}"
    if isinstance(x, (tuple, list)):
        more = ", ..." if len(x) > MOST else ""
        return f"({', '.join(described(one) for one in x[:MOST])}{more})"
    if x is None or isinstance(x, (bool, int, float)):
        return repr(x)
    shape = getattr(x, "shape", None)
    if shape is None:
        return type(x).__name__
    return f"an array of shape {tuple(shape)}" if shape else "one number"


def check_step(step: object) -> None:
    if inspect.isclass(step):
        STEP_TYPES.refuse("of_class", name=step.__name__)
    STEP_TYPES.require("function", callable(step), kind=type(step).__name__)


def check_arguments(kind: str | None, names: Sequence[str], fits: bool) -> None:
    """`kind`: None where nobody has named one; `names`: of the arguments without a default."""
    required = ", ".join(names)
    STEP_TYPES.require("of_instance", [*names[:1]] != ["self"], required=required)
    asked = f"{PROTOCOL[kind]} with kind='{kind}'" if kind else " or of ".join(TWO)
    way = ", or name the other kind" if kind else ""
    STEP_TYPES.require("arguments", fits, asked=asked, required=required, way=way)


def check_ranks(ranks: object, devices: int, kind: str) -> None:
    STEPS.require("one_rank", kind == "step" or ranks == 1, kind=kind, ranks=ranks)
    number = isinstance(ranks, int) and not isinstance(ranks, bool) and 1 <= ranks <= devices
    STEPS.require("ranks", number, devices=devices, ranks=ranks)


def check_gradient(name: str, shape: tuple[int, ...], *expected: tuple[int, ...]) -> None:
    STEPS.require("gradient", shape in expected, name=name, expected=expected[0], shape=shape)


def check_hiddens(d_hiddens: object, micro_batches: int) -> None:
    there = isinstance(d_hiddens, (tuple, list)) or len(getattr(d_hiddens, "shape", ())) > 0
    if not there or len(d_hiddens) != micro_batches:  # type: ignore[arg-type]
        STEPS.refuse("hiddens", micro_batches=micro_batches, came=described(d_hiddens))


def check_loss(loss: object, size: int | None) -> None:
    """`size`: how many numbers it is, None of what is no number."""
    STEPS.require("loss", size == 1, came=described(loss))


def check_graph(kind: str, value: object, graph: bool) -> None:
    STEPS.require("graph", graph, kind=kind, came=described(value))


def check_distillation(options: Any, kind: str) -> None:
    """Options of a step that distils; of any other they are left out."""
    check_flag("temperature_squared", options.temperature_squared)
    divergence, beta = options.divergence, options.beta
    if divergence is None:
        for name, empty in (("beta", None), ("temperature_squared", False)):
            value = getattr(options, name)
            DISTILLED.require("alone", value is empty, name=name, value=value)
        return
    check_choice("divergence", divergence, DIVERGENCES)
    DISTILLED.require("step", kind == "step", kind=kind)
    takes_beta = KINDS[divergence].takes_beta
    if takes_beta and beta is not None:
        check_rule("beta", beta, RULES["beta"])
    else:
        way = "Pass 0.5 for the symmetric one." if beta is None else "Leave it out."
        fits = not takes_beta and beta is None
        DISTILLED.require("beta", fits, beta=beta, divergence=divergence, way=way)
    for name, value in options.of_loss.items():
        DISTILLED.require("labels", value == 0, name=name, value=value)
