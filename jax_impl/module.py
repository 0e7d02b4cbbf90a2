"""The head as a module, in Flax: a linear layer of NNX or Linen that takes labels.

Shapes: V vocabulary, H hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xentlib.arguments import Arguments
from xentlib.checks.head import check_head_options, check_kept_option, check_linear
from xentlib.checks.placement import PLACEMENTS
from xentlib.jax.api import chunked_logprobs, chunked_nll
from xentlib.jax.core.call import Placement
from xentlib.jax.losses.index import nll
from xentlib.jax.losses.logprobs import head_logprobs
from xentlib.jax.placement import axes_of, place
from xentlib.logprobs import LogprobOutput
from xentlib.nll import NLLOutput
from xentlib.options import WeightLayout
from xentlib.shards import PaddedVocab

# Attributes of a layer that a head is made of: of `nnx.Embed` too, and of `nnx.Linear` alone.
SHARED = ("dtype", "param_dtype", "promote_dtype")
OF_LINEAR: tuple[str, ...] = ("in_features", "out_features", "use_bias")
OF_LINEAR += ("precision", "dot_general", "preferred_element_type")
LAYER = frozenset(inspect.signature(nnx.Linear.__init__).parameters)


def check_options(per_token: bool, options: Mapping[str, Any], *, kept: bool) -> None:
    """Refuse options that the head's function does not have, or that a module cannot keep."""
    function = chunked_logprobs if per_token else chunked_nll
    names = list(inspect.signature(function).parameters)[3:]
    fields = ("bias", "weight_layout", "vocab_parallel")
    check_head_options(options, [x for x in names if x not in fields])
    for name, value in options.items() if kept else ():
        check_kept_option(name, value)


def options_of(module: NLLHead | LinenNLLHead, options: dict[str, Any]) -> dict[str, Any]:
    """The module's, and those of a call with labels, which win."""
    merged = dict(module.options) | options
    check_options(module.per_token, merged, kept=False)
    return merged


def call_head(
    module: NLLHead | LinenNLLHead, args: Arguments, *specs: P
) -> NLLOutput[jax.Array] | LogprobOutput[jax.Array]:
    """The head's function, under a mesh with its arrays where `specs` of kernel and bias say."""
    where = placement(module, args, *specs)
    if where is None:
        args = args._replace(vocab_parallel=module.vocab_parallel)
    return head_logprobs(args, where) if module.per_token else nll(args, where)


def placement(
    module: NLLHead | LinenNLLHead, args: Arguments, kernel_spec: P, bias_spec: P
) -> Placement | None:
    """Of a call under a mesh that nobody but the module knows of."""
    tokens, parallel = module.tokens, module.vocab_parallel
    if tokens is None and parallel is None:
        return None
    spread = tokens if isinstance(tokens, P) else P(tokens)
    name = parallel.over if isinstance(parallel, PaddedVocab) else parallel
    named = [one for entry in (*spread, name) for one in axes_of(entry)]
    meshes = [jax.typeof(x).sharding.mesh for x in (args.weight, args.hidden)]
    mesh = next((x for x in meshes if not x.empty), jax.sharding.get_abstract_mesh())
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    axes, unknown = tuple(types), [one for one in named if one not in types]
    PLACEMENTS.require("mesh_axes", not unknown, axes=axes, unknown=(*unknown, None)[0])
    leading = args.hidden.ndim - 1
    PLACEMENTS.require("dimensions", len(spread) <= leading, of=leading, spread=len(spread))
    if any(types[one] is AxisType.Manual for one in named):  # inside the user's own `shard_map`
        return None
    args = args._replace(vocab_parallel=parallel)
    return place(mesh, spread, kernel_spec, bias_spec, args, recompute=module.per_token)


