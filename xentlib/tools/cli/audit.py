"""`xentlib audit module:function`: import it, hold it against the oracle, say what is wrong."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xentlib.options import DIVERGENCES
from xentlib.tools.audit.problem import KINDS
from xentlib.tools.cli.command import Row
from xentlib.tools.cli.requirements import prepare
from xentlib.tools.errors import UsageError, writing
from xentlib.tools.harness.environment import BACKENDS

NUMBERS = {
    "softcap": "softcap of the logits that the step applies",
    "logit_scale": "number by which the step multiplies the logits",
    "temperature": "number by which the step divides the logits",
    "label_smoothing": "label smoothing of the step's loss",
    "z_loss": "coefficient of the squared log-sum-exp in the step's loss",
    "beta": "of --divergence jsd, the teacher's share of the mixture",
}
DISTILS = "the step distils from the `teacher_logits` of its micro-batches, by this divergence"
SQUARED = "the step multiplies its divergence by the temperature squared"
DESCRIPTION = (
    "Import a function that returns a loss and the head's gradients, hold it against the float64 "
    "oracle, and name the defect if there is one. Exit status 1 if anything is wrong."
)
CALLS = (
    "step(head, micro_batches), or a function of (hidden, weight, labels) that returns a mean "
    "loss, or log-probabilities (default: step for two arguments, loss for three)"
)
RANKS = (
    "of JAX: devices over which the step spreads the rows; of PyTorch torchrun says it (default: 1)"
)
FRAMEWORK = "default: the framework that the module has imported"
TARGET = "the step, importable from the current directory: train:step of train.py"
ONE_DOCUMENT = "a row is one document: the step need not tell several apart"
ARGUMENTS: tuple[Row, ...] = (
    ("target", str, None, "MODULE:FUNCTION", TARGET),
    ("--backend", BACKENDS, None, None, FRAMEWORK),
    ("--kind", KINDS, None, None, CALLS),
    ("--bias", bool, None, None, "the head has a bias"),
    *((f"--{x.replace('_', '-')}", float, None, "X", words) for x, words in NUMBERS.items()),
    ("--divergence", DIVERGENCES, None, None, DISTILS),
    ("--temperature-squared", bool, None, None, SQUARED),
    ("--ranks", int, None, "N", RANKS),
    ("--out", Path, None, "FILE", "write the report as JSON too"),
    ("--no-documents", bool, None, None, ONE_DOCUMENT),
    ("--verbose, -v", bool, None, None, "list what was looked for, and what was not and why"),
)


def run(args: argparse.Namespace) -> int:
    module, name = _parts(args.target)
    under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    prepare(("jax",), "cpu")  # what JAX reads as it is imported, which the module may do
    flag = "--xla_force_host_platform_device_count"
    if (args.ranks or 1) > 1 and flag not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {flag}={args.ranks}"
    step = _step(module, name)
    backend = args.backend or _imported_framework(args.target)
    if backend == "torch" and args.ranks is not None:
        raise UsageError(
            "`--ranks` is of JAX, which has its devices in one process; in PyTorch run "
            "`torchrun --nproc-per-node N -m xentlib audit ...`."
        )
    if backend == "jax" and under_torchrun:
        raise UsageError(
            "`xentlib audit` of a step in JAX must be run in one process; got several of "
            "torchrun's. Run it without, and pass `--ranks N` for N devices."
        )
    options = {"kind": args.kind, "bias": args.bias, "documents": not args.no_documents}
    options |= {x: getattr(args, x) for x in NUMBERS if getattr(args, x) is not None}
    options |= {"divergence": args.divergence, "temperature_squared": args.temperature_squared}
    if backend == "jax":
        options["ranks"] = args.ranks or 1
    if args.out is not None:
        _check_writable(args.out)  # before the step is run, not after it
    report, rank = _audit(backend, step, options, args.target, under_torchrun)
    if rank == 0:
        print(report.text(args.verbose), flush=True)
        if args.out is not None:
            _write(args.out, report.to_json())
    if under_torchrun:  # which ends the others as soon as one has failed
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
    return 0 if report.passed else 1


def _parts(target: str) -> tuple[str, str]:
    module, colon, name = target.partition(":")
    call = "(" in name
    if not colon or not module or not name or module.endswith(".py") or "/" in module or call:
        path = Path(module.removesuffix(".py"))
        dotted, where = module.removesuffix(".py"), "in the folder that it can be imported from"
        if path.is_absolute() or ".." in path.parts:
            dotted, where = path.name, f"in the folder '{path.parent}'"
        dotted = dotted.strip("./").replace("/", ".") or "module"
        raise UsageError(
            f"the step must be named as MODULE:FUNCTION; got '{target}'. Write "
            f"'{dotted}:{name.partition('(')[0] or 'step'}', {where}."
        )
    return module, name


def _step(module: str, name: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise UsageError(f"'{module}' could not be imported: {error}.") from error
        raise UsageError(
            f"'{module}' must be a module that can be imported from '{Path.cwd()}'; there is none. "
            f"Run the command in the folder of '{module.replace('.', '/')}.py'."
        ) from error
    except SystemExit as error:  # what a script does that reads its command line
        raise UsageError(
            f"'{module}' could not be imported: it ends the process (SystemExit: {error.code}). "
            f"Put what it runs as a script, its command line too, under "
            f"`if __name__ == '__main__':`."
        ) from error
    except Exception as error:
        traceback.print_exc()
        raise UsageError(
            f"'{module}' could not be imported: {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            there = sorted(
                x
                for x, y in vars(value).items()
                if callable(y) and getattr(y, "__module__", module) == module and x[0] != "_"
            )
            raise UsageError(
                f"'{module}' must have '{name}'; it has {', '.join(there) or 'no function'}, in "
                f"{getattr(sys.modules[module], '__file__', None) or 'no file'}."
            )
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _imported_framework(target: str) -> str:
    loaded = [name for name in BACKENDS if name in sys.modules]
    if len(loaded) != 1:
        which = "both PyTorch and JAX" if loaded else "neither PyTorch nor JAX"
        raise UsageError(
            f"`--backend` must be given where the module has imported {which}: "
            f"`xentlib audit {target} --backend torch`, or jax."
        )
    return loaded[0]


def _audit(
    backend: str, step: Any, options: dict[str, Any], target: str, under_torchrun: bool
) -> tuple[Any, int]:
    """The report, and this process's rank."""
    try:
        audit = importlib.import_module(f"xentlib.{backend}.audit").audit
        if not under_torchrun:
            return audit(step, **options), 0
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return audit(step, **options), dist.get_rank()
    except ImportError as error:
        raise UsageError(f"{error}") from error
    except (Exception, SystemExit) as error:
        rank = f" on rank {os.environ['RANK']}" if under_torchrun else ""
        own = error.__traceback__
        while own is not None and own.tb_next is not None:
            own = own.tb_next
        if own is not None and "xentlib/checks" in own.tb_frame.f_code.co_filename:
            raise UsageError(f"the step '{target}'{rank}: {error}") from error
        traceback.print_exc()
        raise UsageError(
            f"the step '{target}' raised {type(error).__name__}{rank}: {error}"
        ) from error


def _check_writable(path: Path) -> None:
    """Leaves what is there."""
    new = not path.exists()
    with writing("--out", path):
        path.open("a").close()
    if new:
        path.unlink()


def _write(path: Path, text: str) -> None:
    with writing("--out", path):
        path.write_text(text, encoding="utf-8")
