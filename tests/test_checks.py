"""Bad input, as data: one sentence each, the same from both backends; and what the packages show.

`MESSAGES` holds the whole text, so two backends that both match it say the same words.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from xentlib import evaluation as evaluation_spec
from xentlib import labels as labels_spec
from xentlib import logprobs as logprobs_spec
from xentlib import nll as nll_spec
from xentlib.interop import to_jax, to_torch

N, V, H = 6, 11, 4
WIDE = {"hidden": np.zeros((4096, 768), np.float32), "labels": np.zeros(4096, np.int32)}
FLOATS = "float16, bfloat16, float32, float64"
OUTPUTS = "'logprobs', 'entropy', 'lse', 'correct', 'predicted'"
OTHER_HEAD = "Pass the head that belongs to these hidden states."
RESHAPE = "Reshape it, or flatten `hidden` to match."


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def label(value: int, dtype: str) -> np.ndarray:
    """Valid labels but for one."""
    labels = np.arange(N).astype(dtype)
    labels[2] = value
    return labels


def outside(value: int) -> str:
    return (
        f"`labels` must lie in [0, {V}) or equal `ignore_index` (-100); got {value}. "
        f"Mask that token with `where`, or set its label to `ignore_index`."
    )


@dataclasses.dataclass(frozen=True)
class Bad:
    """Arguments that differ from a good call, and what is raised."""

    id: str
    error: type[Exception]
    changes: dict[str, Any]
    message: str


BAD = [
    # shapes
    Bad(
        "transposed head",
        ValueError,
        WIDE | {"weight": zeros(768, 50257)},
        "`weight` must have shape (vocab, 768) to match `hidden` (4096, 768); got (768, 50257). "
        "Pass `weight_layout='HV'` or `weight.T`.",
    ),
    Bad(
        "transposed kernel",
        ValueError,
        {"weight": zeros(V, H), "weight_layout": "HV"},
        "`weight` must have shape (4, vocab) to match `hidden` (6, 4); got (11, 4). "
        "Pass `weight_layout='VH'` or `weight.T`.",
    ),
    Bad(
        "another head",
        ValueError,
        {"weight": zeros(V, 5)},
        f"`weight` must have shape (vocab, 4) to match `hidden` (6, 4); got (11, 5). {OTHER_HEAD}",
    ),
    Bad(
        "weight of one dimension",
        ValueError,
        {"weight": zeros(V)},
        f"`weight` must have shape (vocab, 4) to match `hidden` (6, 4); got (11,). {OTHER_HEAD}",
    ),
    Bad(
        "empty head",
        ValueError,
        {"weight": zeros(0, H)},
        "`weight` must have at least one vocabulary row; got shape (0, 4). "
        "Gather a partitioned head before the call.",
    ),
    Bad(
        "hidden of no dimension",
        ValueError,
        {"hidden": zeros()},
        "`hidden` must have shape (..., hidden_size) with hidden_size >= 1; got (). "
        "Pass the states that go into the head.",
    ),
    Bad(
        "labels too short",
        ValueError,
        {"labels": zeros(5, dtype=np.int32)},
        f"`labels` must have shape (6,), one entry per token of `hidden`; got (5,). {RESHAPE}",
    ),
    Bad(
        "labels not flat",
        ValueError,
        {"labels": zeros(2, 3, dtype=np.int32)},
        f"`labels` must have shape (6,), one entry per token of `hidden`; got (2, 3). {RESHAPE}",
    ),
    Bad(
        "bias of the trunk",
        ValueError,
        {"bias": zeros(H)},
        "`bias` must have shape (11,), one entry per row of the head; got (4,). "
        "Pass the bias of this head, or None.",
    ),
    Bad(
        "where of a batch",
        ValueError,
        {"where": zeros(1, N, dtype=np.bool_)},
        f"`where` must have shape (6,), one entry per token of `hidden`; got (1, 6). {RESHAPE}",
    ),
    Bad(
        "one token weight",
        ValueError,
        {"token_weights": zeros(1)},
        f"`token_weights` must have shape (6,), one entry per token of `hidden`; got (1,). "
        f"{RESHAPE}",
    ),
    # dtypes
    Bad(
        "integer hidden",
        TypeError,
        {"hidden": zeros(N, H, dtype=np.int32)},
        f"`hidden` must be floating point ({FLOATS}); got int32. Cast it before the call.",
    ),
    Bad(
        "integer weight",
        TypeError,
        {"weight": zeros(V, H, dtype=np.int8)},
        f"`weight` must be floating point ({FLOATS}); got int8. Cast it before the call.",
    ),
    Bad(
        "boolean bias",
        TypeError,
        {"bias": zeros(V, dtype=np.bool_)},
        f"`bias` must be floating point ({FLOATS}); got bool. Cast it before the call.",
    ),
    Bad(
        "float labels",
        TypeError,
        {"labels": zeros(N)},
        "`labels` must be integers; got float32. Pass class indices, not one-hot rows or masks.",
    ),
    Bad(
        "boolean labels",
        TypeError,
        {"labels": zeros(N, dtype=np.bool_)},
        "`labels` must be integers; got bool. Pass class indices, not one-hot rows or masks.",
    ),
    Bad(
        "integer where",
        TypeError,
        {"where": zeros(N, dtype=np.int32)},
        "`where` must be boolean; got int32. Compare it with 0, or pass weights as "
        "`token_weights`.",
    ),
    Bad(
        "integer token weights",
        TypeError,
        {"token_weights": zeros(N, dtype=np.int32)},
        f"`token_weights` must be floating point ({FLOATS}); got int32. Cast it before the call.",
    ),
    Bad(
        "float ignore_index",
        TypeError,
        {"ignore_index": -100.0},
        "`ignore_index` must be an integer; got -100.0. Pass the label that marks tokens without a "
        "loss, -100 by convention.",
    ),
    # labels
    *(
        Bad(f"label {value} {dtype}", ValueError, {"labels": label(value, dtype)}, outside(value))
        for dtype, values in {
            "int32": (-1, V, V + 5, -101),
            "int64": (-1, V, V + 5, 2**40),
            "int8": (-1, V, 127, -128),
            "uint8": (V, V + 5, 156),  # 156 is -100 in a byte
        }.items()
        for value in values
    ),
    # options
    Bad(
        "negative budget",
        ValueError,
        {"max_chunk_bytes": -1},
        "`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; got -1. "
        "Pass None for the default.",
    ),
    Bad(
        "fractional budget",
        ValueError,
        {"max_chunk_bytes": 1e6},
        "`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; "
        "got 1000000.0. Pass None for the default.",
    ),
    Bad(
        "unknown output",
        ValueError,
        {"outputs": ("lse", "perplexity")},
        f"`outputs` must hold names from {OUTPUTS}; got 'perplexity'. Leave it out.",
    ),
    Bad(
        "one output as text",
        ValueError,
        {"outputs": "lse"},
        f"`outputs` must be a tuple of names from {OUTPUTS}; got 'lse'. "
        f"Pass for instance `outputs=('lse',)`.",
    ),
    Bad(
        "unknown reduction",
        ValueError,
        {"reduction": "none"},
        "`reduction` must be one of 'mean', 'sum'; got 'none'.",
    ),
    Bad(
        "unknown layout",
        ValueError,
        {"weight_layout": "VD"},
        "`weight_layout` must be one of 'VH', 'HV'; got 'VD'.",
    ),
    Bad(
        "unknown compute dtype",
        ValueError,
        {"compute_dtype": "bfloat16"},
        "`compute_dtype` must be one of 'float32', 'float64'; got 'bfloat16'.",
    ),
    Bad(
        "float64 computed in float32",
        ValueError,
        {"hidden": zeros(N, H, dtype=np.float64), "compute_dtype": "float32"},
        "`compute_dtype` must be None or 'float64' for float64 inputs; got 'float32'. "
        "Cast the inputs to float32 instead.",
    ),
    Bad(
        "softcap 0",
        ValueError,
        {"softcap": 0},
        "`softcap` must be None, a positive number or a 0-d array; got 0.",
    ),
    Bad(
        "softcap nan",
        ValueError,
        {"softcap": float("nan")},
        "`softcap` must be None, a positive number or a 0-d array; got nan.",
    ),
    Bad(
        "smoothing 1.5",
        ValueError,
        {"label_smoothing": 1.5},
        "`label_smoothing` must be a number in [0, 1]; got 1.5.",
    ),
    Bad(
        "negative z-loss",
        ValueError,
        {"z_loss": -0.1},
        "`z_loss` must be a number >= 0 or a 0-d array; got -0.1.",
    ),
    Bad("temperature 0", ValueError, {"temperature": 0}, "`temperature` must be "),
    Bad("temperature inf", ValueError, {"temperature": float("inf")}, "`temperature` must be "),
    Bad("temperature shape", ValueError, {"temperature": zeros(5)}, "`temperature` must be "),
    Bad(
        "temperature of booleans",
        TypeError,
        {"temperature": zeros(N, dtype=np.bool_)},
        "`temperature` must be ",
    ),
    Bad("scale of a vector", ValueError, {"logit_scale": zeros(V)}, "`logit_scale` must be "),
    Bad("scale nan", ValueError, {"logit_scale": float("nan")}, "`logit_scale` must be "),
    Bad("denominator text", ValueError, {"denominator": "mean"}, "`denominator` must be "),
    Bad("denominator of a vector", ValueError, {"denominator": zeros(V)}, "`denominator` must be "),
]


def call(backend: str, changes: dict[str, Any]) -> Any:
    """One call; 64-bit types are on in JAX, so that no dtype is narrowed on the way in."""
    arguments = {
        "hidden": zeros(N, H),
        "weight": zeros(V, H),
        "labels": np.arange(N, dtype=np.int32),
    }
    arguments |= changes

    def crossed(cross) -> dict[str, Any]:
        return {k: cross(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}

    if backend == "torch":
        from xentlib.torch import chunked_nll

        return chunked_nll(**crossed(lambda x: to_torch(x, copy=True)))
    import jax

    from xentlib.jax import chunked_nll

    with jax.enable_x64(True):
        return chunked_nll(**crossed(lambda x: to_jax(x, copy=True)))


def refusal(backend: str, bad: Bad) -> str:
    with pytest.raises(bad.error) as caught:
        call(backend, bad.changes)
    assert caught.type is bad.error
    return str(caught.value)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_bad_input_is_refused(backend, bad):
    """D12, M11: argument, expectation, what came, way out; nothing is guessed."""
    text = refusal(backend, bad)
    if bad.message.endswith(" be "):
        assert text.startswith(bad.message)
    else:
        assert text == bad.message
    assert "; got " in text
    assert text.endswith(".")


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_both_backends_say_the_same(bad):
    """D2, M27: validation that is pasted per backend drifts; this one is asked once."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    assert refusal("torch", bad) == refusal("jax", bad)


