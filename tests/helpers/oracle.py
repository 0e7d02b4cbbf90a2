"""The oracle beside other ways to the same numbers: units, bounds, and full logits in PyTorch."""

from __future__ import annotations

from functools import partial

import numpy as np

from xentlib.contract import ROWS, U, tau
from xentlib.tools.harness.problems import Problem

# 4 ULP is row A2 at 24 bits. A value sums H products, V exponentials and N tokens; at most 16 of
# them here, each half an ULP of the largest.
VALUE_ULP = 8.0


def units(got, exact, bound) -> float:
    """tau in units of 2^-53."""
    return tau(got, exact, bound) * U / 2.0**-53


def tau_bound(row: str) -> float:
    return next(bound.value for bound in ROWS[row].bounds if bound.metric == "tau")


def torch_full_logits(p: Problem):
    """The head as users write it: full logits and `F.cross_entropy`, its reduction too where it has
    all that is asked for."""
    import torch

    o = p.options
    leaves = [
        torch.tensor(x, requires_grad=True) for x in (p.hidden, p.weight, p.bias) if x is not None
    ]
    hidden, weight, *bias = leaves
    weight = weight.T if o.get("weight_layout") == "HV" else weight
    z = o.get("logit_scale", 1.0) * sum(bias, hidden @ weight.T)
    if o.get("softcap") is not None:
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    z = z / torch.as_tensor(o.get("temperature", 1.0), dtype=z.dtype).reshape(-1, 1)
    labels = torch.tensor(np.where(p.valid, p.labels, -100), dtype=torch.int64)
    classes = None if p.class_weights is None else torch.tensor(p.class_weights).double()
    cross_entropy = partial(
        torch.nn.functional.cross_entropy, z, labels, classes, ignore_index=-100,
        label_smoothing=o.get("label_smoothing", 0.0),
    )  # fmt: skip
    if p.token_weights is None and not {"z_loss", "denominator"} & set(o):
        loss = cross_entropy(reduction=o.get("reduction", "mean"))
        loss.backward(torch.tensor(p.upstream, dtype=torch.float64))
        return loss.item(), [leaf.grad.numpy() for leaf in leaves]
    nll = cross_entropy(reduction="none")
    nll = nll + o.get("z_loss", 0.0) * torch.logsumexp(z, 1) ** 2
    valid = torch.tensor(p.valid)
    weights = torch.ones(len(valid)) if p.token_weights is None else torch.tensor(p.token_weights)
    weights = torch.where(valid, weights.double(), 0.0)
    counted = weights if classes is None else weights * classes[labels.clamp(min=0)]
    divisor = o.get("denominator", 1.0 if o.get("reduction") == "sum" else counted.sum())
    loss = (weights * nll).sum() / divisor
    loss.backward(torch.tensor(p.upstream, dtype=torch.float64))
    return loss.item(), [leaf.grad.numpy() for leaf in leaves]
