"""Every k steps of a run in PyTorch, a step's loss and head gradient computed a second time.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xentlib.arguments import SCALARS
from xentlib.checks.crosscheck import check_step_number
from xentlib.contract import ROW_OF
from xentlib.interop import to_numpy
from xentlib.nll import OUTPUTS
from xentlib.tools.crosscheck import CheckedCall, CrossCheckError, Schedule
from xentlib.tools.harness.problems import Problem
from xentlib.tools.recompute.call import Kit, LowRank, Returned
from xentlib.torch.array_spec import dtype_name
from xentlib.torch.core.gemm import LOW, gemm_precision, mm, operand
from xentlib.torch.crosscheck_ranks import ranks_of
from xentlib.torch.hooks import EAGER, LOSS_HOOKS, Upstream
from xentlib.torch.operators import DIFFERENTIATED

__all__ = ["CrossCheck"]


class CrossCheck(Schedule):
    """Hold every k-th step's loss and head gradient to a second computation. PyTorch.

        check = CrossCheck(every=100)
        for batch in data:
            with check.step():
                loss = chunked_nll(model(batch), head, labels).loss
                loss.backward()
            optimizer.step()

    In a checked step each call of `chunked_nll` (also that of `NLLHead`, of a patched model of
    transformers, and of the trainers' integrations) is computed a second time on its own device:
    every token and every row of d weight in float32, some of them in float64. Against JAX it is
    copied to the host. The other steps are not touched: nothing is computed, and no device is
    waited for. No number of any step changes.

    What is measured is logged by `logging.getLogger("xentlib.crosscheck")` and kept in `results`;
    where a row of the contract is exceeded, `CrossCheckWarning` says which. The first step is
    checked, so that a loop whose calls cannot be seen says so at once. On several ranks each checks
    its own calls, and all in the same steps.

    Args:
        every: k; steps 0, k, 2 k and so on are checked.
        against: "oracle", or "other", the JAX backend.
        tokens: so many valid tokens of each call are drawn, whose log-probabilities and d hidden
            are compared with float64, entry by entry; None for all. For the oracle alone.
        rows: so many rows of d weight and d bias are drawn, and as many of labels, which are
            compared with float64; None for all. For the oracle alone.
        exceeded: "warn", or "raise" a `CrossCheckError`.
        seed: of the draws.

    Attributes:
        results: one `CheckedStep` for each checked step.

    Raises:
        ValueError: an argument that cannot be used.
        ImportError: JAX is not installed, with `against="other"`.
        CrossCheckError: in a checked step no call was seen, or no backward of any; a call of a
            head that tensor parallelism and a route share; a row was exceeded, with
            `exceeded="raise"`.

    Numerics: float32 gradients are held to tau of rows A5 and A6, 16-bit ones to the largest ULP of
    A7 and A16, counts to A0, and against JAX all to A9 and A19. Of all rows four products with
    random signs are held to 8 times what rounding moves them by, its errors added in quadrature.
    The loss is held to the ULP of A2 and A8, as the sum of its terms. Under autocast the oracle is
    given the operands rounded as the products take them.
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
                f"transformers, and record no CUDA graph of the head; `chunked_logprobs`, which "
                f"TRL's trainers call, is not looked at."
            )
        if graph and not any(x.backward for x in taken):
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
        self.heads: list[tuple[Any, Any, Any]] = []  # where, what tells a change, and copies
        if self in LOSS_HOOKS:
            LOSS_HOOKS.remove(self)
            EAGER.clear()

    # What `chunked_nll` tells

    def forward(self, call: Any, loss: Any, output: tuple[Tensor, ...]) -> CheckedCall:
        options = {
            "ignore_index": call.ignore_index,
            **{name: getattr(call.scalars, name) for name in SCALARS["chunked_nll"]},
            "reduction": "mean" if loss.mean else "sum",
            "weight_layout": "HV" if call.transposed else "VH",
            "denominator": detached(loss.denominator),
            "logit_scale": number_of(call.logit_scale),
            "temperature": number_of(call.temperature),
        }
        if call.compute_dtype == torch.float64:
            options["compute_dtype"] = "float64"
        problem = Problem(
            detached(call.hidden),
            detached(call.weight),
            detached(call.labels),
            detached(call.bias),
            detached(call.where),
            detached(loss.token_weights),
            detached(loss.class_weights),
            options,
        )
        named = dict(zip(OUTPUTS, output[4:9], strict=True))
        values = (*output[:2], named["logprobs"], named["lse"])
        returned, gemm = Returned(*map(detached, values)), dtype_name(call.gemm_dtype)
        if self.against == "other":
            if call.rows.group or call.low_in is not None:
                raise CrossCheckError(
                    "`against` must be 'oracle' for a head whose rows are spread over ranks, or "
                    "with a low-rank part; got 'other', which is given one whole weight."
                )
            problem, returned = self.copied(problem), Returned(*map(host, returned))
        with torch.no_grad():
            low = None
            if call.low_in is not None:
                low = LowRank(call.low_in, call.low_out, call.low_keep, call.low_scale)
            parts = {"low": low, "ranks": ranks_of(call), "needs_head": any(loss.needs[1:])}
            parts = {} if self.against == "other" else parts
            taken = self.taken_of(TorchKit(call.hidden), problem, gemm, returned, **parts)
        self.taken.append(taken)
        self.graph = self.graph or output[0].requires_grad
        return taken

    def compiled(self, call: Any, loss: Any, output: tuple[Tensor, ...]) -> None:
        """Of a call inside of a compiled program, whose backward nobody can look at: its gradients
        as the operator makes them, for an upstream gradient of 1."""
        taken = self.forward(call, loss, output)
        sums = zip(DIFFERENTIATED, output[9:14], loss.needs, strict=True)
        gradients = {name: x if needed else None for name, x, needed in sums}
        if gradients["hidden"] is not None:
            gradients["hidden"] = torch.where(output[14][:, None], gradients["hidden"], 0.0)
        if any(loss.needs):
            self.backward(taken, (output[0].new_ones(()), None, 1.0), gradients)

    def backward(
        self, taken: CheckedCall, upstream: Upstream, gradients: dict[str, Tensor | None]
    ) -> None:
        if taken.backward:  # it is a graph that is walked again
            return
        gradients = dict(gradients)
        if self.against == "other":
            gradients = {name: host(x) for name, x in gradients.items()}
        with torch.no_grad():
            of_loss, of_all, scale = upstream
            head = of_loss if of_all is None else of_all
            taken.receive(float(of_loss), gradients, scale * float(head))

    def copied(self, problem: Problem) -> Problem:
        """On the host; one copy of a head for all the calls of a step, until it is written to: its
        version does not count what is written to `weight.data`, as some optimizers do, so its sum
        is asked too."""
        weight: Any = problem.weight
        now = weight._version, float(weight.sum(dtype=torch.float64))
        copies = [x for where, then, x in self.heads if where == weight.data_ptr() and then == now]
        if not copies:
            copies = [host(weight)]
            self.heads.append((weight.data_ptr(), now, copies[0]))
        names = ("hidden", "labels", "bias", "where", "token_weights", "class_weights")
        arrays = {name: host(getattr(problem, name)) for name in names}
        options = {k: host(x) if isinstance(x, Tensor) else x for k, x in problem.options.items()}
        return problem.changed(weight=copies[0], options=options, **arrays)


