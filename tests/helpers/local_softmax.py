"""Softmaxes that ranks take of their own columns, and of all: which calls refuse them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.refused import said_on_ranks
from xentlib.shards import VocabShard
from xentlib.torch import (
    TeacherLogits,
    chunked_divergence,
    chunked_nll,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)
from xentlib.torch.core import vocab

N, H, V = 21, 6, 50


def of_rank(rank: int, world: int, low: bool = False, reading: bool = True) -> Any:
    """What each call says on this rank, or where nothing is read whether its result is NaN."""
    if not reading:
        vocab.host_readable = lambda x: False
    torch.manual_seed(0)
    hidden, weight, other = torch.randn(N, H), torch.randn(V, H), torch.randn(N, V)
    labels, where = torch.randint(V, (N,)), (torch.arange(N) % 8 == 1) & (torch.arange(N) > 8)
    rows = slice(23 * rank, 23 if rank == 0 else V)
    over = VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)
    weight, z = weight[rows], (hidden @ weight.T)

    def cut(x: Tensor) -> Tensor:
        """Padding has anything, and tokens that do not count have."""
        x = torch.where(where[:, None], x, 3.0)[:, rows]
        return x.bfloat16() if low else x

    def calls(z: Tensor, q: Tensor, p: Tensor) -> dict[str, Any]:
        how: dict[str, Any] = {"vocab_parallel": over, "where": where}
        return {
            "divergence of logits": lambda: vocab_parallel_divergence(z, TeacherLogits(q), **how),
            "divergence of a head": lambda: chunked_divergence(
                hidden, weight, TeacherLogits(q), **how
            ),
            "logprobs": lambda: vocab_parallel_logprobs(z, labels, **how),
            "logprobs of probabilities": lambda: vocab_parallel_logprobs(z, p, **how),
            "nll of probabilities": lambda: chunked_nll(hidden, weight, p, **how),
        }

    log_z, log_q, p = z.log_softmax(1), other.log_softmax(1), other.softmax(1)
    right = calls(cut(z), cut(other), cut(p)), calls(cut(log_z), cut(log_q), cut(p))
    for call in [x for of in right for x in of.values()]:
        assert not numbers(call()).isnan().any()
    of_teacher = calls(cut(z), cut(other).log_softmax(1), cut(other).softmax(1))
    del of_teacher["logprobs"]
    of_student = calls(cut(z).log_softmax(1), cut(other), cut(p))
    only = ("divergence of logits", "logprobs", "logprobs of probabilities")
    wrong = {f"the teacher, {name}": call for name, call in of_teacher.items()}
    wrong |= {f"the student, {name}": of_student[name] for name in only}
    if reading:
        return said_on_ranks(wrong)
    return [bool(numbers(call())[where].isnan().all()) for call in wrong.values()]


def numbers(out: Any) -> Tensor:
    """Of each token, if there are such."""
    values: Tensor = out[0]
    return values.detach().expand(N)
