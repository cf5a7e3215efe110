"""What is measured is kept until the machine or its software changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.planning import timings

from phalanx.planning.calibration_store import FILE, MAX_ENTRIES, CalibrationStore
from phalanx.planning.timings import RankTimings

MACHINE = ("Linux", "x86_64", "mlx 1")


def test_a_measurement_is_kept(tmp_path: Path):
    folder = tmp_path / "new"
    CalibrationStore(folder, MACHINE).put(("rank", "k"), timings())
    assert CalibrationStore(folder, MACHINE).get(("rank", "k"), RankTimings) == timings()
    assert CalibrationStore(folder, MACHINE).get(("rank", "other"), RankTimings) is None
    assert [file.name for file in folder.iterdir()] == [FILE]


def test_another_version_measures_again(tmp_path: Path):
    CalibrationStore(tmp_path, MACHINE).put(("rank",), timings())
    assert CalibrationStore(tmp_path, (*MACHINE[:2], "mlx 2")).get(("rank",), RankTimings) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "[" * 5000, '{"x": {"at": 1, "what": "", "value": 3}}'])
def test_a_file_that_cannot_be_read_is_measured_again(tmp_path: Path, text: str):
    (tmp_path / FILE).write_text(text)
    store = CalibrationStore(tmp_path, MACHINE)
    assert store.get(("rank",), RankTimings) is None
    store.put(("rank",), timings())
    assert store.get(("rank",), RankTimings) == timings()


def test_an_entry_of_another_kind_is_measured_again(tmp_path: Path):
    store = CalibrationStore(tmp_path, MACHINE)
    store.put(("rank",), {"degree": "many"})
    assert store.get(("rank",), RankTimings) is None


def test_the_oldest_make_room(tmp_path: Path):
    store = CalibrationStore(tmp_path, MACHINE)
    for number in range(MAX_ENTRIES + 2):
        store.put((str(number),), number)
    assert store.get(("0",), int) is None
    assert store.get((str(MAX_ENTRIES + 1),), int) == MAX_ENTRIES + 1