@pytest.mark.jax
def test_jax_asks_for_a_mesh_axis():
    """PyTorch's refusals are in test_vocab_parallel.py."""
    pytest.importorskip("jax")
    with pytest.raises(
        ValueError, match=r"`vocab_parallel` must be the name of a mesh axis inside"
    ):
        call("jax", {"vocab_parallel": "tp"})


def test_the_good_call_is_good(backend):
    """The table above differs from this call by what it names, so that is what is refused."""
    out = call(backend, {})
    assert int(out.num_tokens) == N
    # Out of range where it does not count: masked by `where`, or equal to `ignore_index`.
    masked = {"labels": label(V, "int32"), "where": np.arange(N) != 2}
    assert int(call(backend, masked).num_tokens) == N - 1
    assert int(call(backend, {"labels": label(V, "int32"), "ignore_index": V}).num_tokens) == N - 1
    assert int(call(backend, {"labels": label(3, "uint8")}).num_tokens) == N


DEVICES = ("weight", "labels", "bias", "where", "token_weights")


def device_refusal(backend: str, name: str) -> str:
    arrays = {
        "hidden": zeros(N, H),
        "weight": zeros(V, H),
        "labels": np.arange(N, dtype=np.int32),
        "bias": zeros(V),
        "where": zeros(N, dtype=np.bool_),
        "token_weights": zeros(N),
    }
    if backend == "torch":
        import torch

        from xentlib.torch import chunked_nll

        placed = {
            k: torch.from_numpy(v).to("meta" if k == name else "cpu") for k, v in arrays.items()
        }
        here, there = "cpu", "meta"
    else:
        import jax

        from xentlib.jax import chunked_nll

        first, second = jax.devices("cpu")[:2]
        placed = {k: jax.device_put(v, second if k == name else first) for k, v in arrays.items()}
        here, there = str(first), str(second)
    with pytest.raises(ValueError, match="must be on the device") as caught:
        chunked_nll(**placed)
    return str(caught.value).replace(there, "THERE").replace(here, "HERE")


