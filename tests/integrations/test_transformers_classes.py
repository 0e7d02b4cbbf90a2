"""Every causal language model of the installed transformers, tiny: patched, its loss and all of its
gradients are the unpatched model's and no logits are made; or it is refused, and `tiny_models.json`
says why. A class that comes with a new transformers is tried as it is, without an entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from packaging.version import Version  # noqa: E402

# Of the 142 classes of 5.0.0, 122 pass; the others have fields of other names there, or cannot
# compute a loss unpatched: of routers, where it is the number 0.
if Version(transformers.__version__) < Version("5.23"):
    pytest.skip("the table of tiny models is for transformers 5.23", allow_module_level=True)

from helpers import tiny_models  # noqa: E402
from helpers.causal_lm import NONE, step  # noqa: E402
from helpers.held import hold_in_norm  # noqa: E402
from helpers.pairs import parameters  # noqa: E402
from helpers.tiny_models import (  # noqa: E402
    CLASSES,
    IMAGES,
    NEEDS,
    class_of,
    code_of,
    inputs_of,
    model_of,
    refusal_of,
)
from xentlib.torch.integrations.transformers import patch  # noqa: E402

TRIED = [*CLASSES, *IMAGES]
# The first of those whose classes differ in their names alone; the others run under --full.
KEPT = {code_of(x): x for x in reversed(TRIED)}.values()


@contextmanager
def without_patch(tried: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(
            f"{class_of(tried)} cannot be tried as it is. Say what it needs, under its name in "
            f"tests/helpers/tiny_models.json."
        )
        raise


@pytest.mark.parametrize("tried", parameters(TRIED, KEPT))
def test_patched_is_the_unpatched_model(tried: str) -> None:
    """A12. Catches: a soft cap, a factor, an auxiliary loss or a column of the head left out;
    logits that are made after all."""
    refusal = refusal_of(tried)
    with without_patch(tried):
        model, inputs = model_of(tried), inputs_of(tried)
        want = None if refusal else step(model, inputs)
    if want is None:
        with pytest.raises(TypeError, match=refusal["raises"]):
            step(patch(model), inputs)
        return
    assert want.logits
    got = step(patch(model), inputs)
    assert got.logits == []
    assert got.gradients.keys() == want.gradients.keys()
    hold_in_norm([got.loss], [want.loss], "loss")
    sizes = {name: np.linalg.norm(g) for name, g in want.gradients.items()}
    whole = np.linalg.norm(list(sizes.values()))
    assert whole > 0
    for name, size in sizes.items():
        if size > NONE * whole:
            hold_in_norm([got.gradients[name]], [want.gradients[name]], name)
        else:
            assert np.linalg.norm(got.gradients[name]) <= NONE * whole, name


def test_classes_that_compute_something_else_are_kept() -> None:
    """A soft cap, a factor, a router's loss; not what only a name differs in."""
    assert code_of("mistral") == code_of("llama")
    assert len({code_of(x) for x in ("llama", "gemma2", "cohere", "mixtral", "gpt2", "bart")}) == 6


def test_every_entry_is_a_class() -> None:
    assert set(NEEDS) <= {*CLASSES.values(), *IMAGES}
    assert not set(CLASSES.values()) & set(IMAGES)


def test_a_model_that_nobody_has_cut_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "MOST", 1000)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has \d+ parameters, more than 1000"):
        model_of("llama")
