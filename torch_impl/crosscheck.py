"""Every k steps of a run in PyTorch, a step's loss and head gradient computed a second time.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from xentlib.arguments import SCALARS
from xentlib.checks.crosscheck import check_step_number
from xentlib.interop import to_numpy
from xentlib.nll import OUTPUTS
from xentlib.tools.crosscheck import CheckedCall, CrossCheckError, Schedule
from xentlib.tools.harness.problems import Problem
from xentlib.torch.array_spec import dtype_name
from xentlib.torch.hooks import LOSS_HOOKS

__all__ = ["CrossCheck"]


class CrossCheck(Schedule):
    """Hold every k-th step's loss and head gradient to a second computation. PyTorch.

        check = CrossCheck(every=100)
        for batch in data:
            with check.step():
                loss = chunked_nll(model(batch), head, labels).loss
                loss.backward()
            optimizer.step()

    In a checked step the arguments of each call of `chunked_nll` (also that of `NLLHead`, of a
    patched model of transformers, and of the trainers' integrations), its loss, and in the backward
    its gradients of hidden states, head and bias, are copied to the host. When the block ends they
    are held to the float64 oracle, or to JAX on the same numbers. The other steps are not
    touched: nothing is copied, and no device is waited for. No number of any step changes.

    What is measured is logged by `logging.getLogger("xentlib.crosscheck")` and kept in `results`;
    where a row of the contract is exceeded, `CrossCheckWarning` says which. The first step is
    checked, so that a loop whose calls cannot be seen says so at once. On several ranks each checks
    its own calls, and all in the same steps.

    Args:
        every: k; steps 0, k, 2 k and so on are checked.
        against: "oracle", float64 in NumPy, or "other", the JAX backend.
        tokens: so many valid tokens of each call are drawn, and their log-probabilities and d
            hidden are compared; d weight and d bias, which are sums over all tokens, are not. The
            loss is then compared with the sum of the call's own log-probabilities (with label
            smoothing not at all). None compares everything. For the oracle alone.
        exceeded: "warn", or "raise" a `CrossCheckError`.
        seed: of the draw of tokens.

    Attributes:
        results: one `CheckedStep` for each checked step.

    Raises:
        ValueError: an argument that cannot be used.
        ImportError: JAX is not installed, with `against="other"`.
        CrossCheckError: in a checked step no call was seen, or no backward of any, or a call over
            vocabulary shards or of a head with a low-rank part; a row was exceeded, with
            `exceeded="raise"`.

    Numerics: float32 gradients are held to tau of rows A5 and A6, 16-bit ones to the largest ULP of
    A7 and A16, counts to A0, and against JAX all to A9 and A19. The loss is held to the ULP of A2
    and A8, of the sum of its terms and of what the roundings of the logits move it. Under autocast
    the oracle is given the operands rounded as the products take them.
    """

    backend, counterpart = "torch", "jax"

    def start(self) -> None:
        self.next, self.first = 0, True
        self.asked = False  # for a step that has not been entered
        self.entered = False
        self.close()

    def step(self, number: int | None = None) -> AbstractContextManager[CrossCheck]:
        """Around a step: the forward and the backward of all its micro-batches, the optimizer's
        step too if you like.

        Args:
            number: of the step; by default the blocks are counted, from 0.
        """
        if self.asked:
            raise CrossCheckError(
                "`step` must be entered; got a call of `check.step()` alone before this one, which "
                "checked nothing. Write `with check.step():` around forward and backward."
            )
        self.asked = True
        return self.around(number)

    @contextmanager
    def around(self, number: int | None) -> Iterator[CrossCheck]:
        self.asked = False
        if self.entered:
            raise CrossCheckError(
                "`step` must be left before it is entered again; got a block inside of a block of "
                "the same check. Leave one out, or make two checks."
            )
        number, self.entered = self.begin(number), True
        try:
            yield self
        except BaseException:
            self.close()
            raise
        finally:
            self.entered = False
        self.end(number)

    # For callbacks, whose step has no block

    def begin(self, number: int | None = None) -> int:
        """The beginning of a step; its number."""
        self.close()
        number = self.next if number is None else check_step_number(number)
        self.next = number + 1
        # Also of a run that is resumed the first one.
        if self.due(number) or self.first:
            self.first = False
            LOSS_HOOKS.append(self)
        return number

    def end(self, number: int) -> None:
        """The end of a step: if it is a checked one, it is compared."""
        if self not in LOSS_HOOKS:
            return
        taken, graph = self.taken, self.graph
        self.close()
        if not taken:
            raise CrossCheckError(
                f"a checked step must call `chunked_nll` where it can be seen; got none in step "
                f"{number}. Put the forward and the backward into the block, `patch` a model of "
                f"transformers, and leave the head out of what `torch.compile` traces; "
                f"`chunked_logprobs`, which TRL's trainers call, is not looked at."
            )
        if graph and all(x.gradients is None for x in taken):
            raise CrossCheckError(
                f"a checked step must have its backward inside of the block; got no backward of "
                f"any of {len(taken)} calls of `chunked_nll` in step {number}. Put "
                f"`loss.backward()` into it; a loss that has no backward, of an evaluation, is "
                f"made under `torch.no_grad()`."
            )
        self.finish(number, taken)

    def close(self) -> None:
        """Nothing is looked at any more; what was is forgotten."""
        self.taken: list[CheckedCall] = []
        self.graph = False  # whether a backward of any can come
        self.heads: list[tuple[Any, Any, Any]] = []  # weakly, what tells a change, and copies
        if self in LOSS_HOOKS:
            LOSS_HOOKS.remove(self)

    # What `chunked_nll` tells

    def forward(self, call: Any, loss: Any, output: tuple[Tensor, ...]) -> CheckedCall:
        if call.rows.group:
            raise CrossCheckError(
                "a checked call must have the whole vocabulary; got one with `vocab_parallel`, of "
                "which a rank has a part. Check a run without it, or `xentlib parity`."
            )
        if call.low_in is not None:
            raise CrossCheckError(
                "a checked call must have a head of one weight; got a `LowRankHead`, or a layer of "
                "PEFT with an adapter. Check a run with the adapter merged."
            )
        labels, where = host(call.labels), host(call.where)
        rows = self.chosen(labels, where, call.ignore_index)
        options = {
            "ignore_index": call.ignore_index,
            **{name: getattr(call.scalars, name) for name in SCALARS["chunked_nll"]},
            "reduction": "mean" if loss.mean else "sum",
            "weight_layout": "HV" if call.transposed else "VH",
            "denominator": host(loss.denominator),
            "logit_scale": number_of(call.logit_scale),
            "temperature": number_of(call.temperature),
        }
        if call.compute_dtype == torch.float64:
            options["compute_dtype"] = "float64"
        problem = Problem(
            cut(call.hidden, rows),
            self.weight_of(call.weight),
            labels,
            host(call.bias),
            where,
            host(loss.token_weights),
            host(loss.class_weights),
            options,
        )
        named = dict(zip(OUTPUTS, output[4:9], strict=True))
        values = map(host, (*output[:2], named["logprobs"], named["lse"]))
        self.taken.append(CheckedCall.of(problem, dtype_name(call.gemm_dtype), rows, *values))
        self.graph = self.graph or output[0].requires_grad
        return self.taken[-1]

    def backward(
        self, taken: CheckedCall, upstream: Tensor, gradients: dict[str, Tensor | None]
    ) -> None:
        if taken.gradients is None:  # or it is a graph that is walked again
            taken.receive(upstream, gradients, cut)

    def weight_of(self, weight: Tensor) -> Any:
        """One copy of a head for all the calls of a step, until it is written to: its version
        does not count what is written to `weight.data`, as some optimizers do, so its sum is asked
        too."""
        now = weight._version, float(weight.detach().sum(dtype=torch.float64))
        for other, then, copy in self.heads:
            if other() is weight and then == now:
                return copy
        self.heads.append((ref(weight), now, host(weight)))
        return self.heads[-1][-1]


def host(x: Tensor | None) -> Any:
    """A copy in NumPy, or None. Of a clone: memory that NumPy has seen cannot be freed by FSDP2."""
    return None if x is None else to_numpy(x.detach().to("cpu", copy=True))


def number_of(x: Tensor | None) -> Any:
    """A factor of the logits, one or one for each token."""
    number = host(x)
    return 1.0 if number is None else number.reshape(()) if number.size == 1 else number


def cut(x: Tensor, rows: Any) -> Any:
    """A copy of some rows, which are taken on the tensor's own device, or of all."""
    return host(x if rows is None else x[torch.from_numpy(np.asarray(rows)).to(x.device)])
