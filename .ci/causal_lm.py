"""Write what becomes of each causal language model of the installed transformers.

    python .ci/causal_lm.py            (`make classes`) writes docs/data/causal_lm.json
    python .ci/causal_lm.py --check    exit status 1 if that file is not what would be written

The classes are those of transformers, the refusals those of tests/helpers/tiny_models.json.
`tests/integrations/test_transformers_classes.py` holds each class to what is said of it here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "causal_lm.json"


def main() -> int:
    """Write the file, or say that it is stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    text = json.dumps(found(), indent=1) + "\n"
    stale = not DATA.is_file() or DATA.read_text(encoding="utf-8") != text
    if stale and not check:
        DATA.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'stale, run `make classes`' if check else 'written'}: {DATA.relative_to(ROOT)}")
    return 1 if stale and check else 0


def found() -> dict[str, Any]:
    """The version, and for each class its model types, and why it is refused, if it is; of those
    that take images too, the classes that the suite tries on text alone."""
    sys.path.insert(0, str(ROOT / "tests"))
    import transformers

    from helpers.tiny_models import CLASSES, IMAGES, refusal_of

    causal: dict[str, Any] = {}
    for model_type, name in CLASSES.items():
        causal.setdefault(name, {"types": [], **said(refusal_of(model_type))})
        causal[name]["types"].append(model_type)
    images = {name: {"types": [kind], **said(refusal_of(name))} for name, kind in IMAGES.items()}
    return {
        "transformers": transformers.__version__,
        "causal": dict(sorted(causal.items())),
        "images": dict(sorted(images.items())),
    }


def said(refusal: dict[str, str] | None) -> dict[str, str | None]:
    return {"refused": refusal and refusal["why"]}


if __name__ == "__main__":
    sys.exit(main())
