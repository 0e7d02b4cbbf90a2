"""Causal language models of `transformers`: their loss without logits, the rest unchanged."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from xentlib.options import ROUTE_OPTIONS
from xentlib.torch.core.device import device_info
from xentlib.torch.head.lazy_logits import (
    LOSS_SCALARS,
    LazyLogits,
    LazyLogitsError,
    lazy_calls,
    thread,
)
from xentlib.torch.head.modules import parameters_of
from xentlib.torch.micro_batch import known, label_loss
from xentlib.torch.wrappers import keeps_forward, set_class

__all__ = ["LazyLogits", "LazyLogitsError", "patch", "unpatch"]

PRECISION_AND_MEMORY = ("compute_dtype", "max_chunk_bytes", "recompute")
OPTIONS = (*sorted((*PRECISION_AND_MEMORY, *ROUTE_OPTIONS, *LOSS_SCALARS)),)


@dataclass
class Patch:
    """What a patched model remembers."""

    in_place_of_logits: Callable[[Tensor], Tensor] | None
    options: dict[str, Any]  # of `chunked_nll`
    loss_type: str | None  # before the patch
    warned: set[str] = field(default_factory=set)  # of what


def patch(
    model: nn.Module,
    *,
    in_place_of_logits: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> nn.Module:
    """Let a model of `transformers` compute its loss without logits; in place.

        patch(model)
        Trainer(model, arguments, train_dataset=data).train()

    A call with `labels` runs the model's own forward and its own loss function, with an
    `LazyLogits` where the head's logits would be: slices, factors and soft caps on the way are
    recorded, and `cross_entropy` of it is `chunked_nll`. Whatever else a model does to its logits
    raises. Auxiliary losses, shifts of labels and `num_items_in_batch` are the model's own. Calls
    without `labels`, `generate` among them, are unchanged, and so are `state_dict`,
    `save_pretrained` and the name of the class.

    Args:
        model: of any causal LM class that has a head in `get_output_embeddings()`, or of an
            image-text-to-text class; in PEFT's model, or in a wrapper that has it as `.module`.
            Patch after `get_peft_model` and before `accelerator.prepare`.
        in_place_of_logits: in evaluation the output's `logits` are what this makes of the logits
            [T, V] of some tokens at a time, for instance `lambda logits: logits.argmax(-1)`: [T]
            or [T, ...], for `compute_metrics`. None leaves the `LazyLogits`.
        options: `label_smoothing`, `z_loss`, `compute_dtype`, `max_chunk_bytes`, `recompute`,
            `gather`, `tokens_per_rank` or `tokens_parallel` of `chunked_nll`.

    Returns:
        The model.

    Raises:
        TypeError: no such model, a head that is more than a weight and a bias (quantised, say, or
            an adapter that is not LoRA), an option of no use here.
        ValueError: the model is patched already.
        RuntimeError: in a call, the forward has not used the head that it names, or no loss came.

    Numerics: the loss and the gradients are those of `chunked_nll`: of float32 logits, where the
    model's own are rounded to its dtype first. With no valid label the loss is 0, not NaN.
    """
    inner, head = parts(model)
    if hasattr(type(inner), "unpatched"):
        raise ValueError(
            f"`model` must be patched once; got a {type(inner).__name__} that is patched. Call "
            f"`unpatch` first, or leave it as it is."
        )
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise TypeError(
            f"`patch` must have options among {', '.join(OPTIONS)}; got {unknown[0]!r}. Whatever "
            f"else the loss depends on is the model's."
        )
    if not (in_place_of_logits is None or takes_one(in_place_of_logits)):
        raise TypeError(
            f"`in_place_of_logits` must be a function of one argument, logits [T, V], or None; got "
            f"{in_place_of_logits!r}. Pass `lambda logits: logits.argmax(-1)`, for instance."
        )
    kinds: list[Any] = [type(head), type(inner)]
    # The class, as `fully_shard` does it: copies, pickles and tied parameters are right by
    # themselves, which a function on the instance would break.
    set_class(head, head_class(kinds[0]))
    head._lazy_calls = {}  # by thread
    set_class(inner, model_class(kinds[1]))
    inner._xentlib = Patch(in_place_of_logits, options, inner.loss_type)
    # Trainer counts tokens after the shift only for classes whose loss it knows by their name.
    names = inspect.unwrap(kinds[1].forward).__code__.co_names
    if inner.loss_type is None and "loss_function" in names:
        inner.loss_type = "ForCausalLM"
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Take `patch` back, before any wrapper; returns the model.

    Raises:
        ValueError: nothing is patched, or a wrapper such as `fully_shard` has given the patched
            model or its head another class since.
    """
    inner, head = parts(model)
    if not hasattr(type(inner), "unpatched"):
        raise ValueError(
            f"`model` must be patched; got a {type(inner).__name__} that is not. Leave it as it is."
        )
    patched = [x for x in (head, inner) if hasattr(type(x), "unpatched")]
    for module in patched:
        if "unpatched" not in vars(type(module)):
            raise ValueError(
                f"`model` must have the class that `patch` gave it; got a "
                f"{type(module).__name__} that was wrapped since, by `fully_shard` perhaps. Call "
                f"`unpatch` before the wrapper."
            )
    for module in patched:
        set_class(module, type(module).unpatched)
    inner.loss_type = inner._xentlib.loss_type
    del inner._xentlib
    vars(head).pop("_lazy_calls", None)
    return model


