"""tunix's losses of supervised fine-tuning and of distillation from logits, by `chunked_nll` and
`vocab_parallel_divergence`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import pxla

from xentlib.arguments import Arguments
from xentlib.checks.head import refuse_module
from xentlib.jax.api import vocab_parallel_divergence, vocab_parallel_logprobs
from xentlib.jax.losses.index import nll
from xentlib.jax.placement import configured
from xentlib.options import Gather, WeightLayout
from xentlib.teacher import TeacherLogits

__all__ = ["logit_loss", "loss_fn", "loss_fn_by"]


def loss_fn(
    model: Any,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
    images: jax.Array | None = None,
) -> jax.Array:
    """tunix's default loss, without logits.

        trainer = PeftTrainer(model, optimizer, config).with_loss_fn(loss_fn)

    loss = sum_t mask_t nll_t / sum_t mask_t over the next tokens, 0 where no token counts.

    The model runs with `output_hidden_states=True`, and the logits that it makes beside them are
    never computed, as nothing uses them: inside `jit`, where `PeftTrainer` calls this.

    Args:
        model: of tunix (Gemma, Gemma 3, Qwen 2 and 3), or one that sows `all_hidden_states`, after
            its last norm, and whose head is `lm_head` or `embedder`.
        input_tokens: [B, L].
        input_mask: [B, L], or weights, of the tokens that are learnt.
        positions: [B, L].
        attention_mask: [B, L, L].
        images: what the model takes, or None.

    Raises:
        TypeError: a model without `output_hidden_states` (Llama 3, Gemma 4), a head with LoRA.

    Numerics: those of `chunked_nll`: logits are float32, never rounded to the model's dtype.
    """
    batch = (input_tokens, input_mask, positions, attention_mask, images)
    return loss_of(model, *batch, "head", None)


def loss_fn_by(gather: Gather, *, tokens_per_rank: int | None = None) -> Callable[..., jax.Array]:
    """`loss_fn` by a route of `gather`: a function with its signature.

        trainer = PeftTrainer(model, optimizer, config).with_loss_fn(loss_fn_by("hidden"))

    Args:
        gather: as in `chunked_nll`; "hidden" is for a mesh with Auto axes that spreads the
            vocabulary, and not the width, over an axis that spreads tokens.
        tokens_per_rank: with "auto".

    Raises:
        ValueError: in a call, what `chunked_nll` refuses of the route.

    Numerics: those of `loss_fn`.
    """

    # NNX sorts what it is called with by its signature, which may have no options beside arrays.
    @wraps(loss_fn)
    def routed(*arrays: Any, **named: Any) -> jax.Array:
        bound = signature(loss_fn).bind(*arrays, **named)
        bound.apply_defaults()
        return loss_of(**bound.arguments, gather=gather, tokens_per_rank=tokens_per_rank)

    return routed


def loss_of(
    model: Any,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
    images: jax.Array | None,
    gather: Gather,
    tokens_per_rank: int | None,
) -> jax.Array:
    more = {} if images is None else {"images": images}
    model(input_tokens, positions, None, attention_mask, output_hidden_states=True, **more)
    sown: Any = nnx.pop(model, nnx.Intermediate)
    hidden = sown["all_hidden_states"].get_value()[-1]
    mask, shardings = input_mask[:, 1:], getattr(getattr(model, "config", None), "shd_config", None)
    hidden, weight, layout, spec = head_of_model(model, hidden, shardings)
    args = Arguments(
        hidden[:, :-1],
        weight,
        input_tokens[:, 1:],
        where=mask.astype(bool),
        token_weights=mask.astype(jnp.float32),
        softcap=getattr(model, "final_logits_softcap", None),
        weight_layout=layout,
        gather=gather,
        tokens_per_rank=tokens_per_rank,
    )
    tokens = () if shardings is None else shardings.act_btd[:2]
    mesh = None if spec is None else entered()
    loss: jax.Array = nll(args, configured(args, mesh, tokens, spec)).loss
    return loss


def logit_loss(
    student_output: jax.Array,
    teacher_output: jax.Array,
    labels: jax.Array,
    *,
    temperature: float = 2.0,
    alpha: float = 0.5,
    distill_top_k: int = 0,
    where: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What `LogitStrategy.compute_loss` of tunix returns: loss and metrics, of logits.

        loss = mean of alpha * temperature^2 * KL(teacher : student) + (1 - alpha) * NLL

    Args:
        student_output: [..., V] logits.
        teacher_output: [..., V] logits, constants.
        labels: [..., V] one-hot rows, or class probabilities.
        temperature: positive; of both distributions of the KL.
        alpha: the share of the KL.
        distill_top_k: K > 0 takes the KL of both renormalised over the teacher's K likeliest
            classes.
        where: [...] bool, the tokens that count; the means are over them. None for all, padding
            included, as in tunix; `labels.any(-1)` for those that have a label.

    Numerics: the KL keeps its digits where student and teacher are close, and is never below 0.
    Rows A20 to A22 of the contract.
    """
    labels = labels.astype(jnp.float32)
    student, teacher = student_output, jax.lax.stop_gradient(teacher_output)
    task, of_teacher = (
        -vocab_parallel_logprobs(x, labels, where=where).logprobs for x in (student, teacher)
    )
    if distill_top_k > 0:
        teacher, ids = jax.lax.top_k(teacher, distill_top_k)
        student = jnp.take_along_axis(student, ids, axis=-1)
    each = vocab_parallel_divergence(
        student, TeacherLogits(teacher), where=where, temperature=temperature
    ).loss
    count = jnp.float32(each.size) if where is None else jnp.maximum(where.sum(), 1)

    def mean(x: jax.Array) -> jax.Array:
        return x.sum() / count.astype(x.dtype)

    soft, hard = temperature**2 * mean(each), mean(task)
    metrics = {
        "distill/soft_loss": soft,
        "distill/hard_loss": hard,
        "distill/kl_div": mean(each),
        "distill/teacher_loss": mean(of_teacher),
    }
    return alpha * soft + (1.0 - alpha) * hard, metrics


def entered() -> Any:
    """The mesh of `jax.set_mesh`, or of the `with mesh:` that tunix reads its own from."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        with warnings.catch_warnings():  # deprecated with `with mesh:`, since JAX 0.8.2
            warnings.simplefilter("ignore", DeprecationWarning)
            mesh = pxla.thread_resources.env.physical_mesh
    return mesh


def head_of_model(model: Any, hidden: Any, shardings: Any) -> tuple[Any, Any, WeightLayout, Any]:
    """Hidden states and head in the dtype of their product, its layout, and the axes that spread
    it; None where nothing says so."""
    module = getattr(model, "lm_head", None)
    tied = module is None
    module = model.embedder if tied else module
    if nnx.state(module, nnx.LoRAParam):
        refuse_module(
            f"a {type(module).__name__} of tunix with LoRA, whose adapters would be lost",
            "Leave the head out of the adapters' `module_path`, or keep tunix's own loss.",
        )
    param = getattr(module, "input_embedding" if tied else "w", None)
    if param is None:
        return hidden, module, "VH", None  # a layer of NNX, which says how it multiplies
    weight, dtype = param[...], getattr(module, "dtype", hidden.dtype)
    layout: WeightLayout = "VH" if tied else "HV"
    name = "emb_vd" if tied else "emb_dv"
    spec = getattr(shardings, name, None)
    return hidden.astype(dtype), weight.astype(dtype), layout, spec