@pytest.mark.parametrize("name", DEVICES)
def test_devices_must_agree(backend, name):
    """D12: an array elsewhere is refused by name, never moved without a word."""
    assert device_refusal(backend, name) == (
        f"`{name}` must be on the device of `hidden` (HERE); got THERE. "
        f"Move one of them before the call."
    )


@pytest.mark.torch
def test_double_backward_raises_in_torch():
    """D12: double backward raises."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_nll

    hidden = torch.randn(N, H, requires_grad=True)
    loss = chunked_nll(hidden, torch.randn(V, H), torch.arange(N)).loss
    with pytest.raises(RuntimeError, match="must be differentiated once"):
        torch.autograd.grad(loss, hidden, torch.tensor(0.7), create_graph=True)


@pytest.mark.jax
def test_double_backward_raises_in_jax():
    """D12: double backward raises; it is never a silent zero."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_nll

    weight = jax.random.normal(jax.random.key(1), (V, H))
    labels = jax.numpy.arange(N)

    def slope(hidden):
        return jax.grad(lambda h: 0.7 * chunked_nll(h, weight, labels).loss)(hidden).sum()

    with pytest.raises(Exception, match=r".") as caught:
        jax.grad(slope)(jax.random.normal(jax.random.key(0), (N, H)))
    assert isinstance(caught.value, (RuntimeError, TypeError, ValueError))


