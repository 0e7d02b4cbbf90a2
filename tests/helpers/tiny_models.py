"""Every causal language model of the installed `transformers`, with a configuration of its own
class that is small enough for tests.

A configuration is cut by the names of its fields (`SIZES`), its layers to one of each kind, and
what it has inside in the same way. What a class needs beyond that is in `tiny_models.json`:

    config      fields in place of the generic ones, those of an inner configuration as a table
    then        what is set in it once it is checked, by path; a table is an inner configuration
    images      its model type, of a class that takes text with images; text alone is what it gets
    inputs      what its forward takes beside tokens and labels; a list is a random array's shape
    tokens      the shape of its tokens, and `labels` that of its labels
    train       true where it has no gradients in evaluation mode; its dropout is then 0
    refused     `why` it cannot be patched, and what the error `raises`: words of it
"""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    AutoConfig,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = [
    "CLASSES",
    "IMAGES",
    "NEEDS",
    "V",
    "class_of",
    "code_of",
    "inputs_of",
    "model_of",
    "refusal_of",
]

V = 1009  # no other size is this one: a tensor that has it has classes
TABLE = Path(__file__).with_suffix(".json")
MOST = 1_000_000  # parameters; a larger model has a field that nobody has cut

CLASSES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NEEDS: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
# Classes that take images too, by the same name; each is asked for by its entry.
IMAGES: dict[str, str] = {x: needs["images"] for x, needs in NEEDS.items() if "images" in needs}

NAMED: dict[int, str] = {
    32: "hidden_size n_embd d_model embedding_size emb_dim embed_dim out_hidden_size "
    "text_hidden_size adapter_in_dim adapter_out_dim hidden_dim projector_hidden_size "
    "alignment_intermediate_size vision_output_dim projector_input_dim projector_output_dim "
    "output_dim",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff d_inner ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp dim_ff "
    "shared_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "dense_intermediate_size shared_experts_intermediate_size feed_forward_size mlp_dim",
    16: "qk_head_dim q_lora_rank kv_lora_rank o_lora_rank adapter_rank image_size "
    "downsample_hidden_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len num_position_embeddings",
    8: "head_dim swa_head_dim global_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim d_head "
    "index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim kv_channels "
    "mamba_head_dim rotary_dim dim_head attention_head_size attention_head_dim sliding_window "
    "sliding_window_size window_size state_size mamba_d_state ssm_state_size time_step_rank "
    "chunk_size mamba_chunk_size patch_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "swa_num_attention_heads index_n_heads linear_num_heads linear_num_value_heads mamba_n_heads "
    "mamba_num_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "zero_expert_num index_topk",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers depth num_key_value_heads num_kv_heads "
    "swa_num_key_value_heads linear_num_key_heads n_groups num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk eos_token_id",
    1: "n_group topk_group num_expert_group bos_token_id",
    0: "pad_token_id",
    V: "vocab_size",
}
SIZES = {name: size for size, names in NAMED.items() for name in names.split()}
OF_NONE = ("head_dim", "num_key_value_heads")  # given where the default is None too
OF_TOKENS = ("_token_id", "_token_index")
# What stands between the head and the loss, each so that leaving it out is seen.
BEHIND_THE_HEAD: dict[str, Any] = {
    "final_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0,
    "output_logit_soft_cap": 3.0,
    "softcap": 3.0,
    "logit_scale": 0.4,
    "lm_head_multiplier": 0.4,
    "output_multiplier": 0.4,
    "logits_scaling": 2.5,
    "logits_mup_width_multiplier": 2.5,
    "output_router_logits": True,
}


def class_of(tried: str) -> str:
    """The class of a model type, or itself."""
    return CLASSES.get(tried, tried)


