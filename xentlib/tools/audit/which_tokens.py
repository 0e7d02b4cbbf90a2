"""Which tokens are scored against which labels, have which terms and stand in which means, in each
defect of that kind, for a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xentlib.tools.audit.hypotheses import Labelled, Terms
from xentlib.tools.audit.problem import IGNORE, Array, Problem, next_labels


def twice(p: Problem) -> list[Any]:
    """The given targets shifted again, across documents or not; two tokens ahead."""
    shifted = [next_labels(p.targets, None), next_labels(p.targets, p.segments)]
    if p.kind != "logprobs":
        shifted.append(next_labels(p.labels, p.segments, by=2))
    return [Labelled(x) for x in shifted]


def backwards(p: Problem) -> list[Any]:
    """Position t is given token t - 1."""
    back = np.full_like(p.labels, IGNORE)
    back[..., 1:] = p.labels[..., :-1]
    return [Labelled(back)]


def masked(p: Problem) -> list[Any]:
    """The mask of the labels is not used; padding counts too, or does not. A divergence needs no
    next token, so that the last one may count."""
    within = np.where(p.attention, p.ids, IGNORE)
    shifted = [Labelled(next_labels(x, s)) for x in (within, p.ids) for s in (p.segments, None)]
    return shifted if p.teacher is None else [*shifted, Labelled(within), Labelled(p.ids)]


def without(masks: Sequence[Array]) -> list[Any]:
    """What a mask leaves out is counted still, or is not."""
    return [Labelled(None, keep, counted) for keep in masks for counted in (True, False)]


def last_token(p: Problem) -> list[Any]:
    """Of each row: the last target, or the one of the last position that can have one; of each
    document: its last target."""
    valid = p.targets != IGNORE
    rest = np.cumsum(valid[..., ::-1], axis=-1)[..., ::-1]
    place = np.ones(valid.shape, np.bool_)
    place[..., -2:] = False
    last = next_labels(p.targets, p.segments) != IGNORE
    return without([rest > 1, place, last])


def last_chunk(p: Problem) -> list[Any]:
    """The end of each micro-batch, laid flat: k positions, or what is over of its valid tokens, or
    of those of all micro-batches, in chunks of c; of one rank's rows, or of all ranks' rows one
    after the other. Some of each is left, or it is another defect."""
    ranks, m, b, n = p.targets.shape
    valid = p.targets != IGNORE
    masks: dict[bytes, Array] = {}

    def add(keep: Array) -> None:
        rest = keep & valid
        if not (keep | ~valid).all() and rest.any(axis=(2, 3)).all():
            masks.setdefault(rest.tobytes(), keep)

    # Rows that are laid flat together: a rank's, or all ranks'.
    for groups in (ranks, 1) if ranks > 1 else (1,):
        tokens = ranks // groups * b * n
        by_batch = (groups, ranks // groups, m, b, n)

        def back(flat: Array, by_batch: tuple[int, ...] = by_batch) -> Array:
            g, r, m, b, n = by_batch
            return flat.reshape(g, m, r, b, n).swapaxes(1, 2).reshape(g * r, m, b, n)

        flat = valid.reshape(by_batch).swapaxes(1, 2).reshape(groups, m, tokens)
        order = np.cumsum(flat, axis=-1)
        whole = np.cumsum(flat.reshape(groups, -1), axis=-1).reshape(flat.shape)
        for k in range(1, tokens):
            add(back(np.broadcast_to(np.arange(tokens) < tokens - k, flat.shape)))
            add(back(order <= order[..., -1:] // k * k))
            add(back(whole <= whole[:, -1:, -1:] // k * k))
    return without([*masks.values()])


def one_micro_batch(p: Problem) -> list[Any]:
    masks = np.zeros((p.micro_batches, *p.targets.shape), np.bool_)
    for m, keep in enumerate(masks):
        keep[:, m] = True
    return without([*masks])


def unshifted_mask(p: Problem) -> list[Any]:
    """The next token, by the mask of the position itself."""
    masks = p.labels != IGNORE, p.attention
    ahead = [next_labels(p.ids, s) for s in (p.segments, None)]
    return [Labelled(np.where(masks[0], x, IGNORE)) for x in ahead]


def padding_alone(p: Problem) -> list[Any]:
    """The mask of the labels is used, and padding has labels."""
    with_padding = np.where(p.attention, p.labels, p.ids)
    ahead = [next_labels(with_padding, s) for s in (p.segments, None)]
    of_padding = next_labels(np.where(p.attention, IGNORE, p.ids), None)
    ahead.append(np.where(of_padding != IGNORE, of_padding, p.targets))
    return [] if p.attention.all() else [Labelled(x) for x in ahead]


def clipped_to_0(p: Problem) -> list[Any]:
    """-100 is clipped to class 0, and has a loss: after the shift, or before it."""
    zero = np.where(p.labels == IGNORE, 0, p.labels)
    if p.teacher is not None:  # which has no labels
        return []
    ahead = [np.where(p.targets == IGNORE, 0, p.targets)]
    if p.kind == "step":
        ahead += [next_labels(zero, s) for s in (p.segments, None)]
    return [Labelled(x) for x in ahead]


def last_of_documents(p: Problem) -> list[Any]:
    """The last token of each document is nobody's target."""
    last = np.ones(p.ids.shape, np.bool_)
    last[..., :-1] = p.segments[..., :-1] != p.segments[..., 1:]
    keep = np.ones(p.ids.shape, np.bool_)
    keep[..., :-1] = ~last[..., 1:]
    return without([keep])


