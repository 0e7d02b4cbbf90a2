"""Steps of PyTorch whose logits or loss are another function: softcap, temperature, bias, the
vocabulary, label smoothing, z-loss, distillation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from helpers.planted import Table

TABLE = Table()
IGNORE = -100


def together(head: Any, micro_batches: Any, logits_of: Any, loss_of: Any = None) -> Any:
    """One backward of the mean over the tokens with a label, from their hidden states alone."""
    x = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])
    y = torch.cat([b["targets"].flatten() for b in micro_batches])
    x, y = x[y != IGNORE], y[y != IGNORE]
    loss = (loss_of or F.cross_entropy)(logits_of(x), y)
    loss.backward()
    return loss


# --- softcap --------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Any, cap: float) -> Any:
        return cap * torch.tanh(z / cap)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


@TABLE.wrong("softcap without its derivative", "softcap", softcap=8.0)
def softcap_straight_through(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: StraightThrough.apply(head(x), 8.0))


@TABLE.wrong(
    "z tanh(z / cap) in place of cap tanh(z / cap)",
    "softcap",
    source="unslothai/unsloth-zoo#593",
    softcap=8.0,
)
def softcap_with_the_wrong_factor(head: Any, micro_batches: Any) -> Any:
    def logits(x: Any) -> Any:
        z = head(x)
        return z * torch.tanh(z / 8.0)

    return together(head, micro_batches, logits)


@TABLE.wrong(
    "softcap before the logit scale",
    "softcap|logit.scale",
    source="huggingface/trl#5691",
    softcap=6.0,
    logit_scale=0.5,
)
def softcap_before_the_scale(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: 0.5 * (6.0 * torch.tanh(head(x) / 6.0)))


@TABLE.wrong(
    "a patched model that never passes its softcap on",
    "softcap",
    source="apple/ml-cross-entropy#48",
    softcap=15.0,
)
def softcap_not_passed_on(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, head)


@TABLE.wrong(
    "a vocabulary padded to a power of two by -inf, which the softcap makes finite",
    "softcap|vocab|class|pad",
    source="unslothai/unsloth#10616",
    softcap=4.0,
)
def padded_classes_softcapped(head: Any, micro_batches: Any) -> Any:
    def logits(x: Any) -> Any:
        z = F.pad(head(x), (0, 64 - head.weight.shape[0]), value=-math.inf)
        return 4.0 * torch.tanh(z / 4.0)

    return together(head, micro_batches, logits)


@TABLE.wrong("logits clamped to the cap", "softcap|clamp", softcap=3.0)
def clamped_in_place_of_tanh(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: head(x).clamp(-3.0, 3.0))


# --- temperature, scale, bias ---------------------------------------------------------------------


@TABLE.wrong("multiplied by the temperature", "temperature", temperature=0.7)
def temperature_inverted(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: head(x) * 0.7)


@TABLE.wrong(
    "divided by the temperature in the model and in the loss", "temperature", temperature=0.8
)
def temperature_twice(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: head(x) / 0.8 / 0.8)


@TABLE.wrong(
    "the sampler's temperature is not applied in training",
    "temperature",
    source="huggingface/trl#3029",
    temperature=0.9,
)
def temperature_forgotten(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, head)


@TABLE.wrong(
    "hidden states are divided by the temperature, the bias is not",
    "temperature|bias",
    temperature=0.6,
    bias=True,
)
def temperature_before_the_bias(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: head(x / 0.6))


@TABLE.wrong(
    "the logit scale multiplies the product alone, not the bias",
    "scale|bias",
    logit_scale=0.25,
    bias=True,
)
def scale_before_the_bias(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: F.linear(0.25 * x, head.weight, head.bias))


@TABLE.wrong("the bias is detached, and has no gradient", "bias", bias=True)
def bias_gradient_lost(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: F.linear(x, head.weight, head.bias.detach()))


@TABLE.wrong(
    "the bias is added to the target's logit alone, not within the log-sum-exp",
    "bias",
    source="apple/ml-cross-entropy#52",
    bias=True,
)
def bias_of_the_target_alone(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        z_y = z.gather(-1, y[:, None])[:, 0] + head.bias[y]
        return (z.logsumexp(-1) - z_y).mean()

    return together(head, micro_batches, lambda x: x @ head.weight.T, loss)


@TABLE.wrong("logits scaled by 1 / sqrt(H) that nobody declared", "scale|factor|wrong")
def scaled_by_the_width(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: head(x) / math.sqrt(x.shape[-1]))


# --- the vocabulary -------------------------------------------------------------------------------


@TABLE.wrong(
    "the head is padded to 64 classes whose logits are 0", "vocab|class|logit|softmax|wrong"
)
def padded_classes_count(head: Any, micro_batches: Any) -> Any:
    return together(head, micro_batches, lambda x: F.pad(head(x), (0, 64 - head.weight.shape[0])))


@TABLE.wrong(
    "gathered logits summed over two ranks once more: the loss is log 2 too large",
    "log|loss|softmax|wrong",
    source="NVIDIA/Megatron-LM#7452",
)
def denominator_doubled(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        p = z.softmax(-1) / 2
        onehot = F.one_hot(y, z.shape[-1])
        value = -torch.log(p.gather(-1, y[:, None])).mean()
        surrogate = (z * (p - onehot).detach()).sum() / len(y)
        return value.detach() + surrogate - surrogate.detach()

    return together(head, micro_batches, head, loss)


@TABLE.wrong(
    "the last classes are cut off by a loop over whole blocks of 8 classes", "vocab|class|wrong"
)
def last_block_of_classes_dropped(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        blocks = [block for block in z.split(8, -1) if block.shape[-1] == 8]
        lse = torch.stack([block.logsumexp(-1) for block in blocks]).logsumexp(0)
        return (lse - z.gather(-1, y[:, None])[:, 0]).mean()

    return together(head, micro_batches, head, loss)


@TABLE.wrong(
    "log(p + 1e-6) of the label, against log 0", "epsilon|log|softmax|wrong|precision|round"
)
def log_of_p_and_an_epsilon(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        return -torch.log(z.softmax(-1).gather(-1, y[:, None]) + 1e-6).mean()

    return together(head, micro_batches, head, loss)


@TABLE.wrong(
    "the softmax is detached within the loss, so no other class is pushed down",
    "gradient|softmax|wrong",
)
def denominator_detached(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        return (z.logsumexp(-1).detach() - z.gather(-1, y[:, None])[:, 0]).mean()

    return together(head, micro_batches, head, loss)


# --- label smoothing and z-loss -------------------------------------------------------------------


@TABLE.wrong("smoothing spread over V - 1 classes", "smoothing", label_smoothing=0.1)
def smoothed_over_the_others(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        logp, each = z.log_softmax(-1), 0.1 / (z.shape[-1] - 1)
        z_y = logp.gather(-1, y[:, None])[:, 0]
        return -((1 - 0.1 - each) * z_y + each * logp.sum(-1)).mean()

    return together(head, micro_batches, head, loss)


@TABLE.wrong(
    "the smoothing term counts ignored tokens",
    "smoothing",
    "mask|ignored|padd|without a label",
    source="pytorch/pytorch#73205",
    label_smoothing=0.2,
)
def smoothed_over_ignored_tokens(head: Any, micro_batches: Any) -> Any:
    count = sum(b["loss_mask"].sum() for b in micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        logp, y = head(b["hidden"]).flatten(0, 1).log_softmax(-1), b["targets"].flatten()
        nll = F.nll_loss(logp, y, reduction="sum")
        loss = loss + (0.8 * nll - 0.2 * logp.mean(-1).sum()) / count
    loss.backward()
    return loss


@TABLE.wrong(
    "a label smoother that divides by the micro-batch's tokens, summed over micro-batches",
    "micro-batch",
    source="huggingface/transformers#47261",
    label_smoothing=0.1,
)
def smoother_without_the_count(head: Any, micro_batches: Any) -> Any:
    total = 0.0
    for b in micro_batches:
        logits, y = head(b["hidden"]).flatten(0, 1), b["targets"].flatten()
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong("label smoothing 0.1 that was not asked for", "smoothing|wrong")
def smoothed_by_default(head: Any, micro_batches: Any) -> Any:
    return together(
        head, micro_batches, head, lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1)
    )


def z_loss(z: Any) -> Any:
    return 1e-2 * z.logsumexp(-1) ** 2


@TABLE.wrong(
    "z-loss over ignored tokens", "z-loss", "mask|ignored|padd|without a label", z_loss=1e-2
)
def z_loss_over_ignored_tokens(head: Any, micro_batches: Any) -> Any:
    count = sum(b["loss_mask"].sum() for b in micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        z, y = head(b["hidden"]).flatten(0, 1), b["targets"].flatten()
        loss = loss + (F.cross_entropy(z, y, reduction="sum") + z_loss(z).sum()) / count
    loss.backward()
    return loss


@TABLE.wrong(
    "z-loss is the mean over all positions, the cross-entropy that over tokens",
    "z-loss",
    z_loss=1e-2,
)
def z_loss_over_positions(head: Any, micro_batches: Any) -> Any:
    z = torch.cat([head(b["hidden"]).flatten(0, 1) for b in micro_batches])
    y = torch.cat([b["targets"].flatten() for b in micro_batches])
    loss = F.cross_entropy(z, y) + z_loss(z).mean()
    loss.backward()
    return loss


@TABLE.wrong("z-loss of the logits from which the maximum is taken", "z-loss", z_loss=1e-2)
def z_loss_without_the_maximum(head: Any, micro_batches: Any) -> Any:
    def loss(z: Any, y: Any) -> Any:
        z = z - z.detach().amax(-1, keepdim=True)
        return F.cross_entropy(z, y) + z_loss(z).mean()

    return together(head, micro_batches, head, loss)


@TABLE.wrong("z-loss added for the log alone, without gradient", "z-loss", z_loss=1e-2)
def z_loss_detached(head: Any, micro_batches: Any) -> Any:
    return together(
        head, micro_batches, head, lambda z, y: F.cross_entropy(z, y) + z_loss(z).mean().detach()
    )


@TABLE.wrong("half of z-loss: its coefficient is that of lse^2 / 2", "z-loss", z_loss=1e-2)
def z_loss_halved(head: Any, micro_batches: Any) -> Any:
    return together(
        head, micro_batches, head, lambda z, y: F.cross_entropy(z, y) + z_loss(z).mean() / 2
    )


# --- distillation ---------------------------------------------------------------------------------


def distil(head: Any, micro_batches: Any, each: Any, mask: Any = None) -> Any:
    """`each(student logits, teacher logits)` [N], the mean over tokens that count."""
    x = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])
    t = torch.cat([b["teacher_logits"].flatten(0, 1) for b in micro_batches])
    m = torch.cat([(mask or (lambda b: b["loss_mask"]))(b).flatten() for b in micro_batches])
    loss = each(head(x[m]), t[m]).mean()
    loss.backward()
    return loss


def kl(p: Any, q: Any) -> Any:
    """KL(p || q) of logits."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@TABLE.wrong(
    "padding and prompts are distilled too",
    "mask|ignore|padd",
    source="linkedin/Liger-Kernel#974",
    divergence="forward_kl",
)
def distilled_without_the_mask(head: Any, micro_batches: Any) -> Any:
    return distil(
        head, micro_batches, lambda s, t: kl(t, s), lambda b: torch.ones_like(b["loss_mask"])
    )


@TABLE.wrong(
    "student and teacher exchanged in the divergence",
    "revers|kl|direction|exchang|wrong",
    divergence="forward_kl",
)
def divergence_reversed(head: Any, micro_batches: Any) -> Any:
    return distil(head, micro_batches, kl)


@TABLE.wrong(
    "the teacher's logits are not divided by the temperature",
    "temperature|teacher",
    divergence="forward_kl",
    temperature=2.0,
)
def teacher_at_temperature_1(head: Any, micro_batches: Any) -> Any:
    return distil(head, micro_batches, lambda s, t: kl(t, s / 2))


@TABLE.wrong(
    "the factor T^2 that was declared is missing",
    "temperature|4|factor|0\\.25",
    divergence="forward_kl",
    temperature=2.0,
    temperature_squared=True,
)
def temperature_squared_forgotten(head: Any, micro_batches: Any) -> Any:
    return distil(head, micro_batches, lambda s, t: kl(t / 2, s / 2))
