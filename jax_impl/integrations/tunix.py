"""tunix's loss of supervised fine-tuning, by `chunked_nll`."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import pxla

from xentlib.arguments import Arguments
from xentlib.checks.module import refuse_module
from xentlib.jax.nll import nll
from xentlib.jax.placement import configured
from xentlib.options import WeightLayout

__all__ = ["loss_fn"]


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
    more = {} if images is None else {"images": images}
    model(input_tokens, positions, None, attention_mask, output_hidden_states=True, **more)
    sown: Any = nnx.pop(model, nnx.Intermediate)
    hidden = sown["all_hidden_states"].get_value()[-1]
    mask, shardings = input_mask[:, 1:], getattr(getattr(model, "config", None), "shd_config", None)
    hidden, weight, layout, spec = head_of_model(model, hidden, shardings)
    given = Arguments(
        hidden[:, :-1],
        weight,
        input_tokens[:, 1:],
        where=mask.astype(bool),
        token_weights=mask.astype(jnp.float32),
        softcap=getattr(model, "final_logits_softcap", None),
        weight_layout=layout,
    )
    tokens = () if shardings is None else shardings.act_btd[:2]
    mesh = None if spec is None else entered()
    loss: jax.Array = nll(given, configured(given, mesh, tokens, spec)).loss
    return loss


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
