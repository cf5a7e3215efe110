"""A host's part in network set-up, with stand-ins for the system's tools; and links measured over loopback (F4, F6)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from phalanx.cluster import links
from phalanx.cluster.links import (
    LinkSpeed,
    ListenRequest,
    MeasureRequest,
    ReachRequest,
    SetupRequest,
    is_there,
    listener,
    measure,
    set_up,
    undo,
)
from phalanx.cluster.network import Steps
from phalanx.errors import ClusterError, ConfigError

STEPS = Steps(
    host="a",
    commands=[["ifconfig", "en5", "inet", "10.90.0.1", "netmask", "255.255.255.252"]],
    undo=[["ifconfig", "en5", "inet", "10.90.0.1", "delete"]],
    after=[["launchctl", "bootstrap", "system", "x"]],
    undo_after=[["launchctl", "bootout", "x"]],
)
MATRIX: list[list[str | None]] = [[None, "rdma_en5"], ["rdma_en3", None]]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ifconfig` and `launchctl` that write down what they are told; `sudo` that does as it is told."""
    log = tmp_path / "calls"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ifconfig", "launchctl"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n[ "$2" != fail ]\n')
    (folder / "sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    for tool in folder.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def calls(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("root", [True, False])
def test_a_plan_is_carried_out_and_taken_back(tools, tmp_path, monkeypatch, root):
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 501)
    file = tmp_path / "daemon.plist"
    steps = Steps(**{f: getattr(STEPS, f) for f in STEPS.__struct_fields__} | {"files": {str(file): "text"}})
    done = set_up(SetupRequest(steps=steps, matrix=MATRIX), tmp_path)
    assert file.read_text() == "text"
    assert (tmp_path / ".phalanx/devices.json").read_text() == '[[null,"rdma_en5"],["rdma_en3",null]]'
    assert [line.removeprefix("sudo -n ") for line in done.ran] == calls(tools)
    assert calls(tools) == ["ifconfig en5 inet 10.90.0.1 netmask 255.255.255.252", "launchctl bootstrap system x"]
    undo(tmp_path)
    assert calls(tools)[2:] == ["launchctl bootout x", "ifconfig en5 inet 10.90.0.1 delete"]
    assert not file.exists() and not (tmp_path / ".phalanx/devices.json").exists()
    with pytest.raises(ClusterError, match="No network set-up is known here"):
        undo(tmp_path)


def test_undo_leads_back_to_the_beginning(tools, tmp_path):
    set_up(SetupRequest(steps=STEPS, matrix=MATRIX), tmp_path)
    later = Steps(host="a", commands=[], undo=[["ifconfig", "en4", "inet", "10.90.0.5", "delete"]])
    set_up(SetupRequest(steps=later, matrix=MATRIX), tmp_path)
    done = undo(tmp_path)
    assert done.ran[-2:] == ["ifconfig en4 inet 10.90.0.5 delete", "ifconfig en5 inet 10.90.0.1 delete"]


def test_a_command_that_fails_is_named(tools, tmp_path):
    steps = Steps(host="a", commands=[["ifconfig", "en5", "fail"]], undo=[])
    with pytest.raises(ClusterError, match="`ifconfig en5 fail` ended with status 1: it said nothing"):
        set_up(SetupRequest(steps=steps, matrix=[]), tmp_path)


def test_a_host_refuses_commands_that_must_never_run(tools, tmp_path):
    steps = Steps(host="a", commands=[["ifconfig", "en5", "down"]], undo=[])
    with pytest.raises(ConfigError, match="never taken down or up"):
        set_up(SetupRequest(steps=steps, matrix=[]), tmp_path)
    assert calls(tools) == []


def test_a_link_is_measured(monkeypatch):
    monkeypatch.setattr(links, "TOKEN_S", 120.0)
    monkeypatch.setattr(links, "PROBE_S", 120.0)
    listening, thread = listener(ListenRequest(address="127.0.0.1", token="ours"))
    probe = MeasureRequest(address="127.0.0.1", port=listening.port, token="ours")
    assert is_there(ReachRequest(address="127.0.0.1", port=1)).problem == 0  # refused: somebody is there
    found = measure(probe)
    thread.join(120)
    assert not thread.is_alive()
    assert 0 < found.median_us <= found.p99_us and found.gbit_per_s > 0
    with pytest.raises(ClusterError, match=r"The connection to 127\.0\.0\.1 broke"):
        measure(probe)


def measured(request: MeasureRequest) -> LinkSpeed | None:
    """None where a busy machine missed the time within which a connection must say its token."""
    try:
        return measure(request)
    except ClusterError:
        return None


def test_a_stranger_takes_no_measurement_and_the_port_is_on_one_address(monkeypatch):
    monkeypatch.setattr(links, "TOKEN_S", 0.2)
    monkeypatch.setattr(links, "PROBE_S", 120.0)
    listening, thread = listener(ListenRequest(address="127.0.0.1", token="ours"))
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", listening.port), timeout=60):
        pass
    with socket.create_connection(("127.0.0.1", listening.port)):  # a silent one
        wrong = MeasureRequest(address="127.0.0.1", port=listening.port, token="else")
        with pytest.raises(ClusterError, match="broke"):
            measure(wrong)
        ours = MeasureRequest(address="127.0.0.1", port=listening.port, token="ours")
        while (found := measured(ours)) is None:
            assert thread.is_alive()
        assert found.gbit_per_s > 0
    thread.join(120)
    assert not thread.is_alive()


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(ClusterError, match=r"192\.0\.2\.77 is not an address of this host"):
        listener(ListenRequest(address="192.0.2.77", token="ours"))
