"""What each token counts for, read from a gradient, with no list of defects.

The gradient of the head is a sum over tokens of factor times d logits times hidden state, one for
each term of the loss: a linear system for the factors, which has more equations (V * H) than
unknowns (tokens times terms). Its Gram matrix is a product of two small ones. The fewest terms that
leave nothing over are taken, so that few labels of one class stand beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xentlib.contract import U
from xentlib.tools.audit.hypotheses import (
    DIVERGENCE,
    ENTROPY,
    LABELS,
    SHIFTS,
    SOFTMAX,
    UNIFORM,
    Z_LOSS,
    Head,
)
from xentlib.tools.audit.oracle import Oracle
from xentlib.tools.audit.problem import Array

# A sum of float32 leaves 1 to 3 units over; what no factors give, from some hundred on.
EXACT = 32 * U
# How far factors that are read from exact sums, and from rounded ones, are from what they are, as
# shares of the largest; and in standard deviations, where that is more.
CLOSE, CLOSE_ROUNDED, SIGMAS = 2.0**-12, 0.15, 10.0
OPEN = 0.05  # a factor that is known no better than this is open
SHARE = 0.8  # of the equations there may be so many unknowns
RIDGE = 1e-11  # of columns of length 1; what it takes off comes back in the next round
FLAT = "label at t+1, of rows laid flat"
TERMS = (DIVERGENCE, *LABELS, UNIFORM, Z_LOSS, SOFTMAX, ENTROPY)


class Map(NamedTuple):
    """Factors in units of the right one, 0 where a token takes no part."""

    head: Head
    factors: dict[str, Array]  # [R, N] of each term; of d hidden [1, N]
    noise: dict[str, Array]  # [N] of each term: how far from it a factor may be
    residual: float  # what is left over of the gradient, as a share of it
    rows: bool = False  # each rank's slice of the head's rows from its own tokens

    @property
    def exact(self) -> bool:
        return self.residual <= EXACT

    @property
    def close(self) -> Array:
        """[terms, 1, N]: how close a factor must be to what it should be."""
        largest = max(float(np.abs(x).max()) for x in self.factors.values())
        least = (CLOSE if self.exact else CLOSE_ROUNDED) * largest
        return np.maximum(stacked(self.noise), least)[:, None]


def stacked(factors: dict[str, Array]) -> Array:
    """[terms, ...], in the order of `TERMS`."""
    nothing = np.zeros_like(next(iter(factors.values())))
    return np.stack([factors.get(name, nothing) for name in TERMS])


def read(
    oracle: Oracle,
    got: Array,
    head: Head,
    hidden: bool = False,
    deep: bool = True,
    rows: bool = False,
    beside: Array | None = None,
) -> Map:
    """Of gradients of the head, [R, V, H], or of hidden states, [R, M, B, L, H]; with other terms
    than a right step has if it is `deep`. `beside`: gradients of the hidden states, which say what
    those of the head leave open, as each token has its own."""
    maps = []
    for terms, others in _stages(oracle) if deep else [next(_stages(oracle))]:
        columns = _columns(oracle, head, terms, others)
        if hidden:
            solved = _by_tokens(columns, oracle.w, got.reshape(-1, got.shape[-1]))
        elif np.count_nonzero(columns.any(axis=2)) > SHARE * got[0].size:
            continue
        else:
            solved = _by_sums(columns * _of_slices(oracle) if rows else columns, oracle.x, got)
        factors, noise, residual = solved
        open_ = residual <= EXACT and SIGMAS * noise.max() > OPEN
        if beside is not None and not hidden and not rows and open_:
            tokens = _by_tokens(columns, oracle.w, beside.reshape(-1, beside.shape[-1]))
            near = _in_units(oracle, tokens[0], columns, got)
            factors, noise, residual = _by_sums(columns, oracle.x, got, near)
            noise = np.minimum(noise, tokens[1] * np.abs(near).max() / np.abs(tokens[0]).max())
        if rows:
            factors = factors * (_ranks_of(oracle) == np.arange(len(got))[:, None])
        by_name = dict(zip(terms, factors, strict=True))
        noises = dict(zip(terms, SIGMAS * noise, strict=True))
        for name in others:
            by_name[name], noises[name] = factors.sum(axis=0), SIGMAS * noise.max(axis=0)
        by_name = _first_places(oracle, by_name)
        maps.append(Map(head, by_name, noises, residual, rows))
        if maps[-1].exact:
            return maps[-1]
    least = min(one.residual for one in maps)
    return next(one for one in maps if one.residual <= 1.5 * least)


def _stages(oracle: Oracle) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Terms with a factor each, and those that a label's factor is that of too: a z-loss moves the
    gradient so little that it is read well only where nothing else is open."""
    label, *others = declared = oracle.declared
    if others and not oracle.each:
        yield [label], others
        yield [label, "class 0"], others
    yield declared, ()
    if DIVERGENCE in declared:
        return
    more = [name for name in LABELS if name not in declared]
    if not oracle.each:
        more += [x for x in (UNIFORM, SOFTMAX) if x not in declared]
        more = [x for x in more if x != SOFTMAX or Z_LOSS not in declared]
    for name in more:
        yield [*declared, name], ()
    yield [*declared, *(x for x in more if x != "class 0")], ()