class NLLHead(nnx.Linear):
    """An `nnx.Linear` [H, V] that takes labels and returns a loss. Flax NNX.

        model.lm_head = NLLHead.from_linear(model.lm_head)
        loss = model.lm_head(hidden, labels).loss        # chunked_nll
        logits = model.lm_head(hidden)                   # nnx.Linear

    Parameters and their names are `nnx.Linear`'s: state, checkpoints, tied embeddings and sharding
    annotations (`nnx.with_partitioning`, `kernel_metadata`) stay what they are.

    On a mesh with Explicit axes nothing needs to be said. On one with Auto axes `tokens` names
    those that tokens are spread over; the head is then gathered once before the loop over chunks as
    its annotation shards it, its gradient reduce-scattered once (a head that is cut along its width
    and read in blocks of classes block by block), and the vocabulary stays spread over axes that
    spread no tokens. With `gather="hidden"` the hidden states are gathered instead, chunk by chunk,
    and the rows of a vocabulary that is spread over the tokens' axes stay where they are. Without
    `tokens` and `vocab_parallel` the compiler has every device compute every chunk.

    Args:
        in_features: H.
        out_features: V.
        rngs: as in `nnx.Linear`.
        per_token: with labels, return the `LogprobOutput` of `chunked_logprobs` instead.
        tokens: mesh axes that spread the first dimension of `hidden`, or a PartitionSpec of its
            leading dimensions; None on one device, and inside a `shard_map` of one's own.
        vocab_parallel: mesh axis that the vocabulary is spread over, `PaddedVocab` of one where the
            last classes are padding; None to read it from the kernel's annotation.
        arguments: others of `nnx.Linear`, and keyword arguments of `chunked_nll` or
            `chunked_logprobs` for every call. Those of a call win. Arrays cannot be kept.

    Raises:
        TypeError: an option that the function does not have, or that cannot be kept.
        ValueError: axes that are not of the arrays' mesh.

    Numerics: those of the function, on what `promote_dtype` makes of hidden, kernel and bias, as in
    `nnx.Linear`: `dtype` is what the products take. Gradients of shards are summed in float32 and
    rounded once. Logits are `nnx.Linear`'s; no option applies to them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        per_token: bool = False,
        tokens: Any = None,
        vocab_parallel: Any = None,
        **arguments: Any,
    ) -> None:
        options = {name: x for name, x in arguments.items() if name not in LAYER}
        check_options(per_token, options, kept=True)
        layer = {name: x for name, x in arguments.items() if name in LAYER}
        super().__init__(in_features, out_features, rngs=rngs, **layer)
        self.per_token = per_token
        self.tokens = nnx.static(tokens)
        self.vocab_parallel = nnx.static(vocab_parallel)
        self.options = nnx.static(tuple(options.items()))
        self.weight_layout: WeightLayout = "HV"

    @classmethod
    def from_linear(cls, linear: Any, **arguments: Any) -> NLLHead:
        """The same head: its parameters are shared, so that tied ones stay tied.

        Args:
            linear: an `nnx.Linear`, or the `nnx.Embed` that is the head too.
            arguments: `per_token`, `tokens`, `vocab_parallel` and options, as above.

        Raises:
            TypeError: a layer that computes something else. For LoRA, merge it, or call
                `chunked_nll` with a `LowRankHead` of its arrays.
        """
        kind, tied = type(linear), isinstance(linear, nnx.Embed)
        if tied:
            plain = (kind.__call__, kind.attend) == (nnx.Embed.__call__, nnx.Embed.attend)
        else:
            calls = (nnx.Linear.__call__, NLLHead.__call__)
            plain = isinstance(linear, nnx.Linear) and kind.__call__ in calls
        check_linear(kind.__name__, plain, False)
        names = SHARED if tied else (*SHARED, *OF_LINEAR)
        layer = {name: getattr(linear, name) for name in names}
        if tied:
            layer |= {"in_features": linear.features, "out_features": linear.num_embeddings}
            layer["use_bias"] = False
        if isinstance(linear, NLLHead):
            fields = ("per_token", "tokens", "vocab_parallel")
            options = {name: getattr(linear, name) for name in fields} | dict(linear.options)
            arguments = options | arguments
        head: NLLHead = nnx.eval_shape(lambda: cls(rngs=nnx.Rngs(0), **layer, **arguments))
        head.kernel = linear.embedding if tied else linear.kernel
        head.weight_layout = "VH" if tied else getattr(linear, "weight_layout", "HV")
        head.bias = None if tied else linear.bias
        return head

    def __call__(  # type: ignore[override]
        self, inputs: Any, labels: Any = None, out_sharding: Any = None, **options: Any
    ) -> jax.Array | NLLOutput[jax.Array] | LogprobOutput[jax.Array]:
        """Logits [..., V] of `inputs` [..., H]; with `labels` [...] the function's result."""
        layout = self.weight_layout
        if labels is None:
            check_head_options(options, [])
            if layout == "HV":
                logits: jax.Array = super().__call__(inputs, out_sharding=out_sharding)
                return logits
            query, weight = self.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
            return jnp.dot(query, weight.T, out_sharding=out_sharding)
        options = options_of(self, options)
        arrays = (inputs, self.kernel[...], None if self.bias is None else self.bias[...])
        hidden, kernel, bias = self.promote_dtype(arrays, dtype=self.dtype)
        args = Arguments(hidden, kernel, labels, bias=bias, weight_layout=layout, **options)
        return call_head(self, args, annotated(self.kernel), annotated(self.bias))