def code_of(tried: str) -> str:
    """What a class computes between its trunk and its loss: `forward` without docstring, spaces and
    its own name; read without an import, which is most of what a class costs."""
    name = class_of(tried)
    folder = model_type_to_module_name(IMAGES.get(tried, tried))
    files = Path(transformers.__file__).parent.glob(f"models/{folder}/modeling_*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(files))
    begins = text.find(f"class {name}(")
    source = re.compile(r"(?:\n[\s)]|.)*").match(text, max(begins, 0))[0]
    forward = re.search(r"^    def forward\((?:\n(?:     |\n|    \))|.)*", source, re.MULTILINE)
    if begins < 0 or forward is None:  # of another model, or of the class that it extends
        return name
    text = re.sub(r'""".*?"""|\s', "", forward[0], flags=re.DOTALL)
    return text.replace(re.sub(r"For\w+|LMHead\w*", "", name), "")


def config_of(tried: str) -> Any:
    """A tiny configuration for a class."""
    model = getattr(transformers, class_of(tried))
    kind = CONFIG_MAPPING[IMAGES.get(tried, tried)]
    if kind is not model.config_class and getattr(kind, "sub_configs", {}):
        kind = model.config_class  # what `AutoModelForCausalLM` takes out of the composed one
    needs = NEEDS.get(class_of(tried), {})
    config = kind(**fields_of(kind, needs.get("config", {})))
    for path, x in needs.get("then", {}).items():
        *inner, name = path.split(".")
        value = AutoConfig.for_model(**x) if isinstance(x, dict) else x
        vars(reduce(getattr, inner, config))[name] = value  # its own setter checks again
    config._experts_implementation = "eager"  # the others' products have no float64
    return config


def fields_of(kind: Any, more: dict[str, Any]) -> dict[str, Any]:
    """What to make a small configuration of this kind with; `more` in place of what it has."""
    try:
        whole = vars(kind())
    except StrictDataclassError:  # its own defaults do not fit together
        whole = vars(kind(**more))
    found: dict[str, Any] = {}
    for name, x in whole.items():
        if name in BEHIND_THE_HEAD:
            found[name] = BEHIND_THE_HEAD[name]
        elif isinstance(x, bool):
            continue
        elif name in SIZES and (isinstance(x, int) or name in OF_NONE):
            found[name] = SIZES[name]
        elif isinstance(x, int) and name.endswith(OF_TOKENS) and x >= 0:
            found[name] = V - 20 + len(found) % 20  # of images and the like: not among the tokens
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]  # keys come from the latent
    found |= layers_of(whole, {**found, **more})
    for name in getattr(kind, "sub_configs", {}):
        if whole.get(name) is not None:
            found[name] = fields_of(type(whole[name]), more.get(name, {}))
    return found | {name: x for name, x in more.items() if not isinstance(found.get(name), dict)}


def layers_of(whole: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, of the lists that have an entry for each layer."""
    count = next((name for name in ("num_hidden_layers", "num_layers") if name in whole), None)
    lists = {
        name: x
        for name, x in whole.items()
        if isinstance(x, list) and len(x) == whole.get(count) and name not in given
    }
    if not lists:
        return {}
    kept = {x.index(kind) for name, x in lists.items() if "type" in name for kind in x} or {0}
    if len(kept) == 1:
        kept |= {0, 1}
    return {count: len(kept)} | {name: [x[k] for k in sorted(kept)] for name, x in lists.items()}


def model_of(tried: str) -> Any:
    """The model in float64, with weights that are drawn; refused where it is not small."""
    kind, config = getattr(transformers, class_of(tried)), config_of(tried)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > MOST:
        raise ValueError(
            f"{kind.__name__} has {size} parameters, more than {MOST}. Cut the fields that make it "
            f"so under its name in tests/helpers/{TABLE.name}."
        )
    torch.manual_seed(0)
    model = kind(config).double()
    model.train(NEEDS.get(kind.__name__, {}).get("train", False))
    head = model.get_output_embeddings()
    for weight in () if head is None else head.parameters():
        torch.nn.init.normal_(weight, std=2 / weight.shape[-1] ** 0.5)  # a softmax that is not flat
    return model


def inputs_of(tried: str) -> dict[str, Any]:
    """Two rows of tokens, and labels of all but the first row's start; and what else it takes."""
    needs, g = NEEDS.get(class_of(tried), {}), torch.Generator().manual_seed(0)
    ids = torch.randint(3, V - 50, needs.get("tokens", (2, 13)), generator=g)
    labels = ids.clone()
    if "labels" in needs:
        labels = torch.randint(3, V - 50, needs["labels"], generator=g)
    labels[0, :5] = -100
    more = {
        name: torch.randn(x, generator=g, dtype=torch.float64) if isinstance(x, list) else x
        for name, x in needs.get("inputs", {}).items()
    }
    return {"input_ids": ids, "labels": labels} | more


def refusal_of(tried: str) -> dict[str, str] | None:
    """Of a class that cannot be patched, `why`, and what the error `raises`."""
    found: dict[str, str] | None = NEEDS.get(class_of(tried), {}).get("refused")
    return found
