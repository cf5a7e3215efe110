"""All of the gateway's benchmarks in one run, and the page that shows them: docs/reports/gateway.md.

Each part's figures go to docs/reports/gateway.json as soon as they are there. The page and its plots are made of that
file alone: `--page-only` makes them again. Needs matplotlib (`make bench-gateway` installs it).

    python benchmarks/gateway_report.py --routers FOLDER [--quick] [--only PART ...] [--page-only]

Takes about half an hour; --quick, a few minutes, and the page says so. With --only PART --folder FOLDER one part is
measured elsewhere, and docs/reports stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gateway
import gateway_groups
import gateway_kills
import gateway_page
import gateway_plots
from routers import installed, version

from phalanx import __version__

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reports"
QUICK = {
    "seconds": 1.5,
    "streams": 200,
    "held_pause": 0.05,
    "requests": 1000,
    "group_requests": 2,
    "group_tokens": 12,
    "conversations": 5,
    "turns": 4,
    "kill_tokens": 600,
    "kill_after": 60,
}
"""What --quick sets."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few seconds of each: to try it out")
    parser.add_argument("--page-only", action="store_true", help="make the page of the figures that there are")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="measure again only this; may be repeated")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of figures and page")
    for part in (gateway, gateway_groups, gateway_kills):
        part.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    file = options.folder / "gateway.json"
    if not options.page_only:
        options.folder.mkdir(parents=True, exist_ok=True)
        run(options, file)
    found = json.loads(file.read_text())
    gateway_plots.draw(found, options.folder)
    (options.folder / "gateway.md").write_text(gateway_page.text(found))
    return 0


def run(options: argparse.Namespace, file: Path) -> None:
    """Measure, and write after each part."""
    found: dict[str, Any] = json.loads(file.read_text()) if options.only and file.exists() else {}
    found["about"] = about(options)
    for name in options.only or PARTS:
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        found[name] = PARTS[name](options) | {"load_average": round(os.getloadavg()[0], 2)}
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Where and of what the figures are."""
    routers, absent = installed(options.routers)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "quick": options.quick,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "phalanx": __version__,
        "routers": {name: version(name, path) for name, path in routers.items()},
        "absent": absent,
        "seconds": options.seconds,
    }


def part_of_gateway(name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    return lambda options: gateway.measure(name, options)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    **{name: part_of_gateway(name) for name in gateway.PARTS},
    "groups": lambda options: gateway_groups.measure("groups", options),
    "affinity": lambda options: gateway_groups.measure("affinity", options),
    "kills": gateway_kills.measure,
}
"""Part -> what measures it."""


if __name__ == "__main__":
    raise SystemExit(main())
