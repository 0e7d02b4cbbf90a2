"""The mean loss of an evaluation in JAX: a pytree of two arrays, summed over devices at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.checks.placement import PLACEMENTS
from xentlib.checks.window import WINDOWS, check_one_loss
from xentlib.jax.accumulate import two_sum
from xentlib.jax.core.vocab import vary, varying
from xentlib.jax.micro_batch import check_name, loss_and_count
from xentlib.jax.placement import axes_of
from xentlib.results import is_loss_output

ZEROS = np.zeros(2, np.float32)
ZEROS.flags.writeable = False


class Evaluation(NamedTuple):
    """The mean loss a token of any number of batches, on any number of ranks. No gradients.

        evaluation = Evaluation()
        for batch in batches:                                       # none at all, on some ranks
            out = chunked_nll(hidden_of(batch), head, batch["labels"], reduction="sum")
            evaluation = evaluation.add(out)
        loss = evaluation.mean_loss()                               # on every rank
        perplexity = exp(loss)

    `add(loss=None, num_tokens=None, *, loss_sum=None, loss_mean=None)` returns the evaluation with
    one more batch. `loss` is an `NLLOutput` of `reduction="sum"`, which has its count and says
    whether it was divided. One number, [] float32 or float64, may be either: pass `loss_sum`, the
    sum over valid tokens, or `loss_mean`, their mean, with `num_tokens`, their number or their
    weight. It communicates nothing. In PyTorch it adds in place too, and `out.loss` of a sum says
    by itself what it is.

    `mean_loss(data_parallel=None)` is the mean over all batches of all ranks, [], the same on each,
    NaN where there is no token at all. One collective, which every rank enters. `data_parallel`
    says over whom: in PyTorch a ProcessGroup or a one-dimensional DeviceMesh, None for all ranks of
    `torch.distributed`, if it is initialised; in JAX names of mesh axes inside `shard_map`, None
    for all of them. Ranks that hold copies of others' tokens may take part, if each is there as
    often.

    The loss is averaged as it is: where a call has `z_loss` or `label_smoothing` their terms are in
    it, and exp of the mean is no perplexity. Evaluate with a call that has neither.

    It needs no model and no wrapper. Where a forward gathers parameters (FSDP2, ZeRO-3) every rank
    has to run as many: give those that have done a batch whose labels are all ignored.

    In JAX it is a pytree of two arrays, for `jit`, for a host loop, or as the carry of a scan; a
    carry inside `shard_map(check_vma=True)` begins as `jax.lax.pcast(Evaluation(), axis,
    to="varying")`.

    Raises:
        ValueError: a loss that `chunked_nll` has divided, or that is not one number; one without
            its count, or of which nobody says whether it is a sum; an output in which its mean was
            put in place of its sum, where both can be read; a count that its loss cannot
            have, where reading costs nothing. Whether `loss_sum` of other code is a sum cannot be
            checked.
        TypeError: a loss or a count of fewer than 32 bits.

    Numerics: sums in float64 in PyTorch; in JAX in float32 with what each addition has lost beside
    it, so that the error does not grow with the number of batches. NaN and inf show.
    """

    sums: Any = ZEROS  # [2] of losses and of tokens
    lost: Any = ZEROS  # [2] what adding them up has rounded away

    def add(
        self,
        loss: Any = None,
        num_tokens: Any = None,
        *,
        loss_sum: Any = None,
        loss_mean: Any = None,
    ) -> Evaluation:
        named = {"loss": loss, "loss_sum": loss_sum, "loss_mean": loss_mean}
        name = check_one_loss([name for name, x in named.items() if x is not None])
        mean, value = name == "loss_mean", named[name]
        loss, num_tokens = loss_and_count(value, num_tokens, mean=mean)
        WINDOWS.require("named", name != "loss" or is_loss_output(value))
        check_name(value, mean)
        if mean:  # of no token it may be NaN
            count = jnp.asarray(num_tokens).astype(jnp.float32)
            loss = jnp.where(count == 0, 0.0, jnp.asarray(loss).astype(jnp.float32) * count)
        pair = jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in (loss, num_tokens)])
        sums, lost = two_sum(self.sums, pair)
        return Evaluation(sums, self.lost + lost)

    def mean_loss(self, data_parallel: Any = None) -> jax.Array:
        packed: jax.Array = jnp.stack([jnp.asarray(x) for x in self])
        axes = axes_of(data_parallel)
        if data_parallel is None:
            axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        else:
            try:
                lax.axis_size(axes)
            except (NameError, TypeError, ValueError):
                PLACEMENTS.refuse("axis", argument="data_parallel", name=data_parallel)
        if axes:
            packed = lax.psum(vary(packed, varying(lax.axis_index(axes))), axes)
        loss, num_tokens = packed.sum(0)
        mean: jax.Array = loss / num_tokens
        return mean
