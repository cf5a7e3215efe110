"""The rig for the tests here: one for all of them, brought back to a clean state before each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rig as rigs
from clusters import SharedCluster

VARIABLES = {
    "PYTHONPATH": f"{rigs.HOME / 'lib'}:{rigs.CHECKOUT / 'src'}",  # ~/lib: where tests put what a host's software says
    "PATH": f"{Path(sys.executable).parent}:{rigs.SYSTEM_PATH}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "COLUMNS": "300",  # one row of a table is one line
}


def needs_the_rig() -> None:
    """Skip a test where the rig cannot be built. In CI and with RIG=1 that is a failure; with RIG=0 it never is."""
    if problem := rigs.why_not():
        if os.environ.get("RIG", "1" if os.environ.get("CI") else "0") == "1":
            pytest.fail(f"the rig must run here, but it {problem}")
        pytest.skip(f"the rig {problem}")


@pytest.fixture(scope="session")
def whole_rig() -> Iterator[rigs.Rig]:
    """desk, a, b, c, d."""
    needs_the_rig()
    with rigs.rig(["desk", "a", "b", "c", "d"], VARIABLES) as made:
        yield made


@pytest.fixture(scope="module")
def bare_rig() -> Iterator[rigs.Rig]:
    """The same, but phalanx is at the desk alone; the others have Python."""
    needs_the_rig()
    python = {"PATH": f"{Path(sys.base_prefix) / 'bin'}:{rigs.SYSTEM_PATH}"}
    with rigs.rig(["desk", "a", "b", "c", "d"], VARIABLES, dict.fromkeys("abcd", python)) as made:
        clean(made)
        yield made


@pytest.fixture(scope="session")
def shared_cluster(whole_rig: rigs.Rig) -> Iterator[SharedCluster]:
    shared = SharedCluster(whole_rig)
    yield shared
    shared.end()


@pytest.fixture
def hosts(whole_rig: rigs.Rig, shared_cluster: SharedCluster) -> Iterator[rigs.Rig]:
    """The rig, with nothing of phalanx running or left on any host, and a hostfile for n hosts at the desk."""
    shared_cluster.end()
    clean(whole_rig)
    yield whole_rig
    clean(whole_rig)


@pytest.fixture
def serving(whole_rig: rigs.Rig, shared_cluster: SharedCluster) -> Iterator[SharedCluster]:
    """A cluster that serves, and does so again after the test, for tests that do not end it. Put them beside each
    other: one that takes `hosts` ends it."""
    if not shared_cluster.url:
        clean(whole_rig)
        shared_cluster.start()
    yield shared_cluster
    if shared_cluster.url and not shared_cluster.ready:  # the test has failed
        shared_cluster.url = ""
        clean(whole_rig)


def clean(rig: rigs.Rig) -> None:
    """Whatever a test left behind."""
    for host in rig.hosts.values():
        host.mend()
        if host.processes("phalanx"):
            host.reboot()
        host.forget()
    for count in (1, 2, 3, 4):
        names = ["a", "b", "c", "d"][:count]
        (rig["desk"].home / f"{count}.json").write_text(
            json.dumps([{"ssh": name, "ips": [rig[name].address]} for name in names])
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.full)
