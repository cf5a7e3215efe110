"""A real trained model without a model hub: SmolLM2-135M-Instruct, as `phalanx pull smollm2` has it.

    python tools/real_model.py [DIRECTORY]

Prints the directory's name, and makes it before if it does not exist. Needs the engine's packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.model.loading.smollm2 import fetch

if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
