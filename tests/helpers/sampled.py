"""A sampler in PyTorch whose log-probabilities have planted causes, and what `explain` is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

ROWS, LENGTH, V, H = 4, 24, 187, 24
VOCAB = 181  # of the tokenizer; the head has six rows more
TEMPERATURE, SCALE, SOFTCAP, KEPT = 0.7, 1.3, 9.0, 20

# What each planted cause does to the arguments of `Sampler.logprobs`.
PLANTED: dict[str, dict[str, Any]] = {
    "ids shifted by one": {"shift": 1},
    "log-probabilities shifted by one": {"column": 1},
    "old head": {"head": "old_weight"},
    "bias not applied": {"bias": False},
    "logit scale not applied": {"scale": 1.0},
    "softcap not applied": {"softcap": None},
    "temperature not applied": {"temperature": 1.0},
    "temperature applied twice": {"temperature": TEMPERATURE**2},
    "kept ids not applied": {"kept": False},
    "padding of the vocabulary takes part": {"rows": V},
    "operands rounded to 16 bits": {"operands": torch.bfloat16},
    "logits rounded to 16 bits": {"logits": torch.bfloat16},
    "log-probabilities rounded to 16 bits": {"result": torch.bfloat16},
}


class Sampler(NamedTuple):
    """Arrays in float32, [B, L, ...]; `kept_ids` [B, L, K]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    old_weight: torch.Tensor
    bias: torch.Tensor
    ids: torch.Tensor
    kept_ids: torch.Tensor

    def logits(self, **how: Any) -> torch.Tensor:
        x, w = self.hidden, getattr(self, how.get("head", "weight"))
        if "operands" in how:
            x, w = x.to(how["operands"]).float(), w.to(how["operands"]).float()
        z = torch.nn.functional.linear(x, w, self.bias if how.get("bias", True) else None)
        z = z[..., : how.get("rows", VOCAB)]
        if "logits" in how:
            z = z.to(how["logits"]).float()
        z = z * how.get("scale", SCALE)
        softcap = how.get("softcap", SOFTCAP)
        z = softcap * torch.tanh(z / softcap) if softcap else z
        return z / how.get("temperature", TEMPERATURE)

    def logprobs(self, filtered: bool = False, **how: Any) -> torch.Tensor:
        """[B, L], of the ids that were sampled; `filtered`: over the kept ids."""
        z, ids = self.logits(**how), self.ids
        if filtered and how.get("kept", True):
            z = torch.full_like(z, -torch.inf).scatter(
                -1, self.kept_ids, z.gather(-1, self.kept_ids)
            )
        if "shift" in how:
            ids = ids.roll(-how["shift"], -1)
        logprobs = z.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        if "column" in how:
            logprobs = logprobs.roll(-how["column"], -1)
        return logprobs.to(how["result"]) if "result" in how else logprobs

    def arguments(self, filtered: bool = False, **how: Any) -> dict[str, Any]:
        """Of `explain`, with what this sampler returned."""
        arrays = {name: getattr(self, name) for name in ("hidden", "weight", "ids", "bias")}
        arrays |= {
            "old_weight": self.old_weight,
            "sampler_logprobs": self.logprobs(filtered, **how),
        }
        if filtered:
            arrays["kept_ids"] = self.kept_ids
        options = {"temperature": TEMPERATURE, "logit_scale": SCALE, "softcap": SOFTCAP}
        return arrays | options | {"vocab_size": VOCAB}


def sampler(seed: int = 0) -> Sampler:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return std * torch.randn(*shape, generator=made)

    hidden, weight = normal(ROWS, LENGTH, H), normal(V, H, std=2 / np.sqrt(H))
    old, bias = weight + normal(V, H, std=0.02), normal(V)
    nothing = torch.zeros(ROWS, LENGTH, 1, dtype=torch.int64)
    empty = Sampler(hidden, weight, old, bias, nothing[..., 0], nothing)
    top = empty.logits().topk(KEPT).indices
    p = empty.logits().gather(-1, top).softmax(-1).reshape(-1, KEPT)
    drawn = torch.multinomial(p, 1, generator=made)
    ids = top.reshape(-1, KEPT).gather(1, drawn).reshape(ROWS, LENGTH)
    return empty._replace(ids=ids, kept_ids=top)


# --- plain arrays ---------------------------------------------------------------------------------


def wide(vocab=2003, width=512, tokens=64):
    """Arrays of a size at which sums are long, and ids."""
    made = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=made)
    weight = torch.randn(vocab, width, generator=made) * 3 / width**0.5
    return hidden, weight, torch.randint(vocab, (tokens,), generator=made)


def small(tokens=128, vocab=187, width=24):
    """Hidden states, head and log-probabilities of everything, in float32."""
    hidden, weight, _ = wide(vocab, width, tokens)
    made = torch.Generator().manual_seed(2)
    logits = hidden @ weight.T
    return hidden, weight, logits, torch.multinomial(logits.softmax(-1), 1, generator=made)[:, 0]


def of_ids(logits, ids):
    """[N], in float32."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


# --- reports --------------------------------------------------------------------------------------


def named(side):
    return [{effect.name for effect in effects} for effects in side.causes]


def said(report):
    return " ".join(str(report).split())


def only(report):
    (side,) = report.sides
    return side
