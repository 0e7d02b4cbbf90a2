"""Steps of PyTorch whose labels are wrong: which token is predicted from where, and which count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.planted import Table

TABLE = Table()
IGNORE = -100


def of_labels(labels_of: Any) -> Any:
    """A step that is right if `labels_of` says what is predicted at each position."""

    def run(head: Any, micro_batches: Any) -> Any:
        labels = [labels_of(b) for b in micro_batches]
        count = sum((y != IGNORE).sum() for y in labels)
        total = 0.0
        for b, y in zip(micro_batches, labels):
            logits = head(b["hidden"]).view(-1, head.weight.shape[0])
            loss = F.cross_entropy(logits, y.reshape(-1), reduction="sum") / count
            loss.backward()
            total += loss.item()
        return total

    return run


def shift(x: Any, fill: Any = IGNORE) -> Any:
    return F.pad(x[:, 1:], (0, 1), value=fill)


def within(labels: Any, segments: Any) -> Any:
    return labels.masked_fill(segments != shift(segments, -1), IGNORE)


def counts(head: Any, micro_batches: Any, labels: Any) -> Any:
    return of_labels(labels)(head, micro_batches)


def causal_lm_loss(logits: Any, labels: Any, count: Any) -> Any:
    """As transformers has it: pads the labels by one, and shifts."""
    labels = F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()
    return (
        F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="sum") / count
    )


@TABLE.wrong(
    "labels that are flat and shifted already go through a loss that shifts again, over rows",
    "shift|next",
    source="huggingface/transformers#47394",
    documents=False,
)
def shifted_in_the_model_and_in_the_loss(head: Any, micro_batches: Any) -> Any:
    count = sum((b["labels"][:, 1:] != IGNORE).sum() for b in micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        logits, labels = head(b["hidden"])[:, :-1], b["labels"][:, 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        loss = loss + causal_lm_loss(flat, labels.reshape(-1), count)
    loss.backward()
    return loss


@TABLE.wrong(
    "labels of a collator that does not shift, in a model that does not either",
    "shift",
    source="huggingface/transformers#27517",
)
def copies_its_input(head: Any, micro_batches: Any) -> Any:
    return counts(head, micro_batches, lambda b: b["labels"])


@TABLE.wrong(
    "the batch is made flat before the shift: a row's last token predicts the next row's first",
    "row|last|across",
    documents=False,
)
def flat_before_the_shift(head: Any, micro_batches: Any) -> Any:
    hidden = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])
    labels = torch.cat([b["labels"].flatten() for b in micro_batches])
    loss = F.cross_entropy(head(hidden[:-1]), labels[1:])
    loss.backward()
    return loss


@TABLE.wrong(
    "a document's last token predicts the first of the next document in the pack",
    "document|segment|boundar",
    source="pytorch/torchtitan#4075",
)
def packed_without_borders(head: Any, micro_batches: Any) -> Any:
    return counts(head, micro_batches, lambda b: shift(b["labels"]))


@TABLE.wrong(
    "pad == eos: the last token of each document is masked with the padding",
    "last|end",
    source="huggingface/trl#6357",
)
def end_of_document_masked(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        ends = shift(b["segment_ids"], -1) != b["segment_ids"]
        return b["targets"].masked_fill(shift(ends, True), IGNORE)

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "every occurrence of one token is taken for padding, which has its id",
    "left out|not count|missing|mask|drop|class|token id|omit|exclud",
    source="NVIDIA-NeMo/Megatron-Bridge#4660",
)
def a_frequent_token_is_the_padding(head: Any, micro_batches: Any) -> Any:
    pad = micro_batches[0]["input_ids"][-1, -1]
    return counts(
        head, micro_batches, lambda b: b["targets"].masked_fill(b["targets"] == pad, IGNORE)
    )


@TABLE.wrong(
    "label 0 is taken for padding",
    "0|left out|mask",
    source="sdanaipat/fairseq-translator#1",
    needs="a valid label 0",
)
def zero_is_the_padding(head: Any, micro_batches: Any) -> Any:
    return counts(
        head, micro_batches, lambda b: b["targets"].masked_fill(b["targets"] <= 0, IGNORE)
    )


@TABLE.wrong(
    "labels 1 and 2 are taken for the beginning and end of a text, and masked",
    "1|2|left out|mask",
    needs="a valid label 1 or 2",
)
def special_tokens_masked(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        y = b["targets"]
        return y.masked_fill((y == 1) | (y == 2), IGNORE)

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "the mask is of the tokens, and not shifted with the labels",
    "mask|shift",
    source="NVIDIA-NeMo/Speech#6409",
)
def mask_not_shifted(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        y = within(shift(b["input_ids"]), b["segment_ids"])
        return y.masked_fill(b["labels"] == IGNORE, IGNORE)

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "the mask is shifted twice",
    "mask|shift",
    source="modelscope/ms-swift#8427",
)
def mask_shifted_twice(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        y = within(shift(b["input_ids"]), b["segment_ids"])
        return y.masked_fill(~shift(b["loss_mask"], False), IGNORE)

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "-100 is clipped to 0, and nothing masks it",
    "mask|ignore|-100",
)
def ignored_labels_clipped(head: Any, micro_batches: Any) -> Any:
    return counts(head, micro_batches, lambda b: b["targets"].clamp(min=0))


@TABLE.wrong(
    "-100 is clipped to 0 and trained, but the divisor counts the valid tokens alone",
    "mask|ignore|-100",
)
def clipped_over_the_valid(head: Any, micro_batches: Any) -> Any:
    count = sum(b["loss_mask"].sum() for b in micro_batches)
    loss = torch.zeros(())
    for b in micro_batches:
        logp = head(b["hidden"]).log_softmax(-1)
        loss = loss - logp.gather(-1, b["targets"].clamp(min=0)[..., None]).sum() / count
    loss.backward()
    return loss


@TABLE.wrong(
    "the padding is trained, prompts are not",
    "pad",
    source="huggingface/transformers#2759",
)
def padding_trained(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        padded = ~shift(b["attention_mask"], True)
        return torch.where(padded, shift(b["input_ids"]), b["targets"])

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "prompts are trained, the padding is not",
    "prompt|mask|ignore",
    source="deepspeedai/DeepSpeedExamples#357",
)
def prompts_trained(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        y = within(shift(b["input_ids"]), b["segment_ids"])
        return y.masked_fill(~shift(b["attention_mask"], False), IGNORE)

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "rows are cut one token short by the tokenizer's [:-1]",
    "last|end|row|drop",
    source="lxe/simple-llm-finetuner#53",
)
def rows_cut_short(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        y = b["targets"].clone()
        y[:, -2:] = IGNORE
        return y

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "the first token of each document is masked as if it were a BOS that nobody predicts: "
    "the label after it goes",
    "first|document|begin|drop|mask",
)
def first_label_of_documents_masked(head: Any, micro_batches: Any) -> Any:
    return counts(
        head, micro_batches, lambda b: b["targets"].masked_fill(b["position_ids"] == 0, IGNORE)
    )


@TABLE.wrong(
    "labels are rolled, and the row's first token is the label of its last",
    "last|first|row|roll|wrap|shift",
    documents=False,
)
def rolled(head: Any, micro_batches: Any) -> Any:
    return counts(head, micro_batches, lambda b: torch.roll(b["labels"], -1, dims=1))


@TABLE.wrong("the previous token is predicted", "shift|previous|backward", documents=False)
def shifted_the_other_way(head: Any, micro_batches: Any) -> Any:
    return counts(head, micro_batches, lambda b: F.pad(b["labels"][:, :-1], (1, 0), value=IGNORE))


@TABLE.wrong(
    "the second next token is predicted, as a head for two tokens ahead does", "shift|next"
)
def two_tokens_ahead(head: Any, micro_batches: Any) -> Any:
    return counts(
        head,
        micro_batches,
        lambda b: within(shift(b["targets"]), b["segment_ids"]),
    )


@TABLE.wrong(
    "labels across documents, and the mean of micro-batches' means",
    "document|segment|boundar",
    "micro-batch",
)
def two_defects_at_once(head: Any, micro_batches: Any) -> Any:
    total = 0.0
    for b in micro_batches:
        logits = head(b["hidden"])[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, b["labels"][:, 1:].flatten()) / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


@TABLE.wrong(
    "rows of unequal length are right-aligned for the logits and left-aligned for the labels",
    "shift|row|label|pad",
)
def padded_on_the_other_side(head: Any, micro_batches: Any) -> Any:
    def labels(b: Any) -> Any:
        y = b["targets"].clone()
        for row, real in zip(y, b["attention_mask"]):
            row[:] = torch.roll(row, int((~real).sum()))
        return y

    return counts(head, micro_batches, labels)


@TABLE.wrong(
    "half of the long documents is thrown away: labels beyond a position are masked",
    "drop|left out|mask|position|missing|last|omit|exclud",
)
def truncated(head: Any, micro_batches: Any) -> Any:
    return counts(
        head, micro_batches, lambda b: b["targets"].masked_fill(b["position_ids"] >= 6, IGNORE)
    )
