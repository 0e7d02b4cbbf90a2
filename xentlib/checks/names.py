"""Names of arguments that other libraries have, and ours in place of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

GIVEN = "With precomputed logits write `-vocab_parallel_logprobs(logits, labels).logprobs`."
SHIFT = "Labels are taken as they are: pass shifted ones, such as `next_token_labels(tokens)`."
# By the name that people come with: one of our arguments, or a sentence.
INSTEAD = {
    **dict.fromkeys(("target", "targets", "y"), "labels"),
    **dict.fromkeys(("input", "inputs", "x", "hidden_states", "e"), "hidden"),
    **dict.fromkeys(("lin_weight", "linear_weight", "lm_head", "head", "classifier"), "weight"),
    **dict.fromkeys(("mask", "loss_mask", "attention_mask", "label_mask"), "where"),
    **dict.fromkeys(("logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), "softcap"),
    **dict.fromkeys(("weights", "loss_weights"), "token_weights"),
    **dict.fromkeys(("ce_weight", "class_weight"), "class_weights"),
    **dict.fromkeys(("lse_square_scale", "z_loss_multiplier"), "z_loss"),
    **dict.fromkeys(("num_items_in_batch", "num_tokens", "total_tokens"), "denominator"),
    **dict.fromkeys(("shift_labels", "shift"), SHIFT),
    **dict.fromkeys(("logits", "student_logits"), GIVEN),
}


def refuse_name(function: str, name: str, known: Collection[str]) -> NoReturn:
    """Of a keyword that is none of a function's arguments."""
    way = INSTEAD.get(name, "")
    if way in known:
        way = f"Write `{way}=`."
    elif " " not in way:
        way = f"Its arguments are {', '.join(known)}."
    raise TypeError(f"`{name}` is not an argument of `{function}`. {way}")
