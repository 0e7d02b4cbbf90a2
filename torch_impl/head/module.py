"""The head as a module, in PyTorch: a wrapper's hooks see it like any other.

Shapes: V vocabulary, H hidden width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from xentlib.checks.head import MODULES, check_head_options, check_linear
from xentlib.logprobs import LogprobOutput
from xentlib.nll import NLLOutput
from xentlib.torch.api import chunked_logprobs, chunked_nll
from xentlib.torch.array_spec import array_spec, is_dtensor
from xentlib.torch.head.lazy_logits import LazyLogits
from xentlib.torch.head.modules import parameter_of
from xentlib.torch.wrappers import kept_by_zero

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NLLHead(nn.Linear):
    """An `nn.Linear` [V, H] that takes labels and returns a loss.

        model.lm_head = NLLHead.from_linear(model.lm_head)
        loss = model.lm_head(hidden, labels).loss        # chunked_nll
        logits = model.lm_head(hidden)                   # nn.Linear

    Parameters and their names are `nn.Linear`'s, so that a `state_dict`, tied embeddings and
    initialisation stay what they are. As the call is the module's own forward, the hooks of any
    wrapper gather the head and reduce its gradient (DDP, FSDP1, FSDP2, DeepSpeed). Under a
    `fully_shard` of its own it is not gathered again for the backward of the loss, which needs none
    of its values, unless hooks of your own are on the module.

    Args:
        in_features: H.
        out_features: V.
        bias: as in `nn.Linear`.
        per_token: with labels, return the `LogprobOutput` of `chunked_logprobs` instead.
        device: of the parameters; "meta" too.
        dtype: of the parameters.
        options: keyword arguments of `chunked_nll` or `chunked_logprobs`, for every call. Those of
            a call win.

    Raises:
        TypeError: an option that the function does not have; `ColwiseParallel` and what else hands
            on the first argument alone.

    Numerics: those of the function; logits are `torch.nn.functional.linear`'s, to which no option
    applies. In a group of other modules FSDP2 with `cast_forward_inputs` (the default where
    `param_dtype` is set) casts every floating tensor that is passed in, so that a 16-bit
    `denominator` is refused: pass a number.
    """

    multiplies = True  # as a head that is passed on: its weight and bias, and nothing else

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        per_token: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._settle(per_token, options)

    def _settle(self, per_token: bool, options: dict[str, Any]) -> None:
        function = chunked_logprobs if per_token else chunked_nll
        names = list(inspect.signature(function).parameters)
        check_head_options(options, [x for x in names[3:] if x not in ("bias", "weight_layout")])
        self.per_token = per_token
        self.options = options

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, per_token: bool = False, **options: Any) -> NLLHead:
        """The same head: its parameters are shared, so that tied ones stay tied.

        Before any wrapper: `fully_shard` and `deepspeed.initialize` come after.

        Raises:
            TypeError: anything but an `nn.Linear` whose forward is `nn.Linear`'s and that has no
                hooks: what they do would be lost. For LoRA, merge, or call `chunked_nll` with the
                weight that the adapter stands for.
        """
        plain = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
        plain = plain and "forward" not in vars(linear) and "weight" in linear._parameters
        hooked = plain and any(getattr(linear, name) for name in HOOKS)
        kind = type(linear)
        check_linear(kind.__name__, plain, hooked, kind.__module__.partition(".")[0])
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.in_features, head.out_features = linear.in_features, linear.out_features
        for name in ("weight", "bias"):
            head.register_parameter(name, linear._parameters[name])
        head._settle(per_token, options)
        return head.train(linear.training)

    def __call__(self, *args: Any, **named: Any) -> Any:
        # On what a module returns FSDP2 hooks a gather for its backward, to which a loss whose
        # gradients exist has no use. Given the sharded parameter the function calls this module
        # without labels, for the hooks that gather and reduce, and keeps its result from the other.
        labels = named.get("labels", args[1] if len(args) > 1 else None)
        weight = self._parameters.get("weight")  # not the attribute, which DeepSpeed gathers
        if labels is not None and is_dtensor(weight):
            from xentlib.torch.wrappers import fsdp2

            if fsdp2.keeps_alone(self, weight, HOOKS):
                return self.forward(*args, **named)
        # Nor is it gathered where its rows stay; a hook of the user's own still runs.
        gather = {**self.options, **named}.get("gather", "head")
        if labels is not None and gather != "head" and kept_by_zero(weight):
            from xentlib.torch.wrappers import deepspeed

            if deepspeed.keeps_alone(self, HOOKS):
                return self.forward(*args, **named)
        return super().__call__(*args, **named)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None, **options: Any
    ) -> Tensor | NLLOutput[Tensor] | LogprobOutput[Tensor]:
        """Logits [..., V] of `hidden` [..., H]; with `labels` [...] the function's result."""
        if labels is None:
            check_head_options(options, [])
            return nn.functional.linear(hidden, self.weight, self.bias)
        options = {**self.options, **options}
        dtype = getattr(array_spec(options.get("denominator")), "dtype", None)
        MODULES.require("rounded", dtype not in ("bfloat16", "float16"), dtype=dtype)
        gather = options.get("gather", "head")
        parameters = parameter_of(self, "weight", gather), parameter_of(self, "bias", gather)
        logits = LazyLogits(hidden, parameters, options)
        return logits.logprobs(labels) if self.per_token else logits.nll(labels)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """As of any module; a style of tensor parallelism, which drops labels, is refused."""
        of_style = getattr(hook, "__module__", "") == "torch.distributed.tensor._api"
        MODULES.require("parallel_style", not of_style)
        return super().register_forward_pre_hook(hook, **options)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), *(["per_token=True"] if self.per_token else [])]
        return ", ".join(parts + [f"{name}={value!r}" for name, value in self.options.items()])
