"""A machine measures itself once for each share of a model; what goes wrong is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.planning import group, shape, timings

from phalanx.cluster import survey
from phalanx.cluster.survey import HostShape, RankShare, ShapeRequest, SpeedRequest, machine_key, shape_here, speed_here
from phalanx.errors import ClusterError, ModelNotFound
from phalanx.memory import MachineMemory
from phalanx.planning.calibration_store import CalibrationStore
from phalanx.planning.timings import GroupTimings

ONE, HALF = RankShare(degree=1, ranks_here=1), RankShare(degree=2, ranks_here=2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RankShare]]:
    found: list[tuple[str, RankShare]] = []

    def measure(path: str, share: RankShare) -> Any:
        found.append((path, share))
        return timings(share.degree)

    monkeypatch.setattr(survey, "_measure", measure)
    return found


def asked(*shares: RankShare, key: str = "k", again: bool = False) -> SpeedRequest:
    return SpeedRequest(path="/m", key=key, shares=shares, again=again)


def test_what_is_known_is_not_measured_again(measured, tmp_path: Path):
    store = CalibrationStore(tmp_path, ("this machine",))
    first = speed_here(asked(ONE, HALF), store)
    assert measured == [("/m", ONE), ("/m", HALF)]
    assert speed_here(asked(ONE, HALF), store) == first and len(measured) == 2
    speed_here(asked(ONE, again=True), store)
    speed_here(asked(ONE, key="another model"), store)
    speed_here(asked(ONE), CalibrationStore(tmp_path, ("this machine", "mlx 2")))
    assert measured[2:] == [("/m", ONE)] * 3


def test_a_group_is_what_its_self_test_leaves(measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = MachineMemory(total=1, available=1)
    small = HostShape(path="/demo", shape=shape(), memory=memory, guard=0, processors=2)
    monkeypatch.setattr(survey, "shape_here", lambda request: small)
    store = CalibrationStore(tmp_path, ("this machine",))
    store.put(("group", "1 stages", "2 wide"), group())
    found = speed_here(SpeedRequest(path="/m", key="k", shares=(), groups=((1, 2),)), store)
    assert found.groups[0].timings == group() and measured == []
    monkeypatch.setattr(survey, "RUN_PHALANX", ("-c", "import sys; sys.exit(1)"))
    with pytest.raises(ClusterError, match="A group of 2 ranks did not pass its self-test here"):
        speed_here(SpeedRequest(path="/m", key="k", shares=(), groups=((2, 1),)), store)
    assert store.get(("group", "2 stages", "1 wide"), GroupTimings) is None


def test_a_model_that_is_not_here_is_named():
    with pytest.raises(ModelNotFound, match="no-such-model is not on this machine"):
        shape_here(ShapeRequest(model="no-such-model", max_degree=1))


def test_a_measurement_that_fails_says_its_last_line(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"The measurement failed: .*nowhere"):
        speed_here(
            SpeedRequest(path=str(tmp_path / "nowhere"), key="k", shares=(ONE,)), CalibrationStore(tmp_path, ("m",))
        )


def test_versions_and_processors_tell_machines_apart():
    assert any(fact.startswith("phalanx ") for fact in machine_key())
    assert any(fact.endswith(" processors") for fact in machine_key())