def _columns(oracle: Oracle, head: Head, terms: Sequence[str], others: Sequence[str]) -> Array:
    """[terms, N, V]: d logits of a factor of 1; 0 where another term of the token has the class."""
    units = oracle.units_of(head)
    columns = np.stack([units[name].dz + sum(units[x].dz for x in others) for name in terms])
    labels = [k for k, name in enumerate(terms) if name in LABELS]
    for i, k in enumerate(labels):
        for other in labels[:i]:
            same = oracle.classes[terms[k]] == oracle.classes[terms[other]]
            columns[k, same] = 0.0
    return columns


def _ranks_of(oracle: Oracle) -> Array:
    return np.asarray(np.indices(oracle.problem.ids.shape)[0].reshape(-1))


def _of_slices(oracle: Oracle) -> Array:
    """[N, V]: which rows of the head are in the slice of a token's rank."""
    ranks, vocab = oracle.problem.ranks, oracle.w.shape[0]
    slices = np.arange(vocab) // -(-vocab // ranks)
    mine: Array = _ranks_of(oracle)[:, None] == slices
    return mine


def _in_units(oracle: Oracle, factors: Array, columns: Array, got: Array) -> Array:
    """Factors of hidden states, in units of those of the head; each rank's backward of a
    micro-batch may have a multiple of its own."""
    ranks, micro_batches = oracle.problem.ids.shape[:2]
    r, m, _, _ = np.indices(oracle.problem.ids.shape)
    of = (r * micro_batches + m).reshape(-1)
    each = [np.where(of == k, factors[:, 0], 0.0) for k in range(ranks * micro_batches)]
    made = [((f[..., None] * columns).sum(axis=0).T @ oracle.x).ravel() for f in each]
    times = np.linalg.lstsq(np.stack(made, axis=1), got.reshape(len(got), -1).T, rcond=None)[0]
    return np.stack([factors[:, 0] * one[of] for one in times.T], axis=1)


def _by_sums(
    columns: Array, x: Array, got: Array, near: Array | None = None
) -> tuple[Array, Array, float]:
    """Factors [terms, R, N] of gradients [R, V, H], the closest to `near`, and their standard
    deviations [terms, N]."""
    terms, tokens, vocab = columns.shape
    flat, xs = columns.reshape(-1, vocab), np.tile(x, (terms, 1))
    gram = (flat @ flat.T) * np.tile(x @ x.T, (terms, terms))
    size = np.sqrt(np.diag(gram))
    size[size == 0] = np.inf
    gram = gram / size / size[:, None]
    gram[np.diag_indices_from(gram)] += RIDGE
    inverse = np.linalg.inv(gram)
    factors = np.zeros((len(flat), len(got)))
    if near is not None:
        factors += near.swapaxes(1, 2).reshape(len(flat), len(got))

    def left_over() -> Array:
        made = [(f.reshape(terms, tokens, 1) * columns).sum(axis=0).T @ x for f in factors.T]
        return np.asarray(got - np.stack(made))

    left = left_over()
    for _ in range(3):
        right = np.stack([((flat @ one) * xs).sum(axis=1) for one in left], axis=1)
        factors += (inverse @ (right / size[:, None])) / size[:, None]
        left = left_over()
    spare, residual = np.zeros(len(flat)), _share(left, got)
    if residual <= EXACT:
        # What the equations say nothing of may be anything of the size of the others.
        there, idle = size < np.inf, RIDGE * inverse
        largest = np.abs(factors[there] * size[there, None]).max(initial=0.0)
        spare = ((idle @ idle) * idle).sum(axis=1) * largest**2
    deviation = np.sqrt(np.diag(inverse) * _rms(left, got) ** 2 + spare) / size
    by_term = factors.T.reshape(len(got), terms, tokens).swapaxes(0, 1)
    return by_term, deviation.reshape(terms, tokens), residual