# ---------------------------------------------------------------------------------
# What the packages show


@pytest.mark.torch
@pytest.mark.jax
def test_both_backends_show_the_same_names():
    """D2: `__all__`, signatures and docstrings are equal."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    import xentlib.jax
    import xentlib.torch

    assert set(xentlib.torch.__all__) ^ set(xentlib.jax.__all__) == ONE_BACKEND
    for name in (set(xentlib.torch.__all__) & set(xentlib.jax.__all__)) - {"NLLHead"}:
        ours, theirs = getattr(xentlib.torch, name), getattr(xentlib.jax, name)
        assert inspect.getdoc(ours) == inspect.getdoc(theirs)
        if inspect.isfunction(ours):
            assert shape(ours) == shape(theirs)


# Where a concept exists in one framework only: FSDP2 and ZeRO-3 keep parameters, Flax has two APIs,
# windows are objects in PyTorch, and counts are int32 in JAX.
ONE_BACKEND = {
    "CountMismatchError",
    "CountOverflowError",
    "LinenNLLHead",
    "TokenNormalizedState",
    "TokenNormalizer",
    "UnsupportedWrapperError",
    "Window",
    "WindowStateError",
    "accumulate_grads",
    "gather_head",
    "token_normalized",
}


def test_an_evaluation_has_the_methods_of_its_definition(backend: str) -> None:
    """Signatures are written once, in the spec, which does not compute."""
    ours = __import__(f"xentlib.{backend}", fromlist=["_"]).Evaluation
    for name in ("add", "mean_loss"):
        definition = getattr(evaluation_spec.Evaluation, name)
        assert shape(getattr(ours, name)) == shape(definition)
        with pytest.raises(NotImplementedError, match=r"xentlib\.torch\.Evaluation"):
            definition(None, None)
    assert ours.__doc__ == evaluation_spec.Evaluation.__doc__


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


DEFINITIONS = {
    name: getattr(module, name)
    for module, names in (
        (nll_spec, ["chunked_nll"]),
        (labels_spec, ["next_token_labels"]),
        (logprobs_spec, ["chunked_logprobs", "vocab_parallel_logprobs"]),
    )
    for name in names
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_signature_and_docstring_are_the_definition_s(backend, name):
    """D2: written once, in the spec."""
    package = __import__(f"xentlib.{backend}", fromlist=["_"])
    definition = DEFINITIONS[name]
    function = getattr(package, name)
    assert shape(function) == shape(definition)
    assert function.__doc__ == definition.__doc__
    documented = inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^    {parameter}: ", documented, re.MULTILINE), parameter
    assert package.NLLOutput is nll_spec.NLLOutput


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_definition_does_not_compute(name):
    """D2: no dispatch layer; users name their backend."""
    definition = DEFINITIONS[name]
    positional = [p for p in inspect.signature(definition).parameters.values() if p.kind == 1]
    with pytest.raises(NotImplementedError, match=rf"xentlib\.torch\.{name}"):
        definition(*[None] * len(positional))


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("xentlib", ["torch", "jax", "jaxlib", "flax"]),
        ("xentlib.interop", ["torch", "jax", "jaxlib"]),
        ("xentlib.parity.problem", ["torch", "jax", "jaxlib"]),
        ("xentlib.torch", ["jax", "jaxlib", "flax"]),
        ("xentlib.jax", ["torch", "flax"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_import_loads(package, absent):
    """D2: `import xentlib` loads neither framework, a backend never the other one."""
    if package in ("xentlib.torch", "xentlib.jax"):
        pytest.importorskip(package.removeprefix("xentlib."))
    code = f"import sys, {package}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