def parts(model: Any) -> tuple[Any, Any]:
    """The model of `transformers` in a model, and its head."""
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a model of `transformers`; got a {type(model).__name__}. Pass an "
            f"instance, such as `AutoModelForCausalLM.from_pretrained(path)`."
        )
    inner = model
    while not isinstance(inner, PreTrainedModel):
        base = getattr(inner, "get_base_model", None)
        inside = base() if base is not None else getattr(inner, "module", None)
        if inside is None or inside is inner:
            refuse(f"a {type(model).__name__}")
        inner = inside
    kind = type(inner).__name__
    head = inner.get_output_embeddings()
    if head is None:
        refuse(f"a {kind}, whose `get_output_embeddings()` is None")
    if "labels" not in inspect.signature(type(inner).forward).parameters:
        refuse(f"a {kind}, whose forward takes no `labels`")
    if "forward" in vars(inner) and not keeps_forward(inner):
        refuse(f"a {kind} whose forward was replaced, by `accelerator.prepare` perhaps")
    parameters_of(head)  # or the reason why not
    return inner, head


def takes_one(function: Any) -> bool:
    """Whether it can be called with one argument, as far as its signature says."""
    try:
        return bool(inspect.signature(function).bind(None))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True


def refuse(came: str) -> NoReturn:
    raise TypeError(
        f"`model` must be a model of `transformers` with a language-model head and labels; got "
        f"{came}. Patch it before anything else replaces its forward, or call `chunked_nll` with "
        f"its hidden states."
    )


def restore(kind: Any, make: str) -> Any:
    """An empty module of a patched class, for `copy` and `pickle`, which find no such name."""
    patched = {"head": head_class, "model": model_class}[make](kind)
    return patched.__new__(patched)


def same_name(kind: Any, make: str, members: dict[str, Any]) -> Any:
    """A class that is called like its base: configurations and checkpoints carry the name."""

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        return restore, (kind, make), vars(self)

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members_of_tensor = {"unpatched": kind, "__reduce_ex__": __reduce_ex__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**about, **members_of_tensor, **members})


@cache
def head_class(kind: Any) -> Any:
    """A head that computes no logits while its model asks for none."""

    def __call__(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Before any hook of the module: a wrapper's would gather what `chunked_nll` gathers.
        call = lazy_calls(self).get(thread())
        if call is None:
            return super(patched, self).__call__(hidden, *args, **kwargs)
        call["calls"] += 1
        return LazyLogits(hidden, self, call["options"])

    patched = same_name(kind, "head", {"__call__": __call__, "multiplies": True})
    return patched


@cache
def model_class(kind: Any) -> Any:
    """A model whose forward computes no logits where it is given labels."""
    names = list(inspect.signature(kind.forward).parameters)[1:]
    place = names.index("labels")

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[place] if len(args) > place else kwargs.get("labels")
        if labels is None:
            if self.training and torch.is_grad_enabled():
                warn_of_logits(self)
            return kind.forward(self, *args, **kwargs)
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "a patched model must run in a process for each device; got nn.DataParallel, which "
                "`Trainer` takes where one process sees several GPUs. Start it by `torchrun "
                "--nproc-per-node N`, or call `unpatch(model)`."
            )
        if kwargs.get("shift_labels") is None:
            ids = args[0] if args and names[0] == "input_ids" else kwargs.get("input_ids")
            warn_of_labels(self, ids, labels)
        head, settings = self.get_output_embeddings(), self._xentlib
        call = {"calls": 0, "options": settings.options, "outputs": []}
        calls, here = lazy_calls(head), thread()  # of another head {}, which counts no calls
        calls[here] = call
        try:
            out = kind.forward(self, *args, **kwargs)
        finally:
            del calls[here]
        loss = out["loss"] if isinstance(out, dict) else out[0]
        if not call["calls"] or not isinstance(loss, Tensor):
            got = "no loss" if call["calls"] else "the logits of another"
            raise RuntimeError(
                f"a patched model must compute its loss from the head that "
                f"`get_output_embeddings()` names; got {got} from {kind.__name__}. Patch it after "
                f"what replaces the head (`get_peft_model`, `resize_token_embeddings`), or call "
                f"`unpatch(model)`."
            )
        label_model_loss(loss, call["outputs"], kwargs.get("num_items_in_batch"))
        return without_logits(out, None if self.training else settings.in_place_of_logits)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "forward":
            warn_of_forward(self, value)
        super(patched, self).__setattr__(name, value)

    patched = same_name(kind, "model", {"forward": forward, "__setattr__": __setattr__})
    return patched


