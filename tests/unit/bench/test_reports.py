"""The page of the gateway's figures is that of the figures beside it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gateway_page import COST, REPLICAS, text

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reports"


def figures() -> dict:
    return json.loads((FOLDER / "gateway.json").read_text())


def test_the_page_is_made_of_its_figures():
    assert (FOLDER / "gateway.md").read_text() == text(figures())
    assert (FOLDER / COST).is_file() and (FOLDER / REPLICAS).is_file()


def test_a_part_that_was_not_measured_is_named():
    some = figures()
    del some["kills"], some["memory"]
    page = text(some)
    assert "Not measured in this run: memory, kills." in " ".join(page.split())
    assert "The death of a replica" not in page