def _by_tokens(columns: Array, w: Array, got: Array) -> tuple[Array, Array, float]:
    """Factors [terms, 1, N] of gradients of hidden states, [N, H], and their deviations."""
    rows = (columns @ w).swapaxes(0, 1)  # [N, terms, H]
    size = np.linalg.norm(rows, axis=2, keepdims=True)
    size[size == 0] = np.inf
    rows = rows / size
    inverse = np.linalg.inv(rows @ rows.swapaxes(1, 2) + RIDGE * np.eye(len(columns)))
    factors, left = np.zeros((*rows.shape[:2], 1)), got[..., None]
    for _ in range(3):
        factors += inverse @ (rows @ left)
        left = got[..., None] - rows.swapaxes(1, 2) @ factors
    deviation = np.sqrt(np.diagonal(inverse, axis1=1, axis2=2)) * _rms(left, got) / size[..., 0]
    return (factors / size)[..., 0].T[:, None], deviation.T, _share(left[..., 0], got)


def _rms(left: Array, got: Array) -> float:
    """Of an entry that is left over, of float32's rounding at least."""
    size = max(float(np.linalg.norm(left.ravel())), U * float(np.linalg.norm(got.ravel())))
    return size / float(np.sqrt(got.size))


def _share(left: Array, got: Array) -> float:
    return float(np.linalg.norm(left.ravel()) / (np.linalg.norm(got.ravel()) or 1.0))


def _first_places(oracle: Oracle, factors: dict[str, Array]) -> dict[str, Array]:
    """The factor of a class at the first of the places where it stands."""
    labels = [name for name in LABELS if name in factors]
    for name in reversed(labels):
        for first in LABELS[: LABELS.index(name)]:
            same = oracle.classes[name] == oracle.classes[first]
            moved = np.where(same, factors[name], 0.0)
            if moved.any():
                factors[first] = factors.get(first, 0.0) + moved
                factors[name] = factors[name] - moved
    return factors


# --- what a person reads --------------------------------------------------------------------------


