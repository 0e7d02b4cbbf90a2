"""A tiny Llama and GPT-2 of `transformers`, patched or not: a step, and what its tensors were."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from helpers.wide import Wide
from xentlib.contract import check, failures

V, ROWS, LENGTH = 97, 4, 12
CHUNK = 8 * V * 4  # bytes of 8 tokens' logits


def llama(*, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    """The same parameters each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = {"vocab_size": V, **sizes, **heads, **config}
    made = LlamaForCausalLM(LlamaConfig(**config))
    return made.to(dtype)  # type: ignore[no-any-return]


def gpt2() -> GPT2LMHeadModel:
    """Of a class whose name does not tell `Trainer` that its loss shifts the labels; tied."""
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": V}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=1, eos_token_id=2))


def batch() -> dict[str, torch.Tensor]:
    """Labels of uneven numbers in the rows."""
    ids = torch.randint(3, V, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9], labels[1, 5:] = -100, -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, of: Any = None, **more: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients of all parameters, under their names in `of`, the model itself else."""
    named = of if of is not None else model
    named.zero_grad()
    loss = model(**{**batch(), **more}).loss
    loss.backward()
    found = {name: p.grad for name, p in named.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **{k: g.clone() for k, g in found.items()}}


def held(got: dict[str, Any], want: dict[str, Any]) -> None:
    """All of it, by the contract's distance of two implementations."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        measured = check("A9", got[name], x, metrics=("rho / u",), quantity=name)
        assert not failures(measured)


# Of as many tokens as the batch has, or nearly: the last one of each row predicts nothing.
Logits = partial(Wide, V, ROWS * (LENGTH - 1))
