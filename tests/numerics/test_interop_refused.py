"""What is refused between the frameworks: arrays that would be misread, and such as have no
memory.
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from helpers.crossing import CROSS, bits, build, frameworks, patterns, pointer
from xentlib.interop import to_jax, to_numpy


def dtensor(torch):
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(8), init_device_mesh("cpu", (1,)))
    finally:
        destroy_process_group()


def fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(8)


def freed(torch):
    x = torch.ones(8)
    x.untyped_storage().resize_(0)
    return x


def subclass(torch):
    return torch.ones(8).as_subclass(type("Tagged", (torch.Tensor,), {}))


REFUSED_TORCH = {
    "requires_grad": (
        lambda torch: torch.ones(8, requires_grad=True),
        ValueError,
        r"pass tensor\.detach\(\)",
    ),
    "parameter": (
        lambda torch: torch.nn.Parameter(torch.ones(8)),
        ValueError,
        r"pass tensor\.detach\(\)",
    ),
    "result of a graph": (
        lambda torch: torch.ones(8, requires_grad=True) * 2,
        ValueError,
        r"pass tensor\.detach\(\)",
    ),
    "DTensor": (dtensor, TypeError, r"DTensor.*full_tensor"),
    "fake": (fake, TypeError, "FakeTensor"),
    "subclass": (subclass, TypeError, "Tagged"),
    "freed": (freed, ValueError, r"got \(8,\) on cpu without any.*Gather"),
    "meta": (lambda torch: torch.ones(8, device="meta"), ValueError, "meta"),
    "sparse": (lambda torch: torch.eye(3).to_sparse(), TypeError, "sparse_coo.*to_dense"),
    "mkldnn": (lambda torch: torch.eye(3).to_mkldnn(), TypeError, "mkldnn.*to_dense"),
    "complex": (lambda torch: torch.ones(8, dtype=torch.complex64), TypeError, "complex64"),
    "conjugate": (
        lambda torch: torch.ones(8, dtype=torch.complex64).conj(),
        TypeError,
        "complex64",
    ),
    "float8": (lambda torch: torch.ones(8).to(torch.float8_e4m3fn), TypeError, "float8_e4m3fn"),
}


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize(
    ("make", "error", "words"), REFUSED_TORCH.values(), ids=list(REFUSED_TORCH)
)
def test_torch_tensors_that_would_be_misread_are_refused(make, error, words, target, copy):
    frameworks("torch", target)
    x = make(sys.modules["torch"])
    with pytest.raises(error, match=words):
        CROSS[target](x, copy=copy)


def test_a_parameter_without_gradient_is_shared():
    frameworks("torch")
    import torch

    x = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    assert pointer(to_numpy(x, copy=False)) == pointer(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp", "functionalize"])
@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_torch_func_wrappers_are_refused(transform, target):
    frameworks("torch", target)
    import torch

    calls = {
        "vmap": lambda f: torch.func.vmap(f)(torch.ones(4, 5)),
        "jvp": lambda f: torch.func.jvp(f, (torch.ones(4),), (torch.ones(4),)),
        "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(4)),
    }

    def body(x):
        CROSS[target](x)
        return x

    with pytest.raises(ValueError, match=r"inside torch\.func"):
        calls[transform](body)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_a_forward_mode_tangent_is_not_dropped(target):
    frameworks("torch", target)
    from torch import ones
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(ones(4), ones(4))
        with pytest.raises(ValueError, match=r"tangent.*unpack_dual"):
            CROSS[target](x)


def deleted(jax):
    x = jax.numpy.ones(8)
    x.delete()
    return x


def donated(jax):
    x = jax.numpy.ones(8)
    jax.jit(lambda a: a + 1, donate_argnums=0)(x)
    return x


REFUSED_JAX = {
    "key": (lambda jax: jax.random.key(0), TypeError, r"key<.*jax\.random\.key_data"),
    "deleted": (deleted, ValueError, "deleted or donated"),
    "donated": (donated, ValueError, "deleted or donated"),
    "complex": (lambda jax: jax.numpy.ones(8, jax.numpy.complex64), TypeError, "complex64"),
    "int4": (lambda jax: jax.numpy.ones(8, jax.numpy.int4), TypeError, "int4"),
    "float8": (lambda jax: jax.numpy.ones(8, "float8_e5m2"), TypeError, "float8_e5m2"),
}


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize(("make", "error", "words"), REFUSED_JAX.values(), ids=list(REFUSED_JAX))
def test_jax_arrays_without_one_buffer_are_refused(make, error, words, target, copy):
    frameworks("jax", target)
    x = make(pytest.importorskip("jax"))
    with pytest.raises(error, match=words):
        CROSS[target](x, copy=copy)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "eval_shape"])
@pytest.mark.parametrize("target", CROSS)
def test_tracers_are_refused(transform, target):
    frameworks("jax", target)
    import jax

    def body(x):
        CROSS[target](x)
        return x.sum()

    transformed = {
        "jit": jax.jit(body),
        "grad": jax.grad(body),
        "vmap": jax.vmap(body),
        "eval_shape": lambda x: jax.eval_shape(body, x),
    }[transform]
    with pytest.raises(TypeError, match=r"traced.*jax\.pure_callback"):
        transformed(jax.numpy.ones((2, 3)))


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("source", CROSS)
def test_what_crosses_inside_jit_is_a_value(source, copy):
    frameworks(source, "jax")
    import jax

    x = build(source, patterns(np.int32))
    seen = []
    jax.jit(lambda a: seen.append(to_jax(x, copy=copy)) or a)(jax.numpy.ones(2))
    assert bits(seen[0]) == bits(x)


@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.ones(3, np.complex64), "complex64"),
        (np.ones(3, np.longdouble), "float128|longdouble|float96"),
        (np.array([None]), "object"),
        (np.array(["a"]), "str"),
        (np.array(["2020"], "M8[D]"), "datetime64"),
        (np.zeros(3, [("a", "f4")]), "void"),
        (np.ones(3, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), r"masked.*x\.filled"),
        (np.float32(3), r"numpy\.float32.*numpy\.asarray"),
        ([1.0, 2.0], r"builtins\.list.*numpy\.asarray"),
        (None, "NoneType"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_what_is_no_array_of_numbers_is_refused(x, words, target):
    frameworks(target)
    with pytest.raises(TypeError, match=words):
        CROSS[target](x)


@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize("copy", [0, 1, "never", np.True_])
def test_copy_has_three_values(copy, target):
    frameworks(target)
    with pytest.raises(TypeError, match="`copy` must be None, True or False"):
        CROSS[target](np.ones(3, np.float32), copy=copy)
