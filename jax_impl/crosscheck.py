"""Every k steps of a run in JAX, a step's loss and head gradient computed a second time.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.arguments import Arguments
from xentlib.checks.call import is_soft, resolve_dtypes
from xentlib.checks.crosscheck import check_traced_step
from xentlib.checks.validators import plain_args
from xentlib.head import LowRankHead
from xentlib.jax.array_spec import is_array
from xentlib.jax.crosscheck_devices import (
    HEAD,
    CallRecord,
    Devices,
    Leaves,
    Waiting,
    side_by_side,
)
from xentlib.jax.derivatives import primal_values, refused, wanted
from xentlib.jax.head import head_of, unwrapped_args
from xentlib.jax.losses.index import nll
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.options import RULES
from xentlib.tools.crosscheck import CheckedCall, CrossCheckError, Schedule
from xentlib.tools.harness.problems import Problem
from xentlib.tools.recompute.call import Kit, LowRank, Returned

__all__ = ["CrossCheck"]

ARRAYS = ("where", "token_weights", "class_weights")
KEPT = ("logprobs", "lse")  # of a call, beside what it is asked for


class CrossCheck(Schedule):
    """Hold every k-th step's loss and head gradient to a second computation. JAX.

        check = CrossCheck(every=100)

        @jax.jit
        def step(state, batch):
            def loss_of(params):
                hidden = model.apply(params, batch)
                return check.nll(state.step, hidden, params["head"], batch["labels"]).loss
            loss, grads = jax.value_and_grad(loss_of)(state.params)
            return state.apply_gradients(grads=grads), loss

        for batch in data:
            state, loss = step(state, batch)
        check.wait()

    `check.nll(step, ...)` is `chunked_nll(...)`, inside `jit` too. Where `step` is a multiple of
    `every` its backward hands the arguments, the loss and the gradients of hidden states, head
    and bias to the host, in a callback, where they are held to the float64 oracle, or to PyTorch
    on the same numbers. One program serves all steps, so a checked step computes what it would
    have computed otherwise; in the others the callback's branch is not taken, and nothing is
    copied. `hidden` is kept for the backward, 1 array more than `chunked_nll` keeps.

    Of a `vocab_parallel` call each device hands over its shard, and the host compares all of them
    together. A call without a gradient is compared too, in its loss.

    Args:
        every: k; steps 0, k, 2 k and so on are checked.
        against: "oracle", or "other", the PyTorch backend.
        tokens: as in `xentlib.torch.CrossCheck`, on the host.
        rows: as in `xentlib.torch.CrossCheck`, on the host.
        exceeded: "warn" in the callback, or "raise" a `CrossCheckError` in `wait`.
        seed: of the draws.

    Attributes:
        results: one `CheckedStep` for each call of a checked step.

    Raises:
        ValueError: an argument that cannot be used.
        ImportError: PyTorch is not installed, with `against="other"`.
        CrossCheckError: in `wait`, no call was seen, or not all of its shards; a row was exceeded,
            with `exceeded="raise"`.

    Numerics: rows as in `xentlib.torch.CrossCheck`.
    """

    backend, counterpart = "jax", "torch"

    def start(self) -> None:
        self.raised: list[Exception] = []
        self.waiting = Waiting()

    def nll(
        self, step: Any, hidden: Any, weight: Any, labels: Any, **options: Any
    ) -> NLLOutput[Any]:
        """`chunked_nll(hidden, weight, labels, **options)`, checked where its turn has come.

        Args:
            step: [] integer, the number of the step: a traced one inside `jit`, `state.step` of
                Flax's `TrainState` or `optimizer.step[...]` of NNX.
            hidden: as in `chunked_nll`, like all that follow.

        Raises:
            TypeError: a step that is no integer.
            ValueError: one that a trace would keep for ever.
            CrossCheckError: labels that are class probabilities; `vocab_parallel` with
                `tokens_parallel`; a sharded head, or one with a low-rank part, with
                `against="other"`.
        """
        check_traced_step(step, getattr(step, "dtype", None), getattr(step, "shape", ()))
        arguments = plain_args(Arguments(hidden, weight, labels, **options))
        call, low = head_of(unwrapped_args(arguments))
        if is_soft(call.labels, call.hidden):
            raise CrossCheckError(
                "a checked call must have labels that are classes; got class probabilities, which "
                "are not recomputed. Call `chunked_nll` there, or hold them by `xentlib parity`."
            )
        sharded = call.vocab_parallel is not None
        if self.against == "other" and (sharded or low is not None):
            raise CrossCheckError(
                "`against` must be 'oracle' for a head whose rows are spread over devices, or with "
                "a low-rank part; got 'other', which is given one whole weight."
            )
        # A compiler traces what is made anew, also where `hidden` is a constant of its own.
        jitted = in_jit(call.hidden) or isinstance(jnp.zeros(()), jax.core.Tracer)
        if jitted and (not isinstance(step, jax.core.Tracer) or is_constant(step)):
            raise ValueError(
                f"`step` must be an argument of the jitted function; got {step!r}, which the "
                f"compiled program would keep for ever. Pass `state.step`, say."
            )
        both: Any = (*dict.fromkeys((*call.outputs, *KEPT)),)
        fixed = call._replace(outputs=both)
        constants = {x: y for x in (*ARRAYS, *RULES) if is_array(y := getattr(call, x, None))}
        gone: dict[str, Any] = dict.fromkeys(("hidden", "weight", "bias", "labels", *constants))
        scale: Any = 1.0 if low is None else low.scale
        rest = {} if low is None else {"keep": low.keep, "scale": low.scale}
        constants |= {name: x for name, x in rest.items() if is_array(x)}
        apart = self.against == "other" or jax.process_count() > 1
        others = call.labels, constants
        devices = Devices(call, low, *others, waiting=self.waiting, apart=apart)
        of_low = (None, None) if low is None else (low.a, low.b)
        leaves = devices.typed(Leaves(call.hidden, call.weight, call.bias, *of_low))
        out = self.checked(fixed._replace(**gone), scale, devices)(
            jnp.asarray(step), leaves, call.labels, constants
        )
        not_asked: dict[str, Any] = {x: None for x in OUTPUTS if x not in call.outputs}
        output: NLLOutput[Any] = out._replace(**not_asked)
        return output

    def wait(self) -> None:
        """Wait for the callbacks of the steps so far; where nothing was checked, that is wrong."""
        jax.effects_barrier()
        if self.raised:
            raise self.raised.pop(0)
        self.waiting.missing()
        if not self.results:
            raise CrossCheckError(
                f"a checked step must call `check.nll`; got none, or no step whose number is a "
                f"multiple of {self.every}. Call it in place of `chunked_nll`, with the number "
                f"that the run counts."
            )

    def checked(self, fixed: Arguments, scale: Any, devices: Devices) -> Any:
        """The call as a function of its arrays, whose backward tells the host. `scale`: of a
        low-rank part, if it is no array."""

        def call(leaves: Leaves, labels: Any, constants: dict[str, Any]) -> NLLOutput[Any]:
            hidden, weight, bias, a, b = leaves
            rest = dict(constants)
            keep, by = rest.pop("keep", None), rest.pop("scale", scale)
            head = weight if a is None else LowRankHead(weight, a, b, by, keep)
            return nll(fixed._replace(hidden=hidden, weight=head, bias=bias, labels=labels, **rest))

        receive = partial(self.receive, fixed, scale, devices)

        def send(record: CallRecord) -> None:
            due = record.step % self.every == 0
            lax.cond(due, lambda: jax.debug.callback(receive, record), lambda: None)

        @jax.custom_vjp
        def function(
            step: Any, leaves: Leaves, labels: Any, constants: dict[str, Any]
        ) -> NLLOutput[Any]:
            out = call(leaves, labels, constants)
            nothing, one = Leaves(None, None), jnp.ones(())
            send(CallRecord(step, devices.index, leaves, labels, constants, out, one, nothing))
            return out

        def forward(
            step: Any, leaves: Any, labels: Any, constants: Any
        ) -> tuple[NLLOutput[Any], Any]:
            needs = wanted(constants, *leaves)
            step, leaves, labels, constants = primal_values((step, leaves, labels, constants))

            def of(needed: list[Any]) -> tuple[Any, NLLOutput[Any]]:
                left = iter(needed)
                values = [next(left) if n else x for n, x in zip(needs, leaves, strict=True)]
                out = call(Leaves(*values), labels, constants)
                return out.loss, out

            some = [x for n, x in zip(needs, leaves, strict=True) if n]
            _, pull, out = jax.vjp(of, some, has_aux=True)
            marks = Leaves(*(jnp.zeros(0) if n else None for n in needs))
            return out, (step, leaves, labels, constants, out, pull, marks)

        def backward(kept: Any, cotangent: NLLOutput[Any]) -> tuple[Any, ...]:
            step, leaves, labels, constants, out, pull, marks = kept
            upstream = refused(cotangent)
            if upstream is None:
                return (None, None, None, None)
            left = iter(pull(upstream)[0])
            gradients = Leaves(*(None if mark is None else next(left) for mark in marks))
            index = devices.index
            send(CallRecord(step, index, leaves, labels, constants, out, upstream, gradients))
            return (None, gradients, None, None)

        function.defvjp(forward, backward, symbolic_zeros=True)
        return function

    # On the host

    def receive(self, fixed: Arguments, scale: Any, devices: Devices, record: CallRecord) -> None:
        """What a callback brings. An exception here would end the program in other words."""
        try:
            records = devices.complete(jax.tree.map(np.array, record))
            if records:
                self.finish(int(record.step), self.checked_calls(fixed, scale, records))
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self.raised.append(error)

    def checked_calls(
        self, fixed: Arguments, scale: Any, records: list[CallRecord]
    ) -> list[CheckedCall]:
        """Of the tokens of each device, whose gradient of the head is one."""
        if len(records) == 1:
            return [self.checked_call_of(fixed, scale, records[0])]
        if len({float(x.upstream) for x in records}) > 1:  # a sum of other terms
            frozen: dict[str, Any] = dict.fromkeys(HEAD)
            records = [x._replace(gradients=x.gradients._replace(**frozen)) for x in records]
        among, of_rows = self.random

        def one(rank: int, ranks: Any) -> CheckedCall:
            seeded = np.random.default_rng(seeds[rank]), np.random.default_rng(seeds[-1])
            return self.checked_call_of(fixed, scale, records[rank], ranks=ranks, random=seeded)

        seeds = [*among.integers(2**32, size=len(records)), of_rows.integers(2**32)]
        return side_by_side(len(records), one)

    def checked_call_of(
        self, fixed: Arguments, scale: Any, record: CallRecord, **parts: Any
    ) -> CheckedCall:
        hidden, weight, bias, a, b = record.leaves
        labels = record.labels.reshape(-1)
        flat = {
            name: x.reshape(-1) if x.ndim and name not in ("class_weights", "keep") else x
            for name, x in record.constants.items()
        }
        arrays: dict[str, Any] = {name: flat.get(name) for name in ARRAYS}
        names = [name for name in RULES if name in Arguments._fields]
        options = {name: flat.get(name, getattr(fixed, name)) for name in names}
        same = ("ignore_index", "reduction", "weight_layout", "compute_dtype")
        options |= {name: getattr(fixed, name) for name in same}
        gemm = resolve_dtypes(hidden.dtype.name, weight.dtype.name, fixed.compute_dtype)[0]
        flat_NH = hidden.reshape(-1, hidden.shape[-1])
        problem = Problem(flat_NH, weight, labels, bias, options=options, **arrays)
        output = record.output
        of_tokens = (np.reshape(getattr(output, name), -1) for name in KEPT)
        returned = Returned(output.loss, output.num_tokens, *of_tokens)
        if a is not None:
            keep = flat.get("keep")
            keep = None if keep is None else keep.reshape(flat_NH.shape)
            parts["low"] = LowRank(a, b, keep, float(flat.get("scale", scale)))
        call = self.taken_of(Kit(), problem, gemm, returned, **parts)
        gradients = record.gradients._asdict()
        if gradients["hidden"] is not None:
            gradients["hidden"] = gradients["hidden"].reshape(flat_NH.shape)
        call.receive(float(record.upstream), gradients)
        return call


def in_jit(x: Any) -> bool:
    """Whether a compiler traces it; under `grad` alone there is a number."""
    while isinstance(x, jax.core.Tracer):
        if not hasattr(x, "primal"):
            return True
        x = x.primal
    return False


def is_constant(x: Any) -> bool:
    """Whether a trace has made a number by itself, out of literals; False where a JAX does not tell
    what a tracer is made of."""
    x = getattr(x, "primal", x)
    value, made_by = getattr(x, "val", None), getattr(x, "parent", None)
    if made_by is not None:
        inputs = getattr(made_by, "in_tracers", ())
        return bool(inputs) and all(map(is_constant, inputs))
    return type(value).__name__ == "Literal"
