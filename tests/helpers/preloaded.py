"""What ranks of tests need of imports, once: they are forked from a process that has done this.

A rank of DeepSpeed's imports for 6 s of processor time otherwise. Its own operators are taken for
none that can be compiled: it would compile one for a minute on a fresh clone, an all_reduce of its
inference, and ask the compiler about each at every start. What is imported is no garbage: an engine
collects, and looked at all of it for 0.3 s each time.
"""

from __future__ import annotations

import gc
import importlib

from xentlib.tools.harness.ranks import PRELOADED

OTHERS = ("deepspeed", "deepspeed.ops", "deepspeed.runtime.zero.muon.muon_optimizer", "peft")

for name in (*PRELOADED, *OTHERS):
    try:
        module = importlib.import_module(name)
    except ImportError:  # not installed
        continue
    if name == "deepspeed.ops":
        module.__compatible_ops__ = {}
gc.collect()
gc.freeze()