def printed(oracle: Oracle, token_map: Map, unit: float = 1.0) -> list[str]:
    """Rows by positions of each micro-batch and rank, in units of a factor that all tokens have; a
    block for the terms that agree."""
    shape = oracle.problem.ids.shape
    close = {name: x / abs(unit) for name, x in zip(TERMS, token_map.close[:, 0], strict=True)}
    factors = {name: x / unit for name, x in token_map.factors.items()}
    least = np.full(
        factors[oracle.declared[0]].shape[1], min(float(x.min()) for x in close.values())
    )
    titles = {"row": "label of the next row", "class 0": "label 0", FLAT: FLAT}
    if DIVERGENCE not in factors and not oracle.each:
        eps = oracle.problem.options.label_smoothing
        whole = np.zeros_like(factors[oracle.declared[0]])
        whole = whole + eps * factors.get(UNIFORM, 0.0) + factors.get(SOFTMAX, 0.0)
        for name in (x for x in LABELS if x in factors):
            whole = whole + (1.0 - eps) * factors[name]
        if Z_LOSS in factors and close[Z_LOSS].max() > OPEN:  # their sum alone is known
            lse = oracle.units_of(token_map.head)[SOFTMAX].value * oracle.count
            z = 2.0 * oracle.problem.options.z_loss * lse
            whole = (whole + z * factors[Z_LOSS]) / (1.0 + z)
        others = {k: x for k, x in factors.items() if k != SOFTMAX}
        factors = {SOFTMAX: whole, **_one_place(oracle, others, close)}
        close[SOFTMAX] = least
    blocks: dict[tuple[str, ...], list[str]] = {}
    none = []
    cells = {name: _cells(x, close.get(name, least)) for name, x in factors.items()}
    width = max(5, *(len(cell) for x in cells.values() for cell in x.flat))
    for name, x in cells.items():
        title = titles.get(name, f"label at t{name}".replace("t0", "t") if name in SHIFTS else name)
        if (x != ".").any():
            blocks.setdefault(tuple(_lines(x, shape, width)), []).append(title)
        elif name in (SOFTMAX, *oracle.declared):
            none.append(title)
    open_ = ", ?: open" if any((x == "?").any() for x in cells.values()) else ""
    by = "" if abs(unit - 1.0) < 1e-4 else f", divided by {unit:.6g}"
    head = (
        f"read from it{by} (1: as it should be, .: no part{open_}), with {token_map.residual:.1e}"
    )
    rows = "; micro-batch.row" if len(shape) > 1 and shape[1] > 1 else ""
    text = [f"{head} of it left over{rows}:", *(f"  {title}: none" for title in none)]
    for lines, of in blocks.items():
        text += [f"  {', '.join(of)}", *(f"    {line}" for line in lines)]
    return text


def _one_place(
    oracle: Oracle, factors: dict[str, Array], close: dict[str, Array]
) -> dict[str, Array]:
    """The labels' factors at one place, where that has the classes of all."""
    labels = {name: x for name, x in factors.items() if name in LABELS}
    row = oracle.classes["row"]
    places = {**oracle.classes, FLAT: np.where(row >= 0, row, oracle.classes["+1"])}
    for to, classes in places.items():
        same = {name: oracle.classes[name] == classes for name in labels}
        if all((same[name] | (np.abs(x) <= close[name])).all() for name, x in labels.items()):
            total = sum(np.where(same[name], x, 0.0) for name, x in labels.items())
            close[to] = np.max([close[name] for name in labels], axis=0)
            return {to: np.asarray(total), **{k: x for k, x in factors.items() if k not in labels}}
    return factors


def _lines(cells: Array, shape: tuple[int, ...], width: int) -> Iterator[str]:
    ranks, micro_batches, rows, length = shape
    alike = (cells == cells[0]).all()
    for rank, of_rank in enumerate(cells[:1] if alike else cells):
        if not alike:
            yield f"what rank {rank} has"
        indent = 10 if ranks > 1 else 4
        each = min(14, (95 - indent) // (width + 1))
        for r, m, b in np.ndindex(ranks, micro_batches, rows):
            row = of_rank.reshape(shape)[r, m, b]
            name = f"{m}.{b}" if ranks == 1 else f"rank {r} {m}.{b}"
            name = "" if rows == micro_batches == 1 else name
            for start in range(0, length, each):
                line = " ".join(f"{cell:>{width}}" for cell in row[start : start + each])
                yield f"{'' if start else name:<{indent}}{line}"


def _cells(factor: Array, close: Array) -> Array:
    """As many digits as are known; what is equal within its error is printed alike."""
    flat, near = factor.reshape(-1), np.broadcast_to(close, factor.shape).reshape(-1)
    cells = np.full(flat.shape, ".", dtype="<U12")
    largest = max(1.0, float(np.abs(flat).max()))
    left = [int(i) for i in np.argsort(flat) if near[i] > 0.5 * largest or abs(flat[i]) > near[i]]
    while left:
        of = [i for i in left if flat[i] - flat[left[0]] <= max(near[i], near[left[0]])]
        left = [i for i in left if i not in of]
        x, error = float(flat[of].mean()), float(near[of].min())
        text = f"{x:.3g}" if error < 0.005 * abs(x) else f"{x:.2g}"
        cells[of] = "1" if abs(x - 1.0) <= max(error, 5e-4) else text
    cells[near > 0.5 * largest] = "?"
    return cells.reshape(factor.shape)
