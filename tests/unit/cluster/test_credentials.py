"""`phalanx credentials`: a key for each host of a cluster that units start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.supervision.host_ranks import load_cluster
from phalanx.tls.host_credentials import read_credentials

HOSTS = [{"name": name, "address": name, "ips": []} for name in "abc"]


def test_every_host_gets_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"hosts": HOSTS}))
    assert main(["credentials", str(cluster), "--directory", str(tmp_path)]) == 0
    files = [tmp_path / f"credentials-{place}.json" for place in range(3)]
    assert capsys.readouterr().out == "".join(f"{name}: {file}\n" for name, file in zip("abc", files, strict=True))
    found = [read_credentials(file) for file in files]
    assert [one.place for one in found] == [0, 1, 2] and len({one.key for one in found}) == 3
    assert len({one.certificates for one in found}) == 1
    files[0].rename(tmp_path / "credentials.json")
    known = load_cluster(cluster, 3)
    assert known is not None and known.credentials == found[0]
    assert [host.ips for host in known.config.hosts] == [("a",), ("b",), ("c",)]  # those of a ring, unless given


def test_no_file_is_written_over_or_through_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"hosts": HOSTS}))
    (tmp_path / "credentials-0.json").symlink_to(tmp_path / "elsewhere")
    assert main(["credentials", str(cluster), "--directory", str(tmp_path)]) == 64
    assert "credentials-0.json cannot be written: File exists" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("text", [None, "[]", '{"hosts": ["a"]}', '{"hosts": []}', '{"hosts":' * 50_000])
def test_a_file_without_hosts_is_named(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.json"
    if text is not None:
        cluster.write_text(text)
    assert main(["credentials", str(cluster), "--directory", str(tmp_path)]) == 64
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(f"error: {cluster} ") and "Errno" not in said and said.count(str(cluster)) == 1