class TorchKit(Kit):
    """On a tensor's device."""

    xp = torch

    def __init__(self, like: Tensor) -> None:
        self.place, self.device = like.device, like.device.type

    def wide(self, x: Tensor) -> Tensor:
        return x.to(torch.float64)

    def single(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)

    def whole(self, x: Tensor) -> Tensor:
        return x.to(self.place, torch.int64)

    def operand(self, x: Tensor, dtype: str) -> Tensor:
        if dtype not in ROW_OF:
            return x
        return operand(x, getattr(torch, dtype), torch.float32)

    def product(self, w: Tensor, x: Tensor, minus: Tensor | None) -> Tensor:
        if x.dtype not in LOW:
            less = None if minus is None else -minus
            product: Tensor = torch.nn.functional.linear(w.float(), x.float(), less)
            return product
        z = torch.empty(len(w), len(x), dtype=torch.float32, device=self.place)
        mm(w, x.T, z)
        return z if minus is None else z.sub_(minus)

    def narrow(self, x: Tensor, y: Tensor) -> Tensor:
        """As y.T x.T MKL makes it in a third of the time."""
        return self.wide((self.single(y).T @ x.T).T)

    def norms(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=dtype)
        return norms.double()

    def add_at(self, x: Tensor, rows: Tensor, added: Tensor) -> None:
        x.index_add_(0, rows, added)

    def array(self, x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.place)

    def host(self, x: Any) -> Any:
        return host(x) if isinstance(x, Tensor) else np.asarray(x)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.place)

    def not_zero(self, x: Tensor) -> int:
        return int(((x != 0) | torch.signbit(x)).sum())

    @contextmanager
    def precise(self) -> Iterator[None]:
        with (
            torch.no_grad(),
            torch.autocast(self.device, enabled=False),
            gemm_precision(torch.float32, self.place),
        ):
            yield


def detached(x: Tensor | None) -> Any:
    return None if x is None else x.detach()


def host(x: Tensor | None) -> Any:
    """A copy in NumPy, or None. Of a clone: memory that NumPy has seen cannot be freed by FSDP2."""
    return None if x is None else to_numpy(x.detach().to("cpu", copy=True))


def number_of(x: Tensor | None) -> Any:
    """A factor of the logits, one on the host or one for each token."""
    if x is None:
        return 1.0
    return host(x).reshape(()) if x.numel() == 1 else x.detach()
