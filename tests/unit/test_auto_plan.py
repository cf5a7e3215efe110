"""`--tp auto`: the words of `serve`, with the numbers that the planner recommends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.planning import host, shape, timings

from phalanx.cli import auto_plan, main, up
from phalanx.cli.auto_plan import planned_here, without_auto
from phalanx.cluster.hostfile_parser import Hostfile
from phalanx.cluster.planner import Planned, PlanRequest
from phalanx.cluster.plans import Plan
from phalanx.errors import ConfigError, ExitCode, MemoryShortage
from phalanx.planning.candidates import Candidate, Fit, fit_memory
from phalanx.planning.predictor import predict
from phalanx.planning.recommendation import GroupPlan


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    requests: list[PlanRequest] = []

    async def make_plans(request: PlanRequest) -> Planned:
        requests.append(request)
        machine, model = host(), shape()
        fit = fit_memory(model, Candidate(stages=2, hosts=("a", "a")), {"a": machine})
        slow = fit_memory(model, Candidate(hosts=("a",)), {"a": machine})
        plans = [
            GroupPlan(fit=slow, speed=predict(model, slow, {"a": timings(layer_s=0.1)}, None)),
            GroupPlan(fit=fit, speed=predict(model, fit, {"a": timings()}, None)),
        ]
        if request.model == "large":
            plans = [GroupPlan(fit=Fit(candidate=one.candidate, problem="a lacks 3.00 GiB")) for one in plans]
        more = ["1 more host like a (tp 2)"] * (request.model == "large")
        return Planned(shape=model, hosts=[machine], plans=plans, nearest=more)

    monkeypatch.setattr(auto_plan, "make_plans", make_plans)
    return requests


def test_words_without_auto_are_left_alone(asked):
    words = ["serve", "demo", "--tp", "2", "--served-model-name", "automat"]
    assert planned_here(words) == words and asked == []
    assert without_auto(words) == (tuple(words), False)


@pytest.mark.parametrize("words", [["--tp", "auto", "--pp", "auto"], ["-tp", "auto"], ["--pp=auto"]])
def test_auto_becomes_the_recommended_shape_and_says_why(asked, capsys: pytest.CaptureFixture[str], words):
    given = ["serve", "some/model", *words, "--port", "1", "--max-model-len", "4096", "--kv-cache-gb", "1.5"]
    found = planned_here(given)
    assert found[:2] == ["serve", "some/model"] and found[-4:] == ["--tp", "1", "--pp", "2"]
    assert "auto" not in " ".join(found)
    assert asked == [PlanRequest(model="some/model", max_len=4096, kv_gb=1.5)]
    said = capsys.readouterr().err
    assert "plan: pp 2 (--pp 2)." in said and "Predicted: 10.00 ms a token, 14% more or less." in said


def test_without_a_model_the_demo_is_planned(asked):
    planned_here(["serve", "--tp", "auto"])
    assert asked[0].model == "demo"


@pytest.mark.parametrize("other", [["--pp", "2"], ["--pp-split", "3,5"]])
def test_auto_beside_a_choice_is_refused(asked, other):
    with pytest.raises(ConfigError, match=f"chooses ranks and stages together, but there is {other[0]} {other[1]}"):
        planned_here(["serve", "demo", "--tp", "auto", *other])


def test_what_does_not_fit_is_refused_before_anything_is_loaded(asked, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(MemoryShortage, match=r"one rank: a lacks 3.00 GiB\n  pp 2: a lacks"):
        planned_here(["serve", "large", "--tp", "auto"])
    assert main.main(["serve", "large", "--tp", "auto"]) == ExitCode.MEMORY
    said = " ".join(capsys.readouterr().err.split())
    assert "What fits: 1 more host like a (tp 2); a smaller or more strongly quantised model." in said


# `up` ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What `up` starts; no host is asked."""
    plans: list[Plan] = []

    async def addressed(file: Hostfile, remotes: object) -> Hostfile:
        return replace(file, hosts=tuple(replace(one, ips=(f"10.0.0.{i}",)) for i, one in enumerate(file.hosts)))

    async def start(plan: Plan, divided: object, ssl: object, **_: object) -> int:
        plans.append(plan)
        return ExitCode.OK

    monkeypatch.setattr(up, "addressed", addressed)
    monkeypatch.setattr(up, "_up", start)
    return plans


def recommending(monkeypatch: pytest.MonkeyPatch, best: Candidate) -> list[PlanRequest]:
    """Hosts of which one plan is far better than one rank on the first."""
    requests: list[PlanRequest] = []

    async def make_plans(request: PlanRequest) -> Planned:
        requests.append(request)
        machines = {name: host(name) for name in "abc"}
        plans = []
        for one, layer_s in ((Candidate(hosts=("a",)), 0.1), (best, 0.001)):
            fit = fit_memory(shape(), one, machines)
            own = dict.fromkeys("abc", timings(one.width, layer_s=layer_s))
            plans.append(GroupPlan(fit=fit, speed=predict(shape(), fit, own, None)))
        return Planned(shape=shape(), hosts=[*machines.values()], plans=plans)

    monkeypatch.setattr(auto_plan, "make_plans", make_plans)
    return requests


@pytest.mark.parametrize(
    ("best", "hosts", "flags"),
    [
        (Candidate(width=2, hosts=("a", "b")), "ab", ()),  # `up` sets --tp itself: as many as there are hosts
        (Candidate(stages=2, hosts=("a", "b")), "ab", ("--tp", "1", "--pp", "2")),
        (Candidate(stages=3, hosts=("a", "b", "c")), "abc", ("--tp", "1", "--pp", "3")),
        (Candidate(hosts=("b",)), "b", ()),
    ],
)
def test_up_starts_what_is_recommended(started, monkeypatch, capsys: pytest.CaptureFixture[str], best, hosts, flags):
    requests = recommending(monkeypatch, best)
    assert main.main(["up", "--hosts", "a,b,c", "--", "some/model", "--tp", "auto", "--port", "9"]) == ExitCode.OK
    (plan,) = started
    assert [one.ssh for one in plan.hostfile.hosts] == list(hosts)
    assert plan.serve == ("some/model", "--port", "9", *flags)
    assert f"plan: {best.name} ({best.flags})." in capsys.readouterr().err
    (request,) = requests
    assert request.model == "some/model" and not request.replicas
    assert request.hostfile is not None and request.hostfile.hosts[0].ips == ("10.0.0.0",)


def test_up_plans_with_the_memory_that_the_flags_leave(started, monkeypatch):
    requests = recommending(monkeypatch, Candidate(hosts=("a",)))
    words = ["--max-model-len", "4096", "--kv-cache-gb", "1.5", "--memory-guard-gb", "2"]
    assert main.main(["up", "--hosts", "a,b", "--", "demo", "--pp", "auto", *words]) == ExitCode.OK
    assert [(one.max_len, one.kv_gb, one.guard_gb) for one in requests] == [(4096, 1.5, 2.0)]


def test_up_has_no_replicas_beside_auto(started, capsys: pytest.CaptureFixture[str]):
    assert main.main(["up", "--hosts", "a,b", "--replicas", "2", "--", "demo", "--tp", "auto"]) == ExitCode.CONFIG
    assert "--replicas and --tp auto exclude each other" in capsys.readouterr().err and started == []


def test_help_plans_nothing(asked, capsys: pytest.CaptureFixture[str]):
    assert main.main(["serve", "--tp", "auto", "--help"]) == 0
    assert asked == [] and "phalanx plan" in capsys.readouterr().out
