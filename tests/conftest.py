"""What tests take is counted; a busy machine fails no property test, since time decides benchmarks only."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["support.seconds"]

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
