"""Runs a file of examples/ with other sizes, with or without all logits; keeps a gradient.

    [torchrun ...] tests/helpers/recipe.py NAME [--full-logits] [--gather ROUTE] [--keep FILE]
        [--together RANKS] [--vocab V] [--length L] [--steps N]

The example is run as it stands, but for the numbers in its line `VOCAB, LENGTH, ... = ...`.
`--full-logits` puts functions of all logits in place of xentlib's, `--gather` has its heads stay
sharded. `--together RANKS` makes one
batch of the micro-batches of so many ranks. `--keep` writes the first rank's gradient of the first
step.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, **numbers: int) -> dict[str, Any]:
    """The names that an example has at its end. `BATCH` is a factor, the others are values."""
    path = EXAMPLES / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    line = next(x for x in tree.body if isinstance(x, ast.Assign) and "VOCAB" in ast.dump(x))
    (names,), values = line.targets, line.value
    assert isinstance(names, ast.Tuple)
    assert isinstance(values, ast.Tuple)
    before = {x.id: y for x, y in zip(names.elts, values.elts) if isinstance(x, ast.Name)}
    if numbers.get("BATCH") and "ACCUMULATE" in before:
        rows = [ast.literal_eval(before[x]) for x in ("BATCH", "ACCUMULATE")]
        numbers |= {"BATCH": numbers["BATCH"] * rows[0] * rows[1], "ACCUMULATE": 1}
    else:
        numbers.pop("BATCH", None)
    for name_of, value in before.items():
        if name_of in numbers:
            values.elts[list(before).index(name_of)] = ast.copy_location(
                ast.Constant(numbers[name_of]), value
            )
    found: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(tree, str(path), "exec"), found)
    return found


# --- with all logits ------------------------------------------------------------------------------


def torch_with_all_logits(name: str) -> None:
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn import functional as F

    import xentlib.torch as package
    from xentlib.torch.integrations import torchtitan

    def nll(
        hidden: Any, head: Any, labels: Any, *, reduction: str = "mean", denominator: Any = None
    ) -> Any:
        logits, n = head(hidden).flatten(0, -2), (labels != -100).sum()
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        by = n if reduction == "mean" else None
        by = by if denominator is None else denominator
        loss = total if by is None else total / by
        return package.NLLOutput(loss, n, n, torch.zeros(()), denominator=by)

    class Head(torch.nn.Linear):
        @classmethod
        def from_linear(cls, linear: Any) -> Any:
            linear.__class__ = cls
            return linear

        def forward(self, hidden: Any, labels: Any, denominator: Any) -> Any:
            return nll(hidden, super().forward, labels, denominator=denominator)

    class Loss:
        def set_lm_head(self, head: Any) -> None:
            self.head = head

        def __call__(self, hidden: Any, labels: Any, total: Any) -> Any:
            logits = self.head(hidden).flatten(0, 1)
            if torch.distributed.get_world_size() > 1:  # its columns on this rank
                mesh = self.head.weight.device_mesh["tp"]
                logits = DTensor.from_local(logits, mesh, [Shard(-1)])
                loss_parallel().__enter__()
            return F.cross_entropy(logits, labels.flatten(), reduction="sum") / total, {}

    package.chunked_nll, package.NLLHead = nll, Head  # type: ignore[misc, assignment]
    torchtitan.HeadLoss = Loss  # type: ignore[misc, assignment]
    if name == "trainer":
        from xentlib.torch.integrations import transformers

        transformers.patch = lambda model: model  # type: ignore[assignment]
    if name == "trl_sft":
        from xentlib.torch.integrations import trl

        trl.use = contextlib.nullcontext  # type: ignore[assignment]


def jax_with_all_logits() -> None:
    import jax
    import jax.numpy as jnp
    import optax  # type: ignore[import-untyped]
    from flax import linen, nnx

    import xentlib.jax as package
    from xentlib.jax.integrations import maxtext

    def sums(logits: Any, labels: Any) -> Any:
        valid = labels != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(valid, labels, 0)
        )
        n = valid.sum()
        return package.NLLOutput(jnp.where(valid, losses, 0.0).sum(), n, n, jnp.zeros(()))

    def nll(hidden: Any, head: Any, labels: Any, *, reduction: str) -> Any:
        return sums(head.attend(hidden), labels)

    class LinenNLLHead(linen.Dense):  # parameters are drawn by its name
        tokens: Any = None

        @linen.compact
        def __call__(self, x: Any, labels: Any, reduction: str) -> Any:  # type: ignore[override]
            return sums(super().__call__(x), labels)

    class NLLHead(nnx.Linear):
        @classmethod
        def from_linear(cls, linear: Any, tokens: Any) -> Any:
            del tokens
            linear.__class__ = cls
            return linear

        def __call__(self, x: Any, labels: Any) -> Any:  # type: ignore[override]
            out = sums(super().__call__(x), labels)
            return out._replace(loss=out.loss / out.num_tokens)

    def tiling(model: Any, hidden: Any, data: Any, config: Any, is_train: bool) -> Any:
        logits = model.decoder.decoder_norm(hidden) @ model.decoder.logits_dense.kernel[...]
        z = config.z_loss_multiplier * jax.nn.logsumexp(logits, -1) ** 2
        segments = data["targets_segmentation"] != 0
        nll_sum = sums(logits, jnp.where(segments, data["targets"], -100)).loss
        return nll_sum + (z * segments).sum(), (z * segments).sum()

    package.chunked_nll, package.NLLHead = nll, NLLHead  # type: ignore[misc, assignment]
    package.LinenNLLHead = LinenNLLHead  # type: ignore[misc, assignment]
    maxtext.vocab_tiling_nnx_loss = tiling  # type: ignore[assignment]


def torch_by(gather: str) -> None:
    """The heads of an example stay sharded."""
    import xentlib.torch as package

    made = package.NLLHead.from_linear
    package.chunked_nll = partial(package.chunked_nll, gather=gather)  # type: ignore[misc]
    package.NLLHead.from_linear = partial(made, gather=gather)  # type: ignore[method-assign]


# --- the first step -------------------------------------------------------------------------------


def torch_gradient(name: str, **numbers: int) -> Any:
    """Of the first step, flat; read after it, as Lightning runs the backward inside of the step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    kept: list[Any] = []
    if name == "lightning_module":  # which shuffles the rows of several ranks
        sampler = torch.utils.data.DistributedSampler
        sampler.__iter__ = lambda s: iter(range(s.rank, len(s.dataset), s.num_replicas))

    def keep(parameters: Any, gradient_of: Any) -> None:
        if not kept:
            whole = [gradient_of(p) for p in parameters]
            whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in whole]
            kept.append(torch.cat([g.detach().flatten() for g in whole]).numpy().copy())

    if name == "zero3":
        import deepspeed
        from deepspeed.utils import safe_get_full_grad

        step = deepspeed.DeepSpeedEngine.step

        def kept_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            keep(self.module.parameters(), safe_get_full_grad)
            return step(self, *args, **kwargs)

        deepspeed.DeepSpeedEngine.step = kept_step
    else:
        register_optimizer_step_post_hook(
            lambda optimizer, *_: keep(
                (p for group in optimizer.param_groups for p in group["params"]), lambda p: p.grad
            )
        )
    run(name, **numbers)
    return kept[0]


