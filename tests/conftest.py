"""Settings that the contract's rows are held under (D10), made before a framework is loaded, the
`backend` fixture, and the end of all that the suite has started."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from _pytest import runner

from helpers.kept_pages import keep_pages, on_one_piece
from helpers.orphans import guard
from helpers.seconds import Seconds, chosen, file_seconds

# Read when pytest-xdist's workers load NumPy, whose idle threads spin: 5 % of a module of JAX's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Read when a framework starts, so set before any import of one. Four host devices: enough to have
# arrays that are committed to different ones.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_allow_excess_precision=false",
        "--xla_force_host_platform_device_count=4",
    ]
).strip()
# Where the tests compute that are not about the CPU: `make gpu` says "cuda".
DEVICE = os.environ.get("XENTLIB_DEVICE", "cpu")
os.environ["JAX_PLATFORMS"] = "cpu" if DEVICE == "cpu" else f"{DEVICE},cpu"
os.environ["DS_ACCELERATOR"] = "cpu"
# Triton's programs without a GPU, in NumPy.
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
# What DeepSpeed compiles at its first start: here, as under `make`, and not in the user's cache.
BUILD = Path(__file__).parents[1] / "build"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(BUILD / "torch_extensions"))
# Ninja compiles it, in every test the one beside the interpreter: two versions take each
# other's work for out of date (seven compilations of a minute in a run, where one does).
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# What JAX has compiled, under a hash of the program, its options and JAX's version: tests that
# differ in their data alone share a program, and so does the next run (57 tests of heads: 98 s of
# CPU without, 82 s the first time, 22 s from then on).
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BUILD / "jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# XLA's own caches are for GPUs, and put the folder's name into the hash: no other folder, as that
# of a new clone, could have a program that was compiled in this one (flax-meshes.md: 21 s, 8 s).
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

HAS_TORCH, HAS_JAX = (importlib.util.find_spec(name) is not None for name in ("torch", "jax"))
INSTALLED = [name for name, here in (("torch", HAS_TORCH), ("jax", HAS_JAX)) if here]

pytest.register_assert_rewrite(
    *(
        f"helpers.{path.stem}"
        for path in Path(__file__).parent.glob("helpers/*.py")
        if path.stem not in ("compiling", "kept_pages", "orphans", "seconds")
    )
)

# optax and the benchmark's peers promote dtypes and ranks as they like: bfloat16 moments meet
# Python scalars made float32. What these modules run of ours is run strictly elsewhere.
LENIENT = {
    "test_accumulate_jax",
    "test_audit_planted",
    "test_bench",
    "test_docs_code",
    "test_fuzz",
    "test_parity_distillation",
    "test_parity_text",
    "test_parity_training",
    "test_token_normalized_jax",
}

# NumPy 2.0 warns of a float type that is first looked at when flushing is on already.
for dtype in (np.float32, np.float64):
    np.finfo(dtype)
    ml_dtypes.finfo(dtype)

if HAS_TORCH:
    import torch

    torch.set_flush_denormal(True)
    # Small operators on two threads run ten times slower beside a busy process.
    torch.set_num_threads(1)
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)

if HAS_JAX:
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if DEVICE != "cpu":
        jax.config.update("jax_default_device", jax.devices(DEVICE)[0])

from helpers.references import keep_references  # noqa: E402

keep_references()
keep_pages()

COMPILING = None
if HAS_JAX and DEVICE == "cpu":
    from helpers.compiling import Compiling

    COMPILING = Compiling()


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="of each test its first case in each backend; none that is marked slow",
    )
    parser.addoption(
        "--cases",
        choices=["all", "few", "rest"],
        default="all",
        help="few: what .ci/seconds.tsv says, a case of each function at least; rest: the others",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="whole products of options and shapes too, of which a run has every pair",
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        quick = {}
        for item in items:
            backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
            if not item.get_closest_marker("slow"):
                quick.setdefault((item.path, item.originalname, backend), item)
        kept = {id(item) for item in quick.values()}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = quick.values()
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if of_product(item)])
        items[:] = [item for item in items if not of_product(item)]
    cases = config.getoption("--cases")
    if cases != "all":
        few = chosen(items)
        kept = [item for item in items if (id(item) in few) == (cases == "few")]
        config.hook.pytest_deselected(items=[*{*items} - {*kept}])
        items[:] = kept
    seconds = file_seconds(cases)
    # A file is one worker's: the one that takes longest must not begin last. In each, what JAX
    # compiles in one way stands together: a change of the way forgets all that was traced.
    # A test has both backends before the next begins, as helpers/references.py keeps its answers.
    items.sort(
        key=lambda x: (
            *(-seconds[x.path.stem], x.path, compiled_for_users(x)),
            x.location[1],
        )
    )
    for item in items:
        if DEVICE != "cpu" and item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="about the CPU"))


def pytest_collection_finish():
    """Half a million objects that were imported are no garbage, and a trace of JAX makes some
    thousands that are not either: collections took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def compiled_for_users(item) -> bool:
    """Whether JAX compiles as a user's process does, if the test is about JAX at all."""
    params = getattr(item, "callspec", None) and item.callspec.params
    return bool(item.get_closest_marker("optimized")) and (params or {}).get("backend") != "torch"


def of_product(item) -> bool:
    """Whether it is marked `full`, in its backend if the mark names one."""
    mark = item.get_closest_marker("full")
    if mark is None or "backend" not in mark.kwargs:
        return mark is not None
    return mark.kwargs["backend"] == item.callspec.params["backend"]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers are among what is ended
        guard()
    config.pluginmanager.register(Seconds(config))


@pytest.fixture(autouse=True, scope="session")
def preloaded():
    from helpers.ranks import preload_first

    preload_first()


@pytest.fixture(autouse=True, scope="module")
def promotion(request):
    """Strict promotion in JAX, but for the modules in LENIENT."""
    if HAS_JAX:
        lenient = request.module.__name__ in LENIENT
        jax.config.update("jax_numpy_dtype_promotion", "standard" if lenient else "strict")
        jax.config.update("jax_numpy_rank_promotion", "allow" if lenient else "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    return on_one_piece(runner.pytest_runtest_protocol, item, nextitem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture: JAX compiles as a user's process does where a test is marked `optimized`,
    or --full given; otherwise with what takes the least time (helpers/compiling.py)."""
    if COMPILING is not None:
        COMPILING.set(not (compiled_for_users(item) or item.config.getoption("--full")))


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, id=name, marks=getattr(pytest.mark, name)) for name in INSTALLED],
)
def backend(request) -> str:
    """Each installed framework in turn: "torch", "jax"."""
    return request.param