def annotated(param: Any) -> P:
    """Where an NNX parameter's annotation says that it is."""
    if param is None or not param.get_metadata().get("out_sharding"):
        return P()
    spec: P = nnx.get_partition_spec(param).get_value()
    return spec


class LinenNLLHead(nn.Dense):
    """An `nn.Dense` [H, V] that takes labels and returns a loss. Flax Linen.

        head = LinenNLLHead(features=V, options={"z_loss": 1e-4})
        variables = head.init(key, hidden)                        # nn.Dense's
        loss = head.apply(variables, hidden, labels).loss         # chunked_nll
        logits = head.apply(variables, hidden)                    # nn.Dense

    Parameters, their names and their initial values are `nn.Dense`'s, with labels or without. For
    meshes see `NLLHead`; the shards are where `kernel_init` and `bias_init` say (annotated by
    `nn.with_partitioning` or `nn.with_logical_partitioning`), whether or not the parameters that
    come in are boxed.

    Attributes:
        per_token: with labels, return the `LogprobOutput` of `chunked_logprobs` instead.
        tokens: as in `NLLHead`.
        vocab_parallel: as in `NLLHead`.
        options: keyword arguments of `chunked_nll` or `chunked_logprobs` for every call. Those of a
            call win.

    Raises:
        TypeError: an option that the function does not have, or that cannot be kept.
        ValueError: axes that are not of the arrays' mesh.

    Numerics: those of the function, on what `promote_dtype` makes of hidden, kernel and bias, as in
    `nn.Dense`. Logits are `nn.Dense`'s; no option applies to them.
    """

    per_token: bool = False
    tokens: Any = None
    vocab_parallel: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self.per_token, self.options, kept=True)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, inputs: Any, labels: Any = None, **options: Any
    ) -> jax.Array | NLLOutput[jax.Array] | LogprobOutput[jax.Array]:
        """Logits [..., V] of `inputs` [..., H]; with `labels` [...] the function's result."""
        if labels is None:
            check_head_options(options, [])
            logits: jax.Array = super().__call__(inputs)
            return logits
        options = options_of(self, options)
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)
        hidden, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        kernel_spec = boxed(self.kernel_init, shape, self.param_dtype)
        bias_spec = boxed(self.bias_init, shape[1:], self.param_dtype)
        args = Arguments(hidden, kernel, labels, bias=bias, weight_layout="HV", **options)
        return call_head(self, args, kernel_spec, bias_spec)


def boxed(init: Any, shape: tuple[int, ...], dtype: Any) -> P:
    """Where an initialiser's annotation says that its parameter is."""
    box = jax.eval_shape(lambda key: init(key, shape, dtype), jax.random.key(0))
    if not isinstance(box, nn.Partitioned):
        return P()
    if isinstance(box, nn.LogicallyPartitioned):
        return logical_to_mesh_axes(box.names, box.rules) or P()
    return box.get_partition_spec()