def jax_gradient(name: str, **numbers: int) -> Any:
    """The change of the parameters in a first step of SGD, flat."""
    import optax
    from flax import nnx
    from jax.flatten_util import ravel_pytree

    def parameters(found: dict[str, Any]) -> Any:
        if "state" in found:
            return ravel_pytree(found["state"].params)[0]
        return ravel_pytree(nnx.state(found["model"], nnx.Param))[0]

    optax.adamw = lambda rate: optax.sgd(1.0)
    before, after = (parameters(run(name, **{**numbers, "STEPS": k})) for k in (0, 1))
    return np.asarray(after, np.float64) - np.asarray(before, np.float64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--gather")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--together", type=int)
    for size in ("vocab", "length", "steps"):
        parser.add_argument(f"--{size}", type=int)
    options = parser.parse_args()
    sizes = {"VOCAB": options.vocab, "LENGTH": options.length, "STEPS": options.steps}
    numbers = {k: n for k, n in {**sizes, "BATCH": options.together}.items() if n is not None}
    of_jax = "from xentlib.jax" in (EXAMPLES / f"{options.name}.py").read_text(encoding="utf-8")
    if options.full_logits:
        jax_with_all_logits() if of_jax else torch_with_all_logits(options.name)
    if options.gather:
        torch_by(options.gather)
    if options.keep is None:
        run(options.name, **numbers)
        return
    gradient = (jax_gradient if of_jax else torch_gradient)(options.name, **numbers)
    if os.environ.get("RANK", "0") == "0":
        np.save(options.keep, gradient)
    if "RANK" in os.environ:
        # Of two groups that were made one after the other gloo's threads may outlive Python: one of
        # six runs on a busy machine then ended by `std::terminate`, after all was written.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    # This folder's modules are named like packages.
    sys.path[:] = [x for x in sys.path if Path(x).resolve() != Path(__file__).resolve().parent]
    main()