def label_model_loss(loss: Tensor, outputs: list[Any], num_items: Any) -> None:
    """Let the model's loss say what it was divided by: by the model, where it is told a number."""
    if len(outputs) != 1 or loss is outputs[0].loss:
        return
    number = num_items if isinstance(num_items, int) else known(num_items)
    divisor = outputs[0].denominator if num_items is None or number == 1 else num_items
    label_loss(loss, outputs[0].num_tokens, outputs[0].weight_sum, divisor)


def without_logits(out: Any, function: Callable[[Tensor], Tensor] | None) -> Any:
    """The output with what a function makes of its logits; in training with its lazy logits."""
    if function is None:
        return out
    items = out.items() if isinstance(out, dict) else enumerate(out)
    mapped: dict[Any, Any] = {
        k: x.map_chunks(function) if isinstance(x, LazyLogits) else x for k, x in items
    }
    return type(out)(**mapped) if isinstance(out, dict) else tuple(mapped.values())


def warn_of_forward(model: Any, forward: Any) -> None:
    """Of a package that replaces the forward by one with a loss of its own."""
    names = getattr(getattr(forward, "__func__", forward), "__globals__", {})
    package = str(names.get("__name__")).partition(".")[0]
    if package in ("trl", "liger_kernel"):
        warnings.warn(
            f"{type(model).__name__} is patched, and {package} has put a forward of its own in "
            f"place of the patched one, whose loss is {package}'s. Call `unpatch` first, and for "
            f"TRL's trainers use `with xentlib.torch.integrations.trl.use():`.",
            stacklevel=3,
        )


def warn_of_labels(model: Any, ids: Any, labels: Any) -> None:
    """Of labels that are the next tokens already: the model's loss would shift them once more. On
    a CPU alone, where looking costs nothing; of 8 labels or more, which do not agree by chance."""
    both = (ids, labels)
    if torch.compiler.is_compiling() or any(type(x) is not Tensor or x.ndim != 2 for x in both):
        return
    if ids.shape != labels.shape or not all(device_info(x).host_readable for x in both):
        return
    target, valid = labels[:, :-1], labels[:, :-1] != -100
    shifted = int(valid.sum()) >= 8 and bool((target == ids[:, 1:])[valid].all())
    if shifted and not bool((target == ids[:, :-1])[valid].all()):  # as of one token repeated
        warn_once(
            model,
            "labels",
            f"{type(model).__name__} is patched and shifts the labels itself, and each label is "
            f"the next token of `input_ids` already: it would learn to predict the token after "
            f"the next. Pass `labels=input_ids` (-100 where there is no loss), without "
            f"`next_token_labels`.",
        )


def warn_of_logits(model: Any) -> None:
    warn_once(
        model,
        "logits",
        f"{type(model).__name__} is patched but was called without labels while it is trained, and "
        f"makes all logits. Pass `labels` to the model. `Trainer` does not with a "
        f"`label_smoothing_factor` (use `patch(model, label_smoothing=...)`) or a "
        f"`compute_loss_func`.",
    )


def warn_once(model: Any, about: str, text: str) -> None:
    if about not in model._xentlib.warned:
        model._xentlib.warned.add(about)
        warnings.warn(text, stacklevel=4)
