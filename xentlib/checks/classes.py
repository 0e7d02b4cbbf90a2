"""The classes that a sampler kept, and those whose log-probabilities are asked for."""

from __future__ import annotations

from xentlib.checks.validators import ArraySpec, Refusals, check_device, check_integers

KEPT = Refusals(
    ValueError,
    shape="`{name}` must have shape {leading} + (K,), K classes of each token of `{source}`; got "
    "{shape}. Fill rows that have fewer up with -1.",
    # A token that the sampler cannot have drawn.
    outside="`labels` must be among the `kept` classes of their token; got {label}, which is not. "
    "Pass what the sampler kept at the same positions, or -1 throughout where it kept all; a label "
    "that was not sampled, as of a prompt or a forced token, is masked, or added to its row.",
    smoothing="`label_smoothing` must be 0 with `kept`, `ids` or `top_k`; got {eps:g}. Leave it "
    "out.",
)


def check_classes(
    kept: ArraySpec | None, ids: ArraySpec | None, tokens: ArraySpec, *, source: str
) -> None:
    """Validate what a call has of them, beside its argument `source`."""
    leading = tokens.shape[:-1]
    for name, x in (("kept", kept), ("ids", ids)):
        if x is None:
            continue
        check_integers(name, x, "Pass class ids, -1 for none; of a mask its `nonzero`.")
        right = len(x.shape) == len(leading) + 1 and x.shape[:-1] == leading and x.shape[-1] > 0
        KEPT.require("shape", right, name=name, leading=leading, source=source, shape=x.shape)
        check_device(name, x, tokens, source)
