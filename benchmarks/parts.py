"""The command of a benchmark of several parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any


def run_parts(
    description: str,
    parts: Sequence[str],
    add_options: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[str, argparse.Namespace], Any],
) -> int:
    """Measure the parts that the command line names, all unless it names some, and print them as one JSON object."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=parts, help="may be repeated")
    add_options(parser)
    options = parser.parse_args()
    print(json.dumps({part: measure(part, options) for part in options.only or parts}))
    return 0
