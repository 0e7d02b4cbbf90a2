"""How a hurried user calls `segment_sum`, and the sentence that says what to write."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.segments import crossing, function_of
from xentlib.logprobs import LogprobOutput

ONES, IDS = np.ones((2, 3), np.float32), np.array([[0, 0, 1], [2, 2, -1]], np.int32)
WRONG = {
    "ids that are floats": (
        {"segment_ids": IDS.astype(np.float32)},
        (
            TypeError,
            r"`segment_ids` must be integers; got float32. Pass the number of each token's",
        ),
    ),
    "a mask in place of ids": (
        {"segment_ids": IDS > 0},
        (TypeError, r"`segment_ids` must be integers; got bool. .* a mask is `where`\.$"),
    ),
    "one-hot rows": (
        {"segment_ids": np.ones((2, 3, 4), np.int32)},
        (
            ValueError,
            r"shape of `values` \(2, 3\); got \(2, 3, 4\). Pass one number for each token; of one",
        ),
    ),
    "one id for each row": (
        {"segment_ids": np.zeros((2, 1), np.int32)},
        (ValueError, r"`segment_ids` must have the shape .*; got \(2, 1\). Broadcast it first"),
    ),
    "ids that begin at 1": (
        {"segment_ids": IDS + 1},
        (
            ValueError,
            r"below `num_segments` \(3\); got 3. .* sequences of the whole call",
        ),
    ),
    "too few segments": ({"num_segments": 2}, (ValueError, r"`num_segments` \(2\); got 2")),
    "padding as a large id": (
        {"segment_ids": np.where(IDS < 0, 99, IDS).astype(np.int32)},
        (
            ValueError,
            r"\(3\); got 99. Ids count from 0 through all rows, and a negative one",
        ),
    ),
    "no number of segments": (
        {"num_segments": None},
        (TypeError, r"`num_segments` must be a Python integer; got NoneType"),
    ),
    "the number as an array": (
        {"num_segments": np.ones(1, np.int32)},
        (TypeError, r"`num_segments` must be a Python integer; got (ArraySpec|array)"),
    ),
    "the number as a float": ({"num_segments": 3.0}, (TypeError, r"integer; got float")),
    "the number as a truth": ({"num_segments": True}, (TypeError, r"integer; got bool")),
    "a negative number": ({"num_segments": -1}, (ValueError, r"must be at least 0; got -1")),
    "no ids": ({"segment_ids": None}, (TypeError, r"`segment_ids` must be .*; got NoneType")),
    "lists": (
        {"segment_ids": IDS.tolist()},
        (TypeError, r"`segment_ids` must be .*; got list. Pass"),
    ),
    "ids and number exchanged": (
        {"segment_ids": 3, "num_segments": IDS},
        (TypeError, r"`segment_ids` must be .*; got int"),
    ),
    "values that are integers": (
        {"values": ONES.astype(np.int32)},
        (TypeError, r"`values` must be floating point .*; got int32. Cast it before"),
    ),
    "a result in place of values": (
        {"values": LogprobOutput(ONES, None, ONES, ONES > 0)},
        (TypeError, r"`values` must be .*; got LogprobOutput. Pass `values.logprobs`"),
    ),
    "a mask of integers": (
        {"where": np.ones((2, 3), np.int32)},
        (TypeError, r"`where` must be boolean; got int32. Compare the mask with 0"),
    ),
    "a mask of rows": (
        {"where": np.ones(2, bool)},
        (ValueError, r"`where` must have the shape of `values` \(2, 3\); got \(2,\)"),
    ),
    "another library's name": (
        {"mask": ONES > 0},
        (TypeError, r"`mask` is not an argument of `segment_sum`. Write `where=`"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_hurried_user_writes_is_refused(backend, wrong):
    """D12: each in one sentence, the same from both backends."""
    changes, (error, message) = WRONG[wrong]
    given = {"values": ONES, "segment_ids": IDS, "num_segments": 3, **changes}
    cross = crossing(backend)
    with pytest.raises(error, match=message):
        function_of(backend, "segment_sum")(**{k: cross(x) for k, x in given.items()})


@pytest.mark.torch
def test_tensors_that_do_not_belong_together():
    torch = pytest.importorskip("torch")
    from xentlib.torch import segment_sum

    values, ids = torch.tensor(ONES), torch.tensor(IDS)
    with pytest.raises(
        ValueError, match=r"`segment_ids` must be on the device of `values` \(cpu\)"
    ):
        segment_sum(values, ids.to("meta"), 3)
    with pytest.raises(TypeError, match=r"must be integers; got float32"):
        segment_sum(values, ids.float().requires_grad_(), 3)
    with pytest.raises(TypeError, match=r"`num_segments` must be a Python integer; got"):
        segment_sum(values, ids, ids.max() + 1)
    with pytest.raises(TypeError, match=r"torch.Tensor; got numpy.ndarray. Pass `torch.from_numpy"):
        segment_sum(values, IDS, 3)


@pytest.mark.torch
def test_a_dtensor_is_refused():
    torch = pytest.importorskip("torch")
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from xentlib.torch import segment_sum

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.tensor(ONES), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(TypeError, match=r"be a plain tensor; got a DTensor. Pass `values.to_l"):
            segment_sum(sharded, torch.tensor(IDS), 3)
    finally:
        dist.destroy_process_group()


@pytest.mark.jax
def test_arrays_that_jax_would_change_or_trace():
    jax = pytest.importorskip("jax")
    from xentlib.jax import segment_sum

    with pytest.raises(ValueError, match="`segment_ids` must fit int32, in which a JAX without"):
        segment_sum(ONES, IDS.astype(np.int64) + 2**32, 3)
    with pytest.raises(TypeError, match=r"integer; got ArraySpec.*`static_argnames`"):
        jax.jit(segment_sum)(ONES, IDS, 3)
    assert jax.jit(segment_sum, static_argnames="num_segments")(ONES, IDS, 3).tolist() == [2, 1, 2]
