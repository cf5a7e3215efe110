"""`python -m phalanx` is `phalanx`."""

from __future__ import annotations

from phalanx.cli.main import run

if __name__ == "__main__":
    run()
