"""`--tp auto`: the words of `serve`, with the numbers that the planner recommends."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from support.planning import host, shape, timings

from phalanx.cli import auto_plan, main, up
from phalanx.cli.auto_plan import learn_from, planned_here, read_predicted, without_auto
from phalanx.cluster.deployment import Deployment
from phalanx.cluster.host_status import HostReport, HostStatus
from phalanx.cluster.hostfile_parser import Hostfile
from phalanx.cluster.planner import Planned, PlanRequest
from phalanx.cluster.plans import Plan
from phalanx.cluster.ssh import Remote
from phalanx.errors import ClusterError, ConfigError, ExitCode, MemoryShortage
from phalanx.planning.candidates import Candidate, Fit, fit_memory
from phalanx.planning.predictor import predict
from phalanx.planning.recommendation import GroupPlan
from phalanx.planning.timings import Learned
from phalanx.server.sequences.speed_meter import PredictedSpeed, SpeedMeter


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
    assert found[:2] == ["serve", "some/model"] and found[-6:-1] == ["--tp", "1", "--pp", "2", "--predicted"]
    assert "auto" not in " ".join(found)
    predicted = read_predicted(found[-1])
    assert predicted is not None and predicted.tokens_per_second == pytest.approx(100, rel=0.01)
    assert (predicted.model, predicted.plan) == ("k", "pp 2 on a, a")
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
    assert plan.serve[:-2] == ("some/model", "--port", "9", *flags) and plan.serve[-2] == "--predicted"
    assert f"plan: {best.name} ({best.flags})." in capsys.readouterr().err
    (request,) = requests
    assert request.model == "some/model" and not request.replicas and request.ranks_here == 1, (
        "`up` starts one per host"
    )
    assert request.hostfile is not None and request.hostfile.hosts[0].ips == ("10.0.0.0",)


def test_up_plans_with_the_memory_that_the_flags_leave(started, monkeypatch):
    requests = recommending(monkeypatch, Candidate(hosts=("a",)))
    words = ["--max-model-len", "4096", "--kv-cache-gb", "1.5", "--memory-guard-gb", "2"]
    assert main.main(["up", "--hosts", "a,b", "--", "demo", "--pp", "auto", *words]) == ExitCode.OK
    assert [(one.max_len, one.kv_gb, one.guard_gb) for one in requests] == [(4096, 1.5, 2.0)]


def test_up_has_no_replicas_beside_auto(started, capsys: pytest.CaptureFixture[str]):
    assert main.main(["up", "--hosts", "a,b", "--replicas", "2", "--", "demo", "--tp", "auto"]) == ExitCode.CONFIG
    assert "--replicas and --tp auto exclude each other" in capsys.readouterr().err and started == []


# `up` without a choice -------------------------------------------------------------------------------------------


class Unasked:
    """Hosts that `up` asks what runs, and what it starts on them."""

    def __init__(self) -> None:
        self.reports: dict[str, HostReport | ClusterError] = {}
        self.deployments: list[Deployment] = []


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> Unasked:
    world = Unasked()

    async def addressed(file: Hostfile, remotes: object) -> Hostfile:
        return replace(file, hosts=tuple(replace(one, ips=(f"10.0.0.{i}",)) for i, one in enumerate(file.hosts)))

    async def statuses(remotes: list[Remote]) -> dict[str, HostReport | ClusterError]:
        return {one.name: world.reports.get(one.name, HostReport(status=HostStatus(host=one.name))) for one in remotes}

    async def look_first(deployment: Deployment, console: object) -> None:
        pass

    async def bring_up(deployment: Deployment, console: object) -> None:
        world.deployments.append(deployment)

    for name, function in (("addressed", addressed), ("statuses", statuses), ("bring_up", bring_up)):
        monkeypatch.setattr(up, name, function)
    monkeypatch.setattr(up, "_look_first", look_first)
    return world


UP = ["up", "--hosts", "a,b,c"]


def test_up_without_a_choice_starts_what_is_recommended_and_says_so_first(
    unasked, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    requests = recommending(monkeypatch, Candidate(hosts=("b",)))
    assert main.main([*UP, "--", "demo", "--port", "9"]) == ExitCode.OK
    (group,) = unasked.deployments[0].groups
    assert [one.ssh for one in group.hostfile.hosts] == ["b"] and len(requests) == 1
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("plan: one rank (--tp 1). ") and "`-- MODEL --tp 3` starts all 3 hosts." in first


@pytest.mark.parametrize(
    "words",
    [
        ["--", "demo", "--tp", "3"],
        ["--", "demo", "--pp", "3"],
        ["--backend", "ring", "--", "demo"],
        ["--skip-checks", "--", "demo"],
        ["--replicas", "3", "--", "demo"],
    ],
)
def test_up_measures_nothing_where_the_user_has_chosen(unasked, monkeypatch, words, capsys):
    requests = recommending(monkeypatch, Candidate(hosts=("b",)))
    assert main.main([*UP, *words]) == ExitCode.OK, capsys.readouterr().err
    assert sum(len(group.hostfile.hosts) for group in unasked.deployments[0].groups) == 3 and requests == []


def test_one_host_needs_no_plan(unasked, monkeypatch):
    requests = recommending(monkeypatch, Candidate(hosts=("a",)))
    assert main.main(["up", "--hosts", "a", "--", "demo"]) == ExitCode.OK and requests == []


def test_up_starts_all_hosts_where_nothing_can_be_predicted_and_says_why(
    unasked, monkeypatch, capsys: pytest.CaptureFixture[str], tmp_path
):
    async def fails(request: PlanRequest) -> Planned:
        raise ClusterError("b: the measurement failed: out of luck.\nand more")

    monkeypatch.setattr(auto_plan, "make_plans", fails)
    assert main.main([*UP, "--", "demo"]) == ExitCode.OK
    all_hosts = "plan: tp 3 (--tp 3), all hosts as one group, unmeasured: "
    assert capsys.readouterr().err.startswith(f"{all_hosts}b: the measurement failed: out of luck.\n")
    unasked.reports["b"] = HostReport(status=HostStatus(host="b", role="agent"))
    assert main.main([*UP, "--", "demo"]) == ExitCode.OK
    assert f"{all_hosts}b runs a cluster already" in capsys.readouterr().err
    file = tmp_path / "rdma.json"
    rdma = [[None if i == j else "rdma_en1" for j in range(3)] for i in range(3)]
    entries = [{"ssh": name, "ips": [f"10.0.0.{i}"], "rdma": rdma[i]} for i, name in enumerate("abc")]
    file.write_text(json.dumps({"hosts": entries}))
    assert main.main(["up", str(file), "--", "demo"]) == ExitCode.OK
    assert "over RDMA is not predicted" in capsys.readouterr().err
    assert [len(one.groups[0].hostfile.hosts) for one in unasked.deployments] == [3, 3, 3]


def test_up_refuses_what_fits_in_no_way_before_anything_is_loaded(unasked, asked, capsys):
    assert main.main([*UP, "--", "large"]) == ExitCode.MEMORY
    assert "What fits: 1 more host like a (tp 2)" in " ".join(capsys.readouterr().err.split())
    assert unasked.deployments == []


# What is learned ---------------------------------------------------------------------------------------------------


def measured(predicted: PredictedSpeed | None, rate: float | None, first_s: float | None) -> SpeedMeter:
    class Known(SpeedMeter):
        tokens_per_second = rate  # type: ignore[assignment]
        ttft_seconds = first_s  # type: ignore[assignment]

    return Known(predicted)


@pytest.mark.parametrize(
    ("rate", "first_s", "learned"),
    [
        (90.0, 2.2, Learned(rate=0.9 * 0.5, ttft=1.1)),
        (90.0, None, Learned(rate=0.9 * 0.5, ttft=1.0)),
        (None, 4.0, Learned(rate=0.5, ttft=2.0)),
    ],
)
def test_a_start_teaches_the_planner_how_far_off_it_was(monkeypatch, rate, first_s, learned):
    kept: list[tuple[str, str, Learned]] = []
    monkeypatch.setattr(auto_plan, "learn", lambda *found: kept.append(found))
    predicted = PredictedSpeed(tokens_per_second=100.0, ttft_seconds=2.0, model="k", plan="tp 2", rate_factor=0.5)
    learn_from(measured(predicted, rate, first_s))
    ((model, plan, found),) = kept
    assert (model, plan) == ("k", "tp 2")
    assert (found.rate, found.ttft) == (pytest.approx(learned.rate), pytest.approx(learned.ttft))


def test_nothing_is_learned_without_prediction_or_measurement(monkeypatch):
    monkeypatch.setattr(auto_plan, "learn", lambda *_: pytest.fail("learned"))
    learn_from(measured(None, 1.0, 1.0))
    learn_from(measured(PredictedSpeed(tokens_per_second=1.0, ttft_seconds=1.0, plan="x"), None, None))


def test_what_cannot_be_kept_is_a_warning(monkeypatch, caplog: pytest.LogCaptureFixture):
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(auto_plan, "learn", full)
    learn_from(measured(PredictedSpeed(tokens_per_second=1.0, ttft_seconds=1.0, plan="x"), 1.0, 1.0))
    assert "not kept for `phalanx plan`: no space left" in caplog.text


def test_a_prediction_of_another_form_is_refused():
    with pytest.raises(ConfigError, match="--predicted: "):
        read_predicted('{"tokens_per_second": "fast"}')
    assert read_predicted("") is None


def test_help_plans_nothing(asked, capsys: pytest.CaptureFixture[str]):
    assert main.main(["serve", "--tp", "auto", "--help"]) == 0
    assert asked == [] and "phalanx plan" in capsys.readouterr().out
