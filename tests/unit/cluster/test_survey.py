"""A machine measures itself once for each share of a model; what goes wrong is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.planning import group, shape, timings

from phalanx.cluster import survey
from phalanx.cluster.survey import (
    MAX_LEARNED,
    HostShape,
    RankShare,
    ShapeRequest,
    SpeedRequest,
    learn,
    machine_key,
    shape_here,
    speed_here,
)
from phalanx.errors import ClusterError, ModelNotFound
from phalanx.memory import MachineMemory
from phalanx.planning.calibration_store import CalibrationStore
from phalanx.planning.timings import GroupTimings, Learned, ServedSteps, ServingCost

ONE, HALF = RankShare(degree=1, ranks_here=1), RankShare(degree=2, ranks_here=2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RankShare]]:
    found: list[tuple[str, RankShare]] = []

    def measure(path: str, share: RankShare) -> Any:
        found.append((path, share))
        return timings(share.degree)

    monkeypatch.setattr(survey, "_measure", measure)
    return found


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serving costs is known."""
    monkeypatch.setattr(survey, "_serving", lambda store: ServingCost())


def asked(*shares: RankShare, key: str = "k", again: bool = False) -> SpeedRequest:
    return SpeedRequest(path="/m", key=key, shares=shares, again=again)


def test_what_is_known_is_not_measured_again(measured, no_server, tmp_path: Path):
    store = CalibrationStore(tmp_path, ("this machine",))
    first = speed_here(asked(ONE, HALF), store)
    assert measured == [("/m", ONE), ("/m", HALF)]
    assert speed_here(asked(ONE, HALF), store) == first and len(measured) == 2
    speed_here(asked(ONE, again=True), store)
    speed_here(asked(ONE, key="another model"), store)
    speed_here(asked(ONE), CalibrationStore(tmp_path, ("this machine", "mlx 2")))
    assert measured[2:] == [("/m", ONE)] * 3


def test_what_is_measured_again_is_measured_once(measured, served, tmp_path: Path):
    """The bundled model's layers are wanted for its own plans, and to know what serving costs."""
    store = CalibrationStore(tmp_path, ("this machine",))
    wanted = SpeedRequest(path="/demo", key=shape().key, shares=(ONE,), again=True)
    first = speed_here(wanted, store)
    assert measured == [("/demo", ONE)]
    assert speed_here(replace(wanted, again=False), store) == first and len(measured) == 1
    assert speed_here(wanted, store) == first and len(measured) == 2


SERVED = ServedSteps(prompt=48, context={1: 100, 16: 100}, step_s={1: 1.0, 16: 2.0}, first_s=2.0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The small model's servers that were timed."""
    found: list[tuple[int, int]] = []

    def timed_steps(stages: int, width: int) -> ServedSteps:
        found.append((stages, width))
        return SERVED

    memory = MachineMemory(total=1, available=1)
    small = HostShape(path="/demo", shape=shape(), memory=memory, guard=0, processors=2, versions={})
    monkeypatch.setattr(survey, "shape_here", lambda request: small)
    monkeypatch.setattr(survey, "_served", timed_steps)
    return found


def test_what_a_server_costs_is_measured_once(measured, served, tmp_path: Path):
    store = CalibrationStore(tmp_path, ("this machine",))
    first = speed_here(asked(ONE), store)
    assert served == [(1, 1)] and 0.9 < first.serving.step_s + first.serving.row_s < 1.0
    assert speed_here(asked(ONE), store) == first and served == [(1, 1)]
    speed_here(asked(ONE, again=True), store)
    assert served == [(1, 1)] * 2


def test_what_a_start_measured_is_told_to_the_next(measured, served, tmp_path: Path):
    store = CalibrationStore(tmp_path, ("this machine",))
    learn("k", "tp 2 on a, b", Learned(rate=0.9, ttft=1.1), store)
    learn("k", "one rank on a", Learned(rate=0.01, ttft=900.0), store)
    learn("other", "pp 2 on a, b", Learned(rate=0.9), store)
    wanted = SpeedRequest(path="/m", key="k", shares=(), plans=("tp 2 on a, b", "one rank on a", "pp 2 on a, b"))
    bounded = Learned(rate=1 / MAX_LEARNED, ttft=MAX_LEARNED)
    assert speed_here(wanted, store).learned == {"tp 2 on a, b": Learned(rate=0.9, ttft=1.1), "one rank on a": bounded}
    again = speed_here(replace(wanted, again=True), store)
    assert set(again.learned.values()) == {Learned()}, "it was learned beside what is measured anew"
    assert speed_here(wanted, store).learned == again.learned


def test_a_group_measured_again_is_compared_with_what_serving_costs_now(
    measured, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = CalibrationStore(tmp_path, ("this machine",))
    store.put(("serving",), ServingCost(step_s=77.0))
    used: list[ServingCost] = []
    monkeypatch.setattr(survey, "_group", lambda stages, width, serving, *_, **__: used.append(serving) or group())
    found = speed_here(SpeedRequest(path="/m", key="k", shares=(), groups=((1, 2),), again=True), store)
    assert used == [found.serving] and found.serving.step_s < 77.0


def test_a_group_is_what_its_self_test_leaves(measured, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CalibrationStore(tmp_path, ("this machine",))
    store.put(("serving",), ServingCost())
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


def test_what_asks_does_not_count_as_used_for_it_ends_before_a_start(monkeypatch: pytest.MonkeyPatch):
    free = {kind: MachineMemory(total=64 << 30, available=1 << 30, kind=kind) for kind in ("host", "metal")}
    found = {}
    for kind, memory in free.items():
        monkeypatch.setattr(survey.machine, "rank_memory", lambda memory=memory: memory)
        found[kind] = shape_here(ShapeRequest(model="demo", max_degree=1)).memory.available
    assert found["host"] > (1 << 30) + (30 << 20) and found["metal"] == 1 << 30


def test_a_measurement_that_fails_says_its_last_line(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"The measurement failed: .*nowhere"):
        speed_here(
            SpeedRequest(path=str(tmp_path / "nowhere"), key="k", shares=(ONE,)), CalibrationStore(tmp_path, ("m",))
        )


def test_versions_and_processors_tell_machines_apart():
    assert any(fact.startswith("phalanx ") for fact in machine_key())
    assert any(fact.endswith(" processors") for fact in machine_key())
