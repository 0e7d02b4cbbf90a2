"""A patched model in `Trainer` on two ranks, under DDP, FSDP2 and ZeRO-1, 2 and 3: a step is that
of one process with all logits on one batch."""

from __future__ import annotations

import importlib.util

import pytest

from helpers.collected import collected
from helpers.ranks import launch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from packaging.version import Version  # noqa: E402

if Version(transformers.__version__) < Version("5.23"):
    pytest.skip("its arguments and Accelerate's are those of 5.23", allow_module_level=True)

from helpers.patched import held  # noqa: E402
from helpers.trainer_ranks import Case, Found, on_rank, one_process  # noqa: E402

WRAPPERS = ["DDP", "FSDP2"]
if importlib.util.find_spec("deepspeed") is not None:
    WRAPPERS += ["ZeRO-1", "ZeRO-2", "ZeRO-3"]
PATCHED = [
    *(Case(*case) for x in WRAPPERS for case in (("Llama", x, 1), ("GPT2", x, 4))),
    *(Case("Llama", x, 4) for x in WRAPPERS if x in ("FSDP2", "ZeRO-3")),
    *(Case("Llama", "FSDP2", n, gather=way) for n, way in ((4, "hidden"), (1, "stream"))),
    *(Case("even Llama", x, 2, gather="hidden") for x in WRAPPERS if x == "ZeRO-3"),
]
# What Trainer does by itself: right where the class's name tells it the loss.
PLAIN = [Case(make, "FSDP2", 4, patched=False) for make in ("Llama", "GPT2")]
KINDS = {"DDP": "DistributedDataParallel", "FSDP2": "FSDP"}


@pytest.fixture(scope="module")
def found(request) -> dict[Case, list[Found]]:
    """Of each case what both ranks have: one start for all."""
    cases = [*collected(request, PATCHED), *PLAIN]
    return dict(zip(cases, zip(*launch(2, on_rank, cases), strict=True), strict=True))


def compared(case: Case, found: list[Found]) -> list[float]:
    """Every parameter's change, and the ratio of the losses."""
    ratios = []
    for got in found:
        assert got.wrapper.startswith(KINDS.get(case.wrapper, "DeepSpeedEngine"))
        want, loss = one_process(case.make, got.before)
        ratios.append(got.loss / loss)
        if case != PLAIN[1]:
            held(got.change, want)
            held({"loss": torch.tensor(got.loss)}, {"loss": torch.tensor(loss)})
    return ratios


NAMES = [", ".join(map(str, (x.wrapper, x.make, x.accumulate, x.gather))) for x in PATCHED]


@pytest.mark.parametrize("case", PATCHED, ids=NAMES)
def test_every_parameter_on_two_ranks(found: dict[Case, list[Found]], case: Case) -> None:
    """The second step, of micro-batches and ranks with 1 to 11 tokens a row. Catches: a mean of
    means, a sum over ranks for a mean, a division by accumulation steps that comes twice, a head
    that is left as it was gathered in the first step."""
    compared(case, found[case])


def test_what_trainer_does_with_an_unpatched_model(found: dict[Case, list[Found]]) -> None:
    """Of a GPT2LMHeadModel it counts the first column of labels too: its loss is 14 % small, and
    the patched one's is not."""
    compared(PLAIN[0], found[PLAIN[0]])
    assert all(0.8 < ratio < 0.9 for ratio in compared(PLAIN[1], found[PLAIN[1]]))