def first_of_documents(p: Problem) -> list[Any]:
    """The first token of each document has no label."""
    keep = np.zeros(p.ids.shape, np.bool_)
    keep[..., 1:] = p.segments[..., :-1] == p.segments[..., 1:]
    return without([keep])


def next_row(p: Problem) -> list[Any]:
    """Rows laid flat before the shift: the last token of a row is scored against the first of the
    next one, where that has a label; of a micro-batch, or of all of a rank."""
    ends = []
    for inside in (p.targets, next_labels(p.labels, None)):
        ahead = inside.copy()
        ahead[..., :-1, -1] = p.labels[..., 1:, 0]
        ends.append(ahead)
        every = ahead.copy()
        every[:, :-1, -1, -1] = p.labels[:, 1:, 0, 0]
        ends.append(every)
    rolled = next_labels(p.labels, None)
    rolled[..., -1] = p.labels[..., 0]
    return [Labelled(x) for x in (*ends, rolled)]


def no_micro_batch(p: Problem, number: int) -> list[Any]:
    keep = np.ones(p.targets.shape, np.bool_)
    keep[:, number] = False
    return without([keep])


# --- which terms, and means of which chunks -------------------------------------------------------


def of_terms(p: Problem, *names: str) -> list[Any]:
    """Terms that positions without a label have too, on padding or not, divided by the tokens that
    count or by all that have it."""
    there = {True: p.targets.size, False: int(p.attention.sum())}
    shares = [(1.0, pad) for pad in there] + [(p.count / n, pad) for pad, n in there.items()]
    return [
        Terms(everywhere=names, share=share, padding=pad) for share, pad in dict.fromkeys(shares)
    ]


def no_smoothing(p: Problem) -> list[Any]:
    return [Terms(label=1.0 / (1.0 - p.options.label_smoothing), uniform=0.0)]


def over_others(p: Problem) -> list[Any]:
    """Label smoothing's share over all classes but the label's."""
    eps, vocab = p.options.label_smoothing, p.weight.shape[0]
    own = (1.0 - eps - eps / (vocab - 1)) / (1.0 - eps)
    return [Terms(label=own, uniform=vocab / (vocab - 1))]


def chunks(p: Problem) -> list[Any]:
    """Lengths of chunks of a micro-batch that are neither its rows nor all of it, as far as tokens
    that count are in them."""
    r, m, b, n = p.targets.shape
    valid = (p.targets != IGNORE).reshape(r * m, b * n)
    number = int((valid.sum(axis=1) > 0).sum())
    lengths = []
    for length in range(2, b * n):
        if length % n or length // n not in (1, b):
            parts = [valid[:, i : i + length].any(axis=1).sum() for i in range(0, b * n, length)]
            lengths += [length] * bool(sum(parts) > number)
    return lengths
