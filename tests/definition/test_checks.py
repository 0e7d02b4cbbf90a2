"""Arrays that a call refuses, as data: one sentence each, the same from both backends.

`BAD` holds the whole text, so two backends that both match it say the same words. Options are in
test_checks_options.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.refusals import Bad, H, N, V, call, check_both, check_refusal, zeros

WIDE = {"hidden": np.zeros((4096, 768), np.float32), "labels": np.zeros(4096, np.int32)}
FLOATS = "float16, bfloat16, float32, float64"
OTHER_HEAD = "Pass the head that belongs to these hidden states."
QUANTISED = (
    "A quantised head is its integers times scales: pass what its own method dequantises it to, "
    "or leave the head out of the quantisation."
)
RESHAPE = "Reshape it, or flatten `hidden` to match."


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


BAD = [
    # shapes
    Bad(
        "transposed head",
        ValueError,
        WIDE | {"weight": zeros(768, 50257)},
        "`weight` must have shape (vocab, 768) to match `hidden` (4096, 768); got (768, 50257). "
        "Pass `weight_layout='HV'` or `weight.T`; transpose a module's.",
    ),
    Bad(
        "transposed kernel",
        ValueError,
        {"weight": zeros(V, H), "weight_layout": "HV"},
        "`weight` must have shape (4, vocab) to match `hidden` (6, 4); got (11, 4). "
        "Pass `weight_layout='VH'` or `weight.T`; transpose a module's.",
    ),
    Bad(
        "logits for hidden states",
        ValueError,
        {"hidden": zeros(6, 11)},
        "`weight` must have shape (vocab, 11) to match `hidden` (6, 11); got (11, 4). Are `hidden` "
        "logits? Pass the states before the head. Otherwise: Pass `weight_layout='HV'` or "
        "`weight.T`; transpose a module's.",
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
        {"labels": zeros(4, dtype=np.int32)},
        f"`labels` must have shape (6,), one entry per token of `hidden`; got (4,). {RESHAPE}",
    ),
    Bad(
        "labels not flat",
        ValueError,
        {"labels": zeros(2, 3, dtype=np.int32)},
        f"`labels` must have shape (6,), one entry per token of `hidden`; got (2, 3). {RESHAPE}",
    ),
    Bad(
        "labels sliced for the next token",
        ValueError,
        {"hidden": zeros(2, 3, H), "labels": zeros(2, 2, dtype=np.int32)},
        "`labels` must have shape (2, 3), one entry per token of `hidden`; got (2, 2), one column "
        "fewer, as after `labels[:, 1:]`. Slice `hidden[:, :-1]` too, or pass the whole of "
        "`hidden` with `next_token_labels` of the whole labels.",
    ),
    Bad(
        "hidden sliced for the next token",
        ValueError,
        {"labels": zeros(7, dtype=np.int32)},
        "`labels` must have shape (6,), one entry per token of `hidden`; got (7,), one column "
        "more, as after `hidden[:-1]`. Slice `labels[1:]` too, or pass the whole of `hidden` with "
        "`next_token_labels` of the whole labels.",
    ),
    Bad(
        "labels of another batch",
        ValueError,
        {"hidden": zeros(2, 3, H), "labels": zeros(1, 2, dtype=np.int32)},
        f"`labels` must have shape (2, 3), one entry per token of `hidden`; got (1, 2). {RESHAPE}",
    ),
    Bad(
        "where of the next tokens",
        ValueError,
        {"where": zeros(5, dtype=np.bool_)},
        "`where` must have shape (6,), one entry per token of `hidden`; got (5,), one column "
        "fewer, as after `where[1:]`. Add a last column, for the token that predicts nothing.",
    ),
    Bad(
        "where of all tokens",
        ValueError,
        {"where": zeros(7, dtype=np.bool_)},
        "`where` must have shape (6,), one entry per token of `hidden`; got (7,), one column "
        "more, as after `hidden[:-1]`. Slice `where[1:]` too, as the labels are.",
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
        f"`weight` must be floating point ({FLOATS}); got int8. {QUANTISED}",
    ),
    Bad(
        "packed weight",
        TypeError,
        {"weight": zeros(V * H // 2, 1, dtype=np.uint8)},
        f"`weight` must be floating point ({FLOATS}); got uint8. {QUANTISED}",
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
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_bad_input_is_refused(backend, bad):
    """D12, M11: argument, expectation, what came, way out; nothing is guessed."""
    check_refusal(backend, bad)


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_both_backends_say_the_same(bad):
    """D2, M27: validation that is pasted per backend drifts; this one is asked once."""
    check_both(bad)


@pytest.mark.slow
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


@pytest.mark.slow
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
    for tokens in (N, 200):  # one chunk, and a loop
        labels = jax.numpy.arange(tokens) % V
        with pytest.raises(RuntimeError, match="must be differentiated once"):
            jax.hessian(
                lambda h, y=labels: chunked_nll(h, weight, y, max_chunk_bytes=64 * V * 4).loss
            )(jax.numpy.ones((tokens, H)))
