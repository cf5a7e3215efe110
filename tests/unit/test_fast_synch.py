"""`MLX_METAL_FAST_SYNCH` over JACCL: measured both ways, with one sentence on what to write into the hostfile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cli import selftest
from phalanx.config import ClusterConfig, EngineConfig, HostConfig
from phalanx.supervision.fast_synch import FastSynch, advise, is_on, with_value
from phalanx.supervision.host_ranks import KnownCluster
from phalanx.tls.certificates import make_credentials
from phalanx.types import EngineStats, ModelInfo, RankStats, SelfTest

WRITE, LEAVE = 'write "envs": ["MLX_METAL_FAST_SYNCH=1"]', "leave MLX_METAL_FAST_SYNCH out"


@pytest.mark.parametrize(
    ("off_ms", "on_ms", "problem", "says"),
    [
        (10.0, 2.0, "", [WRITE, "2.00 ms with it and 10.00 ms without"]),
        (1.2, 1.0, "", [WRITE, "Take it out again if steps time out"]),
        (1.1, 1.0, "", [LEAVE, "not worth the risk"]),
        (1.0, 5.0, "", [LEAVE]),
        (1.0, None, "rank 1 is stuck.", [LEAVE, "with it the self-test failed (rank 1 is stuck)."]),
        (None, 1.0, "rank 1 is gone", [WRITE, "without it the self-test failed (rank 1 is gone)."]),
    ],
)
def test_the_advice(off_ms, on_ms, problem, says):
    said = advise(FastSynch(off_ms=off_ms, on_ms=on_ms, problem=problem))
    assert all(part in said for part in says), said


@pytest.mark.parametrize(
    ("envs", "on"),
    [
        ((), False),
        (("A=1",), False),
        (("MLX_METAL_FAST_SYNCH=1",), True),
        (("MLX_METAL_FAST_SYNCH=0",), False),
        (("MLX_METAL_FAST_SYNCH=1", "A=1", "MLX_METAL_FAST_SYNCH=0"), False),
    ],
)
def test_entries_are_switched_and_others_kept(envs, on):
    assert is_on(envs) is on
    for value in (True, False):
        changed = with_value(envs, value)
        assert is_on(changed) is value
        assert ("A=1" in changed) == ("A=1" in envs)


class Engine:
    """A group of Macs: its step takes as long as the variable says, or it fails."""

    backend = "jaccl"
    steps_ms: dict[bool, float | None] = {}
    started: list[tuple[str, ...]] = []

    def __init__(self, config: EngineConfig, *, cluster: KnownCluster) -> None:
        self.envs = cluster.config.envs
        self.state = SimpleNamespace(phase="starting", reason="", exit_code=None, progress=None)

    def subscribe(self, verdict: selftest.Verdict) -> None:
        self.verdict = verdict

    async def start(self) -> None:
        Engine.started.append(self.envs)
        step_ms = Engine.steps_ms[is_on(self.envs)]
        if step_ms is None:
            self.verdict.on_down("rank 1 is stuck", False)
            return
        test = SelfTest(total=3, expected=3, step_ms=step_ms)
        self.verdict.on_ready(
            ModelInfo(
                model_type="llama", max_model_len=1, vocab_size=1, dtype="float16", quantization="",
                supports_rollback=True,
                caches="", weights_bytes=1, kv_bytes_per_token=1, kv_budget_bytes=1, prefix_budget_bytes=1, load_s=1,
                ranks=2, backend=Engine.backend, self_test=test,
            )
        )  # fmt: skip

    async def ping(self) -> EngineStats:
        return EngineStats(ranks=[RankStats(rank=0, host="a", pid=1)])

    async def close(self) -> None:
        pass


@pytest.fixture
def tested(monkeypatch, capsys):
    """Runs `phalanx selftest --json` on the stand-in; gives its exit code and what it printed."""

    class View:
        def __init__(self, engine: Engine) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(selftest, "EngineProcess", Engine)
    monkeypatch.setattr(selftest, "LoadingView", View)
    monkeypatch.setattr(Engine, "started", [])
    credentials, _ = make_credentials(["a", "b"])

    def run(*envs: str) -> tuple[int, dict]:
        hosts = (HostConfig(name="a", address="a"), HostConfig(name="b", address="b"))
        cluster = KnownCluster(ClusterConfig(hosts=hosts, envs=envs), Path("c.json"), credentials, Path("d.json"))
        config = EngineConfig(model="demo", tensor_parallel_size=2)
        code = asyncio.run(selftest.run(config, True, cluster))
        return code, json.loads(capsys.readouterr().out or "{}")

    return run


@pytest.mark.parametrize("envs", [(), ("MLX_METAL_FAST_SYNCH=1",)])
def test_both_ways_are_measured(tested, monkeypatch, envs):
    monkeypatch.setattr(Engine, "steps_ms", {False: 9.0, True: 3.0})
    code, printed = tested(*envs)
    assert code == 0 and [is_on(one) for one in Engine.started] == [is_on(envs), not is_on(envs)]
    assert "3.00 ms with it and 9.00 ms without" in printed["fast_synch"]
    assert printed["info"]["self_test"]["step_ms"] == (3.0 if envs else 9.0)


def test_the_other_way_may_fail(tested, monkeypatch):
    monkeypatch.setattr(Engine, "steps_ms", {False: 9.0, True: None})
    code, printed = tested()
    assert code == 0 and LEAVE in printed["fast_synch"] and "rank 1 is stuck" in printed["fast_synch"]


def test_a_group_that_fails_as_it_is_set_up_has_failed(tested, monkeypatch):
    monkeypatch.setattr(Engine, "steps_ms", {False: None, True: 3.0})
    code, printed = tested()
    assert code == 1 and printed == {} and len(Engine.started) == 1


def test_other_backends_are_tested_once(tested, monkeypatch):
    monkeypatch.setattr(Engine, "steps_ms", {False: 9.0})
    monkeypatch.setattr(Engine, "backend", "ring")
    code, printed = tested()
    assert code == 0 and "fast_synch" not in printed and len(Engine.started) == 1
