"""`xentlib audit` on a rank that torchrun has started: its exit status and output, as a file."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from xentlib.tools.cli import main

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with redirect_stdout(StringIO()) as printed:
        status = main(["audit", pickle.loads((folder / "setups").read_bytes())])
    result = pickle.dumps((status, printed.getvalue()))
    (folder / f"rank{os.environ['RANK']}").write_bytes(result)
