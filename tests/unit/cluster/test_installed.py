"""What `phalanx doctor` says about a host's installed packages, on hosts made of stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster import checks
from phalanx.cluster.check_results import CheckResult, ExamineRequest, HostFacts
from phalanx.cluster.supervisor import RunDirectory
from phalanx.config import HostConfig


def results(monkeypatch: pytest.MonkeyPatch, folder: Path, *packages: str) -> list[CheckResult]:
    monkeypatch.setattr(checks, "_version", lambda package: "1" if package in packages else "")
    versions = {package: "1" if package in packages else "" for package in ("mlx", "mlx-lm")}
    facts = HostFacts(host="a", system="Linux", clock=0.0, versions=versions)
    wanted = ExamineRequest(host=HostConfig(name="a", address="a"), rank=0)
    return list(checks.engine(wanted, facts, RunDirectory(folder)))


def test_one_backend_is_right(monkeypatch, tmp_path):
    assert [one.level for one in results(monkeypatch, tmp_path, "mlx", "mlx-lm", "mlx-cuda-13")] == ["ok"]


def test_two_backends_lie_over_each_other(monkeypatch, tmp_path):
    found = results(monkeypatch, tmp_path, "mlx", "mlx-lm", "mlx-cuda-12", "mlx-cpu")[-1]
    assert (found.level, found.seen) == ("bad", "mlx-cuda-12 and mlx-cpu")
    assert "pip uninstall mlx mlx-cuda-12 mlx-cpu" in found.remedy


def test_no_backend_may_be_one_that_was_built(monkeypatch, tmp_path):
    found = results(monkeypatch, tmp_path, "mlx", "mlx-lm")[-1]
    assert found.level == "warning" and found.seen.startswith("none of mlx-metal")


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("dmeo", "Did you mean `demo`? Run `phalanx model push dmeo`."),
        ("/m/x", "Run `phalanx model push /m/x`."),
    ],
)
def test_a_misspelt_model_is_not_only_to_be_pushed(model, remedy, tmp_path):
    facts = HostFacts(host="a", system="Linux", clock=0.0, versions={}, model=None)
    wanted = ExamineRequest(host=HostConfig(name="a", address="a"), rank=0, model=model)
    (found,) = checks.model(wanted, facts, RunDirectory(tmp_path))
    assert (found.level, found.remedy) == ("bad", remedy)
